"""A node for tests of packages: a fresh Debian or Ubuntu system in namespaces.

The checkout is not visible there, so only what the package installed can run. The simulated GPU's
driver is in the directory where NVIDIA's would be.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from bench.machine import Simulated
from tests.conftest import ROOT
from tests.container.bundles import make_rootfs
from tests.container.engine_host import EngineHost
from tests.container.engines import Engine, Started, pack_image
from tests.container.nodes import wait_for
from tests.packages.make import fresh_root

LIBDIR = "/usr/lib/x86_64-linux-gnu"
DRIVER_DIR = "/var/lib/tidegate/driver"
SIMGPU = "/dev/tidegate-simgpu"
WORKLOAD = (
    *("/usr/bin/simgpu-workload", "--unit-us", "500", "--seconds", "600"),
    *("--out", "/out/progress.bin", "--wait-file", "/out/begin"),
)
# Directories of engines in /etc, which remain after a removal of Tidegate.
ENGINES_OWN = ("/etc/docker", "/etc/containers", "/etc/cni", "/etc/containerd")


class PackageNode:
    """A fresh system with a GPU, on which the test installs the package."""

    def __init__(self, host: EngineHost, gpu: Path, build: Path) -> None:
        self.host = host
        self.gpu = gpu
        self.governor: subprocess.Popen[bytes] | None = None
        for library in ("libcuda", "libnvidia-ml"):
            [file] = build.glob(f"simgpu/{library}.so.*.*[0-9]")
            path = host.path(f"{LIBDIR}/{file.name}")
            shutil.copy(file, path)
            path.with_name(f"{library}.so.1").symlink_to(file.name)
        host.check("ldconfig")
        # Hides the checkout: a program that still used it would fail.
        host.check("mount", "-t", "tmpfs", "tmpfs", str(ROOT))

    def apt(self, *arguments: str) -> str:
        """Run apt-get. It finds dependencies only in its cache, because the node has no network."""
        options = ("-o", "APT::Sandbox::User=root", "-o", "Dpkg::Options::=--force-confold")
        environment = ("DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8")
        command = ("apt-get", "-qy", "--no-install-recommends", *options, *arguments)
        return self.host.check("env", *environment, *command, timeout=300)

    def install(self, deb: Path) -> str:
        """Install a package file, or upgrade to it."""
        return self.apt("install", self.bring(deb))

    def bring(self, package: Path) -> str:
        """Copy a package file to a directory that the node sees, and return its path."""
        return str(shutil.copy(package, self.host.work / package.name))

    def files(self) -> set[str]:
        """Return the files where packages install, and the directories there that name Tidegate."""
        places = ("/usr", "/etc", "/opt", "/var/lib/systemd", "/var/lib/tidegate", "/run/tidegate")
        expression = ("(", "!", "-type", "d", "-o", "-path", "*tidegate*", ")", "-print")
        found = self.host.run("find", *places, "-xdev", *expression).stdout.splitlines()
        # Importing a module of another package may leave bytecode.
        return {p for p in found if "__pycache__" not in p or "tidegate" in p}

    def start_governor(self) -> None:
        """Start the governor as its unit does."""
        log = self.host.work / "governor.log"
        self.governor = self.host.start(
            "env", f"SIMGPU_DIR={self.gpu}", "/usr/bin/tidegate-governor", log=log
        )
        wait_for(lambda: self.host.run("tidegate", "check").status == 0, "the governor")

    def stop_governor(self) -> None:
        assert self.governor is not None
        self.host.stop(self.governor)
        self.governor = None

    def generation(self) -> str:
        """Return the name of the current generation of the mirror."""
        return self.host.check("readlink", f"{DRIVER_DIR}/current").strip()

    def books(self) -> set[str]:
        """Return the identifiers of the governor's containers."""
        return {one["id"] for one in json.loads(self.host.check("tidegate", "ps", "--json"))}


def of_the_node(kind: type[Engine]) -> type[Engine]:
    """Return a variant of an engine class that is set up on the node by the installed command."""

    class Installed(kind):  # type: ignore[misc, valid-type]
        def setup(self, *arguments: str) -> None:
            self.host.check("tidegate", "setup", *arguments)

    return Installed


def old_docker(host: EngineHost) -> bool:
    """Return whether `docker run` has no option for annotations."""
    return "--annotation" not in host.check("docker", "run", "--help")


@contextmanager
def fresh_node(
    suite: str, base: Path, build: Path, require: Callable[..., None]
) -> Iterator[PackageNode]:
    """Start a node that runs a release and has a GPU; stop it when the block ends."""
    require("debootstrap", "gcc", "nsenter", "unshare", "setpriv")
    root = fresh_root(suite)
    machine = Simulated(base / "machine", build)
    try:
        with EngineHost(root, base / "n", binds=[str(machine.directory)]) as host:
            node = PackageNode(host, machine.directory, build)
            yield node
            if node.governor is not None:
                node.stop_governor()
    finally:
        machine.close()


def workload_image(node: PackageNode, base: Path, build: Path) -> Path:
    """Make an image with the workload and without Tidegate, at a path that the node sees."""
    rootfs = make_rootfs(base / "image", base / "tools")
    shutil.copy(build / "simgpu/simgpu-workload", rootfs / "usr/bin/simgpu-workload")
    return pack_image(rootfs, node.host.work / "image.tar")


def units(started: Started) -> int:
    """Return how many units of work a container has done."""
    try:
        return (started.out / "progress.bin").stat().st_size // 16
    except FileNotFoundError:
        return 0


def start(engine: Engine, annotations: Mapping[str, str]) -> Started:
    """Start a container that works, and wait until it does."""
    started = engine.run(*WORKLOAD, annotations=annotations)
    wait_for((started.out / "begin.ready").exists, f"{started.name}")
    (started.out / "begin").touch()
    wait_for(lambda: units(started) > 20, f"work of {started.name}")
    return started


@contextmanager
def repeated_starts(engine: Engine) -> Iterator[None]:
    """Start and end containers one after another during the block, and require that each start succeeds."""
    stop = threading.Event()

    def go_on() -> int:
        count = 0
        while not stop.is_set():
            engine.remove(engine.run(*WORKLOAD, annotations={"memory": "1Gi", "compute": "1"}))
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(go_on)
        try:
            yield
        finally:
            stop.set()
        assert going.result() > 2


def assert_works(*containers: Started) -> None:
    before = [units(one) for one in containers]
    wait_for(
        lambda: all(units(one) > b + 50 for one, b in zip(containers, before, strict=True)),
        "containers to continue",
    )
