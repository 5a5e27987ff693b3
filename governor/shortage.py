"""Explain in one line why a quota does not fit: what is short, where, and what would fit.

The module is pure, like the allocation table, which calls it. To keep the line readable on a node
with many GPUs, it names the GPU with the smallest shortfall, and counts the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from governor.errors import RefusedError
from governor.quota import MIB, Quota


@dataclass(frozen=True)
class Room:
    """The part of a GPU that can still be granted: bytes, and percent of its time."""

    index: int
    memory: int
    compute: int
    whole: int
    """Bytes that could be granted if no container had any."""

    def holds(self, quota: Quota) -> bool:
        """Return whether a quota fits."""
        return quota.memory <= self.memory and quota.compute <= self.compute

    def missing(self, quota: Quota) -> str:
        """Return, as text, the part of a quota that does not fit, and how much is missing."""
        parts = []
        short = []
        if quota.memory > self.memory:
            left, asked = self.memory // MIB, -(-quota.memory // MIB)
            parts.append(f"{left} MiB of memory left to grant, but {asked} MiB was requested")
            short.append(f"{asked - left} MiB")
        if quota.compute > self.compute:
            parts.append(
                f"{self.compute} % of its time left to guarantee, but"
                f" {quota.compute} % was requested"
            )
            short.append(f"{quota.compute - self.compute} %")
        return f"GPU {self.index} has {', and '.join(parts)} ({' and '.join(short)} short)"

    def short_of(self, quota: Quota) -> str:
        """Return, as text, the part of a quota that does not fit, and what is left."""
        parts = []
        if quota.memory > self.memory:
            parts.append(
                f"{-(-quota.memory // MIB)} MiB of memory on GPU {self.index},"
                f" but only {self.memory // MIB} MiB is left"
            )
        if quota.compute > self.compute:
            parts.append(
                f"{quota.compute} % of the time of GPU {self.index},"
                f" but only {self.compute} % is left"
            )
        return ", and ".join(parts)

    def miss(self, quota: Quota) -> float:
        """Return the shortfall as a fraction of the request; 0 if the quota fits."""
        memory = (quota.memory - self.memory) / quota.memory
        return max(memory, (quota.compute - self.compute) / quota.compute, 0)


def refuse_named(rooms: Sequence[Room], quota: Quota, least: int) -> RefusedError:
    """Return the refusal of a quota that does not fit on all of `rooms`."""
    short = [room for room in rooms if not room.holds(quota)]
    message = short[0].missing(quota)
    if len(short) > 1:
        others = "another one has" if len(short) == 2 else f"{len(short) - 1} others have"
        message += f", and {others} no room either"
    return RefusedError(message, hint=_hint(rooms, quota, len(rooms), least, fewer=0))


def refuse_any(rooms: Sequence[Room], quota: Quota, count: int, least: int) -> RefusedError:
    """Return the refusal of a quota that does not fit on `count` of `rooms`.

    `least` is the minimum memory of a container; less is not proposed.
    """
    if count > len(rooms):
        shared = f"{len(rooms)} GPU" if len(rooms) == 1 else f"{len(rooms)} GPUs"
        return RefusedError(
            f"{count} GPUs were requested, but this node has {shared} to share",
            hint=f"ask for {len(rooms)} at most",
        )
    short = sorted(
        (room for room in rooms if not room.holds(quota)), key=lambda room: room.miss(quota)
    )
    fitting = len(rooms) - len(short)
    if len(rooms) == 1:
        message = short[0].missing(quota)
    elif count == 1:
        message = f"none of the {len(rooms)} GPUs has room: {short[0].missing(quota)}"
    else:
        have = f"{fitting} have" if fitting > 1 else f"{fitting or 'none'} has"
        message = (
            f"{count} of {len(rooms)} GPUs were requested,"
            f" but {have} room: {short[0].missing(quota)}"
        )
    if len(short) > 1:
        others = "1 other is short" if len(short) == 2 else f"{len(short) - 1} others are short"
        message += f", and {others} by as much or more"
    message += _in_pieces(rooms, quota, count)
    return RefusedError(message, hint=_hint(rooms, quota, count, least, fewer=fitting))


def _in_pieces(rooms: Sequence[Room], quota: Quota, count: int) -> str:
    """Return text saying that there is enough in total, but not per GPU; empty otherwise."""
    memory = sum(room.memory >= quota.memory for room in rooms)
    compute = sum(room.compute >= quota.compute for room in rooms)
    if len(rooms) == 1:
        return ""
    if memory >= count and compute >= count:
        have = "has" if memory == 1 else "have"
        return f", though {memory} {have} the memory and {compute} the time"
    all_memory, all_compute = (sum(room.memory for room in rooms), sum(r.compute for r in rooms))
    pieces = []
    if not memory and all_memory >= count * quota.memory:
        pieces.append(f"{all_memory // MIB} MiB")
    if not compute and all_compute >= count * quota.compute:
        pieces.append(f"{all_compute} %")
    return f", although all GPUs together have {' and '.join(pieces)}" if pieces else ""


def _hint(rooms: Sequence[Room], quota: Quota, count: int, least: int, *, fewer: int) -> str:
    """Return a proposal of what would fit now: less memory, time or GPUs, or two of these."""
    memory = _nth([r.memory for r in rooms if r.compute >= quota.compute], count) // MIB
    compute = _nth([r.compute for r in rooms if r.memory >= quota.memory], count)
    options = []
    if memory * MIB >= least:
        options.append(f"{memory}Mi of memory")
    if compute >= 1:
        options.append(f"{compute} % of the time")
    if fewer:
        options.append("1 GPU" if fewer == 1 else f"{fewer} GPUs")
    if not options:
        nearest = sorted(rooms, key=lambda room: room.miss(quota))[:count]
        memory = min(room.memory for room in nearest) // MIB
        compute = min(room.compute for room in nearest)
        if memory * MIB >= least and compute >= 1:
            options.append(f"{memory}Mi of memory with {compute} % of the time")
    whole = _nth([room.whole for room in rooms], count)
    if quota.memory > whole:
        # Waiting does not help a container that asks for more than a GPU has.
        if options:
            return f"ask for {' or '.join(options)} at most"
        return f"ask for {whole // MIB}Mi of memory at most, once a container has ended"
    if not options:
        return "wait until a container ends"
    return f"ask for {' or '.join(options)} at most, or wait until a container ends"


def _nth(values: Sequence[int], n: int) -> int:
    """Return the n-th largest value, 0 if there are fewer."""
    return sorted(values, reverse=True)[n - 1] if len(values) >= n else 0
