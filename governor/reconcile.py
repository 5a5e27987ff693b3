"""Sample NVML a few times a second for each shared GPU, and compare the ledgers with it.

A sample shows the memory that each process really has. Between two samples, the control library
charges the allocations that it sees. If the driver takes memory by itself, the library signals
that, and the next sample is taken soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from governor.account import GpuSample, RegisteredProcess
from governor.audit import Auditor
from governor.container import Container
from governor.counters import Tally
from governor.quota import Device
from governor.residency import Whereabouts
from governor.server import Server
from governor.threads import show_name
from governor.usage import SAMPLE_NS, WINDOW_NS, Charge
from vdriver.errors import VdriverError
from vdriver.nvml import ProcessMemory, ProcessUse

log = structlog.get_logger()

SOON_NS = 20_000_000
"""Minimum interval between two samples of a GPU, in nanoseconds."""
SETTLE_S = 0.01
"""Time from a process's announcement to the sample, in seconds. The process is about to allocate,
and a sample taken amid allocations counts some of them twice until the next sample. This is also
the shortest interval between two checks of the ledgers: a process can send announcements at any
rate."""
POLL_S = SAMPLE_NS / 1e9
"""Longest interval between two checks for a sample that is due, in seconds. The interval ends
early when a process begins to wait for a sample, or when a container is admitted."""
ALONE_NS = 5_000_000_000
"""Interval at which NVML is called for a GPU without containers, to detect a failure, in ns."""


class Observer(Protocol):
    """The NVML functions that a sample needs."""

    def memory_used(self, uuid: str) -> int | None:
        """Return the bytes in use on a GPU, None if unknown; raise VdriverError if NVML fails."""

    def processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        """Return the processes on a GPU; raise VdriverError if NVML fails."""

    def utilisation(self, uuid: str, since_us: int) -> tuple[ProcessUse, ...]:
        """Return the utilisation samples after `since_us`; raise VdriverError if NVML fails."""


EACH = 16 << 20
"""Upper bound, in bytes, of the memory per process that NVML attributes to no process: 8.8 MiB on
an H200, driver 580."""


@dataclass
class Unattributed:
    """The part of a GPU's memory that NVML attributes to no process, as of the last sample."""

    each: int = EACH
    bytes: int = 0
    n: int | None = None
    began_ns: int = 0

    def tell(self, container: Container, device: int) -> None:
        """Publish the last result to a container, unless that was done already."""
        if self.n is not None:
            container.account.publish_unattributed(
                device, self.began_ns, self.bytes, self.each, self.n
            )

    def record(self, began_ns: int, found: int, n_processes: int) -> None:
        """Record a result with the number of processes, and estimate the memory per process.

        The smallest increase counts, because other causes may add to it.
        """
        if self.n is not None and n_processes > self.n:
            self.each = min(self.each, max(0, (found - self.bytes) // (n_processes - self.n)))
        self.began_ns, self.bytes, self.n = began_ns, found, n_processes


class SampleWaiters(Protocol):
    """The runner of a GPU's arbiter, which knows whether a process is waiting for a sample."""

    @property
    def due_fd(self) -> int:
        """A descriptor that becomes readable when a process begins to wait."""

    def due(self) -> bool:
        """Return whether a process is waiting: the driver took memory that only NVML shows."""


@dataclass
class _Watch:
    """State of one GPU between samples."""

    device: Device
    since_ns: int = field(default_factory=time.monotonic_ns)
    last_ns: int = 0
    sampled_ns: int = 0
    samples: tuple[ProcessUse, ...] = ()
    failing: bool = False
    unattributed: Unattributed = field(default_factory=Unattributed)
    told: tuple[Container, ...] = ()  # the node's containers when results were last published
    blind: bool = False  # NVML does not report its utilisation

    def sharing(self, server: Server) -> Iterator[tuple[Container, int]]:
        """Yield the containers that have this GPU, with the GPU's index in each."""
        for container in list(server.containers.values()):
            for i, own in enumerate(container.devices):
                if own.uuid == self.device.uuid:
                    yield container, i

    def tell_new(self, server: Server) -> None:
        """Publish the last result to containers that were admitted after the sample."""
        here = tuple(server.containers.values())
        if here != self.told:
            for container, i in self.sharing(server):
                self.unattributed.tell(container, i)
            self.told = here

    def wait_ns(self, server: Server, waiting: SampleWaiters, now_ns: int) -> int:
        """Return the time until a sample may be due; 0 if one is due now.

        It is due when the interval is over, or a process is waiting for it.
        """
        passed = now_ns - self.last_ns
        if passed >= SAMPLE_NS:
            alone_ns = now_ns - max(self.last_ns, self.since_ns)
            is_due = alone_ns >= ALONE_NS or any(True for _ in self.sharing(server))
            return 0 if is_due else ALONE_NS - alone_ns
        # A driver that fails now will not recover within 20 ms.
        if not self.failing and waiting.due():
            return max(0, SOON_NS - passed)
        return SAMPLE_NS - passed


TRIES = 4
"""Number of attempts, in a sample, to get consistent numbers while the GPU's memory changes."""


def _ask_memory(nvml: Observer, uuid: str) -> tuple[tuple[ProcessMemory, ...], int | None]:
    """Return the processes on a GPU, and the bytes that are attributed to no process.

    The bytes are None if memory was allocated or freed during each attempt, or if NVML does not
    report the memory of all processes.
    """
    for _ in range(TRIES):
        before = nvml.memory_used(uuid)
        seen = nvml.processes(uuid)
        after = nvml.memory_used(uuid)
        used = [one.used for one in seen if one.used is not None]
        if after is None or len(used) < len(seen):
            break
        if before == after:
            return seen, after - sum(used)
    return seen, None


_MOVES = (Whereabouts.LEAVING.value, Whereabouts.COMING.value)


def _unseen(
    charges: Iterable[tuple[Container, Mapping[RegisteredProcess, Charge]]],
) -> int | None:
    """Return the charged bytes on a GPU that NVML attributes to no process.

    Return None while a process is creating a context: NVML shows the memory before it attributes it
    to the process. The same applies while a container's memory is being moved on the governor's
    order. Memory that is parked in host memory is charged in the same way, but is not on the GPU,
    so it is not counted.
    """
    unseen = 0
    for container, of_processes in charges:
        if container.is_moving:
            return None
        if container.parking is not None and not container.suspension:
            parked = container.parking.report()
            if parked.n_moving and container.residency in _MOVES:
                return None
            unseen -= parked.parked
        for charge in of_processes.values():
            if charge.taking:
                return None
            unseen += 0 if container.suspension else charge.unseen
    return unseen


async def reconcile(
    server: Server,
    nvml: Observer,
    devices: list[Device],
    runners: Mapping[str, SampleWaiters],
    *,
    tally: Tally | None = None,
    auditor: Auditor | None = None,
) -> None:
    """Sample each shared GPU four times a second, and within 20 ms if a process waits for a sample.

    A GPU without containers is sampled every five seconds. Samples are counted in `tally`, and
    passed to `auditor`.
    """
    watches = [_Watch(device) for device in devices]
    with ThreadPoolExecutor(1, "tidegate-nvml", initializer=show_name) as executor:

        async def sample(watch: _Watch) -> None:
            watch.last_ns = time.monotonic_ns()
            await _take_sample(server, nvml, watch, executor, auditor)
            if tally is not None:
                seconds = (time.monotonic_ns() - watch.last_ns) / 1e9
                tally.looked(watch.device.uuid, seconds, failed=watch.failing)

        for watch in watches:
            # This measures the unattributed memory before any process has registered.
            await sample(watch)
        wait_s = POLL_S
        with _woken_by(runners[watch.device.uuid] for watch in watches) as woken:
            server.admissions.on_begin = woken.set
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), max(0.0, wait_s - SETTLE_S))
                await asyncio.sleep(SETTLE_S)
                woken.clear()
                wait_s = POLL_S
                for watch in watches:
                    watch.tell_new(server)
                    waiting = runners[watch.device.uuid]
                    wait_ns = watch.wait_ns(server, waiting, time.monotonic_ns())
                    if not wait_ns:
                        await sample(watch)
                        wait_ns = watch.wait_ns(server, waiting, time.monotonic_ns())
                    wait_s = min(wait_s, wait_ns / 1e9)


