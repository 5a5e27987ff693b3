"""Computes the progress of a job, that is, the amount of work that it has done, by the GPU's clock.

A workload stamps the end of each *unit* of work: a record of the time (nanoseconds, the GPU's
clock) and the unit's kind (its position in the step). A solo run of the job shows how long a unit
of each kind takes. In a run with others, each finished unit counts for the time it takes alone, so
the progress over a window divided by the window's length is the share of the GPU that was
delivered. No figure from the governor, the driver's utilisation or the control library is used.

This module only computes; the one function that reads a file is `read_stamps`. Times and
durations are in nanoseconds throughout, shares are fractions of 1, and quotas are percentages.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import pathlib
import statistics
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

RECORD = struct.Struct("<QQ")
"""One stamp in a file: the time and the unit's kind, both little-endian u64."""

WARM_UP_NS = NS_PER_S
"""Initial part of a solo run that its profile excludes, while clocks and caches settle, in ns."""

MAX_UNIT_NS = 2 * NS_PER_MS
"""Longest unit for windows of 100 ms, in ns: at each edge, at most 2 % counts in the wrong window.
"""


class ProgressError(ValueError):
    """A progress file cannot be used for measuring, or it does not contain the figure requested."""


class Stamp(NamedTuple):
    """A unit of `kind` ended at `time`."""

    time: int
    kind: int


@dataclasses.dataclass(frozen=True)
class Profile:
    """The duration of each kind of unit when its job has the GPU to itself."""

    durations: Mapping[int, float]
    """Kind to nanoseconds, scaled so that the solo run's own progress rate is exactly 1."""

    scale: float
    """Factor by which the medians were multiplied, to account for slow units, which a median
    ignores.
    """

    units: int
    """Number of units in the solo run on which the profile is based."""

    def duration(self, kind: int) -> float:
        """Return how long a unit of `kind` takes alone; raise ProgressError if it is unknown."""
        try:
            return self.durations[kind]
        except KeyError:
            known = ", ".join(map(str, sorted(self.durations)))
            raise ProgressError(
                f"unit kind {kind} is not in the solo run, which has {known}: "
                "run the same workload with the same options alone"
            ) from None

    @property
    def largest(self) -> tuple[int, float]:
        """The kind that takes longest, and how long it takes."""
        return max(self.durations.items(), key=lambda item: item[1])


def parse_stamps(data: bytes, source: str = "progress data") -> tuple[Stamp, ...]:
    """Return all whole records in `data`; a torn last one (its writer was killed) is dropped."""
    whole = len(data) - len(data) % RECORD.size
    stamps = tuple(Stamp(*fields) for fields in RECORD.iter_unpack(data[:whole]))
    if not stamps:
        raise ProgressError(f"{source} contains no stamp: did the workload start?")
    check_order(stamps, source)
    return stamps


def read_stamps(path: str | pathlib.Path) -> tuple[Stamp, ...]:
    """Return all stamps in a progress file, in order."""
    return parse_stamps(pathlib.Path(path).read_bytes(), str(path))


def check_order(stamps: Sequence[Stamp], source: str = "progress data") -> None:
    """Raise ProgressError if time runs backwards; equal times are due to the clock's resolution."""
    for index, (before, after) in enumerate(itertools.pairwise(stamps), start=1):
        if after.time < before.time:
            raise ProgressError(
                f"{source}: stamp {index} is {before.time - after.time} ns "
                "before the one it follows"
            )


def solo_profile(stamps: Sequence[Stamp], warm_up: int = WARM_UP_NS) -> Profile:
    """Return the durations of a job's units without other jobs, from a run in which it was alone.

    The median per kind excludes stray interruptions from a unit's value. The scale corrects the
    sum, so that the solo run has a share of exactly 1 once its warm-up is over.
    """
    if not stamps:
        raise ProgressError("the solo run contains no stamp: did the workload start?")
    check_order(stamps, "the solo run")
    kept = [stamp for stamp in stamps if stamp.time >= stamps[0].time + warm_up]
    samples: dict[int, list[int]] = {}
    for before, after in itertools.pairwise(kept):
        samples.setdefault(after.kind, []).append(after.time - before.time)
    if not samples:
        raise ProgressError(
            f"the solo run has {len(kept)} stamp(s) after its first {warm_up / NS_PER_S:g} s; "
            "let it run longer"
        )
    medians = {kind: statistics.median(taken) for kind, taken in sorted(samples.items())}
    counted = math.fsum(medians[kind] * len(taken) for kind, taken in samples.items())
    if counted <= 0:
        raise ProgressError("the units of the solo run take no time: the clock does not advance")
    scale = (kept[-1].time - kept[0].time) / counted
    return Profile(
        durations={kind: median * scale for kind, median in medians.items()},
        scale=scale,
        units=len(kept) - 1,
    )


