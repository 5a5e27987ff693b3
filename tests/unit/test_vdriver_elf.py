"""One ELF file, read: what gcc and the linker wrote comes back, and nothing hostile does harm."""

import os
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.vdriver_trees import elf, for_aarch64, put
from vdriver import elf as module
from vdriver.elf import read_library, version_in_name
from vdriver.errors import LibraryError


def test_what_the_linker_wrote_is_read_back(tmp_path):
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


def test_the_note_of_a_simulated_driver_is_seen(tmp_path):
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
def test_a_version_is_what_follows_so_in_a_name(name, version):
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


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "libcuda.so.1.2.3")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("libcuda.so.1.2.3", "directory", "loop", "device", "missing"):
        with pytest.raises(LibraryError):
            read_library(tmp_path / name)
    with pytest.raises(LibraryError):
        read_library("/dev/zero")


def test_a_soname_that_is_no_file_name_is_refused(tmp_path):
    for soname in ("../../etc/passwd", "..", "/libcuda.so.1", "a\nb"):
        with pytest.raises(LibraryError, match=r"not a file name|not printable"):
            read_library(put(tmp_path / "a.so", elf(soname)))


def test_a_file_that_keeps_the_parser_busy_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_READS", 100)
    with pytest.raises(LibraryError, match="proportion"):
        read_library(put(tmp_path / "a.so", elf("libcuda.so.1")))


def test_names_that_never_end_are_read_within_the_bound(tmp_path):
    # .shstrtab's own section moved over 32 MiB without a zero byte
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


def _harmless(path, content):
    path.write_bytes(content)
    try:
        library = read_library(path)
    except LibraryError:
        return
    assert library.soname is None or "/" not in library.soname


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=512), magic=st.booleans())
def test_random_bytes_are_refused_or_read(tmp_path, content, magic):
    _harmless(tmp_path / "a.so", (b"\x7fELF\x02\x01\x01" if magic else b"") + content)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_library_with_damaged_headers_is_refused_or_read(tmp_path, data):
    content = bytearray(elf("libcuda.so.1", ("libc.so.6",)))
    headers = int.from_bytes(content[40:48], "little")
    places = st.one_of(
        st.integers(0, 64 + 56 * 10),
        st.integers(headers, len(content) - 8),
        st.integers(0, len(content) - 8),
    )
    values = st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(b"\0" * 8))
    for place, value in data.draw(st.lists(st.tuples(places, values), min_size=1, max_size=6)):
        content[place : place + len(value)] = value
    _harmless(tmp_path / "a.so", bytes(content))
