"""The section of docs/benchmarks.md on containers with several GPUs, from bench.gangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GANGS = """\
## Containers with several GPUs

`python -m bench.gangs`: a job works on two GPUs and sums numbers over both (NCCL where there is
PyTorch), in two processes or in one that has both GPUs; every sum is checked. Hogs are containers
that always have work on one GPU. "Work" is by the stamps of the units, on each GPU's own clock,
against the same job alone and without Tidegate; what a half of a sum waits for the other is no
work. "Charged" is what the governor counted. "Longest" is the longest time without an iteration.
In `restart` the governor is killed (SIGKILL) and started again: "back" is when 100 ms were first
within 5 points of the share after it answered, "second second" the share from 1 to 2 s after.
"""

Table = tuple[Sequence[str], Sequence[Sequence[str]], str]


def show(value: Any, unit: str = "") -> str:
    """Return a figure for a table; empty if there is none."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " / ".join(show(one) or "-" for one in value)
    text = f"{value:,.2f}" if isinstance(value, float) else f"{value}"
    return f"{text}{unit}"


def topology_lines(part: Mapping[str, Any]) -> list[str]:
    """Return a line on how close the GPUs are, and whether nvidia-smi agrees."""
    if "own" not in part:
        return []
    ways = ", ".join(f"{pair}: {way}" for pair, way in part["own"]["ways"].items())
    words = {True: "as nvidia-smi has it", False: "nvidia-smi has it otherwise", None: "not held "
             "against nvidia-smi"}  # fmt: skip
    return [f"Topology {ways}, NUMA nodes {part['own']['nodes']}: {words[part['same']]}."]


def native_table(part: Mapping[str, Any]) -> Table:
    """Return a row for each job alone."""
    rows = [
        (
            name,
            show(one["rate"], " /s"),
            show(one["longest_s"], " s"),
            str(one["wrong"]),
            str(one["how"]),
            ", ".join(one["transports"] or ()),
        )
        for name, one in part.get("jobs", {}).items()
    ]
    return ("alone", "iterations", "longest", "wrong sums", "how", "by"), rows, "lrrrll"


def jobs_table(summary: Mapping[str, Any]) -> Table:
    """Return a row for each job that ran with others."""
    rows = [
        (
            f"{part}, {arm}",
            job["name"],
            show(job["rate"], " /s"),
            show(job["of_native"], " %"),
            show(job["longest_s"], " s"),
            f"{show(job['wrong'])} of {show(job['checked'])}",
            job.get("same_as_native", ""),
            "yes" if job["status"] == 0 else f"no: {job['status']}",
        )
        for part, told in summary.items()
        for arm, one in told.get("arms", {}).items()
        for job in one["jobs"]
    ]
    head = (
        "arm", "job", "iterations", "of alone", "longest", "wrong sums", "weights as alone",
        "ended well",
    )  # fmt: skip
    return head, rows, "llrrrrrl"


def tenants_table(summary: Mapping[str, Any]) -> Table:
    """Return a row for each container on each GPU."""
    rows = [
        (
            f"{part}, {arm}",
            one["name"],
            str(one["gpu"]),
            show(one["compute"], " %"),
            show(one["delivered"], " %"),
            show(one["charged"], " %"),
            show(one.get("error_1s")),
            show(one.get("back_ms")),
            show(one.get("second_s")),
        )
        for part, told in summary.items()
        for arm, side in told.get("arms", {}).items()
        for one in side["tenants"]
    ]
    head = (
        "arm", "container", "GPU", "share", "work", "charged", "error, 1 s", "back, ms",
        "second second, %",
    )  # fmt: skip
    return head, rows, "llrrrrrrr"


def samples_table(part: Mapping[str, Any]) -> Table:
    """Return a row for each call of a look and each number of processes."""
    rows = [
        (
            str(one["processes"]),
            call,
            *(f"{one[call][key]:,.0f} us" for key in ("min", "median", "max")),
        )
        for one in part.get("rounds", [])
        for call in ("utilisation", "list", "samples", "look")
        if one[call]
    ]
    return ("processes", "NVML", "least", "median", "most"), rows, "rlrrr"


def tables_of(summary: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a run that have rows."""
    found = [
        native_table(summary.get("native", {})),
        jobs_table(summary),
        tenants_table(summary),
        samples_table(summary.get("samples", {})),
    ]
    return [table for table in found if table[1]]


def lines_of(summary: Mapping[str, Any]) -> list[str]:
    """Return what is reported in words: the topology, and what failed."""
    failed = [f"- {name} failed: {one['failed']}" for name, one in summary.items() if one["failed"]]
    return topology_lines(summary.get("topology", {})) + (["\n".join(failed)] if failed else [])
