"""Replacement of the DaemonSet's pod, as in an upgrade, while pods with claims are created."""

from __future__ import annotations

import datetime as dt
import statistics
import threading
import time
from dataclasses import dataclass, field

from tests.cluster.cluster import SYSTEM, RealCluster, pod
from tests.cluster.kube_api import is_true, wait_for

MORE_S = 5.0
EVERY_S = 2.0


@dataclass
class Stream:
    """Creates a pod with a claim every two seconds, whether or not the earlier ones are ready; each is deleted
    when it is ready.
    """

    cluster: RealCluster
    delays: dict[str, float] = field(default_factory=dict)
    _created: dict[str, float] = field(default_factory=dict)
    _count: int = 0

    def run(self, end: threading.Event) -> None:
        """Create pods until `end` is set, and wait for all of them."""
        following = time.monotonic()
        while not end.is_set() or self._created:
            now = time.monotonic()
            if now >= following and not end.is_set():
                name = f"stream-{self._count}"
                self._count += 1
                self._created[name] = time.monotonic()
                self.cluster.api.create("pods", pod(name, template="replaced"))
                following = now + EVERY_S
            for one in self.cluster.api.objects("pods"):
                name = one["metadata"]["name"]
                if name in self._created and is_true(one, "Ready"):
                    self.delays[name] = time.monotonic() - self._created.pop(name)
                    self.cluster.api.delete("pods", name, grace=1)
            waiting = [n for n, began in self._created.items() if time.monotonic() - began > 180]
            assert not waiting, (waiting, self.cluster.api.events(waiting[0]))
            time.sleep(0.05)


def during(cluster: RealCluster, seconds: float, *, upgrade: bool) -> list[float]:
    """Create pods for `seconds` seconds, and if requested also during an upgrade before that;
    return the time until each pod was ready, in seconds.
    """
    stream, end = Stream(cluster), threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            stream.run(end)
        except BaseException as e:  # noqa: BLE001 - raised below, in the test's own thread
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        if upgrade:
            [old] = [one["metadata"]["uid"] for one in cluster.system_pods()]
            stamp = dt.datetime.now(dt.UTC).isoformat()
            change = {"metadata": {"annotations": {"upgraded": stamp}}}
            cluster.api.patch("daemonsets", "tidegate", {"spec": {"template": change}}, SYSTEM)

            def replaced() -> bool:
                pods = cluster.system_pods()
                return len(pods) == 1 and pods[0]["metadata"]["uid"] != old and cluster.is_up()

            wait_for("the pod to be replaced", replaced, 300, cluster.explain)
        time.sleep(seconds)
    finally:
        end.set()
        thread.join()
    assert not failed, failed
    wait_for("pods to be gone", lambda: not cluster.api.objects("pods"), 60, cluster.pods_text)
    return list(stream.delays.values())


def test_an_upgrade_of_the_driver_delays_no_pod_by_more_than_5_s(cluster: RealCluster) -> None:
    cluster.claim_template("replaced", memory="600Mi", compute="2")
    usual = during(cluster, 20, upgrade=False)
    delays = during(cluster, 10, upgrade=True)
    print(
        f"ready after {statistics.median(usual):.2f} s, {max(usual):.2f} s at most; while the driver was"
        f" replaced {statistics.median(delays):.2f} s, {max(delays):.2f} s at most, of {len(delays)}"
    )
    assert max(delays) - statistics.median(usual) <= MORE_S, delays
    wait_for("nothing to be left", lambda: not cluster.leftovers(cluster.nodes[0]), 60)
