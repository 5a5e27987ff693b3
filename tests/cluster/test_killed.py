"""Random kills of the node's daemons while the pods of a Job come and go."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import RealCluster, pod
from tests.cluster.cluster_node import ClusterNode
from tests.cluster.kube_api import ApiError, Document, wait_for

SECONDS = float(os.environ.get("TIDEGATE_CLUSTER_KILL_SECONDS", "600"))
"""Duration of the kills, in seconds; the pods' work takes about as long in total."""
COUNT, SIDE_BY_SIDE = 50, 5
PAUSE_S = (2.0, 12.0)
"""Range of the pause between two kills, in seconds."""
AWAY_S = (0.2, 15.0)
"""Range of the time for which containerd or the kubelet is away, in seconds. The other parts are restarted by the kubelet.
"""
MAX_S = 20.0


@dataclass
class Observation:
    """One observation of the node, at a time in seconds since the epoch, with the parts that did not answer."""

    time: float
    away: frozenset[str]


@dataclass
class Watch:
    """Observes the node's parts every 0.2 s, and the state of the pods every second."""

    cluster: RealCluster
    looks: list[Observation] = field(default_factory=list)
    pods: dict[str, Document] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    failed_starts: Counter[str] = field(default_factory=Counter)
    ended: dict[str, Any] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _end: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Observe, in threads, until the block ends."""
        threads = [threading.Thread(target=run) for run in (self._look, self._ask)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._end.set()
            for thread in threads:
                thread.join()

    def _look(self) -> None:
        node = self.cluster.nodes[0]
        while not self._end.wait(0.2):
            self.looks.append(Observation(time.time(), frozenset(away(node))))

    def _ask(self) -> None:
        while not self._end.wait(1.0):
            with contextlib.suppress(ApiError, OSError):
                for one in self.cluster.api.objects("pods", labels="group=killed"):
                    self.pods[one["metadata"]["name"]] = one
                    if (start := started(one)) is not None:
                        self.starts.setdefault(one["metadata"]["name"], start)
                    self._note_ends(one)

    def _note_ends(self, one: Document) -> None:
        """Note containers that never started, and those in which the program failed."""
        for status in one["status"].get("containerStatuses") or []:
            for state in (status.get("state") or {}, status.get("lastState") or {}):
                end = state.get("terminated") or {}
                if not end.get("exitCode") or end["containerID"] in self._seen:
                    continue
                self._seen.add(end["containerID"])
                # If containerd is killed while it starts a container, it does not know that
                # container afterwards.
                if end["reason"] in ("StartError", "Unknown"):
                    message = end.get("message", end["reason"])
                    self.failed_starts[message.rpartition(": ")[2][:120]] += 1
                else:
                    self.ended[end["containerID"]] = (one["metadata"]["name"], end)

    def longest(self, begin: float, end: float) -> float:
        """Return the longest uninterrupted time between `begin` and `end` during which all parts
        answered, in seconds.
        """
        longest = 0.0
        since: float | None = None
        for look in self.looks:
            if not begin <= look.time <= end or look.away:
                since = None
                continue
            since = look.time if since is None else since
            longest = max(longest, look.time - since)
        return longest


def away(node: ClusterNode) -> list[str]:
    """Return which parts of a node do not answer on their sockets."""
    plugins = list(node.path("/var/lib/kubelet/plugins/tidegate.gpu").glob("*.sock"))
    places = {
        "governor": [node.path("/run/tidegate/governor.sock")],
        "driver": plugins,
        "kubelet": [node.path("/var/lib/kubelet/pod-resources/kubelet.sock")],
        "containerd": [node.path("/run/containerd/containerd.sock")],
    }
    return [name for name, paths in places.items() if not any(answers(path) for path in paths)]


def answers(path: Path) -> bool:
    """Return whether a program accepts connections on a socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1)
        # A path below /proc may be too long for a socket address; the path of a directory's descriptor is short.
        try:
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            connection.connect(f"/proc/self/fd/{directory}/{path.name}")
        except OSError:
            return False
        finally:
            os.close(directory)
    return True


