"""Makes the first section of docs/benchmarks.md: the aims, and the figures reached on a real GPU.

An aim is a bound on a figure of one arm or suite. Every result from a real GPU that contains the
arm gives a value for the figure. The newest value counts. The others show how much it varies
between runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AIMS_HEAD = """\
## Aims

Each row gives an aim and the figure that was reached on a real GPU. "Reached" is the figure from
the newest result that has the arm. "In all results" is the range over all results that have it.
Points and percentages refer to the GPU unless stated otherwise. Work is what a container does
relative to what it does alone.
"""

TITLES = ("figure", "aim", "reached", "in all results", "met")

Results = Mapping[str, Mapping[str, Any]]
Figure = Callable[[Mapping[str, Any]], float | None]
"""Extracts the figure from one result, or returns None if the result does not have it."""


@dataclass(frozen=True)
class Aim:
    """One bound: `figure` has to be at least `least`, or at most `most`."""

    words: str
    suite: str
    figure: Figure
    most: float | None = None
    least: float | None = None

    def is_met(self, value: float) -> bool:
        """Return whether a figure is within the bound."""
        return (self.most is None or value <= self.most) and (
            self.least is None or value >= self.least
        )

    @property
    def bound(self) -> str:
        """The bound in words."""
        return f"at most {self.most:g}" if self.most is not None else f"at least {self.least:g}"


def _of(arm: str, take: Callable[[Mapping[str, Any]], float | None]) -> Figure:
    """Return a figure that `take` computes from the summary of an arm."""

    def figure(result: Mapping[str, Any]) -> float | None:
        found = result["summary"].get(arm)
        return take(found) if found else None

    return figure


def _error(arm: str, window: str, statistic: str) -> Figure:
    return _of(arm, lambda s: s[window][statistic] if window in s else None)


def _total(arm: str) -> Figure:
    return _of(arm, lambda s: s["sum"])


def _tight(result: Mapping[str, Any]) -> float | None:
    """Return the least value of work minus quota, in points, over the containers with 49/32/16."""
    return _of(
        "tight", lambda s: min(d - q for d, q in zip(s["delivered"], (49, 32, 16), strict=True))
    )(result)


def _alone(result: Mapping[str, Any]) -> float | None:
    """Return the largest deviation of a single container's work from its cap, in % of the cap."""
    summary = result["summary"]
    caps = (10, 50, 90)
    if not all(f"alone-{cap}" in summary for cap in caps):
        return None
    return float(max(abs(summary[f"alone-{cap}"]["delivered"][0] / cap - 1) * 100 for cap in caps))


def _beside(result: Mapping[str, Any]) -> float | None:
    """Return the largest loss for 50 % alongside one to four neighbours with 10 %.

    The loss is a percentage of the container's share.
    """
    lost: list[float] = [
        (50 - arm["delivered"][0]) / 50 * 100
        for name, arm in result["summary"].items()
        if name.startswith("beside-")
    ]
    return max(lost) if lost else None


def _shape(name: str) -> Figure:
    """Return how far a container with this form of work is from its quota, in points.

    The container has a quota of 30 % and runs alongside one with 70 %.
    """
    return _of(f"shape-{name}", lambda s: abs(s["delivered"][0] - 30))


SHAPES = {
    "50us": "units of 50 us",
    "5000us": "units of 5 ms",
    "20000us": "units of 20 ms",
    "50000us": "units of 50 ms",
    "persistent": "persistent 50 ms kernels",
    "cooperative": "cooperative kernels",
    "graph": "CUDA graphs",
    "copy": "copies",
    "sync": "synchronous launches",
}


def _processor(name: str) -> Figure:
    """Return the processor time of governor and helpers in an arm, in % of a core."""

    def figure(result: Mapping[str, Any]) -> float | None:
        arm = result["raw"].get("arms", {}).get(name)
        return float(100 * sum(arm["processors"].values())) if arm else None

    return figure


def _slower(kind: str) -> Figure:
    return _of(kind, lambda s: s["slower_percent"])


