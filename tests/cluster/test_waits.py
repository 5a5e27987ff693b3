"""A pod that waits starts as soon as the reason for waiting is gone, without waiting for the
kubelet's next resync.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from tests.cluster.cluster import RealCluster, pod
from tests.cluster.kube_api import wait_for

MAX_S = 20.0
AWAY_S = 14.0


def test_a_pod_created_while_the_governor_was_away_starts_when_it_is_back(
    cluster: RealCluster,
) -> None:
    cluster.claim_template("patient", memory="2Gi", compute="40")
    cluster.api.create("pods", pod("patient", template="patient"))
    end = time.monotonic() + AWAY_S
    while time.monotonic() < end:  # the kubelet restarts it each time
        for pid in cluster.container_pids(cluster.nodes[0], "governor"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    waited = cluster.wait_pods("patient", seconds=180)
    print(f"ready {waited:.1f} s after the governor was left alone")
    assert waited <= MAX_S, cluster.api.events("patient")
    cluster.delete_pods("patient")
    wait_for("nothing to be left", lambda: not cluster.leftovers(cluster.nodes[0]), 60)


def test_the_share_of_a_pod_that_was_deleted_by_force_is_free_when_its_container_has_ended(
    cluster: RealCluster,
) -> None:
    cluster.claim_template("forced", memory="2Gi", compute="60")
    # The program ignores SIGTERM, so that the container outlives the pod by some seconds.
    command = ("/bin/sh", "-c", "trap '' TERM; while :; do sleep 1; done")
    first = pod("forced-1", *command, template="forced")
    first["spec"]["terminationGracePeriodSeconds"] = 8
    cluster.api.create("pods", first)
    cluster.wait_pods("forced-1")
    cluster.api.delete("pods", "forced-1", grace=0)
    cluster.api.create("pods", pod("forced-2", template="forced"))
    waited = cluster.wait_pods("forced-2", seconds=180)
    print(f"ready {waited:.1f} s after the other was deleted by force")
    assert waited <= MAX_S, cluster.api.events("forced-2")
    cluster.delete_pods("forced-2")
    wait_for("nothing to be left", lambda: not cluster.leftovers(cluster.nodes[0]), 60)


def test_a_cdi_file_that_was_removed_is_written_again(cluster: RealCluster) -> None:
    cluster.claim_template("removed", memory="2Gi", compute="30")
    command = ("/usr/bin/sleep", "5")  # after that, a second container starts, which needs the file
    cluster.api.create("pods", pod("removed", *command, template="removed"))
    cluster.wait_pods("removed")
    node = cluster.nodes[0]
    directory = node.path("/var/run/cdi")
    [file] = directory.glob("tidegate.gpu-claim_*.json")
    kept = file.read_bytes()
    file.unlink()
    began = time.monotonic()
    wait_for("the file to be back", file.exists, 180)
    seconds = time.monotonic() - began
    print(f"the file was back after {seconds:.1f} s")
    assert file.read_bytes() == kept
    assert seconds <= MAX_S

    def again() -> bool:
        found = cluster.api.get("pods", "removed") or {}
        return any(s["restartCount"] for s in found["status"]["containerStatuses"])

    wait_for("the container to start again", again, 60, cluster.pods_text)
    cluster.wait_pods("removed")
    cluster.delete_pods("removed")
    wait_for("nothing to be left", lambda: not cluster.leftovers(node), 60)
