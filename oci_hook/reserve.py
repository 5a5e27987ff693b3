"""Reserves a GPU for a container that is about to be created, and edits its config.json.

The governor chooses the GPU and reserves it for a limited time; the hook redeems the reservation.
"""

from __future__ import annotations

import os

from oci_hook.claims import find_claims
from oci_hook.client import PATIENCE, Client, require_reachable
from oci_hook.edits import (
    HookEntry,
    edit,
    gives_gpu,
    governed_by,
    gpu_nodes,
    host_nodes,
    refuse_foreign,
    require_no_gpu,
    take_reservation,
)
from oci_hook.errors import AnnotationError, HookError, NoMirrorError, UnservedImageError, show
from oci_hook.light_json import dump_json
from oci_hook.log import RunEvent
from oci_hook.quick import PREFIX
from oci_hook.request import Request, check_request, parse_annotations
from oci_hook.state import find_root, is_sandbox, parse_document

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from typing import Any, NamedTuple
else:
    from oci_hook.light_typing import NamedTuple

VARIABLES = {
    "TIDEGATE_MEMORY": "memory",
    "TIDEGATE_COMPUTE": "compute",
    "TIDEGATE_COMPUTE_LIMIT": "compute-limit",
    "TIDEGATE_COUNT": "count",
    "TIDEGATE_DEVICES": "devices",
    "TIDEGATE_STRATEGY": "strategy",
    "TIDEGATE_CLASS": "class",
    "TIDEGATE_PARKING": "parking",
    "TIDEGATE_CAPABILITIES": "capabilities",
    "TIDEGATE_DRIVER": "driver",
}


class Settings(NamedTuple):
    """Paths and settings of this node."""

    entry: HookEntry
    runtime_dir: str = "/run/tidegate"
    dev_dir: str = "/dev"
    driver_dir: str = "/var/lib/tidegate/driver"
    module_version: str = "/proc/driver/nvidia/version"
    environment: bool = False  # whether TIDEGATE_* variables stand in for missing annotations
    timeout: float = 10.0


def from_environment(document: dict[str, Any]) -> dict[str, str]:
    """Return the requests in the container's environment, as annotations.

    These variables may come from the image, and not only from the command that starts the
    container. They are therefore a last resort for engines without annotations, and count only if
    the node's settings allow it.
    """
    process = document.get("process")
    variables = process.get("env") if type(process) is dict else None
    asked = {}
    for variable in variables if type(variables) is list else ():
        name, _, value = str(variable).partition("=")
        if name in VARIABLES:
            asked[PREFIX + VARIABLES[name]] = value
    return asked


def name_variables(error: AnnotationError, asked: dict[str, str]) -> AnnotationError:
    """Return an error about annotations in terms of the variables from which they were taken."""
    message = error.message
    for variable, name in sorted(VARIABLES.items(), key=lambda pair: -len(pair[1])):
        if PREFIX + name in asked:
            message = message.replace(f"annotation {PREFIX}{name}", f"variable {variable}")
            message = message.replace(PREFIX + name, variable)
    return AnnotationError(message, hint=error.hint)


def find_unserved(request: Request, root: str, settings: Settings) -> HookError | None:
    """Return the hook's error if this node's driver cannot serve the image; None if it can.

    Raise the errors that make the hook refuse every container.
    """
    from oci_hook.apply import explain
    from oci_hook.image import inspect_image, open_root
    from oci_hook.manifest import check_fresh, choose_share, module_version, read_manifest

    opened: list[int] = []
    try:
        manifest = read_manifest(settings.driver_dir)
        opened.append(manifest.hold)
        check_fresh(manifest, module_version(settings.module_version))
        share = choose_share(manifest, request.capabilities)
        opened.append(open_root(root))
        opened.append(os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        _, rootfd, procfd = opened
        inspect_image(rootfd, procfd, manifest.machine, compat32=share.compat32 != "no")
    except (NoMirrorError, UnservedImageError) as e:
        return e
    except OSError as e:
        raise explain(e, f"examine {show(root)}") from e
    finally:
        for fd in opened:
            os.close(fd)
    return None


def edit_config(
    data: bytes, bundle: str, name: str, settings: Settings, event: RunEvent
) -> tuple[str, bytes | None]:
    """Return the outcome, and the edited config.json; None if it stays unchanged.

    `bundle` is the base of a relative root.path; `name` is for messages. Raise HookError if the
    container cannot start; if a reservation has already been made, it expires on its own.
    """
    document, annotations, identity = parse_document(data, show(name))
    if find_claims(document, settings.entry.path):
        return "no-request", None  # a claim's GPUs are allocated, and CDI has edited the file
    exact = governed_by(document, settings.entry.path)
    if is_sandbox(annotations) and not exact and not gives_gpu(document):
        return "no-request", None
    ours = {k: v for k, v in annotations.items() if k.startswith(PREFIX)}
    replaces = take_reservation(ours)
    asked = from_environment(document) if settings.environment else {}
    asked = {k: v for k, v in asked.items() if k not in ours}
    ours = asked | ours
    if not ours:
        return "no-request", None
    refuse_foreign(document, show(name))
    try:
        request = parse_annotations(ours)
        check_request(request, ours)
    except AnnotationError as e:
        raise name_variables(e, asked) from e
    require_reachable(settings.runtime_dir)
    if request.optional:
        # Checked before device nodes are added: they would stay even in an ungoverned container.
        why = find_unserved(request, find_root(document, bundle, show(name)), settings)
        if why is not None:
            require_no_gpu(document, why)
            event.fields |= {"code": why.code, "message": why.message}
            return "without-gpu", None
    client = Client(settings.runtime_dir, settings.timeout, PATIENCE)
    try:
        answer = client.reserve(
            ours,
            identity,
            replaces=replaces,
            # Nodes from an earlier reservation were the governor's choice, and may change.
            nodes=() if replaces else gpu_nodes(document),
            exact=exact,
        )
    finally:
        client.close()
    nodes = host_nodes(settings.dev_dir, answer.minors)
    edit(
        document,
        annotations=ours,
        reservation=answer.reservation,
        nodes=nodes,
        entry=settings.entry,
    )
    return "edited", dump_json(document).encode()
