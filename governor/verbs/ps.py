"""`tidegate ps`: list the containers that share this node's GPUs."""

from __future__ import annotations

import argparse
import json

from governor.client import node_config
from governor.listing import Listing, table, trouble_lines, unknown_lines

SUMMARY = "List the containers that share this node's GPUs"
EPILOG = """\
COMPUTE is in percent of the GPU's time: what was used over the last two seconds, what is
guaranteed, and the limit. WAITING is the part of these two seconds for which calls waited, for
their turn or for room in the queue: a program that always has more work is near 100 %, however much
time it gets. Violations that have not ended, and processes that use a GPU that their container was
not granted, are shown in STATE, and each on its own line below the table. After them come the
driver functions that containers looked up and that the control library does not know.

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
    """Print one row per container and GPU."""
    config = node_config(args.config, args.runtime_dir)
    containers = Listing(config).containers()
    if args.json:
        print(json.dumps(containers, indent=2))
        return 0
    lines = [*table(containers), *trouble_lines(containers), *unknown_lines(containers)]
    print("\n".join(lines))
    return 0
