"""`tidegate cdi`: describe the node's GPUs as CDI devices, for engines that support CDI."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from governor.cdi import HOOK, KIND, make_spec
from governor.errors import SetupError
from governor.setup.files import Root

SUMMARY = "Describe the node's GPUs to engines that support CDI"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    generate = actions.add_parser(
        "generate",
        help="write the specification",
        description="Write the specification of the GPUs that the driver reports.",
    )
    generate.add_argument(
        "--output",
        metavar="FILE",
        help="write it to this file; engines read /var/run/cdi and /etc/cdi (default: print it)",
    )
    generate.add_argument("--hook", default=HOOK, metavar="FILE", help="the hook (%(default)s)")
    generate.add_argument(
        "--hook-argument",
        action="append",
        default=[],
        metavar="WORD",
        help="an argument for the hook; may be repeated",
    )
    generate.add_argument(
        "--dev-dir", default="/dev", metavar="DIR", help="the host's device nodes (%(default)s)"
    )
    for action in (
        generate,
        actions.add_parser(
            "list",
            help="list the devices",
            description="List the names by which the devices are requested from engines.",
        ),
    ):
        action.add_argument(
            "--driver-dir",
            default="/var/lib/tidegate/driver",
            metavar="DIR",
            help="the driver's mirror (%(default)s)",
        )


def run(args: argparse.Namespace) -> int:
    """Run the action, and return the exit status."""
    from governor.daemon import find_devices, original_nvml, require_simulated
    from vdriver.nvml import Nvml

    simulated = require_simulated(args.driver_dir)
    with Nvml(original_nvml(args.driver_dir)) as nvml:
        devices, _ = find_devices(nvml)
    if args.action == "list":
        for device in devices:
            print(f"{KIND}={device.index}  {KIND}={device.uuid}  {device.name}")
        return 0
    spec = make_spec(
        devices,
        hook=args.hook,
        arguments=args.hook_argument,
        dev_dir=args.dev_dir,
        simulated=simulated,
    )
    if args.output:
        write(Path(args.output), spec)
    else:
        print(json.dumps(spec, indent=2))
    return 0


def write(path: Path, spec: dict[str, Any]) -> None:
    """Replace the specification atomically: an engine reads either the old or the new one.

    Raise SetupError if that is not possible.
    """
    data = json.dumps(spec, indent=2).encode() + b"\n"
    root = Root("/")
    try:
        root.make_directory(str(path.parent.absolute()))
        # Engines that run as other users read it, too, so the mode of an existing file is not kept.
        root.write(str(path.absolute()), data, keep_mode=False)
    except SetupError as e:
        raise SetupError(e.message, hint=f"{e.hint}, or name another --output") from e
