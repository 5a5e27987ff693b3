"""Test how quotas are completed, GPUs are chosen, and refusals state what is short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from governor.allocations import AllocationTable, Nodes
from governor.claims import Claim, ClaimShare, check_claim
from governor.completion import complete_quota
from governor.config import Config, Defaults, MemoryOptions
from governor.errors import RefusedError
from governor.quota import MIB, Device, Quota, show_memory
from oci_hook.request import Request, parse_annotations

GIB = 1 << 30
TOTAL = 16 * GIB
FREE = TOTAL - 512 * MIB


def gpus(n: int, memory: int = TOTAL) -> list[Device]:
    return [
        Device(i, f"GPU-00000000-0000-0000-0000-{i:012x}", "simulated", memory) for i in range(n)
    ]


def ask(**annotations: object) -> Request:
    named = {f"tidegate.gpu/{k.replace('_', '-')}": str(v) for k, v in annotations.items()}
    return parse_annotations(named)


def chosen(allocations: AllocationTable, key: str, **annotations: object) -> list[int]:
    return [device.index for device in allocations.admit(key, ask(**annotations))[1]]


@pytest.mark.parametrize(
    ("annotations", "quota"),
    [
        ({"memory": "2Gi"}, Quota(2 * GIB, 1, 100)),
        ({"memory": "2Gi", "compute": 30}, Quota(2 * GIB, 30, 30)),
        ({"memory": "2Gi", "compute": 30, "compute_limit": 70}, Quota(2 * GIB, 30, 70)),
        ({"memory": "2Gi", "compute_limit": 70}, Quota(2 * GIB, 1, 70)),
    ],
)
def test_a_quota_is_completed(annotations: dict[str, object], quota: Quota) -> None:
    assert complete_quota(ask(**annotations), Config()) == quota


def test_the_configuration_completes_a_quota() -> None:
    config = Config(defaults=Defaults(memory=3 * GIB, compute=20, compute_limit=60))
    assert complete_quota(ask(), config) == Quota(3 * GIB, 20, 60)
    # A container's own cap below the default guarantee lowers the guarantee.
    assert complete_quota(ask(compute_limit=5), config) == Quota(3 * GIB, 5, 5)


def test_a_request_without_memory_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"tidegate\.gpu/memory is missing") as caught:
        complete_quota(ask(compute=10), Config())
    assert "defaults.memory" in caught.value.hint


def test_a_device_without_annotations_is_refused_with_the_probable_cause() -> None:
    """containerd's default handler does not pass annotations to the hook, even if the pod has them."""
    with pytest.raises(RefusedError, match=r"has a device of .*, but no annotation") as e:
        complete_quota(ask(), Config(), annotated=False)
    assert "tidegate setup containerd, then set runtimeClassName: tidegate" in e.value.hint
    assert "defaults.memory" in e.value.hint
    config = Config(defaults=Defaults(memory=3 * GIB))
    assert complete_quota(ask(), config, annotated=False).memory == 3 * GIB


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1 << 10, "1Ki"),
        (1025, "1.0 KiB"),
        (256 * MIB, "256Mi"),
        (1536 * MIB, "1536Mi"),
        (8 * GIB, "8Gi"),
        (1 << 40, "1Ti"),
        (300_000_000, "286.1 MiB"),
        (8 * GIB - 1, "7.9 GiB"),
    ],
)
def test_memory_is_shown_with_units(amount: int, shown: str) -> None:
    assert show_memory(amount) == shown


def test_the_memory_quota_must_be_enough_for_a_context() -> None:
    config = Config(context_memory=520 * MIB)
    with pytest.raises(RefusedError, match=r"is 519\.9 MiB, .* alone takes 520Mi") as caught:
        complete_quota(ask(memory=520 * MIB - 1), config)
    assert "520Mi" in caught.value.hint
    assert complete_quota(ask(memory=520 * MIB), config).memory == 520 * MIB


@pytest.mark.parametrize("strategy", ["mps", "passthrough"])
def test_a_strategy_that_the_node_does_not_offer_is_refused(strategy: str) -> None:
    with pytest.raises(RefusedError, match=f"strategy is {strategy}"):
        complete_quota(ask(memory="2Gi", strategy=strategy), Config())


