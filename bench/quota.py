"""`python -m bench.quota [SUITE|ARM ...]`: GPU time under quotas, in many arrangements.

Each arm (bench/arms.py) runs containers side by side on one GPU. Each container runs a burner that
stamps its units of work with the GPU's clock (bench/burner.c; on a simulated GPU, its own
workload). What a container did is computed from its stamps and from what a unit takes alone; no
figure of the governor is used. Writes quota.json: each container's work in steps of 10 ms, what the
governor reported of it, and the processor time of the governor and of the library's helper threads;
for a suite also quota.svg. With --native each arm runs a second time without Tidegate, where that
is meaningful.

A suite is a series of arms with a file of its own, SUITE/quota.json. Without a name all suites run.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.arms import ARMS, OWN_DRIVER, SUITES, Arm, Tenant
from bench.demo import SETTLE_S, find_machine, name_gpu, run_solo, say
from bench.events import SAMPLE_NS, SCRIPTS, Event, pid_of, place_events, summarise_events
from bench.limits import PartError, time_limit
from bench.machine import ROOT, Machine, MachineError, wait_set_up
from bench.node import Node, Running, last_json
from bench.progress import (
    NS_PER_MS,
    NS_PER_S,
    Profile,
    Progress,
    ProgressError,
    Stamp,
    read_stamps,
)
from bench.provenance import describe_run
from governor.config import Config
from governor.daemon import origin_of
from governor.errors import TidegateError
from vdriver.errors import VdriverError
from vdriver.manifest import read_manifest

NATIVE_STEP_NS = 100 * NS_PER_MS
NATIVE_S = 4.0
"""Maximum duration of an arm without Tidegate, seconds: only a sum is compared, and no windows."""

LEAST_S = 40.0
"""Time limit for ending what an arm has left, seconds."""
WAIT_NS = 500_000
"""Shortest wait that counts, ns: shorter ones are context switches and variations of the units."""
LONGEST_NS = 3000 * NS_PER_MS
"""Maximum time that a unit may take alone, ns."""

SPARE_S = 1.0
"""Time that a container works beyond the measurement, seconds: containers start with some delay."""

FOREVER_S = 600.0
"""Duration that is passed to a container which a script ends, seconds."""

COUNTERS = (
    "grants", "charged_ns", "lent_ns", "held_ns", "overdue", "launches", "waits", "busy_ns",
)  # fmt: skip
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def lay_profiles(profiles: Mapping[str, Profile], job: str) -> Profile:
    """Return what a unit of a job takes alone; raises MachineError if it was not measured."""
    try:
        return profiles[job]
    except KeyError:
        raise MachineError(f"{job} was not run alone") from None


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


def children(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*"):
            try:
                found += [int(child) for child in (task / "children").read_text().split()]
            except OSError:
                continue
    return found


class Clock:
    """Processor time of the governor and of the helper threads in all containers."""

    def __init__(self, node: Node, containers: Sequence[Running]) -> None:
        self.governor = node.governor_pid
        self.tenants = [pid for one in containers for pid in children(one.seen.get("pid", 0))]

    def read(self) -> dict[str, float]:
        """Return the seconds so far."""
        return {
            "governor": processor_time(self.governor),
            "helpers": sum(processor_time(pid, "tidegate") for pid in self.tenants),
        }

    def read_threads(self) -> dict[str, float]:
        """Return the seconds so far of the governor's threads, by name."""
        return processor_times(self.governor)


def give_own_driver(node: Node) -> None:
    """Put a copy of the driver's own libcuda into the containers that are started from now on."""
    copy = node.work / OWN_DRIVER
    if copy not in node.machine.programs:
        shutil.copy(origin_of(str(node.driver_dir), "libcuda"), copy)
        node.machine.programs.append(copy)


def start_one(node: Node, tenant: Tenant, seconds: float) -> Running:
    """Start a container that sets up and then waits for the signal to begin."""
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
        **({"class": "latency"} if tenant.latency else {}),
    }  # fmt: skip
    return node.start(f"{next(_names)}", arguments, annotations)


def start_all(node: Node, tenants: Sequence[Tenant], seconds: float) -> list[Running]:
    """Start containers, and make them begin together."""
    containers = [start_one(node, tenant, seconds) for tenant in tenants]
    node.wait_ready([c.out / "begin.ready" for c in containers], 240)
    node.look()
    for container in containers:
        (container.out / "begin").touch()
    return containers


_names = (f"t{i}" for i in itertools.count())


def spans_of(stamps: Sequence[Stamp], bursts: Sequence[Sequence[int]], unit_ns: float) -> list[Any]:
    """Return when a container had work, from the first and last units of its bursts."""
    spans = []
    for first, last in bursts:
        if first <= last < len(stamps):
            begin = stamps[first - 1].time if first else stamps[0].time - int(unit_ns)
            spans.append([max(begin, stamps[first].time - int(4 * unit_ns)), stamps[last].time])
    return spans


