#!/usr/bin/env python3
"""Tests compute-sanitizer: it reports a write beyond an allocation, and no error otherwise."""

from __future__ import annotations

import re

from cuda_tool import WORDS, check_answer, compile_steps, find_tool, run_tool
from program import ProgramCheck, run

FOUND = 3
"""Exit status that compute-sanitizer is told to use if it finds errors."""


def body(program: ProgramCheck) -> None:
    tool = find_tool("compute-sanitizer")
    steps = str(compile_steps(program, "-lineinfo"))
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), steps, str(WORDS)]
    clean = run_tool(command)
    program.check("a correct program has no error", clean.returncode == 0, clean.stdout)
    program.value("errors of a correct program", errors_of(clean.stdout))
    check_answer(program, clean.stdout)
    wrong = run_tool([*command, "beyond"])
    program.check("a wrong program is reported", wrong.returncode == FOUND, wrong.stdout)
    program.value("invalid accesses", sorted(set(re.findall(r"Invalid .*", wrong.stdout))))
    program.value("places", sorted(set(re.findall(r"steps\.cu:\d+", wrong.stdout))))


def errors_of(output: str) -> str:
    """Return the number of errors in the summary, or the last line if there is no summary."""
    found = re.search(r"ERROR SUMMARY: (\d+) error", output)
    return found[1] if found else output.strip().rpartition("\n")[2]


if __name__ == "__main__":
    run(body)
