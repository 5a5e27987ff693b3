"""Reads and writes the grant page and the ledger, as `libcontrol.layout` describes them.

A ledger is written by the container, so it is not trusted: a value read from it is a number of
known width and nothing more, and the caller checks its bounds.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Callable, Mapping, Sequence
from mmap import mmap

from libcontrol import layout

_CODES = {"u8": "B", "u32": "I", "u64": "Q"}
# Numbers in native order (both architectures are little-endian) are written with one store of their
# width. Those in a fixed order are written byte by byte, and another process could see a torn
# value.
_NATIVE = "@"
_NUMBERS = {name: struct.Struct(_NATIVE + code) for name, code in _CODES.items()}
# The governor reads thousands of numbers a second, so what an access needs is computed once:
# offset, size, the functions that unpack and pack the number, and whether its store is a release
# store.
_PLACES = {
    (s.name, field.name): (
        layout.offsets(s)[field.name],
        layout.SIZES[field.type],
        _NUMBERS[field.type].unpack_from,
        _NUMBERS[field.type].pack_into,
        field.order == "release",
    )
    for s in layout.STRUCTS
    for field in s.fields
}
_USAGE_ENTRY = struct.Struct(
    _NATIVE + "".join(f"{field.n}{_CODES[field.type]}" for field in layout.USAGE_ENTRY.fields)
)
_USAGE_BLANKS = [(field.name, (0,) * field.n) for field in layout.USAGE_ENTRY.fields]


# Architectures other than x86-64 let a processor reorder stores with stores, and loads with loads.
_REORDERS = platform.machine() != "x86_64"
_fence: Callable[[], object] | None = None


def use_fence(fence: Callable[[], object]) -> None:
    """Order stores and loads with `fence`, a full memory barrier, if this machine reorders them.

    Python has no such barrier, so it comes from the library that the governor loads. Without it,
    order is kept only on x86-64.
    """
    global _fence  # noqa: PLW0603 - one processor, one fence
    _fence = fence if _REORDERS else None


def read(page: mmap, base: int, name: str, field: str, index: int = 0) -> int:
    """Return one number: element `index` of `field` in the structure `name` at `base`."""
    at, size, unpack, _, _ = _PLACES[name, field]
    value: int = unpack(page, base + at + index * size)[0]
    return value


class Reader:
    """Reads some fields of the structure `name`, one after the other, in the order of `fields`.

    A field may be named more than once, and is then read each time.
    """

    def __init__(self, name: str, *fields: str) -> None:
        self.fields = fields
        places = [_PLACES[name, field] for field in fields]
        self._steps = [(at, unpack) for at, _, unpack, _, _ in places]

    def __call__(self, page: mmap, base: int) -> list[int]:
        """Return the numbers of the structure at `base`."""
        if _fence is None:
            return [unpack(page, base + at)[0] for at, unpack in self._steps]
        numbers = []
        for at, unpack in self._steps:
            numbers.append(unpack(page, base + at)[0])
            _fence()
        return numbers


def write(page: mmap, base: int, name: str, field: str, value: int, *, index: int = 0) -> None:
    """Store one number where `read` with the same arguments finds it.

    A reader that finds the value in a field with the order `release` also finds all earlier stores.
    """
    at, size, _, pack, releases = _PLACES[name, field]
    if releases and _fence is not None:
        _fence()
    pack(page, base + at + index * size, value)


def init_grant(
    page: mmap, *, settings: dict[str, int], devices: list[dict[str, int | bytes]]
) -> None:
    """Fill an empty grant page; the magic number is written last.

    `settings` has fields of the header, and each of `devices` those of its entry (`uuid` as 16
    bytes).
    """
    write(page, 0, "grant_header", "version", layout.VERSION)
    write(page, 0, "grant_header", "size", len(page))
    write(page, 0, "grant_header", "n_devices", len(devices))
    for name, value in settings.items():
        write(page, 0, "grant_header", name, value)
    for i, device in enumerate(devices):
        base = layout.grant_device(i)
        for name, content in device.items():
            if isinstance(content, bytes):
                for j, byte in enumerate(content):
                    write(page, base, "grant_device", name, byte, index=j)
            else:
                write(page, base, "grant_device", name, content)
    write(page, 0, "grant_header", "magic", layout.GRANT_MAGIC)


def write_usage(
    page: mmap, entries: Sequence[Mapping[str, int | Sequence[int]]], time_us: int
) -> None:
    """Replace the entries for the container's processes in the usage part of a grant file.

    `entries` have fields of `usage_entry`; a per-GPU field is a sequence, which may end before the
    last GPU. Missing numbers are 0. `time_us` is the current time in microseconds since 1970. A
    reader that reads at the same time sees that the sequence number is odd or has changed, and
    reads again.
    """
    packed = b""
    for entry in entries[: layout.N_SLOTS]:
        numbers: list[int] = []
        for name, blank in _USAGE_BLANKS:
            given = entry.get(name, blank)
            if isinstance(given, int):
                numbers.append(given)
            else:
                numbers += given
                numbers += blank[len(given) :]
        packed += _USAGE_ENTRY.pack(*numbers).ljust(layout.USAGE_ENTRY.size, b"\0")
    n_entries = len(packed) // layout.USAGE_ENTRY.size
    at = layout.GRANT_USAGE
    # Entries that are no longer in use are cleared. Readers go no further than `n_entries`.
    n_written = min(max(n_entries, read(page, at, "usage_header", "n_entries")), layout.N_SLOTS)
    packed = packed.ljust(n_written * layout.USAGE_ENTRY.size, b"\0")
    sequence = (read(page, at, "usage_header", "sequence") + 1) & 0xFFFFFFFE
    write(page, at, "usage_header", "sequence", sequence | 1)
    if _fence is not None:
        _fence()  # no entry is stored before the odd number
    first = layout.GRANT_USAGE_ENTRIES
    page[first : first + len(packed)] = packed
    write(page, at, "usage_header", "n_entries", n_entries)
    write(page, at, "usage_header", "time_us", time_us)
    write(page, at, "usage_header", "sequence", (sequence + 2) & 0xFFFFFFFE)


def read_usage(page: mmap) -> list[dict[str, int | tuple[int, ...]]]:
    """Return the entries of the usage part, in the form that `write_usage` accepts.

    The sequence number is ignored, so this is only for the process that writes the entries.
    """
    found = []
    n_entries = read(page, layout.GRANT_USAGE, "usage_header", "n_entries")
    for i in range(min(n_entries, layout.N_SLOTS)):
        at = layout.GRANT_USAGE_ENTRIES + i * layout.USAGE_ENTRY.size
        numbers = iter(_USAGE_ENTRY.unpack_from(page, at))
        entry: dict[str, int | tuple[int, ...]] = {}
        for field in layout.USAGE_ENTRY.fields:
            taken = tuple(next(numbers) for _ in range(field.n))
            entry[field.name] = taken if field.n > 1 else taken[0]
        found.append(entry)
    return found


def init_ledger(page: mmap) -> None:
    """Fill an empty ledger; the magic number is written last."""
    write(page, 0, "ledger_header", "version", layout.VERSION)
    write(page, 0, "ledger_header", "size", layout.LEDGER_SIZE)
    write(page, 0, "ledger_header", "magic", layout.LEDGER_MAGIC)


def read_unknown(page: mmap) -> list[bytes]:
    """Return the raw entries of a ledger's header for names of unknown functions.

    An entry that is empty, or is being written, begins with a 0.
    """
    at, *_ = _PLACES["ledger_header", "unknown"]
    size = layout.UNKNOWN_SIZE
    return [page[at + i * size : at + (i + 1) * size] for i in range(layout.N_UNKNOWN)]


def slot_base(slot: int) -> int:
    """Return the offset of process `slot` in the ledger. Raise IndexError if there is none."""
    if not 0 <= slot < layout.N_SLOTS:
        raise IndexError(slot)
    return layout.LEDGER_SLOTS + slot * layout.LEDGER_SLOT.size


def clear_slot(page: mmap, slot: int) -> None:
    """Clear a process's slot and mark it free, so that its charges no longer count."""
    base = slot_base(slot)
    page[base : base + layout.LEDGER_SLOT.size] = bytes(layout.LEDGER_SLOT.size)


def device_sums(page: mmap, fields: Sequence[str], device: int) -> dict[str, int]:
    """Return the sums of fields of GPU `device` over all processes, each at most 2**64 - 1."""
    read_all = Reader("ledger_device", *fields)
    sums = [0] * len(fields)
    for slot in range(layout.N_SLOTS):
        if read(page, slot_base(slot), "ledger_slot", "state"):
            values = read_all(page, layout.ledger_device(slot, device))
            sums = [one + value for one, value in zip(sums, values, strict=True)]
    return {name: min(one, 2**64 - 1) for name, one in zip(fields, sums, strict=True)}
