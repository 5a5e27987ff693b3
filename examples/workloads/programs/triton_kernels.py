#!/usr/bin/env python3
"""Tests two kernels in Triton: a vector addition and a matrix product."""

import torch
import triton
import triton.language as tl
from program import ProgramCheck, run


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201, N803 - Triton's dialect
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def product_kernel(a, b, c, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201, N803 - Triton's dialect
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, n, BLOCK):
        left = tl.load(a + rows[:, None] * n + (k + inner)[None, :])
        right = tl.load(b + (k + inner)[:, None] * n + columns[None, :])
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * n + columns[None, :], total)


def body(program: ProgramCheck) -> None:
    torch.manual_seed(7)
    n = 100_003
    x, y = torch.randn(n).cuda(), torch.randn(n).cuda()
    out = torch.empty_like(x)
    for _ in range(10):
        add_kernel[(triton.cdiv(n, 1024),)](x, y, out, n, BLOCK=1024)
    program.check("the sum is PyTorch's", torch.equal(out, x + y))
    program.value("sum", out.double().sum().item())
    n = 512
    a, b = (torch.randn(n, n).cuda().half() for _ in range(2))
    c = torch.empty(n, n, device="cuda")
    for _ in range(10):
        product_kernel[(n // 64, n // 64)](a, b, c, n, BLOCK=64)
    off = (c - a.float() @ b.float()).abs().max().item()
    program.check("the product is PyTorch's", off < 0.1, off)
    program.value("product", c.double().abs().mean().item(), 1e-2)
    program.launches = 20


if __name__ == "__main__":
    run(body)
