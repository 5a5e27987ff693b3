"""Changes values in a YAML text and keeps the comments and format of everything else.

PyYAML drops comments. A document is therefore read twice, as values and as nodes that record
their positions in the text. Where two values differ, only those positions are overwritten. Where
that is not possible (in flow collections, for example), the smallest enclosing part is rewritten.
The result is read again and compared. If it differs, or if a mapping with a merge key or a repeated
key has to be edited, the whole document is rewritten. A rewritten part loses its comments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

MAX_NODES = 300_000
"""Maximum number of nodes with aliases expanded: a few lines can expand to billions."""
MAX_DEPTH = 200


class UnreadableError(Exception):
    """The text is not usable YAML; the message gives the line and the reason."""


class _CannotEditError(Exception):
    """The text cannot be edited; the whole document has to be rewritten."""


@dataclass
class Document:
    """One document: its text, with the `---` before it, and its value."""

    text: str
    value: Any
    root: yaml.Node | None
    offset: int
    """Offset of the text in the whole input, to which the nodes' positions refer."""
    marked: bool
    """Whether it begins with `---`, without which it cannot follow another document."""
    twice: tuple[str, ...] = ()
    """Keys that a mapping has more than once, with their lines; only the last of each counts."""

    @property
    def has_comments(self) -> bool:
        """Whether a rewrite loses comments; a `#` in a string counts as a comment."""
        return "#" in self.text


def read(text: str) -> list[Document]:
    """Return the documents in a text; raise UnreadableError if the text is not usable YAML."""
    try:
        events = list(_starts(text))
        loader = yaml.SafeLoader(text)
        found = []
        while loader.check_node():
            root: yaml.Node = loader.get_node()  # type: ignore[assignment]
            _require_small(root)
            twice = tuple(_twice(root))
            found.append((root, loader.construct_document(root), twice))
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise UnreadableError(f"{where}{e.problem or e.context or 'not YAML'}") from e
    except yaml.YAMLError as e:
        raise UnreadableError(" ".join(str(e).split())) from e
    except RecursionError as e:
        raise UnreadableError("it is nested too deeply") from e
    except (ValueError, OverflowError) as e:  # a date like 2026-13-40, a number of 5000 digits
        raise UnreadableError(f"a value is not valid: {' '.join(str(e).split())}") from e
    if not found:
        return []
    starts = [0, *(_index(event) for event in events[1:])]
    ends = [*starts[1:], len(text)]
    return [
        Document(text[start:end], value, root, start, bool(event.explicit), twice)
        for start, end, event, (root, value, twice) in zip(starts, ends, events, found, strict=True)
    ]


def _starts(text: str) -> Iterator[yaml.DocumentStartEvent]:
    """Yield the start events of documents; raise UnreadableError if one is nested too deeply."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.DocumentStartEvent):
            yield event
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise UnreadableError("it is nested too deeply")


def _index(event: yaml.Event) -> int:
    mark = event.start_mark
    assert mark is not None  # noqa: S101 - events from a text have marks
    return int(mark.index)


def _require_small(root: yaml.Node) -> None:
    """Count nodes once per reference; raise UnreadableError for too many, or for a cycle."""
    left = MAX_NODES

    def count(node: yaml.Node, above: int) -> None:
        nonlocal left
        left -= 1
        if left < 0 or above > MAX_DEPTH:
            raise UnreadableError("it is too large, nested too deeply, or refers to itself")
        for child in _children(node):
            count(child, above + 1)

    count(root, 0)


def _twice(root: yaml.Node) -> Iterator[str]:
    """Yield the keys that a mapping has more than once, in the form `key on line 7`."""
    waiting, looked = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in looked:
            continue
        looked.add(id(node))
        if isinstance(node, yaml.MappingNode):
            seen, said = set(), set()
            for key, _ in node.value:
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
                if name in seen and name not in said and name is not None and key.value != "<<":
                    said.add(name)
                    yield f"{key.value} on line {key.start_mark.line + 1}"
                seen.add(name)
        waiting += _children(node)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def dump(value: Any, *, flow: bool = False) -> str:
    """Return a value as YAML, with keys in their order and without anchors."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        width=1 << 20,
        allow_unicode=True,
        default_flow_style=flow,
    )


class _Dumper(yaml.SafeDumper):
    """Writes a shared value wherever it occurs, and indents sequences below their keys."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        super().increase_indent(flow=flow, indentless=False)


def unshared(value: Any) -> Any:
    """Return a copy without shared objects: PyYAML returns the same object for an alias."""
    if isinstance(value, dict):
        return {key: unshared(inner) for key, inner in value.items()}
    return [unshared(inner) for inner in value] if isinstance(value, list) else value


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same, including type and order: 1 differs from true."""
    return repr(one) == repr(other)


def rewrite(document: Document, value: Any) -> tuple[str, bool]:
    """Return the document's text with another value, and whether its format was kept."""
    text = document.text if document.text.endswith("\n") else f"{document.text}\n"
    if document.root is not None and "%" not in text[:1]:
        try:
            edits = sorted(
                _Editor(text, document.offset).edits(document.root, document.value, value)
            )
        except (_CannotEditError, RecursionError):
            edits = []
        result, at = "", 0
        for start, end, replacement in edits:
            result += text[at:start] + replacement
            at = max(end, start)
        result += text[at:]
        if edits and _reads_as(result, value):
            return result, True
    return f"---\n{dump(value)}", False


