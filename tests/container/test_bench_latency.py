"""`python -m bench.latency` on the simulated GPU, shortened: every arm serves the same requests. No
test asserts how fast they are served.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench import latency, run


@pytest.mark.slow
def test_every_arm_serves_the_same_requests(
    require, build_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require("runc")
    options = ["--simulated", "--seconds", "1", "--mean-us", "20000", "--jobs", "2"]
    assert (
        latency.main([*options, "--build", str(build_dir), "--output", str(tmp_path / "out")]) == 0
    )
    report = json.loads((tmp_path / "out/latency.json").read_text())
    assert [arm["arm"] for arm in report["arms"]] == [
        way.name for way in (*latency.ALONE, *latency.BESIDE)
    ]
    assert len({len(arm["requests_ms"]) for arm in report["arms"]}) == 1
    # On the simulated GPU an iteration takes 1 ns. The number of iterations in 0.1 ms is measured
    # at the start.
    least_ms = latency.UNITS * int(report["iterations"][latency.SERVICE]) / 1e6
    for arm in report["arms"]:
        assert min(arm["requests_ms"]) >= least_ms
        assert all(units > 0 for units in arm["units_per_s"])
    kept = tmp_path / "kept.json"
    assert (
        run.main(["--suite", "latency", "--from", str(tmp_path / "out"), "--out", str(kept)]) == 0
    )
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 7  # including the path of the kept result
    assert "= " in rows[2]
    assert not list(Path("/dev/shm").glob(f"tidegate-simgpu-{os.getpid()}"))


@pytest.mark.slow
def test_several_services_share_the_requests(require, build_dir: Path, tmp_path: Path) -> None:
    require("runc")
    options = ["--simulated", "--seconds", "1", "--mean-us", "10000", "--jobs", "1"]
    options += ["--ways", "alone", "hardware", "--services", "1", "3"]
    out = tmp_path / "out"
    assert latency.main([*options, "--build", str(build_dir), "--output", str(out)]) == 0
    report = json.loads((out / "latency.json").read_text())
    assert list(report["summary"]) == [
        "every-10000us-0-jobs-alone",
        "every-10000us-1-jobs-hardware",
        "every-10000us-0-jobs-alone-3-services",
        "every-10000us-1-jobs-hardware-3-services",
    ]
    n = [len(arm["requests_ms"]) for arm in report["arms"]]
    assert n[0] == n[1]
    assert n[2] == n[3]
    assert 0.5 * n[0] < n[2] < 2 * n[0]


@pytest.mark.slow
def test_each_requested_guarantee_has_an_arm(require, build_dir: Path, tmp_path: Path) -> None:
    require("runc")
    options = ["--simulated", "--seconds", "0.5", "--mean-us", "20000", "--jobs", "1"]
    options += ["--ways", "alone", "native", "hardware", "--guarantees", "50", "20"]
    out = tmp_path / "out"
    assert latency.main([*options, "--build", str(build_dir), "--output", str(out)]) == 0
    report = json.loads((out / "latency.json").read_text())
    assert list(report["summary"]) == [
        "every-20000us-0-jobs-alone",
        "every-20000us-1-jobs-native",
        "every-20000us-1-jobs-hardware-50",
        "every-20000us-1-jobs-hardware-20",
    ]
