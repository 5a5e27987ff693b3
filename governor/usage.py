"""What a process uses of a GPU: its ledger compared with what NVML sees, and its part of the time.

Pure: no clock, no driver. The ledger is written by the container, so everything that comes from
them is bounded here before anything is computed with it. Bytes, nanoseconds and percent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Generic, TypeVar

from libcontrol import layout, pages
from vdriver.nvml import ProcessUse

Key = TypeVar("Key", bound=Hashable)

WINDOW_NS = 1_000_000_000
"""Time over which utilisation is measured, in nanoseconds."""

LOOK_NS = 250_000_000
"""Interval between two looks at a shared GPU, in nanoseconds."""

NEW_NS = 300_000_000
"""Time after its creation within which NVML may not list a context, in nanoseconds."""

MOST_WAITING = 64
"""Maximum number of looks that are kept until the pools were asked."""

MOST_CONTEXTS = 64
"""Maximum number of contexts of one process on one GPU; a higher report is nonsense."""


@dataclass(frozen=True)
class Charge:
    """What the ledger says about one process on one GPU."""

    memory: int = 0
    unseen: int = 0
    provisional: int = 0
    provisional_ns: int = 0
    busy_ns: int = 0
    returned: int = 0
    contexts: int = 0
    moving: int = 0
    """What calls under way take or give back: the sum of the values before and after `memory` was
    read."""
    pooled: int = 0
    taking: int = 0
    shrunk: int = 0
    told: int = 0
    """What the process reported that the driver took on its own, less what it gave back, in total.
    """
    asked_ns: int = 0
    returned_before: int = 0
    """`returned`, read before the rest; `returned` itself is read after it."""
    shrunk_before: int = 0
    """The same of `shrunk`."""

    @property
    def attributed(self) -> int:
        """The part of the charge that NVML attributes to the process."""
        return self.memory - self.unseen

    def used(self, overhead: int, since_ns: int) -> int:
        """Return what the process uses, if the last look, at `since_ns`, found `overhead`.

        What the driver took after the look was seen by no look; it counts as the process reports
        it.
        """
        late = self.provisional if self.provisional_ns > since_ns else 0
        return self.memory + overhead + late


read_ledger = pages.Reader(
    "ledger_device",
    *("asked_ns", "returned", "shrunk", "moving", "pooled"),
    *("memory", "unseen", "moving", "pooled", "provisional", "provisional_ns", "taking"),
    *("busy_ns", "contexts", "took", "gave"),
    *("returned", "shrunk"),
)  # fmt: skip
"""Reads the ledger in the order that Debt.update() needs: what ends meanwhile is in at least one of
the numbers."""


def read_charge(ledger: mmap, slot: int, device: int, whole: int) -> Charge:
    """Return the charge of a process on a GPU of `whole` bytes; no number exceeds that."""
    (
        asked_ns, returned_before, shrunk_before, moving_before, pooled_before,
        memory, unseen, moving, pooled, provisional, provisional_ns, taking,
        busy_ns, contexts, took, gave,
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
        min(contexts, MOST_CONTEXTS),
        min(moving_before + moving, memory),
        min(max(pooled_before, pooled), memory),
        min(taking, unseen),
        shrunk,
        took - gave,
        asked_ns,
        returned_before,
        shrunk_before,
    )


@dataclass(frozen=True)
class Passing:
    """What passes without a grant: small copies and fills, and copies to and from the host.

    `pending` says whether work of a grant that is over may still run.
    """

    count: int
    bytes: int
    pending: bool


def read_passing(ledger: mmap, slots: Iterable[int], device: int) -> Passing:
    """Return what the processes in `slots` report."""
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
    """What the driver took on its own for one process: what NVML sees beyond the process's ledger.

    The ledger moves while NVML is asked. Of what is charged, calls under way may or may not have
    what they take or give back, and pools may have given back what they held; all else is
    allocated. So a look gives a lower and an upper bound of what the driver took. Within these
    bounds the earlier value stands, together with what the process has reported since that the
    driver took. What a process reports that the driver takes, and the look may have missed, counts
    by the process's own ledger until the next look.

    Where pools are in use, one look says little about the upper bound: pools may have given
    something back that the process has not noticed. But the process asks them ten times a second.
    What they were found without since an earlier look is all that they can have been without during
    it.

    NVML may not list a new context at once. For a moment it counts for what it is expected to take.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.last = 0
        """The debt by the last look during which the ledger stood still; perhaps too little."""
        self._last_ns = 0
        self._new_until_ns = 0
        self._told = 0
        # What the last look saw that the process had not reported.
        self._ahead = 0
        # Looks since which the pools were not asked: when each ended, and its upper bound.
        self._waiting: deque[tuple[int, int]] = deque()
        # The upper bound by the last look since which they were asked, less what was added until
        # then.
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
        """Return the debt after a look from `began_ns` to `ended_ns`, in bytes.

        It is at most `seen`, or what the contexts are expected to take while one of them is new.
        """
        changed = self._last_ns < after.provisional_ns <= began_ns
        late = after.provisional if after.provisional_ns > began_ns else 0
        pending = max(before.taking, after.taking) + late
        self._last_ns = began_ns
        if changed:
            self._new_until_ns = after.provisional_ns + NEW_NS
        returned = max(0, after.returned - before.returned_before)
        charged = max(
            0,
            before.memory
            - max(before.unseen, after.unseen)
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
        debt = self.bytes + self._news(before.told)
        if _is_still(before, after) and not late:
            self.last = max(0, seen - after.attributed)
        self.bytes = max(least, min(debt, most))
        self._ahead = self.bytes - debt
        expected = before.contexts * context_bytes
        # If more than half a context is missing, NVML does not list a context yet; it is not that
        # contexts are smaller than expected.
        if began_ns < self._new_until_ns and self.bytes < expected - context_bytes // 2:
            self.bytes = expected
        self.last = min(self.last, self.bytes)
        return self.bytes

    def _news(self, told: int) -> int:
        """Return what was reported since the last look, less what that look had already seen."""
        news, self._told = told - self._told, told
        if self._ahead > 0:
            return news - min(max(0, news), self._ahead)
        return news - max(min(0, news), self._ahead)

    def _bound(self, ended_ns: int, most: int, before: Charge, after: Charge) -> int:
        """Return the upper bound by the last look since which the pools were asked.

        `most` is the upper bound of this look, if the pools hold all that they are charged for.
        What the driver took since that earlier look, and what pools were found without, is added.
        """
        while self._waiting and self._waiting[0][0] <= after.asked_ns:
            self._most = self._waiting.popleft()[1]
        self._waiting.append((ended_ns, most - before.told - before.shrunk_before))
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
        if self._most is None:
            return 2**64
        return max(0, self._most + before.told + after.shrunk)


def _is_still(before: Charge, after: Charge) -> bool:
    """Return whether no call was under way between the two readings."""
    return not any((before.moving, after.moving, before.taking, after.taking)) and (
        before.memory,
        before.unseen,
        before.returned_before,
    ) == (after.memory, after.unseen, after.returned)


class Meter(Generic[Key]):
    """The GPU time of a container's processes over the last second.

    While others share the GPU, the time is what the processes report (by the GPU's clock, between
    their markers), but no more than the arbiter has counted as held by the container, because the
    container writes the report. A container that is alone holds an open grant, in which few markers
    are recorded, and its held time is not booked before the grant ends. There NVML's samples count.
    They are right in exactly that case: under contention a sample names only one process.
    """

    def __init__(self) -> None:
        # When each look was, and what was busy and held since the one before.
        self._looks: deque[tuple[int, dict[Key, int], int]] = deque()
        self._before: tuple[int, dict[Key, int], int] | None = None
        self._open = False

    def update(
        self,
        now_ns: int,
        busy: Mapping[Key, int],
        held_ns: int,
        sampled: Mapping[Key, int] | None,
    ) -> dict[Key, float]:
        """Return the GPU time of each process over the last second, in percent.

        `busy` is the GPU time that each process reports since its start, and `held_ns` what the
        container has held since its start. `sampled` is NVML's percentages while the grant is open,
        and None while it is not.
        """
        if self._before is None:
            self._before = (now_ns, dict(busy), held_ns)
        then, reported, held = self._before
        passed = now_ns - then
        new = {
            key: min(max(0, value - reported.get(key, 0)), passed) for key, value in busy.items()
        }
        self._looks.append((now_ns, new, min(max(0, held_ns - held), passed)))
        self._before = (now_ns, dict(busy), held_ns)
        while len(self._looks) > 1 and self._looks[1][0] <= now_ns - WINDOW_NS:
            self._looks.popleft()
        was_open, self._open = self._open, sampled is not None
        if sampled is not None and was_open:
            return _at_most({key: float(sampled.get(key, 0)) for key in busy}, 100.0)
        # The first look begins the window and is not a part of it.
        window = now_ns - self._looks[0][0]
        if window <= 0:
            return dict.fromkeys(busy, 0.0)
        looks = list(self._looks)[1:]
        parts = {key: 100.0 * sum(new.get(key, 0) for _, new, _ in looks) / window for key in busy}
        return _at_most(parts, 100.0 * min(1.0, sum(held for _, _, held in looks) / window))


def _at_most(parts: dict[Key, float], most: float) -> dict[Key, float]:
    total = sum(parts.values())
    if total <= most:
        return parts
    return {key: part * most / total for key, part in parts.items()}


def of_limit(part: float, compute_limit: int) -> int:
    """Return a percentage of the GPU as whole percent of a cap, at most 100."""
    return min(100, round(part * 100 / compute_limit)) if compute_limit else 0


def lent_of(used: float, guarantee: float, limit: float) -> float:
    """Return which part of the GPU time that was used in a while was lent.

    That is what exceeds the guarantee of a container which may exceed it. All numbers are of the
    same while and in the same unit.
    """
    return max(0, used - guarantee) if limit > guarantee else 0


def sampled_percent(samples: Sequence[ProcessUse], pids: frozenset[int]) -> dict[int, int]:
    """Return NVML's percentage for each of these processes, on average over its samples.

    NVML samples a few times a second and leaves out idle processes, so a process that works in
    bursts is shown as it is during the bursts.
    """
    own = [sample for sample in samples if sample.pid in pids]
    times = len({sample.time_us for sample in own})
    totals: dict[int, int] = {}
    for sample in own:
        totals[sample.pid] = totals.get(sample.pid, 0) + min(sample.percent, 100)
    return {pid: total // times for pid, total in totals.items()}
