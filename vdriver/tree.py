"""Reads a file system tree below a root, with every symbolic link kept inside the tree.

An absolute link restarts at the root and `..` stops there, as for a process chrooted into the tree,
so a driver in the tree of a container or an image is read in the same way as the host's.
The tree must not change during the search: paths are resolved first and opened later by name.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import PurePosixPath

MAX_LINKS = 40  # the kernel's own limit, include/linux/namei.h MAXSYMLINKS


@dataclass(frozen=True)
class Tree:
    """The tree at `root`; its methods take paths that are absolute below that root."""

    root: str
    # Cache of links: the target by path below the root, or None for any other file. Most lookups
    # are in the same few directories.
    _links: dict[str, str | None] = field(default_factory=dict, compare=False, repr=False)

    def resolve(self, path: str) -> str | None:
        """Return `path` with all links resolved, as a path below the root; None if that fails.

        It fails for loops, missing components and directories that cannot be searched.
        """
        remaining = [p for p in reversed(PurePosixPath(path).parts) if p.strip("/")]
        done: list[str] = []
        links = 0
        while remaining:
            part = remaining.pop()
            if part == "..":
                if not os.path.isdir(self.host("/".join(done))):  # noqa: PTH112
                    return None
                done = done[:-1]
                continue
            here = "/" + "/".join([*done, part])
            try:
                target = self._link(here)
            except (OSError, ValueError):
                return None
            if target is None:
                done.append(part)
                continue
            links += 1
            if links > MAX_LINKS:
                return None
            if target.startswith("/"):
                done = []
            remaining += [p for p in reversed(PurePosixPath(target).parts) if p.strip("/")]
        return "/" + "/".join(done)

    def _link(self, path: str) -> str | None:
        """Return a link's target, None for any other file; raise OSError if no file exists."""
        if path not in self._links:
            host = self.host(path)
            is_link = stat.S_ISLNK(os.lstat(host).st_mode)
            self._links[path] = os.readlink(host) if is_link else None  # noqa: PTH115
        return self._links[path]

    def host(self, path: str) -> str:
        """Return the path by which this process opens a resolved `path`."""
        return os.path.join(self.root, path.lstrip("/"))  # noqa: PTH118 - strings throughout

    def names(self, directory: str) -> tuple[str, ...]:
        """Return the sorted names in `directory`; none if it is not a directory.

        Names with characters that cannot be printed are left out: no driver has such a name, and a
        line feed or an escape in a name could forge lines in the output.
        """
        real = self.resolve(directory)
        try:
            names = os.listdir(self.host(real)) if real else []  # noqa: PTH208
        except OSError:
            return ()
        return tuple(sorted(n for n in names if n.isprintable()))

    def regular(self, path: str) -> str | None:
        """Return the resolved path of the regular file at `path`; None for anything else."""
        real = self.resolve(path)
        try:
            if real and stat.S_ISREG(os.lstat(self.host(real)).st_mode):
                return real
        except OSError:
            pass
        return None

    def read(self, path: str, limit: int) -> bytes | None:
        """Return at most `limit` bytes of the regular file at `path`; None if that fails."""
        real = self.regular(path)
        if real is None:
            return None
        try:
            fd = os.open(self.host(real), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb") as file:
                return file.read(limit)
        except OSError:
            return None
