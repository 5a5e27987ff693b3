"""The installed units under a running systemd, on a fresh system of the release: what the Debian package's scripts start,
restart and stop, and what the script for a wheel does.

The release's systemd is PID 1 of a container whose root is an overlay over the output of
tools/package-root. The simulated GPU's driver is installed there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.machine import Simulated
from tests.conftest import ROOT
from tests.container.test_systemd import BootedContainer, config, put
from tests.packages.make import NEWER, fresh_root, package

pytestmark = pytest.mark.slow

LIBDIR = "usr/lib/x86_64-linux-gnu"
GPU = "/opt/gpu"
UNITS = (
    *("tidegate-refresh.path", "tidegate-steering.socket"),
    *("tidegate-governor.service", "tidegate-forkserver.service"),
)
ENVIRONMENT = "LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin"

APT = "apt-get -qy --no-install-recommends -o APT::Sandbox::User=root install"


class InstalledRelease(BootedContainer):
    """A container that runs a release's own systemd."""

    def __init__(self, base: Path, rootfs: Path, gpu: Path) -> None:
        super().__init__(base, rootfs)
        self.gpu = gpu

    def config(self) -> str:
        """Return a configuration without mounts of the checkout, and with capabilities that units
        have on a real system, as far as this machine has them.
        """
        document = json.loads(config(self.rootfs))
        document["mounts"] = [
            m for m in document["mounts"] if not m["destination"].startswith("/opt/")
        ]
        document["mounts"].append(
            {
                "destination": GPU,
                "type": "bind",
                "source": str(self.gpu),
                "options": ["rbind", "rw"],
            }
        )
        more = own_capabilities() & {"CAP_SYS_RESOURCE", "CAP_CHECKPOINT_RESTORE", "CAP_SYS_NICE"}
        for held in document["process"]["capabilities"].values():
            held.extend(sorted(more))
        return json.dumps(document)

    def shell(self, line: str) -> str:
        """Run a line of shell, which must succeed, and return its output."""
        return self.runc(
            "exec", self.name, "sh", "-ec", f"export {ENVIRONMENT}; {line}", timeout=300
        )

    def governor(self) -> int:
        """Return the governor's process, or 0 if there is none."""
        return int(self.show("tidegate-governor.service", "MainPID"))

    def forkserver(self) -> int:
        """Return the fork server's process, or 0 if there is none."""
        return int(self.show("tidegate-forkserver.service", "MainPID"))


def own_capabilities() -> set[str]:
    """Return which of the three capabilities this machine gives to its root user."""
    [bounding] = (
        int(line.split()[1], 16)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapBnd:")
    )
    numbers = {"CAP_SYS_NICE": 23, "CAP_SYS_RESOURCE": 24, "CAP_CHECKPOINT_RESTORE": 40}
    return {name for name, number in numbers.items() if bounding >> number & 1}


@pytest.fixture(params=["bookworm", "trixie"])
def machine(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    build_dir: Path,
    require: Callable[..., None],
) -> Iterator[InstalledRelease]:
    require("runc", "debootstrap")
    root = fresh_root(request.param)
    place = tmp_path / "place"
    machine = None
    gpu = Simulated(tmp_path / "gpu", build_dir)
    try:
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", place], check=True)
        for name in ("upper", "work", "root"):
            (place / name).mkdir()
        layers = f"lowerdir={root},upperdir={place}/upper,workdir={place}/work"
        subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", layers, place / "root"], check=True
        )
        machine = InstalledRelease(tmp_path, place / "root", gpu.directory)
        for library in ("libcuda", "libnvidia-ml"):
            [file] = build_dir.glob(f"simgpu/{library}.so.*.*[0-9]")
            shutil.copy(file, place / "root" / LIBDIR / file.name)
            (place / "root" / LIBDIR / f"{library}.so.1").symlink_to(file.name)
        # The device nodes of a real driver are in /dev; those of the simulated GPU are files.
        setting = f"[Service]\nEnvironment=SIMGPU_DIR={GPU}\nReadWritePaths={GPU}\n"
        if "CAP_SYS_RESOURCE" not in own_capabilities():
            setting += "OOMScoreAdjust=0\n"
        put(
            place / "root/etc/systemd/system/tidegate-governor.service.d/test.conf",
            setting.encode(),
        )
        if "CAP_SYS_RESOURCE" not in own_capabilities():
            put(
                place / "root/etc/systemd/system/tidegate-forkserver.service.d/test.conf",
                b"[Service]\nOOMScoreAdjust=0\n",
            )
        machine.boot()
        yield machine
    finally:
        if machine is not None:
            machine.end()
        gpu.close()
        for mount in (place / "root", place):
            subprocess.run(["umount", "--lazy", mount], check=False)


