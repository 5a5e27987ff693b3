"""Finds the processes on the machine that have a directory of the driver's mirror mounted or open.

Linux 6.12 and newer list the mount namespaces. On older kernels the search finds those of the
threads in /proc, those that an open descriptor keeps alive, and those that a mount pins. It enters
each namespace and reads the mounts there, because /proc/PID/mountinfo omits the mounts that a
chroot hides from that process. A mount on / hides mounts from a process that enters the namespace;
the hidden mounts are read from outside, through every process whose root is not on a mount that was
read. A directory that a process has open, or has as its working directory, counts as well: a mount
without a namespace (open_tree, umount --lazy) can be found only in that way.

The search does not find the following: a mount that another mount on / hides, if no process has its
root there; a directory that is open only through a descriptor in flight in a socket; an overlay's
layer that was given as a relative path, or through another mount of the driver's directory that no
longer exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import resource
import select
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vdriver.kernel_calls import (
    CLONE_NEWNS,
    MountedFile,
    enter_namespace,
    identify_link,
    next_namespace,
    share_files,
)
from vdriver.mountinfo import MOUNTS, Mount, Sought, names_in_use, parse_mountinfo, show

PROC_USER_INIT_INO = 0xEFFFFFFD  # include/linux/proc_ns.h: the initial user namespace
NS_MNT_GET_NEXT = 0x8010B70B  # include/uapi/linux/nsfs.h
NS_MNT_GET_PREV = 0x8010B70C
CAP_SYS_ADMIN = 21

NAMESPACE = re.compile(r"mnt:\[(\d+)\]")
GONE = (FileNotFoundError, ProcessLookupError)
ROUNDS = 5  # passes over all tasks, after which the search gives up waiting for a quiet pass
FAULTS = 20  # maximum number of faults, and of notes, that are reported
ANSWER = 64 << 20  # bytes; maximum that is read from the child
BIG_TABLE = 1024  # descriptors; a smaller table is read again rather than compared


@dataclass(frozen=True)
class NamespaceUse:
    """A mount namespace in which a generation is mounted, and its processes, lowest pid first.

    For a process that has a directory in the generation open, `inode` is 0.
    """

    inode: int
    pids: tuple[int, ...]
    command: str

    def describe(self) -> str:
        """Return the first process in words, for an operator."""
        if not self.pids:
            return "one without a process, kept alive by a mount or a descriptor"
        return f"pid {self.pids[0]} ({self.command})"


@dataclass
class GenerationUses:
    """The uses of each generation: `mounted` by namespace, `opened` by process.

    `faults` are reasons why these lists may be incomplete; `notes` say what else was not examined.
    """

    mounted: dict[str, list[NamespaceUse]] = field(default_factory=dict)
    opened: dict[str, list[NamespaceUse]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


# The search runs in a child process, because a process that enters a namespace may be unable to
# return.


def search(sought: Sought, *, seconds: float) -> GenerationUses:
    """Search all mount namespaces and the processes' open directories, for `seconds` at most."""
    deadline = time.monotonic() + seconds
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.close(reader)
            with os.fdopen(writer, "w", encoding="ascii") as file:
                child_search = _ChildSearch(sought, deadline, os.getppid(), file)
                try:
                    child_search.run()
                except Exception as e:
                    child_search.fail(e)
                    raise
        except BaseException:  # noqa: BLE001 - the parent's handlers must not run here
            os._exit(1)
        os._exit(0)
    os.close(writer)
    try:
        # A file system in user space may never answer, so the child is killed 1 s after its own
        # deadline.
        data = _read_all(reader, deadline + 1)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return _merge(data)


