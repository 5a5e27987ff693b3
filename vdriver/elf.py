"""Questions asked of one ELF file, answered by pyelftools.

Knows the handful of facts a driver mirror needs, and nothing about drivers. Whatever the file
holds, `read_library` returns a `Library` or raises `LibraryError`: it opens without waiting (a
FIFO is refused), and all that is read from one file is bounded.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

from vdriver.errors import LibraryError

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

# The libraries of 535.261.03 need at most 2,143 reads and 24 KiB for these answers. A file that
# asks for a hundred times that is built to keep a parser busy; this many take about two seconds.
MAX_READS = 200_000
MAX_BYTES = 8 << 20
MAX_HEADERS = 1024
MAX_NAME = 255  # NAME_MAX: a soname is a file name

MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64", "EM_386": "i386", "EM_ARM": "arm"}


@dataclass(frozen=True)
class Library:
    """What the loader and a mirror have to know about one shared library or program."""

    path: str
    bits: int
    machine: str
    soname: str | None
    needed: tuple[str, ...]
    runpath: str | None
    build_id: str | None
    notes: tuple[str, ...]
    version: str | None
    size: int
    mtime_ns: int


def read_library(path: str | Path) -> Library:
    """Read the ELF file at `path`; LibraryError says why it is none that we can use.

    A symbolic link at the end of `path` is refused: whoever resolves links knows the root that
    they are relative to.
    """
    name = str(path)
    try:
        # O_NONBLOCK: opening a FIFO without a writer would wait for ever.
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        raise _error(name, e.strerror or "cannot be opened") from e
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise _error(name, "not a regular file")
    with os.fdopen(fd, "rb") as file:
        # pyelftools raises what its parsers happen to meet (struct, Unicode, key, attribute and
        # assertion errors) and offers no common base for hostile input.
        try:
            return _read(file, name, status)
        except LibraryError:
            raise
        except Exception as e:
            raise _error(name, f"unreadable ELF ({type(e).__name__}: {e})"[:200]) from e


def version_in_name(name: str) -> str | None:
    """Return what follows `.so.` in a file name when it is a dotted version, `535.261.03`."""
    _, dot, version = os.path.basename(name).partition(".so.")  # noqa: PTH119 - a name, not a file
    parts = version.split(".")
    if dot and 2 <= len(parts) <= 4 and all(p.isascii() and p.isdigit() for p in parts):
        return version
    return None


class _Bounded(io.RawIOBase):
    """A file that refuses to be read for longer than any honest library needs."""

    def __init__(self, file: BinaryIO, name: str, size: int) -> None:
        self._file = file
        self._name = name
        self._size = size
        self._reads = 0
        self._bytes = 0

    def read(self, size: int = -1) -> bytes:
        room = max(self._size - self._file.tell(), 0)
        # A length field of 2^60 must not become an allocation.
        size = room if size < 0 else min(size, room)
        self._reads += 1
        self._bytes += size
        if self._reads > MAX_READS or self._bytes > MAX_BYTES:
            raise _error(self._name, "headers, names and notes are out of all proportion")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


def _read(file: BinaryIO, name: str, status: os.stat_result) -> Library:
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import Section

    class Headers(ELFFile):
        # pyelftools reads a hash table when it meets its section: all buckets, one by one, which
        # is most of the time for a library with thousands of symbols. Nothing here asks for them.
        def _make_gnu_hash_section(self, section_header: Any, name: str) -> Any:
            return Section(section_header, name, self)

        def _make_elf_hash_section(self, section_header: Any, name: str) -> Any:
            return Section(section_header, name, self)

    if file.read(4) != b"\x7fELF":
        raise _error(name, "not an ELF file")
    elf = Headers(cast("IO[bytes]", _Bounded(file, name, status.st_size)))
    if elf.header["e_type"] not in ("ET_DYN", "ET_EXEC"):
        raise _error(name, f"neither a library nor a program ({elf.header['e_type']})")
    if elf.num_segments() > MAX_HEADERS or elf.num_sections() > MAX_HEADERS:
        raise _error(name, f"more than {MAX_HEADERS} headers")
    _require_complete(elf, name, status.st_size)
    soname, needed, runpath = _dynamic(elf, name)
    notes = tuple(s.name for s in elf.iter_sections() if s["sh_type"] == "SHT_NOTE")
    machine = str(elf.header["e_machine"])
    return Library(
        path=name,
        bits=int(elf.elfclass),
        machine=MACHINES.get(machine, machine),
        soname=soname,
        needed=needed,
        runpath=runpath,
        build_id=_build_id(elf),
        notes=notes,
        version=version_in_name(name),
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _require_complete(elf: ELFFile, name: str, size: int) -> None:
    """Refuse a file that ends before something its headers announce: a broken download or copy."""
    for segment in elf.iter_segments():
        if segment["p_offset"] + segment["p_filesz"] > size:
            raise _error(name, f"truncated: a {segment['p_type']} segment ends behind the file")
    for section in elf.iter_sections():
        # NOBITS sections (.bss) occupy no room in the file.
        if section["sh_type"] not in ("SHT_NOBITS", "SHT_NULL") and (
            section["sh_offset"] + section["sh_size"] > size
        ):
            raise _error(name, f"truncated: section {section.name!r} ends behind the file")


def _dynamic(elf: ELFFile, name: str) -> tuple[str | None, tuple[str, ...], str | None]:
    """Return soname, needed names and run path, from the segment that the loader itself reads."""
    from elftools.elf.dynamic import DynamicSegment

    soname: str | None = None
    runpath: str | None = None
    rpath: str | None = None
    needed: list[str] = []
    for segment in elf.iter_segments(type="PT_DYNAMIC"):
        if not isinstance(segment, DynamicSegment):
            continue
        for tag in cast("Iterator[Any]", segment.iter_tags()):
            match tag.entry.d_tag:
                case "DT_SONAME":
                    soname = _file_name(tag.soname, name)
                case "DT_NEEDED":
                    needed.append(_path_name(tag.needed, name))
                case "DT_RUNPATH":
                    runpath = _text(tag.runpath, name)
                case "DT_RPATH":
                    rpath = _text(tag.rpath, name)
    return soname, tuple(needed), runpath if runpath is not None else rpath


def _build_id(elf: ELFFile) -> str | None:
    from elftools.elf.segments import NoteSegment

    for segment in elf.iter_segments(type="PT_NOTE"):
        if not isinstance(segment, NoteSegment):
            continue
        for note in segment.iter_notes():
            if note["n_type"] == "NT_GNU_BUILD_ID" and note["n_name"] == "GNU":
                return str(note["n_desc"])
    return None


def _text(value: Any, name: str) -> str:
    text = str(value)
    if len(text) > 4096 or not text.isprintable():
        raise _error(name, "a name in the dynamic section is not printable")
    return text


def _path_name(value: Any, name: str) -> str:
    text = _text(value, name)
    if not text:
        raise _error(name, "an empty name in the dynamic section")
    return text


def _file_name(value: Any, name: str) -> str:
    """A soname becomes the name of a link in the mirror, so it has to be one plain name."""
    text = _path_name(value, name)
    if "/" in text or text in (".", "..") or len(text.encode()) > MAX_NAME:
        raise _error(name, f"soname {text[:80]!r} is not a file name")
    return text


def _error(name: str, reason: str) -> LibraryError:
    return LibraryError(f"{name}: {reason}", hint="reinstall the package that it belongs to")
