"""Backend of gang.py for real GPUs, on PyTorch and NCCL."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_stamps import GpuStamper
from torch import Tensor, nn

TIMEOUT = dt.timedelta(seconds=60)
SIZE, PRODUCTS = 4096, 3
WORDS = 16 << 20
LAYERS, WIDTH, BATCH, RATE = 4, 2048, 4096, 0.5
CHECKPOINT = 100


class Part:
    """One GPU: its data, its stream and its stamps."""

    def __init__(self, rank: int, stream: torch.cuda.Stream) -> None:
        self.rank, self.stream, self.device = rank, stream, stream.device
        self.stamper = GpuStamper()
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream):
            yield

    def stamp(self, label: str) -> None:
        self.stamper.stamp(label)


class Reducing(Part):
    """Products of matrices, and numbers with a known sum over the ranks."""

    def __init__(self, rank: int, world: int, stream: torch.cuda.Stream) -> None:
        super().__init__(rank, stream)
        more: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        self.a, self.b = torch.randn(SIZE, SIZE, **more), torch.randn(SIZE, SIZE, **more)
        self.c = torch.empty(SIZE, SIZE, **more)
        base = torch.arange(WORDS, device=self.device, dtype=torch.float32) % 251
        self.base = base + (rank + 1)
        self.expected = base * world + world * (world + 1) // 2
        self.shared = torch.empty(WORDS, device=self.device)

    def begin(self, i: int) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self.a, self.b, out=self.c)
        # Whole numbers below 2^24: their sum is exact.
        torch.mul(self.base, float(i % 7 + 1), out=self.shared)

    def end(self, i: int) -> None:
        self.wrong += (self.shared != self.expected * float(i % 7 + 1)).sum()

    def results(self) -> dict[str, Any]:
        return {"checkpoints": [], "losses": []}


class Training(Part):
    """A small model; its gradients are shared, and the weights are the same on all GPUs."""

    def __init__(self, rank: int, world: int, stream: torch.cuda.Stream) -> None:
        super().__init__(rank, stream)
        self.world = world
        one = torch.Generator().manual_seed(1)
        own = torch.Generator().manual_seed(100 + rank)
        weights = torch.randn(LAYERS * WIDTH * WIDTH, generator=one) / WIDTH**0.5
        self.weights = weights.to(self.device)
        self.shared = torch.zeros_like(self.weights)
        self.layers = []
        for values, gradient in zip(
            self.weights.view(LAYERS, WIDTH, WIDTH), self.shared.view(LAYERS, WIDTH, WIDTH),
            strict=True,
        ):  # fmt: skip
            layer = nn.Parameter(values)
            layer.grad = gradient
            self.layers.append(layer)
        self.x = torch.randn(BATCH, WIDTH, generator=own).to(self.device)
        self.target = torch.tanh(torch.randn(BATCH, WIDTH, generator=own)).to(self.device)
        self.loss = torch.zeros((), device=self.device)
        self.sums: list[Tensor] = []
        self.losses: list[Tensor] = []

    def begin(self, i: int) -> None:
        del i
        self.shared.zero_()
        h = self.x
        for layer in self.layers:
            h = torch.tanh(h @ layer)
        loss = (h - self.target).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        self.loss = loss.detach()

    def end(self, i: int) -> None:
        self.weights.add_(self.shared, alpha=-RATE / self.world)
        if i % CHECKPOINT == 0:
            self.sums.append(self.weights.double().sum())
            self.losses.append(self.loss)

    def results(self) -> dict[str, Any]:
        losses = [float(one) for one in self.losses]
        self.wrong += sum(not one < float("inf") for one in losses)
        return {
            "checkpoints": [[float(one).hex() for one in self.sums]],
            "losses": [losses[0], losses[-1]] if losses else [],
        }


class TorchGang:
    """The GPUs of this process, and the all-reduce over the GPUs of all processes."""

    def __init__(self, ranks: list[int], world: int, out: Path, *, train: bool) -> None:
        if torch.cuda.device_count() < world:
            raise SystemExit(f"gang: PyTorch sees {torch.cuda.device_count()} of {world} GPUs")
        torch.set_float32_matmul_precision("high")
        self.out, self.iterations = out, 0
        self.alone = len(ranks) == world
        kind = Training if train else Reducing
        self.parts: list[Any] = []
        for rank in ranks:
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
            torch.empty(1, device=device)
            stream = torch.cuda.Stream(device) if self.alone else torch.cuda.current_stream(device)
            with torch.cuda.stream(stream):
                self.parts.append(kind(rank, world, stream))
            torch.cuda.synchronize(device)
        if self.alone:
            self.how = self._choose()
        else:
            dist.init_process_group(
                "nccl", init_method=f"file://{out}/store", rank=ranks[0], world_size=world,
                timeout=TIMEOUT, device_id=self.parts[0].device,
            )  # fmt: skip
            self.how = "torch.distributed over NCCL, a process for each GPU"
        print(
            f"gang: torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, {self.how}, "
            f"NCCL_NVLS_ENABLE={os.environ.get('NCCL_NVLS_ENABLE')}",
            flush=True,
        )

    def _choose(self) -> str:
        """Choose the all-reduce of a single process: NCCL, or copies between GPUs if that fails."""
        for part in self.parts:
            part.shared.zero_()
            torch.cuda.synchronize(part.device)
        try:
            self._sum_by_nccl()
            for part in self.parts:
                torch.cuda.synchronize(part.device)
        except (RuntimeError, AttributeError, TypeError) as e:
            print(f"gang: no NCCL in one process ({e}); using copies", flush=True)
            self._sum = self._sum_by_copies
            return "copies between the GPUs, one process"
        self._sum = self._sum_by_nccl
        return "torch.cuda.nccl, one process and thread"

    def _sum_by_nccl(self) -> None:
        torch.cuda.nccl.all_reduce(
            [part.shared for part in self.parts], streams=[part.stream for part in self.parts]
        )

    def _sum_by_copies(self) -> None:
        """Send each GPU the numbers of the others; no GPU adds before all have been sent."""
        got: list[list[Tensor]] = []
        events = []
        for part in self.parts:
            event = torch.cuda.Event()
            event.record(part.stream)
            events.append(event)
        for part in self.parts:
            with part.current():
                for event in events:
                    part.stream.wait_event(event)
                others = [one.shared for one in self.parts if one is not part]
                got.append([one.to(part.device, non_blocking=True) for one in others])
                sent = torch.cuda.Event()
                sent.record(part.stream)
                events.append(sent)
        for part, others in zip(self.parts, got, strict=True):
            with part.current():
                for event in events:
                    part.stream.wait_event(event)
                for other in others:
                    part.shared.add_(other)

    def iterate(self, i: int) -> None:
        """Launch one iteration on all GPUs of this process."""
        for part in self.parts:
            with part.current():
                part.stamper.begin_step()
                part.begin(i)
                part.stamp("work")
        if self.alone:
            self._sum()
        else:
            dist.all_reduce(self.parts[0].shared)
        for part in self.parts:
            with part.current():
                part.stamp("all-reduce")
                part.end(i)
                part.stamp("check")
                part.stamper.end_step()
        self.iterations += 1

    def mark(self) -> list[torch.cuda.Event]:
        """Return events that are complete once all work launched so far is done."""
        events = []
        for part in self.parts:
            with part.current():
                event = torch.cuda.Event(blocking=True)
                event.record(part.stream)
                events.append(event)
        return events

    def wait(self, events: list[torch.cuda.Event]) -> None:
        for event in events:
            event.synchronize()

    def record(self) -> None:
        """Write the stamps to a file from now on."""
        for part in self.parts:
            with part.current():
                part.stamper.record_to(str(self.out / f"gpu{part.rank}.bin"))

    def finish(self) -> dict[str, Any]:
        checkpoints, losses = [], []
        for part in self.parts:
            with part.current():
                part.stamper.record_to(None)
                found = part.results()
                checkpoints += found["checkpoints"]
                losses = losses or found["losses"]
        return {
            "checked": self.iterations * len(self.parts),
            "wrong": sum(int(part.wrong) for part in self.parts),
            "checkpoints": checkpoints or [[]],
            "losses": losses,
            "how": self.how,
        }

    def close(self) -> None:
        for part in self.parts:
            with part.current():
                part.stamper.close()
        if not self.alone:
            dist.destroy_process_group()
