"""Start-up time of pods with claims, compared with pods without."""

from __future__ import annotations

import statistics
import time

from bench.demo import processors_taken
from tests.cluster.cluster import RealCluster, pod
from tests.cluster.kube_api import is_true, wait_for

COUNT = 50
ROUNDS = 6
MOST = 1.3
IDLE = 0.5
"""Maximum number of processors that an idle cluster uses."""
REFILL_S = 2.0
"""Time in seconds after which kube-controller-manager may again send a full burst of 30 requests;
its sustained limit is 20 requests a second.
"""


def wait_for_cleanup(cluster: RealCluster) -> None:
    """Wait until the cluster has cleaned up after the last round, so that the next round does not
    measure the cleanup.

    kube-controller-manager deletes the claims of ended pods at 20 requests a second, and does
    little else during that time. If the next 50 pods are created before it has finished, they take
    12 s instead of 8.
    """
    wait_for("no claims", lambda: not cluster.api.objects("resourceclaims"), 120)
    wait_for("the cluster to be at rest", lambda: processors_taken(2) < IDLE, 120)
    time.sleep(REFILL_S)


def start_many(cluster: RealCluster, label: str, template: str) -> float:
    """Create COUNT pods at once; return the time in seconds until the last one is ready."""
    names = [f"{label}-{number}" for number in range(COUNT)]
    began = time.monotonic()
    for name in names:
        cluster.api.create("pods", pod(name, template=template, labels={"group": label}))

    def ready() -> bool:
        pods = cluster.api.objects("pods", labels=f"group={label}")
        return len(pods) == COUNT and all(is_true(one, "Ready") for one in pods)

    wait_for(f"{COUNT} pods", ready, 300, cluster.pods_text, every=0.1)
    seconds = time.monotonic() - began
    cluster.delete_pods(*names, seconds=300)
    return seconds


def test_50_pods_with_claims_are_ready_within_1_3_times_the_time_of_50_without(
    cluster: RealCluster,
) -> None:
    cluster.claim_template("small", memory="600Mi", compute="2")
    for label, template in (("first", ""), ("second", "small")):
        start_many(cluster, label, template)  # one-time delays
    taken: dict[str, list[float]] = {"": [], "small": []}
    for number in range(ROUNDS):
        # Each kind of pod is first as often as second, because the API server takes longer from round to round.
        for template in ("", "small") if number % 2 == 0 else ("small", ""):
            wait_for_cleanup(cluster)
            taken[template].append(start_many(cluster, f"{template or 'plain'}-{number}", template))
    plain, claimed = taken[""], taken["small"]
    print(f"{COUNT} pods: {plain} s without claims, {claimed} s with")
    assert statistics.median(claimed) <= MOST * statistics.median(plain), (plain, claimed)
    wait_for("nothing to be left", lambda: not cluster.leftovers(cluster.nodes[0]), 60)
