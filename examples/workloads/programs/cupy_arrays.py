#!/usr/bin/env python3
"""Tests CuPy: elementwise work, FFT, matrix products, memory pool, a CUDA C kernel, a graph."""

from __future__ import annotations

import cupy
from program import ProgramCheck, run

REPLAYS = 20

SOURCE = r"""
extern "C" __global__ void scale(const float *x, float *y, float factor, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] = factor * x[i];
}
"""


def graph(program: ProgramCheck) -> None:
    """Capture an elementwise kernel and replay it."""
    x = cupy.zeros(1 << 16, dtype=cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupy.add(x, 0, out=x)  # compiled before the capture
        stream.synchronize()
        stream.begin_capture()
        cupy.add(x, 1, out=x)
        captured = stream.end_capture()
        for _ in range(REPLAYS):
            captured.launch(stream)
        stream.synchronize()
    program.check("each replay adds one", bool((x == REPLAYS).all()), x[:4].get().tolist())


def body(program: ProgramCheck) -> None:
    generator = cupy.random.RandomState(9)
    x = generator.standard_normal(1 << 20, dtype=cupy.float32)
    program.value("elementwise", float(cupy.sqrt(cupy.abs(x)).mean()))
    there = cupy.fft.ifft(cupy.fft.fft(x)).real
    off = float(cupy.abs(there - x).max())
    program.check("an inverse FFT restores the input", off < 1e-3, off)
    a = x.reshape(1024, 1024)
    program.value("product", float(cupy.abs(a @ a).mean()), 1e-2)
    y = cupy.empty_like(x)
    scale = cupy.RawKernel(SOURCE, "scale")
    blocks = (x.size + 255) // 256
    scale((blocks,), (256,), (x, y, cupy.float32(3), cupy.int32(x.size)))
    program.check("a kernel in CUDA C", bool(cupy.allclose(y, 3 * x)))
    graph(program)
    pool = cupy.get_default_memory_pool()
    held = pool.total_bytes()
    program.check("the pool holds what is used", held >= pool.used_bytes() >= 2 * x.nbytes, held)
    del x, y, a, there
    pool.free_all_blocks()
    program.check("the pool gives memory back", pool.total_bytes() < held, pool.total_bytes())
    _, total = cupy.cuda.runtime.memGetInfo()
    program.check(
        "total memory equals the quota", not program.governed or total == program.quota, total
    )
    try:
        cupy.cuda.Memory(2 * total)
    except cupy.cuda.runtime.CUDARuntimeError as e:
        program.check(
            "excess memory is refused", "OutOfMemory" in str(e) or "MemoryAllocation" in str(e), e
        )
    else:
        program.check("excess memory is refused", False, total)
    program.launches = REPLAYS


if __name__ == "__main__":
    run(body)
