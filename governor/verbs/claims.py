"""`tidegate claims`: list the Kubernetes claims that are booked on this node."""

from __future__ import annotations

import argparse
import json

from governor.client import ask, node_config
from governor.listing import claims_table

SUMMARY = "List the claims that are booked on this node's GPUs"
EPILOG = """\
A claim is booked from the time that the node's Kubernetes driver announces it until that driver
withdraws it, whether or not a container uses it. If it is withdrawn while containers use it, its
state is leaving, and it is removed when the last of them ends.

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
    parser.add_argument(
        "--json", action="store_true", help="print everything that the governor reports, as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Print one row per claim and share."""
    claims = ask(node_config(args.config, args.runtime_dir), "claims")["claims"]
    if args.json:
        print(json.dumps(claims, indent=2))
    else:
        print("\n".join(claims_table(claims)))
    return 0
