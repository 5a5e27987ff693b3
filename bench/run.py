"""Keeps the raw data of a benchmark run as one JSON file: `python -m bench.run --suite NAME`.

A result is written to bench/results/<date>-<suite>-<gpu>.json and described by result.schema.json.
`bench.report_docs` writes the published figures from the results alone. A suite is a function that
takes the options and returns the result; SUITES is the table of them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.churn import summarise as summarise_churn
from bench.gang_figures import summarise as summarise_gangs
from bench.hook import summarise as summarise_starts
from bench.latency import summarise as summarise_requests
from bench.memory import judge as judge_memory
from bench.memory import longest_stretch
from bench.mirror import faults
from bench.overhead import summarise_report
from bench.parking import summarise as summarise_parking
from bench.progress import ProgressError, mean_abs_error_pp
from bench.provenance import ROOT, UNKNOWN
from bench.quota_measure import summarise as summarise_arm
from bench.report import WINDOWS, sampled_shares
from bench.restarts import summarise as summarise_pauses
from bench.suspension import summarise as summarise_moves

RESULTS = ROOT / "bench" / "results"
SCHEMA = pathlib.Path(__file__).with_name("result.schema.json")
MAX_BYTES = 300_000
"""Maximum size of a result, in bytes: all results stay in the repository forever."""

ROUNDING_PP = 0.05
"""Maximum difference between a figure from 10 ms samples and the one from stamps, in points."""

Suite = Callable[[argparse.Namespace], dict[str, Any]]


class ResultError(ValueError):
    """A run cannot be kept as a result."""


def read_json(path: pathlib.Path, runner: str = "bench.demo") -> dict[str, Any]:
    """Return the object in a JSON file that a run of `runner` has written."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ResultError(
            f"{path} is missing: run `python -m {runner}`, and pass the directory that"
            f" contains its {path.name} with --from"
        ) from None
    if not isinstance(found, dict):
        raise ResultError(f"{path} does not hold a JSON object")
    return found


