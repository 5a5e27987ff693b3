"""Caches the results of `read_library` in a file, from one refresh to the next.

A driver changes about once a month, but a refresh reads its forty libraries at every boot. An entry
is valid while its file's inode, size and times are unchanged. The cache file is trusted, so only
root must be able to write to its directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from vdriver.elf import Library, read_library
from vdriver.errors import LibraryError

MAX_BYTES = 16 << 20  # largest cache file; forty libraries take 25 KiB

# Minimum age of a file's last change for a result to be cached, in nanoseconds. A file that changes
# twice within a tick of the kernel's clock (10 ms at most) has the same times after both changes.
SETTLED_NS = 100_000_000

# Incremented when the meaning of a field of Library or a rule for refusing a file changes.
FORMAT_REVISION = 2

# A cache with another version is discarded; the version covers the names and types of all fields.
VERSION = zlib.crc32(
    repr((FORMAT_REVISION, [(f.name, f.type) for f in dataclasses.fields(Library)])).encode()
)

Stamp = tuple[int, int, int, int, int]
ReadResult = Library | LibraryError


class ElfCache:
    """A cached `read_library`: `read` returns the cached result if the file has not changed.

    `file` keeps the results between runs; with None they last for this run only. A cache file that
    is absent, damaged, too large or from another version of this program counts as empty.
    """

    def __init__(self, file: str | Path | None) -> None:
        self._file = None if file is None else Path(file)
        self._known: dict[str, tuple[Stamp, ReadResult]] = {}
        if self._file is not None:
            damage = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
            with contextlib.suppress(*damage):
                self._known = _load(self._file)
        self._used: dict[str, tuple[Stamp, ReadResult]] = {}
        self._stored = dict(self._known)

    def read(self, path: str | Path) -> Library:
        """Return what `read_library(path)` returns, or raise the LibraryError that it raises."""
        name = str(path)
        stamp = _stamp(name)
        kept = self._known.get(name)
        if kept is None or kept[0] != stamp:
            self._known.pop(name, None)
            self._used.pop(name, None)
            answer = _read_file(name)
            if stamp is None or not _is_settled(stamp):
                return _unpack(answer)
            # The stamp is taken before the file is read, so a change during reading is noticed.
            kept = self._known[name] = stamp, answer
        self._used[name] = kept
        return _unpack(kept[1])

    def save(self) -> None:
        """Store the results that this run used if they changed; raise OSError if that fails."""
        if self._file is None or self._same():
            return
        document = {"version": VERSION, "readings": {n: _pack(*a) for n, a in self._used.items()}}
        _write(self._file, json.dumps(document, separators=(",", ":")).encode())
        self._stored = dict(self._used)

    def _same(self) -> bool:
        # Errors compare by identity: an error loaded from the file is the same object in both.
        return self._used == self._stored


def _stamp(path: str) -> Stamp | None:
    """Return values that change when a regular file changes; None if `path` is not one."""
    try:
        s = os.lstat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(s.st_mode):
        return None
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def _is_settled(stamp: Stamp) -> bool:
    return stamp[4] + SETTLED_NS <= time.time_ns()


def _read_file(path: str) -> ReadResult:
    try:
        return read_library(path)
    except LibraryError as e:
        if e.__cause__ is not None:
            raise  # not cached: an error from the system may be temporary
        return LibraryError(e.message, hint=e.hint)  # a new one, without references to frames


def _unpack(answer: ReadResult) -> Library:
    if isinstance(answer, LibraryError):
        raise LibraryError(answer.message, hint=answer.hint)
    return answer


def _pack(stamp: Stamp, answer: ReadResult) -> list[Any]:
    if isinstance(answer, LibraryError):
        return [stamp, {"message": answer.message, "hint": answer.hint}]
    return [stamp, vars(answer)]


def _load(file: Path) -> dict[str, tuple[Stamp, ReadResult]]:
    """Return a cache file's content; if it is damaged, raise an error that ElfCache suppresses."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as stored:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return {}
        document = json.loads(stored.read(MAX_BYTES))
    if document["version"] != VERSION:
        return {}
    return {n: (_parse_stamp(s), _parse(n, a)) for n, (s, a) in document["readings"].items()}


def _parse_stamp(values: list[int]) -> Stamp:
    device, inode, size, mtime, ctime = values
    if not all(type(v) is int for v in values):
        raise ValueError("not a stamp")
    return device, inode, size, mtime, ctime


def _parse(path: str, fields: dict[str, Any]) -> ReadResult:
    if "message" in fields:
        if not isinstance(fields["message"], str) or not isinstance(fields["hint"], str):
            raise ValueError("not a refusal")
        return LibraryError(fields["message"], hint=fields["hint"])
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    library = Library(**values)
    if library.path != path or not all(
        _fits(values[f.name], str(f.type)) for f in dataclasses.fields(Library)
    ):
        raise ValueError("not a library")
    return library


def _fits(value: Any, kind: str) -> bool:
    """Return whether a value has the type `kind`, one of the four types of Library's fields."""
    if kind == "tuple[str, ...]":
        return isinstance(value, tuple) and all(isinstance(v, str) for v in value)
    if kind == "int":
        return type(value) is int
    return isinstance(value, str) or (value is None and kind == "str | None")


def _write(file: Path, data: bytes) -> None:
    """Replace a file atomically; after a power failure, the old or the new file exists."""
    fd, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # mode 0600
    try:
        with os.fdopen(fd, "wb") as new:
            new.write(data)
            new.flush()
            os.fsync(fd)
        Path(name).rename(file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
