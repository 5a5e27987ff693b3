#!/usr/bin/env python3
"""A decoding job that stamps its progress: tokens from a model with 24 layers, in a CUDA graph.

    torch_decode.py --seconds S --out FILE [--wait-file FILE]

Each unit is a token for each of eight sequences: one replay of the graph, a stamp after it, and
the tokens read back before the next replay, as in a server. The stamps are written to FILE. The
job needs PyTorch, a driver, and the modules in this directory.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import signal
import sys
import threading
import time
from typing import Any

import torch
from gpu_stamps import GpuStamper, HostStamper
from torch_step import Decode, DecodeGraph

WARM_UP = 50
"""Units that are not recorded, at the start."""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decodes tokens with a CUDA graph.")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", default="/dev/null", help="the progress file")
    parser.add_argument("--wait-file", help="create WAIT_FILE.ready, then wait for WAIT_FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny version, for tests")
    return parser.parse_args()


def decode(options: argparse.Namespace, stop: threading.Event) -> dict[str, Any]:
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit("torch_decode: PyTorch finds no GPU; --device cpu runs without one")
    torch.manual_seed(1)
    device = torch.device(options.device)
    torch.empty(1, device=device)  # creates the context that the stamper needs
    stamper = GpuStamper() if cuda else HostStamper()
    # Without a GPU there is no graph; the model is the same.
    job = (DecodeGraph if cuda else Decode)(device, tiny=options.tiny)
    for _ in range(WARM_UP):
        job.step()
    stamper.drain()
    if options.wait_file:
        pathlib.Path(options.wait_file + ".ready").touch()
        while not stop.is_set() and not pathlib.Path(options.wait_file).exists():
            time.sleep(0.005)
    stamper.record_to(options.out)

    def stamp() -> None:
        stamper.stamp("token")

    begin, units = time.monotonic(), 0
    while not stop.is_set() and time.monotonic() - begin < options.seconds:
        stamper.begin_step()
        job.step(stamp)
        stamper.end_step()
        units += 1
    seconds = time.monotonic() - begin
    stamper.close()
    return {"units": units, "seconds": round(seconds, 3), "result": "CUDA_SUCCESS"}


def main() -> int:
    options = parse_options()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print(json.dumps(decode(options, stop)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
