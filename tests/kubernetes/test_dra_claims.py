"""Interpretation of an allocated ResourceClaim: shares, parameters, CDI devices, and refusals, each of
one line.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from governor.errors import TidegateError
from kube.cdi import Directory, make_spec
from kube.claims import Reference, read_claim
from kube.errors import CdiError, ClaimError
from kube.parameters import Parameters, applies, check, merge, schema
from kube.slices import device_name
from tests.conftest import examples, lack
from tests.kubernetes.documents import NODE, claim, config, reference, result
from tests.kubernetes.governor import GIB, MIB, gpu

DEVICES = {device_name(gpu(i)["uuid"]): gpu(i)["uuid"] for i in range(2)}


def read(document: dict[str, Any]) -> Any:
    return read_claim(document, Reference(*_named(document)), NODE, DEVICES)


def _named(document: dict[str, Any]) -> tuple[str, str, str]:
    namespace, name, uid = reference(document)
    return namespace, name, uid


def refusal(document: dict[str, Any]) -> str:
    with pytest.raises(ClaimError) as caught:
        read(document)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_allocation_becomes_a_request_to_the_governor() -> None:
    document = claim(
        "train",
        "team-a",
        result(0, compute="30", memory="8Gi"),
        result(1, compute="30", memory=str(8 * GIB)),
        {"driver": "nic.example.com", "pool": "x", "device": "y", "request": "nic"},
        result(1, "other", compute="10", memory="1Gi"),
        configs=(config(computeLimit=60, requests=("gpu",)),),
        uid="0b7e3c2c-0000-4000-8000-000000000001",
    )
    assert read(document).describe() == {
        "uid": "0b7e3c2c-0000-4000-8000-000000000001",
        "namespace": "team-a",
        "name": "train",
        "shares": [
            {
                "name": "gpu/0",
                "device": gpu(0)["uuid"],
                "memory": 8 * GIB,
                "compute": 30,
                "compute_limit": 60,
                "strategy": "auto",
            },
            {
                "name": "gpu/1",
                "device": gpu(1)["uuid"],
                "memory": 8 * GIB,
                "compute": 30,
                "compute_limit": 60,
                "strategy": "auto",
            },
            {
                "name": "other/0",
                "device": gpu(1)["uuid"],
                "memory": GIB,
                "compute": 10,
                "compute_limit": 10,
                "strategy": "auto",
            },
        ],
    }


def test_each_option_of_the_claim_overrides_that_of_the_class() -> None:
    configs = (
        config("FromClaim", ("gpu",), strategy="mps"),
        config(
            "FromClass",
            computeLimit=80,
            strategy="timeslice",
            parking="never",
            **{"class": "latency"},
        ),
        {
            "source": "FromClaim",
            "opaque": {"driver": "nic.example.com", "parameters": {"what": "ever"}},
        },
        config("FromClaim", ("another",), computeLimit=3),
    )
    found = read(claim("a", "b", result(), configs=configs))
    (share,) = found.shares
    assert (share.compute_limit, share.strategy, share.work_class) == (80, "mps", "latency")
    assert found.describe()["shares"][0]["class"] == "latency"
    assert found.describe()["shares"][0]["parking"] == "never"


@pytest.mark.parametrize(
    ("documents", "limit"),
    [
        ([], None),
        ([{"strict": True}], None),
        ([{"strict": False}], 100),
        ([{"computeLimit": 50}], 50),
        ([{"computeLimit": 50}, {"strict": True}], None),
        ([{"strict": True}, {"computeLimit": 50}], 50),
        ([{"computeLimit": 50}, {"strict": False}], 50),
        ([{"computeLimit": 50, "strict": False}], 50),
        ([{"computeLimit": 50}, {"strategy": "mps"}], 50),
    ],
)
def test_strict_and_a_limit_override_each_other(documents: list[dict], limit: int | None) -> None:
    parameters = Parameters()
    for document in documents:
        parameters = merge(
            parameters,
            {"apiVersion": "tidegate.gpu/v1", "kind": "TidegateConfig", **document},
            "here",
        )
    assert parameters.compute_limit == limit


def test_parameters_for_a_request_apply_to_its_alternatives() -> None:
    assert applies((), "a/b")
    assert applies(("a",), "a")
    assert applies(("a",), "a/b")
    assert applies(("a/b",), "a/b")
    assert not applies(("a/b",), "a/c")
    assert not applies(("a",), "ab")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (
            {"computeLimit": 130},
            "claim b/a, request gpu, parameters of the claim: computeLimit: 130 is greater than the maximum of 100",
        ),
        ({"computLimit": 50}, "computLimit is not an option; did you mean computeLimit?"),
        ({"strategy": "fair"}, "strategy: 'fair' is not one of ['auto', 'timeslice', 'mps']"),
        (
            {"strict": True, "computeLimit": 5},
            "computeLimit and strict: true contradict each other",
        ),
        ({"kind": "GpuConfig"}, "kind: 'TidegateConfig' was expected"),
        (
            {"computeLimit": 20},
            "claim b/a, request gpu: computeLimit is 20 %, but compute is 30 %; write 30 or more, or strict: true",
        ),
    ],
)
def test_an_error_in_parameters_names_the_field(parameters: dict, words: str) -> None:
    assert words in refusal(claim("a", "b", result(), configs=(config("FromClaim", **parameters),)))


def test_a_refusal_names_the_claim_and_the_fault() -> None:
    def changed(**more: Any) -> str:
        return refusal(claim("a", "b", result(**more)))

    assert changed(pool="node-2").startswith(
        "claim b/a, request gpu: memory 8Gi, compute 30 of device gpu-00000000-1111-2222-3333-444455556666 was allocated from the pool node-2, but this node's pool is node-1; "
    )
    assert changed(device="gpu-ffff").startswith(
        "claim b/a, request gpu: memory 8Gi, compute 30 of device gpu-ffff was requested, but this node does not have it; "
    )
    qualified = {"tidegate.gpu/memory": "1Gi", "tidegate.gpu/compute": "5"}
    assert ": memory 1Gi, compute 5 of device gpu-ffff " in changed(
        device="gpu-ffff", consumedCapacity=qualified
    )
    assert ": device gpu-ffff was requested" in changed(device="gpu-ffff", consumedCapacity=None)
    assert "was allocated without memory and compute" in changed(consumedCapacity=None)
    assert "DRAConsumableCapacity" in changed(consumedCapacity={})
    assert "consumedCapacity has no memory" in changed(consumedCapacity={"compute": "5"})
    assert "compute: '1500m' is not a whole number" in changed(
        consumedCapacity={"memory": "1Gi", "compute": "1500m"}
    )
    assert "compute is 0 %" in changed(compute="0")
    assert "compute is 101 %" in changed(compute="101")
    assert "memory is 5 bytes" in changed(memory="5")
    assert "memory 8Gi, compute 30 of device gpu-0" in changed(adminAccess=True)
    assert "administrative access" in changed(adminAccess=True)
    assert "which is not a valid name" in changed(request="a/b/c")
    document = claim("a", "b", {**result(), "driver": "other"})
    assert "has no device of tidegate.gpu" in refusal(document)
    del document["status"]["allocation"]
    assert "is not allocated" in refusal(document)
    with pytest.raises(ClaimError, match=r"has the uid .*, but the kubelet is preparing else"):
        read_claim(document, Reference("b", "a", "else"), NODE, DEVICES)
    with pytest.raises(ClaimError, match="which is not valid"):
        read_claim(document, Reference("b", "a", "../../etc/cron.d/x"), NODE, DEVICES)


def test_too_many_devices_are_refused() -> None:
    assert "has 33 devices" in refusal(claim("a", "b", *[result() for _ in range(33)]))


def failure(function: Callable[..., object], *arguments: object) -> str:
    """Return the message with which a call is refused, or an empty string if it is not refused."""
    try:
        function(*arguments)
    except ClaimError as e:
        line = str(e)
    else:
        return ""
    assert "\n" not in line
    return line


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3)
    ),
    max_leaves=8,
)
_parameters = st.dictionaries(
    st.sampled_from([*schema()["properties"], "more"]),
    _json | st.sampled_from(["mps", "tidegate.gpu/v1", "TidegateConfig", 50]),
)


@given(document=_json | _parameters)
def test_any_parameters_are_accepted_or_refused_in_one_line(document: object) -> None:
    error = failure(check, document, "claim b/a")
    assert not error or (error.startswith("claim b/a: ") and len(error) < 1000)


_result = st.fixed_dictionaries(
    {},
    optional={
        "request": _json | st.sampled_from(["gpu", "a/b"]),
        "driver": st.just("tidegate.gpu"),
        "pool": st.just(NODE),
        "device": st.sampled_from(sorted(DEVICES)),
        "consumedCapacity": _json
        | st.fixed_dictionaries(
            {"memory": _json | st.just("1Gi"), "compute": _json | st.just("10")}
        ),
        "adminAccess": _json,
    },
)


@settings(max_examples=examples(100), deadline=None)
@given(
    results=st.lists(_result | _json, max_size=3),
    parameters=_json | _parameters,
    uid=st.text(max_size=70) | st.just("u-1"),
)
def test_any_allocation_is_accepted_or_refused_in_one_line(
    results: list[dict], parameters: object, uid: str
) -> None:
    entry = {"source": "FromClaim", "opaque": {"driver": "tidegate.gpu", "parameters": parameters}}
    document = claim("a", "b", *results, configs=(entry,), uid=uid or "u")
    document["status"]["allocation"]["devices"]["results"] = results
    if not failure(read_claim, document, Reference("b", "a", uid), NODE, DEVICES):
        found = read_claim(document, Reference("b", "a", uid), NODE, DEVICES)
        for share in found.shares:
            assert MIB <= share.memory < 1 << 50
            assert 1 <= share.compute <= share.compute_limit <= 100
        assert json.dumps(found.describe())


def spec_of(document: dict[str, Any], **minors: int | None) -> dict[str, Any]:
    return make_spec(
        read(document), minors, hook="/usr/bin/tidegate-hook", arguments=("--log", "/x")
    )


def test_the_hooks_arguments_name_the_claim_and_the_share() -> None:
    document = claim("a", "b", result(0), result(1, "main/fast"), uid="u-1")
    spec = spec_of(document)
    assert spec["kind"] == "tidegate.gpu/claim"
    assert [device["name"] for device in spec["devices"]] == ["u-1-gpu_0", "u-1-main_fast_0"]
    first = spec["devices"][0]["containerEdits"]
    assert [hook["hookName"] for hook in first["hooks"]] == ["createRuntime"]
    assert [hook["hookName"] for hook in spec["containerEdits"]["hooks"]] == ["poststop"]
    assert first["hooks"][0]["path"] == "/usr/bin/tidegate-hook"
    assert first["hooks"][0]["args"] == [
        "tidegate-hook", "--log", "/x", "--claim", "u-1", "--share", "gpu/0", "createRuntime",
    ]  # fmt: skip
    assert first["hooks"][0]["env"]  # if `env` is empty, older versions of runc use the image's
    assert first["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]


def test_a_specification_has_the_gpus_device_node_and_the_common_ones(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        lack("needs root")  # for device nodes
    for name, numbers in {
        "nvidiactl": (195, 255),
        "nvidia-uvm": (510, 0),
        "nvidia3": (195, 3),
    }.items():
        os.mknod(tmp_path / name, 0o666 | stat.S_IFCHR, os.makedev(*numbers))
    document = claim("a", "b", result(0))
    spec = make_spec(read(document), {gpu(0)["uuid"]: 3}, dev_dir=str(tmp_path))
    assert [node["path"] for node in spec["containerEdits"]["deviceNodes"]] == [
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
    ]
    (own,) = spec["devices"][0]["containerEdits"]["deviceNodes"]
    assert (own["path"], own["major"], own["minor"], own["permissions"]) == (
        "/dev/nvidia3",
        195,
        3,
        "rw",
    )


def test_a_specification_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "cdi")
    assert directory.uids() == set()
    assert not directory.remove("u-1")
    assert directory.write("u-1", {"kind": "x"})
    assert not directory.write("u-1", {"kind": "x"})
    assert directory.write("u-1", {"kind": "y"})
    path = tmp_path / "cdi" / "tidegate.gpu-claim_u-1.json"
    assert json.loads(path.read_text()) == {"kind": "y"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "cdi" / "tidegate.gpu-claim_u-2.new").write_text("{")  # left by a killed driver
    (tmp_path / "cdi" / "nvidia.json").write_text("{}")
    assert directory.uids() == {"u-1", "u-2"}
    assert directory.remove("u-1")
    directory.remove("u-2")
    assert sorted(p.name for p in (tmp_path / "cdi").iterdir()) == ["nvidia.json"]


def test_a_link_in_place_of_a_specification_is_not_followed(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("as before")
    (tmp_path / "tidegate.gpu-claim_u-1.json").symlink_to(victim)
    with pytest.raises(CdiError):
        directory.write("u-1", {})
    directory.remove("u-1")
    (tmp_path / "tidegate.gpu-claim_u-1.new").symlink_to(victim)
    directory.write("u-1", {})
    assert victim.read_text() == "as before"


def test_a_write_error_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("a file")
    with pytest.raises(TidegateError, match=r"cdi/tidegate\.gpu-claim_u-1\.json: Not a directory"):
        Directory(tmp_path / "cdi").write("u-1", {})
