"""Choose what divides a GPU's time: grants at each launch, or the GPU's own scheduler."""

from __future__ import annotations

import contextlib
import ctypes
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from governor.arbiter import Runner, Runners
from governor.config import Config
from governor.hardware.driver import DriverCallError
from governor.hardware.gangs import Board
from governor.hardware.probe import NotProbedError, Results, WithoutEffectError, probe
from governor.hardware.runner import Closeable, HardwareRunner, open_hardware
from governor.quota import Device
from vdriver.errors import NvmlError
from vdriver.nvml import Nvml

log = structlog.get_logger()


PROBES_S = 25.0
"""Time that the tests of all GPUs of a node may take together, in seconds. Hooks wait in the
meantime, and systemd ends a governor that is not ready within a minute."""


class NotSteeredError(Exception):
    """The GPU's own scheduler does not divide its time; the message is the reason."""


@dataclass
class RunnerMaker:
    """Makes the runner of each GPU of a node."""

    library: ctypes.CDLL
    config: Config
    nvml: Nvml
    libcuda: Path
    """The driver's own library, with which a GPU is tested."""
    together: Runners
    """Coordinates grants of several GPUs."""
    board: Board
    """Coordinates steered GPUs."""
    left_s: float = PROBES_S
    """What is left of the time for tests."""

    def make(self, device: Device) -> Runner:
        """Return a GPU's runner; it uses the GPU's own scheduler if configured and possible.

        With `scheduling: auto`, it does so on a real GPU on which a test has shown that the driver
        calls work (`probe`).
        """
        strategy = self.config.strategy_of(device.index, device.uuid)
        why = ""
        if strategy != "timeslice":
            why = f"it is shared by {strategy}" if self._is_required else ""
        elif self._is_required or self._is_possible(device):
            try:
                return self._steer(device)
            except NotSteeredError as e:
                why = str(e)
                self._report(device, why)
        gate = Runner(self.library, self.config, strategy, self.together)
        gate.not_steered = why
        return gate

    @property
    def _is_required(self) -> bool:
        return self.config.scheduling == "hardware"

    def _is_possible(self, device: Device) -> bool:
        return self.config.scheduling == "auto" and self.nvml.simulated(device.uuid) is None

    def _steer(self, device: Device) -> Runner:
        """Return a runner that steers the GPU's own scheduler."""
        try:
            hardware = open_hardware(self.nvml, device.uuid)
            why = self._find_effect(device, hardware)
            if why:
                hardware.close()
                raise NotSteeredError(why)
            runner = HardwareRunner(
                self.library,
                self.config,
                hardware,
                gpu=device.index,
                board=self.board,
                busy=partial(self.nvml.busy, device.uuid),
                reopen=partial(open_hardware, self.nvml, device.uuid),
            )
        except (OSError, DriverCallError) as e:
            raise NotSteeredError(str(e)) from e
        log.info("gpu-steered", gpu=device.index, uuid=device.uuid)
        return runner

    def _find_effect(self, device: Device, hardware: Closeable) -> str:
        """Return why a GPU should not be steered; empty if it may be.

        A GPU that has not passed a test yet is tested. With `scheduling: hardware`, one that cannot
        be tested now is steered unless it failed an earlier test. The calls for a simulated GPU
        always work.
        """
        if self.nvml.simulated(device.uuid) is not None:
            return ""
        results = Results(self.config.state_dir, self.nvml.driver_version())
        known = results.get(device.uuid)
        if known == "":
            return ""
        try:
            why = self._test(device, hardware)
        except (NotProbedError, NvmlError, OSError) as e:
            log.info("gpu-not-probed", gpu=device.index, error=str(e))
            untested = f"whether it can be steered was not tested: {e}"
            return known or ("" if self._is_required else untested)
        log.info("gpu-probed", gpu=device.index, works=not why, error=why)
        with contextlib.suppress(OSError):  # it is tested again at the next start
            results.put(device.uuid, why)
        return why

    def _test(self, device: Device, hardware: Closeable) -> str:
        """Return why the driver calls do not work on a GPU; empty if they do."""
        if self.left_s <= 0:
            raise NotProbedError("the tests of other GPUs took too long")
        if any(process.computes for process in self.nvml.processes(device.uuid)):
            raise NotProbedError("other processes use it")
        began = time.monotonic()
        try:
            probe(hardware, str(self.libcuda), device.uuid, self.left_s)
        except (WithoutEffectError, DriverCallError) as e:
            return str(e)
        finally:
            self.left_s -= time.monotonic() - began
        return ""

    def _report(self, device: Device, why: str) -> None:
        """Log why grants divide a GPU's time."""
        if self._is_required:
            hint = "grants divide its time, as with `scheduling: gate`"
            log.warning("gpu-not-steered", gpu=device.index, error=why, hint=hint)
        else:
            log.info("gpu-not-steered", gpu=device.index, error=why)
