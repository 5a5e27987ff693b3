"""The device plugin and the DRA driver with a real governor process on the simulated GPU, for behaviour that stand-ins
do not have.

Only the API server is a stand-in. Containers are admitted as the hook admits them, with the pod that
their engine names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kube.cdi import Directory
from kube.claims import Reference
from kube.driver import ClaimDriver
from kube.errors import ClusterError
from kube.node import NodeClient
from kube.plugin import Allocations
from kube.slices import device_name
from kube.units import UnitPolicy, unit_names
from tests.kubernetes.documents import NODE, claim, reference, result
from tests.unit.governor_process import GovernorNode, gpus

__all__ = ["gpus"]  # a fixture


@pytest.fixture
def node(tmp_path: Path, gpus: tuple[Path, Path], build_dir: Path) -> Iterator[GovernorNode]:
    with GovernorNode(tmp_path, gpus, build_dir) as made:
        yield made


class ServedClaims:
    """The claims of an API server."""

    def __init__(self) -> None:
        self.claims: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, document: dict[str, Any]) -> None:
        metadata = document["metadata"]
        self.claims[metadata["namespace"], metadata["name"]] = document

    def claim(self, namespace: str, name: str) -> dict[str, Any]:
        if (namespace, name) not in self.claims:
            raise ClusterError(
                "the API server answered with status 404", hint="it is gone", http=404
            )
        return self.claims[namespace, name]


def admit(node: GovernorNode, name: str, claim: dict[str, Any], namespace: str) -> Path:
    """Admit a container of a pod with the first share of a claim."""
    return node.container(
        name,
        annotations={},
        identity={"namespace": namespace, "pod": f"pod-{name}"},
        claims=[{"uid": claim["uid"], "shares": [claim["shares"][0]["name"]]}],
    )


def test_pods_of_any_namespace_use_the_device_plugins_units(
    node: GovernorNode, tmp_path: Path
) -> None:
    """The kubelet's request for units has no namespace; the engine names the pod's namespace for each container."""
    governor = NodeClient(node.config.runtime_dir)
    allocations = Allocations(governor, Directory(tmp_path / "cdi"), UnitPolicy())
    units = unit_names(governor.gpus()["gpus"][0])
    for namespace, own in (("default", units[:4]), ("team-a", units[4:8])):
        (device,) = allocations.allocate([own])
        claim = next(one for one in governor.claims() if one["uid"] in device)
        admit(node, f"of-{namespace}", claim, namespace)
        # No namespace can have this name, so no claim of the cluster is mistaken for units.
        assert "." in claim["namespace"]
    assert [one["shares"][0]["containers"] for one in governor.claims()] == [
        ["of-default"],
        ["of-team-a"],
    ]


def test_prepared_claims_are_announced_again_after_the_database_was_lost(
    node: GovernorNode, tmp_path: Path
) -> None:
    """When a container with such a claim restarts, the kubelet does not prepare the claim again."""
    governor, cluster = NodeClient(node.config.runtime_dir), ServedClaims()
    directory = Directory(tmp_path / "cdi")
    driver = ClaimDriver(NODE, governor, cluster, directory)
    own = device_name(governor.gpus()["gpus"][0]["uuid"])
    kept, gone = (
        claim(name, "team-a", result(memory="1Gi", compute="10", device=own), uid=f"u-{name}")
        for name in ("kept", "gone")
    )
    for document in (kept, gone):
        cluster.add(document)
        driver.prepare(Reference(*reference(document)))
    assert not driver.differs()
    before = governor.claims()
    node.stop()
    (tmp_path / "state" / "state.db").write_bytes(b"no database" * 1000)
    node.start()
    assert node.events("database-damaged")
    assert governor.claims() == []
    assert driver.differs()
    del cluster.claims["team-a", "gone"]
    driver.reconcile()
    assert governor.claims() == [one for one in before if one["name"] == "kept"]
    assert directory.uids() == {"u-kept"}
    assert not driver.differs()
    admit(node, "again", governor.claims()[0], "team-a")


def test_units_are_announced_again_after_the_database_was_lost(
    node: GovernorNode, tmp_path: Path
) -> None:
    governor = NodeClient(node.config.runtime_dir)
    allocations = Allocations(governor, Directory(tmp_path / "cdi"), UnitPolicy())
    units = unit_names(governor.gpus()["gpus"][0])
    allocations.allocate([units[:2]])
    allocations.allocate([units[2:4]])
    before = governor.claims()
    node.stop()
    (tmp_path / "state" / "state.db").write_bytes(b"no database" * 1000)
    node.start()
    assert governor.claims() == []
    allocations.allocate([units[3:5]])  # to another pod: the second claim has ended
    allocations.tell_again()
    assert len(governor.claims()) == 2
    assert before[0] in governor.claims()
    assert before[1] not in governor.claims()
