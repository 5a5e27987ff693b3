"""Share a GPU through its own scheduler: a thread steers it, and the arbiter's grants stay open.

Every container has an open grant, so no launch waits. The steering thread reads which container was
on the GPU, and sets switches and time slices according to the policy. If steering fails for any
reason, the arbiter grants again as it does on other GPUs, so quotas hold either way. After a pause
the thread tries to steer the GPU again.
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

from governor.arbiter import NO_TENANT, WHOLE, Runner, Runners, Stats
from governor.config import Config
from governor.hardware.activity import Sample
from governor.hardware.driver import DriverCallError
from governor.hardware.finder import Finder, Found
from governor.hardware.gangs import Board
from governor.hardware.nvidia import NvidiaHardware, require_rights
from governor.hardware.probe import NotProbedError, WithoutEffectError
from governor.hardware.remote import RemoteHardware
from governor.hardware.steering import Hardware, Steering
from governor.hardware.tenant import Share
from governor.threads import show_name
from vdriver.errors import NvmlError
from vdriver.nvml import DeviceUse, Nvml

log = structlog.get_logger("tidegate")

HIDDEN_NS = 500_000_000
"""Largest GPU time, in nanoseconds, that a process may use through channels that have not been
found. Above it, the GPU is no longer steered, and grants limit the process."""

AGAIN_S, MAX_AGAIN_S = 60.0, 3600.0
"""First and longest pause after steering has failed, in seconds. The pause doubles each time."""
OPENING = "it is being opened, and tested if it has not been tested before"
"""Why a GPU is not steered at first."""
LASTED_S = 600.0
"""After this many seconds of steering without a failure, the next pause is the shortest again."""


class WatchdogProtocol(Protocol):
    """A watchdog: it is told which channels are off, and switches them on if the governor dies."""

    def tell(self, off: Sequence[Any], /) -> None:
        """Announce what is about to be switched off; raise OSError if nothing is listening."""

    def close(self) -> None:
        """Switch on everything that is off, then stop."""


class Closeable(Hardware[Any], Protocol):
    """A GPU that is steered until it is closed."""

    def watchdog(self) -> WatchdogProtocol:
        """Start the watchdog, which switches channels on when the governor dies."""

    def close(self) -> None:
        """Release its resources."""


def open_hardware(nvml: Nvml, uuid: str) -> Closeable:
    """Return the scheduler of a GPU; raise OSError or DriverCallError if it cannot be steered.

    A governor that has no right to make the calls uses the steering service.
    """
    simulated = nvml.simulated(uuid)
    if simulated is None:
        try:
            require_rights()
        except PermissionError as lacking:
            try:
                return RemoteHardware(uuid)
            except OSError as e:
                raise OSError(f"{e} (and the governor itself lacks permission: {lacking})") from e
        return NvidiaHardware(uuid)
    try:
        from simgpu.steering import SimulatedHardware
    except ImportError as e:  # packages do not have it
        raise OSError("only a governor run from a checkout steers simulated GPUs") from e
    return SimulatedHardware(*simulated, uuid)


LOG_INTERVAL_S = 60.0
"""Shortest interval between two log messages of the same kind, in seconds."""


class UnsteerableError(Exception):
    """A process cannot be switched off."""


class _SteeredContainers:
    """The containers' shares, gangs and processes, from which a new Steering starts."""

    def __init__(self) -> None:
        self.shares: dict[int, Share] = {}
        self.adopted: set[int] = set()  # their channels may have any slice
        self.gangs: dict[int, int] = {}
        self.processes: set[tuple[int, int]] = set()
        self._is_told = False

    def remove(self, number: int) -> None:
        """Forget a container and its processes."""
        del self.shares[number]
        self.adopted.discard(number)
        self.gangs.pop(number, None)
        self.processes = {one for one in self.processes if one[0] != number}

    def tell(self, steering: Steering[Any]) -> None:
        """Add all containers and their processes to a new Steering."""
        for number, share in self.shares.items():
            steering.add(number, share, is_adopted=self._is_told or number in self.adopted)
        self._is_told = True
        for number, gang in self.gangs.items():
            steering.join(number, gang)
        for number, pid in self.processes:
            steering.enter(number, pid)


