"""Decide when containers with several GPUs have all of them at once.

A job with processes that wait for each other makes progress only while it runs on all of its GPUs;
otherwise it spins on those that it has. With uncoordinated turns, a job that has 30 % of two GPUs
makes progress for about 9 % of the time. So such a container has a *window* in each period, at the
same time on all its GPUs, in which every other container that keeps one of these GPUs busy is off.
Outside its window the container is off. It has a window while it uses most of its part of the
periods and another container works on any of its GPUs. A container with only occasional work gets
none: it would wait for its window needlessly, and block others during it.

The threads of the GPUs share a `Board`. In each step, each thread reports what its containers are
doing. The windows are placed once per period, from the reports received until then, so they are the
same on all GPUs. Periods begin at multiples of PERIOD on the clock. Windows of containers that
share a GPU do not overlap. Times are in nanoseconds, and shares are fractions of one GPU.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from governor.hardware.tenant import MS, PERIOD, Load, Window

MORE = 3 * MS
"""Longest time that is added to a window because earlier ones were too short: the driver calls that
begin and end a window take 0.3 to 0.7 ms each, and wait for those of other GPUs."""
ALIKE = 0.8
"""Fraction of a container's time on the GPU that it uses most. A container is taken to have little
work on a GPU that it uses for less than this."""
ENTER, LEAVE = 0.6, 0.4
"""Fractions of a container's part of a period. A container that uses at least the first gets a
window, and keeps it while it uses at least the second."""
TINY = 1e-6
"""Tolerance in comparing sums of guarantees."""
RECENT = 3 * PERIOD
"""Time for which a GPU's report is valid. If it is older, the GPU's thread has ended or hung."""


class Joins(Protocol):
    """A GPU on the board."""

    def join(self, tenant: int, gang: int) -> None:
        """Run a container on this GPU at the same time as on its other GPUs."""


@dataclass
class _Gang:
    said: dict[int, tuple[int, Load]] = field(default_factory=dict)  # reports by GPU: time, load
    missing: float = 0.0  # time by which its windows were too short, in ns
    used: float = 0.0  # time per period on the GPU that it used most, averaged


class Board:
    """Reports and windows that the threads of all GPUs share; any of them may call methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._gangs: dict[int, _Gang] = {}
        self._period = -1
        self._windows: dict[int, Window] = {}

    def add(self, gpus: Sequence[Joins], tenants: Sequence[int]) -> int:
        """Run a container on several GPUs at the same time; return its gang number.

        `tenants` are its numbers on the GPUs. From now on each GPU reports what the container does
        there.
        """
        with self._lock:
            number = next(self._numbers)
            self._gangs[number] = _Gang()
        for gpu, tenant in zip(gpus, tenants, strict=True):
            gpu.join(tenant, number)
        return number

    def remove(self, gang: int) -> None:
        """Forget a container; it no longer has a window."""
        with self._lock:
            self._gangs.pop(gang, None)
            self._windows.pop(gang, None)

    def say(self, gpu: int, now: int, loads: Mapping[int, Load]) -> None:
        """Record, by gang, the loads of containers with several GPUs on one of these GPUs."""
        with self._lock:
            for number, load in loads.items():
                if number in self._gangs:
                    self._gangs[number].said[gpu] = now, load

    def windows(self, now: int) -> dict[int, Window]:
        """Return the windows in the current period, by gang."""
        with self._lock:
            period = now // PERIOD
            if period > self._period:
                self._period = period
                self._windows = self._place_windows(now)
            return dict(self._windows)

    def _place_windows(self, now: int) -> dict[int, Window]:
        lengths: dict[int, int] = {}
        gpus: dict[int, set[int]] = {}
        guarantees: dict[int, dict[int, float]] = {}  # by GPU and gang
        spare: dict[int, float] = {}  # by GPU: time of a period that no container is guaranteed
        others: dict[int, float] = {}  # by GPU: guarantees of containers without a window
        for number, gang in self._gangs.items():
            loads = {gpu: load for gpu, (at, load) in gang.said.items() if now - at < RECENT}
            part = _part_of_period(loads)
            each = [load.had for load in loads.values() if load.is_busy]
            most = max(each, default=0)
            gang.used = (gang.used + most) / 2
            least = LEAVE if number in self._windows else ENTER
            if part is None or gang.used < least * part * PERIOD:
                gang.missing = 0.0
                continue
            if number in self._windows:
                # It makes progress only while it is on all of its GPUs, so the GPU where it had the
                # least time counts, unless it has little work there. The correction is halved,
                # because its effect is reported a period later.
                had = min((one for one in each if one >= ALIKE * most), default=0)
                had -= _time_apart([load.span for load in loads.values()], now)
                gang.missing = min(max(gang.missing + (part * PERIOD - had) / 2, 0.0), MORE)
            lengths[number] = int(part * PERIOD)
            gpus[number] = set(loads)
            for gpu, load in loads.items():
                spare[gpu] = max(0.0, 1.0 - load.guarantee - load.others) * PERIOD
                guarantees.setdefault(gpu, {})[number] = load.guarantee
                others[gpu] = load.guarantee + load.others
        # There are gaps only where all busy containers have windows: others would use the gaps.
        gaps = {
            gpu: spare[gpu] if others[gpu] - sum(guarantees[gpu].values()) < TINY else 0.0
            for gpu in others
        }
        windows = _spread(_arrange(lengths, gpus), gpus, gaps)
        for number, window in windows.items():
            # An extension takes nothing from the guarantees of others, nor from another window.
            own = gpus[number]
            n = max(sum(gpu in gpus[other] for other in lengths) for gpu in own)
            free = min(spare[gpu] for gpu in own) / n
            after = [w.begin for i, w in windows.items() if i != number and gpus[i] & own]
            until = min([begin for begin in after if begin >= window.end], default=PERIOD)
            more = int(min(self._gangs[number].missing, free, until - window.end))
            windows[number] = Window(window.begin, window.end + more, more)
        return windows


