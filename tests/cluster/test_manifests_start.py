"""The manifests of packaging/kubernetes as they stand, but for the simulated GPU's mounts."""

from __future__ import annotations

from tests.cluster.cluster import SYSTEM, Cluster


def test_the_base_manifests_start_and_no_container_had_to_start_twice(cluster: Cluster) -> None:
    [daemon_set] = cluster.api.objects("daemonsets", SYSTEM)
    assert daemon_set["status"]["numberReady"] == len(cluster.nodes)
    assert len(cluster.first_look) == len(cluster.nodes)
    for one in cluster.first_look:
        statuses = one["status"]["initContainerStatuses"] + one["status"]["containerStatuses"]
        assert {status["name"] for status in statuses} == {"install", "refresh", "governor", "dra"}
        assert {status["name"]: status["restartCount"] for status in statuses} == dict.fromkeys(
            ("install", "refresh", "governor", "dra"), 0
        )


def test_each_node_s_gpus_are_offered(cluster: Cluster) -> None:
    slices = [one["spec"] for one in cluster.api.objects("resourceslices")]
    assert {one["nodeName"] for one in slices} == {node.name for node in cluster.nodes}
    for one in slices:
        [device] = one["devices"]
        assert device["allowMultipleAllocations"] is True
        assert set(device["capacity"]) == {"memory", "compute"}
        assert "taints" not in device
