#!/usr/bin/env python3
"""Holds device memory with known contents, and computes on a part of it, until a file appears.

    holder.py --bytes N --out DIR

It is not one of the compared programs: `bench.suspension` runs it. Each turn adds one to the words
of the first block and writes a line to DIR/turns: the time at its end by this machine's monotonic
clock, and its duration in milliseconds, by that clock and by the GPU's events. When DIR/stop
exists, it compares all contents with the expected ones, and prints a line of JSON.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import json
import random
import time
from collections.abc import Iterable
from pathlib import Path

from driver_api import MIB, Cuda

BLOCK = 64 * MIB
WORDS = BLOCK // 4
PERIOD_S = 0.005

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class HeldMemory:
    """Blocks of device memory whose initial contents are the same, except for the first word."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.cuda = cuda
        self.first = array.array("I", random.Random(11).randbytes(BLOCK))  # noqa: S311 - no secret
        self.blocks = [cuda.get("cuMemAlloc_v2", BLOCK) for _ in range(size // BLOCK)]
        self.added = 0
        for i, address in enumerate(self.blocks):
            self.first[0] = i
            cuda.call("cuMemcpyHtoD_v2", address, self._pointer(self.first), BLOCK)

    @staticmethod
    def _pointer(words: array.array[int]) -> ctypes.c_void_p:
        return ctypes.c_void_p(words.buffer_info()[0])

    def add(self) -> None:
        """Add one to each word of the first block."""
        self.added += self.cuda.add_one(self.blocks[0], WORDS)

    def count_wrong(self, numbers: Iterable[int]) -> int:
        """Return how many of the blocks with these numbers have wrong contents."""
        found = array.array("I", bytes(BLOCK))
        wrong = 0
        for i in numbers:
            self.cuda.call("cuMemcpyDtoH_v2", self._pointer(found), self.blocks[i], BLOCK)
            self.first[0] = i
            wanted = self.first
            if i == 0 and self.added:
                wanted = array.array("I", ((word + self.added) & 0xFFFFFFFF for word in wanted))
            # Python compares arrays number by number, which takes a second for a block.
            wrong += _libc.memcmp(self._pointer(found), self._pointer(wanted), BLOCK) != 0
        return wrong


def main() -> None:
    """Hold the memory."""
    parser = argparse.ArgumentParser(description="Holds device memory with known contents.")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cuda = Cuda()
    cuda.start()
    memory = HeldMemory(cuda, args.bytes)
    begin, end = (cuda.get("cuEventCreate", 0) for _ in range(2))
    between = ctypes.c_float()
    turns = 0
    with (args.out / "turns").open("w", buffering=1) as lines:
        (args.out / "begin.ready").touch()
        while not (args.out / "stop").exists():
            started = time.monotonic()
            cuda.call("cuEventRecord", begin, 0)
            memory.add()
            cuda.call("cuEventRecord", end, 0)
            cuda.call("cuCtxSynchronize")
            ended = time.monotonic()
            cuda.call("cuEventElapsedTime", ctypes.byref(between), begin, end)
            lines.write(f"{ended:.6f} {(ended - started) * 1e3:.3f} {between.value:.3f}\n")
            turns += 1
            time.sleep(PERIOD_S)
    blocks = range(len(memory.blocks))
    print(json.dumps({"turns": turns, "blocks": len(blocks), "wrong": memory.count_wrong(blocks)}))


if __name__ == "__main__":
    main()
