"""Makes kube-scheduler retry pods that it left waiting although a GPU has room.

For a moment kube-scheduler counts a newly allocated share twice: as an allocation in flight, and as
the claim, which its informer has seen by then (`GatherAllocatedState`, Kubernetes 1.36). A pod that
it tries at that moment seems too large. No cluster event corrects that, so the pod waits for up to
five minutes. An update of any ResourceSlice, whatever it changes, makes the scheduler try such pods
again. Therefore an annotation on the slice gets a new value soon after claims are prepared, if a
GPU still has room.

The failed attempt began before the claim's pod was bound, and therefore before the claim was
prepared. An update after the preparation is thus never too early. A claim that is prepared after an
update gets another update.
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
"""Annotation on the slice: the number of retries so far, and a digest of the claims at the last
retry."""
DELAY_S = 1.0
"""Seconds from the first new claim to the update. The delay is short, so that a waiting pod is
retried while the others start: on a one-node cluster, after 2.6 to 4.4 s (after 6.7 s with a
delay of 5 s)."""
INTERVAL_S = 6.0
"""Minimum interval between two updates of a node's slice, in seconds: each makes the scheduler try
all pods in the cluster that are waiting for a claim."""

_MARK = re.compile(r"([0-9]{1,18})-([0-9a-f]{16})")


class Recheck:
    """Decides when a node's slice gets a new mark, which is the value of the annotation."""

    def __init__(self, *, delay: float = DELAY_S, interval: float = INTERVAL_S) -> None:
        self._delay = delay
        self._interval = interval
        self._covered: frozenset[str] | None = None
        """Claims that an update of the slice covers; None if they are known only from the mark."""
        self._since: float | None = None
        """Time at which a claim that no update covers was first seen."""
        self._updated: float | None = None

    def forget(self) -> None:
        """Rely on the slice's mark alone, because another driver may have written the slice."""
        self._covered = None

    def next_mark(
        self, claims: Collection[str], mark: str, now: float, *, room: bool
    ) -> str | None:
        """Return the mark that replaces `mark` in the slice, or None if `mark` stays.

        `claims` are the uids of the prepared claims, `now` is in monotonic seconds, and `room` is
        whether a GPU has room left.
        """
        count, digest = _parse(mark)
        current = frozenset(claims)
        if self._covered is None:
            self._covered = current if digest == _digest(current) else frozenset()
        self._covered &= current  # a claim that is prepared a second time counts as new
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
            # If a claim ends later and makes room, the scheduler retries anyway.
            self._covered = current
            return None
        return f"{count + 1}-{_digest(current)}"

    def updated(self, claims: Collection[str], now: float) -> None:
        """Record that the slice was written, for any reason, while `claims` were prepared."""
        self._covered = frozenset(claims)
        self._since = None
        self._updated = now


def has_room(answer: Mapping[str, Any], closed: Collection[str]) -> bool:
    """Return whether a GPU in the governor's answer to `gpus` has room for the smallest share.

    `closed` are the UUIDs of GPUs to which the scheduler sends no pod.
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