def test_memory_is_granted_to_the_last_byte_and_no_further() -> None:
    allocations = AllocationTable(gpus(1), Config())
    allocations.admit("a", ask(memory=FREE - GIB))
    with pytest.raises(RefusedError) as caught:
        allocations.admit("b", ask(memory=GIB + 1))
    assert (
        caught.value.message
        == "GPU 0 has 1024 MiB of memory left to grant, but 1025 MiB was requested (1 MiB short)"
    )
    allocations.admit("b", ask(memory=GIB))
    with pytest.raises(RefusedError, match="has 0 MiB of memory left"):
        allocations.admit("c", ask(memory=GIB))


def test_compute_is_guaranteed_to_the_last_percent_and_no_further() -> None:
    allocations = AllocationTable(gpus(1), Config())
    allocations.admit("a", ask(memory="1Gi", compute=45))
    with pytest.raises(RefusedError, match=r"GPU 0 has 55 % of its time left.*56 % was requested"):
        allocations.admit("b", ask(memory="1Gi", compute=56))
    allocations.admit("b", ask(memory="1Gi", compute=55))
    with pytest.raises(RefusedError, match="0 % of its time left"):
        allocations.admit("c", ask(memory="1Gi"))


def test_a_limit_is_not_a_guarantee() -> None:
    allocations = AllocationTable(gpus(1), Config())
    for key in "abcd":
        allocations.admit(key, ask(memory="1Gi", compute=25, compute_limit=100))


def test_an_ended_container_makes_room_and_a_refusal_takes_none() -> None:
    allocations = AllocationTable(gpus(1), Config())
    allocations.admit("a", ask(memory=FREE, compute=100))
    for _ in range(3):
        with pytest.raises(RefusedError):
            allocations.admit("b", ask(memory="1Gi"))
    allocations.leave("b")  # was never admitted
    allocations.leave("a")
    allocations.leave("a")
    assert chosen(allocations, "b", memory=FREE, compute=100) == [0]


def test_a_node_without_a_gpu_refuses() -> None:
    with pytest.raises(RefusedError, match="no GPU"):
        AllocationTable([], Config()).admit("a", ask(memory="1Gi"))


def test_a_gpu_smaller_than_the_reserve_has_nothing_left() -> None:
    with pytest.raises(RefusedError, match="GPU 0 has 0 MiB of memory left"):
        AllocationTable(gpus(1, 256 * MIB), Config()).admit("a", ask(memory="1Gi"))


def test_spread_chooses_the_emptiest_gpu() -> None:
    allocations = AllocationTable(gpus(3), Config(placement="spread"))
    taken = [chosen(allocations, str(i), memory="2Gi", compute=10) for i in range(6)]
    assert taken == [[0], [1], [2], [0], [1], [2]]
    assert chosen(allocations, "two", memory="2Gi", compute=50, count=2) == [0, 1]
    assert chosen(allocations, "next", memory="2Gi", compute=10) == [2]


def test_pack_chooses_the_fullest_gpu_that_fits() -> None:
    allocations = AllocationTable(gpus(3), Config(placement="pack"))
    assert chosen(allocations, "pinned", memory="2Gi", compute=30, devices=1) == [1]
    assert [chosen(allocations, str(i), memory="2Gi", compute=30) for i in range(4)] == [
        [1],
        [1],
        [0],
        [0],
    ]


def test_memory_decides_where_compute_does_not() -> None:
    spread, pack = (AllocationTable(gpus(2), Config(placement=p)) for p in ("spread", "pack"))
    for allocations in (spread, pack):
        allocations.admit("a", ask(memory="8Gi", compute=10, devices=0))
        allocations.admit("b", ask(memory="2Gi", compute=10, devices=1))
    assert chosen(spread, "c", memory="1Gi") == [1]
    assert chosen(pack, "c", memory="1Gi") == [0]


def test_count_takes_that_many_gpus_or_none() -> None:
    allocations = AllocationTable(gpus(3), Config())
    allocations.admit("a", ask(memory="2Gi", compute=60, devices=1))
    with pytest.raises(RefusedError) as caught:
        allocations.admit("b", ask(memory="2Gi", compute=50, count=3))
    assert caught.value.message == (
        "3 of 3 GPUs were requested, but 2 have room: "
        "GPU 1 has 40 % of its time left to guarantee, but 50 % was requested (10 % short)"
    )
    with pytest.raises(
        RefusedError, match="4 GPUs were requested, but this node has 3 GPUs to share"
    ):
        allocations.admit("b", ask(memory="2Gi", count=4))
    quota, devices = allocations.admit("b", ask(memory=FREE, compute=100, count=2))
    assert {device.index for device in devices} == {0, 2}
    assert quota.memory == FREE  # on each GPU
    allocations.leave("b")
    assert chosen(allocations, "c", memory=FREE, compute=100, count=2) == [0, 2]


