"""One cluster for all tests here, with the programs that TIDEGATE_CLUSTER_BIN names. A test that breaks the cluster
repairs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.binaries import VARIABLE, Binaries, BinariesError
from tests.cluster.cluster import RealCluster
from tests.cluster.images import pause_image, tidegate_image, workload_images
from tests.conftest import ROOT

SUITE = "forky"
"""Debian release from which nodes get containerd, runc and the hook's Python."""
TOOLS = ("gcc", "git", "ip", "mount", "nsenter", "openssl", "unshare")


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Remember that a test failed, so that the logs are kept."""
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        item.session.config.stash[FAILED] = True


FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def binaries() -> Binaries:
    """The programs. These tests run only on request, so a missing program is a failure."""
    named = os.environ.get(VARIABLE)
    lacking = f"{VARIABLE} names no directory with a cluster's programs: docs/testing.md"
    if named:
        try:
            return Binaries(Path(named))
        except BinariesError as e:
            lacking = str(e)
    pytest.fail(lacking, pytrace=False)


@pytest.fixture(scope="session")
def node_root(binaries: Binaries) -> Path:  # noqa: ARG001 - the cheap checks come first
    """A node's root file system, unpacked from packages."""
    if os.geteuid() != 0:
        pytest.fail("a cluster's nodes are namespaces: run as root", pytrace=False)
    for tool in TOOLS:
        if shutil.which(tool) is None:
            pytest.fail(f"{tool} is not installed", pytrace=False)
    done = subprocess.run(
        ["tools/engine-root", SUITE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"no root file system for a node: {done.stderr.strip()}", pytrace=False)
    return ROOT / "build/engines" / SUITE


@pytest.fixture(scope="session")
def images(
    node_root: Path,  # noqa: ARG001 - as above
    build_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Path]:
    """Archives of all images that the pods here use."""
    base = tmp_path_factory.mktemp("images")
    return [pause_image(base), *workload_images(base, build_dir), tidegate_image()]


@pytest.fixture(scope="session")
def bare_cluster(
    request: pytest.FixtureRequest,
    binaries: Binaries,
    node_root: Path,
    build_dir: Path,
    images: list[Path],
) -> Iterator[RealCluster]:
    """A cluster of one node, at first without Tidegate.

    The certificate of its authority has no key usage extension, as on EKS and microk8s.
    """
    base = ROOT / "build/cluster" / f"run-{os.getpid()}"
    cluster = RealCluster(base, binaries, root=node_root, build=build_dir, key_usage=False)
    try:
        cluster.start(images)
        yield cluster
    finally:
        left = cluster.close()
        failed = request.config.stash.get(FAILED, False) or left
        if failed:
            print(f"logs are in {base}")
        else:
            cluster.remove()
    assert not left, "\n".join(left)


@pytest.fixture(scope="session")
def cluster(bare_cluster: RealCluster) -> RealCluster:
    """The cluster with Tidegate installed."""
    bare_cluster.apply()
    return bare_cluster
