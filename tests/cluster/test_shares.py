"""GPU shares that kube-scheduler allocated, as pods receive them."""

from __future__ import annotations

import time
from pathlib import Path

from bench.progress import Profile, Progress, common_span, read_stamps
from tests.cluster.cluster import RealCluster, pod
from tests.cluster.kube_api import condition, wait_for

MEASURED_S = 20.0
UNIT_US = 500
ALONE = Profile(durations={0: UNIT_US * 1e3}, scale=1.0, units=1)
"""Time that a unit of work takes alone; it is exact on the simulated GPU."""


def work(*options: str) -> tuple[str, ...]:
    """Return the command of a workload that begins on request."""
    return (
        *("/usr/bin/simgpu-workload", "--unit-us", str(UNIT_US), "--seconds", "3600"),
        *("--out", "/out/progress.bin", "--wait-file", "/out/begin", *options),
    )


def out(cluster: RealCluster, name: str) -> Path:
    return cluster.nodes[0].path(f"/var/lib/out/{name}")


def begin(cluster: RealCluster, *names: str) -> None:
    """Start the work of several workloads at the same time."""
    for name in names:
        wait_for(f"{name}'s program", (out(cluster, name) / "begin.ready").exists, 60)
    for name in names:
        (out(cluster, name) / "begin").touch()


def test_two_pods_get_70_and_30_percent_and_a_third_waits_with_a_reason(
    cluster: RealCluster,
) -> None:
    for name, compute in (("seventy", "70"), ("thirty", "30"), ("ten", "10")):
        cluster.claim_template(name, memory="2Gi", compute=compute)

    for name in ("seventy", "thirty"):
        cluster.api.create("pods", pod(name, *work(), template=name, out=True))
    cluster.wait_pods("seventy", "thirty")
    begin(cluster, "seventy", "thirty")

    cluster.api.create("pods", pod("ten", *work(), template="ten", out=True))
    reason = wait_for(
        "a reason why the third pod waits",
        lambda: condition(cluster.api.get("pods", "ten") or {}, "PodScheduled").get("message"),
        30,
    )
    assert "cannot allocate all claims" in str(reason)

    time.sleep(MEASURED_S)
    runs = {
        name: Progress(read_stamps(out(cluster, name) / "progress.bin"), ALONE)
        for name in ("seventy", "thirty")
    }
    first, last = common_span(runs.values())
    first += 2_000_000_000  # skip the first 2 s, in which the workloads begin one after the other
    assert last - first > 10e9
    delivered = {name: 100 * run.share(first, last) for name, run in runs.items()}
    total = sum(delivered.values())
    parts = {name: 100 * share / total for name, share in delivered.items()}
    print(f"delivered {delivered}, {parts} percent of the total")
    assert abs(parts["seventy"] - 70) <= 1.5, delivered
    assert abs(parts["thirty"] - 30) <= 1.5, delivered

    cluster.api.delete("pods", "thirty", grace=1)
    waited = cluster.wait_pods("ten", seconds=60)
    print(f"the third pod was ready {waited:.1f} s after the other was deleted")
    cluster.delete_pods("seventy", "thirty", "ten")
    wait_for("nothing to be left", lambda: not cluster.leftovers(cluster.nodes[0]), 60)
