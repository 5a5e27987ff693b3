"""Which containers may use a GPU now, and for how long at a time: the policy for the hardware.

Pure: no clock, no thread, no driver. The caller says what each container used and what time it is;
`step` answers with the setting of each container and the time of the next step. A setting has two
parts, which the GPU's own scheduler carries out. *On* says whether the container's channels are
scheduled at all. The *slice* is how long a channel group runs before the GPU looks for another; the
groups that are on and have work take turns in a circle, so their slices are their weights, and a
group without work costs nothing.

Containers stand in one of two ranks. *First* are those of class latency that have used less than
their guarantee of the last second, and those of the other class that have used less than their
guarantee for a while: they get long slices, and what goes on beside them gets short ones, so that
their work waits for a fraction of a millisecond. A container *goes on* whose turns seldom end with
its work. Short slices waste time in switching where several go on, so of these only one at a time
is on; they have turns. A container of the first rank whose work is shorter than what it takes to
begin it uses up its guarantee by that, too: others keep theirs. With no container in the first rank
all are on, with long slices in the ratio of their guarantees. Where none goes on, or the GPU has
time left, there is nothing to keep the first rank from, and all have the driver's own slices; but
for class latency, which is first in any case.

A container that works on several GPUs at once may have a window in each period: a part of it in
which no container that keeps the GPU busy is on beside it, and outside of which it is off. The
caller says where windows are (gangs.py); the others share what is left of the period.

A cap holds within each period: a container that has used its part of it is off until the next. That
of a container of class latency holds within a second, so that it may use all of it at once; one
that does is of the second rank, and capped in each period, until it has used less again.

Times are nanoseconds, shares are parts of one GPU from 0 to 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

MS = 1_000_000
NEVER = 1 << 63

PERIOD = 100 * MS
"""Caps hold within it, and turns go round in it. Switching costs 0.6 ms (H100, H200): at 100 ms
three containers deliver 100.7 % of solo, at 20 ms 94 to 95."""
WINDOW = 10
"""Periods within which the cap of a container of class latency holds."""
ROUNDS = {1: 3, 2: 3, 3: 2}
"""How often all have their slices in a period, by how many are busy, where no container is in the
first rank; once where there are more. A turn costs some 0.2 ms (H200). In a whole number of rounds
each container has the same in every period, wherever it begins."""
SHORTEST = 3 * MS
"""In fewer where turns would be shorter than this: their ends would cost too much of them."""
LONGER_WAITS = 9 * MS
"""Of two containers the larger one waits for the other for so long at most in three rounds; where
it would be longer there are four."""
CREDIT = 3 * MS
"""What a period's part of a cap may grow by, for what the container was short of in those before,
or a whole turn where that is more: turns begin and end anywhere in a period, and calls of the
driver end them early or late."""
UNFOUND = 10
"""Periods for which a container may work before it is found without a debt: a governor that starts
finds those of the one before it, and one of 5 % would be off for 2 s for each period until then."""
DEBT = 3 * PERIOD
"""So much of what a container had too much is taken off later: what it did after a pause is known
0.3 s later (activity.py)."""
SHORT = 200_000
"""The slice of containers that must not keep the first rank waiting."""
EVEN = 2 * MS
"""That of all where none has work all the time: the driver's own."""
LONG = 16 * MS
"""That of the first rank; where all of it go on, that of all together."""
END = 70_000
"""So long a turn lasts beyond its slice (H200: 0 to 100 us)."""
GAP = 80_000
"""And so long it is until the next one has begun (H100, H200)."""
LEAST = 1 * MS
"""No slice is shorter where all are on: 1 ms costs 8 % in switching, 2 ms 7 % (H100)."""
TURN_LEAST = 10 * MS
"""No turn by switching is shorter."""
LATER = 10 * MS
"""For the sake of a container that is idle no step is nearer, and to look whether one that has
reached its cap has more, as it should not, none is farther."""
LITTLE = 1 * MS
"""So much beyond its cap a container may have before it is switched off."""
SOON = 2 * MS
"""No step is nearer: each takes calls of the driver. What is used too much in it is debt."""

