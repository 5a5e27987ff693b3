"""`tidegate ps`: the containers that share this node's GPUs."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from governor.client import ask
from governor.config import read_config

SUMMARY = "List the containers that share this node's GPUs"

COLUMNS = (
    "CONTAINER",
    "GPU",
    "STRATEGY",
    "COMPUTE",
    "LIMIT",
    "MEMORY",
    "QUOTA",
    "PEAK",
    "PROCESSES",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's own options."""
    parser.add_argument("--config", help="configuration file (/etc/tidegate/config.yaml)")
    parser.add_argument("--runtime-dir", help="the governor's directory (/run/tidegate)")
    parser.add_argument("--json", action="store_true", help="print all that the governor knows")


def run(args: argparse.Namespace) -> int:
    """Print one row per container and GPU."""
    config = read_config(args.config)
    if args.runtime_dir:
        config = replace(config, runtime_dir=args.runtime_dir)
    containers = ask(config, "list")["containers"]
    if args.json:
        print(json.dumps(containers, indent=2))
        return 0
    rows = [COLUMNS, *(row for container in containers for row in _rows(container))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def _rows(container: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            str(container["id"])[:40],
            str(device["index"]),
            str(container["strategy"]),
            f"{container['compute']} %",
            f"{container['compute_limit']} %",
            _mebibytes(device["memory_used"]),
            _mebibytes(device["memory_limit"]),
            _mebibytes(device["memory_peak"]),
            str(len(container["processes"])),
        )
        for device in container["devices"]
    ]


def _mebibytes(amount: int) -> str:
    return f"{amount / (1 << 20):.0f} MiB"
