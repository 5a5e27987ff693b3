"""Implement `steering.Hardware` for a real GPU: channel groups, driver calls and the trace."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from governor.hardware import calls
from governor.hardware.activity import Full
from governor.hardware.discovery import (
    MAX_CLIENTS_PROBED,
    ChannelGroup,
    Holding,
    answers,
    borrowed_of,
    duplicate_descriptor,
    find_holdings,
    live_clients,
)
from governor.hardware.driver import (
    DriverCallError,
    DriverClient,
    DriverGpu,
    Ioctl,
    kernel_ioctl,
    module_branch,
)
from governor.hardware.trace import Residency, Trace
from governor.hardware.watchdog import Watchdog

CAP_SYS_ADMIN = 21
MIN_SLICE_US = 100
"""Shortest time slice that is set, in microseconds: a context switch takes 80 us."""
N_OVERLAP = 64
"""Number of handles that two consecutive searches both probe."""
MAX_CLIENTS_KEPT = MAX_CLIENTS_PROBED // 2
"""Number of known clients that an ordinary search probes again."""
SLICE_UNIT = 1024
"""Length in nanoseconds of what the driver counts as a microsecond of a time slice: a slice of
24,920 us lasts 25.53 ms (H200), and slices of all other lengths that were tried are longer in the
same ratio."""


class ClientHolding(NamedTuple):
    """A client of a process, and its channel groups on this GPU."""

    holding: Holding
    groups: tuple[ChannelGroup, ...]

    @property
    def pid(self) -> int:
        """The process."""
        return self.holding.pid

    @property
    def key(self) -> int:
        """The client's handle, which is unique on the host."""
        return self.holding.client

    @property
    def n_groups(self) -> int:
        """Number of channel groups that the GPU schedules."""
        return len(self.groups)

    @property
    def channels(self) -> list[tuple[int, int]]:
        """All channels, as pairs of client and channel."""
        return [(group.client, channel) for group in self.groups for channel in group.channels]


