#!/usr/bin/env python3
"""A job on several GPUs: in a loop, work on each of them and an all-reduce over all of them.

    gang.py --form processes|single --work reduce|train --seconds S --out DIR [--wait-file F]

`processes` runs a process for each GPU, `single` one process and one thread for all of them.
`reduce` multiplies matrices and checks every result of the all-reduce; `train` trains a small
model with the data divided, and records the sum of its weights every 100 steps. Each GPU's own
clock stamps the parts of an iteration into DIR/gpu<n>.bin. The job prints its progress once a
second, and a line of JSON at the end. It ends when the time is up or DIR/end exists. After
20 s without progress its processes print their stacks, and after a minute the job fails. It needs
PyTorch with NCCL, and the modules in this directory.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORLD = 2
WARM_UP = 12
DEPTH = 4
"""Iterations that are launched ahead of the last one that the GPUs have completed."""

QUIET_S, STILL_S, SET_UP_S = 20.0, 60.0, 90.0
"""Seconds without progress after which the processes print their stacks, after which the job fails,
and after which it fails during set-up."""

NCCL = {
    # Not every machine has multicast over NVLink, and it may harm other users of the switches.
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "INFO",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}

GO, STOP_AT, END, DONE = 0, 1, 2, 8
"""Indexes of the words that the processes share: a request to begin; the iteration to stop before;
a request to end; and from DONE on the number of iterations that each process has completed."""


def say(text: str) -> None:
    print(f"gang: {text}", flush=True)


class Control:
    """A page of words in DIR/control, mapped by all processes of the job."""

    def __init__(self, out: Path, *, create: bool = False) -> None:
        path = out / "control"
        if create:
            path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4096)
        self.words = memoryview(self._map).cast("Q")


# ---- one process ----


def work(options: argparse.Namespace) -> None:
    """Iterate on the GPUs of this process until all stop before the same iteration."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    ranks = [int(rank) for rank in options.ranks.split(",")]
    number, out = ranks[0], Path(options.out)
    words = Control(out).words
    module = importlib.import_module(f"gang_{options.on}")
    kind = module.SimulatedGang if options.on == "simulated" else module.TorchGang
    backend = kind(ranks, WORLD, out, train=options.work == "train")
    say(f"process {number}: set up")
    for i in range(WARM_UP):
        backend.iterate(i)
        backend.wait(backend.mark())
    backend.record()
    (out / f"ready{number}").touch()
    while not words[GO]:
        time.sleep(0.001)
    pending: collections.deque[Any] = collections.deque()
    i, done, longest = WARM_UP, 0, 0.0
    begin = last = now = time.monotonic()
    while not (words[STOP_AT] and i >= words[STOP_AT]):
        backend.iterate(i)
        pending.append(backend.mark())
        i += 1
        if len(pending) > DEPTH:
            backend.wait(pending.popleft())
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            done += 1
            words[DONE + number] = done
        over = words[END] or now - begin > options.seconds
        if number == 0 and over and not words[STOP_AT]:
            # No process can be beyond this iteration, because its all-reduce needs this process.
            words[STOP_AT] = i + 4 * DEPTH
    for mark in pending:
        backend.wait(mark)
    now = time.monotonic()
    answer = {
        "iterations": i - WARM_UP,
        "seconds": round(now - begin, 3),
        "longest_s": round(max(longest, now - last), 4),
        **backend.finish(),
    }
    (out / f"process{number}.json").write_text(json.dumps(answer))
    say(f"process {number}: done")
    backend.close()


# ---- the parent of all processes ----


def choose_gpus() -> None:
    """Make the GPUs that Tidegate gave this container visible to CUDA, in Tidegate's order."""
    with contextlib.suppress(OSError):
        listed = Path("/run/tidegate/devices").read_text().strip()
        os.environ["CUDA_VISIBLE_DEVICES"] = listed


