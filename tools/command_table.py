"""Describes the command lines as data, for the manual pages, completions and reference page.

`tidegate` and `tidegate-governor` use argparse, from which their options are taken. The hook and
the wrapper runtime do not, so their options are described here; a test compares the descriptions
with the options that these programs accept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from governor import cli, daemon  # noqa: E402
from governor.install_paths import control_dir  # noqa: E402

Takes = Literal["nothing", "word", "file", "directory", "container"]

FILES = {"FILE"}
DIRECTORIES = {"DIR"}


@dataclass(frozen=True)
class Option:
    """An option; one without flags is a positional argument."""

    flags: tuple[str, ...]
    value: str  # placeholder for its value in a synopsis, empty if it takes none
    doc: str
    choices: tuple[str, ...] = ()
    takes: Takes = "nothing"
    required: bool = False
    repeated: bool = False

    @property
    def shown(self) -> str:
        """The option with its value, as on a command line."""
        return f"{self.flags[-1]} {self.value}".rstrip() if self.flags else self.value


@dataclass(frozen=True)
class Command:
    """A program, a verb, or a subcommand of a verb."""

    path: tuple[str, ...]
    summary: str
    options: tuple[Option, ...] = ()
    more: str = ""
    """Text below the options in --help."""
    commands: tuple[Command, ...] = ()

    @property
    def name(self) -> str:
        """The last word of the command: the name of the program, verb or subcommand."""
        return self.path[-1]

    def synopsis(self) -> str:
        """Return the synopsis."""
        words = [" ".join(self.path)]
        places = [option for option in self.options if not option.flags]
        words += [
            option.shown if option.required else f"[{option.shown}]"
            for option in (*(one for one in self.options if one.flags), *places)
            if "--help" not in option.flags
        ]
        if self.commands:
            words.append("VERB ..." if len(self.path) == 1 else "ACTION ...")
        return " ".join(words)

    def walk(self) -> Iterator[Command]:
        """Yield the command and all subcommands."""
        yield self
        for command in self.commands:
            yield from command.walk()


def _takes(action: argparse.Action, value: str) -> Takes:
    if not value:
        return "nothing"
    if value in FILES:
        return "file"
    if value in DIRECTORIES:
        return "directory"
    return "container" if action.dest == "container" else "word"


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> Option:
    choices = tuple(str(choice) for choice in action.choices or ())
    value = ""
    if action.nargs != 0:
        value = str(action.metavar or ("|".join(choices) if choices else action.dest.upper()))
    doc = parser._get_formatter()._expand_help(action) if action.help else ""  # noqa: SLF001
    # A default that depends on the location of this checkout is replaced by the one on a node.
    doc = doc.replace(str(control_dir()), "/usr/lib/tidegate/MACHINE-linux-gnu")
    return Option(
        tuple(sorted(action.option_strings, key=len)),
        value,
        doc,
        choices,
        _takes(action, value),
        required=action.required,
        repeated=isinstance(action, argparse._AppendAction),  # noqa: SLF001
    )


def _command(parser: argparse.ArgumentParser, path: tuple[str, ...], summary: str) -> Command:
    options, commands = [], []
    for action in parser._actions:  # noqa: SLF001 - argparse has no public accessor
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            helps = {choice.dest: choice.help for choice in action._choices_actions}  # noqa: SLF001
            for name, inner in action.choices.items():
                commands.append(_command(inner, (*path, name), str(helps[name])))
        else:
            options.append(_option(parser, action))
    description = parser.description or ""
    is_summary = description.rstrip(".") == summary.rstrip(".")
    more = ["" if is_summary else description, parser.epilog or ""]
    return Command(path, summary, tuple(options), "\n\n".join(filter(None, more)), tuple(commands))


def tidegate() -> Command:
    """Return the operator's command."""
    parser = cli.parser()
    return _command(parser, ("tidegate",), (parser.description or "").rstrip("."))


def governor() -> Command:
    """Return the daemon's command."""
    return _command(daemon.parser(), ("tidegate-governor",), daemon.SUMMARY)


HOOK = Command(
    ("tidegate-hook",),
    "OCI hook that gives containers their share of a GPU",
    (
        Option(
            ("--runtime-dir",), "DIR", "the governor's directory (/run/tidegate)", (), "directory"
        ),
        Option(
            ("--driver-dir",),
            "DIR",
            "the driver's mirror (/var/lib/tidegate/driver)",
            (),
            "directory",
        ),
        Option(("--dev-dir",), "DIR", "the host's device nodes (/dev)", (), "directory"),
        Option(
            ("--module-version",),
            "FILE",
            "file with the kernel module's version (/proc/driver/nvidia/version)",
            (),
            "file",
        ),
        Option(("--log",), "FILE", "write events to this file, not to syslog", (), "file"),
        Option(
            ("--timeout",),
            "SECONDS",
            "give up, and fail the start, after this time (20)",
            (),
            "word",
        ),
        Option(
            ("--governed",),
            "",
            "the container is governed, regardless of its annotations; CDI specifications"
            " pass this option",
        ),
        Option(
            ("--claim",),
            "UID",
            "the container has a share of this claim; the Kubernetes driver passes this option",
            (),
            "word",
        ),
        Option(("--share",), "NAME", "the name of the share of the claim", (), "word"),
        Option(
            (),
            "prestart|createRuntime|precreate|poststop",
            "the stage at which the runtime (for precreate: the engine) calls the hook",
            ("prestart", "createRuntime", "precreate", "poststop"),
            "word",
            required=True,
        ),
    ),
)

RUNTIME = Command(
    ("tidegate-runtime",),
    "OCI runtime that adds GPUs, and executes runc or crun",
    (
        Option(
            ("--tidegate-config",),
            "FILE",
            "the settings (/etc/tidegate/runtime); only as the first argument",
            (),
            "file",
        ),
    ),
)

RUNTIME_SETTINGS = {
    "runtime": "the runtime to execute: by default the first of /usr/bin/runc, /usr/sbin/runc,"
    " /usr/local/sbin/runc, /usr/bin/crun, /usr/libexec/crio/crun and /usr/libexec/crio/runc that"
    " exists",
    "runtime-for": "a state directory, a space, and the runtime to execute in place of `runtime` if"
    " the engine passes that directory with --root; any number of lines",
    "environment": "whether the container's environment variables count if an annotation is"
    " missing: allow or ignore (the default)",
    "hook": "the path of the hook that is written into config.json (/usr/bin/tidegate-hook)",
    "hook-arguments": "the hook's options, separated by spaces",
    "runtime-dir": "directory of the governor's socket (/run/tidegate)",
    "dev-dir": "the host's device nodes (/dev)",
    "log": "a file to which failed starts are logged, one line each, instead of syslog",
}
