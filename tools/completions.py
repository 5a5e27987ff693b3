"""Generates packaging/completions, for bash, zsh and fish, from the programs' parsers, with shtab.

`python tools/completions.py` writes the files; `--check` fails if they are stale. Completion starts
Python only to complete the name of a container, for which it runs `tidegate ps`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import shtab

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from governor import cli, daemon  # noqa: E402
from governor.install_paths import control_dir  # noqa: E402
from tools.command_table import DIRECTORIES, FILES  # noqa: E402
from tools.generated import write_or_check  # noqa: E402

DIRECTORY = ROOT / "packaging/completions"
HEAD = "# Written by `python tools/completions.py` from the parsers of the programs."
FILE_NAMES = {"bash": "bash/{}", "zsh": "zsh/_{}", "fish": "fish/{}.fish"}
# The first column of `tidegate ps`, without the lines below the table. Only ids without characters
# that are special to the shell are offered, because crun accepts any id without a slash, and bash
# expands the candidates that it is given. This also leaves out lines that begin with `violation:`.
PLAIN = "[A-Za-z0-9][A-Za-z0-9_.+-]*"
BELOW = "^not its own|^unknown functions"
CONTAINERS = (
    f"tidegate ps 2>/dev/null | awk '/{BELOW}/ {{exit}} NR > 1 && $1 ~ /^{PLAIN}$/ {{print $1}}'"
)
# For fish, shtab writes the command in double quotes, in which fish would expand dollar signs.
ESCAPED = CONTAINERS.replace("$", r"\$")
# Bash splits --option=value into three words, and shtab's function expects two.
SPLIT = """
{function}() {{
  local i at=$COMP_CWORD words=()
  for i in "${{!COMP_WORDS[@]}}"; do
    if [[ ${{COMP_WORDS[i]}} != = ]]; then
      words+=("${{COMP_WORDS[i]}}")
    elif ((i == COMP_CWORD)); then
      words+=("")
    elif ((i < COMP_CWORD)); then
      ((at--))
    fi
  done
  COMP_WORDS=("${{words[@]}}")
  COMP_CWORD=$at
  _shtab{function}
}}

complete -o bashdefault -F {function} {program}
"""


def _prepare(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Tell shtab what the values of options are, and what their defaults are on a node."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public accessor
        if str(action.default) == str(control_dir()):  # depends on this checkout's path
            action.default = "/usr/lib/tidegate/MACHINE-linux-gnu"
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for inner in action.choices.values():
                _prepare(inner)
        elif action.dest == "container":
            values = shtab.cmd(CONTAINERS)
            values["fish"] = f"({ESCAPED})"
            action.complete = values  # type: ignore[attr-defined]
        elif action.nargs != 0 and not action.choices:
            if action.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in DIRECTORIES:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return parser


def _script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script. In zsh, the first line of a script has to name the program."""
    lines = shtab.complete(_prepare(parser), shell=shell).rstrip().splitlines()
    begin = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    head = [lines[0], HEAD] if shell == "zsh" else [HEAD]  # shtab's instructions are left out
    if shell == "bash":
        function = "_" + parser.prog.replace("-", "_")
        assert lines.pop().startswith("complete ")  # noqa: S101
        lines += SPLIT.format(function=function, program=parser.prog).splitlines()
    return "\n".join(line.rstrip() for line in [*head, "", *lines[begin:]]) + "\n"


def files() -> dict[Path, str]:
    """Return every file with its expected content."""
    return {
        DIRECTORY / name.format(program): _script(make(), shell)
        for program, make in (("tidegate", cli.parser), ("tidegate-governor", daemon.parser))
        for shell, name in FILE_NAMES.items()
    }


if __name__ == "__main__":
    sys.exit(write_or_check(files(), "tools/completions.py"))
