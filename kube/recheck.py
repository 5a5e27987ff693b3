"""Has kube-scheduler look again at pods that it left waiting although a GPU has room. Pure.

For a moment kube-scheduler counts a share that it has just allocated twice: as an allocation in
flight, and as the claim that its informer has by then (`GatherAllocatedState`, Kubernetes 1.36). A
pod that is tried in that moment is found too large, and no event of the cluster says that it was
not: it waits for up to five minutes. An update of any ResourceSlice is such an event, whatever it
changes. So some seconds after claims were prepared, where a GPU still has room, the slice gets
another value of an annotation.

The attempt that went wrong began before the claim's pod was bound, so before the claim was
prepared: an update after that is never too early, and a claim that is prepared after an update has
one of its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kube.names import DRIVER
from kube.quantity import MIB
from kube.slices import CONTEXT_MEMORY

ANNOTATION = f"dra.{DRIVER}/recheck"
"""Of the slice: how often pods were to be looked at again, and a digest of the claims by then."""
DELAY_S = 5.0
"""From a claim that is prepared to the update: a burst has one."""
INTERVAL_S = 10.0
"""Minimum between two updates of a node."""

_MARK = re.compile(r"([0-9]{1,18})-([0-9a-f]{16})")


class Recheck:
    """Decides when a node's slice gets another mark, the value of the annotation."""

    def __init__(self, *, delay: float = DELAY_S, interval: float = INTERVAL_S) -> None:
        self._delay = delay
        self._interval = interval
        self._covered: frozenset[str] | None = None
        """Claims after which the slice was updated; None where only its mark tells."""
        self._since: float | None = None
        """Since when there has been another claim."""
        self._updated: float | None = None

    def forget(self) -> None:
        """Take the slice's mark for what it says: another driver may have written it."""
        self._covered = None

    def next_mark(
        self, claims: Collection[str], mark: str, now: float, *, room: bool
    ) -> str | None:
        """Return the mark that the slice is to have instead of `mark`, None while it keeps it.

        `claims` are the uids of those that are prepared, `now` is in monotonic seconds, and `room`
        says whether a GPU has some left.
        """
        count, digest = _parse(mark)
        current = frozenset(claims)
        if self._covered is None:
            self._covered = current if digest == _digest(current) else frozenset()
        self._covered &= current  # one that is prepared a second time is a new one
        if self._covered == current:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now - self._since < self._delay:
            return None
        if self._updated is not None and now - self._updated < self._interval:
            return None
        if not room:
            # Where a claim makes room later, its end is an event by itself.
            self._covered = current
            return None
        return f"{count + 1}-{_digest(current)}"

    def updated(self, claims: Collection[str], now: float) -> None:
        """Note that the slice was written, for whatever reason, when these were prepared."""
        self._covered = frozenset(claims)
        self._since = None
        self._updated = now


def has_room(answer: Mapping[str, Any], closed: Collection[str]) -> bool:
    """Return whether a GPU of the governor's answer to `gpus` has room for the smallest share.

    `closed` are UUIDs of GPUs to which the scheduler sends no pod.
    """
    least = int(answer.get("context_memory") or CONTEXT_MEMORY)
    return any(
        gpu["compute_left"] >= 1 and gpu["memory_left"] >= max(least, MIB)
        for gpu in answer["gpus"]
        if gpu["uuid"] not in closed
    )


def _parse(mark: str) -> tuple[int, str]:
    found = _MARK.fullmatch(mark)
    return (int(found[1]), found[2]) if found else (0, "")


def _digest(claims: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(sorted(claims)).encode()).hexdigest()[:16]
