"""Reads glibc's ld.so.cache and writes it with the driver's libraries added.

The layout is that of sysdeps/generic/dl-cache.h. The file in an image is not trusted: every count
and offset is checked before it is used, and one that does not fit raises DamagedCacheError.
"""

from __future__ import annotations

from _struct import Struct, iter_unpack, pack  # struct only re-exports these names

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from oci_hook.light_typing import NamedTuple

OLD_MAGIC = b"ld.so-1.7.0"
NEW_MAGIC = b"glibc-ld.so.cache1.1"
EXTENSION_MAGIC = 0xEAA42174
TAG_GENERATOR = 0
TAG_HWCAPS = 1
FLAGS_X86_64 = 0x0303  # FLAG_X8664_LIB64 | FLAG_ELF_LIBC6
FLAGS_AARCH64 = 0x0A03  # FLAG_AARCH64_LIB64 | FLAG_ELF_LIBC6
FLAGS_I386 = 0x0003  # FLAG_ELF_LIBC6; there is no bit for i386
DL_CACHE_HWCAP_EXTENSION = 1 << 62
CACHE_LIMIT = 4 << 20
NAME_LIMIT = 255  # NAME_MAX: a soname in a cache is the name of a file
PATH_LIMIT = 4096
SECTIONS_LIMIT = 16  # glibc has two kinds
HWCAPS_LIMIT = 4096

OLD_HEADER = Struct("=12sI")  # eleven characters and a byte of padding
OLD_ENTRY_SIZE = 12
HEADER = Struct("=20sIIB3xI12x")
ENTRY = Struct("=iIIIQ")
EXTENSION = Struct("=II")
SECTION = Struct("=IIII")
ENDIAN_UNSET, ENDIAN_LITTLE = 0, 2


class DamagedCacheError(ValueError):
    """The cache is damaged."""


class CachedLibrary(NamedTuple):
    """One library in a cache."""

    flags: int
    soname: bytes
    path: bytes
    osversion: int = 0
    hwcap: int = 0


class Cache(NamedTuple):
    """A cache; `hwcaps` are the names that entries with DL_CACHE_HWCAP_EXTENSION refer to."""

    entries: tuple[CachedLibrary, ...]
    hwcaps: tuple[bytes, ...] | None = None
    generator: bytes | None = None


def is_cache(data: bytes) -> bool:
    """Return whether a loader would accept this as a cache; it ignores anything else."""
    return data.startswith((OLD_MAGIC, NEW_MAGIC))


def _string(data: bytes, offset: int, limit: int) -> bytes:
    end = data.find(b"\0", offset, offset + limit + 1)
    if offset >= len(data) or end < 0:
        raise DamagedCacheError(f"the string at offset {offset} is not terminated")
    return data[offset:end]


def _new_part(data: bytes) -> int | None:
    """Return where the new format begins: at the start, or after the old one; None if absent."""
    if data.startswith(NEW_MAGIC):
        return 0
    if not data.startswith(OLD_MAGIC) or len(data) < OLD_HEADER.size:
        raise DamagedCacheError("no magic")
    _, count = OLD_HEADER.unpack_from(data)
    start = OLD_HEADER.size + count * OLD_ENTRY_SIZE
    start = (start + 7) & ~7  # ALIGN_CACHE: the alignment of struct cache_file_new
    return start if data.startswith(NEW_MAGIC, start) else None


def parse(data: bytes) -> Cache | None:
    """Parse a cache; None if it has only the old format, which no 64-bit loader uses."""
    if len(data) > CACHE_LIMIT:
        raise DamagedCacheError(f"larger than {CACHE_LIMIT} bytes")
    base = _new_part(data)
    if base is None:
        return None
    if len(data) < base + HEADER.size:
        raise DamagedCacheError("the header is truncated")
    _, count, _, endian, extension = HEADER.unpack_from(data, base)
    if endian & 3 not in (ENDIAN_UNSET, ENDIAN_LITTLE):
        raise DamagedCacheError("the byte order is not little-endian")
    first = base + HEADER.size
    if count > (len(data) - first) // ENTRY.size:
        raise DamagedCacheError(f"{count} entries do not fit")
    entries = _parse_entries(data, base, first, count)
    if not extension:
        return Cache(entries)
    hwcaps, generator = _parse_extension(data, extension)
    return Cache(entries, hwcaps, generator)


def _parse_entries(data: bytes, base: int, first: int, count: int) -> tuple[CachedLibrary, ...]:
    """Read the entries. Raise DamagedCacheError if the names total over twice the file's size.

    ldconfig writes each path once, and a soname is at most as long as its path. Entries that share
    a long name would fill the memory with copies of it.
    """
    entries = []
    room = 2 * len(data)
    for flags, key, value, osversion, hwcap in ENTRY.iter_unpack(
        memoryview(data)[first : first + count * ENTRY.size]
    ):
        soname = _string(data, base + key, NAME_LIMIT)
        path = _string(data, base + value, PATH_LIMIT)
        room -= len(soname) + len(path)
        if room < 0:
            raise DamagedCacheError("the names take too many bytes")
        entries.append(CachedLibrary(flags, soname, path, osversion, hwcap))
    return tuple(entries)


