"""Start-up time of pods with claims, compared with pods without."""

from __future__ import annotations

import statistics
import time

from tests.cluster.cluster import Cluster, pod
from tests.cluster.kube_api import is_true, wait_for

COUNT = 50
ROUNDS = 3
MOST = 1.3


def start_many(cluster: Cluster, label: str, template: str) -> float:
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
    cluster: Cluster,
) -> None:
    cluster.claim_template("small", memory="600Mi", compute="2")
    start_many(cluster, "first", "")  # one-time delays
    plain, claimed = [], []
    for number in range(ROUNDS):
        plain.append(start_many(cluster, f"plain-{number}", ""))
        claimed.append(start_many(cluster, f"claimed-{number}", "small"))
    print(f"{COUNT} pods: {plain} s without claims, {claimed} s with")
    assert statistics.median(claimed) <= MOST * statistics.median(plain), (plain, claimed)
    wait_for("nothing to be left", lambda: not cluster.leftovers(cluster.nodes[0]), 60)
