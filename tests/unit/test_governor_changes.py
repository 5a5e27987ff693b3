"""Test changes of quotas that wait for room on the GPU while other requests and failures occur."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from governor.container import Container
from governor.errors import RefusedError
from governor.quota import Quota
from tests.unit.governor_world import GIB, MetricsWorld

WAIT_S = 20.0


class DecidedRoom:
    """Replaces the parker: a container waits for room until the test decides."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Container, int, asyncio.Future[None]]] = []
        self._changed = asyncio.Condition()

    async def make(self, container: Container, more: int) -> None:
        decided = asyncio.get_running_loop().create_future()
        async with self._changed:
            self.waiting.append((container, more, decided))
            self._changed.notify_all()
        await decided

    async def until_waiting(self, count: int = 1) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: len(self.waiting) >= count)

    def give(self, number: int = 0) -> None:
        self.waiting[number][2].set_result(None)

    def refuse(self, number: int = 0) -> None:
        self.waiting[number][2].set_exception(RefusedError("no room", hint="try again"))


Scene = Callable[[MetricsWorld, DecidedRoom, Container], Awaitable[None]]


def run(directory: Path, build_dir: Path, scene: Scene) -> None:
    """Play a scene on a node with one container of 4 GiB and 40 %."""

    async def play() -> None:
        world = MetricsWorld(directory, build_dir / "libcontrol")
        room = DecidedRoom()
        try:
            container = await world.admit("one")
            world.server.admissions.make_room = room.make
            await scene(world, room, container)
            assert booked(world, container) == container.quota
        finally:
            world.close()

    asyncio.run(play())


def booked(world: MetricsWorld, container: Container) -> Quota | None:
    """Return the quota of a container in the allocation table."""
    [gpu] = world.server.admissions._allocations._gpus
    return gpu.quotas.get(container.key)


def change(world: MetricsWorld, **quota: Any) -> asyncio.Task[dict[str, Any]]:
    """Begin to change the quota of the container."""
    return asyncio.create_task(world.server.admissions.set({"id": "one", **quota}))


def amounts(quota: Quota) -> tuple[int, int]:
    return quota.memory // GIB, quota.compute


def test_of_two_concurrent_changes_neither_is_lost(tmp_path: Path, build_dir: Path) -> None:
    async def scene(world: MetricsWorld, room: DecidedRoom, container: Container) -> None:
        first = change(world, memory=12 * GIB)
        await room.until_waiting()
        second = change(world, compute=20)
        await asyncio.sleep(0.01)
        room.give()
        await asyncio.gather(first, second)
        assert amounts(container.quota) == (12, 20)

    run(tmp_path, build_dir, scene)


def test_a_change_that_fails_leaves_a_later_one_alone(tmp_path: Path, build_dir: Path) -> None:
    async def scene(world: MetricsWorld, room: DecidedRoom, container: Container) -> None:
        first = change(world, memory=12 * GIB)
        await room.until_waiting()
        second = change(world, compute=20)
        await asyncio.sleep(0.01)
        room.refuse()
        with pytest.raises(RefusedError, match="no room"):
            await first
        await second
        assert amounts(container.quota) == (4, 20)

    run(tmp_path, build_dir, scene)


def test_two_changes_that_grow_each_wait_for_their_room(tmp_path: Path, build_dir: Path) -> None:
    async def scene(world: MetricsWorld, room: DecidedRoom, container: Container) -> None:
        first, second = change(world, memory=8 * GIB), change(world, memory=12 * GIB)
        await room.until_waiting()
        room.give()
        await room.until_waiting(2)
        room.give(1)
        await asyncio.gather(first, second)
        assert [more // GIB for _, more, _ in room.waiting] == [4, 4]
        assert amounts(container.quota) == (12, 40)

    run(tmp_path, build_dir, scene)


def test_while_a_change_waits_others_get_neither_the_old_nor_the_new_quota(
    tmp_path: Path, build_dir: Path
) -> None:
    """After a failed change to more memory and less time, the container has its former time."""

    async def scene(world: MetricsWorld, room: DecidedRoom, container: Container) -> None:
        first = change(world, memory=12 * GIB, compute=10)
        await room.until_waiting()
        for memory, compute in (("1Gi", "61"), ("4Gi", "60")):
            with pytest.raises(LookupError, match="refused"):
                await world.admit("two", memory, compute)
        world.server.admissions.make_room = give_room
        await world.admit("two", "3Gi", "60")
        room.refuse()
        with pytest.raises(RefusedError, match="no room"):
            await first
        assert amounts(container.quota) == (4, 40)

    run(tmp_path, build_dir, scene)


async def give_room(_container: Container, _more: int) -> None:
    """Return at once."""


def test_a_gpu_that_is_lost_during_a_change_does_not_hide_the_refusal(
    tmp_path: Path, build_dir: Path
) -> None:
    async def scene(world: MetricsWorld, room: DecidedRoom, container: Container) -> None:
        first = change(world, memory=12 * GIB)
        await room.until_waiting()
        [device] = container.devices
        world.server.admissions._allocations.set_lost(device.uuid, "it does not answer")
        room.refuse()
        with pytest.raises(RefusedError, match="no room"):
            await first
        assert amounts(container.quota) == (4, 40)

    run(tmp_path, build_dir, scene)


def test_a_container_that_ends_while_its_change_waits_is_not_stored_again(
    tmp_path: Path, build_dir: Path
) -> None:
    async def scene(world: MetricsWorld, room: DecidedRoom, container: Container) -> None:
        first = change(world, memory=12 * GIB)
        await room.until_waiting()
        world.server.admissions.end(container, "test")
        other = await admit_again(world)
        stored: list[object] = []
        world.server.admissions._state.put = stored.append  # type: ignore[method-assign]
        room.give()
        with pytest.raises(RefusedError, match="one"):
            await first
        assert stored == []
        assert booked(world, container) == other.quota
        container.quota = other.quota  # what `run` compares

    run(tmp_path, build_dir, scene)


async def admit_again(world: MetricsWorld) -> Container:
    """Admit another container with the same id."""
    world.server.admissions.make_room = give_room
    return await world.admit("one", "2Gi", "30")


def test_a_container_that_ends_while_it_waits_for_its_memory_is_refused(
    tmp_path: Path, build_dir: Path
) -> None:
    async def scene(world: MetricsWorld, room: DecidedRoom, container: Container) -> None:
        starting = asyncio.create_task(world.admit("two", "2Gi", "10"))
        await room.until_waiting()
        world.server.admissions.end(room.waiting[0][0], "test")
        room.give()
        with pytest.raises(LookupError, match="refused"):
            await starting
        assert list(world.server.containers.values()) == [container]

    run(tmp_path, build_dir, scene)
