"""Test the access to the two pages from Python.

What is written is read back, and an index out of bounds reaches no other field.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator

import pytest

from libcontrol import layout, pages

UUID = bytes(range(16))


@pytest.fixture
def grant() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, layout.GRANT_SIZE) as page:
        yield page


@pytest.fixture
def ledger() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, layout.LEDGER_SIZE) as page:
        pages.init_ledger(page)
        yield page


def places() -> list[tuple[str, int]]:
    """Return the structures of a ledger, each at its first and at its last offset."""
    return [
        ("ledger_header", 0),
        ("ledger_slot", pages.slot_base(0)),
        ("ledger_slot", pages.slot_base(layout.N_SLOTS - 1)),
        ("ledger_device", layout.ledger_device(0, 0)),
        ("ledger_device", layout.ledger_device(layout.N_SLOTS - 1, layout.N_DEVICES - 1)),
    ]


def test_every_field_keeps_the_widest_number_and_touches_no_other(ledger: mmap.mmap) -> None:
    described = {s.name: s for s in layout.STRUCTS}
    for name, base in places():
        for field in described[name].fields:
            for index in (0, field.n - 1):
                ledger[:] = bytes(layout.LEDGER_SIZE)
                size = layout.SIZES[field.type]
                pages.write(ledger, base, name, field.name, 2 ** (8 * size) - 1, index=index)
                assert (
                    pages.read(ledger, base, name, field.name, index=index) == 2 ** (8 * size) - 1
                )
                assert ledger[:].count(0xFF) == size
                assert ledger[:].count(0) == layout.LEDGER_SIZE - size


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_number_that_is_too_wide_is_an_error(ledger: mmap.mmap, value: int) -> None:
    with pytest.raises(struct.error):
        pages.write(ledger, 0, "ledger_header", "n_slots", value)


def test_unknown_names_are_errors(ledger: mmap.mmap) -> None:
    with pytest.raises(KeyError):
        pages.read(ledger, 0, "ledger_header", "nothing")
    with pytest.raises(KeyError):
        pages.read(ledger, 0, "nothing", "magic")


@pytest.mark.parametrize("slot", [-1, layout.N_SLOTS])
def test_a_slot_out_of_bounds_is_an_error(ledger: mmap.mmap, slot: int) -> None:
    before = ledger[:]
    for call in (
        lambda: pages.slot_base(slot),
        lambda: pages.clear_slot(ledger, slot),
        lambda: layout.ledger_device(slot, 0),
    ):
        with pytest.raises(IndexError):
            call()
    assert ledger[:] == before


@pytest.mark.parametrize("device", [-1, layout.N_DEVICES])
def test_a_device_out_of_bounds_is_an_error(ledger: mmap.mmap, device: int) -> None:
    pages.write(ledger, pages.slot_base(0), "ledger_slot", "state", 1)
    for call in (
        lambda: layout.grant_device(device),
        lambda: layout.ledger_device(0, device),
        lambda: pages.device_sums(ledger, ["memory"], device)["memory"],
    ):
        with pytest.raises(IndexError):
            call()


def test_all_structures_are_inside_their_page_and_do_not_overlap() -> None:
    last = layout.grant_device(layout.N_DEVICES - 1) + layout.GRANT_DEVICE.size
    assert last <= layout.GRANT_SIZE
    slots = [pages.slot_base(i) for i in range(layout.N_SLOTS)]
    assert slots[0] >= layout.LEDGER_HEADER.size
    assert slots[-1] + layout.LEDGER_SLOT.size == layout.LEDGER_SIZE
    for slot, base in enumerate(slots):
        first = layout.ledger_device(slot, 0)
        end = layout.ledger_device(slot, layout.N_DEVICES - 1) + layout.LEDGER_DEVICE.size
        assert base + 32 <= first < end <= base + layout.LEDGER_SLOT.size


def test_a_grant_page_is_initialised(grant: mmap.mmap) -> None:
    device: dict[str, int | bytes] = {"uuid": UUID, "memory_limit": 3 << 30, "compute": 300_000}
    pages.init_grant(
        grant, settings={"spin_ns": 250_000}, devices=[device, {**device, "compute": 1}]
    )
    assert grant[:8] == b"TDGGRANT"
    assert pages.read(grant, 0, "grant_header", "version") == layout.VERSION
    assert pages.read(grant, 0, "grant_header", "size") == layout.GRANT_SIZE
    assert pages.read(grant, 0, "grant_header", "n_devices") == 2
    assert pages.read(grant, 0, "grant_header", "spin_ns") == 250_000
    for i, compute in enumerate((300_000, 1)):
        base = layout.grant_device(i)
        assert grant[base : base + 16] == UUID
        assert pages.read(grant, base, "grant_device", "memory_limit") == 3 << 30
        assert pages.read(grant, base, "grant_device", "compute") == compute
        assert pages.read(grant, base, "grant_device", "deadline_ns") == 0  # closed


def test_a_ledger_is_initialised(ledger: mmap.mmap) -> None:
    assert ledger[:8] == b"TDGLEDGR"
    assert pages.read(ledger, 0, "ledger_header", "version") == layout.VERSION
    assert pages.read(ledger, 0, "ledger_header", "size") == layout.LEDGER_SIZE
    assert pages.read(ledger, 0, "ledger_header", "n_slots") == 0
    assert not any(ledger[layout.LEDGER_SLOTS :])


def charge(ledger: mmap.mmap, slot: int, device: int, amount: int, *, state: int = 1) -> None:
    pages.write(ledger, pages.slot_base(slot), "ledger_slot", "state", state)
    base = layout.ledger_device(slot, device)
    pages.write(ledger, base, "ledger_device", "memory", amount)


def test_a_sum_covers_one_device_of_the_slots_in_use(ledger: mmap.mmap) -> None:
    charge(ledger, 0, 0, 5)
    charge(ledger, 0, 1, 100)
    charge(ledger, layout.N_SLOTS - 1, 0, 7)
    charge(ledger, 3, 0, 1000, state=0)  # a free slot
    assert [pages.device_sums(ledger, ["memory"], i)["memory"] for i in range(3)] == [12, 100, 0]
    assert pages.device_sums(ledger, ["launches"], 0)["launches"] == 0


def test_what_a_container_writes_does_not_overflow_a_sum(ledger: mmap.mmap) -> None:
    for slot in range(layout.N_SLOTS):
        charge(ledger, slot, 0, 2**64 - 1, state=2**32 - 1)
    assert pages.device_sums(ledger, ["memory"], 0)["memory"] == 2**64 - 1


def test_a_cleared_slot_is_free_and_its_neighbours_are_untouched(ledger: mmap.mmap) -> None:
    for slot in (4, 5, 6):
        charge(ledger, slot, 0, slot)
        charge(ledger, slot, layout.N_DEVICES - 1, slot)
    pages.clear_slot(ledger, 5)
    base = pages.slot_base(5)
    assert not any(ledger[base : base + layout.LEDGER_SLOT.size])
    for device in (0, layout.N_DEVICES - 1):
        assert pages.device_sums(ledger, ["memory"], device)["memory"] == 10
    assert ledger[:8] == b"TDGLEDGR"


@pytest.fixture
def grant_file() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, layout.GRANT_FILE_SIZE) as page:
        pages.init_grant(page, settings={}, devices=[])
        yield page


def test_the_usage_part_has_what_was_written_last(grant_file: mmap.mmap) -> None:
    assert pages.read(grant_file, 0, "grant_header", "size") == layout.GRANT_FILE_SIZE
    memory = tuple(range(layout.N_DEVICES))
    pages.write_usage(grant_file, [{"pid": 5, "state": 1, "memory": memory}] * 3, 17)
    assert [entry["pid"] for entry in pages.read_usage(grant_file)] == [5, 5, 5]
    assert pages.read_usage(grant_file)[2]["memory"] == memory
    pages.write_usage(grant_file, [{"pid": 6, "state": 1}], 18)
    [entry] = pages.read_usage(grant_file)
    assert (entry["pid"], entry["memory"]) == (6, (0,) * layout.N_DEVICES)
    assert pages.read(grant_file, layout.GRANT_USAGE, "usage_header", "time_us") == 18
    assert pages.read(grant_file, layout.GRANT_USAGE, "usage_header", "sequence") == 4


def test_the_usage_part_overwrites_nothing_before_or_after_it(grant_file: mmap.mmap) -> None:
    before = grant_file[: layout.GRANT_SIZE]
    full = {"pid": 2**32 - 1, "memory": (2**64 - 1,) * layout.N_DEVICES}
    pages.write_usage(grant_file, [full] * (layout.N_SLOTS + 5), 1)
    assert grant_file[: layout.GRANT_SIZE] == before
    assert len(pages.read_usage(grant_file)) == layout.N_SLOTS
    end = layout.GRANT_USAGE_ENTRIES + layout.N_SLOTS * layout.USAGE_ENTRY.size
    assert not any(grant_file[end:])


@pytest.mark.parametrize("sequence", [0, 3, 2**32 - 2, 2**32 - 1])
def test_a_sequence_is_even_after_each_write_and_always_changes(
    grant_file: mmap.mmap, sequence: int
) -> None:
    pages.write(grant_file, layout.GRANT_USAGE, "usage_header", "sequence", sequence)
    pages.write_usage(grant_file, [], 1)
    after = pages.read(grant_file, layout.GRANT_USAGE, "usage_header", "sequence")
    assert after % 2 == 0
    assert after != sequence


@pytest.fixture
def reordering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as a machine that reorders stores; the fence is removed after the test."""
    monkeypatch.setattr(pages, "_REORDERS", True)
    monkeypatch.setattr(pages, "_fence", None)


