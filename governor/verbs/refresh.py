"""`tidegate refresh`: mirror the host's driver and activate the mirror."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from governor.install_paths import control_dir

if TYPE_CHECKING:
    from vdriver.manifest import CapabilitySet
    from vdriver.refresh import RefreshResult

FEW = 12  # maximum number of changes that are listed without --verbose

SUMMARY = "Mirror the host's driver, with the control library interposed"


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
        default=str(control_dir()),
        metavar="DIR",
        help="directory of the control libraries libcuda.so.1 and libnvidia-ml.so.1 "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--library-dir",
        action="append",
        metavar="DIR",
        help="search only this directory below the root; may be repeated",
    )
    parser.add_argument(
        "--sockets",
        action="store_true",
        help="give containers the sockets of nvidia-persistenced and nv-fabricmanager, which "
        "treat a container's root as the host's",
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="also read the generation in force, and replace it if its content is damaged",
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="mirror the driver even if it lacks libraries that the mirror in force has",
    )
    parser.add_argument(
        "--no-hard-links",
        action="store_true",
        help="copy files if the file system has no reflinks, instead of sharing them with the host",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="write nothing; list what would be made"
    )
    parser.add_argument("--verbose", action="store_true", help="list every name that changed")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Refresh, and print what changed."""
    from vdriver.refresh import refresh

    directories = args.library_dir and [str(Path(d).absolute()) for d in args.library_dir]
    result = refresh(
        args.root,
        args.output,
        args.control_dir,
        driver_directories=directories,
        sockets=args.sockets,
        dry_run=args.dry_run,
        repair=args.repair,
        accept_loss=args.accept_loss,
        hard_links=not args.no_hard_links,
        progress=_show if sys.stderr.isatty() and not args.json else None,
    )
    if args.json:
        print(json.dumps(_document(result, args.output), indent=1))
    else:
        print("\n".join(_lines(result, verbose=args.verbose)))
    return 0


def _show(done: int, total: int) -> None:
    """Show progress on a terminal: copying a driver means writing a gigabyte."""
    end = "\n" if done >= total else ""
    text = f"\rmirroring: {done >> 20:5} of {total >> 20} MiB{end}"
    print(text, end="", file=sys.stderr, flush=True)


def _lines(result: RefreshResult, *, verbose: bool) -> list[str]:
    """Return the outcome first, then what needs attention, then the details."""
    driver, plan = result.plan.driver, result.plan
    lines = [f"driver {driver.version} ({driver.kind}, {driver.machine}) below {driver.root}"]
    lines.append(_outcome(result))
    if result.aside is not None:
        lines.append(
            f"the previous generation was damaged, and was set aside as {result.aside.name}"
        )
    lines += [
        f"warning: {path} has new content but the same build id: reinstall its package"
        for path in result.rewritten
    ]
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"skipped {s.path}: {s.reason}" for s in result.skipped]
    if result.dry_run:
        lines += [f"set {'+'.join(s.capabilities)}: {_counts(s)}" for s in plan.sets]
        lines += [f"left out {reason}" for reason in plan.left_out]
        return [*lines, *plan.describe()]
    if not result.changed:
        return lines
    lines.append("files " + ", ".join(f"{how} {n}" for how, n in sorted(result.how.items())))
    changes = [
        f"{sign} {path}"
        for sign, paths in (("+", result.added), ("-", result.removed), ("~", result.replaced))
        for path in paths
    ]
    if verbose or len(changes) <= FEW:
        return lines + changes
    counts = (len(result.added), len(result.removed), len(result.replaced))
    words = "{} names added, {} removed, {} with different content".format(*counts)
    return [*lines, f"{words} (--verbose lists them)"]


def _outcome(result: RefreshResult) -> str:
    generation = result.manifest.generation if result.manifest else None
    if not result.changed:
        return f"generation {generation}: nothing to do"
    if result.dry_run:
        size = f"{len(result.plan.operations)} names, {result.plan.size >> 20} MiB"
        instead = f" in place of {generation}" if generation else ""
        return f"a generation of {size} would be made{instead}; nothing was written"
    before = result.previous.generation if result.previous else "none"
    return f"generation {generation} is in force (before: {before})"


def _counts(s: CapabilitySet) -> str:
    more = f", {len(s.names32)} 32-bit names in {s.lib32}" if s.names32 else ""
    return f"{len(s.names64)} names in {s.lib64}{more}"


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
        "how": result.how,
        "aside": str(result.aside) if result.aside else None,
        "rewritten": list(result.rewritten),
        "size": result.plan.size,
        "notes": list(result.plan.notes),
        "left_out": list(result.plan.left_out),
        "skipped": [{"path": s.path, "reason": s.reason} for s in result.skipped],
        "operations": list(result.plan.describe()),
    }
