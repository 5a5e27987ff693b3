"""Check whether any function of cuda.h bypasses Tidegate: `python -m tests.gpu.coverage_probe`.

Compile coverage_probe.c against the CUDA headers of this machine, and run it twice: on the bare
machine, and in a container with a quota. A call that changes the memory that NVML reports, or that
makes the GPU work, has to change the container's ledger as well, and has to return the same result
as natively. The tables that describe the control library's handling of a function (libcontrol.api,
functions.toml) are not consulted. Write report.json, table.txt and the lines of both runs, and exit
with status 1 if a function failed or was never called.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import at_least
from bench.machine import ROOT, Machine, MachineError, Nvidia, Simulated
from bench.node import BenchNode
from bench.overhead import gpu_name
from bench.provenance import describe_run
from libcontrol.coverage import read_declarations
from vdriver.manifest import read_manifest

SOURCE = Path(__file__).with_name("coverage_probe.c")
LEAST_VERSION = 13000

MIB = 1 << 20
TOOK = 2 * MIB
"""Smallest change that counts, in bytes: NVML counts in pages of this size."""
WORKED_US = 40.0
"""GPU time of a call above which it counts as work; two events with nothing between them are 2 us
apart.
"""
WAITED_US = 100.0
"""The same for a call that waits: a difference of two times with host time, which is less exact."""
OUT_OF_MEMORY = 2
SMALL_CHANGE = 4 * MIB
"""Memory in bytes that the driver may take or free for itself in any call: the governor finds it
later.
"""
RUN_S = 540.0

Row = dict[str, Any]
Key = tuple[str, str]
"""A function's name, and the name of one of its calls."""

CONTROLS = {
    "cuMemAlloc_v2": "memory",
    "cuLaunchKernel": "work",
    "cuMemcpyDtoD_v2": "work",
    "cuMemsetD8_v2": "work",
}
"""Calls with a known effect: if the coverage probe misses an effect, none of its verdicts counts."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one call, from both runs."""

    key: Key
    native: Row
    governed: Row
    faults: tuple[str, ...]
    unproven: str
    """Why the call proves nothing here: it cannot be made, or the driver itself refuses it."""


def packaged_includes() -> list[Path]:
    """Return the directories with headers of NVIDIA's Python packages, such as nvidia-cuda-runtime."""
    return [d for p in sys.path for d in sorted(Path(p or ".").glob("nvidia/*/include"))]


def find_include(places: Iterable[Path] | None = None) -> Path | None:
    """Return the first directory with a cuda.h that declares what coverage_probe.c calls, or None.

    Without `places`, look in this machine's toolkits first, then in NVIDIA's Python packages.
    """
    if places is None:
        names = ("CUDA_HOME", "CUDA_PATH")
        named = [Path(os.environ[name], "include") for name in names if name in os.environ]
        usual = [
            Path("/usr/local/cuda/include"),
            *sorted(Path("/usr/local").glob("cuda-*/include")),
        ]
        places = [*named, *usual, Path("/usr/include"), *packaged_includes()]
    for directory in places:
        header = directory / "cuda.h"
        if header.exists():
            text = header.read_text(encoding="utf-8", errors="replace")
            version = re.search(r"^#define CUDA_VERSION (\d+)", text, re.MULTILINE)
            if version and int(version[1]) >= LEAST_VERSION:
                return directory
    return None