def _reads_as(text: str, value: Any) -> bool:
    try:
        documents = read(text)
    except UnreadableError:
        return False
    return len(documents) == 1 and same(documents[0].value, value)


Edit = tuple[int, int, str]


class _Editor:
    """Computes the replacements in a text that change its value to another."""

    def __init__(self, text: str, offset: int) -> None:
        self.text, self.offset = text, offset

    def at(self, mark: yaml.Mark) -> int:
        return int(mark.index) - self.offset

    def line_start(self, index: int) -> int:
        return self.text.rfind("\n", 0, index) + 1

    def line_end(self, index: int) -> int:
        """Return the start of the next line."""
        end = self.text.find("\n", index)
        return len(self.text) if end < 0 else end + 1

    def end(self, node: yaml.Node) -> int:
        """Return the end of a node's own text; PyYAML marks a block's end at the next token."""
        if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
            end = self.at(node.end_mark)
            while end > self.at(node.start_mark) and self.text[end - 1] in " \n":
                end -= 1  # a block scalar's mark is after its last line
            return end
        last = node.value[-1]
        return self.end(last[1] if isinstance(node, yaml.MappingNode) else last)

    def edits(self, node: yaml.Node, old: Any, new: Any) -> Iterator[Edit]:
        """Yield the replacements for one node."""
        if same(old, new):
            return
        if isinstance(node, yaml.MappingNode) and isinstance(new, dict) and not node.flow_style:
            edits = list(self.mapping(node, old, new))
            if edits:
                yield from edits
                return
        elif (
            isinstance(node, yaml.SequenceNode)
            and isinstance(new, list)
            and len(new) == len(old) == len(node.value)
            and not node.flow_style
        ):
            for child, before, after in zip(node.value, old, new, strict=True):
                yield from self.edits(child, before, after)
            return
        elif isinstance(node, yaml.SequenceNode) and isinstance(new, list) and not node.flow_style:
            edits = self.sequence(node, old, new)
            if edits:
                yield from edits
                return
        yield self.whole(node, new)

    def sequence(self, node: yaml.SequenceNode, old: list[Any], new: list[Any]) -> list[Edit]:
        """Return the edits that only remove or only append items; none if that is not enough."""
        dashes = []
        for child in node.value:
            start = self.at(child.start_mark)
            line = self.line_start(start)
            if self.text[line:start].strip() != "-":
                return []  # something other than the dash precedes it
            dashes.append(line)
        if new[: len(old)] and all(map(same, old, new)) and len(new) > len(old):
            indent = self.text[dashes[0] : self.text.index("-", dashes[0])]
            after = self.line_end(self.end(node))
            body = "".join(f"{indent}{line}\n" for line in dump(new[len(old) :]).splitlines())
            return [(after, after, body)]
        kept, edits = 0, []
        for child, line, item in zip(node.value, dashes, old, strict=True):
            if kept < len(new) and same(item, new[kept]):
                kept += 1
            else:
                end = max(self.end(child), self.at(child.start_mark))
                edits.append((line, self.line_end(end), ""))
        return edits if new and kept == len(new) else []

    def mapping(self, node: yaml.MappingNode, old: Any, new: dict[Any, Any]) -> Iterator[Edit]:
        """Yield the edits within a block mapping; none if it has to be rewritten as a whole."""
        keys = [key.value for key, _ in node.value]
        column = node.start_mark.column
        indent = " " * column
        if len(set(keys)) != len(keys) or "<<" in keys or not isinstance(old, dict):
            raise _CannotEditError
        if not set(keys) & set(new) or set(keys) != set(old):
            return
        edits: list[Edit] = []
        for key, value in node.value:
            start = self.at(key.start_mark)
            if key.value in new:
                edits += self.edits(value, old[key.value], new[key.value])
                continue
            line = self.line_start(start)
            if self.text[line:start].strip():
                return  # it follows a dash, so the mapping's first line would be removed
            edits.append((line, self.line_end(max(self.end(value), start)), ""))
        added = {key: value for key, value in new.items() if key not in old}
        if added:
            after = self.line_end(max(self.end(node), self.at(node.start_mark)))
            body = "".join(f"{indent}{line}\n" for line in dump(added).splitlines())
            edits.append((after, after, body))
        yield from edits

    def whole(self, node: yaml.Node, new: Any) -> Edit:
        """Return the edit that replaces a whole node with a value."""
        start, end = self.at(node.start_mark), self.end(node)
        if node.flow_style if isinstance(node, yaml.CollectionNode) else True:
            flat = dump(new, flow=True)
            return start, end, flat.removesuffix("\n").removesuffix("\n...")
        if not new:
            return start, end, "{}" if isinstance(new, dict) else "[]"
        indent = " " * node.start_mark.column
        return start, end, f"\n{indent}".join(dump(new).splitlines())
