"""`tidegate refresh`: mirror the host's driver and put the mirror in force."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vdriver.refresh import RefreshResult

SUMMARY = "Mirror the host's driver, with the control library in its place"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refresh`."""
    parser.add_argument("--root", default="/", metavar="DIR", help="the tree to search (default /)")
    parser.add_argument(
        "--output",
        default="/var/lib/tidegate/driver",
        metavar="DIR",
        help="where generations are kept (default %(default)s)",
    )
    parser.add_argument(
        "--control-dir",
        default=f"/usr/lib/tidegate/{platform.machine()}-linux-gnu",
        metavar="DIR",
        help="holds the control libraries libcuda.so.1 and libnvidia-ml.so.1 (default %(default)s)",
    )
    parser.add_argument(
        "--driver-dir",
        action="append",
        metavar="DIR",
        help="search only this directory below the root; may be repeated",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="write nothing, list what would be made"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Refresh, and say what changed."""
    from vdriver.refresh import refresh

    directories = args.driver_dir and [str(Path(d).absolute()) for d in args.driver_dir]
    result = refresh(
        args.root,
        args.output,
        args.control_dir,
        driver_directories=directories,
        dry_run=args.dry_run,
    )
    if args.json:
        print(json.dumps(_document(result, args.output), indent=1))
    else:
        print("\n".join(_lines(result)))
    return 0


def _lines(result: RefreshResult) -> list[str]:
    driver = result.plan.driver
    lines = [f"driver {driver.version} ({driver.kind}, {driver.machine}) below {driver.root}"]
    generation = result.manifest.generation if result.manifest else "none"
    if result.dry_run:
        lines += result.plan.describe()
    if not result.changed:
        lines.append(f"generation {generation}: nothing to do")
    elif result.dry_run:
        lines.append(f"generation {generation} would be replaced; nothing was written")
    else:
        before = result.previous.generation if result.previous else "none"
        lines.append(f"generation {generation} is in force (before: {before})")
        for sign, paths in (("+", result.added), ("-", result.removed), ("~", result.replaced)):
            lines += [f"{sign} {p}" for p in paths]
    left_out = result.plan.left_out
    if result.dry_run:
        lines += [f"left out {reason}" for reason in left_out]
    elif left_out:
        lines.append(f"left out {len(left_out)} libraries (--dry-run says which and why)")
    lines += [f"skipped {s.path}: {s.reason}" for s in result.skipped]
    return lines


def _document(result: RefreshResult, output: str) -> dict[str, Any]:
    driver = result.plan.driver
    generation = result.manifest.generation if result.manifest else None
    return {
        "driver": {
            "version": driver.version,
            "kind": driver.kind,
            "machine": driver.machine,
            "root": driver.root,
            "kernel_version": driver.kernel_version,
        },
        "generation": generation,
        "path": str(Path(output, generation).absolute()) if generation else None,
        "previous": result.previous.generation if result.previous else None,
        "changed": result.changed,
        "dry_run": result.dry_run,
        "added": list(result.added),
        "removed": list(result.removed),
        "replaced": list(result.replaced),
        "left_out": list(result.plan.left_out),
        "skipped": [{"path": s.path, "reason": s.reason} for s in result.skipped],
        "operations": list(result.plan.describe()),
    }