def compile_probe(include: Path, output: Path) -> None:
    """Compile coverage_probe.c against a cuda.h; the program is not linked with any NVIDIA library."""
    command = [
        "gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'libcontrol'}",
        "-isystem", str(include), str(SOURCE), "-o", str(output), "-lpthread", "-ldl",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error:" in line]
        raise MachineError(f"coverage_probe.c does not compile: {' '.join(errors[:1])}")


def listed(program: Path) -> frozenset[str]:
    """Return the names of the functions that a compiled coverage probe covers."""
    done = subprocess.run([str(program), "--list"], capture_output=True, text=True, check=True)
    return frozenset(line.split("\t")[0] for line in done.stdout.splitlines())


def read_rows(text: str) -> dict[Key, Row]:
    """Return the coverage probe's lines by key; a call that ended its process has the line that reports this."""
    rows: dict[Key, Row] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rows[row["name"], row["variant"]] = row
    return rows


def memory_of(row: Mapping[str, Any]) -> int:
    """Return the change of memory that NVML reported, in bytes: of the processes, or else of the
    device. Freed memory is negative.
    """
    return int(row.get("process") or row.get("device") or 0)


def accounted(row: Mapping[str, Any], change: int, *, late: bool) -> bool:
    """Return whether the ledger recorded the change, with its sign, when the call returned or later.

    Half of the change is enough: both sides round sizes, and a context is charged with the average
    size of contexts. With `late`, memory that the governor has found since then counts as well.
    """
    sign = -1 if change < 0 else 1
    for when in ("returned", "after"):
        counters = row.get(when, {})
        # Memory that NVML attributes to the process may change without a change of the charge,
        # because the memory itself still exists.
        charged = counters.get("memory", 0)
        found = max(sign * charged, sign * (charged - counters.get("unseen", 0)))
        found += max(0, sign * counters.get("provisional", 0))
        # The memory was charged provisionally in the call, and the governor settled the charge
        # before this reading.
        settled = counters.get("provisional_ns", 0) > 0 >= counters.get("provisional", 0)
        if late or (settled and sign > 0):
            found += sign * counters.get("overhead", 0)
        if 2 * found >= abs(change):
            return True
    return False


def counted(row: Mapping[str, Any], *counters: str) -> bool:
    """Return whether one of the ledger's counters increased, when the call returned or later."""
    return any(
        row.get(when, {}).get(name, 0) > 0 for when in ("returned", "after") for name in counters
    )


def memory_fault(native: Row, governed: Row) -> str:
    """Describe the memory that a call took or freed without a record in the ledger, or return an
    empty string.
    """
    change = max(memory_of(native), memory_of(governed), key=abs)
    late = native["late"] or abs(change) <= SMALL_CHANGE
    if abs(change) < TOOK or native["paid"] or accounted(governed, change, late=late):
        return ""
    return f"{'takes' if change > 0 else 'frees'} {abs(change) / MIB:.0f} MiB unseen"


def found_late(native: Row, governed: Row) -> bool:
    """Return whether a call took or freed memory that was charged only after the governor's sample
    of NVML.
    """
    change = max(memory_of(native), memory_of(governed), key=abs)
    at_once = accounted(governed, change, late=False)
    return abs(change) >= TOOK and not native["paid"] and not at_once


HOST_FUNCTIONS = ("cuLaunchHostFunc", "cuLaunchHostFunc_v2", "cuStreamAddCallback")
"""Functions that make a stream wait for the host: the GPU does no work, however long they take."""


def worked_us(row: Row) -> float:
    """Return the GPU time of a call, or 0 if it is too short to be distinguished from none."""
    time = float(row["gpu_us"])
    return time if time > (WAITED_US if row["waited"] else WORKED_US) else 0.0


def work_fault(native: Row, governed: Row) -> str:
    """Describe the GPU time of a call that bypassed the gate, or return an empty string."""
    time = max(worked_us(native), worked_us(governed))
    if not time or counted(governed, "launches", "small"):
        return ""
    if str(native.get("name")).removesuffix("_ptsz") in HOST_FUNCTIONS:
        return ""
    if not counted(governed, "transfers"):
        return f"works {time:.0f} us past the gate"
    return "" if native["host"] else f"works {time:.0f} us on the device, counted as a transfer"


def judge_call(key: Key, native: Row, governed: Row, quota: int) -> Verdict:
    """Compare the two runs of a call; `quota` is the container's memory in bytes."""
    outcome = native["outcome"]
    if outcome != "ran":
        # The control library may have a function that the driver lacks. It must then return an error.
        mild = ("absent", "unprepared", outcome)
        refused = governed["outcome"] == "ran" and governed["result"]
        fault = f"{governed['outcome']} with a quota, natively {outcome}"
        faults = () if governed["outcome"] in mild or refused else (fault,)
        return Verdict(key, native, governed, faults, native["reason"])
    if governed["outcome"] != "ran":
        fault = f"{governed['outcome']} with a quota: {governed['reason']}"
        return Verdict(key, native, governed, (fault,), "")
    answers = ""
    if governed["result"] != native["result"]:
        refused = governed["result"] == OUT_OF_MEMORY and memory_of(native) > quota
        if not refused:
            answers = f"answers {governed['result']}, natively {native['result']}"
            answers += f" ({governed['detail']})" if "detail" in governed else ""
    found = (answers, memory_fault(native, governed), work_fault(native, governed))
    unproven = f"the driver answers {native['result']}" if native["result"] else ""
    return Verdict(key, native, governed, tuple(f for f in found if f), unproven)


def blind(rows: Mapping[Key, Row], controls: Iterable[str] = tuple(CONTROLS)) -> list[str]:
    """Return the calls of CONTROLS without their known effect in the native run."""
    missed = []
    for name in controls:
        row = rows.get((name, ""), {"outcome": "missing"})
        seen = row["outcome"] == "ran" and row["result"] == 0
        if seen and CONTROLS[name] == "memory":
            seen = memory_of(row) >= TOOK
        elif seen:
            seen = worked_us(row) > 0
        if not seen:
            missed.append(f"{name}: its {CONTROLS[name]} was not seen natively")
    return missed


def judge_all(
    native: Mapping[Key, Row], governed: Mapping[Key, Row], declared: Iterable[str], quota: int
) -> tuple[list[Verdict], list[str]]:
    """Return a verdict for each call, and the defects of the probe's own run."""
    lost: Row = {"outcome": "missing", "reason": "this run did not reach it"}
    keys = dict.fromkeys([*native, *governed])
    verdicts = [judge_call(k, native.get(k, lost), governed.get(k, lost), quota) for k in keys]
    called = {name for name, _ in keys}
    wrong = [f"{name}: declared, and never called" for name in sorted(set(declared) - called)]
    if not any("after" in row for row in governed.values()):
        wrong.append("no process in the container found its slot in the ledger")
    return verdicts, wrong


def summarise(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the number of calls, and the names of those that failed, or are unproven, untimed or late."""
    named = {" ".join(v.key).strip(): v for v in verdicts}
    failed = {name: list(v.faults) for name, v in named.items() if v.faults}
    rest = {name: v for name, v in named.items() if name not in failed}
    unproven = {name: v.unproven for name, v in rest.items() if v.unproven}
    proven = {name: v for name, v in rest.items() if name not in unproven}
    return {
        "calls": len(verdicts),
        "proven": len(proven),
        "failed": failed,
        "unproven": unproven,
        "untimed": [name for name, v in proven.items() if v.native["gpu_us"] < 0],
        "found_late": [name for name, v in proven.items() if found_late(v.native, v.governed)],
    }


def make_table(verdicts: Iterable[Verdict]) -> str:
    """Return a line for each call: its native result, memory and GPU time, and then the verdict."""
    lines = [f"{'function':<52} {'answer':>6} {'MiB':>7} {'us':>8}  verdict"]
    for v in verdicts:
        name = v.key[0] + (f" ({v.key[1]})" if v.key[1] else "")
        ran = v.native["outcome"] == "ran"
        answer = str(v.native["result"]) if ran else "-"
        memory = f"{memory_of(v.native) / MIB:.0f}" if ran else "-"
        time = f"{v.native['gpu_us']:.0f}" if ran and v.native["gpu_us"] >= 0 else "-"
        said = "; ".join(v.faults)
        said = f"FAILED: {said}" if said else f"unproven: {v.unproven}" if v.unproven else "ok"
        lines.append(f"{name:<52} {answer:>6} {memory:>7} {time:>8}  {said}")
    return "\n".join(lines) + "\n"


class ProbeNvidia(Nvidia):
    """A real GPU, with the coverage probe in the container's image."""

    program: Path

    def make_rootfs(self, directory: Path) -> None:
        """Make the image's root file system, and add the coverage probe."""
        super().make_rootfs(directory)
        shutil.copy(self.program, directory / "usr/bin/coverage_probe")


class ProbeSimulated(Simulated):
    """The simulated GPU, with the coverage probe in the container's image."""

    program: Path

    def make_rootfs(self, directory: Path) -> None:
        """Make the image's root file system, and add the coverage probe."""
        super().make_rootfs(directory)
        shutil.copy(self.program, directory / "usr/bin/coverage_probe")


def run_native(machine: Machine, program: Path, options: list[str]) -> str:
    """Run the coverage probe on the bare machine and return its output."""
    try:
        done = subprocess.run(
            [str(program), *options],
            env={**os.environ, **machine.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_S,
        )
    except subprocess.TimeoutExpired as e:
        raise MachineError(f"the coverage probe did not end within {RUN_S:g} s") from e
    if done.returncode:
        raise MachineError(
            f"the coverage probe ended with {done.returncode}: {done.stderr.strip()[-200:]}"
        )
    return done.stdout


def run_governed(machine: Machine, options: list[str], quota: int) -> tuple[str, str]:
    """Run the coverage probe in the only container of a node; return its output and the driver's version."""
    with BenchNode(machine) as node:
        driver = read_manifest((node.driver_dir / "current").resolve()).version
        annotations = {"memory": str(quota), "compute": "100"}
        container = node.start("coverage-probe", ["/usr/bin/coverage_probe", *options], annotations)
        status = node.wait(container, RUN_S)
    if status:
        last = " ".join(container.output.strip().splitlines()[-2:])
        raise MachineError(f"the coverage probe ended with {status} in a container: {last[-300:]}")
    return container.output, driver


def main(argv: list[str] | None = None) -> int:
    """Run the coverage probe natively and governed, and write the report.

    Return 1 if a function failed or the probe was blind.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.coverage_probe", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build/coverage_probe")
    parser.add_argument(
        "--include", type=Path, help="the directory of cuda.h; default: the usual places"
    )
    parser.add_argument(
        "--quota",
        type=at_least(1),
        help="the container's memory quota, in bytes (64 GiB; 8 GiB with --simulated)",
    )
    parser.add_argument(
        "--block",
        type=at_least(1),
        help="size of copies and fills, in MiB (1024; 4 with --simulated)",
    )
    parser.add_argument("--only", help="one function, by the name that the driver exports")
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="run on the simulated GPU, which has only some functions and whose copies take no time",
    )
    args = parser.parse_args(argv)
    args.quota = args.quota or (8 << 30 if args.simulated else 64 << 30)
    args.block = args.block or (4 if args.simulated else 1024)
    output = args.output.absolute()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    include = find_include([args.include] if args.include else None)
    if include is None:
        where = f"in {args.include}" if args.include else "here; see --include"
        print(f"coverage_probe: no cuda.h of CUDA 13.0 or later {where}", file=sys.stderr)
        return os.EX_NOINPUT
    program = output / "coverage_probe"
    options = ["--block", str(args.block), *(["--only", args.only] if args.only else [])]
    machine: ProbeSimulated | ProbeNvidia
    try:
        compile_probe(include, program)
        build = ROOT / "build/meson"
        work = output / "work"
        machine = ProbeSimulated(work, build) if args.simulated else ProbeNvidia(work, build)
        machine.program = program
        lines = {"native": run_native(machine, program, options)}
        lines["governed"], driver = run_governed(machine, options, args.quota)
    except MachineError as e:
        print(f"coverage_probe: {e}", file=sys.stderr)
        return 1
    for arm, text in lines.items():
        (output / f"{arm}.jsonl").write_text(text)
    native, governed = (read_rows(lines[arm]) for arm in ("native", "governed"))
    declared = [args.only] if args.only else read_declarations(include / "cuda.h")
    verdicts, wrong = judge_all(native, governed, declared, args.quota)
    if not args.only:
        # Copies and fills take no time on a simulated GPU.
        sure = ("cuMemAlloc_v2", "cuLaunchKernel")
        wrong += blind(native, sure if args.simulated else tuple(CONTROLS))
    table = make_table(verdicts)
    report = {
        "run": describe_run(),
        "gpu": {"kind": machine.kind, "name": gpu_name(machine), "driver": driver},
        "functions": len(set(declared)),
        "quota": args.quota,
        "wrong": wrong,
        **summarise(verdicts),
        "rows": [{"native": v.native, "governed": v.governed} for v in verdicts],
    }
    (output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (output / "table.txt").write_text(table)
    for name, faults in report["failed"].items():
        print(f"{name}: {'; '.join(faults)}")
    for line in wrong:
        print(line)
    print(
        f"coverage_probe: {report['functions']} functions, {len(verdicts)} calls: "
        f"{report['proven']} correct ({len(report['untimed'])} of them without a measurement of GPU time), "
        f"{len(report['failed'])} failed, {len(report['unproven'])} prove nothing here; "
        f"see {output}/table.txt"
    )
    return 1 if report["failed"] or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
