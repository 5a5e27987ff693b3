"""The cost of a container's start as a kept result: its figures follow from the measured starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import hook, report_docs, run
from tests.container import start_times

STARTS = {
    "bare": [10.0, 12.0, 11.0],
    "trivial": [11.0, 13.0, 12.0],
    "asks-not": [24.0, 26.0, 80.0],
    "governed": [40.0, 42.0, 41.5],
    "wrapper-asks-not": [30.0, 31.0, 32.0],
    "wrapper-governed": [70.0, 72.0, 71.0],
}


@pytest.fixture
def report() -> dict[str, Any]:
    machine = {"processor": "p", "cores": 2, "memory": 1, "kernel": "k"}
    found: dict[str, Any] = {
        "ways": {"runc": STARTS},
        "crowd": {"runc": {"ms": [*range(1, 101)], "failures": ["x"]}},
        "run": {"command": "c", "date": "2026-01-02T00:00:00+00:00", "commit": "0" * 40, "machine": machine},
    }  # fmt: skip
    return found | {"summary": hook.summarise(found)}


def keep(directory: Path, report: dict[str, Any]) -> dict[str, Any]:
    (directory / "hook.json").write_text(json.dumps(report))
    out = directory / "result.json"
    assert run.main(["--suite", "hook", "--from", str(directory), "--out", str(out)]) == 0
    kept: dict[str, Any] = json.loads(out.read_text())
    return kept


def test_the_cost_of_a_start_is_the_median_of_differences(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    kept = keep(tmp_path, report)
    found = kept["summary"]["runc"]
    assert found["added_ms"]["asks-not"] == 14.0
    assert found["added_ms"]["governed"] == 30.0
    assert (found["crowd_p50_ms"], found["crowd_p99_ms"], found["failures"]) == (50.5, 99, 1)
    line = "| runc, 11.0 ms | 1.0 | 14.0 | 30.0 | 20.0 | 60.0 | 50 / 99 | 1 |"
    assert line in report_docs.build_page({"x": kept}).text


def test_a_figure_that_does_not_follow_from_the_starts_is_refused(
    tmp_path: Path, report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report["summary"]["runc"]["added_ms"]["governed"] = 29.0
    (tmp_path / "hook.json").write_text(json.dumps(report))
    words = ["--suite", "hook", "--from", str(tmp_path), "--out", str(tmp_path / "x.json")]
    assert run.main(words) != 0
    assert "do not give" in capsys.readouterr().err


def test_the_page_has_the_cost_of_a_start_with_each_engine() -> None:
    ways = {"native": [100.0, 102.0, 98.0], "ungoverned": [101.0, 103.0, 99.0]}
    summary = start_times.summarise({"docker": {**ways, "governed": [120.0, 130.0, 119.0]}})
    assert summary["docker"]["native_ms"] == 100.0
    assert (summary["docker"]["ungoverned_adds_ms"], summary["docker"]["ungoverned_error_ms"]) == (1.0, 0.0)  # fmt: skip
    # The starts add 20, 28 and 21 ms. The figures are the median, and 1.25 standard deviations over
    # the square root of three.
    assert (summary["docker"]["governed_adds_ms"], summary["docker"]["governed_error_ms"]) == (21.0, 3.1)  # fmt: skip
    kept = {
        "suite": "starts", "command": "x", "date": "2026-01-02", "commit": "0" * 40, "summary": summary,
        "machine": {"processor": "P", "cores": 2, "memory": 1 << 30, "kernel": "K"},
        "gpu": {"kind": "simulated", "name": "G", "driver": "simulated"}, "configuration": {"engines": {"docker": "Docker 1"}},
    }  # fmt: skip
    line = "| docker: Docker 1 | 100 | 1.0 ± 0.0 | 21.0 ± 3.1 |"
    assert line in report_docs.build_page({"2026-01-02-starts": kept}).text


def test_start_times_of_one_round_are_refused_before_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        start_times.main(["--rounds", "1"])
    assert "--rounds is 2 or more" in capsys.readouterr().err
