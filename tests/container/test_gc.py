"""`tidegate gc` on a machine with containers: a generation that is mounted in any way is kept, and
removed once it is no longer mounted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from governor import cli
from tests.conftest import need
from tests.container.bundles import DiskBundle, Runtime, base_config
from tests.unit.vdriver_generation import (
    put_control_with_origin,
    put_generation,
    small_driver,
    switch,
)
from vdriver import generations, kernel_calls, namespaces
from vdriver.generations import PROC_PID_INIT_INO
from vdriver.mountinfo import Mount

OLD, NEW = "550.163.01", "580.159.04"
ROOT = Path(__file__).resolve().parents[2]
# In a container, the PID namespace of the tests is not the machine's.
NESTED = (
    [] if os.stat("/proc/self/ns/pid").st_ino == PROC_PID_INIT_INO else ["--nested"]  # noqa: PTH116
)
UNSURE = (
    "mount namespaces keep changing",
    "list of mount namespaces, after",
    "the search did not finish",
)
"""Reasons for which the collector keeps a generation because other containers start and end during the search."""
BIND = 'mount --bind "$1" "$2" && echo ready && exec sleep 600'


class TwoGenerations:
    """A directory with two generations, of which the newer one is in force."""

    def __init__(self, base: Path) -> None:
        self.path = base / "driver dir"
        control = put_control_with_origin(base / "control")
        self.old = put_generation(self.path, OLD, small_driver(OLD), control)
        self.new = put_generation(self.path, NEW, small_driver(NEW), control)
        self.target = base / "target"
        self.target.mkdir()

    def gc(self, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, str]:
        """Run `tidegate gc`, and return the reason by generation, preceded by `removed: ` if the generation was removed.

        The run is repeated if the containers of other tests prevented a complete search.
        """
        found: dict[str, str] = {}
        deadline = time.monotonic() + 20
        while True:
            found |= self.gc_once(capsys, *more)
            unsure = any(text in reason for reason in found.values() for text in UNSURE)
            if not unsure or time.monotonic() > deadline:
                return found

    def gc_once(self, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, str]:
        """Run `tidegate gc` once, without regard to other activity on the machine."""
        assert cli.main(["gc", "--driver-dir", str(self.path), *NESTED, *more, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        return {
            g["name"]: ("removed: " if g["removed"] else "") + g["reason"]
            for g in document["generations"]
        }

    def gc_lines(self, capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
        """Run `tidegate gc`, repeated as in `gc`, and return the lines about generations.

        The other lines are about processes, including those of other tests.
        """
        deadline = time.monotonic() + 20
        while True:
            assert cli.main(["gc", "--driver-dir", str(self.path), *NESTED, *more]) == 0
            printed = capsys.readouterr().out.splitlines()
            lines = [line for line in printed if not line.startswith("not examined: ")]
            unsure = any(text in line for line in lines for text in UNSURE)
            if not unsure or time.monotonic() > deadline:
                return lines


@pytest.fixture(params=["the kernel's list", "proc"])
def driver(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TwoGenerations:
    """Namespaces must be found in both ways; kernels before 6.12 have no list."""
    need("gcc", "unshare")
    if request.param == "proc":
        monkeypatch.setattr(namespaces._ChildSearch, "_read_listed", lambda _: False)
    elif not kernel_lists():
        pytest.skip("this kernel does not list mount namespaces, or not to this process")
    return TwoGenerations(tmp_path)


def kernel_lists() -> bool:
    fd = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    try:
        following = kernel_calls.next_namespace(fd, namespaces.NS_MNT_GET_NEXT)
    except OSError:
        return False
    finally:
        os.close(fd)
    if following is not None:
        os.close(following)
    return os.stat("/proc/self/ns/user").st_ino == namespaces.PROC_USER_INIT_INO  # noqa: PTH116


def run_by_now(pid: int) -> str:
    """Wait until a shell has executed its program, and return the program's name.

    The shell reports that it is ready just before it executes the program.
    """
    deadline = time.monotonic() + 20
    while (name := Path(f"/proc/{pid}/comm").read_text().strip()) in {"sh", "chroot", "unshare"}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return name


def is_gone(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    assert process.stdout is not None
    process.stdout.close()
    process.wait()


@contextlib.contextmanager
def namespace(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a new mount namespace, and wait until it reports that it is ready."""
    process = subprocess.Popen(
        ["unshare", "-m", "--propagation", "private", *command], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        run_by_now(process.pid)
        yield process
    finally:
        is_gone(process)


def shell(script: str, *arguments: Path) -> list[str]:
    return ["sh", "-c", script, "sh", *map(str, arguments)]


def test_a_containers_generation_is_kept_until_it_ends(
    driver: TwoGenerations,
    runc: Runtime,
    made_once: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "bundle"
    path.mkdir()
    subprocess.run(["cp", "-a", str(made_once / "rootfs"), str(path / "rootfs")], check=True)
    bundle = DiskBundle(path, path / "rootfs", base_config("echo ready; exec sleep 600"))
    bundle.config["mounts"].append(
        {
            "destination": "/driver",
            "type": "bind",
            "source": str(driver.old / "lib64"),
            "options": ["bind", "ro"],
        }
    )
    bundle.write()
    name = f"tidegate-gc-{os.getpid()}"
    switch(driver.path, driver.old.name)
    container = subprocess.Popen(
        runc.command("run", "--bundle", str(path), name),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        assert container.stdout is not None
        assert container.stdout.readline() == b"ready\n"
        switch(driver.path, driver.new.name)
        state = json.loads(subprocess.check_output(runc.command("state", name)))
        assert run_by_now(state["pid"]) == "sleep"
        assert driver.gc(capsys) == {
            driver.old.name: f"mounted in 1 namespace, e.g. pid {state['pid']} (sleep)",
            driver.new.name: "in force",
        }
        assert (driver.old / "lib64/libcuda.so.1").exists()
    finally:
        subprocess.run(runc.command("kill", name, "KILL"), check=False)
        container.wait(30)
        assert container.stdout is not None
        container.stdout.close()
    assert driver.gc(capsys) == {
        driver.old.name: "removed: not in use",
        driver.new.name: "in force",
    }
    assert sorted(p.name for p in driver.path.iterdir()) == [driver.new.name, "current"]


def test_a_starting_containers_lock_keeps_its_generation(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    fd = os.open(driver.old, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert (
        driver.gc(capsys)[driver.old.name]
        == "locked by a starting container, or by tidegate verify"
    )
    os.close(fd)
    assert driver.gc(capsys)[driver.old.name] == "removed: not in use"


def test_a_removal_waits_for_a_refresh_to_end(driver: TwoGenerations) -> None:
    fd = os.open(driver.path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    command = [sys.executable, "-m", "governor.cli", "gc", "--driver-dir", str(driver.path)]
    with subprocess.Popen([*command, *NESTED], cwd=ROOT, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 20
        while f" {os.stat(driver.path).st_ino} " not in _waiting_for_locks():  # noqa: PTH116
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert driver.old.exists()
        os.close(fd)
        assert process.wait(20) == 0
    assert not driver.old.exists()


def _waiting_for_locks() -> str:
    lines = Path("/proc/locks").read_text().splitlines()
    return " ".join(line.replace(":", " ") + " " for line in lines if "->" in line)


def test_a_dry_run_reports_the_same_and_removes_nothing(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    would = driver.gc_lines(capsys, "--dry-run")
    assert would[0].startswith(f"{driver.old.name}  would be removed: not in use, ")
    assert would[1] == f"{driver.new.name}  kept: in force"
    assert driver.old.exists()
    done = driver.gc_lines(capsys)
    assert done == [line.replace("would be removed", "removed") for line in would]
    assert not driver.old.exists()


def test_only_generations_and_their_remains_are_removed(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = driver.old.rename(f"{driver.old}.damaged-0")
    left = driver.path / f".tmp-gc-{driver.old.name}"
    (left / "lib64").mkdir(parents=True)
    for name in (".tmp-abcdef", "backup", f"{driver.old.name}.bak"):
        (driver.path / name).mkdir()
    (driver.path / "550.1-aaaaaaaaaaaa").write_bytes(b"a file")
    (driver.path / "550.2-bbbbbbbbbbbb").symlink_to("backup")
    assert driver.gc(capsys) == {
        left.name: "removed: not in use",
        damaged.name: "removed: not in use",
        driver.new.name: "in force",
    }
    assert sorted(p.name for p in driver.path.iterdir()) == [
        ".tmp-abcdef",
        "550.1-aaaaaaaaaaaa",
        f"{driver.old.name}.bak",
        "550.2-bbbbbbbbbbbb",
        driver.new.name,
        "backup",
        "current",
    ]


def test_a_damaged_generation_is_kept_while_it_is_mounted(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    """The generation was mounted under its original name; the kernel shows its current name."""
    with namespace(*shell(BIND, driver.old / "lib64", driver.target)) as process:
        damaged = driver.old.rename(f"{driver.old}.damaged-0")
        reason = f"mounted in 1 namespace, e.g. pid {process.pid} (sleep)"
        assert driver.gc(capsys)[damaged.name] == reason
    assert driver.gc(capsys)[damaged.name] == "removed: not in use"


def test_a_single_file_that_is_mounted_keeps_its_generation(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds even after the file was unlinked, when the kernel marks it as deleted."""
    target = driver.target / "file"
    target.touch()
    library = driver.old / "lib64/libcuda.so.1"
    with namespace(*shell(BIND, library, target)) as process:
        expected = f"mounted in 1 namespace, e.g. pid {process.pid} (sleep)"
        assert driver.gc(capsys)[driver.old.name] == expected
        library.unlink()
        assert driver.gc(capsys)[driver.old.name] == expected


def test_a_mount_outside_the_root_of_a_process_keeps_its_generation(
    driver: TwoGenerations, made_once: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mountinfo of a process in a chroot does not show such a mount."""
    script = 'mount --bind "$1" "$2" && exec chroot "$3" /bin/sh -c "echo ready; exec sleep 600"'
    arguments = (driver.old / "lib64", driver.target, made_once / "rootfs")
    with namespace(*shell(script, *arguments)) as process:
        assert OLD not in Path(f"/proc/{process.pid}/mountinfo").read_text()
        expected = f"mounted in 1 namespace, e.g. pid {process.pid} (sleep)"
        assert driver.gc(capsys)[driver.old.name] == expected


def test_a_namespace_of_one_thread_keeps_a_generation(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    script = """
import ctypes, subprocess, sys, threading, time
def hold():
    libc = ctypes.CDLL(None)
    assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS, and with it CLONE_FS
    assert libc.mount(None, b"/", None, 1 << 18 | 1 << 14, None) == 0  # MS_PRIVATE | MS_REC
    assert libc.mount(sys.argv[1].encode(), sys.argv[2].encode(), None, 1 << 12, None) == 0
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=hold, daemon=True).start()
time.sleep(60)
"""
    command = [sys.executable, "-c", script, str(driver.old / "lib64"), str(driver.target)]
    with namespace(*command) as process:
        reason = driver.gc(capsys)[driver.old.name]
        assert reason.startswith(f"mounted in 1 namespace, e.g. pid {process.pid} (python")


def test_a_namespace_below_a_user_namespace_keeps_a_generation(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rootless container has such a namespace."""
    command = ["unshare", "--user", "--map-root-user", "-m", "--propagation", "private"]
    script = shell(BIND, driver.old / "lib64", driver.target)
    with namespace(*command, *script) as process:
        expected = f"mounted in 1 namespace, e.g. pid {process.pid} (sleep)"
        assert driver.gc(capsys)[driver.old.name] == expected


def test_a_namespace_held_only_by_a_descriptor_keeps_a_generation(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    with namespace(*shell(BIND, driver.old / "lib64", driver.target)) as process:
        fd = os.open(f"/proc/{process.pid}/ns/mnt", os.O_RDONLY)
    assert driver.gc(capsys)[driver.old.name] == (
        "mounted in 1 namespace, e.g. one without a process, kept alive by a mount or a descriptor"
    )
    os.close(fd)
    assert driver.gc(capsys)[driver.old.name] == "removed: not in use"


def test_a_namespace_held_only_by_a_descriptor_of_one_thread_keeps_a_generation(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread may have a table of descriptors of its own, in which a number means another file."""
    script = """
import ctypes, os, sys, threading, time
def hold():
    assert ctypes.CDLL(None).unshare(0x00000400) == 0  # CLONE_FILES
    os.open(f"/proc/{sys.argv[1]}/ns/mnt", os.O_RDONLY)
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=hold, daemon=True).start()
time.sleep(60)
"""
    with contextlib.ExitStack() as holder:
        with namespace(*shell(BIND, driver.old / "lib64", driver.target)) as process:
            command = [sys.executable, "-c", script, str(process.pid)]
            holder.enter_context(running(*command))
        assert driver.gc(capsys)[driver.old.name] == (
            "mounted in 1 namespace, e.g. one without a process, kept alive by a mount or a descriptor"
        )
    assert driver.gc(capsys)[driver.old.name] == "removed: not in use"


@contextlib.contextmanager
def pinned(driver: TwoGenerations, pin: Path) -> Iterator[None]:
    """Keep a namespace that has no process, and in which the old generation is mounted, by a mount
    of the namespace's file.
    """
    pin.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", pin], check=True)
    try:
        subprocess.run(["mount", "--make-private", pin], check=True)
        (pin / "ns").touch()
        command = ["unshare", f"--mount={pin}/ns", "--propagation", "private"]
        bind = ["mount", "--bind", driver.old / "lib64", driver.target]
        # A namespace can be pinned only in an older one. The kernel compares their numbers, which each processor takes
        # from a batch of its own, so that a new namespace may count as older. In that case another processor is tried.
        processors = itertools.cycle(sorted(os.sched_getaffinity(0)))
        for _ in range(100):
            on = ["taskset", "-c", str(next(processors))]
            done = subprocess.run(
                [*on, *command, *bind], check=False, capture_output=True, text=True
            )
            if "Invalid argument" not in done.stderr:
                break
        assert done.returncode == 0, done.stderr
        yield
    finally:
        subprocess.run(["umount", "-R", pin], check=True)


def test_a_namespace_held_only_by_a_mount_keeps_a_generation(
    driver: TwoGenerations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pinned(driver, tmp_path / "pin"):
        assert driver.gc(capsys)[driver.old.name] == (
            "mounted in 1 namespace, e.g. one without a process, kept alive by a mount or a descriptor"
        )
    assert driver.gc(capsys)[driver.old.name] == "removed: not in use"


def test_a_namespace_whose_pin_is_covered_keeps_its_generation(
    driver: TwoGenerations,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """The kernel's list contains the namespace nevertheless. Without the list, any generation could
    be mounted in the namespace.
    """
    with pinned(driver, tmp_path / "pin"):
        subprocess.run(["mount", "--bind", "/dev/null", tmp_path / "pin/ns"], check=True)
        reason = driver.gc(capsys)[driver.old.name]
        if request.node.callspec.params["driver"] == "proc":
            assert reason.startswith("may be in use: mount namespace ")
            assert ", uid 0): something else is mounted over it" in reason
            assert "/pin/ns of mount namespace " in reason
        else:
            assert reason.startswith("mounted in 1 namespace, e.g. one without a process")
        subprocess.run(["umount", tmp_path / "pin/ns"], check=True)


def test_a_layer_of_an_overlay_keeps_its_generation(
    driver: TwoGenerations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lower").mkdir()
    script = 'mount -t overlay overlay -o "lowerdir=$1:$2" "$3" && echo ready && exec sleep 600'
    arguments = (driver.old / "lib64", tmp_path / "lower", driver.target)
    with namespace(*shell(script, *arguments)) as process:
        expected = f"mounted in 1 namespace, e.g. pid {process.pid} (sleep)"
        assert driver.gc(capsys)[driver.old.name] == expected


def test_a_generation_with_a_mount_on_it_is_kept(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the mounted files would be removed with it."""
    precious = driver.target / "precious"
    precious.touch()
    subprocess.run(["mount", "--bind", driver.target, driver.old / "bin"], check=True)
    try:
        assert driver.gc(capsys)[driver.old.name] == "something is mounted on it"
        assert precious.exists()
    finally:
        subprocess.run(["umount", driver.old / "bin"], check=True)


def test_a_mount_below_another_name_of_the_file_system_counts(
    driver: TwoGenerations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory is reached through a bind mount, while the generation was mounted by its
    original name.
    """
    other = tmp_path / "other name"
    other.mkdir()
    subprocess.run(["mount", "--bind", driver.path, other], check=True)
    try:
        with namespace(*shell(BIND, driver.old / "lib64", driver.target)):
            assert cli.main(["gc", "--driver-dir", str(other), *NESTED]) == 0
            kept = capsys.readouterr().out.splitlines()[0]
            assert kept.startswith(f"{driver.old.name}  kept: mounted in 1 namespace")
    finally:
        subprocess.run(["umount", other], check=True)


def test_in_another_pid_namespace_every_generation_is_kept(driver: TwoGenerations) -> None:
    """Containers may be invisible there, unless --nested declares that they are not."""
    command = [
        *("unshare", "--pid", "--fork", "--mount-proc", "--propagation", "private"),
        *(sys.executable, "-m", "governor.cli", "gc", "--driver-dir", str(driver.path)),
    ]

    def run(*more: str) -> str:
        return subprocess.run(
            [*command, *more], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()[0]

    assert run() == (
        f"{driver.old.name}  kept: may be in use: "
        "processes outside this PID namespace cannot be seen (see --nested)"
    )
    assert run("--nested").startswith(f"{driver.old.name}  removed: not in use, ")


def test_without_privileges_every_generation_is_kept(driver: TwoGenerations) -> None:
    need("setpriv")
    command = [
        *("setpriv", "--bounding-set", "-sys_admin,-sys_ptrace"),
        *(sys.executable, "-m", "governor.cli", "gc", "--driver-dir", str(driver.path)),
    ]
    done = subprocess.run([*command, *NESTED], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(f"{driver.old.name}  kept: may be in use: mount namespace ")
    assert driver.old.exists()


def test_an_interrupted_removal_leaves_no_partial_generation_under_its_name(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        (path / "lib64/libcuda.so.1").unlink()
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path / "lib64"))

    left = driver.path / f".tmp-gc-{driver.old.name}"
    monkeypatch.setattr(shutil, "rmtree", fail)
    assert cli.main(["gc", "--driver-dir", str(driver.path), *NESTED]) == 72
    captured = capsys.readouterr()
    reason = f"cannot be removed: {left}/lib64: Input/output error"
    assert captured.out.splitlines()[0] == f"{driver.old.name}  kept: {reason}"
    assert captured.err.startswith(f"tidegate: {driver.old}: {reason}; run tidegate gc as root")
    assert not driver.old.exists()
    monkeypatch.undo()
    assert driver.gc(capsys) == {left.name: "removed: not in use", driver.new.name: "in force"}
    assert not left.exists()


# Mounts that are hidden, and users who try to keep every generation

TENANT = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "unshare", "-Urm"]


@contextlib.contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, which may start others, and wait until it reports that it is ready."""
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def python(script: str, *arguments: Path) -> list[str]:
    head = "import ctypes, os, sys, time\nlibc = ctypes.CDLL(None)\n"
    return [sys.executable, "-c", head + script, *map(str, arguments)]


def test_a_mount_below_one_on_the_root_directory_keeps_its_generation(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that enters the namespace gets the upper mount as its root; the process that made
    the mounts still has the lower one.
    """
    script = """
assert libc.mount(sys.argv[1].encode(), sys.argv[2].encode(), None, 1 << 12, None) == 0
assert libc.mount(b"x", b"/", b"tmpfs", 0, None) == 0
print("ready", flush=True)
time.sleep(60)
"""
    with namespace(*python(script, driver.old / "lib64", driver.target)) as process:
        reason = driver.gc(capsys)[driver.old.name]
        assert reason.startswith(f"mounted in 1 namespace, e.g. pid {process.pid} (python")
        assert Path(f"/proc/{process.pid}/root{driver.target}/libcuda.so.1").exists()
    assert driver.gc(capsys)[driver.old.name] == "removed: not in use"


def test_a_process_whose_mounts_the_kernel_does_not_show_may_use_a_generation(
    driver: TwoGenerations,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The process is in a namespace newer than the list, and is changing to another one."""
    is_listed = request.node.callspec.params["driver"] != "proc"
    if is_listed:
        monkeypatch.setattr(namespaces._ChildSearch, "_read_listed", lambda _: True)
    read = namespaces._ChildSearch._mounts

    def show(self: namespaces._ChildSearch, path: str, what: str) -> list[Mount]:
        return read(self, path, what) if path.startswith("self/") else []

    monkeypatch.setattr(namespaces._ChildSearch, "_mounts", show)
    script = 'mount --bind "$1" "$2" && echo ready && exec sleep 600'
    with namespace(*shell(script, driver.old, driver.target)):
        reason = driver.gc_once(capsys, "--dry-run")[driver.old.name]
        # Without the list, the namespace itself is entered.
        expected = "may be in use: mount namespaces keep changing" if is_listed else "mounted in 1"
        assert reason.startswith(expected), reason


def test_a_process_that_constantly_changes_its_namespace_keeps_its_generation(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    script = """
assert libc.mount(sys.argv[1].encode(), sys.argv[2].encode(), None, 1 << 12, None) == 0
print("ready", flush=True)
while True:
    libc.unshare(0x00020000)
"""
    with namespace(*python(script, driver.old / "lib64", driver.target)):
        for _ in range(10):
            reason = driver.gc_once(capsys, "--dry-run")[driver.old.name]
            assert reason.startswith(("mounted in ", "may be in use: ")), reason


def test_a_layer_that_was_mounted_through_the_link_keeps_every_generation(
    driver: TwoGenerations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The link pointed to the old generation when the layer was mounted."""
    (tmp_path / "lower").mkdir()
    switch(driver.path, driver.old.name)
    script = (
        'mount -t overlay o -o "lowerdir=$1/current/lib64:$2" "$3" && echo ready && exec sleep 600'
    )
    arguments = (driver.path, tmp_path / "lower", driver.target)
    with namespace(*shell(script, *arguments)) as process:
        switch(driver.path, driver.new.name)
        expected = f"mounted in 1 namespace, e.g. pid {process.pid} (sleep)"
        assert driver.gc(capsys)[driver.old.name] == expected


def test_a_layer_of_the_same_name_elsewhere_keeps_nothing(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    need("setpriv")
    script = (
        "mount -t tmpfs x /mnt && mkdir -p /mnt/$1 /mnt/b /mnt/m && "
        "mount -t overlay o -o lowerdir=/mnt/$1:/mnt/b /mnt/m && echo ready && exec sleep 600"
    )
    with running(*TENANT, *shell(script, Path(driver.old.name))):
        assert driver.gc(capsys)[driver.old.name] == "removed: not in use"


def test_a_detached_mount_keeps_its_generation(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    script = """
assert libc.syscall(428, -100, sys.argv[1].encode(), 1) >= 0  # open_tree, OPEN_TREE_CLONE
print("ready", flush=True)
time.sleep(60)
"""
    with running(*python(script, driver.old / "lib64")) as process:
        reason = driver.gc(capsys)[driver.old.name]
        assert reason.startswith(f"open in 1 process, e.g. pid {process.pid} (python")
    assert driver.gc(capsys)[driver.old.name] == "removed: not in use"


def test_a_lazily_unmounted_directory_in_use_keeps_its_generation(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    script = 'mount --bind "$1" "$2" && cd "$2" && umount -l "$2" && echo ready && exec sleep 600'
    with namespace(*shell(script, driver.old, driver.target)) as process:
        expected = f"open in 1 process, e.g. pid {process.pid} (sleep)"
        assert driver.gc(capsys)[driver.old.name] == expected


def test_a_tenants_covered_pin_does_not_stop_the_removal(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Without the kernel's list, the reason says which user keeps the generations."""
    need("setpriv")
    script = (
        "set -e; mount -t tmpfs x /mnt; touch /mnt/p; unshare -m sleep 600 & c=$!; "
        'until [ "$(readlink /proc/$c/ns/mnt)" != "$(readlink /proc/$$/ns/mnt)" ]; do sleep 0.02; done; '
        # See pinned() for what may fail here.
        "mount --bind /proc/$c/ns/mnt /mnt/p; mount --bind /etc/hostname /mnt/p; kill $c; "
        "wait $c || true; echo ready; exec sleep 600"
    )
    # On one processor, both namespaces take their numbers from one batch, in ascending order.
    on = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    with running(*on, *TENANT, *shell(script)):
        reason = driver.gc(capsys)[driver.old.name]
        if request.node.callspec.params["driver"] == "proc":
            assert reason.startswith("may be in use: mount namespace ")
            assert reason.endswith(", uid 65534): something else is mounted over it")
            assert " at /mnt/p of mount namespace " in reason
        else:
            assert reason == "removed: not in use"


def test_descriptors_that_many_processes_share_are_examined_once(
    driver: TwoGenerations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of the lookups shows this, for 20 processes with one table of 5000 descriptors."""
    script = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (6000, 6000))
for n in range(3, 5000):
    os.dup2(0, n)
for _ in range(20):
    if libc.syscall(56, 0x400 | 17, 0, 0, 0, 0) == 0:  # clone, CLONE_FILES | SIGCHLD
        time.sleep(60)
print("ready", flush=True)
time.sleep(60)
"""
    log = driver.target / "log"
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    look = namespaces._ChildSearch._look_at_open

    def look_and_say(self, pid, path, kind, **more):
        if more.get("fd", -1) >= 0:
            os.write(fd, f"{pid}\n".encode())  # the path does not exist in other namespaces
        look(self, pid, path, kind, **more)

    monkeypatch.setattr(namespaces._ChildSearch, "_look_at_open", look_and_say)
    with running(*python(script)) as process:
        assert cli.main(["gc", "--driver-dir", str(driver.path), *NESTED]) == 0
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.close(fd)
    assert len(children) == 20
    looked = log.read_text().split()
    assert looked.count(str(process.pid)) >= 5000
    assert [looked.count(c) for c in children] == [0] * 20


def test_a_search_that_does_not_end_in_time_keeps_every_generation(driver: TwoGenerations) -> None:
    found = generations.collect(driver.path, nested=True, seconds=0)
    assert found.outcomes[0].reason.startswith(
        "may be in use: the search reached its time or mount limit"
    )
    assert driver.old.exists()


def test_a_search_that_hangs_is_ended(
    driver: TwoGenerations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system in user space that does not answer has this effect.

    The time limit expires as soon as the search hangs, however long this machine took to get there.
    """
    hangs, says = os.pipe()
    read_all = namespaces._read_all

    def hang(self: Any, **_: Any) -> None:
        self._at("mount namespace 1 of pid 7 (hanging, uid 65534)")
        os.write(says, b"1")
        time.sleep(60)

    def read_when_it_hangs(fd: int, deadline: float) -> bytes:
        os.read(hangs, 1)
        assert time.monotonic() < deadline
        return read_all(fd, time.monotonic())

    monkeypatch.setattr(namespaces._ChildSearch, "_look_at_tasks", hang)
    monkeypatch.setattr(namespaces, "_read_all", read_when_it_hangs)
    found = generations.collect(driver.path, nested=True)
    os.close(hangs)
    os.close(says)
    assert found.outcomes[0].reason == (
        "may be in use: the search did not finish: "
        "it was at mount namespace 1 of pid 7 (hanging, uid 65534)"
    )


def test_a_generation_that_comes_into_force_during_the_search_is_kept(
    driver: TwoGenerations, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search holds the lock of the generation and not that of the directory, so that a refresh can finish."""
    search = generations.search

    def search_slowly(*arguments: Any, **more: Any) -> namespaces.GenerationUses:
        fd = os.open(driver.path, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        switch(driver.path, driver.old.name)
        os.close(fd)
        lock = os.open(driver.old, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(lock)
        return search(*arguments, **more)

    monkeypatch.setattr(generations, "search", search_slowly)
    assert driver.gc(capsys)[driver.old.name] == "in force"
    assert driver.old.exists()


def test_a_mount_whose_type_is_not_text_is_read_like_any_other(
    driver: TwoGenerations, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file system in user space chooses its own subtype; /dev/fuse is made here, on a tmpfs."""
    script = """
assert libc.mount(b"x", sys.argv[1].encode(), b"tmpfs", 0, None) == 0
os.mknod(sys.argv[1] + "/fuse", 0o20666, os.makedev(10, 229))
os.mkdir(sys.argv[1] + "/m\\r\\u2028")
try:
    fd = os.open(sys.argv[1] + "/fuse", os.O_RDWR)
    data = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    done = libc.mount(b"x", (sys.argv[1] + "/m\\r\\u2028").encode(), b"fuse." + bytes([255]), 6, data)
except OSError:
    done = -1
print("ready" if done == 0 else "absent", flush=True)
time.sleep(60)
"""
    command = ["unshare", "-m", "--propagation", "private", *python(script, driver.target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                pytest.skip("this kernel has no file systems in user space")
            assert b"fuse.\xff" in Path(f"/proc/{process.pid}/mountinfo").read_bytes()
            assert driver.gc(capsys)[driver.old.name] == "removed: not in use"
        finally:
            process.kill()


def test_descriptors_for_which_no_time_was_left_are_reported(
    driver: TwoGenerations, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Any user can have millions of descriptors.

    If the list of namespaces is complete without them, they keep no generation.
    """

    def too_many(self: Any, pid: int, *_: Any, **__: Any) -> None:
        self.last = self._describe_process(pid)
        self.notes["descriptors of pid 7: Permission denied"] = None
        raise namespaces._LateError

    monkeypatch.setattr(namespaces._ChildSearch, "_look_at_descriptors", too_many)
    found = generations.collect(driver.path, nested=True)
    if request.node.callspec.params["driver"] == "proc":
        reason = found.outcomes[0].reason
        assert reason.startswith(
            "may be in use: the search reached its time or mount limit at pid "
        )
    else:
        assert found.outcomes[0].removed
        assert found.notes[0].startswith("no time left to examine the descriptors from pid ")
        assert found.notes[0].endswith(" on")
        assert found.notes[1] == "descriptors of pid 7: Permission denied"
