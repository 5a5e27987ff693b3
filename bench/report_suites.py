"""Makes the text, the tables and the figure of each suite of `bench.quota` in docs/benchmarks.md.

All of them follow from the raw data and the summary of a result. Shares are percentages of the GPU.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.arms import LOADS, NEIGHBOURS
from bench.events import SAMPLE_NS, WINDOW_NS, trailing
from bench.plot import Chart, Point, Series, render
from bench.progress import NS_PER_MS, NS_PER_S
from bench.quota_measure import delivered
from bench.report_quota import HEAD, chart_of_arm, describe_arm, row_of, show_work

Table = tuple[Sequence[str], Sequence[tuple[str, ...]], str]
Result = Mapping[str, Any]

SEQUENCES = 8
"""Number of sequences that examples/workloads/torch_step.py decodes at once."""

KINDS = {"gpu": "GPU-bound", "memory": "memory-bound", "launch": "launch-bound"}

NATIVE = (
    '"Without" is the same work run concurrently without Tidegate, under the GPU\'s own time'
    " slicing."
)

WORDS = {
    "table7": f"Three containers have 45, 30 and 15 %. {NATIVE}",
    "sweep": "One container runs alone. Its guarantee is 10 to 90 %, and its cap is the same.",
    "table8": (
        "A container with 50 % runs alongside one to four containers with 10 % each. Its loss is"
        " the shortfall from half of the work that it does alone, as a percentage of that half."
        f" {NATIVE}"
    ),
    "aggregate": (
        "Two, four and eight containers always have work and share all of the GPU. The sum is the"
        f" work that they do together. {NATIVE}"
    ),
    "elastic": (
        "Four containers with 25 % each run in bursts, from the same random seeds. In the strict"
        " arms, no container gets more than its share. In the elastic arms, every"
        " container may be lent up to 100 %. The load is the fraction of the time in which"
        ' each container has work. "Of ideal" is the work done, as a percentage of the time in'
        f" which any container had work. {NATIVE}"
    ),
    "longkernels": (
        f"20 ms kernels run alongside 0.2 ms kernels, and alongside each other. {NATIVE}"
    ),
    "shapes": (
        "A container with 30 % runs alongside a hog, which is a container with 70 % that always has"
        ' work. "Off" is the work of the first container over the whole run'
        f" less 30, in points. {NATIVE}"
    ),
    "graphs": (
        "CUDA graphs run at 30 % alongside a hog, which is a container with 70 % that always has"
        " work. One kind of graph has 20 kernels. The other decodes with a 24-layer model, and each"
        f" graph computes a token for each of eight sequences. {NATIVE}"
    ),
    "settle": (
        "A change is settled when a container's work in the trailing 100 ms is within 3 points of"
        " its new share and stays there for half a second. The time to settle is measured from"
        " the change.\n\n"
        "In `settle-quota` the quota of a container is changed from 30 to 60 % and back, alongside"
        " a container that takes what is left. In `settle-neighbour` a container that may be lent"
        " all of the GPU has 30 % while a neighbour is running; the changes are the start of the"
        " neighbour's work and the end of its last unit.\n\n"
        '"Reached" is when the work first comes within 3 points, even if it moves away again. A'
        " window contains so few grants that it can be 3 points off without any change. For this"
        ' reason "off" is the distance from the new share over the half second that begins 200 ms'
        " after a change, in points; the largest distance over all changes is shown."
        ' "Outside" is the fraction of later windows that were nevertheless more than 3 points off.'
    ),
    "killed": (
        "A running neighbour is killed (SIGKILL) or stopped (SIGSTOP) at a random time. The wait"
        " is the longest time in the following 0.3 s in which the remaining container completed no"
        " unit of its work, less the time of one unit. It includes the usual wait for a turn.\n\n"
        '"With the turn before" also counts how long the neighbour had run before the event. The'
        " neighbour is at times entitled to two turns in a row."
        ' "Had the GPU" counts the events at which it was the neighbour that was using the GPU.'
    ),
}


def _ms(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} ms"


def _without(summary: Mapping[str, Any], key: str = "sum") -> str:
    if "native" not in summary:
        return ""
    value = summary["native"][key]
    return show_work(value) if isinstance(value, list) else f"{value:.2f}"


def arms_table(result: Result) -> Table:
    """Return a row for each arm, with its work without Tidegate if that was measured."""
    arms = summarised_arms(result)
    rows = [row_of(name, arm, summary) for name, arm, summary in arms]
    if not any("native" in summary for _, _, summary in arms):
        return HEAD, rows, "llrrrrrr"
    rows = [
        (*row, _without(summary, "delivered"), _without(summary))
        for row, (_, _, summary) in zip(rows, arms, strict=True)
    ]
    return (*HEAD, "without", "sum without"), rows, "llrrrrrrrr"


def summarised_arms(result: Result) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Return the name, the raw data and the summary of each arm of a result."""
    return [(name, arm, result["summary"][name]) for name, arm in result["raw"]["arms"].items()]


