"""An admitted container: its directory, its two shared pages, and its processes and GPUs.

Containers that use the same shares of claims are members of one `Container`, each with its own
first process. They have a common account: what one of them is charged is not available to the
others.

The directory holds the grant page and the socket, and is bind-mounted into the container read-only.
A bind mount of the socket file itself would still refer to the old socket after a restart of the
governor, and refuse connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from mmap import mmap
from pathlib import Path
from typing import Any

import structlog

from governor.account import Account, RegisteredProcess
from governor.arbiter import Runner
from governor.arenas import Arenas
from governor.cgroups import Membership, find_membership, pid_namespaces, read_cgroups
from governor.claims import Claim, ClaimShare, Use, uses_key
from governor.config import Config
from governor.errors import RefusedError
from governor.lookups import UnknownFunctions
from governor.members import Member, Members, warn_if_unknown
from governor.mps import DIRECTORY, Mps, MpsEvent
from governor.pace import RateLimitedLog
from governor.parking import Parking
from governor.processes import Identity, identify, names_in
from governor.quota import Device, Quota
from governor.scheduled import Scheduled, shares_of
from governor.shared_memory import Ledger, make_grant, make_ledger, take_over
from governor.slots import Slots
from governor.state import ContainerRow, MemberRow, Owner, ProcessRow, State
from governor.violations import Findings
from libcontrol import layout, pages

log = structlog.get_logger()

CLAIMS = "claims"
"""File in a container's directory that records the claims and shares which the container uses."""


def container_key(identifier: str) -> str:
    """Return the name of a container's directory: a digest, because an id is untrusted text.

    A candidate id may contain arbitrary bytes (`processes.cgroup_names`).
    """
    return hashlib.sha256(identifier.encode(errors="surrogateescape")).hexdigest()[:16]


@dataclass(frozen=True)
class Wanted:
    """Parameters of a new container: its id, its first process, its quota and GPUs.

    `claims` are the shares that it uses, if its quota comes from claims. `owner` has the names that
    the engine and the cluster give it.
    """

    identifier: str
    pidfd: int
    quota: Quota
    devices: tuple[Device, ...]
    owner: Owner = field(default_factory=Owner)
    claims: tuple[tuple[Claim, ClaimShare], ...] = ()

    @property
    def uses(self) -> tuple[Use, ...]:
        """The shares of claims that it uses, as they are stored."""
        return tuple((claim.uid, share.name) for claim, share in self.claims)

    @property
    def key(self) -> str:
        """The name of its directory."""
        return uses_key(self.uses) if self.uses else container_key(self.identifier)


@dataclass(frozen=True)
class RecoveredContainer:
    """State of a running container that the previous governor left.

    `grant` and `ledger` are None if they were not found. New ones are then created, which running
    processes do not see. Each process comes with its pidfd. `membership` is None if it was not
    stored. `others` are the members after the first, with their pidfds. `suspended` is true if some
    of its processes may be suspended.
    """

    key: str
    grant: mmap | None
    ledger: Ledger | None
    processes: tuple[tuple[ProcessRow, int], ...]
    membership: Membership | None = None
    others: tuple[tuple[MemberRow, int], ...] = ()
    suspended: bool = False

    @property
    def members(self) -> list[Member]:
        """The members after the first."""
        return [
            Member(row.identifier or f"recovered-{self.key}-{row.process.pid}", row, pidfd)
            for row, pidfd in self.others
        ]


