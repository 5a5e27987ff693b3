"""`tidegate resume`: let a suspended container run again."""

from __future__ import annotations

import argparse

from governor.verbs.suspend import add_container as add_arguments
from governor.verbs.suspend import change

__all__ = ["add_arguments", "run"]

SUMMARY = "Bring back the GPU memory of a suspended container, and let it run"


def run(args: argparse.Namespace) -> int:
    """Resume the container, and print what it has on its GPUs."""
    return change(args, "resume", "resumed", {})
