"""The units of packaging/systemd under a real systemd, which is PID 1 of a container; the driver
consists of small ELF files.

The container has a root file system of its own, copied from this host: systemd, journald, Python
and their libraries, and only those units that a boot needs. The host's systemd is not touched.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.vdriver_trees import link, put, put_control, put_driver
from tools.install import CODE

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "packaging" / "systemd"
TRIPLET = f"{platform.machine()}-linux-gnu"
LIBDIR = f"usr/lib/{TRIPLET}"
REFRESH, CHANGED, PATH = (
    "tidegate-refresh.service",
    "tidegate-driver-changed.service",
    "tidegate-refresh.path",
)
MANAGER = "/usr/lib/systemd/systemd"
PROGRAMS = ("sh", "sleep", "systemctl", "journalctl")
# systemd 255 and newer have the executor, older versions do not.
DAEMONS = ("systemd", "systemd-executor", "systemd-journald", "systemd-shutdown")
HOST_UNITS = (
    *("sysinit.target", "basic.target", "multi-user.target", "paths.target", "local-fs.target"),
    *("sockets.target", "timers.target", "slices.target", "shutdown.target", "umount.target"),
    *("rescue.target", "final.target", "exit.target", "systemd-exit.service"),
    *("systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket"),
)
WAIT_S = 30

# While /hold exists, a refresh that has done its work does not end.
COMMAND = """#!/bin/sh
export PYTHONHOME=/opt/python PYTHONPATH=/opt/tidegate:/opt/packages PYTHONDONTWRITEBYTECODE=1
{python} -m governor.cli "$@" || exit
while [ -e /hold ]; do sleep 0.1; done
"""


def elf_needs(files: list[Path]) -> set[Path]:
    """Return the paths at which the loader finds what these files need, including the loader itself."""
    listing = subprocess.run(
        ["ldd", *map(str, files)], capture_output=True, text=True, check=False
    ).stdout
    return {Path(word) for word in listing.split() if word.startswith("/") and ":" not in word}


def copy_in(rootfs: Path, path: Path) -> None:
    """Copy a file of the host to the same path; links in its directory are resolved."""
    there = Path(os.path.realpath(path.parent)) / path.name
    target = rootfs / there.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


@pytest.fixture(scope="module")
def systemd_rootfs(tmp_path_factory: pytest.TempPathFactory, require: Callable[..., None]) -> Path:
    """Make a root file system that boots to multi-user.target, with the units installed and without
    a driver.
    """
    require("gcc", "runc", "ldd", "systemctl", "journalctl", MANAGER)
    rootfs = tmp_path_factory.mktemp("systemd") / "rootfs"
    for name in ("usr/bin", "usr/sbin", LIBDIR, "usr/lib64", "usr/lib/systemd/system"):
        (rootfs / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        link(rootfs / name, f"usr/{name}")
    for name in ("etc", "proc", "dev", "sys", "run", "tmp", "root", "home", "opt", "var/lib"):
        (rootfs / name).mkdir(parents=True)

    python = Path(sys.executable).resolve()
    packages = Path(sysconfig.get_path("purelib"))
    programs = [Path(found) for name in PROGRAMS if (found := shutil.which(name))]
    programs += [p for name in DAEMONS if (p := Path(MANAGER).with_name(name)).exists()]
    modules = [
        *Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"),
        *packages.glob("rpds/*.so"),
    ]
    for path in {*programs, *elf_needs([*programs, python, *modules])}:
        copy_in(rootfs, path)
    command = COMMAND.format(python=Path("/opt/python") / python.relative_to(sys.base_prefix))
    put(rootfs / "usr/bin/tidegate", command.encode(), 0o755)
    put_control(rootfs / "usr/lib/tidegate" / TRIPLET)

    for name in HOST_UNITS:
        if (unit := Path("/usr/lib/systemd/system", name)).exists():
            shutil.copy(unit, rootfs / "usr/lib/systemd/system")
    for unit in UNITS.iterdir():
        kind = "system-preset" if unit.suffix == ".preset" else "system"
        put(rootfs / "usr/lib/systemd" / kind / unit.name, unit.read_bytes())
    link(
        rootfs / "usr/lib/systemd/system/sysinit.target.wants/systemd-journald.service",
        "../systemd-journald.service",
    )
    link(rootfs / "var/run", "../run")
    put(rootfs / "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
    put(rootfs / "etc/group", b"root:x:0:\n")
    put(rootfs / "etc/machine-id", b"6d0b7ab02f4f4d5e9b3a0c2d9d2a7f10\n")
    put(rootfs / "etc/ld.so.cache", b"")
    subprocess.run(
        ["systemctl", f"--root={rootfs}", "preset", REFRESH, PATH],
        check=True,
        capture_output=True,
    )
    return rootfs


def config(rootfs: Path) -> str:
    """Return the config.json of a container with systemd as its first process."""
    capabilities = [
        *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID"),
        *("CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP", "CAP_SETFCAP", "CAP_SYS_CHROOT"),
        *("CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_NET_ADMIN", "CAP_MKNOD", "CAP_AUDIT_WRITE"),
    ]
    binds = {
        "/opt/python": sys.base_prefix,
        "/opt/packages": sysconfig.get_path("purelib"),
        # The packages are where an installation has them, because code in a checkout would use the
        # control library that is built there.
        **{f"/opt/tidegate/{package}": str(ROOT / package) for package in CODE},
    }
    tmpfs = {
        path: {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": options}
        for path, options in {
            "/dev": ["nosuid", "mode=755"],
            # No sysfs: a kernel module of this host would be taken for the node's driver.
            "/sys": ["nosuid", "nodev", "mode=755"],
            "/run": ["nosuid", "nodev", "mode=755"],
            "/tmp": ["nosuid", "nodev", "mode=1777"],
        }.items()
    }
    return json.dumps(
        {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": [MANAGER, "--unit=multi-user.target", "--show-status=no"],
                "env": ["container=runc", "PATH=/usr/bin:/usr/sbin"],
                "cwd": "/",
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            },
            "root": {"path": str(rootfs), "readonly": False},
            "hostname": "node",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                *tmpfs.values(),
                {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"},
                *(
                    {
                        "destination": destination,
                        "type": "bind",
                        "source": source,
                        "options": ["rbind", "ro"],
                    }
                    for destination, source in binds.items()
                ),
            ],
            "linux": {
                "cgroupsPath": f"/tidegate-test-{os.getpid()}",
                "resources": {"devices": [{"allow": True, "access": "rwm"}]},
                "namespaces": [
                    {"type": name} for name in ("pid", "mount", "ipc", "uts", "network", "cgroup")
                ],
            },
        }
    )


class BootedContainer:
    """A container that boots systemd."""

    def __init__(self, base: Path, rootfs: Path) -> None:
        self.base = base
        self.rootfs = rootfs
        self.name = f"tidegate-test-systemd-{os.getpid()}"
        self.command = ["runc", "--root", str(base / "state")]
        self.driver_dir = rootfs / "var/lib/tidegate/driver"
        self.libdir = rootfs / LIBDIR

    def runc(self, *arguments: str, check: bool = True, timeout: float = WAIT_S) -> str:
        """Run runc, and return its output."""
        done = subprocess.run(
            [*self.command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def config(self) -> str:
        """Return the config.json of the container."""
        return config(self.rootfs)

    def boot(self) -> None:
        """Start the container, and wait until the boot has finished."""
        (self.base / "config.json").write_text(self.config())
        with (self.base / "console").open("wb") as console:
            subprocess.run(
                [*self.command, "run", "--detach", "--bundle", self.base, self.name],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                timeout=WAIT_S,
                check=True,
            )
        self.until(lambda: self.systemctl("is-system-running") in ("running", "degraded"))

    def execute(self, *command: str) -> str:
        """Run a command inside, and return its output, whatever its status."""
        return self.runc("exec", self.name, *command, check=False).strip()

    def systemctl(self, *arguments: str) -> str:
        return self.execute("systemctl", "--no-pager", *arguments)

    def show(self, unit: str, name: str) -> str:
        return self.systemctl("show", "--value", f"--property={name}", unit)

    def runs(self, unit: str) -> int:
        """Return how often a unit was started."""
        return sum(line.startswith(("Starting ", "Started ")) for line in self.journal(unit))

    def journal(self, unit: str) -> list[str]:
        """Return what a unit wrote and what systemd logged about it."""
        return self.execute(
            "journalctl", "--no-pager", "--output=cat", f"--unit={unit}"
        ).splitlines()

    def failed(self) -> list[str]:
        lines = self.systemctl("list-units", "--failed", "--plain", "--no-legend").splitlines()
        return [line.split()[0] for line in lines]

    def in_force(self) -> str | None:
        """Return the driver version of the generation in force, or None if there is none."""
        try:
            return str((self.driver_dir / "current").readlink()).split("-")[0]
        except OSError:
            return None

    def story(self) -> str:
        """Return what systemd and the units logged, for the message of a failed test."""
        console = (self.base / "console").read_text(errors="replace")
        return "\n".join([console, *self.journal("tidegate-*"), self.systemctl("status")])

    def running_root(self) -> Path:
        """Return the container's root, with everything that is mounted there."""
        return Path("/proc", str(json.loads(self.runc("state", self.name))["pid"]), "root")

    def until(self, holds: Callable[[], bool], otherwise: str = "timed out") -> None:
        """Wait until a condition holds; after the timeout fail with the log of the units."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            if time.monotonic() > deadline:
                pytest.fail(f"{otherwise}\n{self.story()}")
            time.sleep(0.05)

    def drop_in(self, unit: str, text: str) -> None:
        """Add a drop-in to a unit, before the boot."""
        put(self.rootfs / f"etc/systemd/system/{unit}.d/test.conf", text.encode())

    def remove_driver(self) -> None:
        for stem in ("libcuda", "libnvidia-ml"):
            for old in self.libdir.glob(f"{stem}.so*"):
                old.unlink()

    def replace_driver(self, version: str) -> None:
        """Install another driver as a package manager does, which runs ldconfig at the end."""
        self.remove_driver()
        put_driver(self.libdir, version, simulated=True)
        self.ldconfig()

    def ldconfig(self) -> None:
        """Rename a new ld.so.cache into place."""
        put(self.rootfs / "etc/ld.so.cache~", b"").replace(self.rootfs / "etc/ld.so.cache")

    def end(self) -> None:
        """Kill the container with all its processes, and remove its control groups."""
        self.runc("delete", "--force", self.name, check=False)


@pytest.fixture
def machine(tmp_path: Path, systemd_rootfs: Path) -> Iterator[BootedContainer]:
    subprocess.run(["cp", "-a", systemd_rootfs, tmp_path / "rootfs"], check=True)
    machine = BootedContainer(tmp_path, tmp_path / "rootfs")
    try:
        yield machine
    finally:
        machine.end()


def test_at_boot_the_mirror_exists_before_a_container_engine_starts(machine):
    put_driver(machine.libdir, "535.1.2", simulated=True)
    engine = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=sh -c ': < {}'\n"
    made = "/var/lib/tidegate/driver/current/manifest.json"
    put(machine.rootfs / "etc/systemd/system/containerd.service", engine.format(made).encode())
    wants = machine.rootfs / "etc/systemd/system/multi-user.target.wants"
    link(wants / "containerd.service", "../containerd.service")
    machine.boot()
    assert machine.in_force() == "535.1.2"
    assert machine.systemctl("is-active", "containerd.service") == "active"
    assert machine.failed() == [], machine.story()


def test_after_a_refresh_an_unused_former_mirror_is_removed(machine):
    put_driver(machine.libdir, "535.1.2", simulated=True)
    former = machine.driver_dir / "535.1.1-0123456789ab"
    former.mkdir(parents=True)
    # All of the node's processes are in this container, and gc cannot know that without --nested.
    nested = "[Service]\nExecStart=\nExecStart=/usr/bin/tidegate gc --nested\n"
    machine.drop_in("tidegate-gc.service", nested)
    machine.boot()
    machine.until(lambda: not former.exists())
    assert machine.in_force() == "535.1.2"
    assert machine.failed() == [], machine.story()


def test_a_node_without_a_driver_has_no_failed_unit_and_mirrors_the_first_one(machine):
    machine.boot()
    assert machine.systemctl("is-system-running") == "running"
    assert machine.show(REFRESH, "ConditionResult") == "no"
    machine.ldconfig()
    machine.until(lambda: machine.runs(CHANGED) == 1)
    assert machine.failed() == [], machine.story()
    assert machine.in_force() is None
    machine.replace_driver("535.1.2")
    machine.until(lambda: machine.in_force() == "535.1.2")


@pytest.mark.slow
def test_ten_drivers_within_a_second_end_with_the_last_one_mirrored(machine):
    put_driver(machine.libdir, "535.1.0", simulated=True)
    machine.boot()
    for n in range(1, 11):
        machine.replace_driver(f"535.1.{n}")
    machine.until(lambda: machine.in_force() == "535.1.10")
    # This is more than the 200 triggers within 2 s that would make a path unit fail.
    for _ in range(1000):
        machine.ldconfig()
    machine.replace_driver("535.1.11")
    machine.until(lambda: machine.in_force() == "535.1.11")
    machine.until(lambda: machine.show(REFRESH, "ActiveState") == "inactive")
    assert machine.show(PATH, "ActiveState") == "active"
    assert machine.failed() == [], machine.story()


@pytest.mark.slow
def test_a_change_during_a_refresh_causes_another_refresh(machine):
    put_driver(machine.libdir, "535.1.2", simulated=True)
    machine.boot()
    put(machine.rootfs / "hold", b"")
    machine.replace_driver("535.1.3")
    machine.until(lambda: machine.in_force() == "535.1.3")
    assert machine.show(REFRESH, "ActiveState") == "activating"
    machine.replace_driver("535.1.4")
    machine.until(lambda: machine.in_force() == "535.1.4")
    (machine.rootfs / "hold").unlink()
    machine.until(lambda: machine.show(REFRESH, "ActiveState") == "inactive")
    assert not [line for line in machine.journal(REFRESH) if "Failed" in line]
    assert machine.failed() == [], machine.story()


def test_an_incomplete_driver_fails_with_one_line_and_the_old_mirror_stays_until_it_is_complete(
    machine,
):
    put_driver(machine.libdir, "535.1.2", simulated=True)
    machine.boot()
    machine.remove_driver()
    put_driver(machine.libdir, "535.1.3", simulated=True)
    for library in machine.libdir.glob("libnvidia-ml.so*"):
        library.unlink()
    machine.ldconfig()
    machine.until(lambda: machine.failed() == [REFRESH])
    assert machine.show(REFRESH, "ExecMainStatus") == "69"
    lines = [line for line in machine.journal(REFRESH) if line.startswith("tidegate: ")]
    assert len(lines) == 1
    assert machine.in_force() == "535.1.2"
    machine.replace_driver("535.1.4")
    machine.until(lambda: machine.in_force() == "535.1.4")
    assert machine.failed() == [], machine.story()


@pytest.mark.slow
def test_a_refresh_that_fails_temporarily_is_tried_five_times_and_again_after_a_change(machine):
    put_driver(machine.libdir, "535.1.2", simulated=True)
    machine.drop_in(REFRESH, "[Service]\nRestartSec=100ms\n")
    control = machine.rootfs / "usr/lib/tidegate" / TRIPLET
    for library in control.iterdir():
        library.unlink()
    machine.boot()
    machine.until(lambda: machine.failed() == [REFRESH])
    assert machine.show(REFRESH, "ExecMainStatus") == "72"
    assert machine.runs(REFRESH) == 5
    put_control(control)
    machine.until(lambda: machine.in_force() == "535.1.2")
    assert machine.failed() == [], machine.story()
    assert machine.show(PATH, "ActiveState") == "active"


def test_each_path_at_which_a_driver_may_appear_is_watched_before_it_exists(machine):
    machine.boot()
    run = machine.running_root() / "run/nvidia"
    for name, path in (
        ("ldconfig", machine.rootfs / "etc/ld.so.cache"),
        ("Debian's driver", machine.libdir / "nvidia/current/libcuda.so.535.1.2"),
        (
            "a driver that was installed by hand",
            machine.rootfs / "usr/local/nvidia/lib64/libcuda.so.535.1.2",
        ),
        ("another file there", machine.rootfs / "usr/local/nvidia/lib64/libcuda.so.535.1.3"),
        ("the driver container", run / "driver/bin"),
        ("the operator's mark", run / "validations/.driver-ctr-ready"),
        ("the control library", machine.rootfs / "usr/lib/tidegate" / TRIPLET / "libcuda.so.1"),
    ):
        put(path.with_name("new"), b"").replace(path)
        machine.until(
            lambda: machine.show(CHANGED, "ActiveState") == "activating", f"{name}: no refresh"
        )
        # Other tests cover the rest of the service, a pause and a refresh.
        machine.systemctl("stop", CHANGED)
    assert machine.show(PATH, "ActiveState") == "active"
    assert machine.failed() == [CHANGED], machine.story()
