"""Rootless Podman, run by an ordinary user: a container without annotations works as on a node
without Tidegate, and one with annotations is refused in one line.

The user has no subordinate ids, so the user namespace has only one user. The user also has no
control groups, as on any machine with cgroup v1. The results depend on neither.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.container.bundles import ROOT, make_rootfs
from tests.container.engine_host import CommandResult, EngineHost, machine
from tests.container.engines import CONTAINERS_CONF, IMAGE, pack_image
from tests.container.test_engines import unpacked

UID = "1000"
# Without CAP_SYS_ADMIN on the host, an overlay needs features that not every machine has.
STORAGE_CONF = """[storage]
driver = "vfs"
[storage.options]
ignore_chown_errors = "true"
"""
SETUP = f"""
mkdir -p /home/user /run/user/{UID}
chown {UID}:{UID} /home/user /run/user/{UID}
echo user:x:{UID}:{UID}::/home/user:/bin/sh >>/etc/passwd
echo user:x:{UID}: >>/etc/group
mkdir -p /run/tidegate /usr/local/lib
"""
SOCKET = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
"""


@pytest.fixture(scope="module")
def host(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[..., None]
) -> Iterator[EngineHost]:
    require("gcc", "nsenter", "unshare", "setpriv")
    base = tmp_path_factory.mktemp("r")
    for directory in (base, *base.parents):
        if directory.is_relative_to(tmp_path_factory.getbasetemp().parent):
            directory.chmod(directory.stat().st_mode | 0o011)
    rootfs = make_rootfs(base / "rootfs", base / "tools")
    with EngineHost(unpacked(machine()), base) as host:
        host.check("sh", "-c", SETUP)
        # Every user can read these files, like those of a package.
        subprocess.run(
            ["cp", "-r", str(ROOT / "oci_hook"), str(host.path("/usr/local/lib"))], check=True
        )
        for program in ("tidegate-hook", "tidegate-runtime"):
            host.path(f"/usr/bin/{program}").symlink_to(f"/usr/local/lib/oci_hook/{program}")
        host.write("/etc/containers/containers.conf", CONTAINERS_CONF.format(runtime="runc"))
        host.write("/etc/containers/storage.conf", STORAGE_CONF)
        subprocess.run(
            [sys.executable, "-m", "governor.cli", "setup", "podman", "--root", f"/proc/{host.pid}/root"],
            check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        # A governor's socket. Only its mode matters here: only root may connect.
        socket = host.path("/run/tidegate/governor.sock")
        subprocess.run([sys.executable, "-c", SOCKET, str(socket)], check=True)
        socket.chmod(0o600)
        image = pack_image(rootfs, host.work / "image.tar")
        ran = podman(host, "load", "--input", str(image))
        assert ran.status == 0, ran.text
        yield host
        podman(host, "system", "migrate")  # ends the process that keeps the user's namespaces


def podman(host: EngineHost, *arguments: str) -> CommandResult:
    """Run podman as the user."""
    return host.run(
        *("setpriv", "--reuid", UID, "--regid", UID, "--clear-groups"),
        *("env", "HOME=/home/user", f"XDG_RUNTIME_DIR=/run/user/{UID}", "podman", *arguments),
    )


def start(host: EngineHost, runtime: str, *options: str) -> CommandResult:
    cgroups = ["--cgroups=disabled"] if runtime == "crun" else []
    return podman(
        host, "--runtime", runtime, "run", "--rm", "--pull=never", "--network=none", *cgroups,
        *options, IMAGE, "/usr/bin/cat", "/proc/self/uid_map",
    )  # fmt: skip


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_container_without_annotations_starts(host: EngineHost, runtime: str) -> None:
    ran = start(host, runtime)
    assert (ran.status, ran.stdout.split()) == (0, ["0", UID, "1"]), ran.text


@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.parametrize("driver", ["required", "optional"])
def test_a_container_with_annotations_is_refused_with_the_reason(
    host: EngineHost, runtime: str, driver: str
) -> None:
    """The refusal precedes any contact with the driver or the governor."""
    ran = start(
        host,
        runtime,
        *("--annotation", "tidegate.gpu/memory=1Gi"),
        *("--annotation", f"tidegate.gpu/driver={driver}"),
    )
    assert (ran.status != 0, ran.stdout) == (True, "")
    assert ran.stderr.count("tidegate: ") == 1, ran.stderr
    assert (
        f"tidegate: this engine is rootless (root in its user namespace is user {UID} outside), and the governor"
        " at /run/tidegate/governor.sock serves only the node's root; start this container with root's engine,"
        " for example with `sudo podman run`"
    ) in ran.stderr


def test_a_hooks_directory_that_the_user_cannot_read_stops_every_container(
    host: EngineHost,
) -> None:
    """This is why `tidegate setup podman` refuses such a directory."""
    directory = host.path("/etc/tidegate")
    directory.chmod(0o700)
    try:
        ran = start(host, "runc")
        assert ran.status != 0
        assert "/etc/tidegate/hooks.d: permission denied" in ran.text
    finally:
        directory.chmod(0o755)
    assert start(host, "runc").status == 0
