"""What the hook keeps in mind of containers, on the host's side; what it takes away shows tests/container/test_hook_start.py."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oci_hook import kernel, ldcache, runtime, traces
from oci_hook.errors import MountError
from oci_hook.traces import Trace, forget, remember, sweep, take_back

PID = 1 << 30  # nobody's


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "rootfs"
    (path / "run/tidegate").mkdir(parents=True)
    (path / "usr/bin").mkdir(parents=True)
    return path


def keep(tmp_path: Path, root: Path, ident: str = "c1", pid: int = PID) -> Path:
    made = [Trace("directory", "run/tidegate"), Trace("file", "usr/bin/nvidia-smi")]
    remember(str(tmp_path), ident, pid, str(root), made)
    return tmp_path / traces.DIRECTORY / ident


def test_only_what_is_empty_goes(tmp_path: Path, root: Path) -> None:
    file = root / "usr/bin/nvidia-smi"
    for directory, content in (("", b""), ("own", b"the container's")):
        (root / "run/tidegate" / directory).mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        record = keep(tmp_path, root)
        assert record.stat().st_mode & 0o777 == 0o600
        assert record.parent.stat().st_mode & 0o777 == 0o700
        take_back(str(tmp_path), "c1")
        assert not record.exists()
        assert (root / "run/tidegate").exists() == file.exists() == bool(content)


def test_nothing_goes_while_the_container_runs(tmp_path: Path, root: Path) -> None:
    """Two engines may have a container of one id; one that has ended and waits for its parent is no more."""
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            record = keep(tmp_path, root, pid=process.pid)
            take_back(str(tmp_path), "c1")
            assert (root / "run/tidegate").exists()
            assert record.exists()
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        take_back(str(tmp_path), "c1")
        assert not (root / "run/tidegate").exists()
        assert not record.exists()


@pytest.mark.parametrize("ident", ["", ".", "..", "../c1", "a/b", "~c1", "a" * 201, "a\nb"])
def test_an_id_that_is_no_file_name_keeps_nothing(tmp_path: Path, root: Path, ident: str) -> None:
    with pytest.raises(OSError, match="not taken for a file's name"):
        remember(str(tmp_path), ident, PID, str(root), [Trace("directory", "run/tidegate")])
    assert not (tmp_path / traces.DIRECTORY).exists()
    take_back(str(tmp_path), ident)
    assert (root / "run/tidegate").exists()


def head(root: object, pid: object = PID, began: object = 0) -> bytes:
    return json.dumps([root, pid, began, 1, 2]).encode()


DAMAGED = [
    b"", b"{", b"{}", b"[]", b"3", b"[]\n[]", b'["/nowhere", 1073741824]\n[]', b"[" * 100_000,
    head(1) + b"\n3", head("/\0"), head("/tmp", "x") + b"\n[]", head(["/tmp"]) + b"\n[]",
]  # fmt: skip
ODD = [
    b"", b"3", b"[" * 100_000, b"[[]]", b"[3]", b'[["directory", 3, {}]]', b'[["file", "a", []]]',
    b'[["cache", "usr/bin/nvidia-smi", {}]]', b'[["cache", "usr/bin/nvidia-smi", {"ours": [0, 0], "attributes": 3}]]',
    b'[["directory", "", {}]]', b'[["directory", "..", {}]]', b'[["file", "\\ud800", {}]]',
]  # fmt: skip


@pytest.mark.parametrize("content", [*DAMAGED, *(head("/tmp") + b"\n" + odd for odd in ODD)])
def test_a_damaged_note_is_forgotten(tmp_path: Path, root: Path, content: bytes) -> None:
    record = keep(tmp_path, root)
    record.write_bytes(content.replace(b'"/tmp"', json.dumps(str(root)).encode()))
    take_back(str(tmp_path), "c1")
    assert not record.exists()
    assert (root / "run/tidegate").is_dir()


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_note_is_nothing_to_others(tmp_path: Path, root: Path, content: bytes) -> None:
    """One bad file stops no start and no end on the node."""
    record = keep(tmp_path, root)
    (record.parent / "bad").write_bytes(content)
    (record.parent / "odd").mkdir()
    os.mkfifo(record.parent / "pipe")
    take_back(str(tmp_path), "c1")
    assert not (root / "run/tidegate").exists()
    sweep(str(tmp_path))
    assert [path.name for path in record.parent.iterdir()] == ["odd"]
    take_back(str(tmp_path), "odd")


def test_the_host_s_own_root_loses_nothing(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, root)
    here, stat = root.stat(), os.stat
    monkeypatch.setattr(
        os, "stat", lambda path, **more: here if path == "/" else stat(path, **more)
    )
    take_back(str(tmp_path), "c1")
    assert (root / "run/tidegate").is_dir()


def test_a_number_that_is_used_again_is_another_process(tmp_path: Path, root: Path) -> None:
    record = keep(tmp_path, root, pid=os.getpid())
    name, pid, began, *place = json.loads(record.read_bytes().partition(b"\n")[0])
    record.write_bytes(
        json.dumps([name, pid, began + 1, *place]).encode()
        + b"\n"
        + record.read_bytes().partition(b"\n")[2]
    )
    take_back(str(tmp_path), "c1")
    assert not (root / "run/tidegate").exists()
    assert not record.exists()


def test_of_containers_with_one_root_the_last_takes_all(tmp_path: Path, root: Path) -> None:
    """A directory that goes takes its mounts along, in each of them; the second made nothing, all was there."""
    other = tmp_path / "other name"
    other.symlink_to(root)
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            first = keep(tmp_path, root)
            remember(str(tmp_path), "c2", process.pid, str(other), [])
            take_back(str(tmp_path), "c1")
            assert (root / "run/tidegate").exists()
            assert first.exists()
        finally:
            process.kill()
    take_back(str(tmp_path), "c2")
    assert not (root / "run/tidegate").exists()
    assert not (root / "usr/bin/nvidia-smi").exists()
    assert not list(first.parent.iterdir())


def test_notes_of_roots_that_are_gone_go(tmp_path: Path, root: Path) -> None:
    """One that runs may have its root in another mount namespace."""
    stays, goes = keep(tmp_path, root), keep(tmp_path, root / "usr", "c2")
    runs = keep(tmp_path, root / "usr", "c3", pid=os.getpid())
    for record in (goes, runs):
        record.write_text(record.read_text().replace("/usr", "/gone", 1))
    (stays.parent / "odd").write_text("no note\n")
    (stays.parent / "~c4").write_text("")
    sweep(str(tmp_path))
    assert {path.name for path in stays.parent.iterdir()} == {"c1", "c3", "~c4"}
    forget(str(tmp_path), "c1")
    forget(str(tmp_path), "c1")
    assert not stays.exists()


HWCAPS = "usr/lib/x86-64-v2"


def container_cache(root: Path, paths: list[str]) -> Path:
    """A cache that ldconfig made in the container, with libraries of ours, and its own behind them."""
    (root / HWCAPS).mkdir(parents=True, exist_ok=True)
    (root / "etc").mkdir(exist_ok=True)
    entries = [ldcache.Entry(0x303, b"libcuda.so.1", path.encode()) for path in paths]
    entries.append(ldcache.Entry(0x303, b"libc.so.6", b"/usr/lib/libc.so.6"))
    cache = root / "etc/ld.so.cache"
    cache.write_bytes(ldcache.write(ldcache.Cache(tuple(entries))))
    return cache


def made_a_cache(tmp_path: Path, root: Path) -> None:
    kept = {"attributes": [0o644, 0, 0, 0], "data": "", "ours": [0, 0]}
    made = [Trace("directory", HWCAPS), Trace("cache", "etc/ld.so.cache", kept)]
    remember(str(tmp_path), "c1", PID, str(root), made)


def test_what_a_container_s_cache_says_of_us_goes_however_it_is_spelled(
    tmp_path: Path, root: Path
) -> None:
    names = [f"/usr/{'./' * n}lib{'/' * n}/x86-64-v2/libcuda.so.1" for n in range(200)]
    cache = container_cache(root, names)
    made_a_cache(tmp_path, root)
    take_back(str(tmp_path), "c1")
    found = ldcache.parse(cache.read_bytes())
    assert found is not None
    assert [entry.soname for entry in found.entries] == [b"libc.so.6"]


def test_a_container_s_cache_does_not_choose_how_long_its_end_takes(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each directory that it names could be a walk over the longest links."""
    cache = container_cache(root, [f"/{n}/x86-64-v2/libcuda.so.1" for n in range(5000)])
    before = cache.read_bytes()
    made_a_cache(tmp_path, root)
    walks = []
    walk = kernel.open_in_root

    def count(rootfd: int, path: str, *args: int, same_mount: bool = False) -> int:
        walks.append(path)
        return walk(rootfd, path, *args, same_mount=same_mount)

    monkeypatch.setattr(kernel, "open_in_root", count)
    take_back(str(tmp_path), "c1")
    assert len(walks) < 100
    assert cache.read_bytes() == before
    assert not (root / HWCAPS).exists()
    assert not list((tmp_path / traces.DIRECTORY).iterdir())


