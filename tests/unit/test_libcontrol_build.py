"""The built control library: its exports, its dependencies, and the structure layout that its code assumes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.dwarf.die import DIE
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from libcontrol import api, layout

GLIBC_LIMIT = (2, 17)
LIBRARIES = {
    "libcuda.so.1": (api.CUDA, "libcuda-origin.so.1"),
    "libnvidia-ml.so.1": (api.NVML, "libnvidia-ml-origin.so.1"),
}


@pytest.fixture(params=sorted(LIBRARIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def elf(build_dir: Path, name: str):
    with (build_dir / "libcontrol" / name).open("rb") as file:
        yield ELFFile(file)


def section(elf: ELFFile, kind: type, name: str | None = None):
    found = [s for s in elf.iter_sections() if isinstance(s, kind) and name in (None, s.name)]
    assert found, f"no {kind.__name__}"
    return found[0]


def test_the_exports_are_those_of_the_table(elf: ELFFile, name: str) -> None:
    symbols = section(elf, SymbolTableSection, ".dynsym").iter_symbols()
    exported = {s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF" and s.name}
    assert exported == {fn.name for fn in LIBRARIES[name][0]}


def test_each_library_needs_only_the_original_and_the_c_library(elf: ELFFile, name: str) -> None:
    tags = list(section(elf, DynamicSection).iter_tags())
    needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
    # The original comes first, because a name that the library does not define is looked up there
    # before anywhere else.
    assert needed[0] == LIBRARIES[name][1]
    # Thread-local storage needs __tls_get_addr of the loader, which is in every process.
    assert set(needed[1:]) - {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"} == {"libc.so.6"}
    assert [tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"] == [name]
    assert [tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"] == ["$ORIGIN/origin"]
    assert not [tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_TEXTREL")]


def test_no_glibc_newer_than_2_17_is_needed(elf: ELFFile) -> None:
    versions = {
        version.name
        for _, auxiliaries in section(elf, GNUVerNeedSection).iter_versions()
        for version in auxiliaries
    }
    assert versions
    for version in versions:
        match = re.fullmatch(r"GLIBC_([0-9]+)\.([0-9]+)(\.[0-9]+)?", version)
        assert match, version
        assert (int(match[1]), int(match[2])) <= GLIBC_LIMIT, version


IMPORTS = {
    "libcuda.so.1": {
        "__errno_location", "__register_atfork", "clock_gettime", "dlopen", "dlsym", "memcpy",
        "memmove", "memset", "pthread_create", "pthread_detach", "pthread_setcancelstate", "setenv",
        "snprintf", "strcmp", "strlen", "strncmp",
    },
    "libnvidia-ml.so.1": {"dlopen", "dlsym", "strncmp"},
}  # fmt: skip
# On aarch64, gcc's atomic operations check once, at load time, whether the processor has
# instructions for them (-moutline-atomics), and gcc calls memcpy to copy a structure.
ALSO_AARCH64 = {"__getauxval", "memcpy"}


def test_the_library_imports_no_function_that_sets_errno_or_ends_a_cancelled_thread(
    elf: ELFFile, name: str
) -> None:
    """System calls are made directly, not by the C library's wrappers.

    A wrapper sets errno, which belongs to the application. Some wrappers are cancellation points,
    where a cancelled thread ends with the locks that it holds. The functions listed here do
    neither, or run where errno is saved.
    """
    symbols = section(elf, SymbolTableSection, ".dynsym").iter_symbols()
    imported = {
        s.name for s in symbols
        if s["st_shndx"] == "SHN_UNDEF" and s["st_info"]["bind"] == "STB_GLOBAL"
    }  # fmt: skip
    if elf["e_machine"] == "EM_AARCH64":
        imported -= ALSO_AARCH64 - IMPORTS[name]
    assert imported == IMPORTS[name]


def test_the_stack_is_not_executable(elf: ELFFile) -> None:
    [stack] = [s for s in elf.iter_segments() if s["p_type"] == "PT_GNU_STACK"]
    assert not stack["p_flags"] & 1


SHOWS = """
import ctypes, os, sys
def now():
    return len(os.listdir("/proc/self/task")), sorted(os.listdir("/proc/self/fd"))
