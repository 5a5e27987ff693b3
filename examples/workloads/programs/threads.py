#!/usr/bin/env python3
"""Tests eight threads that launch at the same time, each with its own stream and memory."""

from __future__ import annotations

import ctypes
import threading

from driver_api import MIB, Cuda
from program import ProgramCheck, run

THREADS, ROUNDS, WORDS = 8, 40, MIB // 4
BURN_NS = 100_000


def work(cuda: Cuda, number: int, together: threading.Barrier, found: list[int | str]) -> None:
    """Burn time and fill a block in turns; the block has the last value if no fill was lost."""
    try:
        cuda.call("cuCtxSetCurrent", cuda.context)
        stream = cuda.get("cuStreamCreate", 1)
        block = cuda.get("cuMemAlloc_v2", 4 * WORDS)
        together.wait(30)
        for i in range(ROUNDS):
            cuda.burn(BURN_NS, stream)
            value = ctypes.c_uint32(1000 * number + i)
            cuda.call("cuMemsetD32Async", block, value, WORDS, stream)
        cuda.call("cuStreamSynchronize", stream)
        found[number] = sum(cuda.words(block, WORDS))
        cuda.call("cuMemFree_v2", block)
        cuda.call("cuStreamDestroy_v2", stream)
    except Exception as e:  # noqa: BLE001 - a thread's error is its result
        found[number] = repr(e)


def body(program: ProgramCheck) -> None:
    cuda = Cuda()
    cuda.start()
    together = threading.Barrier(THREADS)
    found: list[int | str] = [""] * THREADS
    threads = [
        threading.Thread(target=work, args=(cuda, i, together, found)) for i in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [WORDS * (1000 * i + ROUNDS - 1) for i in range(THREADS)]
    program.check("each thread finds its own last fill", found == wanted, found)
    program.value("sums", [str(one) for one in found])
    program.launches = THREADS * ROUNDS


if __name__ == "__main__":
    run(body)
