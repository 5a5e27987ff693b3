#!/usr/bin/env python3
"""Tests sleep and wake in a serving engine: memory is unmapped and mapped again.

The addresses stay reserved. When the engine goes to sleep, the contents are copied to pinned host
memory, and the memory is unmapped and released. When it wakes, new memory is mapped at the same
addresses and filled again.
"""

from __future__ import annotations

import ctypes
import hashlib
import random

from driver_api import MIB, Cuda
from program import ProgramCheck, run

REGION = 16 * MIB
REGIONS = 4
SIZE = REGION * REGIONS
WORDS = SIZE // 4
ROUNDS = 50

SLACK = 8 * MIB
"""Tolerance for a measurement of free memory: page tables, and what the driver takes for copies."""

PINNED, DEVICE, READ_WRITE, MINIMUM = 1, 1, 3, 0

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class MemoryLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", MemoryLocation),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemoryLocation), ("flags", ctypes.c_int))


class Weights:
    """Memory that can be unmapped, and mapped again at the same addresses."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        here = MemoryLocation(DEVICE, 0)
        self.properties = AllocationProperties(PINNED, 0, here)
        self.access = Access(here, READ_WRITE)
        self.granularity = cuda.get(
            "cuMemGetAllocationGranularity", ctypes.byref(self.properties), MINIMUM
        )
        self.address = cuda.get("cuMemAddressReserve", SIZE, 0, 0, 0)
        self.handles: list[int] = []

    def map(self) -> None:
        """Create memory for each region, and map it."""
        properties = ctypes.byref(self.properties)
        for i in range(REGIONS):
            handle = self.cuda.get("cuMemCreate", REGION, properties, 0)
            self.cuda.call("cuMemMap", self.address + i * REGION, REGION, 0, handle, 0)
            self.handles.append(handle)
        self.cuda.call("cuMemSetAccess", self.address, SIZE, ctypes.byref(self.access), 1)

    def unmap(self) -> None:
        """Unmap and release the memory; the addresses stay reserved."""
        for i, handle in enumerate(self.handles):
            self.cuda.call("cuMemUnmap", self.address + i * REGION, REGION)
            self.cuda.call("cuMemRelease", handle)
        self.handles.clear()


def body(program: ProgramCheck) -> None:
    cuda = Cuda()
    cuda.start()
    saved, again = (cuda.get("cuMemHostAlloc", SIZE, 0) for _ in range(2))
    first = random.Random(7).randbytes(REGION)  # noqa: S311 - a pattern, no secret
    weights = Weights(cuda)
    program.check(
        "regions are multiples of the granularity", REGION % weights.granularity == 0, REGION
    )
    weights.map()
    for i in range(REGIONS):
        cuda.call("cuMemcpyHtoD_v2", weights.address + i * REGION, ctypes.c_char_p(first), REGION)
    differ, falls, rises = [], [], []
    added = 0
    for i in range(ROUNDS):
        added += cuda.add_one(weights.address, WORDS)
        cuda.call("cuMemcpyDtoH_v2", saved, weights.address, SIZE)
        awake, _ = cuda.memory()
        weights.unmap()
        asleep, _ = cuda.memory()
        # Others can use the memory that was released; the memory that is mapped next is different.
        other = cuda.get("cuMemAlloc_v2", SIZE)
        cuda.call("cuMemsetD32_v2", other, i, WORDS)
        cuda.call("cuCtxSynchronize")
        cuda.call("cuMemFree_v2", other)
        asleep_again, _ = cuda.memory()
        weights.map()
        rises.append(asleep - awake)
        falls.append(asleep_again - cuda.memory()[0])
        cuda.call("cuMemcpyHtoD_v2", weights.address, saved, SIZE)
        ctypes.memset(again, 0, SIZE)
        cuda.call("cuMemcpyDtoH_v2", again, weights.address, SIZE)
        if _memcmp(saved, again, SIZE):
            differ.append(i)
    program.check("contents are the same after each wake", not differ, differ)
    for name, sizes in (("falls with each wake", falls), ("rises with each sleep", rises)):
        off = [one for one in sizes if abs(one - SIZE) > SLACK]
        program.check(f"free memory {name}", not off, off)
    begin = [int.from_bytes(first[i : i + 4], "little") for i in range(0, 64, 4)]
    wanted = [(word + added) % (1 << 32) for word in begin]
    found = [cuda.words(weights.address + i * REGION, 16) for i in range(REGIONS)]
    program.check("the kernels' sums survived", all(one == wanted for one in found), found)
    contents = hashlib.sha256(ctypes.string_at(again, SIZE)).hexdigest()
    program.value("contents at the end", contents)
    weights.unmap()
    cuda.call("cuMemAddressFree", weights.address, SIZE)
    for block in (saved, again):
        cuda.call("cuMemFreeHost", block)
    program.launches = ROUNDS


if __name__ == "__main__":
    run(body)
