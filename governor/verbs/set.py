"""`tidegate set`: change the quota of a running container."""

from __future__ import annotations

import argparse
from typing import Any

from governor.client import ask, node_config
from governor.config import parse_quantity
from governor.errors import RequestError
from governor.listing import Listing, find, safe
from governor.quota import CLASSES

SUMMARY = "Change the quota of a container while it runs"

MIB = 1 << 20


def _percent(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 100")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.add_argument(
        "container",
        help="the container's id, a unique prefix of its id, its name, or its pod",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="device memory on each of its GPUs, like 12Gi"
    )
    parser.add_argument(
        "--compute",
        type=_percent,
        metavar="PERCENT",
        help="guaranteed share of each GPU, in percent",
    )
    parser.add_argument(
        "--compute-limit",
        type=_percent,
        metavar="PERCENT",
        help="maximum share that it may use while others leave time idle",
    )
    parser.add_argument(
        "--class",
        choices=CLASSES,
        dest="work_class",
        help="class of its work, like the annotation tidegate.gpu/class",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="configuration file (/etc/tidegate/config.yaml)"
    )
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the governor's directory (/run/tidegate)"
    )


def run(args: argparse.Namespace) -> int:
    """Change the quota, and print the new one."""
    config = node_config(args.config, args.runtime_dir)
    wanted: dict[str, Any] = {}
    if args.memory is not None:
        wanted["memory"] = parse_quantity(args.memory, "--memory")
    if args.compute is not None:
        wanted["compute"] = args.compute
    if args.compute_limit is not None:
        wanted["compute_limit"] = args.compute_limit
    if args.work_class is not None:
        wanted["class"] = args.work_class
    if not wanted:
        options = "--memory, --compute, --compute-limit or --class"
        raise RequestError("nothing to change", hint=f"give {options}")
    identifier = str(find(args.container, Listing(config).containers())["id"])
    quota = ask(config, "set", id=identifier, **wanted)
    print(
        f"{safe(identifier)}: compute {quota['compute']} %, limit {quota['compute_limit']} %, "
        f"memory {quota['memory'] / MIB:.0f} MiB, class {quota['class']}"
    )
    return 0
