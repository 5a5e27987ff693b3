"""Statistics for two arms that run alternately: medians and bootstrap confidence intervals."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Sequence

RESAMPLES = 10_000


def in_turn(pairs: int) -> Iterator[tuple[str, str]]:
    """Yield the order of each pair: A B, B A, A B..., so that a drift favours neither arm."""
    for i in range(pairs):
        yield ("native", "governed") if i % 2 == 0 else ("governed", "native")


def bootstrap_medians(values: Sequence[float], seed: int = 1) -> list[float]:
    """Return the sorted medians of samples drawn from `values` with replacement."""
    draw = random.Random(seed)  # noqa: S311 - a sample, not a secret
    return sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of `values`."""
    medians = bootstrap_medians(values)
    return medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]


def bootstrap_rounds(rounds: Sequence[Sequence[float]], seed: int = 1) -> list[float]:
    """Return the sorted means of the rounds' medians, one mean for each sample.

    The samples are drawn with replacement: rounds first, then values within each, so that the
    result covers differences between rounds as well as those within a round.
    """
    draw = random.Random(seed)  # noqa: S311 - a sample, not a secret
    return sorted(
        statistics.mean(
            statistics.median(draw.choices(values, k=len(values)))
            for values in draw.choices(rounds, k=len(rounds))
        )
        for _ in range(RESAMPLES // 5)
    )


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers not below `least`, for argparse."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read
