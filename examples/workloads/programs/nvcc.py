#!/usr/bin/env python3
"""Tests a build in the container: nvcc compiles and links with libcuda, and the program runs."""

from __future__ import annotations

from cuda_tool import WORDS, check_answer, compile_steps, run_tool
from program import ProgramCheck, run


def body(program: ProgramCheck) -> None:
    done = run_tool([str(compile_steps(program)), str(WORDS)])
    program.check("the program ends with 0", done.returncode == 0, done.stdout)
    check_answer(program, done.stdout)


if __name__ == "__main__":
    run(body)
