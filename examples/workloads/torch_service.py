#!/usr/bin/env python3
"""A service in PyTorch that answers requests that arrive at random, and records their latency.

    torch_service.py --model resnet18|decode-graph --requests MEAN_US --seconds S --out FILE

A request is a forward pass of ResNet18 over a batch of images, or a few tokens of a decoder. Each
token is one CUDA graph, and is read back before the next one begins. The records of request_loop.py
are written to FILE. The service needs PyTorch, a driver, and the modules in this directory.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from request_loop import arrivals, serve
from torch import Tensor, nn
from torch_models import MODELS
from torch_step import Decode, DecodeGraph

IMAGES = 8
TOKENS = 2
"""Tokens per request and sequence of the decoder; a token takes 1.1 ms (H200)."""
WARM_UP = 50
"""Number of requests that are not recorded, at the start."""


def classify(device: torch.device, units: int, *, tiny: bool) -> Callable[[], None]:
    """Return a function that classifies a batch of images and reads the result back."""
    kind = MODELS["resnet18"]
    model = kind(lambda part: part, tiny=tiny).to(device=device, dtype=kind.dtype).eval()
    x, _ = model.data(units, device)
    parts: list[nn.Module] = list(model.parts)

    @torch.no_grad()
    def answer() -> None:
        y: Tensor = x
        for part in parts:
            y = part(y)
        y.argmax(-1).tolist()

    return answer


def generate(device: torch.device, units: int, *, tiny: bool) -> Callable[[], None]:
    """Return a function that decodes `units` tokens."""
    # Without a GPU there is no graph; the model is the same.
    job = (DecodeGraph if device.type == "cuda" else Decode)(device, tiny=tiny)

    def answer() -> None:
        for _ in range(units):
            job.step()

    return answer


MAKE: dict[str, tuple[Callable[..., Callable[[], None]], int]] = {
    "resnet18": (classify, IMAGES),
    "decode-graph": (generate, TOKENS),
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answers requests that arrive at random.")
    parser.add_argument("--model", choices=sorted(MAKE), required=True)
    parser.add_argument(
        "--requests", type=float, required=True, help="mean time between two requests, in us"
    )
    parser.add_argument("--units", type=int, help="images or tokens per request")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", default="/dev/null", help="file for the records of the requests")
    parser.add_argument("--wait-file", help="create WAIT_FILE.ready, then wait for WAIT_FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny version, for tests")
    return parser.parse_args()


def work(options: argparse.Namespace, stop: threading.Event) -> dict[str, Any]:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch_service: PyTorch finds no GPU; --device cpu runs without one")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    make, units = MAKE[options.model]
    answer = make(torch.device(options.device), options.units or units, tiny=options.tiny)
    for _ in range(WARM_UP):
        answer()
    if options.wait_file:
        pathlib.Path(options.wait_file + ".ready").touch()
        while not stop.is_set() and not pathlib.Path(options.wait_file).exists():
            time.sleep(0.001)
    with pathlib.Path(options.out).open("wb") as out:
        times = arrivals(options.requests, options.seconds, options.seed)
        n = serve(answer, times, out, stop)
    return {"requests": n, "result": "CUDA_SUCCESS"}


def main() -> int:
    options = parse_options()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print(json.dumps(work(options, stop)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
