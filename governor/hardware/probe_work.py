"""Program for the probe's worker processes, which keep a GPU busy for given lengths of time.

It is started with the path of a libcuda and the UUID of a GPU, and writes a line of JSON when it is
ready. For each line with a number of milliseconds that it reads, it runs a kernel that takes that
long if nothing else uses the GPU, and writes how long the kernel took and when it ended, in
nanoseconds on the monotonic clock. Before the first run it measures the kernel's speed, for which
it must have the GPU to itself. If a call fails, it writes a line with the error and exits.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

from oci_hook.kernel import die_with_parent

KERNEL = b"""\
.version 7.0
.target sm_50
.address_size 64
.visible .entry burn(.param .u64 count, .param .u64 sink)
{
  .reg .u64 %n, %i, %p;
  .reg .f32 %a;
  .reg .pred %q;
  ld.param.u64 %n, [count];
  ld.param.u64 %p, [sink];
  mov.u64 %i, 0;
  mov.f32 %a, 0f3F800000;
LOOP:
  fma.rn.f32 %a, %a, 0f3F7FFFFF, 0f33800000;
  add.u64 %i, %i, 1;
  setp.lt.u64 %q, %i, %n;
  @%q bra LOOP;
  setp.eq.f32 %q, %a, 0f00000000;
  @%q st.global.f32 [%p], %a;
  ret;
}
"""
"""One thread of dependent multiply-adds, in PTX, so that its duration is proportional to `count`.
The simulated GPU has a kernel of this name, which takes `count` nanoseconds."""

FIRST = 1 << 14
"""First count that is tried."""
LONG_MS = 10.0
"""Shortest duration from which the kernel's speed is computed, in ms."""
N_WARM = 8
"""Number of runs of such a kernel, of which the fastest counts: the GPU's clock rises with use."""


class WorkFailedError(Exception):
    """A call to the driver failed; the message is one line."""


class GpuContext:
    """A context on a GPU with one kernel."""

    def __init__(self, library: str, uuid: str) -> None:
        self._cuda = ctypes.CDLL(library)
        self._call("cuInit", 0)
        context, module, self._kernel = (ctypes.c_void_p() for _ in range(3))
        self._sink = ctypes.c_uint64()
        self._events = (ctypes.c_void_p(), ctypes.c_void_p())
        device = self._find(uuid)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuModuleLoadData", ctypes.byref(module), KERNEL)
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"burn")
        self._call("cuMemAlloc_v2", ctypes.byref(self._sink), ctypes.c_size_t(64))
        for event in self._events:
            self._call("cuEventCreate", ctypes.byref(event), 0)
        self._per_ms = 0.0

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise WorkFailedError(f"{name} returned {status}")

    def _find(self, uuid: str) -> ctypes.c_int:
        """Return the device with this UUID, given in NVML's form (GPU-...)."""
        count, device = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        wanted = bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))
        for index in range(count.value):
            found = (ctypes.c_ubyte * 16)()
            self._call("cuDeviceGet", ctypes.byref(device), index)
            self._call("cuDeviceGetUuid", found, device)
            if bytes(found) == wanted:
                return device
        raise WorkFailedError(f"CUDA has no GPU {uuid}")

    def _launch(self, count: int) -> None:
        values = (ctypes.c_uint64(count), self._sink)
        parameters = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
        shape = (1, 1, 1, 1, 1, 1)
        self._call("cuLaunchKernel", self._kernel, *shape, 0, None, parameters, None)

    def _measure(self, count: int) -> float:
        """Return how long the kernel takes with this count, in ms, by the GPU's clock."""
        begin, end = self._events
        took = ctypes.c_float()
        self._call("cuEventRecord", begin, None)
        self._launch(count)
        self._call("cuEventRecord", end, None)
        self._call("cuEventSynchronize", end)
        self._call("cuEventElapsedTime", ctypes.byref(took), begin, end)
        return took.value

    def _calibrate(self) -> float:
        """Return the count that takes a millisecond."""
        count = FIRST
        while self._measure(count) < LONG_MS:
            count *= 2
        return count / min(self._measure(count) for _ in range(N_WARM))

    def work(self, ms: float) -> int:
        """Work for `ms`; return how long it took, in ns. The first call takes longer."""
        self._per_ms = self._per_ms or self._calibrate()
        began = time.monotonic_ns()
        self._launch(max(1, int(ms * self._per_ms)))
        self._call("cuCtxSynchronize")
        return time.monotonic_ns() - began


def main() -> None:
    """Serve the process at the other end of the pipes, and end with it."""
    # A process with its channels off does not notice that its pipe was closed.
    die_with_parent()
    library, uuid = sys.argv[1:3]
    try:
        gpu = GpuContext(library, uuid)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            ns = gpu.work(float(line))
            print(json.dumps({"ns": ns, "end": time.monotonic_ns()}), flush=True)
    except (WorkFailedError, OSError, AttributeError, ValueError) as e:
        print(json.dumps({"error": str(e)}), flush=True)
