"""Device plugin and DRA driver on the governor itself, a process on the simulated GPU: what stand-ins cannot show.

Only the API server is the test's. Containers are admitted as the hook does it, with what their engine says of their pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kube.cdi import Directory
from kube.node import Node as Governor
from kube.plugin import Books
from kube.units import Policy, unit_names
from tests.unit.governor_process import Node, gpus

__all__ = ["gpus"]  # a fixture


@pytest.fixture
def node(tmp_path: Path, gpus: tuple[Path, Path], build_dir: Path) -> Iterator[Node]:
    with Node(tmp_path, gpus, build_dir) as made:
        yield made


def admit(node: Node, name: str, claim: dict[str, Any], namespace: str) -> Path:
    """Start a container of a pod with the first share of a claim."""
    return node.container(
        name,
        annotations={},
        identity={"namespace": namespace, "pod": f"pod-{name}"},
        claims=[{"uid": claim["uid"], "shares": [claim["shares"][0]["name"]]}],
    )


def test_pods_of_any_namespace_use_the_device_plugins_units(node: Node, tmp_path: Path) -> None:
    """The kubelet says no namespace with units, and the engine says the pod's with the container."""
    governor = Governor(node.config.runtime_dir)
    books = Books(governor, Directory(tmp_path / "cdi"), Policy())
    units = unit_names(governor.gpus()["gpus"][0])
    for namespace, own in (("default", units[:4]), ("team-a", units[4:8])):
        (device,) = books.allocate([own])
        claim = next(one for one in governor.claims() if one["uid"] in device)
        admit(node, f"of-{namespace}", claim, namespace)
        # No namespace can have this name, and so no claim of the cluster is taken for units.
        assert "." in claim["namespace"]
    assert [one["shares"][0]["containers"] for one in governor.claims()] == [
        ["of-default"],
        ["of-team-a"],
    ]
