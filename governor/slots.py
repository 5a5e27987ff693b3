"""Registration of a container's processes, each in a slot of the container's ledger.

A process connects to the container's socket, sends one byte, and gets the number of its slot and
the ledger. It keeps the connection for as long as it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from governor.account import Account, GpuUse, RegisteredProcess
from governor.arenas import Arenas
from governor.listener import Listener
from governor.members import Member, Members
from governor.pace import RateLimitedLog, RateLimiter
from governor.processes import Identity, identify, namespace_pid, pid_namespace, start_time
from governor.scheduled import Scheduled
from governor.shared_memory import Ledger
from governor.state import ProcessRow, State
from libcontrol import layout, pages

log = structlog.get_logger()

_SO_PEERPIDFD = 77

MAX_UNANSWERED = 64
"""Maximum number of unanswered connections from a container's own processes. Connections from
processes outside the container have a separate limit of the same size.
"""
ANSWER_S = 5.0
"""Longest time that a connection may stay silent, in seconds."""
REGISTRATION_S = 0.01
REGISTRATIONS = 256
"""A container's processes may connect a hundred times a second, after a burst of 256."""
ENDED = "it has ended"
STRANGER = "it is not in the container's control group; enter with the engine's exec, not nsenter"


def _has_ended(peer: socket.socket, pid: int) -> bool:
    """Return whether the process that connected has ended; it is then in no control group."""
    try:
        pidfd = _peer(peer, pid)
    except OSError:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(0))
    os.close(pidfd)
    return ended


def _hung_up(peer: socket.socket | None) -> bool:
    if peer is None:
        return True
    try:
        return not peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _disconnect(peer: socket.socket) -> None:
    """Shut down a connection, even if other descriptors for it are open.

    The arbiter has one, and any process to which the registered process passed its descriptor may
    have one as well.
    """
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()


def _peer(own: socket.socket, pid: int) -> int:
    """Return a pidfd of the process that connected.

    Before Linux 6.5, it refers to the process that has that pid now.
    """
    try:
        return int.from_bytes(
            own.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4), sys.byteorder, signed=True
        )
    except OSError as e:
        if e.errno != errno.ENOPROTOOPT:
            raise
        return os.pidfd_open(pid)


