"""A GPU that its own scheduler divides: an arbiter's thread that stands back, and one that steers.

Every container has an open grant, so no launch waits. The steering's thread reads which container
was on the GPU, and switches and weighs containers by the policy. Where steering fails, for whatever
reason, the arbiter grants again as it does on other GPUs: quotas hold either way.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from mmap import mmap
from typing import Any, Protocol

import structlog

from governor.arbiter import WHOLE, Runner, Stats
from governor.config import Config
from governor.hardware.activity import Sample
from governor.hardware.finder import Finder, Found
from governor.hardware.gangs import Board
from governor.hardware.nvidia import NvidiaHardware, require_rights
from governor.hardware.policy import Share
from governor.hardware.steering import Hardware, Steering
from governor.hardware.watchdog import Watchdog
from vdriver.errors import NvmlError
from vdriver.nvml import DeviceUse, Nvml

log = structlog.get_logger("tidegate")

HIDDEN_NS = 500_000_000
"""A process that had so much GPU time by what is not found is held by grants, if by anything."""


class Closeable(Hardware[Any], Protocol):
    """A GPU whose scheduler is steered until it is closed."""

    @property
    def reviver(self) -> tuple[str, tuple[str, ...]]:
        """What switches on by tokens in another process: a function, and what it is called with."""

    def close(self) -> None:
        """Give back what it has."""


def open_hardware(nvml: Nvml, uuid: str) -> Closeable:
    """Return a GPU whose scheduler can be steered; OSError or DriverCallError where none can."""
    simulated = nvml.simulated(uuid)
    if simulated is None:
        require_rights()
        return NvidiaHardware(uuid)
    try:
        from simgpu.steering import SimulatedHardware
    except ImportError as e:  # no package has it
        raise OSError("a simulated GPU is steered by a checkout's governor only") from e
    return SimulatedHardware(*simulated, uuid)


LOST_S = 60.0
"""Lost records are said this often at most."""


class UnsteerableError(Exception):
    """A process cannot be switched off."""


class HardwareRunner(Runner):
    """Shares one GPU among containers by its own scheduler; the interface is the arbiter's."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: Config,
        hardware: Closeable,
        *,
        gpu: int,
        board: Board | None = None,
        busy: Callable[[int], Sequence[DeviceUse]] | None = None,
    ) -> None:
        """`busy` returns NVML's samples of the GPU since a time, in us since 1970.

        `board` is what the GPUs of the node share.
        """
        # First: without it nothing may be switched off, and nothing is begun that had to end.
        self._watchdog = Watchdog(*hardware.reviver)
        super().__init__(library, config)
        self._board = board or Board()
        self.together = self._board
        self._hardware, self._gpu, self._busy = hardware, gpu, busy
        self._told: queue.SimpleQueue[Callable[[Steering[Any]], None] | None] = queue.SimpleQueue()
        # A container's number is another one's as soon as it is free; the steering's never is.
        self._numbers = itertools.count()
        self._number: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._failed = False
        self._finder = Finder(hardware.find, self._found)
        self._n_lost, self._lost_said_at, self._returned_said_at = 0, -LOST_S, -LOST_S
        self.open(is_open=True)
        self._steering_thread = threading.Thread(target=self._run, name="tidegate-hw", daemon=True)
        self._steering_thread.start()

    @property
    def is_steered(self) -> bool:
        """Whether the GPU's own scheduler divides its time, or the arbiter's grants do."""
        return not self._failed

    # ---- called from the event loop ----

    def add(
        self,
        guarantee: int,
        limit: int,
        grant: mmap,
        device: int,
        ledger: mmap,
        *,
        latency: bool = False,
    ) -> int:
        """Share the GPU with a container whose pages these are."""
        tenant = super().add(guarantee, limit, grant, device, ledger)
        number = self._number[tenant] = next(self._numbers)
        share = Share(guarantee / WHOLE, limit / WHOLE, latency)
        self._tell(lambda steering: steering.add(number, share))
        return tenant

    def join(self, tenant: int, gang: int) -> None:
        """Have a container on this GPU when it is on its others."""
        number = self._number[tenant]
        self._tell(lambda steering: steering.join(number, gang))

    def set(self, tenant: int, guarantee: int, limit: int, *, latency: bool = False) -> None:
        """Change a container's shares."""
        super().set(tenant, guarantee, limit)
        number, share = self._number[tenant], Share(guarantee / WHOLE, limit / WHOLE, latency)
        self._tell(lambda steering: steering.add(number, share))

    def remove(self, tenant: int) -> None:
        """Forget a container: its pages are not touched any more once this returns."""
        super().remove(tenant)
        number = self._number.pop(tenant)
        self._finder.remove(number)
        self._tell(lambda steering: steering.remove(number))

    def enter(
        self, tenant: int, slot: int, pid: int, pidfd: int, contexts: Callable[[], int]
    ) -> None:
        """Hear of a container's process, and how many contexts it says that it has."""
        number = self._number[tenant]
        self._tell(lambda steering: steering.enter(number, pid))
        try:
            self._finder.enter(number, slot, pid, pidfd, contexts)
        except OSError:
            self._tell(lambda steering: steering.forget(number, pid))
            raise

    def leave(self, tenant: int, slot: int) -> None:
        """Hear that a container's process has ended."""
        number = self._number[tenant]
        pid = self._finder.leave(number, slot)
        if pid is not None:
            self._tell(lambda steering: steering.forget(number, pid))

    def stats(self, tenant: int) -> Stats:
        """Return a container's counters: what it had by the GPU's own word."""
        stats = super().stats(tenant)
        # The arbiter's part stands still while the GPU is steered, and goes on afterwards.
        used = self._used.get(self._number[tenant], 0)
        stats.charged_ns += used
        stats.held_ns += used
        return stats

    def close(self) -> None:
        """Stop both threads. Every container is switched on, and keeps its quota by itself."""
        self._finder.close()
        self._told.put(None)
        self._steering_thread.join()
        super().close()

    # ---- the finder's thread ----

    def _found(self, found: Found) -> None:
        if found.held:
            self._tell(lambda steering: steering.take(found.tenant, found.pid, found.held))
        elif found.thorough:
            # Before that it may be a client of long ago, which an ordinary look does not find.
            self._tell(lambda steering: steering.miss(found.pid))

    # ---- the steering's thread ----

    def _run(self) -> None:
        steering = Steering(
            self._hardware,
            announce=self._watchdog.tell,
            samples=self._samples,
            board=self._board,
            gpu=self._gpu,
        )
        try:
            while self._step(steering):
                pass
        except Exception as e:  # noqa: BLE001
            # Whatever it is: quotas hold by grants.
            self.not_steered = str(e) or repr(e)
            log.error(
                "gpu-not-steered",
                gpu=self._gpu,
                error=self.not_steered,
                hint="grants divide its time from now on; restart tidegate-governor to try again",
            )
        finally:
            self._failed = True
            # First, so that a container that is switched on finds no open grant.
            self.open(is_open=False)
            with contextlib.suppress(Exception):
                steering.all_on()
            # What could not be switched on here is switched on there: it was told of it.
            self._watchdog.close()
            self._hardware.close()
            self._drain()

    def _tell(self, what: Callable[[Steering[Any]], None]) -> None:
        """Have the steering's thread do something, as long as there is one."""
        self._told.put(what)
        if self._failed:
            self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._told.get_nowait()

    def _step(self, steering: Steering[Any]) -> bool:
        """Do what is due, then what is told until the next step; return False when it is over."""
        wake = steering.step() / 1e9
        self._used = dict(steering.used_ns)
        if steering.strangers or steering.returned:
            self._finder.saw(steering.strangers | steering.returned)
        self._say_returned(steering.returned)
        if steering.hidden_ns > HIDDEN_NS:
            raise UnsteerableError("a process has GPU time by an open file that cannot be found")
        self._say_lost()
        while True:
            left = wake - time.monotonic()
            try:
                told = self._told.get(timeout=left) if left > 0 else self._told.get_nowait()
            except queue.Empty:
                return True
            if told is None:
                return False
            told(steering)

    def _say_returned(self, pids: Collection[int]) -> None:
        now = time.monotonic()
        for pid in pids:
            if now >= self._returned_said_at + LOST_S:
                hint = "it is switched off again; a program can only do that on purpose"
                log.warning("process-switched-on", gpu=self._gpu, pid=pid, hint=hint)
                self._returned_said_at = now

    def _samples(self, since_ns: int) -> list[Sample] | None:
        if self._busy is None:
            return None
        ahead = time.time_ns() - time.monotonic_ns()
        try:
            found = self._busy((since_ns + ahead) // 1000)
        except NvmlError:  # what is on the GPU counts as working, then
            return None
        # NVML rounds down: of a small cap a whole percent is much, and is not given away.
        return [Sample(one.time_us * 1000 - ahead, (one.percent + 1) / 100) for one in found]

    def _say_lost(self) -> None:
        n, now = self._hardware.n_lost, time.monotonic()
        if n > self._n_lost and now >= self._lost_said_at + LOST_S:
            hint = "the time in between is charged to no container; is a CPU always busy?"
            log.warning("trace-lost", gpu=self._gpu, records=n - self._n_lost, hint=hint)
            self._n_lost, self._lost_said_at = n, now
