#!/usr/bin/env python3
"""Holds the weights of a model in PyTorch, and answers requests, until a file appears.

    torch_model.py --bytes N --out DIR

It is not one of the compared programs: `bench.parking --program torch` runs it, with the same files
as model.py. An answer is a pass through all layers. It has to equal the first answer bit for bit,
and the weights of one layer have to equal those that are generated again from their seed. At the
end the weights of all layers are compared in this way.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from model import serve

WIDTH = 8192
LAYER = 2 * WIDTH * WIDTH
"""The size of a layer in bytes."""
BATCH = 64


class Layers:
    """The weights, and passes through them."""

    def __init__(self, size: int) -> None:
        self.device = torch.device("cuda")
        self.input = torch.randn(BATCH, WIDTH, generator=self._seeded(0), device=self.device)
        self.layers = [self._make(i) for i in range(size // LAYER)]
        self.n_blocks = len(self.layers)
        self.expected = self._run().cpu()

    def _seeded(self, number: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(number)

    def _make(self, number: int) -> torch.Tensor:
        generator = self._seeded(1 + number)
        shape = (WIDTH, WIDTH)
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)

    def _run(self) -> torch.Tensor:
        activations = self.input.to(torch.bfloat16)
        for weights in self.layers:
            activations = torch.tanh(activations @ weights / WIDTH**0.5)
        return activations

    def begin(self) -> None:
        """Run a first kernel, and return when it has ended."""
        self.input.add_(0)
        torch.cuda.synchronize()

    def count_wrong(self, answered: int) -> int:
        """Compute an answer and check a layer's weights; return how many of the two are wrong."""
        wrong = int(not torch.equal(self._run().cpu(), self.expected))
        return wrong + self.count_wrong_blocks([answered % self.n_blocks])

    def count_wrong_blocks(self, numbers: range | list[int]) -> int:
        """Return how many of these layers have wrong weights."""
        return sum(not torch.equal(self.layers[i], self._make(i)) for i in numbers)


def main() -> None:
    """Hold the weights, and answer."""
    parser = argparse.ArgumentParser(description="Holds a model's weights and answers requests.")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    layers = Layers(args.bytes)
    began = time.monotonic()
    answered = serve(layers, args.out)
    wrong = layers.count_wrong_blocks(range(layers.n_blocks))
    seconds = round(time.monotonic() - began, 1)
    end = {"answers": answered, "blocks": layers.n_blocks, "wrong": wrong, "seconds": seconds}
    print(json.dumps(end))


if __name__ == "__main__":
    main()
