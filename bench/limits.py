"""Limits the time of a part of a benchmark, so that a part that hangs does not affect others."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class PartError(Exception):
    """A part reached its time limit."""


@contextlib.contextmanager
def time_limit(seconds: float, name: str) -> Iterator[None]:
    """Raise PartError in this thread, which must be the main one, when the time is up."""

    def over(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise PartError(f"{name} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
