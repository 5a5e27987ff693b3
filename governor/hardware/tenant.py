"""State of one container in the policy for a GPU's own scheduler: its shares, use and debts.

The module is pure, as the policy is. `policy` explains the terms (period, turn, rank, circle).
Times are in nanoseconds, and shares are fractions of one GPU.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MS = 1_000_000
PERIOD = 100 * MS
"""Interval within which caps hold and each container that takes turns gets one turn. Switching
costs 0.6 ms (H100, H200): at 100 ms, three containers together deliver 100.7 % of what one delivers
alone; at 20 ms, 94 to 95 %."""
WINDOW = 10
"""Number of periods in a second, within which the cap of a container of class latency holds."""
SLACK = 4 * MS
"""Time by which a container of class latency may exceed its cap in an arbitrary second, because
driver calls may be late. In a second that begins with a period it may not exceed its cap, which
keeps its average exact."""
DEFAULT_SLICE = 2 * MS
"""Slice of all containers while none has work all the time; it is the driver's default."""
BURST = 0.5
"""Fraction of the time that a container could have used. A container that used more than this in a
recent period has to take turns."""
UNFOUND = 10
"""Number of periods for which a container may work without incurring a debt until its channels are
found. A new governor has to find the containers of its predecessor; without this, a
container with a cap of 5 % would be off for 2 s for each such period."""
UNSEARCHED = 50
"""The same number before the first search for its channels has ended. The channels of many
containers that start together are found one after the other (32 containers on an H100: within
5 s)."""
MAX_OWED = 150 * MS
"""Time in nanoseconds. A container that exceeded its guarantee by more than this while others were
below theirs has to take turns, even if it ends its turns early for lack of work."""


class Share(NamedTuple):
    """A container's guarantee and limit on a GPU, and whether its class is latency."""

    guarantee: float
    limit: float
    latency: bool = False


class Setting(NamedTuple):
    """The setting of a container: whether it is on, and its slice in nanoseconds."""

    on: bool
    slice_ns: int


class Window(NamedTuple):
    """A part of a period, in nanoseconds from the beginning of the period."""

    begin: int
    end: int
    more: int = 0
    """The extension at its end, which makes up for earlier windows that were too short."""


class Load(NamedTuple):
    """The load of a container and of the others on a GPU, as far as windows depend on it."""

    guarantee: float
    limit: float
    is_busy: bool
    """Whether it used the GPU in the last few periods; always false for class latency."""
    others: float
    """Sum of the guarantees of the other containers that keep the GPU busy."""
    others_limit: float
    """Sum of their limits, at most 1."""
    had: int
    """GPU time in the last period, in nanoseconds."""
    span: tuple[int, int] = (0, 0)
    """The last interval in which it was on, from the return of the call that switched it on to that
    of the call that switched it off."""


class Second:
    """The GPU time that a container used within the last second, to the accuracy of a step."""

    def __init__(self) -> None:
        # Beginning and end of the use of the GPU in each step, and the GPU time.
        self._parts: deque[tuple[int, int, float]] = deque()
        self._sum = 0.0

    def add(self, begin: int, end: int, ns: float) -> None:
        """Add what was used between two times, and forget what is older than a second."""
        if ns < 0:
            self._take_back(-ns)
        elif ns and end > begin:
            # The use may have been at the end of the step.
            self._parts.append((max(begin, end - max(1, int(ns))), end, ns))
            self._sum += ns
        while self._parts and self._parts[0][1] <= end - WINDOW * PERIOD:
            self._sum -= self._parts.popleft()[2]
        if not self._parts:
            self._sum = 0.0  # discards rounding errors

    def _take_back(self, ns: float) -> None:
        """Subtract an overcharge, oldest use first, so that recent use is not underestimated."""
        while ns > 0 and self._parts:
            begin, end, of = self._parts.popleft()
            taken = min(ns, of)
            self._sum -= taken
            ns -= taken
            if of > taken:
                begin = max(begin, end - max(1, int(of - taken)))
                self._parts.appendleft((begin, end, of - taken))

    def total(self, now: int) -> float:
        """Return the sum. A use that began more than a second ago counts in proportion."""
        since = now - WINDOW * PERIOD
        if not self._parts or self._parts[0][0] >= since:
            return self._sum
        begin, end, ns = self._parts[0]
        return self._sum - ns * (min(end, since) - begin) / (end - begin)

    def time_below(self, amount: float) -> int:
        """Return when the total will be no more than an amount if nothing is added."""
        left = self._sum
        for begin, end, ns in self._parts:
            if left - ns <= amount:
                return WINDOW * PERIOD + begin + int((end - begin) * max(0.0, left - amount) / ns)
            left -= ns
        return 0


