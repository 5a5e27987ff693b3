#!/usr/bin/env python3
"""Tests managed memory: host and GPU alternately write the same words."""

from __future__ import annotations

import ctypes
import time

from driver_api import MIB, Cuda
from program import ProgramCheck, run

SIZE = 64 * MIB
WORDS = SIZE // 4
ROUNDS = 5
ATTACH_GLOBAL = 1
OUT_OF_MEMORY = 2
SETTLED_S = 0.5


def settled_free(cuda: Cuda) -> int:
    """Return the free bytes, once they have not changed for SETTLED_S seconds.

    What the driver takes for a context is measured from outside, so a measurement that is made
    while the context is being created is corrected by the next one.
    """
    free, since = cuda.memory()[0], time.monotonic()
    while time.monotonic() - since < SETTLED_S:
        time.sleep(0.02)
        now = cuda.memory()[0]
        if now != free:
            free, since = now, time.monotonic()
    return free


def body(program: ProgramCheck) -> None:
    cuda = Cuda()
    cuda.start()
    add_one = cuda.function("add_one")
    free = settled_free(cuda)
    block = cuda.get("cuMemAllocManaged", SIZE, ATTACH_GLOBAL)
    words = (ctypes.c_uint32 * WORDS).from_address(block)
    ctypes.memset(block, 0, SIZE)
    for i in range(ROUNDS):
        words[i] += 100
        cuda.launch(add_one, block, WORDS, blocks=WORDS // 256, threads=256)
        cuda.call("cuCtxSynchronize")
    head = list(words[: ROUNDS + 1])
    program.check("host and GPU see both writes", head == [100 + ROUNDS] * ROUNDS + [ROUNDS], head)
    program.check("the last word is right", words[WORDS - 1] == ROUNDS, words[WORDS - 1])
    program.value("words", [str(word) for word in head])
    taken = free - cuda.memory()[0]
    program.note("decrease of free bytes", taken)
    program.check("under a quota it is charged", not program.governed or taken >= SIZE, taken)
    big = ctypes.c_uint64()
    code = cuda.attempt("cuMemAllocManaged", ctypes.byref(big), 2 * program.quota, ATTACH_GLOBAL)
    wanted = OUT_OF_MEMORY if program.governed else 0
    program.check(
        "twice the quota, where there is one, is refused", code == wanted, cuda.error_name(code)
    )
    if code == 0:
        cuda.call("cuMemFree_v2", big.value)
    del words
    cuda.call("cuMemFree_v2", block)
    program.launches = ROUNDS


if __name__ == "__main__":
    run(body)
