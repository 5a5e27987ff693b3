"""Tests of oci_hook.claims: only the entries of this hook in config.json name a container's claims."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from governor import cdi
from oci_hook.claims import as_request, find_claims, leads_to, require_named
from oci_hook.edits import DeviceNode, HookEntry
from oci_hook.errors import AnnotationError, BundleError, InternalError
from oci_hook.log import RunEvent
from oci_hook.quick import parse_arguments
from oci_hook.request import parse_annotations, refuse_beside
from oci_hook.reserve import Settings, edit_config
from oci_hook.state import parse_document

OWN = "/usr/bin/tidegate-hook"
UID = "4c6e3a1e-9d2b-4bd3-8f0a-0d5b3b1c2a77"


def entry(*words: str, path: str = OWN, stage: str = "createRuntime") -> dict[str, Any]:
    return {"path": path, "args": ["tidegate-hook", *words, stage], "env": ["PATH=/bin"]}


def claimed(uid: str = UID, share: str = "gpu", **more: str) -> dict[str, Any]:
    return entry("--claim", uid, "--share", share, **more)


def document(*hooks: dict[str, Any], prestart: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"hooks": {"createRuntime": list(hooks), "prestart": list(prestart)}}


def test_shares_are_in_the_order_in_which_a_runtime_runs_the_hooks() -> None:
    found = find_claims(
        document(
            entry("--log", "/x"),
            claimed("b"),
            claimed("a", "gpu/1"),
            claimed("b"),
            prestart=(claimed("a", "gpu/0", stage="prestart"),),
        ),
        OWN,
    )
    assert found == (("a", "gpu/0"), ("b", "gpu"), ("a", "gpu/1"))
    assert as_request(found) == [
        {"uid": "a", "shares": ["gpu/0", "gpu/1"]},
        {"uid": "b", "shares": ["gpu"]},
    ]


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"hooks": None},
        {"hooks": []},
        {"hooks": {"createRuntime": {}}},
        document({"path": OWN}),
        document({"path": OWN, "args": "--claim a --share b"}),
        document(entry("--governed")),
        document(claimed(path="/usr/bin/true")),
        document(claimed(path="tidegate-hook")),
        document(claimed(path="/usr/bin/tidegate-hook\0")),
        document(claimed(path="/usr/bin/../bin/tidegate-hook.d")),
        document({**claimed(), "path": None}),
        # These are the stages that run in the container, and the one at its end.
        {"hooks": {stage: [claimed(stage=stage)] for stage in ("createContainer", "poststart", "poststop")}},
        # Everything else is ignored.
        {"annotations": {"tidegate.gpu/claim": UID}, "process": {"env": [f"TIDEGATE_CLAIM={UID}"],
         "args": ["--claim", UID, "--share", "gpu"]}},
    ],
)  # fmt: skip
def test_other_documents_name_no_claim(found: dict[str, Any]) -> None:
    assert find_claims(found, OWN) == ()


def test_a_link_to_the_hook_counts_as_the_hook(tmp_path: Path) -> None:
    own, link, copy = tmp_path / "hook", tmp_path / "link", tmp_path / "copy"
    for path in (own, copy):
        path.write_text("#!/bin/sh\n")
    link.symlink_to(own)
    os.link(own, tmp_path / "hard")
    assert leads_to(str(link), str(own))
    assert leads_to(str(tmp_path / "hard"), str(own))
    assert not leads_to(str(copy), str(own))
    assert not leads_to(str(tmp_path / "none"), str(own))
    assert find_claims(document(claimed(path=str(link))), str(own)) == ((UID, "gpu"),)
    assert find_claims(document(claimed(path=str(copy))), str(own)) == ()


@pytest.mark.parametrize(
    "words",
    [
        ("--claim", UID),
        ("--share", "gpu"),
        (f"--claim={UID}",),
        ("--claim", "", "--share", "gpu"),
        ("--claim", UID, "--share", ""),
        ("--claim", "x" * 254, "--share", "gpu"),
        ("--claim", "a\nb", "--share", "gpu"),
        ("--claim", "ä", "--share", "gpu"),
        ("--claim", UID, "--share", "gpu", "--else"),
    ],
)
def test_an_invalid_entry_of_the_hook_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(InternalError):
        parse_arguments([*words, "createRuntime"])
    with pytest.raises(
        BundleError, match=r"an entry of the hook in config\.json has invalid arguments"
    ):
        find_claims(document(claimed(), entry(*words)), OWN)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--timeout", "soon"),
        ("--timeout", "0"),
        ("--log", ""),
    ],
)
def test_the_invalid_value_of_an_option_is_named(option: str, value: str) -> None:
    with pytest.raises(InternalError, match=f"^option {option} has the invalid value '{value}'"):
        parse_arguments([f"{option}={value}", "prestart"])


def test_claim_and_share_are_parsed() -> None:
    options = parse_arguments(["--log", "/x", f"--claim={UID}", "--share", "gpu/0", "prestart"])
    assert (options.claim, options.share, options.stage) == (UID, "gpu/0", "prestart")
    assert options.given == ("--log", "/x")  # a claim belongs to one container
    with pytest.raises(InternalError, match="cannot be used with precreate"):
        parse_arguments(["--claim", UID, "--share", "gpu", "precreate"])


def test_an_entry_with_an_argument_that_is_not_a_string_is_refused() -> None:
    broken = claimed()
    broken["args"].insert(2, 7)
    with pytest.raises(BundleError):
        find_claims(document(broken), OWN)


@pytest.mark.parametrize("first", [True, False])
def test_a_shared_gpu_together_with_a_claim_is_refused(first: bool) -> None:  # noqa: FBT001
    hooks = [claimed(), entry("--governed")]
    with pytest.raises(BundleError, match=f"tidegate.gpu/shared together with claim {UID}"):
        find_claims(document(*(hooks if first else hooks[::-1])), OWN)


def test_a_share_that_config_json_does_not_name_is_refused() -> None:
    claims = ((UID, "gpu/0"), ("other", "gpu/1"))
    for own in (("", ""), *claims):
        require_named(claims, own)
    for own in ((UID, "gpu/1"), ("unknown", "gpu/0")):
        with pytest.raises(
            BundleError, match=f"share {own[1]} of claim {own[0]}, which config.json"
        ):
            require_named(claims, own)
    with pytest.raises(BundleError):
        require_named((), (UID, "gpu"))


def test_a_duplicate_name_is_refused_in_a_container_with_a_claim() -> None:
    text = json.dumps(document(claimed()))[:-1] + ', "root": {}, "root": {}}'
    with pytest.raises(BundleError, match="root is given twice"):
        parse_document(text.encode(), "config.json")


def test_a_container_with_a_claim_is_not_edited(tmp_path: Path) -> None:
    """The test has no governor, so a request to it would fail."""
    config = document(claimed()) | {
        "annotations": {"tidegate.gpu/capabilities": "compute"},
        "process": {"env": ["TIDEGATE_MEMORY=8Gi"]},
        "root": {"path": "rootfs"},
    }
    settings = Settings(HookEntry(OWN), runtime_dir=str(tmp_path), environment=True)
    event = RunEvent("test", None)
    assert edit_config(json.dumps(config).encode(), "/b", "x", settings, event) == (
        "no-request",
        None,
    )


@given(st.dictionaries(st.sampled_from(
    ["memory", "compute", "compute-limit", "count", "devices", "strategy", "capabilities", "driver"]
), st.just("1")))  # fmt: skip
def test_only_two_annotations_are_allowed_together_with_a_claim(names: dict[str, str]) -> None:
    annotations = {f"tidegate.gpu/{name}": value for name, value in names.items()}
    if set(names) <= {"capabilities", "driver"}:
        refuse_beside(annotations, "claim default/train")
        return
    with pytest.raises(AnnotationError, match="conflicts with claim default/train"):
        refuse_beside(annotations, "claim default/train")


def test_an_annotation_that_names_a_claim_is_unknown() -> None:
    for name in ("claim", "claims", "share"):
        with pytest.raises(AnnotationError, match="is unknown"):
            parse_annotations({f"tidegate.gpu/{name}": UID})


def test_a_claims_specification_has_nodes_and_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes(_: str, minors: tuple[int, ...]) -> tuple[DeviceNode, ...]:
        numbered = [(f"/dev/nvidia{minor}", 195, minor) for minor in minors]
        return tuple(
            DeviceNode(*one)
            for one in (("/dev/nvidiactl", 195, 255), ("/dev/nvidia-uvm", 507, 0), *numbered)
        )

    monkeypatch.setattr(cdi, "host_nodes", nodes)
    spec = cdi.make_claim_spec(
        UID, [("gpu/0", 3), ("gpu/1", 0), ("more", 3)], arguments=("--log", "/l")
    )
    assert spec["kind"] == "tidegate.gpu/claim"
    assert [one["name"] for one in spec["devices"]] == [
        f"{UID}-gpu_0",
        f"{UID}-gpu_1",
        f"{UID}-more",
    ]
    paths = [
        [node["path"] for node in one["containerEdits"]["deviceNodes"]] for one in spec["devices"]
    ]
    assert paths == [["/dev/nvidia3"], ["/dev/nvidia0"], ["/dev/nvidia3"]]
    common = spec["containerEdits"]
    assert [node["path"] for node in common["deviceNodes"]] == ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert [hook["hookName"] for hook in common["hooks"]] == ["poststop"]
    for one, name in zip(spec["devices"], ("gpu/0", "gpu/1", "more"), strict=True):
        (hook,) = one["containerEdits"]["hooks"]
        assert hook["args"] == [
            "tidegate-hook", "--log", "/l", "--claim", UID, "--share", name, "createRuntime"
        ]  # fmt: skip
        assert hook["env"]
        assert find_claims(document(hook), OWN) == ((UID, name),)
    # A simulated GPU has no device node.
    monkeypatch.setattr(cdi, "host_nodes", lambda *_: ())
    spec = cdi.make_claim_spec(UID, [("gpu", None)])
    assert "deviceNodes" not in spec["containerEdits"]
    assert spec["devices"][0]["containerEdits"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
