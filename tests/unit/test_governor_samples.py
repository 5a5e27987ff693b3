"""Test what a sample proves if it begins during calls of a process: never more than is in use.

The process does everything that changes its ledger, one store at a time and in the order of
libcontrol/account.c, and continues between any two numbers that the governor reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from mmap import mmap
from unittest.mock import Mock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from governor import usage
from governor.account import GpuSample
from governor.usage import Charge, Debt, read_charge
from libcontrol import pages
from tests.conftest import examples
from tests.unit.test_governor_reconcile import (
    MIB,
    SECOND,
    BusyProcess,
    Play,
    World,
    play,
    read,
    write,
)

__all__ = ["play"]  # a fixture

Step = Callable[[], None]
CONTEXT = 100


class Guest(BusyProcess):
    """A process that also creates contexts and streams, and allocates memory that NVML attributes to no process."""

    OVERHEAD = 0

    def __init__(self) -> None:
        super().__init__()
        self.managed: list[int] = []
        self.hidden = 0  # memory in use that NVML attributes to no process
        self.contexts: list[int] = []
        self.n_contexts = 0
        self.reconciled = 0
        self.reporting: list[Step] = []  # the call that reports; one at a time, under a lock

    def now(self) -> int:
        self.clock += 1
        return self.clock

    def hide(self, change: int) -> Step:
        def act() -> None:
            self.hidden += change

        return act

    def charge_unseen(self, size: int) -> list[Step]:
        return [
            self.add("taking", size), self.add("unseen", size), self.add("memory", size),
            self.add("taking", -size),
        ]  # fmt: skip

    def give_unseen(self, size: int) -> list[Step]:
        return [
            self.add("taking", size), self.add("memory", -size), self.add("unseen", -size),
            self.add("taking", -size),
        ]  # fmt: skip

    def take_managed(self, size: int) -> list[Step]:
        return [*self.charge_unseen(size), self.hide(size), lambda: self.managed.append(size)]

    def give_managed(self, size: int) -> list[Step]:
        return [self.hide(-size), *self.give_unseen(size)]

    def stamp(self) -> None:
        self.write("provisional_ns", self.now())

    def report(self, more: int, less: int = 0) -> list[Step]:
        def provisional() -> None:
            if self.read("provisional_ns") <= self.reconciled:
                self.write("provisional", more)
            else:
                self.write("provisional", max(0, self.read("provisional") + more - less))

        return [provisional, self.add("took", more), self.add("gave", less), self.stamp]

    def create(self) -> list[Step]:
        return [
            *self.charge_unseen(CONTEXT), self.add("taking", CONTEXT), self.driver(CONTEXT),
            *self.report(CONTEXT), *self.give_unseen(CONTEXT), self.stamp,
            self.add("taking", -CONTEXT), self.add("contexts", 1),
            lambda: self.contexts.append(CONTEXT),
        ]  # fmt: skip

    def destroy(self) -> list[Step]:
        return [self.driver(-CONTEXT), *self.report(0, CONTEXT), self.add("contexts", -1)]

    def step(self, draw: int) -> None:
        """Begin a call, or advance one that is in progress."""
        kind, size = draw % 16, 1 + draw // 16 % 60
        if kind < 8:
            super().step(kind + 8 * (size - 1))
        elif kind == 8:
            self.steps.append(self.take_managed(size))
        elif kind == 9 and self.managed:
            self.steps.append(self.give_managed(self.managed.pop(size % len(self.managed))))
        elif kind in (10, 11, 12) and not self.reporting:
            self.step_driver(kind)
        else:
            super().step(7 + 8 * (size - 1))

    def step_driver(self, kind: int) -> None:
        """Begin a call in which the driver takes memory on its own, or gives it back."""
        if kind == 10 and self.n_contexts < 3:
            self.n_contexts += 1
            self.reporting = self.create()
        elif kind == 11 and self.contexts:
            self.n_contexts -= 1
            self.contexts.pop()
            self.reporting = self.destroy()
        elif kind == 12:
            self.reporting = [self.driver(3), *self.report(3)]
        self.steps.append(self.reporting)

    def finish(self) -> None:
        """End all calls in progress, and query the pool."""
        for steps in [*self.steps, self.refresh()]:
            while steps:
                steps.pop(0)()
        self.steps = []

    @property
    def memory(self) -> int:
        return self.read("memory")

    @property
    def total(self) -> int:
        """The memory that is really in use, in bytes."""
        return self.there + self.hidden

    @property
    def is_due(self) -> bool:
        return self.read("provisional_ns") > self.reconciled


def read_amid(guest: Guest, go_on: Callable[[str], None]) -> Charge:
    """Read the ledger; `go_on` is called with the name of each field before the field is read."""

    def read_fields(page: mmap, base: int) -> list[int]:
        values = []
        for name in fields:
            go_on(name)
            values.append(pages.read(page, base, "ledger_device", name))
        return values

    fields = usage.read_ledger.fields
    with patch.object(usage, "read_ledger", Mock(side_effect=read_fields)):
        return read_charge(guest.ledger, 0, 0, 2**40)


def sample(guest: Guest, debt: Debt, *continuing: Callable[[str], None]) -> None:
    """Take a sample; each function of `continuing` is called before each number that is read."""

    def go_on(name: str) -> None:
        for act in continuing:
            act(name)

    began = guest.now()
    before = read_amid(guest, go_on)
    go_on("nvml")
    seen = guest.there
    go_on("nvml")
    after = read_amid(guest, go_on)
    debt.update(began, seen, before, after, ended_ns=guest.now())
    guest.reconciled = began


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 2**64), st.sampled_from([0.3, 1, 5]), st.integers(1, 8))
def test_no_sample_proves_more_than_is_in_use(seed: int, often: float, n: int) -> None:
    """Memory that the samples prove to be in use makes the library refuse allocations, so it must
    really be in use, however the samples raced.
    """
    draw = random.Random(seed)  # noqa: S311
    guest, debt = Guest(), Debt()

    def go_on(_name: str) -> None:
        for _ in range(int(draw.random() * 2 * often + 0.5)):
            guest.step(draw.randrange(960))

    for _ in range(n):
        for _ in range(draw.randrange(30)):
            guest.step(draw.randrange(960))
        sample(guest, debt, go_on)
    guest.finish()
    if not guest.is_due:
        assert guest.memory + debt.least <= guest.total
    # A quiet sample proves all that is in use. If there are pools, a second one shows that there is
    # no more.
    sample(guest, debt)
    assert guest.memory + debt.least == guest.total
    guest.finish()
    sample(guest, debt)
    assert guest.memory + debt.bytes == guest.total


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**64), st.sampled_from([0.3, 1, 5]), st.integers(1, 8))
def test_no_sample_hides_what_is_in_use(seed: int, often: float, n: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    guest, debt = Guest(), Debt()
    kinds = [kind for kind in range(16) if kind != 11]  # contexts stay

    def go_on(_name: str) -> None:
        for _ in range(int(draw.random() * 2 * often + 0.5)):
            guest.step(draw.choice(kinds) + 16 * draw.randrange(60))

    for _ in range(n):
        sample(guest, debt, go_on)
    guest.finish()
    late = guest.read("provisional") if guest.is_due else 0
    assert guest.memory + debt.bytes + late >= guest.total


def behind(field: str, steps: Sequence[Step], *, time: int = 1) -> Callable[[str], None]:
    """Return a function for sample() that does `steps` after `field` was read for the `time`-th
    time.
    """
    names: list[str] = []

    def go_on(name: str) -> None:
        if names and names[-1] == field and names.count(field) == time:
            for step in steps:
                step()
        names.append(name)

    return go_on


@pytest.mark.parametrize("stores", range(1, 4))
def test_a_managed_block_that_is_half_charged_during_a_sample_is_no_debt(
    stores: int,
) -> None:
    """A thread may be stopped between two stores for as long as a sample takes."""
    guest, debt = Guest(), Debt()
    for step in [*guest.take(300), *guest.take_managed(200)[:stores]]:
        step()
    sample(guest, debt)
    assert debt.least == debt.bytes == 0


@pytest.mark.parametrize("stores", range(1, 4))
def test_a_managed_block_that_is_half_given_back_during_a_sample_is_no_debt(
    stores: int,
) -> None:
    guest, debt = Guest(), Debt()
    for step in [
        *guest.take(300),
        *guest.take_managed(200),
        *guest.give_managed(200)[: stores + 1],
    ]:
        step()
    sample(guest, debt)
    assert debt.least == debt.bytes == 0


def test_a_managed_block_that_is_given_back_while_the_ledger_is_read_is_no_debt() -> None:
    """The sum is read without the block, and the memory that NVML does not attribute is read with
    it.
    """
    guest, debt = Guest(), Debt()
    for step in [*guest.take(300), *guest.take_managed(200)]:
        step()
    give = guest.give_managed(200)
    lowered = behind("nvml", give[:3], time=2)
    given = behind("unseen", give[3:], time=4)
    sample(guest, debt, lowered, given)
    assert debt.least == debt.bytes == 0


def test_a_context_that_is_made_between_two_reads_counts_once() -> None:
    """The context is still a claim when the governor reads the provisional charge."""
    guest, debt = Guest(), Debt()
    create = guest.create()
    claimed = len(guest.charge_unseen(CONTEXT))
    for step in create[:claimed]:
        step()
    taken = behind("shrunk", create[claimed : claimed + 2], time=2)
    made = behind("provisional_ns", create[claimed + 2 :], time=2)
    sample(guest, debt, taken, made)
    assert debt.least == debt.bytes == 0
    sample(guest, debt)
    assert debt.least == debt.bytes == CONTEXT


def test_a_context_that_is_reported_while_the_ledger_is_read_counts_once() -> None:
    """The report is made in two steps, and the first reading is between them."""
    debt = Debt()
    amid = Charge(CONTEXT, CONTEXT, taking=CONTEXT, told=CONTEXT, took=CONTEXT, contexts=1)
    after = Charge(provisional=CONTEXT, provisional_ns=11, told=CONTEXT, took=CONTEXT, contexts=1)
    debt.update(10, CONTEXT, amid, after, CONTEXT)
    assert after.used(debt.bytes, 10) == CONTEXT
    debt.update(20, CONTEXT, after, after, CONTEXT)
    assert after.used(debt.bytes, 20) == CONTEXT


def test_reports_before_and_during_a_sample_count_once() -> None:
    """The sum of the reports since the last sample is late, but some came before this sample."""
    debt = Debt()
    one = Charge(provisional=MIB, provisional_ns=9, told=MIB, took=MIB)
    two = Charge(provisional=3 * MIB, provisional_ns=11, told=3 * MIB, took=3 * MIB)
    debt.update(10, MIB, one, two)
    assert two.used(debt.bytes, 10) == 3 * MIB
    three = Charge(provisional=7 * MIB, provisional_ns=21, told=7 * MIB, took=7 * MIB)
    debt.update(20, 3 * MIB, two, three)
    assert three.used(debt.bytes, 20) == 7 * MIB
    debt.update(30, 7 * MIB, three, three)
    assert three.used(debt.bytes, 30) == 7 * MIB


def test_a_context_that_becomes_provisional_while_the_ledger_is_read_hides_nothing() -> None:
    """The sum is read with the context's claim, and the memory that NVML does not attribute is read
    without it.
    """
    guest, debt = Guest(), Debt()
    create = guest.create()
    claimed = len(guest.charge_unseen(CONTEXT)) + 2
    for step in create[:claimed]:
        step()
    sample(guest, debt, behind("memory", create[claimed:]))
    # The blocks of the claims that follow are allocated only after the next sample.
    take = guest.take(200)
    for step in take[:2]:
        step()
    sample(guest, debt)
    for step in take[2:]:
        step()
    assert guest.memory + debt.bytes == guest.total


# One process, by hand


def test_a_sample_during_an_allocation_shows_the_least_that_the_driver_took() -> None:
    """A context of 512 is expected to take 520. A sample during an allocation does not show the
    difference.
    """
    debt = Debt()
    made = Charge(told=520, took=520, provisional=520, provisional_ns=1, contexts=1)
    allocates = made._replace(memory=640, moving=64)
    assert debt.update(2, 512 + 640, allocates, allocates, 520) == 520
    assert debt.least == 512
    still = allocates._replace(moving=0)
    assert debt.update(SECOND, 512 + 640, still, still, 520) == 512
    # This sample began before the driver took the next 64.
    allocates = made._replace(memory=704, moving=64)
    assert debt.update(2 * SECOND, 512 + 640, allocates, allocates, 520) == 512
    assert debt.least == 448


def test_a_process_that_asks_for_a_sample_has_no_new_context() -> None:
    """Otherwise a context of less than half its expected size would stay unknown while the process
    asks for samples.
    """
    debt = Debt()
    new = Charge(told=500, took=500, provisional=500, provisional_ns=SECOND, contexts=1)
    assert debt.update(SECOND + 1, 100, new, new, 500) == 500
    assert debt.update(2 * SECOND, 100, new, new, 500) == 100
    asks = new._replace(provisional=0, provisional_ns=2 * SECOND + 1)
    assert debt.update(2 * SECOND + 2, 100, asks, asks, 500) == 100
    # Another context was made, which NVML does not list yet, and the first was destroyed.
    other = asks._replace(took=1000, provisional_ns=2 * SECOND + 3)
    assert debt.update(2 * SECOND + 4, 0, other, other, 500) == 500


def test_both_bounds_are_published(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        child, slot = await world.join(container)
        write(container, slot, memory=64 * MIB, moving=64 * MIB, took=520 * MIB)
        before = container.account.charges(0)
        container.account.reconcile(0, before, GpuSample(5, {child.pid: 576 * MIB}))
        assert read(container, "memory_overhead") == 520 * MIB
        assert read(container, "overhead_last") == 512 * MIB
        assert read(container, "reconciled_ns") == 5

    play(scene)
