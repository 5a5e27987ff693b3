"""Reads the facts that a driver mirror needs from one ELF file, with pyelftools.

This module knows nothing about drivers. For any file, `read_library` and `read_exports` either
return or raise `LibraryError`: they open the file without blocking (a FIFO is refused), and the
amount read from one file is bounded. Facts for the loader are read as the loader reads them, from
the segments, never from sections.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vdriver.errors import LibraryError

# Bounds for one file, in read calls and bytes. The files in drivers 390.157 to 555.58.02 need at
# most 958 reads and 7 KB for a Library, 25,715 reads and 280 KB for exports; the 46,000 exports of
# LLVM 15 need 388,096 reads and 5.9 MB. A file that needs more was made to keep a parser busy.
# MAX_READS reads take about a second.
MAX_READS = 500_000
MAX_BYTES = 8 << 20
MAX_HEADERS = 1024
MAX_NOTES = 64 << 10  # bytes; a driver's library has a few hundred
MAX_TEXT = 4096  # PATH_MAX
MAX_NAME = 255  # NAME_MAX: a soname is a file name

NT_GNU_ABI_TAG = 1
NT_GNU_BUILD_ID = 3
ABI_SYSTEMS = {0: "Linux", 1: "Gnu", 2: "Solaris2", 3: "Freebsd", 4: "Netbsd", 5: "Syllable"}
MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64", "EM_386": "i386", "EM_ARM": "arm"}

# Symbols that a search by name finds. On GNU systems, STB_LOOS is a unique symbol and STT_LOOS an
# indirect function.
BINDS = ("STB_GLOBAL", "STB_WEAK", "STB_LOOS")
TYPES = ("STT_NOTYPE", "STT_OBJECT", "STT_FUNC", "STT_COMMON", "STT_TLS", "STT_LOOS")
VISIBILITIES = ("STV_DEFAULT", "STV_PROTECTED")

# Tags that may occur only once: of two equal tags, the loader uses the last, pyelftools the first.
SINGLE = ("DT_SONAME", "DT_RUNPATH", "DT_RPATH", "DT_STRTAB", "DT_SYMTAB", "DT_HASH", "DT_GNU_HASH")


@dataclass(frozen=True)
class Library:
    """The facts about one shared library or program that the loader and a mirror need.

    `notes` are the names of the note sections, `version` is the one in the file's name, `size` is
    in bytes, `interpreter` is a program's loader, and `abi` is the operating system and the oldest
    kernel that the file supports ("Linux 2.3.99").
    """

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
    interpreter: str | None = None
    abi: str | None = None


def read_library(path: str | Path) -> Library:
    """Read the ELF file at `path`; LibraryError if it cannot be used.

    A symbolic link at the end of `path` is refused: only the caller knows the root under which
    links are to be resolved.
    """
    name = str(path)
    with _opened(name) as (elf, notes, status):
        soname, needed, runpath = _linked(elf)
        build_id, abi = _gnu_notes(elf)
        machine = str(elf["e_machine"])
        return Library(
            path=name,
            bits=elf.elfclass,
            machine=MACHINES.get(machine, machine),
            soname=soname,
            needed=needed,
            runpath=runpath,
            interpreter=_interpreter(elf),
            build_id=build_id,
            abi=abi,
            notes=notes,
            version=version_in_name(name),
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
        )


def read_exports(path: str | Path) -> tuple[str, ...]:
    """Return the sorted names that dlsym finds in the file at `path`; errors as in read_library.

    These are the dynamic symbols that are defined, visible, and global, weak or unique. Each name
    occurs once, even if it has several symbol versions.
    """
    with _opened(str(path)) as (elf, _, _):
        segment, tags = _dynamic(elf)
        values = {tag["d_tag"]: tag["d_val"] for tag in tags}
        # Without a hash table pyelftools guesses the number of symbols; the loader finds none.
        if not _has_hash_table(elf, values):
            return ()
        room = segment.num_symbols() * elf.structs.Elf_Sym.sizeof()
        _offset(elf, values.get("DT_SYMTAB", 0), room, "the symbol table")
        # Otherwise pyelftools searches for the tables again for every symbol.
        segment.get_table_offset = functools.cache(segment.get_table_offset)
        found = {symbol.name for symbol in segment.iter_symbols() if _is_found(symbol)}
        return tuple(sorted(_text(name) for name in found if name))


def version_in_name(name: str) -> str | None:
    """Return the text after `.so.` in a file name if it is a dotted version like `535.261.03`."""
    _, dot, version = os.path.basename(name).partition(".so.")  # noqa: PTH119 - a name, not a file
    parts = version.split(".")
    if dot and 2 <= len(parts) <= 4 and all(p.isascii() and p.isdigit() for p in parts):
        return version
    return None


class _RefusedError(Exception):
    """The reason why a file is refused; `_opened` adds the file's name."""


