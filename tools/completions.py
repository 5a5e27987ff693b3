"""Generates packaging/completions, for bash, zsh and fish, from the table of command lines.

`python tools/completions.py` writes the files; `--check` fails if they are stale. Completion does
not start Python, except for the name of a container: then it runs `tidegate ps`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.command_table import Command, Option, governor, tidegate  # noqa: E402
from tools.generated import write_or_check  # noqa: E402

DIRECTORY = ROOT / "packaging/completions"
HEAD = "# Written by `python tools/completions.py` from what the programs parse."
# The first column of `tidegate ps`, without the lines of violations below the table. Only ids
# without special characters of the shell are offered: crun accepts any id without a slash, and bash
# expands the words that it is given to choose from.
PLAIN = "[A-Za-z0-9][A-Za-z0-9_.+-]*"
CONTAINERS = f"tidegate ps 2>/dev/null | awk 'NR > 1 && $1 ~ /^{PLAIN}$/ {{print $1}}'"


def _function(command: Command) -> str:
    return "_" + command.name.replace("-", "_")


def _leaves(command: Command) -> list[Command]:
    return [one for one in command.walk() if not one.commands]


def _key(command: Command) -> str:
    """Return a command's words after the program's name."""
    return " ".join(command.path[1:])


# ---- bash


def _bash_value(option: Option) -> str:
    if option.choices:
        return f"mapfile -t COMPREPLY < <(compgen -W '{' '.join(option.choices)}' -- \"$cur\")"
    return {
        "file": 'compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$cur")',
        "directory": 'compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$cur")',
        "container": f'mapfile -t COMPREPLY < <(compgen -W "$({CONTAINERS})" -- "$cur")',
        "word": "COMPREPLY=()",
        "nothing": "COMPREPLY=()",
    }[option.takes]


def bash(program: Command) -> str:
    """Return the script for bash 4.4 and newer, which does not need bash-completion."""
    function = _function(program)
    lines = [
        HEAD,
        "# shellcheck shell=bash",
        "",
        f"{function}() {{",
        '    local cur=${COMP_WORDS[COMP_CWORD]} previous="" path="" words=""',
        "    COMPREPLY=()",
        "    # Bash takes --option=value for three words.",
        "    if [[ $cur == = ]]; then",
        '        cur="" previous=${COMP_WORDS[COMP_CWORD - 1]}',
        "    elif [[ ${COMP_WORDS[COMP_CWORD - 1]} == = ]]; then",
        "        previous=${COMP_WORDS[COMP_CWORD - 2]}",
        "    else",
        "        previous=${COMP_WORDS[COMP_CWORD - 1]}",
        "    fi",
    ]
    inner = [one for one in program.walk() if one.commands and one is not program]
    if program.commands:
        lines += [
            "    if ((COMP_CWORD > 1)); then path=${COMP_WORDS[1]}; fi",
            "    case $path in",
            *(
                f'    {one.name}) if ((COMP_CWORD > 2)); then path+=" ${{COMP_WORDS[2]}}"; fi ;;'
                for one in inner
            ),
            "    esac",
        ]
    lines += ['    case "$path $previous" in']
    for leaf in _leaves(program):
        for option in leaf.options:
            if option.flags and option.value:
                pattern = " | ".join(f'"{_key(leaf)} {flag}"' for flag in option.flags)
                lines.append(f"    {pattern}) {_bash_value(option)}; return ;;")
    lines += ["    esac", '    case "$path" in']
    for command in program.walk():
        flags = [option.flags[-1] for option in command.options if option.flags]
        words = [*(one.name for one in command.commands), *flags]
        places = [option for option in command.options if not option.flags]
        lines.append(f'    "{_key(command)}") words="{" ".join(words)}"')
        if places:
            lines += [f"        if [[ $cur != -* ]]; then {_bash_value(places[0])}; return; fi"]
        lines += ["        ;;"]
    lines += [
        "    esac",
        '    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")',
        "}",
        f"complete -F {function} {program.name}",
    ]
    return "\n".join(lines) + "\n"


# ---- zsh


def _zsh_words(text: str) -> str:
    """Return text for the inside of a specification between single quotes."""
    for char in "\\[]:":
        text = text.replace(char, "\\" + char)
    return text.replace("'", "'\\''")


def _zsh_action(option: Option) -> str:
    if option.choices:
        return f"({' '.join(option.choices)})"
    return {
        "file": "_files",
        "directory": "_files -/",
        "container": "_tidegate_containers",
        "word": " ",
        "nothing": "",
    }[option.takes]


def _zsh_spec(option: Option, place: int) -> str:
    value = _zsh_words(option.value)
    if not option.flags:
        count = ":" if option.required else "::"
        shown = "value" if option.choices else value.lower()
        return f"'{place}{count}{shown}:{_zsh_action(option)}'"
    many = "*" if option.repeated else ""
    flag = f"{option.flags[-1]}{'=' if option.value else ''}"
    argument = f":{value}:{_zsh_action(option)}" if option.value else ""
    if option.flags[-1] in ("--help", "--version"):
        many = "(- *)"
    return f"'{many}{flag}[{_zsh_words(option.doc)}]{argument}'"


def _zsh_case(command: Command, indent: str) -> list[str]:
    """Return the code that completes the arguments of one command."""
    places = iter(range(1, 9))
    specs = [_zsh_spec(one, 0 if one.flags else next(places)) for one in command.options]
    if not command.commands:
        return [indent + "_arguments \\", *_joined(specs, indent + "    ")]
    lines = [
        f"{indent}_arguments -C \\",
        *_joined([*specs, "'1:verb:->verb'", "'*::argument:->rest'"], indent + "    "),
        f"{indent}case $state in",
        f"{indent}verb)",
        f"{indent}    verbs=(",
        *(f"{indent}        '{one.name}:{_zsh_words(one.summary)}'" for one in command.commands),
        f"{indent}    )",
        f"{indent}    _describe verb verbs",
        f"{indent}    ;;",
        f"{indent}rest)",
        f"{indent}    case $line[1] in",
    ]
    for one in command.commands:
        lines += [
            f"{indent}    {one.name})",
            *_zsh_case(one, indent + "        "),
            f"{indent}        ;;",
        ]
    return [*lines, f"{indent}    esac", f"{indent}    ;;", f"{indent}esac"]


def _joined(parts: list[str], indent: str) -> list[str]:
    return [f"{indent}{part} \\" for part in parts[:-1]] + [indent + parts[-1]]


def zsh(programs: list[Command]) -> str:
    """Return the function for zsh, which is autoloaded by the name of its file."""
    lines = [f"#compdef {' '.join(program.name for program in programs)}", HEAD, ""]
    lines += [
        "_tidegate_containers() {",
        "    local -a containers",
        f'    containers=(${{(f)"$({CONTAINERS})"}})',
        "    compadd -a containers",
        "}",
        "",
    ]
    for program in programs:
        lines += [
            f"_{program.name}_program() {{",
            "    local curcontext=$curcontext state line",
            "    local -a verbs",
            *_zsh_case(program, "    "),
            "}",
            "",
        ]
    return "\n".join([*lines, '_${service}_program "$@"']) + "\n"


# ---- fish


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish_value(option: Option) -> str:
    if option.choices:
        return f"-x -a {_fish_quoted(' '.join(option.choices))}"
    return {
        "file": "-r -F",
        "directory": "-x -a '(__fish_complete_directories)'",
        "container": f"-x -a {_fish_quoted(f'({CONTAINERS})')}",
        "word": "-x",
        "nothing": "",
    }[option.takes]


def _fish_when(command: Command) -> str:
    """Return the condition under which a command's own words are completed."""
    if len(command.path) == 1:
        return "__fish_use_subcommand" if command.commands else ""
    words = [f"__fish_seen_subcommand_from {word}" for word in command.path[1:]]
    if command.commands:
        names = " ".join(one.name for one in command.commands)
        words.append(f"not __fish_seen_subcommand_from {names}")
    return "; and ".join(words)