def test_devices_are_named_by_index_or_uuid_and_keep_the_requested_order() -> None:
    devices = gpus(3)
    allocations = AllocationTable(devices, Config())
    assert chosen(allocations, "a", memory="2Gi", devices=f"{devices[2].uuid},0") == [2, 0]


def test_a_named_device_that_is_full_is_not_replaced_by_another() -> None:
    allocations = AllocationTable(gpus(2), Config())
    allocations.admit("a", ask(memory=FREE, devices=0))
    with pytest.raises(
        RefusedError,
        match=r"^GPU 0 has 0 MiB of memory left to grant, but 1024 MiB was requested \(",
    ):
        allocations.admit("b", ask(memory="1Gi", devices="1,0"))
    # The refused container leaves nothing booked on GPU 1.
    assert chosen(allocations, "c", memory=FREE, compute=100, devices=1) == [1]


def test_the_refusal_of_an_unknown_device_lists_the_known_ones() -> None:
    devices = gpus(2)
    with pytest.raises(RefusedError) as caught:
        AllocationTable(devices, Config()).admit("a", ask(memory="1Gi", devices=7))
    assert caught.value.message == (
        "annotation tidegate.gpu/devices names 7, "
        f"but this node has 0 ({devices[0].uuid}), 1 ({devices[1].uuid})"
    )


def test_one_device_under_two_names_is_refused() -> None:
    devices = gpus(2)
    with pytest.raises(RefusedError, match="names a GPU twice"):
        AllocationTable(devices, Config()).admit(
            "a", ask(memory="1Gi", devices=f"1,{devices[1].uuid}")
        )


BOTH = Config(strategies=("timeslice", "mps"), gpus={"1": {"strategy": "mps"}})


@pytest.mark.parametrize(
    ("annotations", "found"),
    [
        ({"strategy": "mps"}, [1]),
        ({"strategy": "timeslice"}, [0]),
        ({"strategy": "auto", "compute": 30}, [0]),
        ({"count": 2}, [0, 2]),  # a client of MPS has one GPU
        ({"devices": "1"}, [1]),
        ({"devices": "1", "strategy": "mps"}, [1]),
    ],
)
def test_a_container_is_placed_by_its_strategy(
    annotations: dict[str, object], found: list[int]
) -> None:
    assert chosen(AllocationTable(gpus(3), BOTH), "a", memory="2Gi", **annotations) == found


@pytest.mark.parametrize(
    ("annotations", "line"),
    [
        ({"strategy": "mps", "devices": "0"}, "GPU 0 uses strategy timeslice, but annotation"),
        ({"strategy": "timeslice", "devices": "1"}, "GPU 1 uses strategy mps, but annotation"),
        (
            {"devices": "0,1"},
            "GPU 1 uses strategy mps, but a container can have only one GPU under that strategy",
        ),
        (
            {"strategy": "mps", "count": 2},
            "2 GPUs were requested, but a client of MPS can have only one",
        ),
        ({"count": 3}, "3 GPUs were requested, but this node has 2 GPUs to share"),
    ],
)
def test_a_container_is_refused_where_its_strategy_is_missing(
    annotations: dict[str, object], line: str
) -> None:
    with pytest.raises(RefusedError, match=line):
        AllocationTable(gpus(3), BOTH).admit("a", ask(memory="2Gi", **annotations))


