#!/usr/bin/env python3
"""Tests a paged key-value cache that sizes itself, and decoding with it in a CUDA graph.

Like a serving engine, it loads weights, measures the memory of a forward pass, and allocates blocks
up to 0.92 of the GPU's memory. Sequences find their blocks through a table.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import torch
from driver_api import MIB
from program import ProgramCheck, run
from torch import Tensor

UTILISATION = 0.92
LAYERS, HEADS, SIZE, WIDE = 4, 32, 128, 8192
WIDTH = HEADS * SIZE
BLOCK, MOST = 16, 8  # tokens per block, blocks per sequence
BATCH, STEPS, PROFILE = 8, 200, 4096
USED = 256  # blocks that the sequences use: the first and the last ones of the cache
STARTS = 20
SLACK = 96 * MIB

Layer = dict[str, Tensor]
Cache = list[tuple[Tensor, Tensor]]


def load() -> list[Layer]:
    """Return 1 GiB of weights."""
    torch.manual_seed(11)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * rows**-0.5

    square = dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH))
    shapes = {**square, "up": (WIDTH, WIDE), "down": (WIDE, WIDTH)}
    return [{name: matrix(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]


def project(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of each token."""
    normal = torch.nn.functional.layer_norm(x, (WIDTH,))
    q, k, v = ((normal @ layer[name]).view(-1, HEADS, SIZE) for name in "qkv")
    return q, k, v


def finish(layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
    x = x + mixed.reshape(-1, WIDTH) @ layer["out"]
    return x + torch.nn.functional.gelu(x @ layer["up"]) @ layer["down"]


def profile(weights: list[Layer]) -> None:
    """Run a forward pass of one long prompt, without a cache."""
    x = torch.randn(PROFILE, WIDTH, device="cuda", dtype=torch.bfloat16)
    for layer in weights:
        q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in project(layer, x))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = finish(layer, x, mixed[0].transpose(0, 1))
    torch.cuda.synchronize()


def make_cache(weights: list[Layer]) -> Cache:
    """Size the cache by what is left of the GPU's memory after a profile, and allocate it."""
    torch.cuda.reset_peak_memory_stats()
    profile(weights)
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    size = int(total * UTILISATION) - (total - free) - peak
    shape = (size // (LAYERS * 2 * BLOCK * WIDTH * 2), BLOCK, HEADS, SIZE)
    return [
        (
            torch.zeros(shape, device="cuda", dtype=torch.bfloat16),
            torch.zeros(shape, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(LAYERS)
    ]


class Batch:
    """The sequences that are decoded: their inputs, lengths and block tables, changed in place."""

    def __init__(self, blocks: int) -> None:
        self.random = random.Random(12)  # noqa: S311 - the same choices in each run, no secret
        self.free = [*range(USED // 2), *range(blocks - USED // 2, blocks)]
        self.random.shuffle(self.free)
        self.rows: list[list[int]] = [[] for _ in range(BATCH)]
        self.replaced = 0
        self.lengths, self.ends = [0] * BATCH, [20 + 13 * i for i in range(BATCH)]
        self.x = torch.zeros(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.table = torch.zeros(BATCH, MOST, device="cuda", dtype=torch.int64)
        self.slots = torch.arange(BATCH, device="cuda")  # where the new token goes
        self.length = torch.ones(BATCH, 1, device="cuda", dtype=torch.int64)

    def advance(self, x: Tensor) -> None:
        """Give each sequence a token, and a block when it needs one; replace sequences that end."""
        slots = []
        for i, row in enumerate(self.rows):
            if self.lengths[i] == self.ends[i]:
                self.free += row
                row.clear()
                self.replaced += 1
                self.lengths[i], self.ends[i] = 0, self.random.randint(10, BLOCK * MOST)
            if self.lengths[i] == len(row) * BLOCK:
                row.append(self.free.pop(0))
            slots.append(row[-1] * BLOCK + self.lengths[i] % BLOCK)
            self.lengths[i] += 1
        self.x.copy_(x)
        self.table.copy_(torch.tensor([row + [row[0]] * (MOST - len(row)) for row in self.rows]))
        self.slots.copy_(torch.tensor(slots))
        self.length.copy_(torch.tensor(self.lengths).unsqueeze(1))


def decode(weights: list[Layer], cache: Cache, batch: Batch) -> Tensor:
    """Compute the next token of each sequence: its key and value are stored, then all are read."""
    x = batch.x
    behind = torch.arange(MOST * BLOCK, device="cuda") >= batch.length
    for layer, (keys, values) in zip(weights, cache, strict=True):
        q, k, v = project(layer, x)
        found = []
        for pages, new in ((keys, k), (values, v)):
            pages.view(-1, HEADS, SIZE).index_copy_(0, batch.slots, new)
            pages_of = pages.index_select(0, batch.table.view(-1))
            found.append(pages_of.view(BATCH, MOST * BLOCK, HEADS, SIZE).transpose(1, 2))
        scores = (q.unsqueeze(2) @ found[0].transpose(2, 3)).float() * SIZE**-0.5
        scores = scores.masked_fill(behind[:, None, None, :], float("-inf"))
        mixed = torch.softmax(scores, -1).to(x.dtype) @ found[1]
        x = finish(layer, x, mixed.squeeze(2))
    return x


def decode_all(cache: Cache, step: Callable[[], Tensor], batch: Batch) -> list[float]:
    """Decode all steps with an empty cache, and return a checksum of each."""
    for pages in cache:
        for one in pages:
            one.zero_()
    inputs = torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(13))
    sums = []
    for x in inputs:
        batch.advance(x)
        sums.append(step().float().abs().mean())
    return torch.stack(sums).tolist()


def serve(program: ProgramCheck) -> None:
    """Decode eagerly, and by replaying one graph; both must give the same result."""
    weights = load()
    cache = make_cache(weights)
    blocks = cache[0][0].shape[0]
    program.note("blocks", blocks)
    program.check("the cache has room for the sequences", blocks >= USED, blocks)
    once, again = Batch(blocks), Batch(blocks)
    eager = decode_all(cache, lambda: decode(weights, cache, once), once)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decode(weights, cache, again)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(weights, cache, again)
    replayed = decode_all(cache, lambda: (graph.replay(), out)[1], again)
    off = max(abs(a - b) for a, b in zip(eager, replayed, strict=True))
    program.check(
        "a replayed step gives the result of the eager one", off <= 1e-2 * max(eager), off
    )
    program.check("sequences ended, and others began", again.replaced >= BATCH, again.replaced)
    program.value("checksums of the steps", replayed, 2e-2)


def body(program: ProgramCheck) -> None:
    total = torch.cuda.mem_get_info()[1]
    expected = total == program.quota if program.governed else total > program.quota
    program.check("total memory is as expected", expected, total)
    serve(program)
    counts, left = [], []
    for _ in range(STARTS):
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.mem_get_info()[0])
        weights = load()
        cache = make_cache(weights)
        counts.append(cache[0][0].shape[0])
        cache[-1][1][-1].fill_(1)
        program.check("the end of the cache can be used", cache[-1][1][-1].float().mean() == 1)
        del weights, cache
    program.check(
        "each start has as many blocks", max(counts) - min(counts) <= SLACK // MIB, counts
    )
    program.check("memory is free again after each", max(left) - min(left) <= SLACK, left)
    stats = torch.cuda.memory_stats()
    failed = {name: stats.get(name, 0) for name in ("num_ooms", "num_alloc_retries")}
    program.check("no allocation failed", not any(failed.values()), failed)
    program.note("versions", f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    program.launches = 2 * STEPS


if __name__ == "__main__":
    run(body)
