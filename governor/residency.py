"""Decide which containers' memory is on a GPU if more is granted than the GPU has.

The module is pure: it uses no clock or driver. A container is resident with its whole quota: its
quota is reserved on the GPU, so it can allocate without asking. A container whose memory is parked
keeps on the GPU what cannot be moved, such as contexts. So the quotas of the resident containers
and what the parked ones keep never exceed the GPU's memory in total. If a quota does not fit
alongside the minimum that the others keep, only the part that fits counts, so that its container is
not parked for ever.

A container moves to the GPU when one of its calls waits for memory. To make room, the containers
that have been idle for the longest time leave. A working container leaves only when it has been
resident for a turn, which is longer where a move costs more; so containers that always have work,
but do not fit on the GPU together, share it in turns of several seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

IDLE_NS = 500_000_000
"""A container that has not worked for this long is idle, in nanoseconds."""
STAY_NS = 1_000_000_000
"""Shortest time for which an idle container stays resident, in nanoseconds. It also stays at least
as long as its last move took, so that a container that wakes up often does not spend most of its
time moving."""
TURN_NS = 10_000_000_000
"""Shortest time for which a working container stays resident, in nanoseconds."""
COST = 8
"""A working container also stays at least this many times as long as its last move took."""


class Whereabouts(enum.Enum):
    """Where a container's memory is."""

    RESIDENT = "resident"
    LEAVING = "leaving"
    """It has to be parked, but is still resident as far as is known."""
    PARKED = "parked"
    COMING = "coming"
    """It may be moved back, but is not yet known to be resident."""


@dataclass(frozen=True)
class Occupant:
    """A container on one GPU: sizes are bytes, times are nanoseconds on the same clock."""

    key: str
    quota: int
    place: Whereabouts
    held: int = 0
    """Memory that it has on the GPU according to the driver, while its memory is parked."""
    keeps: int = 0
    """Estimate of what it would hold if it were parked."""
    holds: int = 0
    """Memory that it has allocated, on the GPU or parked, by its own report; within its quota."""
    waits_ns: int | None = None
    """When a call began to wait for memory, if one is waiting."""
    worked_ns: int = 0
    """When it last worked."""
    since_ns: int = 0
    """When it last came to the GPU."""
    move_ns: int = 0
    """Time that its last move took."""
    is_going: bool = False
    """Whether it is leaving, and is giving up its memory right now."""
    may_leave: bool = True
    is_fixed: bool = False
    """Whether its memory is never parked."""
    is_latency: bool = False

    @property
    def taken(self) -> int:
        """The part of the GPU's memory that no other container can have."""
        if self.place is Whereabouts.PARKED:
            return self.held
        return self.keeps if self.is_going else self.quota

    @property
    def least(self) -> int:
        """The part that it has even when its memory is parked."""
        if self.is_fixed:
            return self.quota
        return self.held if self.place is Whereabouts.PARKED else self.keeps

    def is_idle(self, now_ns: int) -> bool:
        """Return whether it has not worked for a while."""
        return now_ns - self.worked_ns >= IDLE_NS

    def can_leave(self, now_ns: int) -> bool:
        """Return whether it may be parked now."""
        if self.place is not Whereabouts.RESIDENT or not self.may_leave or self.is_fixed:
            return False
        stayed_ns = now_ns - self.since_ns
        if self.is_idle(now_ns):
            return stayed_ns >= max(STAY_NS, self.move_ns)
        return not self.is_latency and stayed_ns >= max(TURN_NS, COST * self.move_ns)

    def will_leave(self, now_ns: int) -> bool:
        """Return whether it will leave for another within a turn, or is leaving."""
        if self.is_fixed or not self.may_leave or self.place is Whereabouts.PARKED:
            return False
        return self.is_idle(now_ns) or not self.is_latency


@dataclass(frozen=True)
class Orders:
    """The keys of containers that have to leave the GPU, and of those that may come."""

    leave: tuple[str, ...] = ()
    come: tuple[str, ...] = ()


def decide(capacity: int, tenants: Iterable[Occupant], now_ns: int) -> Orders:
    """Return what has to change on a GPU with `capacity` bytes.

    Containers come to the GPU in the order in which they began to wait. A container for which there
    is no room blocks those behind it as long as others will make room for it, so that containers
    with large quotas are not passed over.
    """
    everyone = _fitted(capacity, list(tenants))
    free = capacity - sum(one.taken for one in everyone)
    soon = _leaving(everyone)
    if free < 0:  # a container that is never parked has started, or has a larger quota
        return Orders(tuple(_choose(everyone, -free - soon, now_ns)))
    come: list[str] = []
    waiting = sorted(
        (one for one in everyone if one.place is Whereabouts.PARKED and one.waits_ns is not None),
        key=lambda one: (one.waits_ns or 0, one.key),
    )
    for one in waiting:
        need = one.quota - one.held
        if need <= free:
            free -= need
            come.append(one.key)
            continue
        missing = need - free - soon
        leave = _choose(everyone, missing, now_ns)
        later = sum(
            other.taken - other.keeps
            for other in everyone
            if other.will_leave(now_ns) and other.place is not Whereabouts.LEAVING
        )
        if leave or missing <= later:
            return Orders(tuple(leave), tuple(come))
    return Orders((), tuple(come))


def excess(capacity: int, tenants: Iterable[Occupant]) -> int:
    """Return the bytes taken beyond the GPU's memory; negative if some memory is left."""
    return sum(one.taken for one in _fitted(capacity, list(tenants))) - capacity


def _fitted(capacity: int, everyone: Sequence[Occupant]) -> list[Occupant]:
    """Return the containers, with quotas reduced to what fits alongside the others' minimum.

    A quota is reduced at most by what the others keep when they are parked: admission has ensured
    that it fits alongside the quotas of containers that are never parked.
    """
    least = sum(one.least for one in everyone)
    kept = sum(one.least for one in everyone if not one.is_fixed)

    def fitted(one: Occupant) -> Occupant:
        room = max(capacity - least + one.least, one.holds)
        return replace(one, quota=min(one.quota, max(room, one.quota - kept + one.least)))

    return [one if one.is_fixed else fitted(one) for one in everyone]


def _leaving(everyone: Sequence[Occupant]) -> int:
    """Return the bytes that will be free when the containers that are leaving have left."""
    return sum(one.taken - one.keeps for one in everyone if one.place is Whereabouts.LEAVING)


def _choose(everyone: Sequence[Occupant], need: int, now_ns: int) -> list[str]:
    """Return the containers that should leave to make room; none if that would not suffice."""
    if need <= 0:
        return []
    candidates = sorted(
        (one for one in everyone if one.can_leave(now_ns)),
        key=lambda one: (
            not one.is_idle(now_ns),
            one.worked_ns if one.is_idle(now_ns) else one.since_ns,
        ),
    )
    chosen: list[Occupant] = []
    for one in candidates:
        if need <= 0:
            break
        chosen.append(one)
        need -= one.quota - one.keeps
    if need > 0:
        return []
    # A container that was chosen early may be unnecessary if a larger one was chosen later.
    for one in list(chosen):
        if need + one.quota - one.keeps <= 0:
            chosen.remove(one)
            need += one.quota - one.keeps
    return [one.key for one in chosen]
