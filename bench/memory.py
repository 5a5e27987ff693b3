"""`python -m bench.memory`: puts a memory quota under attack.

It runs bench/oom_stress.c in one container: several processes allocate and free memory at random
in many threads, and some of the processes are killed. No other program uses the GPU. During the
run, the driver's own NVML is read a hundred times a second: the memory in use on the GPU, and the
memory of its processes. Every sample is written to memory.json.

The run fails if
- more than the quota is used for longer than a second (the governor finds memory that the driver
  takes on its own within a second), or a call fails for a reason other than a lack of memory;
- a process that fills the quota ends up more than one allocation granule (2 MiB) below the quota,
  or above it;
- the memory of a killed process is not available again within 100 ms of its end, or memory is
  still charged at the end of the run.

Memory that a context takes and that NVML attributes to no process does not count as the
container's. Its size is measured while one process is idle at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench.demo import find_machine
from bench.machine import ROOT, MachineError
from bench.node import BenchNode, last_json
from bench.overhead import gpu_name
from bench.provenance import describe_run
from governor.daemon import original_nvml
from governor.errors import TidegateError
from vdriver.errors import VdriverError
from vdriver.manifest import read_manifest
from vdriver.nvml import Nvml

GRANULE = 2 << 20
STRETCH_S = 1.0
RETURN_MS = 100.0
SAMPLE_S = 0.01
STILL_S = 0.8


def longest_stretch(samples: list[tuple[float, int]], limit: int) -> float:
    """Return the longest time for which consecutive samples were above `limit`, in seconds."""
    longest, since = 0.0, None
    for at, value in samples:
        if value <= limit:
            since = None
        else:
            since = at if since is None else since
            longest = max(longest, at - since)
    return longest


def judge(report: dict[str, Any]) -> list[str]:
    """Return the faults in a run, one line each."""
    limit, counts = report["limit"], report["oom_stress"]
    most = limit + report["unattributed"] * report["processes"]
    wrong = []
    stretch = longest_stretch([(at, used) for at, used, _ in report["samples"]], most)
    if stretch > STRETCH_S:
        wrong.append(f"more than the quota was used for {stretch:.2f} s")
    if counts["wrong"]:
        wrong.append(f"{counts['wrong']} calls failed, first {counts['call']}: {counts['error']}")
    if not counts["refused"]:
        wrong.append("no allocation was refused: the quota was not reached")
    if not 0 <= counts["left"] <= GRANULE:
        wrong.append(f"{counts['left']} bytes were left when no more could be allocated")
    if counts["total"] != limit:
        wrong.append(f"cuMemGetInfo reports a total of {counts['total']} bytes")
    if not limit - GRANULE <= report["full"] <= limit:
        wrong.append(
            f"a process that filled its quota holds {report['full']} bytes according to NVML,"
            f" but the quota is {limit}"
        )
    if counts["returned_ms"] > RETURN_MS:
        wrong.append(
            "the memory of a killed process was available again only after"
            f" {counts['returned_ms']} ms"
        )
    if report["after"]:
        wrong.append(f"{report['after']} bytes were still charged at the end")
    return wrong


def watch(node: BenchNode, arguments: list[str], limit: int) -> dict[str, Any]:
    """Run the processes in a container, and sample the GPU until they end."""
    samples: list[tuple[float, int, int]] = []
    with Nvml(original_nvml(str(node.driver_dir))) as nvml:
        uuid = nvml.gpus()[0].uuid
        before = nvml.memory_used(uuid) or 0
        container = node.start("oom_stress", arguments, {"memory": str(limit), "compute": "100"})
        began = time.monotonic()
        while container.process.poll() is None:
            at = round(time.monotonic() - began, 4)
            # A single number from the driver: a sum over processes would mix different moments.
            used = (nvml.memory_used(uuid) or 0) - before
            samples.append((at, used, sum(one.used or 0 for one in nvml.processes(uuid))))
            time.sleep(SAMPLE_S)
    if node.wait(container, 60):
        raise MachineError(f"the container failed: {container.output.strip()[-300:]}")
    # The last process filled the quota and was idle for a second.
    last = [one for one in samples if one[0] > samples[-1][0] - STILL_S]
    return {
        "limit": limit,
        "oom_stress": last_json(container.output),
        "samples": samples,
        "full": max((held for _, _, held in last), default=0),
        "unattributed": max((used - held for _, used, held in last), default=0),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run."""
    parser.add_argument(
        "--simulated", action="store_true", help="use the simulated GPU even if there is a real one"
    )
    parser.add_argument("--limit-mib", type=int, default=8192, help="the quota (8192)")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill-every", type=int, default=500, help="ms between kills (500)")
    parser.add_argument(
        "--ways",
        type=int,
        default=7,
        help="bit mask of ways to allocate; see the comment at the top of oom_stress.c (7: all)",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build/memory")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")


def main(argv: list[str] | None = None) -> int:
    """Run, print the findings and write memory.json; return 1 if there are faults."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory", description=__doc__.split("\n", maxsplit=1)[0]
    )
    add_options(parser)
    args = parser.parse_args(argv)
    args.compile = False
    args.output, args.build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    arguments = ["/usr/bin/oom_stress"]
    for name in ("processes", "threads", "seconds", "seed", "ways", "kill_every"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    try:
        machine = find_machine(args, args.output, args.build)
        machine.programs.append(args.build / "oom_stress")
        os.environ.update(machine.environment)  # for the driver's NVML in this process
        with BenchNode(machine, settings={"scheduling": "auto"}) as node:
            version = read_manifest((node.driver_dir / "current").resolve()).version
            report = watch(node, arguments, args.limit_mib << 20)
            report["processes"] = args.processes
            report["gpu"] = {"kind": machine.kind, "name": gpu_name(machine), "driver": version}
            deadline = time.monotonic() + 5
            while node.list_containers() and time.monotonic() < deadline:
                time.sleep(0.05)
            report["after"] = sum(
                device["memory_used"]
                for one in node.list_containers().values()
                for device in one["devices"]
            )
    except (MachineError, TidegateError, VdriverError) as e:
        print(f"memory: {e}", file=sys.stderr)
        return 1
    report["run"] = describe_run()
    report["wrong"] = judge(report)
    (args.output / "memory.json").write_text(json.dumps(report) + "\n")
    counts, limit = report["oom_stress"], report["limit"]
    above = max(used for _, used, _ in report["samples"])
    above -= limit + report["unattributed"] * args.processes
    print(
        f"{counts['allocations']} allocations, {counts['refused']} refused,"
        f" {counts['killed']} killed\nquota {limit >> 20} MiB; peak use {above / 2**20:+.1f} MiB"
        f" relative to it; filled to {report['full'] / 2**20:.1f},"
        f" {counts['left'] / 2**20:.2f} left\n"
        f"the memory of a killed process was available again after {counts['returned_ms']} ms"
    )
    for line in report["wrong"]:
        print(f"WRONG: {line}")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
