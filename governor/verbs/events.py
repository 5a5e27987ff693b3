"""`tidegate events`: show why starts failed, from the hook's and governor's events in the log."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from governor.errors import RequestError

if TYPE_CHECKING:
    from governor.events import Event

SUMMARY = "Show why containers did not start, from the node's log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.add_argument(
        "--container",
        metavar="ID",
        help="show the events of this container only: its id or a prefix of its id; for a pod or "
        "claim, NAMESPACE/NAME",
    )
    parser.add_argument("--all", action="store_true", help="also show what succeeded")
    parser.add_argument(
        "--since",
        metavar="WHEN",
        help="show events since this time, in journalctl's format: --since=today, --since=-1h",
    )
    parser.add_argument("--follow", action="store_true", help="wait for further events")
    parser.add_argument(
        "--log",
        action="append",
        metavar="FILE",
        help="read this file: the hook's log (its --log), the governor's output, or a syslog; "
        "may be repeated (default: the journal, or else /var/log/syslog or messages)",
    )
    parser.add_argument("--json", action="store_true", help="print each event as it was written")


def run(args: argparse.Namespace) -> int:
    """Print a line per event; it is not an error if there are none."""
    from governor.events import select

    shown = 0
    events = _source(args)
    for event in select(events, args.container, everything=args.all):
        shown += 1
        print(json.dumps(event.fields) if args.json else _line(event), flush=args.follow)
    if not shown and not args.json:
        about = f" for {args.container}" if args.container else ""
        what = "no events" if args.all else "no failures"
        print(f"{what}{about} in {_where(args)}{_hint(args.container)}", file=sys.stderr)
    return 0


def _hint(container: str | None) -> str:
    """Return a hint for a container that is specified by its name; logs contain only ids."""
    if container is None or "/" in container or set(container) <= set("0123456789abcdef"):
        return ""
    return "; containers are found by their ids: tidegate ps, docker ps --all, podman ps --all"


def _files(args: argparse.Namespace) -> list[Path]:
    from governor.events import SYSLOG_FILES, has_journal

    if args.log:
        return [Path(name) for name in args.log]
    if has_journal():
        return []
    found = [Path(name) for name in SYSLOG_FILES if Path(name).exists()]
    if not found:
        raise RequestError(
            f"this node has no journal and none of {', '.join(SYSLOG_FILES)}",
            hint="run a syslog daemon; or write the governor's standard error to a file, give the"
            " hook --log FILE, add `log FILE` to the wrapper's settings, and name the files with"
            " --log",
        )
    return found


def _source(args: argparse.Namespace) -> Iterator[Event]:
    from governor.events import read_files, read_journal

    files = _files(args)
    if not files:
        return read_journal(args.since, follow=args.follow)
    if args.since:
        raise RequestError(
            f"--since applies only to the journal, but {files[0]} is a file", hint="leave it out"
        )
    return read_files(files, follow=args.follow)


def _where(args: argparse.Namespace) -> str:
    return " or ".join(map(str, _files(args))) or "the journal"


def _line(event: Event) -> str:
    words = [f"{event.time:24}", f"{event.source:8}", event.name, event.container[:40]]
    line = " ".join(word for word in words if word)
    text = event.text()
    line = f"{line}: {text}" if text else line
    return "".join(c if c.isprintable() else "?" for c in line)
