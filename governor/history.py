"""History of the containers' GPU use over the last 15 minutes, in steps of five seconds.

The module is pure: it uses no clock, container or file. The caller passes each reading and its
time. Between two readings, rates are taken to be constant. Memory is bounded: a container takes
6 KiB per GPU, and at most `MAX_SERIES` series are kept. Series that ended first are dropped first.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from governor.usage import lent_of

STEP_S = 5
STEP_NS = STEP_S * 1_000_000_000
STEPS = 180
MAX_SERIES = 1024
"""Maximum number of series, one per container and GPU, including those of ended containers."""

PART = 100
"""Number of parts in one percent."""

COLUMNS = {
    "used": "H",
    "lent": "H",
    "guarantee": "B",
    "limit": "B",
    "memory": "Q",
    "parked": "Q",
    "memory_limit": "Q",
    "refused": "I",
}
"""The values that are kept for each step, and their array types: parts of a percent, percent,
bytes, counts."""
PARTS = ("used", "lent")
MAX_BYTES = 2**64 - 1
"""Upper bound on amounts of memory: a peak is reported by the container and not verified."""


@dataclass(frozen=True)
class Use:
    """One reading of a container on a GPU. Times and refusals count from the container's start.

    `memory` is in use, and `parked` is the part of it that is in host memory.
    """

    key: str
    container: str
    name: str
    gpu: str
    charged_ns: int
    guarantee: int
    limit: int
    memory: int
    memory_peak: int
    memory_limit: int
    refused: int
    parked: int = 0


@dataclass
class _Series:
    """The values of a container on a GPU, by step; a step is at index `step % STEPS`."""

    number: int
    use: Use
    first: int
    last: int
    ended: bool = False
    values: dict[str, array[int]] = field(
        default_factory=lambda: {name: array(kind, [0]) * STEPS for name, kind in COLUMNS.items()}
    )

    def write(self, steps: range, row: Mapping[str, int]) -> None:
        """Write the same row to each of these steps."""
        for name, value in row.items():
            column = self.values[name]
            most = (1 << 8 * column.itemsize) - 1
            for step in steps:
                column[step % STEPS] = min(max(0, value), most)
        self.last = steps[-1]

    def cut(self, since: int, last: int) -> tuple[int, dict[str, array[int]]]:
        """Return the first step after `since` that exists, and the values from that step."""
        begin = max(self.first, since + 1, last - STEPS + 1)
        first, behind = begin % STEPS, (self.last + 1) % STEPS
        if begin > self.last:
            return begin, {name: array(kind) for name, kind in COLUMNS.items()}
        return begin, {
            name: column[first:behind] if first < behind else column[first:] + column[:behind]
            for name, column in self.values.items()
        }


@dataclass(frozen=True)
class Cut:
    """A part of the history, with copies of its values."""

    last: int
    left_out: int
    series: list[tuple[dict[str, Any], dict[str, array[int]]]]

    def describe(self) -> list[dict[str, Any]]:
        """Return the series as plain values: shares in percent, memory in bytes."""
        return [
            {
                **about,
                **{
                    name: [value / PART for value in column] if name in PARTS else column.tolist()
                    for name, column in columns.items()
                },
            }
            for about, columns in self.series
        ]


class History:
    """The history of one governor since `start_ns`; steps are numbered from 0."""

    def __init__(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._looked_ns = start_ns
        self.last = -1
        """The last complete step that was recorded."""
        self.left_out = 0
        """Number of series of running containers for which there is no room."""
        self._numbers = 0
        self._here: dict[Hashable, _Series] = {}
        self._ended: list[_Series] = []
        self._parted: list[tuple[Hashable, Use]] = []

    def due_ns(self) -> int:
        """Return when the current step ends, in nanoseconds on the caller's clock."""
        return self._start_ns + (self.last + 2) * STEP_NS

    def part(self, who: Hashable, use: Use) -> None:
        """Record a container's last reading, at its end.

        Otherwise its use since the previous reading would be lost.
        """
        if len(self._parted) < MAX_SERIES:
            self._parted.append((who, use))

    def record(self, now_ns: int, uses: Iterable[tuple[Hashable, Use]]) -> None:
        """Record a reading of all containers; a known container that is missing has ended."""
        last = (now_ns - self._start_ns) // STEP_NS - 1
        if last <= self.last:
            return
        steps = range(max(self.last + 1, last - STEPS + 1), last + 1)
        passed = max(1, now_ns - self._looked_ns)
        self.last, self._looked_ns = last, now_ns
        # Running containers come first, so that ended ones do not take their room.
        here = dict(uses)
        for who, use in here.items():
            self._write(who, use, steps, passed)
        self.left_out = len(here.keys() - self._here.keys())
        parted, self._parted = self._parted, []
        for who, use in parted:
            if who not in here:
                self._write(who, use, steps, passed)
        for who in self._here.keys() - here.keys():
            series = self._here.pop(who)
            series.ended = True
            self._ended.append(series)
        self._ended = [one for one in self._ended if one.last > last - STEPS]

    def _write(self, who: Hashable, use: Use, steps: range, passed_ns: int) -> None:
        series = self._here.get(who)
        before = series.use if series is not None else None
        if series is None:
            if len(self._here) + len(self._ended) >= MAX_SERIES:
                if not self._ended:
                    return
                self._ended.pop(0)
            self._numbers += 1
            # The container and its counters started in the last of these steps.
            last = steps[-1]
            series = self._here[who] = _Series(self._numbers, use, last, last)
            passed_ns = min(passed_ns, STEP_NS)
            steps = steps[-1:]
        series.use = use
        charged = use.charged_ns - (before.charged_ns if before else 0)
        used = 100 * PART * charged // passed_ns
        series.write(
            steps,
            {
                "used": used,
                "lent": int(lent_of(used, use.guarantee * PART, use.limit * PART)),
                "guarantee": use.guarantee,
                "limit": use.limit,
                "memory": use.memory,
                "parked": min(use.parked, use.memory),
                "memory_limit": use.memory_limit,
                "refused": 0,
            },
        )
        # Refusals cannot be spread over the steps, so all of them count for the last one.
        refused = use.refused - (before.refused if before else 0)
        series.write(steps[-1:], {"refused": refused})

    def cut(self, since: int) -> Cut:
        """Return the values after step `since`; a series without values has only a description."""
        series = []
        for one in sorted([*self._here.values(), *self._ended], key=lambda one: one.number):
            first, values = one.cut(since, self.last)
            about = {
                "series": one.number,
                "key": one.use.key,
                "id": one.use.container,
                "name": one.use.name,
                "gpu": one.use.gpu,
                "first": first,
                "ended": one.ended,
                "memory_peak": min(max(0, one.use.memory_peak), MAX_BYTES),
            }
            series.append((about, values))
        return Cut(self.last, self.left_out, series)
