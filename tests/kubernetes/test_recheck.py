"""The recheck mark of a slice, which makes kube-scheduler retry waiting pods: when it changes, and
how often at most.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kube.cdi import Directory
from kube.cluster import Cluster
from kube.driver import ClaimDriver
from kube.errors import ClusterError
from kube.main import AWAY_S, DriverLoop
from kube.publish import Publisher
from kube.recheck import ANNOTATION, DELAY_S, INTERVAL_S, Recheck, _digest, has_room
from kube.service import Health
from kube.slices import make_slice
from tests.conftest import examples
from tests.kubernetes.apiserver import ApiServer, validate
from tests.kubernetes.conftest import Stand
from tests.kubernetes.documents import NODE, claim, reference, result
from tests.kubernetes.governor import MIB, answer, gpu
from tests.kubernetes.kubelet import wait_for
from tests.kubernetes.test_dra_loop import AnsweringGovernor, StoredSlices

LOOK_S = 2.0


class MarkedNode:
    """The part of a driver's loop that handles the mark, on a virtual clock; counts the updates."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.claims: set[str] = set()
        self.room = True
        self.mark = ""
        self.recheck = Recheck()
        self.updates: list[float] = []

    def look(self) -> bool:
        """Run one round of the loop, and let two seconds pass; return whether the slice was
        updated.
        """
        mark = self.recheck.next_mark(self.claims, self.mark, self.now, room=self.room)
        if mark is not None:
            assert mark != self.mark  # an update without a change causes no event
            self.mark = mark
            self.updates.append(self.now)
            self.recheck.updated(self.claims, self.now)
        self.now += LOOK_S
        return mark is not None

    def pass_time(self, seconds: float) -> int:
        """Run the loop for `seconds` seconds; return how often the slice was updated."""
        return sum(self.look() for _ in range(int(seconds / LOOK_S)))


@pytest.fixture
def node() -> MarkedNode:
    return MarkedNode()


def test_a_burst_of_claims_causes_one_update_soon_after_its_beginning(node: MarkedNode) -> None:
    assert node.pass_time(60) == 0
    begun = node.now
    for number in range(4):
        node.claims.add(f"u-{number}")
        if number % 2:
            node.look()
    node.pass_time(600)
    assert len(node.updates) == 1
    assert DELAY_S <= node.updates[0] - begun < DELAY_S + 2 * LOOK_S


def test_a_claim_that_is_prepared_after_an_update_causes_another(node: MarkedNode) -> None:
    node.claims.add("u-1")
    while not node.look():
        assert node.now < 1060
    node.claims.add("u-2")
    assert node.pass_time(600) == 1
    assert node.updates[1] - node.updates[0] >= INTERVAL_S


def test_a_claim_that_is_prepared_again_causes_an_update_with_a_new_mark(node: MarkedNode) -> None:
    node.claims.add("u-1")
    assert node.pass_time(60) == 1
    node.claims.clear()
    assert node.pass_time(60) == 0
    node.claims.add("u-1")
    assert node.pass_time(60) == 1


def test_claims_that_are_prepared_without_room_cause_no_update_even_later(node: MarkedNode) -> None:
    node.room = False
    node.claims |= {"u-1", "u-2"}
    assert node.pass_time(60) == 0
    node.room = True
    node.claims.remove("u-1")  # the end of a claim makes the scheduler retry pods anyway
    assert node.pass_time(600) == 0


def test_a_slice_that_is_written_for_another_reason_needs_no_update(node: MarkedNode) -> None:
    node.claims.add("u-1")
    node.look()
    node.recheck.updated(node.claims, node.now)
    assert node.pass_time(600) == 0


def test_a_new_driver_continues_where_the_previous_one_ended(node: MarkedNode) -> None:
    node.claims |= {"u-1", "u-2"}
    assert node.pass_time(60) == 1
    node.recheck = Recheck()
    assert node.pass_time(600) == 0
    node.claims.add("u-3")
    node.look()
    node.recheck = Recheck()  # the driver ended before the update
    assert node.pass_time(600) == 1


def test_a_driver_that_leads_again_uses_the_other_drivers_mark(node: MarkedNode) -> None:
    other = MarkedNode()
    node.claims.add("u-1")
    assert node.pass_time(60) == 1
    other.mark, other.claims = node.mark, {"u-1", "u-2"}
    assert other.pass_time(60) == 1
    node.mark, node.claims = other.mark, other.claims
    node.recheck.forget()
    assert node.pass_time(600) == 0


@pytest.mark.parametrize("mark", ["", "x", "7", "-1-0", "7-", "9" * 200, "7-" + "g" * 16])
def test_a_mark_that_was_written_by_hand_is_replaced(node: MarkedNode, mark: str) -> None:
    node.mark = mark
    node.claims.add("u-1")
    assert node.pass_time(60) == 1
    assert node.mark.startswith("1-")
    assert node.pass_time(600) == 0