class Slots:
    """The slots of one container; `processes` maps them to processes, for other modules to read."""

    def __init__(
        self,
        *,
        key: str,
        ledger: Ledger,
        n_devices: int,
        processes: dict[int, RegisteredProcess],
        members: Members,
        gpus: Scheduled,
        account: Account,
        state: State,
        arenas: Arenas | None = None,
    ) -> None:
        self._key, self._n_devices, self._arenas = key, n_devices, arenas
        self._ledger_fd, self._ledger = ledger
        self._processes, self._members = processes, members
        self._gpus, self._account, self._state = gpus, account, state
        self._listener: Listener | None = None
        self._unanswered = {True: 0, False: 0}  # by whether the process is the container's own
        self._lines = RateLimitedLog(log)
        self._refusals = {True: RateLimitedLog(log), False: RateLimitedLog(log)}
        self._loop = asyncio.get_running_loop()

    @property
    def _name(self) -> str:
        return self._members[0].identifier if self._members else ""

    def take_over(
        self, rows: Iterable[tuple[ProcessRow, int]], usage: Iterable[Mapping[str, Any]]
    ) -> None:
        """Keep the slots of running processes; clear the other slots and their charges.

        Each row comes with the process's pidfd. `usage` contains the entries of the grant page.
        """
        known = {(entry["pid"], entry["start_us"]): entry for entry in usage}
        for row, pidfd in rows:
            member = self._members.of(row.process.pid)
            inner = namespace_pid(row.process.pid, (member or self._members[0]).pid)
            uses = [GpuUse() for _ in range(self._n_devices)]
            peaks = known.get((inner, row.start_us), {}).get("memory_peak", ())
            for use, peak in zip(uses, peaks if isinstance(peaks, tuple) else (), strict=False):
                use.peak = peak
            self._enter(
                RegisteredProcess(
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
                pages.clear_slot(self._ledger, slot)
        if self._arenas is not None:
            self._arenas.find(self._processes.values())
        n_slots = 1 + max(self._processes, default=-1)
        pages.write(self._ledger, 0, "ledger_header", "n_slots", n_slots)

    def announce(self) -> None:
        """Tell the runners, once they exist, which processes were taken over."""
        for process in self._processes.values():
            self._announce(process)

    def listen(self, path: Path) -> None:
        """Serve the container's processes on a socket."""
        self._listener = Listener(path, RateLimiter(REGISTRATION_S, REGISTRATIONS), self._register)

    def close(self, *, keep: bool) -> None:
        """Stop serving; with `keep`, processes keep their slots and charges."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None  # breaks a reference cycle
        for slot in () if keep else list(self._processes):
            self._end(slot)

    def drop(self) -> None:
        """Close the descriptors of processes that keep their slots."""
        for process in self._processes.values():
            self._loop.remove_reader(process.pidfd)
            os.close(process.pidfd)
            if process.socket is not None:
                _disconnect(process.socket)
        self._processes.clear()
        if self._arenas is not None:
            self._arenas.drop()

    async def _register(self, own: socket.socket) -> None:
        """Register a process: it sends one byte and gets the slot's number and the ledger.

        A process with a slot from the previous governor sends a different byte and keeps that slot.
        A process that connects or registers in a loop cannot exhaust the descriptors, rows or log
        lines of other containers.
        """
        credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid = struct.unpack("3i", credentials)[0]
        is_own = self._is_own(pid)
        self._unanswered[is_own] += 1
        is_kept = False
        try:
            if self._unanswered[is_own] <= MAX_UNANSWERED:
                # wait_for() is not used: before Python 3.12 it ignores a cancellation that arrives
                # together with the result, and the process would be registered after close().
                async with asyncio.timeout(ANSWER_S):
                    request = await self._loop.sock_recv(own, 1)
                is_kept = bool(request) and self._answer_request(request, pid, own, is_own=is_own)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._unanswered[is_own] -= 1
            if not is_kept:
                _disconnect(own)

    def _is_own(self, pid: int) -> bool:
        """Return whether a process is registered, or in the container's control group.

        Also return True if the container has no control group. If containers share a pid namespace,
        a process of another container with the same rights can reach this container's directory
        through /proc/PID/root. Only the control group distinguishes them.
        """
        is_registered = any(process.pid == pid for process in self._processes.values())
        return is_registered or self._members.of(pid) is not None

    def _answer_request(
        self, request: bytes, pid: int, own: socket.socket, *, is_own: bool
    ) -> bool:
        """Answer a process, and return whether the connection is kept."""
        try:
            if not is_own:
                raise RuntimeError(ENDED if _has_ended(own, pid) else STRANGER)
            if request == layout.AGAIN:
                self._readmit(pid, own)
            else:
                self._admit(pid, own)
        except (OSError, RuntimeError) as e:
            # Refuse explicitly: a process that only sees its connection end assumes that the
            # governor is not running, and would use a whole quota by itself.
            with contextlib.suppress(OSError):
                own.send(struct.pack("I", layout.NO_SLOT))
            self._refusals[is_own].warning(
                "process-refused", container=self._name, pid=pid, error=str(e)
            )
            return False
        return True

    def _admit(self, pid: int, own: socket.socket) -> None:
        # After execve, a process's old connection is closed, and it registers again.
        for known in [p for p in self._processes.values() if p.pid == pid and _hung_up(p.socket)]:
            self._end(known.slot)
        slot = next((i for i in range(layout.N_SLOTS) if i not in self._processes), None)
        if slot is None:
            raise RuntimeError(
                f"{layout.N_SLOTS} processes of this container are already using the GPU"
            )
        process = self._identify(slot, pid, own)
        # The row is stored before the slot is in use: a slot in use without a row would look like
        # damage to the state.
        self._state.register(
            self._key, ProcessRow(slot, Identity(pid, process.start), process.start_us)
        )
        pages.clear_slot(self._ledger, slot)
        try:
            self._enter(process)
            if self._arenas is not None:
                self._arenas.open(slot)
            self._answer(process, own)
        except OSError:
            self._forget(slot)
            raise
        self._lines.info("process-registered", container=self._name, pid=pid, slot=slot)

    def _identify(self, slot: int, pid: int, own: socket.socket) -> RegisteredProcess:
        """Return the record of the process that connected."""
        pidfd = _peer(own, pid)
        # The process may have ended since it connected, and its pid may have been reused.
        identity = identify(pidfd)
        if not pid or identity.pid != pid:
            os.close(pidfd)
            raise RuntimeError(ENDED)
        member = self._members.of(pid)
        if member is None:
            os.close(pidfd)
            raise RuntimeError(STRANGER)
        return RegisteredProcess(
            slot=slot,
            pid=pid,
            start=identity.start,
            pidfd=pidfd,
            socket=own,
            inner_pid=namespace_pid(pid, member.pid),
            start_us=time.time_ns() // 1000,
            start_ns=time.monotonic_ns(),
            uses=[GpuUse() for _ in range(self._n_devices)],
            member=member,
        )

    def _readmit(self, pid: int, own: socket.socket) -> None:
        """Reconnect a process that this governor or the previous one registered."""
        start = start_time(pid)
        for process in self._processes.values():
            if (process.pid, process.start) == (pid, start) and _hung_up(process.socket):
                if process.socket is not None:
                    _disconnect(process.socket)
                process.socket = None
                self._answer(process, own)
                process.socket = own
                self._lines.info(
                    "process-returned", container=self._name, pid=pid, slot=process.slot
                )
                return
        raise RuntimeError("it claims to be registered, but it is not")

    def _enter(self, process: RegisteredProcess) -> None:
        """Put a process into its slot."""
        slot = process.slot
        base = pages.slot_base(slot)
        pages.write(self._ledger, base, "ledger_slot", "namespace", pid_namespace(process.pid))
        pages.write(self._ledger, base, "ledger_slot", "state", 1)
        seen = pages.read(self._ledger, 0, "ledger_header", "n_slots")
        if slot >= seen:
            pages.write(self._ledger, 0, "ledger_header", "n_slots", slot + 1)
        self._processes[slot] = process
        self._loop.add_reader(process.pidfd, self._end, slot)
        self._announce(process)

    def withdraw(self) -> None:
        """Undo `announce`."""
        for slot in self._processes:
            self._gpus.leave(slot)

    def _announce(self, process: RegisteredProcess) -> None:
        contexts = partial(self._account.contexts, process.slot)
        self._gpus.enter(process.slot, process.pid, process.pidfd, contexts)

    def _answer(self, process: RegisteredProcess, own: socket.socket) -> None:
        self._gpus.watch(own.fileno())
        fds = [self._ledger_fd]
        if (
            self._arenas is not None
            and (arena := self._arenas.descriptor(process.slot)) is not None
        ):
            fds.append(arena)
        socket.send_fds(own, [struct.pack("I", process.slot)], fds)

    def _forget(self, slot: int) -> RegisteredProcess:
        process = self._processes.pop(slot)
        self._gpus.leave(slot)
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        self._account.count_ended(slot)
        if self._arenas is not None:
            self._arenas.close(slot)
        pages.clear_slot(self._ledger, slot)
        self._state.unregister(self._key, slot)
        return process

    def _end(self, slot: int) -> None:
        """Clear the slot of a process that ended; the driver has already freed its memory."""
        process = self._forget(slot)
        if process.socket is not None:
            _disconnect(process.socket)
        self._account.publish_ended()
        self._lines.info("process-ended", container=self._name, pid=process.pid, slot=slot)

    def release(self, member: Member) -> None:
        """Detach a removed member's processes, which then belong to the container."""
        for process in self._processes.values():
            if process.member is member:
                process.member = None
