#!/usr/bin/env python3
"""PyTorch out of memory at the quota, and on again."""

from __future__ import annotations

from fill import SEGMENT, fill_twice
from program import ProgramCheck, run


def body(program: ProgramCheck) -> None:
    fill_twice(program, SEGMENT)


if __name__ == "__main__":
    run(body)
