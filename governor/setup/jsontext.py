"""Add and remove members of a JSON object in its text, without changing other text.

New text follows the style of the file: its newlines, its indentation and the spaces after colons.
The result of each edit is parsed and compared with the intended value, so the text is changed as
intended or not at all.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

BOM = "\ufeff"
BLANK = re.compile(r"[ \t\r\n]*")
INDENT = "  "  # if the text has none


@dataclass(frozen=True)
class MemberSpan:
    """Position of a member of an object: from its key's quote to the end of its value."""

    key: str
    start: int
    value: int
    end: int


@dataclass(frozen=True)
class Span:
    """Position of an object: its braces, and its members in order."""

    open: int
    close: int
    members: tuple[MemberSpan, ...]

    def get(self, key: str) -> MemberSpan | None:
        """Return the member of this name."""
        return next((m for m in self.members if m.key == key), None)


def parse(text: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raise ValueError if it is invalid, even if only a Go parser would reject it, or if a key occurs
    twice in one object. Empty text is an empty object, as for dockerd.
    """
    body = text.removeprefix(BOM)
    if not body.strip(" \t\r\n"):
        return {}
    try:
        found = json.loads(body, object_pairs_hook=_once, parse_constant=_constant)
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - what was found is text
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{json.dumps(twice)} occurs twice in one object")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def put(text: str, path: tuple[str, ...], value: Any) -> str:
    """Return the text with the member at `path` set; missing parent objects are created."""
    before = parse(text)
    bom, body = (BOM, text[1:]) if text.startswith(BOM) else ("", text)
    if not body.strip(" \t\r\n"):
        body = "{}" + (body if body.endswith("\n") else "\n")
    result = bom + _put(body, 0, path, value)
    _require(parse(result) == _with(before, path, value))
    return result


def drop(text: str, path: tuple[str, ...]) -> str:
    """Return the text without the member at `path`; unchanged if there is none."""
    before = parse(text)
    bom, body = (BOM, text[1:]) if text.startswith(BOM) else ("", text)
    at = 0
    for key in path[:-1]:
        member = _object(body, at).get(key) if body.strip() else None
        if member is None or body[member.value] != "{":
            return text
        at = member.value
    span = _object(body, at) if body.strip() else Span(0, 0, ())
    member = span.get(path[-1])
    if member is None:
        return text
    where = span.members.index(member)
    if where:
        body = body[: span.members[where - 1].end] + body[member.end :]
    elif len(span.members) > 1:
        body = body[: member.start] + body[span.members[1].start :]
    else:
        body = body[: span.open + 1] + body[span.close :]
    _require(parse(bom + body) == _without(before, path))
    return bom + body


def _require(same: object) -> None:
    if not same:
        raise ValueError("it cannot be edited as text")


def _with(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    rest = value if len(path) == 1 else _with(tree.get(path[0], {}), path[1:], value)
    return {**tree, path[0]: rest}


def _without(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    if len(path) > 1:
        return {**tree, path[0]: _without(tree[path[0]], path[1:])}
    return {key: value for key, value in tree.items() if key != path[0]}


def _skip(text: str, at: int) -> int:
    found = BLANK.match(text, at)
    return found.end() if found else at


def _object(text: str, at: int) -> Span:
    """Return the positions in the object that begins at `at`; the text must be valid."""
    decoder = json.JSONDecoder()
    opened = _skip(text, at)
    at = _skip(text, opened + 1)
    members = []
    while text[at] != "}":
        start = at
        key, at = decoder.raw_decode(text, start)
        value = _skip(text, _skip(text, at) + 1)
        end = decoder.raw_decode(text, value)[1]
        members.append(MemberSpan(key, start, value, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return Span(opened, at, tuple(members))


def _put(text: str, at: int, path: tuple[str, ...], value: Any) -> str:
    span = _object(text, at)
    member = span.get(path[0])
    if member is not None and len(path) > 1:
        return _put(text, member.value, path[1:], value)
    for key in reversed(path[1:]):
        value = {key: value}
    style = _Style(text, span)
    if member is not None:
        return text[: member.value] + style.value(value) + text[member.end :]
    new = json.dumps(path[0]) + style.colon + style.value(value)
    if span.members:
        last = span.members[-1].end
        return text[:last] + "," + style.between + new + text[last:]
    return text[: span.open + 1] + style.before + new + style.after + text[span.close :]


class _Style:
    """The formatting of the members of one object."""

    def __init__(self, text: str, span: Span) -> None:
        newline = "\r\n" if "\r\n" in text else "\n"
        lines = "\n" in text[span.open : span.close] or (
            not span.members and (span.open == _skip(text, 0) or "\n" in text)
        )
        outer = re.match(r"[ \t]*", text[text.rfind("\n", 0, span.open) + 1 :])
        first = re.search(r"\n([ \t]+)\"", text)
        self.unit = first[1] if first else INDENT
        self.base = (outer[0] if outer else "") + self.unit
        if span.members and lines:
            head = text[text.rfind("\n", 0, span.members[-1].start) + 1 : span.members[-1].start]
            # After `{ "a": 1,` the next member may be on its own line: the last member decides.
            self.base = head if not head.strip(" \t") else self.base
        colon = re.search(r'"([ \t]*:[ \t]*)', text)
        self.colon = colon[1] if colon else ": "
        self.lines, self.newline = lines, newline
        blank = " " if self.colon.endswith(" ") else ""
        self.comma = "," + blank
        self.between = newline + self.base if lines else blank
        self.before = newline + self.base if lines else ""
        self.after = newline + (outer[0] if outer else "") if lines else ""

    def value(self, value: Any) -> str:
        if not self.lines:
            return json.dumps(value, separators=(self.comma, self.colon))
        text = json.dumps(value, indent=self.unit, separators=(",", self.colon))
        return text.replace("\n", self.newline + self.base)