class _Stream(io.RawIOBase):
    """A file up to `end`, read in pieces that are bounded in number and in total size."""

    def __init__(self, fd: int, end: int) -> None:
        self.end = end
        self._fd = fd
        self._at = 0
        self._reads = 0
        self._bytes = 0

    def read(self, size: int = -1) -> bytes:
        # A length field of 2^60 must not become an allocation.
        room = max(self.end - self._at, 0)
        size = room if size < 0 else min(size, room)
        self._reads += 1
        self._bytes += size
        modest = self._reads <= MAX_READS and self._bytes <= MAX_BYTES
        _require(modest, "headers, names and tables are unreasonably large")
        data = os.pread(self._fd, size, self._at) if size else b""
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.end)[whence]
        return self._at


@contextlib.contextmanager
def _opened(name: str) -> Iterator[tuple[Any, tuple[str, ...], os.stat_result]]:
    """Open a file; yield the result of `_parse` and the file's status, or raise LibraryError."""
    from elftools.common.exceptions import ELFError
    from elftools.construct import ConstructError

    try:
        # O_NONBLOCK: opening a FIFO that has no writer would block forever.
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        is_link = e.errno == errno.ELOOP
        raise _error(name, "a symbolic link" if is_link else e.strerror or str(e)) from e
    except ValueError as e:  # a NUL byte in the name
        raise _error(repr(name), "not a file name") from e
    try:
        status = os.fstat(fd)
        yield *_parse(fd, status), status
    except _RefusedError as e:
        # Raised without a cause: ElfCache stores only refusals that depend on the file's content.
        raise _error(name, str(e)) from None
    # pyelftools raises these for damaged files. It may also wrap the OSError of a failing disk in
    # them.
    except (ELFError, ConstructError, UnicodeDecodeError, struct.error, OSError) as e:
        raise _error(name, f"unreadable or truncated ELF ({type(e).__name__}: {e})"[:200]) from e
    finally:
        os.close(fd)


def _parse(fd: int, status: os.stat_result) -> tuple[Any, tuple[str, ...]]:
    """Return an ELFFile that is complete and can be loaded, and its note sections' names."""
    from elftools.elf.elffile import ELFFile

    _require(stat.S_ISREG(status.st_mode), "not a regular file")
    stream: Any = _Stream(fd, status.st_size)
    _require(stream.read(4) == b"\x7fELF", "not an ELF file")
    elf = ELFFile(stream)
    kind, count, header = elf["e_type"], elf["e_phnum"], elf.structs.Elf_Phdr.sizeof()
    _require(elf.little_endian, "not in the byte order of this machine (little-endian)")
    _require(kind in ("ET_DYN", "ET_EXEC"), f"neither a library nor a program ({kind})")
    _require(count, "no loadable segments")
    _require(max(count, elf.num_sections()) <= MAX_HEADERS, f"more than {MAX_HEADERS} headers")
    size = elf["e_phentsize"]
    _require(size == header, f"headers of {size} bytes instead of {header}")
    notes = _note_sections(elf, status.st_size)
    # Without sections pyelftools takes names from DT_STRTAB, as the loader does, and does not read
    # whole hash tables whenever it reaches the dynamic segment.
    elf.header["e_shoff"] = 0
    end = 0
    for s in elf.iter_segments():
        whole = s["p_offset"] + s["p_filesz"] <= status.st_size
        _require(whole, f"truncated: a {s['p_type']} segment extends beyond the file")
        if s["p_type"] == "PT_LOAD":
            # The loader maps segments in this order, each over the earlier ones.
            _require(s["p_vaddr"] >= end, "loaded segments overlap or are out of order")
            end = s["p_vaddr"] + max(s["p_memsz"], s["p_filesz"])
    return elf, notes


