"""Reset of a node: all processes, mounts and files of /run are lost; the files of /var remain."""

from __future__ import annotations

import time

from tests.cluster.cluster import RealCluster, pod
from tests.cluster.kube_api import Document, is_true, wait_for

MAX_S = 15.0
COUNT = 5


def test_after_a_reboot_all_pods_are_back_within_15_s(cluster: RealCluster) -> None:
    cluster.claim_template("fifth", memory="2Gi", compute="20")
    names = [f"back-{number}" for number in range(COUNT)]
    command = ("/usr/bin/simgpu-workload", "--unit-us", "500", "--seconds", "3600")
    for name in names:
        cluster.api.create("pods", pod(name, *command, template="fifth"))
    cluster.wait_pods(*names)
    before = containers(cluster)
    node = cluster.nodes[0]

    left = node.crash()
    assert not left, left
    node.boot()
    cluster.control_plane.plug(node)
    began = time.monotonic()
    node.start()

    def back() -> bool:
        now = containers(cluster)
        renewed = all(now[key] != identifier for key, identifier in before.items() if key in now)
        pods = [p for p in cluster.api.objects("pods", None) if p["status"]["phase"] == "Running"]
        return renewed and len(pods) == len(names) + 1 and all(is_true(p, "Ready") for p in pods)

    wait_for("all pods to be back", back, 180, cluster.pods_text, every=0.1)
    seconds = time.monotonic() - began
    print(f"all pods were back {seconds:.1f} s after containerd and the kubelet were started")
    books = cluster.tidegate("ps", "--json")
    assert books.count('"id"') == COUNT, books
    assert seconds <= MAX_S
    cluster.delete_pods(*names)
    wait_for("nothing to be left", lambda: not cluster.leftovers(node), 60)


def containers(cluster: RealCluster) -> dict[tuple[str, str], str]:
    """Return the identifiers of all pods' containers, by pod and name."""
    found = {}
    for one in cluster.api.objects("pods", None):
        statuses: list[Document] = one["status"].get("containerStatuses") or []
        for status in statuses:
            found[one["metadata"]["name"], status["name"]] = status.get("containerID", "")
    return found
