"""Tests of oci_hook.cleanup: the notes on the host, and the removal of files at a container's end.

tests/container/test_hook_start.py tests the same with real runtimes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posix
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_hook import cleanup, kernel, ldcache, runtime
from oci_hook.cleanup import HookTrace, forget, remember, sweep, take_back
from oci_hook.errors import MountError
from oci_hook.quick import arm, disarm

PID = 1 << 30  # no process has this PID


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "rootfs"
    (path / "run/tidegate").mkdir(parents=True)
    (path / "usr/bin").mkdir(parents=True)
    return path


def keep(tmp_path: Path, root: Path, ident: str = "c1", pid: int = PID) -> Path:
    made = [HookTrace("directory", "run/tidegate"), HookTrace("file", "usr/bin/nvidia-smi")]
    remember(str(tmp_path), ident, pid, str(root), made)
    return tmp_path / cleanup.DIRECTORY / ident


def test_only_empty_files_and_directories_are_removed(tmp_path: Path, root: Path) -> None:
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


def test_nothing_is_removed_while_the_container_runs(tmp_path: Path, root: Path) -> None:
    """Two engines may have containers with the same id, so the container's process is checked. A
    zombie process counts as ended.
    """
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
def test_an_id_that_is_not_a_file_name_gets_no_note(tmp_path: Path, root: Path, ident: str) -> None:
    with pytest.raises(OSError, match="cannot be used as a file name"):
        remember(str(tmp_path), ident, PID, str(root), [HookTrace("directory", "run/tidegate")])
    assert not (tmp_path / cleanup.DIRECTORY).exists()
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
def test_a_damaged_note_is_removed(tmp_path: Path, root: Path, content: bytes) -> None:
    record = keep(tmp_path, root)
    record.write_bytes(content.replace(b'"/tmp"', json.dumps(str(root)).encode()))
    take_back(str(tmp_path), "c1")
    assert not record.exists()
    assert (root / "run/tidegate").is_dir()


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_note_does_not_affect_other_containers(
    tmp_path: Path, root: Path, content: bytes
) -> None:
    """A bad file must not prevent any start or clean-up on the node."""
    record = keep(tmp_path, root)
    (record.parent / "bad").write_bytes(content)
    (record.parent / "odd").mkdir()
    os.mkfifo(record.parent / "pipe")
    arm(10)  # otherwise a pipe would block the test
    try:
        take_back(str(tmp_path), "c1")
        sweep(str(tmp_path))
    finally:
        disarm()
    assert not (root / "run/tidegate").exists()
    assert [path.name for path in record.parent.iterdir()] == ["odd"]
    take_back(str(tmp_path), "odd")


def test_nothing_is_removed_from_the_hosts_own_root(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, root)
    here, stat = root.stat(), os.stat
    monkeypatch.setattr(
        os, "stat", lambda path, **more: here if path == "/" else stat(path, **more)
    )
    take_back(str(tmp_path), "c1")
    assert (root / "run/tidegate").is_dir()


def test_a_reused_pid_is_another_process(tmp_path: Path, root: Path) -> None:
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


def test_the_last_container_of_a_root_removes_all_files(tmp_path: Path, root: Path) -> None:
    """Removing a directory removes the mounts on it in every container.

    The second container created nothing, because everything existed.
    """
    other = tmp_path / "other name"
    other.symlink_to(root)
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            first = keep(tmp_path, root)
            remember(str(tmp_path), "c2", process.pid, str(other.resolve()), [])
            take_back(str(tmp_path), "c1")
            assert (root / "run/tidegate").exists()
            assert first.exists()
        finally:
            process.kill()
    take_back(str(tmp_path), "c2")
    assert not (root / "run/tidegate").exists()
    assert not (root / "usr/bin/nvidia-smi").exists()
    assert not list(first.parent.iterdir())


@pytest.mark.parametrize("is_above", [False, True])
def test_nothing_is_removed_from_a_root_whose_name_became_a_link(
    tmp_path: Path, *, is_above: bool
) -> None:
    """A user may have write access above the root, if the engine keeps it in the user's directory."""
    own = tmp_path / "users" / "rootfs"
    for tree in (own, tmp_path / "victim", tmp_path / "victim" / "rootfs"):
        (tree / "run/tidegate").mkdir(parents=True)
        (tree / "usr/bin").mkdir(parents=True)
        (tree / "usr/bin/nvidia-smi").touch()
    keep(tmp_path, own)
    name = own.parent if is_above else own
    name.rename(tmp_path / "moved")
    name.symlink_to(tmp_path / "victim")
    take_back(str(tmp_path), "c1")
    for tree in (tmp_path / "victim", tmp_path / "victim" / "rootfs"):
        assert (tree / "run/tidegate").exists()
        assert (tree / "usr/bin/nvidia-smi").exists()
    assert not list((tmp_path / cleanup.DIRECTORY).iterdir())
    # No note is written for a root that a link leads to, either.
    with pytest.raises(OSError, match="Too many levels"):
        remember(str(tmp_path), "c2", PID, str(own), [])


