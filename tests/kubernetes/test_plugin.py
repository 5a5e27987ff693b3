"""The device plugin: units, the kubelet's requests, and restarts of the kubelet and of the plugin.

The kubelet is a stand-in, written from the public protocol. The governor is a stand-in, too: the
plugin needs only the five requests of `kube.plugin.UnitGovernor`.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from governor.errors import GovernorError, RefusedError
from kube.api import deviceplugin_v1beta1_pb2 as messages
from kube.api import deviceplugin_v1beta1_pb2_grpc as services
from kube.cdi import Directory
from kube.errors import CdiError
from kube.plugin import (
    AWAY_S,
    SOCKET,
    Allocations,
    DevicePlugin,
    PluginLoop,
    _exclusive_lock,
    main,
)
from kube.units import (
    GIB,
    UnitPolicy,
    Units,
    make_claim,
    parse_units,
    prefer,
    read_back,
    unit_names,
)
from tests.conftest import examples

A, B = (f"GPU-{letter * 8}-0000-4000-8000-000000000000" for letter in "ab")


class AllocatingGovernor:
    """A governor that allocates what is requested, up to the capacity of a GPU."""

    def __init__(self, gib: int = 16) -> None:
        self.memory = gib * GIB
        self.entered: dict[str, dict[str, Any]] = {}
        self.away = False
        self.lost: str | None = None

    def gpus(self) -> dict[str, Any]:
        if self.away:
            raise GovernorError("the governor does not answer", hint="start it")
        return {
            "gpus": [
                {"uuid": uuid, "index": i, "memory": self.memory, "numa_node": i, "lost": self.lost}
                for i, uuid in enumerate((A, B))
            ]
        }

    def containers(self) -> list[dict[str, Any]]:
        return []

    def claim(self, claim: dict[str, Any]) -> list[dict[str, Any]]:
        others = [s for uid, c in self.entered.items() for s in c["shares"] if uid != claim["uid"]]
        for share in claim["shares"]:
            same = [one for one in others if one["device"] == share["device"]]
            if sum(one["memory"] for one in same) + share["memory"] > self.memory:
                raise RefusedError("memory is short", hint="ask for less")
            assert sum(one["compute"] for one in same) + share["compute"] <= 100
        self.entered[claim["uid"]] = json.loads(json.dumps(claim))
        return [{**share, "uuid": share["device"], "minor": None} for share in claim["shares"]]

    def unclaim(self, uid: str) -> None:
        self.entered.pop(uid, None)

    def claims(self) -> list[dict[str, Any]]:
        return [
            {**claim, "leaving": False, "shares": [{**s, "minor": None, "uuid": s["device"]} for s in claim["shares"]]}
            for claim in self.entered.values()
        ]  # fmt: skip


class CallingKubelet:
    """A kubelet that accepts a registration, and calls the plugin as the real one does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.requests: list[Any] = []
        self.refuse = False

    def start(self) -> None:
        """Remove every socket in the directory, as a kubelet does first, and listen."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            path.unlink()
        self.server = grpc.server(ThreadPoolExecutor(2))
        services.add_RegistrationServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{self.directory}/kubelet.sock")
        self.server.start()

    def stop(self) -> None:
        self.server.stop(0).wait()

    def Register(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.refuse:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such version")
        self.requests.append(request)
        return messages.Empty()

    def plugin(self) -> Any:
        self.channel = grpc.insecure_channel(f"unix:{self.directory}/{self.requests[-1].endpoint}")
        return services.DevicePluginStub(self.channel)


@pytest.fixture
def node(tmp_path: Path):
    governor = AllocatingGovernor()
    allocations = Allocations(
        governor, Directory(tmp_path / "cdi"), UnitPolicy(), hook="/usr/bin/tidegate-hook"
    )
    plugin = DevicePlugin(allocations)
    kubelet = CallingKubelet(tmp_path / "device-plugins")
    loop = PluginLoop(governor, allocations, plugin, tmp_path)
    kubelet.start()
    yield governor, kubelet, loop, plugin, tmp_path
    loop.stop()
    kubelet.stop()


def names(uuid: str, *numbers: int) -> list[str]:
    return [f"{uuid}.{number}" for number in numbers]


def allocate(stub: Any, *containers: list[str]) -> list[str]:
    request = messages.AllocateRequest(
        container_requests=[messages.ContainerAllocateRequest(devices_ids=c) for c in containers]
    )
    answer = stub.Allocate(request, timeout=10)
    for one in answer.container_responses:
        # These fields are never set: a pod can override them, or they work without the governor.
        assert not one.envs
        assert not one.mounts
        assert not one.devices
    return [one.cdi_devices[0].name for one in answer.container_responses]


def spec_of(directory: Path, device: str) -> dict[str, Any]:
    kind, _, name = device.partition("=")
    for path in (directory / "cdi").glob("*.json"):
        document = json.loads(path.read_text())
        for one in document["devices"]:
            if one["name"] == name:
                assert document["kind"] == kind
                return one
    raise AssertionError(f"{device} is in no file")


def test_the_plugin_lists_units_and_allocates_them_as_a_cdi_device(node) -> None:
    governor, kubelet, loop, _, directory = node
    loop.step()
    (request,) = kubelet.requests
    assert (request.version, request.endpoint) == ("v1beta1", SOCKET)
    assert request.resource_name == "tidegate.gpu/memory-gib"
    assert request.options.get_preferred_allocation_available
    stub = kubelet.plugin()
    assert stub.GetDevicePluginOptions(messages.Empty()) == request.options
    units = next(iter(stub.ListAndWatch(messages.Empty()))).devices
    assert [unit.ID for unit in units] == names(A, *range(16)) + names(B, *range(16))
    assert {unit.health for unit in units} == {"Healthy"}
    assert [unit.topology.nodes[0].ID for unit in units] == [0] * 16 + [1] * 16
    assert max(len(unit.ID) for unit in units) <= 63
    (device,) = allocate(stub, names(B, 0, 1, 2, 3))
    (claim,) = governor.entered.values()
    (share,) = claim["shares"]
    assert (share["device"], share["memory"], share["compute"], share["compute_limit"]) == (
        B, 4 * GIB, 25, 100,
    )  # fmt: skip
    hooks = spec_of(directory, device)["containerEdits"]["hooks"]
    (start,) = [hook for hook in hooks if hook["hookName"] == "createRuntime"]
    words = start["args"]
    assert words[words.index("--claim") + 1] == claim["uid"]
    assert words[words.index("--share") + 1] == share["name"]


def test_a_repeated_request_has_the_same_answer_and_is_allocated_once(node) -> None:
    governor, kubelet, loop, _, directory = node
    loop.step()
    stub = kubelet.plugin()
    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(lambda _: allocate(stub, names(A, 5, 3, 4))[0], range(16)))
    assert len(answers) == 1
    assert len(governor.entered) == 1
    assert len(list((directory / "cdi").iterdir())) == 1


def test_claims_end_when_one_of_their_units_is_allocated_again(node) -> None:
    governor, kubelet, loop, _, directory = node
    loop.step()
    stub = kubelet.plugin()
    first, other = (allocate(stub, names(A, *r))[0] for r in (range(8), range(8, 12)))
    allocate(stub, names(B, 0, 1))
    new = allocate(stub, names(A, *range(4, 8), *range(12, 16)))[0]
    assert len(governor.entered) == 3
    spec_of(directory, other)
    spec_of(directory, new)
    with pytest.raises(AssertionError):
        spec_of(directory, first)


def test_units_of_two_gpus_and_unknown_units_are_refused(node) -> None:
    _, kubelet, loop, _, _ = node
    loop.step()
    stub = kubelet.plugin()
    with pytest.raises(grpc.RpcError) as caught:
        allocate(stub, [*names(A, 0, 1, 2), *names(B, 7)])
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "4 GiB were requested" in caught.value.details()
    assert "3 GiB on GPU 0, 1 GiB on GPU 1" in caught.value.details()
    for wrong in (names(A, 16), ["x"], ["GPU-other.1"], [], ["../../etc.1"], [f"{A}.99999"]):
        with pytest.raises(grpc.RpcError) as caught:
            allocate(stub, wrong)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_units_that_are_requested_for_two_containers_are_refused(node) -> None:
    governor, kubelet, loop, _, directory = node
    loop.step()
    stub = kubelet.plugin()
    for second in (names(A, 1, 2, 3), names(A, 0, 1, 2)):
        with pytest.raises(grpc.RpcError) as caught:
            allocate(stub, names(A, 0, 1, 2), second)
        assert "GiB of GPU 0 to two containers" in caught.value.details()
    assert governor.entered == {}
    assert not (directory / "cdi").exists()


def test_the_plugin_registers_with_a_restarted_kubelet(node) -> None:
    governor, kubelet, loop, _, _ = node
    loop.step()
    kubelet.stop()
    loop.step()  # without a kubelet, which is not an error
    kubelet.start()
    assert not (kubelet.directory / SOCKET).exists()
    for _ in range(3):
        loop.step()
    assert len(kubelet.requests) == 2
    allocate(kubelet.plugin(), names(A, 1))
    assert len(governor.entered) == 1
    loop.step()
    assert len(kubelet.requests) == 2


def test_a_removed_socket_is_recreated_and_registered_again(node) -> None:
    governor, kubelet, loop, _, _ = node
    loop.step()
    (kubelet.directory / SOCKET).unlink()
    loop.step()
    assert len(kubelet.requests) == 2
    allocate(kubelet.plugin(), names(A, 1))
    assert len(governor.entered) == 1


def test_a_kubelet_that_refuses_is_left_alone_for_a_while(node, monkeypatch) -> None:
    _, kubelet, loop, _, _ = node
    kubelet.refuse = True
    clock = [100.0]
    monkeypatch.setattr("kube.plugin.time.monotonic", lambda: clock[0])
    loop.step()
    assert not loop.registered
    kubelet.refuse = False
    loop.step()
    assert not kubelet.requests
    clock[0] += 1.5
    loop.step()
    assert len(kubelet.requests) == 1


def test_a_missing_kubelet_is_reported_but_not_every_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the kubelet's directory is missing, then its socket, as with another --root-dir."""
    clock = [100.0]
    monkeypatch.setattr("kube.plugin.time.monotonic", lambda: clock[0])
    governor = AllocatingGovernor()
    allocations = Allocations(governor, Directory(tmp_path / "cdi"), UnitPolicy())
    loop = PluginLoop(governor, allocations, DevicePlugin(allocations), tmp_path)
    with capture_logs() as logs:
        for _ in range(30):
            loop.turn()
            clock[0] += 1
        (tmp_path / "device-plugins").mkdir()
        for _ in range(30):
            loop.turn()
            clock[0] += 1
    loop.stop()
    first, second = [one for one in logs if one["event"] == "no-kubelet"]
    assert f"cannot listen on {tmp_path}/device-plugins/{SOCKET}: " in first["message"]
    assert second["message"] == (
        f"no kubelet for 40 s: {tmp_path}/device-plugins/kubelet.sock does not exist;"
        " no GPU is offered"
    )
    assert "--kubelet-dir" in first["hint"]


