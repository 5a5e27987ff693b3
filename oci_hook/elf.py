"""Reads the library search path (DT_RPATH and DT_RUNPATH) of a program in an image.

The file is not trusted: every offset and count is bounded before it is used, and for a malformed
file the path is empty. Only the dynamic section and its strings are read.
"""

from __future__ import annotations

import os
from _struct import Struct  # struct only re-exports this name

EHEADER = Struct("<4sBBB9xHHIQQQIHHHHHH")
PHEADER = Struct("<IIQQQQQQ")
DYNAMIC = Struct("<qQ")
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_STRTAB, DT_RPATH, DT_RUNPATH = 0, 5, 15, 29
MACHINES = (62, 183)  # EM_X86_64, EM_AARCH64
SEGMENTS_LIMIT = 64
DYNAMIC_LIMIT = 64 << 10
PATH_LIMIT = 16 << 10


def run_path(fd: int) -> str:
    """Return the search path of a 64-bit program, separated by colons; "" for other files."""
    head = os.pread(fd, EHEADER.size, 0)
    if len(head) < EHEADER.size:
        return ""
    magic, bits, order, _, _, machine, _, _, start, *_, size, count, _, _, _ = EHEADER.unpack(head)
    if (magic, bits, order, size) != (b"\x7fELF", 2, 1, PHEADER.size) or machine not in MACHINES:
        return ""
    if count > SEGMENTS_LIMIT or start >= 1 << 62:
        return ""
    table = os.pread(fd, count * PHEADER.size, start)
    segments = list(PHEADER.iter_unpack(table[: len(table) // PHEADER.size * PHEADER.size]))
    for kind, _, offset, _, _, length, _, _ in segments:
        if kind == PT_DYNAMIC and offset < 1 << 62:
            data = os.pread(fd, min(length, DYNAMIC_LIMIT), offset)
            return _path(fd, segments, data[: len(data) // DYNAMIC.size * DYNAMIC.size])
    return ""


def _path(fd: int, segments: list[tuple[int, ...]], dynamic: bytes) -> str:
    strings, wanted = 0, []
    for tag, value in DYNAMIC.iter_unpack(dynamic):
        if tag == DT_NULL:
            break
        if tag == DT_STRTAB:
            strings = value
        elif tag in (DT_RPATH, DT_RUNPATH):
            wanted.append(value)
    found = []
    for kind, _, offset, address, _, length, _, _ in segments:
        if kind != PT_LOAD or not address <= strings < address + length:
            continue
        for value in wanted[:4]:
            at = offset + strings - address + value
            text = os.pread(fd, PATH_LIMIT, at) if at < 1 << 62 else b""
            found.append(os.fsdecode(text.partition(b"\0")[0]))
        break
    return ":".join(found)
