"""A memory quota under attack, in a container on the simulated GPU: see bench/memory.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import memory
from bench.machine import ROOT


def test_processes_that_compete_for_memory_do_not_exceed_the_quota(
    build_dir: Path, tmp_path: Path, require: Callable[..., None]
) -> None:
    require("runc")
    for name in ("first", "second", "third"):
        out = tmp_path / name
        # In a process of its own, because NVML stays attached to the first GPU that it finds.
        command = [sys.executable, "-m", "bench.memory", "--simulated", "--seconds", "4"]
        arguments = ["--output", str(out), "--build", str(build_dir)]
        done = subprocess.run([*command, *arguments], cwd=ROOT, check=False)
        report = json.loads((out / "memory.json").read_text())
        log = (out / "governor.log").read_text()
        # Samples are from different moments; whatever they show, no process was accused of a
        # violation.
        assert '"event": "violation"' not in log
        # How soon the memory of a killed process is available is measured only once in a run, and a
        # busy machine may delay that. Any other fault ends the test at once.
        is_late = report["oom_stress"]["returned_ms"] > memory.RETURN_MS
        if len(report["wrong"]) != 1 or not is_late:
            break
    assert done.returncode == 0, report["wrong"]
    assert report["oom_stress"]["killed"] > 0
    # At most a granule is left, and the driver's NVML reports that a full process has the whole
    # quota.
    assert report["limit"] - memory.GRANULE <= report["full"] <= report["limit"]
    assert "process-registered" in log


GOOD = {
    "limit": 100 << 20,
    "processes": 2,
    "unattributed": 1 << 20,
    "samples": [[0.0, 0, 0], [1.0, 102 << 20, 102 << 20], [2.0, 100 << 20, 99 << 20]],
    "full": 99 << 20,
    "after": 0,
    "oom_stress": {
        "wrong": 0, "call": "", "error": 0, "refused": 5, "left": 1 << 20, "total": 100 << 20,
        "returned_ms": 99.0,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, []),
        ({"samples": [[0.0, 103 << 20, 0], [1.5, 103 << 20, 0]]}, ["was used for 1.50 s"]),
        ({"samples": [[0.0, 103 << 20, 0], [0.5, 0, 0], [1.5, 103 << 20, 0]]}, []),
        ({"full": 101 << 20}, ["a process that filled its quota holds 105906176 bytes"]),
        ({"full": 97 << 20}, ["a process that filled its quota holds 101711872 bytes"]),
        ({"after": 1}, ["1 bytes were still charged at the end"]),
        ({"oom_stress": {"wrong": 2, "call": "cuMemMap", "error": 999}}, ["first cuMemMap: 999"]),
        ({"oom_stress": {"refused": 0}}, ["the quota was not reached"]),
        ({"oom_stress": {"left": 3 << 20}}, ["3145728 bytes were left"]),
        ({"oom_stress": {"total": 1}}, ["a total of 1 bytes"]),
        ({"oom_stress": {"returned_ms": 100.1}}, ["available again only after 100.1 ms"]),
    ],
)
def test_each_fault_of_a_run_is_reported(change: dict, says: list[str]) -> None:
    counts = {**GOOD["oom_stress"], **change.get("oom_stress", {})}
    wrong = memory.judge({**GOOD, **change, "oom_stress": counts})
    assert len(wrong) == len(says)
    assert all(part in line for part, line in zip(says, wrong, strict=True))
