"""Reports the delivered shares of containers on one GPU: report.json, report.svg, a table.

`build_report` and `chart_of` compute from progress; `write_report` writes everything to a
directory. report.json is described by report.schema.json next to this module. progress.json in the
same directory has each container's progress in 10 ms samples, from which every figure can be
recomputed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bench.plot import Chart, Series, render
from bench.progress import NS_PER_MS, NS_PER_S, Profile, Progress, common_span, mean_abs_error_pp
from bench.provenance import describe_run

WINDOWS = {"1s": NS_PER_S, "100ms": 100 * NS_PER_MS}
SAMPLE_NS = 10 * NS_PER_MS
SCHEMA = pathlib.Path(__file__).with_name("report.schema.json")


@dataclasses.dataclass(frozen=True)
class ReportedGpu:
    """The GPU that the containers shared."""

    kind: Literal["simulated", "nvidia"]
    name: str
    driver: str


@dataclasses.dataclass(frozen=True)
class ReportedContainer:
    """A container's quotas, and its results; memory is in bytes."""

    name: str
    compute: float
    """Guaranteed percentage of the GPU's time."""
    memory_limit: int
    memory_peak: int
    exit: int
    progress: Progress
    profile: Profile
    without: Progress | None = None
    """The same job while all jobs ran at the same time without Tidegate; None if they did not."""


@dataclasses.dataclass(frozen=True)
class RefusedAllocation:
    """The allocation above the limit, in bytes, and the driver API's answer to it."""

    requested: int
    limit: int
    result: str


def shares(
    containers: Sequence[ReportedContainer], width: int, span: tuple[int, int]
) -> dict[str, list[float]]:
    """Return each container's delivered shares in windows of `width`, all with the same edges."""
    return {one.name: one.progress.windows(width, *span) for one in containers}


def build_report(
    gpu: ReportedGpu,
    containers: Sequence[ReportedContainer],
    refused: RefusedAllocation,
    *,
    span: tuple[int, int] | None = None,
    detail: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the report over `span` (nanoseconds; default: while all containers ran)."""
    begin, end = span or common_span([one.progress for one in containers])
    quota = {one.name: one.compute for one in containers}
    before = span_without(containers)
    errors = {
        label: mean_abs_error_pp(shares(containers, width, (begin, end)), quota)
        for label, width in WINDOWS.items()
    }
    return {
        "gpu": dataclasses.asdict(gpu),
        "containers": [
            {
                "name": one.name,
                "compute": one.compute,
                "delivered": round(100 * one.progress.share(begin, end), 3),
                "memory_limit": one.memory_limit,
                "memory_peak": one.memory_peak,
                "exit": one.exit,
                **(
                    {"without": round(100 * one.without.share(*before), 3)}
                    if one.without and before
                    else {}
                ),
            }
            for one in containers
        ],
        "refused": dataclasses.asdict(refused),
        "windows": {label: {"mean_abs_error_pp": round(e, 4)} for label, e in errors.items()},
        "detail": {
            "span_ns": [begin, end],
            "units": {
                one.name: {
                    "largest_ns": round(one.profile.largest[1]),
                    "solo_scale": round(one.profile.scale, 5),
                }
                for one in containers
            },
            **(detail or {}),
        },
    }


def span_without(containers: Sequence[ReportedContainer]) -> tuple[int, int] | None:
    """Return the span in which all jobs ran without Tidegate; None if there was no such run."""
    runs = [one.without for one in containers if one.without]
    if not runs:
        return None
    begin, end = common_span(runs)
    settle = min(NS_PER_S, (end - begin) // 4)
    return begin + settle, end


def sample_progress(
    containers: Sequence[ReportedContainer], span: tuple[int, int]
) -> dict[str, Any]:
    """Return each container's progress in steps of 10 ms: the work done in each, in microseconds.

    Rounding errors are carried over, so that sums over any number of steps are exact to a
    microsecond.
    """
    samples = _sample({one.name: one.progress for one in containers}, span)
    before = span_without(containers)
    if before:
        runs = {one.name: one.without for one in containers if one.without}
        samples["without"] = _sample(runs, before)
    return samples


def _sample(runs: Mapping[str, Progress], span: tuple[int, int]) -> dict[str, Any]:
    begin, end = span
    sampled = {}
    for name, run in runs.items():
        edges = [round(run.at(t) / 1000) for t in range(begin, end + 1, SAMPLE_NS)]
        sampled[name] = [after - before for before, after in itertools.pairwise(edges)]
    return {"begin_ns": begin, "step_ns": SAMPLE_NS, "work_us": sampled}


def sampled_shares(samples: Mapping[str, Any], width: int) -> dict[str, list[float]]:
    """Return each container's shares in windows of `width` (a multiple of the samples' step)."""
    per = width // samples["step_ns"]
    return {
        name: [sum(work[i : i + per]) * 1000 / width for i in range(0, len(work) - per + 1, per)]
        for name, work in samples["work_us"].items()
    }


def chart_of(report: Mapping[str, Any], samples: Mapping[str, Any]) -> Chart:
    """Return each container's share over time and its quota, from a report and its samples."""
    gpu, quota = report["gpu"], {one["name"]: one for one in report["containers"]}
    step = samples["step_ns"]
    delivered = {label: sampled_shares(samples, width) for label, width in WINDOWS.items()}
    before = {
        label: sampled_shares(samples["without"], width) if "without" in samples else {}
        for label, width in WINDOWS.items()
    }
    series = []
    seconds = earlier = 0.0
    for name, work in samples["work_us"].items():
        lines = {
            label: [
                ((index + 0.5) * width / NS_PER_S, 100 * share)
                for index, share in enumerate(
                    [*before[label].get(name, ()), *delivered[label][name]],
                    -len(before[label].get(name, ())),
                )
            ]
            for label, width in WINDOWS.items()
        }
        one = quota[name]
        seconds = max(seconds, len(work) * step / NS_PER_S)
        earlier = max(earlier, float(len(before["1s"].get(name, ()))))
        note = f"quota {one['compute']:g} %, got {one['delivered']:.1f} %"
        series.append(Series(name, lines["1s"], note, lines["100ms"], one["compute"]))
    kind = "a simulated GPU" if gpu["kind"] == "simulated" else f"one {gpu['name']}"
    errors = {label: one["mean_abs_error_pp"] for label, one in report["windows"].items()}
    notes = "; ".join(f"{one.name}: {one.note}" for one in series)
    first = "Before 0 s, the jobs run without Tidegate. " if earlier else ""
    where = f"{kind}. {first}" if first else f"{kind}, driver {gpu['driver']}. "
    return Chart(
        title="Delivered GPU time",
        subtitle=(
            f"{len(series)} containers on {where}Mean distance from the quota: "
            f"{errors['1s']:.2f} points in 1 s windows, {errors['100ms']:.2f} in 100 ms"
        ),
        description=(
            f"Share of the GPU delivered to each container over {seconds:.0f} s. {first}{notes}."
        ),
        x_label="time, s",
        y_label="share of the GPU",
        y_unit=" %",
        x_range=(-earlier, seconds),
        series=series,
        key=(("thick", "1 s windows"), ("thin", "100 ms windows"), ("dashed", "quota")),
    )


