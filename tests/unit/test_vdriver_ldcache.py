"""Tests of vdriver.ldcache with caches that ldconfig wrote, and with damaged ones."""

import contextlib
import os
import re
import struct
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.fuzz.mutations import hold_the_cache_to_its_contract, mutated_cache
from tests.unit.vdriver_trees import elf, put
from vdriver.ldcache import MACHINE_FLAGS, CacheError, parse_cache


@pytest.fixture
def cache(tmp_path, require):
    """A cache of two directories, made by the system's own ldconfig."""
    require("ldconfig")
    put(tmp_path / "one/libcuda.so.535.261.03", elf("libcuda.so.1"))
    put(tmp_path / "two/libnvidia-ml.so.535.261.03", elf("libnvidia-ml.so.1"))
    put(tmp_path / "two/libold.so.1", elf("libold.so.1", ("libc.so.6",), bits=32))
    conf = put(tmp_path / "ld.so.conf", f"{tmp_path}/one\n{tmp_path}/two\n".encode())
    made = tmp_path / "ld.so.cache"
    subprocess.run(["ldconfig", "-f", conf, "-C", made], check=True, capture_output=True)
    return made


def test_entries_are_those_that_ldconfig_lists(cache, tmp_path):
    entries = parse_cache(cache.read_bytes())
    listed = subprocess.run(
        ["ldconfig", "-p", "-C", cache],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    ).stdout
    expected = re.findall(r"^\s+(\S+) \(.*\) => (\S+)$", listed, re.MULTILINE)
    assert [(e.soname, e.path) for e in entries] == expected
    made = {e.soname: e for e in entries if e.path.startswith(str(tmp_path))}
    assert made["libcuda.so.1"].path == f"{tmp_path}/one/libcuda.so.1"
    assert made["libcuda.so.1"].flags == MACHINE_FLAGS["x86_64"]
    assert made["libold.so.1"].flags == 0x0003


@pytest.mark.parametrize("form", ["old", "compat"])
def test_the_older_format_has_the_same_entries(cache, form):
    conf, made = cache.with_name("ld.so.conf"), cache.with_name("ld.so.cache.older")
    command = ["ldconfig", "-c", form, "-f", conf, "-C", made]
    subprocess.run(command, check=True, capture_output=True)
    data = made.read_bytes()
    assert data.startswith(b"ld.so-1.7.0")
    assert (b"glibc-ld.so.cache1.1" in data) == (form == "compat")
    older = {(e.soname, e.path, e.flags) for e in parse_cache(data)}
    # The entries of a hwcaps subdirectory are in the newer format only.
    assert older <= {(e.soname, e.path, e.flags) for e in parse_cache(cache.read_bytes())}
    assert {"libcuda.so.1", "libnvidia-ml.so.1", "libold.so.1"} <= {n for n, _, _ in older}


def test_a_cache_truncated_anywhere_is_refused(cache):
    data = cache.read_bytes()
    for cut in (0, 5, 19, 20, 47, 48, 60):
        with pytest.raises(CacheError):
            parse_cache(data[:cut])


def test_a_cache_in_another_byte_order_is_refused():
    with pytest.raises(CacheError, match="big-endian"):
        parse_cache(struct.pack(">20sIIB3xI12x", b"glibc-ld.so.cache1.1", 0, 0, 3, 0))


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"glibc-ld.so.cache1.1", b"ld.so-1.7.0\0"]))
def test_random_bytes_are_refused_or_read(data, magic):
    with contextlib.suppress(CacheError):
        parse_cache(magic + data)


def test_entries_that_share_a_long_name_do_not_fill_the_memory():
    count = 10_000
    name = b"A" * 4000 + b"\0"
    base = 48 + 24 * count
    data = struct.pack("<20sIIB3xI12x", b"glibc-ld.so.cache1.1", count, len(name), 2, 0)
    data += struct.pack("<iIIIQ", 0x0303, base, base, 0, 0) * count + name
    with pytest.raises(CacheError, match="too many bytes"):
        parse_cache(data)


@settings(max_examples=examples(300), deadline=None)
@given(content=mutated_cache())
def test_a_damaged_cache_is_refused_or_read(content):
    hold_the_cache_to_its_contract(content)
