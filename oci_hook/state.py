"""The runtime's side: the OCI state on stdin and the bundle's config.json.

Both come from outside: sizes are bounded, types are checked, and what the hook has no use for is
ignored.
"""

from __future__ import annotations

import os
import stat

from oci_hook.entry import CONFIG_LIMIT, PREFIX, STATE_LIMIT, read_bounded
from oci_hook.errors import AnnotationError, BundleError, HookError, StateError, show
from oci_hook.notation import load_json

TYPE_CHECKING = False  # typing itself takes 3 ms
if TYPE_CHECKING:
    from typing import Any

ID_LIMIT = 1024
PID_LIMIT = 1 << 22  # PID_MAX_LIMIT


class State:
    """What the runtime said.  A plain class: NamedTuple would cost every container 3 ms."""

    __slots__ = ("annotations", "bundle", "id", "pid")

    def __init__(self, *, ident: str, pid: int, bundle: str, annotations: dict[str, str]) -> None:
        self.id = ident
        self.pid = pid
        self.bundle = bundle
        self.annotations = annotations


class Bundle:
    """What config.json says that the hook needs."""

    __slots__ = ("annotations", "document", "identity", "root")

    def __init__(
        self,
        *,
        root: str,
        annotations: dict[str, str],
        identity: dict[str, str],
        document: dict[str, Any],
    ) -> None:
        self.root = root
        self.annotations = annotations
        self.identity = identity
        self.document = document


# Who the container belongs to, as the node's components wrote it: containerd, CRI-O.
IDENTITY = {
    "io.kubernetes.cri.sandbox-namespace": "namespace",
    "io.kubernetes.cri.sandbox-name": "pod",
    "io.kubernetes.cri.sandbox-uid": "pod_uid",
    "io.kubernetes.cri.container-name": "container",
    "io.kubernetes.cri-o.Namespace": "namespace",
    "io.kubernetes.pod.namespace": "namespace",
    "io.kubernetes.pod.name": "pod",
    "io.kubernetes.pod.uid": "pod_uid",
    "io.kubernetes.container.name": "container",
    "nerdctl/name": "name",
    "nerdctl/namespace": "namespace",
}


# What containerd and CRI-O say of each container: `sandbox` of the one that keeps a pod's
# namespaces and runs nothing of the user's.  It has the pod's annotations, too.
KINDS = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")


def is_sandbox(annotations: dict[str, str]) -> bool:
    """Tell whether a container says that it is a pod's sandbox, which is left alone.

    Each engine writes its own word over a user's, but not the other engine's: they have to agree.
    Docker and Podman write none, so there it is the user's word: nobody who has a GPU is believed.
    """
    said = [annotations[name] for name in KINDS if name in annotations]
    return bool(said) and all(kind == "sandbox" for kind in said)


def _unique(pairs: list[tuple[str, object]], twice: list[str]) -> dict[str, object]:
    """Build an object; refuse an annotation given twice: readers differ in which one wins.

    Other names that are given twice are added to `twice`.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen and key.startswith(PREFIX):
                raise AnnotationError(
                    f"annotation {show(key)} is given twice", hint="give each annotation once"
                )
            if key in seen:
                twice.append(key)
            seen.add(key)
    return result


def is_text(value: object) -> bool:
    """Tell whether a value can be a name to the kernel: half a surrogate pair, or NUL, cannot."""
    if type(value) is not str or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_object(
    data: bytes, error: type[HookError], what: str, hint: str, twice: list[str]
) -> dict[str, object]:
    try:
        document = load_json(data, lambda pairs: _unique(pairs, twice))
    except (ValueError, RecursionError) as e:
        raise error(f"{what} is not JSON ({show(e)})", hint=hint) from e
    if type(document) is not dict:
        raise error(f"{what} is {type(document).__name__}, not an object", hint=hint)
    return document


def _annotations(document: dict[str, object], error: type[HookError], what: str) -> dict[str, str]:
    value = document.get("annotations")
    if value is None:
        return {}
    if type(value) is not dict:
        raise error(
            f"annotations in {what} are {type(value).__name__}, not an object",
            hint="annotations map names to strings",
        )
    for name, text in value.items():
        if type(text) is not str and name.startswith(PREFIX):
            raise AnnotationError(
                f"annotation {show(name)} in {what} is {type(text).__name__}, not a string",
                hint="quote the value",
            )
    return {name: text for name, text in value.items() if type(text) is str}


def parse_state(data: bytes | None, *, needs_pid: bool = True) -> State:
    """Check what the runtime wrote to stdin."""
    hint = "run the hook from an OCI runtime, as createRuntime or prestart"
    if data is None:
        raise StateError(f"the OCI state on stdin is larger than {STATE_LIMIT} bytes", hint=hint)
    document = _parse_object(data, StateError, "the OCI state on stdin", hint, [])
    ident, pid, bundle = document.get("id"), document.get("pid"), document.get("bundle")
    if type(ident) is not str or not is_text(ident) or not 0 < len(ident) <= ID_LIMIT:
        raise StateError(
            f"id in the OCI state is {show(ident)}, not a string of 1 to {ID_LIMIT} characters",
            hint=hint,
        )
    if needs_pid:
        if type(pid) is not int or not 0 < pid <= PID_LIMIT:
            raise StateError(
                f"pid in the OCI state is {show(pid)}, not a process of this host",
                hint="register the hook as createRuntime or prestart, which run on the host's side",
            )
        if type(bundle) is not str or not bundle.startswith("/") or not is_text(bundle):
            raise StateError(
                f"bundle in the OCI state is {show(bundle)}, not an absolute path", hint=hint
            )
    return State(
        ident=ident,
        pid=pid if type(pid) is int else 0,
        bundle=bundle if type(bundle) is str else "",
        annotations=_annotations(document, StateError, "the OCI state"),
    )


def read_config(
    bundle: str, hint: str = "the runtime that started the hook keeps config.json in the bundle"
) -> bytes:
    """Read config.json, all of it; BundleError with `hint` when it is not there to be read."""
    return read_file(f"{bundle}/config.json", hint)


def read_file(path: str, hint: str) -> bytes:
    """Read a file of the runtime's or engine's, all of it; BundleError with `hint` otherwise."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BundleError(f"{show(path)} is not a regular file", hint=hint)
            data = read_bounded(fd, CONFIG_LIMIT)
        finally:
            os.close(fd)
    except OSError as e:
        raise BundleError(f"{show(path)}: {e.strerror}", hint=hint) from e
    if data is None:
        raise BundleError(
            f"{show(path)} is larger than {CONFIG_LIMIT} bytes", hint="make it smaller"
        )
    return data


