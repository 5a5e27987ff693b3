"""The admission policies: their cases match what the driver and the hook refuse, and their lists
match the schemas.

tests/cluster tests that a real API server accepts the expressions and makes the same decisions.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from governor.errors import TidegateError
from kube.claims import Reference, read_claim
from kube.parameters import Parameters, merge, schema
from kube.slices import device_name
from oci_hook.errors import HookError
from oci_hook.request import check_request, parse_annotations
from tests.kubernetes import documents
from tests.kubernetes.admission_cases import PASS, REFUSE, WARN
from tests.kubernetes.governor import gpu

ROOT = Path(__file__).resolve().parents[2]
POLICIES = {
    document["metadata"]["name"]: document["spec"]
    for document in yaml.safe_load_all(
        (ROOT / "packaging/kubernetes/base/admission.yaml").read_text()
    )
    if document["kind"] == "ValidatingAdmissionPolicy"
}
BINDINGS = {
    document["spec"]["policyName"]: document["spec"]["validationActions"]
    for document in yaml.safe_load_all(
        (ROOT / "packaging/kubernetes/base/admission.yaml").read_text()
    )
    if document["kind"] == "ValidatingAdmissionPolicyBinding"
}


def judge(document: dict[str, Any]) -> None:
    """Process an object as the driver or the hook does, and raise the error if it is refused."""
    kind = document["kind"]
    if kind == "Pod":
        annotations = document["metadata"].get("annotations")
        if annotations and not document["spec"].get("resourceClaims"):
            check_request(parse_annotations(annotations), annotations)
        return
    if kind == "DeviceClass":
        for one in document["spec"]["config"]:
            merge(Parameters(), one["opaque"]["parameters"], "the class")
        return
    spec = document["spec"] if kind == "ResourceClaim" else document["spec"]["spec"]
    asked = spec["devices"]["requests"][0]["exactly"].get("capacity", {}).get("requests", {})
    compute = {"30000m": "30"}.get(asked.get("compute"), asked.get("compute", "30"))
    configs = [{"source": "FromClaim", **one} for one in spec["devices"].get("config", ())]
    allocated = documents.claim(
        "case", "default", documents.result(0, compute=compute), configs=tuple(configs), uid="u-1"
    )
    devices = {device_name(gpu(0)["uuid"]): gpu(0)["uuid"]}
    read_claim(allocated, Reference("default", "case", "u-1"), documents.NODE, devices)


@pytest.mark.parametrize("name", PASS)
def test_objects_that_the_policies_accept_are_accepted_at_the_start(name: str) -> None:
    judge(PASS[name])


@pytest.mark.parametrize("name", REFUSE)
def test_objects_that_the_policies_refuse_are_refused_at_the_start(name: str) -> None:
    with pytest.raises((TidegateError, HookError)):
        judge(REFUSE[name][0])


def _expressions(policy: str) -> str:
    spec = POLICIES[policy]
    parts = [*spec.get("variables", ()), *spec["validations"]]
    return " ".join(" ".join(str(part[key]) for key in part) for part in parts)


def _list_after(text: str, words: str) -> set[str]:
    """Return the words of the CEL list that follows the given words."""
    found = re.search(re.escape(words) + r"\s*\[([^\]]*)\]", " ".join(text.split()))
    assert found, words
    return set(re.findall(r'"([^"]+)"', found[1]))


def test_the_policies_match_the_schemas() -> None:
    parameters = _expressions("tidegate-parameters")
    assert _list_after(parameters, "!(key in") == set(schema()["properties"])
    strategies = set(schema()["properties"]["strategy"]["enum"])
    assert _list_after(parameters, "document.strategy in") == strategies
    classes = set(schema()["properties"]["class"]["enum"])
    assert _list_after(parameters, 'document["class"] in') == classes
    parking = set(schema()["properties"]["parking"]["enum"])
    assert _list_after(parameters, "document.parking in") == parking
    hook = json.loads((ROOT / "oci_hook/annotations.schema.json").read_text())["properties"]
    annotations = _expressions("tidegate-annotations")
    assert _list_after(annotations, "(key.substring(13) in") == {
        name.removeprefix("tidegate.gpu/") for name in hook
    }
    for name in ("class", "driver", "parking", "strategy"):
        default = re.search(rf'tidegate\.gpu/{name}"\]\.orValue\("\w+"\) in', annotations)
        assert default, name
        assert _list_after(annotations, default[0]) == set(hook[f"tidegate.gpu/{name}"]["enum"])
    for name in ("memory", "count", "compute", "compute-limit"):
        # RE2 has no lookahead, and its $ matches only at the end of the text.
        assert hook[f"tidegate.gpu/{name}"]["pattern"].replace("(?!\\n)", "") in annotations, name


def test_a_policy_that_fails_blocks_no_object() -> None:
    """The driver and the hook refuse what the policy would have refused, and claims and pods that
    do not use Tidegate must pass.
    """
    assert {spec["failurePolicy"] for spec in POLICIES.values()} == {"Ignore"}
    assert BINDINGS == {
        "tidegate-parameters": ["Deny"],
        "tidegate-annotations": ["Deny"],
        "tidegate-annotations-beside-claims": ["Warn"],
    }


def test_annotations_beside_a_claim_cause_a_warning_unless_allowed() -> None:
    from oci_hook.request import BESIDE_CLAIM

    expressions = _expressions("tidegate-annotations-beside-claims")
    allowed = {f"tidegate.gpu/{name}" for name in BESIDE_CLAIM}
    assert _list_after(expressions, "!(key in") == allowed
    assert set(WARN["metadata"]["annotations"]) - allowed
