"""Test `tidegate convert`: what other vendors' pods are converted to, what is reported as not
converted, and that everything else is unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from governor.cli import main
from kube import yamltext
from kube.convert import convert
from kube.convert_pod import ConvertOptions, Taken
from tests.conftest import examples

HERE = Path(__file__).with_name("convert")
CASES = sorted(path.stem for path in HERE.glob("*.yaml") if not path.stem.endswith("-expected"))
OPTIONS = {"several": ConvertOptions(gpu_mib=81920)}


@pytest.mark.parametrize("case", CASES)
def test_manifests_are_converted_as_expected(case: str) -> None:
    """To rewrite the expected files: python -m tests.unit.test_convert."""
    result = convert((HERE / f"{case}.yaml").read_text(), OPTIONS.get(case))
    assert result.text == (HERE / f"{case}-expected.yaml").read_text()
    assert [str(note) for note in result.notes] == (HERE / f"{case}.notes").read_text().splitlines()


@pytest.mark.parametrize("case", CASES)
def test_the_published_schemas_accept_what_is_written(case: str) -> None:
    result = convert((HERE / f"{case}.yaml").read_text(), OPTIONS.get(case))
    documents = list(yaml.safe_load_all(result.text))
    found = 0
    for document in documents:
        for one in document.get("items", [document]):
            if "kubeflow" in one["apiVersion"]:
                continue
            kubernetes_validate.validate(one, "1.36", strict=True)
            found += one["kind"] == "ResourceClaimTemplate"
    assert found >= 1
    assert json.loads(result.json())["manifests"]["kind"] == "List"


def test_comments_and_unchanged_lines_are_kept() -> None:
    before = (HERE / "hami.yaml").read_text()
    after = convert(before).text
    for line in before.splitlines():
        if not re.search(r"nvidia.com|hami|GPU_CORE|value: force|env:", line):
            assert line in after.splitlines(), line


POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: p
  annotations: {{{annotations}}}
spec:
  containers:
    - name: main
      image: x
      resources: {{limits: {{{limits}}}}}
"""


def requests_of(text: str, **options: int) -> tuple[dict, list[str]]:
    """Return the claim that a pod gets, and the notes."""
    result = convert(text, ConvertOptions(**options))
    template = next(one for one in result.items if one["kind"] == "ResourceClaimTemplate")
    return template["spec"]["spec"]["devices"], [str(note) for note in result.notes]


@pytest.mark.parametrize(
    "limits",
    [
        "nvidia.com/gpu: 1",
        "nvidia.com/gpu: 1, nvidia.com/gpucores: 30",
        "nvidia.com/gpu: 1, nvidia.com/gpumem-percentage: 100",
        "tencent.com/vcuda-core: 100",
    ],
)
def test_a_claim_for_all_of_the_memory_names_no_amount(limits: str) -> None:
    """A node offers less memory than a GPU is sold with. A claim for all 80 GiB would never be
    allocated.
    """
    devices, _ = requests_of(POD.format(annotations="", limits=limits), gpu_mib=81920)
    assert "memory" not in devices["requests"][0]["exactly"]["capacity"]["requests"]
    percent = "nvidia.com/gpu: 1, nvidia.com/gpumem-percentage: 50"
    devices, _ = requests_of(POD.format(annotations="", limits=percent), gpu_mib=81920)
    assert devices["requests"][0]["exactly"]["capacity"]["requests"]["memory"] == "40960Mi"


def test_mps_is_for_one_gpu_and_is_reported_as_lost_for_more() -> None:
    """The governor refuses a container with two GPUs under MPS, so with such a claim no container
    would start.
    """
    mps = {"annotations": "nvidia.com/vgpu-mode: mps"}
    devices, notes = requests_of(POD.format(limits="nvidia.com/gpu: 2", **mps))
    assert "config" not in devices
    assert notes == [
        (
            "Pod p: lost: nvidia.com/vgpu-mode: mps: a client of MPS can have only one GPU, not 2; the node's"
            " strategy applies"
        )
    ]
    devices, notes = requests_of(POD.format(limits="nvidia.com/gpu: 1", **mps))
    assert devices["config"][0]["opaque"]["parameters"]["strategy"] == "mps"
    assert notes == []


