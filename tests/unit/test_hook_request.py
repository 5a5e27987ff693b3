"""Tests of the annotations: one corpus for the hook's parser and for the schema that documents it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oci_hook.errors import AnnotationError
from oci_hook.request import CAPABILITIES, PARSERS, Request, check_request, parse_annotations

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "oci_hook" / "annotations.schema.json").read_text()
)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
P = "tidegate.gpu/"
UUID = "GPU-6d0b7ab0-2f4f-4d5e-9b3a-0c2d9d2a7f10"

ACCEPTED: list[tuple[dict[str, str], Request]] = [
    ({}, Request()),
    ({"memory": "8Gi"}, Request(memory=8589934592)),
    ({"memory": "512Mi"}, Request(memory=536870912)),
    ({"memory": "1Ki"}, Request(memory=1024)),
    ({"memory": "999Ti"}, Request(memory=1098412116148224)),
    ({"memory": "8589934592"}, Request(memory=8589934592)),
    ({"memory": "1"}, Request(memory=1)),
    ({"compute": "1"}, Request(compute=1)),
    ({"compute": "100"}, Request(compute=100)),
    ({"compute": "30", "compute-limit": "60"}, Request(compute=30, compute_limit=60)),
    ({"compute-limit": "60"}, Request(compute_limit=60)),
    ({"count": "1"}, Request(gpus=1)),
    ({"count": "64"}, Request(gpus=64)),
    ({"devices": "0"}, Request(devices=("0",))),
    ({"devices": "1,0"}, Request(devices=("1", "0"))),
    ({"devices": "1,11"}, Request(devices=("1", "11"))),
    ({"devices": f"0,{UUID}"}, Request(devices=("0", UUID))),
    ({"strategy": "auto"}, Request()),
    ({"class": "throughput"}, Request()),
    ({"class": "latency"}, Request(work_class="latency")),
    ({"parking": "never"}, Request(parking="never")),
    ({"strategy": "passthrough"}, Request(strategy="passthrough")),
    ({"capabilities": "utility,compute"}, Request()),
    ({"capabilities": "video"}, Request(capabilities=("video",))),
    ({"capabilities": "all"}, Request(capabilities=("all",))),
    ({"driver": "optional"}, Request(optional=True)),
    ({"driver": "required"}, Request()),
]

REJECTED: list[dict[str, str]] = [
    {"memory": ""},
    {"memory": "0"},
    {"memory": "0Gi"},
    {"memory": "08Gi"},
    {"memory": "-8Gi"},
    {"memory": "+8Gi"},
    {"memory": "8 Gi"},
    {"memory": " 8Gi"},
    {"memory": "8Gi "},
    {"memory": "8Gi\n"},
    {"memory": "8G"},
    {"memory": "8GB"},
    {"memory": "8gi"},
    {"memory": "8GiB"},
    {"memory": "1.5Gi"},
    {"memory": "1e9"},
    {"memory": "0x10"},
    {"memory": "1_000"},
    {"memory": "1000Ti"},
    {"memory": "1000000Gi"},
    {"memory": "1000000000000000"},
    {"memory": "٨Gi"},
    {"memory": "GiKi"},
    {"compute": "0"},
    {"compute": "101"},
    {"compute": "50%"},
    {"compute": "0.5"},
    {"compute": "050"},
    {"compute": "100\n"},
    {"compute": "-1"},
    {"compute-limit": "0"},
    {"compute-limit": "1000"},
    {"count": "0"},
    {"count": "65"},
    {"count": "two"},
    {"count": "1\n"},
    {"count": "1", "devices": "0"},
    {"devices": ""},
    {"devices": "0,"},
    {"devices": ",0"},
    {"devices": "0,0"},
    {"devices": "0,1,0"},
    {"devices": "1,0,2,0"},
    {"devices": f"{UUID},{UUID}"},
    {"devices": "64"},
    {"devices": "00"},
    {"devices": "all"},
    {"devices": "0, 1"},
    {"devices": "0\n"},
    {"devices": "GPU-6d0b7ab0"},
    {"devices": UUID.upper()},
    {"class": "Latency"},
    {"class": ""},
    {"strategy": "Auto"},
    {"strategy": ""},
    {"capabilities": "all,compute"},
    {"capabilities": "compute,all"},
    {"capabilities": "all,all"},
    {"capabilities": "All"},
    {"capabilities": "all\n"},
    {"capabilities": ""},
    {"capabilities": "compute,,utility"},
    {"capabilities": "compute,compute"},
    {"capabilities": "compute\n"},
    {"driver": "maybe"},
    {"driver": ""},
    {"Memory": "8Gi"},
    {"mem": "8Gi"},
    {"": "8Gi"},
    {"memory ": "8Gi"},
    {"compute_limit": "8"},
    {"memory\n": "8Gi"},
]


def prefixed(annotations: dict[str, str]) -> dict[str, str]:
    return {P + name: value for name, value in annotations.items()}


def accepts(annotations: dict[str, str]) -> bool:
    try:
        parse_annotations(annotations)
    except AnnotationError:
        return False
    return True


def test_the_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(("annotations", "request_"), ACCEPTED)
def test_parser_and_schema_accept(annotations: dict[str, str], request_: Request) -> None:
    assert parse_annotations(prefixed(annotations)) == request_
    VALIDATOR.validate(prefixed(annotations))


@pytest.mark.parametrize("annotations", REJECTED)
def test_parser_and_schema_reject(annotations: dict[str, str]) -> None:
    with pytest.raises(AnnotationError) as caught:
        parse_annotations(prefixed(annotations))
    assert not VALIDATOR.is_valid(prefixed(annotations))
    line = caught.value.line()
    assert line.isascii()
    assert line.isprintable()


VALUES = st.one_of(
    st.text(max_size=12),
    st.tuples(
        st.integers(0, 10**16).map(str), st.sampled_from(["", "Ki", "Mi", "Gi", "Ti", "K"])
    ).map("".join),
    st.lists(
        st.sampled_from([*CAPABILITIES, "all", "0", "1", "63", "64", UUID, ""]), max_size=4
    ).map(",".join),
    st.sampled_from(["auto", "mps", "required", "optional", "100"]),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*PARSERS, "mem"]).map(P.__add__), VALUES, max_size=3))
def test_parser_and_schema_agree_on_anything(annotations: dict[str, str]) -> None:
    assert accepts(annotations) == VALIDATOR.is_valid(annotations)


def test_every_annotation_of_the_schema_is_in_the_reference() -> None:
    reference = (Path(__file__).parents[2] / "docs" / "reference" / "annotations.md").read_text()
    assert set(SCHEMA["properties"]) == {P + name for name in PARSERS}
    for name in SCHEMA["properties"]:
        assert f"`{name}`" in reference


@pytest.mark.parametrize(
    ("annotations", "line"),
    [
        (
            {"memory": "8GB"},
            (
                "tidegate: annotation tidegate.gpu/memory is '8GB', but must be a whole number of bytes, or of Ki, Mi, Gi"
                " or Ti, from 1 to 999Ti; write it like 8Gi or 512Mi"
            ),
        ),
        (
            {"memoryy": "8Gi"},
            (
                "tidegate: annotation tidegate.gpu/memoryy is unknown: the names under tidegate.gpu/ are memory, compute,"
                " compute-limit, class, count, devices, strategy, parking, capabilities, driver; did you mean tidegate.gpu/memory?"
            ),
        ),
        (
            {"zzz": "8Gi"},
            (
                "tidegate: annotation tidegate.gpu/zzz is unknown: the names under tidegate.gpu/ are memory, compute,"
                " compute-limit, class, count, devices, strategy, parking, capabilities, driver; remove it"
            ),
        ),
        (
            {"strategy": "\x1b[2Jmps\nroot:"},
            (
                "tidegate: annotation tidegate.gpu/strategy is '\\x1b[2Jmps\\nroot:', but must be auto or timeslice or mps"
                " or passthrough; leave it out for auto"
            ),
        ),
        (
            {"count": "1", "devices": "0"},
            (
                "tidegate: annotations tidegate.gpu/count and tidegate.gpu/devices are both given; give either the number"
                " of GPUs or their names, not both"
            ),
        ),
    ],
)
def test_error_lines_of_annotations(annotations: dict[str, str], line: str) -> None:
    with pytest.raises(AnnotationError) as caught:
        parse_annotations(prefixed(annotations))
    assert caught.value.line() == line


def test_a_long_value_is_truncated() -> None:
    with pytest.raises(AnnotationError) as caught:
        parse_annotations({P + "memory": "9" * 100000})
    assert len(caught.value.line()) < 300


def test_a_limit_below_the_guarantee_is_refused() -> None:
    annotations = {P + "compute": "60", P + "compute-limit": "30"}
    with pytest.raises(
        AnnotationError, match=r"compute-limit is 30, below tidegate.gpu/compute, which is 60"
    ):
        check_request(parse_annotations(annotations), annotations)


def test_annotations_that_do_not_fit_a_line_of_the_protocol_are_refused() -> None:
    annotations = {P + "devices": ",".join([UUID] * 2000)}
    with pytest.raises(AnnotationError, match="more than 32768"):
        check_request(Request(), annotations)
