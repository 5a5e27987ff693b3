"""The driver's loop on a virtual clock, with a step every two seconds; and the service, with arbitrary requests."""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from governor.errors import GovernorError, RefusedError
from kube.api import dra_v1_pb2, dra_v1_pb2_grpc
from kube.cdi import Directory
from kube.claims import Reference
from kube.driver import ClaimDriver
from kube.errors import ClusterError, GateError
from kube.main import AWAY_S, Backoff, DriverLoop
from kube.publish import Publisher, Watcher
from kube.service import REFUSED_S, DraPlugin, Endpoints, Health
from kube.slices import make_slice
from tests.conftest import examples
from tests.kubernetes.documents import NODE, claim, reference, result
from tests.kubernetes.governor import answer, gpu
from tests.kubernetes.kubelet import Kubelet


class StoredSlices:
    """The slices of an API server, without the network."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] | None = None
        self.writes = 0
        self.failure: Exception | None = None

    def node(self, _name: str) -> dict[str, Any]:
        return {"metadata": {"uid": "u"}}

    def slice(self, _name: str) -> dict[str, Any] | None:
        if self.failure:
            raise self.failure
        return self.stored

    def create_slice(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        return self.replace_slice(body, dry_run=dry_run)

    def replace_slice(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        made = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.writes)}}
        if not dry_run:
            self.writes += 1
            self.stored = made
        return made

    def delete_slice(self, _name: str) -> None:
        self.stored = None


class AnsweringGovernor:
    """A governor that answers, unless the test sets `away`."""

    def __init__(self) -> None:
        self.away = False
        self.booked: dict[str, Any] = {}

    def gpus(self) -> dict[str, Any]:
        if self.away:
            raise GovernorError("the governor does not answer", hint="start it")
        return answer(gpu(0), gpu(1))

    def containers(self) -> list[dict[str, Any]]:
        return []

    def claims(self) -> list[dict[str, Any]]:
        self.gpus()
        return list(self.booked.values())

    def claim(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        if sum(share["compute"] for share in asked["shares"]) > 100:
            raise RefusedError(
                f"claim {asked['namespace']}/{asked['name']} asks for too much", hint="ask for less"
            )
        self.booked[asked["uid"]] = asked
        return [{"uuid": share["device"], "minor": None} for share in asked["shares"]]

    def unclaim(self, uid: str) -> None:
        self.booked.pop(uid, None)


def test_the_delay_grows_with_each_failure() -> None:
    backoff = Backoff()
    waits = [backoff.failed(0.0) for _ in range(12)]
    assert 0.5 <= waits[0] <= 1.0
    assert 30 <= waits[-1] <= 60
    assert not backoff.over(29)
    assert backoff.over(61)
    backoff.answered()
    assert backoff.over(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def parts(
    clock: list[float], tmp_path: Path
) -> tuple[DriverLoop, StoredSlices, AnsweringGovernor, Publisher]:
    slices, governor = StoredSlices(), AnsweringGovernor()
    publisher = Publisher(slices, interval=6.0, clock=lambda: clock[0])
    args = argparse.Namespace(
        node_name=NODE,
        default_memory=None,
        default_compute=None,
        kubelet_dir="/var/lib/kubelet",
        instance="",
    )
    driver = ClaimDriver(NODE, governor, slices, Directory(tmp_path))  # type: ignore[arg-type]
    loop = DriverLoop(
        args, cluster=slices, node=governor, driver=driver, publisher=publisher, health=Health(NODE)
    )  # type: ignore[arg-type]
    loop.registered()
    return loop, slices, governor, publisher


def taints(slices: StoredSlices) -> set[tuple[str, str]]:
    assert slices.stored is not None
    return {
        (t["key"], t["value"])
        for d in slices.stored["spec"]["devices"]
        for t in d.get("taints", ())
    }


def test_a_governor_that_stays_away_keeps_new_pods_away(
    parts: tuple[DriverLoop, StoredSlices, AnsweringGovernor, Publisher], clock: list[float]
) -> None:
    """A restart of the governor has no effect. If it is away for a minute, its GPUs accept no new pods until it is back."""
    loop, slices, governor, _ = parts
    loop.step()
    assert slices.writes == 1
    governor.away = True
    for _ in range(int(AWAY_S / 2) - 1):
        clock[0] += 2
        loop.step()
    assert (slices.writes, taints(slices)) == (1, set())
    clock[0] += 6
    loop.step()
    assert (slices.writes, taints(slices)) == (2, {("tidegate.gpu/closed", "governor-away")})
    governor.away = False
    for _ in range(20):
        clock[0] += 2
        loop.step()
    assert (slices.writes, taints(slices)) == (3, set())


def test_nothing_is_offered_before_a_kubelet_has_registered_the_driver(
    clock: list[float], tmp_path: Path
) -> None:
    """A pod never starts on a node where the kubelet does not know the driver."""
    slices, governor = StoredSlices(), AnsweringGovernor()
    publisher = Publisher(slices, interval=6.0, clock=lambda: clock[0])
    args = argparse.Namespace(
        node_name=NODE,
        default_memory=None,
        default_compute=None,
        kubelet_dir="/srv/kubelet",
        instance="",
    )
    driver = ClaimDriver(NODE, governor, slices, Directory(tmp_path))  # type: ignore[arg-type]
    loop = DriverLoop(
        args, cluster=slices, node=governor, driver=driver, publisher=publisher, health=Health(NODE)
    )  # type: ignore[arg-type]
    with capture_logs() as logs:
        for _ in range(50):
            loop.step()
            clock[0] += 2
    assert slices.writes == 0
    assert not publisher.current
    warnings = [one for one in logs if one["event"] == "no-kubelet"]
    assert [one["message"].split(";")[0] for one in warnings] == [
        f"no kubelet has registered this driver for {seconds} s" for seconds in (20, 40, 80)
    ]
    assert "/srv/kubelet/plugins_registry/tidegate.gpu-reg.sock" in warnings[0]["message"]
    assert "--kubelet-dir" in warnings[0]["hint"]
    loop.registered()
    loop.step()
    assert slices.writes == 1


def test_no_gpus_are_offered_if_the_kubelet_refuses_the_driver(
    parts: tuple[DriverLoop, StoredSlices, AnsweringGovernor, Publisher], clock: list[float]
) -> None:
    """The kubelet deletes the slice. If the driver created it again, pods would be scheduled to a node on which none starts."""
    loop, slices, _, publisher = parts
    loop.step()
    assert publisher.current
    loop.registered(False)
    slices.stored = None
    with capture_logs() as logs:
        for _ in range(12):
            clock[0] += 2
            loop.step()
    assert slices.stored is None
    assert not publisher.current
    assert [one["event"] for one in logs].count("no-kubelet") == 1
    loop.registered(True)
    loop.step()
    assert slices.stored is not None


def test_a_kubelet_that_refuses_is_asked_again(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet never retries a socket that it could not register, but it registers a new one."""
    base = tmp_path_factory.mktemp("k")
    told: list[bool] = []
    driver = ClaimDriver(NODE, AnsweringGovernor(), Documents(), Directory(base / "cdi"))
    endpoints = Endpoints(base / "kubelet", driver, Health(NODE), told.append)
    endpoints.start()
    path = base / "kubelet/plugins_registry/tidegate.gpu-reg.sock"
    kubelet = Kubelet(base / "kubelet")
    try:
        kubelet.register(accept=False)
        first = path.stat().st_ctime_ns
        refused_at = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr("kube.service.time", SimpleNamespace(monotonic=lambda: refused_at))
            endpoints.poll()
            assert path.stat().st_ctime_ns == first
            refused_at += REFUSED_S
            endpoints.poll()
        assert path.stat().st_ctime_ns != first
        second = path.stat().st_ctime_ns
        kubelet.register()
        time.sleep(0.3)
        endpoints.poll()
        assert path.stat().st_ctime_ns == second
        assert told == [False, True]
    finally:
        kubelet.close()
        endpoints.stop(0)


