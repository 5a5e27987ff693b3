"""Estimate how much of its time on the GPU each process spent working.

The driver's trace has a record only where one context ends and another begins. A process that is
not interrupted stays on the GPU from its first piece of work onward, whether it works or pauses,
so its residency does not measure its work. This applies to a process that is alone, and to one with
neighbours that have reached their caps. For each interval of 0.2 s, NVML reports the fraction in
which a kernel of any process ran (H200: accurate to a percent, even while processes are switched
off and on). If all processes together were on the GPU for longer than that, they paused for the
difference.

Some turns show that a process did not pause: a turn that ends with its slice contains no pause,
because a process that pauses gives up the GPU at once if another process is waiting. The charge of
a process is reduced only by pauses that cannot have been in the turns of others. So no process is
charged less because of what another process does, but a process that paused may be charged too
much. The estimate is exact for a process that is alone, and where its neighbours are off or work
all the time.

Samples arrive some time after the interval that they describe. Until then, time is charged at the
highest rate of any sample from the last second. When a sample arrives, the difference is charged or
given back. Times are in nanoseconds. The module is pure: it uses no file, clock or driver.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

MS = 1_000_000

ASK = 200 * MS
"""Shortest interval between requests for samples: the driver takes one sample per 0.2 s (H200)."""
SHORTEST = 100 * MS
"""Shortest interval between two samples."""
LONGEST = 300 * MS
"""Longest time that one sample describes."""
RATE_HISTORY = 1000 * MS
"""Time for which a rate is remembered; the highest rate in it determines a process's charge."""
NOISE = 0.02
"""Error of a sample, as a fraction of its interval; samples are in whole percent."""
BUSY = 0.9
"""Fraction of a process's time on the GPU: a process that works for more than this is charged for
all of its time."""


class Sample(NamedTuple):
    """The fraction of the time since the previous sample in which a kernel ran, from 0 to 1."""

    at: int
    part: float


class Full(NamedTuple):
    """A turn that ended with its slice: its process, and how long ago it began and ended."""

    pid: int
    began_ago: int
    ended_ago: int


class _Step:
    """An interval, with times by pid: on the GPU, charged, and possibly paused."""

    def __init__(
        self,
        begin: int,
        end: int,
        resident: Mapping[int, float],
        charged: Mapping[int, float],
        open_: Mapping[int, float],
    ) -> None:
        self.begin, self.end = begin, end
        self.resident, self.charged, self.open = dict(resident), dict(charged), dict(open_)

    def part(self, begin: int, end: int) -> _Step:
        """Return the proportional part of the step between two times."""
        share = (end - begin) / max(1, self.end - self.begin)

        def of(times: Mapping[int, float]) -> dict[int, float]:
            return {pid: ns * share for pid, ns in times.items()}

        return _Step(begin, end, of(self.resident), of(self.charged), of(self.open))

    def close(self, pid: int, begin: int, end: int) -> None:
        """Record that a process did not pause between two times."""
        overlap = min(end, self.end) - max(begin, self.begin)
        if overlap > 0 and pid in self.open:
            self.open[pid] = max(0.0, self.open[pid] - overlap)


class _Settled(NamedTuple):
    until: int
    parts: Mapping[int, float]


