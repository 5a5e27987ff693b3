"""Tests of oci_hook.elf: the RPATH of a program in an image, and malformed programs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oci_hook.elf import (
    DT_RPATH,
    DT_STRTAB,
    DYNAMIC,
    EHEADER,
    MACHINES,
    PHEADER,
    PT_DYNAMIC,
    PT_LOAD,
    run_path,
)

PATHS = "/opt/a:$ORIGIN/../lib"


def ask(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return run_path(fd)
    finally:
        os.close(fd)


def build(output: Path, *flags: str) -> Path:
    source = b"int main(void) { return 0; }"
    command = ["gcc", "-o", str(output), "-x", "c", "-", *flags]
    subprocess.run(command, input=source, check=True)
    return output


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, require: Callable[..., None]) -> Path:
    require("gcc")
    return build(
        tmp_path_factory.mktemp("elf") / "program", f"-Wl,--disable-new-dtags,-rpath,{PATHS}"
    )


@pytest.mark.parametrize("tags", ["--disable-new-dtags", "--enable-new-dtags"])
@pytest.mark.parametrize("pie", ["-pie", "-no-pie"])
def test_the_path_is_the_one_given_to_the_linker(
    tmp_path: Path, require: Callable[..., None], tags: str, pie: str
) -> None:
    require("gcc")
    assert ask(build(tmp_path / "with", pie, f"-Wl,{tags},-rpath,{PATHS}")) == PATHS
    assert ask(build(tmp_path / "without", pie)) == ""
    assert ask(build(tmp_path / "static", "-static")) == ""


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF", b"\x7fELF\x01\x01" * 20])
def test_other_files_have_no_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert ask(tmp_path / "file") == ""


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_a_damaged_program_raises_no_exception(
    program: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Offsets, sizes and counts in the header and in the dynamic section may have any value."""
    content = bytearray(program.read_bytes())
    dynamic = content.find(b"\x1d\0\0\0\0\0\0\0") if data.draw(st.booleans()) else 64
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(
            st.integers(16, 63) | st.integers(64, 64 + 56 * 14) | st.just(max(dynamic, 64))
        )
        new = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8))
        content[at : at + len(new)] = new
    del content[data.draw(st.integers(0, len(content)) | st.just(len(content))) :]
    (tmp_path / "file").write_bytes(content)
    assert len(ask(tmp_path / "file")) <= 4 * (16 << 10) + 3


@pytest.mark.parametrize("wild", ["", "table", "dynamic section", "path", "strings"])
def test_offsets_beyond_any_file_are_not_read(tmp_path: Path, wild: str) -> None:
    """The system call does not accept such an offset, and Python would raise an exception."""
    far = 1 << 63

    def number(name: str, usual: int) -> int:
        return far if wild == name else usual

    dynamic, strings = EHEADER.size + 2 * PHEADER.size, EHEADER.size + 2 * PHEADER.size + 48
    head = EHEADER.pack(
        *(b"\x7fELF", 2, 1, 1, 3, MACHINES[0], 1, 0, number("table", EHEADER.size), 0, 0),
        *(EHEADER.size, PHEADER.size, 2, 0, 0, 0),
    )
    base = number("strings", 0)
    segments = PHEADER.pack(PT_LOAD, 4, base, 0, 0, 4096, 4096, 1) + PHEADER.pack(
        PT_DYNAMIC, 4, number("dynamic section", dynamic), dynamic, dynamic, 48, 48, 8
    )
    entries = ((DT_STRTAB, strings), (DT_RPATH, number("path", 0)), (0, 0))
    (tmp_path / "file").write_bytes(
        head + segments + b"".join(DYNAMIC.pack(*entry) for entry in entries) + b"/opt\0"
    )
    assert ask(tmp_path / "file") == ("" if wild else "/opt")
