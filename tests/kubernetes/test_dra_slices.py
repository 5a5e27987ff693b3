"""A node's GPUs as a ResourceSlice, checked against the published schemas and against the scheduler's needs."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kube.health import Condition, Damper, Taint, judge
from kube.names import TAINT_BYPASS, TAINT_CLOSED, TAINT_LOST
from kube.pci import find_roots
from kube.quantity import parse_quantity, whole
from kube.slices import (
    ClaimDefaults,
    device_name,
    make_slice,
    normalised,
    nvlink_group,
    semantic_version,
    slice_name,
)
from tests.conftest import examples
from tests.kubernetes.apiserver import validate
from tests.kubernetes.governor import GIB, MIB, answer, gpu


def test_each_gpu_is_a_device_that_can_be_allocated_many_times() -> None:
    made = make_slice(
        "node-1", "uid-1", answer(gpu(0), gpu(1)), {}, roots={"0000:1a:00.0": "pci0000:16"}
    )
    validate(made)
    assert made["metadata"] == {
        "name": "node-1-tidegate.gpu",
        "ownerReferences": [
            {
                "apiVersion": "v1",
                "kind": "Node",
                "name": "node-1",
                "uid": "uid-1",
                "controller": True,
            }
        ],
    }
    assert made["spec"]["driver"] == "tidegate.gpu"
    assert made["spec"]["nodeName"] == "node-1"
    assert made["spec"]["pool"] == {"name": "node-1", "generation": 1, "resourceSliceCount": 1}
    first = made["spec"]["devices"][0]
    assert first == {
        "name": "gpu-00000000-1111-2222-3333-444455556666",
        "allowMultipleAllocations": True,
        "attributes": {
            "uuid": {"string": "GPU-00000000-1111-2222-3333-444455556666"},
            "index": {"int": 0},
            "model": {"string": "NVIDIA H100 80GB HBM3"},
            "strategy": {"string": "timeslice"},
            "driverVersion": {"version": "580.159.4"},
            "cudaVersion": {"version": "13.0.0"},
            "pciBusID": {"string": "0000:1a:00.0"},
            "resource.kubernetes.io/pciBusID": {"string": "0000:1a:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:16"},
            "numaNode": {"int": 0},
            "resource.kubernetes.io/numaNode": {"int": 0},
        },
        "capacity": {
            "memory": {
                "value": "81408Mi",
                "requestPolicy": {
                    "default": "81408Mi",
                    "validRange": {"min": "520Mi", "max": "81408Mi", "step": "1Mi"},
                },
            },
            "compute": {
                "value": "100",
                "requestPolicy": {
                    "default": "100",
                    "validRange": {"min": "1", "max": "100", "step": "1"},
                },
            },
        },
    }
    assert len(made["spec"]["devices"]) == 2


def test_an_overbooked_gpu_offers_more_memory_than_one_claim_may_request() -> None:
    one = {**gpu(0), "memory_offered": gpu(0)["memory"] * 17 // 10}
    made = make_slice("n", "u", answer(one), {})
    validate(made)
    device = made["spec"]["devices"][0]
    assert device["attributes"]["memoryOverbook"] == {"int": 170}
    assert device["capacity"]["memory"] == {
        "value": f"{81408 * 17 // 10}Mi",
        "requestPolicy": {
            "default": "81408Mi",
            "validRange": {"min": "520Mi", "max": "81408Mi", "step": "1Mi"},
        },
    }
    same = make_slice("n", "u", answer({**one, "memory_offered": one["memory"]}), {})
    assert same["spec"]["devices"][0]["attributes"]["memoryOverbook"] == {"int": 100}


def test_defaults_apply_to_claims_without_capacities() -> None:
    made = make_slice(
        "n", "u", answer(gpu(0)), {}, defaults=ClaimDefaults(memory=8 * GIB + 5, compute=25)
    )
    validate(made)
    capacity = made["spec"]["devices"][0]["capacity"]
    assert capacity["memory"]["requestPolicy"]["default"] == "8192Mi"
    assert capacity["compute"]["requestPolicy"]["default"] == "25"


@settings(max_examples=examples(40), deadline=None)
@given(
    memory=st.integers(0, 1 << 40),
    context=st.integers(0, 1 << 34),
    default_memory=st.none() | st.integers(0, 1 << 41),
    default_compute=st.none() | st.integers(-5, 300),
    name=st.text(max_size=100),
    uuid=st.from_regex(r"GPU-[0-9a-fA-F]{8}-[0-9a-f]{4}", fullmatch=True),
    driver=st.none() | st.text(max_size=20) | st.just("535.129.03"),
)
def test_the_api_server_accepts_the_slice_of_any_node(
    *, memory, context, default_memory, default_compute, name, uuid, driver
) -> None:
    gpus = answer(
        gpu(0, memory=memory, name=name, uuid=uuid), context_memory=context, driver=driver
    )
    validate(
        make_slice(
            "node",
            "u",
            gpus,
            {uuid: [Taint(TAINT_LOST, "does-not-answer")]},
            defaults=ClaimDefaults(default_memory, default_compute),
        )
    )


@pytest.mark.parametrize(
    ("name", "shown"), [("G" * 80, "G" * 64), ("\u00e9" * 40, "\u00e9" * 32), ("a" + "\u20ac" * 30, "a" + "\u20ac" * 21)]
)  # fmt: skip
def test_a_name_is_cut_to_the_api_servers_limit_in_bytes(name: str, shown: str) -> None:
    made = make_slice("node", "u", answer(gpu(0, name=name)), {})
    validate(made)
    assert made["spec"]["devices"][0]["attributes"]["model"] == {"string": shown}


def test_a_gpu_with_too_little_memory_is_not_in_the_slice() -> None:
    assert make_slice("n", "u", answer(gpu(0, memory=5)), {})["spec"]["devices"] == []


def test_a_device_is_named_after_the_uuid_of_its_gpu() -> None:
    assert (
        device_name("GPU-8A3f0000-1111-2222-3333-444455556666")
        == "gpu-8a3f0000-1111-2222-3333-444455556666"
    )


def test_a_long_node_name_yields_a_valid_slice_name() -> None:
    one, other = (slice_name("n." + "a" * 250 + end) for end in "xy")
    assert len(one) <= 253
    assert one != other


def test_gpus_connected_by_nvlinks_are_one_group() -> None:
    def linked(*pairs: tuple[int, int]) -> list[dict]:
        routes: dict[int, list[dict]] = {i: [] for i in range(5)}
        for a, b in pairs:
            routes[a].append({"to": b, "nvlinks": 4, "pcie": "NODE"})
            routes[b].append({"to": a, "nvlinks": 4, "pcie": "NODE"})
        routes[4].append({"to": 3, "nvlinks": 0, "pcie": "SYS"})
        return [gpu(i, routes=routes[i]) for i in range(5)]

    gpus = linked((0, 1), (1, 2))
    assert [nvlink_group(one, gpus) for one in gpus] == [0, 0, 0, None, None]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("580.159.04", "580.159.4"),
        ("13.0", "13.0.0"),
        ("0", "0.0.0"),
        ("", None),
        ("580.x", None),
        ("1.2.3.4", None),
    ],
)
def test_a_drivers_version_is_written_as_semver(text: str, version: str | None) -> None:
    assert semantic_version(text) == version


def test_slices_are_compared_in_normal_form() -> None:
    sent = make_slice("n", "u", answer(gpu(0)), {gpu(0)["uuid"]: [Taint(TAINT_LOST, "x")]})["spec"]
    stored = make_slice("n", "u", answer(gpu(0)), {gpu(0)["uuid"]: [Taint(TAINT_LOST, "x")]})[
        "spec"
    ]
    device = stored["devices"][0]
    device["capacity"]["memory"]["value"] = str(81408 * MIB)
    device["taints"][0]["timeAdded"] = "2026-11-22T00:00:00Z"
    stored["pool"]["generation"] = 7
    assert normalised(sent) == normalised(stored)
    device["capacity"]["compute"]["value"] = "99"
    assert normalised(sent) != normalised(stored)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8Gi", 8 * GIB), ("30", 30), (30, 30), ("1500m", Fraction(3, 2)), ("2e9", 2 * 10**9), ("1.5Gi", 3 * GIB // 2),
        (".5Ki", 512), ("1E", 10**18), ("1e1", 10), ("5.", 5), ("-1Mi", -MIB),
    ],
)  # fmt: skip
def test_quantities_are_exact(text: str | int, number: object) -> None:
    assert parse_quantity(text) == number


@pytest.mark.parametrize(
    "text", ["", "Gi", "8 Gi", "8gi", "0x8", "1e", "nan", "8Gi\n", True, None, "1e999", "٣"]
)
def test_invalid_quantities_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole"):
        whole("1500m")


def test_the_pcie_root_of_a_gpu_is_read_from_sysfs(tmp_path: Path) -> None:
    device = tmp_path / "devices/pci0000:16/0000:16:01.0/0000:1a:00.0"
    device.mkdir(parents=True)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:1a:00.0").symlink_to(device)
    asked = ["0000:1a:00.0", "0000:1b:00.0", None, "../../etc"]
    assert find_roots(asked, str(tmp_path)) == {"0000:1a:00.0": "pci0000:16"}


def violation(uuid: str, kind: str = "unregistered", ended: float | None = None) -> dict:
    return {
        "kind": kind,
        "gpu": uuid,
        "pid": 7,
        "found": 1,
        "allowed": 0,
        "began": 1.0,
        "ended": ended,
    }


def test_the_governors_findings_become_health_and_taints() -> None:
    gpus = [
        gpu(0),
        gpu(1, lost="GPU is lost"),
        gpu(2, closed="its MPS daemon starts", strategy="mps"),
        gpu(3),
    ]
    containers = [
        {
            "id": "abc",
            "violations": [violation(gpus[3]["uuid"]), violation(gpus[0]["uuid"], ended=2.0)],
        },
        {"id": "def", "violations": [violation(gpus[3]["uuid"], "memory")]},
    ]
    found = [judge(gpus, containers)[one["uuid"]] for one in gpus]
    assert found == [
        Condition("Healthy"),
        Condition(
            "Unhealthy",
            "the GPU does not answer: GPU is lost",
            (Taint(TAINT_LOST, "does-not-answer"),),
        ),
        Condition(
            "Unhealthy",
            "the GPU accepts no new containers: its MPS daemon starts",
            (Taint(TAINT_CLOSED, "mps"),),
        ),
        Condition(
            "Healthy",
            "containers bypass their quota: abc (unregistered), def (memory)",
            (Taint(TAINT_BYPASS, "several"),),
        ),
    ]


def test_a_taint_stays_until_its_reason_has_been_gone_for_a_while() -> None:
    damper = Damper(clear_s=30)
    lost = Taint(TAINT_LOST, "does-not-answer")
    bad, good = {"g": Condition("Unhealthy", "", (lost,))}, {"g": Condition("Healthy")}
    assert damper.settle(good, 0) == {"g": ()}
    assert damper.settle(bad, 1) == {"g": (lost,)}
    assert damper.settle(good, 2) == {"g": (lost,)}
    assert damper.settle(bad, 20) == {"g": (lost,)}
    assert damper.settle(good, 49) == {"g": (lost,)}
    assert damper.settle(good, 51) == {"g": ()}
