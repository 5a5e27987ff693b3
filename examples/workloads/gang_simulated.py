"""Backend of gang.py for simulated GPUs, on the driver API.

An all-reduce is the kernel `meet`, which spins until its counterpart on the other GPU runs. The
simulated driver acts on the start of a kernel only during a call by the process that launched it,
so a thread makes such calls continuously.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).with_name("programs")))
from driver_api import Cuda

WORK_NS, MEET_NS = 1_000_000, 500_000
RING, KINDS = 64, 3
CHECKPOINT = 100


class SimulatedPart:
    """One GPU."""

    def __init__(self, cuda: Cuda, rank: int, words: int) -> None:
        self.cuda, self.rank = cuda, rank
        self.own, self.other = words + 64 * rank, words + 64 * (1 - rank)
        self.context = cuda.get("cuDevicePrimaryCtxRetain", cuda.get("cuDeviceGet", rank))
        self.enter()
        self.module = cuda.get("cuModuleLoadData", ctypes.c_char_p(b"image"))
        self.burn, self.meet, self.mark_time = (
            cuda.get("cuModuleGetFunction", self.module, ctypes.c_char_p(name))
            for name in (b"burn", b"meet", b"stamp")
        )
        self.slots_at = cuda.get("cuMemHostAlloc", RING * KINDS * 8, 0)
        self.slots = (ctypes.c_uint64 * (RING * KINDS)).from_address(self.slots_at)
        self.events = [cuda.get("cuEventCreate", 2) for _ in range(RING)]
        self.file = -1

    def enter(self) -> None:
        self.cuda.call("cuCtxSetCurrent", self.context)

    def launch(self, function: int, *values: int) -> None:
        numbers = [ctypes.c_uint64(value) for value in values]
        pointers = (ctypes.c_void_p * len(numbers))(*(ctypes.addressof(one) for one in numbers))
        self.cuda.call("cuLaunchKernel", function, *[1] * 6, 0, 0, pointers, 0)

    def stamp(self, i: int, kind: int) -> None:
        self.launch(self.mark_time, self.slots_at + 8 * (i % RING * KINDS + kind))


class SimulatedGang:
    """The simulated GPUs of this process, with the same methods as TorchGang in gang_torch.py."""

    def __init__(self, ranks: list[int], world: int, out: Path, *, train: bool) -> None:
        path = out / "words"
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.ftruncate(fd, 4096)
        self._map = mmap.mmap(fd, 4096)
        os.close(fd)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for rank in ranks:
            ctypes.c_uint32.from_address(at + 64 * rank).value = 0
        self.out, self.train, self.words, self.world = out, train, at, world
        self.wrong = self.done = self.launched = 0
        self.sums: list[int] = []
        cuda = Cuda()
        cuda.call("cuInit", 0)
        self.parts = [SimulatedPart(cuda, rank, at) for rank in ranks]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stop.is_set():
            for part in self.parts:
                part.enter()
                part.cuda.attempt("cuStreamQuery", 0)
            time.sleep(0.0002)

    def iterate(self, i: int) -> None:
        for part in self.parts:
            part.enter()
            part.launch(part.burn, WORK_NS)
            part.stamp(i, 0)
        # The kernels are launched one after the other, as by a group of NCCL calls.
        for part in self.parts:
            part.enter()
            part.launch(part.meet, MEET_NS, part.own, part.other, i + 1)
        for part in self.parts:
            part.enter()
            part.stamp(i, 1)
            part.stamp(i, 2)
        self.launched = i

    def mark(self) -> int:
        i = self.launched
        for part in self.parts:
            part.enter()
            part.cuda.call("cuEventRecord", part.events[i % RING], 0)
        return i

    def wait(self, i: int) -> None:
        for part in self.parts:
            part.enter()
            part.cuda.call("cuEventSynchronize", part.events[i % RING])
            if part.file >= 0:
                at = i % RING * KINDS
                pairs = [(part.slots[at + kind], kind) for kind in range(KINDS)]
                flat = [word for pair in pairs for word in pair]
                os.write(part.file, (ctypes.c_uint64 * len(flat))(*flat))
        for rank in range(self.world):
            self.wrong += ctypes.c_uint32.from_address(self.words + 64 * rank).value < i + 1
        self.done += 1
        if self.train and i % CHECKPOINT == 0:
            self.sums.append(i)

    def record(self) -> None:
        for part in self.parts:
            path = self.out / f"gpu{part.rank}.bin"
            part.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def finish(self) -> dict[str, Any]:
        self._stop.set()
        self._thread.join()
        return {
            "checked": self.done * len(self.parts),
            "wrong": self.wrong,
            "checkpoints": [[float(one).hex() for one in self.sums] for _ in self.parts],
            "losses": [],
            "how": "simulated",
        }

    def close(self) -> None:
        for part in self.parts:
            os.close(part.file)
