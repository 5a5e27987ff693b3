"""Decide which containers may use a GPU now, and for how long at a time.

The module is pure: it uses no clock, thread or driver. The caller passes the GPU time that each
container used and the current time; `step` returns a setting for each container and the time of the
next step. The GPU's own scheduler carries the settings out. *On*: the container's channels are
scheduled. *Slice*: how long a channel group runs before the GPU looks for another. The GPU
schedules the groups that are on and have work round-robin, so their slices act as weights, and a
group without work costs nothing. A *turn* is one stay on the GPU: a channel group's turn ends with
its slice or its work; a container's turn lasts while it is the only one of several that is switched
on. In a *round* each busy group has one turn; a period has a whole number of rounds.

A container that is below its guarantee is *owed* the missing time. There are two ranks. The *first
rank* consists of the containers that have been below their guarantee for a while, and of those of
class latency that used less than their guarantee in the last second. They get long slices, and
other containers get short ones, so that the first rank waits for only a fraction of a millisecond.

A container is *continuous* if its turns seldom end for lack of work. Several continuous containers
would waste time switching between short slices, so they take turns: only one of them is on at a
time. If a container has the turn but does nothing, it *rests*: it is on, but takes no turns until
it works again. The context switches that a container in the first rank causes also count against
its guarantee, so that many short pieces of work do not use up the guarantees of others. While the
first rank is empty, all containers are on, with long slices in the ratio of their guarantees. While
no container is continuous, or the GPU is not fully used, nothing delays the first rank, and all
containers have the driver's default slices. A container of class latency is preferred even then.

A container that works on several GPUs at once may have a *window* in each period. Within it, the
other containers that keep the GPU busy are off; outside it, the container itself is off. The caller
passes the windows (gangs.py). The other containers share the rest of the period.

A cap holds within each period: a container that has used its part is off until the next period. A
shortfall is a *credit* for later periods, and an excess is a debt. When channels are switched, the
GPU restarts its round at an arbitrary group. So no container is switched off before all have had
their turns in the period, nor while the slices alone keep all containers within their caps; extra
turns are a debt. The cap of a container of class latency holds within a second instead, so that it
may use all of its time at once. After that it is in the second rank, with at most twice its part
in each period, until its use has fallen again.

Times are in nanoseconds, and shares are fractions of one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from governor.hardware.tenant import (
    BURST,
    DEFAULT_SLICE,
    MS,
    PERIOD,
    SLACK,
    UNFOUND,
    UNSEARCHED,
    WINDOW,
    Load,
    Setting,
    Share,
    Tenant,
    Window,
)

NEVER = 1 << 63

FINE = 10 * MS
"""Longest interval to the next step while a container of class latency is working. The time of its
use is known only to within the length of a step."""
ROUNDS = {1: 3, 2: 3, 3: 2}
"""Rounds per period, by the number of busy channel groups, while the first rank is empty; one round
if there are more groups. A turn costs about 0.2 ms (H200). With a whole number of rounds, each
container has the same time in every period, wherever the period begins."""
SHORTEST = 3 * MS
"""A period is not divided into more rounds if turns would become shorter than this, because context
switches would take too large a part of them."""
LONGER_WAITS = 9 * MS
"""Longest time for which the larger of two containers waits for the smaller one with three rounds
per period; if it would wait longer, there are four."""
CREDIT = 3 * MS
"""Largest credit that a container carries into the next period, or a whole turn if that is longer.
Turns begin and end anywhere in a period, and driver calls end them early or late, so a container
may fall short of its cap."""
DEBT = 3 * PERIOD
"""Largest excess over a cap that is deducted from later periods. What a container used after a
pause is known only 0.3 s later (activity.py)."""
SHORT = 200_000
"""Slice of containers that must not keep the first rank waiting."""
LONG = 16 * MS
"""Slice of a container in the first rank; if all of them are continuous, the sum of their
slices."""
END = 70_000
"""Time by which a turn exceeds its slice, mostly to restore the context (H200: 0 to 100 us).
Of this time, only RESTORE (trace.py) is charged to no container."""
GAP = 80_000
"""Time from the end of a turn to the beginning of the next (H100, H200)."""
TURN_COST = GAP + END
"""Time per turn that no container can use."""
LEAST = 1 * MS
"""Shortest slice while all containers are on: 1 ms costs 8 % in switching, 2 ms 7 % (H100)."""
TURN_LEAST = 10 * MS
"""Shortest turn that is made by switching channels off and on."""
LATER = 10 * MS
"""Shortest interval to the next step on behalf of an idle container. Also the longest interval
between checks of a container that has reached its cap and is still on."""
LITTLE = 1 * MS
"""Time by which a container may exceed its cap before it is switched off."""
SOON = 2 * MS
"""Shortest interval between two steps, because each makes driver calls. Overuse within
the interval is a debt."""

LIVELY = 3 * PERIOD
"""Time for which a container counts as working after its last use of the GPU. It spans several
periods because containers with windows are off most of the time."""
MANY = 4
"""With at least this number of busy channel groups, steps are less frequent."""
CROWD = 16
"""With this many busy containers or more, slices are kept in proportion to the default slice that
containers have until they are found, so that caps hold without switching. A few are found soon."""
RISE = 150 * MS
FALL = 10 * MS
MOST = 400 * MS
"""Thresholds for the time that a container is owed, in wall time at its guaranteed rate. A
container enters the first rank at RISE and leaves it below FALL. It is owed at most MOST. For time
that it took while others were owed, it owes at most MOST."""
LACKS = 0.8
"""Fraction of a container's guarantee for the last second. In a *circle* (the slices alone keep its
containers to their caps), the time that a container is owed varies by a turn or two, and is
recovered slowly because no container gets more than its slices. So a container that got more than
this fraction stays in the circle."""
AWAKE = 2000 * MS
"""Time for which a container keeps the slices of others short after its last use of the GPU."""
BUSY = 0.05, 0.02
"""Fractions of the time that a container could have had. A container's weight counts once it uses
more than the first, until it uses less than the second."""
FULL, NOT_FULL = 0.97, 0.92
"""Fractions of a period with work or context switches. The GPU is full, that is, has more work than
it can do, once N_FULL consecutive periods have exceeded the first, until the average falls below
the second."""
N_FULL = 4
RESTS = 3 * MS
"""If the GPU is idle for this long while a container has the turn, the container rests."""
LOOK = 5 * MS
"""Time from the beginning of a turn to the check whether the container is working."""
ENDING = 5 * MS
"""A container is continuous if it has more GPU time than this per turn that ends for lack of
work."""


N_SHORT = 8
"""Largest number of a container's groups that get SHORT each."""


