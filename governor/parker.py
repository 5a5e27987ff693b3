"""Park the memory of idle containers in host memory when others need the room on the GPU.

`residency` decides which memory moves; the processes of a container move it when they are ordered
to. Once a container has reported that its memory is parked, the amount that it still holds on the
GPU is read from NVML's next sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from governor.arenas import ArenaError
from governor.container import Container
from governor.errors import RefusedError
from governor.parking import ParkingReport
from governor.quota import MIB, Device
from governor.residency import Occupant, Whereabouts, decide, excess

log = structlog.get_logger()

TICK_S = 0.01
"""Interval between checks while any container's memory is parked or being moved, in seconds."""
REST_S = 0.2
"""The same at other times."""
ROOM_S = 5.0
"""Longest time for which the start of a container that is never parked waits for room, in seconds.
The hook waits ten seconds for the answer."""
LEAVE_NS = 60_000_000_000
"""Time within which a container has to park its memory. Work that it has submitted ends first, and
host memory is cleared and pinned the first time: 40 GiB in 14 s (H200)."""
AGAIN_NS = 60_000_000_000
"""Time for which a container that did not park its memory in time is left alone."""
LATE_NS = 5_000_000_000
"""A move to the GPU that takes longer is logged."""
COME_NS = 60_000_000_000
"""A container that has not reported within this time that its memory is on the GPU counts as
resident: others must not wait for that report for ever."""
WAIT_NS = 30_000_000_000
"""A wait for room on the GPU that takes longer is logged."""
UNKNOWN = 1 << 62
"""Larger than any quota. It is used for the memory that a container keeps if it was already leaving
when it was found, until the container has left and the actual value is known."""
SAMPLE_NS = 5_000_000_000
"""Longest time that a new governor waits for the first sample of the containers that it finds."""


class ListsContainers(Protocol):
    """The containers of a node."""

    @property
    def containers(self) -> Mapping[str, Container]:
        """All of them, by key."""


@dataclass
class _Spot:
    """Where a container's memory is, and since when."""

    place: Whereabouts
    since_ns: int
    worked_ns: int
    work: int = 0
    waits_ns: int | None = None
    ordered_ns: int = 0
    move_ns: int = 0
    left_alone_ns: int = 0
    keeps: int = 0
    parked_ns: int = 0
    said_late: bool = False
    said_waits: bool = False
    unsampled_ns: int = 0
    """Time until which nothing is decided for the GPU without a sample of this container, because a
    new governor has found the container; 0 if there is no need to wait."""