LIVELY = 3 * PERIOD
"""A container that was on the GPU so lately works; those with windows are off most of the time."""
MANY = 4
"""Channel groups with work, from which on steps come less often."""

RISE = 150 * MS
FALL = 10 * MS
MOST = 400 * MS
"""A container enters the first rank when it is owed RISE times its guarantee, and leaves it below
FALL; it is owed MOST at most, and owes as much at most for what it took while others were owed."""
AWAKE = 2000 * MS
"""A container that has not used the GPU for so long keeps no slices short."""
BUSY = 0.05, 0.02
"""Of the time that it could have had a container uses more than the first to count for weights, and
more than the second to go on so."""
FULL, NOT_FULL = 0.98, 0.92
"""The GPU has more work than it can do when it had so much in each of N_FULL periods, until it has
less than the second on average."""
N_FULL = 4
BURST = 0.5
"""A container that used more than this in one of the last periods takes turns."""
ENDING = 5 * MS
"""A container goes on that has so much of the GPU for each turn that ends with its work."""


class Share(NamedTuple):
    """What a container may have of a GPU: guarantee and limit, and whether its class is latency."""

    guarantee: float
    limit: float
    latency: bool = False


class Setting(NamedTuple):
    """What holds for a container: whether it is on, and its slice in nanoseconds."""

    on: bool
    slice_ns: int


class Window(NamedTuple):
    """A part of a period, from its beginning on, in nanoseconds."""

    begin: int
    end: int
    more: int = 0
    """Of that, what is for windows before it that were too short."""


class Load(NamedTuple):
    """What one container and the others do with a GPU, as windows depend on it."""

    guarantee: float
    limit: float
    is_busy: bool
    """It was on the GPU in the last periods."""
    others: float
    """Guarantees of the other containers that keep the GPU busy."""
    others_limit: float
    """And their limits."""
    had: int
    """GPU time in the last period."""


class _Tenant:
    def __init__(self, share: Share, now: int) -> None:
        self.share = share
        self.owed = 0.0  # GPU time below its guarantee, in ns of wall time at that rate
        self.first = share.latency
        self.spent = 0.0  # in this period
        self.cost = 0.0  # and what changes of the context took that it caused
        self.carried = 0.0  # of its cap, beyond what earlier periods allowed, or below it
        self.turn = 0.0  # how long it has the GPU at a time
        self.groups = 1  # that have turns of their own
        self.recent: deque[float] = deque(maxlen=WINDOW - 1)  # used in each of the last periods
        self.costs: deque[float] = deque(maxlen=WINDOW - 1)
        self.used_at = now  # when it last used the GPU
        self.on_at = now  # and when it was last switched on
        self.could_use = 0.0  # time that it was on and no other used, and what it used of that
        self.did_use = 0.0
        # What it used of the time that it could have had, over the last periods and of late: as
        # nothing is known of it yet, all.
        self.load = self.burst = 1.0
        self.busy = True
        self.n_early = 0  # turns in this period that ended with its work
        self.goes_on = False  # few of its turns do; what is not known ends its turns by itself
        self.on, self.slice = True, EVEN
        # It is steered from some time on within the period in which it is found, so what it has
        # beyond its cap until then is no debt; nor what it had before, as far as UNFOUND allows.
        self.is_found = False
        self.n_unfound = 0  # periods in which it worked, and could not be switched off
        self.fresh = True

    @property
    def had(self) -> float:
        """What it used within the last second."""
        return sum(self.recent) + self.spent

    @property
    def cost_others(self) -> float:
        """What others could not use for its sake within the last second."""
        return self.had + sum(self.costs) + self.cost

    @property
    def budget(self) -> float:
        """What it may use in this period."""
        own = self.share.limit * PERIOD - self.carried
        if self.share.latency:
            left = self.share.limit * WINDOW * PERIOD - sum(self.recent)
            return left if self.first else min(own, left)
        return max(0.0, own)

    @property
    def left(self) -> float:
        """What it has not used of that."""
        return self.budget - self.spent

    @property
    def takes_turns(self) -> bool:
        """Whether only one of its kind may be on where others must not wait."""
        return self.goes_on and (self.burst > BURST or self.share.latency)

    @property
    def is_capped(self) -> bool:
        return self.share.limit < 1.0

    @property
    def is_spent(self) -> bool:
        return self.is_capped and self.spent >= self.budget