def test_an_end_that_took_its_time_is_the_last_one(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds it would hold the next start, too."""
    record = keep(tmp_path, root)
    monkeypatch.setattr(traces, "SECONDS", 0.0)
    take_back(str(tmp_path), "c1")
    assert (root / "run/tidegate").exists()
    assert not record.exists()

    def expire(*_: object) -> None:
        raise MountError("late", hint="")

    record = keep(tmp_path, root)
    monkeypatch.setattr(traces, "_take_all", expire)
    with pytest.raises(MountError):
        take_back(str(tmp_path), "c1")
    assert not record.exists()


def test_delete_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine holds a lock of the container's meanwhile."""

    def hang(*_: object) -> None:
        for _ in range(100):
            time.sleep(0.1)

    node, call = runtime.Node(), runtime.Call()
    node.runtime, node.runtime_dir, node.log = "/bin/true", str(tmp_path), str(tmp_path / "log")
    monkeypatch.setattr(traces, "take_back", hang)
    monkeypatch.setattr(runtime, "END_DEADLINE", 0.2)
    began = time.monotonic()
    assert runtime.delete(call, node, ["delete", "c1"]) == 0
    assert time.monotonic() - began < 5
    assert "did not finish within 0.2 s" in (tmp_path / "log").read_text()


def test_a_large_cache_is_not_kept_and_loses_what_leads_to_us(tmp_path: Path, root: Path) -> None:
    """/run is memory, which is nobody's."""
    more = [f"/usr/lib/{'x' * 200}{n}.so" for n in range(4000)]
    cache = container_cache(root, [f"/{HWCAPS}/libcuda.so.1", *more])
    rootfd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    assert traces.keep(rootfd, "etc/ld.so.cache", cache.read_bytes()) == {}
    os.close(rootfd)
    status = cache.stat()
    made = [
        Trace("directory", HWCAPS),
        Trace("cache", "etc/ld.so.cache", {"ours": [status.st_size, status.st_mtime_ns]}),
    ]
    remember(str(tmp_path), "c1", PID, str(root), made)
    take_back(str(tmp_path), "c1")
    found = ldcache.parse(cache.read_bytes())
    assert found is not None
    assert [os.fsdecode(entry.path) for entry in found.entries] == [*more, "/usr/lib/libc.so.6"]


def test_a_note_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [Trace("directory", f"{'ä' * 2000}/{n}") for n in range(200)]
    with pytest.raises(OSError, match="bytes to write down"):
        remember(str(tmp_path), "c1", PID, str(root), many)
    keep(tmp_path, root)

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(traces, "write_all", full)
    with pytest.raises(OSError, match="No space"):
        keep(tmp_path, root, "c2")
    assert [path.name for path in (tmp_path / traces.DIRECTORY).iterdir()] == ["c1"]


def test_a_delete_that_fails_is_an_end_of_what_has_ended(tmp_path: Path, root: Path) -> None:
    """As after a checkpoint: the runtime has removed the container by itself, and says that there is none."""
    keep(tmp_path, root)
    node, call = runtime.Node(), runtime.Call()
    node.runtime, node.runtime_dir = "/bin/false", str(tmp_path)
    call.command, call.ident = "delete", "c1"
    assert runtime.delete(call, node, ["delete", "c1"]) == 1
    assert not (root / "run/tidegate").exists()


def test_who_kills_a_delete_kills_the_real_one(tmp_path: Path, root: Path) -> None:
    """An engine that tries again meets no other one at work."""
    keep(tmp_path, root)
    real, said = tmp_path / "runtime", tmp_path / "said"
    real.write_text(f"#!/bin/sh\necho $$ > {said}.new && mv {said}.new {said}\nexec sleep 60\n")
    real.chmod(0o755)
    (tmp_path / "settings").write_text(f"runtime {real}\nruntime-dir {tmp_path}\n")
    code = "from oci_hook import runtime; runtime.main()"
    command = [
        sys.executable,
        "-c",
        code,
        "--tidegate-config",
        str(tmp_path / "settings"),
        "delete",
        "c1",
    ]
    with subprocess.Popen(command, cwd=Path(traces.__file__).parents[1]) as wrapper:
        for _ in range(200):
            if said.exists():
                break
            time.sleep(0.05)
        wrapper.kill()
    child = Path(f"/proc/{int(said.read_text())}/stat")
    for _ in range(100):
        with contextlib.suppress(OSError):
            if child.read_text().rpartition(") ")[2][0] != "Z":
                time.sleep(0.05)
                continue
        return
    pytest.fail("the real delete goes on")
