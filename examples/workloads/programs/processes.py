#!/usr/bin/env python3
"""Tests an engine with several processes: a front end, an engine core, and two workers on one GPU.

Only the workers have contexts. They share a tensor through CUDA IPC, and answer through pipes. A
worker is killed, and its successor needs the memory that the dead one held.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from driver_api import MIB, CallError, Cuda
from program import ProgramCheck, run, wait_until

WORDS = MIB
ROUNDS = 20
LAZY_PEER_ACCESS = 1
SLACK = 64 * MIB
ANSWER_S = 60
HANDLE = ctypes.c_char * 64


class MemoryHandle(ctypes.Structure):
    """CUipcMemHandle, which calls take by value."""

    _fields_ = (("reserved", HANDLE),)


class EngineWorker:
    """A process with a context: a tensor to share, and a cache that takes most of its memory."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.cuda = Cuda()
        self.cuda.start()
        self.tensor = self.cuda.get("cuMemAlloc_v2", 4 * WORDS)

    def hold(self, size: int) -> None:
        """Allocate the cache, and write to both of its ends."""
        block = self.cuda.get("cuMemAlloc_v2", size)
        for address in (block, block + size - MIB):
            self.cuda.call("cuMemsetD32_v2", address, 7, MIB // 4)
        self.cuda.call("cuCtxSynchronize")

    def write(self, value: int) -> int:
        """Fill the tensor, add one to it in each round, and return its final value."""
        self.cuda.call("cuMemsetD32_v2", self.tensor, value, WORDS)
        added = sum(self.cuda.add_one(self.tensor, WORDS) for _ in range(ROUNDS))
        self.cuda.call("cuCtxSynchronize")
        return value + added

    def read(self) -> list[int]:
        """Return the distinct words of the tensor."""
        return sorted(set(self.cuda.words(self.tensor, WORDS)))

    def share(self) -> bytes:
        """Return the handle with which other processes open the tensor."""
        handle = MemoryHandle()
        self.cuda.call("cuIpcGetMemHandle", ctypes.byref(handle), self.tensor)
        return bytes(handle)

    def take(self, raw: bytes) -> bool:
        """Copy another worker's tensor to this one's, and write to both.

        Return whether the GPU computes, and hence shares contents; the simulated one does not.
        """
        handle = MemoryHandle.from_buffer_copy(raw)
        theirs = self.cuda.get("cuIpcOpenMemHandle_v2", handle, LAZY_PEER_ACCESS)
        self.cuda.call("cuMemcpyDtoD_v2", self.tensor, theirs, 4 * WORDS)
        computes = self.cuda.add_one(self.tensor, WORDS) + self.cuda.add_one(theirs, WORDS) > 0
        self.cuda.call("cuCtxSynchronize")
        self.cuda.call("cuIpcCloseMemHandle", theirs)
        return computes

    def free(self) -> int:
        """Return the free memory, in bytes."""
        return self.cuda.memory()[0]


def serve(make: Callable[..., Any], requests: Connection, *arguments: Any) -> None:
    """Answer requests, pairs (method, arguments), until the other end closes the pipe."""
    try:
        one = make(*arguments)
        while True:
            method, given = requests.recv()
            try:
                requests.send(getattr(one, method)(*given))
            except CallError as e:
                requests.send(f"worker {arguments}: {e}")
    except EOFError:
        pass


class Remote:
    """An object in a separate process, and the pipe to it."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(make, theirs, *arguments))
        self.process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the answer to a request."""
        self.pipe.send((method, arguments))
        if not self.pipe.poll(ANSWER_S):
            raise TimeoutError(f"no answer to {method} in {ANSWER_S} s")
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.close()
        self.process.join(ANSWER_S)


class Core:
    """The engine core: starts the workers, passes requests on, and replaces a worker."""

    def __init__(self) -> None:
        self.workers = [Remote(EngineWorker, rank) for rank in range(2)]

    def ask(self, rank: int, method: str, *arguments: Any) -> Any:
        return self.workers[rank].call(method, *arguments)

    def kill(self, rank: int, enough: int) -> tuple[bool, float]:
        """Kill a worker; return whether the other sees `enough` bytes free, and the delay in ms."""
        self.workers[rank].process.kill()
        self.workers[rank].process.join()
        ended = time.monotonic()
        back = wait_until(lambda: self.ask(1 - rank, "free") >= enough, 10, every=0.001)
        return back, (time.monotonic() - ended) * 1000

    def replace(self, rank: int) -> None:
        self.workers[rank].pipe.close()
        self.workers[rank] = Remote(EngineWorker, rank)

    def stop(self) -> None:
        for worker in self.workers:
            worker.end()


def share(program: ProgramCheck, core: Remote, when: str) -> None:
    """Let worker 1 read and change the tensor of worker 0."""
    wanted = core.call("ask", 0, "write", 1000)
    core.call("ask", 1, "write", 2000)
    computes = core.call("ask", 1, "take", core.call("ask", 0, "share"))
    found = [core.call("ask", rank, "read") for rank in range(2)]
    right = not computes or found == [[wanted + 1]] * 2
    program.check(f"the workers share a tensor {when}", computes in {True, False}, computes)
    program.check(f"both have the right contents {when}", right, (wanted, found))
    program.value(f"contents {when}", str(found))


def body(program: ProgramCheck) -> None:
    core = Remote(Core)
    program.until_end.callback(core.end)
    program.until_end.callback(core.call, "stop")
    # A third cache does not fit in the quota.
    cache = program.quota * 35 // 100 // MIB * MIB
    share(program, core, "at first")
    core.call("ask", 0, "hold", cache)
    before = core.call("ask", 0, "free")
    held = core.call("ask", 1, "hold", cache)
    program.check("two workers have their caches", held is None, held)
    back, taken = core.call("kill", 1, before - SLACK)
    program.check(
        "the memory of a killed worker comes back soon", back and taken <= program.within_ms, taken
    )
    program.note("ms until the memory of the killed worker is back", round(taken, 1))
    core.call("replace", 1)
    held = core.call("ask", 1, "hold", cache)
    program.check("its successor has the memory", held is None, held)
    share(program, core, "afterwards")
    program.launches = 2 * ROUNDS


if __name__ == "__main__":
    run(body)
