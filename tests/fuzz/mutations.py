"""Damage real files, and check what a reader must guarantee for damaged files."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from hypothesis import strategies as st

from tests.unit.vdriver_trees import elf, elf_parts, rich_elf
from vdriver import elf as module
from vdriver.elf import read_exports, read_library
from vdriver.errors import LibraryError
from vdriver.ldcache import CacheError, parse_cache

SECONDS = 10  # time limit of a reader; normally it takes a millisecond
NUMBERS = (0, 1, 2, 7, 8, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)


class Counted:
    """Count reads with os.pread inside the block: their number in `calls`, and their size in `bytes`."""

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0

    def __enter__(self) -> Self:
        self._pread = os.pread
        os.pread = self._count
        return self

    def __exit__(self, *_: object) -> None:
        os.pread = self._pread

    def _count(self, fd: int, size: int, offset: int) -> bytes:
        self.calls += 1
        self.bytes += size
        return self._pread(fd, size, offset)


def hold_to_the_contract(content: bytes) -> None:
    """Read a file with these bytes, and check that the result is a library or a refusal, within
    bounds.
    """
    with tempfile.TemporaryDirectory() as work:
        path = Path(work, "libfuzz.so.1.2.3")
        path.write_bytes(content)
        with _alarm(), Counted() as counted:
            library: Any = _answer(read_library, path)
            first = counted.calls
            exports: Any = _answer(read_exports, path)
    # A read beyond the limits is refused before it calls os.pread.
    assert max(first, counted.calls - first) <= module.MAX_READS
    assert counted.bytes <= 2 * module.MAX_BYTES
    if library is not None:
        texts = [
            library.soname,
            library.runpath,
            library.interpreter,
            library.abi,
            library.build_id,
        ]
        texts += [*library.needed, *library.notes]
        assert all(t is None or t.isprintable() for t in texts)
        assert library.soname is None or ("/" not in library.soname and library.soname)
        assert library.bits in (32, 64)
        assert library.size == len(content)
    if exports is not None:
        assert list(exports) == sorted(set(exports))
        assert all(name.isprintable() for name in exports)


def hold_the_cache_to_its_contract(content: bytes) -> None:
    """Parse a loader's cache with these bytes, and check that the result is entries or a refusal."""
    with _alarm():
        try:
            entries = parse_cache(content)
        except CacheError:
            return
    assert len(entries) * 24 <= len(content)
    assert sum(len(e.soname) + len(e.path) for e in entries) <= 16 << 20


def _answer(question: Any, path: Path) -> Any:
    try:
        return question(path)
    except LibraryError as e:
        text = str(e)
    assert text.isprintable()
    return None


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"still reading after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def bases() -> list[bytes]:
    """Return ELF files of 32 and 64 bits: with all parts, without sections, a plain library, and a
    program.
    """
    found = []
    for bits in (64, 32):
        found += [rich_elf(bits, s, interpreter=True) for s in ("both", "gnu", "sysv")]
        whole = rich_elf(bits, "gnu")
        cut = bytearray(whole[: elf_parts(whole)["sections"][0]])
        struct.pack_into("<Q" if bits == 64 else "<I", cut, 40 if bits == 64 else 32, 0)
        struct.pack_into("<HHH", cut, 58 if bits == 64 else 46, 0, 0, 0)
        found += [bytes(cut), elf("liba.so.1", ("libc.so.6",), bits=bits)]
    return [*found, elf(program=True)]


@st.composite
def mutated_elf(draw: st.DrawFn) -> bytes:
    """Generate one of `bases` with up to six changes, most of them in parts that readers use."""
    originals = bases()
    original = draw(st.sampled_from(originals))
    content = bytearray(original)
    parts = elf_parts(original)
    for _ in range(draw(st.integers(1, 6))):
        change = draw(st.sampled_from(("word", "word", "word", "bytes", "cut", "splice", "grow")))
        if change == "cut":
            del content[draw(st.integers(0, len(content))) :]
            continue
        if change == "grow":
            content += draw(st.sampled_from((b"\0", b"A", b"\xff"))) * draw(st.integers(1, 1 << 16))
            continue
        start, size = parts[draw(st.sampled_from(sorted(parts)))]
        at = start + draw(st.integers(0, max(size, 64) - 1))
        if change == "word":
            width = draw(st.sampled_from((1, 2, 4, 8)))
            number = draw(
                st.sampled_from((*NUMBERS, len(content), start)) | st.integers(0, 1 << 64)
            )
            at -= at % width
            new = (number % (1 << 8 * width)).to_bytes(width, "little")
        elif change == "bytes":
            new = draw(st.binary(min_size=1, max_size=16))
        else:
            other = draw(st.sampled_from(originals))
            there, length = elf_parts(other)[draw(st.sampled_from(sorted(elf_parts(other))))]
            new = other[there : there + max(length, 16)]
        content[at : at + len(new)] = new
    return bytes(content)


def cache_bytes() -> bytes:
    """Return a loader's cache of three libraries that follows a cache in the older format."""
    strings = b"liba.so.1\0/x/liba.so.1\0/usr/lib/libcuda.so.1\0"
    names = ((0, 10), (3, 13), (33, 23))
    base = 48 + 24 * len(names)
    new = struct.pack("<20sIIB3xI12x", b"glibc-ld.so.cache1.1", len(names), len(strings), 2, 0)
    for key, value in names:
        new += struct.pack("<iIIIQ", 0x0303, base + key, base + value, 0, 0)
    old = b"ld.so-1.7.0\0" + struct.pack("<I", 1) + bytes(12)
    return old + bytes(-len(old) % 8) + new + strings


@st.composite
def mutated_cache(draw: st.DrawFn) -> bytes:
    """Generate a cache with up to six changes, most of them in counts and offsets."""
    whole = cache_bytes()
    content = bytearray(draw(st.sampled_from((whole, whole[32:]))))
    header = content.find(b"glibc")
    for _ in range(draw(st.integers(1, 6))):
        change = draw(st.sampled_from(("word", "word", "word", "bytes", "cut", "grow")))
        if change == "cut":
            del content[draw(st.integers(0, len(content))) :]
        elif change == "grow":
            content += draw(st.sampled_from((b"\0", b"A", b"\xff"))) * draw(st.integers(1, 1 << 16))
        elif change == "bytes":
            at = draw(st.integers(0, len(whole)))
            new = draw(st.binary(min_size=1, max_size=16))
            content[at : at + len(new)] = new
        else:
            at = draw(st.sampled_from((0, 12, 16, *range(header + 20, header + 120, 4))))
            number = draw(st.sampled_from((*NUMBERS, len(content))) | st.integers(0, 1 << 32))
            content[at : at + 4] = (number % (1 << 32)).to_bytes(4, "little")
    return bytes(content)
