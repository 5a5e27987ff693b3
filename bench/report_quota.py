"""Makes the section of docs/benchmarks.md on GPU time, with a row for each arm of `bench.quota`.

bench/report_suites.py has the text, tables and figures of the individual suites.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.plot import Chart, Series
from bench.progress import NS_PER_MS, NS_PER_S
from bench.quota_measure import windows

QUOTA = """\
## GPU time, in many arrangements

`python -m bench.quota` runs containers side by side. Each of them runs a kernel that stamps the end
of every unit of its work, as above. The columns:

- "Share, units": what each container is guaranteed, with its cap if it may be lent more, and how
  long a unit takes alone.
- "Work" and "sum": the work of each container and of all together, as percentages of the GPU.
- "Error": the distance between work and share, as the mean and the 95th percentile over all
  windows. It is given for arms whose containers always have work and are lent no time.
- "Of ideal": the work done, as a percentage of the time in which any container had work. "Short"
  counts the windows of 1 s in which a container that had work fell more than a point short of its
  guarantee.
- "Governor + helpers": processor time of the governor and of the library's helper threads, as a
  percentage of one core.
"""

FORMS = {
    "sweep": "memory-bound",
    "tiny": "launch-bound",
    "sync": "synchronous launches",
    "copy": "copies",
    "graph": "CUDA graph",
}
LEAVE_GPU_IDLE = ("tiny", "sync", "copy")
"""Forms of work that leave the GPU idle at times, even with all of the GPU's time available."""

DRAWN = ("elastic", "bursts-strict", "thirds")
"""Arms that have a figure if their result belongs to no suite."""

WIDTH_NS = 100 * NS_PER_MS
"""Width of the narrow windows in figures, in nanoseconds."""


def describe_tenant(tenant: Mapping[str, Any]) -> str:
    """Return the share of one container and its kind of work, in a few words."""
    text = f"{tenant['compute']}"
    if tenant["limit"] is not None:
        text += f" to {tenant['limit']}"
    if tenant.get("program"):
        return f"{text} %, {tenant['program']}"
    text += f" %, {tenant['unit_us'] / 1000:g} ms"
    if tenant.get("form"):
        text += f" {FORMS.get(tenant['form'], tenant['form'])}"
    if tenant["gap_us"]:
        text += f" and a pause of {tenant['gap_us'] / 1000:g} ms"
    if tenant["bursts"]:
        text += " in bursts" + (f", {tenant['duty']} % of the time" if "duty" in tenant else "")
    return text


def describe_arm(arm: Mapping[str, Any]) -> Iterator[str]:
    """Yield the containers in an arm, with identical ones grouped."""
    for text, alike in itertools.groupby(describe_tenant(one) for one in arm["tenants"]):
        n = len(list(alike))
        yield text if n == 1 else f"{n} x {text}"


def is_saturating(arm: Mapping[str, Any]) -> bool:
    """Return whether each container always has work and may get no more than its share."""
    return not any(
        one["bursts"]
        or one["gap_us"]
        or one["limit"]
        or one.get("program")
        or one.get("form") in LEAVE_GPU_IDLE
        for one in arm["tenants"]
    )


def show_work(delivered: Sequence[float]) -> str:
    """Return the work of each container, or the range if there are more than eight."""
    if len(delivered) > 8:
        return f"{min(delivered):.2f} to {max(delivered):.2f}"
    return " / ".join(f"{one:.2f}" for one in delivered)


def row_of(name: str, arm: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the row for an arm."""
    errors = [
        f"{summary[label]['mean']:.2f} / {summary[label]['p95']:.2f}"
        if label in summary and is_saturating(arm)
        else ""
        for label in ("1s", "100ms")
    ]
    ideal = summary.get("of_ideal")
    return (
        name,
        "; ".join(describe_arm(arm)),
        show_work(summary["delivered"]),
        f"{summary['sum']:.2f}",
        *errors,
        "" if ideal is None else f"{100 * ideal:.1f} %, {summary['short_windows']} short",
        " + ".join(f"{100 * arm['processors'][key]:.1f}" for key in ("governor", "helpers")),
    )


HEAD = (
    "arm", "share, units", "work", "sum", "error, 1 s", "error, 100 ms", "of ideal",
    "governor + helpers",
)  # fmt: skip


def chart_of_arm(name: str, arm: Mapping[str, Any], gpu: Mapping[str, Any]) -> Chart:
    """Return a chart of the work of each container in an arm over time."""
    series = []
    for i, tenant in enumerate(arm["tenants"]):
        lines = {
            width: [
                ((at + 0.5) * width / NS_PER_S, share)
                for at, share in enumerate(windows(tenant["work_us"], width))
            ]
            for width in (NS_PER_S, WIDTH_NS)
        }
        series.append(
            Series(
                f"container {i + 1}",
                lines[NS_PER_S],
                f"{tenant['compute']} % guaranteed",
                lines[WIDTH_NS],
                tenant["compute"],
            )
        )
    seconds = len(arm["tenants"][0]["work_us"]) * arm["step_ns"] / NS_PER_S
    return Chart(
        title=f"GPU time, arm {name}",
        subtitle=f"{'; '.join(describe_arm(arm))}; {gpu['name']}, driver {gpu['driver']}",
        description=f"Work of each container in the arm {name} over {seconds:.0f} s.",
        x_label="time, s",
        y_label="work",
        y_unit=" %",
        x_range=(0.0, seconds),
        series=series,
        key=(("thick", "1 s windows"), ("thin", "100 ms windows"), ("dashed", "guarantee")),
    )
