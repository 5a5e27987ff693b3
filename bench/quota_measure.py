"""Computes the work of each container in an arm, and the arm's figures.

An arm is one experiment in `bench.quota` (`bench.arms`). Work is computed from the timestamps with
which a container's program records the end of each unit of its work.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.arms import Arm
from bench.demo import SETTLE_S
from bench.events import SAMPLE_NS, summarise_events
from bench.machine import MachineError
from bench.node import BenchNode, Running, last_json
from bench.progress import (
    NS_PER_MS,
    NS_PER_S,
    Profile,
    Progress,
    Stamp,
    read_stamps,
)

WAIT_NS = 500_000
"""Shortest wait that counts, in ns: shorter ones are context switches and variations in the
duration of units."""

LONGEST_NS = 3000 * NS_PER_MS
"""Maximum time that a unit may take alone, in ns."""

COUNTERS = (
    "grants", "charged_ns", "lent_ns", "held_ns", "overdue", "launches", "waits", "busy_ns",
)  # fmt: skip
"""The governor's counters for a container that are kept with its work."""


def profile_of(profiles: Mapping[str, Profile], job: str) -> Profile:
    """Return a job's profile; raise MachineError if the job was not measured alone."""
    try:
        return profiles[job]
    except KeyError:
        raise MachineError(f"{job} was not run alone") from None


def spans_of(stamps: Sequence[Stamp], bursts: Sequence[Sequence[int]], unit_ns: float) -> list[Any]:
    """Return when a container had work, in ns, from the first and last units of its bursts."""
    spans = []
    for first, last in bursts:
        if first <= last < len(stamps):
            begin = stamps[first - 1].time if first else stamps[0].time - int(unit_ns)
            spans.append([max(begin, stamps[first].time - int(4 * unit_ns)), stamps[last].time])
    return spans


class WorkloadReport:
    """A workload's report: its stamps, and the values in its last line."""

    def __init__(self, path: Path, output: str) -> None:
        answer = last_json(output)
        # One file per process in a container (bench/processes.h).
        paths = [path, *sorted(path.parent.glob(f"{path.name}.*"))]
        self.stamps = tuple(sorted(stamp for one in paths for stamp in read_stamps(one)))
        self.bursts = answer.get("bursts", [])
        # 0 on the simulated GPU, which uses this machine's clock.
        self.ahead_ns = int(answer.get("clock_ns", 0))


def wait_for_end(node: BenchNode, containers: Sequence[Running]) -> list[WorkloadReport]:
    """Wait until containers have exited on their own, and return their reports."""
    for container in containers:
        if node.wait(container, 120):
            raise MachineError(f"a container failed: {container.output.strip()[-200:]}")
        node.running.remove(container)
    return [WorkloadReport(one.out / "progress.bin", one.output) for one in containers]


def measure_work(
    arm: Arm,
    reports: Sequence[WorkloadReport],
    profiles: Mapping[str, Profile],
    seconds: float,
    step_ns: int,
) -> tuple[int, int, list[dict[str, Any]]]:
    """Return the samples' start and step in ns, and the work of each container in each step."""
    used = [profile_of(profiles, tenant.job) for tenant in arm.tenants]
    runs = [Progress(one.stamps, profile) for one, profile in zip(reports, used, strict=True)]
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
        for tenant, profile, run, one in zip(arm.tenants, used, runs, reports, strict=True)
    ]
    return begin, step_ns, tenants


def waits(
    stamps: Sequence[Stamp], profile: Profile, begin: int, end: int
) -> dict[str, float | int]:
    """Return how long a program that always has work waited for the GPU.

    A wait is the time between the ends of two units, less the time that the later one takes alone;
    only waits of WAIT_NS or more count.
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
    """Return the work in each step, as the time in us that it takes alone.

    Rounding errors do not accumulate.
    """
    edges = [round(run.at(at) / 1000) for at in range(begin, end + 1, step_ns)]
    return [after - before for before, after in itertools.pairwise(edges)]


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Return the change of a container's governor counters on its first GPU between two samples."""
    if not before or not after:
        return {}
    one, two = before["devices"][0], after["devices"][0]
    return {name: two[name] - one[name] for name in COUNTERS}


def windows(work_us: Sequence[int], width_ns: int) -> list[float]:
    """Return the shares in windows of `width_ns`, as percentages of the GPU."""
    per = width_ns // SAMPLE_NS
    return [
        sum(work_us[i : i + per]) * 1e5 / width_ns for i in range(0, len(work_us) - per + 1, per)
    ]


def delivered(tenants: Sequence[Mapping[str, Any]], step_ns: int) -> list[float]:
    """Return the work of each container, as a percentage of the GPU."""
    return [
        statistics.fmean(one["work_us"]) * 1e5 / step_ns if one["work_us"] else 0.0
        for one in tenants
    ]


def summarise(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return an arm's figures, in percentages of the GPU and points, from its raw data alone."""
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
        # If quotas change, an error over the whole run has no meaning.
        if errors and not arm.get("events"):
            errors.sort()
            summary[label] = {
                "mean": round(statistics.fmean(errors), 3),
                "p95": round(errors[min(len(errors) - 1, int(0.95 * len(errors)))], 3),
            }
    # Results from earlier runs have no waits.
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
    """Return the fraction of the time with work that was used, and the number of short windows.

    The time with work is that in which any container had work. A short window is a second in which
    a container with work got more than a point less than its guarantee.
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
