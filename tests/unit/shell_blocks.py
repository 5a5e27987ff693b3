"""Extract the commands of the documents from their shell blocks, split into words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools import markdown

ROOT = Path(__file__).resolve().parents[2]
SHELL = {"sh", "console", "bash"}
KEYWORDS = {"do", "then", "else", "until", "while", "if", "!", "exec", "sudo", "{", "("}
ENDS = {"done", "fi", "esac", "}"}
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class ShellCommand:
    """A command as a shell would run it, without redirections and without leading assignments."""

    page: str
    line: int
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The first word."""
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"


def pages() -> list[Path]:
    """Return the pages with commands that a reader may type: all pages."""
    return markdown.pages()


def script_of(fence: markdown.Fence) -> str:
    """Return what is typed. In a console block these are the lines after a prompt."""
    if fence.language != "console":
        return fence.text
    return "\n".join(line[2:] for line in fence.text.splitlines() if line.startswith("$ "))


def blocks() -> Iterator[tuple[str, markdown.Fence]]:
    """Yield each shell block with the page that it is on."""
    for page in pages():
        for fence in markdown.fences(page.read_text(encoding="utf-8")):
            if fence.language in SHELL:
                yield page.relative_to(ROOT).as_posix(), fence


def commands() -> Iterator[ShellCommand]:
    """Yield each command of each block."""
    for page, fence in blocks():
        for offset, line in _lines(script_of(fence)):
            for words in split(line):
                yield ShellCommand(page, fence.line + offset, words)


def _lines(script: str) -> Iterator[tuple[int, str]]:
    """Yield logical lines with their offset. Continued lines are joined and here-documents left out."""
    until, joined, start = "", "", 0
    for offset, written in enumerate(script.splitlines()):
        if until:
            until = "" if written.strip() == until else until
            continue
        start = start if joined else offset
        if written.endswith("\\"):
            joined += written[:-1] + " "
            continue
        line, joined = joined + written, ""
        here = re.search(r"<<-?\s*['\"]?(\w+)", line)
        if here:
            until = here[1]
            line = line[: here.start()]
        if line.strip():
            yield start, line


def split(line: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each simple command of a line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    skip = False
    for token in [*lexer, ";"]:
        if token[0] in "();|&" and set(token) <= set("();|&"):
            yield from _simple(words)
            words, skip = [], False
        elif set(token) & set("<>") and set(token) <= set("<>&|"):
            if words and words[-1].isdigit():
                words.pop()
            skip = True
        elif skip:
            skip = False
        else:
            words.append(token)


def _simple(words: list[str]) -> Iterator[tuple[str, ...]]:
    while words and (words[0] in KEYWORDS or ASSIGNMENT.match(words[0])):
        words = words[1:]
    if words and words[0] == "export":
        return
    if words and words[0] != "for" and words[0] not in ENDS:
        yield tuple(words)


def inline() -> Iterator[ShellCommand]:
    """Yield Tidegate's own commands that the text quotes between backticks. Some are cut short."""
    for page in pages():
        name = page.relative_to(ROOT).as_posix()
        for line in markdown.prose(page.read_text(encoding="utf-8")):
            for match in markdown.CODE.finditer(line.text):
                code = match[2].strip()
                if re.match(r"(sudo )?(\.venv/bin/)?(tidegate[a-z-]* |python -m |make )", code):
                    try:
                        for words in split(code):
                            yield ShellCommand(name, line.number, words)
                    except ValueError:
                        continue  # an unfinished quotation
