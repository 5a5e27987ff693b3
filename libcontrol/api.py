"""The driver API as a table: what the control library does with each function of libcuda.

A row is a name, parameters as in NVIDIA's cuda.h 13.0, and a method:

- `gate`     starts work on the GPU: may go while the container holds GPU time. `key` is the
             expression that identifies the work (its duration is learned under it), `blocks`
             distinguishes sizes of the same work, `stream` is the stream it goes to.
- `charge`   takes device memory: `size` is reserved before the driver is called, `pointer` names
             the block afterwards, `settle` (optional) is the size once the driver has answered.
- `refund`   gives device memory back: `pointer` names the block.
- `custom`   written by hand in `custom.c`.

What the table does not name is forwarded without our help: the control library needs (DT_NEEDED)
the original, so that every look-up of such a name falls through to it.
"""

from __future__ import annotations

from typing import NamedTuple


class Fn(NamedTuple):
    """One function of the driver API."""

    name: str
    params: str
    method: str
    key: str = ""
    blocks: str = "1"
    stream: str = ""
    size: str = ""
    settle: str = ""
    pointer: str = ""


_LAUNCH = (
    "CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, "
    "unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, "
    "unsigned int sharedMemBytes, CUstream hStream, void **kernelParams"
)
_GRID = "gate_blocks(gridDimX, gridDimY, gridDimZ)"
_CONFIG_GRID = "gate_blocks(config->gridDimX, config->gridDimY, config->gridDimZ)"


def _with_ptsz(fn: Fn) -> tuple[Fn, Fn]:
    """Return the row and its form for the per-thread default stream."""
    stream = f"gate_ptsz({fn.stream})" if fn.stream else ""
    return fn, fn._replace(name=fn.name + "_ptsz", stream=stream)


CUDA: tuple[Fn, ...] = (
    Fn("cuInit", "unsigned int Flags", "custom"),
    Fn(
        "cuGetProcAddress",
        "const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags",
        "custom",
    ),
    Fn(
        "cuGetProcAddress_v2",
        "const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, "
        "CUdriverProcAddressQueryResult *symbolStatus",
        "custom",
    ),
    Fn("cuDeviceTotalMem_v2", "size_t *bytes, CUdevice dev", "custom"),
    Fn("cuMemGetInfo_v2", "size_t *free_bytes, size_t *total", "custom"),
    Fn("cuCtxCreate_v2", "CUcontext *pctx, unsigned int flags, CUdevice dev", "custom"),
    Fn(
        "cuCtxCreate_v3",
        "CUcontext *pctx, void *paramsArray, int numParams, unsigned int flags, CUdevice dev",
        "custom",
    ),
    Fn(
        "cuCtxCreate_v4",
        "CUcontext *pctx, void *ctxCreateParams, unsigned int flags, CUdevice dev",
        "custom",
    ),
    Fn("cuCtxDestroy_v2", "CUcontext ctx", "custom"),
    Fn("cuDevicePrimaryCtxRetain", "CUcontext *pctx, CUdevice dev", "custom"),
    Fn("cuDevicePrimaryCtxRelease_v2", "CUdevice dev", "custom"),
    Fn("cuDevicePrimaryCtxReset_v2", "CUdevice dev", "custom"),
    Fn("cuStreamDestroy_v2", "CUstream hStream", "custom"),
    *_with_ptsz(
        Fn("cuStreamWaitEvent", "CUstream hStream, CUevent hEvent, unsigned int Flags", "custom")
    ),
    Fn(
        "cuMemAlloc_v2",
        "CUdeviceptr *dptr, size_t bytesize",
        "charge",
        size="bytesize",
        pointer="*dptr",
    ),
    Fn(
        "cuMemAllocPitch_v2",
        "CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height, "
        "unsigned int ElementSizeBytes",
        "charge",
        size="account_pitch(WidthInBytes, Height)",
        settle="account_product(*pPitch, Height)",
        pointer="*dptr",
    ),
    Fn(
        "cuMemAllocManaged",
        "CUdeviceptr *dptr, size_t bytesize, unsigned int flags",
        "charge",
        size="bytesize",
        pointer="*dptr",
    ),
    *_with_ptsz(
        Fn(
            "cuMemAllocAsync",
            "CUdeviceptr *dptr, size_t bytesize, CUstream hStream",
            "charge",
            size="bytesize",
            pointer="*dptr",
        )
    ),
    *_with_ptsz(
        Fn(
            "cuMemAllocFromPoolAsync",
            "CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream",
            "charge",
            size="bytesize",
            pointer="*dptr",
        )
    ),
    Fn("cuMemFree_v2", "CUdeviceptr dptr", "refund", pointer="dptr"),
    *_with_ptsz(
        Fn("cuMemFreeAsync", "CUdeviceptr dptr, CUstream hStream", "refund", pointer="dptr")
    ),
    *_with_ptsz(
        Fn(
            "cuLaunchKernel",
            _LAUNCH + ", void **extra",
            "gate",
            key="f",
            blocks=_GRID,
            stream="hStream",
        )
    ),
    *_with_ptsz(
        Fn(
            "cuLaunchKernelEx",
            "const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra",
            "gate",
            key="f",
            blocks=_CONFIG_GRID,
            stream="config->hStream",
        )
    ),
    *_with_ptsz(
        Fn(
            "cuLaunchCooperativeKernel",
            _LAUNCH,
            "gate",
            key="f",
            blocks=_GRID,
            stream="hStream",
        )
    ),
    *_with_ptsz(
        Fn(
            "cuGraphLaunch",
            "CUgraphExec hGraphExec, CUstream hStream",
            "gate",
            key="hGraphExec",
            stream="hStream",
        )
    ),
)

NVML: tuple[Fn, ...] = (
    Fn("nvmlDeviceGetMemoryInfo", "nvmlDevice_t device, nvmlMemory_t *memory", "custom"),
    Fn("nvmlDeviceGetMemoryInfo_v2", "nvmlDevice_t device, nvmlMemory_v2_t *memory", "custom"),
)
