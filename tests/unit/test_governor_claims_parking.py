"""Test claims on a node that grants more memory than its GPUs have."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from governor.config import MemoryOptions
from governor.errors import OccupiedError, RefusedError, StateError
from tests.unit.test_governor_claims import FREE, GIB, ClaimsWorld, share, told, until, use
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


def test_claims_add_up_to_more_memory_than_the_gpu_has() -> None:
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


def test_a_claim_that_is_never_parked_has_its_memory_on_the_gpu() -> None:
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


def test_a_claim_for_which_the_host_has_no_room_stays_on_the_gpu() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 10))
        world.claim(part("b", 3))  # 2 GiB of host memory are left
        assert [world.claims()[uid].get("parkable", False) for uid in "ab"] == [True, False]
        await world.admit("one", use("b"))
        assert not parks(world, "one")
        with pytest.raises(OccupiedError, match="2560 MiB is left"):
            world.claim(part("c", 3))
        world.claim(part("c", 2))
        assert world.claims()["c"]["parkable"]

    run(scene, MemoryOptions(overbook=2.0, host=12 * GIB))


def test_a_claim_that_never_fits_into_the_host_is_booked_as_without_overbooking() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 15))
        await world.admit("one", use("a"))
        assert not parks(world, "one")
        told_about = world.server._allocations.describe()["gpus"][0]
        assert told_about["memory_offered"] == FREE + 4 * GIB

    run(scene, MemoryOptions(overbook=2.0, host=4 * GIB))


def test_all_shares_of_a_claim_fit_together() -> None:
    """A container that names a claim without a request gets all shares of the claim."""

    async def scene(world: ClaimsWorld) -> None:
        two = [share(f"{name}/0", memory=10 * GIB, compute=10) for name in "ab"]
        with pytest.raises(RefusedError, match="5632 MiB is left"):
            world.claim(told("a", *two))
        assert world.booked() == (0, 0)
        two = [share(f"{name}/0", memory=5 * GIB, compute=10) for name in "ab"]
        world.claim(told("a", *two))
        await world.admit("one", use("a", "a/0", "b/0"))
        assert parks(world, "one")
        with pytest.raises(OccupiedError, match="5632 MiB is left"):
            world.claim(part("b", 6, parking="never"))
        world.claim(part("b", 5, parking="never"))

    run(scene)


def test_a_container_with_shares_of_two_claims_is_never_parked() -> None:
    async def scene(world: ClaimsWorld) -> None:
        for uid in "ab":
            world.claim(part(uid, 7))
        await world.admit("one", use("a"), use("b"))
        assert not parks(world, "one")
        await world.end("one")
        world.claim(part("c", 2))
        with pytest.raises(RefusedError, match="because it has shares of several claims"):
            await world.admit("refused", use("a"), use("b"))

    run(scene)


def test_memory_fixed_for_a_container_may_be_parked_after_its_end() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 8))
        await world.admit("one", use("a"), **GRAPHICS)
        gpu = world.server._allocations._gpus[0]
        assert gpu.memory_fixed == 8 * GIB
        await world.end("one")
        await until(lambda: not gpu.memory_fixed)
        assert gpu.memory_parkable == (8 * GIB, 8 * GIB)

    run(scene)


def test_a_lowered_factor_applies_to_claims_that_are_booked_from_then_on() -> None:
    async def scene(world: ClaimsWorld) -> None:
        for uid in "abc":
            world.claim(part(uid, 10))
        await world.admit("one", use("a"))
        world.config = replace(world.config, memory=replace(TWICE, overbook=1.0))
        await world.restart()
        assert parks(world, "one")
        await world.admit("two", use("b"))
        assert parks(world, "two")
        with pytest.raises(RefusedError, match="asks for the capability graphics"):
            await world.admit("refused", use("c"), **GRAPHICS)
        with pytest.raises(OccupiedError):
            world.claim(part("d", 1))

    run(scene)


def test_after_a_restart_the_host_has_room_for_all_that_may_be_parked() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 8))
        await world.admit("one", use("a"), **GRAPHICS)
        world.claim(part("b", 7))
        await world.end("one", wait=False)
        await world.restart()
        gpu = world.server._allocations._gpus[0]
        assert gpu.memory_parkable[1] <= 12 * GIB
        await world.admit("two", use("a"))
        await world.admit("three", use("b"))
        assert gpu.memory_parkable[1] <= 12 * GIB
        assert parks(world, "two") != parks(world, "three")

    run(scene, MemoryOptions(overbook=2.0, host=12 * GIB))


def test_a_restarted_governor_knows_which_memory_may_be_parked() -> None:
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


def test_a_leaving_claim_that_is_announced_again_is_booked_as_before() -> None:
    async def scene(world: ClaimsWorld) -> None:
        for uid in "ab":
            world.claim(part(uid, 10))
        await world.admit("one", use("a"))
        world.server.bookings.unclaim("a")
        world.claim(part("a", 10))
        assert world.claims()["a"]["parkable"]
        await world.end("one")
        await world.admit("two", use("a"))
        assert parks(world, "two")

    run(scene)


def test_the_shares_of_a_claim_are_released_together_or_not_at_all() -> None:
    async def scene(world: ClaimsWorld) -> None:
        shares = [share(f"{name}/0", memory=5 * GIB, compute=10) for name in "ab"]
        world.claim(told("a", *shares))
        await world.admit("one", use("a", "a/0", "b/0"), **GRAPHICS)
        world.claim(part("b", 5))
        await world.end("one")
        with pytest.raises(OccupiedError):
            world.claim(part("c", 5, parking="never"))
        await world.admit("two", use("a", "a/0", "b/0"))
        assert not parks(world, "two")

    run(scene, MemoryOptions(overbook=2.0, host=12 * GIB))


def test_after_a_restart_the_running_containers_come_first() -> None:
    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 8))
        await world.admit("one", use("a"), **GRAPHICS)
        for uid in "bc":
            world.claim(part(uid, 7))
        gpu = world.server._allocations._gpus[0]
        assert (gpu.memory_fixed, gpu.memory_parkable[1]) == (8 * GIB, 14 * GIB)
        await world.restart()
        gpu = world.server._allocations._gpus[0]
        assert (gpu.memory_fixed, gpu.memory_parkable[1]) == (8 * GIB, 14 * GIB)

    run(scene, MemoryOptions(overbook=2.0, host=14 * GIB))


def test_a_claim_whose_change_cannot_be_written_is_booked_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node's host memory is reduced before the change."""

    async def scene(world: ClaimsWorld) -> None:
        world.claim(part("a", 10))
        world.claim(part("b", 10))
        allocations = world.server.admissions._allocations
        smaller = replace(TWICE, host=12 * GIB)
        allocations.configure(replace(world.config, memory=smaller))
        before = [dict(gpu.quotas) for gpu in allocations._gpus]

        def full(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(world.state, "_write", full)
            with pytest.raises(StateError):
                world.claim(part("a", 4))
        assert [dict(gpu.quotas) for gpu in allocations._gpus] == before

    run(scene)
