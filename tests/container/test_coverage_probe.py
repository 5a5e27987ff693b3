"""Run the coverage probe (tests.gpu.coverage_probe) in a container on the simulated GPU.

The simulated driver has only some of the functions.
"""

import json

import pytest

from tests.gpu import coverage_probe


@pytest.mark.usefixtures("build_dir")
def test_no_function_bypasses_the_control_library(tmp_path, require, capsys) -> None:
    require("runc", "gcc")
    output = tmp_path / "coverage_probe"
    status = coverage_probe.main(["--simulated", "--output", str(output)])
    printed = capsys.readouterr().out
    report = json.loads((output / "report.json").read_text())
    assert status == 0, printed
    assert report["failed"] == {}
    assert report["proven"] >= 220
    governed = [row["governed"] for row in report["rows"] if row["governed"]["outcome"] == "ran"]
    assert any(row["after"].get("memory") for row in governed)
