"""Find out whether the driver calls have the effect on a GPU that the policy relies on.

The calls are not documented by NVIDIA, and whether they work can depend on the GPU, the driver and
a virtual machine's host. So before a GPU is steered for the first time, two processes work on it,
and are switched off and on, given unequal time slices, and looked for in the trace. That takes one
or two seconds, and twice the memory of a context. The result is kept in the governor's state
directory, and is valid for the GPU and the driver's version.

The driver kills the processes' channels when they end, so nothing is left if this process dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from governor.hardware.child import driver_environment, module_command
from governor.hardware.driver import DriverCallError
from governor.hardware.steering import Hardware

VERSION = 1
"""Version of this test; results from other versions are ignored."""
NAME = "steering.json"
"""File with the results, in the state directory."""
WITHIN_S = 25.0
"""Longest duration of a test, in seconds."""
POLL_S = 0.1
"""Interval at which a waiting test checks whether the governor is shutting down, in seconds."""
CLOSE_S = 2.0
"""Longest wait for the end of a killed process, which a driver that hangs may delay, in seconds."""
ANSWER_S = 5.0
"""Longest wait for some tens of milliseconds of work, in seconds."""
WORK_MS = 40
OFF_S = 0.1
"""Time for which a process with WORK_MS of work is switched off, in seconds: more than twice the
time in which the work would otherwise end."""
LATE_NS = 2_000_000
"""Time for which a process may still work after the call that switches it off, in ns."""
HELD = 1.5
"""WORK_MS of work that takes longer than this multiple of WORK_MS was interrupted."""
N_TRIES = 5
RACE_MS = 60
SLICE_NS = (8_000_000, 1_000_000)
"""Time slices of two processes with RACE_MS of work each. The first process takes 9/8 of RACE_MS,
and the second one twice RACE_MS; with equal slices, both take equally long."""
AHEAD = 1.5
"""Longest time that the first process may take, and shortest time that the second one must take, as
a multiple of RACE_MS."""
TRACED = 0.25
"""Smallest fraction of the work that the trace must show. The trace has no record of a context that
has the GPU to itself until another one takes the GPU over."""


class WithoutEffectError(Exception):
    """A call had no effect; the message is one line."""


class NotProbedError(Exception):
    """The test could not be run; the message is one line."""


class Work(NamedTuple):
    """Work that has ended: how long it took, and its end on the monotonic clock, in ns."""

    ns: int
    end: int


class Worker:
    """A process that works on the GPU when told to; a context manager that ends it."""

    def __init__(self, library: str, uuid: str, until: float, ending: Callable[[], bool]) -> None:
        """Start the process.

        A wait for an answer ends at `until`, a time on the monotonic clock, or when `ending`
        returns true.
        """
        self._until, self._ending = until, ending
        self._process = subprocess.Popen(
            module_command("governor.hardware.probe_work", [library, uuid]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=driver_environment(Path(library)),
        )
        self._buffer = b""
        try:
            self.pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._end()
            raise

    @property
    def pid(self) -> int:
        """The pid of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self.pidfd)
        self._end()

    def _end(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None  # noqa: S101
            with contextlib.suppress(OSError):
                pipe.close()

    def start(self, ms: float) -> None:
        """Start work that takes `ms` milliseconds if the process has the GPU to itself."""
        assert self._process.stdin is not None  # noqa: S101
        try:
            self._process.stdin.write(b"%g\n" % ms)
            self._process.stdin.flush()
        except OSError as e:
            raise NotProbedError("the test's worker process has ended") from e

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the process's next answer, or None if there is none within `timeout_s` seconds."""
        assert self._process.stdout is not None  # noqa: S101
        fd = self._process.stdout.fileno()
        deadline = min(time.monotonic() + timeout_s, self._until)
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if not select.select([fd], [], [], max(0.0, min(left, POLL_S)))[0]:
                if self._ending():
                    raise NotProbedError("the governor is stopping")
                if left > POLL_S:
                    continue
                if deadline == self._until:
                    raise NotProbedError("the test took too long")
                return None
            data = os.read(fd, 1 << 12)
            if not data:
                raise NotProbedError("the test's worker process has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NotProbedError(
                f"a worker process of the test cannot use the GPU: {answer['error']}"
            )
        return answer

    def wait(self) -> Work:
        """Wait until the process's work has ended, and return that work."""
        answer = self.answer(ANSWER_S)
        if answer is None:
            raise WithoutEffectError(
                f"a few milliseconds of work did not end within {ANSWER_S:g} s"
            )
        return Work(int(answer["ns"]), int(answer["end"]))


def probe(
    hardware: Hardware[Any],
    library: str,
    uuid: str,
    computing: Callable[[], Collection[int]],
    ending: Callable[[], bool],
) -> None:
    """Test the calls on a GPU that no other process is using, with the libcuda at `library`.

    `computing` returns the pids of the processes that compute on the GPU, and `ending` whether the
    governor is shutting down. Raise WithoutEffectError if a call has no effect, NotProbedError if
    the test cannot be run or has to stop, and the errors from `hardware` and `computing`.
    """
    until = time.monotonic() + WITHIN_S
    own: set[int] = set()

    def require_alone() -> None:
        # While other processes work, the test's work takes longer, as if it were interrupted.
        if not own >= set(computing()):
            raise NotProbedError("other processes are using it")

    require_alone()
    with (
        Worker(library, uuid, until, ending) as first,
        Worker(library, uuid, until, ending) as second,
    ):
        own |= {first.pid, second.pid}
        try:
            _check(hardware, (first, second), require_alone)
        except (WithoutEffectError, DriverCallError) as e:
            # A service manager may end all processes at once.
            if ending() or not (first.is_alive and second.is_alive):
                raise NotProbedError("a worker process of the test has ended") from e
            require_alone()
            raise


def _check(
    hardware: Hardware[Any], workers: Sequence[Worker], require_alone: Callable[[], None]
) -> None:
    for worker in workers:
        worker.answer(WITHIN_S)
    for worker in workers:  # one by one: at first, each measures its kernel alone on the GPU
        worker.start(1)
        worker.wait()
    held = [hardware.find(worker.pid, worker.pidfd) for worker in workers]
    if not all(held):
        raise WithoutEffectError("the channels of a process were not found")
    hardware.used_ns()
    for worker, its in zip(workers, held, strict=True):
        _switch(hardware, worker, its)
        require_alone()
    for order in (0, 1), (1, 0):
        _race(hardware, [workers[i] for i in order], [held[i] for i in order])
        require_alone()
    _check_trace(hardware, workers)


def _switch(hardware: Hardware[Any], worker: Worker, held: Sequence[Any]) -> None:
    """Switch a process off in the middle of its work, and on again."""
    n_worked_on = 0
    for _ in range(N_TRIES):
        worker.start(WORK_MS)
        time.sleep(WORK_MS / 4 / 1000)
        hardware.switch(held, on=False)
        off_ns = time.monotonic_ns()
        try:
            time.sleep(OFF_S)
            on_ns = time.monotonic_ns()
        finally:
            hardware.switch(held, on=True)
        work = worker.wait()
        n_worked_on += off_ns + LATE_NS < work.end < on_ns
        if work.end >= on_ns and work.ns > HELD * WORK_MS * 1e6:
            return
        # The process continued, or was late: its work had ended before, or had not begun.
    if n_worked_on == N_TRIES:
        raise WithoutEffectError("a process that was switched off continued to work")
    raise NotProbedError("the test's worker processes had to wait for a CPU")


def _race(
    hardware: Hardware[Any], workers: Sequence[Worker], held: Sequence[Sequence[Any]]
) -> None:
    """Give the first process longer slices than the second; both have the same work."""
    for its, ns in zip(held, SLICE_NS, strict=True):
        n_groups = sum(one.n_groups for one in its)
        for one in its:
            hardware.set_slice(one, ns // n_groups)
    took = [0, 0]
    for _ in range(N_TRIES):
        for worker in workers:
            worker.start(RACE_MS)
        took = [worker.wait().ns for worker in workers]
        if took[0] <= AHEAD * RACE_MS * 1e6 < took[1]:
            return
        # Either the slices have no effect, or a process began late.
    shown = " and ".join(f"{ns / 1e6:.0f}" for ns in took)
    ratio = SLICE_NS[0] // SLICE_NS[1]
    raise WithoutEffectError(
        f"time slices of {ratio} to 1 had no effect: {RACE_MS} ms of work took {shown} ms"
    )


def _check_trace(hardware: Hardware[Any], workers: Sequence[Worker]) -> None:
    used = hardware.used_ns()
    if used and not any(worker.pid in used for worker in workers):
        raise WithoutEffectError(
            "the trace has the PIDs of another namespace: run the governor in the host's PID"
            " namespace"
        )
    for worker in workers:
        expected = (WORK_MS + 2 * RACE_MS) * 1e6
        if used.get(worker.pid, 0) < TRACED * expected:
            raise WithoutEffectError(
                f"the trace shows only {used.get(worker.pid, 0) / 1e6:.0f} ms of"
                f" {expected / 1e6:.0f} ms of work"
            )


class Results:
    """The results of earlier tests, in a file."""

    _writing = threading.Lock()  # one for all instances: a node's GPUs are tested at once

    def __init__(self, directory: str, driver: str | None) -> None:
        self._path = Path(directory) / NAME
        self._driver = driver

    def get(self, uuid: str) -> str | None:
        """Return why a GPU cannot be steered, empty if it can; None if that is not known."""
        found = self._read().get(uuid)
        if not isinstance(found, dict):
            return None
        is_ours = found.get("version") == VERSION and found.get("driver") == self._driver
        why = found.get("why")
        return why if is_ours and isinstance(why, str) else None

    def put(self, uuid: str, why: str) -> None:
        """Keep a result; raise OSError if that is not possible."""
        with self._writing:
            results = self._read()
            results[uuid] = {"version": VERSION, "driver": self._driver, "why": why}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(results))
            new.replace(self._path)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
