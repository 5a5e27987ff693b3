#!/usr/bin/env python3
"""Tests Nsight Compute (ncu): it reads the hardware counters of a kernel."""

from __future__ import annotations

import csv

from cuda_tool import WORDS, compile_steps, find_tool, run_tool
from program import NotHereError, ProgramCheck, run

METRICS = ("smsp__inst_executed.sum", "launch__grid_size", "launch__block_size")


def body(program: ProgramCheck) -> None:
    tool = find_tool("ncu")
    steps = str(compile_steps(program))
    done = run_tool(
        [
            tool, "--clock-control", "none", "--csv", "--page", "raw",
            "--metrics", ",".join(METRICS), steps, str(WORDS),
        ]
    )  # fmt: skip
    if "ERR_NVGPUCTRPERM" in done.stdout:
        raise NotHereError("this process may not read the GPU's counters")
    program.check("ncu exits with status 0", done.returncode == 0, done.stdout)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    # The first row contains the units.
    rows = list(csv.DictReader(lines))[1:]
    program.check("the kernel is in the report", len(rows) == 1, done.stdout)
    for metric in METRICS:
        # ncu groups digits according to the locale.
        program.value(metric, [row.get(metric, "").replace(",", "") for row in rows])


if __name__ == "__main__":
    run(body)
