"""Compute a process's use of a GPU: memory, from the ledger and NVML, and its share of the time.

The module is pure: it uses no clock or driver. The container writes the ledger, so memory and time
from it are bounded here before they are used. Units are bytes, nanoseconds and percent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Generic, NamedTuple, TypeVar

from libcontrol import layout, pages
from vdriver.nvml import ProcessUse

Key = TypeVar("Key", bound=Hashable)

WINDOW_NS = 1_000_000_000
"""Time over which utilisation is measured, in nanoseconds."""

SAMPLE_NS = 250_000_000
"""Interval between two samples of a shared GPU, in nanoseconds."""

NEW_NS = 300_000_000
"""Time after a context's creation during which NVML may not list it, in nanoseconds."""

MAX_WAITING = 64
"""Maximum number of samples that wait for the process's next query of its pools."""

MAX_CONTEXTS = 64
"""Maximum number of contexts of one process on one GPU; a higher value is reduced to this."""


class Charge(NamedTuple):
    """The ledger's values for one process on one GPU."""

    memory: int = 0
    unseen: int = 0
    provisional: int = 0
    provisional_ns: int = 0
    busy_ns: int = 0
    returned: int = 0
    contexts: int = 0
    moving: int = 0
    """Bytes that calls in progress are allocating or freeing: the sum of the values that were read
    before and after `memory`."""
    pooled: int = 0
    taking: int = 0
    shrunk: int = 0
    told: int = 0
    """Total number of bytes that the driver took by itself, less those that it gave back, as
    reported by the process.
    """
    asked_ns: int = 0
    returned_before: int = 0
    """`returned`, read before the other values; `returned` itself is read after them."""
    shrunk_before: int = 0
    """The same for `shrunk`."""
    unseen_before: int = 0
    """The same for `unseen`."""
    took: int = 0
    """Total number of bytes that the driver took by itself, as reported by the process."""

    def used(self, overhead: int, since_ns: int) -> int:
        """Return the bytes in use, if the last sample, at `since_ns`, found `overhead`.

        Memory that the driver took after the sample counts as the process reports it.
        """
        late = self.provisional if self.provisional_ns > since_ns else 0
        return self.memory + overhead + late


read_ledger = pages.Reader(
    "ledger_device",
    *("asked_ns", "returned", "shrunk", "moving", "pooled", "contexts"),
    *("unseen", "memory", "taking", "unseen", "moving", "pooled", "provisional", "provisional_ns"),
    *("busy_ns", "took", "gave"),
    *("returned", "shrunk"),
)  # fmt: skip
"""Reads the ledger in the order that Debt.update() needs: a call that ends in the meantime is in at
least one of the numbers."""


def read_charge(ledger: mmap, slot: int, device: int, whole: int) -> Charge:
    """Return the charge of a process on a GPU with `whole` bytes.

    No amount of memory exceeds `whole`; times and running totals are not bounded here.
    """
    (
        asked_ns, returned_before, shrunk_before, moving_before, pooled_before, contexts,
        unseen_before, memory, taking, unseen, moving, pooled, provisional, provisional_ns,
        busy_ns, took, gave,
        returned, shrunk,
    ) = read_ledger(ledger, layout.ledger_device(slot, device))  # fmt: skip
    memory = min(memory, whole)
    unseen = min(unseen, memory)
    return Charge(
        memory,
        unseen,
        min(provisional, whole),
        provisional_ns,
        busy_ns,
        returned,
        min(contexts, MAX_CONTEXTS),
        min(moving_before + moving, memory),
        min(max(pooled_before, pooled), memory),
        min(taking, unseen),
        shrunk,
        took - gave,
        asked_ns,
        returned_before,
        shrunk_before,
        min(unseen_before, memory),
        took,
    )


@dataclass(frozen=True)
class Passing:
    """Work that needs no grant: small copies and fills, and copies to and from the host.

    `pending` is true if work from a grant that is over may still be running.
    """

    count: int
    bytes: int
    pending: bool


def read_passing(ledger: mmap, slots: Iterable[int], device: int) -> Passing:
    """Return the sums of the reports from the processes in `slots`."""
    count = copied = pending = 0
    for slot in slots:
        base = layout.ledger_device(slot, device)
        small, transfers, transferred, waiting = (
            pages.read(ledger, base, "ledger_device", name)
            for name in ("small", "transfers", "transfer_bytes", "pending")
        )
        count += small + transfers
        copied += transferred
        pending += waiting
    return Passing(count, copied, bool(pending))


