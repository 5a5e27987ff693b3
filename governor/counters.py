"""Counters that never go back: of a container while it is there, and of a GPU whatever ends on it.

What a process counted stands in its slot of the ledger and is cleared with it; what a container
held is the arbiter's, and forgotten with the container. Whoever draws a rate takes a counter that
goes back for one that began anew, so sums are kept here. Numbers of a ledger are foreign: they may
be nonsense, and go back; here they are bounded, and the highest stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from mmap import mmap
from typing import Protocol

from governor.arbiter import Stats
from libcontrol import layout, pages

OF_PROCESSES = ("launches", "waits", "wait_ns", "refused")
"""Fields of a ledger's device that are counted on when their process ends."""

MOST = 2**62
"""No counter passes it: years of nanoseconds. What says more is nonsense."""


@dataclass(frozen=True)
class GpuTime:
    """What the arbiter says of a container on a GPU, or of all on it: nanoseconds and counts.

    `held_ns` has the grant under way; `handover_ns` is held and not charged, of grants whose charge
    is settled.
    """

    held_ns: int = 0
    charged_ns: int = 0
    lent_ns: int = 0
    handover_ns: int = 0
    grants: int = 0
    overdue: int = 0

    def __add__(self, other: GpuTime) -> GpuTime:
        return GpuTime(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(GpuTime)),
        )


def gpu_time(stats: Stats, now_ns: int) -> GpuTime:
    """Return a container's GPU time as of now: a grant without end is booked at its end only."""
    running = max(0, now_ns - int(stats.since_ns)) if stats.since_ns else 0
    return GpuTime(
        held_ns=int(stats.held_ns) + running,
        charged_ns=int(stats.charged_ns) + (running if stats.open else 0),
        lent_ns=int(stats.lent_ns),
        handover_ns=int(stats.handover_ns),
        grants=int(stats.grants),
        overdue=int(stats.overdue),
    )


class Counters:
    """Of one container, by GPU."""

    def __init__(self, n_devices: int) -> None:
        self._past = [Counter[str]() for _ in range(n_devices)]
        self._told = [Counter[str]() for _ in range(n_devices)]
        self._time = [GpuTime()] * n_devices

    def process_ended(self, ledger: mmap, slot: int) -> None:
        """Keep what a process counted, before its slot is cleared."""
        for device, past in enumerate(self._past):
            past.update(_read(ledger, slot, device))

    def processes(self, ledger: mmap, slots: Iterable[int], device: int) -> Mapping[str, int]:
        """Return what the processes in these slots and those that ended counted."""
        now = self._past[device].copy()
        for slot in slots:
            now.update(_read(ledger, slot, device))
        told = self._told[device]
        for name in OF_PROCESSES:
            told[name] = max(told[name], min(now[name], MOST))
        return dict(told)

    def time(self, device: int, stats: Stats, now_ns: int) -> GpuTime:
        """Return the container's GPU time.

        What is under way may turn out to have ended a little earlier than it was looked at.
        """
        new, old = gpu_time(stats, now_ns), self._time[device]
        self._time[device] = GpuTime(
            *(max(getattr(new, f.name), getattr(old, f.name)) for f in fields(GpuTime))
        )
        return self._time[device]


def _read(ledger: mmap, slot: int, device: int) -> dict[str, int]:
    base = layout.ledger_device(slot, device)
    return {
        name: min(pages.read(ledger, base, "ledger_device", name), MOST) for name in OF_PROCESSES
    }


@dataclass
class Looks:
    """Looks at NVML on one GPU: how many, how many failed, and seconds that they took together."""

    made: int = 0
    failed: int = 0
    seconds: float = 0.0


class Timed(Protocol):
    """What a container says of its GPUs' time."""

    def gpu_times(self) -> Mapping[str, GpuTime]:
        """Return its time of each GPU, by UUID."""


@dataclass
class Tally:
    """What the governor counted since it started, of containers that ended, too."""

    admitted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Admissions that were refused, by the error's code."""
    violations: Counter[str] = field(default_factory=Counter)
    """Violations that began, by kind."""
    throttles: int = 0
    stops: int = 0
    looks: dict[str, Looks] = field(default_factory=dict)
    """By the GPU's UUID."""
    _past: dict[str, GpuTime] = field(default_factory=dict)

    def container_ended(self, container: Timed) -> None:
        """Keep what a container had, while the arbiter still knows it."""
        for uuid, time in container.gpu_times().items():
            self._past[uuid] = self._past.get(uuid, GpuTime()) + time

    def gpu_times(self, running: Iterable[Mapping[str, GpuTime]]) -> dict[str, GpuTime]:
        """Return the time of each GPU, by UUID: of these containers, and of those that ended."""
        total = dict(self._past)
        for times in running:
            for uuid, time in times.items():
                total[uuid] = total.get(uuid, GpuTime()) + time
        return total

    def looked(self, uuid: str, seconds: float, *, failed: bool) -> None:
        """Count a look at a GPU."""
        looks = self.looks.setdefault(uuid, Looks())
        looks.made += 1
        looks.failed += failed
        looks.seconds += seconds
