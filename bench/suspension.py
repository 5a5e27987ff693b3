"""`python -m bench.suspension`: repeatedly suspends a container alongside one that computes.

One container holds memory with known contents and computes on a part of it continuously
(examples/workloads/programs/holder.py). It is repeatedly suspended for a second and resumed; before
every third resume, the governor is killed and another one is started. The other container runs
kernels all the time and may be lent the whole GPU. Before either of them starts, holder.py is
suspended alone and without Tidegate, through the driver API.

The run fails if the contents differ at the end, if the program completes an iteration while it is
suspended, or if the GPU's used memory falls by less than the memory that the container holds, or by
less than what NVML attributes to its process. It reports how long the calls take, and how fast the
neighbour runs during the calls and while the container is suspended. The results are written to
suspension.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.arms import ArmContainer
from bench.demo import driver_answers, name_gpu
from bench.events import now, pid_of
from bench.images import INSIDE, SOURCE, NvidiaImage, SimulatedImage
from bench.machine import ROOT, Machine, MachineError
from bench.node import BenchNode, Running, last_json
from bench.progress import NS_PER_S
from bench.provenance import describe_run
from bench.quota import FOREVER_S, start_one
from bench.quota_measure import wait_for_end
from governor.client import ask
from governor.daemon import original_nvml
from governor.errors import TidegateError
from governor.hardware.child import module_command
from governor.processes import start_time
from vdriver.errors import VdriverError
from vdriver.nvml import Nvml

MIB = 1 << 20
CONTEXT = 1 << 30
"""Part of the quota, in bytes, for contexts and modules; the rest is for the held memory."""
LIBCUDA = "libcuda.so.1"
APART_S = 1.0
CALL_S = 300.0
NEIGHBOUR = ArmContainer(30, limit=100)


def read_turns(container: Running) -> list[tuple[float, float, float]]:
    """Return each iteration's end in s, and its duration in ms, as timed by host and events."""
    lines = (container.out / "turns").read_text().splitlines()
    return [(float(a), float(b), float(c)) for a, b, c in (line.split() for line in lines)]


def timed(node: BenchNode, op: str, container: Running) -> dict[str, Any]:
    """Suspend or resume a container; return the answer and the times of the call, in ns."""
    began = now()
    answer = ask(node.config, op, CALL_S, id=container.identifier)
    return {"began": began, "ended": now(), **answer}


def measure_native(machine: Machine, python: str, held: int, rounds: int) -> list[dict[str, float]]:
    """Return, for each round, the seconds that the driver's calls take outside any container."""
    out = machine.work / "native"
    out.mkdir()
    environment = {**os.environ, **machine.environment}
    command = [python, str(SOURCE / "holder.py"), "--bytes", str(held), "--out", str(out)]
    holder = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def make_calls(what: str) -> float:
        identity = f"{holder.pid}:{start_time(holder.pid)}"
        arguments = [str(os.getpid()), LIBCUDA, what, "30000", identity]
        began = time.monotonic()
        done = subprocess.run(
            module_command("governor.checkpoint_work", arguments),
            env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=CALL_S,
        )  # fmt: skip
        if '"done"' not in done.stdout:
            raise MachineError(f"the driver's calls failed: {done.stdout.strip()}")
        return round(time.monotonic() - began, 2)

    try:
        deadline = time.monotonic() + CALL_S
        while not (out / "begin.ready").exists():
            if holder.poll() is not None or time.monotonic() > deadline:
                raise MachineError("the holder failed without Tidegate")
            time.sleep(0.02)
        taken = [{what: make_calls(what) for what in ("suspend", "resume")} for _ in range(rounds)]
        (out / "stop").touch()
        output, _ = holder.communicate(timeout=CALL_S)
    finally:
        holder.kill()
        holder.wait()
    if last_json(output).get("wrong") != 0:
        raise MachineError(f"the contents are wrong without Tidegate: {output.strip()}")
    return taken


def look_at(node: BenchNode, nvml: Nvml, holder: Running) -> dict[str, int]:
    """Return the bytes in use on the GPU and in the container, as NVML and the governor report."""
    uuid = nvml.gpus()[0].uuid
    listed = {one.pid: one.used for one in nvml.processes(uuid)}
    reported = node.list_containers()[holder.identifier]
    return {
        "used": nvml.memory_used(uuid) or 0,
        "process": listed.get(pid_of(node, holder)) or 0,
        "charged": reported["devices"][0]["memory_used"],
    }


def measure(node: BenchNode, held: int, rounds: int) -> dict[str, Any]:
    """Suspend and resume the container `rounds` times; return the measurements."""
    arguments = [
        node.machine.python,  # type: ignore[attr-defined]
        f"{INSIDE}/holder.py",
        "--bytes", str(held),
        "--out", "/out",
    ]  # fmt: skip
    quota = {"memory": str(held + CONTEXT), "compute": "30"}
    with Nvml(original_nvml(str(node.driver_dir))) as nvml:
        holder = node.start("holder", arguments, quota)
        neighbour = start_one(node, NEIGHBOUR, FOREVER_S)
        node.wait_ready([holder.out / "begin.ready", neighbour.out / "begin.ready"], CALL_S)
        (neighbour.out / "begin").touch()
        time.sleep(2)

        seen = []
        for i in range(rounds):
            before = look_at(node, nvml, holder)
            out = timed(node, "suspend", holder)
            during = look_at(node, nvml, holder)
            time.sleep(APART_S)
            if i % 3 == 2:
                node.stop_governor(signal.SIGKILL)
                node.start_governor()
            back = timed(node, "resume", holder)
            seen.append({"before": before, "suspend": out, "during": during, "resume": back})
            print(
                f"round {i + 1} of {rounds}: out {out['seconds']} s, back {back['seconds']} s,"
                f" {(before['used'] - during['used']) / MIB:.0f} MiB freed",
                flush=True,
            )
            time.sleep(APART_S)
        (holder.out / "stop").touch()
        status = node.wait(holder, CALL_S)
        answer = last_json(holder.output)
        if status or not answer:
            raise MachineError(f"the holder ended with {status}: {holder.output.strip()[-300:]}")
        os.kill(pid_of(node, neighbour), signal.SIGTERM)
        stamps = wait_for_end(node, [neighbour])[0]
    times = [one.time - stamps.ahead_ns for one in stamps.stamps]
    return {
        "held": held,
        "rounds": seen,
        "holder": answer,
        "turns": read_turns(holder),
        "neighbour": neighbour_rates(times, seen),
    }