def run_arm(node: Node, arm: Arm, profiles: Mapping[str, Profile]) -> dict[str, Any]:
    """Run one arm, and return what each container did."""
    visitors: dict[str, Running] = {}
    if any(tenant.goes_around for tenant in arm.tenants):
        give_own_driver(node)

    def start(tenant: Tenant, seconds: float) -> Running:
        visitor = start_one(node, tenant, seconds)
        visitors[visitor.name] = visitor
        return visitor

    seconds = FOREVER_S if arm.script else arm.seconds + SETTLE_S + SPARE_S
    containers = start_all(node, arm.tenants, seconds)
    time.sleep(SETTLE_S)
    node.look()
    before = {one.name: one.seen for one in containers}
    clock = Clock(node, containers)
    began, processors, threads = time.monotonic(), clock.read(), clock.read_threads()
    events: list[Event] = []
    if arm.script:
        events = SCRIPTS[arm.script](node, arm, containers, start)
    else:
        time.sleep(arm.seconds)
    passed = time.monotonic() - began
    processors = {key: (value - processors[key]) / passed for key, value in clock.read().items()}
    threads = {
        name: (value - threads.get(name, 0.0)) / passed
        for name, value in clock.read_threads().items()
    }
    node.look()
    node.check_scheduling()
    after = {one.name: one.seen for one in containers}
    if arm.script:
        for one in containers:
            os.kill(pid_of(node, one), signal.SIGTERM)
    told = wait_for_end(node, containers)
    begin, step, tenants = measure_work(arm, told, profiles, passed, SAMPLE_NS)
    for tenant, container in zip(tenants, containers, strict=True):
        tenant["governor"] = difference(before[container.name], after[container.name])
    result = {
        "seconds": round(passed, 3) if arm.script else arm.seconds,
        "settings": dict(arm.settings),
        "processors": {key: round(value, 5) for key, value in processors.items()},
        "governor_threads": {key: round(value, 5) for key, value in threads.items()},
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
                ahead_ns=told[0].ahead_ns,
                stamps=told[0].stamps,
                begin=begin,
                last_of=lambda name: read_stamps(visitors[name].out / "progress.bin")[-1].time,
            ),
        }
    for container in (*containers, *visitors.values()):
        node.machine.remove_bundle(container.bundle)
    return result


class Told:
    """What a workload reported: its stamps and its last line."""

    def __init__(self, path: Path, output: str) -> None:
        answer = last_json(output)
        # One file per process of a container (bench/processes.h).
        paths = [path, *sorted(path.parent.glob(f"{path.name}.*"))]
        self.stamps = tuple(sorted(stamp for one in paths for stamp in read_stamps(one)))
        self.bursts = answer.get("bursts", [])
        # The simulated GPU's clock is that of this machine.
        self.ahead_ns = int(answer.get("clock_ns", 0))


def wait_for_end(node: Node, containers: Sequence[Running]) -> list[Told]:
    """Wait until containers have ended by themselves, and return what they reported."""
    for container in containers:
        if node.wait(container, 120):
            raise MachineError(f"a container failed: {container.output.strip()[-200:]}")
        node.running.remove(container)
    return [Told(one.out / "progress.bin", one.output) for one in containers]