def check_units(profile: Profile, limit: float = MAX_UNIT_NS) -> float:
    """Return the length of the profile's longest unit; raise ProgressError above `limit`."""
    kind, longest = profile.largest
    if longest > limit:
        raise ProgressError(
            f"unit kind {kind} takes {longest / NS_PER_MS:.2f} ms alone, "
            f"above {limit / NS_PER_MS:g} ms: stamp more often, or make the step smaller"
        )
    return longest


class Progress:
    """The work that a job has done, as a function of time.

    It grows linearly over each unit by the unit's solo duration, and is flat before the first stamp
    and after the last.
    """

    def __init__(self, stamps: Sequence[Stamp], profile: Profile) -> None:
        if not stamps:
            raise ProgressError("no stamp to measure progress from: did the workload start?")
        check_order(stamps)
        self._times = [stamp.time for stamp in stamps]
        steps = (profile.duration(stamp.kind) for stamp in stamps[1:])
        self._done = list(itertools.accumulate(steps, initial=0.0))

    @property
    def begin(self) -> int:
        """The time of the first stamp."""
        return self._times[0]

    @property
    def end(self) -> int:
        """The time of the last stamp."""
        return self._times[-1]

    def at(self, time: float) -> float:
        """Return the work from the first stamp to `time`, as the time in ns that it takes alone."""
        after = bisect.bisect_right(self._times, time)
        if after == 0:
            return 0.0
        if after == len(self._times):
            return self._done[-1]
        t0, t1 = self._times[after - 1], self._times[after]
        p0, p1 = self._done[after - 1], self._done[after]
        return p0 + (p1 - p0) * ((time - t0) / (t1 - t0))

    def share(self, begin: float, end: float) -> float:
        """Return the share delivered from `begin` to `end`, as a fraction of the whole GPU."""
        if end <= begin:
            raise ProgressError(f"the window from {begin} to {end} is empty")
        return (self.at(end) - self.at(begin)) / (end - begin)

    def windows(self, width: int, begin: int | None = None, end: int | None = None) -> list[float]:
        """Return the shares of all whole windows of `width` from `begin` to `end`.

        The defaults are the first and the last stamp.
        """
        if width <= 0:
            raise ProgressError(f"a window of {width} ns is empty")
        first = self.begin if begin is None else begin
        last = self.end if end is None else end
        edges = [self.at(edge) for edge in range(first, last + 1, width)]
        return [(after - before) / width for before, after in itertools.pairwise(edges)]


def common_span(runs: Iterable[Progress]) -> tuple[int, int]:
    """Return the span from when all jobs were running to when the first of them ended."""
    kept = list(runs)
    if not kept:
        raise ProgressError("there are no jobs whose common span could be found")
    begin, end = max(run.begin for run in kept), min(run.end for run in kept)
    if end <= begin:
        raise ProgressError("the jobs never ran at the same time")
    return begin, end


def mean_abs_error_pp(windows: Mapping[str, Sequence[float]], quota: Mapping[str, float]) -> float:
    """Return how far delivered shares are from the quotas, in percentage points.

    The error is averaged over a container's windows, then over containers.

    `windows` holds each container's shares (fractions), `quota` its compute quota (percent).
    """
    if not windows:
        raise ProgressError("there is no container to compare with its quota")
    means = []
    for name, shares in windows.items():
        if not shares:
            raise ProgressError(f"container {name} has no whole window: let it run longer")
        means.append(statistics.fmean(abs(100 * share - quota[name]) for share in shares))
    return statistics.fmean(means)