def test_a_claim_is_refused_on_a_gpu_with_another_strategy() -> None:
    allocations = AllocationTable(gpus(3), BOTH)
    devices = allocations.devices

    def claim(uid: str, *indices: int, strategy: str = "auto") -> Claim:
        quota = Quota(2 * GIB, 30, 30)
        shares = [ClaimShare(f"s{i}", devices[i].uuid, quota, strategy) for i in indices]
        return Claim(uid, "default", uid, tuple(shares))

    for wanted in (
        claim("a", 1, strategy="mps"),
        claim("b", 0, strategy="timeslice"),
        claim("c", 0, 1),
    ):
        allocations.claims.admit(wanted)
    assert [gpu["claims"] for gpu in allocations.describe()["gpus"]] == [2, 2, 0]
    with pytest.raises(
        RefusedError,
        match="claim default/d asks for 2048 MiB and 30 % of GPU 0 with strategy mps, but that GPU uses",
    ):
        allocations.claims.admit(claim("d", 1, 0, strategy="mps"))
    assert [gpu["claims"] for gpu in allocations.describe()["gpus"]] == [2, 2, 0]
    both = [devices[i].uuid for i in (1, 0)]
    assert [one.index for one in allocations.claims.devices(claim("c", 0, 1), both[:1])] == [1]
    with pytest.raises(RefusedError, match="has 2 GPUs, and GPU 1 uses strategy mps"):
        allocations.claims.devices(claim("c", 0, 1), both)
    with pytest.raises(
        RefusedError,
        match="has 2 GPUs that use strategy mps, but a client of MPS can have only one",
    ):
        check_claim(
            Claim(
                "e",
                "default",
                "e",
                tuple(ClaimShare(f"gpu/{i}", f"GPU-{i}", Quota(1, 1, 1), "mps") for i in (0, 1)),
            )
        )
    allocations.set_closed(devices[1].uuid, "its MPS server starts")
    allocations.claims.admit(claim("f", 1))  # the server may be running when a container starts
    with pytest.raises(
        RefusedError, match="GPU 1 of claim default/a accepts no containers at present"
    ):
        allocations.claims.devices(claim("a", 1), both[:1])


def test_gpus_that_are_not_named_have_the_first_strategy() -> None:
    allocations = AllocationTable(gpus(2), Config(strategies=("mps",)))
    assert [gpu["strategy"] for gpu in allocations.describe()["gpus"]] == ["mps", "mps"]
    with pytest.raises(RefusedError, match="this node offers mps"):
        allocations.admit("a", ask(memory="2Gi", strategy="timeslice"))
    with pytest.raises(RefusedError, match="no GPU that answers uses strategy timeslice"):
        allocations.admit("a", ask(memory="2Gi", count=2))


