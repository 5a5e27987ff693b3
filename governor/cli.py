"""The command `tidegate`: one verb, one module in governor/verbs/, imported when it is called.

A verb's module has `SUMMARY`, `add_arguments(parser)` and `run(args)`, which returns the exit
status. Only this module maps an error to a line on stderr and to an exit status.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

VERBS = (
    *("refresh", "verify", "gc", "check", "doctor", "explain", "ps", "set", "events", "cdi"),
    "setup",
)


class Verb(Protocol):
    """What a module in governor/verbs/ offers."""

    SUMMARY: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the verb's own options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and return the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; whatever an operator can act on becomes one line on stderr."""
    args = list(sys.argv[1:] if argv is None else argv)
    # The verb stands first, so its module alone is imported: `ps` does not wait for pyelftools.
    verbs = (args[0],) if args and args[0] in VERBS else VERBS
    options = parser(verbs).parse_args(args)
    try:
        status = load(options.verb).run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `tidegate ps | head`: the reader has left, and flushing at exit would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as e:
        known = _as_line(e)
        if known is None:
            raise
        line, status = known
        sys.stderr.write(f"tidegate: {line}\n")
    return status


def parser(verbs: Sequence[str] = VERBS) -> argparse.ArgumentParser:
    """Return the parser of these verbs; of all of them for --help, the man page and completion."""
    top = argparse.ArgumentParser(
        prog="tidegate", description="Shares a GPU among containers by quota."
    )
    top.add_argument(
        "--version", action=_Version, nargs=0, help="show program's version number and exit"
    )
    subparsers = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name in verbs:
        verb = load(name)
        verb.add_arguments(
            subparsers.add_parser(name, help=verb.SUMMARY, description=f"{verb.SUMMARY}.")
        )
    return top


class _Version(argparse.Action):
    """Look the version up when it is asked for: that takes 20 ms."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"tidegate {version()}")
        parser.exit()


def load(name: str) -> Verb:
    """Import the module of one verb."""
    return cast("Verb", importlib.import_module(f"governor.verbs.{name}"))


def version() -> str:
    """Return the version that is installed, or the checkout's where nothing is."""
    from importlib import metadata

    try:
        return metadata.version("tidegate")
    except metadata.PackageNotFoundError:
        import tomllib

        project = Path(__file__).parents[1] / "pyproject.toml"
        try:
            return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
        except OSError:
            return "unknown"


def _as_line(error: Exception) -> tuple[str, int] | None:
    """Return the line and the exit status of an error of ours, None for anybody else's.

    Recognised by what they carry: the packages have no base class in common, so that the hook
    imports nothing of the others.
    """
    status, hint = getattr(error, "status", None), getattr(error, "hint", None)
    if not isinstance(status, int) or not isinstance(getattr(error, "code", None), str):
        return None
    message = str(getattr(error, "message", error))
    return " ".join((f"{message}; {hint}" if hint else message).split()), status


if __name__ == "__main__":
    sys.exit(main())
