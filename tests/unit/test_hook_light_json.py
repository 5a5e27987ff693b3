"""Tests that the hook's JSON parser has the same results and errors as the standard library's."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oci_hook import client, light_json, manifest, state
from oci_hook.light_json import dump_json, load_json
from oci_hook.light_typing import NamedTuple
from tests.conftest import examples
from tests.fuzz.documents import KINDS, corpus, mutated, refusal

ROOT = Path(__file__).resolve().parents[2]

ODD = [
    b"", b" ", b"\n\t\r {} \n\t\r ", b"\x0b{}", b"\xa0{}", b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b"\xff", b"{", b"[", b'"', b"[1", b"[1,]",
    b"{,}", b'{"a"}', b'{"a":}', b'{"a":1,}', b'{"a" 1}', b"{1:2}", b"[1 2]", b"{} {}", b"[]x", b"nul", b"null", b"true", b"tr", b"-", b"01",
    b"-01", b"1.", b".5", b"1e", b"1e5", b"1.0", b"-0", b"-0.0", b"1.5", b"1e999", b"-1e999", b"NaN", b"Infinity", b"-Infinity", b"[NaN]",
    b"1" * 5000, b"1" * 4000, b"1." + b"0" * 5000, b'"\x00"', b'"\n"', b'"\\x"', b'"\\u12"', b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\\ud83d\\u0041"',
    b'"\\udc80"', b'"\xf0\x9f\x98\x80"', b'"\xed\xa0\x80"', b"'a'", b'{"a": 1, "a": 2}', b'{"a": {"b": 1, "b": 1}}', b"[" * 500 + b"]" * 500,
    b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000, b"/**/1", b"1 // one", b"\xe2\x80\xa81", b'["a\xe2\x80\xa8"]', b"\x00", b"1\x00",
]  # fmt: skip


def by_json(data: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse with the standard library."""
    return json.loads(
        data.decode(),
        object_pairs_hook=pairs,
        parse_float=light_json._number,
        parse_constant=light_json._refuse_constant,
    )


def outcome(parse: Callable[..., Any], data: bytes) -> str:
    """Return the result with the type of each number and all pairs, or the error's text."""
    try:
        return repr(parse(data, list)) + repr(parse(data))
    except RecursionError:
        return "RecursionError"
    except Exception as e:  # noqa: BLE001
        return f"{type(e).__name__}: {e}"


def documents() -> list[bytes]:
    return ODD + [case.data for kind in KINDS if kind != "edit" for case in corpus(kind)]


@pytest.mark.parametrize("which", ["C", "Python"])
def test_the_parser_accepts_the_same_documents_as_json(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if which == "Python":  # as in an interpreter without _json
        monkeypatch.setattr(light_json, "make_scanner", None)
    for data in documents():
        assert outcome(load_json, data) == outcome(by_json, data), data[:200]


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from binascii import a2b_base64
from oci_hook.light_json import load_json
for line in sys.stdin.buffer.read().splitlines():
    data = a2b_base64(line)
    for name in [name for name in sys.modules if name.partition(".")[0] == "json"]:
        del sys.modules[name]
    try:
        said = repr(load_json(data, list)) + repr(load_json(data))
        assert "json" not in sys.modules, data
    except RecursionError:
        said = "RecursionError"
    except Exception as e:
        said = f"{type(e).__name__}: {e}"
    print(ascii(said))
"""


def test_the_parsers_errors_are_those_of_json() -> None:
    """The process is like the hook's, where json is imported only after the scanner found an error."""
    tried = documents()
    done = subprocess.run(
        ["/usr/bin/python3", "-ISE", "-c", PROGRAM, str(ROOT)],
        input=b"\n".join(base64.b64encode(data) or b" " for data in tried),
        capture_output=True,
        check=True,
    )
    lines = done.stdout.decode().splitlines()
    assert len(lines) == len(tried)
    for data, line in zip(tried, lines, strict=True):
        assert line == ascii(outcome(by_json, data)), data[:200]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@given(
    JSON,
    st.booleans(),
    st.sampled_from([None, 1]),
    st.integers(0, 200),
    st.binary(max_size=3),
)
def test_any_document_has_the_same_outcome(
    value: Any,
    ascii_only: bool,  # noqa: FBT001
    indent: int | None,
    at: int,
    damage: bytes,
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    data = text.encode(errors="surrogatepass")
    for found in (data, data[:at] + damage + data[at + len(damage) :]):
        assert outcome(load_json, found) == outcome(by_json, found)


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["state", "config", "manifest", "answer", "admitted"])
def test_error_lines_are_the_same_as_with_json(kind: str) -> None:
    def lines(data: bytes) -> tuple[str | None, str | None]:
        new = refusal(kind, data)
        with pytest.MonkeyPatch.context() as patch:
            for module in (state, client, manifest):
                patch.setattr(module, "load_json", by_json)
            return new, refusal(kind, data)

    @settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
    @given(mutated(kind))
    def holds(data: bytes) -> None:
        new, old = lines(data)
        assert new == old

    for data in [*ODD, *(case.data for case in corpus(kind))]:
        new, old = lines(data)
        assert new == old, data[:200]
    holds()


class Record(NamedTuple):
    name: str
    sizes: dict[str, Any]


def dumped(dump: Callable[[object], str], value: object) -> str:
    try:
        return dump(value)
    except (TypeError, ValueError) as e:
        return f"{type(e).__name__}: {e}"


@given(JSON)
def test_the_encoders_output_is_that_of_json(value: Any) -> None:
    for one in (value, {"a": value}, (value, value), Record("a", {"b": value})):
        assert dump_json(one) == json.dumps(one)


@pytest.mark.parametrize("which", ["C", "Python"])
def test_values_that_json_cannot_write_are_errors(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if which == "Python":
        monkeypatch.setattr(light_json, "make_encoder", None)
    circle: list[Any] = []
    circle.append(circle)
    for value in (object(), {"a": {1}}, b"x", circle, {(1, 2): 3}, float("inf"), "\ud800é\0"):
        assert dumped(dump_json, value) == dumped(json.dumps, value)