class Parker:
    """Moves the memory of the containers of a node."""

    def __init__(
        self, containers: ListsContainers, devices: Iterable[Device], reserve: Callable[[], int]
    ) -> None:
        """Withhold `reserve()` bytes of each GPU from containers; a reload may change the value."""
        self._containers, self._reserve = containers, reserve
        self._memory = {device.uuid: device.memory for device in devices}
        self._spots: dict[Container, _Spot] = {}
        self._growing: dict[Container, asyncio.Task[None]] = {}
        self._lacks_memory: set[Container] = set()  # those of `_growing` that found no host memory
        self._more: dict[Container, int] = {}
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Check the containers periodically, until cancelled."""
        try:
            while True:
                moving = self.step(time.monotonic_ns())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S if moving else REST_S):
                        await self._wanted.wait()
                self._wanted.clear()
        finally:
            for task in self._growing.values():
                task.cancel()
            await asyncio.gather(*self._growing.values(), return_exceptions=True)

    async def make_room(self, container: Container, more: int = 0) -> None:
        """Wait until the GPUs of a container that is never parked have room for its quota.

        `more` is the number of bytes by which its quota is about to grow. Raise RefusedError if
        others that may be parked do not leave in time.
        """
        deadline = time.monotonic() + ROOM_S
        self._more[container] = more
        try:
            while (missing := self._missing(container)) > 0 and not container.has_ended:
                if time.monotonic() > deadline:
                    raise RefusedError(
                        f"{-(-missing // MIB)} MiB of memory is held by containers that may be"
                        " parked but are working",
                        hint="try again",
                    )
                self._wanted.set()
                await asyncio.sleep(TICK_S)
        finally:
            self._more.pop(container, None)

    def _missing(self, container: Container) -> int:
        """Return the bytes by which the fullest of a container's GPUs is too full.

        On a GPU without containers that may be parked, all memory that was granted fits.
        """
        now_ns = time.monotonic_ns()
        everyone = list(self._containers.containers.values())
        return max(
            (
                excess(self._capacity(uuid), [self._look(one, now_ns) for one in here])
                for uuid, here in self._sharing(everyone).items()
                if container in here and any(one.parking for one in here)
            ),
            default=0,
        )

    def _capacity(self, uuid: str) -> int:
        """Return the bytes of a GPU that containers may have."""
        return self._memory[uuid] - self._reserve()

    def _sharing(self, everyone: Iterable[Container]) -> dict[str, list[Container]]:
        """Return the containers on each GPU."""
        return {
            uuid: [one for one in everyone if any(own.uuid == uuid for own in one.devices)]
            for uuid in self._memory
        }

    def step(self, now_ns: int) -> bool:
        """Check all containers once; return whether the memory of any is parked or being moved."""
        everyone = list(self._containers.containers.values())
        self._spots = {one: spot for one, spot in self._spots.items() if one in everyone}
        if not any(one.parking for one in everyone):
            return False
        for uuid, here in self._sharing(everyone).items():
            capacity = self._capacity(uuid)
            by_key = {one.key: one for one in here}
            tenants = [self._look(one, now_ns) for one in here]
            if any(now_ns < self._spots[one].unsampled_ns for one in here if one.parking):
                continue
            orders = decide(capacity, tenants, now_ns)
            for key in orders.leave:
                self._order(by_key[key], Whereabouts.LEAVING, now_ns)
            for key in orders.come:
                self._order(by_key[key], Whereabouts.COMING, now_ns)
            if sum(one.quota for one in tenants) > capacity:
                for one in here:
                    self._prepare(one)
        return any(spot.place is not Whereabouts.RESIDENT for spot in self._spots.values())

    # One container

    def _look(self, container: Container, now_ns: int) -> Occupant:
        parking = container.parking
        if parking is None:
            quota = container.quota.memory + self._more.get(container, 0)
            return Occupant(container.key, quota, Whereabouts.RESIDENT, is_fixed=True)
        report = parking.report()
        seen, sampled_ns = container.account.seen(0)
        spot = self._spots.get(container)
        if spot is None:
            spot = self._spots[container] = self._find(
                report, now_ns, is_ordered=parking.is_ordered
            )
        if sampled_ns:
            spot.unsampled_ns = 0
        if report.work != spot.work or report.is_busy:
            spot.work, spot.worked_ns = report.work, now_ns
        # The calls of a suspended container cannot go on, wherever its memory is.
        if not report.awaiting or container.suspension:
            spot.waits_ns, spot.said_waits = None, False
        elif spot.waits_ns is None:
            spot.waits_ns = now_ns
        if spot.place is Whereabouts.RESIDENT:
            spot.keeps = max(seen - report.movable, 0)
        self._follow(container, spot, report, now_ns)
        container.residency = spot.place.value
        held = min(spot.keeps, container.quota.memory)
        if spot.place is Whereabouts.PARKED and sampled_ns > spot.parked_ns:
            held = seen
        quota = container.quota.memory + self._more.get(container, 0)
        return Occupant(
            container.key,
            quota,
            spot.place,
            held=held,
            holds=min(held + report.movable, quota),
            keeps=min(spot.keeps, container.quota.memory),
            waits_ns=spot.waits_ns,
            worked_ns=spot.worked_ns,
            since_ns=spot.since_ns,
            move_ns=spot.move_ns,
            is_going=spot.place is Whereabouts.LEAVING and report.n_going == report.n_processes,
            may_leave=now_ns >= spot.left_alone_ns and not container.suspension,
            is_latency=container.quota.is_latency,
        )

    @staticmethod
    def _find(report: ParkingReport, now_ns: int, *, is_ordered: bool) -> _Spot:
        """Locate the memory of a container that is new, or that a new governor found."""
        place = Whereabouts.COMING if is_ordered else Whereabouts.LEAVING
        if not is_ordered and report.n_parked == report.n_processes:
            place = Whereabouts.PARKED
        spot = _Spot(place, now_ns, now_ns, report.work)
        spot.ordered_ns = now_ns
        if place is Whereabouts.LEAVING:
            spot.keeps = UNKNOWN
        if report.n_processes:
            spot.unsampled_ns = now_ns + SAMPLE_NS
        return spot

    def _follow(
        self, container: Container, spot: _Spot, report: ParkingReport, now_ns: int
    ) -> None:
        """Record the progress of the last order, and log a move or a wait that takes too long."""
        took_ns = now_ns - spot.ordered_ns
        if spot.place is Whereabouts.COMING and report.n_resident == report.n_processes:
            spot.place, spot.since_ns = Whereabouts.RESIDENT, now_ns
            spot.move_ns = min(took_ns, LATE_NS)
            if report.movable:
                self._log("container-resident", container, report, took_ns)
        elif spot.place is Whereabouts.COMING and took_ns > COME_NS:
            spot.place, spot.since_ns = Whereabouts.RESIDENT, now_ns
        elif spot.place is Whereabouts.COMING and took_ns > LATE_NS and not spot.said_late:
            spot.said_late = True
            log.warning(
                "container-not-resident",
                container=container.identifier,
                message="the GPU has no room for its memory, although no container is using the"
                " memory that is reserved for it",
                hint="the move is retried; nvidia-smi shows what else is using the GPU",
            )
        elif spot.place is Whereabouts.LEAVING and report.n_parked == report.n_processes:
            spot.place, spot.parked_ns = Whereabouts.PARKED, now_ns
            spot.move_ns = min(took_ns, LATE_NS)
            container.times_parked += 1
            self._log("container-parked", container, report, took_ns)
        elif spot.place is Whereabouts.LEAVING and took_ns > LEAVE_NS:
            log.warning(
                "container-not-parked",
                container=container.identifier,
                message="its work does not end, and other containers are waiting for its memory",
                hint="set tidegate.gpu/parking to never if it always behaves like this",
            )
            spot.left_alone_ns = now_ns + AGAIN_NS
            self._order(container, Whereabouts.COMING, now_ns)
        waits_ns = 0 if spot.waits_ns is None else now_ns - spot.waits_ns
        if spot.place is Whereabouts.PARKED and waits_ns > WAIT_NS and not spot.said_waits:
            spot.said_waits = True
            log.warning(
                "container-waits",
                container=container.identifier,
                message="its calls are waiting for GPU memory that other containers are not"
                " releasing",
                hint="tidegate ps shows them; a container that is of class latency and working, or"
                " that has tidegate.gpu/parking set to never, is not parked",
            )

    def _log(self, event: str, container: Container, report: ParkingReport, took_ns: int) -> None:
        log.info(
            event,
            container=container.identifier,
            memory=report.movable,
            seconds=round(took_ns / 1e9, 3),
        )

    def _order(self, container: Container, place: Whereabouts, now_ns: int) -> None:
        spot, parking = self._spots[container], container.parking
        assert parking is not None  # noqa: S101 - only such containers get orders
        container.residency = place.value
        spot.place, spot.ordered_ns, spot.said_late = place, now_ns, False
        parking.order(resident=place is Whereabouts.COMING)

    def _prepare(self, container: Container) -> None:
        """Prepare host memory for what a container may have to park, in the background."""
        parking = container.parking
        if parking is None or container in self._growing:
            return
        needed = parking.lacking(container.quota.memory)
        if needed:
            self._growing[container] = asyncio.create_task(self._grow(container, needed))

    async def _grow(self, container: Container, needed: Mapping[int, int]) -> None:
        parking = container.parking
        try:
            for slot, size in needed.items():
                if parking is not None and not container.has_ended:
                    await parking.arenas.grow(slot, size, lambda: self._turn(container))
        except ArenaError as e:
            log.warning("no-host-memory", container=container.identifier, error=str(e))
            self._lacks_memory.add(container)
            await asyncio.sleep(LATE_NS / 1e9)
        finally:
            self._lacks_memory.discard(container)
            del self._growing[container]

    async def _turn(self, container: Container) -> None:
        """Wait until no container that is to leave needs host memory more urgently.

        The node clears memory at a few GiB per second, however many threads request it. While one
        container has to leave, preparations for others would prolong all waits for the room that it
        vacates.
        """
        while not self._is_leaving(container) and any(  # noqa: ASYNC110 - see step()
            self._is_leaving(one) for one in self._growing.keys() - self._lacks_memory
        ):
            await asyncio.sleep(TICK_S)

    def _is_leaving(self, container: Container) -> bool:
        spot = self._spots.get(container)
        return spot is not None and spot.place is Whereabouts.LEAVING
