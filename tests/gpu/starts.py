"""`python -m tests.gpu.starts`: starts engines that size their cache by what is free, next to a container that allocates and frees.

Each start is a separate container with examples/workloads/programs/engine_start.py, several at a time. The neighbour
is bench/oom_stress.c: processes whose threads allocate and free at random up to their quota. Some of the processes are
killed. A start in which an allocation fails, or whose cache is much smaller than the others', makes the exit status 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench.demo import driver_answers, name_gpu
from bench.images import INSIDE, NvidiaImage
from bench.machine import ROOT, MachineError
from bench.node import BenchNode, last_json
from bench.provenance import describe_run
from governor.errors import TidegateError
from vdriver.errors import VdriverError

QUOTA = "8Gi"
FOREVER_S = "3600"
START_S = 120.0
LEAST = 0.9
"""Least size of a cache, as a fraction of the largest. What the driver may have taken since the last sample of NVML counts
until the next sample, so a cache may be slightly smaller than possible.
"""


def start(node: BenchNode, i: int) -> dict[str, Any]:
    """Start one engine; return what it printed, its exit status, and the duration in seconds."""
    arguments = [node.machine.python, f"{INSIDE}/engine_start.py"]  # type: ignore[attr-defined]
    began = time.monotonic()
    container = node.start(
        f"start-{i}", arguments, {"memory": QUOTA, "compute": "5", "compute-limit": "100"}
    )
    status = node.wait(container, START_S)
    seconds = round(time.monotonic() - began, 2)
    answer = last_json(container.output)
    node.running.remove(container)
    node.machine.remove_bundle(container.bundle)
    text = "" if status == 0 else container.output.strip()[-300:]
    return {"status": status, "seconds": seconds, **answer, **({"output": text} if text else {})}


def measure(node: BenchNode, n: int, at_a_time: int) -> dict[str, Any]:
    """Start `n` engines next to the neighbour; return what each reported."""
    stress = [
        "/usr/bin/oom_stress",
        "--processes",
        "4",
        "--threads",
        "8",
        "--seconds",
        FOREVER_S,
        "--kill-every",
        "500",
    ]
    neighbour = node.start(
        "neighbour", stress, {"memory": QUOTA, "compute": "5", "compute-limit": "100"}
    )
    time.sleep(2)
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
        starts = list(pool.map(lambda i: start(node, i), range(n)))
    seconds = time.monotonic() - began
    if neighbour.process.poll() is not None:
        raise MachineError(f"the neighbour has ended; see {neighbour.bundle}/output")
    peak = node.list_containers()[neighbour.identifier]["devices"][0]["memory_peak"]
    return {"starts": starts, "seconds": round(seconds, 1), "neighbour_peak": peak}


def judge(report: dict[str, Any]) -> list[str]:
    """Return the faults of a run, one line each."""
    starts = report["starts"]
    found = [
        f"start {i}: status {one['status']}, {one.get('failed')} failed allocations: {one.get('output', '')}"
        for i, one in enumerate(starts)
        if one["status"] or one.get("failed") != 0
    ]
    blocks = [one["blocks"] for one in starts if "blocks" in one]
    if blocks and min(blocks) < LEAST * max(blocks):
        found.append(f"the caches have {min(blocks)} to {max(blocks)} blocks")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run, print the findings and write starts.json."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.starts", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--at-a-time", type=int, default=8)
    parser.add_argument("--output", type=Path, default=ROOT / "build/starts")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    args = parser.parse_args(argv)
    output, build = args.output.resolve(), args.build.resolve()
    os.environ["PATH"] += ":/usr/sbin:/sbin"  # for ldconfig
    if not driver_answers():
        print("starts: no NVIDIA driver answers on this machine", file=sys.stderr)
        return 69
    shutil.rmtree(output, ignore_errors=True)
    tools = output / "tools"
    tools.mkdir(parents=True)
    machine = NvidiaImage(output, build, tools)
    machine.programs.append(build / "oom_stress")
    try:
        with BenchNode(machine, settings={"scheduling": "auto"}) as node:
            report: dict[str, Any] = {"gpu": name_gpu(node).__dict__, "run": describe_run()}
            report |= measure(node, args.starts, args.at_a_time)
    except (MachineError, TidegateError, VdriverError) as e:
        print(f"starts: {e}", file=sys.stderr)
        return 1
    report["wrong"] = judge(report)
    (output / "starts.json").write_text(json.dumps(report) + "\n")
    good = [one for one in report["starts"] if one["status"] == 0]
    blocks = [one["blocks"] for one in good if "blocks" in one]
    print(
        f"{len(report['starts'])} starts, {len(report['starts']) - len(good)} failed; caches of {min(blocks, default=0)}"
        f" to {max(blocks, default=0)} blocks; {report['seconds']} s"
    )
    for line in report["wrong"]:
        print(f"WRONG: {line}")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
