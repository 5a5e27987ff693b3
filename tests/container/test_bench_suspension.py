"""`python -m bench.suspension` on the simulated GPU, shortened."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import run, suspension
from bench.machine import ROOT


@pytest.mark.slow
def test_the_contents_survive_and_faults_are_found(
    require: Callable[..., None], build_dir: Path, tmp_path: Path
) -> None:
    require("runc")
    out, kept = tmp_path / "out", tmp_path / "kept.json"
    options = ["--simulated", "--held-mib", "256", "--rounds", "3", "--build", str(build_dir)]
    # A separate process, because the simulated driver's NVML keeps the first GPU that a process
    # opens.
    command = [sys.executable, "-m", "bench.suspension", *options, "--output", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    report = json.loads((out / "suspension.json").read_text())
    assert report["holder"]["wrong"] == 0
    assert len(report["rounds"]) == len(report["native"]) == 3
    assert run.main(["--suite", "suspension", "--from", str(out), "--out", str(kept)]) == 0

    wrong = copy.deepcopy(report)
    wrong["holder"]["wrong"] = 1
    second = wrong["rounds"][1]
    second["during"]["used"] = second["before"]["used"]
    middle = (second["suspend"]["ended"] + second["resume"]["began"]) / 2e9
    wrong["turns"].append([middle, 1.0, 1.0])
    assert len(suspension.judge(wrong)) == 3