class Activity:
    """Corrects the residency of the processes on one GPU."""

    def __init__(self, now: int) -> None:
        self._now = now
        self._known = now  # charges before this time are final
        self._asked = now
        self._steps: deque[_Step] = deque()
        self._settled: deque[_Settled] = deque()
        self._rates: dict[int, float] = {}

    def wants_samples(self, now: int) -> bool:
        """Return whether new samples are due, and can correct more than their own error.

        They correct charges of processes that may have paused, and charges below the full time.
        """
        if now - self._asked < ASK:
            return False
        uncertain = sum(
            max(step.open[pid], ns - step.charged[pid])
            for step in self._steps
            for pid, ns in step.resident.items()
        )
        if uncertain > NOISE * (now - self._known):
            return True
        self._asked = now  # so that the sum is not computed in every step
        return False

    @property
    def known(self) -> int:
        """Time before which all charges are final."""
        return self._known

    def step(
        self,
        now: int,
        resident: Mapping[int, int],
        samples: Iterable[Sample] | None,
        full: Iterable[Full] = (),
    ) -> dict[int, int]:
        """Return what to charge for the time since the last step, by pid.

        A charge is negative if more time is given back than charged. `samples` are the new ones,
        None if they were not requested or NVML has none. `full` are the turns that ended with their
        slice since the last step.
        """
        began, self._now = self._now, now
        charged = {pid: ns * self._rates.get(pid, 1.0) for pid, ns in resident.items()}
        self._steps.append(_Step(began, now, dict(resident), charged, dict(resident)))
        for one in full:
            begin, end = now - one.began_ago, now - one.ended_ago
            for step in reversed(self._steps):
                if step.end <= begin:
                    break
                step.close(one.pid, begin, end)
        more: dict[int, float] = defaultdict(float)
        if samples is not None:
            self._asked = now
            for sample in sorted(samples):
                # A sample that was taken during the request describes the time up to now. A sample
                # may be returned twice, because the offset between the two clocks is not constant
                # to the nanosecond.
                if self._known + SHORTEST // 2 < sample.at <= now + SHORTEST:
                    for pid, ns in self._settle_until(min(sample.at, now), sample.part).items():
                        more[pid] += ns
        self._forget(now)
        return {pid: int(charged.get(pid, 0.0) + more[pid]) for pid in {*charged, *more}}

    def _forget(self, now: int) -> None:
        """Drop steps that are too old for a sample to describe; their charges become final."""
        while self._steps and self._steps[0].end < now - RATE_HISTORY - LONGEST:
            self._known = max(self._known, self._steps.popleft().end)
        while self._settled and self._settled[0].until < now - RATE_HISTORY - LONGEST:
            self._settled.popleft()
        if not self._settled:
            self._rates = {}

    def _settle_until(self, until: int, part: float) -> dict[int, float]:
        """Settle the time before `until`; return corrections.

        `part` is the fraction of that time in which kernels ran.
        """
        if until - self._known > LONGEST:
            self._remove_steps(until - ASK)
        length = until - self._known
        cut = self._remove_steps(until)
        idle = max(0.0, sum(cut.resident.values()) - part * length)
        if idle < NOISE * length:
            idle = 0.0
        anywhere = sum(cut.open.values())
        active = {
            # A process paused for at least the idle time that does not fit into the turns of
            # others.
            pid: ns - min(cut.open[pid], max(0.0, idle - (anywhere - cut.open[pid])))
            for pid, ns in cut.resident.items()
        }
        parts = {pid: active[pid] / ns for pid, ns in cut.resident.items() if ns >= MS}
        self._settled.append(_Settled(until, parts))
        while self._settled[0].until < until - RATE_HISTORY:
            self._settled.popleft()
        self._rates = {}
        for one in self._settled:
            for pid, of in one.parts.items():
                self._rates[pid] = max(self._rates.get(pid, 0.0), of if of < BUSY else 1.0)
        return {pid: ns - cut.charged[pid] for pid, ns in active.items()}

    def _remove_steps(self, until: int) -> _Step:
        """Remove the steps before `until`; return them as one."""
        sums: list[dict[int, float]] = [defaultdict(float) for _ in range(3)]
        begin = self._known
        while self._steps and self._steps[0].begin < until:
            step = self._steps.popleft()
            if step.end > until:
                self._steps.appendleft(step.part(until, step.end))
                step = step.part(step.begin, until)
            for whole, times in zip(sums, (step.resident, step.charged, step.open), strict=True):
                for pid, ns in times.items():
                    whole[pid] += ns
        self._known = max(self._known, until)
        return _Step(begin, until, *sums)