before = now()
os.write(1, b"loading\\n")
library = ctypes.CDLL(sys.argv[1])
os.write(1, b"loaded\\n")
assert now() == before, (before, now())
"""


def test_loading_a_library_starts_nothing_and_connects_to_nothing(
    build_dir: Path, name: str, tmp_path: Path, require
) -> None:
    """A program that never calls CUDA, or that forks first, loads the library as well."""
    require("strace")
    stem = name.partition(".so")[0]
    driver = {"libcuda": "libcuda-stub.so", "libnvidia-ml": "simgpu/libnvidia-ml.so.1"}[stem]
    (tmp_path / "origin").mkdir()
    shutil.copy(build_dir / "libcontrol" / name, tmp_path)
    shutil.copy(build_dir / driver, tmp_path / f"origin/{stem}-origin.so.1")
    log = tmp_path / "calls"
    watched = "%process,%network,%file,write,eventfd2,epoll_create1,memfd_create,rt_sigaction"
    done = subprocess.run(
        ["strace", "-f", "-o", log, "-e", f"trace={watched}",
         sys.executable, "-c", SHOWS, tmp_path / name],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = log.read_text()
    between = text.partition('"loading')[2].partition('"loaded')[0].splitlines()[1:-1]
    calls = [line.split(maxsplit=1)[1] for line in between]
    assert any(f"origin/{stem}-origin.so.1" in call for call in calls), text
    # The loader searches for libraries and opens them. Nothing else may be opened, created or
    # started.
    looks = re.compile(r"(stat|newfstatat|fstat|access|readlink)\(|open(at)?\(.*\.so")
    assert [call for call in calls if not looks.match(call) or "/run/" in call] == []


def structures(path: Path) -> dict[str, tuple[int, dict[str, tuple[int, int]]]]:
    """Return a dictionary, name -> (size, member -> (offset, size)), of the structures in a
    library's DWARF data.
    """
    found = {}
    with path.open("rb") as file:
        for unit in ELFFile(file).get_dwarf_info().iter_CUs():
            for die in unit.iter_DIEs():
                if die.tag != "DW_TAG_structure_type" or "DW_AT_name" not in die.attributes:
                    continue
                members = {
                    child.attributes["DW_AT_name"].value.decode(): (
                        child.attributes["DW_AT_data_member_location"].value,
                        size_of(child.get_DIE_from_attribute("DW_AT_type")),
                    )
                    for child in die.iter_children()
                    if child.tag == "DW_TAG_member" and "DW_AT_name" in child.attributes
                    and "DW_AT_data_member_location" in child.attributes
                }  # fmt: skip
                if "DW_AT_byte_size" in die.attributes:
                    name = die.attributes["DW_AT_name"].value.decode()
                    found[name] = (die.attributes["DW_AT_byte_size"].value, members)
    return found


def size_of(die: DIE) -> int:
    """Return the size of a type in bytes."""
    if "DW_AT_byte_size" in die.attributes:
        return int(die.attributes["DW_AT_byte_size"].value)
    if "DW_AT_type" not in die.attributes:
        return 0  # void
    inner = size_of(die.get_DIE_from_attribute("DW_AT_type"))
    if die.tag != "DW_TAG_array_type":
        return inner
    for child in die.iter_children():
        if "DW_AT_upper_bound" in child.attributes:
            inner *= child.attributes["DW_AT_upper_bound"].value + 1
        elif "DW_AT_count" in child.attributes:
            inner *= child.attributes["DW_AT_count"].value
    return inner


GRANT = {"grant_header", "grant_device"}
LEDGER = {"ledger_header", "ledger_device"}
READ_BY = {
    "libcuda.so.1": GRANT | LEDGER | {"ledger_slot"},
    "libtidegate-arbiter.so": GRANT | LEDGER,  # the arbiter reads only the device parts of a slot
    "libnvidia-ml.so.1": GRANT | {"usage_header", "usage_entry"},
}


def test_every_structure_is_read_by_some_library() -> None:
    assert set().union(*READ_BY.values()) == {described.name for described in layout.STRUCTS}


@pytest.mark.parametrize("library", READ_BY)
def test_the_built_structures_have_the_described_layout(build_dir: Path, library: str) -> None:
    built = structures(build_dir / "libcontrol" / library)
    for described in layout.STRUCTS:
        if described.name not in READ_BY[library]:
            continue
        size, members = built[described.name]
        members.pop("pad", None)
        expected = {
            field.name: (at, layout.SIZES[field.type] * field.n)
            for field, at in zip(described.fields, layout.offsets(described).values(), strict=True)
        }
        assert members == expected, described.name
        assert size == described.size
