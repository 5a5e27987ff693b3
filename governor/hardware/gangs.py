"""Decide when containers with several GPUs have all of them at once.

A job with processes that wait for each other goes on only while it is on all of its GPUs; meanwhile
it spins on each that it has. With turns that are not coordinated, a job that has 30 % of two GPUs
works for some 9 %. So such a container has a *window* in each period, at the same time on all its
GPUs, in which no other container that keeps a GPU busy is on there. Outside of its window it is
off. It has a window while it uses most of its part and another container works on any of its GPUs.
A container with work only now and then would wait for its window for nothing, and keep others from
the GPU in it.

The threads of the GPUs share the board. Each reports in each step what its containers do. Where the
windows are is decided once per period, from what was reported until then, so they are the same on
all GPUs. Periods begin at multiples of PERIOD on the clock. Windows of containers that share a GPU
follow one another. Times are nanoseconds, shares are parts of one GPU.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from governor.hardware.tenant import MS, PERIOD, Load, Window

MORE = 3 * MS
"""Longest time that is added to a window for what was missing in earlier ones: the driver calls
that begin and end it take 0.3 to 0.7 ms each, and wait for those of other GPUs."""
ALIKE = 0.8
"""Part of what a container uses on the GPU where it uses most: a GPU where it uses less counts as
one on which it does little."""
ENTER, LEAVE = 0.6, 0.4
"""Parts of its share of a period: a container that uses at least the first gets a window, and keeps
it while it uses at least the second."""
TINY = 1e-6
"""Sums of guarantees differ by less if they are of the same containers."""
RECENT = 3 * PERIOD
"""Time for which a GPU's report counts. If it is older, the GPU's thread has ended, or hangs."""


class Joins(Protocol):
    """A GPU on the board."""

    def join(self, tenant: int, gang: int) -> None:
        """Run a container on this GPU at the same time as on its others."""


@dataclass
class _Gang:
    said: dict[int, tuple[int, Load]] = field(default_factory=dict)  # by GPU: when, and what
    missing: float = 0.0  # time that its windows lacked, in ns
    used: float = 0.0  # time per period on the GPU where it used most, averaged


class Board:
    """What the threads of all GPUs share; its methods may be called from any of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._gangs: dict[int, _Gang] = {}
        self._period = -1
        self._windows: dict[int, Window] = {}

    def add(self, gpus: Sequence[Joins], tenants: Sequence[int]) -> int:
        """Let a container be on several GPUs at once; return its number.

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
        """Forget a container: it has no window from now on."""
        with self._lock:
            self._gangs.pop(gang, None)
            self._windows.pop(gang, None)

    def say(self, gpu: int, now: int, loads: Mapping[int, Load]) -> None:
        """Record what containers with several GPUs do on one of them, by gang."""
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
                self._windows = self._place(now)
            return dict(self._windows)

    def _place(self, now: int) -> dict[int, Window]:
        lengths: dict[int, int] = {}
        gpus: dict[int, set[int]] = {}
        guarantees: dict[int, dict[int, float]] = {}  # by GPU and gang
        spare: dict[int, float] = {}  # by GPU: time of a period that no container is guaranteed
        others: dict[int, float] = {}  # by GPU: guarantees of containers without a window
        for number, gang in self._gangs.items():
            loads = {gpu: load for gpu, (at, load) in gang.said.items() if now - at < RECENT}
            part = _part(loads)
            each = [load.had for load in loads.values() if load.is_busy]
            most = max(each, default=0)
            gang.used = (gang.used + most) / 2
            least = LEAVE if number in self._windows else ENTER
            if part is None or gang.used < least * part * PERIOD:
                gang.missing = 0.0
                continue
            if number in self._windows:
                # It goes on only while it is on all of its GPUs, so the one where it had least
                # counts; but a job may do little on one of them. By half, because the effect is
                # reported a period later.
                had = min((one for one in each if one >= ALIKE * most), default=0)
                had -= _alone([load.span for load in loads.values()], now)
                gang.missing = min(max(gang.missing + (part * PERIOD - had) / 2, 0.0), MORE)
            lengths[number] = int(part * PERIOD)
            gpus[number] = set(loads)
            for gpu, load in loads.items():
                spare[gpu] = max(0.0, 1.0 - load.guarantee - load.others) * PERIOD
                guarantees.setdefault(gpu, {})[number] = load.guarantee
                others[gpu] = load.guarantee + load.others
        # Only between windows that have their GPUs to themselves: others would run in the gaps.
        gaps = {
            gpu: spare[gpu] if others[gpu] - sum(guarantees[gpu].values()) < TINY else 0.0
            for gpu in others
        }
        windows = _spread(_arrange(lengths, gpus), gpus, gaps)
        for number, window in windows.items():
            # Nothing is taken from what is guaranteed to others, nor from another window.
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

    Each begins as early as it can. Where they do not fit, as with GPUs in a ring, windows that are
    connected by their GPUs are shortened until they do.
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

    Without a gap the container before is still on when the next one begins, as the calls take time.
    `gaps`: how much of a period the windows on each GPU may leave.
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


def _alone(spans: Sequence[tuple[int, int]], now: int) -> int:
    """Return for how much of its last window a container was not on all of its GPUs.

    The driver calls of several GPUs exclude each other, so one GPU's window begins and ends later
    than another's.
    """
    # A window is reported in the next step, which may be one of the next period.
    if not all(now - 5 * PERIOD // 2 < on < off <= now for on, off in spans):
        return 0
    begin = max(on for on, _ in spans)
    together = min(off for _, off in spans) - begin
    # If the spans are of different windows, they have nothing in common.
    return max(0, min(off - on for on, off in spans) - together) if together > 0 else 0


def _part(loads: Mapping[int, Load]) -> float | None:
    """Return a container's part of a period on all its GPUs; None if it needs no window.

    As on one GPU, the part is its guarantee, its share of what no container is guaranteed, and what
    the limits of the others leave. The GPU where that is least decides.
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
