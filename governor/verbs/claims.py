"""`tidegate claims`: list the Kubernetes claims that are booked on this node."""

from __future__ import annotations

import argparse
import json

from governor.client import ask, node_config
from governor.listing import claims_table

SUMMARY = "List the claims that are booked on this node's GPUs"
EPILOG = """\
A claim is booked from when the node's driver told it until that takes it back, whether a container
uses it or not. One that was taken back while containers use it is leaving: it goes with the last.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--config", metavar="FILE", help="configuration file (/etc/tidegate/config.yaml)"
    )
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the governor's directory (/run/tidegate)"
    )
    parser.add_argument("--json", action="store_true", help="print all that the governor knows")


def run(args: argparse.Namespace) -> int:
    """Print one row per claim and share."""
    claims = ask(node_config(args.config, args.runtime_dir), "claims")["claims"]
    if args.json:
        print(json.dumps(claims, indent=2))
    else:
        print("\n".join(claims_table(claims)))
    return 0
