"""`python -m bench.parking` on the simulated GPU, shortened."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import parking, run
from bench.machine import ROOT


@pytest.mark.slow
def test_models_take_turns_and_faults_are_found(
    require: Callable[..., None], build_dir: Path, tmp_path: Path
) -> None:
    require("runc")
    out, kept = tmp_path / "out", tmp_path / "kept.json"
    # Of the GPU's 16 GiB, 3 GiB are granted 1.7 times.
    options = [
        "--simulated", "--models", "3", "--held-mib", "256", "--pair-mib", "1280",
        "--reserve-mib", "13312", "--host-mib", "8192", "--rounds", "2", "--seconds", "25",
        "--build", str(build_dir),
    ]  # fmt: skip
    # A separate process, because the simulated driver's NVML keeps the first GPU that a process
    # opens.
    command = [sys.executable, "-m", "bench.parking", *options, "--output", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=250)
    report = json.loads((out / "parking.json").read_text())
    assert parking.judge(report) == []
    assert report["summary"]["came"] >= 4
    assert run.main(["--suite", "parking", "--from", str(out), "--out", str(kept)]) == 0

    wrong = copy.deepcopy(report)
    wrong["models"]["asked"][0]["wrong"] = 1
    wrong["models"]["asked"][1]["after"]["used"] = 2 << 30
    wrong["pair"]["ends"][1]["wrong"] = 3
    wrong["pair"]["together"][0] = 0
    assert len(parking.judge(wrong)) == 4

    (out / "parking.json").write_text(json.dumps({**report, "wrong": ["a fault"]}))
    kept.unlink()
    assert run.main(["--suite", "parking", "--from", str(out), "--out", str(kept)]) == 1
    assert not kept.exists()


@pytest.mark.slow
def test_processes_are_killed_while_memory_moves_and_faults_are_found(
    require: Callable[..., None], build_dir: Path, tmp_path: Path
) -> None:
    require("runc")
    out = tmp_path / "out"
    options = [
        "--simulated", "--parts", "deaths", "--pair-mib", "2048", "--reserve-mib", "13312",
        "--host-mib", "16384", "--seconds", "30", "--kill-every", "300", "--build", str(build_dir),
    ]  # fmt: skip
    command = [sys.executable, "-m", "bench.parking", *options, "--output", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, check=False, timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "parking.json").read_text())
    assert parking.judge(report) == []
    assert report["summary"]["deaths"]["killed"] > 20

    wrong = copy.deepcopy(report)
    deaths = wrong["deaths"]
    deaths["stress"][0].update(wrong=2, left=-1)
    deaths["stress"][1]["refused"] = 0
    deaths["samples"][1] = [deaths["quota"] + 1] * len(deaths["times"])
    deaths["parking"] = [{**one, "residency": "resident"} for one in deaths["parking"]]
    deaths.update(left_gpu=1 << 30, left_host=1 << 30, listed=1)
    assert len(parking.judge(wrong)) == 8
