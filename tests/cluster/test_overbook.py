"""A node that grants more memory than its GPU has offers all of it to the scheduler, and may park
the memory of containers with claims.
"""

from __future__ import annotations

import json

from tests.cluster.cluster import RealCluster, pod
from tests.cluster.kube_api import condition, wait_for

OVERBOOKED = """
memory_reserve: 124Gi
memory: {overbook: 1.7, host: 8Gi}
"""
HAS, OFFERS = 4096, 6963
"""MiB of the GPU that may be granted, and 1.7 times that."""


def capacity(cluster: RealCluster) -> str:
    [one] = cluster.api.objects("resourceslices")
    return str(one["spec"]["devices"][0]["capacity"]["memory"]["value"])


def test_pods_whose_claims_exceed_the_memory_of_the_gpu_run_together(cluster: RealCluster) -> None:
    usual = capacity(cluster)
    cluster.apply(configuration=OVERBOOKED)
    try:
        wait_for("the offer to follow", lambda: capacity(cluster) == f"{OFFERS}Mi", 30)
        [one] = cluster.api.objects("resourceslices")
        attributes = one["spec"]["devices"][0]["attributes"]
        assert attributes["memoryOverbook"] == {"int": 170}

        cluster.claim_template("three", memory="3Gi", compute="20")
        command = ("/usr/bin/simgpu-workload", "--unit-us", "500", "--seconds", "3600")
        names = ("first", "second")
        for name in names:
            cluster.api.create("pods", pod(name, *command, template="three"))
        cluster.wait_pods(*names)
        listed = json.loads(cluster.tidegate("ps", "--json"))
        assert [sum(device["memory_limit"] for device in one["devices"]) for one in listed] == [
            3 << 30
        ] * 2
        assert all(one["parking"] is not None for one in listed)

        # 939 MiB of the offer are left.
        cluster.api.create("pods", pod("third", *command, template="three"))
        reason = wait_for(
            "a reason why the third pod waits",
            lambda: condition(cluster.api.get("pods", "third") or {}, "PodScheduled").get(
                "message"
            ),
            30,
        )
        assert "cannot allocate all claims" in str(reason)
        cluster.delete_pods("first")
        cluster.wait_pods("third")
        cluster.delete_pods("second", "third")
        wait_for("nothing to be left", lambda: not cluster.leftovers(cluster.nodes[0]), 60)
    finally:
        cluster.apply()
    wait_for("the offer to be the usual one", lambda: capacity(cluster) == usual, 30)