def neighbour_rates(times: Sequence[int], rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the neighbour's units per second during the calls, and during the suspensions."""

    def rate(spans: Sequence[tuple[int, int]]) -> float:
        seconds = sum(end - begin for begin, end in spans) / NS_PER_S
        units = sum(sum(begin < one <= end for one in times) for begin, end in spans)
        return round(units / seconds, 1)

    apart = int(APART_S * NS_PER_S)
    return {
        "out": rate([(one["suspend"]["began"], one["suspend"]["ended"]) for one in rounds]),
        "back": rate([(one["resume"]["began"], one["resume"]["ended"]) for one in rounds]),
        "away": rate(
            [(one["suspend"]["ended"], one["suspend"]["ended"] + apart) for one in rounds]
        ),
    }


def judge(report: Mapping[str, Any]) -> list[str]:
    """Return the faults in a run, one line each."""
    found = []
    if report["holder"]["wrong"]:
        found.append(f"{report['holder']['wrong']} blocks have wrong contents")
    ends = [turn[0] for turn in report["turns"]]
    for i, one in enumerate(report["rounds"], 1):
        away = one["suspend"]["ended"] / NS_PER_S, one["resume"]["began"] / NS_PER_S
        inside = sum(away[0] < end < away[1] for end in ends)
        if inside:
            found.append(f"round {i}: {inside} iterations while the container was suspended")
        freed = one["before"]["used"] - one["during"]["used"]
        least = max(report["held"], one["before"]["process"])
        if freed < least:
            found.append(f"round {i}: {freed} bytes were freed; expected at least {least}")
        if one["during"]["process"]:
            found.append(f"round {i}: {one['during']['process']} bytes stayed on the GPU")
    for i, (one, then) in enumerate(itertools.pairwise(report["rounds"]), 1):
        running = one["resume"]["ended"] / NS_PER_S, then["suspend"]["began"] / NS_PER_S
        if not any(running[0] < end < running[1] for end in ends):
            found.append(f"round {i}: no iteration after the container was resumed")
    return found


def summarise(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the medians of the times in seconds and of the freed memory in MiB."""
    rounds = report["rounds"]
    freed = [one["before"]["used"] - one["during"]["used"] for one in rounds]
    rates = report["neighbour"]
    native = report["native"]
    return {
        "native_out_s": statistics.median(one["suspend"] for one in native),
        "native_back_s": statistics.median(one["resume"] for one in native),
        "out_s": statistics.median(one["suspend"]["seconds"] for one in rounds),
        "back_s": statistics.median(one["resume"]["seconds"] for one in rounds),
        "freed_mib": round(statistics.median(freed) / MIB, 1),
        "more_than_held_mib": round((min(freed) - report["held"]) / MIB, 1),
        "longest_turn_ms": max(turn[1] for turn in report["turns"]),
        "longest_by_events_ms": max(turn[2] for turn in report["turns"]),
        "shortest_by_events_ms": min(turn[2] for turn in report["turns"]),
        "neighbour_out": round(rates["out"] / rates["away"], 4) if rates["away"] else None,
        "neighbour_back": round(rates["back"] / rates["away"], 4) if rates["away"] else None,
    }


def main(argv: list[str] | None = None) -> int:
    """Run, print the findings and write suspension.json; return 1 if there are faults."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.suspension", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--simulated", action="store_true", help="always use a simulated GPU")
    parser.add_argument("--held-mib", type=int, default=4096, help="memory that is held (4096)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--scheduling", choices=["auto", "hardware", "gate"], default="auto")
    parser.add_argument("--output", type=Path, default=ROOT / "build/suspension")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    args = parser.parse_args(argv)
    output, build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(output, ignore_errors=True)
    tools = output / "tools"
    tools.mkdir(parents=True)
    real = not args.simulated and driver_answers()
    machine = (NvidiaImage if real else SimulatedImage)(output, build, tools)
    try:
        os.environ.update(machine.environment)  # for the driver's NVML in this process
        with BenchNode(machine, settings={"scheduling": args.scheduling}) as node:
            report = {"gpu": asdict(name_gpu(node)), "scheduling": args.scheduling}
            held = args.held_mib * MIB
            report["native"] = measure_native(machine, machine.python, held, args.rounds)
            report |= measure(node, held, args.rounds)
    except (MachineError, TidegateError, VdriverError, subprocess.SubprocessError) as e:
        print(f"suspension: {e}", file=sys.stderr)
        return 1
    report["run"] = describe_run()
    report["summary"], report["wrong"] = summarise(report), judge(report)
    (output / "suspension.json").write_text(json.dumps(report) + "\n")
    print(json.dumps(report["summary"]))
    for line in report["wrong"]:
        print(f"WRONG: {line}")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