def test_a_closed_gpu_takes_no_container_and_keeps_its_own() -> None:
    allocations = AllocationTable(gpus(3), BOTH)
    quota, _ = allocations.admit("a", ask(memory="2Gi", strategy="mps"))
    allocations.set_closed(gpus(3)[1].uuid, "its MPS server is away")
    for asked in ({"strategy": "mps"}, {"devices": "1"}):
        with pytest.raises(
            RefusedError, match="GPU 1 accepts no containers at present: its MPS server"
        ):
            allocations.admit("b", ask(memory="2Gi", **asked))
    allocations.change("a", Quota(quota.memory // 2, 10, 10))
    assert chosen(allocations, "c", memory="2Gi") == [0]
    allocations.set_closed(gpus(3)[1].uuid, None)
    assert chosen(allocations, "b", memory="2Gi", strategy="mps") == [1]


def with_nodes(n: int) -> AllocationTable:
    """Return an allocation table of GPUs whose device nodes are numbered in reverse order."""
    devices = [replace(device, minor=n - 1 - device.index) for device in gpus(n)]
    return AllocationTable(devices, Config())


def test_a_gpu_is_chosen_among_those_whose_nodes_a_container_has() -> None:
    allocations = with_nodes(3)
    _, devices = allocations.admit("a", ask(memory="1Gi"), Nodes(frozenset({0})))
    assert [device.index for device in devices] == [2]
    _, devices = allocations.admit("b", ask(memory="1Gi", count=2), Nodes(frozenset({0, 1})))
    assert [device.index for device in devices] == [1, 2]


def test_a_container_with_gpus_by_name_gets_each_of_them() -> None:
    allocations = with_nodes(3)
    nodes = Nodes(frozenset({0, 2}), exact=True)
    _, devices = allocations.admit("a", ask(memory="1Gi"), nodes)
    assert [device.index for device in devices] == [0, 2]
    _, devices = allocations.admit("b", ask(memory="1Gi", count=1), nodes)
    assert len(devices) == 1


@pytest.mark.parametrize(
    ("annotations", "minors", "line"),
    [
        ({"devices": "0"}, {0, 1}, "names GPU 0, whose node /dev/nvidia2 the container does"),
        ({"count": 2}, {1}, "count is 2, but the container has only /dev/nvidia1"),
        (
            {},
            {7, 9},
            "the container has /dev/nvidia7, /dev/nvidia9, but no GPU that this node shares",
        ),
    ],
)
def test_a_gpu_without_its_node_is_refused(
    annotations: dict[str, object], minors: set[int], line: str
) -> None:
    allocations = with_nodes(3)
    with pytest.raises(RefusedError, match=line):
        allocations.admit("a", ask(memory="1Gi", **annotations), Nodes(frozenset(minors)))
    assert all(gpu["containers"] == 0 for gpu in allocations.describe()["gpus"])


def test_gpus_whose_device_nodes_are_unknown_are_not_restricted() -> None:
    allocations = AllocationTable(gpus(2), Config())
    assert (
        allocations.admit("a", ask(memory="1Gi", devices="1"), Nodes(frozenset({0})))[1][0].index
        == 1
    )


# ---- overbooked memory ----

OVERBOOKED = Config(memory=MemoryOptions(overbook=2.0, host=100 * GIB))


def test_quotas_of_containers_that_may_be_parked_can_exceed_the_gpus_memory() -> None:
    allocations = AllocationTable(gpus(1), OVERBOOKED)
    for i in range(3):
        quota, _ = allocations.admit(str(i), ask(memory="10Gi"))
        assert quota.parking
    assert 2 * FREE - 30 * GIB == GIB
    with pytest.raises(RefusedError, match="1024 MiB of memory left"):
        allocations.admit("more", ask(memory="2Gi"))
    allocations.admit("more", ask(memory="1Gi"))


def test_no_container_gets_more_than_the_gpu_has() -> None:
    with pytest.raises(RefusedError, match="15872 MiB of memory left"):
        AllocationTable(gpus(1), OVERBOOKED).admit("a", ask(memory="16Gi"))


@pytest.mark.parametrize(
    ("annotations", "count"),
    [
        ({"parking": "never"}, 1),
        ({"count": 2}, 2),
        ({"devices": "0,1"}, 2),
        ({"capabilities": "compute,utility,video"}, 1),
        ({"capabilities": "all"}, 1),
    ],
)
def test_the_memory_of_a_container_that_is_never_parked_is_not_overbooked(
    annotations, count
) -> None:
    allocations = AllocationTable(gpus(count), OVERBOOKED)
    quota, _ = allocations.admit("a", ask(memory="10Gi", **annotations))
    assert not quota.parking
    with pytest.raises(RefusedError, match="5632 MiB of memory left"):
        allocations.admit("b", ask(memory="6Gi"))
    allocations.admit("b", ask(memory="5Gi"))
    # A container that may be parked has to fit next to those that may not, but not next to others
    # that may be parked.
    with pytest.raises(RefusedError, match="512 MiB of memory left"):
        allocations.admit("c", ask(memory="1Gi", parking="never", devices=0))
    allocations.admit("c", ask(memory="5Gi", devices=0))


def test_clients_of_an_mps_server_are_never_parked() -> None:
    config = replace(OVERBOOKED, strategies=("timeslice", "mps"), gpus={"0": {"strategy": "mps"}})
    quota, _ = AllocationTable(gpus(1), config).admit("a", ask(memory="10Gi"))
    assert not quota.parking


def test_host_memory_must_suffice_for_all_memory_that_may_be_parked() -> None:
    config = Config(memory=MemoryOptions(overbook=2.0, host=20 * GIB))
    allocations = AllocationTable(gpus(2), config)
    allocations.admit("a", ask(memory="8Gi"))
    allocations.admit("b", ask(memory="8Gi"))
    with pytest.raises(RefusedError, match="4096 MiB are left, but 5120 MiB are needed") as caught:
        allocations.admit("c", ask(memory="5Gi"))
    assert "memory.host" in caught.value.hint
    allocations.admit("c", ask(memory="5Gi", parking="never"))
    allocations.leave("a")
    allocations.admit("d", ask(memory="8Gi"))


def test_a_container_may_be_parked_after_its_quota_was_changed() -> None:
    allocations = AllocationTable(gpus(1), OVERBOOKED)
    allocations.admit("a", ask(memory="10Gi"))
    allocations.admit("b", ask(memory="10Gi"))
    with pytest.raises(RefusedError, match="memory left"):
        allocations.change("a", Quota(16 * GIB, 1, 100, parking=True))
    allocations.change("a", Quota(15 * GIB, 1, 100, parking=True))


def test_without_overbooking_nothing_is_parked() -> None:
    quota, _ = AllocationTable(gpus(1), Config()).admit("a", ask(memory="10Gi"))
    assert not quota.parking
