"""`python -m bench.quota [ARM ...]`: GPU time under quotas, in many arrangements.

Each arm runs containers side by side on one GPU, each with a burner that stamps its units of work
by the GPU's clock (bench/burner.c; the simulated GPU's own workload where there is no real one).
What a container did is told from its stamps and from what a unit takes alone; nothing of the
governor goes into it. Writes quota.json: each container's work in steps of 10 ms, what the governor
said of it, and the processor time of the governor and of the library's helper threads.

Without a name all arms run, in the order of `--list`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.demo import SETTLE_S, find_machine, name_gpu, run_solo, say
from bench.machine import ROOT, Machine, MachineError
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
from governor.errors import TidegateError
from vdriver.errors import VdriverError
from vdriver.manifest import read_manifest

SAMPLE_NS = 10 * NS_PER_MS
MEMORY = "1Gi"
COUNTERS = (
    "grants", "charged_ns", "lent_ns", "held_ns", "overdue", "launches", "waits", "busy_ns",
)  # fmt: skip
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Tenant:
    """A container of an arm: its shares in percent, and what it runs."""

    compute: int
    unit_us: int = 500
    limit: int | None = None
    """Percent that it may be lent up to; None: its guarantee, and no more."""
    gap_us: int = 0
    """It pauses so long behind each unit."""
    bursts: int = 0
    """It works and rests in turn, drawn from this seed: 0.2..2 s of work, 70 % of the time."""
    depth: int = 64
    """Units that it launches ahead."""

    @property
    def job(self) -> str:
        """The burner without pauses, whose units are the measure of this one's."""
        return f"burner-{self.unit_us}"

    @property
    def options(self) -> list[str]:
        """Its command line beyond the job's."""
        options = ["--depth", str(self.depth)]
        if self.gap_us:
            options += ["--gap-us", str(self.gap_us)]
        if self.bursts:
            options += ["--bursts", str(self.bursts)]
        return options


@dataclass(frozen=True)
class Arm:
    """Containers that run at the same time."""

    tenants: tuple[Tenant, ...]
    seconds: float = 12
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of the governor's configuration."""


def strict(*shares: int, unit_us: int = 500, seconds: float = 12) -> Arm:
    """Return an arm of saturating containers with these shares."""
    return Arm(tuple(Tenant(share, unit_us) for share in shares), seconds)


def _arms() -> dict[str, Arm]:
    arms = {
        "thirds": strict(45, 30, 15, seconds=20),
        "tight": strict(49, 32, 16, seconds=20),
        "crowd": strict(50, 10, 10, 10, 10),
        "four-50us": strict(25, 25, 25, 25, unit_us=50),
        "four-500us": strict(25, 25, 25, 25),
        "units-20ms": strict(45, 30, 15, unit_us=20_000, seconds=20),
        "elastic": Arm(
            tuple(Tenant(25, limit=100, bursts=seed) for seed in (1, 2, 3, 4)), seconds=30
        ),
        "bursts-strict": Arm(tuple(Tenant(25, bursts=seed) for seed in (1, 2, 3, 4)), seconds=30),
        "gaps": Arm((Tenant(50, 1000, gap_us=500), Tenant(50))),
        "gaps-30": Arm((Tenant(30, 1000, gap_us=500), Tenant(50))),
        "many": strict(*[3] * 32),
    }
    for share in range(10, 100, 10):
        arms[f"alone-{share}"] = strict(share, seconds=6)
    for unit_us in (50, 5000, 20_000, 50_000):
        arms[f"shape-{unit_us}us"] = Arm((Tenant(30, unit_us), Tenant(70)), seconds=12)
    return arms


ARMS = _arms()


def lay_profiles(profiles: Mapping[str, Profile], job: str) -> Profile:
    """Return what a unit of a job takes alone; MachineError when it was not measured."""
    try:
        return profiles[job]
    except KeyError:
        raise MachineError(f"{job} was not run alone") from None


def processor_time(pid: int, thread: str | None = None) -> float:
    """Return the seconds of processor time of a process, or of its threads of that name."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            name = (task / "comm").read_text().strip()
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if thread is None or name == thread:
            total += int(fields[11]) + int(fields[12])
    return total * TICK_S


def children(pid: int) -> list[int]:
    """Return a process and all that came of it."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*"):
            try:
                found += [int(child) for child in (task / "children").read_text().split()]
            except OSError:
                continue
    return found


