"""`python -m bench.quota [SUITE|ARM ...]`: measures GPU time under quotas, in many arrangements.

Each arm (bench/arms.py) runs containers side by side on one GPU. Each container runs a burner that
stamps its units of work with the GPU's clock (bench/burner.c; on a simulated GPU, its own
workload). A container's work is computed from its stamps and from the duration of a unit alone; no
figure from the governor is used. quota.json gets each container's work in steps of 10 ms, the
governor's report on it, and the processor time of the governor and of the library's helper threads;
a suite also gets a quota.svg. With --native each arm runs a second time without Tidegate, if that
is meaningful.

A suite is a series of arms with its own file, SUITE/quota.json. Without a name all suites run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.arms import ARMS, OWN_DRIVER, SUITES, Arm, ArmContainer
from bench.demo import SETTLE_S, find_machine, name_gpu, run_solo, say
from bench.events import SAMPLE_NS, SCRIPTS, Event, pid_of, place_events
from bench.limits import PartError, time_limit
from bench.machine import ROOT, Machine, MachineError, wait_set_up
from bench.node import BenchNode, Running
from bench.progress import (
    NS_PER_MS,
    Profile,
    ProgressError,
    read_stamps,
)
from bench.provenance import describe_run
from bench.quota_measure import (
    LONGEST_NS,
    WorkloadReport,
    difference,
    measure_work,
    summarise,
    wait_for_end,
)
from governor.config import Config
from governor.daemon import origin_of
from governor.errors import TidegateError
from vdriver.errors import VdriverError
from vdriver.manifest import read_manifest

NATIVE_STEP_NS = 100 * NS_PER_MS
NATIVE_S = 4.0
"""Maximum duration of an arm without Tidegate, in seconds; only its total is compared."""

CLEANUP_S = 40.0
"""Time limit for cleaning up after an arm, in seconds."""

SPARE_S = 1.0
"""Extra time for which a container runs, in seconds, so that it is still running at the end of the
measurement if it started late."""

FOREVER_S = 600.0
"""Duration that is passed to a container that a script ends, in seconds."""

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processor_times(pid: int) -> dict[str, float]:
    """Return the processor time of a process's threads in seconds, by name."""
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            name = (task / "comm").read_text().strip()
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[name] += int(fields[11]) + int(fields[12])
    return {name: ticks * TICK_S for name, ticks in found.items()}


def processor_time(pid: int, thread: str | None = None) -> float:
    """Return the processor time of a process, or of its threads with that name, in seconds."""
    found = processor_times(pid)
    return sum(found.values()) if thread is None else found.get(thread, 0.0)


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*"):
            try:
                found += [int(child) for child in (task / "children").read_text().split()]
            except OSError:
                continue
    return found


class ProcessorClock:
    """Processor time of the governor and of the helper threads in all containers."""

    def __init__(self, node: BenchNode, containers: Sequence[Running]) -> None:
        self.governor = node.governor_pid
        self.tenants = [pid for one in containers for pid in process_tree(one.seen.get("pid", 0))]

    def read(self) -> dict[str, float]:
        """Return the seconds so far."""
        return {
            "governor": processor_time(self.governor),
            "helpers": sum(processor_time(pid, "tidegate") for pid in self.tenants),
        }

    def read_threads(self) -> dict[str, float]:
        """Return the seconds so far of the governor's threads, by name."""
        return processor_times(self.governor)


def give_own_driver(node: BenchNode) -> None:
    """Put a copy of the driver's own libcuda into the containers that are started from now on."""
    copy = node.work / OWN_DRIVER
    if copy not in node.machine.programs:
        shutil.copy(origin_of(str(node.driver_dir), "libcuda"), copy)
        node.machine.programs.append(copy)


