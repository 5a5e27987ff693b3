"""`tidegate suspend`: free the GPU memory of a container, and make the container wait."""

from __future__ import annotations

import argparse
import sys

from governor.client import ask, node_config
from governor.listing import Listing, find, safe

SUMMARY = "Move a container's GPU memory to host memory, and make the container wait"

MIB = 1 << 20
LONGEST_S = 3600.0
"""Longest `--wait`, in seconds."""
ANSWER_S = 86400.0
"""Timeout of the request to the governor, in seconds. The governor itself ends driver calls that
take too long."""


def seconds(text: str) -> float:
    """Return a number of seconds from the command line."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.001 <= number <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0.001 to {LONGEST_S:g}")
    return number


def add_container(parser: argparse.ArgumentParser) -> None:
    """Add the options that `suspend` and `resume` have in common."""
    parser.add_argument(
        "container",
        help="the container's id, a unique prefix of its id, its name, or its pod",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="configuration file (/etc/tidegate/config.yaml)"
    )
    parser.add_argument(
        "--runtime-dir", metavar="DIR", help="the governor's directory (/run/tidegate)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    add_container(parser)
    parser.add_argument(
        "--wait",
        type=seconds,
        metavar="SECONDS",
        help="time within which its submitted work has to end (30)",
    )


def run(args: argparse.Namespace) -> int:
    """Suspend the container, and print what it had on its GPUs."""
    return change(args, "suspend", "suspended", {} if args.wait is None else {"wait": args.wait})


def change(args: argparse.Namespace, op: str, done: str, options: dict[str, float]) -> int:
    """Suspend or resume the container that a command line names, and print what was done."""
    config = node_config(args.config, args.runtime_dir)
    identifier = str(find(args.container, Listing(config).containers())["id"])
    try:
        answer = ask(config, op, timeout=ANSWER_S, id=identifier, **options)
    except KeyboardInterrupt:
        print(
            f"tidegate: {safe(identifier)}: the governor continues to {op} it; tidegate ps shows"
            " its state",
            file=sys.stderr,
        )
        raise
    n = answer["processes"]
    print(
        f"{safe(identifier)}: {done}, {n} process{'' if n == 1 else 'es'}, "
        f"{answer['memory'] / MIB:.0f} MiB, {answer['seconds']:.1f} s"
    )
    return 0
