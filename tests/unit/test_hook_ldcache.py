"""Tests of oci_hook.ldcache: reading, changing and writing ld.so.cache, compared with ldconfig."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oci_hook import ldcache
from oci_hook.ldcache import (
    Cache,
    CachedLibrary,
    DamagedCacheError,
    compare,
    parse,
    strays,
    with_libraries,
    write,
)

HOST = Path("/etc/ld.so.cache")
DIRECTORY = b"/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2"
NAMES = (b"libcuda.so", b"libcuda.so.1", b"libnvidia-ml.so.1", b"libaaa.so.2", b"libzzz.so.10")
quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def listing(path: Path) -> list[str]:
    """Return the entries of a cache as ldconfig lists them."""
    done = subprocess.run(
        ["ldconfig", "-C", str(path), "-p"], capture_output=True, text=True, check=True
    )
    return [line.strip() for line in done.stdout.splitlines() if line.startswith("\t")]


@pytest.fixture
def cache(tmp_path: Path, require: Callable[..., None]) -> Path:
    """A cache that ldconfig wrote for a directory with awkward library names and for a hwcaps subdirectory."""
    require("ldconfig", "gcc")
    lib = tmp_path / "lib"
    for directory in (lib, lib / "glibc-hwcaps" / "x86-64-v3", lib / "glibc-hwcaps" / "x86-64-v2"):
        directory.mkdir(parents=True)
    for directory, name in [
        (lib, n)
        for n in (
            "libcuda.so.1",
            "libcudart.so.12",
            "libcudart.so.9",
            "libc++.so.1",
            "libA.so.1",
            "lib2.so.1",
            "libz.so",
            "libcud.so.100",
        )
    ] + [
        (lib / "glibc-hwcaps/x86-64-v3", "libcuda.so.1"),
        (lib / "glibc-hwcaps/x86-64-v2", "libfast.so.1"),
    ]:
        subprocess.run(
            [
                "gcc",
                "-shared",
                "-nostdlib",
                f"-Wl,-soname,{name}",
                "-o",
                str(directory / name),
                "-x",
                "c",
                "/dev/null",
            ],
            check=True,
        )
    path = tmp_path / "ld.so.cache"
    (tmp_path / "conf").write_text(f"{lib}\n")
    subprocess.run(
        ["ldconfig", "-X", "-f", str(tmp_path / "conf"), "-C", str(path)],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return path


def test_a_rewritten_cache_is_the_same_for_ldconfig(cache: Path, tmp_path: Path) -> None:
    for source in (cache, HOST):
        parsed = parse(source.read_bytes())
        assert parsed is not None
        again = tmp_path / "again"
        again.write_bytes(write(parsed))
        assert listing(again) == listing(source)
        assert parse(again.read_bytes()) == parsed


def test_the_entries_of_a_hwcaps_directory_and_the_generator_are_kept(cache: Path) -> None:
    parsed = parse(cache.read_bytes())
    assert parsed is not None
    assert parsed.hwcaps == (b"x86-64-v2", b"x86-64-v3")
    assert parsed.generator is not None
    assert parsed.generator.startswith(b"ldconfig ")
    changed = parse(write(with_libraries(parsed, DIRECTORY, (b"libnew.so.1",))))
    assert changed is not None
    assert (changed.hwcaps, changed.generator) == (parsed.hwcaps, parsed.generator)
    fast = [e for e in changed.entries if e.soname == b"libfast.so.1"]
    assert [e.hwcap for e in fast] == [ldcache.DL_CACHE_HWCAP_EXTENSION]


def test_new_entries_replace_old_ones_and_the_others_are_kept(cache: Path, tmp_path: Path) -> None:
    parsed = parse(cache.read_bytes())
    assert parsed is not None
    lib = str(tmp_path / "lib").encode()
    assert set(strays(parsed, DIRECTORY, NAMES)) == {
        lib + b"/libcuda.so.1",
        lib + b"/glibc-hwcaps/x86-64-v3/libcuda.so.1",
    }
    changed = with_libraries(parsed, DIRECTORY, NAMES)
    assert strays(changed, DIRECTORY, NAMES) == ()
    assert with_libraries(changed, DIRECTORY, NAMES) == changed
    path = tmp_path / "changed"
    path.write_bytes(write(changed))
    before = [line for line in listing(cache) if not line.startswith("libcuda.so.1 ")]
    added = [
        f"{name.decode()} (libc6,x86-64) => {DIRECTORY.decode()}/{name.decode()}" for name in NAMES
    ]
    assert sorted(listing(path)) == sorted(before + added)


def test_a_cache_of_both_formats_is_read(cache: Path, tmp_path: Path) -> None:
    """ldconfig -c compat writes the old format followed by the new one; the cache that the hook
    writes has only the new one.
    """
    compat = tmp_path / "compat"
    subprocess.run(
        ["ldconfig", "-X", "-c", "compat", "-f", str(tmp_path / "conf"), "-C", str(compat)],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    data = compat.read_bytes()
    assert data.startswith(ldcache.OLD_MAGIC)
    parsed = parse(data)
    assert parsed is not None
    again = tmp_path / "again"
    again.write_bytes(write(parsed))
    assert listing(again) == listing(compat)
    plain = parse(cache.read_bytes())
    assert plain is not None
    # hwcaps are compared as glibc reads them, not as ldconfig wrote them: ldconfig 2.36 counts the
    # offsets of these strings from two different positions.
    assert parsed.entries == plain.entries


def test_the_order_is_that_of_ldconfig(cache: Path) -> None:
    """By the hook's comparison, every cache that ldconfig wrote is in descending order."""
    for source in (cache, HOST):
        parsed = parse(source.read_bytes())
        assert parsed is not None
        names = [e.soname for e in parsed.entries]
        assert all(compare(a, b) >= 0 for a, b in itertools.pairwise(names))


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (b"libx.so.9", b"libx.so.10"),
        (b"libx.so", b"libx.so.1"),
        (b"liba", b"libb"),
        (b"lib+", b"lib1"),
        (b"liba", b"lib1"),
        (b"", b"a"),
        (b"lib\xc3\xa9", b"liba"),
        (b"x1", b"x01a"),
    ],
)
def test_names_are_compared_as_by_the_loader(low: bytes, high: bytes) -> None:
    assert compare(low, high) < 0 < compare(high, low)


