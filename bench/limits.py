"""A time limit for a part of a benchmark: one that hangs does not take the others along."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class PartError(Exception):
    """A part came to its time limit."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise PartError in this thread, the main one, when the time is over."""

    def over(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise PartError(f"{what} took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