@settings(max_examples=examples(100), deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "remove", "room", "full", "restart"]), st.integers(0, 3)),
        max_size=60,
    )
)
def test_updates_are_bounded_for_any_sequence_of_events(steps: list[tuple[str, int]]) -> None:
    """At most one update in six seconds of a driver's life, and at most one for each prepared claim and each restart."""
    node, prepared, started = MarkedNode(), 0, 0.0
    for what, number in steps:
        uid = f"u-{number}"
        match what:
            case "add":
                prepared += uid not in node.claims
                node.claims.add(uid)
            case "remove":
                node.claims.discard(uid)
            case "restart":
                prepared += 1
                node.recheck, started = Recheck(), node.now
            case _:
                node.room = what == "room"
        before = len(node.updates)
        if node.look() and before:
            last = max(node.updates[-2], started - INTERVAL_S)
            assert node.updates[-1] - last >= INTERVAL_S
            assert node.room
    assert len(node.updates) <= prepared
    node.room = True
    node.pass_time(60)
    assert node.pass_time(600) == 0


@pytest.mark.parametrize(
    ("more", "room"),
    [
        ({}, True),
        ({"compute_left": 1, "memory_left": 520 * MIB}, True),
        ({"compute_left": 0}, False),
        ({"memory_left": 519 * MIB}, False),
    ],
)
def test_a_gpu_has_room_if_the_smallest_share_fits(more: dict[str, int], *, room: bool) -> None:
    full = gpu(1, compute_left=0)
    assert has_room(answer(full, gpu(0, **more)), ()) is room
    assert not has_room(answer(full, gpu(0, **more)), {gpu(0)["uuid"]})
    assert not has_room(answer(), ())


@pytest.fixture
def api(tmp_path: Path) -> Any:
    server = ApiServer(tmp_path, NODE)
    yield server
    server.close()
    assert server.misfits == []


def wanted(mark: str | None = None, *gpus: dict[str, Any]) -> dict[str, Any]:
    """Return the slice of a node, with a mark."""
    made = make_slice(NODE, "u", answer(*(gpus or (gpu(0),))), {})
    if mark is not None:
        made["metadata"]["annotations"] = {ANNOTATION: mark}
        validate(made)
    return made


def stored_mark(api: ApiServer) -> str | None:
    stored = api.slice_of()
    assert stored is not None
    mark: str | None = (stored["metadata"].get("annotations") or {}).get(ANNOTATION)
    return mark


def test_a_mark_changes_nothing_else_in_the_slice(api: ApiServer) -> None:
    publisher = Publisher(Cluster(str(api.kubeconfig)), interval=0.0)
    assert publisher.publish(wanted())
    before = api.slice_of()
    assert before is not None
    assert publisher.publish(wanted("1-a"))
    assert not publisher.publish(wanted("1-a"))
    assert not publisher.publish(wanted())
    after = api.slice_of()
    assert after is not None
    assert after["spec"] == before["spec"]
    assert after["metadata"].pop("annotations") == {ANNOTATION: "1-a"}
    for one in (before, after):
        del one["metadata"]["resourceVersion"]
    assert after["metadata"] == before["metadata"]


def test_a_slice_that_changes_keeps_its_mark(api: ApiServer) -> None:
    publisher = Publisher(Cluster(str(api.kubeconfig)), interval=0.0)
    publisher.publish(wanted("3-a"))
    assert publisher.publish(wanted(None, gpu(0), gpu(1)))
    assert (stored_mark(api), publisher.mark) == ("3-a", "3-a")
    assert publisher.publish(wanted("4-a", gpu(0)))
    assert stored_mark(api) == "4-a"
    another = Publisher(Cluster(str(api.kubeconfig)), interval=0.0)
    assert not another.publish(wanted())
    assert another.mark == "4-a"


def test_a_mark_waits_with_other_changes_for_the_next_write(api: ApiServer) -> None:
    now = [1000.0]
    publisher = Publisher(Cluster(str(api.kubeconfig)), interval=6.0, clock=lambda: now[0])
    publisher.publish(wanted())
    assert not publisher.publish(wanted("1-a"))
    now[0] += 6
    assert publisher.publish(wanted("1-a"))


def test_a_conflicting_update_is_repeated_on_the_stored_slice(api: ApiServer) -> None:
    """Neither the other writer's annotation nor the mark is lost."""
    publisher = Publisher(Cluster(str(api.kubeconfig)), interval=0.0)
    publisher.publish(wanted())

    def change(verb: str, resource: str) -> None:
        if (verb, resource) == ("update", "resourceslices"):
            with api.lock:
                metadata = api.slices[f"{NODE}-tidegate.gpu"]["metadata"]
                metadata["resourceVersion"] = "7000"
                metadata["annotations"] = {"example.com/note": "theirs"}

    api.before = change
    with pytest.raises(ClusterError) as caught:
        publisher.publish(wanted("1-a"))
    assert caught.value.http == 409
    assert not publisher.current
    api.before = lambda _verb, _resource: None
    assert publisher.publish(wanted("1-a"))
    stored = api.slice_of()
    assert stored is not None
    assert stored["metadata"]["annotations"] == {"example.com/note": "theirs", ANNOTATION: "1-a"}