def test_equal_numbers_are_equal_names() -> None:
    assert compare(b"libx.so.01", b"libx.so.1") == 0


names = st.text("ab1290.+-", min_size=1, max_size=8).map(str.encode)


@quick
@given(st.lists(names, unique=True, max_size=20), st.lists(names, unique=True, max_size=6))
def test_a_binary_search_finds_new_entries(present: list[bytes], added: list[bytes]) -> None:
    import functools

    order = sorted(present, key=functools.cmp_to_key(compare), reverse=True)
    cache = Cache(tuple(CachedLibrary(0x303, n, b"/x/" + n) for n in order))
    changed = with_libraries(cache, b"/t", tuple(added))
    found = [e.soname for e in changed.entries]
    assert all(compare(a, b) >= 0 for a, b in itertools.pairwise(found))
    assert set(found) == set(present) | set(added)
    assert {e.path for e in changed.entries if e.soname in added} == {b"/t/" + n for n in added}
    again = parse(write(changed))
    assert again == changed


def sample() -> bytes:
    return write(
        Cache(
            (
                CachedLibrary(0x303, b"libb.so.2", b"/l/libb.so.2"),
                CachedLibrary(0x303, b"liba.so.1", b"/l/liba.so.1"),
            ),
            (b"x86-64-v2",),
            b"gen",
        )
    )


@quick
@given(st.data())
def test_a_damaged_cache_is_parsed_or_refused(data: st.DataObject) -> None:
    content = bytearray(sample())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        cache = parse(cut)
    except DamagedCacheError:
        return
    if cache is not None:
        write(with_libraries(cache, DIRECTORY, NAMES))


@quick
@given(st.binary(max_size=300))
def test_any_bytes_after_a_magic_are_parsed_or_refused(data: bytes) -> None:
    for magic in (ldcache.NEW_MAGIC, ldcache.OLD_MAGIC, b""):
        with contextlib.suppress(DamagedCacheError):
            parse(magic + data)


