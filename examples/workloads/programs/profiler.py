#!/usr/bin/env python3
"""Tests PyTorch's profiler (CUPTI): the same kernels, each with a launch and a duration."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from program import NotHereError, ProgramCheck, run
from torch import nn
from torch.profiler import ProfilerActivity, profile, supported_activities

STEPS = 10
REPLAYS = 5

LAUNCHING = ("cuda_runtime", "cuda_driver")
"""Categories of the calls that launch work, in the trace."""


class ProfiledWork:
    """A model and its training step, eager or as a CUDA graph."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)).cuda()
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.inputs = torch.randn(64, 256)
        self.static = self.inputs.cuda()
        self.graph = torch.cuda.CUDAGraph()
        for _ in range(3):
            self.step()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(3):
                self.model(self.static)
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.out = self.model(self.static)
        torch.cuda.synchronize()

    def step(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        self.model(self.inputs.cuda()).square().mean().backward()
        self.optimiser.step()

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
        for _ in range(REPLAYS):
            self.graph.replay()
        torch.cuda.synchronize()


def trace_of(work: ProfiledWork) -> list[dict[str, Any]]:
    """Return the events of a profiled run that have a duration."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work.run()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def check_trace(program: ProgramCheck, events: list[dict[str, Any]]) -> None:
    """Check the kernels and copies of a trace, and record what can be compared."""
    by_kind = defaultdict(list)
    for event in events:
        by_kind[event.get("cat", "")].append(event)
    kernels, copies = by_kind["kernel"], by_kind["gpu_memcpy"]
    called = {one["args"].get("correlation") for kind in LAUNCHING for one in by_kind[kind]}
    program.check("there are kernels", kernels, sorted(by_kind))
    program.check(
        "each kernel has its launch",
        all(one["args"]["correlation"] in called for one in kernels),
        len(called),
    )
    program.check("each kernel has a duration", all(one["dur"] > 0 for one in kernels))
    for what, found in (("kernels", kernels), ("copies", copies)):
        counts = Counter(str(one["name"]) for one in found)
        program.value(what, [f"{count} x {name}" for name, count in sorted(counts.items())])
    program.value("bytes copied", float(sum(one["args"].get("bytes", 0) for one in copies)))
    program.note("kernel time, us", sum(one["dur"] for one in kernels))


def body(program: ProgramCheck) -> None:
    if ProfilerActivity.CUDA not in supported_activities():
        raise NotHereError("this PyTorch has no CUPTI")
    torch.manual_seed(7)
    work = ProfiledWork()
    trace_of(work)  # the first run initialises CUPTI
    check_trace(program, trace_of(work))
    program.launches = STEPS + REPLAYS


if __name__ == "__main__":
    run(body)
