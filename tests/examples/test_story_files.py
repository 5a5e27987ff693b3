"""Tidegate accepts what a story's page says to copy: annotations, configurations, commands, links."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from bench.provenance import ROOT
from governor import cli
from governor.config import read_config
from oci_hook.request import check_request, parse_annotations
from tests.examples.story_files import (
    EXAMPLES,
    PREFIX,
    STORIES,
    annotations_of,
    blocks,
    containers,
    pods,
    readme,
    shell_lines,
)

SCHEMA = json.loads((ROOT / "oci_hook/annotations.schema.json").read_text())
HEADINGS = ["The files to copy", "See it", "What to change"]


def accept(annotations: dict[str, str]) -> None:
    """Check annotations with the hook's parser and with the schema."""
    assert annotations
    check_request(parse_annotations(annotations), annotations)
    jsonschema.validate(annotations, SCHEMA)


def test_every_directory_of_a_story_is_tested():
    others = {"workloads", "three-containers", "first-container"}
    found = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert found - others == set(STORIES)


@pytest.mark.parametrize("story", STORIES)
def test_a_page_has_what_a_reader_looks_for(story):
    text = readme(story)
    found = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [heading for heading in found if heading in HEADINGS] == HEADINGS
    assert f"\nexamples/{story}/run\n" in text
    assert os.access(EXAMPLES / story / "run", os.X_OK)
    for path in (EXAMPLES / story).iterdir():
        # Files to copy are linked from the page; files that end in .tidegate.yaml are in a table.
        if path.is_file() and path.name not in {"README.md", "run"}:
            assert f"]({path.name})" in text, f"the page has no link to {path.name}"


@pytest.mark.parametrize("story", STORIES)
def test_the_annotations_of_a_story_are_accepted(story):
    for asked in containers(story).values():
        accept(asked)
    if story != "moving-from-hami":
        assert containers(story)


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*/config.yaml")), ids=lambda path: path.parent.name
)
def test_the_configuration_of_a_story_is_accepted(path):
    read_config(path)


@pytest.mark.parametrize("story", STORIES)
def test_the_commands_of_a_page_use_the_annotations_of_its_files(story):
    said = list(containers(story).values())
    for words in shell_lines(readme(story)):
        program = words[0]
        if {"podman", "docker"} & set(words):
            given = annotations_of(words)
            accept(given)
            assert given in said, words
            if "docker" in words:
                assert words[words.index("--runtime") + 1] == "tidegate"
            if "--name" in words:
                name = words[words.index("--name") + 1]
                assert given in (said if story == "jupyter-class" else [
                    containers(story)[re.sub(r"-[0-9]+$", "", name) if name not in containers(story) else name]
                ])  # fmt: skip
        if program.startswith("examples/"):
            assert os.access(ROOT / program, os.X_OK), words
        elif program == "tidegate":
            cli.parser().parse_args(words[1:])
        else:
            assert program in {"podman", "docker", "make"}, words


@pytest.mark.parametrize("story", STORIES)
def test_commands_in_the_text_of_a_page_are_parsed(story):
    for code in re.findall(r"`(tidegate [^`]+)`", readme(story)):
        cli.parser().parse_args(code.split()[1:])


@pytest.mark.parametrize("story", STORIES)
def test_annotations_in_the_text_of_a_page_are_accepted(story):
    written = re.findall(r"`(tidegate\.gpu/[\w-]+)(?:: |=)\"?([^`\"]+)\"?`", readme(story))
    for name, value in written:
        parse_annotations({name: value})
    for name in re.findall(r"tidegate\.gpu/([\w-]+)", readme(story)):
        assert name in SCHEMA["properties"] or PREFIX + name in SCHEMA["properties"], name


@pytest.mark.parametrize("story", STORIES)
def test_the_links_of_a_page_lead_to_existing_files(story):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", readme(story)):
        if "://" not in link:
            assert (EXAMPLES / story / link).exists(), link