class Debt:
    """Memory that the driver took by itself for one process: NVML's value less the ledger's.

    The ledger changes while NVML is read. Of the charged memory, what belongs to calls in progress
    may or may not be allocated, and pools may have freed memory; all other memory is allocated. A
    sample thus gives a lower and an upper bound of what the driver took. Within these bounds the
    earlier value is kept, plus what the process has reported since then. If the process reports
    memory that the driver takes and that the sample may have missed, the ledger's value counts
    until the next sample.

    If pools are in use, a single sample gives only a loose upper bound: pools may have freed memory
    without the process noticing. But the process queries them ten times a second. The reductions
    that it has found since an earlier sample include all memory that the pools had already freed,
    unnoticed, at the time of that sample.

    NVML may not list a new context immediately. For a short time such a context counts at its
    expected size.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.least = 0
        """The lower bound from the last sample: the least that the driver had taken by then."""
        self._last_ns = 0
        self._new_until_ns = 0
        self._told = 0
        self._took = 0
        # Bytes that the last sample showed but the process had not reported.
        self._seen_unreported = 0
        # Samples after which the pools have not been queried yet: end and upper bound of each.
        self._waiting: deque[tuple[int, int]] = deque()
        # Upper bound from the last sample after which the pools were queried, less the additions
        # until then.
        self._most: int | None = None

    def update(
        self,
        began_ns: int,
        seen: int,
        before: Charge,
        after: Charge,
        context_bytes: int = 0,
        *,
        ended_ns: int | None = None,
    ) -> int:
        """Return the debt after a sample from `began_ns` to `ended_ns`, in bytes.

        It is at most `seen`, or the expected size of the contexts while one of them is new.
        """
        late = after.provisional if after.provisional_ns > began_ns else 0
        pending = max(before.taking, after.taking) + late
        self._note_new(began_ns, after)
        returned = max(0, after.returned - before.returned_before)
        charged = max(
            0,
            before.memory
            - max(before.unseen, before.unseen_before, after.unseen)
            - before.moving
            - after.moving
            - returned,
        )
        least = max(
            0, seen - (after.memory + returned - min(before.unseen, after.unseen)) - pending
        )
        most = max(0, seen - max(0, charged - before.pooled))
        if before.pooled:
            ended = began_ns if ended_ns is None else ended_ns
            most = min(most, self._bound(ended, max(0, seen - charged), before, after))
        if late and before.told > self._told:
            # The reports since the last sample are part of `late`, which counts in addition. They
            # become debt with the next sample that no report follows.
            debt, unreported = self.bytes, self._seen_unreported
        else:
            debt, unreported = self.bytes + self._new_reports(before.told), 0
        self.bytes = max(least, min(debt, most))
        self._seen_unreported = unreported + self.bytes - debt
        expected = before.contexts * context_bytes
        # If more than half a context is missing, there is a context that NVML does not list yet; a
        # smaller difference means that contexts are smaller than expected.
        if began_ns < self._new_until_ns and self.bytes < expected - context_bytes // 2:
            self.bytes = expected
        self.least = least
        return self.bytes

    def assume(self, size: int) -> None:
        """Set the debt to `size` bytes until the first sample that shows the process."""
        self.bytes = size

    def _note_new(self, began_ns: int, after: Charge) -> None:
        """Note when contexts cease to be new: a while after the last report of taken memory.

        A report of zero bytes only requests a sample.
        """
        last_ns, self._last_ns = self._last_ns, began_ns
        if last_ns < after.provisional_ns <= began_ns:
            if after.provisional or after.took != self._took:
                self._new_until_ns = after.provisional_ns + NEW_NS
            self._took = after.took

    def _new_reports(self, told: int) -> int:
        """Return the reports since the last sample, less what that sample already showed."""
        news, self._told = told - self._told, told
        if self._seen_unreported > 0:
            return news - min(max(0, news), self._seen_unreported)
        return news - max(min(0, news), self._seen_unreported)

    def _bound(self, ended_ns: int, most: int, before: Charge, after: Charge) -> int:
        """Return the upper bound from the last sample after which the pools were queried.

        `most` is the upper bound of this sample if the pools hold all that they are charged for.
        The memory that the driver took since that earlier sample, and the reductions of pools that
        were found, are added.
        """
        while self._waiting and self._waiting[0][0] <= after.asked_ns:
            self._most = self._waiting.popleft()[1]
        self._waiting.append((ended_ns, most - before.told - before.shrunk_before))
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
        if self._most is None:
            return 2**64
        return max(0, self._most + before.told + after.shrunk)


class Meter(Generic[Key]):
    """The GPU time of a container's processes over the last second.

    While others share the GPU, the time is what the processes report (by the GPU's clock, between
    their markers). Because reports are not trusted, it is limited to the time for which the
    container held the GPU according to the arbiter. A container that is alone holds an open grant,
    under which few markers are recorded, and its held time is not booked before the grant ends. In
    this case NVML's samples are used. They are correct only then: under contention a sample names
    only one process.

    On a steered GPU the container's time is known from the GPU's trace. The reports only divide it
    among the processes: on an H200 they added up to a tenth of it in two of six runs, because few
    markers are recorded there and other containers' work lies between them.
    """

    def __init__(self) -> None:
        # For each reading: its time, and the busy and held times since the previous one.
        self._looks: deque[tuple[int, dict[Key, int], int]] = deque()
        self._before: tuple[int, dict[Key, int], int] | None = None
        self._open = False

    def update(
        self,
        now_ns: int,
        busy: Mapping[Key, int],
        held_ns: int,
        sampled: Mapping[Key, int] | None,
        *,
        is_traced: bool = False,
    ) -> tuple[float, dict[Key, float]]:
        """Return the GPU time of the container and of each process in the last second, in percent.

        `busy` is the GPU time that each process has reported since its start, and `held_ns` the
        time for which the container has held the GPU since its start; if `is_traced` is true, it
        has used the GPU for all of this time. `sampled` has NVML's percentages while the grant is
        open, and is None otherwise.
        """
        if self._before is None:
            self._before = (now_ns, dict(busy), held_ns)
        then, reported, held_before = self._before
        passed = now_ns - then
        new = {
            key: min(max(0, value - reported.get(key, 0)), passed) for key, value in busy.items()
        }
        # The trace is read once per step, so one reading may cover a longer time.
        held_since = max(0, held_ns - held_before)
        self._looks.append((now_ns, new, held_since if is_traced else min(held_since, passed)))
        self._before = (now_ns, dict(busy), held_ns)
        while len(self._looks) > 1 and self._looks[1][0] <= now_ns - WINDOW_NS:
            self._looks.popleft()
        was_open, self._open = self._open, sampled is not None
        if sampled is not None and was_open:
            return _at_most(100.0, {key: float(sampled.get(key, 0)) for key in busy})
        # The first reading marks the beginning of the window.
        window = now_ns - self._looks[0][0]
        if window <= 0:
            return 0.0, dict.fromkeys(busy, 0.0)
        looks = list(self._looks)[1:]
        held = 100.0 * min(1.0, sum(held for _, _, held in looks) / window)
        keys = {*busy}
        if is_traced:  # the time of a process that has ended is not divided among the others
            keys |= {key for _, new, _ in looks for key, value in new.items() if value}
        parts = {key: 100.0 * sum(new.get(key, 0) for _, new, _ in looks) / window for key in keys}
        total, parts = (_divide if is_traced else _at_most)(held, parts)
        return total, {key: parts[key] for key in busy}


def _at_most(most: float, parts: dict[Key, float]) -> tuple[float, dict[Key, float]]:
    """Return the sum of the parts, scaled down to at most `most`, and the scaled parts."""
    return _divide(most, parts) if sum(parts.values()) > most else (sum(parts.values()), parts)


def _divide(total: float, parts: dict[Key, float]) -> tuple[float, dict[Key, float]]:
    """Return `total`, and its division in proportion to the parts, or evenly if all are zero."""
    reported = sum(parts.values())
    if not reported:
        return total, dict.fromkeys(parts, total / max(1, len(parts)))
    return total, {key: total * part / reported for key, part in parts.items()}


def of_limit(part: float, compute_limit: int) -> int:
    """Return a percentage of the GPU as a whole percentage of a cap, at most 100."""
    return min(100, round(part * 100 / compute_limit)) if compute_limit else 0


def lent_of(used: float, guarantee: float, limit: float) -> float:
    """Return the part of the used GPU time that was lent.

    That is the use beyond the guarantee of a container that may exceed it. All numbers are for the
    same interval and in the same unit.
    """
    return max(0, used - guarantee) if limit > guarantee else 0


def sampled_percent(samples: Sequence[ProcessUse], pids: frozenset[int]) -> dict[int, int]:
    """Return NVML's percentage for each of these processes, averaged over its samples.

    NVML samples a few times a second and omits idle processes, so a process that works in bursts is
    shown with its use during the bursts.
    """
    own = [sample for sample in samples if sample.pid in pids]
    times = len({sample.time_us for sample in own})
    totals: dict[int, int] = {}
    for sample in own:
        totals[sample.pid] = totals.get(sample.pid, 0) + min(sample.percent, 100)
    return {pid: total // times for pid, total in totals.items()}