def test_failures_of_the_governor_do_not_delay_requests_to_the_api_server(
    parts: tuple[DriverLoop, StoredSlices, AnsweringGovernor, Publisher], clock: list[float]
) -> None:
    loop, slices, governor, publisher = parts
    governor.away = True
    for _ in range(60):
        clock[0] += 2
        loop.step()
    governor.away = False
    loop.step()
    assert slices.writes == 1
    assert publisher.current
    slices.failure = ClusterError("no answer", hint="wait", http=0)
    loop.registered()
    loop.step()
    assert not publisher.current
    slices.failure = None
    clock[0] += 61
    loop.step()
    assert publisher.current


def test_changes_are_written_together_not_one_by_one(clock: list[float]) -> None:
    slices = StoredSlices()
    publisher = Publisher(slices, interval=6.0, clock=lambda: clock[0])
    for left in range(100):
        publisher.publish(make_slice(NODE, "u", answer(gpu(0, memory=(left + 1000) << 20)), {}))
        clock[0] += 1
    assert slices.writes == 17
    assert slices.stored is not None
    assert slices.stored["spec"]["pool"]["generation"] == 17


def test_a_damaged_slice_is_repaired_or_deleted(clock: list[float]) -> None:
    slices = StoredSlices()
    publisher = Publisher(slices, clock=lambda: clock[0])
    wanted = make_slice(NODE, "u", answer(gpu(0)), {})
    assert publisher.publish(wanted)
    assert not publisher.publish(wanted)
    assert slices.stored is not None
    slices.stored["spec"] = {**slices.stored["spec"], "devices": []}
    publisher.forget()
    assert publisher.publish(wanted)
    del slices.stored["spec"]["devices"][0]["allowMultipleAllocations"]
    publisher.forget()
    with pytest.raises(GateError):
        publisher.publish(make_slice(NODE, "u", answer(gpu(0)), {}))
    assert slices.stored is None


