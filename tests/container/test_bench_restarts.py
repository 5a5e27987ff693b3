"""`python -m bench.restarts` on the simulated GPU, shortened. No test asserts how long a pause is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import restarts, run


@pytest.mark.slow
def test_the_pauses_after_each_kill_are_kept(require, build_dir: Path, tmp_path: Path) -> None:
    require("runc")
    out, kept = tmp_path / "out", tmp_path / "kept.json"
    options = ["--simulated", "--kills", "2", "--build", str(build_dir), "--output", str(out)]
    assert restarts.main(options) == 0
    report = json.loads((out / "restarts.json").read_text())
    assert len(report["kills"]) == 2
    assert all(len(kill["pauses_ms"]) == len(restarts.SHARES) for kill in report["kills"])
    assert run.main(["--suite", "restarts", "--from", str(out), "--out", str(kept)]) == 0
    assert json.loads(kept.read_text())["summary"] == report["summary"]


def test_a_pause_that_extends_beyond_the_interval_counts_in_full() -> None:
    ms = 1_000_000
    times = [one * ms for one in (0, 10, 60, 70, 80, 200)]
    assert restarts.longest_gap_ms(times, 65 * ms, 75 * ms) == 10
    assert restarts.longest_gap_ms(times, 20 * ms, 75 * ms) == 50
    assert restarts.longest_gap_ms(times, 75 * ms, 100 * ms) == 120
