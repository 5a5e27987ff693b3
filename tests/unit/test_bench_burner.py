"""The burner's forms of work on the simulated GPU: each form stamps the end of each unit, in order."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.machine import Simulated
from bench.node import last_json
from bench.progress import read_stamps
from tests.unit.test_simgpu_processes import LEAVES_NONE

MS = 1_000_000


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, build_dir: Path) -> Iterator[Simulated]:
    machine = Simulated(tmp_path_factory.mktemp("burner"), build_dir)
    yield machine
    machine.close()


def burn(machine: Simulated, job: str, *options: str) -> tuple[list[int], dict[str, Any]]:
    """Return when the units ended, and the burner's final report."""
    out = machine.work / f"{job}.bin"
    done = subprocess.run(
        [*machine.command(job, inside=False), "--out", str(out), *options],
        env={**os.environ, **machine.environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [stamp.time for stamp in read_stamps(out)], last_json(done.stdout)


def median_gap(ends: list[int]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


@pytest.mark.parametrize(
    ("form", "unit_us", "stamp_us"),
    [
        ("burn", 500, 500),
        ("cooperative", 500, 500),
        ("graph", 500, 500),
        ("sweep", 500, 500),
        # There is a stamp for each 64th of a unit.
        ("persistent", 20_000, 312),
        # These forms wait for the host, which determines how long a unit takes.
        ("sync", 500, None),
        ("tiny", 500, None),
        ("copy", 500, None),
    ],
)
def test_each_form_stamps_its_units(
    machine: Simulated, form: str, unit_us: int, stamp_us: int | None
) -> None:
    runs: list[tuple[int, float]] = []
    for _ in range(3):  # on a busy machine there are few units, or the calibration is off
        ends, told = burn(machine, f"burner-{unit_us}-{form}", "--seconds", "0.3")
        assert told["units"] == len(ends)
        assert ends == sorted(ends)
        took_us = median_gap(ends) / 1000 if len(ends) > 10 else 0.0
        if took_us and (stamp_us is None or 0.3 * stamp_us < took_us < 1.3 * stamp_us):
            return
        runs.append((len(ends), took_us))
    pytest.fail(f"units, and their median duration in us: {runs}")


def test_a_given_number_of_iterations_is_done(machine: Simulated) -> None:
    """For a persistent kernel, the number of iterations is that of one stretch of work."""
    job = "burner-20000-persistent"
    runs: list[float] = []
    for _ in range(3):  # on a busy machine there may be gaps between the stretches
        ends, told = burn(machine, job, "--seconds", "0.2", "--iterations", "250000")
        assert told["iterations"] == 250_000
        runs.append(median_gap(ends) if len(ends) > 1 else 0.0)
        if runs[-1] == 250_000:
            break
    assert runs[-1] == 250_000, runs


def test_bursts_are_as_long_as_the_duty_requires(machine: Simulated) -> None:
    """The duty is half of the time. The GPU's clock is this machine's clock, so the measurements
    agree.
    """
    ratios: list[float] = []
    for _ in range(3):
        # The first bursts take 0.5, 0.3 and 1 s. A busy machine may begin fewer than four.
        ends, told = burn(
            machine, "burner-500-burn", "--seconds", "5", "--bursts", "4", "--duty", "50",
            "--iterations", "500000",
        )  # fmt: skip
        assert abs(told["clock_ns"]) < 50 * MS
        ratios += [
            (ends[again] - ends[end]) / (ends[end] - ends[begin])
            for (begin, end), (again, _) in itertools.pairwise(told["bursts"])
            if begin < end
        ]
        if len(ratios) >= 3:
            break
    assert len(ratios) >= 3
    assert statistics.median(ratios) == pytest.approx(1, rel=0.5)


@pytest.mark.parametrize(
    "options",
    [
        ("--allocate", "4096"),
        ("--requests", "10000", "--units", "1", "--iterations", "1000", "--seconds", "0.1"),
    ],
)
def test_the_first_process_ends_after_the_others(
    machine: Simulated, options: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_NONE, machine.build / "burner", "--processes", "4", *options],
        env={**os.environ, **machine.environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_form_is_refused(machine: Simulated) -> None:
    done = subprocess.run(
        [machine.build / "burner", "--form", "dance"],
        env={**os.environ, **machine.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert (
        done.stderr == "burner: unknown form dance; see the comment at the top of bench/burner.c\n"
    )