def test_memory_with_a_unit_does_not_become_a_claim_for_exbibytes() -> None:
    text = POD.format(annotations="", limits="nvidia.com/gpu: 1, nvidia.com/gpumem: 8Gi")
    result = convert(text)
    assert [str(note) for note in result.notes] == [
        (
            "Pod p: lost: nvidia.com/gpumem: '8Gi' is 8589934592 MiB, which no GPU has: this resource"
            " is counted in MiB; the container was left unchanged"
        )
    ]
    assert "ResourceClaimTemplate" not in result.text


def test_a_pod_that_selects_a_node_by_an_nvidia_label_is_reported() -> None:
    """The component that sets the label is part of what the cluster migrates from, so the pod would
    wait for ever.
    """
    pod = yaml.safe_load(POD.format(annotations="", limits="nvidia.com/gpu: 1"))
    pod["spec"]["nodeSelector"] = {"nvidia.com/gpu.product": "A100", "zone": "a"}
    match = [{"key": key, "operator": "Exists"} for key in ("nvidia.com/mig.capable", "disk")]
    pod["spec"]["affinity"] = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": match}]
            }
        }
    }
    result = convert(yaml.safe_dump(pod))
    assert [note.what for note in result.notes] == [
        "nvidia.com/gpu.product",
        "nvidia.com/mig.capable",
    ]
    assert result.items[1]["spec"]["affinity"] == pod["spec"]["affinity"]


def test_an_unchanged_request_is_reported_once() -> None:
    result = convert(POD.format(annotations="", limits="nvidia.com/gpu: 0.5"))
    (note,) = result.notes
    assert "0.5 is not a whole number" in note.reason


def test_quotas_of_hami_are_reported_as_lost() -> None:
    text = "kind: ResourceQuota\nspec: {hard: {limits.nvidia.com/gpumem: 4000}}\n"
    (note,) = convert(text).notes
    assert (note.what, note.level) == ("limits.nvidia.com/gpumem", "lost")


def test_a_byte_order_mark_is_not_left_in_the_middle_of_the_text() -> None:
    text = "\ufeff" + POD.format(annotations="", limits="nvidia.com/gpu: 1")
    assert "\ufeff" not in convert(text).text


def test_a_text_without_gpus_is_returned_byte_for_byte() -> None:
    text = "# one\n\nkind: Pod\nmetadata: {name: 'x'}\n--- # two\n- 1\n- 0x10\n...\n---\nyes\n"
    result = convert(text)
    assert (result.text, result.notes) == (text, [])


def test_the_content_of_an_anchor_is_rewritten_and_that_is_reported() -> None:
    text = """kind: Pod
metadata: {name: a}   # one
spec:
  containers:
    - name: x
      resources: &r
        limits: {nvidia.com/gpu: 1, nvidia.com/gpucores: 20, nvidia.com/gpumem: 1000}
    - name: y
      resources: *r
"""
    result = convert(text)
    assert [note.level for note in result.notes] == ["form"]
    pod = list(yaml.safe_load_all(result.text))[1]
    assert pod["spec"]["containers"] == [
        {"name": "x", "resources": {"claims": [{"name": "gpu-x"}]}},
        {"name": "y", "resources": {"claims": [{"name": "gpu-y"}]}},
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "line 1: "),
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("&a [*a]", "refers to itself"),
        ("a: 2026-13-40", "a value is not valid"),
        ("[" * 5000, "nested too deeply"),
        ("{? [a]: 1}", "unhashable key"),
        ("a: \x01", "special characters are not allowed"),
        ("!!python/object:os.system {}", "could not determine a constructor"),
        ("\n".join(["a: &a [1,1,1,1,1,1,1,1,1,1]"] + [f"{c}: &{c} [{','.join(['*' + p] * 10)}]" for p, c in zip("abcdefgh", "bcdefghi", strict=True)]), "too large"),
    ],
)  # fmt: skip
def test_invalid_yaml_is_refused_in_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert main(["convert", str(path)]) == 65
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "value", ["'{{ .Values.gpus }}'", "1.5", "-1", "[1]", "true", "null", "1e3"]
)
def test_an_invalid_number_leaves_the_container_as_it_was(value: str) -> None:
    text = f"kind: Pod\nspec:\n  containers:\n    - resources: {{limits: {{nvidia.com/gpu: {value}}}}}\n"
    result = convert(text)
    assert result.lost >= 1
    assert "is not a whole number" in str(result.notes[0])
    assert list(yaml.safe_load_all(result.text)) == list(yaml.safe_load_all(text))


