"""The loader's cache, /etc/ld.so.cache, read without running ldconfig.

Knows the format that glibc has written since 2.2 (`glibc-ld.so.cache1.1`), alone or behind the
older one. Knows nothing about directories or libraries.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

OLD_MAGIC = b"ld.so-1.7.0\0"
OLD_HEADER = 16  # magic and a count
OLD_ENTRY = 12
NEW_MAGIC = b"glibc-ld.so.cache1.1"
NEW_HEADER = struct.Struct("<20sIIB3xI12x")  # magic, count, bytes of strings, byte order, extension
NEW_ENTRY = struct.Struct("<iIIIQ")  # flags, key, value, (once: OS version), hwcap

# sysdeps/generic/ldconfig.h: the low byte is the kind of library, the next the architecture.
FLAG_ELF_LIBC6 = 0x0003
FLAG_X8664_LIB64 = 0x0300
FLAG_AARCH64_LIB64 = 0x0A00
MACHINE_FLAGS = {
    "x86_64": FLAG_ELF_LIBC6 | FLAG_X8664_LIB64,
    "aarch64": FLAG_ELF_LIBC6 | FLAG_AARCH64_LIB64,
}
BIG_ENDIAN = 3

# A distribution with everything installed has some ten thousand; offsets are checked one by one.
MAX_BYTES = 16 << 20
MAX_STRING = 4096


class CacheError(ValueError):
    """The bytes are no cache that we can read; the text says why."""


@dataclass(frozen=True)
class CacheEntry:
    """One line of `ldconfig -p`."""

    soname: str
    path: str
    flags: int
    hwcap: int


def parse_cache(data: bytes) -> tuple[CacheEntry, ...]:
    """Return the cache's entries in its order; CacheError when `data` is not such a cache."""
    if len(data) > MAX_BYTES:
        raise CacheError("larger than any loader's cache")
    base = 0
    if data.startswith(OLD_MAGIC):
        if len(data) < OLD_HEADER:
            raise CacheError("truncated")
        (count,) = struct.unpack_from("<I", data, len(OLD_MAGIC))
        # The new cache follows at the next multiple of eight (glibc: ALIGN_CACHE).
        base = (OLD_HEADER + count * OLD_ENTRY + 7) & ~7
    if data[base : base + len(NEW_MAGIC)] != NEW_MAGIC:
        raise CacheError("not in the format glibc-ld.so.cache1.1")
    if len(data) < base + NEW_HEADER.size:
        raise CacheError("truncated")
    _, count, _, order, _ = NEW_HEADER.unpack_from(data, base)
    if order == BIG_ENDIAN:
        raise CacheError("written by a big-endian machine")
    if base + NEW_HEADER.size + count * NEW_ENTRY.size > len(data):
        raise CacheError(f"truncated: {count} entries announced")
    entries = []
    for i in range(count):
        flags, key, value, _, hwcap = NEW_ENTRY.unpack_from(
            data, base + NEW_HEADER.size + i * NEW_ENTRY.size
        )
        entries.append(
            CacheEntry(_string(data, base + key), _string(data, base + value), flags, hwcap)
        )
    return tuple(entries)


def _string(data: bytes, offset: int) -> str:
    end = data.find(b"\0", offset, offset + MAX_STRING)
    if offset >= len(data) or end < 0:
        raise CacheError("a name lies outside of the file")
    return data[offset:end].decode("utf-8", "surrogateescape")