def test_counts_that_exceed_the_file_are_refused() -> None:
    huge = ldcache.HEADER.pack(ldcache.NEW_MAGIC, 0xFFFFFFFF, 0, 2, 0)
    with pytest.raises(DamagedCacheError, match="4294967295 entries do not fit"):
        parse(huge)
    with pytest.raises(DamagedCacheError, match="larger than"):
        parse(ldcache.NEW_MAGIC + bytes(ldcache.CACHE_LIMIT))


def shared(count: int, *, soname: bytes, path: bytes) -> bytes:
    """Return a cache in which all entries have the same names, each stored once."""
    start = ldcache.HEADER.size + count * ldcache.ENTRY.size
    strings = soname + b"\0" + path + b"\0"
    row = ldcache.ENTRY.pack(0x303, start, start + len(soname) + 1, 0, 0)
    header = ldcache.HEADER.pack(ldcache.NEW_MAGIC, count, len(strings), 2, 0)
    return header + row * count + strings


@pytest.mark.parametrize(
    ("count", "soname", "path"),
    [(174000, b"s", b"p" * 4095), (87000, b"s" * 255, b"p"), (174000, b"s", b"p")],
)
def test_entries_that_share_long_names_do_not_fill_the_memory(
    tmp_path: Path, count: int, soname: bytes, path: bytes
) -> None:
    """If the hook kept a copy of the names for each entry, a file of 4 MiB would take 1.4 GiB of
    memory. VmHWM is the peak since the process's exec.
    """
    (tmp_path / "cache").write_bytes(shared(count, soname=soname, path=path) + b"liba.so.1")
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from oci_hook.errors import ImageError
from oci_hook.plan import CacheMapping, plan_cache
with open({str(tmp_path / "cache")!r}, "rb") as f:
    data = f.read()
try:
    plan_cache(data, (CacheMapping("usr/lib/x", ("liba.so.1",)),))
except ImageError as e:
    print(e.line())
with open("/proc/self/status") as f:
    print(*[int(line.split()[1]) >> 10 for line in f if line.startswith("VmHWM:")])
"""
    done = subprocess.run(
        [sys.executable, "-ISE", "-c", code], capture_output=True, text=True, check=True
    )
    *lines, peak = done.stdout.splitlines()
    assert int(peak) < 128  # MiB
    damaged = (
        "tidegate: /etc/ld.so.cache in the image is damaged (the names take too many bytes) and"
        " names driver libraries; run ldconfig in the image"
    )
    assert lines == ([] if len(path) == len(soname) else [damaged])


def test_names_that_are_too_long_for_a_file_are_damage() -> None:
    assert parse(shared(1, soname=b"s" * 255, path=b"p" * 4095)) is not None
    for soname, path in ((b"s" * 256, b"p"), (b"s", b"p" * 4097)):
        with pytest.raises(DamagedCacheError, match="is not terminated"):
            parse(shared(1, soname=soname, path=path))


def test_sections_that_repeat_are_not_copied_one_by_one() -> None:
    """Copying a quarter of a million sections, each of which spans the whole file, takes 25 s."""
    extension = ldcache.HEADER.size
    header = ldcache.HEADER.pack(ldcache.NEW_MAGIC, 0, 0, 2, extension)
    for count in (2, 17):
        directory = ldcache.EXTENSION.pack(ldcache.EXTENSION_MAGIC, count)
        data = header + directory + ldcache.SECTION.pack(ldcache.TAG_GENERATOR, 0, 0, 4) * count
        if count == 2:
            assert parse(data) == Cache((), None, b"glib")
        else:
            with pytest.raises(DamagedCacheError, match="the extension is damaged"):
                parse(data)


def test_a_cache_in_only_the_old_format_is_not_parsed() -> None:
    assert parse(ldcache.OLD_HEADER.pack(ldcache.OLD_MAGIC, 0)) is None


def test_other_files_are_not_taken_for_a_cache() -> None:
    assert ldcache.is_cache(sample())
    assert not ldcache.is_cache(b"hello")
    assert re.match(rb"glibc-ld\.so\.cache1\.1", sample())
