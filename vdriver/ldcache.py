"""Reads the loader's cache, /etc/ld.so.cache, without running ldconfig.

It supports the format that glibc has written since 2.2 (`glibc-ld.so.cache1.1`), the older one
(`ld.so-1.7.0`), and a file that has both. It does not know which libraries belong to a driver.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

OLD_MAGIC = b"ld.so-1.7.0\0"
OLD_HEADER = 16  # magic and a count
OLD_ENTRY = struct.Struct("<iII")  # flags, key, value
NEW_MAGIC = b"glibc-ld.so.cache1.1"
NEW_HEADER = struct.Struct("<20sIIB3xI12x")  # magic, count, bytes of strings, byte order, extension
NEW_ENTRY = struct.Struct("<iIIIQ")  # flags, key, value, unused (formerly OS version), hwcap

# sysdeps/generic/ldconfig.h: the low byte is the kind of library, the next the architecture.
FLAG_ELF_LIBC6 = 0x0003
FLAG_X8664_LIB64 = 0x0300
FLAG_AARCH64_LIB64 = 0x0A00
MACHINE_FLAGS = {
    "x86_64": FLAG_ELF_LIBC6 | FLAG_X8664_LIB64,
    "aarch64": FLAG_ELF_LIBC6 | FLAG_AARCH64_LIB64,
}
BIG_ENDIAN = 3

# Bounds for a file and for one name, in bytes. A distribution with everything installed has about
# ten thousand entries and 2 MiB of names. Offsets are checked one by one.
MAX_BYTES = 16 << 20
MAX_STRING = 4096


class CacheError(ValueError):
    """The data are not a valid cache; the message gives the reason."""


@dataclass(frozen=True)
class CacheEntry:
    """One entry in the cache, as `ldconfig -p` prints it on one line."""

    soname: str
    path: str
    flags: int
    hwcap: int


def parse_cache(data: bytes) -> tuple[CacheEntry, ...]:
    """Return the cache's entries in file order; raise CacheError if `data` is not a cache.

    If a file has both formats, the newer one is used, as in the loader.
    """
    if len(data) > MAX_BYTES:
        raise CacheError("larger than any loader's cache")
    base = old = 0
    if data.startswith(OLD_MAGIC):
        if len(data) < OLD_HEADER:
            raise CacheError("truncated")
        (old,) = struct.unpack_from("<I", data, len(OLD_MAGIC))
        # The new cache follows at the next multiple of eight (glibc: ALIGN_CACHE).
        base = (OLD_HEADER + old * OLD_ENTRY.size + 7) & ~7
    if data[base : base + len(NEW_MAGIC)] == NEW_MAGIC:
        return _entries(data, *_new_entries(data, base))
    if not base:
        raise CacheError("in neither of the formats glibc-ld.so.cache1.1 and ld.so-1.7.0")
    strings = OLD_HEADER + old * OLD_ENTRY.size
    if strings > len(data):
        raise CacheError(f"truncated: the header declares {old} entries")
    rows = OLD_ENTRY.iter_unpack(data[OLD_HEADER:strings])
    return _entries(data, ((flags, key, value, 0) for flags, key, value in rows), strings)


Row = tuple[int, int, int, int]


def _new_entries(data: bytes, base: int) -> tuple[Iterator[Row], int]:
    """Return each entry's flags, key, value and hwcap, and the base of the keys and values."""
    if len(data) < base + NEW_HEADER.size:
        raise CacheError("truncated")
    _, count, _, order, _ = NEW_HEADER.unpack_from(data, base)
    if order == BIG_ENDIAN:
        raise CacheError("written by a big-endian machine")
    start = base + NEW_HEADER.size
    end = start + count * NEW_ENTRY.size
    if end > len(data):
        raise CacheError(f"truncated: the header declares {count} entries")
    rows = NEW_ENTRY.iter_unpack(data[start:end])
    return ((flags, key, value, hwcap) for flags, key, value, _, hwcap in rows), base


def _entries(data: bytes, rows: Iterator[Row], base: int) -> tuple[CacheEntry, ...]:
    entries = []
    total = 0
    for flags, key, value, hwcap in rows:
        soname, path = _string(data, base + key), _string(data, base + value)
        # Entries may share names, so a long name that all of them share could exhaust memory.
        total += len(soname) + len(path)
        if total > MAX_BYTES:
            raise CacheError("the names take too many bytes")
        entries.append(CacheEntry(soname, path, flags, hwcap))
    return tuple(entries)


def _string(data: bytes, offset: int) -> str:
    end = data.find(b"\0", offset, offset + MAX_STRING)
    if offset >= len(data) or end < 0:
        raise CacheError("a name lies outside the file, or is too long")
    return data[offset:end].decode("utf-8", "surrogateescape")