class Container:
    """An admitted container, or several that use the same shares; ended by `close`."""

    def __init__(
        self,
        wanted: Wanted,
        *,
        runners: dict[str, Runner],
        config: Config,
        state: State | None = None,
        mps: Mps | None = None,
        recovered: RecoveredContainer | None = None,
    ) -> None:
        """Create a new container's directory and pages, or take over those of `recovered`."""
        self.claims, self.uses = wanted.claims, wanted.uses
        self.quota, self.devices = wanted.quota, wanted.devices
        self.key = recovered.key if recovered else wanted.key
        row = MemberRow(None, identify(wanted.pidfd), recovered is not None, None, wanted.owner)
        if self.uses or container_key(wanted.identifier) == self.key:
            row = replace(row, identifier=wanted.identifier)
        first = Member(wanted.identifier, row, wanted.pidfd)
        self.members = Members([first, *(recovered.members if recovered else ())])
        self.directory = Path(config.runtime_dir) / "containers" / self.key
        self.context_memory = config.context_memory
        self._holds = config.hold_launches
        self.engine_name: str | None = None  # None until it has been looked up
        self.findings = Findings(len(self.devices))
        self._suspension = "suspended" if recovered and recovered.suspended else ""
        self._is_left_alone = False
        self._on_end: Callable[[Container, Member], None] = lambda *_: None
        self._state = state or State()
        self._mps = mps
        self._gpus = Scheduled([runners[device.uuid] for device in self.devices])
        self._processes: dict[int, RegisteredProcess] = {}  # by slot
        self._ledger: Ledger | None = None
        self.parking: Parking | None = None  # None: its memory is never parked
        self.residency = ""  # where its memory is, if it may be parked
        self.times_parked = 0  # since this governor admitted it or took it over
        self.changing = asyncio.Lock()  # held while its quota changes, or it waits for room
        self._closed = False
        self._lines = RateLimitedLog(log)
        self._unknown = UnknownFunctions()
        self._loop = asyncio.get_running_loop()
        try:
            self._make(config, recovered)
        except BaseException:
            self._forget(keep=recovered is not None)
            raise

    def _make(self, config: Config, recovered: RecoveredContainer | None) -> None:
        """Create the directory, the pages and the objects that use them, or take them over."""
        ledger = self._make_pages(config, recovered)
        first = self.members[0]
        first.row = replace(
            first.row, membership=self._find_membership(first.row.process, recovered)
        )
        for member in self.members:
            warn_if_unknown(member)
        self.row = ContainerRow(
            self.key,
            quota=self.quota,
            devices=tuple(device.uuid for device in self.devices),
            ledger=ledger.file,
            uses=self.uses,
            others=tuple(member.row for member in self.members[1:]),
            suspended=bool(self.suspension),
            **vars(first.row),
        )
        is_adopted = recovered is not None
        self.account = Account(
            grant=self.grant,
            ledger=self.ledger,
            devices=self.devices,
            quota=self.quota,
            processes=self._processes,
            gpus=self._gpus,
            context_memory=self.context_memory,
            is_adopted=is_adopted,
        )
        self.account.is_suspended = bool(self._suspension)
        arenas = Arenas(self.ledger) if self.quota.parking else None
        if arenas is not None:
            memory = self.devices[0].memory
            self.parking = Parking(self.grant, self.ledger, self._processes, arenas, memory)
        self._slots = Slots(
            arenas=arenas,
            key=self.key,
            ledger=ledger,
            n_devices=len(self.devices),
            processes=self._processes,
            members=self.members,
            gpus=self._gpus,
            account=self.account,
            state=self._state,
        )
        if recovered is not None:
            take_over(self.grant, config, self.strategy, may_hold=not self.suspension)
            self._slots.take_over(recovered.processes, pages.read_usage(self.grant))
        self._gpus.start(self.quota, self.grant, self.ledger, is_adopted=is_adopted)
        self._slots.announce()
        self._gpus.run_together()
        if self.suspension:
            self._gpus.pause()

    def _make_pages(self, config: Config, recovered: RecoveredContainer | None) -> Ledger:
        """Create the directory with the grant page, and the ledger, unless they exist."""
        if recovered is None:
            shutil.rmtree(self.directory, ignore_errors=True)
        # The governor created the parent directory. If it has been removed since, the new one must
        # not be accessible to other users.
        self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.mkdir(mode=0o755, exist_ok=recovered is not None)
        grant = recovered.grant if recovered else None
        self.grant = grant or make_grant(
            self.directory / "grant", self.quota, self.devices, config, strategy=self.strategy
        )
        if self.claims and recovered is None:
            self._note_claims()
        if self._mps is not None:
            self._mps.link(self.directory)
        self._ledger = ledger = (recovered.ledger if recovered else None) or make_ledger()
        return ledger

    @property
    def ledger(self) -> mmap:
        """The page that its processes write."""
        assert self._ledger is not None  # noqa: S101 - until `close`
        return self._ledger.page

    @property
    def ledger_fd(self) -> int:
        """A descriptor of the ledger, which is sent to processes."""
        assert self._ledger is not None  # noqa: S101
        return self._ledger.fd

    def _note_claims(self) -> None:
        """Record the claims next to the grant page, in case the database is damaged."""
        claims = {claim.uid: claim.describe() for claim, _ in self.claims}
        path = self.directory / CLAIMS
        path.write_text(json.dumps({"claims": list(claims.values()), "uses": self.uses}) + "\n")
        path.chmod(0o644)

    def _find_membership(self, first: Identity, recovered: RecoveredContainer | None) -> Membership:
        if recovered is None:
            # The runtime has put the first process into its control group, and no code from the
            # image has run yet.
            return find_membership(first.pid)
        if recovered.membership is not None:
            return recovered.membership
        return find_membership(first.pid, is_named=self._is_named)

    def _is_named(self, part: str) -> bool:
        return any(container_key(name) == self.key for name in names_in(part))

    # Members

    @property
    def identifier(self) -> str:
        """The id of the container; of the oldest member, if there are several."""
        return self.members[0].identifier if self.members else ""

    @property
    def pid(self) -> int:
        """The first process of the oldest member."""
        return self.members[0].pid if self.members else 0

    @property
    def confirmed(self) -> bool:
        """Whether the start of at least one member is confirmed."""
        return any(member.confirmed for member in self.members)

    def join(self, identifier: str, pidfd: int, owner: Owner) -> Member:
        """Add a container that uses the same shares."""
        first = identify(pidfd)
        membership = find_membership(first.pid)
        row = MemberRow(identifier, first, membership=membership, owner=owner)
        member = Member(identifier, row, pidfd)
        warn_if_unknown(member)
        self.members.add(member)
        self._loop.add_reader(pidfd, self._member_ended, member)
        self._renew_row()
        return member

    def confirm(self, member: Member) -> ContainerRow:
        """Return the row in which a member's start is confirmed."""
        return self.members.confirmed(self.row, member)

    def confirmed_as(self, row: ContainerRow) -> None:
        """Adopt the members' rows that were written to the state."""
        self.row = row
        for member, own in zip(self.members, row.members, strict=True):
            member.row = own

    def remove_member(self, member: Member) -> None:
        """Remove a member that has ended or did not start; at least one other member stays."""
        if member is self.members[0]:
            self.engine_name = None  # the next member's name is used from now on
        self.members.remove(member)
        self._loop.remove_reader(member.pidfd)
        os.close(member.pidfd)
        self._slots.release(member)
        self._renew_row()

    def _renew_row(self) -> None:
        self.row = self.row.of([member.row for member in self.members])

    def _member_ended(self, member: Member) -> None:
        self._on_end(self, member)

    async def listen(self, on_end: Callable[[Container, Member], None]) -> None:
        """Serve the container's processes; call `on_end` when a first process has ended."""
        self._on_end = on_end
        try:
            self._slots.listen(self.directory / "governor.sock")
        finally:
            # The end of a container that cannot be reached has to be noticed, too.
            for member in self.members:
                self._loop.add_reader(member.pidfd, self._member_ended, member)

    def kill(self) -> None:
        """Kill the first process of each member; raise OSError if none could be killed."""
        self.members.kill()

    # GPUs

    @property
    def strategy(self) -> str:
        """The strategy that its GPUs use."""
        return "timeslice" if self._mps is None else "mps"

    @property
    def gpus(self) -> Scheduled:
        """The container's entries in the schedulers of its GPUs."""
        return self._gpus

    def hold(self, device: int, pids: frozenset[int], owns: Callable[[int], bool]) -> bool:
        """Hold exactly these unregistered processes to the quota by means of the GPU's scheduler.

        They belong to the container; `owns` checks whether a pid does. Return false if that is
        impossible because the GPU's scheduler is not steered. While the driver's checkpoint calls
        are being made, nothing is done, and true is returned.
        """
        if self._is_left_alone or not self._gpus.is_steered(device):
            return self._is_left_alone
        for pid in self._gpus.hold(device, pids, owns):
            self._lines.info("process-held", container=self.identifier, pid=pid)
        return True

    def note_unknown(self) -> None:
        """Log functions that its programs looked up but the control library does not recognise."""
        if found := self._unknown.read(self.ledger):
            self._lines.warning("unknown-functions", container=self.identifier, functions=found)

    def tell_mps(self, event: MpsEvent) -> None:
        """Tell the container, in /run/tidegate/mps/events, what happened to its MPS server."""
        path = self.directory / DIRECTORY / "events"
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            before = path.read_text().splitlines()[-99:] if path.exists() else []
            new = path.with_name(".events")
            new.write_text("\n".join([*before, f"{when} {event.kind}: {event.text}"]) + "\n")
            new.chmod(0o644)
            new.rename(path)
        except OSError as e:
            log.warning("container-not-told", container=self.identifier, error=e.strerror)

    def pids(self) -> frozenset[int]:
        """Return the host pids of the registered processes."""
        return frozenset(process.pid for process in self._processes.values())

    def configure(self, config: Config) -> None:
        """Apply new settings of the node; the assumed size of a context does not change."""
        self._holds = config.hold_launches
        take_over(self.grant, config, self.strategy, may_hold=not self.suspension)

    @property
    def suspension(self) -> str:
        """`suspending`, `suspended`, `resuming`, or empty while it runs."""
        return self._suspension

    @suspension.setter
    def suspension(self, value: str) -> None:
        self._suspension = value
        self.account.is_suspended = bool(value)

    @property
    def is_moving(self) -> bool:
        """Whether its memory is on its way off the GPU or back."""
        return self._suspension in ("suspending", "resuming")

    def allow_holds(self, *, allowed: bool) -> None:
        """Tell the processes whether a launch may be held on the GPU, if the node allows it."""
        pages.write(self.grant, 0, "grant_header", "holds", int(self._holds and allowed))

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Do not steer its processes while the driver's checkpoint calls are being made.

        Afterwards they are steered again, whatever the calls did: a running process is held to the
        quota.
        """
        self._is_left_alone = True
        self._gpus.let_go()
        self._slots.withdraw()
        try:
            yield
        finally:
            self._is_left_alone = False
            if not self._closed:
                self._slots.withdraw()  # processes that have registered in the meantime
                self._announce()

    def _announce(self) -> None:
        try:
            self._slots.announce()
        except OSError as e:  # out of descriptors; processes are found when they use the GPU
            log.warning("processes-not-steered", container=self.identifier, error=e.strerror)

    def set_quota(self, quota: Quota) -> None:
        """Hold the container to a new quota on each of its GPUs."""
        self.quota = self.account.quota = quota
        self.row = replace(self.row, quota=quota)
        compute, limit = shares_of(quota)
        for i in range(len(self.devices)):
            base = layout.grant_device(i)
            for name, value in (
                ("memory_limit", quota.memory),
                ("compute", compute),
                ("compute_limit", limit),
                ("work_class", int(quota.is_latency)),
            ):
                pages.write(self.grant, base, "grant_device", name, value)
        self._gpus.set(quota)

    def describe(self) -> list[dict[str, Any]]:
        """Return what `tidegate ps` shows: bytes, percent, nanoseconds and counts.

        There is one entry for each member. The use of GPUs is that of all members together.
        """
        self.note_unknown()
        common = {
            "key": self.key,
            "claims": _describe_claims(self.claims),
            "together": len(self.members),
            "compute": self.quota.compute,
            "compute_limit": self.quota.compute_limit,
            "class": self.quota.work_class,
            "strategy": self.strategy,
            "mps": None if self._mps is None else self._mps.describe(),
            "suspension": self.suspension,
            "parking": self.describe_parking(),
            "lookups": self.account.lookups(),
            "unknown_functions": list(self._unknown.names),
            "devices": [self.account.describe(i) for i in range(len(self.devices))],
            **self.findings.describe(),
        }
        return [
            {
                "id": member.identifier,
                "pid": member.pid,
                "confirmed": member.confirmed,
                "bundle": member.row.owner.bundle,
                "identity": dict(member.row.owner.identity),
                "processes": self._processes_of(member),
                "control_group": bool(member.membership.cgroups),
                **common,
            }
            for member in self.members
        ]

    def describe_parking(self) -> dict[str, Any] | None:
        """Return its memory's place and moves (bytes, ns, counts); None if it is never parked."""
        if self.parking is None:
            return None
        report = self.parking.report()
        return {
            "residency": self.residency or "parked",
            "movable": report.movable,
            "parked": report.parked,
            "times_parked": self.times_parked,
            **self.account.moves(),
            "awaiting": report.awaiting,
            "host_memory": self.parking.arenas.total,
        }

    def _processes_of(self, member: Member) -> list[int]:
        """Return a member's registered processes; those without a member belong to the oldest."""
        oldest = self.members[0]
        return sorted(
            {
                process.pid  # once, however many connections it opened
                for process in self._processes.values()
                if (process.member or oldest) is member
            }
        )

    # The end

    @property
    def has_ended(self) -> bool:
        """Whether it has been closed."""
        return self._closed

    def close(self, *, keep: bool = False) -> None:
        """Release everything: the GPU, the slots, the socket, the directory.

        With `keep` the container continues without the governor: its pages, its processes' charges,
        its directory and its rows in the state stay, and its control library enforces the quota.
        """
        if self._closed:
            return
        self._closed = True
        self.note_unknown()  # a short-lived container may run between two samples
        if not keep:
            # The row is removed first: a directory without a row is examined and removed.
            self._state.leave(self.key)
        for member in self.members:
            with contextlib.suppress(OSError, ValueError):
                self._loop.remove_reader(member.pidfd)
        self._slots.close(keep=keep)
        self._forget(keep=keep)

    def _forget(self, *, keep: bool = False) -> None:
        if self._mps is not None:
            self._mps.unlink(self.directory)
        self._gpus.close()
        if hasattr(self, "_slots"):
            self._slots.drop()
        for member in self.members:
            os.close(member.pidfd)
        if self._ledger is not None:
            os.close(self._ledger.fd)
        if not keep:
            shutil.rmtree(self.directory, ignore_errors=True)


def unknown_container(identifier: str) -> RefusedError:
    """Return the error for an id that no container of this node has."""
    return RefusedError(
        f"no container {identifier[:64]!r} shares a GPU on this node",
        hint="tidegate ps lists the containers that do",
    )


def find_owner(pid: int, containers: Iterable[Container]) -> Container | None:
    """Return the container of an unregistered process, by its control group or pid namespace."""
    containers = list(containers)
    groups = read_cgroups(pid)
    for one in containers:
        if one.members.has_cgroups(groups):
            return one
    namespaces = pid_namespaces(pid)
    for one in containers:
        if one.members.has_namespaces(namespaces):
            return one
    return None


def _describe_claims(shares: Sequence[tuple[Claim, ClaimShare]]) -> list[dict[str, Any]]:
    claims: dict[str, dict[str, Any]] = {}
    for claim, share in shares:
        named = {"uid": claim.uid, "namespace": claim.namespace, "name": claim.name}
        claims.setdefault(claim.uid, {**named, "shares": []})["shares"].append(share.name)
    return list(claims.values())