def test_two_workloads_with_the_same_name_get_templates_with_different_names() -> None:
    pod = "kind: Pod\nmetadata: {name: a, namespace: %s}\nspec: {containers: [{name: x, resources: {limits: {nvidia.com/gpu: 1}}}]}\n"
    result = convert(f"{pod % 'n'}---\n{pod % 'm'}")
    names = [one["metadata"]["name"] for one in result.items if one["kind"] != "Pod"]
    assert names == ["a-gpu", "a-gpu-2"]


def test_the_exit_status_and_the_output_streams(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["convert", str(HERE / "hami.yaml")]) == 1
    out, err = capsys.readouterr()
    assert list(yaml.safe_load_all(out))
    assert "lost: hami.io/gpu-scheduler-policy: binpack" in err
    assert main(["convert", "--json", str(HERE / "hami.yaml")]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert {note["level"] for note in json.loads(out)["notes"]} == {"lost", "changed"}
    good = b"kind: Pod\nspec: {containers: [{resources: {limits: {nvidia.com/gpu: 1}}}]}\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(good)))
    assert main(["convert", "-"]) == 0
    assert main(["convert", "/nowhere"]) == 65


PLAIN = "kind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n  - name: x\n    resources:\n      limits:\n        nvidia.com/gpu: 1\n"


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("        memory: 1Gi\n        memory: 2Gi\n", "memory on line 10"),
        ("        nvidia.com/gpu: 2\n", "nvidia.com/gpu on line 9"),
        # With this key, no request for a GPU is left: nothing is changed, but the key is reported.
        ("spec: {nodeName: b}\n", "spec on line 9"),
    ],
)
def test_a_duplicate_key_is_reported(more: str, key: str) -> None:
    result = convert(PLAIN + more)
    assert str(result.notes[0]) == (
        f"Pod a: lost: {key}: the key occurs more than once, and the last one counts"
    )
    assert result.lost == 1
    others = PLAIN.replace("nvidia.com/gpu", "other") + more.replace("nvidia.com/gpu", "other")
    assert convert(others).notes == []


def test_a_key_of_a_type_that_json_lacks_becomes_a_string() -> None:
    keys = "metadata:\n  annotations:\n    2020-01-01: a\n    1: b\n    null: c\n    !!binary aGk=: d\n"
    (item,) = json.loads(convert(f"kind: ConfigMap\n{keys}").json())["manifests"]["items"]
    assert item["metadata"]["annotations"] == {
        "2020-01-01": "a", "1": "b", "null": "c", "b'hi'": "d",
    }  # fmt: skip


def test_notes_contain_no_control_characters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "pods.yaml"
    file.write_text(
        PLAIN.replace("{name: a}", '{name: "\\e]0;x\\a\\u202e\\n# y", annotations: {nvidia.com/"\\e[2J": b}}')
        .replace('nvidia.com/"', '"nvidia.com/')
    )  # fmt: skip
    assert main(["convert", str(file)]) == 1
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (*out.splitlines(), *err.splitlines()))
    assert len(err.splitlines()) == 1


def test_a_text_of_comments_alone_is_returned_unchanged() -> None:
    for text in ("# nothing\n\n# more\n", "\n"):
        assert convert(text).text == text


def test_the_time_to_name_a_workload_does_not_grow_with_the_number_of_workloads() -> None:
    """With one attempt per earlier workload, the last of 200,000, in a file of 32 MiB, would take
    200,000 attempts.
    """
    taken = Taken(["x", "x-3"])
    names = [taken.take("x") for _ in range(200_000)]
    assert names[:3] == ["x-2", "x-4", "x-5"]
    assert len(set(names)) == len(names)


