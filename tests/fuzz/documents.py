"""The documents that reach Tidegate from outside, the hand-written parser of each, and the equivalent schema.

A document is a sequence of bytes, from a runtime, an engine, `tidegate refresh`, the governor or a hook, or from a program that
impersonates one of them. `hold` checks what must be true of any document. corpus/KIND.jsonl has documents, each with the
verdict that both the parser and the schema must return.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jsonschema
from hypothesis import strategies as st

from governor.errors import TidegateError
from governor.requests import parse_request
from oci_hook import reserve
from oci_hook.client import WRONG, Reservation, parse_admission, parse_answer, parse_reservation
from oci_hook.edits import HookEntry, foreign_driver, gpu_nodes
from oci_hook.errors import (
    AnnotationError,
    HookError,
    InternalError,
    MirrorMismatchError,
    UnreachableError,
)
from oci_hook.light_json import load_json
from oci_hook.log import RunEvent
from oci_hook.manifest import parse_manifest
from oci_hook.quick import PREFIX
from oci_hook.request import parse_annotations
from oci_hook.state import our_annotations, parse_config, parse_state
from vdriver import manifest

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).with_name("corpus")
LINE = 900
SETTINGS = reserve.Settings(entry=HookEntry("/usr/bin/tidegate-hook"), driver_dir="/nonexistent")
BEYOND = ("is given twice", "is the host's own root", "'..' after a name", "not absolute")
"""Reasons for refusing a document that its schema accepts: JSON Schema can express neither duplicate names nor where a path ends."""


class DocumentKind(NamedTuple):
    """One kind of document: its parser, which raises HookError or TidegateError, and its schema."""

    take: Callable[[bytes], object]
    schema: jsonschema.Draft202012Validator | None = None
    text: bool = False  # lone surrogates are refused anywhere


def validator(path: str, part: str | None = None) -> jsonschema.Draft202012Validator:
    schema = json.loads((ROOT / path).read_text())
    if part is not None:
        schema = {"$ref": f"#/$defs/{part}", "$defs": schema["$defs"]}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def take_config(data: bytes) -> object:
    """Parse as `oci_hook.main.prepare` does before it examines the container."""
    bundle = parse_config(data, "/bundle")
    foreign_driver(bundle.document)
    gpu_nodes(bundle.document)
    return bundle


def take_annotations(data: bytes) -> object:
    """Parse the annotations with Tidegate's prefix: an object of strings, checked as in config.json and in the state."""
    try:
        annotations = load_json(data)
    except (ValueError, RecursionError) as e:
        raise AnnotationError("is not JSON", hint="write it") from e
    if type(annotations) is not dict or not all(type(v) is str for v in annotations.values()):
        raise AnnotationError("is not an object of strings", hint="write it")
    return parse_annotations(annotations)


def take_manifest(data: bytes) -> object:
    """Parse as `read_manifest` does. The reader of the command line must accept the same."""
    try:
        found = parse_manifest(data, "/generation")
    except (ValueError, TypeError, RecursionError) as e:
        raise MirrorMismatchError("is not a manifest", hint="refresh") from e
    manifest.parse_manifest(data)
    return found


def take_answer(data: bytes, parse: Callable[[dict[str, Any]], object] | None = None) -> object:
    """Parse as the hook's client does. Without `parse`, a refusal is accepted as an answer, too."""
    try:
        document = parse_answer(data)
        if parse is None:
            return document
        if not document["ok"]:
            raise UnreachableError("is a refusal", hint="none")
        return parse(document)
    except WRONG as e:
        raise UnreachableError("is not an answer", hint="same version") from e


class Reserving:
    """A governor that accepts every reservation."""

    def __init__(self, *_: object) -> None:
        pass

    def reserve(self, *args: object, **more: object) -> Reservation:
        json.dumps((args, more)).encode()
        return Reservation("token", ())

    def close(self) -> None:
        pass


