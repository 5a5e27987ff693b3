"""Generates docs/benchmarks.md from bench/results/*.json; the page has no other source.

`python -m bench.report_docs` writes the page and its figures. `--check` fails if they are stale.
Each suite has a function that adds its section from its results. SECTIONS lists these functions.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench import report_aims, report_gangs, report_parking, report_suites
from bench.hook import WAYS
from bench.latency import label_of
from bench.overhead import TITLES
from bench.plot import render
from bench.provenance import ROOT
from bench.report import chart_of, size
from bench.report_gangs import GANGS
from bench.report_quota import DRAWN, QUOTA, chart_of_arm, row_of
from bench.report_quota import HEAD as QUOTA_HEAD
from bench.report_texts import (
    API_COVERAGE,
    CHURN,
    HEAD,
    HOOK,
    LATENCY,
    MEMORY,
    MIRROR,
    OVERHEAD,
    PROGRAMS,
    RESTARTS,
    SHARES,
    STARTS_BY_ENGINE,
    STEP,
    SUSPENSION,
)

STARTS = WAYS[1:]


class ResultsPage:
    """The text and the figures of the page, which the sections add to."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.figures: dict[str, str] = {}

    def add(self, text: str) -> None:
        """Add a block of Markdown."""
        self.parts.append(text.strip("\n"))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> None:
        """Add a table. `align` has one letter for each column, l or r."""
        rule = ["---:" if side == "r" else "---" for side in align]
        self.add("\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)))

    def figure(self, name: str, words: str, svg: str) -> None:
        """Add a picture."""
        self.figures[name] = svg
        self.add(f"![{words}](figures/{name})")

    @property
    def text(self) -> str:
        """The whole page."""
        return "\n\n".join(self.parts) + "\n"


def where(result: Mapping[str, Any]) -> str:
    """Return a line with a result's command, commit, date and machine."""
    machine = result["machine"]
    commit = result["commit"]
    short = commit if commit == "unknown" else f"{commit[:12]}{commit[40:]}"
    return (
        f"`{result['command']}` at commit {short}, {result['date'][:10]}; "
        f"{machine['processor']}, {machine['cores']} cores, {size(machine['memory'])}, "
        f"Linux {machine['kernel']}."
    )


def add_shares(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a table and a figure for each run."""
    page.add(SHARES)
    for stem, result in results.items():
        gpu, summary = result["gpu"], result["summary"]
        jobs = result["configuration"].get("jobs", {})
        counters = result["raw"].get("counters", {})
        kind = " (simulated)" if gpu["kind"] == "simulated" else ""
        title = f"{gpu['name']}{kind}, driver {gpu['driver']}, {result['date'][:10]}"
        page.add(f"### {title} ({stem.removeprefix(result['date'][:10] + '-')})")
        rows = [
            (
                one["name"],
                jobs.get(one["name"], ""),
                f"{one['compute']:g} %",
                f"{one['delivered']:.2f} %",
                size(one["memory_peak"]),
                size(one["memory_limit"]),
                *(
                    str(counters.get(one["name"], {}).get(key, ""))
                    for key in ("lookups", "launches", "grants")
                ),
            )
            for one in summary["containers"]
        ]
        head = (
            *("container", "job", "quota", "delivered", "memory peak", "memory limit"),
            *("look-ups replaced", "launches gated", "grants"),
        )
        page.table(head, rows, "llrrrrrrr")
        errors = {label: one["mean_abs_error_pp"] for label, one in summary["windows"].items()}
        refused = summary["refused"]
        page.add(
            f"The error is {errors['1s']:.2f} points in windows of 1 s and {errors['100ms']:.2f} "
            f"in windows of 100 ms. An allocation of {size(refused['requested'])} under a limit of "
            f"{size(refused['limit'])} returns `{refused['result']}`."
        )
        chart = chart_of({**summary, "gpu": gpu}, result["raw"]["progress"])
        page.figure(f"{stem}.svg", chart.description, render(chart))
        page.add(where(result))


def add_quota(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a table for each run, and the figures of the arms in DRAWN."""
    page.add(QUOTA)
    for stem, result in results.items():
        gpu, arms = result["gpu"], result["raw"]["arms"]
        kind = " (simulated)" if gpu["kind"] == "simulated" else ""
        title = f"{gpu['name']}{kind}, driver {gpu['driver']}, {result['date'][:10]}"
        page.add(f"### {title} ({stem.removeprefix(result['date'][:10] + '-')})")
        suite = result["configuration"].get("suite")
        if suite:
            add_suite(page, stem, suite, result)
        else:
            rows = [row_of(name, arm, result["summary"][name]) for name, arm in arms.items()]
            page.table(QUOTA_HEAD, rows, "llrrrrrr")
            for name in DRAWN:
                if name in arms:
                    chart = chart_of_arm(name, arms[name], gpu)
                    page.figure(f"{stem}-{name}.svg", chart.description, render(chart))
        page.add(where(result))


def add_suite(page: ResultsPage, stem: str, suite: str, result: Mapping[str, Any]) -> None:
    """Add a suite's description, its tables, and its figure."""
    page.add(report_suites.WORDS[suite])
    for head, rows, align in report_suites.tables_of(suite, result):
        page.table(head, rows, align)
    chart = report_suites.chart_of(suite, result)
    page.figure(f"{stem}.svg", chart.description, render(chart))


def add_mirror(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a table for each run."""
    page.add(MIRROR)
    for result in results.values():
        gpu, found = result["gpu"], result["summary"]
        how = ", ".join(
            f"{n} {word}" for word, n in sorted(result["raw"]["refresh"]["how"].items())
        )
        page.add(f"### {gpu['name']}, driver {gpu['driver']}, {result['date'][:10]}")
        rows = (
            ("files that readelf reads in the same way", f"{found['files']} of {found['files']}"),
            ("names in the mirror", f"{found['names']}, {size(found['bytes'])} ({how})"),
            ("first refresh", f"{found['first_s']:.2f} s"),
            ("a refresh without changes", f"{found['again_s'] * 1000:.0f} ms"),
            ("verify: content and loading", f"{found['verify_s']:.2f} s"),
            ("libraries that load from it", f"{found['loaded']} of {found['libraries']}"),
            ("EGL in a container draws with", found["renderer"]),
            ("Vulkan in a container lists", ", ".join(found["vulkan"])),
        )
        page.table(("", ""), rows, "ll")
        page.add(where(result))


def add_overhead(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a table for each run."""
    page.add(OVERHEAD)
    for result in results.values():
        gpu = result["gpu"]
        where_run = (
            "the stub" if gpu["kind"] == "stub" else f"{gpu['name']}, driver {gpu['driver']}"
        )
        page.add(f"### {where_run}, {result['date'][:10]}")
        rows = [
            (
                f"{measure}, {TITLES[kind]}",
                *(f"{one[key]:,.1f}" for key in ("native_ns", "governed_ns", "difference_ns")),
                f"{one['low_ns']:,.1f} to {one['high_ns']:,.1f}",
            )
            for kind, measures in result["summary"].items()
            for measure, one in measures.items()
        ]
        page.table(("ns", "native", "governed", "difference", "95 %"), rows, "lrrrr")
        page.add(f"{result['configuration']['pairs']} pairs of runs. {where(result)}")


def add_programs(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a table for each run, and below it the differences that were found."""
    page.add(PROGRAMS)
    for stem, result in results.items():
        gpu, found = result["gpu"], result["summary"]["programs"]
        kind = " (simulated)" if gpu["kind"] == "simulated" else ""
        quota = size(result["configuration"]["quota"])
        title = f"{gpu['name']}{kind}, driver {gpu['driver']}, {quota}, {result['date'][:10]}"
        page.add(f"### {title} ({stem.removeprefix(result['date'][:10] + '-')})")
        rows = [
            (
                one["name"],
                str(one["checks"]),
                str(one["values"]),
                str(one["launches"]),
                str(one["lookups"]),
                size(one["memory_peak"]),
                one["result"],
            )
            for one in found
        ]
        head = ("program", "checks", "values", "launches", "look-ups", "memory peak", "result")
        page.table(head, rows, "lrrrrrl")
        differences = [f"- {one['name']}: {line}" for one in found for line in one["differences"]]
        if differences:
            page.add("\n".join(differences))
        page.add(where(result))


def add_step(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a table for each run."""
    page.add(STEP)
    for stem, result in results.items():
        gpu = result["gpu"]
        title = f"{gpu['name']}, driver {gpu['driver']}, {result['date'][:10]}"
        page.add(f"### {title} ({stem.removeprefix(result['date'][:10] + '-')})")
        rows = [
            (
                kind,
                *(f"{one[key]:.3f} ms" for key in ("native_ms", "governed_ms")),
                *(f"{one[key]:.2f} %" for key in ("slower_percent", "upper_95_percent")),
            )
            for kind, one in result["summary"].items()
        ]
        page.table(("", "native", "governed", "slower", "upper 95 % bound"), rows, "lrrrr")
        settings = result["configuration"]
        page.add(f"{settings['rounds']} rounds of {settings['pairs']} pairs. {where(result)}")


def add_memory(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a row for each run."""
    page.add(MEMORY)
    rows = []
    for result in results.values():
        one, settings = result["summary"], result["configuration"]
        rows.append(
            (
                f"{result['gpu']['name']}, {result['date'][:10]}",
                size(settings["limit"]),
                f"{one['allocations']:,}",
                f"{one['refused']:,}",
                str(one["killed"]),
                f"{one['beyond'] / 2**20:+,.1f} MiB",
                f"{one['full'] / 2**20:,.1f} MiB",
                f"{one['returned_ms']:.1f} ms",
            )
        )
    head = (
        "GPU", "quota", "allocations", "refused", "killed", "peak use above the quota",
        "filled to", "memory of a dead process is free after",
    )  # fmt: skip
    page.table(head, rows, "lrrrrrrr")
    for result in results.values():
        page.add(where(result))


def add_hook(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a row for each runtime of each run."""
    page.add(HOOK)
    for stem, result in results.items():
        page.add(f"### {stem}")
        rows = [
            (
                f"{runtime}, {one['bare_ms']:.1f} ms",
                *(f"{one['added_ms'][way]:.1f}" for way in STARTS),
                f"{one['crowd_p50_ms']:.0f} / {one['crowd_p99_ms']:.0f}",
                str(one["failures"]),
            )
            for runtime, one in result["summary"].items()
        ]
        ways = [
            way.replace("wrapper-", "wrapper, ").replace("asks-not", "no request") for way in STARTS
        ]
        head = (
            "runtime, alone",
            *(f"{way}: added ms" for way in ways),
            "at once, p50 / p99 ms",
            "failed",
        )
        page.table(head, rows, "l" + "r" * (len(head) - 1))
        page.add(where(result))


def add_starts(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a row for each engine of each run."""
    page.add(STARTS_BY_ENGINE)
    for stem, result in results.items():
        page.add(f"### {stem}")
        rows = [
            (
                f"{name}: {result['configuration']['engines'][name]}",
                f"{one['native_ms']:.0f}",
                *(
                    f"{one[f'{way}_adds_ms']:.1f} ± {one[f'{way}_error_ms']:.1f}"
                    for way in ("ungoverned", "governed")
                ),
            )
            for name, one in result["summary"].items()
        ]
        head = ("engine", "native, ms", "no request: added ms", "governed: added ms")
        page.table(head, rows, "lrrr")
        page.add(where(result))


def add_judge(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add the verdicts of each run, with the reasons why some calls prove nothing."""
    page.add(API_COVERAGE)
    for result in results.values():
        one, gpu = result["summary"], result["gpu"]
        page.add(f"### {gpu['name']}, driver {gpu['driver']}, {result['date'][:10]}")
        page.add(
            f"{one['functions']} functions in {one['calls']} calls. {one['proven']} calls"
            f" behave as required; the GPU time of {len(one['untimed'])} of them was not measured."
            f" {len(one['failed'])} calls failed, and {len(one['unproven'])} prove nothing on this"
            " machine."
        )
        if one["failed"]:
            page.add("\n".join(f"- failed: {name}" for name in one["failed"]))
        page.add("Found within a second: " + ", ".join(one["found_late"]) + ".")
        reasons: dict[str, list[str]] = {}
        for name, why in one["unproven"].items():
            reasons.setdefault(why, []).append(name)
        page.add(
            "\n".join(
                f"- {why}: {', '.join(f'`{name}`' for name in names)}"
                for why, names in reasons.items()
            )
        )
        page.add(where(result))


def add_gangs(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add the tables of each run, and the parts of it that failed."""
    page.add(GANGS)
    for stem, result in results.items():
        gpu = result["gpu"]
        kind = " (simulated)" if gpu["kind"] == "simulated" else ""
        title = f"{gpu['name']}{kind}, driver {gpu['driver']}, {result['date'][:10]}"
        page.add(f"### {title} ({stem.removeprefix(result['date'][:10] + '-')})")
        for line in report_gangs.lines_of(result["summary"]):
            page.add(line)
        for head, rows, align in report_gangs.tables_of(result["summary"]):
            page.table(head, rows, align)
        page.add(where(result))


def add_latency(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a row for each arm of each run, with times also as multiples of the arm `alone`."""
    page.add(LATENCY)
    for stem, result in results.items():
        title = f"### {stem}"
        for key, relation in (("service", "requests to"), ("job", "beside")):
            name = result["configuration"].get(key, "burner")
            title += "" if name.startswith("burner") else f", {relation} {name}"
        page.add(title)
        # If there are several rounds, the summary has each arm once.
        by_label = {label_of(arm): arm for arm in reversed(result["raw"]["arms"])}
        arms = [(by_label[label], one) for label, one in result["summary"].items()]
        alone = {_load_of(arm): one for arm, one in arms if arm["arm"] == "alone"}
        rows = [
            (
                f"{arm['mean_us'] / 1000:g} ms",
                str(arm["jobs"]),
                _name_of(arm),
                *(
                    f"{one[key]:.2f} ({one[key] / alone[_load_of(arm)][key]:.2f})"
                    for key in ("mean_ms", "p99_ms")
                ),
                " ".join(f"{job:.1f}" for job in one["jobs"]),
                _together(one) if arm["jobs"] else "",
            )
            for arm, one in arms
        ]
        head = (
            *("a request every", "jobs", "arm", "mean, ms (x alone)", "p99, ms (x alone)"),
            *("each job, %", "together"),
        )
        page.table(head, rows, "rrlrrrr")
        page.add(where(result))


def _together(one: Mapping[str, Any]) -> str:
    """Return the work of all jobs in percent; also the minimum and maximum if there were rounds."""
    words = f"{sum(one['jobs']):.1f}"
    return (
        f"{words} ({one['jobs_from']:.1f} to {one['jobs_to']:.1f})" if "jobs_from" in one else words
    )


def _load_of(arm: Mapping[str, Any]) -> tuple[int, int]:
    return arm["mean_us"], arm.get("services", 1)


def _name_of(arm: Mapping[str, Any]) -> str:
    guarantee, n = arm.get("guarantee"), arm.get("services", 1)
    name = f"{arm['arm']}, {n} services" if n > 1 else arm["arm"]
    return name if guarantee is None else f"{name} {guarantee}/{100 - guarantee}"


def add_restarts(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a row for each container of each run."""
    page.add(RESTARTS)
    for stem, result in results.items():
        raw, summary = result["raw"], result["summary"]
        page.add(f"### {stem}")
        down = max(kill["down_ms"] for kill in raw["kills"])
        page.add(
            f"{result['gpu']['name']}, {len(raw['kills'])} kills. The next governor was started at "
            f"most {down / 1000:.1f} s after each kill."
        )
        rows = [
            (f"{share} %", f"{quiet:.0f} ms", f"{killed:.0f} ms")
            for share, quiet, killed in zip(
                raw["shares"], summary["without_a_kill"], summary["with_kills"], strict=True
            )
        ]
        page.table(("cap", "longest pause without a kill", "with kills"), rows, "rrr")
        page.add(where(result))


def add_suspension(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add two rows for each run."""
    page.add(SUSPENSION)
    rows = []
    for stem, result in results.items():
        summary, gib = result["summary"], result["raw"]["held"] / (1 << 30)
        rows.append(
            (
                stem, f"{gib:g} GiB", "none", f"{summary['native_out_s']:.2f} s",
                f"{summary['native_back_s']:.2f} s", "", "", "",
            )
        )  # fmt: skip
        rows.append(
            (
                stem, f"{gib:g} GiB", result["raw"]["scheduling"], f"{summary['out_s']:.2f} s",
                f"{summary['back_s']:.2f} s", f"{summary['more_than_held_mib']:.0f} MiB",
                f"{100 * summary['neighbour_out']:.1f} %",
                f"{100 * summary['neighbour_back']:.1f} %",
            )
        )  # fmt: skip
    page.table(
        (
            "result", "memory", "Tidegate's scheduling", "suspend", "resume", "also freed",
            "the neighbour's speed during suspend", "during resume",
        ),
        rows,
        "llllllll",
    )  # fmt: skip
    for result in results.values():
        page.add(where(result))


def add_parking(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a row for each run."""
    page.add(report_parking.PARKING)
    page.table(report_parking.TITLES, report_parking.rows_of(results), "lllrrrrrr")
    if deaths := report_parking.deaths_of(results):
        page.add(report_parking.DEATHS)
        page.table(report_parking.DEATHS_TITLES, deaths, "llrrrrr")
    for result in results.values():
        page.add(where(result))


def add_churn(page: ResultsPage, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a row for each run."""
    page.add(CHURN)
    rows = []
    for stem, result in results.items():
        raw, summary = result["raw"], result["summary"]
        shares = raw["witness"]["shares"]
        rows.append(
            (
                stem, raw["scheduling"], raw["n_kills"], summary["containers"], summary["killed"],
                summary["failed"], summary["left"], summary["measured"],
                f"{summary['furthest_below']:.2f}", summary["below_1"],
                f"{statistics.fmean(shares):.2f}", f"{min(shares):.2f}",
            )
        )  # fmt: skip
    page.table(
        (
            "result", "scheduling", "kills of the governor", "containers", "killed", "failed",
            "left at the end", "measured", "below", "more than 1 below", "seconds: mean, %",
            "least, %",
        ),
        [[str(cell) for cell in row] for row in rows],
        "llrrrrrrrrrr",
    )  # fmt: skip
    for result in results.values():
        page.add(where(result))


SECTIONS: dict[str, Callable[[ResultsPage, Mapping[str, dict[str, Any]]], None]] = {
    "shares": add_shares,
    "quota": add_quota,
    "gangs": add_gangs,
    "mirror": add_mirror,
    "overhead": add_overhead,
    "hook": add_hook,
    "starts": add_starts,
    "step": add_step,
    "memory": add_memory,
    "latency": add_latency,
    "restarts": add_restarts,
    "churn": add_churn,
    "suspension": add_suspension,
    "parking": add_parking,
    "judge": add_judge,
    "programs": add_programs,
}


def build_page(results: Mapping[str, dict[str, Any]]) -> ResultsPage:
    """Return the page from results by file stem. Each section has its newest result first."""
    page = ResultsPage()
    page.add(HEAD)
    if any(one["gpu"]["kind"] != "simulated" for one in results.values()):
        page.add(report_aims.AIMS_HEAD)
        page.table(report_aims.TITLES, tuple(report_aims.rows_of(results)), "lrrll")
    for suite, section in SECTIONS.items():
        mine = {stem: one for stem, one in results.items() if one["suite"] == suite}
        if mine:
            section(page, dict(sorted(mine.items(), reverse=True)))
    return page


def results_below(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of all results in bench/results."""
    return sorted((root / "bench" / "results").glob("*.json"))


def plan_files(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """Return the page and its figures with their content, from the results below `root`."""
    found = results_below(root)
    if not found:
        return {}
    page = build_page({path.stem: json.loads(path.read_text()) for path in found})
    docs = root / "docs"
    figures = {docs / "figures" / name: svg for name, svg in page.figures.items()}
    return {docs / "benchmarks.md": page.text, **figures}


def stale_files(files: Mapping[pathlib.Path, str]) -> list[pathlib.Path]:
    """Return the files that are missing or have other content."""
    return [path for path, text in files.items() if not path.exists() or path.read_text() != text]


def main(arguments: list[str] | None = None, root: pathlib.Path = ROOT) -> int:
    """Write the page and its figures, or check that they are up to date."""
    parser = argparse.ArgumentParser(prog="python -m bench.report_docs", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and fail if a file is stale"
    )
    options = parser.parse_args(arguments)
    files = plan_files(root)
    stale = stale_files(files)
    if options.check:
        for path in stale:
            print(f"{path.relative_to(root)} is stale: run python -m bench.report_docs")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path])
        print(path.relative_to(root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
