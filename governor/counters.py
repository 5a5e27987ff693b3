"""Counters that never go back: of a container while it exists, and of a GPU whatever ends on it.

What a process counted is in its slot of the ledger, and is cleared with the slot. What a container
held is kept by the arbiter, and forgotten with the container. A program that draws a rate takes a
counter that goes back for one that began anew, so sums are kept here. Numbers of a ledger are
foreign: they may be nonsense, and go back. Here they are bounded, and the highest value stands.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from mmap import mmap
from typing import Protocol

from governor.arbiter import WAIT_BOUNDS_NS, Stats
from governor.quota import Quota
from governor.usage import lent_of
from governor.violations import Episode
from libcontrol import layout, pages

OF_PROCESSES = ("launches", "waits", "wait_ns", "refused")
"""Fields of a ledger's device that go on counting when their process has ended."""

MOST = 2**62
"""No counter exceeds it: in nanoseconds it is years. A higher report is nonsense."""


@dataclass(frozen=True)
class GpuTime:
    """What the arbiter says about a container on a GPU, or about all containers on it.

    Nanoseconds and counts. `held_ns` includes the grant under way. `lent_ns` is what was charged
    beyond the guarantee, second by second. `handover_ns` is time that was held and not charged, of
    grants with a settled charge.
    """

    held_ns: int = 0
    charged_ns: int = 0
    lent_ns: int = 0
    handover_ns: int = 0
    grants: int = 0
    overdue: int = 0

    def __add__(self, other: GpuTime) -> GpuTime:
        return GpuTime(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(GpuTime)),
        )


def gpu_time(stats: Stats, now_ns: int) -> GpuTime:
    """Return a container's GPU time as of now.

    It includes the grant under way, because an open grant is booked only at its end. What was lent
    is not in it: see Counters.
    """
    running = max(0, now_ns - int(stats.since_ns)) if stats.since_ns else 0
    return GpuTime(
        held_ns=int(stats.held_ns) + running,
        charged_ns=int(stats.charged_ns) + (running if stats.open else 0),
        handover_ns=int(stats.handover_ns),
        grants=int(stats.grants),
        overdue=int(stats.overdue),
    )


def wait_bound_ms(waits: Sequence[int], part: float) -> float | None:
    """Return the bound that this part of a container's waits for grants keeps, in milliseconds.

    `waits` are counts as in Runner.waits(). None if there are none; inf if that wait is beyond the
    longest bound.
    """
    whole = sum(waits)
    bounds = (*(ns / 1e6 for ns in WAIT_BOUNDS_NS), math.inf)
    counted = zip(bounds, itertools.accumulate(waits), strict=True)
    return next((bound for bound, n in counted if n >= part * whole), None) if whole else None


LENT_NS = 1_000_000_000
"""Shortest time of which it is said how much was lent, in nanoseconds. The arbiter knows which
grants it gave beyond the guarantee, but not of a grant without an end, nor where the GPU's own
scheduler divides the time; and a container that had its guarantee late has some of it in such
grants. What was used in a second, less the guarantee, is the same in all these cases."""