class Policy:
    """The policy for one GPU. Containers are named by any number."""

    def __init__(self, now: int) -> None:
        self._tenants: dict[int, _Tenant] = {}
        self._now = now
        # Of all GPUs they begin at the same time.
        self._period_end = (now // PERIOD + 1) * PERIOD
        self._windows: Mapping[int, Window] = {}
        self._turn: int | None = None
        self._turn_end = 0
        self._early: Mapping[int, int] = {}
        self._grain = SOON
        self._part = 1.0  # of the time that the GPU had work or changed the context, of late
        self._is_full, self._n_full, self._n_unknown = True, 0, N_FULL
        self._had = 0.0  # of that in this period
        self._round_left: float = NEVER  # of all caps, where those that have reached theirs wait
        self._is_even = False  # all have the same slices, whatever their ranks

    def add(self, tenant: int, share: Share, now: int) -> None:
        """Let a container share the GPU from now on, or change what it may have."""
        known = self._tenants.get(tenant)
        if known is None:
            self._tenants[tenant] = _Tenant(share, now)
            # What it does is not known yet: for some periods the GPU counts as full.
            self._is_full, self._n_unknown = True, N_FULL
        else:
            known.share = share

    def remove(self, tenant: int) -> None:
        """Forget a container."""
        self._tenants.pop(tenant, None)
        if self._turn == tenant:
            self._turn = None

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
        """Return every container's setting and when to step again; `used` since the last step.

        `groups`: how many channel groups of a container have work, each with turns of its own;
        one, where it is not said. A container's slice is for all of them. Where groups are given, a
        container without any was not found yet, and cannot be switched off. `early`: how many of
        its turns ended with its work since the last step. `windows`: when containers that have
        several GPUs are on.
        """
        self._windows = {i: w for i, w in (windows or {}).items() if i in self._tenants}
        self._early = early or {}
        for number, tenant in self._tenants.items():
            tenant.groups = max(1, (groups or {}).get(number, 1))
            tenant.is_found = tenant.is_found or groups is None or number in groups
        self._account(now, used)
        self._rank()
        settings = self._with_windows(now, self._settings(now))
        for number, tenant in self._tenants.items():
            if settings[number].on and not tenant.on:
                tenant.on_at = now
            tenant.on, tenant.slice = settings[number]
        return settings, self._next(now, settings)

    def load(self, tenant: int, now: int) -> Load:
        """Return what a container and the others do."""
        own = self._tenants[tenant]
        others = [t for t in self._tenants.values() if t is not own and self._is_lively(t, now)]
        return Load(
            own.share.guarantee,
            own.share.limit,
            # One of class latency is first on each of its GPUs whenever it has work.
            is_busy=now - own.used_at < LIVELY and not own.share.latency,
            others=sum(t.share.guarantee for t in others),
            others_limit=min(1.0, sum(t.share.limit for t in others)),
            had=int(own.recent[-1]) if own.recent else 0,
        )

    def _is_lively(self, tenant: _Tenant, now: int) -> bool:
        return tenant.busy and now - tenant.used_at < LIVELY

    # ---- what was used ----

    def _account(self, now: int, used: Mapping[int, int]) -> None:
        passed = max(0, now - self._now)
        together = sum(used.get(number, 0) for number in self._tenants)
        costs = sum(self._early.get(number, 0) for number in self._tenants) * 2 * GAP
        # Turns that end with their slices cost as much, where others have work.
        self._had += together + costs
        self._had += sum(
            used.get(i, 0) * GAP / (t.slice + END) for i, t in self._tenants.items() if t.on
        )
        kept = self._turn if self._turn_end < NEVER else None
        self._now = max(now, self._now)
        for number, tenant in self._tenants.items():
            ns = used.get(number, 0)
            share = tenant.share
            tenant.spent += ns
            cost = self._early.get(number, 0) * 2 * GAP
            tenant.cost += cost
            tenant.n_early += self._early.get(number, 0)
            # What it took while others were short is a debt; idle time is none.
            is_owing = any(t.owed > FALL for t in self._tenants.values() if t is not tenant)
            least = -MOST if is_owing else min(tenant.owed, -FALL)
            # A turn in which it did nothing was its own, too: others were off for it.
            had = max(ns + cost, passed - (together - ns) - costs) if number == kept else ns + cost
            tenant.owed = min(max(tenant.owed + passed - had / share.guarantee, least), MOST)
            if tenant.is_spent:
                tenant.owed = min(tenant.owed, 0.0)  # it had what its cap allows
            if ns:
                tenant.used_at = now
            if tenant.on:
                tenant.could_use += max(0, passed - (together - ns) - costs)
                tenant.did_use += ns
        self._forgive(now)
        if now >= self._period_end:
            self._end_period(now)

    def _forgive(self, now: int) -> None:
        """What all busy containers are short of, as switching cost it, is owed to none."""
        busy = [t for t in self._tenants.values() if now - t.used_at < PERIOD and t.burst > BURST]
        common = min((t.owed for t in busy), default=0.0)
        if len(busy) > 1 and common > 0:
            for tenant in busy:
                tenant.owed -= common

    def _end_period(self, now: int) -> None:
        n = (now - self._period_end) // PERIOD + 1
        self._note_work(self._had / (n * PERIOD))
        self._had = 0.0
        self._period_end += n * PERIOD
        for number, tenant in self._tenants.items():
            over = tenant.spent - tenant.share.limit * PERIOD * n + tenant.carried
            # Of class latency the last second says what it may have, or its window.
            is_debt = not tenant.share.latency and not tenant.fresh and number not in self._windows
            # What a container that sleeps does not use is not saved for later.
            slept = now - tenant.used_at > PERIOD * 2
            credit = CREDIT if slept else max(CREDIT, min(tenant.turn, tenant.share.limit * PERIOD))
            tenant.carried = min(max(over, -credit), DEBT) if is_debt else 0.0
            tenant.n_unfound += n if tenant.spent and not tenant.is_found else 0
            is_known = tenant.is_found or tenant.n_unfound >= UNFOUND
            tenant.fresh = tenant.fresh and not (tenant.spent and is_known)
            if tenant.spent > SOON or tenant.n_early:
                tenant.goes_on = tenant.spent > ENDING * (tenant.n_early + 1)
            tenant.n_early = 0
            tenant.recent.append(tenant.spent)
            tenant.costs.append(tenant.cost)
            for of in (tenant.recent, tenant.costs):
                of.extend([0.0] * min(n - 1, WINDOW))
            tenant.spent = tenant.cost = 0.0
            if tenant.could_use >= TURN_LEAST:
                part = min(1.0, tenant.did_use / tenant.could_use)
                tenant.load = (tenant.load + part) / 2
                tenant.burst = max(part, (tenant.burst + part) / 2)
                tenant.busy = tenant.load > BUSY[tenant.busy]
                tenant.could_use = tenant.did_use = 0.0

    def _note_work(self, part: float) -> None:
        """Hear for which part of a period the GPU had work or changed the context."""
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
            if number in self._windows:
                tenant.first, tenant.owed = False, 0.0  # it has its part by them
            elif tenant.share.latency:
                whole = tenant.share.guarantee * WINDOW * PERIOD
                tenant.first = tenant.cost_others < (0.8 if not tenant.first else 1) * whole
                tenant.busy = tenant.busy or not tenant.first
            elif tenant.first:
                tenant.first = tenant.owed >= FALL
            else:
                tenant.first = tenant.owed >= RISE

    def _is_service(self, tenant: _Tenant, now: int) -> bool:
        return tenant.share.latency and now - tenant.used_at < AWAKE

    def _wakes(self, tenant: _Tenant, now: int) -> bool:
        return tenant.share.latency or now - tenant.used_at < AWAKE

    # ---- settings ----

    def _settings(self, now: int) -> dict[int, Setting]:
        others = {i: t for i, t in self._tenants.items() if i not in self._windows}
        first = {i: t for i, t in others.items() if t.first}
        rest = {i: t for i, t in others.items() if not t.first}
        waits = any(self._wakes(tenant, now) for tenant in first.values())
        self._is_even = False
        keeps_on = any(t.goes_on and self._is_lively(t, now) for t in others.values())
        takers = [i for i, t in rest.items() if t.takes_turns and not t.is_spent]
        if not waits:
            self._turn = None
            # Whether one is off says nothing of slices: to set one takes a call of the driver.
            working = {i for i, t in rest.items() if t.busy}
            settings = self._by_weight({**first, **rest}, {*working, *first})
        elif not (
            (keeps_on and self._is_full) or any(self._is_service(t, now) for t in first.values())
        ):
            self._turn, self._grain, self._is_even = None, SOON, True
            settings = dict.fromkeys(others, Setting(True, EVEN))
        else:
            self._grain = SOON
            settings = {i: Setting(True, self._slice_of_first(i, first)) for i in first}
            holder = self._take_turn(takers, now)
            for i, tenant in rest.items():
                # One that does not go on ends its turn by itself; to cut it up would cost as much.
                ns = SHORT if tenant.goes_on else EVEN
                settings[i] = Setting(i == holder or i not in takers, ns)
        lively = [t for t in others.values() if self._is_lively(t, now)]
        is_batched = not waits and all(t.is_capped and not t.first for t in lively)
        left = sum(max(0.0, t.left) for t in lively)
        is_going_on = is_batched and left > LITTLE
        self._round_left = left if is_going_on else NEVER
        for i, tenant in others.items():
            is_over = tenant.is_spent
            if is_batched and tenant.spent > tenant.turn / 2:
                # Its next turn comes after those of all others. As long as these go on to their own
                # caps it takes none of their time, and one call serves all.
                is_over = tenant.left <= (-LITTLE if is_going_on else LITTLE)
            if tenant.is_capped and is_over:
                settings[i] = settings[i]._replace(on=False)
        return settings

    def _slice_of_first(self, number: int, first: Mapping[int, _Tenant]) -> int:
        """Return the slice of a container of the first rank.

        One whose work comes now and then ends its turn by itself. Those that go on share as they
        are guaranteed, in turns that keep others of the rank waiting for little.
        """
        tenant = first[number]
        if not tenant.goes_on:
            return LONG
        length = LONG if all(t.goes_on for t in first.values()) else EVEN
        whole = sum(t.share.guarantee for t in first.values() if t.goes_on)
        return max(LEAST, int(length * tenant.share.guarantee / whole))

    def _with_windows(self, now: int, settings: dict[int, Setting]) -> dict[int, Setting]:
        """Return the settings of all containers, where those of the ones without a window are."""
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

    def _by_weight(self, tenants: Mapping[int, _Tenant], busy: set[int]) -> dict[int, Setting]:
        n = sum(tenants[i].groups for i in busy)
        # What windows have beyond their parts changes each time; slices do not, for that.
        free = PERIOD - sum(w.end - w.begin - w.more for w in self._windows.values())
        free = max(0, free)
        is_room = sum(tenants[i].share.limit for i in busy) * PERIOD < free
        if is_room:
            # There is room for all caps, and they are reached in whole turns.
            weights = {i: tenant.share.limit for i, tenant in tenants.items()}
            length = PERIOD
        else:
            whole = sum(tenants[i].share.guarantee for i in busy) or 1.0
            # One that has been idle is not in the sum, and may wake up.
            weights = {i: min(1.0, t.share.guarantee / whole) for i, t in tenants.items()}
            length = free
        rounds = self._rounds(n, length * min((weights[i] for i in busy), default=1.0))
        # Of many each has one turn in a round, so one that is over its cap is no hurry.
        self._grain = SOON if n < MANY else length // rounds // 8
        length = length // rounds - (0 if is_room else n * GAP)
        settings = {}
        for i, tenant in tenants.items():
            is_alone = len(busy) == 1 and i in busy
            ns = int(length * weights[i]) - tenant.groups * END
            ns = SHORT if is_alone else max(LEAST, ns)
            settings[i] = Setting(True, ns)
            tenant.turn = float(ns)
        return settings

    def _rounds(self, n: int, least: float) -> int:
        """Return in how many rounds so many groups have their time in a period.

        `least` is what of it the container has that has least.
        """
        rounds = ROUNDS.get(n, 1)
        if n == 2 and least > rounds * LONGER_WAITS:
            return rounds + 1
        return max(1, min(rounds, int(least // SHORTEST)))

    def _take_turn(self, busy: list[int], now: int) -> int | None:
        """Return whose turn it is among containers that keep the GPU busy."""
        if len(busy) < 2:
            self._turn = busy[0] if busy else None
            self._turn_end = NEVER
            return self._turn
        if self._turn in busy and now < self._turn_end < NEVER:
            return self._turn
        # What a container lost to those of the first rank it has back; of equals the next one.
        last = -1 if self._turn is None else self._turn
        self._turn = min(busy, key=lambda i: (-self._tenants[i].owed, i <= last, i))
        whole = sum(self._tenants[i].share.guarantee for i in busy)
        part = self._tenants[self._turn].share.guarantee / whole
        self._turn_end = now + max(TURN_LEAST, int(PERIOD * part))
        return self._turn

    # ---- when to look again ----

    def _next(self, now: int, settings: Mapping[int, Setting]) -> int:
        at = [self._period_end]
        for window in self._windows.values():
            edges = (self._period_begin + edge for edge in (window.begin, window.end))
            at += [edge for edge in edges if edge > now]
        if self._turn is not None and self._turn_end < NEVER:
            at.append(self._turn_end)
        on = [i for i, setting in settings.items() if setting.on]
        slices = sum(settings[i].slice_ns for i in on if self._tenants[i].busy) or 1
        for i in on:
            tenant = self._tenants[i]
            is_idle = now - max(tenant.used_at, tenant.on_at) > PERIOD
            if tenant.first and len(on) > 1 and self._wakes(tenant, now) and not self._is_even:
                left = (
                    tenant.share.guarantee * WINDOW * PERIOD - tenant.had
                    if tenant.share.latency
                    else (tenant.owed - FALL) * tenant.share.guarantee
                )
                at.append(now + max(LATER if is_idle else SOON, int(left)))
            if is_idle:
                continue  # what it may have too much until the period ends is taken off the next
            if tenant.is_spent:  # it waits for the others to reach their caps
                at.append(now + min(LATER, max(SOON, int(self._round_left))))
            elif tenant.is_capped:
                # Slices of the first rank say nothing of what it uses.
                is_rate = tenant.busy and not any(self._tenants[j].first for j in on)
                rate = settings[i].slice_ns / slices if is_rate else 1.0
                left = (tenant.budget - tenant.spent) / min(1.0, max(rate, 0.01))
                at.append(now + max(self._grain, int(left)))
        return max(now + MS // 2, min(at))
