"""Test when containers are told to park their memory, and the reactions to what they report."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from governor import parker as module
from governor.arenas import ArenaError, Arenas
from governor.errors import RefusedError
from governor.parker import AGAIN_NS, COME_NS, LATE_NS, LEAVE_NS, Parker
from governor.parking import Parking, ParkingReport
from governor.quota import Device, Quota
from governor.residency import IDLE_NS, STAY_NS, Whereabouts
from libcontrol import layout, pages

GIB = 1 << 30
S = 1_000_000_000
GPU = Device(0, "GPU-0", "a GPU", 41 * GIB)
SECOND = Device(1, "GPU-1", "a GPU", 41 * GIB)
CONTEXT = 512 << 20


class PlayedArenas:
    total = 0

    def __init__(self) -> None:
        self.grown: list[tuple[int, int]] = []
        self.error: str | None = None
        self.may_grow = asyncio.Event()
        self.may_grow.set()

    async def grow(self, slot: int, size: int, turn: Callable[[], Awaitable[None]]) -> None:
        await turn()
        if self.error:
            raise ArenaError(self.error)
        await self.may_grow.wait()
        self.grown.append((slot, size))


class PlayedParking:
    """A container with one process, which follows orders while `obeys` is true."""

    def __init__(self, memory: int) -> None:
        self.told = ParkingReport(n_processes=1, n_parked=1, n_going=1, movable=memory)
        self.is_ordered = False
        self.obeys = True
        self.arenas = PlayedArenas()
        self.lacks: dict[int, int] = {}

    def report(self) -> ParkingReport:
        return self.told

    def order(self, *, resident: bool) -> None:
        self.is_ordered = resident
        if self.obeys:
            self.settle()

    def settle(self) -> None:
        here = int(self.is_ordered)
        self.told = replace(
            self.told, n_resident=here, n_parked=1 - here, n_going=1 - here, awaiting=0
        )

    def lacking(self, quota: int) -> dict[int, int]:
        assert quota
        return self.lacks


class PlayedContainer:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def container(key: str, memory: int, *, parks: bool = True, devices: Any = (GPU,)) -> Any:
    return PlayedContainer(
        key=key,
        identifier=key,
        quota=Quota(memory * GIB, 10, 100, parking=parks),
        devices=devices,
        parking=PlayedParking(memory * GIB - CONTEXT) if parks else None,
        account=SimpleNamespace(seen=lambda _: (CONTEXT, 1)),
        suspension="",
        residency="",
        times_parked=0,
        has_ended=False,
    )


class Played:
    """A node, on a clock that the test advances."""

    def __init__(self, *containers: Any) -> None:
        self.containers = {one.key: one for one in containers}
        self.reserve = GIB
        self.parker = Parker(self, (GPU, SECOND), lambda: self.reserve)  # type: ignore[arg-type]
        self.now_ns = time.monotonic_ns()

    def step(self, seconds: float = 0.0) -> bool:
        self.now_ns += int(seconds * S)
        return self.parker.step(self.now_ns)

    def wants(self, one: Any) -> None:
        one.parking.told = replace(one.parking.told, awaiting=1)

    def works(self, one: Any) -> None:
        one.parking.told = replace(one.parking.told, work=one.parking.told.work + 1)


def where(*containers: Any) -> list[str]:
    return [one.residency for one in containers]


def test_a_container_comes_when_it_waits_and_leaves_when_another_one_waits() -> None:
    a, b = container("a", 30), container("b", 30)
    node = Played(a, b)
    assert node.step()
    assert where(a, b) == ["parked", "parked"]
    node.wants(a)
    with capture_logs() as logs:
        node.step()
        node.step()
    assert where(a, b) == ["resident", "parked"]
    assert [line["event"] for line in logs] == ["container-resident"]
    assert (logs[0]["container"], logs[0]["memory"]) == ("a", 30 * GIB - CONTEXT)
    assert logs[0]["seconds"] == 0.0
    node.wants(b)
    node.step((STAY_NS + IDLE_NS) / S)
    node.step()
    node.step()
    assert where(a, b) == ["parked", "resident"]
    # The initial state, in which memory counts as parked, is not a move.
    assert (a.times_parked, b.times_parked) == (1, 0)


def test_a_container_comes_as_soon_as_the_other_gives_its_memory_up() -> None:
    a, b = container("a", 30), container("b", 30)
    node = Played(a, b)
    node.wants(a)
    node.step()
    node.step()
    a.parking.obeys = False
    node.wants(b)
    node.step(5)
    node.step(0.1)
    assert where(a, b) == ["leaving", "parked"]
    assert not b.parking.is_ordered
    a.parking.told = replace(a.parking.told, n_resident=0, n_going=1)
    node.step(0.1)
    assert b.parking.is_ordered
    assert where(a, b) == ["leaving", "coming"]


def test_memory_that_nvml_reports_for_a_parked_container_counts() -> None:
    a, b = container("a", 30), container("b", 30)
    node = Played(a, b)
    # The container reports that its memory is parked, but still holds it.
    node.step()
    a.account.seen = lambda _: (30 * GIB, time.monotonic_ns() + 1000 * S)
    node.wants(b)
    node.step()
    assert where(a, b) == ["parked", "parked"]
    assert not b.parking.is_ordered


def test_a_container_that_does_not_leave_stays_and_is_left_alone_for_a_while() -> None:
    a, b = container("a", 30), container("b", 30)
    node = Played(a, b)
    node.wants(a)
    node.step()
    node.step()
    a.parking.obeys = False
    node.wants(b)
    node.step(5)
    node.step()
    assert not a.parking.is_ordered
    with capture_logs() as logs:
        node.step(LEAVE_NS / S + 1)
    assert [line["event"] for line in logs] == ["container-not-parked", "container-waits"]
    assert [line["container"] for line in logs] == ["a", "b"]
    assert a.parking.is_ordered
    node.step(1)
    node.step(AGAIN_NS / S - 10)
    assert a.residency == "resident"
    node.step(20)
    assert a.residency == "leaving"


def test_a_move_to_the_gpu_that_takes_long_is_logged_once() -> None:
    a = container("a", 30)
    node = Played(a)
    a.parking.obeys = False
    node.wants(a)
    node.step()
    with capture_logs() as logs:
        for _ in range(3):
            node.step(LATE_NS / S)
    assert [line["event"] for line in logs] == ["container-not-resident"]


def test_a_suspended_container_is_left_alone() -> None:
    a, b = container("a", 30), container("b", 30)
    node = Played(a, b)
    node.wants(a)
    node.step()
    node.step()
    a.suspension = "suspended"
    node.wants(b)
    node.step(20)
    assert a.parking.is_ordered


def test_a_suspended_container_does_not_come() -> None:
    a = container("a", 30)
    node = Played(a)
    a.suspension = "suspended"
    node.wants(a)
    node.step()
    assert not a.parking.is_ordered
    a.suspension = ""
    node.step()
    assert a.parking.is_ordered


def test_a_container_that_never_reports_its_arrival_leaves_like_any_other() -> None:
    a, b = container("a", 30), container("b", 30)
    node = Played(a, b)
    a.parking.obeys = False
    node.wants(a)
    node.step()
    node.wants(b)
    node.step(COME_NS / S - 1)
    assert a.parking.is_ordered
    node.step(2)
    node.step((STAY_NS + IDLE_NS) / S)
    assert not a.parking.is_ordered


def test_a_restarted_governor_finds_where_memory_is() -> None:
    a, b = container("a", 30), container("b", 30)
    a.parking.order(resident=True)
    node = Played(a, b)
    node.step()
    assert where(a, b) == ["resident", "parked"]


def test_a_restarted_governor_decides_nothing_before_it_has_sampled_the_gpu() -> None:
    a, b = container("a", 30), container("b", 30)
    a.account.seen = b.account.seen = lambda _: (0, 0)
    # Container a was leaving when the previous governor ended, and holds all of its memory.
    a.parking.told = replace(a.parking.told, n_parked=0, n_going=0)
    node = Played(a, b)
    node.wants(b)
    node.step()
    assert where(a, b) == ["leaving", "parked"]
    node.step(1)
    assert not b.parking.is_ordered
    a.account.seen = b.account.seen = lambda _: (30 * GIB, 1)
    a.parking.settle()
    node.step()
    assert where(a, b) == ["parked", "parked"]
    a.account.seen = b.account.seen = lambda _: (CONTEXT, time.monotonic_ns() + 1000 * S)
    node.step()
    assert b.parking.is_ordered


def test_without_containers_that_may_be_parked_nothing_is_done() -> None:
    assert not Played(container("a", 30, parks=False)).step()
    assert not Played().step()


def test_host_memory_is_made_ready_where_gpu_memory_is_short() -> None:
    async def run() -> None:
        a, b = container("a", 30), container("b", 30)
        a.parking.lacks = {0: 20 * GIB}
        node = Played(a)
        node.step()
        await asyncio.sleep(0)
        assert a.parking.arenas.grown == []
        node.containers["b"] = b
        node.step()
        await asyncio.sleep(0.01)
        assert a.parking.arenas.grown == [(0, 20 * GIB)]

    asyncio.run(run())


def test_host_memory_of_a_container_that_has_to_leave_is_made_ready_first() -> None:
    async def run(error: str | None) -> list[bool]:
        a, b, c = (container(key, 30) for key in "abc")
        for one in (a, b, c):
            one.parking.obeys = False
            one.parking.lacks = {0: 20 * GIB}
        node = Played(a, b, c)
        node.step()
        a.parking.arenas.may_grow.clear()
        a.parking.arenas.error = error
        spots = node.parker._spots
        assert spots[a].place is Whereabouts.PARKED
        spots[a].place = Whereabouts.LEAVING
        await asyncio.sleep(0.05)
        early = [bool(one.parking.arenas.grown) for one in (a, b, c)]
        a.parking.arenas.may_grow.set()
        await asyncio.sleep(0.05)
        late = [bool(one.parking.arenas.grown) for one in (a, b, c)]
        tasks = list(node.parker._growing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [*early, *late]

    assert asyncio.run(run(None)) == [False, False, False, True, True, True]
    with capture_logs():
        found = asyncio.run(run("none is left"))
    # If there is no host memory for the container that leaves, the others are prepared anyway.
    assert found == [False, True, True, False, True, True]


def test_missing_host_memory_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE_NS", 0)

    async def run() -> None:
        a, b = container("a", 30), container("b", 30)
        a.parking.lacks = {0: 20 * GIB}
        a.parking.arenas.error = "this node lacks 5 bytes of memory"
        node = Played(a, b)
        node.step()
        await asyncio.sleep(0.01)

    with capture_logs() as logs:
        asyncio.run(run())
    assert [line["event"] for line in logs] == ["no-host-memory"]


def test_a_container_that_is_never_parked_waits_for_its_room() -> None:
    async def run() -> None:
        a = container("a", 30)
        node = Played(a)
        node.wants(a)
        node.step(-100)
        node.step(10)
        node.step(10)
        assert where(a) == ["resident"]
        new = container("new", 30, parks=False)
        node.containers["new"] = new
        task = asyncio.create_task(node.parker.run())
        await node.parker.make_room(new)
        assert a.residency == "parked"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_start_is_refused_if_others_keep_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM_S", 0.1)

    async def run() -> None:
        a = container("a", 30)
        node = Played(a)
        node.wants(a)
        node.step()
        node.step()
        new = container("new", 20, parks=False)
        node.containers["new"] = new
        with pytest.raises(RefusedError, match="10240 MiB of memory is held by containers"):
            await node.parker.make_room(new)
        await node.parker.make_room(container("elsewhere", 20, parks=False, devices=(SECOND,)))

    asyncio.run(run())


def test_no_start_waits_if_no_container_can_be_parked() -> None:
    async def run() -> None:
        node = Played(container("a", 30, parks=False))
        new = container("new", 10, parks=False)
        node.containers["new"] = new
        node.reserve = 20 * GIB  # raised after the containers had been admitted
        await node.parker.make_room(new)

    asyncio.run(run())


def test_a_changed_reserve_takes_effect() -> None:
    a, b = container("a", 20), container("b", 20)
    node = Played(a, b)
    node.reserve = 2 * GIB
    node.wants(a)
    node.wants(b)
    node.step()
    node.step()
    assert sorted(where(a, b)) == ["parked", "resident"]
    node.reserve = GIB
    node.step()
    node.step()
    assert where(a, b) == ["resident", "resident"]


def test_a_quota_that_grows_waits_for_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM_S", 0.1)

    async def run() -> None:
        a, b = container("a", 20), container("b", 20, parks=False)
        node = Played(a, b)
        node.wants(a)
        node.step()
        node.step()
        await node.parker.make_room(b, 0)
        with pytest.raises(RefusedError, match="1024 MiB"):
            await node.parker.make_room(b, GIB)
        await node.parker.make_room(b, 0)

    asyncio.run(run())


# ---- what a container reports ----


@pytest.fixture
def pair() -> Iterator[tuple[Parking, mmap.mmap]]:
    """A container with three processes, and its ledger."""
    with mmap.mmap(-1, layout.LEDGER_SIZE) as ledger, mmap.mmap(-1, layout.GRANT_SIZE) as grant:
        pages.init_ledger(ledger)
        arenas = Arenas(ledger)
        processes: dict[int, Any] = {}
        for slot in (0, 1, 5):
            processes[slot] = SimpleNamespace(slot=slot)
            arenas.open(slot)
        yield Parking(grant, ledger, processes, arenas, 40 * GIB), ledger
        for slot in processes:
            arenas.close(slot)


def write(ledger: mmap.mmap, slot: int, **values: int) -> None:
    for name, value in values.items():
        pages.write(ledger, pages.slot_base(slot), "ledger_slot", name, value)


def test_reports_are_added_up_and_bounded(pair) -> None:
    parking, ledger = pair
    write(ledger, 0, residency=3, movable=2**64 - 1, parked=2**63, awaiting=1)
    write(ledger, 1, residency=2, movable=GIB)
    write(ledger, 5, residency=77)
    pages.write(ledger, layout.ledger_device(1, 0), "ledger_device", "pending", 4)
    report = parking.report()
    assert (report.n_processes, report.n_resident, report.n_parked, report.n_going) == (3, 0, 1, 2)
    assert report.movable == 41 * GIB
    assert report.parked == 40 * GIB
    assert report.awaiting == 1
    assert report.is_busy


def test_no_report_makes_the_node_give_more_host_memory_than_the_quota(pair) -> None:
    parking, ledger = pair
    for slot in (0, 1, 5):
        write(ledger, slot, movable=2**64 - 1)
    quota = 200 << 20
    for _ in range(4):
        for slot, size in parking.lacking(quota).items():
            asyncio.run(parking.arenas.grow(slot, size))
    assert parking.arenas.total <= quota + 3 * layout.ARENA_PIECE
    assert parking.lacking(quota) == {}


def test_an_order_is_written_to_the_grant_page(pair) -> None:
    parking, _ = pair
    assert not parking.is_ordered
    parking.order(resident=True)
    assert parking.is_ordered
    parking.order(resident=False)
    assert not parking.is_ordered