def _arrange(lengths: Mapping[int, int], gpus: Mapping[int, set[int]]) -> dict[int, Window]:
    """Return windows of these lengths in a period; those on a common GPU follow one another.

    Each begins as early as possible. If they do not fit, as with containers that share GPUs in a
    ring, all windows that are connected by common GPUs are shortened.
    """
    placed: dict[int, Window] = {}
    for number, length in lengths.items():
        taken = sorted(placed[i] for i in placed if gpus[i] & gpus[number])
        begin = 0
        for window in taken:
            if window.begin - begin >= length:
                break
            begin = max(begin, window.end)
        placed[number] = Window(begin, begin + length)
    for group in _connected(lengths, gpus):
        end = max(placed[i].end for i in group)
        if end > PERIOD:
            for i in group:
                window = placed[i]
                placed[i] = Window(window.begin * PERIOD // end, window.end * PERIOD // end)
    return placed


def _spread(
    windows: Mapping[int, Window], gpus: Mapping[int, set[int]], gaps: Mapping[int, float]
) -> dict[int, Window]:
    """Return the windows with gaps between them, into which they may be extended.

    Without a gap, the previous container is still on when the next window begins, because driver
    calls take time. `gaps` is the time of a period that may be left between windows, by GPU.
    """
    spread = {}
    for group in _connected(windows, gpus):
        left = PERIOD - max(windows[i].end for i in group)
        left = max(0, min([left, *(int(gaps[gpu]) for i in group for gpu in gpus[i])]))
        for i in group:
            begin, end, _ = windows[i]
            later = int(begin * left / PERIOD)
            spread[i] = Window(begin + later, end + later)
    return spread


def _connected(numbers: Iterable[int], gpus: Mapping[int, set[int]]) -> list[list[int]]:
    """Return the containers in groups that are connected by their GPUs."""
    groups: list[tuple[list[int], set[int]]] = []
    for number in numbers:
        members, own = [number], set(gpus[number])
        for group in [group for group in groups if group[1] & own]:
            groups.remove(group)
            members, own = group[0] + members, group[1] | own
        groups.append((members, own))
    return [members for members, _ in groups]


def _time_apart(spans: Sequence[tuple[int, int]], now: int) -> int:
    """Return for how long in its last window a container was not on all of its GPUs, in ns.

    The driver calls for several GPUs exclude each other, so one GPU's window begins and ends later
    than another's.
    """
    # A window is reported in the following step, which may belong to the next period.
    if not all(now - 5 * PERIOD // 2 < on < off <= now for on, off in spans):
        return 0
    begin = max(on for on, _ in spans)
    together = min(off for _, off in spans) - begin
    # Spans of different windows do not overlap.
    return max(0, min(off - on for on, off in spans) - together) if together > 0 else 0


def _part_of_period(loads: Mapping[int, Load]) -> float | None:
    """Return a container's part of a period on all its GPUs, or None if it needs no window.

    As on one GPU, the part is its guarantee, its share of the time that no container is guaranteed,
    and what the limits of the others leave. The smallest such part of any of its GPUs is used.
    """
    is_shared = any(load.others > 0 for load in loads.values())
    if len(loads) < 2 or not is_shared or not any(load.is_busy for load in loads.values()):
        return None
    return min(
        min(
            load.limit,
            max(load.guarantee / (load.guarantee + load.others), 1.0 - load.others_limit),
        )
        for load in loads.values()
    )