class Clock:
    """Processor time of the governor and of the helpers of all containers."""

    def __init__(self, node: Node, containers: Sequence[Running]) -> None:
        self.governor = node.governor_pid
        self.tenants = [pid for one in containers for pid in children(one.seen.get("pid", 0))]

    def read(self) -> dict[str, float]:
        """Return seconds so far."""
        return {
            "governor": processor_time(self.governor),
            "helpers": sum(processor_time(pid, "tidegate") for pid in self.tenants),
        }


def start_all(node: Node, arm: Arm) -> list[Running]:
    """Start the containers of an arm, and let them begin together."""
    containers = []
    for tenant in arm.tenants:
        arguments = [
            *node.machine.command(tenant.job, inside=True),
            *tenant.options,
            "--seconds", str(arm.seconds + SETTLE_S + 1),
            "--out", "/out/progress.bin",
            "--wait-file", "/out/begin",
        ]  # fmt: skip
        limit = tenant.compute if tenant.limit is None else tenant.limit
        annotations = {
            "compute": str(tenant.compute), "compute-limit": str(limit), "memory": MEMORY,
        }  # fmt: skip
        containers.append(node.start(f"{next(_names)}", arguments, annotations))
    node.wait_ready([c.out / "begin.ready" for c in containers], 240)
    node.look()
    for container in containers:
        (container.out / "begin").touch()
    return containers


_names = (f"t{i}" for i in itertools.count())


def spans_of(stamps: Sequence[Stamp], bursts: Sequence[Sequence[int]], unit_ns: float) -> list[Any]:
    """Return when a container had work to do, by the units that its bursts began and ended with."""
    spans = []
    for first, last in bursts:
        if first <= last < len(stamps):
            begin = stamps[first - 1].time if first else stamps[0].time - int(unit_ns)
            spans.append([max(begin, stamps[first].time - int(4 * unit_ns)), stamps[last].time])
    return spans


