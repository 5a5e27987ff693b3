"""Counters that never decrease: for a container while it exists, and for all of a GPU's containers.

A process's counters are in its slot of the ledger, and are cleared with the slot. A container's
times are in the arbiter, and are removed with the container. A program that computes rates takes a
decreasing counter for one that was reset, so sums are kept here. Numbers in a ledger are not
trusted: they may be nonsense, and may decrease. Here they are bounded, and the highest value is
kept.
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
"""Fields of the ledger for a device, which remain counted after the process has ended."""
OF_MOVES = ("moved", "move_ns", "away_ns")
"""Fields of a ledger's slot about moves of memory, which remain counted in the same way."""

MOST = 2**62
"""Upper bound on every counter, 146 years in nanoseconds: a higher value is nonsense."""


@dataclass(frozen=True)
class GpuTime:
    """The arbiter's times for a container on a GPU, or for all containers on it.

    The values are nanoseconds and counts. `held_ns` includes the current grant. `lent_ns` is the
    time that was charged beyond the guarantee, in intervals of a second or more. `handover_ns` is
    the time that was held but not charged, in grants whose charge is settled.
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

    It includes the current grant, because an open grant is charged only at its end. `lent_ns` is
    not set: see Counters.
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
    """Return the bound below which this fraction of a container's waits lies, in milliseconds.

    `waits` are counts as in Runner.waits(). Return None if there are no waits, and inf if the bound
    would be beyond the longest one.
    """
    whole = sum(waits)
    bounds = (*(ns / 1e6 for ns in WAIT_BOUNDS_NS), math.inf)
    counted = zip(bounds, itertools.accumulate(waits), strict=True)
    return next((bound for bound, n in counted if n >= part * whole), None) if whole else None


LENT_NS = 1_000_000_000
"""Interval over which lent time is computed, in nanoseconds: the time used in it, less the
guarantee. The arbiter's own count is not used: it includes neither open grants nor time that the
GPU's own scheduler divides, and it counts as lent any time that only makes up for a late guarantee.
"""


@dataclass
class _Lent:
    """The time lent until `at_ns`, when `charged_ns` had been charged."""

    at_ns: int
    charged_ns: int
    total_ns: int = 0

    def update(self, now_ns: int, charged_ns: int, quota: Quota) -> int:
        """Return the time lent so far, in nanoseconds; less than a second of it may be missing."""
        passed = now_ns - self.at_ns
        if passed >= LENT_NS:
            own, most = (passed * part // 100 for part in (quota.compute, quota.compute_limit))
            self.total_ns += int(lent_of(charged_ns - self.charged_ns, own, most))
            self.at_ns, self.charged_ns = now_ns, charged_ns
        return self.total_ns


class _ProcessSums:
    """Sums of what processes count, including those that have ended; the sums never decrease."""

    def __init__(self, names: Iterable[str]) -> None:
        self._past = Counter[str]()
        self._highest = dict.fromkeys(names, 0)

    def keep(self, values: Mapping[str, int]) -> None:
        """Keep the counts of a process that is ending."""
        self._past.update(values)

    def add_up(self, running: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
        """Return the sums, including the counts of the running processes."""
        each = [self._past, *running]
        for name, highest in self._highest.items():
            now = sum(values.get(name, 0) for values in each)
            self._highest[name] = max(highest, min(now, MOST))
        return dict(self._highest)


class Counters:
    """The counters of one container, by GPU."""

    def __init__(self, n_devices: int) -> None:
        self._sums = [_ProcessSums(OF_PROCESSES) for _ in range(n_devices)]
        self._moves = _ProcessSums(OF_MOVES)
        self._time = [GpuTime()] * n_devices
        self._lent: list[_Lent | None] = [None] * n_devices

    def process_ended(self, ledger: mmap, slot: int) -> None:
        """Keep the counters of a process, before its slot is cleared."""
        for device, sums in enumerate(self._sums):
            sums.keep(_read(ledger, slot, device))
        self._moves.keep(_read_moves(ledger, slot))

    def processes(self, ledger: mmap, slots: Iterable[int], device: int) -> Mapping[str, int]:
        """Return the sums over the processes in these slots and those that have ended."""
        return self._sums[device].add_up(_read(ledger, slot, device) for slot in slots)

    def moves(self, ledger: mmap, slots: Iterable[int]) -> Mapping[str, int]:
        """Return the sums of the fields in `OF_MOVES`: bytes moved, and nanoseconds."""
        return self._moves.add_up(_read_moves(ledger, slot) for slot in slots)

    def time(self, device: int, stats: Stats, now_ns: int, quota: Quota) -> GpuTime:
        """Return the container's GPU time, which never decreases.

        The current grant may turn out to have ended slightly before this reading.
        """
        new, old = gpu_time(stats, now_ns), self._time[device]
        time = GpuTime(*(max(getattr(new, f.name), getattr(old, f.name)) for f in fields(GpuTime)))
        lent = self._lent[device]
        if lent is None:
            lent = self._lent[device] = _Lent(now_ns, time.charged_ns)
        self._time[device] = replace(time, lent_ns=lent.update(now_ns, time.charged_ns, quota))
        return self._time[device]


_read_counters = pages.Reader("ledger_device", *OF_PROCESSES)
_read_slot = pages.Reader("ledger_slot", *OF_MOVES)


def _read(ledger: mmap, slot: int, device: int) -> dict[str, int]:
    values = _read_counters(ledger, layout.ledger_device(slot, device))
    return {name: min(value, MOST) for name, value in zip(OF_PROCESSES, values, strict=True)}


def _read_moves(ledger: mmap, slot: int) -> dict[str, int]:
    values = _read_slot(ledger, pages.slot_base(slot))
    return {name: min(value, MOST) for name, value in zip(OF_MOVES, values, strict=True)}


RATE_NS = 2_000_000_000
"""Time over which a rate is computed, in nanoseconds: long enough for a few hundred grants, and
short enough to show the current activity."""
LEAST_NS = 100_000_000
"""Shortest time over which a rate is meaningful, in nanoseconds."""
MAX_RATE = 1e6
"""Highest rate, in percent: that of ten thousand threads that wait all the time. A ledger may
contain nonsense."""


class Rates:
    """A container's rates on a GPU over the last two seconds, as percentages of that time.

    A reading that comes less than LEAST_NS after the last kept one is not kept. Rates are computed
    from the newest kept reading that is at least RATE_NS old or, if there is none, from the oldest.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[int, dict[str, int]]] = deque()

    def update(self, now_ns: int, **counters: int) -> dict[str, float | None]:
        """Return each counter's rate; None while too little time has passed."""
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
            name: min(MAX_RATE, round(100 * max(0, value - before[name]) / passed, 1))
            for name, value in counters.items()
        }


