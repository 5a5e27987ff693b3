"""Looks for what processes have on a GPU, on a thread of its own.

A look takes 7 ms, and longer where a process has many open files, so it keeps neither the steering
nor the event loop waiting, and takes a small part of one core whatever a container does: after each
look a process is left alone for a multiple of the time that it took, and so is its container, but
for a first few looks as when its processes start. Containers that were looked at less come first. A
process is looked for when
it says that it has another number of contexts, which it may lie about, and when the GPU's trace has
it although nothing is known of it, which it cannot.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import structlog

from governor.hardware.driver import DriverCallError

POLL_S = 0.02
"""Between two looks at how many contexts processes say that they have."""
RETRY_S = (0.02, 0.1, 1.0)
"""After looks that found nothing: a context is counted a moment before or after it is there."""
CLOSE_S = 5.0
"""A look that takes longer is left to itself when the governor ends."""
COST = 20
"""So many times as long as a look took, the process is left alone."""
BURST_S = 0.2
"""Looks at a container take so long at once at most, and one part in COST of the time beyond it."""

log = structlog.get_logger("tidegate")

Find = Callable[..., Sequence[Any]]
"""`find` of steering.Hardware."""


class Found(NamedTuple):
    """What a look has found that a process of a container has on the GPU; it may be nothing."""

    tenant: int
    pid: int
    held: Sequence[Any]
    thorough: bool
    """Old clients were looked at, too."""


class _Process:
    def __init__(self, tenant: int, pid: int, pidfd: int) -> None:
        self.tenant, self.pid, self.pidfd = tenant, pid, pidfd
        self.slots: dict[int, Callable[[], int]] = {}
        self.n_known = 0  # contexts that it said it had when it was found
        self.is_seen = False  # on the GPU, and nothing is known of it
        self.n_misses = 0
        self.next_at = 0.0

    def n_contexts(self) -> int:
        return sum(contexts() for contexts in self.slots.values())


class _Account:
    """What looks at a container took, as far as it is not paid for by the time since."""

    def __init__(self) -> None:
        self._debt, self._at = 0.0, 0.0
        self.thorough_at = 0.0  # the next search among all clients

    def debt(self, now: float) -> float:
        return max(0.0, self._debt - (now - self._at) / COST)

    def charge(self, took: float, now: float) -> None:
        self._debt, self._at = self.debt(now) + took, now

    def may(self, now: float, *, thorough: bool) -> bool:
        return now >= self.thorough_at if thorough else self.debt(now) < BURST_S


class Finder:
    """One GPU's. Methods are called from any thread; what is found is told from the finder's."""

    def __init__(self, find: Find, tell: Callable[[Found], None]) -> None:
        self._find, self._tell = find, tell
        self._lock = threading.Lock()
        self._rests: dict[tuple[int, int], float] = {}  # of those that left, and may come again
        self._accounts: dict[int, _Account] = {}
        self._said = False
        self._processes: dict[tuple[int, int], _Process] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidegate-find", daemon=True)
        self._thread.start()

    def enter(
        self, tenant: int, slot: int, pid: int, pidfd: int, contexts: Callable[[], int]
    ) -> None:
        """Look for a process from now on; `contexts` tells how many it says that it has.

        A process may come in several slots. `pidfd` is duplicated.
        """
        with self._lock:
            process = self._processes.get((tenant, pid))
            if process is None:
                process = _Process(tenant, pid, os.dup(pidfd))
                # A process that registers again and again is not looked at more often for it.
                process.next_at = self._rests.pop((tenant, pid), 0.0)
                self._processes[tenant, pid] = process
            process.slots[slot] = contexts

    def leave(self, tenant: int, slot: int) -> int | None:
        """Forget a slot; return the process if it was its last. `contexts` is not called again."""
        with self._lock:
            for process in self._processes.values():
                if process.tenant == tenant and process.slots.pop(slot, None) is not None:
                    if process.slots:
                        return None
                    self._drop(process)
                    return process.pid
        return None

    def remove(self, tenant: int) -> None:
        """Forget a container's processes."""
        with self._lock:
            for process in [p for p in self._processes.values() if p.tenant == tenant]:
                self._drop(process)
            self._accounts.pop(tenant, None)

    def saw(self, pids: Iterable[int]) -> None:
        """Hear of processes that are on the GPU by what is not known yet."""
        with self._lock:
            for process in self._processes.values():
                if process.pid in pids:
                    process.is_seen = True

    def close(self) -> None:
        """End the thread; a look that is under way ends first."""
        self._ended.set()
        self._thread.join(CLOSE_S)
        with self._lock:
            for process in list(self._processes.values()):
                self._drop(process)

    def _drop(self, process: _Process) -> None:
        del self._processes[process.tenant, process.pid]
        now = time.monotonic()
        self._rests = {key: at for key, at in self._rests.items() if at > now}
        if process.next_at > now:
            self._rests[process.tenant, process.pid] = process.next_at
        os.close(process.pidfd)

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            while not self._ended.is_set() and (due := self._next(time.monotonic())):
                process, pidfd, n, thorough = due
                try:
                    self._look(process, pidfd, n, thorough=thorough)
                finally:
                    os.close(pidfd)

    def _next(self, now: float) -> tuple[_Process, int, int, bool] | None:
        """Return the process to look at, with a descriptor of it; None where none is due."""
        with self._lock:
            due = []
            for process in self._processes.values():
                if now < process.next_at:
                    continue
                n = process.n_contexts()
                if n == process.n_known and not process.is_seen:
                    continue
                thorough = process.is_seen and process.n_misses > 1
                account = self._account(process.tenant)
                if account.may(now, thorough=thorough):
                    due.append((thorough, account.debt(now), process, n))
            if not due:
                return None
            thorough, _, process, n = min(due, key=lambda one: one[:2])
            try:
                # The process may be dropped during the look, and the number be another file's.
                return process, os.dup(process.pidfd), n, thorough
            except OSError:  # no descriptor is left: at the next poll
                return None

    def _account(self, tenant: int) -> _Account:
        return self._accounts.setdefault(tenant, _Account())

    def _look(self, process: _Process, pidfd: int, n: int, *, thorough: bool) -> None:
        began = time.monotonic()
        held: Sequence[Any] = ()
        is_wanted = bool(n) or process.is_seen
        process.is_seen = False  # the next step says it again
        if is_wanted:
            try:
                held = self._find(process.pid, pidfd, thorough=thorough)
            except (OSError, DriverCallError) as e:
                # Whatever a process does to its descriptors: others are looked for all the same.
                if not self._said:
                    self._said = True
                    log.warning("process-not-looked-at", pid=process.pid, error=str(e))
        ended = time.monotonic()
        key = (process.tenant, process.pid)
        with self._lock:
            account = self._accounts.get(process.tenant, _Account())  # it may be removed
            if thorough:
                account.thorough_at = ended + COST * (ended - began)
            else:
                account.charge(ended - began, ended)
            # It may have registered anew meanwhile; or left, and will.
            now = self._processes.get(key, process)
            if held or not is_wanted:
                now.n_known, now.n_misses = n, 0
            else:
                now.n_misses = process.n_misses + 1
            pause = RETRY_S[min(now.n_misses, len(RETRY_S)) - 1] if now.n_misses else POLL_S
            now.next_at = ended + max(pause, COST * (ended - began))
            if key not in self._processes:
                self._rests[key] = now.next_at
            elif is_wanted:
                # Under the lock: a process that leaves is told of after this, and forgotten last.
                self._tell(Found(process.tenant, process.pid, held, thorough))