@dataclass
class _Lent:
    """What was lent up to `at_ns`, when `charged_ns` had been charged."""

    at_ns: int
    charged_ns: int
    total_ns: int = 0

    def update(self, now_ns: int, charged_ns: int, quota: Quota) -> int:
        """Return what was lent so far, in nanoseconds, by the last second that is over."""
        passed = now_ns - self.at_ns
        if passed >= LENT_NS:
            own, most = (passed * part // 100 for part in (quota.compute, quota.compute_limit))
            self.total_ns += int(lent_of(charged_ns - self.charged_ns, own, most))
            self.at_ns, self.charged_ns = now_ns, charged_ns
        return self.total_ns


class Counters:
    """The counters of one container, by GPU."""

    def __init__(self, n_devices: int) -> None:
        self._past = [Counter[str]() for _ in range(n_devices)]
        self._told = [Counter[str]() for _ in range(n_devices)]
        self._time = [GpuTime()] * n_devices
        self._lent: list[_Lent | None] = [None] * n_devices

    def process_ended(self, ledger: mmap, slot: int) -> None:
        """Keep what a process counted, before its slot is cleared."""
        for device, past in enumerate(self._past):
            past.update(_read(ledger, slot, device))

    def processes(self, ledger: mmap, slots: Iterable[int], device: int) -> Mapping[str, int]:
        """Return what the processes in these slots, and those that ended, have counted."""
        now = self._past[device].copy()
        for slot in slots:
            now.update(_read(ledger, slot, device))
        told = self._told[device]
        for name in OF_PROCESSES:
            told[name] = max(told[name], min(now[name], MOST))
        return dict(told)

    def time(self, device: int, stats: Stats, now_ns: int, quota: Quota) -> GpuTime:
        """Return the container's GPU time, which never goes back.

        A grant under way may turn out to have ended a little before it was looked at.
        """
        new, old = gpu_time(stats, now_ns), self._time[device]
        time = GpuTime(*(max(getattr(new, f.name), getattr(old, f.name)) for f in fields(GpuTime)))
        lent = self._lent[device]
        if lent is None:
            lent = self._lent[device] = _Lent(now_ns, time.charged_ns)
        self._time[device] = replace(time, lent_ns=lent.update(now_ns, time.charged_ns, quota))
        return self._time[device]


_read_counters = pages.Reader("ledger_device", *OF_PROCESSES)


def _read(ledger: mmap, slot: int, device: int) -> dict[str, int]:
    values = _read_counters(ledger, layout.ledger_device(slot, device))
    return {name: min(value, MOST) for name, value in zip(OF_PROCESSES, values, strict=True)}


RATE_NS = 2_000_000_000
"""Time over which a rate is taken, in nanoseconds: some hundred grants, and short enough to show
what happens."""
LEAST_NS = 100_000_000
"""Shortest time over which a rate says anything, in nanoseconds."""
MOST_RATE = 1e6
"""Highest rate, in percent: that of ten thousand threads that wait all the time. A ledger may
contain nonsense."""


class Rates:
    """What a container had of a GPU over the last two seconds, in percent of that time.

    Each look is remembered, so every caller gets the rate since the oldest look within the window.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[int, dict[str, int]]] = deque()

    def update(self, now_ns: int, **counters: int) -> dict[str, float | None]:
        """Return each counter's rate; None while too little time has passed to tell."""
        looks = self._looks
        while len(looks) > 1 and looks[1][0] <= now_ns - RATE_NS:
            looks.popleft()
        then_ns, before = looks[0] if looks else (now_ns, counters)
        if not looks or now_ns - looks[-1][0] >= LEAST_NS:
            looks.append((now_ns, counters))
        passed = now_ns - then_ns
        if passed < LEAST_NS:
            return dict.fromkeys(counters)
        return {
            name: min(MOST_RATE, round(100 * max(0, value - before[name]) / passed, 1))
            for name, value in counters.items()
        }


@dataclass
class Looks:
    """Looks at NVML on one GPU: how many, how many failed, and how many seconds they took."""

    made: int = 0
    failed: int = 0
    seconds: float = 0.0


MOST_REMEMBERED = 64
"""Number of refusals, and of violations, that are remembered."""
TEXT_LIMIT = 1024
"""Longest text that is remembered of a refusal, in characters; a request can contain 64 KiB of
foreign text."""


@dataclass(frozen=True)
class Refusal:
    """An admission that was refused: when (seconds since 1970), which container, and why."""

    at: float
    container: str
    code: str
    message: str
    hint: str


class Timed(Protocol):
    """What a container says about its time on GPUs."""

    def gpu_times(self) -> Mapping[str, GpuTime]:
        """Return its time on each GPU, by UUID."""


@dataclass
class Tally:
    """What the governor has counted since it started, also of containers that ended."""

    admitted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Admissions that were refused, by the error's code."""
    violations: Counter[str] = field(default_factory=Counter)
    """Violations that began, by kind."""
    throttles: int = 0
    stops: int = 0
    looks: dict[str, Looks] = field(default_factory=dict)
    """By the GPU's UUID."""
    refusals: deque[Refusal] = field(default_factory=lambda: deque(maxlen=MOST_REMEMBERED))
    """The last refusals, the newest at the end."""
    episodes: deque[tuple[str, Episode]] = field(
        default_factory=lambda: deque(maxlen=MOST_REMEMBERED)
    )
    """The last violations with their containers' ids, also of containers that ended."""
    _past: dict[str, GpuTime] = field(default_factory=dict)

    def refuse(self, at: float, container: str, code: str, message: str, hint: str) -> None:
        """Count an admission that was refused, and remember why."""
        self.refused[code] += 1
        texts = (text[:TEXT_LIMIT] for text in (container, code, message, hint))
        self.refusals.append(Refusal(at, *texts))

    def violate(self, container: str, episode: Episode) -> None:
        """Count a violation that begins, and remember it."""
        self.violations[episode.kind] += 1
        self.episodes.append((container, episode))

    def container_ended(self, container: Timed) -> None:
        """Keep what a container had, while the arbiter still knows the container."""
        for uuid, time in container.gpu_times().items():
            self._past[uuid] = self._past.get(uuid, GpuTime()) + time

    def gpu_times(self, running: Iterable[Mapping[str, GpuTime]]) -> dict[str, GpuTime]:
        """Return the time of each GPU, by UUID: of these containers, and of those that ended."""
        total = dict(self._past)
        for times in running:
            for uuid, time in times.items():
                total[uuid] = total.get(uuid, GpuTime()) + time
        return total

    def looked(self, uuid: str, seconds: float, *, failed: bool) -> None:
        """Count a look at a GPU."""
        looks = self.looks.setdefault(uuid, Looks())
        looks.made += 1
        looks.failed += failed
        looks.seconds += seconds
