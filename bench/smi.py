"""`python -m bench.smi`: what nvidia-smi shows in a container with a quota, as JSON."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from bench.machine import ROOT, MachineError, Nvidia
from bench.node import Node

QUERY = [
    "--query-gpu=name,driver_version,memory.total,memory.used",
    "--format=csv,noheader,nounits",
]


def main(argv: list[str] | None = None) -> int:
    """Run nvidia-smi in a container of 3 GiB and compare what it shows with the quota."""
    parser = argparse.ArgumentParser(prog="python -m bench.smi", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build/smi")
    args = parser.parse_args(argv)
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    try:
        machine = Nvidia(args.output.resolve(), ROOT / "build/meson")
        with Node(machine) as node:
            container = node.start("smi", ["/usr/bin/nvidia-smi", *QUERY], {"memory": "3Gi"})
            status = node.wait(container, 60)
    except MachineError as e:
        print(f"smi: {e}", file=sys.stderr)
        return 1
    lines = container.output.strip().splitlines()
    print(container.output.strip())
    if status or not lines:
        return status or 1
    name, driver, total, used = (part.strip() for part in lines[-1].split(","))
    result = {"name": name, "driver": driver, "total_mib": int(total), "used_mib": int(used)}
    (args.output / "smi.json").write_text(json.dumps(result) + "\n")
    return 0 if int(total) == 3072 else 1


if __name__ == "__main__":
    sys.exit(main())
