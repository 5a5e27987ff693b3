"""The fork server: an interpreter with the hook's modules loaded, which forks for each start.

Starting an interpreter and importing the hook takes 25 ms, and would happen several times for each
container. The C programs in `oci_hook/front` connect to this server instead. One of its children
does the work of the Python script, with the caller's standard input, working directory and command
line, and with its outputs redirected to files. Everything also works without the server, but more
slowly.

A caller is served if the script would behave in the server as it would in the caller: the caller is
root, and has the same version and installation, the same mount, PID and user namespaces and the
same root directory. Any other caller is declined and executes the script. A child ends with its
caller: the kernel sends it a signal when the caller's end of a pipe closes. That happens when a
runtime gives up on a hook and kills it, or when the caller abandons a child that is stuck
(`oci_hook.apart`).

Spare children are forked in advance and accept a caller themselves, so no start waits for a fork.
They end when the server ends, which closes a pipe that they watch.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import select
import signal
import socket
import struct
import sys
import time

import oci_hook.apart
import oci_hook.apply
import oci_hook.claims
import oci_hook.cleanup
import oci_hook.client
import oci_hook.crun
import oci_hook.edits
import oci_hook.entry
import oci_hook.files
import oci_hook.gvisor
import oci_hook.image
import oci_hook.kernel
import oci_hook.ldcache
import oci_hook.light_ctypes
import oci_hook.light_json
import oci_hook.log
import oci_hook.main
import oci_hook.manifest
import oci_hook.plan
import oci_hook.quick
import oci_hook.request
import oci_hook.reserve
import oci_hook.runtime
import oci_hook.start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCRIPTS = os.path.dirname(os.path.realpath(__file__))
SOCKET = "forkserver.sock"
LOCK = "forkserver.lock"
USAGE = "usage: tidegate-forkserver [--wait] [--runtime-dir DIR]"
MESSAGE_LIMIT = 32 << 10  # bytes of a request, as in front/handover.c
N_DESCRIPTORS = 5  # standard input, output and error, the working directory, one end of a pipe
REQUEST_S = 1.0  # seconds; a caller sends its request at once
FINISH_S = 30  # seconds that children have to finish when the server is stopped
NAMESPACES = ("ns/mnt", "ns/pid", "ns/user", "root")  # in /proc/PID
# Maximum number of children. The largest config.json takes 48 MiB in one of them. In a cluster, the
# server's container has 1 GiB for all of them; beyond that, it would be killed with all its
# children.
MAX_CHILDREN = 16
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
N_SPARE = 2  # children that wait for callers; further callers wait until more are forked
PAUSE_S = 0.1  # seconds until the next attempt if there was no memory, descriptor or child left
BACKLOG = 512
PEER = struct.Struct("=iII")  # struct ucred: pid, uid, gid
REPORT = struct.Struct("=i?")  # a child's report: its pid, and whether its code is up to date
BEGUN = b"\1"
DECLINED = b"\0"


class Declined(Exception):  # noqa: N818 - not an error: the caller executes the script
    """The server does not serve this request."""


def _hook(arguments: list[str]) -> int:
    return oci_hook.entry.run(arguments)


ROLES: dict[str, Callable[[list[str]], int]] = {
    "hook": _hook,
    "runtime": oci_hook.runtime.make_ready,
    "deleted": oci_hook.runtime.after_delete,
}


def _version() -> str:
    """Return the version of this code; a caller from the same installation has the same version."""
    path = os.path.join(os.path.dirname(os.path.dirname(__file__)), "governor/__init__.py")
    with open(path, encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(" = ")
            if name == "VERSION":
                return value.strip().strip('"')
    return ""


class Sources:
    """The files of the loaded code: the server stops once they have been replaced on disk."""

    def __init__(self) -> None:
        own = os.path.dirname(__file__)
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        self.files = sorted({file for file in files if file and os.path.dirname(file) == own})
        self.known = self._look()

    def _look(self) -> list[tuple[int, int, int]]:
        found = []
        for file in self.files:
            status = os.stat(file)
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return found

    def are_current(self) -> bool:
        """Return whether the files are still those that were loaded."""
        try:
            return self._look() == self.known
        except OSError:
            return False


def _namespaces(pid: str) -> list[tuple[int, int]]:
    found = (os.stat(f"/proc/{pid}/{name}") for name in NAMESPACES)
    return [(status.st_dev, status.st_ino) for status in found]


def read_request(caller: socket.socket, version: str) -> list[str]:
    """Receive a request: role, program and arguments. Raise Declined if it is not served here.

    A caller sends its version, the directory of its scripts, the role, the path by which it was
    executed, and its arguments, each followed by a NUL.

    This sets `oci_hook.apart.caller`.
    """
    pid, uid, _ = PEER.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    if uid != os.geteuid():
        raise Declined
    data = caller.recv(MESSAGE_LIMIT + 1)
    said, *words = [os.fsdecode(word) for word in data.split(b"\0")[:-1]]
    if said != version or len(words) < 3 or words.pop(0) != SCRIPTS or words[0] not in ROLES:
        raise Declined
    if not words[1].startswith("/") or _namespaces(str(pid)) != _namespaces("self"):
        raise Declined
    oci_hook.apart.caller = pid
    return words


def read_descriptors(caller: socket.socket) -> list[int]:
    """Receive the caller's descriptors. Raise OSError if the caller has given up."""
    _, fds, flags, _ = socket.recv_fds(caller, 1, N_DESCRIPTORS)
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) != N_DESCRIPTORS:
        raise OSError(errno.EPROTO, "the caller sent no descriptors")
    return fds


