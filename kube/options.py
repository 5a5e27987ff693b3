"""Defines the command line options that the DRA driver and the device plugin have in common."""

from __future__ import annotations

import argparse

from governor.cdi import HOOK
from kube.names import KUBELET_DIR


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add the options with the paths of the governor, the kubelet, the engine and the hook."""
    parser.add_argument(
        "--runtime-dir",
        default="/run/tidegate",
        metavar="DIR",
        help="the governor's runtime directory (%(default)s)",
    )
    parser.add_argument(
        "--kubelet-dir",
        default=KUBELET_DIR,
        metavar="DIR",
        help="the kubelet's directory (%(default)s)",
    )
    parser.add_argument(
        "--cdi-dir",
        default="/var/run/cdi",
        metavar="DIR",
        help="where the engine looks for CDI specifications (%(default)s)",
    )
    parser.add_argument("--hook", default=HOOK, metavar="FILE", help="the hook (%(default)s)")
    parser.add_argument(
        "--hook-argument",
        action="append",
        default=[],
        metavar="WORD",
        help="an option to pass to the hook",
    )
    parser.add_argument(
        "--dev-dir", default="/dev", metavar="DIR", help="the host's device nodes (%(default)s)"
    )
