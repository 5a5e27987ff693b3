"""What a container reports about its parked memory, and what it is ordered to do with it."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap

from governor.account import RegisteredProcess
from governor.arenas import Arenas
from libcontrol import layout, pages

RESIDENT, CLOSING, OUT, PARKED, IN = range(5)
"""Values of `residency` in a process's slot."""

_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAKE = 1
_ALL = 2**31 - 1

_REPORT = pages.Reader("ledger_slot", "residency", "awaiting", "movable", "parked")
_WORK = pages.Reader("ledger_device", "launches", "transfers", "small", "pending")


@dataclass(frozen=True)
class ParkingReport:
    """The sums of what the running processes of a container report, in bytes and counts.

    The container writes these numbers. They decide when its memory is moved, but not how much of
    the GPU counts as free: that is taken from NVML.
    """

    n_processes: int = 0
    n_resident: int = 0
    n_parked: int = 0
    n_going: int = 0
    """Processes whose memory is parked, or is being copied to host memory."""
    n_moving: int = 0
    """Processes whose memory is being copied."""
    awaiting: int = 0
    movable: int = 0
    parked: int = 0
    work: int = 0
    """A number that changes when the container works."""
    is_busy: bool = False
    """Whether any submitted work has not ended."""


class Parking:
    """The parked memory of one container with one GPU."""

    def __init__(
        self,
        grant: mmap,
        ledger: mmap,
        processes: Mapping[int, RegisteredProcess],
        arenas: Arenas,
        memory: int,
    ) -> None:
        """`memory` is the GPU's memory in bytes; larger reported values are capped at it."""
        self._grant, self._ledger, self._memory = grant, ledger, memory
        self._processes, self.arenas = processes, arenas

    def report(self) -> ParkingReport:
        """Return what the processes report, added up."""
        total = [0] * len(_REPORT.fields)
        resident = parked = going = moving = work = busy = 0
        for slot in self._processes:
            values = _REPORT(self._ledger, pages.slot_base(slot))
            resident += values[0] == RESIDENT
            parked += values[0] == PARKED
            going += values[0] in (OUT, PARKED)
            moving += values[0] in (OUT, IN)
            values[2:] = [min(value, self._memory) for value in values[2:]]
            total = [one + value for one, value in zip(total, values, strict=True)]
            *counts, pending = _WORK(self._ledger, layout.ledger_device(slot, 0))
            work += sum(counts)
            busy += pending > 0
        _, awaiting, movable, held = total
        return ParkingReport(
            len(self._processes),
            resident,
            parked,
            going,
            moving,
            awaiting,
            movable,
            held,
            work,
            busy > 0,
        )

    @property
    def is_ordered(self) -> bool:
        """Whether the last order was to move the memory to the GPU."""
        return bool(pages.read(self._grant, layout.grant_device(0), "grant_device", "resident"))

    def order(self, *, resident: bool) -> None:
        """Order the processes to move their memory to the GPU, or to the host."""
        base = layout.grant_device(0)
        pages.write(self._grant, base, "grant_device", "resident", int(resident))
        at = base + layout.offsets(layout.GRANT_DEVICE)["resident"]
        # The view is deleted at the end: while a view exists, the page cannot be closed.
        view = (ctypes.c_uint32 * 1).from_buffer(self._grant, at)
        libc = ctypes.CDLL(None)
        libc.syscall(_FUTEX[platform.machine()], ctypes.byref(view), _WAKE, _ALL, None, None, 0)
        del view

    def lacking(self, quota: int) -> dict[int, int]:
        """Return the processes whose arena is smaller than what they may have to park, by slot.

        The values are the sizes that are needed, in bytes. Whatever the processes report, the
        arenas together exceed the quota by at most one piece per process.
        """
        left = quota - self.arenas.total
        needed = {}
        for slot in list(self._processes):
            ready = self.arenas.ready(slot)
            movable = pages.read(self._ledger, pages.slot_base(slot), "ledger_slot", "movable")
            more = min(movable - ready, left)
            if more > 0:
                needed[slot] = ready + more
                left -= more
        return needed
