"""Common code for the programs that run one of CUDA's tools on steps.cu."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from program import NotHereError, ProgramCheck

CUDA = "/usr/local/cuda/bin"
"""Where the tools are if they are not on the PATH."""

WORDS = 4096
"""Number of words that the kernel in steps.cu increments."""

SECONDS = 90.0


def find_tool(name: str) -> str:
    """Return the path of a tool; raise NotHereError if it is not installed."""
    found = shutil.which(name) or shutil.which(f"{CUDA}/{name}")
    if found is None:
        raise NotHereError(f"{name} is not installed")
    return found


def compile_steps(program: ProgramCheck, *options: str) -> Path:
    """Compile steps.cu for the machine's GPU, against libcuda, and return the program's path."""
    compiler = find_tool("nvcc")
    directory = Path(program.until_end.enter_context(tempfile.TemporaryDirectory()))
    made = directory / "steps"
    source = Path(__file__).with_name("steps.cu")
    done = run_tool([compiler, "-arch=native", *options, "-o", str(made), str(source), "-lcuda"])
    program.check("nvcc compiles and links with libcuda", done.returncode == 0, done.stdout)
    return made


def run_tool(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; `stdout` of the result has its standard output and standard error."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def answer_of(lines: Iterable[str]) -> dict[str, Any]:
    """Return the JSON object that `steps` printed, from a tool's output; empty if there is none."""
    for line in lines:
        if line.startswith('{"sum": '):
            return dict(json.loads(line))
    return {}


def check_answer(program: ProgramCheck, output: str) -> None:
    """Check the sum, and that the program sees the quota as the GPU's memory."""
    answer = answer_of(output.splitlines())
    program.check("the kernel added one to each word", answer.get("sum") == WORDS, output)
    program.check(
        "total memory equals the quota",
        not program.governed or answer.get("total") == program.quota,
        answer,
    )
