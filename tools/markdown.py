"""Reads the links, anchors and fenced blocks of Markdown pages, for tools and tests.

It supports only the Markdown that the project's pages use: fences of three backticks, inline links
and images, headings with #.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"^\s*```\s*([\w-]*)\s*$")
HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
CODE = re.compile(r"(`+)(.+?)\1")
# The text may continue on the next line, but not across an empty one.
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\]\n]|\n(?!\s*\n))*)\]\((?P<target>[^()\s]+)\)")


@dataclass(frozen=True)
class Line:
    """A line of prose, without its newline; `number` counts from 1."""

    number: int
    text: str


@dataclass(frozen=True)
class Fence:
    """A fenced block; `line` is the number of its first line, after the fence."""

    language: str
    line: int
    text: str


@dataclass(frozen=True)
class Link:
    """A link or an image, as written."""

    line: int
    target: str
    image: bool

    @property
    def outside(self) -> bool:
        """Whether the link points outside the repository."""
        return re.match(r"[a-z]+:", self.target) is not None

    @property
    def path(self) -> str:
        """The path of the file; empty for an anchor in the same page."""
        return self.target.partition("#")[0]

    @property
    def anchor(self) -> str:
        """The part after #, or an empty string."""
        return self.target.partition("#")[2]


def pages(root: Path = ROOT) -> list[Path]:
    """Return every page in the repository, including untracked ones, except ignored ones."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.md"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    names = sorted(set(listing.stdout.splitlines()))
    return [root / name for name in names if (root / name).exists()]


def fences(text: str) -> list[Fence]:
    """Return the fenced blocks; raise ValueError if one is not closed."""
    found: list[Fence] = []
    language, start = "", 0
    inside: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if inside is None:
            if fence:
                language, start, inside = fence[1], number + 1, []
        elif fence and not fence[1]:
            found.append(Fence(language, start, "\n".join(_outdented(inside))))
            inside = None
        else:
            inside.append(line)
    if inside is not None:
        raise ValueError(f"the fenced block that begins on line {start - 1} is not closed")
    return found


def _outdented(lines: list[str]) -> list[str]:
    """Return a block without the indentation that its lines have in common, if it is in a list."""
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[margin:] for line in lines]


def prose(text: str) -> Iterator[Line]:
    """Yield the lines outside fenced blocks."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            yield Line(number, line)


def links(text: str) -> Iterator[Link]:
    """Yield the links in the prose; text in backticks is not a link."""
    masked = _masked(text)
    for match in LINK.finditer(masked):
        line = masked.count("\n", 0, match.start("target")) + 1
        yield Link(line, match["target"], bool(match["image"]))


def _masked(text: str) -> str:
    """Return a page with its code replaced by blanks, so that all positions stay the same."""
    outside = {line.number for line in prose(text)}
    lines = text.splitlines(keepends=True)
    return "".join(
        CODE.sub(lambda code: "`" * len(code[0]), line)
        if number in outside
        else " " * (len(line) - 1) + "\n"
        for number, line in enumerate(lines, 1)
    )


def with_links(text: str, rewritten: dict[str, str]) -> str:
    """Return the page with its link targets replaced as in `rewritten`."""
    # Replaced from the end, so that earlier positions stay valid.
    for match in reversed(list(LINK.finditer(_masked(text)))):
        target = rewritten.get(match["target"])
        if target is not None:
            start, end = match.span("target")
            text = text[:start] + target + text[end:]
    return text


def headings(text: str) -> list[tuple[int, str]]:
    """Return the depth of each heading, and its text without backticks and links."""
    found = []
    for line in prose(text):
        match = HEADING.match(line.text)
        if match:
            words = LINK.sub(lambda link: link["text"], match[2])
            found.append((len(match[1]), words.replace("`", "")))
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors of a page, as forges and the site derive them from headings."""
    found: set[str] = set()
    for _, words in headings(text):
        base = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        slug, count = base, 0
        while slug in found:
            count += 1
            slug = f"{base}-{count}"
        found.add(slug)
    return found