def test_a_conversion_needs_neither_grpc_nor_a_client() -> None:
    code = (
        "import sys; from governor.cli import main; main(['convert', sys.argv[1]]);"
        "print({m.split('.')[0] for m in sys.modules} & {'grpc', 'google', 'kubernetes', 'pynvml'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(HERE / "hami.yaml")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("set()\n")


# Arbitrary input

keys = st.sampled_from(
    [
        *("kind", "metadata", "spec", "template", "items", "containers", "initContainers", "name"),
        *(
            "resources",
            "limits",
            "requests",
            "claims",
            "annotations",
            "env",
            "value",
            "jobTemplate",
        ),
        *("nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores", "tencent.com/vcuda-core"),
        *("nvidia.com/use-gpuuuid", "tencent.com/vcuda-core-limit", "hami.io/x", "resourceClaims"),
    ]
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5000), st.floats(allow_nan=False), st.text(max_size=8),
    st.sampled_from(["Pod", "List", "CronJob", "Deployment", "Always", "GPU_CORE_UTILIZATION_POLICY"]),
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | scalars, inner, max_size=5),
    max_leaves=25,
)
amounts = st.one_of(st.integers(0, 300), st.sampled_from(["1", "3k", "x", None, "12Gi"]))
limits = st.dictionaries(
    st.sampled_from(
        [
            *("nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "cpu"),
            *("nvidia.com/gpucores", "tencent.com/vcuda-core", "tencent.com/vcuda-memory"),
        ]
    ),
    amounts,
)
containers = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["a", "b", "Ä b"])},
        optional={
            "resources": st.fixed_dictionaries({"limits": limits}, optional={"requests": limits}),
            "restartPolicy": st.just("Always"),
            "command": st.lists(st.text(max_size=5), max_size=2),
            "env": anything,
        },
    ),
    max_size=3,
)
pods = st.fixed_dictionaries(
    {
        "kind": st.just("Pod"),
        "metadata": st.fixed_dictionaries({"name": st.just("p")}, optional={"annotations": anything}),
        "spec": st.fixed_dictionaries({"containers": containers}, optional={"initContainers": containers}),
    },
    optional={"status": anything},
)  # fmt: skip


