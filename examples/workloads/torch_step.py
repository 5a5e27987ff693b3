#!/usr/bin/env python3
"""Runs steps of training or decoding on command, to compare two processes step by step.

    torch_step.py --kind train|decode|decode-graph --orders DIR --seconds S [--cores 2,3]

After its warm-up it creates DIR/ready. For each file DIR/go-<n> it takes two steps that do not
count, because the caches are cold, then steps for S seconds, and writes DIR/done-<n>, a JSON
object: the number of steps, the seconds, and the median duration of a step in ms. DIR/end ends it.

`train` is a step of torch_models' transformer. `decode` is a token from a model with 24 layers in
eager mode, read back before the next one begins: some 300 small kernels, so the host is the
bottleneck. `decode-graph` is the same token as one CUDA graph, as in a server. With --cores all
threads stay on those cores, so that two processes that take turns use the same ones. Other causes
that make one process faster than another for its whole life are removed: random addresses, random
hashes, and garbage collection.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import gc
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_models import Transformer

WARM_UP_S = 2.0
STEPS_IN_FLIGHT = 2
LEAD = 2
"""Number of steps after each pause that are not measured."""
POLL_S = 0.002


ADDR_NO_RANDOMIZE = 0x0040000


def start_alike() -> None:
    """Execute this program again without random addresses and hashes, unless it already does."""
    libc = ctypes.CDLL(None)
    if os.environ.get("PYTHONHASHSEED") == "0" or libc.personality(ADDR_NO_RANDOMIZE) < 0:
        return
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606 - the same program


class Train:
    """Forward, backward and optimiser; at most two steps are in flight."""

    def __init__(self, device: torch.device, *, tiny: bool) -> None:
        self.model = Transformer(lambda part: part, tiny=tiny).to(device, Transformer.dtype)
        self.x, self.target = self.model.data(2 if tiny else Transformer.batch, device)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.events: collections.deque[Any] = collections.deque()
        self.cuda = device.type == "cuda"

    def step(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        self.model.loss(self.x, self.target, lambda x, _name: x).backward()
        self.optimiser.step()
        if self.cuda:
            event = torch.cuda.Event(blocking=True)
            event.record()
            self.events.append(event)
            if len(self.events) > STEPS_IN_FLIGHT:
                self.events.popleft().synchronize()


class Layer(nn.Module):
    """Attention over a cache of a fixed length, and a feed-forward part."""

    def __init__(self, wide: int, heads: int, batch: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.project, self.out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)
        shape = (batch, heads, length, wide // heads)
        self.register_buffer("keys", torch.randn(shape))
        self.register_buffer("values", torch.randn(shape))

    def forward(self, x: Tensor, at: int) -> Tensor:
        batch, wide = x.shape
        new = self.project(self.before(x)).view(batch, 3, self.heads, 1, wide // self.heads)
        query, key, value = new.unbind(1)
        self.keys[:, :, at : at + 1] = key
        self.values[:, :, at : at + 1] = value
        seen = functional.scaled_dot_product_attention(query, self.keys, self.values)
        x = x + self.out(seen.reshape(batch, wide))
        update: Tensor = self.down(functional.gelu(self.up(self.between(x))))
        return x + update


class Decode:
    """Decodes a token for each of eight sequences, and reads the tokens back."""

    def __init__(self, device: torch.device, *, tiny: bool) -> None:
        layers, wide, heads, self.length = (2, 32, 2, 16) if tiny else (24, 1024, 16, 512)
        batch, words = 8, 1024
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.words = nn.Embedding(words, wide).to(device, dtype)
        self.layers = nn.ModuleList(Layer(wide, heads, batch, self.length) for _ in range(layers))
        self.layers.to(device, dtype)
        self.head = nn.Linear(wide, words).to(device, dtype)
        self.token = torch.zeros(batch, dtype=torch.long, device=device)
        self.at = 0

    @torch.no_grad()
    def step(self, queued: Callable[[], None] | None = None) -> None:
        """Decode a token and read it back; `queued` is called once all of its work is queued."""
        x = self.words(self.token)
        for layer in self.layers:
            x = layer(x, self.at % self.length)
        self.token = self.head(x).argmax(-1)
        self.at += 1
        if queued:
            queued()
        self.token.tolist()


class DecodeGraph(Decode):
    """The same as one CUDA graph: a token attends to the whole cache, and writes its entry 0."""

    def __init__(self, device: torch.device, *, tiny: bool) -> None:
        super().__init__(device, tiny=tiny)
        side = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(side):
            self._token()  # libraries load outside a capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self._token()

    def _token(self) -> None:
        x = self.words(self.token)
        for layer in self.layers:
            x = layer(x, 0)
        self.token.copy_(self.head(x).argmax(-1))

    def step(self, queued: Callable[[], None] | None = None) -> None:
        self.graph.replay()
        if queued:
            queued()
        self.token.tolist()


JOBS: dict[str, Callable[..., Any]] = {
    "train": Train,
    "decode": Decode,
    "decode-graph": DecodeGraph,
}


def take_steps(step: Callable[[], None], seconds: float, device: torch.device) -> dict[str, float]:
    """Take steps for `seconds`, wait until all of them are done, and return the measurements."""
    for _ in range(LEAD):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = []
    begin = last = time.perf_counter()
    while last - begin < seconds:
        step()
        now = time.perf_counter()
        took.append(1000 * (now - last))
        last = now
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {
        "steps": len(took),
        "seconds": time.perf_counter() - begin,
        "step_ms": statistics.median(took),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Takes steps on command.")
    parser.add_argument("--kind", choices=sorted(JOBS), required=True)
    parser.add_argument("--orders", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--cores", help="the processors to stay on, 0,1,...")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny version, for tests")
    options = parser.parse_args()
    start_alike()
    if options.cores:
        os.sched_setaffinity(0, [int(core) for core in options.cores.split(",")])
    torch.manual_seed(1)
    device = torch.device(options.device)
    job = JOBS[options.kind](device, tiny=options.tiny)
    take_steps(job.step, WARM_UP_S if device.type == "cuda" else options.seconds, device)
    gc.collect()
    gc.disable()
    (options.orders / "ready").touch()
    number = 0
    while not (options.orders / "end").exists():
        if not (options.orders / f"go-{number}").exists():
            time.sleep(POLL_S)
            continue
        result = json.dumps(take_steps(job.step, options.seconds, device))
        partial = options.orders / "partial"
        partial.write_text(result)
        partial.rename(options.orders / f"done-{number}")
        number += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
