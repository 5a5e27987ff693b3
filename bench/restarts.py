"""Measures how long containers pause when the governor is killed, under the GPU's own scheduler.

`python -m bench.restarts` runs containers with caps, which the governor switches off and on in each
period of 0.1 s. It repeatedly kills the governor with SIGKILL at a random time and starts another
one, at once or up to 3 s later. From the stamps of each container's units of work it computes the
longest time without work, between the kill and one second after the next governor answers. The same
figure for seconds without a kill is the baseline: a container that has used its cap is off until
the period ends. The results are written to restarts.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.arms import ArmContainer
from bench.demo import find_machine, name_gpu
from bench.events import now, pid_of
from bench.machine import ROOT, Machine, MachineError
from bench.node import BenchNode
from bench.progress import NS_PER_MS, NS_PER_S
from bench.provenance import describe_run
from bench.quota import FOREVER_S, start_all
from bench.quota_measure import wait_for_end
from governor.errors import TidegateError
from vdriver.errors import VdriverError

SHARES = (45, 30, 15)
DOWN_S = (0.0, 0.0, 0.3, 3.0)
"""Upper bounds of the random time until the next governor is started, in seconds, used in turn."""
AFTER_S = 1.0


def longest_gap_ms(times: Sequence[int], begin: int, end: int) -> float:
    """Return the longest interval without a stamp that overlaps `begin` to `end` (ns), in ms."""
    inside = [one for one in times if begin < one < end]
    before = max((one for one in times if one <= begin), default=begin)
    after = min((one for one in times if one >= end), default=end)
    edges = [before, *inside, after]
    return max(b - a for a, b in itertools.pairwise(edges)) / NS_PER_MS


def measure(machine: Machine, n_kills: int, scheduling: str) -> dict[str, Any]:
    """Kill the governor `n_kills` times; return each container's longest pause after each kill."""
    draw = random.Random(1)  # noqa: S311
    tenants = [ArmContainer(share) for share in SHARES]
    events: list[tuple[int, int, int]] = []
    with BenchNode(machine, settings={"scheduling": scheduling}, keep_machine=True) as node:
        gpu = asdict(name_gpu(node))
        containers = start_all(node, tenants, FOREVER_S)
        time.sleep(2)
        quiet = [now()]
        for _ in range(5):
            time.sleep(AFTER_S)
            quiet.append(now())
        node.check_scheduling()
        for i in range(n_kills):
            time.sleep(draw.uniform(0.5, 1.0))
            killed = now()
            node.stop_governor(signal.SIGKILL)
            time.sleep(draw.uniform(0, DOWN_S[i % len(DOWN_S)]))
            started = now()
            node.start_governor()
            answers = now()
            time.sleep(AFTER_S)
            events.append((killed, started, answers))
            took = (answers - started) / NS_PER_MS
            print(
                f"kill {i + 1}: the next governor answered {took:.0f} ms after its start",
                flush=True,
            )
        node.check_scheduling()
        for one in containers:
            os.kill(pid_of(node, one), signal.SIGTERM)
        reports = wait_for_end(node, containers)
    times = [[stamp.time - one.ahead_ns for stamp in one.stamps] for one in reports]

    def gaps(begin: int, end: int) -> list[float]:
        return [round(longest_gap_ms(one, begin, end), 2) for one in times]

    return {
        "gpu": gpu,
        "scheduling": scheduling,
        "shares": SHARES,
        "quiet_ms": [gaps(a, b) for a, b in itertools.pairwise(quiet)],
        "kills": [
            {
                "down_ms": round((started - killed) / NS_PER_MS, 1),
                "start_ms": round((answers - started) / NS_PER_MS, 1),
                "pauses_while_down_ms": gaps(killed, started),
                "pauses_ms": gaps(killed, answers + int(AFTER_S * NS_PER_S)),
            }
            for killed, started, answers in events
        ],
    }


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """Return the longest pauses of each container, in ms."""
    return {
        "without_a_kill": [max(column) for column in zip(*result["quiet_ms"], strict=True)],
        "with_kills": [
            max(column)
            for column in zip(*(kill["pauses_ms"] for kill in result["kills"]), strict=True)
        ],
    }


def main(argv: list[str] | None = None) -> int:
    """Measure; return 1 if that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.restarts", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--scheduling", choices=["hardware", "gate"], default="hardware")
    parser.add_argument("--simulated", action="store_true", help="always use a simulated GPU")
    parser.add_argument("--output", type=Path, default=ROOT / "build/restarts")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    args = parser.parse_args(argv)
    args.compile = False
    args.output, args.build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    try:
        machine = find_machine(args, args.output / "machine", args.build)
        try:
            result = measure(machine, args.kills, args.scheduling)
        finally:
            machine.close()
    except (MachineError, TidegateError, VdriverError, subprocess.SubprocessError) as e:
        print(f"restarts: {e}", file=sys.stderr)
        return 1
    result |= {"run": describe_run(), "summary": summarise(result)}
    (args.output / "restarts.json").write_text(json.dumps(result) + "\n")
    print(json.dumps(result["summary"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