def read_run(path: pathlib.Path, runner: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the object in a JSON file, and separately the description of the run."""
    report = read_json(path, runner)
    if not isinstance(report.get("run"), dict):
        raise ResultError(
            f"{path} is not from `python -m {runner}`: name its directory with --from"
        )
    return report, report.pop("run")


def check_samples(summary: Mapping[str, Any], samples: Mapping[str, Any]) -> None:
    """Raise ResultError unless the raw samples give the figures that the summary claims."""
    quota = {one["name"]: one["compute"] for one in summary["containers"]}
    for label, width in WINDOWS.items():
        again = mean_abs_error_pp(sampled_shares(samples, width), quota)
        claimed = summary["windows"][label]["mean_abs_error_pp"]
        if abs(again - claimed) > ROUNDING_PP:
            raise ResultError(
                f"the samples give {again:.3f} points in {label} windows, "
                f"but the report says {claimed:.3f}: they are not from the same run"
            )


def name_commit(run: dict[str, Any], commit: str | None) -> None:
    """Set the commit of a run that could not find it; raise ResultError if the run names another.

    A run of a changed tree names a commit that ends with `-dirty`, and stays recognizable as such.
    """
    if not commit:
        return
    if run["commit"] not in {UNKNOWN, commit}:
        raise ResultError(f"the run names its commit, {run['commit']}: leave out --commit")
    run["commit"] = commit


def shares(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a demo run: the shares delivered under quotas."""
    report = read_json(options.source / "report.json")
    samples = read_json(options.source / "progress.json")
    detail = report.pop("detail", {})
    run = detail.pop("run", None)
    if run is None:
        raise ResultError(
            "report.json does not say where the benchmark was run (detail.run):"
            " run the benchmark again"
        )
    name_commit(run, options.commit)
    gpu = report.pop("gpu")
    check_samples(report, samples)
    counters = {
        name: {
            "lookups": one["lookups"],
            **{key: one["devices"][0][key] for key in ("launches", "waits", "grants", "markers")},
        }
        for name, one in detail.pop("governor", {}).items()
        if one
    }
    return {
        "suite": "shares",
        **run,
        "gpu": gpu,
        "configuration": detail,
        "raw": {"progress": samples, "counters": counters},
        "summary": report,
    }


def mirror(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.mirror: a driver mirrored, verified and used."""
    report, run = read_run(options.source / "report.json", "bench.mirror")
    name_commit(run, options.commit)
    wrong = faults(report)
    if wrong:
        raise ResultError(f"the run failed: {', '.join(wrong)}")
    report["verify"].pop("path", None)  # it is specific to that machine
    containers = report["containers"]
    libraries = report["verify"]["libraries"]
    return {
        "suite": "mirror",
        **run,
        "gpu": {
            "kind": "nvidia",
            "name": containers["torch"]["device"],
            "driver": report["readelf"]["version"],
        },
        "configuration": {},
        "raw": report,
        "summary": {
            "files": report["readelf"]["files"],
            "names": report["refresh"]["names"],
            "bytes": report["refresh"]["bytes"],
            "first_s": statistics.median(report["refresh"]["first_s"]),
            "again_s": statistics.median(report["refresh"]["again_s"]),
            "verify_s": report["verify"]["seconds"],
            "loaded": sum(one["outcome"] == "loaded" for one in libraries),
            "libraries": len(libraries),
            "renderer": containers["graphics"]["egl"]["renderer"],
            "vulkan": containers["graphics"]["vulkan"]["devices"],
        },
    }


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.overhead: the cost of calls or steps."""
    report, run = read_run(options.source / "overhead.json", "bench.overhead")
    gpu, claimed = report.pop("gpu"), report.pop("summary")
    settings = report.pop("options")
    name_commit(run, options.commit)
    if claimed != summarise_report(report):
        raise ResultError("the samples do not give the figures that the report claims")
    return {
        "suite": "step" if "train" in report else "overhead",
        **run,
        "gpu": gpu,
        "configuration": settings,
        "raw": report,
        "summary": claimed,
    }


def programs(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.programs: programs alone and governed."""
    report, run = read_run(options.source / "programs.json", "bench.programs")
    name_commit(run, options.commit)
    ran = report.pop("programs", None)
    if not ran:
        raise ResultError("the run ended before its first program")
    return {
        "suite": "programs",
        **run,
        "gpu": report.pop("gpu"),
        "configuration": report,
        "raw": {"programs": ran},
        "summary": {
            "programs": [
                {
                    "name": one["name"],
                    "result": one["result"],
                    "differences": one["differences"],
                    "checks": len(one["governed"]["answer"].get("checks", {})),
                    "values": len(one["governed"]["answer"].get("values", {})),
                    **{key: one["seen"][key] for key in ("launches", "lookups", "memory_peak")},
                }
                for one in ran
            ]
        },
    }


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.memory: a memory quota under attack."""
    report, run = read_run(options.source / "memory.json", "bench.memory")
    gpu, claimed = report.pop("gpu"), report.pop("wrong")
    name_commit(run, options.commit)
    if claimed != judge_memory(report):
        raise ResultError("the samples do not give the faults that the report claims")
    most = report["limit"] + report["unattributed"] * report["processes"]
    used = [(at, value) for at, value, _ in report["samples"]]
    return {
        "suite": "memory",
        **run,
        "gpu": gpu,
        "configuration": {name: report[name] for name in ("limit", "processes")},
        "raw": report,
        "summary": {
            **{
                name: report["oom_stress"][name]
                for name in ("allocations", "refused", "killed", "left", "returned_ms")
            },
            "beyond": max(value for _, value in used) - most,
            "stretch_s": longest_stretch(used, most),
            "full": report["full"],
            "wrong": claimed,
        },
    }


def hook(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.hook: the cost of a container's start."""
    report, run = read_run(options.source / "hook.json", "bench.hook")
    name_commit(run, options.commit)
    claimed = report.pop("summary")
    if claimed != summarise_starts(report):
        raise ResultError("the starts do not give the costs that the report claims")
    return {
        "suite": "hook",
        **run,
        "gpu": {"kind": "simulated", "name": "Tidegate Simulated GPU", "driver": "simulated"},
        "configuration": {"rounds": min(len(taken["bare"]) for taken in report["ways"].values())},
        "raw": report,
        "summary": claimed,
    }


JUDGED = (
    "outcome", "result", "reason", "host", "paid", "late", "waited", "gpu_us", "process", "device",
    "returned", "after",
)  # fmt: skip


def judge(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of tests.gpu.coverage_probe: every function of cuda.h."""
    from tests.gpu.coverage_probe import judge_call, summarise

    report, run = read_run(options.source / "report.json", "tests.gpu.coverage_probe")
    name_commit(run, options.commit)
    # The verdicts are computed again from the raw data, by the current rules.
    verdicts = [
        judge_call(
            (row["native"]["name"], row["native"].get("variant", "")),
            row["native"],
            row["governed"],
            report.get("quota", 64 << 30),
        )
        for row in report["rows"]
    ]
    return {
        "suite": "judge",
        **run,
        "gpu": report["gpu"],
        "configuration": {},
        "raw": {
            # For both runs of a call: its answer, GPU time, memory, and the counters that changed.
            "rows": [
                [
                    row["native"]["name"] + " " + row["native"].get("variant", ""),
                    *(
                        {key: one[key] for key in JUDGED if key in one and one[key] is not False}
                        for one in row.values()
                    ),
                ]
                for row in report["rows"]
            ],
        },
        "summary": {"functions": report["functions"], **summarise(verdicts)},
    }


def quota(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.quota: GPU time in many arrangements."""
    report, run = read_run(options.source / "quota.json", "bench.quota")
    gpu, claimed = report.pop("gpu"), report.pop("summary")
    name_commit(run, options.commit)
    arms = report["arms"]
    if not arms or claimed != {name: summarise_arm(arm) for name, arm in arms.items()}:
        raise ResultError("the samples do not give the figures that the report claims")
    return {
        "suite": "quota",
        **run,
        "gpu": gpu,
        "configuration": {
            key: report[key]
            for key in ("generation", "suite", "quantum_ms")
            if report.get(key) not in {None, ""}
        },
        "raw": {"arms": arms},
        "summary": claimed,
    }


def gangs(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.gangs: containers with several GPUs."""
    report, run = read_run(options.source / "gangs.json", "bench.gangs")
    parts = report["parts"]
    name_commit(run, options.commit)
    if report["summary"] != summarise_gangs(parts):
        raise ResultError("the samples do not give the figures that the report claims")
    logs = ("outputs", "trace")
    return {
        "suite": "gangs",
        **run,
        "gpu": report["gpu"],
        "configuration": {"generation": report["generation"]},
        "raw": {
            "parts": {
                name: {key: value for key, value in part.items() if key not in logs}
                for name, part in parts.items()
            }
        },
        "summary": report["summary"],
    }


def keep_report(
    options: argparse.Namespace,
    suite: str,
    summarise: Callable[[dict[str, Any]], dict[str, Any]],
    configuration: Sequence[str],
) -> dict[str, Any]:
    """Return the result of a suite whose report contains all raw data and a summary."""
    report, run = read_run(options.source / f"{suite}.json", f"bench.{suite}")
    gpu, claimed = report.pop("gpu"), report.pop("summary")
    name_commit(run, options.commit)
    if claimed != summarise(report):
        raise ResultError("the raw data does not give the figures that the report claims")
    return {
        "suite": suite,
        **run,
        "gpu": gpu,
        "configuration": {key: report[key] for key in configuration if key in report},
        "raw": report,
        "summary": claimed,
    }


def latency(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.latency: requests alongside endless work."""
    configuration = ("unit_us", "units", "job", "service", "request_us")
    return keep_report(options, "latency", summarise_requests, configuration)


def restarts(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.restarts: a governor that is killed."""
    return keep_report(options, "restarts", summarise_pauses, ("scheduling", "shares"))


def parking(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.parking: models that take turns on a GPU."""
    result = keep_report(options, "parking", summarise_parking, ("settings", "held", "program"))
    if result["raw"]["wrong"]:  # the published page says that all contents were right
        raise ResultError(f"the run found faults: {result['raw']['wrong'][0]}")
    return result


def suspension(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.suspension: a container leaves the GPU."""
    return keep_report(options, "suspension", summarise_moves, ("scheduling", "held"))


def churn(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run of bench.churn: containers that come and go."""
    return keep_report(options, "churn", summarise_churn, ("scheduling", "seed", "n_kills"))


SUITES: dict[str, Suite] = {
    "churn": churn,
    "gangs": gangs,
    "hook": hook,
    "judge": judge,
    "latency": latency,
    "memory": memory,
    "mirror": mirror,
    "overhead": overhead,
    "parking": parking,
    "programs": programs,
    "restarts": restarts,
    "quota": quota,
    "shares": shares,
    "suspension": suspension,
}


def validate(result: Mapping[str, Any]) -> None:
    """Raise jsonschema.ValidationError unless the result conforms to its schema."""
    import jsonschema

    jsonschema.validate(result, json.loads(SCHEMA.read_text()))


def result_name(result: Mapping[str, Any]) -> str:
    """Return <date>-<suite>-<gpu>.json, with the suite of bench.quota if there is one."""
    gpu = "simulated" if result["gpu"]["kind"] == "simulated" else result["gpu"]["name"]
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    suite = "-".join(filter(None, (result["suite"], result["configuration"].get("suite"))))
    return f"{result['date'][:10]}-{suite}-{slug}.json"


def write_result(result: Mapping[str, Any], out: pathlib.Path) -> None:
    """Write a result to a new file; raise ResultError if it exists: a result is never replaced."""
    validate(result)
    text = json.dumps(result, separators=(",", ":")) + "\n"
    if len(text) > MAX_BYTES:
        raise ResultError(
            f"the result is {len(text)} bytes, above {MAX_BYTES}: make the run shorter"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with out.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ResultError(f"{out} exists: choose another name with --out") from None


def main(arguments: list[str] | None = None) -> int:
    """Keep the result of a run that has ended; return 1 if that is impossible."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("--suite", choices=sorted(SUITES), required=True, help="what was run")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="the file to write (bench/results/<date>-<suite>-<gpu>.json)",
    )
    parser.add_argument(
        "--from", dest="source", type=pathlib.Path, default=ROOT / "build" / "demo",
        metavar="DIR", help="the directory that the run wrote (build/demo); nothing is run again",
    )  # fmt: skip
    parser.add_argument("--commit", help="commit of a run on a copy of the tree without git")
    options = parser.parse_args(arguments)
    try:
        result = SUITES[options.suite](options)
        out = options.out or RESULTS / result_name(result)
        write_result(result, out)
    except (ResultError, ProgressError) as error:
        print(f"bench.run: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
