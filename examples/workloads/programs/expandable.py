#!/usr/bin/env python3
"""Tests PyTorch's expandable segments: virtual memory management instead of cudaMalloc."""

from __future__ import annotations

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
from driver_api import MIB
from fill import SEGMENT, fill_twice
from program import ProgramCheck, run


def body(program: ProgramCheck) -> None:
    grown = []
    for n in (100, 1000, 3000, 500):
        x = torch.arange(n * n, dtype=torch.float32, device="cuda").view(n, n)
        grown.append(x.double().mean().item())
    segments = torch.cuda.memory_snapshot()
    program.check(
        "a segment is expandable", any(one.get("is_expandable") for one in segments), segments[:1]
    )
    program.value("means", grown)
    del x
    # Segments grow by 20 MiB, so up to 20 MiB more may be left.
    fill_twice(program, SEGMENT + 32 * MIB)


if __name__ == "__main__":
    run(body)
