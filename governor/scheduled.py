"""One container's entries in the runners that divide the time of its GPUs.

A runner is a thread that hands out grants, or that steers the GPU's own scheduler.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from mmap import mmap

from governor.arbiter import NO_TENANT, WHOLE, Runner, Stats, Together, Waits
from governor.quota import Quota


def shares_of(quota: Quota) -> tuple[int, int]:
    """Return the guarantee and the cap of a quota, in parts per million of a GPU."""
    return quota.compute * WHOLE // 100, quota.compute_limit * WHOLE // 100


class Scheduled:
    """One container's entries in the runners of its GPUs, from `start` to `close`."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self._runners = list(runners)
        self._tenants: list[int] = []
        self._gang = NO_TENANT
        # Pidfds of the unregistered processes that are held to the quota, by GPU and pid.
        self._held: dict[int, dict[int, int]] = {}
        self._loop = asyncio.get_running_loop()

    def start(self, quota: Quota, grant: mmap, ledger: mmap, *, is_adopted: bool = False) -> None:
        """Share the GPUs with the container that has these pages.

        `is_adopted` is true if an earlier governor admitted the container.
        """
        shares, is_latency = shares_of(quota), quota.is_latency
        for i, runner in enumerate(self._runners):
            self._tenants.append(
                runner.add(*shares, grant, i, ledger, latency=is_latency, is_adopted=is_adopted)
            )

    def run_together(self) -> None:
        """Let a container with several GPUs run on all of them at the same time."""
        together = self._together
        if together is not None and len(self._tenants) > 1:
            self._gang = together.add(self._runners, self._tenants)

    @property
    def _together(self) -> Together | None:
        """The coordinator of the gangs on all GPUs; None if the GPUs' scheduling differs."""
        ways = {id(runner.together): runner.together for runner in self._runners}
        return ways.popitem()[1] if len(ways) == 1 else None

    def set(self, quota: Quota) -> None:
        """Hold the container to another quota from now on."""
        for runner, tenant in zip(self._runners, self._tenants, strict=True):
            runner.set(tenant, *shares_of(quota), latency=quota.is_latency)

    def enter(self, slot: int, pid: int, pidfd: int, contexts: Callable[[int], int]) -> None:
        """Announce a process, which may create a context on each GPU.

        `contexts` returns the number of contexts that the process reports on a GPU, by index.
        """
        for i, (runner, tenant) in enumerate(zip(self._runners, self._tenants, strict=False)):
            runner.enter(tenant, slot, pid, pidfd, lambda i=i: contexts(i))  # type: ignore[misc]

    def leave(self, slot: int) -> None:
        """Remove a process that has ended."""
        for runner, tenant in zip(self._runners, self._tenants, strict=False):
            runner.leave(tenant, slot)

    def pause(self) -> None:
        """Grant nothing to the container; its grants end at once."""
        self._leave_gang()
        for runner, tenant in zip(self._runners, self._tenants, strict=True):
            runner.pause(tenant, is_paused=True)

    def unpause(self) -> None:
        """Resume giving the container grants."""
        for runner, tenant in zip(self._runners, self._tenants, strict=True):
            runner.pause(tenant, is_paused=False)
        if self._gang == NO_TENANT:
            self.run_together()

    def watch(self, fd: int) -> None:
        """Wake the GPUs' threads when a process writes to its socket."""
        self._runners[0].watch(fd, self._runners[1:])

    def is_steered(self, device: int) -> bool:
        """Return whether a GPU's own scheduler divides its time."""
        return self._runners[device].is_steered

    def stats(self, device: int) -> Stats:
        """Return the counters of GPU `device`."""
        return self._runners[device].stats(self._tenants[device])

    def waits(self, device: int) -> Waits:
        """Return the container's grants on GPU `device`, by the length of the wait for each."""
        return self._runners[device].waits(self._tenants[device])

    def hold(self, device: int, pids: frozenset[int], owns: Callable[[int], bool]) -> list[int]:
        """Hold exactly these unregistered processes to the quota through a steered GPU's scheduler.

        They belong to the container; `owns` tells whether a given pid does. Return the pids that
        were not held before.
        """
        runner, tenant = self._runners[device], self._tenants[device]
        held = self._held.setdefault(device, {})
        for pid in held.keys() - pids:
            self._let_go(device, pid)
        new = []
        for pid in pids - held.keys():
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                continue
            # From here on the pid is not reused as long as this process lives.
            if not owns(pid):
                os.close(pidfd)
                continue
            # Slots are numbered from 0. An unregistered process has no slot, so its negative pid is
            # used as the number. The process is known to have a context.
            try:
                runner.enter(tenant, -pid, pid, pidfd, lambda: 1)
            except OSError:  # no descriptor is left: retried at the next sample
                os.close(pidfd)
                continue
            held[pid] = pidfd
            self._loop.add_reader(pidfd, self._let_go, device, pid)
            new.append(pid)
        return new

    def let_go(self) -> None:
        """Stop holding unregistered processes; they are held again when they are next found."""
        for device, held in self._held.items():
            for pid in list(held):
                self._let_go(device, pid)

    def _let_go(self, device: int, pid: int) -> None:
        pidfd = self._held[device].pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self._runners[device].leave(self._tenants[device], -pid)

    def _leave_gang(self) -> None:
        together = self._together
        if together is not None and self._gang != NO_TENANT:
            together.remove(self._gang)
            self._gang = NO_TENANT

    def close(self) -> None:
        """Leave the runners; the pages are not accessed after that."""
        self._leave_gang()
        self.let_go()
        for runner, tenant in zip(self._runners, self._tenants, strict=False):
            runner.remove(tenant)
        self._tenants = []
