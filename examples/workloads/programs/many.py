#!/usr/bin/env python3
"""Tests 200 short processes, eight at a time: a context, a small allocation and a kernel in each.

A server that starts a process for each request behaves like this. The memory of processes that
have ended must be free in time for those that start.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from driver_api import MIB, Cuda
from program import ProgramCheck, child_environment, run

PROCESSES, TOGETHER = 200, 8
WORDS = MIB // 4
CHILD_S = 60


def use_gpu(number: int) -> tuple[int, int]:
    """Fill a block with a number, add one to each word; return their sum and the right one."""
    cuda = Cuda()
    cuda.start()
    block = cuda.get("cuMemAlloc_v2", 4 * WORDS)
    cuda.call("cuMemsetD32_v2", block, number, WORDS)
    wanted = WORDS * (number + cuda.add_one(block, WORDS))
    cuda.call("cuCtxSynchronize")
    found = sum(cuda.words(block, WORDS))
    cuda.call("cuMemFree_v2", block)
    return found, wanted


def in_a_process(number: int) -> tuple[str, float]:
    """Return what a process printed, or how it ended, and the seconds that it took."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, "use", str(number)],
        capture_output=True,
        text=True,
        check=False,
        timeout=CHILD_S,
        env=child_environment(),
    )
    taken = time.monotonic() - begin
    if done.returncode:
        return f"status {done.returncode}: {done.stderr.strip()[-200:]}", taken
    return done.stdout.strip(), taken


def body(program: ProgramCheck) -> None:
    begin = time.monotonic()
    with ThreadPoolExecutor(TOGETHER) as pool:
        answers = list(pool.map(in_a_process, range(PROCESSES)))
    program.note("seconds for all processes", round(time.monotonic() - begin, 1))
    times = sorted(taken for _, taken in answers)
    program.note("seconds for one process, median", round(times[PROCESSES // 2], 3))
    program.note("seconds for one process, longest", round(times[-1], 3))
    # This process uses the GPU last; until here it had no context.
    last, wanted = use_gpu(PROCESSES)
    program.check("the GPU works afterwards", last == wanted, (last, wanted))
    added = wanted - WORDS * PROCESSES
    wrong = [(i, a) for i, (a, _) in enumerate(answers) if a != str(WORDS * i + added)]
    program.check("each process has the right sum", not wrong, wrong[:5])
    program.value("sums", [answer for answer, _ in answers])
    program.launches = 1  # Launches of ended processes are not counted; this process made one.


if __name__ == "__main__":
    if sys.argv[1:2] == ["use"]:
        print(use_gpu(int(sys.argv[2]))[0])
    else:
        run(body)
