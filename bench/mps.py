"""Measures the effect of a client's fatal fault on the other clients of its MPS server.

`python -m bench.mps`, on a node with an NVIDIA GPU: two containers run under the strategy `mps`,
and a third writes to an unmapped address. The report shows how each container ended, what the
governor saw, and when a new container could run again. Only the latter two are judged, because a
fault ends the other clients by design.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench.demo import driver_answers, find_machine
from bench.machine import ROOT, MachineError
from bench.node import BenchNode, Running, last_json
from bench.provenance import describe_run
from governor.client import ask
from governor.errors import TidegateError
from vdriver.errors import VdriverError

SETTINGS = {"strategies": ["mps"], "mps_fault_s": 5}
N_NEIGHBOURS = 2
WAIT_LIMIT_S = 60.0
UNIT = "burner-500"


def worker(node: BenchNode, name: str, seconds: float) -> Running:
    """Start a container that computes as soon as it can."""
    arguments = [
        *node.machine.command(UNIT, inside=True),
        "--seconds", str(seconds), "--out", "/out/progress.bin",
    ]  # fmt: skip
    return node.start(name, arguments, {"memory": "1Gi", "compute": "30"})


def wait_working(*containers: Running) -> None:
    """Wait until each container has completed 100 units of work."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    for container in containers:
        path = container.out / "progress.bin"
        while not (path.exists() and path.stat().st_size >= 16 * 100):
            if container.process.poll() is not None or time.monotonic() > deadline:
                raise MachineError(
                    f"container {container.name} has not completed 100 units of work;"
                    f" see {container.bundle}/output and mps/ next to it"
                )
            time.sleep(0.02)


def work_again(node: BenchNode, began: float) -> dict[str, Any]:
    """Start containers until one works; return the time since the fault, and how many failed."""
    for tries in range(1000):
        container = worker(node, f"again-{tries}", 1.0)
        status = node.wait(container, WAIT_LIMIT_S)
        if status == 0:
            return {"seconds": round(time.monotonic() - began, 2), "refused": tries}
        if time.monotonic() - began > WAIT_LIMIT_S:
            break
        time.sleep(0.2)
    return {"seconds": None, "refused": tries + 1, "output": container.output[-300:]}


def measure(node: BenchNode) -> dict[str, Any]:
    """Make one container cause a fault while others are running."""
    others = [worker(node, f"beside-{i}", 30.0) for i in range(N_NEIGHBOURS)]
    wait_working(*others)
    wait_file = "/out/begin"
    faulty = node.start(
        "faulty", ["/usr/bin/fault", "--wait-file", wait_file], {"memory": "1Gi", "compute": "30"}
    )
    node.wait_ready([faulty.out / "begin.ready"], WAIT_LIMIT_S)
    began = time.monotonic()
    (faulty.out / "begin").touch()
    status = node.wait(faulty, WAIT_LIMIT_S)
    report: dict[str, Any] = {
        "faulty": {"status": status, **last_json(faulty.output)},
        "others": [],
    }
    again = work_again(node, began)
    for container in others:
        ended = node.wait(container, WAIT_LIMIT_S)
        report["others"].append({"status": ended, "output": container.output[-300:]})
    report["again"] = again
    report["mps"] = ask(node.config, "gpus")["gpus"][0]["mps"]
    log = (node.work / "governor.log").read_text().splitlines()
    events = [json.loads(line) for line in log if line.startswith("{")]
    report["events"] = [e for e in events if str(e.get("event", "")).startswith("mps-")]
    return report


def main(argv: list[str] | None = None) -> int:
    """Run; return 1 if the fault was not detected or no container could run afterwards."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.mps", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build/mps")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    args = parser.parse_args(argv)
    args.compile, args.simulated = False, False
    args.output, args.build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    try:
        if not driver_answers():
            print(
                "mps: no NVIDIA GPU here; tests/container/test_mps.py needs none", file=sys.stderr
            )
            return 1
        machine = find_machine(args, args.output, args.build)
        machine.programs.append(args.build / "fault")
        with BenchNode(machine, settings=SETTINGS) as node:
            report = measure(node)
    except (MachineError, TidegateError, VdriverError) as e:
        print(f"mps: {e}", file=sys.stderr)
        return 1
    report["run"] = describe_run()
    (args.output / "mps.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in ("faulty", "others", "again", "mps")}))
    return 0 if report["mps"]["faults"] and report["again"]["seconds"] is not None else 1


if __name__ == "__main__":
    sys.exit(main())
