"""The manifests of packaging/kubernetes, unchanged except for the simulated GPU's mounts."""

from __future__ import annotations

from tests.cluster.cluster import SYSTEM, RealCluster, pod
from tests.cluster.kube_api import wait_for


def test_the_base_manifests_start_and_no_container_restarts(cluster: RealCluster) -> None:
    [daemon_set] = cluster.api.objects("daemonsets", SYSTEM)
    assert daemon_set["status"]["numberReady"] == len(cluster.nodes)
    assert len(cluster.first_look) == len(cluster.nodes)
    for one in cluster.first_look:
        statuses = one["status"]["initContainerStatuses"] + one["status"]["containerStatuses"]
        assert {status["name"]: status["restartCount"] for status in statuses} == dict.fromkeys(
            ("install", "refresh", "governor", "forkserver", "dra"), 0
        )


def test_a_pod_with_a_claim_starts_with_the_fork_server_and_without(cluster: RealCluster) -> None:
    """With a hook script that does nothing, only the fork server can prepare a container; without the
    server's socket, only the script can.
    """
    cluster.claim_template("served", memory="2Gi", compute="30")
    node = cluster.nodes[0]
    version = node.path("/opt/tidegate/current").readlink()
    script = node.path(f"/opt/tidegate/{version}/python/oci_hook/tidegate-hook")
    kept = script.read_bytes()
    script.write_text("#!/bin/false\n")
    try:
        cluster.api.create("pods", pod("served", template="served"))
        cluster.wait_pods("served")
        cluster.delete_pods("served")
    finally:
        script.write_bytes(kept)
    listening = node.path("/run/tidegate/forkserver.sock")
    moved = listening.rename(listening.with_name("moved.sock"))
    try:
        cluster.api.create("pods", pod("alone", template="served"))
        cluster.wait_pods("alone")
        cluster.delete_pods("alone")
    finally:
        moved.rename(listening)
    wait_for("nothing to be left", lambda: not cluster.leftovers(node), 60)


def test_the_gpus_of_each_node_are_offered(cluster: RealCluster) -> None:
    slices = [one["spec"] for one in cluster.api.objects("resourceslices")]
    assert {one["nodeName"] for one in slices} == {node.name for node in cluster.nodes}
    for one in slices:
        [device] = one["devices"]
        assert device["allowMultipleAllocations"] is True
        assert set(device["capacity"]) == {"memory", "compute"}
        assert "taints" not in device