def measure_work(
    arm: Arm,
    told: Sequence[Told],
    profiles: Mapping[str, Profile],
    seconds: float,
    step_ns: int,
) -> tuple[int, int, list[dict[str, Any]]]:
    """Return the start of the samples, their step, and what each container did in each step."""
    used = [lay_profiles(profiles, tenant.job) for tenant in arm.tenants]
    runs = [Progress(one.stamps, profile) for one, profile in zip(told, used, strict=True)]
    begin = max(run.begin for run in runs) + int(SETTLE_S * NS_PER_S)
    end = min(run.end for run in runs)
    end = begin + (min(end - begin, int(seconds * NS_PER_S)) // step_ns) * step_ns
    tenants = [
        {
            **asdict(tenant),
            "unit_ns": round(profile.largest[1]),
            "work_us": work(run, begin, end, step_ns),
            "waits": waits(one.stamps, profile, begin, end) if tenant.is_endless else None,
            "busy_ns": within(spans_of(one.stamps, one.bursts, profile.largest[1]), begin, end),
        }
        for tenant, profile, run, one in zip(arm.tenants, used, runs, told, strict=True)
    ]
    return begin, step_ns, tenants


def run_native(machine: Machine, arm: Arm, profiles: Mapping[str, Profile]) -> dict[str, Any]:
    """Run the same work without Tidegate, where the GPU's own time slicing shares it."""
    seconds = min(arm.seconds, NATIVE_S)
    root = machine.work / "native"
    shutil.rmtree(root, ignore_errors=True)
    environment = {**os.environ, **machine.environment}
    told = []
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
            if process.wait(seconds + 120):
                last = (root / str(i) / "output").read_text(errors="replace").strip()[-200:]
                raise MachineError(f"a workload failed without Tidegate: {last}")
    for i in range(len(started)):
        text = (root / str(i) / "output").read_text(errors="replace")
        told.append(Told(root / str(i) / "progress.bin", text))
    _, step, tenants = measure_work(arm, told, profiles, seconds, NATIVE_STEP_NS)
    shutil.rmtree(root, ignore_errors=True)
    kept = ("compute", "work_us", "waits", "busy_ns")
    return {"step_ns": step, "tenants": [{key: one[key] for key in kept} for one in tenants]}


def waits(
    stamps: Sequence[Stamp], profile: Profile, begin: int, end: int
) -> dict[str, float | int]:
    """Return how long the GPU did not work for a program that always has work.

    Such a wait is the time between two ends of units, less what the later unit takes alone, if it
    is WAIT_NS or more.
    """
    found = sorted(
        after.time - before.time - profile.duration(after.kind)
        for before, after in itertools.pairwise(stamps)
        if begin <= before.time and after.time <= end
    )
    found = found[bisect.bisect_left(found, WAIT_NS) :]

    def percentile(n: int) -> int:
        return round(found[max(0, -(-n * len(found) // 100) - 1)] / 1000) if found else 0

    names = {"p50_us": 50, "p99_us": 99, "most_us": 100}
    return {"n": len(found), **{name: percentile(n) for name, n in names.items()}}


def within(spans: Sequence[Sequence[int]], begin: int, end: int) -> list[list[int]]:
    """Return the spans clipped to `begin` and `end`, relative to `begin`."""
    return [[max(a, begin) - begin, min(b, end) - begin] for a, b in spans if b > begin and a < end]


def work(run: Progress, begin: int, end: int, step_ns: int = SAMPLE_NS) -> list[int]:
    """Return the work done in each step, in microseconds alone; rounding is carried over."""
    edges = [round(run.at(at) / 1000) for at in range(begin, end + 1, step_ns)]
    return [after - before for before, after in itertools.pairwise(edges)]


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Return the change of a container's governor counters on its first GPU between two samples."""
    if not before or not after:
        return {}
    one, two = before["devices"][0], after["devices"][0]
    return {name: two[name] - one[name] for name in COUNTERS}


def windows(work_us: Sequence[int], width_ns: int) -> list[float]:
    """Return the shares in windows of `width_ns`, in percent of the GPU."""
    per = width_ns // SAMPLE_NS
    return [
        sum(work_us[i : i + per]) * 1e5 / width_ns for i in range(0, len(work_us) - per + 1, per)
    ]


def delivered(tenants: Sequence[Mapping[str, Any]], step_ns: int) -> list[float]:
    """Return the work of each container, in percent of the GPU."""
    return [
        statistics.fmean(one["work_us"]) * 1e5 / step_ns if one["work_us"] else 0.0
        for one in tenants
    ]


def summarise(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return an arm's figures, in percent of the GPU and points, from its raw data alone."""
    shares = delivered(arm["tenants"], SAMPLE_NS)
    summary: dict[str, Any] = {
        "delivered": [round(one, 2) for one in shares],
        "sum": round(sum(shares), 2),
    }
    for label, width in (("1s", NS_PER_S), ("100ms", 100 * NS_PER_MS)):
        errors = [
            abs(share - one["compute"])
            for one in arm["tenants"]
            for share in windows(one["work_us"], width)
        ]
        # If quotas change, there is no error for the whole.
        if errors and not arm.get("events"):
            errors.sort()
            summary[label] = {
                "mean": round(statistics.fmean(errors), 3),
                "p95": round(errors[min(len(errors) - 1, int(0.95 * len(errors)))], 3),
            }
    # Results of earlier runs lack it.
    waited = [one.get("waits") for one in arm["tenants"]]
    if any(waited):
        summary["wait_p99_ms"] = [one and round(one["p99_us"] / 1000, 2) for one in waited]
    if any(one["busy_ns"] for one in arm["tenants"]):
        summary |= elasticity(arm)
    if arm.get("events"):
        summary |= summarise_events(arm)
    if "native" in arm:
        native = delivered(arm["native"]["tenants"], arm["native"]["step_ns"])
        summary["native"] = {
            "delivered": [round(one, 2) for one in native],
            "sum": round(sum(native), 2),
        }
    return summary


def elasticity(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return how much of the time with work was used, and the windows that were short.

    The former is a fraction of the time in which any container had work. A short window is a second
    in which a container with work got less than its guarantee by more than a point.
    """
    edges = sorted(
        (at, change)
        for one in arm["tenants"]
        for begin, end in one["busy_ns"]
        for at, change in ((begin, 1), (end, -1))
    )
    ideal = at = n = 0
    for edge, change in edges:
        ideal += edge - at if n else 0
        at, n = edge, n + change
    done = sum(sum(one["work_us"]) for one in arm["tenants"]) * 1000
    short = 0
    per = NS_PER_S // SAMPLE_NS
    for one in arm["tenants"]:
        for begin, end in one["busy_ns"]:
            first, last = -(-begin // SAMPLE_NS), end // SAMPLE_NS
            for i in range(first, last - per + 1, per):
                short += sum(one["work_us"][i : i + per]) / 1e4 < one["compute"] - 1
    return {"of_ideal": round(done / ideal, 4) if ideal else None, "short_windows": short}


def find_profiles(machine: Machine, arms: Mapping[str, Arm], seconds: float) -> dict[str, Profile]:
    """Run each kind of unit alone, outside any container."""
    profiles = {}
    for job in dict.fromkeys(t.job for arm in arms.values() for t in (*arm.tenants, *arm.visitors)):
        say(f"alone, without Tidegate: {job}")
        profiles[job] = run_solo(machine, job, seconds, longest_ns=LONGEST_NS)
    return profiles


def what_lacks(machine: Machine) -> str | None:
    """Return what arms of real programs lack on this machine, or None."""
    if machine.kind != "nvidia":
        return "a real GPU"
    return None if importlib.util.find_spec("torch") else "PyTorch"


def choose_arms(args: argparse.Namespace, machine: Machine) -> dict[str, list[str]]:
    """Return the arms to run, by the directory of their file; report those that cannot run."""
    names = [*(args.suite or []), *args.names] or list(SUITES)
    chosen: dict[str, list[str]] = {}
    lacks = what_lacks(machine)
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
    node: Node, name: str, arm: Arm, profiles: Mapping[str, Profile], args: argparse.Namespace
) -> dict[str, Any] | None:
    """Run an arm, also without Tidegate if requested; None if it could not be measured.

    Without a time limit, an arm that cannot be measured ends the whole run.
    """
    try:
        with time_limit(args.limit, name) if args.limit else contextlib.nullcontext():
            told = run_arm(node, arm, profiles)
            if args.native and arm.native:
                told["native"] = run_native(node.machine, arm, profiles)
    except (PartError, MachineError, ProgressError, TidegateError) as e:
        if not args.limit:
            raise
        say(f"{name:16} {type(e).__name__}: {e}")
        with time_limit(LEAST_S, "the end of an arm"):
            node.clear()
        return None
    say(f"{name:16} {json.dumps(summarise(told))}")
    return told


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
        with Node(machine, settings=settings, keep_machine=True) as node:
            gpu = name_gpu(node)
            generation = read_manifest((node.driver_dir / "current").resolve()).generation
            for name in names:
                told = try_arm(node, name, arms[name], profiles, args)
                if told is None:
                    failed.append(name)
                    continue
                for suite in (one for one, its in chosen.items() if name in its):
                    result = results[suite]
                    result |= {"gpu": asdict(gpu), "generation": generation, "suite": suite}
                    result["quantum_ms"] = Config(**settings).quantum_ms
                    result["arms"][name] = told
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
    """Run arms; the status is 0 if all could be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quota", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="SUITE|ARM", help="those that --list names; all, without any"
    )
    parser.add_argument("--suite", action="append", choices=SUITES, help="the same as its name")
    parser.add_argument("--list", action="store_true", help="name the suites and arms, and end")
    parser.add_argument("--native", action="store_true", help="also without Tidegate")
    parser.add_argument("--seconds", type=float, help="how long each arm runs (its own time)")
    parser.add_argument("--times", type=int, help="events of each script, at most")
    parser.add_argument(
        "--limit", type=float, default=0.0, metavar="SECONDS",
        help="of each arm: one that takes longer, or fails, does not end the others",
    )  # fmt: skip
    parser.add_argument("--solo", type=float, default=4.0, help="seconds of each job alone (4)")
    parser.add_argument("--simulated", action="store_true", help="even where there is a real GPU")
    parser.add_argument("--output", type=Path, default=ROOT / "build/quota")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    args = parser.parse_args(argv)
    args.compile = False
    unknown = [name for name in args.names if name not in SUITES and name not in ARMS]
    if unknown:
        parser.error(f"{unknown[0]!r} is neither a suite nor an arm; --list names them")
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
