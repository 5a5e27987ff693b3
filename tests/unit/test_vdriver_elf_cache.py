"""Tests of vdriver.elf_cache: cached results are those of read_library, and never out of date."""

import json
import os
import stat
import subprocess
import sys

import pytest

from tests.unit.vdriver_trees import elf, put, rich_elf
from vdriver import elf_cache as module
from vdriver.elf import read_library
from vdriver.elf_cache import ElfCache
from vdriver.errors import LibraryError


@pytest.fixture(autouse=True)
def _files_are_settled(monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", 0)


@pytest.fixture
def files_read(monkeypatch):
    """The paths that are actually read, not answered from the cache."""
    paths = []

    def read(path):
        paths.append(str(path))
        return read_library(path)

    monkeypatch.setattr(module, "read_library", read)
    return paths


def refusal(readings, path):
    with pytest.raises(LibraryError) as caught:
        readings.read(path)
    return caught.value.message, caught.value.hint


def test_a_second_run_reads_no_file_and_gives_the_same_results(tmp_path, files_read):
    library = put(tmp_path / "librich.so.1.2", rich_elf(64, interpreter=True))
    text = put(tmp_path / "libtext.so.1.2", b"not a library")
    store = tmp_path / "readings.json"
    first = ElfCache(store)
    assert first.read(library) == read_library(library)
    said = refusal(first, text)
    first.save()
    assert files_read == [str(library), str(text)]
    second = ElfCache(store)
    assert second.read(library) == read_library(library)
    assert refusal(second, text) == said
    assert said == (
        f"{text}: not an ELF file",
        "reinstall the package that it belongs to",
    )
    assert files_read == [str(library), str(text)]


def test_a_second_run_does_not_load_pyelftools(tmp_path):
    put(tmp_path / "liba.so.1.2", elf("liba.so.1"))
    code = f"""
import sys
sys.path[:0] = {[p for p in sys.path if p]!r}
from vdriver import elf_cache
elf_cache.SETTLED_NS = 0
kept = elf_cache.ElfCache({str(tmp_path / "readings.json")!r})
print(kept.read({str(tmp_path / "liba.so.1.2")!r}).soname, "elftools" in sys.modules)
kept.save()
"""
    run = [sys.executable, "-c", code]
    said = [subprocess.run(run, check=True, capture_output=True, text=True).stdout for _ in "12"]
    assert said == ["liba.so.1 True\n", "liba.so.1 False\n"]


def _let_the_clock_tick(path):
    """Wait for the kernel's clock tick, at most 10 ms: changes within one tick have the same file time."""
    other = path.with_name("tick")
    for _ in range(1_000_000):
        other.touch()
        if other.stat().st_ctime_ns > path.stat().st_ctime_ns:
            break
    other.unlink()


def _rewrite(path):
    _let_the_clock_tick(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"liba.so.1", b"libb.so.1"))


def _replace(path):
    status = path.stat()
    put(path.with_name("new"), elf("libb.so.1"))
    os.utime(path.with_name("new"), ns=(status.st_atime_ns, status.st_mtime_ns))
    path.with_name("new").rename(path)


def _rewrite_and_restore_the_time(path):
    status = path.stat()
    _rewrite(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [_rewrite, _replace, _rewrite_and_restore_the_time])
def test_a_file_that_changed_is_read_again(tmp_path, change):
    path = put(tmp_path / "liba.so.1.2", elf("liba.so.1"))
    store = tmp_path / "readings.json"
    first = ElfCache(store)
    assert first.read(path).soname == "liba.so.1"
    first.save()
    change(path)
    assert first.read(path).soname == "libb.so.1"
    assert ElfCache(store).read(path).soname == "libb.so.1"


def test_a_file_that_replaced_a_library_is_read_again(tmp_path):
    path = put(tmp_path / "liba.so.1.2", elf("liba.so.1"))
    store = tmp_path / "readings.json"
    first = ElfCache(store)
    first.read(path)
    first.save()
    path.rename(tmp_path / "other")
    path.symlink_to("other")
    assert refusal(ElfCache(store), path)[0] == f"{path}: a symbolic link"
    path.unlink()
    os.mkfifo(path)
    assert refusal(ElfCache(store), path)[0] == f"{path}: not a regular file"
    path.unlink()
    assert refusal(ElfCache(store), path)[0] == f"{path}: No such file or directory"
    (tmp_path / "other").rename(path)
    assert ElfCache(store).read(path).soname == "liba.so.1"


def test_an_error_of_the_system_is_not_cached(tmp_path, monkeypatch):
    path = put(tmp_path / "liba.so.1.2", elf("liba.so.1"))
    store = tmp_path / "readings.json"
    first = ElfCache(store)

    def no_descriptor_left(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_descriptor_left)
        assert refusal(first, path)[0] == f"{path}: Too many open files"
    assert first.read(path).soname == "liba.so.1"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", no_descriptor_left)
        (tmp_path / "libb.so.1.2").write_bytes(elf("libb.so.1"))
        assert "Too many open files" in refusal(first, tmp_path / "libb.so.1.2")[0]
    assert first.read(tmp_path / "libb.so.1.2").soname == "libb.so.1"


