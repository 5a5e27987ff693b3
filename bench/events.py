"""Runs the scripts of `bench.quota`'s experiments, and computes the effects of their events.

A script is a sequence of events: it changes quotas, starts and ends a neighbour, or kills or stops
a container, and records the time of each event on this machine's clock. The effect is computed from
the timestamps that the remaining containers record on the GPU's clock; `clock_ns` in the burner's
last line is how far the GPU's clock is ahead of this machine's.

Times are in nanoseconds; shares are percentages of the GPU.
"""

from __future__ import annotations

import bisect
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.arms import Arm, ArmContainer
from bench.node import BenchNode, Running
from bench.progress import NS_PER_MS, NS_PER_S, Stamp
from governor.client import ask

SAMPLE_NS = 10 * NS_PER_MS
WINDOW_NS = 100 * NS_PER_MS
TOLERANCE = 3.0
"""Distance from the new share within which a container counts as settled, in points."""

HOLD_NS = NS_PER_S // 2
"""Time for which the container has to stay within that distance, in ns."""

SOON_NS = 200 * NS_PER_MS
"""Time within which a change should be over, in ns."""

BEFORE_NS, AFTER_NS = 50 * NS_PER_MS, 300 * NS_PER_MS
"""Range of the observed container's timestamps that is kept around each kill or stop, in ns."""

PHASE_S = 1.5
"""Duration of each phase with one quota, or with or without a neighbour, in seconds."""

Event = dict[str, Any]
Start = Callable[[ArmContainer, float], Running]


def now() -> int:
    """Return the time on this machine's clock."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


# ---- figures ----


def settled_after(
    work_us: Sequence[int],
    changed_ns: int,
    share: float,
    until_ns: int,
    hold_ns: int = HOLD_NS,
) -> int | None:
    """Return the time in ns from a change until work in the trailing 100 ms is near a share.

    It has to stay within 3 points of the share for `hold_ns`. Return None if that does not happen
    by `until_ns`. `work_us` is in steps of 10 ms.
    """
    need = hold_ns // SAMPLE_NS
    good = 0
    for end, done in trailing(work_us, changed_ns, until_ns):
        good = good + 1 if abs(done - share) <= TOLERANCE else 0
        if good > need:
            return max(0, (end - need) * SAMPLE_NS - changed_ns)
    return None


def trailing(work_us: Sequence[int], from_ns: int, until_ns: int) -> Iterator[tuple[int, float]]:
    """Yield, for each step between two times, its end and the share of the 100 ms before that."""
    per = WINDOW_NS // SAMPLE_NS
    sums = list(itertools.accumulate(work_us, initial=0))
    last = min(len(work_us), until_ns // SAMPLE_NS)
    for end in range(max(per, -(-from_ns // SAMPLE_NS)), last + 1):
        yield end, (sums[end] - sums[end - per]) * 1e5 / WINDOW_NS


def settle_times(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the time until each change of an arm had settled, in ms, and the longest of these.

    `reached` is the time until the new share was reached for the first time. A window of 100 ms
    contains so few grants that it can be more than 3 points off again without a change.
    `outside_percent` is the percentage of later windows that were more than 3 points off. `off` is
    the distance from the new share over the half second that begins 200 ms after the change, in
    points.
    """
    took: list[float | None] = []
    reached: list[float | None] = []
    off: list[float | None] = []
    later: list[bool] = []
    for event in arm["events"]:
        work_us = arm["tenants"][event["tenant"]]["work_us"]
        share, at, until = event["share"], event["at_ns"], event["until_ns"]
        after = settled_after(work_us, at, share, until)
        took.append(_ms(after))
        reached.append(_ms(settled_after(work_us, at, share, until, 0)))
        off.append(off_after(work_us, at + SOON_NS, share))
        if after is not None:
            windows = trailing(work_us, at + after, until)
            later += [abs(done - share) > TOLERANCE for _, done in windows]
    return {
        "ms": took,
        "longest_ms": _longest(took),
        "reached_ms": reached,
        "reached_longest_ms": _longest(reached),
        "off_points": off,
        "outside_percent": round(100 * sum(later) / len(later), 2) if later else None,
    }