def test_the_hub_s_settings_are_those_of_a_student():
    (block,) = (b for b in blocks(readme("jupyter-class")) if b.language == "python")
    values = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in ast.parse(block.text).body
        if isinstance(node, ast.Assign)
    }
    assert values["c.KubeSpawner.extra_annotations"] == containers("jupyter-class")["student"]
    assert values["c.KubeSpawner.extra_pod_config"] == {"runtimeClassName": "tidegate"}


def test_the_runner_s_settings_are_those_of_a_job():
    (block,) = (b for b in blocks(readme("ci-runners")) if b.language == "toml")
    settings = tomllib.loads(block.text)["runners"]["kubernetes"]
    assert settings["pod_annotations"] == containers("ci-runners")["tests"]
    assert settings["runtime_class_name"] == "tidegate"


# ---- gpu-queue ----

REFUSAL = "tidegate: GPU 0 has 1 MiB of memory left to grant; ask for less, or wait until a container ends"
COMMAND = """#!/bin/sh
echo said; echo warned >&2
echo once >>"$COUNT"
[ "$(wc -l <"$COUNT")" -gt {refusals} ] || {{ echo 'hook: {line}' >&2; exit 1; }}
exit {status}
"""


def queue(tmp_path: Path, command: str, running: str = "[1]", **environment: str):
    """Run gpu-queue before a command; `running` is the output of `tidegate ps --json`."""
    for name, text in (("tidegate", f"#!/bin/sh\necho '{running}'\n"), ("start", command)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    count = tmp_path / "count"
    done = subprocess.run(
        [EXAMPLES / "ci-runners/gpu-queue", tmp_path / "start", "a b"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "COUNT": str(count), "TMPDIR": str(tmp_path),
            "GPU_QUEUE_EVERY": "0.01", **environment,
        },
        capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    tries = len(count.read_text().splitlines()) if count.exists() else 0
    assert not list(tmp_path.glob("tmp.*")), "a temporary file is left"
    return done, tries


@pytest.mark.parametrize("status", [0, 3])
def test_the_queue_waits_and_ends_as_the_command_does(tmp_path, status):
    command = COMMAND.format(refusals=2, line=REFUSAL, status=status)
    done, tries = queue(tmp_path, command)
    assert (done.returncode, tries) == (status, 3)
    assert done.stdout == "said\n" * 3
    assert done.stderr.count("warned\n") == 3
    assert done.stderr.count("gpu-queue: ") == 1


def test_the_queue_does_not_retry_after_other_failures(tmp_path):
    line = "tidegate: annotation tidegate.gpu/memory is 8Gb; write 8Gi"
    done, tries = queue(tmp_path, COMMAND.format(refusals=9, line=line, status=0))
    assert (done.returncode, tries) == (1, 1)
    assert "gpu-queue" not in done.stderr


def test_the_queue_gives_up_when_no_container_runs(tmp_path):
    done, tries = queue(tmp_path, COMMAND.format(refusals=99, line=REFUSAL, status=0), "[]")
    assert (done.returncode, tries) == (1, 3)
    assert done.stderr.endswith("gpu-queue: no container is running whose end could make room\n")


def test_the_queue_gives_up_after_its_time_limit(tmp_path):
    command = COMMAND.format(refusals=10**6, line=REFUSAL, status=0)
    done, _ = queue(tmp_path, command, GPU_QUEUE_S="0")
    assert done.returncode == 1
    assert done.stderr.endswith("gpu-queue: waited 0 s\n")


# ---- to-tidegate ----


def convert(*documents: dict, arguments: tuple[str, ...] = ()) -> tuple[list[dict], list[str]]:
    """Convert manifests; return them, and the messages."""
    done = subprocess.run(
        [EXAMPLES / "moving-from-hami/to-tidegate", *arguments],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        input=yaml.safe_dump_all(documents), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return list(yaml.safe_load_all(done.stdout)), done.stderr.splitlines()


def pod(limits: dict, annotations: dict | None = None, **spec: object) -> dict:
    container = {"name": "main", "image": "i", "resources": {"limits": limits}}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "p", "annotations": annotations or {}},
        "spec": {"containers": [container], **spec},
    }  # fmt: skip


def first_cells(page: str, below: str) -> list[str]:
    """Return the first cells of the first table below a heading."""
    lines = page.partition(f"\n{below}\n")[2].splitlines()
    table = itertools.takewhile(
        lambda line: line.startswith("|"), itertools.dropwhile(lambda line: line[:1] != "|", lines)
    )
    return [line.split("|")[1].strip() for line in table][2:]


def test_the_page_of_the_story_and_that_on_kubernetes_agree_about_the_scheduler():
    page = (EXAMPLES / "moving-from-hami/README.md").read_text()
    kubernetes = (EXAMPLES.parent / "docs/howto/kubernetes.md").read_text()
    assert first_cells(page, "## First: who chooses the node") == [
        "requires", "a pod requests a GPU with", "convert with", "the node is chosen by",
        "the GPU is chosen by", "a pod that fits nowhere",
    ]  # fmt: skip
    for said in (
        "cluster's own scheduler",  # with claims, Kubernetes chooses
        "DRAConsumableCapacity",
        "`Pending`",
        "CEL selectors",
        "scoringStrategy",
    ):
        assert said in page, said
        assert said in kubernetes, said
    # Every resource that the page on Kubernetes names is on the other page, too.
    for cell in first_cells(kubernetes, "## Pods that were written for others"):
        for word in re.findall(r"(?:nvidia|tencent)\.com/([a-z-]+)", cell):
            assert word in page, word


def test_the_committed_pods_are_conversions_of_the_originals():
    assert len(pods()) == 2
    for path in pods():
        before = yaml.safe_load(path.with_name(path.name.replace(".tidegate", "")).read_text())
        (after,), _ = convert(before)
        assert after == yaml.safe_load(path.read_text())
        accept(after["metadata"]["annotations"])


HAMI = [
    ({"nvidia.com/gpu": 1}, {}, {}),
    ({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000}, {}, {"count": "2", "memory": "3000Mi"}),
    ({"nvidia.com/gpumem-percentage": 50}, {}, {"memory": "40960Mi"}),
    ({"nvidia.com/gpumem": 1000, "nvidia.com/gpucores": 0}, {}, {"memory": "1000Mi"}),
    ({"nvidia.com/gpu": "1", "nvidia.com/gpucores": "30"}, {}, {"compute": "30"}),
    (
        {"nvidia.com/gpu": 1},
        {"nvidia.com/use-gpuuuid": "GPU-6d0b7ab0-2f4f-4d5e-9b3a-0c2d9d2a7f10"},
        {"devices": "GPU-6d0b7ab0-2f4f-4d5e-9b3a-0c2d9d2a7f10"},
    ),
    ({"nvidia.com/gpu": 1}, {"nvidia.com/vgpu-mode": "mps"}, {"strategy": "mps"}),
    ({"nvidia.com/gpu": 1}, {"nvidia.com/vgpu-mode": "hami-core"}, {}),
    ({"nvidia.com/gpu": 1}, {"hami.io/vgpu-node": "n", "hami.io/bind-phase": "success"}, {}),
    (
        {"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 30},
        {"tencent.com/vcuda-core-limit": "50"},
        {"compute": "30", "compute-limit": "50", "memory": "7680Mi"},
    ),
    (
        {"tencent.com/vcuda-core": 200, "tencent.com/vcuda-memory": 60},
        {},
        {"compute": "100", "count": "2", "memory": "7680Mi"},
    ),
]


@pytest.mark.parametrize(("limits", "annotations", "wanted"), HAMI)
def test_what_a_pod_asks_for_becomes_annotations(limits, annotations, wanted):
    (after,), _ = convert(pod(limits, annotations), arguments=("--gpu-memory", "80Gi"))
    assert after["metadata"]["annotations"] == {PREFIX + key: v for key, v in wanted.items()}
    parse_annotations(after["metadata"]["annotations"])
    assert after["spec"] == {
        "containers": [{"name": "main", "image": "i"}],
        "runtimeClassName": "tidegate",
    }


SAID = [
    ({"nvidia.com/gpumem-percentage": 50}, {}, "gpumem-percentage 50: pass --gpu-memory"),
    ({"nvidia.com/gpu": 1}, {}, "no gpumem"),
    ({"nvidia.com/gpu": 1, "nvidia.com/priority": 1}, {}, "nvidia.com/priority has no equivalent"),
    ({"nvidia.com/gpumem": 1}, {"nvidia.com/use-gputype": "A10"}, "a nodeSelector"),
    ({"nvidia.com/gpumem": 1}, {"nvidia.com/vgpu-mode": "mig"}, "Tidegate shares whole GPUs"),
    ({"nvidia.com/gpumem": 1}, {"hami.io/gpu-scheduler-policy": "binpack"}, "placement: pack"),
    (
        {"nvidia.com/gpumem": 1},
        {"nvidia.com/numa-bind": "true"},
        "nvidia.com/numa-bind: true belongs to the node's configuration: placement: topology",
    ),
    (
        {"nvidia.com/gpumem": 1},
        {"nvidia.com/use-gpuuuid": "GPU-a,GPU-b"},
        "names 2 GPUs to choose from, which has no equivalent",
    ),
]


@pytest.mark.parametrize(("limits", "annotations", "line"), SAID)
def test_settings_without_an_equivalent_are_reported(limits, annotations, line):
    (after,), said = convert(pod(limits, annotations))
    assert any(one.startswith("Pod p: ") and line in one for one in said), said
    assert not set(after["metadata"]["annotations"]) & set(annotations)


def test_variables_of_the_library_are_removed_and_others_stay():
    before = pod({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1000, "nvidia.com/gpucores": 30})
    before["spec"]["containers"][0]["env"] = [
        {"name": "GPU_CORE_UTILIZATION_POLICY", "value": "disable"},
        {"name": "CUDA_DEVICE_MEMORY_LIMIT_0", "value": "1g"},
        {"name": "CUDA_DISABLE_CONTROL", "value": "true"},
        {"name": "CUDA_OVERSUBSCRIBE", "value": "true"},
        {"name": "MODEL", "value": "large"},
    ]
    (after,), said = convert(before)
    assert after["spec"]["containers"][0]["env"] == [{"name": "MODEL", "value": "large"}]
    assert after["metadata"]["annotations"][PREFIX + "compute-limit"] == "100"
    assert any("CUDA_DISABLE_CONTROL has no equivalent" in line for line in said)
    assert "Pod p: CUDA_OVERSUBSCRIBE belongs to the node's configuration: memory.overbook" in said


def test_pod_templates_are_converted_and_other_documents_are_unchanged():
    template = {key: pod({"nvidia.com/gpumem": 500})[key] for key in ("metadata", "spec")}
    meta = {"name": "x"}
    documents = [
        {"kind": "ConfigMap", "metadata": meta, "data": {"nvidia.com/gpu": "1"}},
        {"kind": "Deployment", "metadata": meta, "spec": {"replicas": 2, "template": template}},
        {"kind": "CronJob", "metadata": meta, "spec": {"jobTemplate": {"spec": {"template": template}}}},
        {"kind": "List", "items": [pod({"nvidia.com/gpumem": 500}), pod({"cpu": 1})]},
    ]  # fmt: skip
    after, _ = convert(*documents)
    assert after[0] == documents[0]
    assert after[3]["items"][1] == documents[3]["items"][1]
    for changed in (
        after[1]["spec"]["template"],
        after[2]["spec"]["jobTemplate"]["spec"]["template"],
        after[3]["items"][0],
    ):
        assert changed["metadata"]["annotations"] == {PREFIX + "memory": "500Mi"}
        assert changed["spec"]["runtimeClassName"] == "tidegate"


def test_containers_of_a_pod_that_differ_are_reported():
    two = pod({"nvidia.com/gpumem": 500})
    two["spec"]["containers"].append({"name": "log", "image": "l"})
    _, said = convert(two)
    assert said == [
        "Pod p: annotations apply to every container of the pod, but its containers differ"
    ]
