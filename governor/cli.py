"""The command `tidegate`: each verb is a module in governor/verbs/, imported when it is called.

A verb's module has `SUMMARY`, `add_arguments(parser)` and `run(args)`, which returns the exit
status. Only this module turns an error into a line on stderr and an exit status.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from governor import VERSION
from governor.options import Parser
from vdriver.errors import one_line

VERBS = (
    *(
        "ps",
        "top",
        "inspect",
        "claims",
        "set",
        "suspend",
        "resume",
        "events",
        "check",
        "reload",
        "doctor",
        "explain",
        "setup",
    ),
    *("cdi", "convert", "refresh", "verify", "gc", "install"),
)


class Verb(Protocol):
    """The interface of a module in governor/verbs/."""

    SUMMARY: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the verb's own options."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the verb, and return the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; an error that an operator can act on becomes one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal's encoding cannot show must not suppress the other output.
            stream.reconfigure(errors="backslashreplace")
    args = list(sys.argv[1:] if argv is None else argv)
    # The verb comes first, so only its module is imported: `ps` need not import pyelftools.
    verbs = (args[0],) if args and args[0] in VERBS else VERBS
    options = parser(verbs).parse_verb(args)
    try:
        status = load(options.verb).run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `tidegate ps | head`: the reader is gone, and flushing at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except PermissionError as e:
        if not os.geteuid():
            raise
        what = f"{e.filename}: {e.strerror}" if e.filename else str(e)
        sys.stderr.write(f"tidegate: {one_line(what)}; run it as root\n")
        return os.EX_NOPERM
    except Exception as e:
        known = _as_line(e)
        if known is None:
            raise
        line, status = known
        sys.stderr.write(f"tidegate: {line}\n")
    return status


def parser(verbs: Sequence[str] = VERBS) -> Parser:
    """Return the parser of these verbs; --help, the man page and completion need all verbs."""
    top = Parser(prog="tidegate", description="Shares a GPU among containers by quota.")
    top.add_argument("--version", action="version", version=f"tidegate {VERSION}")
    subparsers = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name in verbs:
        verb = load(name)
        verb.add_arguments(
            subparsers.add_parser(name, help=verb.SUMMARY, description=f"{verb.SUMMARY}.")
        )
    return top


def load(name: str) -> Verb:
    """Import the module of one verb."""
    return cast("Verb", importlib.import_module(f"governor.verbs.{name}"))


def _as_line(error: Exception) -> tuple[str, int] | None:
    """Return the line and the exit status of one of Tidegate's errors; None for any other.

    These errors are recognised by their attributes: the packages have no common base class, so that
    the hook need not import the other packages.
    """
    status, hint = getattr(error, "status", None), getattr(error, "hint", None)
    if not isinstance(status, int) or not isinstance(getattr(error, "code", None), str):
        return None
    message = str(getattr(error, "message", error))
    return one_line(f"{message}; {hint}" if hint else message), status


if __name__ == "__main__":
    sys.exit(main())