def _note_sections(elf: Any, size: int) -> tuple[str, ...]:
    """Return the note sections' names; every section must end within the `size` bytes."""
    from elftools.common.utils import struct_parse

    notes = []
    for number in range(elf.num_sections()):
        # Not get_section, which would read all of a hash table.
        place = elf["e_shoff"] + number * elf["e_shentsize"]
        s = struct_parse(elf.structs.Elf_Shdr, elf.stream, place)
        # NOBITS sections (.bss) occupy no space in the file.
        room = 0 if s["sh_type"] in ("SHT_NOBITS", "SHT_NULL") else s["sh_offset"] + s["sh_size"]
        _require(room <= size, f"truncated: section {number} extends beyond the file")
        if s["sh_type"] == "SHT_NOTE" and elf.get_shstrndx():
            notes.append(_text(elf.get_section(number).name))
    return tuple(notes)


def _offset(elf: Any, address: int, size: int, what: str) -> Any:
    """Return the offset in the file from which the `size` bytes at an address are loaded."""
    offset = next(elf.address_offsets(address, size), None)
    _require(offset is not None, f"{what} is not in a loaded segment")
    return offset


def _dynamic(elf: Any) -> tuple[Any, list[Any]]:
    """Return the dynamic segment and its tags; None and no tags for a static program."""
    segments = [s for s in elf.iter_segments("PT_DYNAMIC") if s["p_filesz"]]
    if not segments:
        return None, []
    _require(len(segments) == 1, "more than one dynamic segment")
    [segment] = segments
    # The loader uses the address and pyelftools the offset: both must find the same bytes.
    place = _offset(elf, segment["p_vaddr"], segment["p_filesz"], "the dynamic segment")
    _require(place == segment["p_offset"], "the dynamic segment is not at its load address")
    _, names = segment.get_table_offset("DT_STRTAB")
    _require(names is not None, "no string table in a loaded segment")
    tags = list(itertools.islice(segment.iter_tags(), MAX_HEADERS + 1))
    _require(len(tags) <= MAX_HEADERS, f"more than {MAX_HEADERS} dynamic tags")
    kinds = [tag["d_tag"] for tag in tags]
    _require(all(kinds.count(kind) < 2 for kind in SINGLE), "a dynamic tag occurs twice")
    return segment, tags


def _linked(elf: Any) -> tuple[str | None, tuple[str, ...], str | None]:
    """Return the soname, the needed names and the run path."""
    _, tags = _dynamic(elf)
    names = {
        kind: [_text(getattr(tag, kind)) for tag in tags if hasattr(tag, kind)]
        for kind in ("soname", "needed", "runpath", "rpath")
    }
    _require(all(names["needed"]), "an empty library name")
    soname, runpath, rpath = (next(iter(names[k]), None) for k in ("soname", "runpath", "rpath"))
    if soname is not None:
        # The soname becomes the name of a link in the mirror, so it must be one plain file name.
        plain = soname not in ("", ".", "..") and "/" not in soname
        short = len(soname.encode()) <= MAX_NAME
        _require(plain and short, f"soname {soname[:80]!r} is not a file name")
    return soname, tuple(names["needed"]), rpath if runpath is None else runpath


