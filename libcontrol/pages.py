"""The two shared pages seen from Python, by the description in `libcontrol.layout`.

A ledger is written by the container: whatever is read from it here is a number of known width and
nothing more; the caller bounds it.
"""

from __future__ import annotations

import struct
from mmap import mmap

from libcontrol import layout

_OFFSETS = {s.name: layout.offsets(s) for s in layout.STRUCTS}
_TYPES = {s.name: {f.name: f for f in s.fields} for s in layout.STRUCTS}
_CODES = {"u8": "B", "u32": "I", "u64": "Q"}


def read(page: mmap, base: int, name: str, field: str, index: int = 0) -> int:
    """Return one number: element `index` of `field` of the structure `name` at `base`."""
    described = _TYPES[name][field]
    code = _CODES[described.type]
    at = base + _OFFSETS[name][field] + index * layout.SIZES[described.type]
    value: int = struct.unpack_from("<" + code, page, at)[0]
    return value


def write(page: mmap, base: int, name: str, field: str, value: int, *, index: int = 0) -> None:
    """Store one number where `read` finds it."""
    described = _TYPES[name][field]
    code = _CODES[described.type]
    at = base + _OFFSETS[name][field] + index * layout.SIZES[described.type]
    struct.pack_into("<" + code, page, at, value)


def init_grant(
    page: mmap, *, settings: dict[str, int], devices: list[dict[str, int | bytes]]
) -> None:
    """Fill an empty grant page; magic comes last.

    `settings` are fields of the header, each of `devices` fields of its entry (uuid as 16 bytes).
    """
    write(page, 0, "grant_header", "version", layout.VERSION)
    write(page, 0, "grant_header", "size", layout.GRANT_SIZE)
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


def init_ledger(page: mmap) -> None:
    """Fill an empty ledger; magic comes last."""
    write(page, 0, "ledger_header", "version", layout.VERSION)
    write(page, 0, "ledger_header", "size", layout.LEDGER_SIZE)
    write(page, 0, "ledger_header", "magic", layout.LEDGER_MAGIC)


def slot_base(slot: int) -> int:
    """Return where process `slot` begins."""
    if not 0 <= slot < layout.N_SLOTS:
        raise IndexError(slot)
    return layout.LEDGER_SLOTS + slot * layout.LEDGER_SLOT.size


def clear_slot(page: mmap, slot: int) -> None:
    """Empty a process's slot and mark it free: what it was charged is charged no more."""
    base = slot_base(slot)
    page[base : base + layout.LEDGER_SLOT.size] = bytes(layout.LEDGER_SLOT.size)


def device_sum(page: mmap, field: str, device: int) -> int:
    """Return the sum of a ledger field of GPU `device` over all processes, at most 2**64 - 1."""
    total = 0
    for slot in range(layout.N_SLOTS):
        if read(page, slot_base(slot), "ledger_slot", "state"):
            total += read(page, layout.ledger_device(slot, device), "ledger_device", field)
    return min(total, 2**64 - 1)
