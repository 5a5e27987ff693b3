"""Builds the ResourceSlice that describes the node's GPUs to the scheduler.

A GPU is one device that may be allocated many times; its capacities are bytes of memory and percent
of time. A claim takes all of a capacity that it does not name, unless the node's options set
another default. Where the node grants more memory than a GPU has (`memory.overbook`), the GPU
offers more than a single claim can have. The functions are pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kube.health import Taint
from kube.names import COMPUTE, DRIVER, MEMORY
from kube.quantity import MIB, parse_quantity

STANDARD = "resource.kubernetes.io/"
"""Prefix of attributes that have the same meaning in all drivers (KEP 4381, KEP 6072)."""

MAX_DEVICES = 64
"""Maximum number of devices in a slice with taints."""

CONTEXT_MEMORY = 520 * MIB
"""Memory of a context, in bytes. It is the minimum for a claim, unless the governor reports one."""


@dataclass(frozen=True)
class ClaimDefaults:
    """The capacities of a claim that names none, in bytes and percent; None means all of a GPU."""

    memory: int | None = None
    compute: int | None = None


def device_name(uuid: str) -> str:
    """Return the name of a GPU's device: its UUID, as a DNS label.

    An index would change with the order on the bus, and an old claim would refer to another GPU.
    """
    return re.sub(r"[^a-z0-9-]", "-", uuid.lower())[:63].strip("-")


def slice_name(node: str) -> str:
    """Return the name of a node's slice. It never changes, so a node never has two slices."""
    name = f"{node}-{DRIVER}"
    if len(name) <= 253:
        return name
    digest = hashlib.sha256(node.encode()).hexdigest()[:12]
    return f"{node[:220].rstrip('.-')}-{digest}-{DRIVER}"


