"""Records when each unit of work in a CUDA stream ends, by the GPU's own clock.

A stamp is a one-thread kernel that stores %globaltimer straight into pinned host memory. It runs
in order with the work around it, costs the GPU a few microseconds and needs no synchronisation; a
host thread collects finished stamps and writes them as records of two little-endian u64, the time
and the unit's position in the step.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from typing import Any

import torch
from torch import Tensor

RECORD = struct.Struct("<QQ")
HARVEST_S = 0.05

STAMP_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry tidegate_stamp(.param .u64 slot)
{
    .reg .u64 %address, %now;
    ld.param.u64 %address, [slot];
    mov.u64 %now, %globaltimer;
    st.volatile.u64 [%address], %now;
    ret;
}
"""


class StampDriver:
    """The few calls of libcuda that a job makes itself; the dynamic loader finds the library."""

    def __init__(self) -> None:
        lib = ctypes.CDLL("libcuda.so.1")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.name_of = lib.cuGetErrorName
        self.name_of.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
        self.mem_alloc = lib.cuMemAlloc_v2
        self.mem_alloc.argtypes = [ctypes.POINTER(ctypes.c_uint64), size]
        self.mem_free = lib.cuMemFree_v2
        self.mem_free.argtypes = [ctypes.c_uint64]
        self.module_load_data = lib.cuModuleLoadData
        self.module_load_data.argtypes = [ctypes.POINTER(pointer), ctypes.c_char_p]
        self.module_get_function = lib.cuModuleGetFunction
        self.module_get_function.argtypes = [ctypes.POINTER(pointer), pointer, ctypes.c_char_p]
        self.launch_kernel = lib.cuLaunchKernel
        self.launch_kernel.argtypes = [pointer, *[ctypes.c_uint] * 7, pointer, pointer, pointer]

    def result(self, code: int) -> str:
        """Return the name of a CUresult, such as CUDA_ERROR_OUT_OF_MEMORY."""
        name = ctypes.c_char_p()
        self.name_of(code, ctypes.byref(name))
        return name.value.decode() if name.value else f"CUDA_ERROR_{code}"

    def check(self, code: int, call: str) -> None:
        if code:
            raise RuntimeError(f"{call}: {self.result(code)}")

    def load_function(self, ptx: bytes, name: bytes) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.module_load_data(ctypes.byref(module), ptx), "cuModuleLoadData")
        got = self.module_get_function(ctypes.byref(function), module, name)
        self.check(got, "cuModuleGetFunction")
        return function


class Stamper:
    """Numbers the units of a step and writes their stamps; subclasses read the clock."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.written = 0
        self._position = 0
        self._file = -1

    def begin_step(self) -> None:
        self._position = 0

    def end_step(self) -> None:
        """Raise RuntimeError if the step had a different number of units than the first one."""
        if self._position != len(self.labels):
            raise RuntimeError(
                f"a step had {self._position} units, but the first one had {len(self.labels)}"
            )

    def stamp(self, label: str) -> None:
        """Mark the end of a unit in the current stream."""
        kind = self._position
        self._position += 1
        if kind == len(self.labels):
            self.labels.append(label)
        self.take(kind)

    def write(self, records: bytes) -> None:
        if records and self._file >= 0:
            os.write(self._file, records)
            self.written += len(records) // RECORD.size

    def record_to(self, path: str | None) -> None:
        """Close the current file, and write later stamps to `path`; drop them if it is None."""
        self.drain()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def take(self, kind: int) -> None:
        raise NotImplementedError

    def drain(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.record_to(None)


class HostStamper(Stamper):
    """Stamps without a GPU: a unit on the CPU is done when its call returns."""

    def take(self, kind: int) -> None:
        self.write(RECORD.pack(time.monotonic_ns(), kind))

    def drain(self) -> None:
        pass


class GpuStamper(Stamper):
    """A ring of slots in pinned host memory that the GPU writes and a host thread collects.

    A slot is 0 until its kernel has run. Stamps follow each other on one stream, so collecting
    stops at the first slot that is 0.
    """

    RING = 1 << 14

    def __init__(self) -> None:
        super().__init__()
        self._driver = StampDriver()
        self._function = self._driver.load_function(STAMP_PTX, b"tidegate_stamp")
        self._ring = torch.zeros(self.RING, dtype=torch.int64, pin_memory=True)
        self._base = self._ring.data_ptr()
        self._slots = (ctypes.c_uint64 * self.RING).from_address(self._base)
        self._kinds = [0] * self.RING
        self._slot = ctypes.c_uint64()
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._slot))
        self._head = self._tail = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="stamps", daemon=True)
        self._thread.start()

    def take(self, kind: int) -> None:
        while self._head - self._tail >= self.RING:
            time.sleep(0.001)
        slot = self._head % self.RING
        self._kinds[slot] = kind
        self._slot.value = self._base + 8 * slot
        stream = torch.cuda.current_stream().cuda_stream
        code = self._driver.launch_kernel(
            self._function, 1, 1, 1, 1, 1, 1, 0, stream, self._arguments, None
        )
        if code:
            self._driver.check(code, "cuLaunchKernel of a stamp")
        self._head += 1

    def harvest(self) -> None:
        with self._lock:
            records = []
            while self._tail < self._head:
                slot = self._tail % self.RING
                now = self._slots[slot]
                if not now:
                    break
                self._slots[slot] = 0
                records.append(RECORD.pack(now, self._kinds[slot]))
                self._tail += 1
            self.write(b"".join(records))

    def drain(self) -> None:
        torch.cuda.synchronize()
        self.harvest()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        super().close()

    def _collect(self) -> None:
        while not self._stop.wait(HARVEST_S):
            self.harvest()


class Mark(torch.autograd.Function):
    """An identity function that stamps in the forward pass, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stamper: Stamper, name: str) -> Tensor:
        ctx.stamper, ctx.name = stamper, name
        stamper.stamp(f"forward of {name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.stamper.stamp(f"backward to {ctx.name}")
        return grads[0], None, None
