"""One admitted container: its directory, its two pages, its socket and its processes.

Containers that use the same shares of claims are the members of one `Container`, each with its own
first process. They have one account: what one of them is charged is not available to the others.

The directory holds the grant page and the socket, and is bind-mounted into the container read-only.
A bind mount of the socket file alone would refuse connections forever after a governor's restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import structlog

from governor.arbiter import NOBODY, WHOLE, Runner, Stats, Together, Waits
from governor.cgroups import Membership, find_membership, read_cgroups
from governor.claims import Claim, Share, Use, uses_key
from governor.config import Config
from governor.counters import Counters, GpuTime, Rates
from governor.listener import Listener
from governor.mps import DIRECTORY, Event, Mps
from governor.pace import Pace, PacedLog
from governor.processes import (
    Identity,
    identify,
    names_in,
    namespace_pid,
    pid_namespace,
    start_time,
)
from governor.quota import Device, Quota
from governor.region import Ledger, make_grant, make_ledger, take_over
from governor.state import ContainerRow, MemberRow, ProcessRow, State, Whose
from governor.usage import (
    Charge,
    Debt,
    Meter,
    Passing,
    of_limit,
    read_charge,
    read_passing,
    sampled_percent,
)
from governor.violations import Findings
from libcontrol import layout, pages
from vdriver.nvml import ProcessUse

log = structlog.get_logger()


def container_key(identifier: str) -> str:
    """Return the name of a container's directory: a digest, because an id is foreign text.

    Text that may be an id can contain any bytes (`cgroup_names`).
    """
    return hashlib.sha256(identifier.encode(errors="surrogateescape")).hexdigest()[:16]


_SO_PEERPIDFD = 77

CLAIMS = "claims"
"""File in a container's directory that records the claims and shares which the container uses."""

MOST_UNANSWERED = 64
"""Maximum number of connections from a container's own processes that have sent nothing yet or wait
for their turn. Connections from processes outside the container have an equal limit of their own.
"""
ANSWER_S = 5.0
"""Longest time that a connection may stay silent, in seconds."""
REGISTRATION_S = 0.01
REGISTRATIONS = 256
"""A container's processes may connect a hundred times a second, after a burst of 256."""
STRANGER = "it is not in the container's control group; enter with the engine's exec, not nsenter"


@dataclass
class _Use:
    """What a process uses of one GPU, as of the last look."""

    debt: Debt = field(default_factory=Debt)
    used: int = 0
    peak: int = 0
    part: float = 0.0  # of the GPU's time, percent
    worked: float = 0.0  # `part` times nanoseconds, summed


@dataclass(frozen=True)
class Memory:
    """What a container uses of one GPU's memory, in bytes."""

    charged: int
    overhead: int
    used: int
    peak: int


@dataclass(eq=False)
class Member:
    """A container as its engine created it; it lives as long as its first process."""

    identifier: str
    row: MemberRow
    pidfd: int

    @property
    def pid(self) -> int:
        """The pid of its first process."""
        return self.row.process.pid

    @property
    def membership(self) -> Membership:
        """What tells its processes from others."""
        return self.row.membership or Membership()

    @property
    def confirmed(self) -> bool:
        """Whether its start was confirmed."""
        return self.row.confirmed

    def has_ended(self) -> bool:
        """Return whether its first process has ended."""
        return _is_readable(self.pidfd)

    def is_process(self, pidfd: int) -> bool:
        """Return whether a pidfd refers to its first process, and that process is alive."""
        process = identify(pidfd)
        return process.pid > 0 and process == self.row.process


@dataclass(eq=False)
class Process:
    """A registered process; compared by identity, because slots and pids are reused."""

    slot: int
    pid: int
    start: int
    pidfd: int
    socket: socket.socket | None  # None until it has come back to this governor
    inner_pid: int
    start_us: int
    start_ns: int
    uses: list[_Use]
    member: Member | None = None
    """The member that the process belongs to, where there are several."""


@dataclass(frozen=True)
class Look:
    """One look at NVML: when it began, and what it saw of a GPU's processes, by host pid."""

    began_ns: int
    seen: Mapping[int, int]
    samples: tuple[ProcessUse, ...] = ()


@dataclass(frozen=True)
class Remains:
    """What the previous governor has left of a container that runs.

    `grant` and `ledger` are None where they could not be found again. They are then made anew, and
    no running process sees the new ones. Each process comes with its pidfd. `membership` is None
    where it was not kept. `others` are the members after the first, with their pidfds.
    """

    key: str
    grant: mmap | None
    ledger: Ledger | None
    processes: tuple[tuple[ProcessRow, int], ...]
    membership: Membership | None = None
    others: tuple[tuple[MemberRow, int], ...] = ()