def test_a_lost_gpu_and_a_governor_that_is_away_make_units_unhealthy(node, monkeypatch) -> None:
    governor, kubelet, loop, _, _ = node
    clock = [100.0]
    monkeypatch.setattr("kube.plugin.time.monotonic", lambda: clock[0])
    loop.step()
    seen: list[set[str]] = []
    stub = kubelet.plugin()
    stream = stub.ListAndWatch(messages.Empty())

    def read() -> None:
        try:
            for answer in stream:
                seen.append({unit.health for unit in answer.devices})  # noqa: PERF401 - one by one
        except grpc.RpcError:
            return

    thread = threading.Thread(target=read)
    thread.start()
    wait(lambda: seen == [{"Healthy"}])
    governor.lost = "fallen off the bus"
    loop.step()
    wait(lambda: seen[-1] == {"Unhealthy"})
    governor.lost = None
    loop.step()
    wait(lambda: seen[-1] == {"Healthy"})
    governor.away = True
    loop.step()
    clock[0] += AWAY_S - 1  # as long as a restart may take
    loop.step()
    assert len(seen) == 3
    with pytest.raises(grpc.RpcError) as caught:
        allocate(stub, names(A, 1))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    clock[0] += 2
    loop.step()
    wait(lambda: seen[-1] == {"Unhealthy"})
    governor.away = False
    loop.step()
    wait(lambda: seen[-1] == {"Healthy"})
    stream.cancel()
    thread.join(10)
    assert not thread.is_alive()