def disturb(cluster: RealCluster, seconds: float, chance: random.Random) -> dict[str, int]:
    """Kill one part after another; return how often each was killed."""
    node = cluster.nodes[0]
    count = dict.fromkeys(("governor", "driver", "forkserver", "kubelet", "containerd"), 0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        part = chance.choice(list(count))
        if part in ("kubelet", "containerd"):
            daemon = node.kubelet if part == "kubelet" else node.containerd
            daemon.kill()
            time.sleep(chance.uniform(*AWAY_S))
            daemon.start()
            count[part] += 1
        else:
            for pid in cluster.container_pids(node, part):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    count[part] += 1
        time.sleep(chance.uniform(*PAUSE_S))
    return count


def moment(text: str) -> float:
    """Return the time in a field of an object, in seconds since the epoch."""
    return dt.datetime.fromisoformat(text).timestamp()


def started(document: Document) -> float | None:
    """Return when the first container of a pod started."""
    for status in document["status"].get("containerStatuses") or []:
        for state in (status.get("state") or {}).values():
            # A container that never started has a time in 1970.
            if state.get("startedAt", "1970") > "1971":
                return moment(state["startedAt"])
    return None


def of_pods(cluster: RealCluster, uids: set[str]) -> list[str]:
    """Return the mounts and control groups of pods on the node."""
    node = cluster.nodes[0]
    found = [path for path in node.mounts() if any(uid in path for uid in uids)]
    found += [path for path in node.groups() if any(uid in path for uid in uids)]
    # Mounts of the engine contain the names of its containers. Those of containers that still exist are not leftovers.
    known = set(node.check("ctr", "-n", "k8s.io", "containers", "list", "-q").split())
    for path in node.mounts():
        parts = path.split("/")
        if path.startswith("/run/containerd/io.containerd.") and not known & set(parts):
            found.append(path)
    return found


def test_pods_of_a_job_survive_kills_of_every_daemon(cluster: RealCluster) -> None:
    chance = random.Random(20)  # noqa: S311 - no secret
    node = cluster.nodes[0]
    cluster.claim_template("killed", memory="2Gi", compute=str(100 // SIDE_BY_SIDE))
    each = SECONDS * SIDE_BY_SIDE / COUNT * 0.8
    work = ("/usr/bin/simgpu-workload", "--unit-us", "500", "--seconds", f"{each:.1f}")
    # If the kubelet or containerd dies while a container starts, that start fails, with or without a claim. The kubelet
    # counts this as a failure of the container, which is final under the restart policy Never.
    template = pod(
        "killed", *work, template="killed", labels={"group": "killed"}, restart="OnFailure"
    )
    job: dict[str, Any] = {
        "metadata": {"name": "killed"},
        "spec": {
            "completions": COUNT,
            "parallelism": SIDE_BY_SIDE,
            "backoffLimit": 1000,  # interrupted starts count
            "template": {"metadata": template["metadata"] | {"name": ""}, "spec": template["spec"]},
        },
    }
    watch = Watch(cluster)
    with watch.running():
        cluster.api.create("jobs", job)
        kills = disturb(cluster, SECONDS, chance)

        def status() -> dict[str, Any]:
            found: dict[str, Any] = (cluster.api.get("jobs", "killed") or {})["status"]
            return found

        def over() -> bool:
            now = status()
            assert not now.get("failed"), cluster.pods_text()
            return bool(now.get("succeeded") == COUNT)

        wait_for("the Job to end", over, SECONDS + 600, cluster.pods_text, every=1)
        time.sleep(2)
    print(f"killed: {kills}; starts that failed: {dict(watch.failed_starts)}")
    assert not watch.ended, watch.ended
    assert min(kills.values()) > 0 or SECONDS < 300, kills

    waits = {}
    for name, one in watch.pods.items():
        created, start = moment(one["metadata"]["creationTimestamp"]), watch.starts[name]
        # Both times are in whole seconds.
        waits[name] = (watch.longest(created, start + 1), start - created)
    assert len(waits) == COUNT, sorted(waits)
    worst = sorted(waits.items(), key=lambda item: item[1])[-3:]
    print(f"longest waits (while all parts answered, in total): {worst}")
    late = {name: wait for name, wait in waits.items() if wait[0] > MAX_S}
    assert not late, {name: (late[name], cluster.api.events(name)) for name in late}

    uids = {one["metadata"]["uid"] for one in watch.pods.values()}
    cluster.api.delete("jobs", "killed")
    wait_for("the Job's pods to be gone", lambda: not cluster.api.objects("pods"), 120)
    wait_for("the claims to be gone", lambda: not cluster.api.objects("resourceclaims"), 120)
    wait_for(
        "no file to be left",
        lambda: not cluster.leftovers(node),
        120,
        lambda: str(cluster.leftovers(node)),
    )
    # The kubelet and the engine need some time to clean up containers that ended while they were away.
    wait_for(
        "no mount or group to be left",
        lambda: not of_pods(cluster, uids),
        300,
        lambda: "\n".join(of_pods(cluster, uids)),
    )
    books = cluster.tidegate("ps", "--json")
    assert '"id"' not in books, books


@pytest.fixture(autouse=True)
def _all_up(cluster: RealCluster) -> Iterator[None]:
    """Restart parts that a test left stopped; otherwise all later tests would fail, too."""
    yield
    for node in cluster.nodes:
        for daemon in (node.containerd, node.kubelet):
            if daemon.pid is None:
                daemon.start()
    wait_for("Tidegate to be up again", cluster.is_up, 180, cluster.explain)
