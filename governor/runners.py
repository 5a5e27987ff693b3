"""Choose what divides a GPU's time: grants at each launch, or the GPU's own scheduler."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from governor.arbiter import Runner
from governor.config import Config
from governor.hardware.driver import DriverCallError
from governor.hardware.probe import NotProbedError, Results, WithoutEffectError, probe
from governor.hardware.runner import (
    Closeable,
    GangCoordinator,
    HardwareRunner,
    open_hardware,
)
from governor.quota import Device
from vdriver.errors import VdriverError
from vdriver.nvml import Nvml

log = structlog.get_logger()

START_S = 3.0
"""Longest wait for GPUs to be tested and steered before containers are admitted, in seconds. A hook
waits 5 s for the governor. A test takes one or two seconds, and cannot be run once containers are
using the GPU."""
TURN_S = 0.1
"""Interval at which a test that is waiting for its turn checks whether the governor is shutting
down, in seconds."""


def _n_at_once() -> int:
    """Return how many GPUs are tested at once: each test has two processes that must not wait."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def wait_opened(runners: Iterable[Runner]) -> None:
    """Wait until it is known which GPUs are steered, for at most START_S seconds."""
    until = time.monotonic() + START_S
    for runner in runners:
        if isinstance(runner, HardwareRunner):
            runner.wait_opened(max(0.0, until - time.monotonic()))


@dataclass
class RunnerMaker:
    """Makes the runner of each GPU of a node."""

    library: ctypes.CDLL
    config: Config
    nvml: Nvml
    libcuda: Path
    """The driver's own library, with which a GPU is tested."""
    together: GangCoordinator
    turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_n_at_once()))
    """Held during a test."""

    def make(self, device: Device) -> Runner:
        """Return a GPU's runner; it uses the GPU's own scheduler if configured and possible.

        With `scheduling: auto`, it does so on a real GPU, once a test has shown that the driver
        calls work (`probe`). Until then, and if the GPU cannot be steered, grants divide its time.
        """
        strategy = self.config.strategy_of(device.index, device.uuid)
        is_required = self.config.scheduling == "hardware"
        if strategy == "timeslice" and (is_required or self._is_possible(device)):
            return HardwareRunner(
                self.library,
                self.config,
                Opener(self, device).open,
                gpu=device.index,
                together=self.together,
                busy=partial(self.nvml.busy, device.uuid),
            )
        gate = Runner(self.library, self.config, strategy, self.together.grants)
        gate.not_steered = f"it uses strategy {strategy}" if is_required else ""
        return gate

    def _is_possible(self, device: Device) -> bool:
        return self.config.scheduling == "auto" and self.nvml.simulated(device.uuid) is None


class Opener:
    """Opens a GPU for steering, and tests it the first time."""

    def __init__(self, maker: RunnerMaker, device: Device) -> None:
        self._config, self._nvml = maker.config, maker.nvml
        self._libcuda, self._turns = maker.libcuda, maker.turns
        self._device = device
        self._results = Results(self._config.state_dir, self._nvml.driver_version())
        # The calls for a simulated GPU always work.
        self._works = (
            self._nvml.simulated(device.uuid) is not None or self._results.get(device.uuid) == ""
        )
        self._said = ""

    def open(self, ending: threading.Event) -> Closeable:
        """Return the GPU; test it first if it has not passed a test yet.

        Raise OSError or DriverCallError if it cannot be opened, NotProbedError if it cannot be
        tested now, and WithoutEffectError if it must not be steered. With `scheduling: hardware`, a
        GPU that cannot be tested is steered unless it failed an earlier test.
        """
        try:
            hardware = open_hardware(self._nvml, self._device.uuid)
            try:
                self._require_effect(hardware, ending)
            except BaseException:
                hardware.close()
                raise
        except (OSError, DriverCallError, NotProbedError, WithoutEffectError) as e:
            self._report(str(e))
            raise
        self._said = ""
        return hardware

    def _require_effect(self, hardware: Closeable, ending: threading.Event) -> None:
        if self._works:
            return
        try:
            self._test(hardware, ending)
        except NotProbedError as e:
            known = self._results.get(self._device.uuid)
            if known:
                raise NotProbedError(known) from e
            if self._config.scheduling != "hardware" or ending.is_set():
                raise NotProbedError(
                    f"the test of whether it can be steered was not completed: {e}"
                ) from e
            log.info("gpu-not-probed", gpu=self._device.index, error=str(e))
        else:
            self._works = True

    def _test(self, hardware: Closeable, ending: threading.Event) -> None:
        """Test the driver calls, and keep the result."""
        why = ""
        try:
            with self._turn(ending):
                probe(
                    hardware,
                    str(self._libcuda),
                    self._device.uuid,
                    self._computing,
                    ending.is_set,
                )
        except (WithoutEffectError, DriverCallError) as e:
            why = str(e)
        except VdriverError as e:
            raise NotProbedError(e.message) from e
        except OSError as e:
            raise NotProbedError(str(e)) from e
        log.info("gpu-probed", gpu=self._device.index, works=not why, error=why)
        with contextlib.suppress(OSError):  # it is tested again at the next start
            self._results.put(self._device.uuid, why)
        if why:
            raise WithoutEffectError(why)

    @contextlib.contextmanager
    def _turn(self, ending: threading.Event) -> Iterator[None]:
        """Wait until few enough other GPUs of the node are being tested."""
        while not self._turns.acquire(timeout=TURN_S):
            if ending.is_set():
                raise NotProbedError("the governor is stopping")
        try:
            yield
        finally:
            self._turns.release()

    def _computing(self) -> list[int]:
        return [one.pid for one in self._nvml.processes(self._device.uuid) if one.computes]

    def _report(self, why: str) -> None:
        """Log why grants divide the GPU's time, if the reason is new."""
        if why == self._said:
            return
        self._said = why
        if self._config.scheduling == "hardware":
            hint = "grants divide its time, as with `scheduling: gate`"
            log.warning("gpu-not-steered", gpu=self._device.index, error=why, hint=hint)
        else:
            log.info("gpu-not-steered", gpu=self._device.index, error=why)
