#!/usr/bin/env python3
"""Tests CUDA graphs in PyTorch: captured inference and training steps, and graphed callables."""

from __future__ import annotations

import copy

import torch
from program import ProgramCheck, run
from torch import nn

REPLAYS = 25


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64), nn.Tanh()).cuda()


def warm_up(work) -> None:  # noqa: ANN001 - any callable
    """Run the work on another stream before its capture, as PyTorch requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)


def inference(program: ProgramCheck) -> None:
    """Replay a forward pass with new input each time."""
    model = make_model().eval()
    inputs = torch.randn(REPLAYS, 32, 128).cuda()
    with torch.no_grad():
        wanted = [model(x).sum().item() for x in inputs]
        static = inputs[0].clone()
        warm_up(lambda: model(static))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            out = model(static)
        found = []
        for x in inputs:
            static.copy_(x)
            graph.replay()
            found.append(out.sum().item())
    off = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    program.check("a replayed forward pass gives the result of the eager one", off < 1e-2, off)
    program.value("forward", found, 1e-2)


def training(program: ProgramCheck) -> None:
    """Replay a whole step: forward, backward, optimiser."""
    model = make_model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    x, wanted = torch.randn(32, 128).cuda(), torch.randn(32, 64).cuda()
    start = copy.deepcopy(model.state_dict())

    def step() -> torch.Tensor:
        optimiser.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), wanted)
        loss.backward()
        optimiser.step()
        return loss

    eager = [step().item() for _ in range(REPLAYS)]
    warm_up(step)
    optimiser.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    model.load_state_dict(start)
    replayed = []
    for _ in range(REPLAYS):
        graph.replay()
        replayed.append(loss.item())
    off = max(abs(a - b) for a, b in zip(eager, replayed, strict=True))
    program.check("a replayed training step gives the result of the eager one", off < 1e-2, off)
    program.value("losses", replayed, 1e-2)


def callables(program: ProgramCheck) -> None:
    """Let PyTorch graph a module, forward and backward."""
    plain = make_model()
    sample = torch.randn(32, 128, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(plain), (sample,))
    x = torch.randn(32, 128).cuda()
    sizes = []
    for model in (plain, graphed):
        for _ in range(5):
            given = x.clone().requires_grad_()
            model(given).pow(2).sum().backward()
        sizes.append(given.grad.abs().mean().item() if given.grad is not None else 0.0)
    program.check(
        "a graphed callable gives the result of the plain one",
        abs(sizes[0] - sizes[1]) < 1e-3,
        sizes,
    )
    program.value("gradient through a graphed callable", sizes[1], 1e-2)


def body(program: ProgramCheck) -> None:
    torch.manual_seed(4)
    inference(program)
    training(program)
    callables(program)
    torch.cuda.synchronize()
    program.launches = 3 * REPLAYS


if __name__ == "__main__":
    run(body)