def off_after(work_us: Sequence[int], from_ns: int, share: float) -> float | None:
    """Return how far half a second of work is from a share, in points; None if it is missing."""
    first = -(-from_ns // SAMPLE_NS)
    steps = work_us[first : first + HOLD_NS // SAMPLE_NS]
    if len(steps) < HOLD_NS // SAMPLE_NS:
        return None
    return round(sum(steps) * 1e5 / HOLD_NS - share, 2)


def _ms(ns: int | None) -> float | None:
    return None if ns is None else round(ns / NS_PER_MS, 1)


def _longest(took: Sequence[float | None]) -> float | None:
    known = [one for one in took if one is not None]
    return max(known) if known and len(known) == len(took) else None


def stall_of(event: Event, unit_ns: float) -> tuple[float, float, bool]:
    """Return the observed container's wait and longest pause at an event, and whether it waited.

    Both times are in ms, less one unit. The wait is measured from the event, because the time
    before it was the other container's turn (sometimes two in a row), which that container was
    entitled to. The pause is the whole gap. The container waited if none of its work was running at
    the event.
    """
    ends = [one * 1000 for one in itertools.accumulate(event["ends_us"])]
    gaps = [
        (before, after)
        for before, after in itertools.pairwise([*ends, max(AFTER_NS, ends[-1] if ends else 0)])
        if after > 0
    ] or [(-BEFORE_NS, AFTER_NS)]
    wait = max(after - max(before, 0) for before, after in gaps)
    pause = max(after - before for before, after in gaps)
    waited = any(before <= 0 < after and after - before > 2 * unit_ns for before, after in gaps)
    return _less(wait, unit_ns), _less(pause, unit_ns), waited


def _less(took_ns: float, unit_ns: float) -> float:
    return round(max(0.0, took_ns - unit_ns) / NS_PER_MS, 2)


def stalls(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the waits after the events in ms, the longest pause, and the number of waits."""
    unit_ns = arm["tenants"][0]["unit_ns"]
    found = [stall_of(event, unit_ns) for event in arm["events"]]
    waits = [wait for wait, _, _ in found]
    return {
        "ms": waits,
        "longest_ms": max(waits, default=None),
        "longest_pause_ms": max((pause for _, pause, _ in found), default=None),
        "at_work": sum(waited for _, _, waited in found),
    }


def summarise_events(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of an arm with a script, from its raw data alone."""
    if arm["script"] in {"set", "neighbour"}:
        return {"settle": settle_times(arm)}
    return {"stall": stalls(arm)}


def keep_ends(stamps: Sequence[Stamp], at: int) -> list[int]:
    """Return the end times of the observed container's units around a time, in us.

    The first is relative to that time, and each later one to the one before it.
    """
    first = bisect.bisect_left(stamps, at - BEFORE_NS, key=lambda one: one.time)
    last = bisect.bisect_right(stamps, at + AFTER_NS, key=lambda one: one.time)
    edges = [(one.time - at) // 1000 for one in stamps[first:last]]
    return [after - before for before, after in itertools.pairwise([0, *edges])]


# ---- scripts ----


def pid_of(node: BenchNode, container: Running) -> int:
    """Return the pid of a container's first process."""
    if not container.seen.get("pid"):
        node.list_containers()
    return int(container.seen["pid"])


def _begin(container: Running) -> int:
    at = now()
    (container.out / "begin").touch()
    return at


def change_quota(
    node: BenchNode, arm: Arm, containers: list[Running], _start: Start
) -> list[Event]:
    """Double the first container's quota and set it back, repeatedly, as `tidegate set` does."""
    one = arm.tenants[0].compute
    events: list[Event] = []
    time.sleep(WINDOW_NS / NS_PER_S)  # so that the first change also has a window before it
    for i in range(arm.times):
        share = 2 * one if i % 2 == 0 else one
        at = now()
        ask(node.config, "set", id=containers[0].identifier, compute=share)
        time.sleep(PHASE_S)
        events.append({"at_ns": at, "tenant": 0, "share": share, "until_ns": now()})
    return events


def come_and_go(node: BenchNode, arm: Arm, _containers: list[Running], start: Start) -> list[Event]:
    """Repeatedly start a neighbour of the first container, and let it work until it ends."""
    events: list[Event] = []
    for _ in range(arm.times):
        neighbour = start(arm.visitors[0], PHASE_S)
        node.wait_ready([neighbour.out / "begin.ready"], 240)
        began = _begin(neighbour)
        node.wait(neighbour, 60)
        node.running.remove(neighbour)
        time.sleep(PHASE_S)
        # The neighbour ended at its last stamp, which is looked up when its stamps are read.
        share = arm.tenants[0].compute
        events.append(
            {"at_ns": began, "tenant": 0, "share": share, "until_ns": 0, "end_of": neighbour.name}
        )
        events.append({"at_ns": 0, "tenant": 0, "share": 100, "until_ns": now()})
    return events


def kill_each(node: BenchNode, arm: Arm, _containers: list[Running], start: Start) -> list[Event]:
    """Run containers alongside the first, one after another, and kill each at a random time."""
    draw = random.Random(1)  # noqa: S311
    victims = [start(arm.visitors[0], 600) for _ in range(arm.times)]
    node.wait_ready([one.out / "begin.ready" for one in victims], 240)
    node.list_containers()
    events: list[Event] = []
    for victim in victims:
        _begin(victim)
        time.sleep(0.15 + draw.uniform(0, 0.1))
        at = now()
        os.kill(pid_of(node, victim), signal.SIGKILL)
        events.append({"at_ns": at})
        node.wait(victim, 30)
        node.running.remove(victim)
        time.sleep(max(0.0, (at + AFTER_NS - now()) / NS_PER_S))
    return events


def stop_and_continue(
    node: BenchNode, arm: Arm, containers: list[Running], _start: Start
) -> list[Event]:
    """Stop the second container at random times, and continue it after a while."""
    draw = random.Random(1)  # noqa: S311
    pid = pid_of(node, containers[1])
    events: list[Event] = []
    for _ in range(arm.times):
        time.sleep(0.15 + draw.uniform(0, 0.1))
        at = now()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(AFTER_NS / NS_PER_S + 0.01)
        os.kill(pid, signal.SIGCONT)
        events.append({"at_ns": at})
    return events


SCRIPTS: dict[str, Callable[[BenchNode, Arm, list[Running], Start], list[Event]]] = {
    "set": change_quota,
    "neighbour": come_and_go,
    "kill": kill_each,
    "stop": stop_and_continue,
}


def place_events(
    events: Sequence[Event],
    script: str,
    *,
    ahead_ns: int,
    stamps: Sequence[Stamp],
    begin: int,
    last_of: Callable[[str], int],
) -> list[Event]:
    """Return the events relative to the samples, which begin at `begin` on the GPU's clock.

    `ahead_ns` is how far that clock is ahead of this machine's, `stamps` are those of the first
    container, and `last_of` returns when the named container ended its last unit, on the GPU's
    clock.
    """
    placed: list[Event] = []
    if script in {"kill", "stop"}:
        for event in events:
            at = event["at_ns"] + ahead_ns
            placed.append({"at_ns": at - begin, "ends_us": keep_ends(stamps, at)})
        return placed
    ended = 0
    for event in events:
        one = {
            **event,
            "at_ns": event["at_ns"] + ahead_ns - begin,
            "until_ns": event["until_ns"] + ahead_ns - begin,
        }
        name = one.pop("end_of", None)
        if name is not None:
            ended = one["until_ns"] = last_of(name) - begin
        elif script == "neighbour":
            one["at_ns"] = ended
        placed.append(one)
    return placed
