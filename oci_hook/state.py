"""Reads the runtime's input: the OCI state on stdin and the bundle's config.json.

Neither is trusted: sizes are bounded, types are checked, and members that the hook does not need
are ignored.
"""

from __future__ import annotations

import os
import stat

from oci_hook.errors import AnnotationError, BundleError, HookError, OciStateError, show
from oci_hook.light_json import load_json
from oci_hook.quick import CONFIG_LIMIT, PREFIX, STATE_LIMIT, read_bounded

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from typing import Any

ID_LIMIT = 1024
PID_LIMIT = 1 << 22  # PID_MAX_LIMIT


class OciState:
    """The OCI state, as a plain class: NamedTuple would cost every container 3 ms."""

    __slots__ = ("annotations", "bundle", "id", "pid")

    def __init__(self, *, ident: str, pid: int, bundle: str, annotations: dict[str, str]) -> None:
        self.id = ident
        self.pid = pid
        self.bundle = bundle
        self.annotations = annotations


class Bundle:
    """The parts of config.json that the hook needs."""

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


# Annotations that engines write, and the field of the container's identity that each contains.
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


# Annotations in which containerd and CRI-O give the container's type. A `sandbox` is the container
# that keeps a pod's namespaces and runs none of the user's programs; it has the pod's annotations,
# too.
KINDS = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")


def is_sandbox(annotations: dict[str, str]) -> bool:
    """Return whether the annotations declare a pod's sandbox, which the hook leaves alone.

    Each engine overwrites a user's value for its own annotation, but not for the other's, so
    both have to agree. Docker and Podman write neither: there the value comes from the user, so
    callers ignore it for a container that has a GPU.
    """
    kinds = [annotations[name] for name in KINDS if name in annotations]
    return bool(kinds) and all(kind == "sandbox" for kind in kinds)


def _unique(pairs: list[tuple[str, object]], twice: list[str]) -> dict[str, object]:
    """Build an object; refuse a duplicate annotation, because parsers differ in which one wins.

    Other duplicate names are added to `twice`.
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
    """Return whether a value can be a name for the kernel: no NUL, no lone surrogate."""
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


def parse_state(data: bytes | None, *, needs_pid: bool = True) -> OciState:
    """Parse and check the OCI state that the runtime wrote to stdin."""
    hint = "run the hook from an OCI runtime, as createRuntime or prestart"
    if data is None:
        raise OciStateError(f"the OCI state on stdin is larger than {STATE_LIMIT} bytes", hint=hint)
    document = _parse_object(data, OciStateError, "the OCI state on stdin", hint, [])
    ident, pid, bundle = document.get("id"), document.get("pid"), document.get("bundle")
    if type(ident) is not str or not is_text(ident) or not 0 < len(ident) <= ID_LIMIT:
        raise OciStateError(
            f"id in the OCI state is {show(ident)}, not a string of 1 to {ID_LIMIT} characters",
            hint=hint,
        )
    if needs_pid:
        if type(pid) is not int or not 0 < pid <= PID_LIMIT:
            raise OciStateError(
                f"pid in the OCI state is {show(pid)}, not a process on this host",
                hint="register the hook as createRuntime or prestart, which run on the host's side",
            )
        if type(bundle) is not str or not bundle.startswith("/") or not is_text(bundle):
            raise OciStateError(
                f"bundle in the OCI state is {show(bundle)}, not an absolute path", hint=hint
            )
    return OciState(
        ident=ident,
        pid=pid if type(pid) is int else 0,
        bundle=bundle if type(bundle) is str else "",
        annotations=_annotations(document, OciStateError, "the OCI state"),
    )


def read_config(
    bundle: str, hint: str = "the runtime that started the hook keeps config.json in the bundle"
) -> bytes:
    """Return the content of config.json. Raise BundleError with `hint` if it cannot be read."""
    return read_file(f"{bundle}/config.json", hint)


def read_file(path: str, hint: str) -> bytes:
    """Return the content of an engine's file. Raise BundleError if it cannot be read."""
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
    """Parse and check config.json; the result's `root` is absolute and not the host's own."""
    path = f"{show(bundle)}/config.json"
    document, annotations, identity = parse_document(data, path)
    root = find_root(document, bundle, path)
    return Bundle(root=root, annotations=annotations, identity=identity, document=document)


def find_root(document: dict[str, Any], bundle: str, name: str) -> str:
    """Return the absolute path of the container's root; `name` names config.json in messages."""
    section = document.get("root")
    root = section.get("path") if type(section) is dict else None
    hint = "root.path names the container's root file system, below the bundle or absolute"
    if type(root) is not str or not root or not is_text(root):
        raise BundleError(f"root.path in {name} is {show(root)}", hint=hint)
    parts = [part for part in root.split("/") if part not in ("", ".")]
    if ".." in parts[parts.count("..") :]:
        # runc resolves it as text; crun and the kernel follow links.
        raise BundleError(f"root.path in {name} is {show(root)}, with '..' after a name", hint=hint)
    root = os.path.normpath(os.path.join(os.path.realpath(bundle) if bundle else "", root))
    if not root.startswith("/"):
        raise BundleError(f"root.path in {name} is {show(root)}, not absolute", hint=hint)
    if root.strip("/") == "":
        raise BundleError(f"root.path in {name} is the host's own root", hint=hint)
    return root


def parse_document(data: bytes, name: str) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Return config.json, its annotations and the container's identity; `name` is for messages."""
    twice: list[str] = []
    document = _parse_object(
        data, BundleError, name, "the runtime has to write a valid config.json", twice
    )
    annotations = _annotations(document, BundleError, name)
    asks = b'"--governed"' in data or b'"--claim' in data
    asks = asks or any(known.startswith(PREFIX) for known in annotations)
    if twice and asks:
        # crun uses the first of the two; runc and the hook use the last.
        raise BundleError(
            f"{show(twice[0])} is given twice in {name}",
            hint="the program that wrote config.json has to write each name once",
        )
    return document, annotations, _identity(annotations, asks=asks)


def _identity(annotations: dict[str, str], *, asks: bool) -> dict[str, str]:
    """Return the identity of the pod to which the container belongs.

    Each engine overwrites a user's values for its own annotations, but not for the other engine's,
    and CRI-O passes on all annotations of a pod. So values that disagree come from a user. A
    container that has such values and asks for a GPU is refused, because its use would be charged
    to another tenant.
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
                hint="a container belongs to one pod: remove the annotation that the engine does"
                " not write",
            )
    return identity


def our_annotations(state: OciState, bundle: Bundle, *, governed: bool = False) -> dict[str, str]:
    """Return the annotations with the prefix in config.json and the state; both have to agree.

    A sandbox's annotations do not count. A container that has a GPU or is `governed` is not a
    sandbox: containerd and CRI-O give a sandbox no access to devices, even in a privileged pod.
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
                hint="the program that edits one of them has to edit both",
            )
    return ours
