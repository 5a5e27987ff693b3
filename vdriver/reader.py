"""Reads a driver's optional files below a root; skips unusable files and records the reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vdriver.driver import Skipped
from vdriver.elf import Library
from vdriver.errors import LibraryError
from vdriver.tree import Tree

Read = Callable[[str], Library]


@dataclass
class TreeReader:
    """A tree, a function that reads libraries, and the list of skipped files."""

    tree: Tree
    read: Read
    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, path: str, reason: str) -> None:
        """Record why the file at `path` is skipped."""
        self.skipped.append(Skipped(path, reason))

    def regular(self, path: str) -> str | None:
        """Return the resolved path of a regular file; skip any other file, and return None."""
        real = self.tree.regular(path)
        if real is None:
            dangling = self.tree.resolve(path) is None
            self.skip(path, "a dangling link" if dangling else "not a regular file")
        return real

    def library(self, path: str) -> tuple[str, Library] | None:
        """Return a library's resolved path and content; skip an unusable file, and return None."""
        real = self.regular(path)
        if real is None:
            return None
        host = self.tree.host(real)
        try:
            return real, self.read(host)
        except LibraryError as e:
            self.skip(path, e.message.removeprefix(f"{host}: "))
            return None