AIMS = (
    Aim("45/30/15: mean error over 1 s, points", "quota", _error("thirds", "1s", "mean"), most=0.5),
    Aim("the same over 100 ms, mean", "quota", _error("thirds", "100ms", "mean"), most=1.5),
    Aim(
        "the same over 100 ms, 95th percentile", "quota", _error("thirds", "100ms", "p95"), most=3.5
    ),
    Aim("49/32/16: container furthest behind its quota, points", "quota", _tight, least=-0.5),
    Aim(
        "alone at 10, 50 and 90 %: distance from the cap, percent of the cap",
        "quota",
        _alone,
        most=2,
    ),
    Aim(
        "50 % alongside up to four with 10 %: loss, percent of its share", "quota", _beside, most=3
    ),
    Aim("4 x 25 %, units of 50 us: sum, percent", "quota", _total("four-50us"), least=97),
    Aim("4 x 25 %, units of 0.5 ms: sum, percent", "quota", _total("four-500us"), least=97),
    Aim(
        "`mps`: 4 x 25 %, units of 50 us: sum, percent",
        "quota",
        _total("mps-four-50us"),
        least=99.5,
    ),
    Aim(
        "`mps`: 4 x 25 %, units of 0.5 ms: sum, percent",
        "quota",
        _total("mps-four-500us"),
        least=99.5,
    ),
    Aim(
        "`mps`: 45/30/15: mean error over 100 ms, points",
        "quota",
        _error("mps-thirds", "100ms", "mean"),
        most=0.5,
    ),
    Aim(
        "`mps`: the same, 95th percentile", "quota", _error("mps-thirds", "100ms", "p95"), most=1.2
    ),
    Aim(
        "elastic: work, percent of the time in which any container had work",
        "quota",
        _of("elastic", lambda s: 100 * s["of_ideal"]),
        least=95,
    ),
    Aim(
        "elastic: windows of 1 s in which a container got too little",
        "quota",
        _of("elastic", lambda s: s["short_windows"]),
        most=0,
    ),
    Aim(
        "45/30/15 in units of 20 ms: mean error over 1 s, points",
        "quota",
        _error("units-20ms", "1s", "mean"),
        most=1,
    ),
    *(
        Aim(
            f"{words} at 30 % alongside 70 %: distance from 30 %, points",
            "quota",
            _shape(name),
            most=1,
        )
        for name, words in SHAPES.items()
    ),
    Aim(
        "time until a new quota is reached, ms",
        "quota",
        _of("settle-quota", lambda s: s["settle"]["reached_longest_ms"]),
        most=200,
    ),
    Aim(
        "a holder is stopped: time until the next one runs, ms",
        "quota",
        _of("stopped", lambda s: s["stall"]["longest_ms"]),
        most=20,
    ),
    Aim(
        "a holder is killed: time until the next one runs, ms",
        "quota",
        _of("killed", lambda s: s["stall"]["longest_ms"]),
        most=20,
    ),
    Aim(
        "32 containers: governor and helpers, percent of a core",
        "quota",
        _processor("many"),
        most=19,
    ),
    Aim(
        "the same on a steered GPU, in the first 12 s", "quota", _processor("hardware-many"), most=8
    ),
    Aim("alone at 100 %: slowdown of a training step, percent", "step", _slower("train"), most=0.3),
    Aim(
        "alone at 100 %: slowdown of a decoded token (graph), percent",
        "step",
        _slower("decode-graph"),
        most=0.3,
    ),
)
"""The aims for GPU time, in the order of the rows on the page."""


def found_for(aim: Aim, results: Results) -> list[tuple[str, float]]:
    """Return the dates and values of a figure in results from real GPUs, oldest first."""
    found = []
    for result in results.values():
        if result["suite"] != aim.suite or result["gpu"]["kind"] == "simulated":
            continue
        value = aim.figure(result)
        if value is not None:
            found.append((result["date"], float(value)))
    return sorted(found)


def rows_of(results: Results, aims: Sequence[Aim] = AIMS) -> Iterator[tuple[str, ...]]:
    """Yield a row for each aim, with the columns of TITLES."""
    for aim in aims:
        found = found_for(aim, results)
        if not found:
            yield aim.words, aim.bound, "not measured", "", ""
            continue
        values = [value for _, value in found]
        spread = f"{min(values):.2f} to {max(values):.2f} in {len(values)}" if values[1:] else ""
        yield (
            aim.words,
            aim.bound,
            f"{values[-1]:.2f}",
            spread,
            ("yes" if aim.is_met(values[-1]) else "**no**"),
        )
