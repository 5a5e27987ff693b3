"""Edits a config.json for a container that asks for a share of a GPU.

The governor says which GPU it will be and keeps it for a while; the hook confirms.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from oci_hook.client import Client
from oci_hook.edits import (
    RESERVATION,
    Entry,
    edit,
    foreign_driver,
    governed_by,
    gpu_nodes,
    host_nodes,
)
from oci_hook.errors import BundleError, show
from oci_hook.request import check_request, parse_annotations
from oci_hook.state import PREFIX, is_sandbox, parse_document

VARIABLES = {
    "TIDEGATE_MEMORY": "memory",
    "TIDEGATE_COMPUTE": "compute",
    "TIDEGATE_COMPUTE_LIMIT": "compute-limit",
    "TIDEGATE_COUNT": "count",
    "TIDEGATE_DEVICES": "devices",
    "TIDEGATE_STRATEGY": "strategy",
    "TIDEGATE_CAPABILITIES": "capabilities",
    "TIDEGATE_DRIVER": "driver",
}


class Settings(NamedTuple):
    """Where things are on this node."""

    entry: Entry
    runtime_dir: str = "/run/tidegate"
    dev_dir: str = "/dev"
    environment: bool = False  # variables of the container count where an annotation is missing
    timeout: float = 10.0


def from_environment(document: dict[str, Any]) -> dict[str, str]:
    """Give what the container's environment asks for, as annotations.

    An image can set it as well as who starts the container: the last resort of engines that have no
    annotations, and only where the node says so.
    """
    process = document.get("process")
    variables = process.get("env") if type(process) is dict else None
    asked = {}
    for variable in variables if type(variables) is list else ():
        name, _, value = str(variable).partition("=")
        if name in VARIABLES:
            asked[PREFIX + VARIABLES[name]] = value
    return asked


def edit_config(data: bytes, name: str, settings: Settings) -> bytes | None:
    """Give the edited config.json; None when the container asks for nothing.

    HookError says what is wrong; nothing is reserved then, or not for long.
    """
    document, annotations, identity = parse_document(data, show(name))
    if is_sandbox(annotations):
        return None
    ours = {k: v for k, v in annotations.items() if k.startswith(PREFIX)}
    replaces = ours.pop(RESERVATION, "")
    if settings.environment:
        ours = from_environment(document) | ours
    if not ours:
        return None
    foreign = foreign_driver(document)
    if foreign:
        raise BundleError(
            f"{show(name)} has a {foreign}, which brings a driver of its own",
            hint="start the container without --gpus and nvidia.com devices, by a runtime that"
            " is not NVIDIA's",
        )
    request = parse_annotations(ours)
    check_request(request, ours)
    client = Client(settings.runtime_dir, settings.timeout)
    try:
        answer = client.reserve(
            ours,
            identity,
            replaces=replaces[:64],
            # Those of a reservation were our own choice, and may be another now.
            nodes=() if replaces else gpu_nodes(document),
            exact=governed_by(document, settings.entry.path),
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
    return json.dumps(document).encode()
