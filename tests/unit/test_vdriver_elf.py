"""Tests of vdriver.elf with files that gcc and the linker made, and with hostile files."""

import ctypes
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.fuzz.mutations import Counted, hold_to_the_contract, mutated_elf
from tests.unit.vdriver_trees import (
    RICH_EXPORTS,
    elf,
    elf_parts,
    for_aarch64,
    put,
    put_driver,
    rich_elf,
)
from vdriver import elf as module
from vdriver.elf import read_exports, read_library, version_in_name
from vdriver.errors import LibraryError


def test_the_facts_are_those_that_the_linker_wrote(tmp_path):
    content = elf("libcuda.so.1", ("libm.so.6", "libc.so.6"), runpath="$ORIGIN/origin")
    path = put(tmp_path / "libcuda.so.535.261.03", content)
    library = read_library(path)
    assert library.soname == "libcuda.so.1"
    assert library.needed == ("libm.so.6", "libc.so.6")
    assert library.runpath == "$ORIGIN/origin"
    assert (library.bits, library.machine) == (64, "x86_64")
    assert library.version == "535.261.03"
    assert library.size == len(content)
    assert library.mtime_ns == path.stat().st_mtime_ns
    readelf = subprocess.run(["readelf", "-nW", path], check=True, capture_output=True, text=True)
    assert f"Build ID: {library.build_id}" in readelf.stdout
    assert ".note.gnu.build-id" in library.notes


def test_the_note_of_a_simulated_driver_is_found(tmp_path):
    library = read_library(put(tmp_path / "a.so", elf("libcuda.so.1", simulated=True)))
    assert ".note.tidegate.simgpu" in library.notes


def test_a_library_of_another_machine_or_width_is_read_as_such(tmp_path):
    other = read_library(put(tmp_path / "a.so", for_aarch64(elf("liba.so.1"))))
    assert (other.bits, other.machine) == (64, "aarch64")
    narrow = read_library(put(tmp_path / "b.so", elf("liba.so.1", bits=32)))
    assert (narrow.bits, narrow.machine, narrow.soname) == (32, "i386", "liba.so.1")


def test_a_program_is_read_and_has_no_soname(tmp_path):
    program = read_library(put(tmp_path / "nvidia-smi", elf(program=True)))
    assert (program.soname, program.needed, program.version) == (None, (), None)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("libcuda.so.535.261.03", "535.261.03"),
        ("libcuda.so.999.10.1", "999.10.1"),
        ("/a/libnvidia-ml.so.535.86", "535.86"),
        ("libcuda.so.1", None),
        ("libcuda.so", None),
        ("libcuda.so.535.261.03.tmp", None),
        ("libcuda.so.535..03", None),
        ("libcuda.so.\u0665\u0663.\u0661", None),
        ("libcuda.1.2", None),
    ],
)
def test_the_version_is_the_part_of_a_name_after_so(name, version):
    assert version_in_name(name) == version