def start_one(
    node: BenchNode,
    tenant: ArmContainer,
    seconds: float,
    *,
    more: Mapping[str, str] | None = None,
) -> Running:
    """Start a container that sets itself up and then waits for the signal to begin.

    `more` are annotations beyond those in the arm.
    """
    arguments = [
        *node.machine.command(tenant.job, inside=True),
        *tenant.options,
        "--seconds", str(seconds),
        "--out", "/out/progress.bin",
        "--wait-file", "/out/begin",
    ]  # fmt: skip
    limit = tenant.compute if tenant.limit is None else tenant.limit
    annotations = {
        "compute": str(tenant.compute), "compute-limit": str(limit), "memory": tenant.memory,
        **({"class": "latency"} if tenant.latency else {}), **(more or {}),
    }  # fmt: skip
    return node.start(f"{next(_names)}", arguments, annotations)


def start_all(node: BenchNode, tenants: Sequence[ArmContainer], seconds: float) -> list[Running]:
    """Start containers, and make them begin together."""
    containers = [start_one(node, tenant, seconds) for tenant in tenants]
    node.wait_ready([c.out / "begin.ready" for c in containers], 240)
    node.list_containers()
    for container in containers:
        (container.out / "begin").touch()
    return containers


_names = (f"t{i}" for i in itertools.count())


