"""`python -m bench.smi`: checks what nvidia-smi shows in a container with a quota.

A container keeps the GPU busy and runs nvidia-smi at the same time: first alone and without a cap,
then with a cap of 30 % while another container uses the GPU as well. Each time nvidia-smi must show
the quota, the memory of the container's process, no other process, and a GPU that is fully used.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.machine import ROOT, MachineError, Nvidia
from bench.node import BenchNode

QUOTA_MIB = 3072
BUSY = 80
"""Minimum utilisation of the part of the GPU that a burner may use, in percent."""
WORK_S = 15
LOOK_S = 9

GPU_QUERY = "name,driver_version,memory.total,memory.used,memory.free,utilization.gpu"
# Runs nvidia-smi from the burner's first work until shortly before its end; the last output counts.
# (Running nvidia-smi delays the creation of a context.) Plain `nvidia-smi` must work as well,
# because its table and the queries come from different calls.
SCRIPT = f"""
/usr/bin/burner --unit-us 500 --seconds {WORK_S} --out /out/progress.bin >/out/burner.log 2>&1 &
burner=$!
until [ -s /out/progress.bin ] || ! kill -0 $burner; do sleep 0.1; done
end=$(($(date +%s) + {LOOK_S}))
while [ "$(date +%s)" -lt $end ]; do
    echo "look $burner"
    echo gpu; nvidia-smi --query-gpu={GPU_QUERY} --format=csv,noheader,nounits || exit
    echo apps; nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits || exit
    sleep 0.3
done
echo table; nvidia-smi || exit
echo monitor; nvidia-smi pmon -c 1 || exit
wait $burner
"""
CASES: dict[str, dict[str, str]] = {
    "alone": {"compute": "30", "compute-limit": "100"},
    "beside": {"compute": "30"},
}
NEIGHBOUR = {"memory": "3Gi", "compute": "60"}


@dataclass
class SmiOutput:
    """Output of nvidia-smi at one time: MiB, percent, and each process's MiB by pid."""

    burner: int
    name: str = ""
    driver: str = ""
    total_mib: int = 0
    used_mib: int = 0
    free_mib: int = 0
    utilisation: int = -1
    processes: dict[int, int] = field(default_factory=dict)


def read_looks(text: str) -> tuple[list[SmiOutput], str, str]:
    """Return the query results in a container's output, and its table and monitor verbatim."""
    looks: list[SmiOutput] = []
    verbatim = {"table": "", "monitor": ""}
    section = ""
    for line in text.splitlines():
        first, _, number = line.partition(" ")
        if first == "look" and number.isdigit():
            looks.append(SmiOutput(int(number)))
            section = ""
        elif line in ("gpu", "apps", *verbatim):
            section = line
        elif section in verbatim:
            verbatim[section] += line + "\n"
        elif section and looks and line.strip():
            parts = [part.strip() for part in line.split(",")]
            if section == "gpu" and len(parts) == 6:
                look = looks[-1]
                look.name, look.driver = parts[:2]
                look.total_mib, look.used_mib, look.free_mib, look.utilisation = (
                    int(part) if part.isdigit() else -1 for part in parts[2:]
                )
            elif section == "apps" and parts[0].isdigit():
                known = parts[1] if len(parts) > 1 else ""
                looks[-1].processes[int(parts[0])] = int(known) if known.isdigit() else -1
    return looks, verbatim["table"], verbatim["monitor"]


def judge(looks: list[SmiOutput], table: str, monitor: str) -> list[str]:
    """Return the faults in a container's view of its GPU."""
    if not looks:
        return ["nvidia-smi was not run"]
    last = looks[-1]
    wrong = []
    if last.total_mib != QUOTA_MIB:
        wrong.append(f"memory.total is {last.total_mib} MiB, not {QUOTA_MIB}")
    if abs(last.used_mib + last.free_mib - last.total_mib) > 1:
        wrong.append(
            f"{last.used_mib} MiB used and {last.free_mib} MiB free do not add up to the total"
        )
    if list(last.processes) != [last.burner]:
        wrong.append(f"processes {list(last.processes)}, not the burner ({last.burner}) alone")
    # nvidia-smi rounds both numbers.
    elif abs(last.processes[last.burner] - last.used_mib) > 1 or last.used_mib <= 0:
        wrong.append(
            f"the burner has {last.processes[last.burner]} MiB, the GPU {last.used_mib} MiB in use"
        )
    if not BUSY <= last.utilisation <= 100:
        wrong.append(f"utilization.gpu is {last.utilisation} %, not {BUSY} to 100")
    if f"{QUOTA_MIB}MiB" not in table:
        wrong.append(f"the table does not show {QUOTA_MIB} MiB")
    rows = [line.split() for line in monitor.splitlines() if line and not line.startswith("#")]
    pids = [row[1] for row in rows if len(row) > 1]
    if pids != [str(last.burner)]:
        wrong.append(f"pmon shows {pids}, not the burner ({last.burner}) alone")
    return wrong


def run_case(
    node: BenchNode, name: str, annotations: Mapping[str, str]
) -> tuple[list[str], dict[str, object]]:
    """Run one case; return its faults, and the outputs."""
    neighbour = None
    if name == "beside":
        burn = ["/usr/bin/burner", "--unit-us", "500", "--seconds", str(2 * WORK_S)]
        neighbour = node.start("neighbour", burn, NEIGHBOUR)
    container = node.start(name, ["/bin/sh", "-c", SCRIPT], {"memory": "3Gi", **annotations})
    status = node.wait(container, 120)
    if neighbour is not None:
        beside = neighbour.process.poll() is None
        node.delete(neighbour)
        if not beside:
            return [f"the neighbour ended early: see {neighbour.bundle}/output"], {}
    looks, table, monitor = read_looks(container.output)
    wrong = judge(looks, table, monitor)
    if status:
        log = container.out / "burner.log"
        message = log.read_text(errors="replace").strip() if log.exists() else ""
        wrong.append(f"the container ended with status {status}: {message}")
    seen: dict[str, object] = {
        "looks": [asdict(look) for look in looks],
        "table": table,
        "monitor": monitor,
    }
    return wrong, seen


def main(argv: list[str] | None = None) -> int:
    """Run the cases, write DIR/smi.json, and return 1 if one of them has a fault."""
    parser = argparse.ArgumentParser(prog="python -m bench.smi", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build/smi")
    args = parser.parse_args(argv)
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    report: dict[str, object] = {}
    failed = False
    try:
        machine = Nvidia(args.output.resolve(), ROOT / "build/meson")
        with BenchNode(machine, settings={"scheduling": "auto"}) as node:
            for name, annotations in CASES.items():
                wrong, seen = run_case(node, name, annotations)
                report[name] = {"wrong": wrong, **seen}
                failed = failed or bool(wrong)
                print(seen.get("table", ""))
                print(seen.get("monitor", ""))
                print(f"{name}: {'; '.join(wrong) or 'as it should be'}")
    except MachineError as e:
        print(f"smi: {e}", file=sys.stderr)
        return 1
    (args.output / "smi.json").write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
