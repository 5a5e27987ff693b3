"""Work that is done apart from the process that the runtime waits for.

A container's root file system may be one that stalls: FUSE, whose server is a process, or one of a
network. A process that has asked such a server for something waits in the kernel until the server
answers, and no signal ends that wait: neither the one of a deadline nor SIGKILL. Therefore a
process of its own looks into the root. The one that the runtime waits for never does, and
abandons the other one when the deadline has passed.

An abandoned process takes back what it has made as soon as the file system answers, and ends. It
has no descriptor of the runtime's: runtimes in Go wait until every process has closed a hook's
outputs.

This module imports next to nothing, because what is in memory before the fork is copied after it.
"""

import fcntl
import posix  # os, without its classes
import select

TYPE_CHECKING = False  # typing itself takes 3 ms
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable

    from oci_hook.errors import MountError
else:
    import _signal as signal  # without the names of numbers, which take 4 ms

# Seconds beyond a deadline. A process that is not stuck ends by then, with a line that says more.
GRACE = 2.0
BRIEFLY = 1.0  # seconds for work that may be cut short, and for a process to be ended by SIGKILL
LOST = 255  # the status of a process that did not come to an end of its work
ANSWERS = "see what serves that file system (FUSE, NFS), and start the container once it answers"

caller = 0
"""The process that waits for this one; its parent is the runtime."""
link = -1
"""The end of a pipe: the process that waits has the other one."""


def follow(pipe: int) -> None:
    """Have SIGALRM sent when the process that waits ends; OSError where it has ended already.

    Nothing is ever written to the pipe, so a signal for it says that its other end is closed.
    PR_SET_PDEATHSIG does not do: the kernel forgets it when a process changes its user.
    """
    global link  # noqa: PLW0603 - a process has one
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGALRM)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, posix.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, posix.O_ASYNC | posix.O_NONBLOCK)
    link = pipe
    if is_abandoned():
        raise BrokenPipeError


def is_abandoned() -> bool:
    """Tell whether the process that waited for this one has ended."""
    if link < 0:
        return False
    try:
        return posix.read(link, 1) == b""
    except BlockingIOError:
        return False


def overdue(seconds: float, who: str) -> "MountError":
    """Say that a process was abandoned."""
    from oci_hook.errors import MountError

    return MountError(
        f"{who} did not finish within {seconds:g} s, and could not be interrupted:"
        " most likely the container's root file system does not answer",
        hint=ANSWERS,
    )


def run_apart(work: "Callable[[], int]", seconds: float, who: str = "the hook") -> int:
    """Do work in another process, and give its status; MountError where that outlasts its deadline.

    `seconds` is the deadline that the work sets itself. A child of the fork server is that other
    process already.
    """
    if link >= 0:
        return work()
    reading, writing = posix.pipe2(posix.O_CLOEXEC)
    outputs = [posix.memfd_create("tidegate-output") for _ in range(2)]
    own = posix.getpid()
    try:
        pid = posix.fork()
    except OSError as e:
        raise _lost(f"no process can be made for {who}: {e.strerror}") from e
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
            raise overdue(seconds, who)
        if status < 0 or status == LOST:
            raise _lost(f"the process that works for {who} did not come to its end ({status})")
        _pass_on(outputs)
    finally:
        posix.close(writing)
        for fd in outputs:
            posix.close(fd)
    return status


def run_briefly(work: "Callable[[], None]") -> None:
    """Do work that may be cut short in another process, which has no descriptor.

    After a second it is killed, and left alone where that does not end it. It is waited for because
    crun adopts what a hook leaves behind, and misses the end of the hook where both end at once.
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
        message, hint="see the kernel's log for what is short, and start the container again"
    )


def _is_stuck(pid: int) -> bool:
    """Tell whether a process that was killed is in a wait that no signal ends."""
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return file.read(4096).rpartition(b") ")[2][:1] == b"D"


def _wait_for(pid: int, seconds: float) -> int | None:
    """Wait for a child, and give its status; None where it has not ended in time."""
    pidfd = posix.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], seconds)[0]:
            return None
    finally:
        posix.close(pidfd)
    return posix.waitstatus_to_exitcode(posix.waitpid(pid, 0)[1])


def _leave(parent: int, pipe: int, outputs: list[int]) -> None:
    """Keep nothing of the process that waits but the pipe, and files in place of its outputs."""
    global caller  # noqa: PLW0603
    caller = parent
    null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
    for number, fd in enumerate((null, *outputs)):
        posix.dup2(fd, number)
    posix.closerange(3, pipe)
    posix.closerange(pipe + 1, 1 << 30)
    follow(pipe)


def _pass_on(outputs: list[int]) -> None:
    """Write to the outputs what was written in their place."""
    for number, fd in enumerate(outputs, 1):
        data = memoryview(posix.pread(fd, posix.fstat(fd).st_size, 0))
        try:
            while data:
                data = data[posix.write(number, data) :]
        except OSError:
            if number == 1:
                raise  # of standard error the log has the line, too