def rates(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Return the processor time between two readings, as fractions of a processor."""
    return {
        name: round((value - before.get(name, 0.0)) / seconds, 5) for name, value in after.items()
    }


def run_arm(node: BenchNode, arm: Arm, profiles: Mapping[str, Profile]) -> dict[str, Any]:
    """Run one arm, and return the work of each container."""
    visitors: dict[str, Running] = {}
    if any(tenant.goes_around for tenant in arm.tenants):
        give_own_driver(node)

    def start(tenant: ArmContainer, seconds: float) -> Running:
        visitor = start_one(node, tenant, seconds)
        visitors[visitor.name] = visitor
        return visitor

    seconds = FOREVER_S if arm.script else arm.seconds + SETTLE_S + SPARE_S
    containers = start_all(node, arm.tenants, seconds)
    time.sleep(SETTLE_S)
    node.list_containers()
    before = {one.name: one.seen for one in containers}
    clock = ProcessorClock(node, containers)
    began, processors, threads = time.monotonic(), clock.read(), clock.read_threads()
    events: list[Event] = []
    if arm.script:
        events = SCRIPTS[arm.script](node, arm, containers, start)
    else:
        time.sleep(arm.seconds)
    passed = time.monotonic() - began
    processors = rates(processors, clock.read(), passed)
    threads = rates(threads, clock.read_threads(), passed)
    node.list_containers()
    node.check_scheduling()
    after = {one.name: one.seen for one in containers}
    if arm.script:
        for one in containers:
            os.kill(pid_of(node, one), signal.SIGTERM)
    reports = wait_for_end(node, containers)
    begin, step, tenants = measure_work(arm, reports, profiles, passed, SAMPLE_NS)
    for tenant, container in zip(tenants, containers, strict=True):
        tenant["governor"] = difference(before[container.name], after[container.name])
    result = {
        "seconds": round(passed, 3) if arm.script else arm.seconds,
        "settings": dict(arm.settings),
        "processors": processors,
        "governor_threads": threads,
        "step_ns": step,
        "tenants": tenants,
    }
    if arm.script:
        result |= {
            "script": arm.script,
            "visitors": [asdict(tenant) for tenant in arm.visitors],
            "events": place_events(
                events,
                arm.script,
                ahead_ns=reports[0].ahead_ns,
                stamps=reports[0].stamps,
                begin=begin,
                last_of=lambda name: read_stamps(visitors[name].out / "progress.bin")[-1].time,
            ),
        }
    for container in (*containers, *visitors.values()):
        node.machine.remove_bundle(container.bundle)
    return result


def run_native(machine: Machine, arm: Arm, profiles: Mapping[str, Profile]) -> dict[str, Any]:
    """Run the same work without Tidegate, under the GPU's own time slicing."""
    seconds = min(arm.seconds, NATIVE_S)
    root = machine.work / "native"
    shutil.rmtree(root, ignore_errors=True)
    environment = {**os.environ, **machine.environment}
    reports = []
    with contextlib.ExitStack() as stack:
        started = []
        for i, tenant in enumerate(arm.tenants):
            (root / str(i)).mkdir(parents=True)
            command = [
                *machine.command(tenant.job, inside=False), *tenant.options,
                "--seconds", str(seconds + SETTLE_S + SPARE_S),
                "--out", str(root / str(i) / "progress.bin"),
                "--wait-file", str(root / str(i) / "begin"),
            ]  # fmt: skip
            output = stack.enter_context((root / str(i) / "output").open("w"))
            process = stack.enter_context(
                subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            )
            stack.callback(process.kill)
            started.append(process)
        wait_set_up(root, started)
        for ready in root.glob("*/begin.ready"):
            ready.with_name("begin").touch()
        for i, process in enumerate(started):
            try:
                status = process.wait(seconds + 120)
            except subprocess.TimeoutExpired as e:
                raise MachineError("a workload without Tidegate did not end") from e
            if status:
                last = (root / str(i) / "output").read_text(errors="replace").strip()[-200:]
                raise MachineError(f"a workload failed without Tidegate: {last}")
    for i in range(len(started)):
        text = (root / str(i) / "output").read_text(errors="replace")
        reports.append(WorkloadReport(root / str(i) / "progress.bin", text))
    _, step, tenants = measure_work(arm, reports, profiles, seconds, NATIVE_STEP_NS)
    shutil.rmtree(root, ignore_errors=True)
    kept = ("compute", "work_us", "waits", "busy_ns")
    return {"step_ns": step, "tenants": [{key: one[key] for key in kept} for one in tenants]}


def find_profiles(machine: Machine, arms: Mapping[str, Arm], seconds: float) -> dict[str, Profile]:
    """Run each kind of unit alone, outside any container."""
    profiles = {}
    for job in dict.fromkeys(t.job for arm in arms.values() for t in (*arm.tenants, *arm.visitors)):
        say(f"alone, without Tidegate: {job}")
        profiles[job] = run_solo(machine, job, seconds, longest_ns=LONGEST_NS)
    return profiles


def missing_requirement(machine: Machine) -> str | None:
    """Return what this machine lacks for arms with real programs, or None."""
    if machine.kind != "nvidia":
        return "a real GPU"
    return None if importlib.util.find_spec("torch") else "PyTorch"


def choose_arms(args: argparse.Namespace, machine: Machine) -> dict[str, list[str]]:
    """Return the arms to run, by the directory of their file; report those that cannot run."""
    names = [*(args.suite or []), *args.names] or list(SUITES)
    chosen: dict[str, list[str]] = {}
    lacks = missing_requirement(machine)
    for name in names:
        for arm in SUITES.get(name, (name,)):
            if ARMS[arm].real and lacks:
                say(f"{arm:16} left out: it needs {lacks}")
            else:
                chosen.setdefault(name if name in SUITES else "", []).append(arm)
    return chosen


def shorten(arm: Arm, args: argparse.Namespace) -> Arm:
    """Return the arm with the duration and number of events that the options request."""
    return replace(
        arm,
        seconds=args.seconds or arm.seconds,
        times=min(arm.times, args.times) if args.times else arm.times,
    )


def try_arm(
    node: BenchNode, name: str, arm: Arm, profiles: Mapping[str, Profile], args: argparse.Namespace
) -> dict[str, Any] | None:
    """Run an arm, also without Tidegate if requested; None if it could not be measured.

    Without a time limit, an arm that cannot be measured ends the whole run.
    """
    try:
        with time_limit(args.limit, name) if args.limit else contextlib.nullcontext():
            result = run_arm(node, arm, profiles)
            if args.native and arm.native:
                result["native"] = run_native(node.machine, arm, profiles)
    except (PartError, MachineError, ProgressError, TidegateError) as e:
        if not args.limit:
            raise
        say(f"{name:16} {type(e).__name__}: {e}")
        with time_limit(CLEANUP_S, "cleaning up after an arm"):
            node.clear()
        return None
    say(f"{name:16} {json.dumps(summarise(result))}")
    return result


def measure(
    args: argparse.Namespace, machine: Machine
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Run the arms; return the result of each suite, and the arms that could not be measured."""
    failed: list[str] = []
    chosen = choose_arms(args, machine)
    arms = {name: shorten(ARMS[name], args) for names in chosen.values() for name in names}
    results: dict[str, dict[str, Any]] = {suite: {"arms": {}} for suite in chosen}
    profiles = find_profiles(machine, arms, args.solo)
    for settings, names in group(arms):
        with BenchNode(machine, settings=settings, keep_machine=True) as node:
            gpu = name_gpu(node)
            generation = read_manifest((node.driver_dir / "current").resolve()).generation
            for name in names:
                measured = try_arm(node, name, arms[name], profiles, args)
                if measured is None:
                    failed.append(name)
                    continue
                for suite in (one for one, its in chosen.items() if name in its):
                    result = results[suite]
                    result |= {"gpu": asdict(gpu), "generation": generation, "suite": suite}
                    result["quantum_ms"] = Config(**settings).quantum_ms
                    result["arms"][name] = measured
                    write(args.output / suite, result)
    return results, failed


def group(arms: Mapping[str, Arm]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the arms grouped by the governor settings that they need, in order."""
    groups: dict[str, list[str]] = {}
    for name, arm in arms.items():
        groups.setdefault(json.dumps(dict(arm.settings), sort_keys=True), []).append(name)
    return [(json.loads(key), names) for key, names in groups.items()]


def write(output: Path, result: dict[str, Any]) -> None:
    """Save the results so far."""
    output.mkdir(parents=True, exist_ok=True)
    report = {**result, "run": describe_run()}
    report["summary"] = {name: summarise(arm) for name, arm in result["arms"].items()}
    (output / "quota.json").write_text(json.dumps(report, separators=(",", ":")) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run arms; return 0 if all could be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quota", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="SUITE|ARM", help="names that --list prints (default: all)"
    )
    parser.add_argument(
        "--suite", action="append", choices=SUITES, help="the same as SUITE without the option"
    )
    parser.add_argument("--list", action="store_true", help="print the suites and arms, and exit")
    parser.add_argument("--native", action="store_true", help="also run without Tidegate")
    parser.add_argument("--seconds", type=float, help="duration of each arm (default: its own)")
    parser.add_argument("--times", type=int, help="maximum number of events of each script")
    parser.add_argument(
        "--limit", type=float, default=0.0, metavar="SECONDS",
        help="time limit of each arm; an arm that exceeds it or fails does not stop the run",
    )  # fmt: skip
    parser.add_argument(
        "--solo", type=float, default=4.0, help="duration of each job's solo run (default: 4 s)"
    )
    parser.add_argument("--simulated", action="store_true", help="always use a simulated GPU")
    parser.add_argument("--output", type=Path, default=ROOT / "build/quota")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    args = parser.parse_args(argv)
    args.compile = False
    unknown = [name for name in args.names if name not in SUITES and name not in ARMS]
    if unknown:
        parser.error(f"{unknown[0]!r} is neither a suite nor an arm; --list prints them")
    if args.list:
        for suite, names in SUITES.items():
            print(f"{suite}: {' '.join(names)}")
        print("\n".join(ARMS))
        return 0
    args.output, args.build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    try:
        machine = find_machine(args, args.output, args.build)
        try:
            results, failed = measure(args, machine)
        finally:
            machine.close()
    except (MachineError, ProgressError, TidegateError, VdriverError) as e:
        print(f"quota: {e}", file=sys.stderr)
        return 1
    from bench.report_suites import draw  # imports this module

    for suite, result in results.items():
        say(f"{args.output / suite}/quota.json")
        if suite:
            summary = {name: summarise(arm) for name, arm in result["arms"].items()}
            picture = draw(suite, {**result, "raw": result, "summary": summary})
            (args.output / suite / "quota.svg").write_text(picture)
    if failed:
        print(f"quota: {len(failed)} arms were not measured: {' '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
