"""Model a GPU's hardware scheduler on a virtual clock: channel groups run in turn, a slice each.

The model follows measurements on an H100 and an H200 (docs/reference/driver-calls.md):

- A context switch costs 70 us at the end of a turn and 80 us before the next; neither is charged.
- A group gives way at once when its work ends. A group without work costs nothing.
- The end of a slice interrupts a kernel.
- When channels are switched off or on, the turn ends, and a new round begins at a random group.

A switch off or on takes effect at once here; the caller models the time that the driver's calls take.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

MS = 1_000_000
SWITCH = 80_000
END = 70_000


@dataclass
class VirtualContext:
    """The work of one container: endless work, or requests of `length` ns that arrive at random."""

    mean: int = 0  # mean time between two requests, in ns; 0: there is always work
    length: int = 0
    seed: int = 1
    on: bool = True
    slice_ns: int = 2 * MS
    used: int = 0
    done: int = 0  # the part of `used` that was work
    early: int = 0  # number of turns that ended early because the work ended
    left: int = 0  # rest of the request in progress, in ns
    arrivals: list[int] = field(default_factory=list)  # arrival times of the requests that wait
    waits: list[int] = field(default_factory=list)  # times from arrival to completion, in ns

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311
        self.next_at = 0
        if self.mean:
            self._draw(0)

    def _draw(self, now: int) -> None:
        self.next_at = now + max(1, int(self.random.expovariate(1 / self.mean)))

    def arrive(self, now: int) -> None:
        while self.mean and self.next_at <= now:
            heapq.heappush(self.arrivals, self.next_at)
            self._draw(self.next_at)

    def work(self) -> int:
        """Return the work that is left, in ns; for endless work, a very large number."""
        if not self.mean:
            return 1 << 62
        return len(self.arrivals) * self.length - (self.length - self.left if self.left else 0)

    def run(self, ns: int, now: int) -> None:
        self.used += ns
        self.done += ns
        while self.mean and ns and self.arrivals:
            if not self.left:
                self.left = self.length
            part = min(ns, self.left)
            self.left -= part
            ns -= part
            if not self.left:
                self.waits.append(now - ns - heapq.heappop(self.arrivals))


class VirtualGpu:
    def __init__(self, contexts: dict[int, VirtualContext]) -> None:
        self.contexts = contexts
        self.now = 0
        self.resident: int | None = None
        self.switches = 0
        self._order = sorted(contexts)
        self._slice_left = 0
        self._begin = 0
        self._random = random.Random(2)  # noqa: S311

    def begin_anew(self) -> None:
        """End the turn, and begin a new round at a random group."""
        self.resident, self._slice_left = None, 0
        self._begin = self._random.randrange(len(self._order))

    def _runnable(self, i: int) -> bool:
        c = self.contexts[i]
        return c.on and c.work() > 0

    def _next(self) -> int | None:
        n = len(self._order)
        at = self._order.index(self.resident) + 1 if self.resident in self.contexts else self._begin
        for k in range(n):
            i = self._order[(at + k) % n]
            if self._runnable(i):
                return i
        return None

    def advance(self, until: int) -> dict[int, int]:
        """Run until `until`; return the time that each context used, without the cost of switches."""
        before = {i: c.used for i, c in self.contexts.items()}
        while self.now < until:
            for c in self.contexts.values():
                c.arrive(self.now)
            # A stretch ends at the next arrival of any context, so that the scheduler sees that arrival.
            horizon = min([until, *(c.next_at for c in self.contexts.values() if c.mean)])
            horizon = max(horizon, self.now + 1)
            if self.resident is None or not self._runnable(self.resident) or self._slice_left <= 0:
                chosen = self._next()
                if chosen is None:
                    self.now = horizon
                    continue
                if chosen != self.resident:
                    if self.resident is not None:
                        end = min(until, self.now + END)
                        if self.resident in self.contexts:
                            before_it = self.contexts[self.resident]
                            before_it.early += before_it.on and self._slice_left > 0
                        self.now = min(until, end + SWITCH)
                        self.switches += 1
                    self.resident = chosen
                self._slice_left = self.contexts[chosen].slice_ns
                continue
            c = self.contexts[self.resident]
            ns = min(self._slice_left, c.work(), max(1, horizon - self.now))
            self.now += ns
            self._slice_left -= ns
            c.run(ns, self.now)
        return {i: c.used - before[i] for i, c in self.contexts.items()}