def take_edit(data: bytes) -> object:
    """Edit as `tidegate-runtime` and `precreate` do; a second edit of the result must change nothing."""
    settings = SETTINGS._replace(environment=True)
    event = RunEvent("precreate", None)
    with mock.patch.object(reserve, "Client", Reserving):
        _, edited = reserve.edit_config(data, "/bundle", "config.json", settings, event)
        if edited is not None:
            _, again = reserve.edit_config(edited, "/bundle", "config.json", settings, event)
            assert again == edited
            strict(edited)
    return edited


def take_state(data: bytes) -> object:
    state = parse_state(data)
    bundle = parse_config(b'{"root": {"path": "rootfs"}}', "/bundle")
    ours = our_annotations(state, bundle)
    assert all(type(value) is str for value in ours.values())
    return state


KINDS = {
    "state": DocumentKind(take_state, validator("oci_hook/state.schema.json", "state")),
    "config": DocumentKind(take_config, validator("oci_hook/state.schema.json", "config")),
    "edit": DocumentKind(take_edit),
    "annotations": DocumentKind(take_annotations, validator("oci_hook/annotations.schema.json")),
    "manifest": DocumentKind(take_manifest, validator("vdriver/manifest.schema.json")),
    "request": DocumentKind(parse_request, validator("governor/protocol.schema.json"), text=True),
    "answer": DocumentKind(take_answer, validator("governor/answers.schema.json")),
    "admitted": DocumentKind(
        lambda data: take_answer(data, parse_admission),
        validator("governor/answers.schema.json", "admit"),
    ),
    "reserved": DocumentKind(
        lambda data: take_answer(data, parse_reservation),
        validator("governor/answers.schema.json", "reserve"),
    ),
}


def strict(data: bytes) -> Any:
    """Parse JSON strictly by its standard, fractions as doubles; raise ValueError for anything else."""

    def number(text: str) -> float:
        value = float(text)
        if abs(value) == float("inf"):
            raise ValueError(text)
        return value

    def none(text: str) -> None:
        raise ValueError(text)

    return json.loads(data.decode(), parse_float=number, parse_constant=none)


def is_valid(kind: str, data: bytes) -> bool | None:
    """Return the verdict of the schema, or None if there is no schema."""
    schema = KINDS[kind].schema
    if schema is None:
        return None
    try:
        document = strict(data)
        if KINDS[kind].text:
            json.dumps(document, ensure_ascii=False).encode()
        return schema.is_valid(document)
    except (ValueError, RecursionError):
        return False


def refusal(kind: str, data: bytes) -> str | None:
    """Parse a document; return None, or the line with which it was refused. Any other exception is a bug."""
    try:
        KINDS[kind].take(data)
    except InternalError:
        raise
    except HookError as e:
        return e.line()
    except TidegateError as e:
        return f"tidegate: {e}"
    return None


def hold(kind: str, data: bytes) -> bool:
    """Check the properties that every document of a kind must have. Return whether the document was accepted."""
    line, valid = refusal(kind, data), is_valid(kind, data)
    if line is not None:
        # The message is one line for a terminal, whatever the document contains.
        assert len(line) <= LINE, line
        assert line.isascii(), line
        assert line.isprintable(), line
    if valid is not None:
        what = f"{kind}: {data[:2000]!r}: {line or 'accepted'}"
        assert line is not None or valid, f"accepted, but its schema rejects it: {what}"
        beyond = line is not None and any(text in line for text in BEYOND)
        assert line is None or not valid or beyond, f"refused, but its schema accepts it: {what}"
    return line is None


class Case(NamedTuple):
    """One document of the corpus."""

    why: str
    good: bool
    data: bytes