def target_loss(summary: Mapping[str, Any], share: float) -> float:
    """Return the part of its share that the first container lost, as a percentage of the share."""
    return 100 * (1 - float(summary["delivered"][0]) / share)


def table8(result: Result) -> list[Table]:
    """Return the target's work and loss by kind and number of its neighbours, and all arms."""
    rows = []
    for kind, words in KINDS.items():
        cells = []
        for n in range(1, 5):
            summary = result["summary"].get(f"beside-{n}-{kind}")
            if summary is None:
                cells.append("")
                continue
            text = f"{summary['delivered'][0]:.2f} ({target_loss(summary, 50):+.1f} %"
            if "native" in summary:
                text += f"; without {summary['native']['delivered'][0]:.2f}"
            cells.append(text + ")")
        if any(cells):
            rows.append((words, *cells))
    heads = ("neighbours", "one", "two", "three", "four")
    return [(heads, rows, "lrrrr"), arms_table(result)]


def elastic(result: Result) -> list[Table]:
    """Return the gain from lending at each load."""
    rows = []
    for name, duties in LOADS.items():
        both = [result["summary"].get(one) for one in (f"{name}-strict", name)]
        if None in both:
            continue
        low, high = both
        gain = f"{100 * (high['sum'] / low['sum'] - 1):+.1f} %" if low["sum"] else ""
        rows.append(
            (
                name,
                " / ".join(f"{duty} %" for duty in duties),
                f"{low['sum']:.2f}",
                f"{high['sum']:.2f}",
                gain,
                f"{100 * low['of_ideal']:.1f} %",
                f"{100 * high['of_ideal']:.1f} %",
                str(high["short_windows"]),
                _without(high),
            )
        )
    head = (
        "load", "has work", "work, strict", "work, elastic", "gain", "of ideal, strict",
        "of ideal, elastic", "short windows, elastic", "sum without",
    )  # fmt: skip
    return [(head, rows, "llrrrrrrr")]


def shapes(result: Result) -> list[Table]:
    """Return the distance of each form of work from its quota of 30 %."""
    rows = [
        (
            name.removeprefix("shape-"),
            "; ".join(describe_arm(arm)),
            f"{summary['delivered'][0]:.2f}",
            f"{summary['delivered'][0] - arm['tenants'][0]['compute']:+.2f}",
            f"{summary['delivered'][1]:.2f}",
            _without(summary, "delivered"),
        )
        for name, arm, summary in summarised_arms(result)
    ]
    return [(("shape", "share, units", "work", "off", "hog", "without"), rows, "llrrrr")]


def tokens_per_second(arm: Mapping[str, Any], share: float) -> float:
    """Return the tokens per second of a container that has `share` % of its speed when alone."""
    return SEQUENCES * 1e9 / float(arm["tenants"][0]["unit_ns"]) * share / 100


def graphs(result: Result) -> list[Table]:
    """Return the arms, and the tokens per second of the arms that decode."""
    tables = [arms_table(result)]
    rows = []
    for name, arm, summary in summarised_arms(result):
        if not arm["tenants"][0].get("program"):
            continue
        native = summary.get("native", {}).get("delivered", [None])[0]
        rows.append(
            (
                name,
                f"{tokens_per_second(arm, 100):,.0f}",
                f"{tokens_per_second(arm, summary['delivered'][0]):,.0f}",
                "" if native is None else f"{tokens_per_second(arm, native):,.0f}",
            )
        )
    if rows:
        head = (
            "tokens a second", "alone", "30 % alongside a hog",
            "30 % alongside a hog, without Tidegate",
        )  # fmt: skip
        tables.append((head, rows, "lrrr"))
    return tables


def settle(result: Result) -> list[Table]:
    """Return the time that changes took to settle."""
    rows = []
    for name, arm, summary in summarised_arms(result):
        found = summary["settle"]
        took = [one for one in found["ms"] if one is not None]
        outside = found["outside_percent"]
        off = [abs(one) for one in found["off_points"] if one is not None]
        rows.append(
            (
                name,
                "; ".join(describe_arm(arm)),
                " / ".join(str(event["share"]) for event in arm["events"]),
                f"{len(took)} of {len(found['ms'])}",
                _ms(statistics.median(took)) if took else "",
                _ms(found["longest_ms"]),
                _ms(found["reached_longest_ms"]),
                f"{max(off):.2f}" if off else "",
                "" if outside is None else f"{outside:.1f} %",
            )
        )
    head = (
        "arm", "share, units", "new shares", "settled", "median", "longest",
        "reached, longest", "off, 200 to 700 ms", "outside later",
    )  # fmt: skip
    return [(head, rows, "lllrrrrrr")]


