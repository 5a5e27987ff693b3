"""Read processes from /proc: identities that survive pid reuse, namespaces, mappings and mounts.

A pid may be reused. Together with the process's start time it is unique until the next boot.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vdriver.mountinfo import parse_mountinfo

PROC = Path("/proc")

_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about the process that was to be read."""


class Identity(NamedTuple):
    """A process: its pid, and its start time in clock ticks since boot."""

    pid: int
    start: int


class FileIdentity(NamedTuple):
    """A file: st_dev and st_ino."""

    device: int
    inode: int


class Status(NamedTuple):
    """Fields of /proc/PID/status: the parent, and the pids from this namespace inwards."""

    parent: int
    numbers: tuple[int, ...]


def boot_id() -> str:
    """Return the id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int, proc: Path = PROC) -> int | None:
    """Return a process's start time in clock ticks since boot, or None if it is gone."""
    with contextlib.suppress(OSError):
        return _read_start_time(pid, proc)
    return None


def _read_start_time(pid: int, proc: Path = PROC) -> int | None:
    """Return the same as `start_time`; raise OSError for lack of a file descriptor or memory."""
    try:
        text = (proc / str(pid) / "stat").read_bytes()
        # The name is in parentheses and may itself contain some. Field 22 is the 20th after it.
        return int(text[text.rindex(b")") + 2 :].split()[19])
    except OSError as e:
        if e.errno in _SHORT:
            raise
        return None
    except (ValueError, IndexError):
        return None


def started_ns(pid: int, proc: Path = PROC) -> int:
    """Return a process's start time on CLOCK_BOOTTIME, in nanoseconds; 0 if it is gone."""
    return (start_time(pid, proc) or 0) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def open_process(process: Identity) -> int | None:
    """Return a pidfd of exactly this process, or None if it is gone.

    Raise OSError if no pidfd can be created, or if the process cannot be read for lack of a file
    descriptor or memory.
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as e:
        # EINVAL: the pid has been reused for a thread.
        if e.errno in (errno.ESRCH, errno.EINVAL):
            return None
        raise
    # From here on the pid is not reused as long as this process lives.
    try:
        is_same = _read_start_time(process.pid) == process.start
    except OSError:
        os.close(pidfd)
        raise
    if is_same:
        return pidfd
    os.close(pidfd)
    return None


def identify(pidfd: int) -> Identity:
    """Return the process that a pidfd refers to; pid 0 if it has ended."""
    try:
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                pid = int(line.split()[1])
                # The pid was read before the start time. If the process ended in between and the
                # pid was reused, the pair of pid and time matches no living process.
                return Identity(pid, start_time(pid) or 0) if pid > 0 else Identity(0, 0)
    except OSError:
        pass
    return Identity(0, 0)


def status_fields(pid: int, proc: Path = PROC) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty when the process is gone."""
    try:
        text = (proc / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (s.partition(":") for s in text.splitlines())}


def read_status(pid: int, proc: Path = PROC) -> Status | None:
    """Return the parent and the pids of a process; None when it is gone."""
    fields = status_fields(pid, proc)
    if not fields:
        return None
    numbers = tuple(int(number) for number in fields.get("NSpid", "").split())
    return Status(int(fields.get("PPid", "0")), numbers)


def namespace_pid(pid: int, init: int) -> int:
    """Return the pid of process `pid` in the namespace of `init`; `pid` itself when it is gone.

    The kernel lists a process's pids from the governor's namespace inwards. A container may create
    nested namespaces, so the pid at the depth of its first process is returned, not the innermost.
    """
    status, first = read_status(pid), read_status(init)
    numbers = status.numbers if status else ()
    depth = len(first.numbers) if first else 0
    if not numbers:
        return pid
    return numbers[depth - 1] if 0 < depth <= len(numbers) else numbers[-1]


def pid_namespace(pid: int) -> int:
    """Return the inode of a process's PID namespace, 0 when the process is gone.

    Together with the pid in that namespace, it identifies a living process.
    """
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        return 0


def mapped(pid: int, name: str, device: int) -> Iterator[tuple[str, int]]:
    """Yield the files of file system `device` that a process has mapped under `name`.

    Each item is a path that opens the file, and the file's inode. Device and name are checked
    before the file is opened: an untrusted process chooses what it maps, and opening a device may
    have side effects.
    """
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
    try:
        text = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return
    sought = name.encode()
    at = text.find(sought)
    while at >= 0:
        line = text[text.rfind(b"\n", 0, at) + 1 : text.find(b"\n", at)]
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[3] == wanted and fields[5] == sought:
            begin, _, end = fields[0].partition(b"-")
            # maps pads short addresses with zeros, map_files does not.
            yield f"/proc/{pid}/map_files/{int(begin, 16):x}-{int(end, 16):x}", int(fields[4])
        at = text.find(sought, at + 1)


