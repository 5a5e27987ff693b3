"""Rate limits for events that tenants cause.

Each container has its own limits for connections and log lines.
"""

from __future__ import annotations

import time
from typing import Any

LINE_S = 1.0
LINES = 64
"""Rate of a `RateLimitedLog`: one line every `LINE_S` seconds, after a burst of `LINES`."""


class RateLimiter:
    """A rate with a burst: `burst` events at once, then one every `each_s` seconds.

    Times are in seconds on a monotonic clock.
    """

    def __init__(self, each_s: float, burst: int) -> None:
        self._each_s, self._burst_s = each_s, burst * each_s
        self._paid_until = -self._burst_s  # end of the time that the events so far take up

    def wait(self, now: float) -> float:
        """Return the time until the next event may happen, in seconds; 0 if it may happen now."""
        return max(0.0, max(self._paid_until, now - self._burst_s) + self._each_s - now)

    def take(self, now: float) -> None:
        """Count an event."""
        self._paid_until = max(self._paid_until, now - self._burst_s) + self._each_s

    def may(self, now: float) -> bool:
        """Count an event if it may happen now, and return whether it may."""
        if self.wait(now) > 0:
            return False
        self.take(now)
        return True


class RateLimitedLog:
    """A log for lines that a tenant causes.

    Lines in excess of the rate are dropped; the next line that is written gives their number.
    """

    def __init__(self, log: Any) -> None:
        self._log = log
        self._pace = RateLimiter(LINE_S, LINES)
        self._n_left_out = 0

    def info(self, event: str, **fields: object) -> None:
        """Write a line, or count it as dropped."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Write a warning, or count it as dropped."""
        self._write("warning", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        if not self._pace.may(time.monotonic()):
            self._n_left_out += 1
            return
        if self._n_left_out:
            fields["left_out"] = self._n_left_out
            self._n_left_out = 0
        getattr(self._log, level)(event, **fields)
