"""CDI specifications for the node's GPUs: `tidegate.gpu/shared=0`, `=GPU-...`, `=all`.

An engine that supports CDI (Podman, Docker, containerd, CRI-O) creates the device nodes and runs
the hook without further configuration. The container's quota comes from its annotations, or else
from the node's defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from governor.quota import Device
from oci_hook.edits import CONTROL, DeviceNode, hook_entry, host_nodes

KIND = "tidegate.gpu/shared"
CLAIM_KIND = "tidegate.gpu/claim"
VERSION = "0.5.0"
"""The lowest version in which a device's name may begin with a digit; older engines would refuse a
newer version."""
HOOK = "/usr/bin/tidegate-hook"


SIMULATED = "/dev/tidegate-simgpu"
"""Mount point, in a container, of the directory of simulated GPUs."""


def make_spec(
    devices: Sequence[Device],
    *,
    hook: str = HOOK,
    arguments: Sequence[str] = (),
    dev_dir: str = "/dev",
    simulated: str | None = None,
) -> dict[str, Any]:
    """Return the specification for these GPUs, in CDI format.

    A simulated GPU has no device node; the directory `simulated` is mounted instead. Raise
    DeviceError if the host lacks a node.
    """
    minors = tuple(device.minor for device in devices if device.minor is not None)
    found = [_node(dev_dir, node) for node in host_nodes(dev_dir, minors)]
    control, own = found[: len(CONTROL)], dict(zip(minors, found[len(CONTROL) :], strict=True))
    nodes = {d.uuid: [] if d.minor is None else [own[d.minor]] for d in devices}
    named = [
        *((str(device.index), nodes[device.uuid]) for device in devices),
        *((device.uuid, nodes[device.uuid]) for device in devices),
        ("all", [node for own in nodes.values() for node in own]),
    ]
    edits: dict[str, Any] = {
        "hooks": [
            {"hookName": stage, **hook_entry(hook, (*arguments, "--governed"), stage)}
            for stage in ("createRuntime", "poststop")
        ],
    }
    if control:
        edits["deviceNodes"] = control
    if simulated is not None:
        options = ["rbind", "rw"]
        edits["mounts"] = [{"hostPath": simulated, "containerPath": SIMULATED, "options": options}]
    return {
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": [{"name": name, "containerEdits": _edits(own)} for name, own in named],
        "containerEdits": edits,
    }


def claim_device(uid: str, share: str) -> str:
    """Return the name of the CDI device for a claim's share; CDI allows no slash in it."""
    return f"{uid}-{share.replace('/', '_')}"


def make_claim_spec(
    uid: str,
    shares: Sequence[tuple[str, int | None]],
    *,
    hook: str = HOOK,
    arguments: Sequence[str] = (),
    dev_dir: str = "/dev",
) -> dict[str, Any]:
    """Return the specification for a claim: a device for each share (name and minor number).

    A container gets the nodes of its shares' GPUs, and for each share a createRuntime hook that
    names the share. A single poststop hook reports the container's end. Raise DeviceError if the
    host lacks a node.
    """
    minors = tuple(dict.fromkeys(minor for _, minor in shares if minor is not None))
    found = [_node(dev_dir, node) for node in host_nodes(dev_dir, minors)]
    control, own = found[: len(CONTROL)], dict(zip(minors, found[len(CONTROL) :], strict=True))
    devices = []
    for name, minor in shares:
        of_share = (*arguments, "--claim", uid, "--share", name)
        edits = _edits([] if minor is None else [own[minor]])
        edits["hooks"] = [
            {"hookName": "createRuntime", **hook_entry(hook, of_share, "createRuntime")}
        ]
        devices.append({"name": claim_device(uid, name), "containerEdits": edits})
    end = (*arguments, "--claim", uid, "--share", shares[0][0])
    spec: dict[str, Any] = {
        "cdiVersion": VERSION,
        "kind": CLAIM_KIND,
        "devices": devices,
        "containerEdits": {
            "hooks": [{"hookName": "poststop", **hook_entry(hook, end, "poststop")}],
        },
    }
    if control:
        spec["containerEdits"]["deviceNodes"] = control
    return spec


def _edits(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    # CDI refuses empty edits, and NVIDIA's own runtime must be disabled in any case.
    edits: dict[str, Any] = {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}
    if nodes:
        edits["deviceNodes"] = nodes
    return edits


def _node(dev_dir: str, node: DeviceNode) -> dict[str, Any]:
    return {
        "path": node.path,
        "hostPath": f"{dev_dir}/{Path(node.path).name}",
        "type": "c",
        "major": node.major,
        "minor": node.minor,
        "permissions": "rw",
    }
