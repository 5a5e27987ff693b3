"""Admission of containers: start, change of quota, take-over from an earlier governor, end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import structlog

from governor.allocations import AllocationTable
from governor.arbiter import Runner
from governor.claims import Claim, ClaimShare, Use, merge, uses_key
from governor.config import Config
from governor.container import (
    Container,
    RecoveredContainer,
    Wanted,
    container_key,
    unknown_container,
)
from governor.counters import Tally
from governor.errors import RefusedError, RequestError, StateError
from governor.members import Member
from governor.mps import Mps
from governor.quota import MIB, Quota, unparkable
from governor.recover import FoundContainer
from governor.requests import limit_after, nodes_of, pod_of, uses_of
from governor.reservations import Reservations, describe_devices
from governor.state import Owner, State
from oci_hook.request import Request, check_request, parse_annotations

log = structlog.get_logger()

Pending = tuple[Container, Member]
"""An admission that has not been confirmed yet."""


class Claimed(Protocol):
    """The claims of the node, as far as the admission of containers needs them."""

    def find_shares(
        self, uses: Sequence[Use], request: dict[str, Any]
    ) -> list[tuple[Claim, ClaimShare]]:
        """Return the shares that a container may use; raise RefusedError if it may not use them."""

    def recover(self, found: FoundContainer) -> list[tuple[Claim, ClaimShare]]:
        """Return the shares that a container from an earlier governor uses."""

    def names(self, uses: Sequence[Use]) -> list[str]:
        """Return the names of the claims."""

    def leave(self, uses: Sequence[Use]) -> None:
        """Handle the end of the last container with these shares."""


async def _have_room(container: Container, more: int) -> None:
    """Return at once: without overbooking, a container in the allocation table has room."""


class Admissions:
    """The containers of one node, by key, from their admission to their end."""

    def __init__(
        self,
        config: Config,
        allocations: AllocationTable,
        runners: Mapping[str, Runner],
        state: State,
        reservations: Reservations,
    ) -> None:
        """Start without containers; `bookings` must be set before the first admission."""
        self.config = config
        self.containers: dict[str, Container] = {}
        self.mps: dict[str, Mps] = {}  # by GPU, for GPUs that use MPS
        self.tally = Tally()
        self.bookings: Claimed
        self.on_begin: Callable[[], None] = lambda: None
        """Called after each admission of a container."""
        self.on_end: Callable[[Container], None] | None = None
        """Called for each container that ends, before it is removed from the arbiter."""
        self.make_room: Callable[[Container, int], Awaitable[None]] = _have_room
        """Waits for room on the GPU for a container that is never parked, or whose quota grows by a
        number of bytes; raises RefusedError if there is none in time."""
        self._allocations, self._state, self._reservations = allocations, state, reservations
        self._runners = dict(runners)

    def _make(self, wanted: Wanted, recovered: RecoveredContainer | None = None) -> Container:
        return Container(
            wanted,
            runners=self._runners,
            config=self.config,
            state=self._state,
            mps=self.mps.get(wanted.devices[0].uuid),
            recovered=recovered,
        )

    async def adopt(self, found: FoundContainer) -> None:
        """Take over a running container that an earlier governor admitted."""
        key = found.recovered.key
        wanted: Wanted | None = None
        try:
            shares = self.bookings.recover(found)
            if shares:
                devices = self._allocations.named(found.devices)
                self._allocations.claims.set_parking(shares, parking=found.quota.parking)
            else:
                devices = self._allocations.restore(key, found.quota, found.devices)
            wanted = Wanted(
                found.identifier, found.pidfd, found.quota, devices, found.owner, tuple(shares)
            )
            container = self._make(wanted, found.recovered)
        except BaseException:
            if wanted is None:  # otherwise the container has closed what was found
                found.close()
            self._allocations.leave(key)
            raise
        self.containers[key] = container
        self._state.note(container.row)
        try:
            await container.listen(self._ended)
        except OSError as e:
            # Its registered processes are known; only new ones cannot reach the governor.
            log.error("container-unreachable", container=found.identifier, error=str(e))
        log.info(
            "container-adopted",
            container=found.identifier,
            key=key,
            processes=sorted(container.pids()),
            **found.quota.describe(),
        )

    async def admit(
        self, request: dict[str, Any], descriptors: list[int], pending: list[Pending]
    ) -> dict[str, Any]:
        """Admit a container, and add it to `pending`; raise RefusedError if it may not start.

        The first of the descriptors is a pidfd of the container's first process.
        """
        if not descriptors:
            raise RequestError("admit was sent without a pidfd", hint="send it with SCM_RIGHTS")
        uses = uses_of(request)
        known = self._admitted_before(request["id"], uses, descriptors[0])
        if known is not None:
            return {**self._grant(known), "already": True}
        parsed = parse_annotations(request["annotations"])
        check_request(parsed, request["annotations"])
        owner = Owner(request["bundle"], request["identity"])
        if uses:
            shares = self.bookings.find_shares(uses, request)
            key = uses_key(uses)
            together = self.containers.get(key)
            if together is not None:
                _check_member(together, parsed)
                answer = self._join(together, request, descriptors, pending)
                await self._wait_for_room(*pending[-1])
                return answer
            quotas = merge(shares)
            devices = self._allocations.claims.devices(shares[0][0], quotas)
            parking = self._allocations.claims.use(shares, parsed.capabilities)
            quota = replace(next(iter(quotas.values())), parking=parking)
        else:
            shares, key = [], container_key(request["id"])
            parsed = self._reservations.redeem(request, parsed)
            annotated = bool(request["annotations"])
            quota, devices = self._allocations.admit(
                key, parsed, nodes_of(request), annotated=annotated
            )
        pidfd = descriptors.pop(0)
        wanted = Wanted(request["id"], pidfd, quota, devices, owner, tuple(shares))
        made = await self._start(key, wanted, pending)
        await self._wait_for_room(*pending[-1])
        self._log_admitted(made, request)
        return self._grant(made)

    async def _wait_for_room(self, container: Container, member: Member) -> None:
        """Wait until a container that is never parked has its memory; otherwise refuse a member.

        If another member has been confirmed, the container already has its memory.
        """
        others = (one for one in container.members if one is not member)
        if container.parking is not None or any(one.confirmed for one in others):
            return
        try:
            async with container.changing:
                await self.make_room(container, 0)
            self._refuse_ended(container)
        except BaseException:
            self.part(container, member, "refused")
            raise

    def _admitted_before(
        self, identifier: str, uses: Sequence[Use], pidfd: int
    ) -> Container | None:
        """Return the container if it was admitted before; raise RefusedError if another has its id.

        The hook may run twice, if two components add it to the configuration, or once for each
        share of a claim.
        """
        known = self.find(identifier)
        if known is None:
            return None
        container, member = known
        is_same = member.confirmed and member.is_process(pidfd)
        if is_same and set(container.uses) == set(uses):
            return container
        if not (uses and member.has_ended()):
            raise RefusedError(
                f"container {identifier[:64]!r} is already registered",
                hint="delete it first, or give this one another name",
            )
        self.part(container, member, "ended")
        return None

    async def _start(self, key: str, wanted: Wanted, pending: list[Pending]) -> Container:
        """Create the container that is allocated under `key`; an error undoes everything."""
        made: Container | None = None
        try:
            made = self._make(wanted)
            self.containers[key] = made
            pending.append((made, made.members[0]))
            # The row is written after the directory: a directory without a row is examined and
            # removed, but a row without a directory would be taken for damage.
            self._state.put(made.row)
            await made.listen(self._ended)
        except BaseException as e:
            if made is None:
                self._allocations.leave(key)
                self.bookings.leave([(claim.uid, share.name) for claim, share in wanted.claims])
            else:
                self.end(made, "failed")
            if not isinstance(e, OSError):
                raise
            raise RefusedError(
                f"the container's directory cannot be created: {e.strerror or e}",
                hint=f"check {self.config.runtime_dir}",
            ) from e
        self.on_begin()
        return made

    def _join(
        self,
        container: Container,
        request: dict[str, Any],
        descriptors: list[int],
        pending: list[Pending],
    ) -> dict[str, Any]:
        """Add a container to those that use the same shares; it gets the same allocation."""
        owner = Owner(request["bundle"], request["identity"])
        member = container.join(request["id"], descriptors.pop(0), owner)
        try:
            self._state.put(container.row)
        except StateError:
            container.remove_member(member)
            raise
        pending.append((container, member))
        self._log_admitted(container, request)
        return self._grant(container)

    def _log_admitted(self, container: Container, request: dict[str, Any]) -> None:
        self.tally.admitted += 1
        quota = container.quota
        claims = self.bookings.names(container.uses)
        log.info(
            "container-admitted",
            container=request["id"],
            key=container.key,
            devices=[device.index for device in container.devices],
            memory=quota.memory,
            compute=quota.compute,
            compute_limit=quota.compute_limit,
            strategy=container.strategy,
            **{"class": quota.work_class},
            **({"claims": claims} if claims else {}),
            **pod_of(request["identity"]),
        )

    def _grant(self, container: Container) -> dict[str, Any]:
        return {
            "ok": True,
            "key": container.key,
            "directory": str(container.directory),
            "devices": describe_devices(container.devices),
            **container.quota.describe(),
            "strategy": container.strategy,
        }

    def confirm(self, pending: list[Pending]) -> dict[str, Any]:
        """Confirm the last admission of a connection."""
        container, member = pending[-1] if pending else (None, None)
        if (
            container is None
            or member is None
            or self.containers.get(container.key) is not container
            or member not in container.members
        ):
            raise RequestError("confirm without an admission", hint="send admit first")
        row = container.confirm(member)
        self._state.put(row)
        container.confirmed_as(row)
        return {"ok": True}

    def find(self, identifier: str) -> tuple[Container, Member] | None:
        """Return a container by its id, or by its provisional name while its id is not known."""
        container = self.containers.get(container_key(identifier))
        if container is not None:
            return container, container.members[0]
        named = (
            (one, member)
            for one in self.containers.values()
            for member in one.members
            if member.identifier == identifier
        )
        return next(named, None)

    def release(self, identifier: str) -> dict[str, Any]:
        """Remove a container when its hook reports its end, if its first process has ended."""
        found = self.find(identifier)
        # A container from another engine may have the same id and still be running, so the process
        # is checked.
        if found is not None and found[1].has_ended():
            self.part(*found, "released")
        return {"ok": True}

    async def set(self, request: dict[str, Any]) -> dict[str, Any]:
        """Give a running container another quota."""
        found = self.find(request["id"])
        if found is None:
            raise unknown_container(request["id"])
        container, _ = found
        if container.claims:
            raise RefusedError(
                f"the container has its quota from {container.claims[0][0]}",
                hint="have the pod use another claim",
            )
        # A change that is waiting for room must not finish after a later one.
        async with container.changing:
            quota = await self._change(container, request)
        log.info("quota-changed", container=container.identifier, **quota.describe())
        return {"ok": True, **quota.describe()}

    async def _change(self, container: Container, request: dict[str, Any]) -> Quota:
        """Give a container the quota of a request, and return it; on error, nothing changes."""
        old = container.quota
        quota = Quota(
            request.get("memory", old.memory),
            request.get("compute", old.compute),
            request.get("compute_limit", limit_after(request, old)),
            request.get("class", old.work_class),
            old.parking,
        )
        self._refuse_ended(container)
        _refuse_below_use(container, quota)
        self._allocations.change(container.key, quota)
        try:
            if quota.memory > old.memory:
                # Until the change has succeeded or failed, others get nothing of either quota.
                self._allocations.hold(container.key, _covering(old, quota))
                await self.make_room(container, quota.memory - old.memory)
                self._refuse_ended(container)
                self._allocations.hold(container.key, quota)
            # Stored before the grant page is changed: a restarted governor uses what is stored.
            self._state.put(replace(container.row, quota=quota))
        except BaseException:
            if self.containers.get(container.key) is container:
                self._allocations.hold(container.key, old)
            raise
        container.set_quota(quota)
        return quota

    def _refuse_ended(self, container: Container) -> None:
        """Raise RefusedError if a container has ended since it was found."""
        if self.containers.get(container.key) is not container:
            raise unknown_container(container.identifier)

    def _ended(self, container: Container, member: Member) -> None:
        self.part(container, member, "ended")

    def part(self, container: Container, member: Member, why: str) -> None:
        """Remove one member; with the last one, the container ends."""
        if self.containers.get(container.key) is not container or member not in container.members:
            return
        if len(container.members) == 1:
            self.end(container, why)
            return
        container.remove_member(member)
        self._state.note(container.row)
        log.info("container-ended", container=member.identifier, key=container.key, why=why)

    def end(self, container: Container, why: str) -> None:
        """Remove a container with all its members."""
        if self.containers.get(container.key) is not container:
            return
        del self.containers[container.key]
        self._allocations.leave(container.key)
        self.tally.container_ended(container.account)
        if self.on_end is not None:
            self.on_end(container)
        container.close()
        log.info("container-ended", container=container.identifier, why=why)
        self.bookings.leave(container.uses)

    def close(self) -> None:
        """Detach from every container; running containers enforce their quotas themselves."""
        for container in list(self.containers.values()):
            for member in list(container.members):
                if not member.confirmed:
                    self.part(container, member, "stopping")
            if container.key in self.containers:
                del self.containers[container.key]
                container.close(keep=True)


def _check_member(container: Container, request: Request) -> None:
    """Refuse a container that cannot be parked, if it would share the quota of one that may be."""
    if container.parking is None:
        return
    others = unparkable(request.capabilities)
    if others:
        raise RefusedError(
            f"the memory of container {container.identifier[:64]!r}, which has the same shares of"
            f" a claim, may be parked, but this one asks for the capability {', '.join(others)}",
            hint="give it a claim of its own, or set parking: never in the claim's parameters",
        )


def _covering(one: Quota, other: Quota) -> Quota:
    """Return the smallest quota that contains both."""
    return replace(
        other,
        memory=max(one.memory, other.memory),
        compute=max(one.compute, other.compute),
        compute_limit=max(one.compute_limit, other.compute_limit),
    )


def _refuse_below_use(container: Container, quota: Quota) -> None:
    """Refuse a memory quota below both the container's use and its current quota."""
    used = max(container.account.used(i) for i in range(len(container.devices)))
    if quota.memory >= min(used, container.quota.memory):
        return
    whole = quota.memory >= MIB
    asked = f"{quota.memory // MIB} MiB" if whole else f"{quota.memory} bytes"
    raise RefusedError(
        f"the container uses {-(-used // MIB)} MiB, but {asked} was requested",
        hint="ask for more, or wait until it has given memory back"
        if whole
        else f"write it like {-(-used // MIB)}Mi",
    )
