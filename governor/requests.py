"""Parse requests to the governor, and check them against protocol.schema.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

from governor.allocations import Nodes
from governor.claims import Use
from governor.errors import RequestError
from governor.quota import Quota
from oci_hook.errors import show
from oci_hook.light_json import load_json

SCHEMA_FILE = Path(__file__).with_name("protocol.schema.json")
_SCHEMA: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
_VALIDATOR = jsonschema.Draft202012Validator(_SCHEMA)


def _validators_by_op() -> dict[str, jsonschema.Draft202012Validator]:
    """Return a separate validator for each operation.

    `oneOf` would try all of them, which takes 0.7 ms of CPU time per container start.
    """
    whole = dict(_SCHEMA)
    kinds = whole.pop("oneOf")
    validators = {}
    for kind in kinds:
        said = kind["properties"]["op"]
        for op in said.get("enum") or [said["const"]]:
            validators[op] = jsonschema.Draft202012Validator({**whole, "allOf": [kind]})
    return validators


_BY_OP = _validators_by_op()


def parse_request(line: bytes) -> dict[str, Any]:
    """Return the request in a line; raise RequestError if the line is not a request."""
    try:
        document: dict[str, Any] = load_json(line)
        json.dumps(document, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
        # A document that the JSON parser accepts can still be nested too deeply for the validator.
        error = None if _is_request(document) else _find_error(document)
    except (ValueError, RecursionError) as e:
        raise RequestError(
            "the request is not valid JSON",
            hint="install the same version of the hook and the governor",
        ) from e
    if error is not None:
        raise RequestError(
            f"the request is not valid: {show(error.message, 160)}",
            hint="install the same version of the hook and the governor",
        )
    return document


def _is_request(document: object) -> bool:
    op = document.get("op") if isinstance(document, dict) else None
    validator = _BY_OP.get(op) if isinstance(op, str) else None
    return validator is not None and validator.is_valid(document)


def _find_error(document: object) -> jsonschema.ValidationError | None:
    """Return the best-matching error of a document, according to the whole schema."""
    error: jsonschema.ValidationError | None = jsonschema.exceptions.best_match(
        _VALIDATOR.iter_errors(document)
    )
    return error


def pod_of(identity: Mapping[str, str]) -> dict[str, str]:
    """Return a container's pod for the log; empty outside Kubernetes."""
    pod, namespace = identity.get("pod"), identity.get("namespace", "")
    return {"pod": f"{namespace}/{pod}"} if pod else {}


def uses_of(request: dict[str, Any]) -> tuple[Use, ...]:
    """Return the shares in an admission request, without duplicates."""
    return tuple(
        dict.fromkeys(
            (one["uid"], name) for one in request.get("claims", ()) for name in one["shares"]
        )
    )


def nodes_of(request: dict[str, Any]) -> Nodes:
    """Return a container's device nodes, as its hook reports them."""
    return Nodes(frozenset(request.get("nodes", ())), request.get("exact", False))


def limit_after(request: dict[str, Any], old: Quota) -> int:
    """Return the limit in percent after a request that sets none.

    A limit that is equal to the guarantee follows the guarantee.
    """
    compute = int(request.get("compute", old.compute))
    return compute if old.compute_limit == old.compute else max(old.compute_limit, compute)
