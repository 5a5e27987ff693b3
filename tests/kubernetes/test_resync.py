"""The annotation that makes the kubelet retry a pod at once after it could not prepare the pod's claims, and which pods get it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kube.errors import ClusterError
from kube.resync import ANNOTATION, Resync
from tests.kubernetes.conftest import Stand
from tests.kubernetes.documents import NODE, claim, reference, result
from tests.kubernetes.kubelet import wait_for


def pod_of(
    document: dict[str, Any], *, sandbox: bool | None = False, **more: Any
) -> dict[str, Any]:
    """Return the pod for which a claim is reserved. With `sandbox=None` its status has no condition
    for the sandbox yet.
    """
    (reserved,) = document["status"]["reservedFor"]
    conditions = [] if sandbox is None else [
        {"type": "PodReadyToStartContainers", "status": str(sandbox)}
    ]  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": reserved["name"],
            "namespace": document["metadata"]["namespace"],
            "uid": reserved["uid"],
            **more.pop("metadata", {}),
        },
        "spec": {"nodeName": NODE, "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]},
        "status": {
            "phase": "Pending",
            "conditions": conditions,
            "resourceClaimStatuses": [
                {"name": "gpu", "resourceClaimName": document["metadata"]["name"]}
            ],
            **more,
        },
    }  # fmt: skip


def add(stand: Stand, document: dict[str, Any], **more: Any) -> dict[str, Any]:
    stand.api.add_claim(document)
    pod = pod_of(document, **more)
    stand.api.pods[pod["metadata"]["namespace"], pod["metadata"]["name"]] = pod
    return pod


def annotated(pod: dict[str, Any]) -> bool:
    return ANNOTATION in pod["metadata"].get("annotations", {})


def test_pods_that_waited_for_the_driver_are_annotated(stand: Stand) -> None:
    """The pod `rebooted` is in the state after a reboot of the node: its status is from before the
    reboot, but its sandbox is gone.
    """
    pending = add(stand, claim("pending", "ns", result(0, compute="5")), sandbox=None)
    rebooted = add(stand, claim("rebooted", "ns", result(0, compute="5")), phase="Running")
    running = add(
        stand, claim("running", "ns", result(0, compute="5")), sandbox=True, phase="Running"
    )
    done = add(stand, claim("done", "ns", result(0, compute="5")), phase="Succeeded")
    leaving = add(
        stand,
        claim("leaving", "ns", result(0, compute="5")),
        metadata={"deletionTimestamp": "2026-11-22T00:00:00Z"},
    )
    elsewhere = claim("elsewhere", "ns", {**result(0), "driver": "nic.example.com"})
    others = add(stand, elsewhere)
    stand.up()
    wait_for(lambda: annotated(pending) and annotated(rebooted), "both pods change")
    stand.await_searches()
    assert not any(map(annotated, (running, done, leaving, others)))
    assert pending["metadata"]["annotations"].keys() == {ANNOTATION}


def test_pods_whose_claims_the_kubelet_has_requested_are_left_alone(stand: Stand) -> None:
    document = claim("a", "ns", result(0, compute="5"))
    stand.up()
    pod = add(stand, document, sandbox=None)
    stand.kubelet.prepare(reference(document))
    stand.kubelet.register()  # the driver checks the pods again
    lists = stand.api.counts()["list", "pods"]
    wait_for(lambda: stand.api.counts()["list", "pods"] > lists + 1, "looks")
    assert not annotated(pod)


def test_a_pod_whose_call_has_waited_in_vain_is_annotated(stand: Stand) -> None:
    full, late = claim("full", "ns", result(0, compute="100")), claim("late", "ns", result(0))
    wrong = claim("wrong", "ns", result(0, compute="500"))
    stand.api.add_claim(full)
    stand.up()
    stand.await_searches()
    waiting, refused = add(stand, late), add(stand, wrong)
    stand.kubelet.prepare(reference(full))
    assert stand.kubelet.prepare(reference(wrong), timeout=4)[wrong["metadata"]["uid"]].error
    # The timeout is long enough for a busy machine, too: only a call that has waited causes an
    # annotation.
    assert stand.kubelet.prepare(reference(late), timeout=8)[late["metadata"]["uid"]].error
    (said,) = wait_for(lambda: stand.logged("pod-asked-again"), "it is asked for again")
    assert (said["pod"], said["why"]) == (waiting["metadata"]["name"], "refused")
    assert annotated(waiting)
    # A claim that is wrong would fail in the same way at the next attempt.
    assert not annotated(refused)


def test_a_cancelled_call_annotates_no_pod(stand: Stand) -> None:
    full, gone = claim("full", "ns", result(0, compute="100")), claim("gone", "ns", result(0))
    stand.api.add_claim(full)
    stand.up()
    stand.await_searches()
    pod = add(stand, gone)
    stand.kubelet.prepare(reference(full))
    call = stand.kubelet.begin(reference(gone))
    wait_for(lambda: stand.logged("claim-waits"), "it waits")
    call.cancel()
    with pytest.raises(grpc.FutureCancelledError):
        call.result()
    wait_for(lambda: stand.logged("claim-refused"), "it ends")
    assert not annotated(pod)


# ---- without processes ----


class Api:
    """An API server whose answers the test sets."""

    def __init__(self) -> None:
        self.listed: list[Any] = []
        self.failures: list[ClusterError] = []
        self.found: dict[str, Any] = {}
        self.written: list[tuple[str, str, str]] = []
        self.asked = 0

    def pods(self, _node: str) -> list[Any]:
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)
        return self.listed

    def claim(self, _namespace: str, name: str) -> Any:
        if name not in self.found:
            raise ClusterError("no such claim", hint="-", http=404)
        return self.found[name]

    def annotate_pod(self, namespace: str, name: str, uid: str, *_: str) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.written.append((namespace, name, uid))

    def was_asked(self, _uid: str) -> bool:
        return False


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def resync(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resync]:
    monkeypatch.setattr("kube.resync.SEARCH_DELAYS_S", (0.0,))
    monkeypatch.setattr("kube.resync.AFTER_S", 0.0)
    monkeypatch.setattr("kube.resync.RETRY_S", 0.05)
    made = Resync(api, NODE, api)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_an_api_server_that_fails_is_asked_again(api: Api, resync: Resync) -> None:
    document = claim("a", "ns")
    api.listed, api.found = [pod_of(document)], {"a": document}
    api.failures = [ClusterError("away", hint="-"), ClusterError("away", hint="-", http=503)]
    resync.registered()
    wait_for(lambda: api.written, "written")
    assert (api.asked, len(api.written)) == (3, 1)


def test_pods_of_a_claim_that_could_not_be_read_are_searched_for(api: Api, resync: Resync) -> None:
    document = claim("a", "ns")
    api.listed, api.found = [pod_of(document)], {"a": document}
    resync.refused("ns", None)
    wait_for(lambda: api.written, "written")


def test_a_missing_permission_is_logged_once_and_ends_the_attempts(
    api: Api, resync: Resync, capfd: pytest.CaptureFixture[str]
) -> None:
    api.failures = [ClusterError("forbidden", hint="-", http=403)]
    resync.refused("ns", [{"name": "a", "uid": "u"}, {"name": "b", "uid": "v"}])
    wait_for(lambda: not api.failures, "refused")
    resync.refused("ns", [{"name": "c", "uid": "w"}])
    resync.registered()
    wait_for(lambda: not resync._searches and not resync._pods, "nothing is left")
    assert (api.written, api.asked) == ([], 0)
    assert capfd.readouterr().out.count("pods-not-asked-again") == 1


def test_another_pod_of_the_same_name_is_not_annotated(
    stand: Stand, api: Api, resync: Resync, capfd: pytest.CaptureFixture[str]
) -> None:
    from kube.cluster import Cluster

    pod = add(stand, claim("a", "ns"))
    cluster = Cluster(str(stand.api.kubeconfig))
    with pytest.raises(ClusterError, match=r"metadata\.uid") as caught:
        cluster.annotate_pod("ns", "a-pod", "another", ANNOTATION, "now")
    assert not annotated(pod)
    api.failures = [caught.value]
    resync.refused("ns", [{"name": "a-pod", "uid": "another"}])
    wait_for(lambda: not api.failures, "refused")
    cluster.annotate_pod("ns", "a-pod", pod["metadata"]["uid"], ANNOTATION, "now")
    assert annotated(pod)
    assert "not-asked-again" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "odd",
    [
        {"metadata": {}},
        {"metadata": {"name": "x", "namespace": "ns", "uid": "u"}, "status": {"conditions": [1]}},
        {"metadata": {"name": "x", "namespace": "ns", "uid": "u"}, "status": {"phase": "Pending"}, "spec": {"resourceClaims": "x"}},
    ],
)  # fmt: skip
def test_an_invalid_pod_does_not_stop_the_resync(
    api: Api, resync: Resync, odd: dict[str, Any]
) -> None:
    api.listed = [odd]
    resync.registered()
    wait_for(lambda: api.asked, "asked")
    resync.refused("ns", [{"name": "a", "uid": str(uuid.uuid4())}])
    wait_for(lambda: api.written, "written")
