"""Test the decisions about which containers' memory is on a GPU, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from governor.residency import (
    COST,
    IDLE_NS,
    STAY_NS,
    TURN_NS,
    Occupant,
    Orders,
    Whereabouts,
    decide,
    excess,
)
from tests.conftest import examples

GIB = 1 << 30
S = 1_000_000_000
NOW = 1000 * S


def resident(key: str, quota: int, *, idle_s: float = 5, stayed_s: float = 100, **more) -> Occupant:
    return Occupant(
        key,
        quota * GIB,
        Whereabouts.RESIDENT,
        worked_ns=NOW - int(idle_s * S),
        since_ns=NOW - int(stayed_s * S),
        **more,
    )


def parked(key: str, quota: int, *, waits_s: float | None = None, held: int = 0) -> Occupant:
    waits_ns = None if waits_s is None else NOW - int(waits_s * S)
    return Occupant(key, quota * GIB, Whereabouts.PARKED, held=held, waits_ns=waits_ns)


def test_nothing_moves_while_no_container_waits() -> None:
    assert decide(80 * GIB, [resident("a", 40), parked("b", 60)], NOW).leave == ()


def test_a_container_comes_if_there_is_room() -> None:
    orders = decide(80 * GIB, [resident("a", 40), parked("b", 40, waits_s=0)], NOW)
    assert (orders.leave, orders.come) == ((), ("b",))


def test_memory_that_a_parked_container_keeps_is_not_free() -> None:
    tenants = [resident("a", 40), parked("b", 40, waits_s=0), parked("c", 40, held=1)]
    orders = decide(80 * GIB, tenants, NOW)
    assert (orders.leave, orders.come) == (("a",), ())


def test_the_container_that_has_been_idle_for_longest_leaves() -> None:
    tenants = [
        resident("a", 20, idle_s=5),
        resident("b", 20, idle_s=50),
        resident("c", 20, idle_s=10),
        parked("d", 30, waits_s=0),
    ]
    assert decide(70 * GIB, tenants, NOW).leave == ("b",)
    assert decide(65 * GIB, tenants, NOW).leave == ("b", "c")


def test_a_container_stays_if_others_free_enough_memory() -> None:
    tenants = [
        resident("small", 2, idle_s=50),
        resident("large", 40, idle_s=5),
        parked("new", 40, waits_s=0),
    ]
    assert decide(42 * GIB, tenants, NOW).leave == ("large",)


def test_idle_containers_leave_before_working_ones() -> None:
    tenants = [
        resident("works", 40, idle_s=0, stayed_s=500),
        resident("idle", 40, idle_s=1, stayed_s=2),
        parked("new", 40, waits_s=0),
    ]
    assert decide(80 * GIB, tenants, NOW).leave == ("idle",)


@pytest.mark.parametrize(
    ("stayed_ns", "move_ns", "leaves"),
    [
        (TURN_NS - 1, 0, False),
        (TURN_NS, 0, True),
        (TURN_NS, 3 * S, False),
        (COST * 3 * S, 3 * S, True),
    ],
)
def test_a_working_container_stays_for_a_turn(stayed_ns, move_ns, leaves) -> None:
    works = resident("a", 40, idle_s=0, stayed_s=stayed_ns / S, move_ns=move_ns)
    orders = decide(40 * GIB, [works, parked("b", 40, waits_s=0)], NOW)
    assert bool(orders.leave) == leaves


def test_a_container_that_has_just_come_stays_although_it_is_idle() -> None:
    new = resident("a", 40, idle_s=IDLE_NS / S, stayed_s=STAY_NS / S - 0.001)
    assert decide(40 * GIB, [new, parked("b", 40, waits_s=0)], NOW).leave == ()
    old = replace(new, since_ns=NOW - STAY_NS)
    assert decide(40 * GIB, [old, parked("b", 40, waits_s=0)], NOW).leave == ("a",)
    costly = replace(old, move_ns=2 * STAY_NS)
    assert decide(40 * GIB, [costly, parked("b", 40, waits_s=0)], NOW).leave == ()
    costly = replace(costly, since_ns=NOW - 2 * STAY_NS)
    assert decide(40 * GIB, [costly, parked("b", 40, waits_s=0)], NOW).leave == ("a",)


def test_work_of_class_latency_is_not_interrupted() -> None:
    works = resident("a", 40, idle_s=0, is_latency=True)
    assert decide(40 * GIB, [works, parked("b", 40, waits_s=0)], NOW).leave == ()
    idle = resident("a", 40, is_latency=True)
    assert decide(40 * GIB, [idle, parked("b", 40, waits_s=0)], NOW).leave == ("a",)


def test_a_container_that_may_not_be_parked_stays() -> None:
    orders = decide(40 * GIB, [resident("a", 40, may_leave=False), parked("b", 40, waits_s=0)], NOW)
    assert orders.leave == ()


def test_no_container_leaves_if_that_would_not_suffice() -> None:
    tenants = [
        resident("a", 10),
        resident("b", 30, may_leave=False),
        parked("c", 40, waits_s=0),
    ]
    assert decide(40 * GIB, tenants, NOW).leave == ()


def test_no_other_container_leaves_while_enough_are_leaving() -> None:
    leaving = replace(resident("a", 40), place=Whereabouts.LEAVING, keeps=GIB)
    tenants = [leaving, resident("b", 40), parked("c", 39, waits_s=0)]
    orders = decide(80 * GIB, tenants, NOW)
    assert (orders.leave, orders.come) == ((), ())
    tenants[2] = parked("c", 41, waits_s=0)
    assert decide(80 * GIB, tenants, NOW).leave == ("b",)


def test_a_container_comes_while_another_one_releases_its_memory() -> None:
    going = replace(resident("a", 40), place=Whereabouts.LEAVING, keeps=GIB, is_going=True)
    tenants = [going, resident("b", 40), parked("c", 39, waits_s=0)]
    assert decide(80 * GIB, tenants, NOW) == Orders(come=("c",))


def test_containers_come_in_the_order_in_which_they_began_to_wait() -> None:
    tenants = [
        parked("late", 10, waits_s=1),
        parked("first", 60, waits_s=3),
        resident("a", 40, idle_s=0, stayed_s=1),
    ]
    assert decide(80 * GIB, tenants, NOW).come == ()  # not even the one that would fit
    assert decide(110 * GIB, tenants, NOW).come == ("first", "late")


def test_a_container_for_which_no_other_leaves_does_not_keep_others_waiting() -> None:
    tenants = [
        resident("service", 40, idle_s=0, is_latency=True),
        parked("large", 60, waits_s=3),
        parked("small", 20, waits_s=1),
    ]
    assert decide(80 * GIB, tenants, NOW) == Orders(come=("small",))
    tenants[0] = replace(tenants[0], worked_ns=NOW - 5 * S)
    assert decide(80 * GIB, tenants, NOW) == Orders(leave=("service",))


def test_a_quota_that_never_fits_beside_the_others_counts_as_far_as_it_fits() -> None:
    others = [parked(key, 18, held=GIB) for key in "bcd"]
    large = parked("a", 78, waits_s=2, held=GIB)
    assert decide(79 * GIB, [large, *others], NOW).come == ("a",)
    comes = replace(large, place=Whereabouts.RESIDENT, keeps=GIB, holds=70 * GIB, waits_ns=None)
    assert excess(79 * GIB, [comes, *others]) == 0
    assert decide(79 * GIB, [comes, *others], NOW) == Orders()
    # It does not come if the memory that it has allocated does not fit.
    assert decide(79 * GIB, [replace(large, holds=77 * GIB), *others], NOW).come == ()


def test_idle_containers_leave_for_one_that_is_never_parked() -> None:
    tenants = [
        resident("a", 30, idle_s=5),
        resident("b", 30, idle_s=50),
        resident("new", 30, idle_s=0, stayed_s=0, is_fixed=True),
    ]
    assert excess(80 * GIB, tenants) == 10 * GIB
    assert decide(80 * GIB, tenants, NOW).leave == ("b",)
    tenants[1] = replace(tenants[1], place=Whereabouts.LEAVING)
    assert decide(80 * GIB, tenants, NOW) == Orders()


# ---- decisions over time ----


@dataclass
class OverbookedGpu:
    """A GPU and its containers; a move takes `cost_ns` each way."""

    capacity: int
    cost_ns: int
    tenants: dict[str, Occupant]
    always: frozenset[str] = frozenset()
    now_ns: int = NOW
    worked: dict[str, int] = field(default_factory=dict)
    moves: int = 0
    until: dict[str, int] = field(default_factory=dict)

    def lived(self, one: Occupant, ns: int) -> Occupant:
        """Return a container as it is `ns` nanoseconds later."""
        now_ns, works = self.now_ns, one.key in self.always
        if one.place in (Whereabouts.LEAVING, Whereabouts.COMING) and now_ns >= self.until[one.key]:
            comes = one.place is Whereabouts.COMING
            return replace(
                one,
                place=Whereabouts.RESIDENT if comes else Whereabouts.PARKED,
                since_ns=now_ns if comes else one.since_ns,
                move_ns=self.cost_ns,
                waits_ns=None,
            )
        if works and one.place is Whereabouts.RESIDENT:
            self.worked[one.key] = self.worked.get(one.key, 0) + ns
            return replace(one, worked_ns=now_ns)
        if works and one.place is Whereabouts.PARKED and one.waits_ns is None:
            return replace(one, waits_ns=now_ns)
        return one

    def step(self, ns: int) -> None:
        self.now_ns += ns
        for key in self.tenants:
            self.tenants[key] = self.lived(self.tenants[key], ns)
        orders = decide(self.capacity, self.tenants.values(), self.now_ns)
        for keys, place in ((orders.leave, Whereabouts.LEAVING), (orders.come, Whereabouts.COMING)):
            for key in keys:
                self.tenants[key] = replace(self.tenants[key], place=place)
                self.until[key] = self.now_ns + self.cost_ns
                self.moves += 1
        assert excess(self.capacity, self.tenants.values()) <= 0


@pytest.mark.parametrize("cost_ns", [S // 3, S, 4 * S])
def test_two_containers_that_always_work_take_turns_and_lose_little(cost_ns: int) -> None:
    world = OverbookedGpu(
        40 * GIB,
        cost_ns,
        {"a": resident("a", 30), "b": parked("b", 30, waits_s=0)},
        frozenset("ab"),
    )
    for _ in range(30_000):
        world.step(20_000_000)
    total = 600 * S
    turn = max(TURN_NS, COST * cost_ns)
    assert abs(world.worked["a"] - world.worked["b"]) <= turn
    lost = 2 * cost_ns / (turn + 2 * cost_ns)
    assert sum(world.worked.values()) / total >= 1 - lost - 0.02


@given(
    st.lists(st.tuples(st.integers(2, 40), st.booleans()), min_size=1, max_size=8),
    st.integers(40, 80),
    st.sampled_from([0, GIB // 2, GIB]),
)
@settings(max_examples=examples(10))
def test_every_container_that_waits_comes_and_the_gpu_is_never_overfull(
    wanted: list[tuple[int, bool]], capacity: int, kept: int
) -> None:
    tenants = {
        str(i): replace(parked(str(i), size, held=kept), keeps=kept)
        for i, (size, _) in enumerate(wanted)
    }
    always = frozenset(str(i) for i, (_, works) in enumerate(wanted) if works)
    world = OverbookedGpu(capacity * GIB, S // 3, tenants, always)
    for _ in range(2_000):
        world.step(100_000_000)
    for key in always:
        assert world.worked.get(key, 0) > 0