def wait(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_without_a_governor_nothing_is_offered(node) -> None:
    governor, kubelet, loop, _, _ = node
    governor.away = True
    loop.step()
    assert not kubelet.requests
    governor.away = False
    loop.step()
    assert len(kubelet.requests) == 1


def test_files_are_restored_after_a_reboot(node) -> None:
    governor, kubelet, loop, _, directory = node
    loop.step()
    device = allocate(kubelet.plugin(), names(A, 2, 3))[0]
    before = spec_of(directory, device)
    for path in (directory / "cdi").iterdir():
        path.unlink()
    (directory / "cdi" / "tidegate.gpu-claim_plugin-of-nobody.json").write_text("{}")
    Allocations(governor, Directory(directory / "cdi"), UnitPolicy(compute=5)).restore()
    assert spec_of(directory, device) == before
    assert len(list((directory / "cdi").iterdir())) == 1


def test_an_allocation_whose_file_could_not_be_written_is_completed(node, monkeypatch) -> None:
    governor, kubelet, loop, _, directory = node
    loop.step()
    stub = kubelet.plugin()

    def fail(*_: object) -> bool:
        raise CdiError("no room", hint="make some")

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "write", fail)
        with pytest.raises(grpc.RpcError):
            allocate(stub, names(A, 0, 1))
    assert len(governor.entered) == 1
    device = allocate(stub, names(A, 0, 1))[0]
    assert len(governor.entered) == 1
    spec_of(directory, device)