def _interpreter(elf: Any) -> str | None:
    for segment in elf.iter_segments("PT_INTERP"):
        name = _text(segment.get_interp_name())
        _require(0 < len(name) < segment["p_filesz"], "an empty or unterminated interpreter name")
        return name
    return None


def _gnu_notes(elf: Any) -> tuple[str | None, str | None]:
    """Return the build id and the ABI; the first note of each kind wins."""
    build_id = abi = None
    segments = list(elf.iter_segments("PT_NOTE"))
    _require(sum(s["p_filesz"] for s in segments) <= MAX_NOTES, f"notes of over {MAX_NOTES} bytes")
    for segment in segments:
        for name, kind, content in _notes(elf, segment):
            if (name, kind) == (b"GNU", NT_GNU_BUILD_ID):
                build_id = build_id or content.hex()
            elif (name, kind) == (b"GNU", NT_GNU_ABI_TAG):
                _require(len(content) >= 16, "a truncated ABI note")
                system, *version = struct.unpack_from("<4I", content)
                name_of = ABI_SYSTEMS.get(system, str(system))
                abi = abi or f"{name_of} {'.'.join(map(str, version))}"
    return build_id, abi


def _notes(elf: Any, segment: Any) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield the name, type and content of each note in a segment.

    They are parsed here because pyelftools before 0.31 takes padding at a segment's end for a note.
    """
    elf.stream.seek(segment["p_offset"])
    data = elf.stream.read(segment["p_filesz"])
    at, header = 0, struct.Struct("<III")
    while at + header.size < len(data):
        # Name and content are padded to a multiple of four, whatever the segment's alignment.
        aligned = segment["p_align"] != 8 or not at % 8
        _require(aligned, "a note is not aligned to 8 bytes, although its segment is")
        name_size, size, kind = header.unpack_from(data, at)
        start = at + header.size + (name_size + 3) // 4 * 4
        _require(start + size <= len(data), "a note extends beyond its segment")
        name = data[at + header.size :][:name_size].partition(b"\0")[0]
        yield name, kind, data[start : start + size]
        at = start + (size + 3) // 4 * 4


def _has_hash_table(elf: Any, values: dict[str, int]) -> bool:
    """Return whether the file has a hash table for names.

    The part of the table that is in use must lie in a loaded segment.
    """
    table = values.get("DT_GNU_HASH", values.get("DT_HASH"))
    if table is None:
        return False
    elf.stream.seek(_offset(elf, table, 16, "a hash table"))
    buckets, number, filters, _ = struct.unpack("<IIII", elf.stream.read(16))
    words = 2 + number if "DT_GNU_HASH" not in values else 4 + filters * elf.elfclass // 32
    _offset(elf, table, 4 * (words + buckets), "a hash table")
    return bool(buckets)


def _is_found(symbol: Any) -> bool:
    """Return whether a search by name finds a symbol.

    It does not find the symbols that name versions, which are absolute and have the value zero.
    """
    kind = symbol["st_info"]["type"]
    return (
        symbol["st_shndx"] != "SHN_UNDEF"
        and symbol["st_info"]["bind"] in BINDS
        and kind in TYPES
        and symbol["st_other"]["visibility"] in VISIBILITIES
        and bool(symbol["st_value"] or kind == "STT_TLS")
    )


def _text(value: str) -> str:
    usable = len(value) <= MAX_TEXT and value.isprintable()
    _require(usable, f"a name that is not printable or too long ({value[:40]!r})")
    return value


def _require(holds: object, reason: str) -> None:
    if not holds:
        raise _RefusedError(reason)


def _error(name: str, reason: str) -> LibraryError:
    return LibraryError(f"{name}: {reason}", hint="reinstall the package that it belongs to")
