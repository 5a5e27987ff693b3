"""Add and remove tables and array elements in the text of a TOML file, keeping its comments.

`tomllib` parses the text, but the text is edited, not regenerated. A small scanner finds where
statements begin and end. The result of each edit is parsed and compared with the intended value, so
the text is changed as intended or not at all.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Path = tuple[str, ...]


@dataclass(frozen=True)
class Statement:
    """A header, or a key with its value: from its first character to the end of its line."""

    path: Path  # of the header; that of a key is relative to the header above it
    header: bool
    start: int
    end: int


def parse(text: str) -> dict[str, Any]:
    """Return the document; raise ValueError if it is invalid."""
    try:
        return tomllib.loads(text)
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def statements(text: str) -> list[Statement]:
    """Return the statements of a valid text, in order."""
    found = []
    at = 0
    while at < len(text):
        if text[at] in " \t\r\n":
            at += 1
        elif text[at] == "#":
            at = _line_end(text, at)
        else:
            start, header = at, text[at] == "["
            at = _line_end(text, _value_end(text, at))
            found.append(Statement(_path(text[start:at]), header, start, at))
    return found


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1


def _value_end(text: str, at: int) -> int:
    """Return the end of a statement: a newline or comment outside strings and brackets."""
    depth = 0
    while at < len(text):
        c = text[at]
        if c in "\"'":
            at = _string_end(text, at)
            continue
        if c == "#":
            if depth == 0:
                return at
            at = _line_end(text, at)
            continue
        if c == "\n" and depth == 0:
            return at
        depth += (c in "[{") - (c in "]}")
        at += 1
    return at


def _string_end(text: str, at: int) -> int:
    quote = text[at]
    long = text.startswith(quote * 3, at)
    end = quote * 3 if long else quote
    at += len(end)
    while not text.startswith(end, at):
        at += 2 if text[at] == "\\" and quote == '"' else 1
    at += len(end)
    # A multi-line string may end with up to two quotes before the three that close it.
    while long and text.startswith(quote, at):
        at += 1
    return at


def _path(statement: str) -> Path:
    """Return the keys of a header, or those to the left of `=`."""
    tree: Any = tomllib.loads(statement)
    if not statement.startswith("["):
        head = statement[: _key_end(statement)]
        tree = tomllib.loads(head + "= 0")
    path: list[str] = []
    while tree and isinstance(tree, dict):
        key = next(iter(tree))
        path.append(key)
        tree = tree[key][0] if isinstance(tree[key], list) else tree[key]
    return tuple(path)


def _key_end(statement: str) -> int:
    at = 0
    while statement[at] != "=":
        at = _string_end(statement, at) if statement[at] in "\"'" else at + 1
    return at


def newline(text: str) -> str:
    """Return the line ending of this text."""
    return "\r\n" if "\r\n" in text else "\n"


def append(text: str, block: str) -> str:
    """Return the text with tables appended; raise ValueError if they are not valid there."""
    end = newline(text)
    gap = "" if not text else end if text.endswith("\n") else end + end
    result = text + gap + block.replace("\n", end)
    _require(parse(result) == merged(parse(text), parse(block)))
    return result


def merged(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return two documents merged: tables are combined; other values come from the second one."""
    result = dict(tree)
    for key, value in other.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def add_element(text: str, key: str, value: str) -> str:
    """Return the text with a string added to the top-level array `key`, which may be missing."""
    tree = parse(text)
    found = _top(text, key)
    quoted = json.dumps(value)
    if found is None:
        at = max((s.end for s in _before_headers(text)), default=0)
        end = newline(text)
        gap = end if at and not text[:at].endswith("\n") else ""
        result = f"{text[:at]}{gap}{key} = [{quoted}]{end}{text[at:]}"
        old = []
    else:
        old = tree[key]
        if not isinstance(old, list):
            raise ValueError(f"{key} is not an array")
        opened = text.index("[", found.start + _key_end(text[found.start :]))
        spans = _elements(text, opened)
        if spans:
            first, last = spans[0][0], spans[-1][1]
            line = text[text.rfind("\n", 0, first) + 1 : first]
            own_line = not line.strip(" \t") and "\n" in text[opened:first]
            between = newline(text) + line if own_line else " "
            result = f"{text[:last]},{between}{quoted}{text[last:]}"
        else:
            result = f"{text[: opened + 1]}{quoted}{text[opened + 1 :]}"
    _require(parse(result) == {**tree, key: [*old, value]})
    return result


