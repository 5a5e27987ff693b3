#!/usr/bin/env python3
"""Tests PyTorch training: some steps of a small CNN and of a small Transformer."""

from __future__ import annotations

import torch
from program import ProgramCheck, run
from torch import Tensor, nn

STEPS = 15


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 8 * 8, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class SmallTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def train(
    model: nn.Module, x: Tensor, wanted: Tensor, optimiser: torch.optim.Optimizer
) -> list[float]:
    losses = []
    for _ in range(STEPS):
        optimiser.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), wanted)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def body(program: ProgramCheck) -> None:
    torch.manual_seed(1)
    device = torch.device("cuda")
    jobs = {
        "cnn": (Cnn(), torch.randn(64, 3, 32, 32)),
        "transformer": (SmallTransformer(), torch.randint(0, 100, (64, 48))),
    }
    for name, (model, x) in jobs.items():
        wanted = torch.randint(0, 10, (64,)).to(device)
        model.to(device)
        if name == "cnn":
            optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        else:
            optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = train(model, x.to(device), wanted, optimiser)
        program.check(f"{name}: the loss falls", losses[-1] < losses[0], losses)
        program.value(f"{name}: losses", losses, 1e-2)
    program.launches = STEPS * 20


if __name__ == "__main__":
    run(body)