@contextlib.contextmanager
def _woken_by(waiters: Iterable[SampleWaiters]) -> Iterator[asyncio.Event]:
    """Set an event when a process begins to wait for a sample on any of the GPUs."""
    woken = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake(fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(fd, 8)
        woken.set()

    with contextlib.ExitStack() as stack:
        for fd in [waiter.due_fd for waiter in waiters]:
            loop.add_reader(fd, wake, fd)
            stack.callback(loop.remove_reader, fd)
        yield woken


async def _ask_use(nvml: Observer, watch: _Watch, executor: ThreadPoolExecutor) -> None:
    """Get utilisation samples; if that fails, memory is still sampled."""
    uuid, since_us = watch.device.uuid, (time.time_ns() - WINDOW_NS) // 1000
    loop = asyncio.get_running_loop()
    try:
        watch.samples = await loop.run_in_executor(executor, nvml.utilisation, uuid, since_us)
    except VdriverError as e:
        watch.samples = ()
        if not watch.blind:
            log.warning("nvml-utilisation-failed", gpu=watch.device.index, error=str(e))
        watch.blind = True
    else:
        watch.blind = False


async def _take_sample(
    server: Server,
    nvml: Observer,
    watch: _Watch,
    executor: ThreadPoolExecutor,
    auditor: Auditor | None,
) -> None:
    # The time is read first: the driver shows all memory that was taken before that time. The
    # ledger is read before and after: memory that is freed or taken in between is not debt.
    began_ns = time.monotonic_ns()
    before = [
        (container, i, container.account.charges(i), container.account.is_sampled(i))
        for container, i in watch.sharing(server)
    ]
    wanted = any(is_sampled for *_, is_sampled in before) or (
        auditor is not None and auditor.wants_samples(watch.device)
    )
    seen: tuple[ProcessMemory, ...] = ()
    loop = asyncio.get_running_loop()
    sample: GpuSample | None = None
    unseen = _unseen((container, charges) for container, _, charges, _ in before)
    try:
        seen, unattributed = await loop.run_in_executor(
            executor, _ask_memory, nvml, watch.device.uuid
        )
        if wanted and began_ns - watch.sampled_ns >= SAMPLE_NS:
            watch.sampled_ns = began_ns
            await _ask_use(nvml, watch, executor)
        if unattributed is not None:
            now = [(one, one.account.charges(i)) for one, i in watch.sharing(server)]
            settled = unseen == _unseen(now)
            unattributed = unattributed - unseen if unseen is not None and settled else None
        if unattributed is not None:
            watch.unattributed.record(began_ns, unattributed, len(seen))
        # A process without a figure from NVML counts as 0, which does not contradict its ledger.
        sample = GpuSample(began_ns, {one.pid: one.used or 0 for one in seen}, watch.samples)
    except VdriverError as e:
        if not watch.failing:
            log.warning("nvml-failed", gpu=watch.device.index, error=str(e))
            server.allocations.set_lost(watch.device.uuid, e.message)
    else:
        if watch.failing:
            log.info("nvml-answers", gpu=watch.device.index)
            server.allocations.set_lost(watch.device.uuid, None)
    watch.failing = sample is None
    for container, i, charges, _ in before:
        # The container may have ended in the meantime, and another one may have its key.
        if server.containers.get(container.key) is container:
            watch.unattributed.tell(container, i)
            container.account.reconcile(i, charges, sample)
            container.note_unknown()
    if sample is not None and auditor is not None:
        auditor.audit(watch.device, sample, seen, {c: charges for c, _, charges, _ in before})
