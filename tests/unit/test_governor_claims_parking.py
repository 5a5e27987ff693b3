"""Claims on a node that grants more memory than its GPUs have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from governor.config import MemoryOptions
from governor.errors import OccupiedError, RefusedError
from tests.unit.test_governor_claims import FREE, GIB, ClaimsWorld, share, told, use
from tests.unit.test_governor_claims import run as run_in

TWICE = MemoryOptions(overbook=2.0, host=100 * GIB)
GRAPHICS = {"annotations": {"tidegate.gpu/capabilities": "compute,utility,graphics"}}


def run(scene: Callable[[ClaimsWorld], Awaitable[None]], memory: MemoryOptions = TWICE) -> None:
    run_in(scene, memory=memory)


def part(uid: str, gib: int, compute: int = 10, **more: Any) -> dict[str, Any]:
    return told(uid, share(memory=gib * GIB, compute=compute, **more))


def parks(world: ClaimsWorld, name: str) -> bool:
    container, _ = world.server.admissions.find(name) or (None, None)
    assert container is not None
    assert container.quota.parking == (container.parking is not None)
    return container.quota.parking


def test_claims_add_up_to_more_than_there_is() -> None:
    async def scene(world: ClaimsWorld) -> None:
        for uid in "abc":
            world.claim(part(uid, 10))
        assert world.booked() == (30 * GIB, 30)
        with pytest.raises(OccupiedError, match="1024 MiB is left"):
            world.claim(part("d", 2))
        with pytest.raises(RefusedError, match="15872 MiB"):
            world.claim(told("d", share(memory=16 * GIB, compute=1, gpu=1)))
        for uid in "abc":
            await world.admit(f"container-{uid}", use(uid))
            assert parks(world, f"container-{uid}")

    run(scene)


def test_without_overbooking_no_claim_is_parked() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 10))
        await world.admit("one", use("a"))
        assert not parks(world, "one")
        with pytest.raises(OccupiedError):
            world.claim(part("b", 10))

    run(scene, MemoryOptions())


def test_a_claim_that_is_never_parked_has_its_memory() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 10, parking="never"))
        with pytest.raises(OccupiedError, match="5632 MiB is left"):
            world.claim(part("b", 6))
        world.claim(part("b", 5))
        await world.admit("one", use("a"))
        await world.admit("two", use("b"))
        assert not parks(world, "one")
        assert parks(world, "two")

    run(scene)


def test_a_claim_with_several_gpus_is_never_parked() -> None:
    async def scene(world: ClaimsWorld) -> None:
        both = [share(f"gpu/{gpu}", gpu=gpu, memory=10 * GIB, compute=10) for gpu in range(2)]
        world.claim(told("a", *both))
        with pytest.raises(OccupiedError, match="5632 MiB is left"):
            world.claim(part("b", 6))
        await world.admit("one", use("a", "gpu/0", "gpu/1"))
        assert not parks(world, "one")

    run(scene)


def test_a_container_that_cannot_be_parked_needs_room() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 10))
        world.claim(part("b", 10))
        with pytest.raises(RefusedError, match="asks for the capability graphics") as caught:
            await world.admit("refused", use("a"), **GRAPHICS)
        assert "parking: never" in caught.value.hint
        await world.admit("two", use("a"))
        assert parks(world, "two")
        await world.end("two")
        world.server.bookings.unclaim("b")
        await world.admit("three", use("a"), **GRAPHICS)
        assert not parks(world, "three")
        with pytest.raises(OccupiedError, match="5632 MiB is left"):
            world.claim(part("b", 6))
        await world.end("three")
        await world.admit("four", use("a"))
        assert parks(world, "four")
        world.claim(part("b", 10))

    run(scene)


def test_containers_that_share_a_claim_are_parked_together() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 10))
        await world.admit("one", use("a"))
        with pytest.raises(RefusedError, match="the capability graphics"):
            await world.admit("two", use("a"), **GRAPHICS)
        await world.admit("three", use("a"))
        assert parks(world, "three")

    run(scene)


def test_a_container_with_shares_of_two_gpus_is_never_parked() -> None:
    async def scene(world: ClaimsWorld) -> None:
        shares = [share(f"{gpu}/0", gpu=gpu, memory=10 * GIB, compute=10) for gpu in range(2)]
        world.claim(told("a", *shares))
        world.claim(part("b", 10))
        with pytest.raises(RefusedError, match="because it has several GPUs"):
            await world.admit("refused", use("a", "0/0", "1/0"))
        assert world.booked() == (20 * GIB, 20)
        world.server.bookings.unclaim("b")
        await world.admit("one", use("a", "0/0", "1/0"))
        assert not parks(world, "one")

    run(scene)


def test_the_host_has_room_for_all_claims_that_may_be_parked() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 10))
        with pytest.raises(OccupiedError, match="2048 MiB are left, but 3072 MiB are needed"):
            world.claim(part("b", 3))
        world.claim(part("b", 3, parking="never"))
        assert world.booked() == (13 * GIB, 20)

    run(scene, MemoryOptions(overbook=2.0, host=12 * GIB))


def test_a_restarted_governor_knows_what_may_be_parked() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 8))
        world.claim(part("b", 7))
        world.claim(part("c", 7))
        await world.admit("one", use("a"), **GRAPHICS)
        await world.admit("two", use("b"))
        before = world.server._allocations._gpus[0]
        found = (before.memory_fixed, before.memory_parkable)
        assert found == (8 * GIB, (7 * GIB, 14 * GIB))
        await world.restart()
        after = world.server._allocations._gpus[0]
        assert (after.memory_fixed, after.memory_parkable) == found
        assert not parks(world, "one")
        assert parks(world, "two")

    run(scene)


def test_a_gpu_offers_more_than_one_claim_can_have() -> None:
    async def scene(world: ClaimsWorld) -> None:
        told_about = world.server._allocations.describe()["gpus"][0]
        assert (told_about["memory"], told_about["memory_offered"]) == (FREE, 2 * FREE)

    run(scene)
