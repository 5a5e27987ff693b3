"""Makes the section of docs/benchmarks.md on models that take turns on a GPU (`bench.parking`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARKING = """\
## Models that do not fit together

`python -m bench.parking` starts models in containers on a GPU that grants memory for about half of
them, and sends a request to each in turn: that model comes back from host memory while another
one leaves. *First kernel* is the time from the request until a kernel of the model has ended;
without Tidegate, with the GPU to itself, that takes less than a millisecond. The longest times are
the first of each run, while host memory is still being pinned. *Rate* is the
speed at which the contents are copied back. The neighbour is a container that always has work and
stays on the GPU; the column shows its speed while models move, as a percentage of its speed while
none does.

Each model checks its answer and a part of its contents at each request, and all contents at the
end; all were right, and no container held more than its quota. The models hold either blocks that
were allocated through the driver API, or the weights of a PyTorch model.

Two containers that always have work and do not fit together take turns; what they deliver together
is given as a percentage of what one of them delivers alone.
"""
TITLES = (
    "result", "models", "granted", "came back", "first kernel: median", "longest", "rate",
    "the neighbour", "two taking turns",
)  # fmt: skip


DEATHS = """\
With `--parts deaths`, two containers that do not fit together take turns on the GPU, while 8
processes in each allocate and free at random in 64 threads, and are killed continuously. The run
fails if a container uses more than its quota for longer than a second according to NVML, if a call
fails for a reason other than a lack of memory, or if memory on the GPU or the host is still in
use at the end.
"""
DEATHS_TITLES = (
    "result", "quotas", "killed", "allocations", "parked", "most used", "left on the GPU",
)  # fmt: skip


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def rows_of(results: Mapping[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each run, with the columns of TITLES."""
    rows: list[tuple[str, ...]] = []
    for stem, result in results.items():
        raw, summary = result["raw"], result["summary"]
        if not {"models", "pair"} & raw.keys():
            continue
        models = len(raw["models"]["ends"]) if "models" in raw else 0
        kind = " in PyTorch" if raw.get("program") == "torch" else ""
        rate = summary.get("came_gb_s")
        rows.append(
            (
                stem, f"{models} of {raw['held'] / (1 << 30):g} GiB{kind}",
                f"{raw['settings']['memory']['overbook']:g} times",
                f"{summary['came']} times" if "came" in summary else "",
                _seconds(summary.get("first_s")), _seconds(summary.get("longest_first_s")),
                f"{rate:g} GB/s" if rate else "", _percent(summary.get("neighbour")),
                _percent(summary.get("pair")),
            )
        )  # fmt: skip
    return rows


def deaths_of(results: Mapping[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each run that killed processes, with the columns of DEATHS_TITLES."""
    rows: list[tuple[str, ...]] = []
    for stem, result in results.items():
        deaths, summary = result["raw"].get("deaths"), result["summary"].get("deaths")
        if deaths is None or summary is None:
            continue
        quota = deaths["quota"]
        most = max(used for samples in deaths["samples"] for used in samples)
        rows.append(
            (
                stem, f"{len(deaths['stress'])} of {quota / (1 << 30):g} GiB",
                str(summary["killed"]), str(summary["allocations"]),
                f"{summary['times_parked']} times", f"{100 * most / quota:.1f} % of a quota",
                f"{deaths['left_gpu'] >> 20} MiB",
            )
        )  # fmt: skip
    return rows
