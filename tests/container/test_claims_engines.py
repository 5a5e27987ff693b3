"""Test the path from a ResourceClaim to a governed container, with the real driver, governor, hook
and mirror, and engines with CDI.

The API server and the kubelet are stand-ins (tests/kubernetes). Like the kubelet, the tests ask the
engine for the devices that the driver's answer names.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from governor.client import ask
from tests.container.bundles import ROOT
from tests.container.engines import ContainerdCri, Engine, Podman, Started, StartError
from tests.container.nodes import wait_for
from tests.container.test_engines import WORKLOAD, EngineSite, begin, site, used, wait_ready
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.documents import NODE, claim, config, reference, result
from tests.kubernetes.kubelet import Kubelet

__all__ = ["site"]
GIB = 1 << 30
NAMESPACE = "team"  # of the pods in tests/container/engines.py


@dataclass
class ClaimNode:
    """A node of a cluster: the driver runs, and the kubelet has registered it."""

    site: EngineSite
    api: ApiServer
    kubelet: Kubelet
    process: subprocess.Popen[bytes]
    devices: list[dict[str, Any]]

    def allocate(self, name: str, *results: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Act as the scheduler: make a claim with shares of the first GPU in the slice."""
        document = claim(
            name,
            NAMESPACE,
            *({**one, "device": self.devices[0]["name"]} for one in results),
            **more,
        )
        self.api.add_claim(document)
        return document

    def prepare(self, document: dict[str, Any]) -> list[str]:
        """Act as the kubelet; return the ids that it requests from the engine."""
        answer = self.kubelet.prepare(reference(document))[document["metadata"]["uid"]]
        assert answer.error == ""
        return [identifier for device in answer.devices for identifier in device.cdi_device_ids]

    def unprepare(self, document: dict[str, Any]) -> None:
        """Act as the kubelet after the end of the pod."""
        assert self.kubelet.unprepare(reference(document))[document["metadata"]["uid"]].error == ""

    def left(self) -> int:
        """Return the percentage of the first GPU that is not reserved."""
        return int(ask(self.site.node.config, "gpus")["gpus"][0]["compute_left"])


@pytest.fixture(params=[Podman, ContainerdCri], ids=lambda kind: kind.name)
def engine(site: EngineSite, request: pytest.FixtureRequest) -> Iterator[Engine]:
    for one in used(site, request.param):
        if not one.knows_cdi():
            pytest.skip(f"{one.version()} does not support CDI")
        yield one


@pytest.fixture
def cluster(
    site: EngineSite, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ClaimNode]:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    base = tmp_path_factory.mktemp("k")
    api = ApiServer(base, NODE)
    kubelet = Kubelet(base / "kubelet")
    log = (base / "driver.log").open("ab")
    process = subprocess.Popen(
        [
            sys.executable, "-m", "kube.main", "--node-name", NODE, "--kubeconfig", str(api.kubeconfig),
            "--runtime-dir", str(site.node.runtime_dir), "--kubelet-dir", str(kubelet.directory),
            "--cdi-dir", str(site.host.path("/var/run/cdi")), "--look-every", "0.5",
        ],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
    )  # fmt: skip
    try:
        kubelet.register(60)
        found = wait_for(api.slice_of, "a ResourceSlice")
        yield ClaimNode(site, api, kubelet, process, found["spec"]["devices"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        log.close()
        kubelet.close()
        api.close()
        print((base / "driver.log").read_text())
        for one in ask(site.node.config, "claims")["claims"]:
            ask(site.node.config, "unclaim", uid=one["uid"])
        for path in site.host.path("/var/run/cdi").glob("tidegate.gpu-claim_*"):
            path.unlink()
    assert api.misfits == []


def run(engine: Engine, devices: list[str]) -> Started:
    """Start a container that has nothing but devices: no annotation, and no runtime or hook of ours."""
    started = engine.run(*WORKLOAD, ours=False, devices=tuple(devices))
    wait_ready(started)
    return started


def units(started: Started) -> int:
    """Return how many units of work a container has done."""
    path = started.out / "progress.bin"
    return path.stat().st_size // 16 if path.exists() else 0


def test_two_pods_share_a_gpu_70_to_30(cluster: ClaimNode, engine: Engine) -> None:
    large = cluster.allocate(
        "large", result(compute="70", memory="4Gi"), configs=(config(strict=True),)
    )
    small = cluster.allocate(
        "small", result(compute="30", memory="2Gi"), configs=(config(strict=True),)
    )
    devices = {one["metadata"]["name"]: cluster.prepare(one) for one in (large, small)}
    assert cluster.left() == 0
    started = {name: run(engine, ids) for name, ids in devices.items()}
    found = [
        (one["compute"], one["compute_limit"], one["devices"][0]["memory_limit"])
        for one in cluster.site.books().values()
    ]
    assert sorted(found) == [(30, 30, 2 * GIB), (70, 70, 4 * GIB)]
    assert cluster.left() == 0  # no share is counted twice
    for one in started.values():
        begin(cluster.site, one)

    def large_part() -> float:
        """Return the large container's part of the work that both do in the next 4 s."""
        before = {name: units(one) for name, one in started.items()}
        time.sleep(4)
        done = {name: units(one) - before[name] for name, one in started.items()}
        return done["large"] / sum(done.values())

    # On a busy machine, either may request its time too late for a while.
    assert any(0.6 < large_part() < 0.8 for _ in range(3))

    for one in started.values():
        engine.remove(one)
    wait_for(lambda: not cluster.site.books(), "the containers to be gone")
    assert cluster.left() == 0  # a claim outlives its containers
    for one in (large, small):
        cluster.unprepare(one)
    assert cluster.left() == 100
    assert not list(cluster.site.host.path("/var/run/cdi").glob("tidegate.gpu-claim_*"))


def test_containers_with_a_claim_start_without_the_driver(
    cluster: ClaimNode, engine: Engine
) -> None:
    """A prepared claim is a file and a row in the governor's database; a pod's container starts again without the driver."""
    document = cluster.allocate("alone", result(compute="40", memory="2Gi"))
    devices = cluster.prepare(document)
    cluster.process.kill()
    cluster.process.wait()
    for _ in range(2):
        started = run(engine, devices)
        assert [one["compute"] for one in cluster.site.books().values()] == [40]
        engine.remove(started)
        wait_for(lambda: not cluster.site.books(), "the container to be gone")


def test_a_withdrawn_claim_starts_no_container(cluster: ClaimNode, engine: Engine) -> None:
    document = cluster.allocate("gone", result(compute="40", memory="2Gi"))
    devices = cluster.prepare(document)
    (path,) = cluster.site.host.path("/var/run/cdi").glob("tidegate.gpu-claim_*")
    kept = path.read_bytes()
    cluster.unprepare(document)
    with pytest.raises(StartError):
        engine.run(*WORKLOAD, ours=False, devices=tuple(devices))
    # Even if the CDI file had been kept, the governor would refuse the container.
    path.write_bytes(kept)
    try:
        with pytest.raises(StartError):
            engine.run(*WORKLOAD, ours=False, devices=tuple(devices))
    finally:
        Path(path).unlink()
    assert cluster.left() == 100