@dataclass
class Looks:
    """Samples of one GPU: their number, the number that failed, and their duration in seconds."""

    made: int = 0
    failed: int = 0
    seconds: float = 0.0


MAX_REMEMBERED = 64
"""Number of refusals, and of violations, that are remembered."""
TEXT_LIMIT = 1024
"""Longest text of a refusal that is kept, in characters; a request can contain 64 KiB of untrusted
text."""


@dataclass(frozen=True)
class Refusal:
    """A refused admission: time (seconds since 1970), container, and reason."""

    at: float
    container: str
    code: str
    message: str
    hint: str


class Timed(Protocol):
    """An object that has GPU times, such as a container's account."""

    def gpu_times(self) -> Mapping[str, GpuTime]:
        """Return its time on each GPU, by UUID."""


@dataclass
class Tally:
    """Counters of the governor since its start, including containers that have ended."""

    admitted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Admissions that were refused, by the error's code."""
    violations: Counter[str] = field(default_factory=Counter)
    """Violations that began, by kind."""
    throttles: int = 0
    stops: int = 0
    looks: dict[str, Looks] = field(default_factory=dict)
    """Samples of each GPU, by its UUID."""
    refusals: deque[Refusal] = field(default_factory=lambda: deque(maxlen=MAX_REMEMBERED))
    """The last refusals, the newest at the end."""
    episodes: deque[tuple[str, Episode]] = field(
        default_factory=lambda: deque(maxlen=MAX_REMEMBERED)
    )
    """The last violations with their containers' ids, including those of ended containers."""
    _past: dict[str, GpuTime] = field(default_factory=dict)

    def refuse(self, at: float, container: str, code: str, message: str, hint: str) -> None:
        """Count an admission that was refused, and remember why."""
        self.refused[code] += 1
        texts = (text[:TEXT_LIMIT] for text in (container, code, message, hint))
        self.refusals.append(Refusal(at, *texts))

    def violate(self, container: str, episode: Episode) -> None:
        """Count a violation that has begun, and remember it."""
        self.violations[episode.kind] += 1
        self.episodes.append((container, episode))

    def container_ended(self, container: Timed) -> None:
        """Keep a container's times, before it is removed from the arbiter."""
        for uuid, time in container.gpu_times().items():
            self._past[uuid] = self._past.get(uuid, GpuTime()) + time

    def gpu_times(self, running: Iterable[Mapping[str, GpuTime]]) -> dict[str, GpuTime]:
        """Return the time on each GPU, by UUID: of these containers and those that have ended."""
        total = dict(self._past)
        for times in running:
            for uuid, time in times.items():
                total[uuid] = total.get(uuid, GpuTime()) + time
        return total

    def looked(self, uuid: str, seconds: float, *, failed: bool) -> None:
        """Count a sample of a GPU."""
        looks = self.looks.setdefault(uuid, Looks())
        looks.made += 1
        looks.failed += failed
        looks.seconds += seconds
