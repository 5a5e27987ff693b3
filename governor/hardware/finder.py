"""Search for the driver clients of containers' processes on a GPU, on a separate thread.

A search takes 7 ms, and longer if a process has many open files, so neither the steering thread nor
the event loop may wait for it. Whatever a container does, searches must take only a small part of
one core. Therefore a process is not searched again for a multiple of the time that its last search
cost. All searches of a container are limited in the same way, except for a short burst, as when its
processes start. Containers with less search time come first. A process is searched when it reports
that its number of contexts has changed, which may be untrue, and when the GPU's trace shows it
although none of its channels is known, which is reliable.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import structlog

from governor.hardware.driver import DriverCallError
from governor.threads import show_name

POLL_S = 0.02
"""Interval at which the context counts that processes report are read, in seconds."""
QUIET_S = 0.2
"""The same interval while no process is new and no search is due. A process that then creates its
first context and works appears in the GPU's trace as well, and is searched because of that."""
NEW_S = 5.0
"""Time after its registration for which a process without a context counts as new, in seconds: most
processes create one within it."""
RETRY_S = (0.02, 0.1, 1.0)
"""Pauses after searches that found nothing, in seconds: a process may report a context a moment
before or after it exists."""
CLOSE_S = 5.0
"""How long a governor that is shutting down waits for a search, in seconds; then the search is
abandoned."""
COST = 20
"""Time for which a process is not searched again, as a multiple of the last search's cost."""
WAITING = 0.1
"""Fraction of a search's duration that its cost includes, in addition to the processor time. Most
of a long search is spent waiting for locks in the driver, for instance while many processes create
contexts; but that wait delays the other searches."""
BURST_S = 0.2
"""Cost of a burst of searches in one container, in seconds; after it, searches cost at most 1/COST
of the time."""

log = structlog.get_logger("tidegate")

Find = Callable[..., Sequence[Any]]
"""`find` of `steering.Hardware`."""


class Found(NamedTuple):
    """Result of a search: what a container's process has on the GPU, if anything."""

    tenant: int
    pid: int
    held: Sequence[Any]
    thorough: bool
    """Whether old clients were probed as well."""


class _Process:
    def __init__(self, tenant: int, pid: int, pidfd: int) -> None:
        self.tenant, self.pid, self.pidfd = tenant, pid, pidfd
        self.slots: dict[int, Callable[[], int]] = {}
        self.forget()

    def forget(self) -> None:
        """Forget the searches that were made."""
        self.n_known = 0  # the context count that it reported when it was found
        self.is_seen = False  # the trace shows it, but none of its channels is known
        self.n_misses = 0
        self.next_at = 0.0

    def n_contexts(self) -> int:
        return sum(contexts() for contexts in self.slots.values())


class _Account:
    """Cost of the searches of a container, less the part paid off by waiting."""

    def __init__(self) -> None:
        self._debt, self._at = 0.0, 0.0
        self.thorough_at = 0.0  # when all clients may be searched again

    def debt(self, now: float) -> float:
        return max(0.0, self._debt - (now - self._at) / COST)

    def charge(self, cost: float, now: float) -> None:
        self._debt, self._at = self.debt(now) + cost, now

    def may(self, now: float, *, thorough: bool) -> bool:
        return now >= self.thorough_at if thorough else self.debt(now) < BURST_S