def killed(result: Result) -> list[Table]:
    """Return the waits of the remaining container."""
    rows = [
        (
            name,
            "; ".join(describe_arm(arm)),
            str(len(summary["stall"]["ms"])),
            str(summary["stall"]["at_work"]),
            _ms(statistics.median(summary["stall"]["ms"])) if summary["stall"]["ms"] else "",
            _ms(summary["stall"]["longest_ms"]),
            _ms(summary["stall"]["longest_pause_ms"]),
        )
        for name, arm, summary in summarised_arms(result)
    ]
    head = (
        "arm", "remaining container", "events", "had the GPU", "median wait", "longest wait",
        "with the turn before",
    )  # fmt: skip
    return [(head, rows, "llrrrrr")]


TABLES: dict[str, Callable[[Result], list[Table]]] = {
    "table8": table8,
    "elastic": elastic,
    "shapes": shapes,
    "graphs": graphs,
    "settle": settle,
    "killed": killed,
}


def tables_of(suite: str, result: Result) -> list[Table]:
    """Return the tables of a suite."""
    if suite in TABLES:
        return TABLES[suite](result)
    return [arms_table(result)]


# ---- figures ----


def _chart(
    suite: str,
    result: Result,
    series: list[Series],
    *,
    subject: str,
    x_label: str,
    y_label: str = "work",
    y_unit: str = " %",
    y_range: tuple[float | None, float | None] = (0.0, None),
    key: Sequence[tuple[str, str]] = (),
) -> Chart:
    gpu = result["gpu"]
    return Chart(
        title=f"GPU time, suite {suite}",
        subtitle=f"{subject}; {gpu['name']}, driver {gpu['driver']}",
        description=f"{subject}, suite {suite}.",
        x_label=x_label,
        y_label=y_label,
        y_unit=y_unit,
        y_min=y_range[0],
        y_max=y_range[1],
        series=series,
        key=key,
    )


def _work(arm: Mapping[str, Any]) -> list[float]:
    return delivered(arm["tenants"], SAMPLE_NS)


def _native_work(arm: Mapping[str, Any]) -> list[float] | None:
    if "native" not in arm:
        return None
    return delivered(arm["native"]["tenants"], arm["native"]["step_ns"])


def draw_sweep(result: Result) -> Chart:
    """Return a chart of delivered against guaranteed shares."""
    points = sorted((arm["tenants"][0]["compute"], _work(arm)[0]) for _, arm in _arms(result))
    ideal = [(float(share), float(share)) for share, _ in points]
    series = [Series("work", [(float(a), b) for a, b in points], "", ideal)]
    return _chart(
        "sweep",
        result,
        series,
        subject="Work of one container alone",
        x_label="guaranteed, %",
        key=(("thick", "work"), ("thin", "the guarantee")),
    )


def _arms(result: Result) -> list[tuple[str, Mapping[str, Any]]]:
    return list(result["raw"]["arms"].items())


def draw_table8(result: Result) -> Chart:
    """Return a chart of the target's work by the number of its neighbours."""
    series = []
    for kind in NEIGHBOURS:
        own: list[Point] = []
        native: list[Point] = []
        for n in range(1, 5):
            arm = result["raw"]["arms"].get(f"beside-{n}-{kind}")
            if arm is None:
                continue
            own.append((float(n), _work(arm)[0]))
            without = _native_work(arm)
            if without:
                native.append((float(n), without[0]))
        if own:
            series.append(Series(KINDS[kind], own, "neighbours", native, 50.0))
    return _chart(
        "table8",
        result,
        series,
        subject="Work of a container with 50 %",
        x_label="neighbours with 10 %",
        key=(("thick", "with Tidegate"), ("thin", "without"), ("dashed", "guarantee")),
    )


def draw_aggregate(result: Result) -> Chart:
    """Return a chart of the total work by number of containers and length of a unit."""
    groups: dict[int, list[tuple[int, Mapping[str, Any]]]] = {}
    for _, arm in _arms(result):
        groups.setdefault(arm["tenants"][0]["unit_us"], []).append((len(arm["tenants"]), arm))
    series = []
    for unit_us, arms in sorted(groups.items()):
        arms.sort(key=lambda one: one[0])
        native = [(float(n), _native_work(arm)) for n, arm in arms]
        series.append(
            Series(
                f"units of {unit_us} us",
                [(float(n), sum(_work(arm))) for n, arm in arms],
                "",
                [(n, sum(one)) for n, one in native if one is not None],
                100.0,
            )
        )
    return _chart(
        "aggregate",
        result,
        series,
        subject="Work of all containers together",
        x_label="containers",
        key=(("thick", "with Tidegate"), ("thin", "without"), ("dashed", "one alone")),
    )