def run_arm(node: Node, arm: Arm, profiles: Mapping[str, Profile]) -> dict[str, Any]:
    """Run one arm and return what each container did."""
    containers = start_all(node, arm)
    time.sleep(SETTLE_S)
    node.look()
    before = {one.name: one.seen for one in containers}
    clock = Clock(node, containers)
    began, processors = time.monotonic(), clock.read()
    time.sleep(arm.seconds)
    passed = time.monotonic() - began
    processors = {key: (value - processors[key]) / passed for key, value in clock.read().items()}
    node.look()
    after = {one.name: one.seen for one in containers}
    runs, told = [], []
    for container, tenant in zip(containers, arm.tenants, strict=True):
        if node.wait(container, 120):
            raise MachineError(f"a container failed: {container.output.strip()[-200:]}")
        stamps = read_stamps(container.out / "progress.bin")
        profile = lay_profiles(profiles, tenant.job)
        runs.append(Progress(stamps, profile))
        bursts = last_json(container.output).get("bursts", [])
        told.append(spans_of(stamps, bursts, profile.largest[1]))
        node.running.remove(container)
        shutil.rmtree(container.bundle, ignore_errors=True)
    begin = max(run.begin for run in runs) + int(SETTLE_S * NS_PER_S)
    end = min(run.end for run in runs)
    end = begin + (min(end - begin, int(arm.seconds * NS_PER_S)) // SAMPLE_NS) * SAMPLE_NS
    return {
        "seconds": arm.seconds,
        "settings": dict(arm.settings),
        "processors": {key: round(value, 5) for key, value in processors.items()},
        "step_ns": SAMPLE_NS,
        "tenants": [
            {
                **asdict(tenant),
                "unit_ns": round(profiles[tenant.job].largest[1]),
                "work_us": work(run, begin, end),
                "busy_ns": within(spans, begin, end),
                "governor": difference(before[one.name], after[one.name]),
            }
            for one, tenant, run, spans in zip(containers, arm.tenants, runs, told, strict=True)
        ],
    }  # fmt: skip


def within(spans: Sequence[Sequence[int]], begin: int, end: int) -> list[list[int]]:
    """Return the spans as far as they are between two times, counted from the first."""
    return [[max(a, begin) - begin, min(b, end) - begin] for a, b in spans if b > begin and a < end]


def work(run: Progress, begin: int, end: int) -> list[int]:
    """Return the work done in each step, microseconds alone; the rounding is carried."""
    edges = [round(run.at(at) / 1000) for at in range(begin, end + 1, SAMPLE_NS)]
    return [after - before for before, after in itertools.pairwise(edges)]


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Return what the governor counted of a container in between, on its first GPU."""
    if not before or not after:
        return {}
    one, two = before["devices"][0], after["devices"][0]
    names = (
        "grants",
        "charged_ns",
        "lent_ns",
        "held_ns",
        "overdue",
        "launches",
        "waits",
        "busy_ns",
    )
    return {name: two[name] - one[name] for name in names}


def windows(work_us: Sequence[int], width_ns: int) -> list[float]:
    """Return the shares, in percent of the GPU, in windows of that width."""
    per = width_ns // SAMPLE_NS
    return [
        sum(work_us[i : i + per]) * 1e5 / width_ns for i in range(0, len(work_us) - per + 1, per)
    ]


def summarise(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return an arm's figures, percent of the GPU and points, from its raw data alone."""
    delivered = [
        statistics.fmean(one["work_us"]) * 1e5 / SAMPLE_NS if one["work_us"] else 0.0
        for one in arm["tenants"]
    ]
    summary: dict[str, Any] = {
        "delivered": [round(one, 2) for one in delivered],
        "sum": round(sum(delivered), 2),
    }
    for label, width in (("1s", NS_PER_S), ("100ms", 100 * NS_PER_MS)):
        errors = [
            abs(share - one["compute"])
            for one in arm["tenants"]
            for share in windows(one["work_us"], width)
        ]
        if errors:
            errors.sort()
            summary[label] = {
                "mean": round(statistics.fmean(errors), 3),
                "p95": round(errors[min(len(errors) - 1, int(0.95 * len(errors)))], 3),
            }
    if any(one["busy_ns"] for one in arm["tenants"]):
        summary |= elasticity(arm)
    return summary


def elasticity(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return how much of the time in which somebody had work was used, and who was kept short."""
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


def find_profiles(machine: Machine, arms: Mapping[str, Arm]) -> dict[str, Profile]:
    """Run each kind of unit alone, outside of any container."""
    profiles = {}
    for job in dict.fromkeys(t.job for arm in arms.values() for t in arm.tenants):
        say(f"alone, without Tidegate: {job}")
        profiles[job] = run_solo(machine, job, 4.0, longest_ns=100 * NS_PER_MS)
    return profiles


def measure(args: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """Run the arms."""
    arms = {name: ARMS[name] for name in args.arms or ARMS}
    result: dict[str, Any] = {"arms": {}}
    profiles = find_profiles(machine, arms)
    for settings, names in group(arms):
        with Node(machine, settings=settings, keep_machine=True) as node:
            gpu = name_gpu(node)
            result["gpu"] = asdict(gpu)
            result["generation"] = read_manifest((node.driver_dir / "current").resolve()).generation
            for name in names:
                result["arms"][name] = run_arm(node, arms[name], profiles)
                say(f"{name:16} {json.dumps(summarise(result['arms'][name]))}")
                write(args.output, result)
    return result


def group(arms: Mapping[str, Arm]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the arms by the governor's settings that they need, in order."""
    groups: dict[str, list[str]] = {}
    for name, arm in arms.items():
        groups.setdefault(json.dumps(dict(arm.settings), sort_keys=True), []).append(name)
    return [(json.loads(key), names) for key, names in groups.items()]


def write(output: Path, result: dict[str, Any]) -> None:
    """Keep what there is so far."""
    report = {**result, "run": describe_run()}
    report["summary"] = {name: summarise(arm) for name, arm in result["arms"].items()}
    (output / "quota.json").write_text(json.dumps(report, separators=(",", ":")) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run arms; the status is 0 when all could be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quota", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("arms", nargs="*", metavar="ARM", choices=[*ARMS, []])
    parser.add_argument("--list", action="store_true", help="name the arms, and end")
    parser.add_argument("--simulated", action="store_true", help="even where there is a real GPU")
    parser.add_argument("--output", type=Path, default=ROOT / "build/quota")
    parser.add_argument("--build", type=Path, default=ROOT / "build/meson")
    args = parser.parse_args(argv)
    args.compile = False
    if args.list:
        print("\n".join(ARMS))
        return 0
    args.output, args.build = args.output.resolve(), args.build.resolve()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    try:
        machine = find_machine(args, args.output, args.build)
        try:
            measure(args, machine)
        finally:
            machine.close()
    except (MachineError, ProgressError, TidegateError, VdriverError) as e:
        print(f"quota: {e}", file=sys.stderr)
        return 1
    say(f"{args.output}/quota.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