def test_notes_of_missing_roots_are_removed(tmp_path: Path, root: Path) -> None:
    """A running container may have its root in another mount namespace."""
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
    """Write a cache as ldconfig in the container would: with driver libraries, and one library of
    the image.
    """
    (root / HWCAPS).mkdir(parents=True, exist_ok=True)
    (root / "etc").mkdir(exist_ok=True)
    entries = [ldcache.CachedLibrary(0x303, b"libcuda.so.1", path.encode()) for path in paths]
    entries.append(ldcache.CachedLibrary(0x303, b"libc.so.6", b"/usr/lib/libc.so.6"))
    cache = root / "etc/ld.so.cache"
    cache.write_bytes(ldcache.write(ldcache.Cache(tuple(entries))))
    return cache


def remember_a_cache(tmp_path: Path, root: Path) -> None:
    kept = {"attributes": [0o644, 0, 0, 0], "data": "", "ours": [0, 0]}
    made = [HookTrace("directory", HWCAPS), HookTrace("cache", "etc/ld.so.cache", kept)]
    remember(str(tmp_path), "c1", PID, str(root), made)


def test_cache_entries_for_the_driver_are_removed_in_any_spelling(
    tmp_path: Path, root: Path
) -> None:
    names = [f"/usr/{'./' * n}lib{'/' * n}/x86-64-v2/libcuda.so.1" for n in range(200)]
    cache = container_cache(root, names)
    remember_a_cache(tmp_path, root)
    take_back(str(tmp_path), "c1")
    found = ldcache.parse(cache.read_bytes())
    assert found is not None
    assert [entry.soname for entry in found.entries] == [b"libc.so.6"]


