#!/usr/bin/env python3
"""Tests torch.compile with a small model, forward and backward: Triton has to find libcuda itself.

Triton finds libcuda with `/sbin/ldconfig -p`, and uses gcc to build a launcher linked with it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
from pathlib import Path

import torch
from program import ProgramCheck, run
from torch import Tensor, nn


class CompiledModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 512)
        self.second = nn.Linear(512, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.first(x)) * torch.sigmoid(x.sum(1, keepdim=True))
        return torch.softmax(self.second(hidden), 1)


def step(model: nn.Module, x: Tensor) -> tuple[float, list[float]]:
    """Return the loss, and the mean size of each gradient."""
    model.zero_grad(set_to_none=True)
    loss = (model(x)[:, 0] ** 2).mean()
    loss.backward()
    sizes = [p.grad.abs().mean().item() for p in model.parameters() if p.grad is not None]
    return loss.item(), sizes


def body(program: ProgramCheck) -> None:
    listing = subprocess.run(
        ["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False
    ).stdout
    program.note(
        "ldconfig -p", [line.strip() for line in listing.splitlines() if "libcuda.so" in line]
    )
    torch.manual_seed(3)
    plain = CompiledModel().cuda()
    compiled = torch.compile(copy.deepcopy(plain))
    x = torch.randn(512, 256).cuda()
    loss, gradients = step(plain, x)
    for _ in range(3):
        fast_loss, fast_gradients = step(compiled, x)
    near = all(abs(a - b) <= 1e-2 * abs(a) for a, b in zip(gradients, fast_gradients, strict=True))
    program.check(
        "the compiled loss equals the plain one", abs(loss - fast_loss) <= 1e-2 * abs(loss)
    )
    program.check("the compiled gradients are the plain ones", near, (gradients, fast_gradients))
    program.value("loss", fast_loss, 1e-2)
    program.value("gradients", fast_gradients, 1e-2)
    with contextlib.suppress(ImportError):
        from triton.backends.nvidia.driver import libcuda_dirs  # noqa: PLC0415 - not in each Triton

        program.note("Triton finds libcuda in", list(libcuda_dirs()))
    cache = Path(os.environ.get("TRITON_CACHE_DIR", "/nowhere"))
    program.note("kernels in Triton's cache", len(list(cache.rglob("*.cubin"))))
    program.launches = 30


if __name__ == "__main__":
    run(body)