def drop_element(text: str, key: str, value: str) -> str:
    """Return the text without a string in the array `key`; an empty array is removed."""
    tree = parse(text)
    old = tree.get(key)
    found = _top(text, key)
    if found is None or not isinstance(old, list) or value not in old:
        return text
    where = old.index(value)
    if len(old) == 1:
        result = text[: found.start] + text[found.end :]
        _require(parse(result) == {k: v for k, v in tree.items() if k != key})
        return result
    opened = text.index("[", found.start + _key_end(text[found.start :]))
    spans = _elements(text, opened)
    if where:
        result = text[: spans[where - 1][1]] + text[spans[where][1] :]
    else:
        result = text[: spans[0][0]] + text[spans[1][0] :]
    _require(parse(result) == {**tree, key: [*old[:where], *old[where + 1 :]]})
    return result


def drop_tables(text: str, prefix: Path, comments: Iterable[str] = ()) -> str:
    """Return the text without the tables at and below `prefix`, and without these comment lines.

    A comment before the next header stays, because it more likely belongs to that header.
    """
    tree = parse(text)
    for comment in comments:
        text = re.sub(rf"(?m)^{re.escape(comment)}\r?\n?", "", text)
    result, inside, cut = "", False, 0
    for statement in statements(text):
        if statement.header:
            inside = statement.path[: len(prefix)] == prefix
        if inside:
            if statement.header:
                # Its indentation and one preceding empty line are removed as well.
                result += text[cut : statement.start].rstrip(" \t")
                result = re.sub(r"\n\r?\n\Z", "\n", result)
            cut = statement.end
    result += text[cut:]
    _require(pruned(parse(result)) == pruned(_dropped(tree, prefix)))
    return result


def drop_key(text: str, table: Path, key: str, comments: Iterable[str] = ()) -> str:
    """Return the text without a key of a table that has a header, and without these comments."""
    tree = parse(text)
    for comment in comments:
        text = re.sub(rf"(?m)^{re.escape(comment)}\r?\n?", "", text)
    here: Path = ()
    for statement in statements(text):
        if statement.header:
            here = statement.path
        elif (here, statement.path) == (table, (key,)):
            text = text[: statement.start].rstrip(" \t") + text[statement.end :]
            break
    _require(pruned(parse(text)) == pruned(_dropped(tree, (*table, key))))
    return text


def _dropped(tree: dict[str, Any], prefix: Path) -> dict[str, Any]:
    inner = tree.get(prefix[0])
    if len(prefix) > 1 and isinstance(inner, dict):
        return {**tree, prefix[0]: _dropped(inner, prefix[1:])}
    return {key: value for key, value in tree.items() if len(prefix) > 1 or key != prefix[0]}


def pruned(tree: Any) -> Any:
    """Return a document without empty tables, which the removal of a header may leave."""
    if not isinstance(tree, dict):
        return tree
    kept = {key: pruned(value) for key, value in tree.items()}
    return {key: value for key, value in kept.items() if value != {}}


def _before_headers(text: str) -> list[Statement]:
    top = []
    for statement in statements(text):
        if statement.header:
            break
        top.append(statement)
    return top


def _top(text: str, key: str) -> Statement | None:
    return next((s for s in _before_headers(text) if s.path == (key,)), None)


def _elements(text: str, opened: int) -> list[tuple[int, int]]:
    """Return the positions of the elements of the array whose bracket is at `opened`."""
    found = []
    at = opened + 1
    while text[at] != "]":
        if text[at] in " \t\r\n,":
            at += 1
        elif text[at] == "#":
            at = _line_end(text, at)
        else:
            start = at
            at = _element_end(text, at)
            found.append((start, at))
    return found


def _element_end(text: str, at: int) -> int:
    depth = 0
    while True:
        c = text[at]
        if c in "\"'":
            at = _string_end(text, at)
            if depth == 0:
                return at
            continue
        if depth == 0 and c in " \t\r\n,]#":
            return at
        depth += (c in "[{") - (c in "]}")
        at += 1
        if depth == 0 and c in "]}":
            return at


def _require(same: object) -> None:
    if not same:
        raise ValueError("it cannot be edited as text")