@pytest.mark.usefixtures("reordering")
def test_the_usage_part_is_stored_only_while_its_sequence_is_odd(
    grant_file: mmap.mmap,
) -> None:
    seen: list[tuple[int, ...]] = []

    def look() -> None:
        names = ("sequence", "n_entries", "time_us")
        usage = layout.GRANT_USAGE
        seen.append(tuple(pages.read(grant_file, usage, "usage_header", name) for name in names))

    pages.use_fence(look)
    pages.write_usage(grant_file, [{"pid": 5, "state": 1}], 17)
    # Before the odd number, after it, and before the even one.
    assert seen == [(0, 0, 0), (1, 0, 0), (1, 1, 17)]
    assert pages.read(grant_file, layout.GRANT_USAGE, "usage_header", "sequence") == 2


@pytest.mark.usefixtures("reordering")
def test_a_magic_number_is_stored_after_a_fence(ledger: mmap.mmap, grant: mmap.mmap) -> None:
    ledger[:] = bytes(layout.LEDGER_SIZE)
    seen: list[bytes] = []
    pages.use_fence(lambda: seen.append(grant[:16] + ledger[:16]))
    pages.init_grant(grant, settings={}, devices=[])
    pages.init_ledger(ledger)
    sizes = [struct.pack("2I", layout.VERSION, n) for n in (layout.GRANT_SIZE, layout.LEDGER_SIZE)]
    assert seen == [
        bytes(8) + sizes[0] + bytes(16),
        b"TDGGRANT" + sizes[0] + bytes(8) + sizes[1],
    ]


@pytest.mark.usefixtures("reordering")
def test_a_reader_reads_in_the_order_of_its_fields(ledger: mmap.mmap) -> None:
    base = layout.ledger_device(0, 0)
    fences = 0

    def look() -> None:  # the container continues to count between any two reads
        nonlocal fences
        fences += 1
        pages.write(ledger, base, "ledger_device", "returned", fences)

    pages.use_fence(look)
    read = pages.Reader("ledger_device", "returned", "memory", "returned")
    assert read(ledger, base) == [0, 0, 2]


def test_a_machine_that_keeps_the_order_needs_no_fence(
    ledger: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_REORDERS", False)
    monkeypatch.setattr(pages, "_fence", None)
    pages.use_fence(lambda: pytest.fail("a fence"))
    pages.init_ledger(ledger)
    pages.Reader("ledger_header", "magic")(ledger, 0)