def parse_config(data: bytes, bundle: str) -> Bundle:
    """Check config.json; `root` is absolute afterwards and is not the host's own."""
    path = f"{show(bundle)}/config.json"
    document, annotations, identity = parse_document(data, path)
    root = find_root(document, bundle, path)
    return Bundle(root=root, annotations=annotations, identity=identity, document=document)


def find_root(document: dict[str, Any], bundle: str, name: str) -> str:
    """Give the absolute path of the container's root; `name` is config.json's, for the reader."""
    section = document.get("root")
    root = section.get("path") if type(section) is dict else None
    hint = "root.path names the container's root file system, below the bundle or absolute"
    if type(root) is not str or not root or not is_text(root):
        raise BundleError(f"root.path in {name} is {show(root)}", hint=hint)
    parts = [part for part in root.split("/") if part not in ("", ".")]
    if ".." in parts[parts.count("..") :]:
        # runc goes by the text, crun and the kernel by the links.
        raise BundleError(f"root.path in {name} is {show(root)}, '..' behind a name", hint=hint)
    root = os.path.normpath(os.path.join(os.path.realpath(bundle) if bundle else "", root))
    if not root.startswith("/"):
        raise BundleError(f"root.path in {name} is {show(root)}, not absolute", hint=hint)
    if root.strip("/") == "":
        raise BundleError(f"root.path in {name} is the host's own root", hint=hint)
    return root


def parse_document(data: bytes, name: str) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Give config.json, its annotations, and whose container it is; `name` is for the reader."""
    twice: list[str] = []
    document = _parse_object(
        data, BundleError, name, "the runtime has to write a valid config.json", twice
    )
    annotations = _annotations(document, BundleError, name)
    asks = b'"--governed"' in data or b'"--claim' in data
    asks = asks or any(known.startswith(PREFIX) for known in annotations)
    if twice and asks:
        # crun takes the first of them, runc and we the last.
        raise BundleError(
            f"{show(twice[0])} is given twice in {name}",
            hint="whatever wrote config.json has to write each name once",
        )
    return document, annotations, _identity(annotations, asks=asks)


def _identity(annotations: dict[str, str], *, asks: bool) -> dict[str, str]:
    """Give whose container it is.

    Each engine writes its own words over a user's, but not the other engine's, and CRI-O passes
    all of a pod's annotations on. So words that disagree are a user's: a container that asks for a
    GPU with them is refused, as it would be booked for another tenant.
    """
    identity: dict[str, str] = {}
    origins: dict[str, str] = {}
    for annotation, field in IDENTITY.items():
        value = annotations.get(annotation, "")
        if not value or len(value) > ID_LIMIT or not is_text(value):
            continue
        first = origins.setdefault(field, annotation)
        if identity.setdefault(field, value) != value and asks:
            raise AnnotationError(
                f"annotation {show(first)} is {show(identity[field])}, and {show(annotation)} is"
                f" {show(value)}",
                hint="whose container it is has one answer: take the annotation out that the engine"
                " does not write",
            )
    return identity


def our_annotations(state: State, bundle: Bundle, *, governed: bool = False) -> dict[str, str]:
    """Give the annotations below our prefix: config.json's, which the state may repeat.

    A sandbox has none that count; no sandbox has a GPU, or is `governed`. containerd and CRI-O give
    it no right to devices, that of a privileged pod neither.
    """
    if is_sandbox(bundle.annotations) and not governed:
        from oci_hook.edits import gives_gpu

        if not gives_gpu(bundle.document):
            return {}
    ours = {n: v for n, v in bundle.annotations.items() if n.startswith(PREFIX)}
    for name, value in state.annotations.items():
        if name.startswith(PREFIX) and ours.setdefault(name, value) != value:
            raise AnnotationError(
                f"annotation {show(name)} is {show(ours[name])} in config.json and"
                f" {show(value)} in the OCI state",
                hint="whatever edits one of them has to edit both",
            )
    return ours
