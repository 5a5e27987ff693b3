"""A GPU that pods fill to its last percent: kube-scheduler retries a pod for which there was no room before."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from kube.recheck import ANNOTATION
from tests.cluster.cluster import RealCluster, pod
from tests.cluster.kube_api import Document, wait_for

ROUNDS = 10
PODS = 5
MAX_S = 60.0
QUIET_S = 15.0
"""Length of the period without attempts for which the test waits, in seconds: longer than the
driver defers an update, and longer than kube-scheduler defers a pod that it has tried.
"""


def failures(cluster: RealCluster, name: str) -> list[Document]:
    """Return the events that report why kube-scheduler found no GPU for a pod."""
    return [
        one
        for one in cluster.api.objects("events")
        if one["reason"] == "FailedScheduling"
        and one["involvedObject"]["name"] == name
        and "cannot allocate all claims" in one["message"]
    ]


def attempts(cluster: RealCluster, name: str) -> int:
    """Return how often kube-scheduler found no GPU for a pod."""
    return sum((one.get("series") or {}).get("count", 1) for one in failures(cluster, name))


def mark(cluster: RealCluster) -> str:
    """Return the recheck mark of the first node's slice."""
    slices = [
        one
        for one in cluster.api.objects("resourceslices")
        if one["spec"].get("nodeName") == cluster.nodes[0].name
    ]
    return str((slices[0]["metadata"].get("annotations") or {}).get(ANNOTATION, ""))


def test_five_pods_that_are_created_at_once_and_fill_a_gpu_are_ready_within_a_minute(
    cluster: RealCluster,
) -> None:
    cluster.claim_template("part", memory="2Gi", compute="20")
    took, refused = [], 0
    for number in range(ROUNDS):
        names = [f"part-{number}-{index}" for index in range(PODS)]
        began = time.monotonic()
        with ThreadPoolExecutor(PODS) as pool:
            list(pool.map(lambda n: cluster.api.create("pods", pod(n, template="part")), names))
        cluster.wait_pods(*names, seconds=MAX_S)
        took.append(round(time.monotonic() - began, 1))
        refused += sum(bool(failures(cluster, name)) for name in names)
        cluster.delete_pods(*names)
        wait_for("nothing to be left", lambda: not cluster.leftovers(cluster.nodes[0]), 60)
    print(f"{PODS} pods were ready after {took} s; {refused} of all were found too large at first")


def test_a_pod_that_waits_is_tried_again_after_claims_were_prepared(cluster: RealCluster) -> None:
    """Only the update of the slice can cause the new attempt: kube-scheduler does not retry a
    waiting pod because of another pod's claim.
    """
    for name, compute in (("held", "40"), ("large", "80"), ("little", "10")):
        cluster.claim_template(name, memory="2Gi", compute=compute)
    cluster.api.create("pods", pod("held", template="held"))
    cluster.wait_pods("held")
    cluster.api.create("pods", pod("large", template="large"))
    wait_for("the large pod to be tried", lambda: attempts(cluster, "large"), 30)
    tried, since = 0, time.monotonic()
    while time.monotonic() - since < QUIET_S:
        if attempts(cluster, "large") != tried:
            tried, since = attempts(cluster, "large"), time.monotonic()
        time.sleep(0.5)
    before = mark(cluster)

    began = time.monotonic()
    cluster.api.create("pods", pod("little", template="little"))
    cluster.wait_pods("little")
    again = lambda: attempts(cluster, "large") > tried  # noqa: E731
    wait_for("another try", again, MAX_S, cluster.pods_text)
    print(f"tried again {time.monotonic() - began:.1f} s after another pod was created")
    assert mark(cluster) != before
    cluster.delete_pods("held", "large", "little")
    wait_for("nothing to be left", lambda: not cluster.leftovers(cluster.nodes[0]), 60)
