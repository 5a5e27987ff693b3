"""Reads the opaque parameters of a claim, which specify what capacities cannot express.

A DeviceClass and a claim may both have parameters; for each option, the last value in the
allocation wins. `strict: true` and `computeLimit` count as one option: a later occurrence of either
replaces both. `strict: false` removes an earlier `strict: true`, and keeps an earlier
`computeLimit`. The functions are pure.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kube.errors import ClaimError
from kube.names import DRIVER

SCHEMA_FILE = Path(__file__).with_name("tidegate_config.schema.json")
MAX_EXCERPT = 300
"""Maximum length in characters of an excerpt from a foreign document in an error."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of one request.

    By default, as with annotations, `compute_limit` is None: the guarantee is also the cap.
    """

    compute_limit: int | None = None
    strategy: str = "auto"
    work_class: str = "throughput"
    parking: str = "allowed"


@functools.cache
def schema() -> dict[str, Any]:
    """Return the schema of a TidegateConfig."""
    document: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return document


@functools.cache
def _validator() -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(schema())


def merge(before: Parameters, document: object, where: str) -> Parameters:
    """Return the parameters updated by a document; raise ClaimError if a field is wrong.

    `where` names the document in the error.
    """
    check(document, where)
    assert isinstance(document, dict)  # noqa: S101 - the schema says so
    after = before
    if document.get("strict") is True:
        after = replace(after, compute_limit=None)
    elif "computeLimit" in document:
        after = replace(after, compute_limit=int(document["computeLimit"]))
    elif document.get("strict") is False:
        after = replace(after, compute_limit=after.compute_limit or 100)
    if "strategy" in document:
        after = replace(after, strategy=document["strategy"])
    if "class" in document:
        after = replace(after, work_class=document["class"])
    if "parking" in document:
        after = replace(after, parking=document["parking"])
    return after


def check(document: object, where: str) -> None:
    """Refuse a document that is not a TidegateConfig; the ClaimError names the field."""
    import jsonschema

    try:
        error = jsonschema.exceptions.best_match(_validator().iter_errors(document))
    except RecursionError as e:
        raise ClaimError(
            f"{where}: the document is nested too deeply",
            hint="the value of an option is a string, a number or a boolean",
        ) from e
    if error is None:
        return
    path = ".".join(str(part) for part in error.absolute_path)
    known = [name for name in schema()["properties"] if name not in ("apiVersion", "kind")]
    hint = f"options are {', '.join(known)}"
    if error.validator == "additionalProperties" and isinstance(document, dict):
        field = next(str(name) for name in document if name not in schema()["properties"])
        close = difflib.get_close_matches(field, known, n=1, cutoff=0.5)
        problem = f"{_cut(field)} is not an option"
        hint = f"did you mean {close[0]}?" if close else hint
    elif error.validator == "not":
        problem = "computeLimit and strict: true contradict each other"
        hint = "leave one of them out"
    elif error.validator == "required":
        problem = _cut(error.message)
        hint = "write apiVersion: tidegate.gpu/v1 and kind: TidegateConfig"
    else:
        problem = f"{path or 'the document'}: {_cut(error.message)}"
    raise ClaimError(f"{where}: {problem}", hint=hint)


def _cut(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= MAX_EXCERPT else plain[: MAX_EXCERPT - 3] + "..."


def applies(requests: Sequence[str], request: str) -> bool:
    """Return whether a configuration for `requests` applies to `request`; an empty list means all.

    A configuration for a request with alternatives applies to each alternative.
    """
    return not requests or any(
        request == name or request.startswith(f"{name}/") for name in requests
    )


def of_request(config: Sequence[Mapping[str, Any]], request: str, claim: str) -> Parameters:
    """Return the parameters of a request, from an allocation's `devices.config`."""
    parameters = Parameters()
    # Entries from classes come first; the scheduler writes them in that order, too.
    for entry in sorted(config, key=lambda one: one.get("source") != "FromClass"):
        opaque = entry.get("opaque") or {}
        if opaque.get("driver") != DRIVER or not applies(entry.get("requests") or (), request):
            continue
        owner = "its class" if entry.get("source") == "FromClass" else "the claim"
        where = f"{claim}, request {request}, parameters of {owner}"
        parameters = merge(parameters, opaque.get("parameters"), where)
    return parameters
