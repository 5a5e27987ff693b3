"""`tidegate doctor`: examine the whole node; report what is wrong and how to fix it.

It changes nothing and has no requirements: it reports what it cannot examine, for instance without
root. `tidegate check` is quicker, and shows only what is in force and what is left of each GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

SUMMARY = (
    "Examine this node: driver, mirror, governor, engines, and anything else that could be wrong"
)
EPILOG = """\
states: ok; note (neither right nor wrong); unseen (could not be examined); warning (stops no
container); wrong (stops containers, leaves them ungoverned, or lets another user become root).
exit status: 0 if nothing is wrong, 1 if something is; with --strict, also 1 for warnings and for
what could not be examined; 2 if the command line is wrong. docs/reference/doctor.md describes each
check.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--root",
        default="/",
        metavar="DIR",
        help="directory that is the node's root; if it is not /, no command is run (default /)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the node's configuration (/etc/tidegate/config.yaml)"
    )
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the governor's directory (/run/tidegate)"
    )
    parser.add_argument(
        "--driver-dir", metavar="DIR", help="the mirror's directory (/var/lib/tidegate/driver)"
    )
    parser.add_argument(
        "--problems", action="store_true", help="omit notes, and findings that are ok"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="also exit with status 1 for warnings and for things that could not be examined",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print a line per finding with its remedy below, and the number of each kind at the end."""
    from governor import VERSION
    from governor.doctor.checks import examine, status_of
    from governor.doctor.finding import Severity
    from governor.doctor.node import open_node

    node = open_node(args.root, args.config, args.runtime_dir, args.driver_dir)
    counts: Counter[Severity] = Counter()
    document = []
    for examined in examine(node):
        finding = examined.finding
        counts[finding.state] += 1
        if args.problems and finding.state in (Severity.OK, Severity.NOTE):
            continue
        if args.json:
            document.append(
                {
                    "id": examined.id,
                    "state": finding.state,
                    "found": finding.found,
                    "remedy": finding.remedy,
                }
            )
            continue
        print(f"{finding.state:8} {examined.id:23} {_safe(finding.found)}")
        if finding.remedy is not None:
            print(f"{'':8} {'':23} -> {_safe(finding.remedy)}")
        sys.stdout.flush()  # an engine may take a while to respond
    status = status_of(counts, strict=args.strict)
    if args.json:
        answer = {
            "schema": 1,
            "version": VERSION,
            "root": node.root,
            "status": status,
            "findings": document,
        }
        print(json.dumps(answer, indent=1))
    else:
        warnings = counts[Severity.WARNING]
        print(
            f"{counts[Severity.WRONG]} wrong, {warnings} warning{'s' * (warnings != 1)}, "
            f"{counts[Severity.UNSEEN]} unseen, {counts[Severity.OK]} ok"
        )
    return status


def _safe(text: str) -> str:
    """Return the text of files and programs as one printable line."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
