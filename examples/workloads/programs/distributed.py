#!/usr/bin/env python3
"""Tests torch.distributed on one GPU: two processes over gloo with GPU tensors, one over NCCL."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

# Host names do not resolve in every container, and all processes are on one host.
for _name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
    os.environ.setdefault(_name, "lo")
# With one GPU, NCCL needs no multicast over NVLink, which machines with several may not allow.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch  # noqa: E402 - after the environment that its libraries read
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from program import ProgramCheck, run  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

WORDS = 100_000


def over_gloo(rank: int, directory: str) -> None:
    """Run one of two processes, which writes its results to a file."""
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=2)
    found = {}
    x = torch.full((WORDS,), float(rank + 1), device="cuda")
    dist.all_reduce(x)
    found["reduced"] = x.sum().item()
    x = torch.arange(WORDS, dtype=torch.float32, device="cuda") * (1 - rank)
    dist.broadcast(x, 0)
    found["broadcast"] = x.double().sum().item()
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Linear(64, 8).cuda())
    torch.manual_seed(rank)
    model(torch.randn(32, 64).cuda()).pow(2).mean().backward()
    found["gradient"] = sum(p.grad.abs().sum().item() for p in model.parameters())
    dist.destroy_process_group()
    Path(directory, f"rank{rank}").write_text(json.dumps(found))


def over_nccl(program: ProgramCheck, directory: str) -> None:
    """Use NCCL with a group of one process."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{directory}/nccl", rank=0, world_size=1)
    x = torch.arange(WORDS, dtype=torch.float32, device="cuda")
    dist.all_reduce(x)
    gathered = torch.empty(WORDS, device="cuda")
    dist.all_gather_into_tensor(gathered, x)
    dist.barrier(device_ids=[0])
    torch.cuda.synchronize()
    program.check("NCCL gathers what it reduced", torch.equal(x, gathered))
    program.value("NCCL", gathered.double().sum().item())
    dist.destroy_process_group()


def body(program: ProgramCheck) -> None:
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(over_gloo, args=(directory,), nprocs=2)
        first, second = (json.loads(Path(directory, f"rank{i}").read_text()) for i in range(2))
        program.check("both processes have the same results", first == second, (first, second))
        program.check("the sum of two is right", first["reduced"] == 3 * WORDS, first)
        for name, number in first.items():
            program.value(f"gloo: {name}", number)
        over_nccl(program, directory)
    program.launches = 2


if __name__ == "__main__":
    run(body)