def draw_elastic(result: Result) -> Chart:
    """Return a chart of the total work over time in an uneven arm, strict and elastic."""
    arms = result["raw"]["arms"]
    name = next((one for one in reversed(LOADS) if one in arms and f"{one}-strict" in arms), None)
    chosen = [name, f"{name}-strict"] if name else list(arms)[:2]
    series = []
    for one in chosen:
        steps = [
            sum(part) for part in zip(*(t["work_us"] for t in arms[one]["tenants"]), strict=True)
        ]
        series.append(Series(one, _over_time(steps, NS_PER_S), "", _over_time(steps, WINDOW_NS)))
    return _chart(
        "elastic",
        result,
        series,
        subject="Work of four containers in bursts",
        x_label="time, s",
        key=(("thick", "1 s windows"), ("thin", "100 ms windows")),
    )


def _over_time(work_us: Sequence[int], width_ns: int) -> list[Point]:
    per = width_ns // SAMPLE_NS
    return [
        ((i + per / 2) * SAMPLE_NS / NS_PER_S, sum(work_us[i : i + per]) * 1e5 / width_ns)
        for i in range(0, len(work_us) - per + 1, per)
    ]


def draw_shapes(result: Result) -> Chart:
    """Return a chart of the work of each form over time."""
    series = [
        Series(
            name.removeprefix("shape-"),
            _over_time(arm["tenants"][0]["work_us"], NS_PER_S),
            "",
            (),
            float(arm["tenants"][0]["compute"]) if i == 0 else None,
        )
        for i, (name, arm) in enumerate(_arms(result))
    ]
    return _chart(
        "shapes",
        result,
        series,
        subject="Work at 30 % alongside a hog",
        x_label="time, s",
        y_range=(20.0, 40.0),
        key=(("thick", "1 s windows"), ("dashed", "guarantee")),
    )


def draw_settle(result: Result) -> Chart:
    """Return a chart of the work in the trailing 100 ms after each kind of change."""
    series = []
    for name, arm in _arms(result):
        shares = sorted({event["share"] for event in arm["events"]})
        for share in shares:
            lines = [
                [
                    (end * SAMPLE_NS / NS_PER_MS - event["at_ns"] / NS_PER_MS, done)
                    for end, done in trailing(
                        arm["tenants"][event["tenant"]]["work_us"],
                        event["at_ns"],
                        min(event["until_ns"], event["at_ns"] + NS_PER_S),
                    )
                ]
                for event in arm["events"]
                if event["share"] == share
            ]
            # All changes form one series: the chart begins a new line where time goes backwards.
            points = list(itertools.chain.from_iterable(lines))
            first = lines[0] if lines else []
            series.append(Series(f"to {share} %", first, name, points, float(share)))
    return _chart(
        "settle",
        result,
        series,
        subject="Work in the trailing 100 ms after a change",
        x_label="time since the change, ms",
        key=(("thick", "the first"), ("thin", "all"), ("dashed", "new share")),
    )


def draw_killed(result: Result) -> Chart:
    """Return a chart of the wait after each event, sorted."""
    series = [
        Series(
            name,
            [(float(i), ms) for i, ms in enumerate(sorted(summary["stall"]["ms"]), 1)],
            "",
            (),
            20.0 if i == 0 else None,
        )
        for i, (name, _, summary) in enumerate(summarised_arms(result))
    ]
    return _chart(
        "killed",
        result,
        series,
        subject="Longest waits of the remaining container, sorted",
        x_label="event",
        y_label="wait",
        y_unit=" ms",
        key=(("dashed", "20 ms"),),
    )


CHARTS: dict[str, Callable[[Result], Chart]] = {
    "sweep": draw_sweep,
    "table8": draw_table8,
    "aggregate": draw_aggregate,
    "elastic": draw_elastic,
    "shapes": draw_shapes,
    "settle": draw_settle,
    "killed": draw_killed,
}


def draw(suite: str, result: Result) -> str:
    """Return the figure of a suite as an SVG document."""
    return render(chart_of(suite, result))


def chart_of(suite: str, result: Result) -> Chart:
    """Return the figure of a suite, or the work of its last arm over time if it has none."""
    if suite in CHARTS:
        return CHARTS[suite](result)
    name, arm = _arms(result)[-1]
    return chart_of_arm(name, arm, result["gpu"])