class Policy:
    """The policy for one GPU. The caller chooses the numbers that identify containers."""

    def __init__(self, now: int) -> None:
        self._tenants: dict[int, Tenant] = {}
        self._now = now
        # Periods begin at the same time on all GPUs.
        self._period_end = (now // PERIOD + 1) * PERIOD
        self._windows: Mapping[int, Window] = {}
        self._turn: int | None = None
        self._turn_end = 0
        self._unused = 0  # idle time of the GPU since the container with the turn last worked
        self._early_turns: Mapping[int, int] = {}
        self._grain, self._later = SOON, LATER
        self._part = 1.0  # recent average part of the time with work or context switches
        self._is_full, self._n_full, self._n_unknown = True, 0, N_FULL
        self._had = 0.0  # time with work or context switches in this period
        # What is left of all budgets, while containers at their caps are still on.
        self._round_left: float = NEVER
        self._is_even = False  # all containers have the same slice, whatever their ranks
        self._circle: set[int] = set()  # containers kept to their caps by their slices alone

    def add(self, tenant: int, share: Share, now: int, *, is_adopted: bool = False) -> None:
        """Let a container share the GPU from now on, or change its share.

        If `is_adopted` is true, its slices may have been set before.
        """
        known = self._tenants.get(tenant)
        if known is None:
            self._tenants[tenant] = Tenant(share, now, is_adopted=is_adopted)
            # Its load is not known yet, so the GPU counts as full for some periods.
            self._is_full, self._n_unknown = True, N_FULL
        else:
            known.share = share

    def remove(self, tenant: int) -> None:
        """Forget a container."""
        self._tenants.pop(tenant, None)
        if self._turn == tenant:
            self._turn = None

    def owed(self, tenant: int) -> float:
        """Return the time that a container is owed, in nanoseconds at its guaranteed rate."""
        return self._tenants[tenant].owed

    def is_first(self, tenant: int) -> bool:
        """Return whether a container is in the first rank."""
        return self._tenants[tenant].first

    def step(
        self,
        now: int,
        used: Mapping[int, int],
        groups: Mapping[int, int] | None = None,
        early: Mapping[int, int] | None = None,
        windows: Mapping[int, Window] | None = None,
    ) -> tuple[dict[int, Setting], int]:
        """Return every container's setting and the time of the next step.

        `used` is the GPU time of each container since the last step, less earlier overcharges.
        `groups` is the number of a container's channel groups that have work, each with its own
        turns. A container's slice is divided among its groups. The number is 0 if a search has
        found none, and missing if no search has ended yet; such a container cannot be switched off.
        Without `groups`, each container has one. `early` is the number of a container's turns that
        have ended for lack of work since the last step. `windows` are those of containers with
        several GPUs.
        """
        self._windows = {i: w for i, w in (windows or {}).items() if i in self._tenants}
        self._early_turns = early or {}
        for number, tenant in self._tenants.items():
            n = 1 if groups is None else groups.get(number, 0)
            tenant.groups = max(1, n)
            tenant.is_found = tenant.is_found or n > 0
            tenant.is_searched = groups is None or number in groups
        self._account(now, used)
        self._rank()
        settings = self._with_windows(now, self._settings(now))
        for number, tenant in self._tenants.items():
            if settings[number].on and not tenant.on:
                tenant.on_at = now
            tenant.on, tenant.slice = settings[number]
        return settings, self._next(now, settings)

    def load(self, tenant: int, now: int) -> Load:
        """Return the load of a container and of the others on the GPU."""
        own = self._tenants[tenant]
        others = [t for t in self._tenants.values() if t is not own and self._is_lively(t, now)]
        return Load(
            own.share.guarantee,
            own.share.limit,
            # A container of class latency needs no window: it is preferred on each GPU when it has
            # work.
            is_busy=now - own.used_at < LIVELY and not own.share.latency,
            others=sum(t.share.guarantee for t in others),
            others_limit=min(1.0, sum(t.share.limit for t in others)),
            had=int(own.recent[-1]) if own.recent else 0,
        )

    def _is_lively(self, tenant: Tenant, now: int) -> bool:
        return tenant.busy and now - tenant.used_at < LIVELY

    # ---- accounting ----

    def _account(self, now: int, used: Mapping[int, int]) -> None:
        passed = max(0, now - self._now)
        together = sum(used.get(number, 0) for number in self._tenants)
        costs = sum(self._early_turns.get(number, 0) for number in self._tenants) * 2 * TURN_COST
        # Turns that end with their slices cost time as well, if others have work.
        turns = min(self._cost_of_turns(used), max(0, passed - together - costs))
        self._had += together + costs + turns
        kept = self._turn if self._turn_end < NEVER else None
        begin, self._now = self._now, max(now, self._now)
        owed = {number for number, tenant in self._tenants.items() if tenant.owed > FALL}
        for number, tenant in self._tenants.items():
            ns = used.get(number, 0)
            share = tenant.share
            tenant.use(begin, self._now, ns)
            cost = self._early_turns.get(number, 0) * 2 * TURN_COST
            tenant.cost += cost
            tenant.n_early += self._early_turns.get(number, 0)
            # Time that a container took while others were owed is a debt; time in which the GPU
            # would have been idle is not.
            is_owing = len(owed) > (number in owed)
            least = -MOST if is_owing else min(tenant.owed, -FALL)
            # A container's idle time in its own turn is charged, too, because others were off then.
            had = ns + cost
            if number == kept:
                had = max(had, min(passed, passed - (together - ns) - costs))
            tenant.owed = min(max(tenant.owed + passed - had / share.guarantee, least), MOST)
            if tenant.is_spent:
                tenant.owed = min(tenant.owed, 0.0)  # it has had all the time that its cap allows
            if ns > 0:
                tenant.used_at, tenant.rests = now, False
            if tenant.on:
                could = passed - (together - ns) - costs - turns
                tenant.could_use += min(passed, max(0, could))
                tenant.did_use += ns
        if kept is not None:
            self._unused += min(passed, max(0, passed - together - costs))
            self._unused = 0 if used.get(kept, 0) > 0 else self._unused
            self._tenants[kept].rests = self._unused >= RESTS
        # The part of an exclusive turn that its container does not use is lost to the others.
        self._forgive(now, passed, together + costs if kept is None else passed)
        if now >= self._period_end:
            self._end_period(now)

    def _cost_of_turns(self, used: Mapping[int, int]) -> float:
        """Return the cost of turns that ended with their slices: time that no container can use."""
        n = largest = 0.0
        for number, tenant in self._tenants.items():
            if tenant.on:
                of_group = max(0, used.get(number, 0)) / tenant.slice
                n += of_group * tenant.groups
                largest = max(largest, of_group)
        n_early = sum(self._early_turns.get(number, 0) for number in self._tenants)
        # A group's turn ends with its slice only if another group has work.
        return TURN_COST * max(0.0, min(n, 2 * (n - largest)) - n_early)

    def _forgive(self, now: int, passed: int, had: float) -> None:
        """Cancel the shortfall that all busy containers have in common: context switches caused it.

        `had` is the part of the elapsed time that the containers together used. The GPU cannot
        fulfil all guarantees if they leave no time for context switches.
        """
        busy = [t for t in self._tenants.values() if now - t.used_at < PERIOD and t.burst > BURST]
        if len(busy) < 2:
            return
        lost = passed - had / min(1.0, sum(t.share.guarantee for t in busy))
        lost = min(max(0.0, lost), passed)
        for tenant in busy:
            tenant.owed = max(tenant.owed - lost, min(tenant.owed, 0.0))
        common = min(t.owed for t in busy)
        if common > 0:
            for tenant in busy:
                tenant.owed -= common

    def _end_period(self, now: int) -> None:
        n = (now - self._period_end) // PERIOD + 1
        self._note_work(self._had / (n * PERIOD))
        self._had = 0.0
        self._period_end += n * PERIOD
        for number, tenant in self._tenants.items():
            over = tenant.spent - tenant.share.limit * PERIOD * n + tenant.carried
            # No debt: class latency is limited within the last second, and a gang by its window.
            is_debt = not tenant.share.latency and not tenant.fresh and number not in self._windows
            # A container that sleeps accumulates no more than CREDIT.
            slept = now - tenant.used_at > PERIOD * 2
            credit = CREDIT if slept else max(CREDIT, min(tenant.turn, tenant.share.limit * PERIOD))
            tenant.carried = min(max(over, -credit), DEBT) if is_debt else 0.0
            tenant.n_unfound += n if tenant.spent and not tenant.is_found else 0
            most = UNFOUND if tenant.is_searched else UNSEARCHED
            is_known = tenant.is_found or tenant.n_unfound >= most
            tenant.fresh = tenant.fresh and not (tenant.spent and is_known)
            if tenant.spent > SOON or tenant.n_early:
                tenant.is_continuous = tenant.spent > ENDING * (tenant.n_early + 1)
            tenant.n_early = 0
            tenant.recent.append(tenant.spent)
            tenant.costs.append(tenant.cost)
            for of in (tenant.recent, tenant.costs):
                of.extend([0.0] * min(n - 1, WINDOW))
            tenant.spent = tenant.cost = 0.0
            if tenant.could_use >= TURN_LEAST:
                part = min(1.0, max(0.0, tenant.did_use / tenant.could_use))
                tenant.load = (tenant.load + part) / 2
                tenant.burst = max(part, (tenant.burst + part) / 2)
                tenant.busy = tenant.load > BUSY[tenant.busy]
                tenant.could_use = tenant.did_use = 0.0

    def _note_work(self, part: float) -> None:
        """Record the fraction of a period in which the GPU had work or switched contexts."""
        if self._n_unknown:
            self._n_unknown -= 1
            part = 1.0
        self._n_full = self._n_full + 1 if part > FULL else 0
        self._part += (min(1.0, part) - self._part) / 5
        if self._n_full >= N_FULL:
            self._part = 1.0
        self._is_full = self._n_full >= N_FULL or (self._is_full and self._part > NOT_FULL)

    # ---- ranks ----

    def _rank(self) -> None:
        for number, tenant in self._tenants.items():
            whole = tenant.share.guarantee * WINDOW * PERIOD
            if number in self._windows:
                tenant.first, tenant.owed = False, 0.0  # the window provides its part
            elif tenant.share.latency:
                is_below = tenant.cost_others < (0.8 if not tenant.first else 1) * whole
                tenant.first = is_below or tenant.owed >= (FALL if tenant.first else RISE)
                tenant.busy = tenant.busy or not tenant.first
            elif tenant.first:
                tenant.first = tenant.owed >= FALL
            else:
                lacks = not tenant.is_in_circle or tenant.had < LACKS * whole
                tenant.first = tenant.owed >= RISE and lacks

    def _is_service(self, tenant: Tenant, now: int) -> bool:
        return tenant.share.latency and now - tenant.used_at < AWAKE

    def _wakes(self, tenant: Tenant, now: int) -> bool:
        return tenant.share.latency or now - tenant.used_at < AWAKE

    # ---- settings ----

    def _settings(self, now: int) -> dict[int, Setting]:
        others = {i: t for i, t in self._tenants.items() if i not in self._windows}
        first = {i: t for i, t in others.items() if t.first}
        rest = {i: t for i, t in others.items() if not t.first}
        waits = any(self._wakes(tenant, now) for tenant in first.values())
        self._is_even = False
        keeps_on = any(t.is_continuous and self._is_lively(t, now) for t in others.values())
        are_turns = any(t.takes_turns for t in rest.values())
        takers = [
            i
            for i, t in rest.items()
            if not t.is_spent and (t.takes_turns or (t.owes and are_turns))
        ]
        if not waits:
            self._turn = None
            # Slices do not depend on which containers are off, because each change takes a driver
            # call.
            working = {i for i, t in rest.items() if t.busy}
            settings = self._by_weight({**first, **rest}, {*working, *first})
        elif not (
            (keeps_on and self._is_full) or any(self._is_service(t, now) for t in first.values())
        ):
            self._turn, self._grain, self._is_even = None, SOON, True
            settings = dict.fromkeys(others, Setting(True, DEFAULT_SLICE))
        else:
            self._grain = SOON
            settings = {i: Setting(True, self._slice_of_first(i, first)) for i in first}
            holder = self._take_turn(takers, now)
            for i, tenant in rest.items():
                # A container that is not continuous has short turns; dividing them would save
                # nothing.
                ns = SHORT * min(tenant.groups, N_SHORT) if tenant.is_continuous else DEFAULT_SLICE
                settings[i] = Setting(i == holder or i not in takers, ns)
        lively = [t for t in others.values() if self._is_lively(t, now)]
        is_batched = not waits and all(t.is_capped and not t.first for t in lively)
        left = sum(max(0.0, t.left) for t in lively)
        has_turns_left = is_batched and any(t.left_of_turns > LITTLE for t in lively)
        self._round_left = left if has_turns_left else NEVER
        for tenant in self._tenants.values():
            tenant.is_in_circle = False
        for i, tenant in others.items():
            # When channels are switched, the GPU restarts its round at an arbitrary group. So
            # nothing is switched while slices keep the containers within their caps.
            tenant.is_in_circle = is_batched and i in self._circle and not tenant.share.latency
            is_over = tenant.is_spent
            if tenant.is_in_circle:
                is_over = tenant.left_until_off <= 0
            elif is_batched and not tenant.share.latency and tenant.spent > tenant.turn / 2:
                # Its next turn comes after those of all others. Until these reach their caps,
                # leaving it on takes none of their time, and then one call switches all of them
                # off.
                is_over = tenant.left <= (-max(LITTLE, tenant.turn) if has_turns_left else LITTLE)
            if tenant.is_capped and is_over:
                settings[i] = settings[i]._replace(on=False)
        return settings

    def _slice_of_first(self, number: int, first: Mapping[int, Tenant]) -> int:
        """Return the slice of a container in the first rank.

        A container with occasional work ends its turns itself. Continuous containers share in the
        ratio of their guarantees, in turns that keep the others of the rank waiting only briefly.
        """
        tenant = first[number]
        # A turn that exceeds a cap would be a debt for some periods.
        most = LONG if tenant.share.latency else min(LONG, int(tenant.share.limit * PERIOD))
        if not tenant.is_continuous:
            return max(LEAST, most)
        length = LONG if all(t.is_continuous for t in first.values()) else DEFAULT_SLICE
        whole = sum(t.share.guarantee for t in first.values() if t.is_continuous)
        return max(LEAST, min(most, int(length * tenant.share.guarantee / whole)))

    def _with_windows(self, now: int, settings: dict[int, Setting]) -> dict[int, Setting]:
        """Return all containers' settings, given those of the containers without a window."""
        at = now - self._period_begin
        inside = {i for i, window in self._windows.items() if window.begin <= at < window.end}
        for i, tenant in self._tenants.items():
            if i in self._windows:
                settings[i] = Setting(i in inside, SHORT)
            elif tenant.busy and not tenant.first and self._uses_its_window(inside, now):
                settings[i] = settings[i]._replace(on=False)
        return settings

    def _uses_its_window(self, inside: set[int], now: int) -> bool:
        return any(now - self._tenants[i].used_at < LIVELY for i in inside)

    @property
    def _period_begin(self) -> int:
        return self._period_end - PERIOD

    def _by_weight(self, tenants: Mapping[int, Tenant], busy: set[int]) -> dict[int, Setting]:
        n = sum(tenants[i].groups for i in busy)
        # The extension of a window (`more`) changes in each period; slices must not.
        free = PERIOD - sum(w.end - w.begin - w.more for w in self._windows.values())
        free = max(0, free)
        # With many turns, even caps that add up to less than the whole GPU may not fit.
        is_room = sum(tenants[i].share.limit for i in busy) * PERIOD + n * TURN_COST < free
        if is_room:
            # All caps fit, and each is reached in whole turns.
            weights = {i: tenant.share.limit for i, tenant in tenants.items()}
            length = PERIOD
        elif sum(tenants[i].share.limit for i in busy) * PERIOD <= free:
            # Each container falls short of its cap only by the cost of turns.
            weights = {i: tenant.share.limit for i, tenant in tenants.items()}
            length = free
        else:
            whole = sum(tenants[i].share.guarantee for i in busy) or 1.0
            # An idle container is not in the sum, so its weight is bounded in case it wakes up.
            weights = {i: min(1.0, t.share.guarantee / whole) for i, t in tenants.items()}
            length = free
        self._circle = {
            i
            for i in busy
            if not is_room and weights[i] <= tenants[i].share.limit + LITTLE / PERIOD
        }
        rounds = self._rounds(n, length * min((weights[i] for i in busy), default=1.0))
        # With many groups, each has one turn per period, so an excess over a cap is not urgent.
        self._grain = SOON if n < MANY else length // rounds // 8
        self._later = LATER if n < MANY else PERIOD // 4
        # Rounds divide the period evenly, so that each container has the same time in each period.
        length = length // rounds - (0 if is_room else n * TURN_COST)
        new = [weights[i] for i in busy if tenants[i].is_new and tenants[i].had]
        is_crowd = len(busy) >= CROWD
        most = DEFAULT_SLICE * len(new) / sum(new) if is_crowd and any(new) else NEVER
        settings = {}
        for i, tenant in tenants.items():
            is_alone = len(busy) == 1 and i in busy
            turn = SHORT if is_alone else max(LEAST, length * weights[i])
            ns = SHORT if is_alone else max(LEAST, min(length, most) * weights[i])
            settings[i] = Setting(True, int(ns))
            # With short slices, a container may have one turn more or less in a period.
            tenant.turn = max(ns, min(turn, SHORTEST))
        return settings

    def _rounds(self, n: int, least: float) -> int:
        """Return the number of rounds per period for `n` groups.

        `least` is the smallest container's time in the period, in nanoseconds.
        """
        rounds = ROUNDS.get(n, 1)
        if n == 2 and least > rounds * LONGER_WAITS:
            return rounds + 1
        return max(1, min(rounds, int(least // SHORTEST)))

    def _take_turn(self, busy: list[int], now: int) -> int | None:
        """Return which of the `busy` containers has the turn; None if there are none."""
        if len(busy) < 2:
            self._turn = busy[0] if busy else None
            self._turn_end = NEVER
            return self._turn
        if self._turn in busy and now < self._turn_end < NEVER:
            return self._turn
        # The container that is owed most is next, so that it recovers what it lost to the first
        # rank; among equals, the next in order.
        last = -1 if self._turn is None else self._turn
        self._turn = min(busy, key=lambda i: (-self._tenants[i].owed, i <= last, i))
        whole = sum(self._tenants[i].share.guarantee for i in busy)
        part = self._tenants[self._turn].share.guarantee / whole
        self._turn_end = now + max(TURN_LEAST, int(PERIOD * part))
        self._unused = 1  # not known yet
        return self._turn

    # ---- when to step again ----

    def _next(self, now: int, settings: Mapping[int, Setting]) -> int:
        at = [self._period_end]
        for window in self._windows.values():
            edges = (self._period_begin + edge for edge in (window.begin, window.end))
            at += [edge for edge in edges if edge > now]
        if self._turn is not None and self._turn_end < NEVER:
            at.append(self._turn_end)
            if self._unused:
                at.append(now + LOOK)
        on = {i: self._tenants[i] for i, setting in settings.items() if setting.on}
        slices = sum(settings[i].slice_ns for i, t in on.items() if t.busy) or 1
        is_ranked = any(tenant.first for tenant in on.values())
        for i, tenant in on.items():
            if not tenant.is_found:
                continue  # nothing can be done about it before its channels are found
            ns = settings[i].slice_ns
            is_idle = now - max(tenant.used_at, tenant.on_at) > PERIOD
            if tenant.first and len(on) > 1 and self._wakes(tenant, now) and not self._is_even:
                left = (tenant.owed - FALL) * tenant.share.guarantee
                if tenant.share.latency:
                    left = max(left, tenant.share.guarantee * WINDOW * PERIOD - tenant.had)
                at.append(now + max(LATER if is_idle else SOON, int(left)))
            if is_idle and tenant.share.latency and tenant.is_capped:
                at.append(now + max(LATER, int(tenant.left)))
            if is_idle:
                continue  # what it overuses until the period ends is deducted from the next
            if tenant.is_in_circle:
                rate = max(ns / slices, 0.01)
                at.append(now + max(self._grain, int(tenant.left_until_off / rate)))
            elif tenant.is_spent:  # it waits for the others to reach their caps
                at.append(now + min(self._later, max(SOON, int(self._round_left))))
            elif tenant.is_capped:
                if tenant.share.latency:
                    at.append(now + FINE)
                # Slices do not predict the use of the first rank. A cap that holds within any
                # second cannot wait for the end of a turn.
                is_rate = tenant.busy and not is_ranked and not tenant.share.latency
                rate = ns / slices if is_rate else 1.0
                left = (tenant.budget - tenant.spent) / min(1.0, max(rate, 0.01))
                at.append(now + max(self._grain, int(left)))
        for tenant in self._tenants.values():
            if tenant.share.latency and tenant.is_over and tenant.is_capped:
                at.append(tenant.second.time_below(tenant.max_per_second - SLACK))
        return max(now + MS // 2, min(at))