def test_claims_of_the_cluster_are_left_alone(node) -> None:
    governor, kubelet, loop, _, directory = node
    foreign = make_claim(Units(A, 0xF), {"memory": 16 * GIB}, UnitPolicy()).describe()
    governor.claim({**foreign, "uid": "c0ffee", "namespace": "shop"})
    (directory / "cdi").mkdir()
    (directory / "cdi" / "tidegate.gpu-claim_c0ffee.json").write_text("{}")
    loop.step()
    allocate(kubelet.plugin(), names(A, 2))
    assert "c0ffee" in governor.entered
    assert (directory / "cdi" / "tidegate.gpu-claim_c0ffee.json").exists()


def test_a_second_plugin_does_not_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with _exclusive_lock(tmp_path):
        assert main(["--kubelet-dir", str(tmp_path)]) == 73
    assert "not both" in capfd.readouterr().err


# Units

gib = st.integers(1, 141)


@given(gib, st.data())
def test_preferred_units_are_of_one_gpu_if_one_has_room(size: int, data: Any) -> None:
    gpus = [{"uuid": u, "memory": 141 * GIB} for u in (A, B)]
    everything = [name for gpu in gpus for name in unit_names(gpu)]
    free = data.draw(st.sets(st.sampled_from(everything)))
    if len(free) < size:
        return
    chosen = prefer(free, [], size)
    assert len(chosen) == len(set(chosen)) == size
    assert set(chosen) <= free
    by_gpu = [sum(name.startswith(uuid) for name in free) for uuid in (A, B)]
    if max(by_gpu) >= size:
        assert len({name.partition(".")[0] for name in chosen}) == 1
        fits = [n for n in by_gpu if n >= size]
        assert sum(n.startswith(chosen[0].partition(".")[0]) for n in free) == min(fits)


def test_required_units_are_included() -> None:
    free = names(A, *range(10)) + names(B, *range(3))
    assert set(prefer(free, names(B, 1), 3)) == set(names(B, 0, 1, 2))
    assert set(names(A, 9)) <= set(prefer(free, names(A, 9), 5))
    assert len(prefer(free, [*names(A, 0), *names(B, 0)], 4)) == 4
    assert prefer([], [], 3) == []


@given(st.integers(1, (1 << 141) - 1))
def test_units_are_recovered_from_their_claim(bits: int) -> None:
    units = Units(A, bits)
    claim = make_claim(units, {"memory": 141 * GIB}, UnitPolicy()).describe()
    assert len(claim["shares"][0]["name"]) <= 253
    ((uid, (again, made)),) = read_back([claim]).items()
    assert (uid, again) == (units.uid, units)
    assert made.describe() == claim


@settings(max_examples=examples(50))
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_proportional_shares_of_compute_never_exceed_a_gpu(sizes: list[int]) -> None:
    total, sums = 80, [0, 0]
    for size in sizes:
        if sums[0] + size <= total:
            sums = [sums[0] + size, sums[1] + UnitPolicy().share(size, total)[0]]
    assert sums[1] <= 100


@pytest.mark.parametrize("total", [100, 101, 140, 141, 200, 287])
@settings(max_examples=examples(50))
@given(st.data())
def test_compute_adds_up_to_more_than_a_gpu_only_with_shares_below_a_percent(
    total: int, data: st.DataObject
) -> None:
    """The least guarantee is 1 %, so a GPU has room for 100 containers, even if it has more units."""
    assert sum(UnitPolicy().share(1, total)[0] for _ in range(100)) == 100
    least = -(-total // 100)
    left, shares = total, 0
    while left >= least:
        size = data.draw(st.integers(least, left))
        left, shares = left - size, shares + UnitPolicy().share(size, total)[0]
    assert shares <= 100


def test_a_fixed_share_raises_a_lower_limit() -> None:
    assert UnitPolicy(compute=25, compute_limit=10).share(4, 80) == (25, 25)
    assert UnitPolicy(compute_limit=50).share(8, 80) == (10, 50)
    assert UnitPolicy().share(1, 141) == (1, 100)


@given(st.lists(st.text(max_size=70)))
def test_any_invalid_unit_name_is_refused(names_: list[str]) -> None:
    with pytest.raises(RefusedError):
        parse_units(names_, [{"uuid": A, "index": 0, "memory": GIB}])
