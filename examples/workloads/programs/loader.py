#!/usr/bin/env python3
"""Tests PyTorch's worker processes with pinned memory, and a tensor shared through CUDA IPC."""

from __future__ import annotations

from typing import Any

import torch
import torch.multiprocessing as mp
from program import ProgramCheck, run
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

ITEMS, BATCH = 96, 16
WORDS = 1 << 20


class Items(Dataset):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, i: int) -> Tensor:
        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i))


def load(how: str) -> list[float]:
    """Return the sum of each batch, computed on the GPU."""
    loader = DataLoader(
        Items(), batch_size=BATCH, num_workers=2, pin_memory=True, multiprocessing_context=how
    )  # fmt: skip
    sums = []
    for batch in loader:
        if not batch.is_pinned():
            raise RuntimeError("a batch is not in pinned memory")
        sums.append(batch.to("cuda", non_blocking=True).double().pow(2).sum().item())
    return sums


def change(incoming: Any, outgoing: Any) -> None:
    """Double the parent's tensor in place, and send its sum to the parent."""
    tensor = incoming.get()
    tensor.mul_(2)
    torch.cuda.synchronize()
    outgoing.put(tensor.double().sum().item())
    del tensor
    incoming.get()


def share(program: ProgramCheck) -> None:
    """Send a tensor to a child, which maps and changes the same memory."""
    context = mp.get_context("spawn")
    to_child, from_child = context.Queue(), context.Queue()
    child = context.Process(target=change, args=(to_child, from_child))
    child.start()
    tensor = torch.arange(WORDS, dtype=torch.float32, device="cuda")
    to_child.put(tensor)
    seen = from_child.get(timeout=60)
    wanted = float(WORDS) * (WORDS - 1)
    program.check("the child saw the parent's tensor, doubled", abs(seen / wanted - 1) < 1e-6, seen)
    changed = tensor.double().sum().item()
    program.check("the parent sees what the child did", abs(changed / wanted - 1) < 1e-6, changed)
    to_child.put(None)
    child.join(60)
    program.check("the child succeeded", child.exitcode == 0, child.exitcode)


def body(program: ProgramCheck) -> None:
    torch.zeros(1, device="cuda")
    forked = load("fork")
    spawned = load("spawn")
    program.check(
        "forked and spawned workers give the same sums", forked == spawned, (forked, spawned)
    )
    program.value("sums", forked)
    share(program)
    program.launches = ITEMS // BATCH * 4


if __name__ == "__main__":
    run(body)
