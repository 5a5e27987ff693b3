"""`tidegate gc`: remove the mirrors of former drivers that no container uses any more."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vdriver.generations import Collection

SUMMARY = "Remove generations of the mirror that no container uses"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.add_argument(
        "--driver-dir",
        default="/var/lib/tidegate/driver",
        metavar="DIR",
        help="where generations are (default %(default)s)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="remove nothing; list what would be removed"
    )
    parser.add_argument(
        "--nested",
        action="store_true",
        help="assume that all containers of the node are in this PID namespace, although it is not "
        "the host's",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Remove unused generations, and print a line for each one; keeping one is not an error."""
    from vdriver.generations import collect

    result = collect(args.driver_dir, dry_run=args.dry_run, nested=args.nested)
    if args.json:
        print(json.dumps(_document(result), indent=1))
    else:
        print("\n".join(_lines(result)))
    result.require_removed()
    return 0


def _lines(result: Collection) -> list[str]:
    removed = "would be removed" if result.dry_run else "removed"
    lines = [
        f"{o.name}  {removed}: {o.reason}, {o.freed / (1 << 20):.1f} MiB"
        ", not counting files that have other hard links"
        if o.removed
        else f"{o.name}  kept: {o.reason}"
        for o in result.outcomes
    ]
    lines += [f"not examined: {note}" for note in result.notes]
    return lines or ["no generation in " + str(result.directory)]


def _document(result: Collection) -> dict[str, Any]:
    return {
        "driver_dir": str(result.directory),
        "dry_run": result.dry_run,
        "generations": [asdict(o) for o in result.outcomes],
        "freed": result.freed,
        "notes": list(result.notes),
    }
