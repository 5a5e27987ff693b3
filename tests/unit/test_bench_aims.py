"""The table of aims: the newest result of a real GPU counts, and a missed aim is reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.provenance import ROOT
from bench.report_aims import AIMS, Aim, rows_of
from bench.report_docs import results_below

AIM = Aim("a sum", "quota", lambda result: result["summary"].get("x", {}).get("sum"), least=97)


def result(
    date: str, total: float | None, kind: str = "nvidia", suite: str = "quota"
) -> dict[str, Any]:
    summary = {} if total is None else {"x": {"sum": total}}
    return {"suite": suite, "date": date, "gpu": {"kind": kind}, "summary": summary, "raw": {}}


@pytest.mark.parametrize(
    ("results", "row"),
    [
        ([], ("not measured", "", "")),
        ([result("1", 97.0)], ("97.00", "", "yes")),
        ([result("1", 96.99)], ("96.99", "", "**no**")),
        ([result("2", 96.0), result("1", 98.0)], ("96.00", "96.00 to 98.00 in 2", "**no**")),
        ([result("1", 96.0), result("2", 98.0)], ("98.00", "96.00 to 98.00 in 2", "yes")),
        ([result("1", 99.0, "simulated")], ("not measured", "", "")),
        ([result("1", 99.0, suite="step")], ("not measured", "", "")),
        ([result("1", 98.0), result("2", None)], ("98.00", "", "yes")),
    ],
)
def test_the_newest_result_of_a_real_gpu_counts(
    results: list[dict[str, Any]], row: tuple[str, ...]
) -> None:
    named = {str(i): one for i, one in enumerate(results)}
    assert list(rows_of(named, [AIM])) == [("a sum", "at least 97", *row)]


def test_every_aim_has_one_bound_and_most_are_measured_by_the_kept_results() -> None:
    found = {path.stem: json.loads(path.read_text()) for path in results_below(ROOT)}
    assert all((aim.most is None) != (aim.least is None) for aim in AIMS)
    measured = [row for row in rows_of(found) if row[2] != "not measured"]
    assert len(measured) > 0.9 * len(AIMS)
    assert all(row[3] == "" or " in " in row[3] for row in measured)