class NvidiaHardware:
    """One GPU of the running driver.

    Methods raise OSError or DriverCallError if it cannot be steered.
    """

    elsewhere_s = 0.0

    def __init__(
        self,
        uuid: str,
        *,
        branch: int | None = None,
        path: str = calls.CONTROL_DEVICE,
        proc: Path = Path("/proc"),
        ioctl: Ioctl = kernel_ioctl,
    ) -> None:
        found = branch or module_branch()
        if found is None:
            raise FileNotFoundError("/proc/driver/nvidia/version does not exist")
        self._branch, self._path, self._proc = found, path, proc
        self._ioctl = ioctl
        self._driver = self._open()
        self._clients: list[int] = []  # of other processes, at the last search
        self._searched = 0  # handle of the client that made that search
        try:
            gpu = self._driver.gpu(uuid)
            if gpu is None:
                raise DriverCallError(f"the driver has no GPU {uuid}", 0x57)
            self._gpu: DriverGpu = gpu
            self._trace = Trace(self._driver, self._gpu)
            with self._open() as probe:
                # The first search is by far the longest, and would otherwise be made while the
                # first containers create their contexts.
                self._live_clients(probe, thorough=False)
        except BaseException:
            self._driver.close()
            raise
        self._residency = Residency()
        self.returned_ns: Mapping[int, int] = {}
        self.early_turns: Mapping[int, int] = {}
        self.full_turns: Sequence[Full] = ()

    def _open(self) -> DriverClient:
        return DriverClient(self._branch, path=self._path, proc=self._proc, ioctl=self._ioctl)

    def watchdog(self) -> Watchdog:
        """Start a process that switches channels on again if they are left off."""
        return Watchdog("governor.hardware.nvidia:revive", (self._gpu.uuid,))

    def close(self) -> None:
        """Free all objects. Channels that are off stay off."""
        self._driver.close()

    def find(self, pid: int, pidfd: int, *, thorough: bool = False) -> Sequence[ClientHolding]:
        """Return a process's clients on this GPU; none if it is gone or has no context.

        A `thorough` search takes 2 s, and finds a client even if thousands of newer clients exist.
        """
        # A client has to be newer than those that it searches for.
        with self._open() as probe:
            clients = self._live_clients(probe, thorough=thorough)
            try:
                holdings = find_holdings(probe, pid, pidfd, clients, device=self._path)
            except ProcessLookupError:
                return []
        here = [
            ClientHolding(holding, tuple(g for g in holding.groups if g.gpu_id == self._gpu.gpu_id))
            for holding in holdings
        ]
        return [held for held in here if held.groups]

    def _live_clients(self, probe: DriverClient, *, thorough: bool) -> list[int]:
        """Return the clients of other processes, newest first.

        Handles come from a counter, so a client that the last search did not find is newer than
        that search. Only newer handles are probed, which saves a few thousand calls.
        """
        n_new = (probe.client - self._searched) % calls.N_CLIENTS + N_OVERLAP
        if thorough:
            found = live_clients(probe, calls.N_CLIENTS)
        elif not self._searched or n_new >= MAX_CLIENTS_PROBED:
            found = live_clients(probe, MAX_CLIENTS_PROBED)
        else:
            found = live_clients(probe, n_new)
            found += [one for one in self._clients if probe.exists(one, one)]
        found = [one for one in dict.fromkeys(found) if one != self._driver.client]
        self._searched = probe.client
        # This bounds the calls in an ordinary search, however many clients exist.
        self._clients = found[:MAX_CLIENTS_KEPT]
        return found

    def switch(self, held: Sequence[ClientHolding], *, on: bool) -> None:
        """Switch the channels of these clients on or off, in as few calls as possible.

        A process that has ended has no channels left to switch.
        """
        channels = [pair for one in held for pair in one.channels]
        if not channels:
            return
        pids = {one.pid for one in held}
        if on:
            self._residency.switched(pids, self._driver.gpu_time_ns(self._gpu), on=True)
        self._switch(held, channels, on=on)
        if not on:
            self._residency.switched(pids, self._driver.gpu_time_ns(self._gpu), on=False)

    def _switch(
        self, held: Sequence[ClientHolding], channels: list[tuple[int, int]], *, on: bool
    ) -> None:
        try:
            self._driver.switch_channels(self._gpu, channels, on=on)
        except DriverCallError as e:
            failed = [one for one in held if not self._switch_one(one, on=on)]
            if failed:
                raise DriverCallError(
                    f"the channels of {len(failed)} clients cannot be switched", e.status
                ) from e

    def _switch_one(self, held: ClientHolding, *, on: bool) -> bool:
        """Switch the channels that still exist; return False if any of these cannot be switched.

        The driver counts how often a channel is switched off, and the call that failed may have
        done part of its work. Switching on a channel once too often has no effect.
        """
        there = [(c, channel) for c, channel in held.channels if self._driver.exists(c, channel)]
        try:
            if there:
                self._driver.switch_channels(self._gpu, there, on=True)
                if not on:
                    self._driver.switch_channels(self._gpu, there, on=False)
        except DriverCallError:
            return not all(self._driver.exists(c, channel) for c, channel in there)
        return True

    def set_slice(self, held: ClientHolding, ns: int) -> None:
        """Set the time slice of each channel group that still exists.

        If a process has closed or replaced its descriptor for the client's open file, the old slice
        stays.
        """
        us = max(MIN_SLICE_US, ns // SLICE_UNIT)
        client = held.holding.client
        self._residency.sliced(held.pid, us * SLICE_UNIT)
        try:
            with borrowed_of(held.pid, held.holding.descriptor, self._path) as fd:
                try:
                    for group in held.groups:
                        if self._driver.exists(client, group.handle):
                            self._driver.set_timeslice(client, group.handle, fd, us)
                except DriverCallError:
                    there = all(self._driver.exists(client, group.handle) for group in held.groups)
                    if there and answers(self._driver, client, fd):
                        raise
        except OSError:
            return

    def tokens(self, held: Sequence[ClientHolding]) -> list[Any]:
        """Return the channels in the form that `revive` accepts."""
        return [list(pair) for one in held for pair in one.channels]

    def name(self, held: ClientHolding) -> list[Any]:
        """Return a JSON value from which `named` restores this client."""
        groups = [[group.handle, group.gpu_id, list(group.channels)] for group in held.groups]
        return [held.pid, held.holding.client, held.holding.descriptor, groups]

    def named(self, data: Any) -> ClientHolding:
        """Return the client with this name.

        Raise ValueError or TypeError if the name is malformed.
        """
        pid, client, descriptor, found = data
        groups = tuple(
            ChannelGroup(int(client), int(handle), int(gpu_id), tuple(int(one) for one in channels))
            for handle, gpu_id, channels in found
        )
        return ClientHolding(Holding(int(pid), int(client), int(descriptor), groups), groups)

    def used_ns(self) -> Mapping[int, int]:
        """Return how long each process has been on the GPU since the last call, by pid."""
        # The time is read before the flush: later records belong to the next call.
        now = self._driver.gpu_time_ns(self._gpu)
        self._trace.flush()
        self._residency.add(self._trace.read())
        self._residency.settle(now)
        used, self.returned_ns = self._residency.take()
        self.early_turns, self.full_turns = self._residency.take_turns(now)
        return used

    @property
    def n_lost(self) -> int:
        """Number of trace records ever lost."""
        return self._residency.n_lost + self._trace.n_dropped


def require_rights(proc: Path = Path("/proc")) -> None:
    """Raise PermissionError if the trace would hide pids, or descriptors cannot be duplicated.

    Without CAP_SYS_ADMIN, the trace has pid 0 for every process. No time would be charged, and no
    cap would hold.
    """
    status = (proc / "self/status").read_text()
    effective = int(next(t for t in status.splitlines() if t.startswith("CapEff:")).split()[1], 16)
    if not effective >> CAP_SYS_ADMIN & 1:
        raise PermissionError("without CAP_SYS_ADMIN the context-switch trace has no pids")
    with tempfile.TemporaryFile() as file:
        pidfd = os.pidfd_open(os.getpid())
        try:
            os.close(duplicate_descriptor(pidfd, file.fileno()))
        except OSError as e:
            raise PermissionError(f"the system call pidfd_getfd is refused: {e.strerror}") from e
        finally:
            os.close(pidfd)


def revive(
    uuid: str,
    tokens: Sequence[Sequence[int]],
    *,
    path: str = calls.CONTROL_DEVICE,
    proc: Path = Path("/proc"),
    ioctl: Ioctl = kernel_ioctl,
) -> None:
    """Switch on channels of a GPU one by one, because some of their processes may have ended.

    Raise OSError or DriverCallError if a channel that still exists may be off.
    """
    branch = module_branch(proc) or calls.FIRST_BRANCH
    with DriverClient(branch, path=path, proc=proc, ioctl=ioctl) as driver:
        gpu = driver.gpu(uuid)
        if gpu is None:
            return  # no process has the GPU open, so no channels exist
        failed: DriverCallError | None = None
        for client, channel in tokens:
            try:
                driver.switch_channels(gpu, [(client, channel)], on=True)
            except DriverCallError as e:  # the others must still be switched on
                failed = e if driver.exists(client, channel) else failed
        if failed:
            raise failed