def test_the_services_run_after_the_installation_and_an_upgrade_and_end_with_the_removal(
    machine: InstalledRelease,
) -> None:
    debs = [package("deb"), package("deb", version=NEWER)]
    for deb in debs:
        shutil.copy(deb, machine.rootfs / "root" / deb.name)
    before = set(machine.failed())
    machine.shell(f"{APT} /root/{debs[0].name}")
    assert set(machine.failed()) == before, machine.story()
    for unit in UNITS:
        assert machine.systemctl("is-active", unit) == "active", machine.story()
        assert machine.systemctl("is-enabled", unit) == "enabled"
    assert machine.show("tidegate-refresh.service", "Result") == "success"
    machine.shell("tidegate check")
    first, server = machine.governor(), machine.forkserver()
    # Hooks enter a container's mount namespace from the host's, so the fork server's children have to be in the host's.
    for name in ("mnt", "pid", "user"):
        machine.shell(f"[ /proc/{server}/ns/{name} -ef /proc/1/ns/{name} ]")
    assert "forkserver.serves" not in machine.shell("tidegate doctor --problems || true")
    assert_steering_starts(machine, "PYTHONPATH=/usr/lib/tidegate/python python3")
    generation = machine.shell("readlink /var/lib/tidegate/driver/current")

    # A reload of an invalid configuration fails and stops nothing; a corrected configuration takes
    # effect.
    ours = "/etc/tidegate/config.d/50-ours.yaml"
    machine.shell(f"echo 'placemnt: pack' >{ours}; ! systemctl reload tidegate-governor")
    assert machine.systemctl("is-active", "tidegate-governor.service") == "active"
    assert "placemnt is not an option" in machine.shell("tidegate doctor --problems || true")
    assert "placemnt is not an option" in machine.shell("tidegate events")
    machine.shell(f"echo 'placement: pack' >{ours}; systemctl reload tidegate-governor")
    assert "placement: pack" in machine.shell("tidegate check")
    assert machine.shell("tidegate reload --dry-run").splitlines()[-1] == "nothing has changed"
    machine.shell(f"rm {ours}; systemctl reload tidegate-governor")
    assert machine.governor() == first

    # A governor that hangs, and so sends no keep-alive, is killed and replaced.
    drop_in = "/run/systemd/system/tidegate-governor.service.d/watchdog.conf"
    machine.shell(
        f"mkdir -p $(dirname {drop_in}); printf '[Service]\\nWatchdogSec=2s\\nTimeoutAbortSec=1s\\n' >{drop_in}"
    )
    machine.shell("systemctl daemon-reload; systemctl restart tidegate-governor")
    first = machine.governor()
    machine.shell(f"kill -STOP {first}")
    machine.until(lambda: machine.governor() not in (0, first))
    # The governor's process exists from the beginning of the start, but answers only at the end.
    machine.until(lambda: machine.systemctl("is-active", "tidegate-governor.service") == "active")
    assert machine.show("tidegate-governor.service", "NRestarts") == "1"
    machine.shell("tidegate check")
    machine.shell(f"rm {drop_in}; systemctl daemon-reload; systemctl restart tidegate-governor")
    first = machine.governor()

    # A new governor of the new version runs, and the mirror has the new control library.
    machine.shell(f"dpkg --install /root/{debs[1].name}")
    machine.until(lambda: machine.governor() not in (0, first))
    machine.until(lambda: machine.forkserver() not in (0, server))
    machine.shell("tidegate check")
    assert machine.shell("tidegate --version").split()[-1] == NEWER
    machine.until(lambda: machine.shell("readlink /var/lib/tidegate/driver/current") != generation)
    assert set(machine.failed()) == before, machine.story()

    machine.shell("dpkg --remove tidegate")
    for unit in UNITS:
        assert machine.systemctl("is-active", unit) in ("inactive", "unknown")
    assert not os.path.lexists(machine.rootfs / "var/lib/tidegate")
    machine.shell("dpkg --purge tidegate")
    machine.systemctl("daemon-reload")
    left = machine.shell("find /etc /usr /var/lib -xdev -name '*tidegate*' -print").split()
    own = "/etc/systemd/system/tidegate-{}.service.d"  # drop-ins of this test
    assert set(left) <= {own.format("governor"), own.format("forkserver")}