def _called(row: MemberRow, key: str) -> str:
    return row.identifier or f"recovered-{key}-{row.process.pid}"


def _hung_up(peer: socket.socket | None) -> bool:
    if peer is None:
        return True
    try:
        return not peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _part(peer: socket.socket) -> None:
    """End a connection for every process that has a descriptor of it.

    The arbiter has one, and so has any process to which the registered process passed its own.
    """
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()


def _peer(own: socket.socket, pid: int) -> int:
    """Return a pidfd of the process that connected.

    Before Linux 6.5 it is of the process that has that process's pid by now.
    """
    try:
        return int.from_bytes(
            own.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4), sys.byteorder, signed=True
        )
    except OSError as e:
        if e.errno != errno.ENOPROTOOPT:
            raise
        return os.pidfd_open(pid)


def _is_readable(fd: int) -> bool:
    poll = select.poll()  # select() rejects descriptors from 1024 on
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class Container:
    """An admitted container, or several that use the same shares; ended by `close`."""

    def __init__(
        self,
        *,
        identifier: str,
        pidfd: int,
        quota: Quota,
        devices: tuple[Device, ...],
        runners: dict[str, Runner],
        config: Config,
        state: State | None = None,
        remains: Remains | None = None,
        mps: Mps | None = None,
        whose: Whose | None = None,
        claims: Sequence[tuple[Claim, Share]] = (),
    ) -> None:
        """Create what a new container needs, or take over a running one from its `remains`.

        `claims` are the shares that it uses, if its quota comes from claims.
        """
        self.claims = tuple(claims)
        self.uses: tuple[Use, ...] = tuple((claim.uid, share.name) for claim, share in claims)
        new_key = uses_key(self.uses) if self.uses else container_key(identifier)
        self.key = remains.key if remains else new_key
        others = remains.others if remains else ()
        row = MemberRow(None, identify(pidfd), remains is not None, None, whose or Whose())
        if self.uses or container_key(identifier) == self.key:
            row = replace(row, identifier=identifier)
        self.members = [Member(identifier, row, pidfd)]
        self.members += [Member(_called(one, self.key), one, fd) for one, fd in others]
        self.quota = quota
        self.devices = devices
        self.directory = Path(config.runtime_dir) / "containers" / self.key
        self.context_memory = config.context_memory
        self._on_end: Callable[[Container, Member], None] = lambda *_: None
        self._state = state or State()
        self._mps = mps
        self._runners = [runners[device.uuid] for device in devices]
        # Pidfds of the processes without a slot that are held, by GPU and pid.
        self._held: dict[int, dict[int, int]] = {}
        self._tenants: list[int] = []
        self._gang = NOBODY
        self._processes: dict[int, Process] = {}  # by slot
        self._meters: list[Meter[Process]] = [Meter() for _ in devices]
        self._looked_ns = [0] * len(devices)
        self._told_ns = [0] * len(devices)
        self._counters = Counters(len(devices))
        self._rates = [Rates() for _ in devices]
        self.called: str | None = None  # its name at its engine; None until it was looked up
        self.findings = Findings(len(devices))
        # What the page says about memory stands until this governor's first look.
        self._kept = [remains is not None] * len(devices)
        self._listener: Listener | None = None
        self._closed = False
        self._unanswered = {True: 0, False: 0}  # its own processes' (True), and others'
        self._lines = PacedLog(log)
        self._refusals = {True: PacedLog(log), False: PacedLog(log)}
        self._loop = asyncio.get_running_loop()
        try:
            if remains is None:
                shutil.rmtree(self.directory, ignore_errors=True)
            # The governor has created the parent directory. If it was removed since, the new one
            # must not be open to other users.
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.mkdir(mode=0o755, exist_ok=remains is not None)
            grant = remains.grant if remains else None
            self.grant = grant or make_grant(
                self.directory / "grant", quota, devices, config, strategy=self.strategy
            )
            if self.claims and remains is None:
                self._note_claims()
            if mps is not None:
                mps.link(self.directory)
            found = remains.ledger if remains else None
            self._ledger_fd, self.ledger = ledger = found or make_ledger()
            row = replace(row, membership=self._find_membership(row.process, remains))
            self.members[0].row = row
            for member in self.members:
                self._look_at(member)
            self.row = ContainerRow(
                self.key,
                quota=quota,
                devices=tuple(device.uuid for device in devices),
                ledger=ledger.file,
                uses=self.uses,
                others=tuple(member.row for member in self.members[1:]),
                **vars(row),
            )
            if remains is not None:
                self._take_over(remains, config)
            shares = (quota.compute * WHOLE // 100, quota.compute_limit * WHOLE // 100)
            for i, runner in enumerate(self._runners):
                tenant = runner.add(*shares, self.grant, i, self.ledger, latency=quota.is_latency)
                self._tenants.append(tenant)
            for slot in self._processes:  # of a container that runs already
                self._tell_runners(slot)
            together = self._together
            if together is not None and len(self._tenants) > 1:
                self._gang = together.add(self._runners, self._tenants)
        except BaseException:
            self._forget(keep=remains is not None)
            raise

    # Members

    @property
    def identifier(self) -> str:
        """The id of the container; of the oldest member, where there are several."""
        return self.members[0].identifier if self.members else ""

    @property
    def pid(self) -> int:
        """The first process of the oldest member."""
        return self.members[0].pid if self.members else 0

    @property
    def confirmed(self) -> bool:
        """Whether the start of at least one member is confirmed."""
        return any(member.confirmed for member in self.members)

    @staticmethod
    def _look_at(member: Member) -> None:
        if not member.membership.cgroups:
            log.warning(
                "membership-unknown",
                container=member.identifier,
                error="it has no control group of its own that the governor sees; whoever "
                "reaches its socket is registered",
            )

    def join(self, identifier: str, pidfd: int, whose: Whose) -> Member:
        """Add a container that uses the same shares."""
        first = identify(pidfd)
        membership = find_membership(first.pid)
        row = MemberRow(identifier, first, membership=membership, whose=whose)
        member = Member(identifier, row, pidfd)
        self._look_at(member)
        self.members.append(member)
        self._loop.add_reader(pidfd, self._member_ended, member)
        self._renew_row()
        return member

    def confirm(self, member: Member) -> ContainerRow:
        """Return the row in which a member's start is confirmed."""
        members = [
            replace(one.row, confirmed=True) if one is member else one.row for one in self.members
        ]
        return self.row.of(members)

    def confirmed_as(self, row: ContainerRow) -> None:
        """Adopt the members' rows that were written to the state."""
        self.row = row
        for member, own in zip(self.members, row.members, strict=True):
            member.row = own

    def part(self, member: Member) -> None:
        """Remove a member that has ended or did not start; at least one other member stays."""
        if member is self.members[0]:
            self.called = None  # from now on the next member's name counts
        self.members.remove(member)
        self._loop.remove_reader(member.pidfd)
        os.close(member.pidfd)
        for process in self._processes.values():
            if process.member is member:
                process.member = None
        self._renew_row()

    def _renew_row(self) -> None:
        self.row = self.row.of([member.row for member in self.members])

    def _member_ended(self, member: Member) -> None:
        self._on_end(self, member)

    def member_of(self, pid: int) -> Member | None:
        """Return the member that a process belongs to.

        A process that is in no member's control group belongs to the first member that has none of
        its own. Where all members have control groups, it belongs to no member (None).
        """
        groups = read_cgroups(pid)
        own = [one for one in self.members if one.membership.has_cgroups(groups)]
        return next(iter(own), next((m for m in self.members if not m.membership.cgroups), None))

    def has_cgroups(self, groups: Mapping[str, str]) -> bool:
        """Return whether a process in these control groups belongs to the container."""
        return any(member.membership.has_cgroups(groups) for member in self.members)

    def has_namespaces(self, namespaces: tuple[tuple[int, int], ...]) -> bool:
        """Return whether a process in these pid namespaces belongs to the container."""
        return any(member.membership.has_namespaces(namespaces) for member in self.members)

    def _note_claims(self) -> None:
        """Record the claims next to the grant page, in case the database is damaged."""
        claims = {claim.uid: claim.describe() for claim, _ in self.claims}
        path = self.directory / CLAIMS
        path.write_text(json.dumps({"claims": list(claims.values()), "uses": self.uses}) + "\n")
        path.chmod(0o644)

    def _find_membership(self, first: Identity, remains: Remains | None) -> Membership:
        if remains is None:
            # The runtime has put the first process into its group, and no code of the image has run
            # yet.
            return find_membership(first.pid)
        if remains.membership is not None:
            return remains.membership
        return find_membership(first.pid, is_named=self._is_named)

    def _is_named(self, part: str) -> bool:
        return any(container_key(name) == self.key for name in names_in(part))

    def _take_over(self, remains: Remains, config: Config) -> None:
        """Keep the slots of the processes that still run; what others were charged becomes free."""
        take_over(self.grant, config, self.strategy)
        usage = {(entry["pid"], entry["start_us"]): entry for entry in pages.read_usage(self.grant)}
        for row, pidfd in remains.processes:
            member = self.member_of(row.process.pid)
            inner = namespace_pid(row.process.pid, member.pid if member else self.pid)
            uses = [_Use() for _ in self.devices]
            peaks = usage.get((inner, row.start_us), {}).get("memory_peak", ())
            for use, peak in zip(uses, peaks if isinstance(peaks, tuple) else (), strict=False):
                use.peak = peak
            self._enter(
                Process(
                    slot=row.slot,
                    pid=row.process.pid,
                    start=row.process.start,
                    pidfd=pidfd,
                    socket=None,
                    inner_pid=inner,
                    start_us=row.start_us,
                    start_ns=time.monotonic_ns(),
                    uses=uses,
                    member=member,
                )
            )
        for slot in range(layout.N_SLOTS):
            if slot not in self._processes:
                pages.clear_slot(self.ledger, slot)
        pages.write(
            self.ledger, 0, "ledger_header", "n_slots", 1 + max(self._processes, default=-1)
        )

    async def listen(self, on_end: Callable[[Container, Member], None]) -> None:
        """Serve the container's processes; call `on_end` when a first process has ended."""
        self._on_end = on_end
        try:
            self._listener = Listener(
                self.directory / "governor.sock",
                Pace(REGISTRATION_S, REGISTRATIONS),
                self._register,
            )
        finally:
            # Also for a container that cannot be reached: its end has to be noticed.
            for member in self.members:
                self._loop.add_reader(member.pidfd, self._member_ended, member)

    async def _register(self, own: socket.socket) -> None:
        """Give a process its slot: it sends one byte and gets the slot's number and the ledger.

        A process that had a slot from the previous governor sends another byte and keeps that slot.
        A process that connects or registers in a loop does not use up the descriptors, rows or log
        lines of other containers.
        """
        credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid = struct.unpack("3i", credentials)[0]
        is_own = pid in self.pids() or self._is_own(pid)
        self._unanswered[is_own] += 1
        is_kept = False
        try:
            if self._unanswered[is_own] <= MOST_UNANSWERED:
                request = await asyncio.wait_for(self._loop.sock_recv(own, 1), ANSWER_S)
                is_kept = bool(request) and self._answer_request(request, pid, own, is_own=is_own)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._unanswered[is_own] -= 1
            if not is_kept:
                _part(own)

    def _answer_request(
        self, request: bytes, pid: int, own: socket.socket, *, is_own: bool
    ) -> bool:
        """Answer a process, and return whether the connection is kept."""
        try:
            if not is_own:
                raise RuntimeError(STRANGER)
            if request == layout.AGAIN:
                self._readmit_process(pid, own)
            else:
                self._admit_process(pid, own)
        except (OSError, RuntimeError) as e:
            # Refuse explicitly: a process that only sees its connection end takes the governor to
            # be away, and would keep a whole quota for itself alone.
            with contextlib.suppress(OSError):
                own.send(struct.pack("I", layout.NO_SLOT))
            self._refusals[is_own].warning(
                "process-refused", container=self.identifier, pid=pid, error=str(e)
            )
            return False
        return True

    def _admit_process(self, pid: int, own: socket.socket) -> None:
        # A process that executed another program has hung up, and registers again.
        for known in [p for p in self._processes.values() if p.pid == pid and _hung_up(p.socket)]:
            self._end_process(known.slot)
        slot = next(
            (i for i in range(layout.N_SLOTS) if i not in self._processes),
            None,
        )
        if slot is None:
            raise RuntimeError(f"{layout.N_SLOTS} processes of this container use the GPU already")
        pidfd = _peer(own, pid)
        # The process that connected may have ended since, and its pid may be another process's.
        who = identify(pidfd)
        if not pid or who.pid != pid:
            os.close(pidfd)
            raise RuntimeError("it has ended")
        member = self.member_of(pid)
        if member is None:
            os.close(pidfd)
            raise RuntimeError(STRANGER)
        process = Process(
            slot=slot,
            pid=pid,
            start=who.start,
            pidfd=pidfd,
            socket=own,
            inner_pid=namespace_pid(pid, member.pid if member else self.pid),
            start_us=time.time_ns() // 1000,
            start_ns=time.monotonic_ns(),
            uses=[_Use() for _ in self.devices],
            member=member,
        )
        # Before the slot is in use: a slot in use that has no row means that the file was damaged.
        self._state.register(
            self.key, ProcessRow(slot, Identity(pid, process.start), process.start_us)
        )
        pages.clear_slot(self.ledger, slot)
        self._enter(process)
        try:
            self._answer(process, own)
        except OSError:
            self._forget_process(slot)
            raise
        self._lines.info("process-registered", container=self.identifier, pid=pid, slot=slot)

    def _is_own(self, pid: int) -> bool:
        """Return whether a process is in the container's control group, or the container has none.

        Where containers share a pid namespace, processes of another container with equal rights can
        reach this one's directory by /proc/PID/root. Only the control group tells them apart.
        """
        return self.member_of(pid) is not None

    def _readmit_process(self, pid: int, own: socket.socket) -> None:
        """Reconnect a process that the previous governor registered, or that lost this one."""
        start = start_time(pid)
        for process in self._processes.values():
            if (process.pid, process.start) == (pid, start) and _hung_up(process.socket):
                if process.socket is not None:
                    _part(process.socket)
                process.socket = None
                self._answer(process, own)
                process.socket = own
                self._lines.info(
                    "process-returned", container=self.identifier, pid=pid, slot=process.slot
                )
                return
        raise RuntimeError("it says that it is registered, and is not")

    def _enter(self, process: Process) -> None:
        """Put a process into its slot."""
        slot = process.slot
        base = pages.slot_base(slot)
        pages.write(self.ledger, base, "ledger_slot", "namespace", pid_namespace(process.pid))
        pages.write(self.ledger, base, "ledger_slot", "state", 1)
        seen = pages.read(self.ledger, 0, "ledger_header", "n_slots")
        if slot >= seen:
            pages.write(self.ledger, 0, "ledger_header", "n_slots", slot + 1)
        self._processes[slot] = process
        self._loop.add_reader(process.pidfd, self._end_process, slot)
        self._tell_runners(slot)

    def _tell_runners(self, slot: int) -> None:
        """Announce a process to each GPU's scheduler: sooner or later it has a context there."""
        process = self._processes[slot]
        for device, (runner, tenant) in enumerate(zip(self._runners, self._tenants, strict=False)):
            contexts = partial(self._contexts, layout.ledger_device(slot, device))
            runner.enter(tenant, slot, process.pid, process.pidfd, contexts)

    def _contexts(self, base: int) -> int:
        """Return how many contexts a process claims to have; the number is not checked."""
        return pages.read(self.ledger, base, "ledger_device", "contexts")

    def _answer(self, process: Process, own: socket.socket) -> None:
        self._runners[0].watch(own.fileno(), self._runners[1:])
        socket.send_fds(own, [struct.pack("I", process.slot)], [self._ledger_fd])

    def _forget_process(self, slot: int) -> Process:
        process = self._processes.pop(slot)
        for runner, tenant in zip(self._runners, self._tenants, strict=False):
            runner.leave(tenant, slot)
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        self._counters.process_ended(self.ledger, slot)
        pages.clear_slot(self.ledger, slot)
        self._state.unregister(self.key, slot)
        return process

    def _end_process(self, slot: int) -> None:
        """Take back what a process that ended was charged; the driver has freed it by now."""
        process = self._forget_process(slot)
        if process.socket is not None:
            _part(process.socket)
        for device in range(len(self.devices)):
            # Its part of the debt as well: the next look may be a quarter of a second away.
            self._publish_memory(device)
        self._publish_usage()
        self._lines.info("process-ended", container=self.identifier, pid=process.pid, slot=slot)

    def hold(self, device: int, pids: frozenset[int], owns: Callable[[int], bool]) -> bool:
        """Have the GPU's scheduler hold exactly these unregistered processes to the quota.

        They belong to the container; `owns` tells whether a pid does. Returns whether the scheduler
        is steered: nothing else could hold the processes.
        """
        runner, tenant = self._runners[device], self._tenants[device]
        if not runner.is_steered:
            return False
        held = self._held.setdefault(device, {})
        for pid in held.keys() - pids:
            self._let_go(device, pid)
        for pid in pids - held.keys():
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                continue
            # From here on the pid is no other process's as long as this process lives.
            if not owns(pid):
                os.close(pidfd)
                continue
            # Slots are numbered from 0. An unregistered process has none, so its negative pid takes
            # the slot's place. It has a context.
            try:
                runner.enter(tenant, -pid, pid, pidfd, lambda: 1)
            except OSError:  # no descriptor is left: retried at the next look
                os.close(pidfd)
                continue
            held[pid] = pidfd
            self._loop.add_reader(pidfd, self._let_go, device, pid)
            self._lines.info("process-held", container=self.identifier, pid=pid)
        return True

    def _let_go(self, device: int, pid: int) -> None:
        pidfd = self._held[device].pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self._runners[device].leave(self._tenants[device], -pid)

    @property
    def strategy(self) -> str:
        """The strategy by which its GPUs are shared."""
        return "timeslice" if self._mps is None else "mps"

    def tell_mps(self, event: Event) -> None:
        """Tell the container what happened to its MPS server, in /run/tidegate/mps/events."""
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

    def charges(self, device: int) -> dict[Process, Charge]:
        """Return what the ledger says about each process on the container's GPU `device`."""
        whole = self.devices[device].memory
        return {
            process: read_charge(self.ledger, slot, device, whole)
            for slot, process in self._processes.items()
        }

    def is_open(self, device: int) -> bool:
        """Return whether the container holds GPU `device` by an open grant."""
        base = layout.grant_device(device)
        return pages.read(self.grant, base, "grant_device", "deadline_ns") == layout.OPEN

    def reconcile(self, device: int, before: Mapping[Process, Charge], look: Look | None) -> None:
        """Compare the books with a look at NVML, and publish the result.

        `before` are the charges from before the look. `look` is None if NVML failed: what NVML saw
        last stands, and `reconciled_ns` says how old that is.
        """
        after = self.charges(device)
        now_ns = time.monotonic_ns()
        base = layout.grant_device(device)
        if look is None:
            since = pages.read(self.grant, base, "grant_device", "reconciled_ns")
        else:
            since = look.began_ns
            self._kept[device] = False
        for process, charge in after.items():
            use = process.uses[device]
            if look is not None:
                seen = look.seen.get(process.pid, 0)
                books = before.get(process, Charge()), charge
                use.debt.look(look.began_ns, seen, *books, self.context_memory, ended_ns=now_ns)
            use.used = charge.used(use.debt.bytes, since)
            use.peak = max(use.peak, use.used)
        self._publish_memory(device)
        if look is not None:
            # After the debt: a process that reads this time also finds what the look found.
            pages.write(self.grant, base, "grant_device", "reconciled_ns", since)
        self._measure(device, now_ns, after, look)
        self._publish_usage()

    def tell_nobodys(
        self, device: int, began_ns: int, nobodys: int, each: int, n_processes: int
    ) -> None:
        """Publish how much memory that belongs to no process a look found on a GPU.

        `began_ns` is when the look began. `nobodys` are the bytes in use that NVML attributes to no
        process and that no container's books mention; the number may be negative. Each process
        brings `each` bytes of them.
        """
        base = layout.grant_device(device)
        if self._told_ns[device] == began_ns:
            return
        self._told_ns[device] = began_ns
        for name, value in (
            ("unattributed", nobodys % 2**64),
            ("unattributed_each", each),
            ("n_processes", n_processes),
            ("unattributed_ns", began_ns),
        ):
            pages.write(self.grant, base, "grant_device", name, value)

    def _measure(
        self, device: int, now_ns: int, charges: Mapping[Process, Charge], look: Look | None
    ) -> None:
        sampled = None
        is_alone = self.is_open(device) and not self._runners[device].is_steered
        if is_alone and look is not None:
            by_pid = sampled_percent(look.samples, self.pids())
            sampled = {process: by_pid.get(process.pid, 0) for process in charges}
        self._rate(device)
        held_ns = int(self._runners[device].stats(self._tenants[device]).held_ns)
        busy = {process: charge.busy_ns for process, charge in charges.items()}
        parts = self._meters[device].look(now_ns, busy, held_ns, sampled)
        passed = now_ns - self._looked_ns[device]
        self._looked_ns[device] = now_ns
        for process, part in parts.items():
            use = process.uses[device]
            use.part = part
            use.worked += part * min(passed, now_ns - process.start_ns)
        pages.write(
            self.grant,
            layout.grant_device(device),
            "grant_device",
            "utilisation",
            of_limit(sum(parts.values()), self.quota.compute_limit),
        )

    def _publish_memory(self, device: int) -> None:
        if self._kept[device]:
            return
        base = layout.grant_device(device)
        uses = [process.uses[device] for process in self._processes.values()]
        for name, value in (
            ("memory_overhead", sum(use.debt.bytes for use in uses)),
            ("overhead_last", sum(use.debt.last for use in uses)),
            ("memory_used", sum(use.used for use in uses)),
        ):
            pages.write(self.grant, base, "grant_device", name, min(value, 2**64 - 1))

    def _publish_usage(self) -> None:
        now_ns = time.monotonic_ns()
        limit = self.quota.compute_limit
        entries: list[dict[str, int | Sequence[int]]] = []
        for process in self._processes.values():
            lived = max(1, now_ns - process.start_ns)
            numbers: dict[str, list[int]] = {
                "memory": [use.used for use in process.uses],
                "memory_peak": [use.peak for use in process.uses],
                "utilisation": [of_limit(use.part, limit) for use in process.uses],
                "mean_utilisation": [of_limit(use.worked / lived, limit) for use in process.uses],
            }
            rest = [0] * (layout.N_DEVICES - len(process.uses))
            entries.append(
                {
                    "pid": process.inner_pid,
                    "state": 1,
                    "start_us": process.start_us,
                    **{name: values + rest for name, values in numbers.items()},
                }
            )
        pages.write_usage(self.grant, entries, time.time_ns() // 1000)

    def used(self, device: int) -> int:
        """Return the bytes in use on GPU `device`, by NVML's last look and the books as of now."""
        base = layout.grant_device(device)
        since = pages.read(self.grant, base, "grant_device", "reconciled_ns")
        return sum(
            charge.used(process.uses[device].debt.bytes, since)
            for process, charge in self.charges(device).items()
        )

    def gpu_times(self) -> dict[str, GpuTime]:
        """Return the container's time on each GPU, by UUID; it never goes back."""
        now_ns = time.monotonic_ns()
        return {
            device.uuid: self._counters.time(i, self.stats(i), now_ns)
            for i, device in enumerate(self.devices)
        }

    def _rate(self, device: int) -> dict[str, float | None]:
        """Return its recent rates on GPU `device`, in percent, and remember this reading."""
        now_ns = time.monotonic_ns()
        time_of = self._counters.time(device, self.stats(device), now_ns)
        waited_ns = self.counted(device)["wait_ns"]
        return self._rates[device].look(
            now_ns, delivered=time_of.charged_ns, lent=time_of.lent_ns, waited=waited_ns
        )

    def configure(self, config: Config) -> None:
        """Put new settings of the node in force; the size of a context stays as it was."""
        take_over(self.grant, config, self.strategy)

    def counted(self, device: int) -> Mapping[str, int]:
        """Return what its processes counted on GPU `device`, including those that ended."""
        return self._counters.processes(self.ledger, self._processes, device)

    def memory(self, device: int) -> Memory:
        """Return what it uses of GPU `device`; no process counts for more than the GPU's memory."""
        charged = sum(charge.memory for charge in self.charges(device).values())
        peak = pages.read(self.ledger, 0, "ledger_header", "memory_peak", device)
        return Memory(
            charged=charged,
            overhead=sum(process.uses[device].debt.bytes for process in self._processes.values()),
            used=self.used(device),
            peak=min(peak, self.devices[device].memory),
        )

    def passing(self, device: int) -> Passing:
        """Return what its processes report that runs on GPU `device` without a grant."""
        return read_passing(self.ledger, self._processes, device)

    def lives(self) -> bool:
        """Return whether at least one member's first process has not ended."""
        return any(not member.has_ended() for member in self.members)

    def kill(self) -> None:
        """Kill its first process, and with it its pid namespace; OSError if that fails.

        Where there are several members all are killed, because what is held is held by all of them;
        OSError then means that none could be killed.
        """
        failed: list[OSError] = []
        for member in self.members:
            try:
                signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
            except OSError as e:
                failed.append(e)
        if len(failed) == len(self.members):
            raise failed[0]

    def stats(self, device: int) -> Stats:
        """Return the arbiter's counters for GPU `device`."""
        return self._runners[device].stats(self._tenants[device])

    def waits(self, device: int) -> Waits:
        """Return how long it waited for its grants of GPU `device`."""
        return self._runners[device].waits(self._tenants[device])

    def set_quota(self, quota: Quota) -> None:
        """Hold the container to another quota from now on, on each of its GPUs."""
        self.quota = quota
        self.row = replace(self.row, quota=quota)
        shares = (quota.compute * WHOLE // 100, quota.compute_limit * WHOLE // 100)
        for i, (runner, tenant) in enumerate(zip(self._runners, self._tenants, strict=True)):
            base = layout.grant_device(i)
            for name, value in (
                ("memory_limit", quota.memory),
                ("compute", shares[0]),
                ("compute_limit", shares[1]),
                ("work_class", int(quota.is_latency)),
            ):
                pages.write(self.grant, base, "grant_device", name, value)
            runner.set(tenant, *shares, latency=quota.is_latency)

    def describe(self) -> list[dict[str, Any]]:
        """Return what `tidegate ps` shows: bytes, percent, nanoseconds and counts.

        There is one entry for each member. What members have of GPUs they have together.
        """
        devices = []
        for i, device in enumerate(self.devices):
            stats, waits = self.stats(i), self.waits(i)
            counters = {
                name: pages.device_sum(self.ledger, name, i)
                for name in (
                    "launches",
                    "waits",
                    "wait_ns",
                    "refused",
                    "markers",
                    "busy_ns",
                    "blocks",
                    "predicted_ns",
                    "error_ns",
                    "transfers",
                    "transfer_bytes",
                    "small",
                    "contexts",
                )
            }
            devices.append(
                {
                    "uuid": device.uuid,
                    "index": device.index,
                    **self._rate(i),
                    "waiting": self._waiting(i),
                    "memory_limit": self.quota.memory,
                    "memory_used": self.used(i),
                    "memory_peak": pages.read(self.ledger, 0, "ledger_header", "memory_peak", i),
                    "grants": int(stats.grants),
                    "charged_ns": int(stats.charged_ns),
                    "lent_ns": int(stats.lent_ns),
                    "held_ns": int(stats.held_ns),
                    "overdue": int(stats.overdue),
                    "grant_waits": list(waits.counts),
                    "grant_wait_ns": int(waits.ns),
                    **counters,
                }
            )
        lookups = sum(
            pages.read(self.ledger, pages.slot_base(slot), "ledger_slot", "lookups")
            for slot in self._processes
        )
        claims: dict[str, dict[str, Any]] = {}
        for claim, share in self.claims:
            named = {"uid": claim.uid, "namespace": claim.namespace, "name": claim.name}
            claims.setdefault(claim.uid, {**named, "shares": []})["shares"].append(share.name)
        common = {
            "key": self.key,
            "claims": list(claims.values()),
            "together": len(self.members),
            "compute": self.quota.compute,
            "compute_limit": self.quota.compute_limit,
            "class": self.quota.work_class,
            "strategy": self.strategy,
            "mps": None if self._mps is None else self._mps.describe(),
            "lookups": lookups,
            "devices": devices,
            **self.findings.describe(),
        }
        return [
            {
                "id": member.identifier,
                "pid": member.pid,
                "confirmed": member.confirmed,
                "bundle": member.row.whose.bundle,
                "identity": dict(member.row.whose.identity),
                "processes": self._processes_of(member),
                "control_group": bool(member.membership.cgroups),
                **common,
            }
            for member in self.members
        ]

    def _processes_of(self, member: Member) -> list[int]:
        """Return a member's registered processes; those of no member count as the oldest's."""
        oldest = self.members[0]
        return sorted(
            {
                process.pid  # once, however many connections it opened
                for process in self._processes.values()
                if (process.member or oldest) is member
            }
        )

    def _waiting(self, device: int) -> int:
        """Return how many of its processes report that they wait for time on GPU `device`."""
        return sum(
            pages.read(self.ledger, layout.ledger_device(slot, device), "ledger_device", "want") > 0
            for slot in self._processes
        )

    def close(self, *, keep: bool = False) -> None:
        """Release everything: the GPU, the slots, the socket, the directory.

        With `keep` the container runs on without the governor: its pages, what its processes are
        charged, its directory and its rows in the state stay, and it keeps to its quota on its own.
        """
        if self._closed:
            return
        self._closed = True
        if not keep:
            # The row goes first: a directory that no row names is examined, and removed.
            self._state.leave(self.key)
        for member in self.members:
            with contextlib.suppress(OSError, ValueError):
                self._loop.remove_reader(member.pidfd)
        if self._listener is not None:
            self._listener.close()
            self._listener = None  # it refers to this object
        for slot in () if keep else list(self._processes):
            self._end_process(slot)
        self._forget(keep=keep)

    @property
    def _together(self) -> Together | None:
        """What schedules all its GPUs at once; None where they are divided in different ways."""
        ways = {id(runner.together): runner.together for runner in self._runners}
        return ways.popitem()[1] if len(ways) == 1 else None

    def _forget(self, *, keep: bool = False) -> None:
        together = self._together
        if together is not None and self._gang != NOBODY:
            together.remove(self._gang)
            self._gang = NOBODY
        if self._mps is not None:
            self._mps.unlink(self.directory)
        for device, held in self._held.items():
            for pid in list(held):
                self._let_go(device, pid)
        for runner, tenant in zip(self._runners, self._tenants, strict=False):
            runner.remove(tenant)
        self._tenants = []
        for process in self._processes.values():
            self._loop.remove_reader(process.pidfd)
            os.close(process.pidfd)
            if process.socket is not None:
                _part(process.socket)
        self._processes.clear()
        for member in self.members:
            os.close(member.pidfd)
        if hasattr(self, "_ledger_fd"):
            os.close(self._ledger_fd)
        if not keep:
            shutil.rmtree(self.directory, ignore_errors=True)
