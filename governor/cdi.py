"""The node's GPUs as CDI devices: `tidegate.gpu/shared=0`, `=GPU-...`, `=all`.

An engine that knows CDI (Podman, Docker, containerd, CRI-O) makes the nodes and enters the hook,
and needs no configuration of ours. How much of the GPU a container gets its annotations say, or
the node's defaults.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from governor.books import Device
from governor.errors import GovernorError
from oci_hook.edits import HOOK_ENV, HOOK_TIMEOUT

KIND = "tidegate.gpu/shared"
VERSION = "0.5.0"
"""The lowest in which a device's name may begin with a digit; older engines refuse newer ones."""
HOOK = "/usr/bin/tidegate-hook"
CONTROL = ("nvidiactl", "nvidia-uvm")


def make_spec(
    devices: Sequence[Device],
    *,
    hook: str = HOOK,
    arguments: Sequence[str] = (),
    dev_dir: str = "/dev",
) -> dict[str, Any]:
    """Return the specification of these GPUs, as the CDI specification says.

    A GPU without a device node, which is a simulated one, has none in it.
    """
    nodes = {
        d.uuid: [] if d.minor is None else [_node(dev_dir, f"nvidia{d.minor}")] for d in devices
    }
    named = [
        *((str(device.index), nodes[device.uuid]) for device in devices),
        *((device.uuid, nodes[device.uuid]) for device in devices),
        ("all", [node for own in nodes.values() for node in own]),
    ]
    edits: dict[str, Any] = {
        "hooks": [
            {
                "hookName": "createRuntime",
                "path": hook,
                "args": [Path(hook).name, *arguments, "--governed", "createRuntime"],
                "env": list(HOOK_ENV),
                "timeout": HOOK_TIMEOUT,
            }
        ],
    }
    if any(nodes.values()):
        edits["deviceNodes"] = [_node(dev_dir, name) for name in CONTROL]
    return {
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": [{"name": name, "containerEdits": _edits(own)} for name, own in named],
        "containerEdits": edits,
    }


def _edits(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    # Edits that are empty are refused, and NVIDIA's own runtime is to stay away in any case.
    edits: dict[str, Any] = {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}
    if nodes:
        edits["deviceNodes"] = nodes
    return edits


def _node(dev_dir: str, name: str) -> dict[str, Any]:
    path = Path(dev_dir, name)
    try:
        status = path.stat()
    except OSError as e:
        raise GovernorError(
            f"device node {path}: {e.strerror}", hint="make it with `nvidia-modprobe -u -c 0`"
        ) from e
    if not stat.S_ISCHR(status.st_mode):
        raise GovernorError(
            f"device node {path} is no character device",
            hint="remove it, and make it with `nvidia-modprobe -u -c 0`",
        )
    return {
        "path": f"/dev/{name}",
        "hostPath": str(path),
        "type": "c",
        "major": os.major(status.st_rdev),
        "minor": os.minor(status.st_rdev),
        "permissions": "rw",
    }
