"""`tidegate inspect`: show everything that is known about one container or claim."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from governor.client import ask, node_config
from governor.counters import wait_bound_ms
from governor.errors import RequestError
from governor.listing import (
    Listing,
    claim_state,
    describe_elsewhere,
    describe_violation,
    find,
    find_claim,
    percent,
    safe,
    state,
    unknown_of,
    waiting,
)

SUMMARY = "Show everything that is known about a container or a claim"
CLAIM = "claim/"
"""Prefix that names a claim if a container or pod has the same name."""
MIB = 1 << 20
COUNTED = ("grants", "overdue", "launches", "waits", "refused", "contexts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.add_argument(
        "container",
        help="a container, by its id, a unique prefix of its id, its name or its pod; or a claim, "
        "by its uid, NAMESPACE/NAME or name (claim/NAME if a pod has the same name)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="configuration file (/etc/tidegate/config.yaml)"
    )
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the governor's directory (/run/tidegate)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the container or the claim."""
    config = node_config(args.config, args.runtime_dir)
    listing = Listing(config)
    wanted = args.container.removeprefix(CLAIM)
    claim = find_claim(wanted, ask(config, "claims")["claims"])
    if claim is not None and args.container.startswith(CLAIM):
        return _show_claim(claim, as_json=args.json)
    try:
        container = find(args.container, listing.containers())
    except RequestError:
        if claim is None:
            raise
        return _show_claim(claim, as_json=args.json)
    container["directory"] = f"{config.runtime_dir}/containers/{container['key']}"
    container["commands"] = {str(pid): _command(pid) for pid in container["processes"]}
    names = {gpu["uuid"]: gpu["name"] for gpu in listing.gpus()}
    for device in container["devices"]:
        device["name"] = names.get(device["uuid"])
    if args.json:
        print(json.dumps(container, indent=2))
        return 0
    for name, value in _fields(container):
        print(f"{name:15} {safe(value)}".rstrip())
    return 0


def _show_claim(claim: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(claim, indent=2))
        return 0
    for name, value in _claim_fields(claim):
        print(f"{name:15} {safe(value)}".rstrip())
    return 0


def _claim_fields(claim: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "claim", f"{claim['namespace']}/{claim['name']}"
    yield "uid", claim["uid"]
    yield "state", claim_state(claim)
    for share in claim["shares"]:
        where = f"GPU {share['index']}" if share["index"] is not None else "no GPU of this node"
        yield "", ""
        yield "share", share["name"]
        yield "  of", f"{where}, {share['uuid']}"
        shares = f"{share['compute']} % of the time guaranteed, {share['compute_limit']} % at most"
        yield "  quota", f"{share['memory'] // MIB} MiB of memory, {shares}"
        yield "  memory", f"{share['memory_used'] // MIB} MiB used"
        yield "  strategy", share["strategy"]
        for container in share["containers"]:
            yield "  container", container


def _command(pid: int) -> str:
    """Return the command line of a process, empty if it is not readable."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()[:4096].split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words).strip()


def _fields(one: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "container", one["id"]
    if one["name"] or one["engine"]:
        yield "name", f"{one['name'] or '?'}" + (f" ({one['engine']})" if one["engine"] else "")
    if one["pod"]:
        yield "pod", one["pod"]
    for claim in one.get("claims", ()):
        shares = ", ".join(claim["shares"])
        yield "claim", f"{claim['namespace']}/{claim['name']}, share {shares}, uid {claim['uid']}"
    if one.get("together", 1) > 1:
        yield "together with", f"{one['together'] - 1} others: what they use is counted together"
    yield "state", state(one)
    yield "first process", f"{one['pid']} {_command(one['pid'])}"[:200]
    yield "bundle", one.get("bundle") or "?"
    yield "directory", one["directory"]
    if not one["control_group"]:
        yield (
            "control group",
            "none that the governor sees: every process that reaches its socket is registered",
        )
    yield "strategy", one["strategy"]
    yield "class", one["class"]
    memory = one["devices"][0]["memory_limit"] // MIB
    shares = f"{one['compute']} % of the time guaranteed, {one['compute_limit']} % at most"
    yield "quota", f"{memory} MiB of memory, {shares}"
    yield from _parking_fields(one.get("parking"))
    for pid in one["processes"]:
        yield "process", f"{pid} {one['commands'][str(pid)]}"[:200]
    for device in one["devices"]:
        yield "", ""
        yield f"GPU {device['index']}", f"{device['name'] or '?'}, {device['uuid']}"
        yield from _device_fields(device)
    if one["mps"]:
        yield "", ""
        yield "MPS server", ", ".join(f"{name} {value}" for name, value in one["mps"].items())
    for use in one["elsewhere"]:
        yield "other GPU", describe_elsewhere(use)
    if unknown := unknown_of(one):
        yield "unknown", f"functions that the control library does not know: {unknown}"
    for episode in one["violations"]:
        until = "ongoing" if episode["ended"] is None else f"until {_when(episode['ended'])}"
        found = describe_violation(one, episode)
        yield "violation", f"{episode['kind']}: {found}, from {_when(episode['began'])}, {until}"


def _parking_fields(parking: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if parking is None:
        return
    movable, host = (parking[name] // MIB for name in ("movable", "host_memory"))
    where = f"{movable} MiB can be parked; {host} MiB of host memory is ready for that"
    yield "memory is", f"{parking['residency']}: {where}"
    moved, took = parking["moved"] // MIB, parking["move_ns"] / 1e9
    times = parking["times_parked"]
    waited = f"calls waited {parking['away_ns'] / 1e9:.1f} s for it"
    yield "moved", f"{moved} MiB in {took:.1f} s, parked {times} time{'s' * (times != 1)}; {waited}"


def _device_fields(device: dict[str, Any]) -> Iterator[tuple[str, str]]:
    used, peak = device["memory_used"] // MIB, device["memory_peak"] // MIB
    yield "  memory", f"{used} MiB used, peak {peak} MiB"
    used, own, lent = map(percent, _parts(device["delivered"], device["lent"]))
    use = f"{used} % of the GPU used ({own} % of its own, {lent} % lent)"
    yield "  last 2 s", f"{use}; calls waited {waiting(device)}"
    n_waiting = "?" if device["waiting"] is None else device["waiting"]
    yield "  now waiting", f"{n_waiting} of its processes"
    parts = _parts(device["charged_ns"] / 1e9, device["lent_ns"] / 1e9)
    used, own, lent = (f"{part:.1f} s" for part in parts)
    waited = f"{device['wait_ns'] / 1e9:.1f} s"
    yield "  in total", f"{used} used ({own} of its own, {lent} lent); calls waited {waited}"
    half, most = (wait_bound_ms(device["grant_waits"], part) for part in (0.5, 0.99))
    if half is not None and most is not None:
        yield "  for a grant", f"median wait {_bound(half)}, 99th percentile {_bound(most)}"
    yield "  counted", ", ".join(f"{name} {device[name]}" for name in COUNTED)


def _parts(used: float | None, lent: float | None) -> tuple[Any, Any, Any]:
    """Return the used time or share, and its two parts: its own, and what was lent to it."""
    return used, None if used is None or lent is None else used - lent, lent


def _bound(ms: float) -> str:
    return "longer than 1 s" if ms == math.inf else f"at most {ms:g} ms"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
