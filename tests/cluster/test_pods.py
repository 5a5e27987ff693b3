"""A cluster without Tidegate, the basis of the other tests."""

from __future__ import annotations

from tests.cluster.cluster import RealCluster, pod


def test_a_pod_without_a_claim_runs(bare_cluster: RealCluster) -> None:
    bare_cluster.api.create("pods", pod("plain"))
    bare_cluster.wait_pods("plain")
    output = bare_cluster.kubectl("exec", "plain", "--", "/bin/sh", "-c", "echo inside")
    assert output == "inside\n"
    bare_cluster.delete_pods("plain")
