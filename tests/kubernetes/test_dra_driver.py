"""Test the driver's process and its client with stand-ins for kubelet, governor and cluster."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest

from kube.cluster import CALLS, Cluster
from kube.errors import ClusterError
from kube.main import main
from tests.kubernetes.conftest import ROOT, Stand
from tests.kubernetes.documents import claim, config, reference, result
from tests.kubernetes.kubelet import Kubelet, wait_for


def wait_for_slice(stand: Stand) -> dict:
    return wait_for(stand.api.slice_of, "a ResourceSlice")


def test_a_claim_is_prepared_and_taken_back(stand: Stand) -> None:
    document = claim("train", "team-a", result(0), result(1), configs=(config(computeLimit=60),))
    stand.api.add_claim(document)
    stand.up("--hook", "/opt/hook")
    uid = document["metadata"]["uid"]
    devices = wait_for_slice(stand)["spec"]["devices"]
    assert [d["attributes"]["index"]["int"] for d in devices] == [0, 1]

    answers = stand.kubelet.prepare(reference(document))
    assert answers[uid].error == ""
    assert [
        (d.request_names, d.pool_name, d.device_name, d.cdi_device_ids)
        for d in answers[uid].devices
    ] == [
        (["gpu"], "node-1", devices[0]["name"], [f"tidegate.gpu/claim={uid}-gpu_0"]),
        (["gpu"], "node-1", devices[1]["name"], [f"tidegate.gpu/claim={uid}-gpu_1"]),
    ]
    assert [s["compute_limit"] for s in stand.governor.claims[uid]["shares"]] == [60, 60]
    assert stand.files() == [f"tidegate.gpu-claim_{uid}.json"]
    spec = json.loads((stand.cdi / stand.files()[0]).read_text())
    assert (
        f"tidegate.gpu/claim={spec['devices'][0]['name']}"
        == answers[uid].devices[0].cdi_device_ids[0]
    )
    assert spec["devices"][0]["containerEdits"]["hooks"][0]["path"] == "/opt/hook"

    before = (stand.governor.changes, (stand.cdi / stand.files()[0]).stat().st_mtime_ns)
    assert stand.kubelet.prepare(reference(document)) == answers
    assert (stand.governor.changes, (stand.cdi / stand.files()[0]).stat().st_mtime_ns) == before

    assert stand.kubelet.unprepare(reference(document))[uid].error == ""
    assert stand.governor.claims == {}
    assert stand.files() == []
    assert stand.kubelet.unprepare(reference(document))[uid].error == ""
    assert stand.kill(signal.SIGTERM) == 0
    assert not stand.ready.exists()
    assert not list(
        stand.kubelet.directory.rglob("*.sock")
    )  # the kubelet then considers the plugin gone
    # CALLS are the rights of the role in packaging/kubernetes/.
    allowed = {(verb, resource) for _, resource, verbs in CALLS for verb in verbs}
    assert {
        (verb.removeprefix("dry-"), resource) for verb, resource in stand.api.counts()
    } <= allowed


def test_a_container_names_a_request_and_gets_the_alternative_that_was_chosen(stand: Stand) -> None:
    """A container names a request, never an alternative; the kubelet gives it the devices with that name among their request names."""
    chosen, other = result(0, "gpu/h100"), result(1, "more")
    document = claim("train", "team-a", chosen, other)
    stand.api.add_claim(document)
    stand.up()
    uid = document["metadata"]["uid"]
    devices = stand.kubelet.prepare(reference(document))[uid].devices
    assert [list(d.request_names) for d in devices] == [["gpu"], ["more"]]
    assert [d.share_id for d in devices] == [chosen["shareID"], other["shareID"]]
    assert [s["name"] for s in stand.governor.claims[uid]["shares"]] == ["gpu/h100/0", "more/0"]


def test_a_failing_claim_does_not_affect_other_claims(stand: Stand) -> None:
    """Each error names claim, resource and amount, and causes one event on the claim and one on its pod."""
    good = claim("good", "team-a", result(0, compute="70"))
    full = claim("full", "team-b", result(0, compute="40"))
    wrong = claim("wrong", "team-b", result(1), configs=(config("FromClaim", computLimit=5),))
    for document in (good, full, wrong):
        stand.api.add_claim(document)
    gone = ("team-c", "gone", "11111111-0000-4000-8000-000000000000")
    stand.up()
    assert stand.kubelet.prepare(reference(good))[good["metadata"]["uid"]].error == ""
    for _ in range(3):
        # Without a deadline the driver does not wait for a change of the state.
        answers = stand.kubelet.prepare(
            *map(reference, (good, full, wrong)), gone, reference(good), timeout=None
        )
        assert len(answers) == 4
        assert answers[good["metadata"]["uid"]].error == ""
        assert (
            answers[full["metadata"]["uid"]].error
            == "claim team-b/full asks for 40 % of GPU 0, 30 % are left; wait"
        )
        assert answers[wrong["metadata"]["uid"]].error == (
            "claim team-b/wrong, request gpu, parameters of the claim: computLimit is not an option; did you mean computeLimit?"
        )
        assert (
            "claim team-c/gone: the API server answered with status 404" in answers[gone[2]].error
        )
    assert list(stand.governor.claims) == [good["metadata"]["uid"]]
    wait_for(lambda: len(stand.api.events) >= 4, "events")
    time.sleep(0.2)
    announced = {
        (e["involvedObject"]["kind"], e["involvedObject"]["name"], e["reason"])
        for e in stand.api.events
    }
    assert announced == {
        ("ResourceClaim", "full", "PrepareRefused"), ("Pod", "full-pod", "PrepareRefused"),
        ("ResourceClaim", "wrong", "PrepareRefused"), ("Pod", "wrong-pod", "PrepareRefused"),
    }  # fmt: skip
    assert len(stand.api.events) == 4
    (message,) = {
        e["message"] for e in stand.api.events if e["involvedObject"]["name"].startswith("full")
    }
    assert "40 % of GPU 0, 30 % are left" in message


def test_two_versions_of_the_kubelets_interface_are_served_and_no_other(stand: Stand) -> None:
    document = claim()
    stand.api.add_claim(document)
    stand.start()
    stand.kubelet.register()
    assert stand.kubelet.chosen == "v1.DRAPlugin"
    old = Kubelet(stand.kubelet.directory, speaks=("v1beta1.DRAPlugin",))
    old.register()
    assert old.prepare(reference(document))[document["metadata"]["uid"]].error == ""
    future = Kubelet(stand.kubelet.directory, speaks=("v7.DRAPlugin",))
    future.register()
    assert future.chosen == ""
    wait_for(lambda: stand.logged("registration-failed"), "the log says so")
    with grpc.insecure_channel(f"unix:{old.info.endpoint}") as channel:
        call = channel.unary_unary("/k8s.io.kubelet.pkg.apis.dra.v7.DRAPlugin/NodePrepareResources")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    old.close()
    future.close()


def test_a_restarted_kubelet_finds_the_driver_and_its_slice(stand: Stand) -> None:
    """A kubelet that starts deletes the slices of its node, and may not know its prepared claims."""
    document = claim()
    stand.api.add_claim(document)
    stand.up()
    uid = document["metadata"]["uid"]
    stand.kubelet.prepare(reference(document))
    changes = stand.governor.changes
    stand.api.wipe_slices()
    wait_for(stand.api.slice_of, "the slice after it was deleted", 20)
    stand.kubelet.register()
    assert stand.kubelet.prepare(reference(document))[uid].error == ""
    assert stand.governor.changes == changes


def test_sockets_that_are_removed_come_back(stand: Stand) -> None:
    stand.up()
    names = ("plugins/tidegate.gpu/dra.sock", "plugins_registry/tidegate.gpu-reg.sock")
    for n_before, name in enumerate(names):
        path = stand.kubelet.directory / name
        path.unlink()
        wait_for(path.exists, f"{name} again")
        wait_for(lambda n=n_before: len(stand.logged("socket-gone")) > n, "the log says so")
        stand.kubelet.register()
        assert stand.kubelet.unprepare(("a", "b", "u-1"))["u-1"].error == ""
    assert len(stand.logged("socket-gone")) == 2


def test_a_second_driver_on_the_node_is_refused(stand: Stand) -> None:
    stand.up()
    first, log = stand.process, len(stand.text())
    second = stand.start()
    assert second.wait(60) == 73
    assert "tidegate-dra: another driver is already using" in stand.text()[log:]
    stand.process = first
    assert stand.kubelet.unprepare(("a", "b", "u-1"))["u-1"].error == ""


def test_a_cdi_file_that_was_removed_is_written_again(stand: Stand) -> None:
    """While the pod's sandbox exists, the kubelet does not prepare the claim again, and containers do not start without the file."""
    document = claim()
    stand.api.add_claim(document)
    stand.up()
    stand.kubelet.prepare(reference(document))
    (name,) = stand.files()
    before = (stand.cdi / name).read_bytes()
    (stand.cdi / name).unlink()
    wait_for(stand.files, "the file again")
    assert (stand.cdi / name).read_bytes() == before
    assert stand.governor.changes == 1


