"""The loader's cache, as ldconfig writes it."""

import contextlib
import os
import re
import struct
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.vdriver_trees import elf, put
from vdriver.ldcache import MACHINE_FLAGS, CacheEntry, CacheError, parse_cache


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
    ours = {e.soname: e for e in entries if e.path.startswith(str(tmp_path))}
    assert ours["libcuda.so.1"].path == f"{tmp_path}/one/libcuda.so.1"
    assert ours["libcuda.so.1"].flags == MACHINE_FLAGS["x86_64"]
    assert ours["libold.so.1"].flags == 0x0003


def test_a_cache_behind_the_older_format_is_read():
    strings = b"libcuda.so.1\0/x/libcuda.so.1\0"
    new = struct.pack("<20sIIB3xI12x", b"glibc-ld.so.cache1.1", 1, len(strings), 2, 0)
    base = len(new) + 24
    new += struct.pack("<iIIIQ", 0x0303, base, base + 13, 0, 0) + strings
    old = b"ld.so-1.7.0\0" + struct.pack("<I", 1) + b"\0" * 12
    old += b"\0" * (-len(old) % 8)
    assert parse_cache(old + new) == (CacheEntry("libcuda.so.1", "/x/libcuda.so.1", 0x0303, 0),)


def test_a_cache_truncated_anywhere_is_refused(cache):
    data = cache.read_bytes()
    for cut in (0, 5, 19, 20, 47, 48, 60):
        with pytest.raises(CacheError):
            parse_cache(data[:cut])


def test_a_cache_of_another_byte_order_is_refused():
    with pytest.raises(CacheError, match="big-endian"):
        parse_cache(struct.pack(">20sIIB3xI12x", b"glibc-ld.so.cache1.1", 0, 0, 3, 0))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"glibc-ld.so.cache1.1", b"ld.so-1.7.0\0"]))
def test_random_bytes_are_refused_or_read(data, magic):
    with contextlib.suppress(CacheError):
        parse_cache(magic + data)
