"""Generates docs/reference/commands.md from the table of command lines (tools/command_table.py).

`python tools/commands_reference.py` writes the page; `--check` fails if it is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import command_table  # noqa: E402
from tools.command_table import HOOK, RUNTIME, RUNTIME_SETTINGS, Command  # noqa: E402
from tools.generated import write_or_check  # noqa: E402

PAGE = ROOT / "docs/reference/commands.md"

HEAD = """\
<!-- Written by `python tools/commands_reference.py` from the parsers of the programs. -->

# Commands

Every program, verb and option. The manual pages (`man tidegate` and so on) and `--help` have the
same content. Exit statuses are those of the [errors](errors.md); 2 means that the command line is
wrong. Completions for bash, zsh and fish come with the package.
"""

SETTINGS = (
    "Its settings, one per line in `/etc/tidegate/runtime` ([more](runtime.md#tidegate-runtime)):"
)


def cell(text: str) -> str:
    """Return text for a table cell, with vertical bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def options(command: Command) -> list[str]:
    """Return the table of a command's options; empty if it has none."""
    rows = []
    for option in command.options:
        if "--help" in option.flags:
            continue
        name = ", ".join((*option.flags[:-1], option.shown))
        again = "; may be repeated" * (option.repeated and "repeated" not in option.doc)
        rows.append(f"| `{cell(name)}` | {cell(option.doc)}{again} |")
    return ["", "| option | meaning |", "| --- | --- |", *rows] if rows else []


def described(command: Command, depth: int) -> list[str]:
    """Return the lines of the sections on a command and on its subcommands."""
    lines = ["", f"{'#' * depth} {' '.join(command.path)}", ""]
    summary = command.summary.strip().rstrip(".")
    lines.append(f"{summary[:1].upper()}{summary[1:]}.")
    if not command.commands or len(command.path) > 1:
        lines += ["", "```text", command.synopsis(), "```"]
    lines += options(command)
    more = [" ".join(part.split()) for part in command.more.split("\n\n") if part.strip()]
    for paragraph in more:
        lines += ["", paragraph]
    for inner in command.commands:
        lines += described(inner, depth + 1)
    return lines


def page() -> str:
    """Return the whole page."""
    lines = []
    for command in (command_table.tidegate(), command_table.governor(), HOOK, RUNTIME):
        lines += described(command, 2)
    rows = [f"| `{name}` | {cell(meaning)} |" for name, meaning in RUNTIME_SETTINGS.items()]
    lines += ["", SETTINGS, "", "| setting | meaning |", "| --- | --- |", *rows]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}, "tools/commands_reference.py"))