def test_concurrent_calls_allocate_a_claim_once(stand: Stand) -> None:
    documents = [claim(f"c{i}", "ns", result(i % 2, compute="5")) for i in range(6)]
    for document in documents:
        stand.api.add_claim(document)
    stand.up()
    errors: list[str] = []

    def call(document: dict) -> None:
        for _ in range(4):
            answers = stand.kubelet.prepare(reference(document))
            errors.extend(one.error for one in answers.values() if one.error)

    threads = [threading.Thread(target=call, args=(d,)) for d in documents for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert stand.governor.changes == 6
    assert len(stand.files()) == 6


def test_a_call_is_repeated_after_its_answer_was_lost(stand: Stand) -> None:
    """The kubelet gives up while the API server is slow; when it calls again, the claim is already
    prepared.
    """
    document = claim()
    stand.api.add_claim(document)
    stand.up()
    given_up = threading.Event()
    stand.api.before = lambda _verb, resource: (
        given_up.wait(60) if resource == "resourceclaims" else None
    )
    with pytest.raises(grpc.RpcError) as caught:
        stand.kubelet.prepare(reference(document), timeout=5.0)
    given_up.set()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    stand.api.before = lambda _verb, _resource: None
    assert stand.kubelet.prepare(reference(document))[document["metadata"]["uid"]].error == ""
    assert stand.governor.changes == 1
    # With too little time left to begin, nothing is done, and the error says so.
    assert (
        "run out of time"
        in stand.kubelet.prepare(reference(document), timeout=1.5)[
            document["metadata"]["uid"]
        ].error
    )


def test_without_the_feature_gate_no_device_is_offered(stand: Stand) -> None:
    """The devices are not offered even for a moment: a scheduler that saw them would allocate whole GPUs."""
    stand.api.consumable = False
    process = stand.start()
    stand.kubelet.register()
    assert process.wait(30) == 78
    assert stand.api.slices == {}
    assert ("create", "resourceslices") not in stand.api.counts()
    last = stand.text().splitlines()[-1]
    assert last.startswith(
        "tidegate-dra: the API server drops allowMultipleAllocations or requestPolicy"
    )
    assert "run the device plugin instead" in last


@pytest.mark.slow
def test_the_slice_is_deleted_when_the_feature_gate_is_turned_off(stand: Stand) -> None:
    stand.up()
    stand.api.consumable = False
    stand.governor.gpus[0]["lost"] = "fell off the bus"
    assert stand.process is not None
    assert stand.process.wait(30) == 78
    assert stand.api.slices == {}


def test_the_state_of_a_gpu_is_published_as_taint_and_health(stand: Stand) -> None:
    stand.up()
    streams = [stand.kubelet.watch_health(version, timeout=30) for version in ("v1", "v1alpha1")]
    for stream in streams:
        assert [d.health for d in next(stream).devices] == [1, 1]
    first = wait_for_slice(stand)
    stand.governor.gpus[1]["lost"] = "fell off the bus"
    for stream in streams:
        assert [(d.health, d.message) for d in next(stream).devices] == [
            (1, ""),
            (2, "the GPU does not answer: fell off the bus"),
        ]
        stream.cancel()
    wait_for(
        lambda: wait_for_slice(stand)["spec"]["pool"]["generation"] == 2, "the next generation", 20
    )
    second = wait_for_slice(stand)
    assert "taints" not in second["spec"]["devices"][0]
    (taint,) = second["spec"]["devices"][1]["taints"]
    assert (taint["key"], taint["value"], taint["effect"]) == (
        "tidegate.gpu/lost",
        "does-not-answer",
        "NoSchedule",
    )
    assert second["metadata"]["uid"] == first["metadata"]["uid"]


@pytest.mark.slow
def test_without_the_feature_gate_of_taints_a_lost_gpu_is_left_out(stand: Stand) -> None:
    stand.api.taints = False
    stand.governor.gpus[1]["lost"] = "fell off the bus"
    stand.start()
    stand.kubelet.register()
    wait_for(
        lambda: len((stand.api.slice_of() or {"spec": {"devices": []}})["spec"]["devices"]) == 1,
        "one device",
        25,
    )
    wait_for(stand.ready.exists, "ready")
    assert len(stand.logged("taints-dropped")) == 1
    time.sleep(1.5)
    writes = stand.api.counts()["update", "resourceslices"]
    time.sleep(1.5)
    assert stand.api.counts()["update", "resourceslices"] == writes


def test_no_requests_are_sent_while_nothing_changes(stand: Stand) -> None:
    stand.up()
    wait_for(lambda: stand.api.counts()["watch", "resourceslices"], "the watch")
    stand.await_searches()
    before = stand.api.counts()
    time.sleep(3)
    assert stand.api.counts() == before
    assert before["create", "resourceslices"] == 1
    assert before["update", "resourceslices"] == 0


def test_a_claim_costs_the_api_server_one_request(stand: Stand) -> None:
    documents = [claim(f"c{i}", "ns", result(i % 2, compute="5")) for i in range(8)]
    for document in documents:
        stand.api.add_claim(document)
    stand.up()
    wait_for(lambda: stand.api.counts()["watch", "resourceslices"], "the watch")
    before = stand.api.counts()
    for document in documents:
        stand.kubelet.prepare(reference(document))
        stand.kubelet.unprepare(reference(document))
    after = stand.api.counts()
    after["list", "pods"] = before["list", "pods"]  # listed after each registration
    added = {key: after[key] - before[key] for key in after if after[key] != before[key]}
    assert added.pop(("get", "resourceclaims")) == 8
    # A claim that stays prepared for some time causes one update of the slice, see kube/recheck.py.
    assert set(added) <= {("get", "resourceslices"), ("update", "resourceslices")}
    assert all(number <= 8 for number in added.values())


@pytest.mark.slow
def test_requests_that_fail_are_repeated_with_growing_pauses(stand: Stand) -> None:
    stand.api.refuse["get", "nodes"] = [503, 0]
    stand.api.refuse["dry-create", "resourceslices"] = [409]
    stand.start()
    stand.kubelet.register()
    wait_for(stand.ready.exists, "ready", 45)
    waits = [one["again_s"] for one in stand.logged("not-answered")]
    assert len(waits) >= 3
    assert waits[-1] > waits[0]
    assert wait_for_slice(stand)["spec"]["pool"]["generation"] == 1


def test_while_the_governor_is_away_claims_are_refused_in_one_line(stand: Stand) -> None:
    document = claim()
    stand.api.add_claim(document)
    stand.up()
    stand.governor.close()
    uid = document["metadata"]["uid"]
    assert (
        "claim team-a/train: the governor does not answer at"
        in stand.kubelet.prepare(reference(document), timeout=None)[uid].error
    )
    stream = stand.kubelet.watch_health(timeout=30)
    assert wait_for(lambda: [d.health for d in next(stream).devices] == [0, 0], "unknown")
    stream.cancel()
    assert stand.api.slice_of() is not None
    stand.governor.come_back()
    assert stand.kubelet.prepare(reference(document))[uid].error == ""


def test_a_call_waits_for_a_governor_that_is_restarted(stand: Stand) -> None:
    """After a refusal the kubelet calls again only at the pod's next resync, a minute later."""
    document = claim()
    stand.api.add_claim(document)
    stand.up()
    stand.governor.close()
    uid = document["metadata"]["uid"]
    answers: list[str] = []
    call = threading.Thread(
        target=lambda: answers.append(
            stand.kubelet.prepare(reference(document), timeout=45)[uid].error
        )
    )
    call.start()
    wait_for(lambda: len(stand.api.events) == 2, "events on claim and pod, at once")
    assert {one["reason"] for one in stand.api.events} == {"PrepareWaiting"}
    found = re.search(
        r"the governor does not answer .* driver retries for (\d+) s",
        stand.api.events[0]["message"],
    )
    assert found is not None
    assert 20 < int(found[1]) <= 40  # less the duration of the first attempt
    assert answers == []
    stand.governor.come_back()
    call.join(15)
    assert answers == [""]
    assert list(stand.governor.claims) == [uid]
    assert len(stand.logged("claim-waits")) == 1


def test_waiting_calls_do_not_block_other_calls(stand: Stand) -> None:
    """All waiting calls succeed as soon as the claim that occupies the GPU is taken back."""
    old = claim("old", "ns", result(0, compute="100"))
    new = [claim(f"new-{i}", "ns", result(0, compute="2")) for i in range(40)]
    other = claim("other", "ns", result(1))
    for document in (old, *new, other):
        stand.api.add_claim(document)
    stand.up()
    stand.kubelet.prepare(reference(old))
    errors: dict[str, str] = {}

    def call(document: dict) -> None:
        for uid, answer in stand.kubelet.prepare(reference(document), timeout=45).items():
            errors[uid] = answer.error

    calls = [threading.Thread(target=call, args=(document,)) for document in new]
    for one in calls:
        one.start()
    wait_for(lambda: len(stand.logged("claim-waits")) == 40, "all wait")
    assert stand.kubelet.prepare(reference(other))[other["metadata"]["uid"]].error == ""
    assert errors == {}
    assert stand.kubelet.unprepare(reference(old))[old["metadata"]["uid"]].error == ""
    for one in calls:
        one.join(15)
    assert errors == {document["metadata"]["uid"]: "" for document in new}


@pytest.mark.parametrize("by", ["cancel", "unprepare"])
def test_a_pod_that_is_deleted_while_its_claim_waits_leaves_nothing(stand: Stand, by: str) -> None:
    """The kubelet cancels the call or takes the claim back; in both cases the waiting call ends at once."""
    old = claim("old", "ns", result(0, compute="100"))
    new = claim("new", "ns", result(0))
    uid = new["metadata"]["uid"]
    for document in (old, new):
        stand.api.add_claim(document)
    stand.up()
    stand.kubelet.prepare(reference(old))
    call = stand.kubelet.begin(reference(new))
    wait_for(lambda: stand.logged("claim-waits"), "it waits")
    if by == "cancel":
        call.cancel()
        wait_for(lambda: stand.logged("claim-refused"), "it ends")
    else:
        assert stand.kubelet.unprepare(reference(new), timeout=20)[uid].error == ""
        assert "taken it back in the meantime" in call.result(20).claims[uid].error
    assert not stand.kubelet.unprepare(reference(old))[old["metadata"]["uid"]].error
    time.sleep(1.5)
    assert stand.governor.claims == {}
    assert stand.files() == []
    # A later request for the same claim is served.
    assert stand.kubelet.prepare(reference(new))[uid].error == ""


def test_orphaned_claims_are_taken_back_at_the_start(stand: Stand) -> None:
    kept, gone, replaced = (
        claim(name, "ns", result(0, compute="5")) for name in ("kept", "gone", "replaced")
    )
    for document in (kept, gone, replaced):
        stand.api.add_claim(document)
    stand.up()
    for document in (kept, gone, replaced):
        assert not stand.kubelet.prepare(reference(document))[document["metadata"]["uid"]].error
    stand.kill()
    del stand.api.claims["ns", "gone"]
    stand.api.add_claim(claim("replaced", "ns"))
    (stand.cdi / "tidegate.gpu-claim_left-over.json").write_text("{}")
    stand.start()
    wait_for(lambda: list(stand.governor.claims) == [kept["metadata"]["uid"]], "one claim")
    wait_for(
        lambda: stand.files() == [f"tidegate.gpu-claim_{kept['metadata']['uid']}.json"], "one file"
    )


@pytest.mark.parametrize("text", ["{[", "hello", "- a", "apiVersion: v1\n", "clusters: 3\n"])
def test_an_invalid_kubeconfig_is_reported_in_one_line(
    text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("governor.logs.configure", lambda: None)
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    assert main(["--node-name", "n", "--kubeconfig", str(path)]) == 75
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"tidegate-dra: no access to the API server through {path}: ")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, "404 page not found\n", ("has no resource.k8s.io/v1", "run the device plugin")),
        (
            422,
            """{"message": "ValidatingAdmissionPolicy 'tidegate-own-node' denied request: x"}""",
            ("denied request: x", "own-node.yaml"),
        ),
    ],
)
def test_refusals_of_the_api_server_are_explained(
    status: int, body: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, stand: Stand
) -> None:
    """A path that the API server does not know is explained differently from a missing object."""
    from kubernetes.client.exceptions import ApiException

    cluster = Cluster(str(stand.api.kubeconfig))

    def refuse(*_: object, **__: object) -> None:
        error = ApiException(status, "as the test wants it")
        error.body = body
        raise error

    monkeypatch.setattr(cluster._client, "call_api", refuse)
    with pytest.raises(ClusterError) as caught:
        cluster.create_slice({"metadata": {"name": "n"}}, dry_run=True)
    assert caught.value.http == status
    for one in words:
        assert one in str(caught.value)