def test_a_file_that_has_just_changed_is_not_cached(tmp_path, files_read, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", 10**18)
    path = put(tmp_path / "liba.so.1.2", elf("liba.so.1"))
    readings = ElfCache(tmp_path / "readings.json")
    readings.read(path)
    readings.read(path)
    assert len(files_read) == 2
    readings.save()
    assert not (tmp_path / "readings.json").exists()


def test_a_file_that_changes_while_it_is_read_is_not_cached(tmp_path, monkeypatch):
    path = put(tmp_path / "liba.so.1.2", elf("liba.so.1"))

    def read(name):
        library = read_library(name)
        _rewrite(path)
        return library

    readings = ElfCache(None)
    with monkeypatch.context() as patch:
        patch.setattr(module, "read_library", read)
        assert readings.read(path).soname == "liba.so.1"
    assert readings.read(path).soname == "libb.so.1"


def test_only_the_results_of_this_run_are_saved(tmp_path):
    one = put(tmp_path / "libone.so.1.2", elf("libone.so.1"))
    two = put(tmp_path / "libtwo.so.1.2", elf("libtwo.so.1"))
    store = tmp_path / "readings.json"
    first = ElfCache(store)
    first.read(one)
    first.read(two)
    first.save()
    second = ElfCache(store)
    second.read(two)
    second.save()
    assert list(json.loads(store.read_text())["readings"]) == [str(two)]


def test_saving_without_a_change_writes_nothing(tmp_path):
    path = put(tmp_path / "liba.so.1.2", elf("liba.so.1"))
    text = put(tmp_path / "libtext.so.1.2", b"not a library")
    store = tmp_path / "readings.json"
    first = ElfCache(store)
    first.read(path)
    refusal(first, text)
    first.save()
    before = store.stat()
    assert stat.S_IMODE(before.st_mode) == 0o600
    first.save()
    second = ElfCache(store)
    second.read(path)
    refusal(second, text)
    second.save()
    assert store.stat().st_ino == before.st_ino
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "liba.so.1.2",
        "libtext.so.1.2",
        "readings.json",
    ]


def test_readings_without_a_file_last_for_the_run(tmp_path, files_read):
    path = put(tmp_path / "liba.so.1.2", elf("liba.so.1"))
    readings = ElfCache(None)
    assert readings.read(path) == readings.read(str(path))
    readings.save()
    assert files_read == [str(path)]


def _stored(tmp_path):
    path = put(tmp_path / "liba.so.1.2", elf("liba.so.1", ("libc.so.6",)))
    store = tmp_path / "readings.json"
    readings = ElfCache(store)
    readings.read(path)
    readings.save()
    return path, store


def test_a_cache_file_of_another_version_is_ignored(tmp_path, files_read):
    path, store = _stored(tmp_path)
    document = json.loads(store.read_text())
    document["version"] += 1
    store.write_text(json.dumps(document))
    assert ElfCache(store).read(path).soname == "liba.so.1"
    assert files_read == [str(path)] * 2


DAMAGE = {
    "empty": lambda _: b"",
    "cut": lambda data: data[:-2],
    "text": lambda _: b"soname liba.so.1\n",
    "bytes": lambda _: bytes(range(256)),
    "a list": lambda _: b"[1, 2]",
    "deep": lambda _: b"[" * 100_000,
    "no readings": lambda data: data.replace(b'"readings"', b'"libraries"'),
    "a number for a name": lambda data: data.replace(b'"liba.so.1"', b"7"),
    "null for a size": lambda data: data.replace(b'"bits":64', b'"bits":null'),
    "a boolean for a number": lambda data: data.replace(b'"bits":64', b'"bits":true'),
    "a number for a list": lambda data: data.replace(b'["libc.so.6"]', b"6"),
    "numbers in a list": lambda data: data.replace(b'["libc.so.6"]', b"[6]"),
    "a missing field": lambda data: data.replace(b'"abi":null', b'"aba":null'),
    "a stamp of four values": lambda data: data.replace(b"[[", b"[[[],"),
    "of another path": lambda data: data.replace(b'"path":"/', b'"path":"/x/'),
    "too large": lambda data: data + b" " * module.MAX_BYTES,
}


@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_a_damaged_cache_file_is_ignored_and_replaced(tmp_path, files_read, name):
    path, store = _stored(tmp_path)
    whole = store.read_bytes()
    damaged = DAMAGE[name](whole)
    assert damaged != whole
    store.write_bytes(damaged)
    readings = ElfCache(store)
    assert readings.read(path).soname == "liba.so.1"
    assert files_read == [str(path)] * 2
    readings.save()
    assert store.read_bytes() == whole


def test_a_cache_that_is_not_a_regular_file_is_ignored_without_blocking(tmp_path):
    path = put(tmp_path / "liba.so.1.2", elf("liba.so.1"))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    for name in ("fifo", "directory", "missing/readings.json"):
        assert ElfCache(tmp_path / name).read(path).soname == "liba.so.1"


def test_a_cache_that_cannot_be_written_is_an_error_and_leaves_no_file(tmp_path):
    path = put(tmp_path / "liba.so.1.2", elf("liba.so.1"))
    readings = ElfCache(tmp_path / "missing/readings.json")
    readings.read(path)
    with pytest.raises(FileNotFoundError):
        readings.save()
    (tmp_path / "in-the-way/below").mkdir(parents=True)
    readings = ElfCache(tmp_path / "in-the-way")
    readings.read(path)
    with pytest.raises(IsADirectoryError):
        readings.save()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in-the-way", "liba.so.1.2"]


def test_the_version_changes_with_the_fields_of_a_library():
    code = f"""
import sys
sys.path[:0] = {[p for p in sys.path if p]!r}
import dataclasses
from vdriver import elf, elf_cache
print(elf_cache.VERSION)
elf.Library = dataclasses.make_dataclass("Library", [("more", "int")], bases=(elf.Library,), frozen=True, kw_only=True)
del sys.modules["vdriver.elf_cache"]
from vdriver.elf_cache import VERSION
print(VERSION)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    usual, changed = done.stdout.split()
    assert usual == str(module.VERSION) != changed
