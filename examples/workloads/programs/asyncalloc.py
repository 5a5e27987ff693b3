#!/usr/bin/env python3
"""Tests PyTorch with cudaMallocAsync: stream-ordered memory from the driver's own pool."""

from __future__ import annotations

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"

import torch
from driver_api import MIB
from fill import SEGMENT, fill_twice
from program import ProgramCheck, run


def body(program: ProgramCheck) -> None:
    backend = torch.cuda.get_allocator_backend()
    program.check("the backend is the driver's pool", backend == "cudaMallocAsync", backend)
    other = torch.cuda.Stream()
    means = []
    for i in range(20):
        x = torch.full((1 << (10 + i % 10),), float(i), device="cuda")
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            means.append((x * 2).mean().item())
        x.record_stream(other)
    program.value("means", means)
    # The pool grows in units of 32 MiB.
    fill_twice(program, SEGMENT + 64 * MIB)


if __name__ == "__main__":
    run(body)