def make_slice(
    node: str,
    node_uid: str,
    answer: Mapping[str, Any],
    taints: Mapping[str, Sequence[Taint]],
    *,
    defaults: ClaimDefaults = ClaimDefaults(),
    roots: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the slice for the governor's answer to `gpus`; its generation is 1.

    `taints` maps the UUIDs of GPUs to their taints, and `roots` maps PCI addresses to PCIe roots.
    """
    devices = [
        _device(gpu, answer, taints.get(gpu["uuid"], ()), defaults, roots or {})
        for gpu in answer["gpus"][:MAX_DEVICES]
        if gpu["memory"] >= MIB
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {
            "name": slice_name(node),
            # The slice is deleted with its node.
            "ownerReferences": [
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "name": node,
                    "uid": node_uid,
                    "controller": True,
                }
            ],
        },
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


def _device(
    gpu: Mapping[str, Any],
    answer: Mapping[str, Any],
    taints: Sequence[Taint],
    defaults: ClaimDefaults,
    roots: Mapping[str, str],
) -> dict[str, Any]:
    memory = gpu["memory"] // MIB * MIB
    offered = int(gpu.get("memory_offered", memory)) // MIB * MIB
    least = -(-int(answer.get("context_memory") or CONTEXT_MEMORY) // MIB) * MIB
    least = min(least, memory)
    usual = memory if defaults.memory is None else defaults.memory // MIB * MIB
    device: dict[str, Any] = {
        "name": device_name(gpu["uuid"]),
        "allowMultipleAllocations": True,
        "attributes": _attributes(gpu, answer, roots),
        "capacity": {
            MEMORY: _capacity(offered, (least, memory), MIB, min(max(usual, least), memory)),
            COMPUTE: _capacity(100, (1, 100), 1, min(max(defaults.compute or 100, 1), 100)),
        },
    }
    if taints:
        device["taints"] = [taint.describe() for taint in taints]
    return device


def _capacity(value: int, span: tuple[int, int], step: int, usual: int) -> dict[str, Any]:
    """Return a capacity and the range that a claim may ask for; `usual` is the default."""
    least, most = span

    def show(number: int) -> str:
        return str(number) if step == 1 else f"{number // MIB}Mi"

    policy: dict[str, Any] = {"default": show(usual)}
    # The API server refuses a range that is smaller than one step.
    if least + step <= most:
        policy["validRange"] = {"min": show(least), "max": show(most), "step": show(step)}
    else:
        policy["validValues"] = [show(usual)]
    return {"value": show(value), "requestPolicy": policy}


def _attributes(
    gpu: Mapping[str, Any], answer: Mapping[str, Any], roots: Mapping[str, str]
) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "uuid": {"string": _short(gpu["uuid"])},
        "index": {"int": gpu["index"]},
        "model": {"string": _short(gpu["name"])},
        "strategy": {"string": gpu["strategy"]},
    }
    if gpu["memory"] and "memory_offered" in gpu:
        # Rounded up: 100 means that nothing is granted twice.
        percent = -(-100 * gpu["memory_offered"] // gpu["memory"])
        attributes["memoryOverbook"] = {"int": percent}
    for name, value in (
        ("driverVersion", answer.get("driver")),
        ("cudaVersion", answer.get("cuda")),
    ):
        version = semantic_version(value or "")
        if version:
            attributes[name] = {"version": version}
    address = gpu.get("pci")
    if address:
        attributes["pciBusID"] = attributes[f"{STANDARD}pciBusID"] = {"string": address}
        if address in roots:
            attributes[f"{STANDARD}pcieRoot"] = {"string": roots[address]}
    node = gpu.get("numa_node")
    if node is not None:
        attributes["numaNode"] = attributes[f"{STANDARD}numaNode"] = {"int": node}
    group = nvlink_group(gpu, answer["gpus"])
    if group is not None:
        attributes["nvlinkGroup"] = {"int": group}
    return attributes


def _short(text: str) -> str:
    """Cut a text to the 64 bytes that the API server accepts, without a partial character."""
    return text.encode(errors="replace")[:64].decode(errors="ignore")


def nvlink_group(gpu: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the lowest index among a GPU and those that NVLinks connect to it, directly or not.

    Return None if there are no others.
    """
    linked = {
        one["index"]: {route["to"] for route in one.get("routes", ()) if route["nvlinks"]}
        for one in gpus
    }
    group, waiting = {gpu["index"]}, [gpu["index"]]
    while waiting:
        for other in linked.get(waiting.pop(), set()) - group:
            group.add(other)
            waiting.append(other)
    return min(group) if len(group) > 1 else None


def semantic_version(text: str) -> str | None:
    """Return a version in semver notation (580.159.4 for `580.159.04`), or None if invalid."""
    parts = text.split(".")
    if not 1 <= len(parts) <= 3 or not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        return None
    return ".".join(str(int(part)) for part in [*parts, "0", "0"][:3])


def normalised(spec: Mapping[str, Any], *, taints: bool = True) -> dict[str, Any]:
    """Return a slice's spec for comparison: without the generation, with quantities as numbers.

    The API server writes quantities in its own notation, and adds the times of taints.
    """
    pool = {key: value for key, value in (spec.get("pool") or {}).items() if key != "generation"}
    return {
        **{key: value for key, value in spec.items() if key not in ("pool", "devices")},
        "pool": pool,
        "devices": [_plain(device, taints=taints) for device in spec.get("devices") or ()],
    }


def _plain(device: Mapping[str, Any], *, taints: bool) -> dict[str, Any]:
    plain = {key: value for key, value in device.items() if key not in ("capacity", "taints")}
    plain["capacity"] = {
        name: _numbers(capacity) for name, capacity in (device.get("capacity") or {}).items()
    }
    if taints:
        plain["taints"] = sorted(
            (one.get("key"), one.get("value"), one.get("effect"))
            for one in device.get("taints") or ()
        )
    return plain


def _numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _numbers(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    try:
        return parse_quantity(value)
    except ValueError:
        return value