class Finder:
    """Finder for one GPU. Its methods may be called from any thread; its thread calls `tell`."""

    def __init__(
        self,
        find: Find,
        tell: Callable[[Found], None],
        elsewhere_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Start the thread.

        `elsewhere_s` returns the processor time, in seconds, that searches have taken so far in
        other processes.
        """
        self._find, self._report, self._elsewhere_s = find, tell, elsewhere_s
        self._lock = threading.Lock()
        self._next_searches: dict[
            tuple[int, int], float
        ] = {}  # time of the next search, for processes that have left
        self._accounts: dict[int, _Account] = {}
        self._has_warned = False
        self._processes: dict[tuple[int, int], _Process] = {}
        self._active = threading.Event()
        self._ended = threading.Event()
        self._wake = threading.Event()  # ends a long interval
        self._pause_s = POLL_S
        self._new_until = 0.0
        self._thread = threading.Thread(target=self._run, name="tidegate-find", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Search all processes that have entered, as if they had only just entered."""
        with self._lock:
            for process in self._processes.values():
                process.forget()
            self._next_searches.clear()
            self._accounts.clear()
            self._new_until = time.monotonic() + NEW_S
        self._active.set()
        self._wake.set()

    def stop(self) -> None:
        """Make no more searches until the next `start`."""
        self._active.clear()

    def enter(
        self, tenant: int, slot: int, pid: int, pidfd: int, contexts: Callable[[], int]
    ) -> None:
        """Search a process from now on; `contexts` returns the context count that it reports.

        A process may have several slots. `pidfd` is duplicated.
        """
        with self._lock:
            process = self._processes.get((tenant, pid))
            if process is None:
                process = _Process(tenant, pid, os.dup(pidfd))
                # Registering again must not let a process be searched sooner.
                process.next_at = self._next_searches.pop((tenant, pid), 0.0)
                self._processes[tenant, pid] = process
            process.slots[slot] = contexts
            self._new_until = time.monotonic() + NEW_S
        self._wake.set()

    def leave(self, tenant: int, slot: int) -> int | None:
        """Forget a slot; return its process if it has no other. `contexts` is not called again."""
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
        """Record that processes are using the GPU through channels that are not known yet."""
        with self._lock:
            new = [p for p in self._processes.values() if p.pid in pids and not p.is_seen]
            for process in new:
                process.is_seen = True
        if new:
            self._wake.set()

    def close(self) -> None:
        """Stop the thread, after the search that is under way."""
        self._ended.set()
        self._active.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        with self._lock:
            for process in list(self._processes.values()):
                self._drop(process)

    def _drop(self, process: _Process) -> None:
        del self._processes[process.tenant, process.pid]
        now = time.monotonic()
        self._next_searches = {key: at for key, at in self._next_searches.items() if at > now}
        if process.next_at > now:
            self._next_searches[process.tenant, process.pid] = process.next_at
        os.close(process.pidfd)

    def _run(self) -> None:
        show_name()
        while not self._ended.is_set():
            self._active.wait()  # a GPU may never be steered
            if self._pause_s > POLL_S:
                self._wake.wait(self._pause_s - POLL_S)
            self._wake.clear()
            self._ended.wait(POLL_S)
            while not self._ended.is_set() and (due := self._next(time.monotonic())):
                process, pidfd, n, thorough = due
                try:
                    self._search(process, pidfd, n, thorough=thorough)
                finally:
                    os.close(pidfd)

    def _next(self, now: float) -> tuple[_Process, int, int, bool] | None:
        """Return the process to search next, with a descriptor for it; None if none is due."""
        with self._lock:
            due = []
            self._pause_s = QUIET_S
            for process in self._processes.values() if self._active.is_set() else ():
                if now < process.next_at:
                    self._pause_s = min(self._pause_s, process.next_at - now)
                    continue
                n = process.n_contexts()
                if n == process.n_known and not process.is_seen:
                    if not n and now < self._new_until:
                        self._pause_s = POLL_S
                    continue
                self._pause_s = POLL_S
                thorough = process.is_seen and process.n_misses > 1
                account = self._account(process.tenant)
                if account.may(now, thorough=thorough):
                    due.append((thorough, account.debt(now), process, n))
            if not due:
                return None
            thorough, _, process, n = min(due, key=lambda one: one[:2])
            try:
                # The process may be dropped during the search, and its descriptor's number reused.
                return process, os.dup(process.pidfd), n, thorough
            except OSError:  # no descriptor is left: try again at the next poll
                return None

    def _processor_s(self) -> float:
        return time.thread_time() + self._elsewhere_s()

    def _account(self, tenant: int) -> _Account:
        return self._accounts.setdefault(tenant, _Account())

    def _search(self, process: _Process, pidfd: int, n: int, *, thorough: bool) -> None:
        began, processor_began = time.monotonic(), self._processor_s()
        held: Sequence[Any] = ()
        is_wanted = bool(n) or process.is_seen
        process.is_seen = False  # the next steering step sets it again
        if is_wanted:
            try:
                held = self._find(process.pid, pidfd, thorough=thorough)
            except (OSError, DriverCallError) as e:
                # What one process does to its descriptors must not stop the searches of others.
                if not self._has_warned:
                    self._has_warned = True
                    log.warning("process-search-failed", pid=process.pid, error=str(e))
        ended = time.monotonic()
        cost = max(0.0, self._processor_s() - processor_began) + WAITING * (ended - began)
        key = (process.tenant, process.pid)
        with self._lock:
            account = self._accounts.get(process.tenant, _Account())  # it may have been removed
            if thorough:
                account.thorough_at = ended + COST * cost
            else:
                account.charge(cost, ended)
            # The process may have registered again in the meantime, or may have left and come back.
            now = self._processes.get(key, process)
            if held or not is_wanted:
                now.n_known, now.n_misses = n, 0
            else:
                now.n_misses = process.n_misses + 1
            pause = RETRY_S[min(now.n_misses, len(RETRY_S)) - 1] if now.n_misses else POLL_S
            now.next_at = ended + max(pause, COST * cost)
            if key not in self._processes:
                self._next_searches[key] = now.next_at
            elif is_wanted:
                # Under the lock, so that a concurrent `leave` of this process is reported later.
                self._report(Found(process.tenant, process.pid, held, thorough))