def start(options: argparse.Namespace, out: Path) -> list[subprocess.Popen[bytes]]:
    """Start the processes, with their ranks."""
    choose_gpus()
    os.environ |= {**NCCL, "NCCL_DEBUG_FILE": str(out / "nccl.%p"), "PYTHONUNBUFFERED": "1"}
    divided = [str(rank) for rank in range(WORLD)]
    groups = divided if options.form == "processes" else [",".join(divided)]
    return [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--ranks", ranks])
        for ranks in groups
    ]


class StillError(Exception):
    """The job makes no progress, or one of its processes failed."""


def watch(options: argparse.Namespace, out: Path, children: list[subprocess.Popen[bytes]]) -> None:
    """Start the iterations once all processes are ready; print progress until all have ended."""
    words = Control(out).words
    began = changed = printed = time.monotonic()
    seen: list[int] = []
    asked = False
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children):
            break
        now = time.monotonic()
        ready = sum((out / f"ready{rank}").exists() for rank in range(WORLD))
        if ready == len(children) and not words[GO]:
            if options.wait_file:
                Path(options.wait_file + ".ready").touch()
            if not options.wait_file or Path(options.wait_file).exists():
                words[GO] = 1
                began = now
            changed = now
        if (out / "end").exists():
            words[END] = 1
        state = [ready, *words[DONE : DONE + WORLD]]
        if state != seen:
            seen, changed, asked = state, now, False
        if now - printed >= 1:
            printed = now
            say(f"{now - began:.0f} s: {state[1:]} iterations, {ready} processes ready")
        if now - changed > QUIET_S and not asked:
            asked = True
            for child in children:
                child.send_signal(signal.SIGUSR1)
        most = STILL_S if words[GO] else SET_UP_S
        if now - changed > most:
            raise StillError(f"no progress for {most:.0f} s at {state}")
        time.sleep(0.02)
    statuses = [child.poll() for child in children]
    if any(statuses):
        raise StillError(f"processes ended with {statuses}")


def transports(out: Path) -> list[str]:
    """Return the transports between GPUs that NCCL's log names."""
    lines = [
        line
        for path in sorted(out.glob("nccl.*"))
        for line in path.read_text(errors="replace").splitlines()
    ]
    return sorted({line.split(" via ")[1].strip() for line in lines if " via " in line})


def lead(options: argparse.Namespace) -> int:
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    left = ("ready*", "process*.json", "store", "end", "control", "words", "gpu*.bin", "nccl.*")
    for name in left:
        for path in out.glob(name):
            path.unlink()
    Control(out, create=True)
    children = start(options, out)
    try:
        watch(options, out, children)
    except StillError as e:
        say(str(e))
        return 3
    finally:
        for child in children:
            child.kill()
    answers = [json.loads(path.read_text()) for path in sorted(out.glob("process*.json"))]
    checkpoints = [one for answer in answers for one in answer["checkpoints"]]
    result = {
        "iterations": min(answer["iterations"] for answer in answers),
        "seconds": max(answer["seconds"] for answer in answers),
        "longest_s": max(answer["longest_s"] for answer in answers),
        "checked": sum(answer["checked"] for answer in answers),
        "wrong": sum(answer["wrong"] for answer in answers),
        "alike": all(one == checkpoints[0] for one in checkpoints),
        "checkpoints": checkpoints[0],
        "losses": answers[0]["losses"],
        "how": answers[0]["how"],
        "transports": transports(out),
    }
    print(json.dumps(result), flush=True)
    return 0 if result["alike"] and not result["wrong"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="A job on several GPUs.")
    parser.add_argument("--form", choices=("processes", "single"), default="processes")
    parser.add_argument("--work", choices=("reduce", "train"), default="reduce")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", required=True, help="a directory")
    parser.add_argument("--wait-file", help="create WAIT_FILE.ready, then wait for WAIT_FILE")
    parser.add_argument("--on", choices=("torch", "simulated"), default="torch")
    parser.add_argument("--ranks", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks:
        work(options)
        return 0
    return lead(options)


if __name__ == "__main__":
    sys.exit(main())
