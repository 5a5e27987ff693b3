"""Runs work in a separate process, so that a root file system cannot block the runtime.

A container's root file system may stall if it is a network file system or FUSE, where a server
process answers each request. A process that waits for such an answer is in uninterruptible
sleep, which no signal ends: neither SIGKILL nor a deadline's SIGALRM. Therefore only a separate
process, the worker, accesses the root. The process that the runtime waits for never does, and
abandons the worker when the deadline has passed.

An abandoned worker removes what it has created as soon as the file system answers, and then ends.
It has none of the runtime's descriptors, because runtimes in Go wait until every process has closed
a hook's outputs.

This module imports as little as possible: memory that is in use before the fork is copied after it.
"""

import fcntl
import posix  # os, without its classes
import select

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from oci_hook.errors import MountError
else:
    import _signal as signal  # without signal's enums, which take 4 ms

# Seconds that a worker gets beyond its deadline. A worker that is not stuck ends within that time,
# with a more specific error line.
GRACE = 2.0
BRIEFLY = 1.0  # seconds for work that may be cut short, and for SIGKILL to take effect
LOST = 255  # exit status of a worker that did not complete its work
ANSWERS = "check that file system's server (FUSE, NFS), and start the container once it answers"

caller = 0
"""Pid of the process that is waiting for this one, a child of the runtime; 0 if there is none."""
link = -1
"""This process's end of a pipe to the waiting process; -1 if no process is waiting."""


def follow(pipe: int) -> None:
    """Have the kernel send SIGALRM when the waiting process ends. Raise OSError if it has ended.

    Nothing is ever written to the pipe, so a signal for it means that its other end is closed.
    PR_SET_PDEATHSIG is not sufficient: the kernel clears it when a process changes its user.
    """
    global link  # noqa: PLW0603 - one per process
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGALRM)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, posix.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, posix.O_ASYNC | posix.O_NONBLOCK)
    link = pipe
    if is_abandoned():
        raise BrokenPipeError


def is_abandoned() -> bool:
    """Return whether the process that was waiting for this one has ended."""
    if link < 0:
        return False
    try:
        return posix.read(link, 1) == b""
    except BlockingIOError:
        return False


def overdue(seconds: float, subject: str) -> "MountError":
    """Return the error that reports an abandoned worker; `subject` is its name in the message."""
    from oci_hook.errors import MountError

    return MountError(
        f"{subject} did not finish within {seconds:g} s, and could not be interrupted:"
        " most likely the container's root file system does not answer",
        hint=ANSWERS,
    )


def run_apart(work: "Callable[[], int]", seconds: float, subject: str = "the hook") -> int:
    """Do work in a worker; return its status. Raise MountError if the work is late or incomplete.

    `seconds` is the deadline that the work itself sets. A child of the fork server is a worker
    already, so it does the work itself.
    """
    if link >= 0:
        return work()
    reading, writing = posix.pipe2(posix.O_CLOEXEC)
    outputs = [posix.memfd_create("tidegate-output") for _ in range(2)]
    own = posix.getpid()
    try:
        pid = posix.fork()
    except OSError as e:
        raise _lost(f"cannot create a process for {subject}: {e.strerror}") from e
    if pid == 0:
        own_status = LOST
        try:
            _leave(own, reading, outputs)
            own_status = work()
        finally:
            posix._exit(own_status)  # noqa: SLF001
    try:
        posix.close(reading)
        status = _wait_for(pid, seconds + GRACE)
        if status is None:
            raise overdue(seconds, subject)
        if status < 0 or status == LOST:
            raise _lost(
                f"the worker process for {subject} did not complete its work (status {status})"
            )
        _pass_on(outputs)
    finally:
        posix.close(writing)
        for fd in outputs:
            posix.close(fd)
    return status


def run_briefly(work: "Callable[[], None]") -> None:
    """Do work in another process, which has no descriptors and may be cut short.

    The process is killed after a second, and abandoned if it is stuck. The caller waits for it
    because crun adopts the processes that a hook leaves behind, and misses the end of the hook if
    both end at the same time.
    """
    try:
        pid = posix.fork()
        if pid == 0:
            try:
                posix.closerange(0, 1 << 30)
                work()
            finally:
                posix._exit(0)  # noqa: SLF001
        if _wait_for(pid, BRIEFLY) is None:
            posix.kill(pid, signal.SIGKILL)
            while _wait_for(pid, BRIEFLY) is None and not _is_stuck(pid):
                pass
    except OSError:
        return


def _lost(message: str) -> "MountError":
    from oci_hook.errors import MountError

    return MountError(
        message,
        hint="see the kernel log to find which resource is exhausted, and start the container"
        " again",
    )


def _is_stuck(pid: int) -> bool:
    """Return whether a process is in uninterruptible sleep."""
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return file.read(4096).rpartition(b") ")[2][:1] == b"D"


def _wait_for(pid: int, seconds: float) -> int | None:
    """Wait for a child and return its status; None if it has not ended in time."""
    pidfd = posix.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], seconds)[0]:
            return None
    finally:
        posix.close(pidfd)
    return posix.waitstatus_to_exitcode(posix.waitpid(pid, 0)[1])


def _leave(parent: int, pipe: int, outputs: list[int]) -> None:
    """Close all inherited descriptors except the pipe; files replace the standard outputs."""
    global caller  # noqa: PLW0603
    caller = parent
    null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
    for number, fd in enumerate((null, *outputs)):
        posix.dup2(fd, number)
    posix.closerange(3, pipe)
    posix.closerange(pipe + 1, 1 << 30)
    follow(pipe)


def _pass_on(outputs: list[int]) -> None:
    """Copy what the worker wrote to the files in `outputs` to the standard outputs."""
    for number, fd in enumerate(outputs, 1):
        data = memoryview(posix.pread(fd, posix.fstat(fd).st_size, 0))
        try:
            while data:
                data = data[posix.write(number, data) :]
        except OSError:
            if number == 1:
                raise  # a lost error line is not fatal: the log has it, too
