"""Measures two containers that do not fit on the GPU together, and whose processes are killed.

Both run bench/oom_stress.c with blocks from cuMemAlloc, so that all of their memory can be parked,
and take turns on the GPU. During the run, the driver's NVML is read fifty times a second. At the
end, the memory in use on the GPU and the host's shared memory are compared with those at the start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.events import pid_of
from bench.machine import MachineError
from bench.memory import GRANULE, STRETCH_S, longest_stretch
from bench.node import BenchNode, Running, last_json
from governor.daemon import original_nvml
from vdriver.nvml import Nvml

MIB = 1 << 20
N_CONTAINERS = 2
SAMPLE_S = 0.02
LOOK_S = 1.0
LEFT = 64 * MIB
"""Memory, in bytes, that may be in use at the end on the GPU, or on the host, beyond what was in
use before the run: other programs use both as well."""


def shared_memory() -> int:
    """Return the host's shared memory in bytes, which includes parked memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


def namespace_of(pid: int) -> str | None:
    """Return a process's PID namespace, or None if there is no such process."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return None


def start_stress(node: BenchNode, quota: int, seconds: int, kill_every: int) -> list[Running]:
    """Start the containers; each kills one of its processes every `kill_every` ms."""
    return [
        node.start(
            f"stress-{i}",
            [
                "/usr/bin/oom_stress",
                "--ways", "1",
                "--seconds", str(seconds),
                "--kill-every", str(kill_every),
                "--seed", str(i + 1),
            ],
            {"memory": str(quota), "compute": "40", "compute-limit": "100", "devices": "0"},
        )
        for i in range(N_CONTAINERS)
    ]  # fmt: skip


def wait_for_container(node: BenchNode, container: Running) -> str | None:
    """Return a container's PID namespace; raise MachineError if it does not start within 20 s."""
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(MachineError, KeyError, IndexError):
            return namespace_of(pid_of(node, container))
        if time.monotonic() > deadline or container.process.poll() is not None:
            raise MachineError(f"container {container.name} did not start")
        time.sleep(0.05)


def watch(node: BenchNode, nvml: Nvml, uuid: str, containers: list[Running]) -> dict[str, Any]:
    """Sample the containers' memory, and their parking once a second, until all have ended.

    Return the times of the samples in seconds, the bytes of each container at these times, and the
    governor's reports of their parking.
    """
    spaces = [wait_for_container(node, one) for one in containers]
    times: list[float] = []
    samples: list[list[int]] = [[] for _ in containers]
    parking: list[dict[str, Any]] = []
    known: dict[int, str | None] = {}
    began = looked = time.monotonic()
    while any(one.process.poll() is None for one in containers):
        processes = nvml.processes(uuid)
        # NVML lists a killed process for a moment after it has disappeared from /proc.
        known = {one.pid: known.get(one.pid) or namespace_of(one.pid) for one in processes}
        at = round(time.monotonic() - began, 4)
        times.append(at)
        for space, found in zip(spaces, samples, strict=True):
            found.append(sum(p.used or 0 for p in processes if known[p.pid] == space))
        if time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            listed = node.list_containers()
            parking += [
                {"at": at, "container": i, **listed[one.identifier]["parking"]}
                for i, one in enumerate(containers)
                if one.identifier in listed
            ]
        time.sleep(SAMPLE_S)
    return {"times": times, "samples": samples, "parking": parking}


def measure_deaths(node: BenchNode, quota: int, seconds: int, kill_every: int) -> dict[str, Any]:
    """Run both containers to their end; `left_host` and `left_gpu` are what remains, in bytes."""
    with Nvml(original_nvml(str(node.driver_dir))) as nvml:
        uuid = nvml.gpus()[0].uuid
        before = nvml.memory_used(uuid) or 0, shared_memory()
        containers = start_stress(node, quota, seconds, kill_every)
        seen = watch(node, nvml, uuid, containers)
        for one in containers:
            if node.wait(one, 60):
                raise MachineError(f"a container failed: {one.output.strip()[-300:]}")
        deadline = time.monotonic() + 10
        while node.list_containers() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        after = nvml.memory_used(uuid) or 0, shared_memory()
    return {
        "quota": quota,
        "stress": [last_json(one.output) for one in containers],
        **seen,
        "left_gpu": after[0] - before[0],
        "left_host": after[1] - before[1],
        "listed": len(node.list_containers()),
    }


def judge_deaths(deaths: Mapping[str, Any]) -> list[str]:
    """Return the faults in a run, one line each."""
    found = []
    for i, (one, samples) in enumerate(zip(deaths["stress"], deaths["samples"], strict=True)):
        used = list(zip(deaths["times"], samples, strict=True))
        stretch = longest_stretch(used, deaths["quota"])
        if stretch > STRETCH_S:
            found.append(f"container {i} used more than its quota for {stretch:.2f} s")
        if one["wrong"]:
            found.append(f"{one['wrong']} calls failed, first {one['call']}: {one['error']}")
        if not one["refused"]:
            found.append(f"no allocation by container {i} was refused: its quota was not reached")
        if not 0 <= one["left"] <= GRANULE:
            found.append(f"{one['left']} bytes were left when no more could be allocated")
    if not any(one["residency"] == "parked" for one in deaths["parking"]):
        found.append("no container was ever parked")
    found += [
        f"{deaths[f'left_{where}']} bytes remain {text}"
        for where, text in (("gpu", "on the GPU"), ("host", "in host memory"))
        if deaths[f"left_{where}"] > LEFT
    ]
    if deaths["listed"]:
        found.append(f"{deaths['listed']} containers are still registered")
    return found


def summarise_deaths(deaths: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many processes were killed and how often memory moved, over both containers."""
    last = {one["container"]: one for one in deaths["parking"]}
    return {
        "killed": sum(one["killed"] for one in deaths["stress"]),
        "allocations": sum(one["allocations"] for one in deaths["stress"]),
        "times_parked": sum(one["times_parked"] for one in last.values()),
    }