class Mounted(NamedTuple):
    """Processes, by the directory that they have mounted.

    `is_whole` is False if some processes could not be examined.
    """

    by_name: dict[str, list[Identity]]
    is_whole: bool


def mounted_below(name: str, device: int) -> Mounted:
    """Return the processes that have a directory `name`/KEY of `device` mounted, by KEY.

    `device` is a file system. Processes in the governor's own mount namespace are skipped, because
    all of them see the directories of the host.
    """
    found: dict[str, list[Identity]] = {}
    is_whole = True
    wanted = f"{os.major(device)}:{os.minor(device)}"
    ours = _mount_namespace("self")
    known: dict[tuple[str, int, int], list[str]] = {}  # by namespace and root
    for entry in os.listdir("/proc"):  # noqa: PTH208 - thousands of names, no paths needed
        if not entry.isdigit():
            continue
        try:
            namespace = _mount_namespace(entry)
            if namespace == ours:
                continue
            # A process in a chroot sees less of its namespace.
            root = os.stat(f"/proc/{entry}/root")  # noqa: PTH116 - thousands of them
            view = namespace, root.st_dev, root.st_ino
            if view not in known:
                known[view] = _directories(entry, name, wanted)
            start = _read_start_time(int(entry)) if known[view] else None
            for key in known[view] if start is not None else ():
                found.setdefault(key, []).append(Identity(int(entry), start or 0))
        except PermissionError:
            # Pid 1 is in no container, and a sandbox may hide only that process.
            is_whole = is_whole and entry == "1"
        except OSError as e:
            is_whole = is_whole and e.errno not in _SHORT  # otherwise it has ended
    return Mounted(found, is_whole)


def _mount_namespace(pid: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/mnt")  # noqa: PTH115 - a name in brackets, not a path


def _directories(pid: str, name: str, device: str) -> list[str]:
    keys = []
    faults: list[str] = []  # malformed lines are skipped
    for mount in parse_mountinfo(Path(f"/proc/{pid}/mountinfo").read_bytes(), faults):
        above, _, key = mount.root.rpartition("/")
        if mount.device == device and above.rpartition("/")[2] == name:
            keys.append(key)
    return keys


def first_of(processes: list[Identity]) -> Identity:
    """Return the first process of a container, among the processes that see its mounts.

    Its parent, the runtime, is not one of these. A process that was started by `exec` also has a
    parent that is not one of them, but was started later.
    """
    pids = {process.pid for process in processes}
    roots = [
        process
        for process in processes
        if (status := read_status(process.pid)) is not None and status.parent not in pids
    ]
    return min(roots or processes, key=lambda process: (process.start, process.pid))


def first_of_each(processes: list[Identity]) -> list[Identity]:
    """Return the first processes of the containers that share a directory, oldest first.

    Each container has its own mount namespace. A process that created another mount namespace
    inside a container is a descendant of one of the container's processes.
    """
    pids = {process.pid for process in processes}
    groups: dict[str, list[Identity]] = {}
    for process in processes:
        try:
            groups.setdefault(_mount_namespace(str(process.pid)), []).append(process)
        except OSError:
            continue  # it has ended
    firsts = [first_of(group) for group in groups.values()]
    roots = [
        process
        for process in firsts
        if (status := read_status(process.pid)) is not None and status.parent not in pids
    ]
    return sorted(roots or [first_of(processes)], key=lambda process: (process.start, process.pid))


def names_in(part: str) -> Iterator[str]:
    """Yield candidates for a container's id in one component of a control group's path.

    Engines write docker-ID.scope, libpod-ID.scope, crio-ID.scope, cri-containerd-ID.scope, or ID.
    """
    bare = part.removesuffix(".scope").removesuffix(".service")
    yield from (part, bare)
    # An id may itself contain dashes, so every suffix is tried.
    for i, character in enumerate(bare):
        if character in "-:":
            yield bare[i + 1 :]


def cgroup_names(pid: int) -> Iterator[str]:
    """Yield candidates for a container's id from a process's control groups, innermost first."""
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text(errors="surrogateescape")
    except OSError:
        return
    for line in text.splitlines():
        for part in reversed(line.split(":", 2)[-1].split("/")):
            yield from names_in(part)
