"""Serves requests that arrive at random, and records each arrival and the time until its answer.

Arrivals do not wait for answers (an open loop), so a request that arrives while another one is in
progress waits for it, and its time includes that wait.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

RECORD = struct.Struct("<QQ")
"""Arrival since the beginning, and time until the answer, both in nanoseconds."""


def arrivals(mean_us: float, seconds: float, seed: int) -> Iterator[int]:
    """Yield the arrivals of a Poisson process within `seconds`, in nanoseconds from the start."""
    draw, at = random.Random(seed), 0  # noqa: S311 - nothing secret depends on it
    while (at := at + int(draw.expovariate(1 / mean_us) * 1000) + 1) <= seconds * 1e9:
        yield at


def serve(
    answer: Callable[[], None], times: Iterable[int], out: BinaryIO, stop: threading.Event
) -> int:
    """Answer requests at these times, or until `stop` is set; return their number."""
    begin, n = time.monotonic_ns(), 0
    for at in times:
        if stop.wait(max(0.0, (begin + at - time.monotonic_ns()) / 1e9)):
            break
        answer()
        out.write(RECORD.pack(at, time.monotonic_ns() - begin - at))
        n += 1
    return n
