#!/usr/bin/env python3
"""Tests a CUDA C++ program with a static runtime: the driver is its only CUDA library."""

from __future__ import annotations

import json
import subprocess

from program import NotHereError, ProgramCheck, run

ROUNDS = 20


def body(program: ProgramCheck) -> None:
    compiled = program.tool("staticrt")
    if compiled is None:
        raise NotHereError("there was no nvcc to compile staticrt.cu")
    child = program.until_end.enter_context(
        subprocess.Popen(
            [str(compiled), str(ROUNDS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    )
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"staticrt printed nothing and ended with status {child.wait()}")
    answer = json.loads(line)
    total = answer.pop("total")
    program.check(
        "total memory equals the quota", not program.governed or total == program.quota, total
    )
    program.check(
        "each kernel added one", answer["smallest"] == answer["largest"] == ROUNDS, answer
    )
    program.check(
        "excess memory is refused", answer["too_much"] == "cudaErrorMemoryAllocation", answer
    )
    program.value("runtime", str(answer["runtime"]))
    program.launches = ROUNDS


if __name__ == "__main__":
    run(body)