def validate(report: Mapping[str, Any]) -> None:
    """Raise jsonschema.ValidationError unless the report conforms to its schema."""
    import jsonschema

    jsonschema.validate(report, json.loads(SCHEMA.read_text()))


def size(count: int) -> str:
    """Return bytes in human-readable form."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def render_table(report: Mapping[str, Any]) -> str:
    """Return the report as text for a terminal."""
    is_compared = any("without" in one for one in report["containers"])
    without = ["without"] if is_compared else []
    head = ["container", "quota", *without, "delivered", "memory peak", "memory limit", "exit"]
    rows = [
        [
            one["name"],
            f"{one['compute']:g} %",
            *([f"{one.get('without', 0):.2f} %"] if is_compared else []),
            f"{one['delivered']:.2f} %",
            size(one["memory_peak"]),
            size(one["memory_limit"]),
            str(one["exit"]),
        ]
        for one in report["containers"]
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join((row[0].ljust(len(first)), *rest))

    gpu, refused = report["gpu"], report["refused"]
    kind = " (simulated)" if gpu["kind"] == "simulated" else ""
    errors = {label: one["mean_abs_error_pp"] for label, one in report["windows"].items()}
    return "\n".join(
        [
            f"GPU: {gpu['name']}{kind}, driver {gpu['driver']}",
            "",
            line(head),
            line(["-" * width for width in widths]),
            *map(line, rows),
            "",
            *(["without: the same jobs at the same time, without Tidegate"] if is_compared else []),
            (
                f"distance from the quota: {errors['1s']:.2f} points in windows of 1 s, "
                f"{errors['100ms']:.2f} in windows of 100 ms"
            ),
            (
                f"an allocation of {size(refused['requested'])} under a limit of "
                f"{size(refused['limit'])}: {refused['result']}"
            ),
        ]
    )


def write_report(
    directory: str | pathlib.Path, report: dict[str, Any], containers: Sequence[ReportedContainer]
) -> None:
    """Write report.json, progress.json and report.svg to `directory`, with the run's origin."""
    report = {**report, "detail": {**report["detail"], "run": describe_run()}}
    validate(report)
    begin, end = report["detail"]["span_ns"]
    samples = sample_progress(containers, (begin, end))
    where = pathlib.Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    (where / "progress.json").write_text(json.dumps(samples, separators=(",", ":")) + "\n")
    (where / "report.svg").write_text(render(chart_of(report, samples)))
    (where / "report.json").write_text(json.dumps(report, indent=2) + "\n")