def fish(program: Command) -> str:
    """Return the script for fish 3."""
    lines = [HEAD, f"complete -c {program.name} -f"]
    for command in program.walk():
        when = _fish_when(command)
        start = f"complete -c {program.name}" + (f" -n {_fish_quoted(when)}" if when else "")
        lines += [
            f"{start} -a {one.name} -d {_fish_quoted(one.summary)}" for one in command.commands
        ]
        for option in command.options:
            names = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                for flag in option.flags
            )
            value = _fish_value(option)
            # A positional argument is not the parameter of an option.
            value = value if option.flags else value.removeprefix("-x ").removeprefix("-r ")
            parts = [start, names, value]
            if option.flags:
                parts.append(f"-d {_fish_quoted(option.doc)}")
            lines.append(" ".join(part for part in parts if part))
    return "\n".join(lines) + "\n"


def files() -> dict[Path, str]:
    """Return every file with its expected content."""
    programs = [tidegate(), governor()]
    made = {DIRECTORY / "zsh/_tidegate": zsh(programs)}
    for program in programs:
        made[DIRECTORY / "bash" / program.name] = bash(program)
        made[DIRECTORY / f"fish/{program.name}.fish"] = fish(program)
    return made


if __name__ == "__main__":
    sys.exit(write_or_check(files(), "tools/completions.py"))
