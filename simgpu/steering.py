"""Steer a simulated GPU's scheduler, as a root process steers the scheduler of a real GPU.

The module implements `Hardware` from governor/hardware/steering.py for a simulated GPU. A driver
call on a real GPU takes 0.6 ms; the calls here take no time.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from governor.hardware.activity import Full
from governor.hardware.watchdog import Watchdog

MOST = 256
"""Maximum number of contexts on one GPU: GPU_CONTEXTS in layout.h."""


class SteeredProcess(NamedTuple):
    """A process that has contexts on the GPU."""

    pid: int
    n_groups: int

    @property
    def key(self) -> int:
        """The PID, because all contexts of a process are steered together."""
        return self.pid


class ContextRow(ctypes.Structure):
    """A context: its process, its GPU time in ns, and its time slices.

    `early` is the number of slices that ended early, `full` the length in ns of the slices that
    were used in full, and `full_ended` the end of the last of those. This is
    `struct simgpu_residency` in steer.c.
    """

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("pid", "ns", "early", "full", "full_ended")
    )

    pid: int
    ns: int
    early: int
    full: int
    full_ended: int


class GpuTimes(NamedTuple):
    """The GPU time and slices of processes by PID, up to `now`, a time on the GPU's clock."""

    now: int
    ns: Counter[int]
    early: Counter[int]
    full: Counter[int]
    full_ended: dict[int, int]


class SimulatedHardware:
    """One simulated GPU, accessed through the simulated NVML and a handle to its device."""

    elsewhere_s = 0.0

    def __init__(self, nvml: Any, handle: object, uuid: str = "") -> None:
        self._nvml, self._handle, self._uuid = nvml, handle, uuid
        nvml.nvmlSimgpuSetTimeslice.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
        nvml.nvmlSimgpuSwitch.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        nvml.nvmlSimgpuResidency.argtypes = (
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_uint64),
            ctypes.POINTER(ContextRow),
            ctypes.c_int,
        )
        # Like the trace of a real GPU, this covers only the time from now on.
        self._last = self._count()
        self.early_turns: Mapping[int, int] = {}
        self.full_turns: Sequence[Full] = ()
        self._off: set[int] = set()
        self._at_off: dict[int, int] = {}
        self.returned_ns: Mapping[int, int] = {}

    def watchdog(self) -> Watchdog:
        """Start a process that switches on the contexts that were left off."""
        return Watchdog("simgpu.steering:revive", (self._nvml._name, self._uuid))  # noqa: SLF001

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _rows(self) -> tuple[int, list[ContextRow]]:
        now, rows = ctypes.c_uint64(), (ContextRow * MOST)()
        n = self._nvml.nvmlSimgpuResidency(self._handle, ctypes.byref(now), rows, MOST)
        if n < 0:
            raise OSError("the simulated GPU is lost")
        return now.value, rows[:n]

    def _count(self) -> GpuTimes:
        now, rows = self._rows()
        counts = GpuTimes(now, Counter(), Counter(), Counter(), {})
        for row in rows:
            counts.ns[row.pid] += row.ns
            counts.early[row.pid] += row.early
            counts.full[row.pid] += row.full
            counts.full_ended[row.pid] = max(counts.full_ended.get(row.pid, 0), row.full_ended)
        return counts

    def find(
        self,
        pid: int,
        pidfd: int = -1,  # noqa: ARG002
        *,
        thorough: bool = False,  # noqa: ARG002
    ) -> Sequence[SteeredProcess]:
        """Return the process, if it has contexts on the GPU."""
        n = sum(row.pid == pid for row in self._rows()[1])
        return [SteeredProcess(pid, n)] if n else []

    def switch(self, held: Sequence[SteeredProcess], *, on: bool) -> None:
        """Switch the contexts of these processes on or off."""
        for one in held:
            self._nvml.nvmlSimgpuSwitch(self._handle, one.pid, int(on))
        pids = {one.pid for one in held}
        if on:
            self._off -= pids
        elif pids:
            ns = self._count().ns
            for pid in pids:
                self._at_off[pid] = ns[pid]
            self._off |= pids

    def set_slice(self, held: SteeredProcess, ns: int) -> None:
        """Give each context of a process a time slice of `ns` nanoseconds."""
        self._nvml.nvmlSimgpuSetTimeslice(self._handle, held.pid, ns)

    @property
    def n_lost(self) -> int:
        """Number of records lost from the trace: always 0."""
        return 0

    def tokens(self, held: Sequence[SteeredProcess]) -> list[Any]:
        """Return the PIDs, in the form that `revive` accepts."""
        return [one.pid for one in held]

    def name(self, held: SteeredProcess) -> list[Any]:
        """Return a JSON value from which `named` restores the process."""
        return list(held)

    def named(self, data: Any) -> SteeredProcess:
        """Return the process that `data` names. Raise ValueError or TypeError if it names none."""
        pid, n_groups = data
        return SteeredProcess(int(pid), int(n_groups))

    def used_ns(self) -> Mapping[int, int]:
        """Return the time in ns that each process has been on the GPU since the last call, by PID.

        The time that a context used between the last call and its end is lost.
        """
        last, now = self._last, self._count()
        self._last = now
        self.early_turns = now.early - last.early
        # Several full slices are reported as one that ended with the last of them.
        self.full_turns = [
            Full(pid, now.now - now.full_ended[pid] + ns, now.now - now.full_ended[pid])
            for pid, ns in (now.full - last.full).items()
        ]
        used = now.ns - last.ns
        self._off &= now.ns.keys()
        self._at_off = {pid: self._at_off[pid] for pid in self._off}
        self.returned_ns = {
            pid: min(used[pid], now.ns[pid] - ns) for pid, ns in self._at_off.items()
        }
        return used


def revive(library: str, uuid: str, tokens: Sequence[int]) -> None:
    """Switch on the processes in `tokens` on the GPU with this UUID."""
    nvml, handle = ctypes.CDLL(library), ctypes.c_void_p()
    nvml.nvmlInit_v2()
    if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0:
        hardware = SimulatedHardware(nvml, handle)
        hardware.switch([SteeredProcess(pid, 1) for pid in tokens], on=True)