class Tenant:
    """A container: its shares, the time that it used, and the time that it is owed or owes."""

    def __init__(self, share: Share, now: int, *, is_adopted: bool = False) -> None:
        self.share = share
        self.is_adopted = is_adopted  # its slices may have been set before
        self.owed = 0.0  # time below its guarantee, in ns of wall time at the guaranteed rate
        self.first = share.latency
        self.spent = 0.0  # GPU time in this period
        self.cost = 0.0  # time of the context switches that it caused in this period
        self.carried = 0.0  # debt from earlier periods to its cap; a credit if negative
        self.turn = 0.0  # length of one turn
        self.is_in_circle = False  # slices alone keep it to its cap
        self.groups = 1  # channel groups with work; each has its own turns
        self.recent: deque[float] = deque(maxlen=WINDOW - 1)  # GPU time in each recent period
        self.costs: deque[float] = deque(maxlen=WINDOW - 1)
        self.second = Second()
        self.room = 0.0  # its cap plus SLACK, less what it used within the last second
        self.is_over = False  # `room` was used up; it is off until it is below its cap again
        self.used_at = now  # when it last used the GPU
        self.on_at = now  # when it was last switched on
        self.could_use = 0.0  # time that it was on and no other container used
        self.did_use = 0.0
        # Fraction that it used of the time that it could have had: the average of recent periods,
        # and the recent peak. Both are 1 while nothing is known yet.
        self.load = self.burst = 1.0
        self.busy = True
        self.n_early = 0  # turns in this period that ended for lack of work
        self.is_continuous = (
            False  # its turns seldom end for lack of work; False while nothing is known
        )
        self.rests = False  # it had the turn, but did nothing
        self.on, self.slice = True, DEFAULT_SLICE
        # A container is found in the middle of a period, and can be steered only from then on. So
        # an excess over its cap in that period is not a debt. What it used before it was found is
        # not a debt either, for at most UNFOUND or, before a search, UNSEARCHED periods.
        self.is_found = self.is_searched = False
        self.n_unfound = 0  # periods in which it worked but could not be switched off
        self.fresh = True

    @property
    def had(self) -> float:
        """GPU time within the last second."""
        return sum(self.recent) + self.spent

    @property
    def is_new(self) -> bool:
        """Whether its channels have the default slice because they are not found yet."""
        return self.fresh and not self.is_found and not self.is_adopted

    @property
    def cost_others(self) -> float:
        """Time within the last second that others could not use because of this container."""
        return self.had + sum(self.costs) + self.cost

    @property
    def own(self) -> float:
        """Its part of this period, less its debt."""
        return self.share.limit * PERIOD - self.carried

    @property
    def budget(self) -> float:
        """GPU time that it may use in this period."""
        own = self.own
        if self.share.latency:
            left = self.share.limit * WINDOW * PERIOD - sum(self.recent)
            left = min(left, self.spent + (0.0 if self.is_over else self.room))
            return left if self.first else min(2 * own, left)
        return max(0.0, own)

    @property
    def max_per_second(self) -> float:
        """GPU time that it may use within any second."""
        return self.share.limit * WINDOW * PERIOD + SLACK

    def use(self, begin: int, now: int, ns: int) -> None:
        """Account for its use between two times; a negative value corrects an overcharge.

        A correction reduces a debt, then the use in this period. It does not become a credit.
        """
        if ns < 0 and self.carried > 0:
            debt = max(0.0, self.carried + ns)
            ns = min(0, int(ns + self.carried - debt))
            self.carried = debt
        self.spent = max(0.0, self.spent + ns)
        self.second.add(begin, now, ns)
        self.room = self.max_per_second - self.second.total(now)
        self.is_over = self.room <= (SLACK if self.is_over else 0)

    @property
    def left(self) -> float:
        """Part of the budget that it has not used."""
        return self.budget - self.spent

    @property
    def left_of_turns(self) -> float:
        """The part of this period's turns that it has not used, not counting a credit."""
        return self.share.limit * PERIOD - max(0.0, self.carried) - self.spent

    @property
    def left_until_off(self) -> float:
        """GPU time that it may use in this period before it is switched off.

        In a circle, turns begin and end anywhere in a period, and each switch disturbs the others.
        So two additional turns are tolerated, unless there is a debt of one.
        """
        if not self.is_in_circle:
            return self.left
        return self.own + (0.0 if self.carried > self.turn else 2 * self.turn) - self.spent

    @property
    def takes_turns(self) -> bool:
        """Whether it has to take turns with similar containers while the first rank runs."""
        return self.is_continuous and not self.rests and (self.burst > BURST or self.share.latency)

    @property
    def owes(self) -> bool:
        """Whether it has to take turns because of the time that it took from others.

        Otherwise a container could avoid taking turns by occasionally ending one early.
        """
        is_debtor = self.owed < -MAX_OWED and self.burst > BURST
        return is_debtor and not self.rests and not self.share.latency

    @property
    def is_capped(self) -> bool:
        """Whether it may not have the whole GPU."""
        return self.share.limit < 1.0

    @property
    def is_spent(self) -> bool:
        """Whether it has used all that its cap allows in this period."""
        return self.is_capped and self.spent >= self.budget