def serve_one(caller: socket.socket, version: str) -> None:
    """Serve a caller in this child: do its work, and send it the exit status."""
    try:
        caller.settimeout(REQUEST_S)
        try:
            role, program, *arguments = read_request(caller, version)
        except Declined:
            caller.send(DECLINED)
            return
        caller.send(BEGUN)
        *standard, directory, pipe = read_descriptors(caller)
        caller.settimeout(None)
        oci_hook.apart.follow(pipe)
    except OSError:
        return
    for number, fd in enumerate(standard):
        if number or role == "hook":  # the other roles do not read standard input
            os.dup2(fd, number)
    os.fchdir(directory)
    for fd in (*standard, directory):
        os.close(fd)
    os.umask(0o022)
    sys.argv = [program, *arguments]
    status = 70
    try:
        status = ROLES[role](arguments)
    except SystemExit as e:
        status = e.code if type(e.code) is int else 1
    finally:
        caller.send(bytes((status & 0xFF,)))


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


class ForkingServer:
    """Listens on the socket and forks the children that serve callers."""

    def __init__(self, runtime_dir: str, *, wait: bool = False) -> None:
        """Start listening. Raise OSError if another server is running or the directory is missing.

        With `wait`, wait until the other server has ended.
        """
        self.version = _version()
        self.sources = Sources()
        self.stopping = False
        self.spare: set[int] = set()
        self.children: set[int] = set()  # including the spare ones
        self.lock = os.open(
            f"{runtime_dir}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(self.lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        self.path = f"{runtime_dir}/{SOCKET}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        temporary = f"{self.path}.new"
        _remove(temporary)
        before = os.umask(0o177)
        try:
            self.listener.bind(temporary)
        finally:
            os.umask(before)
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)  # another child may have accepted the caller already
        self.reports, self.report_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.signals, self.signalled = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.ending, self.end = os.pipe2(os.O_CLOEXEC)
        os.rename(temporary, self.path)

    def run(self) -> None:
        """Serve until SIGTERM, or until the code on disk differs from what is loaded."""
        # The pipe wakes `poll` no matter when a signal arrives, or in which thread.
        signal.set_wakeup_fd(self.signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.collect()
        gc.freeze()  # otherwise the first collection in a child copies every page
        gc.disable()
        waiting = select.poll()
        for fd in (self.reports, self.signals):
            waiting.register(fd, select.POLLIN)
        while not self.stopping:
            if not self._keep_spares():
                if not self._has_room(waiting):
                    self._decline()
                continue
            waiting.poll()
            self._read_pipes()  # before _reap: later signals wake the next poll
            self._reap()
        self._finish()

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _keep_spares(self) -> bool:
        """Fork missing spare children; return whether any child is waiting for a caller."""
        while len(self.spare) < N_SPARE and len(self.children) < MAX_CHILDREN and self._fork():
            pass
        return bool(self.spare)

    def _has_room(self, waiting: select.poll) -> bool:
        """If all children are busy, wait until one ends (usually 20 ms); return whether one did."""
        if len(self.children) < MAX_CHILDREN:
            return False
        waiting.poll(PAUSE_S * 1000)
        self._read_pipes()
        self._reap()
        return len(self.children) < MAX_CHILDREN

    def _decline(self) -> None:
        """Close the waiting connections: there is no child for them, so callers run the script."""
        try:
            while True:
                self.listener.accept()[0].close()
        except OSError:
            time.sleep(PAUSE_S)
        self._reap()

    def _reap(self) -> None:
        try:
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                self.spare.discard(pid)
                self.children.discard(pid)
        except ChildProcessError:
            return

    def _read_pipes(self) -> None:
        """Read the children's reports, and discard the bytes that signals wrote."""
        for fd in (self.signals, self.reports):
            try:
                data = os.read(fd, REPORT.size << 10)
            except BlockingIOError:
                continue
            if fd == self.reports:
                for pid, current in REPORT.iter_unpack(data):
                    self.spare.discard(pid)
                    self.stopping |= not current

    def _fork(self) -> bool:
        try:
            child = os.fork()
        except OSError:
            return False
        if child:
            self.spare.add(child)
            self.children.add(child)
            return True
        try:
            signal.set_wakeup_fd(-1)
            # Python would report an error for a signal that arrives between the change of the
            # kernel's handler and the change of Python's own.
            signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
            for number in HANDLED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            for fd in (self.lock, self.end, self.reports, self.signals, self.signalled):
                os.close(fd)
            caller = self._accept()
            self.listener.close()
            if caller:
                serve_one(caller, self.version)
        finally:
            os._exit(0)

    def _accept(self) -> socket.socket | None:
        """Wait for a caller; None if the server has ended, or its code was replaced on disk."""
        waiting = select.poll()
        waiting.register(self.listener, select.POLLIN)
        waiting.register(self.ending, 0)  # poll reports a hang-up in any case
        while True:
            if self.ending in dict(waiting.poll()):
                return None
            try:
                caller, _ = self.listener.accept()
            except BlockingIOError:
                continue  # another child has accepted the caller
            except OSError:  # no memory or no descriptors
                time.sleep(PAUSE_S)  # a child that ended instead would be replaced at once
                continue
            current = self.sources.are_current()
            os.write(self.report_end, REPORT.pack(os.getpid(), current))
            if current:
                return caller
            caller.close()  # the caller executes the script
            return None

    def _finish(self) -> None:
        """Stop listening, and wait for the children, which have their own deadlines."""
        self.listener.close()
        os.close(self.end)
        _remove(self.path)
        signal.alarm(FINISH_S)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            signal.alarm(0)


def _notify_systemd(state: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
        notify.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stopped; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    runtime_dir = "/run/tidegate"
    wait = words[:1] == ["--wait"]
    if wait:
        del words[0]
    if words[:1] == ["--runtime-dir"] and len(words) == 2:
        runtime_dir = words[1]
    elif words:
        print(USAGE, file=sys.stderr)
        return 2
    if os.geteuid() != 0:
        print(
            "tidegate-forkserver: must be run as root, because hooks run as root", file=sys.stderr
        )
        return 77
    oci_hook.kernel.set_undumpable()
    oci_hook.quick.open_standard()
    try:
        server = ForkingServer(runtime_dir, wait=wait)
    except BlockingIOError:
        print(
            f"tidegate-forkserver: another server is already serving {runtime_dir}; stop it first,"
            " or use --wait to take over when it has exited",
            file=sys.stderr,
        )
        return 75
    except OSError as e:
        print(
            f"tidegate-forkserver: cannot listen in {runtime_dir}: {e.strerror};"
            " start tidegate-governor, which creates that directory",
            file=sys.stderr,
        )
        return 71
    _notify_systemd("READY=1")
    server.run()
    return 0
