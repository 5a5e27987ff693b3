"""Containers that lie to the arbiter, on a virtual clock: their reports do not reduce the share of any other container.

A ledger is written by its container, and the arbiter reads it every few microseconds. A container
can therefore report at any time that it wants the GPU, that it works, that it is done, and how
long it worked, whether or not that is true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from governor.arbiter import NO_TENANT, WHOLE, Arbiter, load_library
from tests.unit.test_arbiter import MS, S, config

TICK = 20_000
UNIT = 200_000  # unit of the other containers' work
SWITCH = 130_000
LONG = 3 * S
# After this time, runner_pages.c takes back a grant in which no work began.
UNUSED = 5 * MS


@pytest.fixture(scope="session")
def library(build_dir: Path):
    return load_library(build_dir / "libcontrol")


@dataclass
class Now:
    """The state on which a liar bases its next report."""

    arbiter: Arbiter
    tenant: int
    now: int
    holds: bool
    began: int  # start of the current grant


Lie = Callable[[Now], None]


def wants_and_does_nothing(at: Now) -> None:
    at.arbiter.want(at.tenant, at.now, want=True)
    if at.holds and at.now >= at.began + UNUSED:
        at.arbiter.released(at.now, used=False)


def has_changed_its_mind(at: Now) -> None:
    """Stop wanting the GPU as soon as it is granted."""
    at.arbiter.want(at.tenant, at.now, want=not at.holds)
    if at.holds and at.now >= at.began + UNUSED:
        at.arbiter.released(at.now, used=False)


def is_done_at_once(at: Now) -> None:
    at.arbiter.want(at.tenant, at.now, want=True)
    if at.holds:
        at.arbiter.released(0)


def works_for_half_a_hand_over(at: Now) -> None:
    """Hold the GPU for as long as a hand-over may take, and report no work."""
    at.arbiter.want(at.tenant, at.now, want=True)
    if at.holds and at.now >= at.began + 400_000:
        at.arbiter.released(at.now)


def calls_and_does_not_come(at: Now) -> None:
    """Want the GPU repeatedly for short moments, but begin no work when it is granted."""
    at.arbiter.want(at.tenant, at.now, want=not at.holds and bool(at.now // TICK % 2))
    if at.holds and at.now >= at.began + UNUSED:
        at.arbiter.released(at.now, used=False)


LIES: tuple[Lie, ...] = (
    wants_and_does_nothing,
    has_changed_its_mind,
    is_done_at_once,
    works_for_half_a_hand_over,
    calls_and_does_not_come,
)


def shares(library, quotas: list[int], lie: Lie, quota: int, limit: int) -> list[float]:
    """Return the shares, in percent of the GPU, that the others get in 3 s next to a liar with this
    quota.
    """
    with Arbiter(library, config()) as arbiter:
        others = [arbiter.add(q * WHOLE // 100, q * WHOLE // 100, 0) for q in quotas]
        liar = arbiter.add(quota * WHOLE // 100, limit * WHOLE // 100, 0)
        done = dict.fromkeys(others, 0)
        left = dict.fromkeys(others, 0)
        holder, last, epoch, began, free = NO_TENANT, NO_TENANT, 0, 0, 0
        for now in range(0, LONG, TICK):
            for other in others:
                arbiter.sign(other, now)
                arbiter.want(other, now, want=True)
                arbiter.busy(other, done[other])
            arbiter.sign(liar, now)
            arbiter.busy(liar, 0)
            lie(Now(arbiter, liar, now, holder == liar, began))
            view = arbiter.step(now)
            holder = view.holder
            if view.epoch != epoch:
                epoch, began = view.epoch, now
                free = now + (SWITCH if holder != last else 0)
                last = holder
            if holder in (NO_TENANT, liar) or now < free:
                continue
            if not left[holder] and now + UNIT // 2 > view.deadline_ns:
                arbiter.busy(holder, done[holder])
                arbiter.released(now)
                continue
            left[holder] = (left[holder] or UNIT) - TICK
            done[holder] += TICK
        return [100 * done[other] / LONG for other in others]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
@pytest.mark.parametrize(
    ("quotas", "quota", "limit"),
    [
        ([45, 45], 10, 10),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (([50], 40, 40), ([45, 45], 10, 100), ([30], 10, 10))
        ),
    ],
)
def test_a_liar_takes_no_share_of_another_container(library, lie, quotas, quota, limit):
    """A lie gains at most a quarter of the liar's own share. If all time is promised, all
    containers pay for hand-overs.

    If only the reported use of a grant that is given back early were charged, four of these lies
    would leave the others less than 1 % of the GPU, and the fifth 36 of 45 %.
    """
    got = shares(library, quotas, lie, quota, limit)
    for share, promised in zip(got, quotas, strict=True):
        assert share > 0.92 * promised, got


def test_a_liar_gets_no_more_lent_time_than_others(library):
    """Both containers may use idle time, and both have the same guarantee."""
    with Arbiter(library, config()) as arbiter:
        honest, liar = (arbiter.add(WHOLE // 10, WHOLE, 0) for _ in range(2))
        held = {honest: 0, liar: 0}
        began, epoch = 0, 0
        for now in range(0, LONG, TICK):
            for tenant in (honest, liar):
                arbiter.sign(tenant, now)
                arbiter.want(tenant, now, want=True)
            arbiter.busy(honest, held[honest])
            arbiter.busy(liar, 0)
            view = arbiter.step(now)
            if view.epoch != epoch:
                epoch, began = view.epoch, now
            held[view.holder] += TICK
            if now >= (began + 400_000 if view.holder == liar else view.deadline_ns):
                arbiter.released(now)
        assert held[liar] < 1.4 * held[honest]


NAP = 150_000
WORK = 10_000


def test_containers_that_work_briefly_pay_for_the_context_switches(library):
    """Three containers work for 10 us and sleep for 150 us. Each grant makes the GPU switch
    contexts twice.

    If only the reported use of such grants were charged, the other container would have 42.5 %
    instead of its 50 %.
    """
    step = 10_000
    with Arbiter(library, config()) as arbiter:
        victim = arbiter.add(WHOLE // 2, WHOLE // 2, 0)
        nappers = [arbiter.add(16 * WHOLE // 100, 16 * WHOLE // 100, 0) for _ in range(3)]
        done = dict.fromkeys([victim, *nappers], 0)
        left = dict.fromkeys(done, 0)
        awake = dict.fromkeys(nappers, 0)
        last, epoch, free = NO_TENANT, 0, 0
        for now in range(0, LONG, step):
            for tenant in done:
                arbiter.sign(tenant, now)
                arbiter.want(tenant, now, want=now >= awake.get(tenant, 0))
                arbiter.busy(tenant, done[tenant])
            view = arbiter.step(now)
            holder = view.holder
            if view.epoch != epoch:
                epoch = view.epoch
                free = now + (SWITCH if holder != last else 0)
                last = holder
            if holder == NO_TENANT or now < free:
                continue
            is_late = not left[holder] and now + UNIT // 2 > view.deadline_ns
            if is_late if holder == victim else now < awake[holder]:
                arbiter.released(now)
                continue
            left[holder] = (left[holder] or (UNIT if holder == victim else WORK)) - step
            done[holder] += step
            if holder != victim and not left[holder]:
                awake[holder] = now + step + NAP
        assert 100 * done[victim] / LONG > 48.5
        # The three are not starved: they pay with their own shares.
        for napper in nappers:
            stats = arbiter.stats(napper)
            assert 100 * stats.charged_ns / LONG == pytest.approx(16, abs=0.5)


@pytest.mark.parametrize("limit", [5, 100])
def test_delays_by_containers_that_keep_their_grants_do_not_add_up(library, limit):
    """Nine containers of 5 % do nothing with their grants, and report that their work still runs.

    If the times for which others wait for them add up, the other container has 36 % instead of its
    50 %, and waits for up to 8 s.
    """
    step, end = 100_000, 8 * S
    with Arbiter(library, config(longest_ns=100 * MS)) as arbiter:
        victim = arbiter.add(WHOLE // 2, WHOLE // 2, 0)
        liars = [arbiter.add(WHOLE // 20, limit * WHOLE // 100, 0) for _ in range(9)]
        held = dict.fromkeys(liars, 0)
        done = left = stall = longest = 0
        holder, last, epoch, free = NO_TENANT, NO_TENANT, 0, 0
        for now in range(0, end, step):
            for tenant in (victim, *liars):
                arbiter.sign(tenant, now)
                arbiter.want(tenant, now, want=True)
                arbiter.busy(tenant, held.get(tenant, done))
            if holder in held:
                arbiter.alive(now)
            view = arbiter.step(now)
            holder = view.holder
            stall = 0 if holder == victim else stall + step
            # At first all nine are due at once, 28 ms each; later they are not.
            longest = max(longest, stall) if now > S else 0
            if view.epoch != epoch:
                epoch = view.epoch
                free = now + (SWITCH if holder != last else 0)
                last = holder
            if holder in held:
                held[holder] += step
            if holder != victim or now < free:
                continue
            if not left and now + UNIT // 2 > view.deadline_ns:
                arbiter.released(now)
                continue
            left = (left or UNIT) - step
            done += step
        assert 100 * done / end > 48.5
        assert longest <= 200 * MS
