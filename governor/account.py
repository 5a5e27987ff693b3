"""A container's use of its GPUs, from its processes' charges and from NVML's samples.

The container's processes write the ledger, so each number from it is bounded when it is read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from socket import socket
from typing import Any

from governor.arbiter import Stats
from governor.counters import LENT_NS, RATE_NS, Counters, GpuTime, Rates
from governor.members import Member
from governor.quota import Device, Quota
from governor.scheduled import Scheduled
from governor.usage import (
    Charge,
    Debt,
    Meter,
    Passing,
    lent_of,
    of_limit,
    read_charge,
    read_passing,
    sampled_percent,
)
from libcontrol import layout, pages
from vdriver.nvml import ProcessUse

COUNTED = (
    *("launches", "waits", "wait_ns", "refused", "markers", "busy_ns", "blocks", "predicted_ns"),
    *("error_ns", "transfers", "transfer_bytes", "small", "contexts"),
)
"""Fields of a device in the ledger that `tidegate ps` shows, summed over the processes."""


@dataclass
class GpuUse:
    """A process's use of one GPU, as of the last sample."""

    debt: Debt = field(default_factory=Debt)
    used: int = 0
    peak: int = 0
    is_listed: bool = False
    """Whether a sample has shown the process since the process last had no context."""
    part: float = 0.0  # of the GPU's time, percent
    worked: float = 0.0  # `part` times nanoseconds, summed


@dataclass(eq=False)
class RegisteredProcess:
    """A registered process; compared by identity, because slots and pids are reused."""

    slot: int
    pid: int
    start: int
    pidfd: int
    socket: socket | None  # None until it has reconnected to this governor
    inner_pid: int
    start_us: int
    start_ns: int
    uses: list[GpuUse]
    member: Member | None = None
    """The member that the process belongs to, if there are several."""


@dataclass(frozen=True)
class Memory:
    """A container's use of one GPU's memory, in bytes; `peak` is the highest so far."""

    charged: int
    overhead: int
    used: int
    peak: int


@dataclass(frozen=True)
class GpuSample:
    """One sample of a GPU: when it began, bytes of memory by host pid, and NVML's samples."""

    began_ns: int
    seen: Mapping[int, int]
    samples: tuple[ProcessUse, ...] = ()


