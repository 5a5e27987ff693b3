"""A filesystem below a root, read with every symbolic link kept inside of it.

An absolute link restarts at the root and `..` stops there, as for a process whose root it is, so
that a driver in a container's or an image's tree reads like the host's own. Meant for trees that
nobody is changing meanwhile: paths are resolved here and opened later by name.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import PurePosixPath

MAX_LINKS = 40  # the kernel's own limit, include/linux/namei.h MAXSYMLINKS


@dataclass(frozen=True)
class Tree:
    """The tree at `root`; paths given to its methods are absolute below that root."""

    root: str
    # What is known of a path below the root: a link's text, or None for anything else. All look at
    # the same few directories.
    _links: dict[str, str | None] = field(default_factory=dict, compare=False, repr=False)

    def resolve(self, path: str) -> str | None:
        """Return where `path` really is, below the root and without links; None if nowhere.

        Loops, missing components and directories that cannot be searched are all "nowhere".
        """
        todo = [p for p in reversed(PurePosixPath(path).parts) if p.strip("/")]
        done: list[str] = []
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
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
            todo += [p for p in reversed(PurePosixPath(target).parts) if p.strip("/")]
        return "/" + "/".join(done)

    def _link(self, path: str) -> str | None:
        """Return a link's text, None for what is no link; OSError for what is not there."""
        if path not in self._links:
            host = self.host(path)
            is_link = stat.S_ISLNK(os.lstat(host).st_mode)
            self._links[path] = os.readlink(host) if is_link else None  # noqa: PTH115
        return self._links[path]

    def host(self, path: str) -> str:
        """Return the name by which this process opens a resolved `path`."""
        return os.path.join(self.root, path.lstrip("/"))  # noqa: PTH118 - strings throughout

    def names(self, directory: str) -> tuple[str, ...]:
        """Return the sorted names in `directory`, none if it is not a directory.

        Names that cannot be printed are left out: no driver has one, and a line of ours that had
        a line feed or an escape in it would not be ours.
        """
        real = self.resolve(directory)
        try:
            names = os.listdir(self.host(real)) if real else []  # noqa: PTH208
        except OSError:
            return ()
        return tuple(sorted(n for n in names if n.isprintable()))

    def regular(self, path: str) -> str | None:
        """Return the resolved path of the regular file at `path`, None for anything else."""
        real = self.resolve(path)
        try:
            if real and stat.S_ISREG(os.lstat(self.host(real)).st_mode):
                return real
        except OSError:
            pass
        return None

    def read(self, path: str, limit: int) -> bytes | None:
        """Return at most `limit` bytes of the regular file at `path`, None if there is none."""
        real = self.regular(path)
        if real is None:
            return None
        try:
            fd = os.open(self.host(real), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb") as file:
                return file.read(limit)
        except OSError:
            return None
