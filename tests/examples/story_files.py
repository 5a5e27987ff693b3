"""The files of a story's directory, as its tests read them."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import yaml

from bench.provenance import ROOT

EXAMPLES = ROOT / "examples"
STORIES = (
    "training-beside-inference", "jupyter-class", "ci-runners", "several-gpus", "many-models",
    "moving-from-hami",
)  # fmt: skip
PREFIX = "tidegate.gpu/"


class FencedBlock(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str


class TableRow(NamedTuple):
    """A row of a story's table."""

    what: str
    expected: str
    measured: str
    met: str


def readme(story: str) -> str:
    return (EXAMPLES / story / "README.md").read_text()


def blocks(text: str) -> list[FencedBlock]:
    return [
        FencedBlock(*found)
        for found in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def table(text: str) -> list[TableRow]:
    """Parse a table; its second line delimits the columns."""
    lines = text.splitlines()
    at = next((i for i, line in enumerate(lines) if re.fullmatch(r"-+(  -+){3}", line)), 0)
    assert at, f"there is no table in:\n{text}"
    spans = [found.span() for found in re.finditer(r"-+", lines[at])]
    rows = []
    for line in lines[at + 1 :]:
        if not line.strip():
            break
        rows.append(TableRow(*(line[begin:end].strip() for begin, end in spans)))
    return rows


def told(story: str, begins: str) -> str:
    """Return the only block of a story's page whose first word is `begins`."""
    found = [b.text for b in blocks(readme(story)) if b.text.split(None, 1)[0] == begins]
    assert len(found) == 1, f"{story}: {len(found)} blocks begin with {begins}"
    return found[0]


def shell_lines(text: str) -> list[list[str]]:
    """Return the words of each command in the shell blocks."""
    return [
        shlex.split(line, comments=True)
        for block in blocks(text)
        if block.language == "sh"
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


def annotations_of(words: list[str]) -> dict[str, str]:
    """Return the annotations of a command line."""
    given = [b for a, b in itertools.pairwise(words) if a == "--annotation"]
    return dict(one.split("=", 1) for one in given)


def containers(story: str) -> dict[str, dict[str, str]]:
    path = EXAMPLES / story / "containers.yaml"
    return yaml.safe_load(path.read_text()) if path.exists() else {}


def pods() -> list[Path]:
    """Return the converted pods of moving-from-hami."""
    return sorted((EXAMPLES / "moving-from-hami").glob("*.tidegate.yaml"))