def _read_all(fd: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < ANSWER:
        left = max(0.0, deadline - time.monotonic())
        if not select.select([fd], [], [], left)[0]:
            break
        part = os.read(fd, 1 << 16)
        if not part:
            break
        data += part
    return bytes(data)


def _merge(data: bytes) -> GenerationUses:
    """Merge the child's lines; if it ended early, add its last position to the faults or notes."""
    found = GenerationUses()
    at, complete, ended = "", False, False
    for line in data.splitlines():
        try:
            document: dict[str, Any] = json.loads(line)
        except ValueError:
            break
        at = document.get("at", at)
        complete = complete or "mounted" in document
        ended = ended or "end" in document
        for key, into in (("mounted", found.mounted), ("opened", found.opened)):
            for name, uses in document.get(key, {}).items():
                into[name] = [NamespaceUse(u[0], tuple(u[1]), u[2]) for u in uses]
        found.faults += document.get("faults", ())
        found.notes += document.get("notes", ())
    if not ended:
        (found.notes if complete else found.faults).append(
            f"the search did not finish: it was at {at or 'its beginning'}"
        )
    return found


class _LateError(Exception):
    """The deadline has passed, or there are too many mounts."""


class _ChildSearch:
    """The search in the child process.

    `read` maps the inode number of each namespace that was read to a descriptor that keeps it
    alive: the kernel reuses an inode number as soon as its namespace has ended.
    """

    def __init__(self, sought: Sought, deadline: float, parent: int, out: Any) -> None:
        self.sought, self.deadline, self.out = sought, deadline, out
        self.parent = parent
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        home = os.stat("self/ns/mnt", dir_fd=self.proc)
        self.nsfs = home.st_dev
        self.read: dict[int, int] = {}
        self.names: dict[int, set[str]] = {}
        self.pids: dict[int, set[int]] = {}
        self.opened: dict[str, set[int]] = {}
        self.idents: set[int] = set()
        self.roots: set[MountedFile] = set()
        self.hidden: dict[int, None] = {}
        self.faults: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.basenames = {"", *(posixpath.basename(p) for p in sought.directories.values())}
        self.quiet = True
        self.last = ""
        self.big: list[tuple[int, int]] = []

    def run(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            listed = self._read_listed()
            for _ in range(ROUNDS):
                self.quiet = True
                self._look_at_tasks(listed=listed)
                if self.quiet:
                    break
            else:
                self._fault(f"mount namespaces keep changing, most recently that of {self.last}")
            self._check_hidden(listed=listed)
            if listed:
                # The list of namespaces is complete without the descriptors. Any user can prolong
                # the search through descriptors, so a timeout there must not cause a generation to
                # be kept.
                self._report()
        except _LateError:
            self._fault(f"the search reached its time or mount limit at {self.last}")
            self._report()
        else:
            if listed:
                with contextlib.suppress(_LateError):
                    self._look_at_descriptors_of_all()
                    self.last = ""
                if self.last:
                    late = f"no time left to examine the descriptors from {self.last} on"
                    self.notes = {late: None, **self.notes}
                self._report_opened()
            else:
                self._report()
        self._write_line(end=True)

    # Output to the parent

    def _write_line(self, **document: Any) -> None:
        self.out.write(json.dumps(document) + "\n")
        self.out.flush()

    def _at(self, what: str) -> None:
        self._write_line(at=what)

    def fail(self, error: Exception) -> None:
        """Report the error that ended the search."""
        self._write_line(faults=[f"the search failed: {error!r}"])

    def _report(self) -> None:
        mounted: dict[str, list[Any]] = {}
        for inode in sorted(self.names):
            pids = sorted(self.pids.get(inode, ()))[:1000]
            for name in sorted(self.names[inode]):
                use = (inode, pids, self._command(pids[0]) if pids else "")
                mounted.setdefault(name, []).append(use)
        faults = list(self.faults)
        more = [f"{len(faults) - FAULTS} more"] if len(faults) > FAULTS else []
        self._write_line(
            mounted=mounted, faults=faults[:FAULTS] + more, notes=list(self.notes)[:FAULTS]
        )
        self.notes = {}
        self._report_opened()

    def _report_opened(self) -> None:
        opened = {
            name: [(0, [pid], self._command(pid)) for pid in sorted(pids)[:1000]]
            for name, pids in self.opened.items()
        }
        self._write_line(opened=opened, notes=list(self.notes)[:FAULTS])

    def _fault(self, text: str) -> None:
        if len(self.faults) < FAULTS * 10:
            self.faults[text] = None

    def _check(self) -> None:
        if time.monotonic() > self.deadline:
            raise _LateError

    # Namespaces

    def _read_listed(self) -> bool:
        """Read the namespaces that the kernel lists; return False if the list is not complete."""
        try:
            status = self._file("self/status", 1 << 16)
            effective = int(re.findall(rb"^CapEff:\s*(\w+)", status, re.MULTILINE)[0], 16)
            first = os.stat("self/ns/user", dir_fd=self.proc).st_ino == PROC_USER_INIT_INO
            if not (first and effective >> CAP_SYS_ADMIN & 1):
                return False
            fd = os.open("self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc)
            while (before := next_namespace(fd, NS_MNT_GET_PREV)) is not None:
                os.close(fd)
                fd = before
        except OSError:
            return False
        following: int | None = fd
        while following is not None:
            self._check()
            fd = following
            inode = os.fstat(fd).st_ino
            if inode not in self.read:
                self._enter(fd, inode, f"mount namespace {inode}")
            try:
                following = next_namespace(fd, NS_MNT_GET_NEXT)
            except OSError as e:
                self._fault(f"list of mount namespaces, after {inode}: {e.strerror}")
                return False
        return True

    def _enter(self, fd: int, inode: int, what: str) -> list[Mount]:
        """Read a namespace and keep its descriptor; return its mounts."""
        self.read[inode] = fd
        self.last = what
        self._at(what)
        try:
            enter_namespace(fd, CLONE_NEWNS)
            mounts = self._mounts("self/mountinfo", what)
        except OSError as e:
            self._fault(f"{what}: {e.strerror}")
            return []
        self._note_mounts(inode, mounts)
        return mounts

    def _note_mounts(self, inode: int, mounts: list[Mount]) -> None:
        names = names_in_use(mounts, self.sought)
        if names:
            self.names.setdefault(inode, set()).update(names)
        self.idents.update(m.ident for m in mounts)
        if len(self.idents) > MOUNTS:
            self._fault(f"more than {MOUNTS} mounts, the last in {self.last}")
            raise _LateError

    def _mounts(self, path: str, what: str) -> list[Mount]:
        faults: list[str] = []
        mounts = parse_mountinfo(self._file(path), faults)
        for fault in faults:
            self._fault(f"{what}: {fault}")
        return mounts

    def _enter_at(self, path: str, inode: int, what: str, *, at: int | None = None) -> None:
        """Read the namespace `inode` through the link at `path`, relative to /proc or to `at`.

        If the link now points to another namespace, nothing is read: the next round examines the
        process again.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc if at is None else at)
        except GONE:
            return
        except OSError as e:
            self._fault(f"{what}: {e.strerror}")
            return
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (self.nsfs, inode):
            os.close(fd)
            return
        for mount in self._enter(fd, inode, what):
            pinned = _inode(mount.root) if mount.type == "nsfs" else None
            if pinned is None or pinned in self.read:
                continue
            # The path is valid in the namespace that was just read, which is therefore re-entered.
            where = f"mount namespace {pinned} at {show(mount.point)} of {what}"
            self._at(where)
            try:
                enter_namespace(self.read[inode], CLONE_NEWNS)
                fd = _open_pinned(mount.point, (self.nsfs, pinned))
            except OSError as e:
                self._fault(f"{where}: {e.strerror}")
                continue
            self._enter_at(f"self/fd/{fd}", pinned, where)
            os.close(fd)

    # Processes

    def _tasks(self) -> Iterator[tuple[int, int]]:
        for pid in sorted(int(n) for n in os.listdir(self.proc) if n.isdigit()):  # noqa: PTH208
            if pid != os.getpid():
                # Each thread may have its own namespace, and the first thread may have ended.
                for task in self._names(f"{pid}/task"):
                    self._check()
                    yield pid, int(task)

    def _look_at_tasks(self, *, listed: bool) -> None:
        scanned: dict[int, list[int]] = {}
        for pid, task in self._tasks():
            path = f"{pid}/task/{task}"
            try:
                inode = _inode(os.readlink(f"{path}/ns/mnt", dir_fd=self.proc))
            except GONE:
                continue
            except OSError:
                self.hidden[task] = None
                continue
            if inode is None:
                continue
            known = inode in self.read
            if not known and not listed:
                self.quiet = False
                self.last = self._describe_process(pid)
                self._enter_at(f"{path}/ns/mnt", inode, f"mount namespace {inode} of {self.last}")
            self.pids.setdefault(inode, set()).add(pid)
            self._look_at_root(path, pid, inode, follow=known or not listed)
            self._look_at_open(pid, f"{path}/cwd", "cwd")
            if not listed:
                self.last = self._describe_process(pid)
                self._look_at_descriptors(pid, task, scanned.setdefault(pid, []), holders=True)

    def _look_at_root(self, path: str, pid: int, inode: int, *, follow: bool) -> None:
        """Read the mounts that a process sees, if its root is not on a mount that was read.

        `follow` is false for a namespace that is newer than the kernel's list: its mounts are
        copies of mounts in listed namespaces, so no further round is needed. If the process changes
        its namespace during the read, the kernel returns no mounts at all (Linux 6.18: in half of
        the reads for a process that keeps changing it), so an empty result proves nothing.
        """
        try:
            root = self._identity(f"{path}/root")
            if root.mount in self.idents or root in self.roots:
                return
            what = f"mounts of {self._describe_process(pid)}"
            self._note_open(pid, root)
            mounts = self._mounts(f"{path}/mountinfo", what)
            stays = _inode(os.readlink(f"{path}/ns/mnt", dir_fd=self.proc)) == inode
            if follow and stays:
                self.roots.add(root)
            if (follow and stays) or not mounts:
                self.quiet = False
                self.last = self._describe_process(pid)
        except GONE:
            return
        except OSError as e:
            # The kernel returns EINVAL for a process that has ended but has not been waited for.
            if self._state(pid) != "Z":
                self._fault(f"root of {self._describe_process(pid)}: {e.strerror}")
            return
        self._note_mounts(inode, mounts)

    def _check_hidden(self, *, listed: bool) -> None:
        """Read the mounts of the threads whose namespace could not be determined.

        With `listed`, note these mounts; otherwise, report the threads whose namespace was not
        read. Reading mountinfo requires less privilege than following the link to the namespace,
        and mount ids are unique on the machine: a thread that sees a mount that was read is in a
        namespace that was read.
        """
        for task in self.hidden:
            try:
                mounts = self._mounts(f"{task}/mountinfo", f"mounts of pid {task}")
            except GONE:
                continue
            except OSError as e:
                if self._state(task) != "Z":
                    self._fault(f"mounts of {self._describe_process(task)}: {e.strerror}")
                continue
            if listed:  # all namespaces were read, except mounts that a mount on / hides
                self._note_mounts(0, mounts)
            elif not any(m.ident in self.idents for m in mounts):
                self._fault(f"mount namespace of {self._describe_process(task)}: not permitted")

    def _look_at_descriptors_of_all(self) -> None:
        scanned: dict[int, list[int]] = {}
        for pid, task in self._tasks():
            self.last = self._describe_process(pid)
            self._look_at_descriptors(pid, task, scanned.setdefault(pid, []), holders=False)

    def _look_at_descriptors(
        self, pid: int, task: int, scanned: list[int], *, holders: bool
    ) -> None:
        """Examine a thread's descriptors, unless it shares a table that was already examined.

        With `holders`, also read the namespaces that descriptors keep alive.
        """
        if any(share_files(other, task) for other in scanned):
            return
        size = self._table_size(task)
        if size >= BIG_TABLE:
            for other, _ in (b for b in self.big if b[1] == size):
                self._check()
                if share_files(other, task):
                    return
        try:
            fd = os.open(
                f"{pid}/task/{task}/fd",
                os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC,
                dir_fd=self.proc,
            )
        except GONE:
            return
        except OSError as e:
            self.notes[f"descriptors of {self._describe_process(pid)}: {e.strerror}"] = None
            return
        try:
            # Since Linux 6.6, opening this list also fails if the process has just ended.
            with contextlib.suppress(*GONE), os.scandir(fd) as entries:
                for entry in entries:
                    self._check()
                    self._look_at_open(pid, entry.name, "fd", fd=fd, holders=holders)
        finally:
            os.close(fd)
        scanned.append(task)
        if size >= BIG_TABLE:
            self.big.append((task, size))

    def _look_at_open(
        self, pid: int, path: str, kind: str, *, fd: int = -1, holders: bool = False
    ) -> None:
        at = self.proc if fd < 0 else fd
        try:
            text = os.readlink(path, dir_fd=at)
            inode = _inode(text)
            if inode is not None:
                if holders and inode not in self.read:
                    self.quiet = False
                    what = (
                        f"mount namespace {inode}, {kind} {path} of {self._describe_process(pid)}"
                    )
                    self._enter_at(path, inode, what, at=at)
            # Only a path that ends in the name of a sought directory is examined further, so that
            # no request goes to a file system that may not answer. The root of a mount without a
            # namespace is shown as "/".
            elif text[:1] == "/" and posixpath.basename(text) in self.basenames:
                self._note_open(pid, identify_link(at, path))
        except OSError:  # the descriptor was closed, or belongs to another user
            return

    def _note_open(self, pid: int, identity: MountedFile) -> None:
        path = self.sought.directories.get((identity.device, identity.inode))
        if path is not None and pid != self.parent:  # the parent holds locks through descriptors
            self.opened.setdefault(path.partition("/")[0], set()).add(pid)

    # /proc

    def _identity(self, path: str) -> MountedFile:
        return identify_link(self.proc, path)

    def _file(self, path: str, limit: int = 1 << 30) -> bytes:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc), "rb") as file:
            return file.read(limit)

    def _names(self, path: str) -> list[str]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc)
        except OSError:
            return []
        try:
            return os.listdir(fd)  # noqa: PTH208
        except OSError:
            return []
        finally:
            os.close(fd)

    def _table_size(self, task: int) -> int:
        try:
            match = re.search(rb"^FDSize:\s*(\d+)", self._file(f"{task}/status"), re.MULTILINE)
        except OSError:
            return 0
        return int(match[1]) if match else 0

    def _state(self, pid: int) -> str:
        try:
            text = self._file(f"{pid}/stat")
        except OSError:
            return "Z"
        return chr(text.rpartition(b") ")[2][0])

    def _command(self, pid: int) -> str:
        """Return a process's name; the process sets it, so it is not trusted."""
        try:
            return show(os.fsdecode(self._file(f"{pid}/comm").removesuffix(b"\n")))
        except OSError:
            return "ended"

    def _describe_process(self, pid: int) -> str:
        """Return a process's pid, name and user, for an administrator."""
        try:
            uid = f", uid {os.stat(str(pid), dir_fd=self.proc).st_uid}"
        except OSError:
            uid = ""
        return f"pid {pid} ({self._command(pid)}{uid})"


def _inode(text: str) -> int | None:
    match = NAMESPACE.fullmatch(text)
    return int(match[1]) if match else None


def _open_pinned(point: str, identity: tuple[int, int]) -> int:
    """Return a descriptor for the namespace mounted at `point`; raise OSError if it is not there.

    The path may be in a hostile container, so the file is identified before it is opened.
    """
    fd = os.open(point, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != identity or not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(0, "something else is mounted over it")
    return fd
