#!/usr/bin/env python3
"""Tests cuda-gdb: it stops inside a kernel, prints a variable there, and continues to the end."""

from __future__ import annotations

import re

from cuda_tool import WORDS, check_answer, compile_steps, find_tool, run_tool
from program import ProgramCheck, run

SCRIPT = ("set pagination off", "break step", "run", "print n", "print threadIdx", "delete", "cont")


def body(program: ProgramCheck) -> None:
    tool = find_tool("cuda-gdb")
    steps = str(compile_steps(program, "-g", "-G"))
    words = [word for line in SCRIPT for word in ("-ex", line)]
    done = run_tool([tool, "-nx", "-batch", *words, "--args", steps, str(WORDS)])
    program.value("printed", re.findall(r"^\$\d+ = .*", done.stdout, re.MULTILINE))
    # A breakpoint in a kernel also has a location on the host, so it is 1.1, 1.2 and so on.
    stops = re.findall(r"hit Breakpoint 1[.\d]*, step", done.stdout)
    program.check("the debugger stops inside the kernel", len(stops) == 1, done.stdout)
    program.check("it prints an argument", f"$1 = {WORDS}" in done.stdout, done.stdout)
    program.check("the program ends normally", "exited normally" in done.stdout, done.stdout)
    check_answer(program, done.stdout)


if __name__ == "__main__":
    run(body)
