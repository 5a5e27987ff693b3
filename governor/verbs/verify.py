"""`tidegate verify`: check that a generation of the mirror matches its manifest, and loads."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vdriver.verify import Report

SUMMARY = "Check the content of a generation of the mirror, and whether its libraries load"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.add_argument(
        "generation", nargs="?", help="a generation's name or path (default: the one in force)"
    )
    parser.add_argument(
        "--driver-dir",
        default="/var/lib/tidegate/driver",
        metavar="DIR",
        help="where generations are (default %(default)s)",
    )
    parser.add_argument("--no-load", action="store_true", help="check files only; load no library")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the report; then raise MirrorError for the first fault, if there is one."""
    from vdriver.verify import find_generation, verify

    generation = find_generation(args.driver_dir, args.generation)
    report = verify(
        generation, load=not args.no_load, progress=_count if sys.stderr.isatty() else None
    )
    if args.json:
        print(json.dumps(_document(report), indent=1))
    else:
        print("\n".join(_lines(report)))
    sys.stdout.flush()  # the error line has to follow the report
    report.require_intact()
    return 0


def _count(done: int, total: int) -> None:
    end = "\r\033[K" if done == total else ""
    sys.stderr.write(f"\rloading libraries: {done} of {total}{end}")
    sys.stderr.flush()


def _lines(report: Report) -> Iterator[str]:
    manifest = report.manifest
    roles = Counter("link" if f.role == "link" else "file" for f in manifest.files)
    outcomes = Counter(x.outcome for x in report.libraries)
    yield f"generation  {report.path.name} ({manifest.kind}, {manifest.machine})"
    yield (
        f"content     {roles['file']} files, {roles['link']} links, {len(manifest.sets)} sets, "
        f"{len(manifest.places)} places: {_faults(len(report.content))}"
    )
    if report.libraries:
        yield (
            f"libraries   {outcomes['loaded']} loaded, {outcomes['not loaded']} not loaded here, "
            f"{outcomes['failed']} failed"
        )
    elif report.content:
        yield "libraries   not loaded: the content is at fault"
    else:
        yield "libraries   not requested"
    reasons: dict[str, list[str]] = {}
    for library in report.libraries:
        if library.outcome == "not loaded":
            reasons.setdefault(library.detail, []).append(library.path)
    for reason, paths in reasons.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield f"  {paths[0]}{more} not loaded here: {reason}"
    for fault in report.faults:
        yield f"fault: {fault.path}: {fault.reason}"


def _faults(number: int) -> str:
    return f"{number} fault{'' if number == 1 else 's'}" if number else "as in the manifest"


def _document(report: Report) -> dict[str, Any]:
    manifest = report.manifest
    return {
        "generation": report.path.name,
        "path": str(report.path),
        "driver": {"version": manifest.version, "kind": manifest.kind},
        "machine": manifest.machine,
        "intact": not report.faults,
        "faults": [asdict(f) for f in report.faults],
        "libraries": [asdict(x) for x in report.libraries],
    }
