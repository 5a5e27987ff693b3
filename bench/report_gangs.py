"""Makes the section of docs/benchmarks.md on containers with several GPUs (`bench.gangs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GANGS = """\
## Containers with several GPUs

`python -m bench.gangs` runs a job that sums numbers over two GPUs. The job consists of two
processes, or of one process that has both GPUs. It uses NCCL if PyTorch is installed. Every sum is
checked. Hogs are containers that always have work on one GPU. The columns:

- "Work": computed from the stamps of the units, on each GPU's own clock, relative to the same job
  alone and without Tidegate. Time in which one half of a sum waits for the other is not work.
- "Charged": what the governor counted.
- "Longest": the longest time without an iteration.

In the part `restart` the governor is killed with SIGKILL and started again. "Back" is the time from
the new governor's first answer until the work in a window of 100 ms was within 5 percentage points
of the share for the first time. "Work, 1 to 2 s" is the work in the second from 1 to 2 s after that
answer.
"""

Table = tuple[Sequence[str], Sequence[Sequence[str]], str]


def show(value: Any, unit: str = "") -> str:
    """Return a figure as text for a table. It is empty if the value is None."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " / ".join(show(one) or "-" for one in value)
    text = f"{value:,.2f}" if isinstance(value, float) else f"{value}"
    return f"{text}{unit}"


def topology_lines(part: Mapping[str, Any]) -> list[str]:
    """Return a line with the distances between GPUs, and whether nvidia-smi reports the same."""
    if "own" not in part:
        return []
    ways = ", ".join(f"{pair}: {way}" for pair, way in part["own"]["ways"].items())
    words = {
        True: "nvidia-smi reports the same",
        False: "nvidia-smi reports a different topology",
        None: "not compared with nvidia-smi",
    }
    return [f"Topology {ways}, NUMA nodes {part['own']['nodes']}: {words[part['same']]}."]


def native_table(part: Mapping[str, Any]) -> Table:
    """Return a row for each job that ran alone, without Tidegate."""
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
    return ("alone", "iterations", "longest", "wrong sums", "how", "transport"), rows, "lrrrll"


def jobs_table(summary: Mapping[str, Any]) -> Table:
    """Return a row for each job that ran alongside other containers."""
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
        for part, figures in summary.items()
        for arm, one in figures.get("arms", {}).items()
        for job in one["jobs"]
    ]
    head = (
        "arm", "job", "iterations", "relative to alone", "longest", "wrong sums",
        "same weights as alone", "succeeded",
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
        for part, figures in summary.items()
        for arm, side in figures.get("arms", {}).items()
        for one in side["tenants"]
    ]
    head = (
        "arm", "container", "GPU", "share", "work", "charged", "error, 1 s", "back, ms",
        "work, 1 to 2 s, %",
    )  # fmt: skip
    return head, rows, "llrrrrrrr"


def samples_table(part: Mapping[str, Any]) -> Table:
    """Return a row for each NVML call in a sample and each number of processes."""
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
    return ("processes", "NVML", "minimum", "median", "maximum"), rows, "rlrrr"


def tables_of(summary: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a run, without those that have no rows."""
    found = [
        native_table(summary.get("native", {})),
        jobs_table(summary),
        tenants_table(summary),
        samples_table(summary.get("samples", {})),
    ]
    return [table for table in found if table[1]]


def lines_of(summary: Mapping[str, Any]) -> list[str]:
    """Return the sentences about a run: its topology, and the parts that failed."""
    failed = [f"- {name} failed: {one['failed']}" for name, one in summary.items() if one["failed"]]
    return topology_lines(summary.get("topology", {})) + (["\n".join(failed)] if failed else [])
