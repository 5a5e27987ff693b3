"""Generate docs/benchmarks.md from bench/results/*.json. Nothing else writes that page.

`python -m bench.report_docs` writes the page and its figures. `--check` fails if they are stale.
Each suite has a function that adds its section from its results. SECTIONS lists these functions.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench import report_aims, report_gangs, report_suites
from bench.hook import WAYS
from bench.latency import label_of
from bench.overhead import TITLES
from bench.plot import render
from bench.provenance import ROOT
from bench.report import chart_of, size
from bench.report_gangs import GANGS
from bench.report_quota import DRAWN, QUOTA, chart_of_arm, row_of
from bench.report_quota import HEAD as QUOTA_HEAD

HEAD = """\
<!-- Written by `python -m bench.report_docs` from bench/results/*.json. Do not edit. -->

# Benchmarks

Every figure on this page comes from a file in `bench/results`, which holds the raw data, the
command, the commit and the machine. `python -m bench.run --suite NAME --from DIR` makes such a
file from the output of a run (`python -m bench.demo`, `bench.quota`, ...) in DIR.
`python -m bench.report_docs` makes this page from the files.
"""

SHARES = """\
## Delivered shares

Each job stamps the end of every unit of its work (at most 2 ms) with the GPU's clock. A run of the
job alone shows how long a unit takes. In a run beside other jobs, each finished unit counts for
that time.

The delivered share is this progress divided by the time that passed. Neither the governor's own
accounting nor the driver's utilisation figure is used. The error is the mean distance between
delivered share and quota over all windows, averaged over the containers, in percentage points.
"""


MIRROR = """\
## The mirror of a driver

`python -m bench.mirror` does the following. Times are medians.

- It compares every library and program of a node's driver with the output of readelf.
- It mirrors the driver from scratch and then refreshes the mirror. Each of these runs is a complete
  `tidegate refresh` command.
- It runs `tidegate verify`, which loads each library with only the mirror on the search path.
- It starts containers that have no driver other than the mirror.
"""

OVERHEAD = """\
## What a call costs

`python -m bench.overhead` runs one C program natively and in a container with a quota, in turn
(A B B A), each time as a new process. The figure of a run is the median of its batches of calls.
The difference is the median of the differences of the pairs of runs, which is not the difference
of the medians beside it. The 95 % interval is a bootstrap of the pairs.

- `launch` is the mean over a batch of launches, `launch-median` the median launch.
- `alloc-async` is `cuMemAllocAsync` and `cuMemFreeAsync`.
- `alloc` is `cuMemAlloc` and `cuMemFree`. `alloc-1000` is the same with 1,000 live blocks, and so
  on.
- `memory-info` is `cuMemGetInfo`.
- `look-up-ours` is `cuGetProcAddress` of a function that the control library replaces, `look-up`
  the same of another function.
- `load` is `dlopen` of libcuda.so.1 by a process.

Rows with "alone" were measured while the container had the GPU to itself. Rows with "while another
container waits" were measured with grants that end, as they do when another container wants the
GPU. Rows with "both in one process" were measured in one governed process that has the control
library and the original libcuda behind it, and calls each in turn. This excludes differences
between processes.

The stub is a driver whose functions return at once. The difference over the stub is the control
library's own cost, without a container around it.
"""

HOOK = """\
## What a start costs

`python -m bench.hook` runs a static program under runc and crun, in turn in these ways:

- "alone": without a hook.
- "trivial": with a hook in C that does nothing.
- "asks not": with Tidegate's hook, in a container that asks for nothing.
- "governed": with Tidegate's hook, in a container that asks for a share.
- "wrapper asks not" and "wrapper governed": the same two under `tidegate-runtime`.

Hook and runtime are the C programs with the [fork server](reference/runtime.md#the-fork-server)
behind them. "ms more" is the median of the differences from the start without a hook in the same
round. After that, containers that ask for a share are started eight at a time.

The aims are 5 ms for a container that asks for nothing and 30 ms for one that asks for a share.
"""

STARTS_BY_ENGINE = """\
## What a start costs with each engine

`python -m tests.container.start_times` starts one container at a time with real engines, in three
ways: natively, with Tidegate's runtime or hooks in a container that asks for nothing, and with them
in a container that asks for a share. Successive rounds go through all orders of the three.

A start lasts from the engine's command, or from the first CRI call, to its return with the
container running. The figures are the medians of the differences from the native start of the same
round, with their standard error.

The aims are 5 ms for a container that asks for nothing and 30 ms for one that asks for a share.
"""

LATENCY = """\
## Requests beside work that never ends

`python -m bench.latency` runs a service beside jobs that always have work. The service's requests
arrive at random (a Poisson process, the same in every arm), and each is 20 kernels of 0.1 ms. The
jobs work in units of 0.5 ms. Where a title names a model, the requests run that model
(`decode-graph`: tokens by CUDA graphs), or the jobs train it.

The arms:

- `alone`: only the service, without Tidegate.
- `governed`: only the service, under Tidegate, with a cap of 70 % and the class `latency`.
- `native`: the service and the jobs, without Tidegate.
- `gate`: grants at the launch divide the time.
- `hardware`: the GPU's own scheduler divides the time.
- `latency`: as `hardware`, and the service has the class `latency` and the cap.

The service is guaranteed ten points more of the GPU than its requests take (20 % with a request
every 20 ms). The jobs share the rest, and all containers may use idle time. Two numbers at the end
of an arm's name are the guarantees of the service and of all jobs together; the first of them
replaces this rule. Several services share the requests and the guarantee.

The work of the jobs is given in percent of what one job does alone.
"""

RESTARTS = """\
## A governor that is killed

`python -m bench.restarts` repeatedly kills the governor with SIGKILL under the GPU's own scheduler,
and starts the next governor at once or up to 3 s later. Meanwhile three containers with caps of
45, 30 and 15 % always have work.

A container that has used its cap is switched off until the period ends, so each container pauses
without a kill as well. The longest pauses with kills are measured from the kill until one second
after the next governor answers.
"""

PROGRAMS = """\
## Programs, alone and governed

`python -m bench.programs` runs each program natively, and then in a container with a quota of
memory and 50 % of the GPU's time. It compares the exit status, named checks, values and printed
lines. "The same" means the same to the bit; otherwise the difference is within the program's own
tolerance. Launches, replaced look-ups and the peak of charged memory are what the governor counted
for the container.
"""

STEP = """\
## What a step costs

`python -m bench.overhead --step` compares a native process with a process in a container that is
alone and has the whole GPU. Both are warm and stay on the same processors. In turn (A B B A), each
process takes steps for a fifth of a second while the other is idle. The figure of a turn is its
median step, because the machine is shared and sometimes takes the processor away. Results without
a median have the mean instead.

Any two processes differ by up to a percent for as long as they live, whichever program they run.
Therefore there are several rounds, each with new processes. "Slower" is the mean over the rounds
of the median of a round's pairs. The true value lies below the upper bound with 95 % confidence
(a bootstrap of the rounds and of the pairs in them).

`train` is a step of a transformer. `decode` is a token of a model of 24 layers in eager mode, some
300 launches, and is limited by the host. `decode-graph` is the same token as one CUDA graph.
"""


STARTS = WAYS[1:]


class Page:
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


def add_shares(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
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


def add_quota(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
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


def add_suite(page: Page, stem: str, suite: str, result: Mapping[str, Any]) -> None:
    """Add a suite's description, its tables, and its figure."""
    page.add(report_suites.WORDS[suite])
    for head, rows, align in report_suites.tables_of(suite, result):
        page.table(head, rows, align)
    chart = report_suites.chart_of(suite, result)
    page.figure(f"{stem}.svg", chart.description, render(chart))


def add_mirror(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a table for each run."""
    page.add(MIRROR)
    for result in results.values():
        gpu, found = result["gpu"], result["summary"]
        how = ", ".join(
            f"{n} {word}" for word, n in sorted(result["raw"]["refresh"]["how"].items())
        )
        page.add(f"### {gpu['name']}, driver {gpu['driver']}, {result['date'][:10]}")
        rows = (
            ("files that readelf reads the same", f"{found['files']} of {found['files']}"),
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


def add_overhead(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
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


def add_programs(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a table for each run, and below it the differences that were found."""
    page.add(PROGRAMS)
    for result in results.values():
        gpu, found = result["gpu"], result["summary"]["programs"]
        kind = " (simulated)" if gpu["kind"] == "simulated" else ""
        quota = size(result["configuration"]["quota"])
        title = f"{gpu['name']}{kind}, driver {gpu['driver']}, {quota}, {result['date'][:10]}"
        page.add(f"### {title}")
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


def add_step(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
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


MEMORY = """\
## A memory quota under attack

`python -m bench.memory` runs processes in one container that allocate and free memory at random, in
eight threads each and in every possible way. Some of them are killed. After that, one process
takes all the memory that it can get.

The used memory of the GPU is read from the driver's own NVML every 10 ms or slightly less often.
Memory that a context takes and that NVML attributes to no process is left out, once for each
process that can exist.
"""

JUDGE = """\
## Every function of the driver API

`python -m tests.gpu.judge` calls each function that `cuda.h` declares, natively and under a quota.
It observes the effect by means that do not depend on Tidegate: memory by NVML, GPU time by events
of the original driver.

A call that takes memory has to change the container's account, by at least half of what NVML saw
and in the same direction. A call that makes the GPU work has to pass the gate or be counted.
"Found within a second" lists calls for which the driver takes memory on its own. The governor
finds that memory through NVML.
"""


def add_memory(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
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
        "GPU", "quota", "allocations", "refused", "killed", "most used, beyond the quota",
        "filled to", "a dead process's memory is back after",
    )  # fmt: skip
    page.table(head, rows, "lrrrrrrr")
    for result in results.values():
        page.add(where(result))


def add_hook(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
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
        ways = [way.replace("-", " ") for way in STARTS]
        head = (
            "runtime, alone",
            *(f"{way}, ms more" for way in ways),
            "at once, p50 / p99 ms",
            "failed",
        )
        page.table(head, rows, "l" + "r" * (len(head) - 1))
        page.add(where(result))


def add_starts(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
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
        head = ("engine", "native, ms", "asks for nothing, ms more", "governed, ms more")
        page.table(head, rows, "lrrr")
        page.add(where(result))


def add_judge(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
    """Add the verdicts of each run, with the reasons of the calls that prove nothing."""
    page.add(JUDGE)
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


def add_gangs(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
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


def add_latency(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a row for each arm of each run, with times also as multiples of the arm `alone`."""
    page.add(LATENCY)
    for stem, result in results.items():
        title = f"### {stem}"
        for key, what in (("service", "requests of"), ("job", "beside")):
            name = result["configuration"].get(key, "burner")
            title += "" if name.startswith("burner") else f", {what} {name}"
        page.add(title)
        # Of several rounds, the summary has each arm once.
        told = {label_of(arm): arm for arm in reversed(result["raw"]["arms"])}
        arms = [(told[label], one) for label, one in result["summary"].items()]
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
            *("a request every", "jobs", "arm", "mean, ms (of alone)", "p99, ms (of alone)"),
            *("each job, %", "together"),
        )
        page.table(head, rows, "rrlrrrr")
        page.add(where(result))


def _together(one: Mapping[str, Any]) -> str:
    """Return what all jobs did, in percent, and of several rounds the least and the most."""
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


def add_restarts(page: Page, results: Mapping[str, dict[str, Any]]) -> None:
    """Add a row for each container of each run."""
    page.add(RESTARTS)
    for stem, result in results.items():
        raw, summary = result["raw"], result["summary"]
        page.add(f"### {stem}")
        down = max(kill["down_ms"] for kill in raw["kills"])
        page.add(
            f"{result['gpu']['name']}, {len(raw['kills'])} kills. The next governor was started at "
            f"most {down / 1000:.1f} s after the kill."
        )
        rows = [
            (f"{share} %", f"{quiet:.0f} ms", f"{killed:.0f} ms")
            for share, quiet, killed in zip(
                raw["shares"], summary["without_a_kill"], summary["with_kills"], strict=True
            )
        ]
        page.table(("cap", "longest pause without a kill", "with kills"), rows, "rrr")
        page.add(where(result))


SECTIONS: dict[str, Callable[[Page, Mapping[str, dict[str, Any]]], None]] = {
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
    "judge": add_judge,
    "programs": add_programs,
}


def build_page(results: Mapping[str, dict[str, Any]]) -> Page:
    """Return the page from results by file stem. Each section has its newest result first."""
    page = Page()
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
