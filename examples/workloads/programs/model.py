#!/usr/bin/env python3
"""Holds device memory like a loaded model, and answers requests, until a file appears.

    model.py --bytes N --out DIR [--busy]

It is not one of the compared programs: `bench.parking` runs it. For each file DIR/ask.K, in the
order of K, it uses the memory: it adds one to the words of the first block and reads one of the
other blocks back. DIR/answer.K then contains a line of JSON: when it began, by the monotonic clock,
the time until the first kernel had ended and the total time, all in seconds, and the number of
wrong blocks. With --busy it computes all the time, and writes the number of its turns to DIR/turns
every tenth of a second. When DIR/stop exists, it compares all contents with the expected ones, and
prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Protocol

from driver_api import Cuda
from holder import HeldMemory

NAP_S = 0.002
WRITE_S = 0.1


class AnswersQuestions(Protocol):
    """What a model does for an answer."""

    def begin(self) -> None:
        """Use the memory, and return when a first kernel has ended."""

    def count_wrong(self, answered: int) -> int:
        """Finish an answer, and return how many of the parts that it compares are wrong."""


def serve(model: AnswersQuestions, out: Path) -> int:
    """Answer questions until DIR/stop exists, and return how many."""
    answered = 0
    (out / "begin.ready").touch()
    while not (out / "stop").exists():
        if not (out / f"ask.{answered}").exists():
            time.sleep(NAP_S)
            continue
        began = time.monotonic()
        model.begin()
        first = time.monotonic()
        wrong = model.count_wrong(answered)
        answer = {
            "asked": began,
            "first_s": round(first - began, 4),
            "total_s": round(time.monotonic() - began, 4),
            "wrong": wrong,
        }
        part = out / "part"
        part.write_text(json.dumps(answer) + "\n")
        part.rename(out / f"answer.{answered}")
        answered += 1
    return answered


class Model:
    """The memory, and the operations for an answer."""

    def __init__(self, cuda: Cuda, size: int, out: Path) -> None:
        self.cuda, self.out = cuda, out
        self.memory = HeldMemory(cuda, size)

    def begin(self) -> None:
        """Add one to the words of the first block."""
        self.memory.add()
        self.cuda.call("cuCtxSynchronize")

    def count_wrong(self, answered: int) -> int:
        """Compare one of the other blocks; return 1 if its contents are wrong, otherwise 0."""
        return self.memory.count_wrong([1 + answered % (len(self.memory.blocks) - 1)])

    def work(self) -> None:
        """Compute all the time."""
        turns, written = 0, 0.0
        (self.out / "begin.ready").touch()
        with (self.out / "turns").open("w", buffering=1) as lines:
            while not (self.out / "stop").exists():
                self.memory.add()
                self.cuda.burn(1_000_000)
                self.cuda.call("cuCtxSynchronize")
                turns += 1
                now = time.monotonic()
                if now - written >= WRITE_S:
                    lines.write(f"{now:.6f} {turns}\n")
                    written = now


def main() -> None:
    """Hold the memory, and answer."""
    parser = argparse.ArgumentParser(description="Holds device memory and answers requests.")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--busy", action="store_true", help="compute all the time")
    args = parser.parse_args()
    cuda = Cuda()
    cuda.start()
    model = Model(cuda, args.bytes, args.out)
    answered = 0
    if args.busy:
        model.work()
    else:
        answered = serve(model, args.out)
    blocks = range(len(model.memory.blocks))
    wrong = model.memory.count_wrong(blocks)
    print(json.dumps({"answers": answered, "blocks": len(blocks), "wrong": wrong}))


if __name__ == "__main__":
    main()
