"""The driver is killed between any two steps: no claim is allocated twice or lost, and no file
without a claim remains.

strace kills the driver at one of its system calls; the stand-ins kill it while it waits for their
answers.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import grpc
import pytest

from tests.kubernetes.conftest import Stand
from tests.kubernetes.documents import claim, reference, result
from tests.kubernetes.kubelet import wait_for


def assert_prepared_once(stand: Stand, document: dict) -> None:
    """Start the driver again, as the DaemonSet does, and prepare the claim again: the result is the same
    as if the driver had not been killed.
    """
    if stand.process is not None:
        stand.kill()
    stand.start()
    stand.kubelet.register()
    uid = document["metadata"]["uid"]
    assert wait_for(lambda: stand.kubelet.prepare(reference(document))[uid].error == "", "prepared")
    assert list(stand.governor.claims) == [uid]
    assert stand.governor.changes == 1
    assert stand.files() == [f"tidegate.gpu-claim_{uid}.json"]


def assert_taken_back(stand: Stand, document: dict) -> None:
    """Start the driver again, and take the claim back: the result is as without the kill."""
    if stand.process is not None:
        stand.kill()
    stand.start()
    stand.kubelet.register()
    uid = document["metadata"]["uid"]
    assert stand.kubelet.unprepare(reference(document))[uid].error == ""
    assert stand.governor.claims == {}
    assert stand.governor.changes == 2
    assert stand.files() == []


def assert_call_fails(call: Callable[[], object]) -> None:
    """Require that a call of the kubelet fails because the driver is killed."""
    with pytest.raises(grpc.RpcError):
        call()


@pytest.mark.parametrize(
    ("op", "when"),
    [
        pytest.param("gpus", "before", marks=pytest.mark.slow),
        pytest.param("claim", "before", marks=pytest.mark.slow),
        ("claim", "after"),
    ],
)
def test_the_driver_is_killed_while_it_asks_the_governor(stand: Stand, op: str, when: str) -> None:
    document = claim()
    stand.api.add_claim(document)
    stand.up()
    asked = threading.Event()

    def die(operation: str) -> None:
        if operation == op and asked.is_set():
            stand.die()

    setattr(stand.governor, when, die)
    stand.api.before = lambda _verb, resource: asked.set() if resource == "resourceclaims" else None
    assert_call_fails(lambda: stand.kubelet.prepare(reference(document)))
    # When the driver dies after the request, the governor has executed it. If the driver dies
    # before that, it may or may not have sent the request.
    assert when == "before" or len(stand.governor.claims) == 1
    setattr(stand.governor, when, lambda _op: None)
    assert_prepared_once(stand, document)


def test_the_driver_is_killed_while_it_reads_the_claim(stand: Stand) -> None:
    document = claim()
    stand.api.add_claim(document)
    stand.up()
    stand.api.before = lambda _verb, resource: stand.die() if resource == "resourceclaims" else None
    assert_call_fails(lambda: stand.kubelet.prepare(reference(document)))
    stand.api.before = lambda _verb, _resource: None
    assert_prepared_once(stand, document)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_the_driver_is_killed_while_it_takes_a_claim_back(stand: Stand, when: str) -> None:
    document = claim()
    stand.api.add_claim(document)
    stand.up()
    assert stand.kubelet.prepare(reference(document))[document["metadata"]["uid"]].error == ""
    setattr(stand.governor, when, lambda op: stand.die() if op == "unclaim" else None)
    assert_call_fails(lambda: stand.kubelet.unprepare(reference(document)))
    assert len(stand.files()) == 1
    setattr(stand.governor, when, lambda _op: None)
    assert_taken_back(stand, document)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("openat", marks=pytest.mark.slow),
        pytest.param("write", marks=pytest.mark.slow),
        "rename",
    ],
)
def test_the_driver_is_killed_while_it_writes_the_file(
    stand: Stand, require: Callable[..., None], call: str
) -> None:
    """The governor knows the claim, and the file is incomplete or missing.

    Engines do not read an incomplete file.
    """
    require("strace")
    document = claim()
    stand.api.add_claim(document)
    uid = document["metadata"]["uid"]
    stand.cdi.mkdir()
    new = stand.cdi / f"tidegate.gpu-claim_{uid}.new"
    stand.start(
        before=(
            "strace", "-f", "-qq", "-o", str(stand.base / "trace"), "-P", str(new),
            "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL",
        )
    )  # fmt: skip
    stand.kubelet.register(60)
    assert_call_fails(lambda: stand.kubelet.prepare(reference(document)))
    assert stand.process is not None
    stand.process.wait(15)
    assert list(stand.governor.claims) == [uid]
    assert [name for name in stand.files() if name.endswith(".json")] in (
        [],
        [f"tidegate.gpu-claim_{uid}.json"],
    )
    assert_prepared_once(stand, document)


def test_the_driver_is_killed_before_it_removes_the_file(
    stand: Stand, require: Callable[..., None]
) -> None:
    """The governor has released the claim; the next driver finds the file, and removes it without a request."""
    require("strace")
    document = claim()
    stand.api.add_claim(document)
    uid = document["metadata"]["uid"]
    stand.up()
    assert stand.kubelet.prepare(reference(document))[uid].error == ""
    stand.kill()
    path = stand.cdi / f"tidegate.gpu-claim_{uid}.json"
    stand.start(
        before=(
            "strace", "-f", "-qq", "-o", str(stand.base / "trace"), "-P", str(path),
            "-e", "trace=unlink,unlinkat", "-e", "inject=unlink,unlinkat:signal=SIGKILL:error=EIO",
        )
    )  # fmt: skip
    stand.kubelet.register(60)
    assert_call_fails(lambda: stand.kubelet.unprepare(reference(document)))
    assert stand.process is not None
    stand.process.wait(15)
    assert stand.governor.claims == {}
    assert stand.files() == [path.name]
    stand.start()
    wait_for(lambda: stand.files() == [], "nothing left")
    assert_taken_back(stand, document)


@pytest.mark.slow
def test_the_driver_is_killed_at_any_time(stand: Stand) -> None:
    """Kill the driver forty times, at random moments, while claims are prepared and taken back."""
    dice = random.Random(4711)  # noqa: S311 - the same sequence each time
    documents = [claim(f"c{i}", "ns", result(i % 2, compute="10")) for i in range(8)]
    for document in documents:
        stand.api.add_claim(document)
    wanted: set[str] = set()
    for _ in range(40):
        stand.start()
        stand.kubelet.register()
        timer = threading.Timer(
            dice.uniform(0.0, 0.4), lambda: stand.process and stand.process.kill()
        )
        timer.start()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            document = dice.choice(documents)
            uid = document["metadata"]["uid"]
            try:
                if uid in wanted:
                    # From here on the claim must be gone, whether or not the answer arrives.
                    wanted.discard(uid)
                    assert stand.kubelet.unprepare(reference(document), timeout=5)[uid].error == ""
                else:
                    assert stand.kubelet.prepare(reference(document), timeout=5)[uid].error == ""
                    wanted.add(uid)
            except grpc.RpcError:
                break
        timer.join()
        stand.kill()
    stand.start()
    stand.kubelet.register()
    for document in documents:
        uid = document["metadata"]["uid"]
        call = stand.kubelet.prepare if uid in wanted else stand.kubelet.unprepare
        assert call(reference(document))[uid].error == ""
    assert set(stand.governor.claims) == wanted
    assert stand.files() == sorted(f"tidegate.gpu-claim_{uid}.json" for uid in wanted)