class GangCoordinator:
    """Lets a container run on several GPUs at once, whether these are steered or use grants."""

    def __init__(self, grants: Runners) -> None:
        self.board, self.grants = Board(), grants
        self._turns: dict[int, int] = {}

    def add(self, runners: Sequence[Any], tenants: Sequence[int]) -> int:
        """Run a container on all these runners' GPUs at once; return its gang number."""
        gang = self.board.add(runners, tenants)
        self._turns[gang] = self.grants.add(runners, tenants)
        return gang

    def remove(self, gang: int) -> None:
        """Forget a container; call it before the container's tenants are removed."""
        self.board.remove(gang)
        turns = self._turns.pop(gang)
        if turns != NO_TENANT:
            self.grants.remove(turns)


class HardwareRunner(Runner):
    """Shares one GPU through its own scheduler, with the interface of the arbiter's `Runner`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: Config,
        opens: Callable[[threading.Event], Closeable],
        *,
        gpu: int,
        together: GangCoordinator | None = None,
        busy: Callable[[int], Sequence[DeviceUse]] | None = None,
        again_s: float = AGAIN_S,
    ) -> None:
        """Start the threads.

        `opens` opens the GPU, on the steering thread. Until then, grants divide its time. `opens`
        returns early if the event that it is passed is set. After a failure, it is called again,
        at first after `again_s` seconds. `busy` returns NVML's samples of the GPU since a given
        time, which is in microseconds since 1970. `together` is shared by the GPUs of the node.
        """
        super().__init__(library, config, together=together.grants if together else None)
        self._board = together.board if together else Board()
        self.together = together or self._board
        self._opens, self._gpu, self._busy = opens, gpu, busy
        self._calls: queue.SimpleQueue[Callable[[Steering[Any]], None] | None] = queue.SimpleQueue()
        # The arbiter reuses a container's number as soon as it is free; `Steering` must not.
        self._numbers = itertools.count()
        self._number: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._used_before: dict[int, int] = {}  # by earlier Steerings
        self._again_s = again_s
        self._lock = threading.Lock()  # guards what follows, and what is put into the queue
        self._known = _SteeredContainers()
        self._is_steered = False
        self._is_opened = threading.Event()  # set once opening has succeeded or failed
        self._ending = threading.Event()
        self._hardware: Closeable | None = None
        self._finder = Finder(self._find, self._found, self._elsewhere_s)
        self._n_lost, self._lost_said_at = 0, -LOG_INTERVAL_S
        self._returned_said_at = -LOG_INTERVAL_S
        self.not_steered = OPENING
        self._steering_thread = threading.Thread(target=self._run, name="tidegate-hw", daemon=True)
        self._steering_thread.start()

    @property
    def is_steered(self) -> bool:
        """Whether the GPU's own scheduler, rather than the arbiter's grants, divides its time."""
        return self._is_steered

    def wait_opened(self, timeout_s: float) -> None:
        """Wait until the GPU is steered or cannot be, for at most `timeout_s` seconds."""
        self._is_opened.wait(timeout_s)

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
        is_adopted: bool = False,
    ) -> int:
        """Add the container with these pages; `device` is the GPU's index in them."""
        tenant = super().add(guarantee, limit, grant, device, ledger)
        number = self._number[tenant] = next(self._numbers)
        share = Share(guarantee / WHOLE, limit / WHOLE, latency)
        self._share(number, share, is_adopted=is_adopted)
        return tenant

    def _share(self, number: int, share: Share, *, is_adopted: bool = False) -> None:
        with self._lock:
            self._known.shares[number] = share
            if is_adopted:
                self._known.adopted.add(number)
            self._run_on_thread(lambda steering: steering.add(number, share, is_adopted=is_adopted))

    def join(self, tenant: int, gang: int) -> None:
        """Run a container on this GPU at the same time as on its other GPUs."""
        number = self._number[tenant]
        with self._lock:
            self._known.gangs[number] = gang
            self._run_on_thread(lambda steering: steering.join(number, gang))

    def set(self, tenant: int, guarantee: int, limit: int, *, latency: bool = False) -> None:
        """Change a container's shares."""
        super().set(tenant, guarantee, limit)
        self._share(self._number[tenant], Share(guarantee / WHOLE, limit / WHOLE, latency))

    def remove(self, tenant: int) -> None:
        """Forget a container: its pages are not accessed after this returns."""
        super().remove(tenant)
        number = self._number.pop(tenant)
        self._finder.remove(number)
        self._used_before.pop(number, None)
        with self._lock:
            self._known.remove(number)
            self._run_on_thread(lambda steering: steering.remove(number))

    def enter(
        self, tenant: int, slot: int, pid: int, pidfd: int, contexts: Callable[[], int]
    ) -> None:
        """Register a container's process; `contexts` returns the context count that it reports."""
        number = self._number[tenant]
        with self._lock:
            self._known.processes.add((number, pid))
            self._run_on_thread(lambda steering: steering.enter(number, pid))
        try:
            self._finder.enter(number, slot, pid, pidfd, contexts)
        except OSError:
            self._forget(number, pid)
            raise

    def _forget(self, number: int, pid: int) -> None:
        with self._lock:
            self._known.processes.discard((number, pid))
            self._run_on_thread(lambda steering: steering.forget(number, pid))

    def leave(self, tenant: int, slot: int) -> None:
        """Unregister a process of a container."""
        number = self._number[tenant]
        pid = self._finder.leave(number, slot)
        if pid is not None:
            self._forget(number, pid)

    def stats(self, tenant: int) -> Stats:
        """Return a container's counters; its GPU time is taken from the GPU's trace."""
        stats = super().stats(tenant)
        # The arbiter's counters do not change while the GPU is steered, and grow afterwards.
        used = self._used.get(self._number[tenant], 0)
        stats.charged_ns += used
        stats.held_ns += used
        return stats

    def close(self) -> None:
        """Stop both threads. Every container is switched on and keeps its quota."""
        self._finder.close()
        self._ending.set()
        self._calls.put(None)
        self._steering_thread.join()
        super().close()

    # ---- called on the finder's thread ----

    def _find(self, pid: int, pidfd: int, *, thorough: bool = False) -> Sequence[Any]:
        hardware = self._hardware if self._is_steered else None
        return () if hardware is None else hardware.find(pid, pidfd, thorough=thorough)

    def _elsewhere_s(self) -> float:
        hardware = self._hardware
        return 0.0 if hardware is None else hardware.elsewhere_s

    def _found(self, found: Found) -> None:
        with self._lock:
            self._run_on_thread(lambda steering: steering.take(found.tenant, found.pid, found.held))
            if found.thorough and not found.held:
                # An ordinary search misses a client that is older than thousands of others, so only
                # a thorough search shows that the process has none.
                self._run_on_thread(lambda steering: steering.miss(found.pid))

    # ---- the steering thread ----

    def _run(self) -> None:
        show_name()
        pause_s = self._again_s
        while True:
            began = time.monotonic()
            try:
                if self._steer(*self._open()):
                    return
            except WithoutEffectError as e:
                self.not_steered = str(e)
                return
            except (OSError, DriverCallError, NotProbedError) as e:
                self.not_steered = str(e)
            except Exception as e:  # noqa: BLE001
                # Whatever the error is, grants enforce the quotas.
                self.not_steered = repr(e)
                self._say_failed()
            finally:
                self._is_opened.set()
            if time.monotonic() - began > LASTED_S:
                pause_s = self._again_s
            if self._ending.wait(pause_s):
                return
            pause_s = min(2 * pause_s, MAX_AGAIN_S)

    def _open(self) -> tuple[Closeable, WatchdogProtocol]:
        """Open the GPU, and start the watchdog, without which nothing may be switched off."""
        hardware = self._opens(self._ending)
        try:
            return hardware, hardware.watchdog()
        except BaseException as e:
            hardware.close()
            log.warning("gpu-not-steered", gpu=self._gpu, error=f"its watchdog cannot start: {e}")
            raise

    def _steer(self, hardware: Closeable, watchdog: WatchdogProtocol) -> bool:
        """Steer the GPU until that fails or the runner is closed; return True if it was closed."""
        steering: Steering[Any] | None = None
        try:
            steering = Steering(
                hardware,
                announce=watchdog.tell,
                samples=self._samples,
                board=self._board,
                gpu=self._gpu,
            )
            self._begin(steering, hardware)
            while self._step(steering, hardware):
                pass
        except Exception as e:  # noqa: BLE001
            self.not_steered = str(e) or repr(e)
            self._say_failed()
            return False
        else:
            return True
        finally:
            self._finder.stop()
            with self._lock:
                self._is_steered = False
                self._drain()
            # Grants are closed first, so that a container that is switched on finds no open grant.
            self.open(is_open=False)
            if steering is not None:
                with contextlib.suppress(Exception):
                    steering.all_on()
            # The watchdog switches on what could not be switched on here.
            for one in (watchdog, hardware):
                with contextlib.suppress(Exception):
                    one.close()
            self._used_before = self._used

    def _begin(self, steering: Steering[Any], hardware: Closeable) -> None:
        self._n_lost = 0
        with self._lock:  # from here on, changes are put into the queue
            self._known.tell(steering)
            self._hardware, self._is_steered = hardware, True
        self.not_steered = ""
        self._finder.start()
        self.open(is_open=True)
        log.info("gpu-steered", gpu=self._gpu)
        self._is_opened.set()

    def _say_failed(self) -> None:
        log.error(
            "gpu-not-steered",
            gpu=self._gpu,
            error=self.not_steered,
            hint="grants divide its time from now on; steering is tried again after a pause",
        )

    def _run_on_thread(self, what: Callable[[Steering[Any]], None]) -> None:
        """Run a call on the steering thread, if the GPU is steered; the caller holds the lock."""
        if self._is_steered:
            self._calls.put(what)

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()

    def _step(self, steering: Steering[Any], hardware: Closeable) -> bool:
        """Run a step, and the calls that arrive before the next one; return False once closed."""
        wake = steering.step() / 1e9
        before = self._used_before
        self._used = before | {i: before.get(i, 0) + ns for i, ns in steering.used_ns.items()}
        if steering.strangers or steering.returned:
            self._finder.saw(steering.strangers | steering.returned)
        self._say_returned(steering.returned)
        if steering.hidden_ns > HIDDEN_NS:
            raise UnsteerableError(
                "a process is using the GPU through an open file that cannot be found"
            )
        self._say_lost(hardware.n_lost)
        while True:
            left = wake - time.monotonic()
            try:
                told = self._calls.get(timeout=left) if left > 0 else self._calls.get_nowait()
            except queue.Empty:
                return True
            if told is None:
                return False
            told(steering)

    def _say_returned(self, pids: Collection[int]) -> None:
        now = time.monotonic()
        for pid in pids:
            if now >= self._returned_said_at + LOG_INTERVAL_S:
                hint = (
                    "it is switched off again; a process cannot switch its channels on by accident"
                )
                log.warning("process-switched-on", gpu=self._gpu, pid=pid, hint=hint)
                self._returned_said_at = now

    def _samples(self, since_ns: int) -> list[Sample] | None:
        if self._busy is None:
            return None
        ahead = time.time_ns() - time.monotonic_ns()
        try:
            found = self._busy((since_ns + ahead) // 1000)
        except NvmlError:  # without samples, every process on the GPU counts as working
            return None
        # NVML rounds down, by half a percent on average.
        return [Sample(one.time_us * 1000 - ahead, (one.percent + 0.5) / 100) for one in found]

    def _say_lost(self, n: int) -> None:
        now = time.monotonic()
        if n > self._n_lost and now >= self._lost_said_at + LOG_INTERVAL_S:
            hint = (
                "the time in between is not charged to any container;"
                " check whether a CPU is permanently busy"
            )
            log.warning("trace-lost", gpu=self._gpu, records=n - self._n_lost, hint=hint)
            self._n_lost, self._lost_said_at = n, now
