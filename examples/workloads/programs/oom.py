#!/usr/bin/env python3
"""Tests that PyTorch runs out of memory at the quota, and works again afterwards."""

from __future__ import annotations

from fill import SEGMENT, fill_twice
from program import ProgramCheck, run


def body(program: ProgramCheck) -> None:
    fill_twice(program, SEGMENT)


if __name__ == "__main__":
    run(body)