LOADED = """
import sys
from kube.cluster import Cluster
Cluster(sys.argv[1]).slice("node-1")
print([m for m in sys.modules if m.startswith(("kubernetes.client.api.", "kubernetes.client.models."))])
"""


def test_the_clients_classes_of_api_groups_are_not_loaded(stand: Stand) -> None:
    """They cost two seconds of processor time, and run through pydantic's Rust code, which aborts the
    process if the interpreter ends while another thread is in a call.
    """
    command = [sys.executable, "-c", LOADED, str(stand.api.kubeconfig)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_a_startup_error_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NODE_NAME", raising=False)
    # Without this, main() would configure the logs of this process.
    monkeypatch.setattr("governor.logs.configure", lambda: None)
    for arguments, status, words in (
        (
            ("--node-name", "n", "--default-compute", "120"),
            78,
            "--default-compute is 120; it must be between 1 and 100",
        ),
        (
            ("--node-name", "n", "--default-memory", "8 GB"),
            78,
            "--default-memory: '8 GB' is not a quantity",
        ),
        (
            ("--node-name", "n", "--look-every", "0"),
            78,
            "--look-every is 0; it must be between 0.1 and 60",
        ),
        (("--node-name", "n", "--kubeconfig", "/nowhere"), 75, "no access to the API server"),
        (("--node-name", "n"), 75, "no access to the API server"),
        ((), 78, "no node name is given; add --node-name, or set NODE_NAME"),
    ):
        assert main(list(arguments)) == status
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("tidegate-dra: ")
        assert words in line


def test_sockets_are_accessible_to_root_only(stand: Stand) -> None:
    stand.up()
    for name in ("plugins/tidegate.gpu/dra.sock", "plugins_registry/tidegate.gpu-reg.sock"):
        assert (stand.kubelet.directory / name).stat().st_mode & 0o077 == 0


def test_parameters_that_are_nested_too_deeply_are_refused_by_their_claim(stand: Stand) -> None:
    """The 10 KiB of parameters that are allowed can be nested too deeply for Python's JSON parser."""
    deep: list = []
    for _ in range(400):  # a depth that this process can still encode
        deep = [deep]
    documents = [
        claim(f"deep-{i}", "ns", result(), configs=(config("FromClaim", computeLimit=deep),))
        for i in range(2)
    ]
    for document in documents:
        stand.api.add_claim(document)
    stand.api.deeper["deep-1"] = 4000
    stand.up()
    # The second claim fails when it is parsed or, with Python 3.13, when its option is checked.
    for document, words in zip(
        documents,
        ("computeLimit: \\[\\[", "is nested too deeply|computeLimit: \\[\\["),
        strict=True,
    ):
        (one,) = stand.kubelet.prepare(reference(document)).values()
        assert one.error.startswith(f"claim ns/{document['metadata']['name']}")
        assert re.search(words, one.error)
        assert "mistake" not in one.error
        assert len(one.error) < 1000
    wait_for(lambda: len(stand.api.events) == 3, "events on both, and a pod")