def test_a_cache_of_the_container_cannot_prolong_the_cleanup(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each directory that the cache names could cost a walk over the longest possible chain of
    links.
    """
    cache = container_cache(root, [f"/{n}/x86-64-v2/libcuda.so.1" for n in range(5000)])
    before = cache.read_bytes()
    remember_a_cache(tmp_path, root)
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
    assert not list((tmp_path / cleanup.DIRECTORY).iterdir())


def test_a_cleanup_that_times_out_is_not_repeated(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause of the delay would also delay the next start."""
    record = keep(tmp_path, root)
    monkeypatch.setattr(cleanup, "SECONDS", 0.0)
    take_back(str(tmp_path), "c1")
    assert (root / "run/tidegate").exists()
    assert not record.exists()

    def expire(*_: object) -> None:
        raise MountError("late", hint="")

    record = keep(tmp_path, root)
    monkeypatch.setattr(cleanup, "_take_all", expire)
    with pytest.raises(MountError):
        take_back(str(tmp_path), "c1")
    assert not record.exists()


def test_delete_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine holds a lock on the container during the delete."""

    def hang(*_: object) -> None:
        for _ in range(100):
            time.sleep(0.1)

    node, call = runtime.NodeSettings(), runtime.EngineCall()
    node.runtime, node.runtime_dir, node.log = "/bin/true", str(tmp_path), str(tmp_path / "log")
    monkeypatch.setattr(cleanup, "take_back", hang)
    monkeypatch.setattr(runtime, "END_DEADLINE", 0.2)
    began = time.monotonic()
    assert runtime.delete(call, node, ["delete", "c1"]) == 0
    assert time.monotonic() - began < 5
    assert 'did not finish within 0.2 s"' in (tmp_path / "log").read_text()


def test_a_large_cache_is_not_kept_and_loses_only_the_drivers_entries(
    tmp_path: Path, root: Path
) -> None:
    """/run is memory, and no quota accounts for it."""
    more = [f"/usr/lib/{'x' * 200}{n}.so" for n in range(4000)]
    cache = container_cache(root, [f"/{HWCAPS}/libcuda.so.1", *more])
    rootfd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    assert cleanup.keep(rootfd, "etc/ld.so.cache", cache.read_bytes()) == {}
    os.close(rootfd)
    status = cache.stat()
    made = [
        HookTrace("directory", HWCAPS),
        HookTrace("cache", "etc/ld.so.cache", {"ours": [status.st_size, status.st_mtime_ns]}),
    ]
    remember(str(tmp_path), "c1", PID, str(root), made)
    take_back(str(tmp_path), "c1")
    found = ldcache.parse(cache.read_bytes())
    assert found is not None
    assert [os.fsdecode(entry.path) for entry in found.entries] == [*more, "/usr/lib/libc.so.6"]


def test_a_note_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [HookTrace("directory", f"{'ä' * 2000}/{n}") for n in range(200)]
    with pytest.raises(OSError, match="the description takes"):
        remember(str(tmp_path), "c1", PID, str(root), many)
    keep(tmp_path, root)

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cleanup, "write_all", full)
    with pytest.raises(OSError, match="No space"):
        keep(tmp_path, root, "c2")
    assert [path.name for path in (tmp_path / cleanup.DIRECTORY).iterdir()] == ["c1"]


def test_a_failed_delete_of_a_container_that_has_ended_cleans_up(
    tmp_path: Path, root: Path
) -> None:
    """This happens after a checkpoint: the runtime has removed the container itself, and then finds
    none.
    """
    keep(tmp_path, root)
    node, call = runtime.NodeSettings(), runtime.EngineCall()
    node.runtime, node.runtime_dir = "/bin/false", str(tmp_path)
    call.command, call.ident = "delete", "c1"
    assert runtime.delete(call, node, ["delete", "c1"]) == 1
    assert not (root / "run/tidegate").exists()


def test_killing_the_wrappers_delete_kills_the_runtimes_delete(tmp_path: Path, root: Path) -> None:
    """Otherwise it would run at the same time as the delete of an engine that retries."""
    keep(tmp_path, root)
    real, pid_file = tmp_path / "runtime", tmp_path / "pid_file"
    real.write_text(
        f"#!/bin/sh\necho $$ > {pid_file}.new && mv {pid_file}.new {pid_file}\nexec sleep 60\n"
    )
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
    with subprocess.Popen(command, cwd=Path(cleanup.__file__).parents[1]) as wrapper:
        for _ in range(200):
            if pid_file.exists():
                break
            time.sleep(0.05)
        wrapper.kill()
    child = Path(f"/proc/{int(pid_file.read_text())}/stat")
    for _ in range(100):
        with contextlib.suppress(OSError):
            if child.read_text().rpartition(") ")[2][0] != "Z":
                time.sleep(0.05)
                continue
        return
    pytest.fail("the runtime's delete is still running")


@pytest.mark.parametrize("kind", ["fifo", "link"])
@pytest.mark.parametrize("place", ["usr/bin/nvidia-smi", "etc/ld.so.cache"])
def test_a_path_that_is_no_longer_a_regular_file_stays(
    tmp_path: Path, root: Path, place: str, kind: str
) -> None:
    """The container has created it, and opening it may have side effects."""
    (root / "etc").mkdir()
    if kind == "link":  # to a file that would be removed or rewritten
        container_cache(root, ["/run/tidegate/libcuda.so.1"]).rename(root / "other")
        if place == "usr/bin/nvidia-smi":
            (root / "other").write_bytes(b"")
        (root / place).symlink_to("../../other" if place.count("/") > 1 else "../other")
    else:
        os.mkfifo(root / place)
    kept = {
        "attributes": [0o644, 0, 0, 0],
        "data": "",
        "ours": [0, (root / place).lstat().st_mtime_ns],
    }
    made = [
        HookTrace("directory", "run/tidegate"),
        HookTrace("file", "usr/bin/nvidia-smi"),
        HookTrace("cache", "etc/ld.so.cache", kept),
    ]
    remember(str(tmp_path), "c1", PID, str(root), made)
    take_back(str(tmp_path), "c1")
    assert (root / place).is_symlink() if kind == "link" else (root / place).is_fifo()


def test_a_cache_is_kept_only_if_it_is_the_file_that_was_read(root: Path) -> None:
    """The name may now belong to another file, or to one that is not a regular file."""
    (root / "etc").mkdir()
    path = root / "etc/ld.so.cache"
    rootfd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    path.write_bytes(b"as it was")
    assert cleanup.keep(rootfd, "etc/ld.so.cache", b"as it was")["data"] == "YXMgaXQgd2Fz"
    path.write_bytes(b"another, that is longer")
    assert cleanup.keep(rootfd, "etc/ld.so.cache", b"as it was") == {}
    path.unlink()
    os.mkfifo(path)
    assert cleanup.keep(rootfd, "etc/ld.so.cache", b"") == {}
    os.close(rootfd)


def test_the_cleanup_does_not_read_an_endless_cache(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container has extended its cache to a sparse file of 1 TiB."""
    cache = container_cache(root, [])
    with cache.open("r+b") as file:
        file.truncate(1 << 40)
    remember_a_cache(tmp_path, root)
    size, read = 0, posix.read

    def count(fd: int, most: int) -> bytes:
        nonlocal size
        data = read(fd, most)
        size += len(data)
        assert size < 8 << 20
        return data

    for module in (os, posix):
        monkeypatch.setattr(module, "read", count)
    take_back(str(tmp_path), "c1")
    assert cache.stat().st_size == 1 << 40
    assert not (root / HWCAPS).exists()


def test_the_cleanup_does_not_accept_a_path_as_an_id(tmp_path: Path, root: Path) -> None:
    record = keep(tmp_path, root)
    record.rename(tmp_path / "c1")
    (tmp_path / "c2").write_bytes(b"no note")
    for ident in ("../c1", "../c2"):
        take_back(str(tmp_path), ident)
    assert (root / "run/tidegate").exists()
    assert (tmp_path / "c1").exists()
    assert (tmp_path / "c2").exists()


def test_the_cleanup_does_not_write_through_a_link(tmp_path: Path, root: Path) -> None:
    """The container has a link to the host under the temporary name of the new cache."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"the host's")
    cache = container_cache(root, [f"/{HWCAPS}/libcuda.so.1"])
    (root / "etc" / cleanup.TEMPORARY).symlink_to(victim)
    remember_a_cache(tmp_path, root)
    take_back(str(tmp_path), "c1")
    assert victim.read_bytes() == b"the host's"
    assert b"libcuda" not in cache.read_bytes()
    assert [path.name for path in (root / "etc").iterdir()] == ["ld.so.cache"]


def test_a_restart_in_a_root_that_is_in_use_keeps_the_earlier_note(
    tmp_path: Path, root: Path
) -> None:
    """The second start finds all files of the first one, which another container now uses."""
    keep(tmp_path, root)
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            remember(str(tmp_path), "c2", process.pid, str(root), [])
            take_back(str(tmp_path), "c1")
            remember(str(tmp_path), "c1", PID, str(root), [])
            take_back(str(tmp_path), "c1")
            assert (root / "run/tidegate").exists()
        finally:
            process.kill()
    take_back(str(tmp_path), "c2")
    assert not (root / "run/tidegate").exists()
    assert not list((tmp_path / cleanup.DIRECTORY).iterdir())


@pytest.mark.parametrize("began", [1, -1])
def test_traces_are_removed_in_reverse_order(tmp_path: Path, root: Path, began: int) -> None:
    """The second start found the first one's cache, whichever process is older.

    Both caches are removed, and the image's own cache is restored.
    """
    cache = container_cache(root, [])
    rootfd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    before = cache.read_bytes(), cache.stat().st_mtime_ns
    for number, ident in enumerate(("c1", "c2"), 1):
        kept = cleanup.keep(rootfd, "etc/ld.so.cache", cache.read_bytes())
        container_cache(root, [f"/{HWCAPS}/{n}.so" for n in range(number)])
        status = cache.stat()
        made = HookTrace(
            "cache", "etc/ld.so.cache", kept | {"ours": [status.st_size, status.st_mtime_ns]}
        )
        remember(str(tmp_path), ident, PID, str(root), [HookTrace("directory", HWCAPS), made])
        record = tmp_path / cleanup.DIRECTORY / ident
        note, traces = record.read_bytes().split(b"\n")
        name, pid, _, *more = json.loads(note)
        began_at = 10 + began * number
        record.write_bytes(json.dumps([name, pid, began_at, *more]).encode() + b"\n" + traces)
    os.close(rootfd)
    take_back(str(tmp_path), "c1")
    assert (cache.read_bytes(), cache.stat().st_mtime_ns) == before
    assert not (root / HWCAPS).exists()


@contextlib.contextmanager
def locked(runtime_dir: Path, device: int, inode: int) -> Iterator[None]:
    """Have another process lock a root."""
    code = (
        "import sys; from oci_hook.cleanup import lock; lock(sys.argv[1], *map(int, sys.argv[2:]));"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, *map(str, (runtime_dir, device, inode))]
    with subprocess.Popen(
        command,
        cwd=Path(cleanup.__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait()


def test_a_lock_covers_one_root(tmp_path: Path) -> None:
    """Processes with other roots do not wait. If locking is impossible, no process waits."""
    with locked(tmp_path, 1, 2):
        os.close(cleanup.lock(str(tmp_path), 1, 3))
        os.close(cleanup.lock(str(tmp_path), 2, 2))
        arm(0.3)
        with pytest.raises(MountError, match="did not finish"):
            cleanup.lock(str(tmp_path), 1, 2)
    os.close(cleanup.lock(str(tmp_path), 1, 2))
    assert cleanup.lock(str(tmp_path / "nowhere"), 1, 2) == -1


def test_a_cleanup_waits_for_a_start_in_the_same_root(tmp_path: Path, root: Path) -> None:
    """The files of the start are not in a note yet."""
    record = keep(tmp_path, root)
    status = root.stat()
    with locked(tmp_path, status.st_dev, status.st_ino):
        arm(0.3)
        with pytest.raises(MountError, match="did not finish"):
            take_back(str(tmp_path), "c1")
        assert (root / "run/tidegate").exists()
        assert record.exists()
    take_back(str(tmp_path), "c1")
    assert not (root / "run/tidegate").exists()
    assert not list(record.parent.iterdir())


def test_restarts_in_a_root_that_is_in_use_do_not_accumulate_notes(
    tmp_path: Path, root: Path
) -> None:
    """Each clean-up reads all notes, and notes take memory."""
    record = keep(tmp_path, root)
    remember(str(tmp_path), "c2", os.getpid(), str(root), [])
    for _ in range(5):
        take_back(str(tmp_path), "c1")
        remember(str(tmp_path), "c1", PID, str(root), [])
    assert len(list(record.parent.iterdir())) == 3  # the notes of the first, of the last, and of c2
    take_back(str(tmp_path), "c2")
    assert record.with_name("c2").exists()


def test_nothing_is_removed_from_another_root_under_the_same_name(
    tmp_path: Path, root: Path
) -> None:
    """Removing a directory would remove the mounts of the container that now uses that root."""
    keep(tmp_path, root)
    root.rename(tmp_path / "before")
    (root / "run/tidegate").mkdir(parents=True)
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            runs = keep(tmp_path, root, "c2", pid=process.pid)
            take_back(str(tmp_path), "c1")
            assert (root / "run/tidegate").exists()
            assert [path.name for path in runs.parent.iterdir()] == ["c2"]
        finally:
            process.kill()
    take_back(str(tmp_path), "c2")
    assert not (root / "run/tidegate").exists()


@pytest.mark.parametrize("found", ["gone", "nothing"])
def test_a_sweep_keeps_the_note_of_a_start_at_the_same_time(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    """A container with the same id starts after its old note was read, and before it is removed."""
    looked = cleanup._notes
    record = keep(tmp_path, root)
    record.write_text(record.read_text().replace("/rootfs", "/gone", 1))

    def then_it_starts(runtime_dir: str) -> dict[str, cleanup.NoteHeader | None]:
        monkeypatch.setattr(cleanup, "_notes", looked)
        if found == "nothing":  # as between the two renames of a start
            record.write_bytes(b"")
        notes = looked(runtime_dir)
        keep(tmp_path, root, pid=os.getpid())
        return notes

    monkeypatch.setattr(cleanup, "_notes", then_it_starts)
    sweep(str(tmp_path))
    assert cleanup._read(str(tmp_path), "c1")


def test_notes_behind_a_link_are_not_used(tmp_path: Path, root: Path) -> None:
    record = keep(tmp_path, root)
    other = tmp_path / "other"
    record.parent.rename(other)
    record.parent.symlink_to(other)
    forget(str(tmp_path), "c1")
    with pytest.raises(NotADirectoryError):
        keep(tmp_path, root, "c2")
    assert [path.name for path in other.iterdir()] == ["c1"]