def _places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every value in a document, except the document itself."""
    pairs = {dict: dict.items, list: enumerate}.get(type(value), lambda _: ())
    for key, one in pairs(value):
        yield (*path, key)
        yield from _places(one, (*path, key))


@pytest.mark.parametrize(
    "foreign", [["Pod"], *(pytest.param(v, marks=pytest.mark.slow) for v in ({"a": 1}, 7, None))]
)
@pytest.mark.parametrize("case", CASES)
def test_no_value_of_a_wrong_type_makes_a_conversion_fail(case: str, foreign: object) -> None:
    """Any value that is read may have any type: apiVersion, kind, metadata, a limit, a variable."""
    for document in yaml.safe_load_all((HERE / f"{case}.yaml").read_text()):
        for path in _places(document):
            changed = copy.deepcopy(document)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = foreign
            result = convert(json.dumps(changed), ConvertOptions(gpu_mib=81920))
            assert result.items


def test_a_kind_that_is_not_a_string_is_passed_through_and_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "foreign.yaml"
    file.write_text("kind: [ResourceQuota]\nspec: {hard: {nvidia.com/gpu: 3}}\n")
    assert main(["convert", str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.out.endswith("kind: [ResourceQuota]\nspec: {hard: {nvidia.com/gpu: 3}}\n")
    assert printed.err == (
        "['ResourceQuota'] ?: lost: nvidia.com/gpu: it was left unchanged in .spec.hard, "
        "which is not a container's limit in a known kind of workload\n"
    )


@settings(deadline=None, max_examples=examples(50), suppress_health_check=list(HealthCheck))
@given(st.lists(pods | anything, min_size=1, max_size=3), st.booleans())
def test_no_manifest_makes_a_conversion_fail_and_the_text_equals_the_items(
    values: list,
    flow: bool,  # noqa: FBT001
) -> None:
    text = yaml.safe_dump_all(values, default_flow_style=flow, sort_keys=False, allow_unicode=True)
    before = list(yaml.safe_load_all(text))
    result = convert(text)
    result.json()
    assert yamltext.same(
        list(yaml.safe_load_all(result.text)),
        [v for v in result.items if v is not None]
        if None not in before
        else list(yaml.safe_load_all(result.text)),
    )
    assert _without(result.items, before) is None


@settings(deadline=None, max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(st.text(max_size=60))
@example("a: &a\n  b: 1\n")
def test_no_text_makes_a_conversion_fail(text: str) -> None:
    with contextlib.suppress(yamltext.UnreadableError):
        convert(text)


@settings(deadline=None, max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(anything, anything, st.booleans())
def test_one_value_becomes_another_in_the_text(one, other, flow: bool) -> None:  # noqa: FBT001
    text = yaml.safe_dump(one, default_flow_style=flow, sort_keys=False, allow_unicode=True)
    (document,) = yamltext.read(text)
    written, _ = yamltext.rewrite(document, other)
    assert yamltext.same(yaml.safe_load(written), yaml.safe_load(yamltext.dump(other)))


def _without(after: list, before: list) -> str | None:
    """Compare both without the parts that a conversion may touch; return the difference."""

    def strip(value):
        if isinstance(value, list):
            return [strip(one) for one in value]
        if not isinstance(value, dict):
            return value
        touched = {
            "resources",
            "env",
            "annotations",
            "resourceClaims",
            "schedulerName",
            "runtimeClassName",
        }
        return {key: strip(one) for key, one in value.items() if key not in touched}

    kept = [
        one
        for one in copy.deepcopy(after)
        if not (isinstance(one, dict) and one.get("kind") == "ResourceClaimTemplate")
    ]
    wanted = [one for one in before if one is not None]
    return (
        None
        if yamltext.same(strip(kept), strip(wanted))
        else f"{strip(kept)} is not {strip(wanted)}"
    )


if __name__ == "__main__":
    for name in CASES:
        made = convert((HERE / f"{name}.yaml").read_text(), OPTIONS.get(name))
        (HERE / f"{name}-expected.yaml").write_text(made.text)
        (HERE / f"{name}.notes").write_text("".join(f"{note}\n" for note in made.notes))


def test_comments_stay_where_they_were() -> None:
    """The comments are at the top, between list items of which one is removed, and after values
    that stay.
    """
    text = (
        "# licence\n\n"
        "# the pod\n"
        "apiVersion: v1\n"
        "kind: Pod\n"
        "metadata:\n"
        "  name: a # its name\n"
        "spec:\n"
        "  containers:\n"
        "    # the first\n"
        "    - name: main\n"
        "      image: x\n"
        "      env:\n"
        "        # debugging\n"
        "        - name: A\n"
        '          value: "1"  # one\n'
        "        - name: CUDA_DISABLE_CONTROL\n"
        '          value: "true"\n'
        "        # the last\n"
        "        - name: B\n"
        '          value: "2" # two\n'
        "      resources:\n"
        "        limits:\n"
        "          nvidia.com/gpu: 1\n"
        "          nvidia.com/gpumem: 3000\n"
        '          cpu: "2" # two\n'
        "  restartPolicy: Never # never\n"
    )
    converted = convert(text)
    assert converted.text.startswith("# licence\n\n---\n")
    pod = converted.text.rpartition("\n---\n")[2]
    assert pod.startswith("# the pod\napiVersion: v1\n")
    assert [line.strip() for line in pod.splitlines() if "#" in line] == [
        "# the pod",
        "name: a # its name",
        "# the first",
        "# debugging",
        'value: "1"  # one',
        "# the last",
        'value: "2" # two',
        'cpu: "2" # two',
        "restartPolicy: Never # never",
    ]
    assert not [note for note in converted.notes if note.level == "form"]


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("- a # 1\n- b # 2\n- c # 3\n", ["a", "c"], "- a # 1\n- c # 3\n"),
        ("x:\n  - a # 1\n  # kept\n  - b\n", {"x": ["a"]}, "x:\n  - a # 1\n  # kept\n"),
        ("x:\n  - a # 1\ny: 2 # 3\n", {"x": ["a", "b"], "y": 2}, "x:\n  - a # 1\n  - b\ny: 2 # 3\n"),
        ("x:\n- k: 1 # 1\n  l: 2\n- k: 3 # 3\n", {"x": [{"k": 3}]}, "x:\n- k: 3 # 3\n"),
        ("x:\n  - - a\n    - b # 1\n  - c # 2\n", {"x": ["c"]}, "x:\n  - c # 2\n"),
    ],
)  # fmt: skip
def test_a_list_of_another_length_keeps_the_rest_as_it_was(
    before: str, after: object, text: str
) -> None:
    (document,) = yamltext.read(before)
    assert yamltext.rewrite(document, after) == (text, True)