GARBAGE: list[Any] = [
    [], {}, {"spec": "x"}, {"spec": {"devices": "abc"}}, {"spec": {"devices": [1]}}, {"spec": {"pool": "x"}},
    {"metadata": {"ownerReferences": [1]}}, {"metadata": {"resourceVersion": "1"}, "spec": {"pool": {"generation": "x"}}},
    {"spec": {"devices": [{"capacity": "x"}]}},
]  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_invalid_answer_does_not_stop_the_loop(
    parts: tuple[DriverLoop, StoredSlices, AnsweringGovernor, Publisher],
    clock: list[float],
    garbage: Any,
) -> None:
    """The driver asks again later, as if no answer had arrived. After a valid answer it continues normally."""
    loop, slices, _, publisher = parts
    slices.stored = garbage
    for _ in range(5):
        loop.step()
    slices.stored = None
    clock[0] += 61
    loop.registered()
    loop.step()
    assert publisher.current
    assert taints(slices) == set()


def test_a_node_without_a_uid_owns_no_slice(
    parts: tuple[DriverLoop, StoredSlices, AnsweringGovernor, Publisher],
) -> None:
    """The garbage collector would delete an object with an owner that does not exist."""
    loop, slices, _, _ = parts
    slices.node = lambda _name: {"metadata": {}}  # type: ignore[method-assign]
    loop.step()
    assert slices.stored is None


def test_a_recreated_node_owns_its_slice(
    parts: tuple[DriverLoop, StoredSlices, AnsweringGovernor, Publisher], clock: list[float]
) -> None:
    """The slice is deleted with the old node. With that node's uid, a new slice would be deleted again and again."""
    loop, slices, _, publisher = parts
    loop.step()
    asked = []

    def node(name: str) -> dict[str, Any]:
        asked.append(name)
        return {"metadata": {"uid": "another"}}

    slices.node = node  # type: ignore[method-assign]
    clock[0] += 10
    loop.step()
    assert asked == []
    slices.stored = None
    publisher.forget()  # as the watcher does after the deletion
    for _ in range(3):
        clock[0] += 10
        loop.step()
    assert slices.stored is not None
    assert [one["uid"] for one in slices.stored["metadata"]["ownerReferences"]] == ["another"]
    assert asked == [NODE]


class DeliveredWatches:
    """Watches that deliver the test's events, one list after the other."""

    def __init__(self, *watches: list[Any]) -> None:
        self.watches = list(watches)
        self.told = 0

    def watch_slice(self, _name: str, _version: str, _seconds: int) -> Any:
        for event in self.watches.pop(0) if self.watches else []:
            self.told += 1
            yield event