@pytest.mark.slow
def test_a_driver_that_is_killed_marks_the_slice_as_often_as_one_that_is_not(stand: Stand) -> None:
    documents = [claim(f"c{i}", "ns", result(0, compute="20")) for i in range(5)]
    for document in documents:
        stand.api.add_claim(document)
    stand.up()
    assert stored_mark(stand.api) is None
    for document in documents[:3]:
        stand.kubelet.prepare(reference(document))
    mark = _wait_mark(stand, documents[:3])
    updates = stand.api.counts()["update", "resourceslices"]
    assert 1 <= updates <= 3
    stand.kill()
    stand.ready.unlink()
    stand.up()
    _wait_looks(stand)
    assert stored_mark(stand.api) == mark
    assert stand.api.counts()["update", "resourceslices"] == updates
    for one in stand.governor.gpus:
        one["compute_left"] = 0
    stand.kubelet.prepare(reference(documents[3]))
    _wait_looks(stand)
    assert stored_mark(stand.api) == mark
    stand.kill()  # the next driver does not know the changes that the previous one did not publish
    stand.governor.gpus[0]["compute_left"] = 20
    stand.ready.unlink()
    stand.up()
    _wait_mark(stand, documents[:4])
    stand.kubelet.prepare(reference(documents[4]))
    _wait_mark(stand, documents)
    assert stand.api.counts()["update", "resourceslices"] == updates + 2
    assert stand.kill(signal.SIGTERM) == 0


def _wait_mark(stand: Stand, documents: list[dict[str, Any]]) -> str:
    """Wait until the slice's mark is that of these claims; return the mark."""
    digest = _digest(document["metadata"]["uid"] for document in documents)

    def found() -> str | None:
        mark = stored_mark(stand.api)
        return mark if mark is not None and mark.endswith(f"-{digest}") else None

    return str(wait_for(found, f"the mark of {len(documents)} claims"))


def _wait_looks(stand: Stand) -> None:
    """Wait for more rounds of a driver's loop than it can defer an update."""
    looks = stand.governor.count("gpus")
    wait_for(lambda: stand.governor.count("gpus") >= looks + 8, "some rounds")


def test_the_loop_marks_the_slice_while_a_gpu_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop takes claims, room and taints into account."""
    loop, slices, governor, pass_time = _loop(tmp_path, monkeypatch)
    loop.step()
    governor.booked["u-1"] = {"uid": "u-1", "namespace": "ns", "name": "c", "shares": []}
    pass_time(60)
    assert slices.writes == 2
    first = slices.stored["metadata"]["annotations"][ANNOTATION]
    governor.gpus = lambda: answer(gpu(0, compute_left=0), gpu(1, closed="it starts"))
    governor.booked["u-2"] = {**governor.booked["u-1"], "uid": "u-2"}
    pass_time(60)
    assert slices.writes == 3  # for the taint
    assert slices.stored["metadata"]["annotations"][ANNOTATION] == first


def test_the_loop_does_not_mark_the_slice_while_the_governor_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last answer may show room, but no claim could be prepared."""
    loop, slices, governor, pass_time = _loop(tmp_path, monkeypatch)
    loop.step()
    governor.booked["u-1"] = {"uid": "u-1", "namespace": "ns", "name": "c", "shares": []}
    pass_time(LOOK_S)
    governor.away = True
    pass_time(AWAY_S - 2 * LOOK_S)  # until the GPUs get a taint
    assert slices.writes == 1
    assert ANNOTATION not in (slices.stored["metadata"].get("annotations") or {})


def _loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any, Any, Callable[[float], None]]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    slices, governor = StoredSlices(), AnsweringGovernor()
    args = argparse.Namespace(
        node_name=NODE,
        default_memory=None,
        default_compute=None,
        kubelet_dir="/var/lib/kubelet",
        instance="",
    )
    driver = ClaimDriver(NODE, governor, slices, Directory(tmp_path))  # type: ignore[arg-type]
    monkeypatch.setattr(driver, "reconcile", lambda: None)
    publisher = Publisher(slices, interval=6.0, clock=lambda: now[0])
    loop = DriverLoop(
        args, cluster=slices, node=governor, driver=driver, publisher=publisher, health=Health(NODE)
    )  # type: ignore[arg-type]
    loop.registered()

    def pass_time(seconds: float) -> None:
        for _ in range(int(seconds / LOOK_S)):
            now[0] += LOOK_S
            loop.step()

    return loop, slices, governor, pass_time
