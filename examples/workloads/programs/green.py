#!/usr/bin/env python3
"""Tests a green context: some of the GPU's multiprocessors, a separate stream, and kernels."""

from __future__ import annotations

import ctypes

from driver_api import Cuda, address_of
from program import NotHereError, ProgramCheck, run

WORDS = 1 << 16
ROUNDS = 10
SM, DEFAULT_STREAM, NON_BLOCKING = 1, 1, 1
RESOURCE = 144
"""Size of a CUdevResource in bytes."""

COUNT_AT = 96
"""Offset of the number of multiprocessors in a CUdevResource."""

LEAST = 8


def body(program: ProgramCheck) -> None:
    cuda = Cuda()
    if not address_of(cuda.library, "cuGreenCtxCreate"):
        raise NotHereError("this driver has no green contexts")
    cuda.start()
    device = cuda.get("cuDeviceGet", 0)
    whole = ctypes.create_string_buffer(RESOURCE)
    part, remainder = (ctypes.create_string_buffer(RESOURCE) for _ in range(2))
    cuda.call("cuDeviceGetDevResource", device, whole, SM)
    groups = ctypes.c_uint(1)
    cuda.call("cuDevSmResourceSplitByCount", part, ctypes.byref(groups), whole, remainder, 0, LEAST)
    counts = [
        int.from_bytes(one[COUNT_AT : COUNT_AT + 4], "little") for one in (whole, part, remainder)
    ]
    program.check("a part has some of the multiprocessors", LEAST <= counts[1] < counts[0], counts)
    program.value("multiprocessors", counts, 0)
    description = cuda.get("cuDevResourceGenerateDesc", part, 1)
    green = cuda.get("cuGreenCtxCreate", description, device, DEFAULT_STREAM)
    cuda.call("cuCtxSetCurrent", cuda.get("cuCtxFromGreenCtx", green))
    stream = cuda.get("cuGreenCtxStreamCreate", green, NON_BLOCKING, 0)
    cuda.load()
    add_one = cuda.function("add_one")
    block = cuda.get("cuMemAlloc_v2", 4 * WORDS)
    cuda.call("cuMemsetD32Async", block, 5, WORDS, stream)
    for _ in range(ROUNDS):
        cuda.launch(add_one, block, WORDS, blocks=WORDS // 256, threads=256, stream=stream)
    cuda.call("cuStreamSynchronize", stream)
    found = set(cuda.words(block, WORDS))
    program.check("its kernels ran", found == {5 + ROUNDS}, sorted(found)[:8])
    cuda.call("cuMemFree_v2", block)
    cuda.call("cuStreamDestroy_v2", stream)
    cuda.call("cuCtxSetCurrent", cuda.context)
    cuda.call("cuGreenCtxDestroy", green)
    program.launches = ROUNDS


if __name__ == "__main__":
    run(body)
