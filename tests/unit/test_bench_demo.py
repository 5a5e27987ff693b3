"""The demo warns when other programs take the processors that it needs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.demo import load_line, processors_taken


def test_the_processors_that_others_use_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 1 1 1\n")

    def sleep(_: float) -> None:
        # Three quarters of the time since the first reading were used. Waiting for a disk counts as
        # idle.
        stat.write_text("cpu  160 5 60 820 55 0 0 0 0 0\n")

    monkeypatch.setattr("bench.demo.time", SimpleNamespace(sleep=sleep))
    assert processors_taken(0.3, stat) == 0.75 * (os.cpu_count() or 1)


def test_the_load_is_0_if_no_time_has_passed(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 50 0 0 0 0 0\n")
    assert processors_taken(0, stat) == 0.0


def test_a_busy_machine_is_reported() -> None:
    assert load_line(0.0) == ""
    assert "processors busy: shares may be off" in load_line(0.9 * (os.cpu_count() or 1))