def corpus(kind: str) -> list[Case]:
    """Return the documents of a kind. Each line of the file has one: as JSON in `document`, as `text`, or else as `base64`."""
    found = []
    for line in (CORPUS / f"{kind}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "document" in entry:
            data = json.dumps(entry["document"]).encode()
        elif "text" in entry:
            data = entry["text"].encode()
        else:
            data = base64.b64decode(entry["base64"])
        found.append(Case(entry["why"], entry["good"], data))
    return found


NUMBERS = (
    0, -1, 1, 2, 42, 100, 101, 195, 255, 1.0, 1.5, -0.0, 1e22, 1e308, 1 << 20, 1 << 22, (1 << 22) + 1, 1 << 31, 1 << 50,
    (1 << 50) + 1, 1 << 63, 1 << 64, 10**400,
)  # fmt: skip
TEXTS = (
    "", "/", "//", ".", "..", "../..", "/..", "/../", "rootfs", "/x/../y", "a/b", "\n", "1\n", "\0", "/\0", "\ud800", "/\udfff",
    "\udc80", "/x\udc80", "a" * 1025, "/" + "a" * 5000, "0", "0,1", "0,0", "8Gi", "8Gi\n", "0123456789ab", "580.159.04",
    "580.159.04\n", "x86_64", "all", "compute,utility", "token", "{libdir}", "{libdir}/", "{libdir}/x", "{libdir}/..",
    PREFIX, f"{PREFIX}memory", f"{PREFIX}reservation", "TIDEGATE_MEMORY=8Gi", "TIDEGATE_COUNT=1\ud800", "NaN", "\x1b[2J",
    "io.kubernetes.pod.name", "io.kubernetes.cri.container-type", "sandbox", "libcuda.so.1", "/usr/lib/libcuda.so.1",
)  # fmt: skip
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(allow_nan=True),
    st.sampled_from(TEXTS),
    st.text(max_size=12),
    st.sampled_from(("[]", "{}", "[[]]", "[{}]", '{"": null}', '[null, 1, "x"]')).map(json.loads),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return the position of each value in a document: its list or object, and its index or key."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            keys = list(one) if isinstance(one, dict) else list(range(len(one)))
            found += [(one, key) for key in keys]
            waiting += [one[key] for key in keys]
    return found


def bases(kind: str) -> list[Any]:
    """Return the accepted documents of a kind, parsed; for `edit` those of config.json."""
    return [json.loads(e.data) for e in corpus("config" if kind == "edit" else kind) if e.good]


def mutated(kind: str) -> st.SearchStrategy[bytes]:
    """Generate documents with up to five changes to an accepted one, most of them to one member or value."""
    originals = [json.dumps(one) for one in bases(kind)]

    @st.composite
    def strategy(draw: st.DrawFn) -> bytes:
        # The document is in a list, so that it can itself be replaced.
        document = [json.loads(draw(st.sampled_from(originals)))]
        for _ in range(draw(st.integers(0, 4))):
            holder, key = draw(st.sampled_from(places(document)))
            match draw(st.sampled_from(("value", "value", "value", "remove", "add", "swap"))):
                case "value":
                    holder[key] = draw(ODD)
                case "remove" if holder is not document:
                    del holder[key]
                case "add":
                    if isinstance(holder, dict):
                        holder[draw(st.sampled_from(TEXTS) | st.text(max_size=8))] = draw(ODD)
                    else:
                        holder.append(draw(ODD))
                case _:
                    other, there = draw(st.sampled_from(places(document)))
                    holder[key] = json.loads(json.dumps(other[there]))
        data = json.dumps(document[0], ensure_ascii=draw(st.booleans())).encode(
            errors="surrogatepass"
        )
        match draw(st.sampled_from(("", "", "", "", "twice", "cut", "bytes"))):
            case "twice":  # repeats the members of an object
                at = draw(st.integers(0, len(data)))
                data = data[:at] + data[at:].replace(b"{", b"{" + data[1:-1] + b", ", 1)
            case "cut":
                data = data[: draw(st.integers(0, len(data)))]
            case "bytes":
                at = draw(st.integers(0, len(data)))
                data = data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at + 1 :]
        return data

    return strategy()
