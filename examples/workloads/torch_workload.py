#!/usr/bin/env python3
"""A training job in PyTorch that stamps its progress, for measurements with and without a quota.

    torch_workload.py --model resnet18|transformer|gru|gemm --seconds S --out FILE
    torch_workload.py --allocate BYTES
    torch_workload.py --model gru --selftest

The job trains on synthetic data that lives on the GPU, with random initial weights, and stamps the
end of each unit of work (a part of the step, at most 2 ms of GPU time when alone) into FILE. It
needs PyTorch, a driver, and the modules in this directory.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import itertools
import json
import pathlib
import signal
import statistics
import sys
import threading
import time
from typing import Any, NamedTuple

import torch
from gpu_stamps import RECORD, GpuStamper, HostStamper, Mark, StampDriver, Stamper
from torch import Tensor, nn
from torch_models import MODELS

MIB = 1 << 20

TORCH_MEMORY = 2252 * MIB
"""Limit of PyTorch's cache; with a context (520 MiB) and modules it fits a quota of 3 GiB."""

WARM_UP_STEPS = 10
STEPS_IN_FLIGHT = 2
ALLOCATION_CHUNK = 64 * MIB


class TrainingJob:
    """A model, its data and its optimiser; one call is one training step."""

    def __init__(self, options: argparse.Namespace, device: torch.device, stamper: Stamper) -> None:
        kind = MODELS[options.model]

        def wrap(part: nn.Module) -> Any:
            return torch.compile(part, dynamic=False) if options.compile else part

        self.stamper = stamper
        self.model = kind(wrap, tiny=options.tiny).to(device=device, dtype=kind.dtype)
        self.x, self.target = self.model.data(options.batch or kind.batch, device)
        self.optimiser = torch.optim.SGD(
            self.model.parameters(), lr=1e-3, momentum=0.9, foreach=True
        )

    def mark(self, x: Tensor, name: str) -> Tensor:
        marked: Tensor = Mark.apply(x, self.stamper, name)
        return marked

    def step(self) -> Tensor:
        self.stamper.begin_step()
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.model.loss(self.x, self.target, self.mark)
        loss.backward()
        self.stamper.stamp("backward to the input")
        self.optimiser.step()
        self.stamper.stamp("optimiser")
        self.stamper.end_step()
        return loss.detach()


class StepPace:
    """Keeps at most two steps in flight, and counts how often the GPU had already finished them."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.events: collections.deque[Any] = collections.deque()
        self.waits = self.late = self.idle = 0

    def step_submitted(self) -> None:
        if not self.cuda:
            return
        event = torch.cuda.Event(blocking=True)
        last_done = bool(self.events) and self.events[-1].query()
        event.record()
        self.events.append(event)
        if len(self.events) > STEPS_IN_FLIGHT:
            oldest = self.events.popleft()
            self.waits += 1
            self.late += oldest.query()
            self.idle += last_done
            oldest.synchronize()


class TrainingRun(NamedTuple):
    """The result of a period of training."""

    steps: int
    seconds: float
    loss: float
    pace: StepPace


def train(
    job: TrainingJob, device: torch.device, seconds: float, stop: threading.Event
) -> TrainingRun:
    pace, steps, loss = StepPace(device), 0, torch.zeros(())
    begin = time.monotonic()
    while not stop.is_set() and time.monotonic() - begin < seconds:
        loss = job.step()
        pace.step_submitted()
        steps += 1
    job.stamper.drain()
    return TrainingRun(steps, time.monotonic() - begin, float(loss), pace)


def wait_for_start(path: str, stop: threading.Event) -> None:
    """Create PATH.ready, then wait until the orchestrator creates PATH to start all jobs."""
    pathlib.Path(path + ".ready").touch()
    while not stop.is_set() and not pathlib.Path(path).exists():
        time.sleep(0.005)


def require_cuda() -> torch.device:
    """Return the GPU, with PyTorch's context created through libcuda.so.1."""
    if not torch.cuda.is_available():
        raise SystemExit("torch_workload: PyTorch finds no GPU; --device cpu runs without one")
    torch.empty(1, device="cuda")
    return torch.device("cuda", torch.cuda.current_device())


