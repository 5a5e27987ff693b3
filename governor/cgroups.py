"""Identify a process's container by control group and pid namespace, and freeze containers.

Names prove nothing: a process belongs to a container if it is in the container's control group, or
in the pid namespace of its first process. Both versions of control groups are supported, even at
the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from governor.processes import PROC, read_status
from vdriver.mountinfo import parse_mountinfo

V2 = ""
"""The hierarchy of version 2, as /proc/PID/cgroup calls it; others are named by their controllers.
"""
FREEZER = "freezer"

NS_GET_PARENT = 0xB702
MAX_NESTED = 32
"""Maximum nesting of pid namespaces (the kernel's MAX_PID_NS_LEVEL)."""


def read_cgroups(pid: int | str, proc: Path = PROC) -> dict[str, str]:
    """Return a process's control group in each hierarchy; empty when it is gone."""
    groups = {}
    with contextlib.suppress(OSError):
        text = (proc / str(pid) / "cgroup").read_text(errors="surrogateescape")
        for line in text.splitlines():
            _, controllers, path = line.split(":", 2)
            groups[controllers] = path
    return groups


def pid_namespaces(pid: int | str, proc: Path = PROC) -> tuple[tuple[int, int], ...]:
    """Return the pid namespaces that a process is in, innermost first; empty when it is gone.

    A container may create nested namespaces. Ancestors of the governor's namespace are not
    visible.
    """
    found: list[tuple[int, int]] = []
    try:
        fd = os.open(proc / str(pid) / "ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        while len(found) < MAX_NESTED:
            status = os.fstat(fd)
            found.append((status.st_dev, status.st_ino))
            outer = fcntl.ioctl(fd, NS_GET_PARENT)
            os.close(fd)
            fd = outer
    except OSError:
        pass  # EPERM: an ancestor of the governor's namespace
    finally:
        os.close(fd)
    return tuple(found)


def is_below(path: str, group: str) -> bool:
    """Return whether a control group is `group` or a descendant of it."""
    return path == group or path.startswith(group.rstrip("/") + "/")


def _outer(path: str) -> Iterator[str]:
    """Yield a control group and its ancestors, except the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]


@dataclass(frozen=True)
class Membership:
    """What identifies a container's processes; no two containers have it in common."""

    cgroups: Mapping[str, str] = field(default_factory=dict)
    namespace: tuple[int, int] | None = None

    def has_cgroups(self, cgroups: Mapping[str, str]) -> bool:
        """Return whether a process in these control groups belongs to the container."""
        return any(
            hierarchy in cgroups and is_below(cgroups[hierarchy], group)
            for hierarchy, group in self.cgroups.items()
        )

    def has_namespaces(self, namespaces: tuple[tuple[int, int], ...]) -> bool:
        """Return whether a process in these pid namespaces belongs to the container."""
        return self.namespace is not None and self.namespace in namespaces


def find_membership(
    pid: int, proc: Path = PROC, is_named: Callable[[str], bool] | None = None
) -> Membership:
    """Return what identifies a container with first process `pid`; empty if the process is gone.

    Call this before any code from the image runs: the first process may move into a descendant of
    its group (systemd does), where its siblings are not. If it is called later, `is_named` tells
    whether a path component is the container's name, and the group with that name counts, if there
    is one.

    A control group counts if neither the governor nor the process's parent (a runtime, a shim) is
    in it: if a runtime creates none, the container is in the group of the process that started it.
    A pid namespace counts if the process is pid 1 in it: a namespace that it joined contains other
    processes.
    """
    status = read_status(pid, proc)
    others = [read_cgroups("self", proc)]
    if status is not None and status.parent:
        others.append(read_cgroups(status.parent, proc))
    cgroups = {
        hierarchy: path
        for hierarchy, path in read_cgroups(pid, proc).items()
        # Outside the governor's own cgroup namespace, paths begin with /.. and identify nothing.
        if path != "/"
        and not path.startswith("/..")
        and not any(is_below(other.get(hierarchy, "/"), path) for other in others)
    }
    if is_named is not None:
        # The outermost group, which comes last, counts: a container chooses the names of groups
        # below its own.
        named = {
            hierarchy: group
            for hierarchy, path in cgroups.items()
            for group in _outer(path)
            if is_named(group.rpartition("/")[2])
            and not any(is_below(other.get(hierarchy, "/"), group) for other in others)
        }
        cgroups = named or cgroups
    numbers = status.numbers if status else ()
    namespaces = pid_namespaces(pid, proc)
    own = pid_namespaces("self", proc)
    namespace = None
    if len(numbers) > 1 and numbers[-1] == 1 and namespaces and namespaces[0] not in own:
        namespace = namespaces[0]
    return Membership(cgroups, namespace)


def find_mounts(proc: Path = PROC) -> dict[str, Path]:
    """Return the mount points of hierarchies that support freezing: version 2 and `freezer`."""
    found: dict[str, Path] = {}
    for mount in parse_mountinfo((proc / "self/mountinfo").read_bytes()):
        # If only a subtree of a hierarchy is mounted, the paths of /proc/PID/cgroup do not apply to
        # it.
        if mount.root != "/":
            continue
        if mount.type == "cgroup2":
            found.setdefault(V2, Path(mount.point))
        elif mount.type == "cgroup" and FREEZER in mount.options:
            found.setdefault(FREEZER, Path(mount.point))
    return found


class CannotFreezeError(Exception):
    """A container cannot be frozen; the message gives the reason."""


class Group:
    """A control group that can be frozen, as an open directory; call `close` after use.

    The constructor raises CannotFreezeError if the group does not exist, is the root, or cannot be
    frozen.
    """

    def __init__(self, hierarchy: str, path: str, mounts: Mapping[str, Path]) -> None:
        parts = [part for part in path.split("/") if part]
        if not parts or ".." in parts or "." in parts:
            raise CannotFreezeError(f"control group {path!r} belongs to no single container")
        if hierarchy not in mounts:
            raise CannotFreezeError(f"no {hierarchy or 'version 2'} hierarchy is mounted")
        self.hierarchy, self.path = hierarchy, path
        flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(mounts[hierarchy], flags)
            for part in parts:
                inner = os.open(part, flags, dir_fd=self._fd)
                os.close(self._fd)
                self._fd = inner
            self._file = "freezer.state" if hierarchy == FREEZER else "cgroup.freeze"
            self._words = ("THAWED", "FROZEN") if hierarchy == FREEZER else ("0", "1")
            self._read(self._file)
        except (OSError, ValueError) as e:  # ValueError: a path that no file can have
            if hasattr(self, "_fd"):
                os.close(self._fd)
            reason = e.strerror if isinstance(e, OSError) else e
            raise CannotFreezeError(f"control group {path}: {reason}") from e

    def close(self) -> None:
        """Close the directory; a frozen group stays frozen."""
        os.close(self._fd)

    def is_frozen(self) -> bool:
        """Return whether this group itself, not an ancestor, is frozen or about to be."""
        if self.hierarchy != FREEZER:
            return self._read("cgroup.freeze").strip() == "1"
        with contextlib.suppress(FileNotFoundError):
            return self._read("freezer.self_freezing").strip() == "1"
        return self._read("freezer.state").strip() != "THAWED"

    def freeze(self) -> None:
        """Stop the processes of the group and its descendants when they next leave the kernel."""
        self._write(self._words[1])

    def thaw(self) -> None:
        """Let the group's processes continue."""
        self._write(self._words[0])

    def _read(self, name: str) -> str:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)
        with os.fdopen(fd) as file:
            return file.read()

    def _write(self, word: str) -> None:
        fd = os.open(self._file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)
        try:
            os.write(fd, word.encode())
        except OSError as e:
            raise CannotFreezeError(f"control group {self.path}: {e.strerror}") from e
        finally:
            os.close(fd)


def _candidates(membership: Membership) -> Iterator[tuple[str, str, str]]:
    """Yield groups that may be frozen: hierarchy as mounted, hierarchy as in /proc, path."""
    # Version 2 is tried first: there, a frozen container that is killed does end.
    for hierarchy in (V2, FREEZER):
        for controllers, path in membership.cgroups.items():
            if hierarchy in ((V2,) if controllers == V2 else controllers.split(",")):
                yield hierarchy, controllers, path


def open_group(
    membership: Membership,
    pid: int,
    others: Mapping[str, Membership],
    mounts: Mapping[str, Path],
    proc: Path = PROC,
) -> Group:
    """Open the control group by which the container with first process `pid` can be frozen.

    The group belongs to this container alone: it is not the root, and neither the governor nor any
    of `others`, given by their ids, is in it. Raise CannotFreezeError if there is none.
    """
    reason = "it has no control group of its own"
    found: list[Group] = []
    now = read_cgroups(pid, proc)
    own = read_cgroups("self", proc)
    for hierarchy, controllers, path in _candidates(membership):
        if is_below(own.get(controllers, "/"), path):
            reason = f"the governor is in its control group {path}"
            continue
        if not is_below(now.get(controllers, "/"), path):
            reason = f"its first process has left control group {path}"
            continue
        neighbour = next(
            (
                name
                for name, other in others.items()
                if controllers in other.cgroups and is_below(other.cgroups[controllers], path)
            ),
            None,
        )
        if neighbour is not None:
            reason = f"container {neighbour[:64]!r} is in its control group {path}"
            continue
        try:
            group = Group(hierarchy, path, mounts)
        except CannotFreezeError as e:
            reason = str(e)
            continue
        found.append(group)
    # If the runtime has already frozen the container, perhaps through the other version, thawing is
    # the runtime's task, not the governor's.
    try:
        if any(group.is_frozen() for group in found):
            reason = "it is already frozen"
        elif found:
            return found.pop(0)
    except OSError as e:
        reason = f"its control group is gone: {e.strerror}"
    finally:
        for group in found:
            group.close()
    raise CannotFreezeError(reason)