STEER = """
from governor.hardware.remote import RemoteHardware
try:
    RemoteHardware("GPU-1")
except OSError as e:
    print(e)
"""


def assert_steering_starts(machine: InstalledRelease, python: str) -> None:
    """Require that a connection starts the service, that its sandbox permits what it needs, and that it ends again.

    There is no kernel module here. If the service names this as the reason why it cannot open a
    GPU, it has found everything else. Installed packages do not steer the simulated GPU.
    """
    put(machine.rootfs / "root/steer.py", STEER.encode())
    for _ in range(2):
        output = machine.shell(f"{python} /root/steer.py")
        assert "/proc/driver/nvidia/version does not exist" in output, machine.story()
        machine.until(
            lambda: machine.systemctl("is-active", "tidegate-steering.service") == "inactive"
        )
        assert machine.show("tidegate-steering.service", "Result") == "success"
    assert machine.systemctl("is-active", "tidegate-steering.socket") == "active"


@pytest.mark.parametrize("machine", ["bookworm"], indirect=True)
def test_the_script_of_tidegate_install_sets_up_a_node_from_a_wheel(
    machine: InstalledRelease, tmp_path: Path
) -> None:
    modules = "jsonschema prometheus-client pyelftools structlog yaml".replace(" ", " python3-")
    machine.shell(f"{APT} python3-{modules}")
    machine.shell("python3 -m venv --without-pip --system-site-packages /opt/tidegate")
    [site] = (machine.rootfs / "opt/tidegate/lib").glob("python3*/site-packages")
    # This does what pip would do; pip has no package index here.
    with zipfile.ZipFile(package("wheel")) as wheel:
        wheel.extractall(site)
    subprocess.run([sys.executable, "tools/vendor.py", tmp_path / "vendor"], cwd=ROOT, check=True)
    shutil.copy(tmp_path / "vendor/pynvml.py", site)
    code = site / "tidegate/python"
    for name in ("tidegate", "tidegate-governor"):
        function = name.replace("-", "_")
        program = f"#!/opt/tidegate/bin/python\nimport sys\nfrom tidegate.commands import {function}\nsys.exit({function}())\n"
        put(machine.rootfs / "opt/tidegate/bin" / name, program.encode())
        (machine.rootfs / "opt/tidegate/bin" / name).chmod(0o755)
    programs = ("tidegate-hook", "tidegate-runtime")
    for name in (*programs, *(f"front/{name}" for name in programs), "tidegate-forkserver"):
        (code / "oci_hook" / name).chmod(0o755)  # pip sets modes, zipfile does not
    (code / "governor/tidegate-steering").chmod(0o755)

    machine.shell("/opt/tidegate/bin/tidegate install >/root/install")
    machine.shell("sh -eu /root/install")
    for unit in UNITS:
        assert machine.systemctl("is-active", unit) == "active", machine.story()
        assert machine.systemctl("is-enabled", unit) == "enabled"
    machine.shell("tidegate check")
    assert machine.shell("readlink -f /usr/bin/tidegate-hook").startswith("/opt/tidegate/lib/")
    assert "usage: tidegate-hook" in machine.shell("tidegate-hook 2>&1 || :")
    inside = f"/{code.relative_to(machine.rootfs)}"
    assert_steering_starts(machine, f"PYTHONPATH={inside} /opt/tidegate/bin/python")