def _parse_extension(data: bytes, offset: int) -> tuple[tuple[bytes, ...] | None, bytes | None]:
    """Read the sections after the strings. Their offsets count from the start of the file."""
    if offset % 4 or offset + EXTENSION.size > len(data):
        raise DamagedCacheError("the extension does not fit")
    magic, count = EXTENSION.unpack_from(data, offset)
    first = offset + EXTENSION.size
    room = (len(data) - first) // SECTION.size
    if magic != EXTENSION_MAGIC or count > min(room, SECTIONS_LIMIT):
        raise DamagedCacheError("the extension is damaged")
    hwcaps = generator = None
    for i in range(count):
        tag, _, start, size = SECTION.unpack_from(data, first + i * SECTION.size)
        if start + size > len(data):
            raise DamagedCacheError("a section does not fit")
        if tag == TAG_GENERATOR:
            generator = data[start : start + size]
        elif tag == TAG_HWCAPS:
            if start % 4 or size % 4 or size > HWCAPS_LIMIT:
                raise DamagedCacheError("the hwcaps section is damaged")
            hwcaps = tuple(
                _string(data, o, NAME_LIMIT)
                for (o,) in iter_unpack("=I", data[start : start + size])
            )
    return hwcaps, generator


def compare(a: bytes, b: bytes, *, signed: bool = True) -> int:
    """Compare sonames as the loader does (_dl_cache_libcmp): runs of digits by their value.

    Return a negative number, 0 or a positive number, like strcmp. Other bytes are compared as
    `char`, which is signed on x86, but not on aarch64.
    """
    i = j = 0
    sign = 128 if signed else 0
    a += b"\0"
    b += b"\0"
    while a[i]:
        x, y = a[i], b[j]
        if 48 <= x <= 57:
            if not 48 <= y <= 57:
                return 1
            m = n = 0
            while 48 <= a[i] <= 57:
                m = m * 10 + a[i] - 48
                i += 1
            while 48 <= b[j] <= 57:
                n = n * 10 + b[j] - 48
                j += 1
            if m != n:
                return m - n
        elif 48 <= y <= 57:
            return -1
        elif x != y:
            return (x ^ sign) - (y ^ sign)
        else:
            i += 1
            j += 1
    return -((b[j] ^ sign) - sign) if b[j] else 0


def with_libraries(
    cache: Cache, directory: bytes, sonames: tuple[bytes, ...], flags: int = FLAGS_X86_64
) -> Cache:
    """Return a cache that maps `sonames` to `directory`, and is otherwise the same.

    Entries are in descending order. New entries are inserted where a binary search for them ends,
    so the order of the others does not change, whatever it is.
    """
    ours = frozenset(sonames)
    entries = [e for e in cache.entries if e.soname not in ours or e.flags != flags]
    for soname in sonames:
        low, high = 0, len(entries)
        while low < high:
            middle = (low + high) // 2
            order = compare(entries[middle].soname, soname, signed=flags != FLAGS_AARCH64)
            # Among equal names ldconfig puts those with higher flags first.
            if order > 0 or (order == 0 and entries[middle].flags > flags):
                low = middle + 1
            else:
                high = middle
        entries.insert(low, CachedLibrary(flags, soname, directory + b"/" + soname))
    return cache._replace(entries=tuple(entries))


def strays(
    cache: Cache, directory: bytes, sonames: tuple[bytes, ...], flags: int = FLAGS_X86_64
) -> tuple[bytes, ...]:
    """Return the paths outside `directory` that the cache has for `sonames`."""
    ours = frozenset(sonames)
    prefix = directory + b"/"
    return tuple(
        e.path
        for e in cache.entries
        if e.soname in ours and e.flags == flags and e.path != prefix + e.soname
    )


def write(cache: Cache) -> bytes:
    """Return a cache in the new format, which every glibc since 2.2 reads."""
    strings = bytearray()
    offsets: dict[bytes, int] = {}
    start = HEADER.size + len(cache.entries) * ENTRY.size

    def place(text: bytes) -> int:
        if text not in offsets:
            offsets[text] = start + len(strings)
            strings.extend(text + b"\0")
        return offsets[text]

    rows = b"".join(
        ENTRY.pack(e.flags, place(e.soname), place(e.path), e.osversion, e.hwcap)
        for e in cache.entries
    )
    hwcaps = None
    if cache.hwcaps is not None:
        hwcaps = b"".join(pack("=I", place(name)) for name in cache.hwcaps)
    sections = [
        (tag, content)
        for tag, content in ((TAG_GENERATOR, cache.generator), (TAG_HWCAPS, hwcaps))
        if content is not None
    ]
    length = len(strings)
    strings.extend(b"\0" * (-(start + length) % 4))
    extension = start + len(strings) if sections else 0
    header = HEADER.pack(NEW_MAGIC, len(cache.entries), length, ENDIAN_LITTLE, extension)
    if not sections:
        return header + rows + bytes(strings[:length])
    directory = bytearray(EXTENSION.pack(EXTENSION_MAGIC, len(sections)))
    body = bytearray()
    offset = extension + EXTENSION.size + len(sections) * SECTION.size
    # The hwcaps array comes first: it has to be aligned, and the generator's text can be of any
    # length.
    for tag, content in sorted(sections, reverse=True):
        directory += SECTION.pack(tag, 0, offset + len(body), len(content))
        body += content
    return header + rows + bytes(strings) + bytes(directory) + bytes(body)