@pytest.mark.parametrize("event", [[1], "x", 5, {"object": "x"}, {"object": {"metadata": [1]}}])
def test_an_invalid_event_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, event: Any
) -> None:
    publisher, wake = Publisher(StoredSlices()), threading.Event()
    publisher.version = "7"
    good = {"type": "DELETED", "object": {"metadata": {"resourceVersion": "8"}}}
    cluster = DeliveredWatches([event], [good])
    watcher = Watcher(cluster, publisher, "n", wake)
    monkeypatch.setattr(watcher._stop, "wait", lambda _s: cluster.watches or watcher.stop())
    thread = threading.Thread(target=watcher.run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert cluster.told == 2


def test_the_driver_recognises_the_events_of_its_own_writes() -> None:
    """The event of a write may arrive before the answer, or after the next write."""
    slices, wake = StoredSlices(), threading.Event()
    publisher = Publisher(slices, interval=0.0)
    watcher = Watcher(DeliveredWatches(), publisher, "n", wake)
    write, events = slices.replace_slice, list[threading.Thread]()

    def tell_first(body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        stored = write(body, dry_run=dry_run)
        if not dry_run:
            events.append(
                threading.Thread(
                    target=watcher._look, args=({"type": "MODIFIED", "object": stored},)
                )
            )
            events[-1].start()
            time.sleep(0.1)
        return stored

    slices.replace_slice = tell_first  # type: ignore[method-assign]
    with capture_logs() as logs:
        for left in range(3):
            publisher.publish(make_slice(NODE, "u", answer(gpu(0, memory=(left + 1000) << 20)), {}))
        for event in events:
            event.join(10)
        assert slices.writes == 3
        late = {"type": "MODIFIED", "object": {"metadata": {"resourceVersion": "0"}}}
        assert not watcher._look(late)
        assert not wake.is_set()
        foreign = {"type": "MODIFIED", "object": {"metadata": {"resourceVersion": "77"}}}
        assert watcher._look(foreign)
    assert [one["event"] for one in logs].count("slice-changed-by-others") == 1


def test_a_competing_writer_is_answered_once_a_second() -> None:
    publisher, wake = Publisher(StoredSlices()), threading.Event()
    publisher.version = "7"
    cluster = DeliveredWatches(
        [{"type": "MODIFIED", "object": {"metadata": {"resourceVersion": "8"}}}] * 1000
    )
    watcher = Watcher(cluster, publisher, "n", wake)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    assert wake.wait(10)
    time.sleep(0.3)
    assert cluster.told <= 2
    watcher.stop()
    thread.join(10)
    assert not thread.is_alive()


class Documents:
    """Claims by name, or whatever the test sets."""

    def __init__(self) -> None:
        self.found: Any = None

    def claim(self, _namespace: str, _name: str) -> Any:
        if self.found is None:
            raise ClusterError(
                "claim: the API server answered with status 404", hint="gone", http=404
            )
        return self.found


def test_a_claim_is_not_taken_back_while_it_is_prepared(tmp_path: Path) -> None:
    """Otherwise the file would be written after the governor has released the claim, and would remain."""
    governor, documents = AnsweringGovernor(), Documents()
    documents.found = claim("a", "b", result(), uid="u-1")
    driver = ClaimDriver(NODE, governor, documents, Directory(tmp_path))
    named = Reference("b", "a", "u-1")
    booked, go_on = threading.Event(), threading.Event()
    book = governor.claim

    def slowly(asked: dict[str, Any]) -> list[dict[str, Any]]:
        shares = book(asked)
        booked.set()
        assert go_on.wait(10)
        return shares

    governor.claim = slowly  # type: ignore[method-assign]
    preparing = threading.Thread(target=driver.prepare, args=(named,))
    preparing.start()
    assert booked.wait(10)
    taking = threading.Thread(target=driver.unprepare, args=(named,))
    taking.start()
    taking.join(0.3)
    assert taking.is_alive()
    go_on.set()
    preparing.join(10)
    taking.join(10)
    assert governor.booked == {}
    assert list(tmp_path.iterdir()) == []


class FailingClaims:
    """Claims by name, with failures for some of them; counts the requests."""

    def __init__(self, *documents: dict[str, Any]) -> None:
        self.found = {reference(one)[1]: one for one in documents}
        self.failures: dict[str, ClusterError] = {}
        self.asked = 0

    def claim(self, _namespace: str, name: str) -> Any:
        self.asked += 1
        if name in self.failures:
            raise self.failures[name]
        if name not in self.found:
            raise ClusterError(
                "claim: the API server answered with status 404", hint="gone", http=404
            )
        return self.found[name]


def test_claims_that_differ_from_what_the_kubelet_was_told_are_restored(tmp_path: Path) -> None:
    names = ("as-it-was", "forgotten", "without-file", "moved", "leaving", "failing", "refused")
    documents = {name: claim(name, "ns", result(0, compute="5"), uid=f"u-{name}") for name in names}
    governor, cluster = AnsweringGovernor(), FailingClaims(*documents.values())
    directory = Directory(tmp_path)
    driver = ClaimDriver(NODE, governor, cluster, directory)
    for document in documents.values():
        driver.prepare(Reference(*reference(document)))
    assert not driver.differs()
    del governor.booked["u-forgotten"], governor.booked["u-refused"]
    directory.remove("u-without-file")
    # The first allocation of this claim has ended, and the kubelet no longer knows of it.
    documents["moved"]["status"]["allocation"]["devices"]["results"][0]["pool"] = "node-2"
    governor.booked["u-leaving"] = {**governor.booked["u-leaving"], "leaving": True}
    driver._prepared.pop("u-leaving")
    cluster.failures["failing"] = ClusterError("a mistake", hint="wait", http=500)
    documents["refused"]["status"]["allocation"]["devices"]["results"][0]["device"] = "gpu-gone"
    assert driver.differs()
    with pytest.raises(ClusterError, match="a mistake"):
        driver.reconcile()
    assert set(governor.booked) == {
        "u-as-it-was", "u-forgotten", "u-without-file", "u-failing", "u-leaving",
    }  # fmt: skip
    assert governor.booked["u-leaving"]["leaving"]
    assert directory.uids() == {
        "u-as-it-was", "u-forgotten", "u-without-file", "u-failing", "u-refused",
    }  # fmt: skip
    # Claims that were refused, or whose requests fail, are not requested again every two seconds.
    assert not driver.differs()


def test_a_driver_that_starts_asks_once_for_each_claim_that_the_governor_knows(
    tmp_path: Path,
) -> None:
    """A claim that can no longer be prepared stays as it is, and is not requested repeatedly."""
    documents = [claim(f"c{i}", "ns", result(0, compute="5"), uid=f"u-{i}") for i in range(3)]
    governor, cluster = AnsweringGovernor(), FailingClaims(*documents)
    for document in documents:
        ClaimDriver(NODE, governor, cluster, Directory(tmp_path)).prepare(
            Reference(*reference(document))
        )
    documents[1]["status"]["allocation"]["devices"]["results"][0]["device"] = "gpu-gone"
    cluster.asked = 0
    driver = ClaimDriver(NODE, governor, cluster, Directory(tmp_path))
    for _ in range(3):
        if driver.differs():
            driver.reconcile()
    assert cluster.asked == 3
    assert len(governor.booked) == 3


class KubeletCall:
    """A call of the kubelet; with `active = False` the kubelet has given it up."""

    def __init__(self) -> None:
        self.active = True

    def is_active(self) -> bool:
        return self.active

    def time_remaining(self) -> float | None:
        return 30.0 if self.active else 0.0

    def add_callback(self, _tell: Any) -> bool:
        return True


@pytest.mark.parametrize("op", ["Prepare", "Unprepare"])
def test_a_call_that_the_kubelet_has_given_up_changes_nothing(tmp_path: Path, op: str) -> None:
    """While the call waits for its turn, the kubelet may request the opposite, and that request may be served first."""
    governor, documents = AnsweringGovernor(), Documents()
    documents.found = claim("a", "b", result(), uid="u-1")
    driver = ClaimDriver(NODE, governor, documents, Directory(tmp_path))
    if op == "Unprepare":
        driver.prepare(Reference("b", "a", "u-1"))
    before = dict(governor.booked), sorted(tmp_path.iterdir())
    call, plugin = KubeletCall(), DraPlugin(driver, dra_v1_pb2)
    request = getattr(dra_v1_pb2, f"Node{op}ResourcesRequest")(
        claims=[dra_v1_pb2.Claim(namespace="b", name="a", uid="u-1")]
    )
    answers: list[Any] = []
    serve = getattr(plugin, f"Node{op}Resources")
    thread = threading.Thread(target=lambda: answers.append(serve(request, call)))
    with driver._alone("u-1"):
        thread.start()
        until = time.monotonic() + 10
        while driver._locks["u-1"][1] < 2:
            assert time.monotonic() < until
        call.active = False
    thread.join(10)
    assert "run out of time" in answers[0].claims["u-1"].error
    assert (dict(governor.booked), sorted(tmp_path.iterdir())) == before


_words = st.text(max_size=40)
_quantity = st.sampled_from(["8Gi", "30", "0", "-1", "1e30", "x", "100", "99"]) | _words
_results = st.lists(
    st.builds(
        result, st.integers(0, 3), st.sampled_from(["gpu", "a/b", "A", ""]), _quantity, _quantity
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("k")
    governor, documents = AnsweringGovernor(), Documents()
    driver = ClaimDriver(NODE, governor, documents, Directory(base / "cdi"))
    endpoints = Endpoints(base / "kubelet", driver, Health(NODE), lambda _accepted: None)
    endpoints.start()
    with grpc.insecure_channel(f"unix:{base}/kubelet/plugins/tidegate.gpu/dra.sock") as channel:
        yield governor, documents, base / "cdi", channel
    endpoints.stop(0)


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    claims=st.lists(
        st.tuples(_words, _words, _words | st.sampled_from(["u-1", "u-2"])), max_size=4
    ),
    results=_results,
    there=st.booleans(),
)
def test_any_call_has_an_answer_for_each_claim(
    served: Any, claims: list[tuple[str, str, str]], results: list[dict], *, there: bool
) -> None:
    """For any names and uids, each claim has an answer, an error is one line, no file is written
    elsewhere, and no claim is partly prepared.
    """
    governor, documents, directory, channel = served
    stub = dra_v1_pb2_grpc.DRAPluginStub(channel)
    named = [dra_v1_pb2.Claim(namespace=n, name=m, uid=u) for n, m, u in claims]
    uid = claims[0][2] if claims else ""
    documents.found = claim("a", "b", *results, uid=uid) if there else None
    prepared = stub.NodePrepareResources(
        dra_v1_pb2.NodePrepareResourcesRequest(claims=named), timeout=20
    ).claims
    assert set(prepared) == {one.uid for one in named}
    good = {uid for uid, one in prepared.items() if not one.error}
    assert all("\n" not in one.error and (one.error or one.devices) for one in prepared.values())
    assert not any("a mistake of the driver" in one.error for one in prepared.values())
    assert set(governor.booked) == good
    assert {path.name for path in directory.glob("*")} == {
        f"tidegate.gpu-claim_{uid}.json" for uid in good
    }
    taken = stub.NodeUnprepareResources(
        dra_v1_pb2.NodeUnprepareResourcesRequest(claims=named), timeout=20
    ).claims
    assert set(taken) == set(prepared)
    assert governor.booked == {}
    assert not list(directory.glob("*"))


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.binary(max_size=200))
def test_an_invalid_message_fails_only_its_own_call(served: Any, data: bytes) -> None:
    governor, documents, _, channel = served
    documents.found = None
    for method in ("NodePrepareResources", "NodeUnprepareResources"):
        call = channel.unary_unary(f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{method}")
        try:
            call(data, timeout=20)
        except grpc.RpcError as e:
            assert e.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)  # noqa: PT017
    documents.found = claim("a", "b", result(), uid="u-1")
    request = dra_v1_pb2.NodePrepareResourcesRequest(
        claims=[dra_v1_pb2.Claim(namespace="b", name="a", uid="u-1")]
    )
    assert (
        dra_v1_pb2_grpc.DRAPluginStub(channel)
        .NodePrepareResources(request, timeout=20)
        .claims["u-1"]
        .error
        == ""
    )
    governor.booked.clear()
    Directory(served[2]).remove("u-1")


def test_uids_cannot_name_other_paths(served: Any) -> None:
    _, documents, _, channel = served
    document = claim("a", "b", result(), uid="../../../etc/cdi/x")
    documents.found = document
    stub = dra_v1_pb2_grpc.DRAPluginStub(channel)
    namespace, name, uid = reference(document)
    request = dra_v1_pb2.NodePrepareResourcesRequest(
        claims=[dra_v1_pb2.Claim(namespace=namespace, name=name, uid=uid)]
    )
    assert "which is not valid" in stub.NodePrepareResources(request, timeout=20).claims[uid].error
    request = dra_v1_pb2.NodeUnprepareResourcesRequest(
        claims=[dra_v1_pb2.Claim(namespace=namespace, name=name, uid=uid)]
    )
    assert (
        "which is not valid" in stub.NodeUnprepareResources(request, timeout=20).claims[uid].error
    )
