"""Program for the process that suspends and resumes a container's processes.

It makes the driver's checkpoint calls, which copy the contents of a process's GPU memory to host
memory and free everything that the process has on the GPU, including its contexts. The calls take
seconds, and their target may never answer, so they are made by a process that can be killed.

It is started with the pid of its parent, the path of a libcuda, `suspend` or `resume`, the time in
milliseconds within which submitted work has to end, and the processes as PID:START. It writes a
line of JSON for each process that it has dealt with, and at the end one with `done` or `error`. If
a process cannot be suspended, the others are resumed, and then a line with `undone` is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator

from governor.members import is_readable
from governor.processes import Identity, open_process
from oci_hook.kernel import die_with_parent

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
"""States of a process (CUprocessState in cuda.h)."""

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NOT_READY = 1, 2, 3, 600
NOT_SUPPORTED = 801


class CheckpointError(Exception):
    """A process could not be suspended or resumed; the message is one line.

    `busy` is true if its work did not end in time.
    """

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


class LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved", ctypes.c_ubyte * 60))


class CheckpointCalls:
    """The checkpoint calls of a libcuda."""

    def __init__(self, library: str) -> None:
        self._cuda = ctypes.CDLL(library)
        if not hasattr(self._cuda, "cuCheckpointProcessLock"):
            raise CheckpointError(
                "the driver has no checkpoint calls, which were introduced in version 570"
            )
        if status := self._cuda.cuInit(0):
            raise CheckpointError(f"cuInit returned {self._name(status)}")

    def _name(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(status, ctypes.byref(text))
        return (text.value or str(status).encode()).decode(errors="replace")

    def state(self, pid: int) -> int | None:
        """Return the state of a process; None if it does not use CUDA."""
        found = ctypes.c_int()
        status = self._cuda.cuCheckpointProcessGetState(pid, ctypes.byref(found))
        if status in (INVALID_VALUE, NOT_INITIALIZED):
            return None
        if status:
            raise CheckpointError(f"process {pid}: its state is not known: {self._name(status)}")
        return found.value

    def lock(self, pid: int, wait_ms: int) -> None:
        """Make a process's further calls wait, and return once its submitted work has ended."""
        status = self._cuda.cuCheckpointProcessLock(pid, ctypes.byref(LockArguments(wait_ms)))
        if status == NOT_READY:
            what = f"its work did not end within {wait_ms / 1000:g} s"
            raise CheckpointError(f"process {pid}: {what}", busy=True)
        self._require(pid, "locked", status)

    def checkpoint(self, pid: int) -> None:
        """Move a locked process's GPU memory to host memory, and free what it has on the GPU."""
        self._require(pid, "suspended", self._cuda.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int) -> None:
        """Undo `checkpoint`; the process stays locked."""
        status = self._cuda.cuCheckpointProcessRestore(pid, None)
        if status == OUT_OF_MEMORY:
            raise CheckpointError(f"process {pid}: its GPU has no room for it")
        self._require(pid, "resumed", status)

    def unlock(self, pid: int) -> None:
        """Undo `lock`."""
        self._require(pid, "unlocked", self._cuda.cuCheckpointProcessUnlock(pid, None))

    def _require(self, pid: int, what: str, status: int) -> None:
        if status == NOT_SUPPORTED:
            raise CheckpointError(f"process {pid}: the driver cannot checkpoint what it uses")
        if status:
            raise CheckpointError(f"process {pid} cannot be {what}: {self._name(status)}")


def _say(**words: object) -> None:
    print(json.dumps(words), flush=True)


@contextlib.contextmanager
def _alive(processes: list[Identity]) -> Iterator[dict[int, int]]:
    """Yield the pidfds of the processes that have not ended, by pid."""
    with contextlib.ExitStack() as stack:
        found: dict[int, int] = {}
        for process in processes:
            pidfd = open_process(process)
            if pidfd is not None:
                stack.callback(os.close, pidfd)
                found[process.pid] = pidfd
        yield found


class Checkpointing:
    """Suspends or resumes a set of processes; one that ends in the meantime is left out."""

    def __init__(self, driver: CheckpointCalls, alive: dict[int, int]) -> None:
        self._driver, self._alive = driver, alive

    def _state(self, pid: int) -> int | None:
        """Return the state of a process; None if it does not use CUDA, or has ended."""
        # A process that has ended keeps its pid until its parent has waited for it. From then on
        # another process may have the pid.
        if is_readable(self._alive[pid]):
            return None
        try:
            return self._driver.state(pid)
        except CheckpointError:
            # If no process has the pid, the driver returns CUDA_ERROR_OPERATING_SYSTEM (580).
            if is_readable(self._alive[pid]):
                return None
            raise

    def suspend(self, wait_ms: int) -> None:
        """Suspend all; on CheckpointError, all but those that failed earlier run again."""
        lost: list[int] = []
        try:
            lost += (pid for pid in self._alive if self._state(pid) == FAILED)
            if lost:
                raise CheckpointError(f"process {lost[0]}: an earlier attempt failed permanently")
            for pid in self._alive:
                self._step(pid, RUNNING, self._driver.lock, wait_ms)
            for pid in self._alive:
                if self._step(pid, LOCKED, self._driver.checkpoint):
                    _say(pid=pid)
        except CheckpointError as e:
            try:
                self.resume(lost)
            except CheckpointError as again:
                raise CheckpointError(f"{e}; then {again}") from e
            _say(undone=True)
            raise

    def resume(self, lost: Collection[int] = ()) -> None:
        """Resume all but `lost`, which failed permanently.

        If that fails for some, resume the others and then raise CheckpointError.
        """
        errors: list[CheckpointError] = []
        failed = set(lost)
        for before, call in (
            (CHECKPOINTED, self._driver.restore),
            (LOCKED, self._driver.unlock),
        ):
            for pid in self._alive:
                if pid in failed:
                    continue
                try:
                    if self._state(pid) == FAILED:
                        raise CheckpointError(f"process {pid}: it failed permanently")
                    if self._step(pid, before, call) and before == LOCKED:
                        _say(pid=pid)
                except CheckpointError as e:
                    errors.append(e)
                    failed.add(pid)
        if errors:
            raise errors[0]

    def _step(self, pid: int, before: int, call: Callable[..., None], *arguments: int) -> bool:
        """Make a call for a process that is in state `before`; return whether the call was made."""
        if self._state(pid) != before:
            return False
        try:
            call(pid, *arguments)
        except CheckpointError:
            if not is_readable(self._alive[pid]):
                raise
        return True


def main() -> None:
    """Suspend or resume the processes in the arguments."""
    die_with_parent()
    parent, library, what, wait_ms, *named = sys.argv[1:]
    if os.getppid() != int(parent):
        return  # the governor ended before `die_with_parent` was called
    processes = [Identity(*map(int, one.split(":"))) for one in named]
    with contextlib.ExitStack() as stack:
        try:
            work = Checkpointing(CheckpointCalls(library), stack.enter_context(_alive(processes)))
        except (CheckpointError, OSError) as e:
            _say(undone=True)
            _say(error=str(e))
            return
        try:
            work.suspend(int(wait_ms)) if what == "suspend" else work.resume()
        except CheckpointError as e:
            _say(error=str(e), busy=e.busy)
        else:
            _say(done=True)