def test_a_file_truncated_anywhere_is_refused_with_a_reason(tmp_path):
    content = elf("libcuda.so.1", ("libc.so.6",))
    sections = subprocess.run(
        ["readelf", "-SW", put(tmp_path / "whole.so", content)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    offsets = {
        int(line.split("]")[1].split()[3], 16)
        for line in sections.splitlines()
        if line.strip().startswith("[") and "NULL" not in line and "Nr" not in line
    }
    assert len(offsets) > 5
    cuts = {0, 1, 3, 4, 15, 16, 63, 64, 65, len(content) - 1} | offsets | {o + 1 for o in offsets}
    for cut in sorted(c for c in cuts if c < len(content)):
        path = put(tmp_path / "cut.so", content[:cut])
        with pytest.raises(LibraryError) as caught:
            read_library(path)
        assert str(path) in caught.value.message


def test_a_file_that_is_not_regular_is_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    link = tmp_path / "link"
    link.symlink_to(put(tmp_path / "a.so", elf("liba.so.1")))
    for question in (read_library, read_exports):
        for name, reason in (
            (tmp_path / "fifo", "not a regular file"),
            (tmp_path / "directory", "not a regular file"),
            ("/dev/zero", "not a regular file"),
            (tmp_path / "loop", "a symbolic link"),
            (link, "a symbolic link"),
            (tmp_path / "missing", "No such file or directory"),
            (tmp_path / "a.so" / "below", "Not a directory"),
            ("a\0b", "not a file name"),
        ):
            with pytest.raises(LibraryError, match=f"{reason};") as caught:
                question(name)
            assert len(str(caught.value).splitlines()) == 1


def test_a_file_without_permission_is_refused(tmp_path):
    path = put(tmp_path / "a.so", elf("liba.so.1"), 0o000)
    code = f"""
import os, sys
sys.path[:0] = {[p for p in sys.path if p]!r}
import elftools.elf.elffile  # read_library imports it, and other users may be unable to read the checkout
from vdriver.elf import read_library
from vdriver.errors import LibraryError
os.chdir({str(tmp_path)!r})
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
try:
    read_library("a.so")
except LibraryError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == ("a.so: Permission denied; reinstall the package that it belongs to\n"), (
        path
    )


def test_a_soname_that_is_not_a_file_name_is_refused(tmp_path):
    for soname in ("../../etc/passwd", "..", "/libcuda.so.1", "a\nb"):
        with pytest.raises(LibraryError, match=r"not a file name|not printable"):
            read_library(put(tmp_path / "a.so", elf(soname)))


def test_a_file_that_needs_too_many_reads_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_READS", 3)
    with pytest.raises(LibraryError, match="unreasonably large"):
        read_library(put(tmp_path / "a.so", elf("libcuda.so.1")))


def test_names_that_never_end_are_read_within_the_bound(tmp_path):
    # This points the section .shstrtab at 32 MiB without a zero byte.
    content = bytearray(elf("libcuda.so.1"))
    table, size, count = (
        int.from_bytes(content[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62))
    )
    content += b"A" * (32 << 20)
    index = int.from_bytes(content[62:64], "little")
    start = table + index * size + 24
    content[start : start + 8] = (len(content) - (32 << 20)).to_bytes(8, "little")
    assert count > 3
    with pytest.raises(LibraryError):
        read_library(put(tmp_path / "a.so", bytes(content)))


@pytest.mark.parametrize("bits", [64, 32])
def test_interpreter_and_abi_are_read_from_the_segments(tmp_path, bits):
    content = rich_elf(bits, interpreter=True)
    library = read_library(put(tmp_path / "a.so", content))
    assert (library.interpreter, library.abi) == ("/lib/ld-test.so.2", "Linux 2.3.99")
    assert library.runpath == "$ORIGIN/origin"
    bare = read_library(put(tmp_path / "b.so", elf("liba.so.1", bits=bits)))
    assert (bare.interpreter, bare.abi) == (None, None)


@pytest.mark.parametrize("hash_style", ["gnu", "sysv", "both"])
@pytest.mark.parametrize("bits", [64, 32])
def test_exports_are_the_symbols_that_a_search_by_name_finds(tmp_path, bits, hash_style):
    path = put(tmp_path / "a.so", rich_elf(bits, hash_style))
    assert read_exports(path) == RICH_EXPORTS


def test_exports_are_the_symbols_that_dlsym_finds(tmp_path):
    source = put(tmp_path / "a.c", b"int f(void) { return 1; } int hidden = 2; __thread int t;")
    script = put(tmp_path / "a.map", b"VERSION_1 { global: f; t; local: *; };")
    made = tmp_path / "a.so"
    flags = ["-shared", "-fPIC", "-nostdlib", f"-Wl,--version-script={script}"]
    subprocess.run(["gcc", *flags, "-o", made, source], check=True)
    exports = read_exports(made)
    assert exports == ("f", "t")
    loaded = ctypes.CDLL(str(made))
    assert all(hasattr(loaded, name) for name in exports)
    assert not hasattr(loaded, "hidden")


def test_a_symbol_that_is_hidden_local_or_a_section_is_not_exported(tmp_path):
    content = bytearray(rich_elf(64))
    symbols, _ = elf_parts(content)["symbols"]
    strings, _ = elf_parts(content)["strings"]
    for name, offset, value in (
        (b"defined_function", 5, 2),  # visibility hidden
        (b"defined_object", 4, 0x01),  # binding local
        (b"weak_function", 4, 0x13),  # type section
    ):
        entry = next(
            e
            for e in range(symbols, strings, 24)
            if content.startswith(name + b"\0", strings + content[e] + 256 * content[e + 1])
        )
        content[entry + offset] = value
    assert read_exports(put(tmp_path / "a.so", bytes(content))) == (
        "indirect_function",
        "protected_function",
        "thread_local_object",
    )


def test_notes_in_a_segment_aligned_to_eight_bytes_are_found_or_refused(tmp_path):
    content = bytearray(rich_elf(64))
    # Linkers use different numbers of segments for notes. This keeps one segment, with these 68
    # bytes.
    (table, size), (kept, _) = (elf_parts(content)[p] for p in ("segments", "note segment"))
    for at in range(table, table + size, 56):
        if at != kept and struct.unpack_from("<I", content, at) == (4,):
            struct.pack_into("<I", content, at, 0)
    _put(content, "note segment", 32, "<QQQ", 68, 68, 8)
    _put(content, "note", 0, "<III4sII", 4, 8, 5, b"GNU", 0xC0000002, 0)
    _put(content, "note", 24, "<III4s4I", 4, 16, 1, b"GNU", 0, 6, 1, 0)
    _put(content, "note", 56, "12x")
    library = read_library(put(tmp_path / "a.so", bytes(content)))
    assert (library.abi, library.build_id) == ("Linux 6.1.0", None)
    # Four bytes, followed by four bytes of padding, which pyelftools takes for the next note.
    _put(content, "note", 0, "<III4s4s4x", 4, 4, 6, b"GNU", b"four")
    with pytest.raises(LibraryError, match="a note is not aligned to 8 bytes"):
        read_library(put(tmp_path / "a.so", bytes(content)))


def test_a_library_that_exports_nothing_has_no_exports(tmp_path):
    assert read_exports(put(tmp_path / "a", elf(program=True))) == ()
    source = put(tmp_path / "a.c", b"static int f(void) { return 1; } int (*g)(void);")
    flags = ["-shared", "-fPIC", "-nostdlib", "-fvisibility=hidden"]
    subprocess.run(["gcc", *flags, "-o", tmp_path / "a.so", source], check=True)
    assert read_exports(tmp_path / "a.so") == ()


def _put(content, part, offset, pattern, *values):
    start, _ = elf_parts(content)[part]
    struct.pack_into(pattern, content, start + offset, *values)


@pytest.mark.parametrize("bits", [64, 32])
def test_a_library_without_section_headers_gives_the_same_results(tmp_path, bits):
    whole = rich_elf(bits, interpreter=True)
    content = bytearray(whole[: elf_parts(whole)["sections"][0]])
    _put(content, "header", 40 if bits == 64 else 32, "<Q" if bits == 64 else "<I", 0)
    _put(content, "header", 58 if bits == 64 else 46, "<HHH", 0, 0, 0)
    cut = read_library(put(tmp_path / "a.so", bytes(content)))
    library = read_library(put(tmp_path / "b.so", whole))
    for field in ("soname", "needed", "runpath", "interpreter", "build_id", "abi", "machine"):
        assert getattr(cut, field) == getattr(library, field) is not None
    assert cut.notes == ()
    assert read_exports(tmp_path / "a.so") == RICH_EXPORTS


def test_names_come_from_the_loaders_table_and_not_from_that_of_a_section(tmp_path):
    content = bytearray(rich_elf(64))
    start, size = elf_parts(content)["sections"]
    strings, _ = elf_parts(content)["strings"]
    [section] = [
        at
        for at in range(start, start + size, 64)
        if struct.unpack_from("<Q", content, at + 24) == (strings,)
    ]
    struct.pack_into("<Q", content, section + 24, 0)
    library = read_library(put(tmp_path / "a.so", bytes(content)))
    assert (library.soname, library.runpath) == ("librich.so.1", "$ORIGIN/origin")
    assert read_exports(tmp_path / "a.so") == RICH_EXPORTS


@pytest.mark.parametrize("bits", [64, 32])
def test_counts_that_the_header_has_no_room_for_are_in_the_first_section(tmp_path, bits):
    content = bytearray(rich_elf(bits))
    library = read_library(put(tmp_path / "a.so", bytes(content)))
    count, number, names = (60, 56, 62) if bits == 64 else (48, 44, 50)
    size, info, link = (32, 44, 40) if bits == 64 else (20, 28, 24)
    first, _ = elf_parts(content)["sections"]
    for at, field, extended, pattern in (
        (count, size, 0, "<Q" if bits == 64 else "<I"),
        (names, link, 0xFFFF, "<I"),
    ):
        (value,) = struct.unpack_from("<H", content, at)
        struct.pack_into("<H", content, at, extended)
        struct.pack_into(pattern, content, first + field, value)
    counted = read_library(put(tmp_path / "b.so", bytes(content)))
    assert counted.notes == library.notes
    assert {".note.gnu.build-id", ".note.ABI-tag"} <= set(library.notes)  # Ubuntu's gcc adds one
    assert counted.build_id == library.build_id
    # This number of segments is refused, whatever number the first section has.
    struct.pack_into("<H", content, number, 0xFFFF)
    struct.pack_into("<I", content, first + info, 1)
    with pytest.raises(LibraryError, match="more than 1024 headers"):
        read_library(put(tmp_path / "b.so", bytes(content)))


NO_END = b"A" * 16
HOSTILE = {
    "another byte order": ("header", 5, "B", (2,), "byte order"),
    "another class": ("header", 4, "B", (3,), "Invalid EI_CLASS"),
    "no segments": ("header", 56, "<H", (0,), "no loadable segments"),
    "wide headers": ("header", 54, "<H", (57,), "headers of 57 bytes instead of 56"),
    "sections behind the file": ("header", 40, "<Q", (1 << 63,), "unreadable or truncated ELF"),
    "a relocatable file": ("header", 16, "<H", (1,), r"neither a library nor a program \(ET_REL"),
    "dynamic elsewhere": ("dynamic segment", 16, "<Q", (0,), "not at its load address"),
    "dynamic nowhere": ("dynamic segment", 16, "<Q", (1 << 60,), "not in a loaded segment"),
    "two tables of names": ("symbols tag", 0, "<Q", (5,), "a dynamic tag occurs twice"),
    "two dynamics": ("note segment", 0, "<I", (2,), "more than one dynamic segment"),
    "names outside": ("strings tag", 8, "<Q", (1 << 60,), "no string table in a loaded segment"),
    "no names": ("strings tag", 0, "<Q", (0x60000000,), "no string table in a loaded segment"),
    "a note with a long name": (
        "note",
        0,
        "<I",
        (0xFFFFFFF0,),
        "a note extends beyond its segment",
    ),
    "a note with much": ("note", 4, "<I", (0xFFFFFFFF,), "a note extends beyond its segment"),
    "an interpreter without end": ("interpreter", 2, "16s", (NO_END,), "unterminated interpreter"),
    "no interpreter": ("interpreter", 0, "B", (0,), "an empty or unterminated"),
    "a segment over another": ("segments", 16, "<Q", (1 << 40,), "overlap or are out of order"),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_library_made_to_mislead_is_refused_with_the_reason(tmp_path, name):
    content = bytearray(rich_elf(64, interpreter=True))
    part, offset, pattern, values, reason = HOSTILE[name]
    if part == "segments":  # the first loaded one
        offset += next(
            at for at in range(0, 56 * 8, 56) if content[64 + at : 68 + at] == b"\1\0\0\0"
        )
    _put(content, part, offset, pattern, *values)
    with pytest.raises(LibraryError, match=reason):
        read_library(put(tmp_path / "a.so", bytes(content)))


HOSTILE_TABLES = {
    "a table of 2^32 symbols": ("sysv", "hash", 4, "<I", 0xFFFFFFFF, "not in a loaded segment"),
    "2^32 buckets": ("gnu", "gnu hash", 0, "<I", 0xFFFFFFFF, "not in a loaded segment"),
    "2^32 filters": ("gnu", "gnu hash", 8, "<I", 0xFFFFFFFF, "not in a loaded segment"),
    "a table elsewhere": ("gnu", "gnu hash tag", 8, "<Q", 1 << 60, "not in a loaded segment"),
    "symbols elsewhere": ("gnu", "symbols tag", 8, "<Q", 1 << 60, "not in a loaded segment"),
    "no symbols": ("gnu", "symbols tag", 0, "<Q", 0x60000000, "does not contain DT_SYMTAB"),
    "symbols behind the end": ("gnu", "gnu hash", 16 + 8, "<I", 1 << 30, "unreadable or truncated"),
}


@pytest.mark.parametrize("name", sorted(HOSTILE_TABLES))
def test_exports_made_to_mislead_are_refused_with_the_reason(tmp_path, name):
    style, part, offset, pattern, value, reason = HOSTILE_TABLES[name]
    content = bytearray(rich_elf(64, style))
    _put(content, part, offset, pattern, value)
    with pytest.raises(LibraryError, match=reason):
        read_exports(put(tmp_path / "a.so", bytes(content)))


def test_a_symbol_whose_name_is_beyond_the_file_is_not_exported(tmp_path):
    content = bytearray(rich_elf(64, "gnu"))
    symbols, _ = elf_parts(content)["symbols"]
    strings, _ = elf_parts(content)["strings"]
    entry = next(
        e
        for e in range(symbols, strings, 24)
        if content.startswith(b"defined_object\0", strings + content[e] + 256 * content[e + 1])
    )
    struct.pack_into("<I", content, entry, 1 << 31)
    exports = read_exports(put(tmp_path / "a.so", bytes(content)))
    assert exports == tuple(name for name in RICH_EXPORTS if name != "defined_object")


@pytest.mark.parametrize("bits", [64, 32])
def test_a_chain_without_an_end_is_followed_to_the_end_of_its_segment(tmp_path, bits):
    content = bytearray(rich_elf(bits, "gnu"))
    start, _ = elf_parts(content)["gnu hash"]
    buckets, _, filters, _ = struct.unpack_from("<IIII", content, start)
    chains = start + 16 + filters * bits // 8 + 4 * buckets
    at, size = elf_parts(content)["dynamic"]
    dynamic = content[at : at + size]
    content[chains:] = bytes(len(content) - chains)
    content[at : at + size] = dynamic
    _put(content, "header", 40 if bits == 64 else 32, "<Q" if bits == 64 else "<I", 0)
    with Counted() as counted, pytest.raises(LibraryError):
        read_exports(put(tmp_path / "a.so", bytes(content)))
    assert counted.bytes < 2 * len(content)


def test_many_long_names_that_share_their_end_do_not_fill_the_memory(tmp_path):
    # 60,000 symbols; their names of up to 60,000 bytes are suffixes of one string.
    count, offset = 60_000, 0x1000
    names = b"\0" + b"A" * count + b"\0"
    symbols = b"".join(struct.pack("<IBBHQQ", i, 0x12, 0, 1, 1, 0) for i in range(count))
    table = struct.pack("<II", 1, count) + bytes(4 * (1 + count))
    where = [offset, offset + len(names), offset + len(names) + len(symbols)]
    pairs = [(5, where[0]), (10, len(names)), (6, where[1]), (11, 24), (4, where[2]), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *p) for p in pairs)
    end = where[2] + len(table)
    content = bytearray(offset) + names + symbols + table + dynamic
    whole = elf("liba.so.1")
    content[:64] = whole[:64]
    _put(content, "header", 40, "<Q", 0)
    _put(content, "header", 56, "<HHHH", 2, 0, 0, 0)
    load = (1, 4, 0, 0, 0, len(content), len(content), 0x1000)
    content[64:176] = struct.pack("<IIQQQQQQ", *load) + struct.pack(
        "<IIQQQQQQ", 2, 4, end, end, end, len(dynamic), len(dynamic), 8
    )
    path = put(tmp_path / "a.so", bytes(content))
    assert read_library(path).soname is None
    with pytest.raises(LibraryError, match="unreasonably large"):
        read_exports(path)


def test_a_small_driver_library_takes_at_most_1000_reads(tmp_path):
    put_driver(tmp_path, "535.261.03")
    with Counted() as counted:
        read_library(tmp_path / "libcuda.so.535.261.03")
    assert counted.calls <= 1000
    assert counted.bytes <= 8192


def test_notes_without_end_are_refused_before_they_are_read(tmp_path):
    content = bytearray(rich_elf(64)) + b"A" * (1 << 20)
    _put(content, "note segment", 32, "<Q", 1 << 20)
    path = put(tmp_path / "a.so", bytes(content))
    with Counted() as counted, pytest.raises(LibraryError, match="notes of over 65536 bytes"):
        read_library(path)
    assert counted.bytes <= 16384


def test_a_missing_pyelftools_is_not_reported_as_a_fault_of_the_file(tmp_path, monkeypatch):
    path = put(tmp_path / "a.so", elf("liba.so.1"))
    for name in [n for n in sys.modules if n.partition(".")[0] == "elftools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "elftools", None)
    with pytest.raises(ModuleNotFoundError, match="elftools"):
        read_library(path)


@settings(max_examples=examples(100), deadline=None)
@given(content=st.binary(max_size=512), magic=st.booleans())
def test_random_bytes_are_refused_or_read(content, magic):
    hold_to_the_contract((b"\x7fELF\x02\x01\x01" if magic else b"") + content)


@settings(max_examples=examples(400), deadline=None)
@given(content=mutated_elf())
def test_a_damaged_library_is_refused_or_read(content):
    hold_to_the_contract(content)