class Account:
    """The use of one container, by GPU; `processes` are its registered processes, by slot."""

    def __init__(
        self,
        *,
        grant: mmap,
        ledger: mmap,
        devices: Sequence[Device],
        quota: Quota,
        processes: Mapping[int, RegisteredProcess],
        gpus: Scheduled,
        context_memory: int,
        is_adopted: bool,
    ) -> None:
        """Start an account; `is_adopted` is true if an earlier governor admitted the container."""
        self.quota = quota
        self.is_suspended = False
        self._grant, self._ledger, self._devices = grant, ledger, devices
        self._processes, self._gpus = processes, gpus
        self._context_memory = context_memory
        self._meters: list[Meter[RegisteredProcess]] = [Meter() for _ in devices]
        self._measured_ns = [0] * len(devices)
        self._rated_ns = [-RATE_NS] * len(devices)
        self._published_ns = [0] * len(devices)
        self._counted_ns = [0] * len(devices)
        self._counters = Counters(len(devices))
        self._rates = [Rates() for _ in devices]
        self._peaks = [0] * len(devices)
        self._seen = [(0, 0)] * len(devices)
        self._stats = [Stats() for _ in devices]
        # The memory on the grant page stays unchanged until this governor's first sample.
        self._keeps_memory = [is_adopted] * len(devices)

    # What is read

    def charges(self, device: int) -> dict[RegisteredProcess, Charge]:
        """Return each process's charges on GPU `device`, read from the ledger."""
        whole = self._devices[device].memory
        return {
            process: read_charge(self._ledger, slot, device, whole)
            for slot, process in self._processes.items()
        }

    def seen(self, device: int) -> tuple[int, int]:
        """Return the bytes that NVML attributed to the processes on GPU `device`, and when.

        The time is when the last sample began, in nanoseconds; 0 if there was none.
        """
        return self._seen[device]

    def stats(self, device: int) -> Stats:
        """Return the runner's counters for GPU `device`, as of the last sample."""
        return self._stats[device]

    def used(self, device: int) -> int:
        """Return the bytes in use on GPU `device`, from the last sample and the current ledger."""
        base = layout.grant_device(device)
        since = pages.read(self._grant, base, "grant_device", "reconciled_ns")
        return sum(
            charge.used(process.uses[device].debt.bytes, since)
            for process, charge in self.charges(device).items()
        )

    def memory(self, device: int) -> Memory:
        """Return the memory use on GPU `device`; a process counts for at most the GPU's memory."""
        charged = sum(charge.memory for charge in self.charges(device).values())
        counted = pages.read(self._ledger, 0, "ledger_header", "memory_peak", device)
        used = self.used(device)
        # The container's own count has every peak, but not the driver's memory.
        peak = max(self._peaks[device], used, min(counted, self._devices[device].memory))
        self._peaks[device] = peak
        return Memory(
            charged=charged,
            overhead=sum(process.uses[device].debt.bytes for process in self._processes.values()),
            used=used,
            peak=peak,
        )

    def gpu_times(self) -> dict[str, GpuTime]:
        """Return the container's time on each GPU, by UUID; it never decreases."""
        now_ns = time.monotonic_ns()
        return {
            device.uuid: self._counters.time(i, self._gpus.stats(i), now_ns, self.quota)
            for i, device in enumerate(self._devices)
        }

    def counted(self, device: int) -> Mapping[str, int]:
        """Return the processes' counters on GPU `device`, including those of ended processes."""
        return self._counters.processes(self._ledger, self._processes, device)

    def moves(self) -> Mapping[str, int]:
        """Return the bytes and times of moves of parked memory, including those of ended processes.

        `moved` counts both directions. `away_ns` is the time for which calls waited for memory,
        added up over all threads.
        """
        return self._counters.moves(self._ledger, self._processes)

    def passing(self, device: int) -> Passing:
        """Return the work without a grant that the processes report on GPU `device`."""
        return read_passing(self._ledger, self._processes, device)

    def is_at_rest(self, device: int) -> bool:
        """Return whether the processes report neither work on GPU `device` nor a wait for it."""
        return not any(
            pages.read(self._ledger, layout.ledger_device(slot, device), "ledger_device", name)
            for slot in self._processes
            for name in ("want", "pending")
        )

    def is_sampled(self, device: int) -> bool:
        """Return whether only NVML's samples measure the container's work on GPU `device`.

        That is so while the container has an open grant from the arbiter.
        """
        if self._gpus.is_steered(device):
            return False
        base = layout.grant_device(device)
        return pages.read(self._grant, base, "grant_device", "deadline_ns") == layout.OPEN

    def contexts(self, slot: int, device: int) -> int:
        """Return the context count that a process reports; it is not verified."""
        base = layout.ledger_device(slot, device)
        # A suspended process has none on the GPU, so there are no channels to search for.
        return (
            0 if self.is_suspended else pages.read(self._ledger, base, "ledger_device", "contexts")
        )

    def lookups(self) -> int:
        """Return how often the processes looked up functions of the driver."""
        return sum(
            pages.read(self._ledger, pages.slot_base(slot), "ledger_slot", "lookups")
            for slot in self._processes
        )

    def describe(self, device: int) -> dict[str, Any]:
        """Return GPU `device` as `tidegate ps` shows it: bytes, percent, nanoseconds, counts."""
        stats, waits = self._gpus.stats(device), self._gpus.waits(device)
        rates = self._rate(device, stats)
        # The same numbers as in the metrics.
        time_of = self._counters.time(device, stats, time.monotonic_ns(), self.quota)
        memory = self.memory(device)
        return {
            "uuid": self._devices[device].uuid,
            "index": self._devices[device].index,
            **rates,
            "waiting": self._waiting(device),
            "memory_limit": self.quota.memory,
            "memory_used": memory.used,
            "memory_peak": memory.peak,
            "grants": time_of.grants,
            "charged_ns": time_of.charged_ns,
            "lent_ns": time_of.lent_ns,
            "held_ns": time_of.held_ns,
            "overdue": time_of.overdue,
            "grant_waits": list(waits.counts),
            "grant_wait_ns": int(waits.ns),
            **pages.device_sums(self._ledger, COUNTED, device),
            **self.counted(device),
            # The processes' own reports date from before the suspension.
            **({"contexts": 0} if self.is_suspended else {}),
        }

    def _rate(self, device: int, stats: Stats) -> dict[str, float | None]:
        """Return the recent rates on GPU `device`, in percent, and remember this reading."""
        now_ns = time.monotonic_ns()
        time_of = self._counters.time(device, stats, now_ns, self.quota)
        waited_ns = self.counted(device)["wait_ns"]
        rates = self._rates[device].update(now_ns, delivered=time_of.charged_ns, waited=waited_ns)
        used = rates["delivered"]
        quota = self.quota.compute, self.quota.compute_limit
        return {**rates, "lent": None if used is None else round(lent_of(used, *quota), 1)}

    def _waiting(self, device: int) -> int:
        """Return the number of processes that report a wait for time on GPU `device`."""
        return sum(
            pages.read(self._ledger, layout.ledger_device(slot, device), "ledger_device", "want")
            > 0
            for slot in self._processes
        )

    # What is published on the grant page

    def reconcile(
        self, device: int, before: Mapping[RegisteredProcess, Charge], sample: GpuSample | None
    ) -> None:
        """Compare the ledger with a sample, and publish the result.

        `before` are the charges from before the sample. `sample` is None if NVML failed; the last
        sample then remains valid, and `reconciled_ns` remains its time.
        """
        after = self.charges(device)
        now_ns = time.monotonic_ns()
        base = layout.grant_device(device)
        if sample is None:
            since = pages.read(self._grant, base, "grant_device", "reconciled_ns")
        else:
            since = sample.began_ns
            self._keeps_memory[device] = False
            seen = sum(sample.seen.get(process.pid, 0) for process in after)
            self._seen[device] = (seen, sample.began_ns)
        for process, charge in after.items():
            use = process.uses[device]
            if sample is not None and not self._is_away(process, use, charge, sample):
                seen = sample.seen.get(process.pid, 0)
                charges = before.get(process, Charge()), charge
                use.debt.update(
                    sample.began_ns, seen, *charges, self._context_memory, ended_ns=now_ns
                )
            use.used = charge.used(use.debt.bytes, since)
            use.peak = max(use.peak, use.used)
        self._publish_memory(device)
        if sample is not None:
            # Written after the debt: a process that reads this time must also find the sample's
            # result.
            pages.write(self._grant, base, "grant_device", "reconciled_ns", since)
        self._stats[device] = self._gpus.stats(device)
        self._measure(device, now_ns, after, sample)
        self._publish_usage()
        if now_ns - self._counted_ns[device] >= LENT_NS:
            # Lent time is computed about once a second, however rarely its counter is read.
            self._counted_ns[device] = now_ns
            self._counters.time(device, self._stats[device], now_ns, self.quota)

    def _is_away(
        self, process: RegisteredProcess, use: GpuUse, charge: Charge, sample: GpuSample
    ) -> bool:
        """Return whether a process's memory has left the GPU, and may come back.

        That is so for a process that has contexts, but that NVML no longer lists, because it was
        suspended by this governor or checkpointed by its own container. The memory that the driver
        had taken for it still counts; otherwise others could take that memory, and the quota would
        be exceeded when the process comes back.
        """
        if process.pid in sample.seen or not charge.contexts:
            use.is_listed = process.pid in sample.seen
            return False
        if self.is_suspended and not use.is_listed:
            # This governor has never seen the process on the GPU.
            use.debt.assume(charge.contexts * self._context_memory)
        return self.is_suspended or use.is_listed

    def publish_unattributed(
        self, device: int, began_ns: int, unattributed: int, each: int, n_processes: int
    ) -> None:
        """Publish the memory on a GPU that a sample attributes to no process.

        `began_ns` is when the sample began. `unattributed` are the bytes in use that NVML
        attributes to no process and that are in no container's ledger; the number may be negative.
        Each process accounts for `each` of these bytes.
        """
        base = layout.grant_device(device)
        if self._published_ns[device] == began_ns:
            return
        self._published_ns[device] = began_ns
        for name, value in (
            ("unattributed", unattributed % 2**64),
            ("unattributed_each", each),
            ("n_processes", n_processes),
            ("unattributed_ns", began_ns),
        ):
            pages.write(self._grant, base, "grant_device", name, value)

    def count_ended(self, slot: int) -> None:
        """Keep the counters of a process that has ended, before its slot is cleared."""
        self._counters.process_ended(self._ledger, slot)

    def publish_ended(self) -> None:
        """Publish the memory use after a process has ended."""
        for device in range(len(self._devices)):
            # This also removes the process's part of the debt: the next sample may be a quarter of
            # a second away.
            self._publish_memory(device)
        self._publish_usage()

    def _measure(
        self,
        device: int,
        now_ns: int,
        charges: Mapping[RegisteredProcess, Charge],
        sample: GpuSample | None,
    ) -> None:
        sampled = None
        if sample is not None and self.is_sampled(device):
            pids = frozenset(process.pid for process in self._processes.values())
            by_pid = sampled_percent(sample.samples, pids)
            sampled = {process: by_pid.get(process.pid, 0) for process in charges}
        stats = self._stats[device]
        if now_ns - self._rated_ns[device] >= RATE_NS // 4:
            self._rated_ns[device] = now_ns
            self._rate(device, stats)
        held_ns = int(stats.held_ns)
        is_traced = self._gpus.is_steered(device)
        busy = {
            process: charge.busy_ns
            for process, charge in charges.items()
            # A process that has never worked has no part of the time that the trace shows.
            if charge.contexts or charge.busy_ns or not is_traced
        }
        total, parts = self._meters[device].update(
            now_ns, busy, held_ns, sampled, is_traced=is_traced
        )
        passed = now_ns - self._measured_ns[device]
        self._measured_ns[device] = now_ns
        for process in charges:
            use, part = process.uses[device], parts.get(process, 0.0)
            use.part = part
            use.worked += part * min(passed, now_ns - process.start_ns)
        pages.write(
            self._grant,
            layout.grant_device(device),
            "grant_device",
            "utilisation",
            of_limit(total, self.quota.compute_limit),
        )

    def _publish_memory(self, device: int) -> None:
        if self._keeps_memory[device]:
            return
        base = layout.grant_device(device)
        uses = [process.uses[device] for process in self._processes.values()]
        for name, value in (
            ("memory_overhead", sum(use.debt.bytes for use in uses)),
            ("overhead_last", sum(use.debt.least for use in uses)),
            ("memory_used", sum(use.used for use in uses)),
        ):
            pages.write(self._grant, base, "grant_device", name, min(value, 2**64 - 1))

    def _publish_usage(self) -> None:
        now_ns = time.monotonic_ns()
        limit = self.quota.compute_limit
        entries: list[dict[str, int | Sequence[int]]] = []
        for process in self._processes.values():
            lived = max(1, now_ns - process.start_ns)
            uses = process.uses
            entries.append(
                {
                    "pid": process.inner_pid,
                    "state": 1,
                    "start_us": process.start_us,
                    "memory": [use.used for use in uses],
                    "memory_peak": [use.peak for use in uses],
                    "utilisation": [of_limit(use.part, limit) for use in uses],
                    "mean_utilisation": [of_limit(use.worked / lived, limit) for use in uses],
                }
            )
        pages.write_usage(self._grant, entries, time.time_ns() // 1000)
