#!/usr/bin/env python3
"""Tests PyTorch inference in bfloat16: attention, convolution, half a dozen batch sizes."""

from __future__ import annotations

import torch
from program import ProgramCheck, run
from torch import Tensor, nn

BATCHES = (1, 2, 7, 16, 33, 64)


class InferenceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(256, 3 * 256)
        self.out = nn.Linear(256, 256)
        self.norm = nn.LayerNorm(256)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.project(self.norm(x)).view(batch, length, 3, 4, 64).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, 256))


def body(program: ProgramCheck) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(*[InferenceBlock() for _ in range(4)]).to("cuda", torch.bfloat16).eval()
    pictures = nn.Conv2d(3, 32, 5, stride=2).to("cuda", torch.bfloat16).eval()
    means = []
    with torch.no_grad():
        for batch in BATCHES:
            x = torch.randn(batch, 128, 256).to("cuda", torch.bfloat16)
            means.append(model(x).float().abs().mean().item())
    with torch.inference_mode():
        convolved = pictures(torch.randn(8, 3, 128, 128).to("cuda", torch.bfloat16))
        means.append(convolved.float().abs().mean().item())
    program.check("no gradient is kept", all(p.grad is None for p in model.parameters()))
    program.value("mean sizes", means, 2e-2)
    program.launches = 10 * len(BATCHES)


if __name__ == "__main__":
    run(body)
