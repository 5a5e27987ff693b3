"""The life of the Debian package on fresh systems, from the installation to the purge.

Each system is a root made by debootstrap, with the release's engines. It runs in namespaces that stand for a node
(node.py).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from governor import VERSION
from tests.conftest import ROOT
from tests.container.engines import IMAGE, Docker, Podman
from tests.container.nodes import wait_for
from tests.packages.make import NEWER, package
from tests.packages.node import (
    DRIVER_DIR,
    ENGINES_OWN,
    SIMGPU,
    PackageNode,
    assert_works,
    fresh_node,
    of_the_node,
    old_docker,
    repeated_starts,
    start,
    units,
    workload_image,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deb(require: Callable[..., None]) -> Path:
    require("dpkg-deb")
    return package("deb")


@pytest.fixture(params=["bookworm", "trixie", "forky", "noble", "resolute"])
def node(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    build_dir: Path,
    require: Callable[..., None],
) -> Iterator[PackageNode]:
    with fresh_node(request.param, tmp_path, build_dir, require) as node:
        yield node


@pytest.fixture
def image(node: PackageNode, tmp_path: Path, build_dir: Path) -> Path:
    return workload_image(node, tmp_path, build_dir)


def test_the_package_is_installed_runs_is_upgraded_and_purged_without_a_trace(
    node: PackageNode, deb: Path, image: Path
) -> None:
    newer = package("deb", version=NEWER)
    host = node.host
    depends = re.findall(r"python3[a-z-]*", (ROOT / "packaging/debian/control").read_text())
    node.apt("install", *sorted(set(depends)))
    before = node.files()

    # Installation: the programs are installed and compiled, and find their files.
    node.install(deb)
    assert host.check("tidegate", "--version") == f"tidegate {VERSION}\n"
    assert host.check("readlink", "-f", "/usr/bin/tidegate-hook").startswith(
        "/usr/lib/tidegate/python/"
    )
    compiled = host.check("find", "/usr/lib/tidegate", "-name", "*.pyc").splitlines()
    assert any("/oci_hook/__pycache__/main." in path for path in compiled)
    assert not host.run("ldconfig", "-p").stdout.count("/tidegate/")
    host.check("tidegate", "refresh")
    node.start_governor()
    found = json.loads(host.run("tidegate", "doctor", "--json").stdout)["findings"]
    assert [one for one in found if one["state"] == "wrong"] == []
    # No program has written bytecode in addition to what the package compiled.
    assert host.check("find", "/usr/lib/tidegate", "-name", "*.pyc").splitlines() == compiled

    # The main job, with the engines of the release.
    podman = of_the_node(Podman)(host, {str(node.gpu): SIMGPU})
    podman.start(image)
    shares = ("45", "30", "15")
    running = [
        start(podman, {"memory": "1Gi", "compute": share, "compute-limit": share})
        for share in shares
    ]
    begun, at = [units(one) for one in running], time.monotonic()
    time.sleep(6)
    done = [units(one) - b for one, b in zip(running, begun, strict=True)]
    seconds = time.monotonic() - at
    # Units take 0.5 ms. This machine may be slow or busy with other programs: a container never
    # gets more than its share, but may get less, down to half of it.
    delivered = [n * 0.05 / seconds for n in done]
    for share, percent in zip(shares, delivered, strict=True):
        assert int(share) / 2 < percent < int(share) + 3, delivered
    assert len(node.books()) == 3

    docker_kind = Docker
    if old_docker(host):
        from tests.container.test_engines import OldDocker

        docker_kind = OldDocker
    podman.remove(running.pop())
    docker = of_the_node(docker_kind)(host, {str(node.gpu): SIMGPU})
    docker.start(image)
    running.append(start(docker, {"memory": "1Gi", "compute": "10"}))
    wait_for(lambda: len(node.books()) == 3, "the removed container to be forgotten")
    known = node.books()

    # Upgrade, as the package's scripts do it under systemd: running containers continue with their library, and new
    # ones start.
    old = node.generation()
    with repeated_starts(podman):
        node.install(newer)
    assert host.check("tidegate", "--version") == f"tidegate {NEWER}\n"
    host.check("tidegate", "refresh")
    node.stop_governor()
    node.start_governor()
    assert node.generation() != old
    assert_works(*running)
    assert node.books() == known
    collected = {
        o["name"]: o
        for o in json.loads(host.check("tidegate", "gc", "--nested", "--json"))["generations"]
    }
    assert not collected[old]["removed"]
    assert "mounted in" in collected[old]["reason"]
    podman.remove(running.pop(0))
    running.insert(0, start(podman, {"memory": "1Gi", "compute": "20"}))
    maps = host.check("grep", "-c", f"{node.generation()}", f"/proc/{running[0].pid}/mountinfo")
    assert int(maps)

    # A removal is refused while engines need the programs to end containers, and a refused removal
    # changes nothing.
    refused = host.run("env", "LC_ALL=C.UTF-8", "dpkg", "--remove", "tidegate", timeout=120)
    assert refused.status != 0
    assert "end them first" in refused.text
    assert host.check("tidegate", "--version") == f"tidegate {NEWER}\n"
    assert_works(*running)

    # Removal: the configuration of the engines is restored, and Tidegate's configuration stays.
    for one in running:
        one.engine.remove(one)
    docker.stop()
    node.stop_governor()
    host.check("env", "LC_ALL=C.UTF-8", "dpkg", "--remove", "tidegate", timeout=120)
    left = {path for path in node.files() - before if not path.startswith(ENGINES_OWN)}
    links = {path for path in left if path.startswith(("/etc/systemd/", "/var/lib/systemd/"))}
    written = {"/etc/tidegate/runtime-docker"} if docker_kind is not Docker else set()
    assert left - links == {"/etc/tidegate", "/etc/tidegate/config.yaml"} | written
    assert (
        "tidegate" not in host.run("cat", "/etc/docker/daemon.json").stdout
        or docker_kind is not Docker
    )
    assert not host.run("sh", "-c", "grep -rl tidegate /etc/containers").stdout
    # An engine without Tidegate starts containers as before.
    host.check(
        "podman", "--runtime=runc", "run", "--rm", "--network=none", IMAGE, "/usr/bin/sleep", "0"
    )

    # Purge: nothing is left, and dpkg prints no warning.
    purged = host.run("env", "LC_ALL=C.UTF-8", "dpkg", "--purge", "tidegate", timeout=120)
    assert purged.status == 0, purged.text
    assert "warning" not in purged.text
    left = {path for path in node.files() - before if not path.startswith(ENGINES_OWN)}
    assert left == set()


def test_the_lintian_of_the_release_has_no_error_for_the_package(
    node: PackageNode, deb: Path
) -> None:
    """The lintian of a newer release has rules that the lintian of the build machine lacks."""
    node.apt("install", "lintian")
    # The C programs are linked statically on purpose. Older releases take them for libraries, and complain about an
    # override of a tag that they do not find.
    but = ("--suppress-tags", "statically-linked-binary")
    ran = node.host.run("lintian", "--fail-on", "error", *but, node.bring(deb), timeout=600)
    assert ran.status == 0, ran.text


def test_a_forced_removal_leaves_running_containers_intact(
    node: PackageNode, deb: Path, image: Path
) -> None:
    node.install(deb)
    host = node.host
    host.check("tidegate", "refresh")
    node.start_governor()
    podman = of_the_node(Podman)(host, {str(node.gpu): SIMGPU})
    podman.start(image)
    running = start(podman, {"memory": "1Gi", "compute": "30"})
    node.stop_governor()
    # This is what dpkg does without a prerm.
    host.check("rm", "/var/lib/dpkg/info/tidegate.prerm")
    ran = host.run("env", "LC_ALL=C.UTF-8", "dpkg", "--purge", "tidegate", timeout=120)
    assert ran.status == 0, ran.text
    assert "running containers load the driver from" in ran.text
    assert "running containers have their grants in" in ran.text
    assert host.path(DRIVER_DIR).is_dir()
    assert_works(running)
    assert (
        host.run(
            "podman",
            "--runtime",
            "runc",
            "exec",
            running.name,
            "/usr/bin/cat",
            "/run/tidegate/devices",
        ).status
        == 0
    )
    node.install(deb)  # the engine needs the hook to end the container
    podman.remove(running)
    host.check("dpkg", "--purge", "tidegate", timeout=120)
    assert not host.path("/var/lib/tidegate").exists()
    assert not host.path("/run/tidegate").exists()