def limit_memory(limit: int) -> None:
    """Cap PyTorch's cache: without a cap it would grow up to the quota."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))


def allocate(count: int) -> dict[str, Any]:
    """Allocate `count` bytes: from the driver in one call, and from PyTorch in chunks."""
    require_cuda()
    driver, pointer = StampDriver(), ctypes.c_uint64()
    code = driver.mem_alloc(ctypes.byref(pointer), count)
    if code == 0:
        driver.mem_free(pointer)
    held: list[Tensor] = []
    with contextlib.suppress(torch.OutOfMemoryError):
        for begin in range(0, count, ALLOCATION_CHUNK):
            size = min(ALLOCATION_CHUNK, count - begin)
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    allocated = sum(chunk.numel() for chunk in held)
    return {"requested": count, "result": driver.result(code), "allocated": allocated}


def read_records(path: str) -> list[tuple[int, ...]]:
    data = pathlib.Path(path).read_bytes()
    return list(RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size]))


def queued_step_ms(job: TrainingJob, tries: int = 15) -> float | None:
    """Return the median GPU time of a step without gaps, queued behind a kernel that only waits.

    Return None if the host never finished queueing before that kernel ended.
    """
    taken = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(tries):
        torch.cuda.synchronize()
        torch.cuda._sleep(60_000_000)  # noqa: SLF001 - the only waiting kernel PyTorch has
        begin.record()
        job.step()
        end.record()
        ahead = not begin.query()
        torch.cuda.synchronize()
        if ahead:
            taken.append(begin.elapsed_time(end))
    return statistics.median(taken) if taken else None


def report_selftest(job: TrainingJob, path: str, run: TrainingRun) -> None:
    """Print the duration of each unit, and whether the job alone keeps the GPU busy."""
    stamps = read_records(path)
    units: dict[int, list[float]] = {}
    for (before, _), (now, kind) in itertools.pairwise(stamps):
        units.setdefault(kind, []).append((now - before) / 1e6)
    for kind, taken in sorted(units.items()):
        median = statistics.median(taken)
        high = statistics.quantiles(taken, n=20)[-1] if len(taken) > 1 else median
        print(f"{kind:4} {median:8.3f} ms  p95 {high:8.3f} ms  {job.stamper.labels[kind]}")
    medians = {kind: statistics.median(taken) for kind, taken in units.items()}
    largest = max(medians, key=medians.__getitem__)
    print(f"largest unit {medians[largest]:.3f} ms (kind {largest}, {job.stamper.labels[largest]})")
    last = [now for now, kind in stamps if kind == len(job.stamper.labels) - 1]
    steps = [(after - before) / 1e6 for before, after in itertools.pairwise(last)]
    step = statistics.fmean(steps)
    print(f"step {step:.3f} ms mean, sum of unit medians {sum(medians.values()):.3f} ms")
    queued = queued_step_ms(job) if run.pace.cuda else None
    if queued is not None:
        print(f"step without gaps {queued:.3f} ms: the GPU is busy {100 * queued / step:.1f} %")
    elif run.pace.cuda:
        print("step without gaps unknown: the host never queued a whole step ahead")
    if run.pace.waits:
        late, idle = (100 * n / run.pace.waits for n in (run.pace.late, run.pace.idle))
        print(
            f"when a step was submitted, the one before last was done in {late:.1f} % of cases,"
            f" the last in {idle:.1f} %"
        )
    print(f"loss {run.loss:.4f}")


def work(options: argparse.Namespace, stop: threading.Event) -> dict[str, Any]:
    device = torch.device("cpu") if options.device == "cpu" else require_cuda()
    cuda = device.type == "cuda"
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = False
    extra = None
    if cuda:
        limit_memory(options.torch_memory + options.memory)
        extra = torch.empty(options.memory, dtype=torch.uint8, device=device)
    if options.compile:
        from torch import _dynamo as dynamo  # noqa: PLC0415 - takes a second; for --compile only

        # The parts of a class share one code object, and each of their shapes is a variant of it.
        dynamo.config.recompile_limit = 64
    stamper = GpuStamper() if cuda else HostStamper()
    try:
        job = TrainingJob(options, device, stamper)
        for _ in range(WARM_UP_STEPS):
            job.step()
        stamper.drain()
        if options.wait_file:
            wait_for_start(options.wait_file, stop)
        stamper.record_to(options.out)
        run = train(job, device, options.seconds, stop)
        written = stamper.written
        stamper.record_to(None)
        if options.selftest:
            report_selftest(job, options.out, run)
    finally:
        stamper.close()
    del extra
    return {
        "units": written,
        "steps": run.steps,
        "seconds": round(run.seconds, 3),
        "memory_peak_torch": torch.cuda.max_memory_reserved() if cuda else 0,
        "result": "CUDA_SUCCESS",
    }


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training job that stamps its progress.")
    parser.add_argument("--model", choices=sorted(MODELS))
    parser.add_argument("--compile", action="store_true", help="torch.compile each part")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", help="the progress file")
    parser.add_argument("--wait-file", help="create WAIT_FILE.ready, then wait for WAIT_FILE")
    parser.add_argument("--memory", type=int, default=0, help="bytes to hold in addition")
    parser.add_argument("--batch", type=int, help="batch size; the default suits an H200")
    parser.add_argument("--torch-memory", type=int, default=TORCH_MEMORY)
    parser.add_argument("--allocate", type=int, metavar="BYTES")
    parser.add_argument("--selftest", action="store_true", help="print the duration of each unit")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny version, for tests")
    options = parser.parse_args(arguments)
    if options.allocate is None and options.model is None:
        parser.error("--model or --allocate is required")
    if options.out is None:
        options.out = "/dev/null" if not options.selftest else "selftest.stamps"
    return options


def main() -> int:
    options = parse_options()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if options.allocate is not None:
        print(json.dumps(allocate(options.allocate)), flush=True)
        return 0
    try:
        summary = work(options, stop)
    except torch.OutOfMemoryError as error:
        print(f"torch_workload: {error}", file=sys.stderr)
        print(
            json.dumps(
                {
                    "units": 0,
                    "steps": 0,
                    "seconds": 0.0,
                    "memory_peak_torch": torch.cuda.max_memory_reserved(),
                    "result": "CUDA_ERROR_OUT_OF_MEMORY",
                }
            )
        )
        return 1
    print(json.dumps(summary), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
