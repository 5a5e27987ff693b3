"""Remove the parts that setup wrote from a file that has been edited since.

A part of a file is a dictionary with one of these keys:

- `member`: the path of a JSON member; with `only`, it is removed only if it has that value, and
  with `former` it is set back to that value
- `tables`: the path of TOML tables, which are removed with their subtables and the comment lines
  `comments`; with `spare`, they stay while there are other tables alongside them
- `key`: a TOML key in a table that has a header, and `comments` as above
- `element`: the key of a TOML array, and a string in it
- `lines`: whole lines of a file of any format
- `whole`: the whole file, which is kept under another name because it has the user's edits
"""

from __future__ import annotations

import re
from typing import Any

from governor.setup import jsontext, tomltext
from governor.setup.journal import Part


def take_out(text: str, parts: list[Part], *, made: bool) -> str | None:
    """Return the text without these parts, or None if setup created the file and it is now empty.

    Raise ValueError if the text is no longer valid JSON or TOML, or a part cannot be identified.
    """
    for part in parts:
        text = _without(text, part)
    return None if made and _is_empty(text, parts) else text


def _without(text: str, part: Part) -> str:
    if "member" in part:
        path = tuple(part["member"])
        if "only" in part and _member(jsontext.parse(text), path) != part["only"]:
            return text
        if part.get("former") is not None:
            return jsontext.put(text, path, part["former"])
        return jsontext.drop(text, path)
    if "lines" in part:
        for line in part["lines"]:
            text = re.sub(rf"(?m)^{re.escape(line)}(\r?\n|\Z)", "", text)
        return text
    if "element" in part:
        return tomltext.drop_element(text, *part["element"])
    if "key" in part:
        *path, key = part["key"]
        return tomltext.drop_key(text, tuple(path), key, part.get("comments", ()))
    prefix = tuple(part["tables"])
    if part.get("spare"):
        beside = _member(tomltext.parse(text), prefix[:-1])
        if isinstance(beside, dict) and set(beside) - {prefix[-1]}:
            return text
    return tomltext.drop_tables(text, prefix, part.get("comments", ()))


def _member(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return None
        tree = tree[key]
    return tree


def _is_empty(text: str, parts: list[Part]) -> bool:
    """Return whether no content is left."""
    if any("lines" in part for part in parts):
        return not text.strip()
    if any("member" in part for part in parts):
        return not jsontext.parse(text)
    return not set(tomltext.pruned(tomltext.parse(text))) - {"version"} and "#" not in text
