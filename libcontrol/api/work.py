"""Rows of the API table for functions that start work on the GPU or affect the queue model."""

from __future__ import annotations

import re

from libcontrol.api.row import Fn, with_ptds, with_ptsz

_LAUNCH = (
    "CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, "
    "unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, "
    "unsigned int sharedMemBytes, CUstream hStream, void **kernelParams"
)
_GRID = "gate_blocks(gridDimX, gridDimY, gridDimZ)"
_OLD_GRID = "gate_blocks((unsigned)grid_width, (unsigned)grid_height, 1)"

_LAUNCHES: tuple[Fn, ...] = (
    *with_ptsz(
        Fn(
            "cuLaunchKernel",
            _LAUNCH + ", void **extra",
            "gate",
            key="f",
            blocks=_GRID,
            stream="hStream",
        )
    ),
    *with_ptsz(
        Fn(
            "cuLaunchKernelEx",
            "const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra",
            "gate",
            key="f",
            blocks="gate_config_blocks(config)",
            stream="gate_config_stream(config)",
        )
    ),
    *with_ptsz(
        Fn(
            "cuLaunchCooperativeKernel",
            _LAUNCH,
            "gate",
            key="f",
            blocks=_GRID,
            stream="hStream",
        )
    ),
    *with_ptsz(
        Fn(
            "cuGraphLaunch",
            "CUgraphExec hGraphExec, CUstream hStream",
            "gate",
            key="hGraphExec",
            stream="hStream",
            needed="account_graphs()",
            before="account_graph_before(hGraphExec)",
            after="account_graph_after(hGraphExec)",
        )
    ),
    Fn(
        "cuLaunchCooperativeKernelMultiDevice",
        "CUDA_LAUNCH_PARAMS *launchParamsList, unsigned int numDevices, unsigned int flags",
        "custom",
    ),
    Fn("cuLaunch", "CUfunction f", "gate", key="f", stream="NULL"),
    Fn(
        "cuLaunchGrid",
        "CUfunction f, int grid_width, int grid_height",
        "gate",
        key="f",
        blocks=_OLD_GRID,
        stream="NULL",
    ),
    Fn(
        "cuLaunchGridAsync",
        "CUfunction f, int grid_width, int grid_height, CUstream hStream",
        "gate",
        key="f",
        blocks=_OLD_GRID,
        stream="hStream",
    ),
)

_BYTES = "size_t ByteCount"


def _old(fn: Fn) -> Fn:
    """Return the row of the form from before CUDA 3.2, with 32-bit addresses and sizes."""
    params = re.sub(r"\bCUdeviceptr\b", "CUdeviceptr_v1", fn.params)
    params = re.sub(r"\bsize_t\b", "unsigned int", params)
    params = re.sub(r"\b(CUDA_MEMCPY[23]D)\b", r"\1_v1", params)
    copy = re.sub(r"\bcopy_([23]d)\b", r"copy_\1_v1", fn.copy)
    return fn._replace(name=fn.name.removesuffix("_v2"), params=params, copy=copy)


def _copy(name: str, params: str, copy: str) -> tuple[Fn, ...]:
    """Return a copy function's rows: both default streams, and the oldest form of _v2 functions."""
    if "CUstream hStream" in params:
        rows = with_ptsz(Fn(name, params, "copy", copy=copy, stream="hStream"))
    else:
        rows = with_ptds(Fn(name, params, "copy", copy=copy, stream="NULL"))
    return (*rows, _old(rows[0])) if name.endswith("_v2") else rows


def _both(name: str, params: str, copy: str) -> tuple[Fn, ...]:
    """Return the rows of a copy function that exists with and without a stream parameter."""
    base = name.removesuffix("_v2")
    suffix = name[len(base) :]
    return (
        *_copy(name, params, copy),
        *_copy(f"{base}Async{suffix}", params + ", CUstream hStream", copy),
    )


def _fills() -> tuple[Fn, ...]:
    rows: list[Fn] = []
    for bits, value in (8, "unsigned char uc"), (16, "unsigned short us"), (32, "unsigned int ui"):
        width = bits // 8
        flat = f"CUdeviceptr dstDevice, {value}, size_t N"
        rows += _copy(f"cuMemsetD{bits}_v2", flat, f"copy_fill(N, {width})")
        rows += _copy(
            f"cuMemsetD{bits}Async", flat + ", CUstream hStream", f"copy_fill(N, {width})"
        )
        pitched = f"CUdeviceptr dstDevice, size_t dstPitch, {value}, size_t Width, size_t Height"
        copy = f"copy_fill_2d(Width, Height, {width})"
        rows += _copy(f"cuMemsetD2D{bits}_v2", pitched, copy)
        rows += _copy(f"cuMemsetD2D{bits}Async", pitched + ", CUstream hStream", copy)
    return tuple(rows)


_TO_D = "CUdeviceptr dstDevice"
_FROM_D = "CUdeviceptr srcDevice"
_TO_A = "CUarray dstArray, size_t dstOffset"
_FROM_A = "CUarray srcArray, size_t srcOffset"
_TO_H = "void *dstHost"
_FROM_H = "const void *srcHost"
_PEER = (
    "CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext, "
    "size_t ByteCount"
)
_BATCH = (
    "CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, "
    "CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs"
)
_BATCH_3D = "size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList"


def _batches() -> tuple[Fn, ...]:
    """Return the rows of calls that make many copies; _v2 does not report which copy failed."""
    rows: list[Fn] = []
    for suffix, failed in ("", ", size_t *failIdx"), ("_v2", ""):
        rows += with_ptsz(
            Fn(
                f"cuMemcpyBatchAsync{suffix}",
                f"{_BATCH}{failed}, CUstream hStream",
                "copy",
                copy="copy_batch(dsts, srcs, sizes, count)",
                stream="hStream",
            )
        )
        rows += with_ptsz(
            Fn(
                f"cuMemcpy3DBatchAsync{suffix}",
                f"{_BATCH_3D}{failed}, unsigned long long flags, CUstream hStream",
                "copy",
                copy="copy_batch_3d(opList, numOps)",
                stream="hStream",
            )
        )
    return tuple(rows)


# Single copies with attributes, and batches of copies over the fabric.
_WITH_ATTRIBUTES: tuple[Fn, ...] = (
    *with_ptsz(
        Fn(
            "cuMemcpyWithAttributesAsync",
            "CUdeviceptr dst, CUdeviceptr src, size_t size, CUmemcpyAttributes *attr, "
            "CUstream hStream",
            "copy",
            copy="copy_any(dst, src, size)",
            stream="hStream",
        )
    ),
    *with_ptsz(
        Fn(
            "cuMemcpy3DWithAttributesAsync",
            "CUDA_MEMCPY3D_BATCH_OP *op, unsigned long long flags, CUstream hStream",
            "copy",
            copy="copy_batch_3d(op, 1)",
            stream="hStream",
        )
    ),
    *with_ptsz(
        Fn(
            "cuFabricCpyBatchAsync",
            "size_t numOps, CUDA_FABRIC_COPY_BATCH_OP *opList, unsigned long long flags, "
            "CUstream hStream",
            "copy",
            copy="copy_fabric(opList, numOps)",
            stream="hStream",
        )
    ),
)

_BATCH_FETCH = (
    "CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs, "
    "size_t *prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags, CUstream hStream"
)

# Managed memory that is prefetched moves between host and device.
_FETCHES: tuple[Fn, ...] = (
    *with_ptsz(
        Fn(
            "cuMemPrefetchAsync",
            "CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream",
            "copy",
            copy="copy_host(count)",
            stream="hStream",
        )
    ),
    *with_ptsz(
        Fn(
            "cuMemPrefetchAsync_v2",
            "CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, "
            "CUstream hStream",
            "copy",
            copy="copy_host(count)",
            stream="hStream",
        )
    ),
    *with_ptsz(
        Fn(
            "cuMemPrefetchBatchAsync",
            _BATCH_FETCH,
            "copy",
            copy="copy_host_batch(sizes, count)",
            stream="hStream",
        )
    ),
    *with_ptsz(
        Fn(
            "cuMemDiscardAndPrefetchBatchAsync",
            _BATCH_FETCH,
            "copy",
            copy="copy_host_batch(sizes, count)",
            stream="hStream",
        )
    ),
)

_COPIES: tuple[Fn, ...] = (
    *_both(
        "cuMemcpy", f"CUdeviceptr dst, CUdeviceptr src, {_BYTES}", "copy_any(dst, src, ByteCount)"
    ),
    *_both("cuMemcpyPeer", _PEER, "copy_device(ByteCount)"),
    *_both("cuMemcpyDtoD_v2", f"{_TO_D}, {_FROM_D}, {_BYTES}", "copy_device(ByteCount)"),
    *_both("cuMemcpyHtoD_v2", f"{_TO_D}, {_FROM_H}, {_BYTES}", "copy_host(ByteCount)"),
    *_both("cuMemcpyDtoH_v2", f"{_TO_H}, {_FROM_D}, {_BYTES}", "copy_host(ByteCount)"),
    *_both("cuMemcpyHtoA_v2", f"{_TO_A}, {_FROM_H}, {_BYTES}", "copy_host(ByteCount)"),
    *_both("cuMemcpyAtoH_v2", f"{_TO_H}, {_FROM_A}, {_BYTES}", "copy_host(ByteCount)"),
    *_copy("cuMemcpyAtoA_v2", f"{_TO_A}, {_FROM_A}, {_BYTES}", "copy_device(ByteCount)"),
    *_copy("cuMemcpyAtoD_v2", f"{_TO_D}, {_FROM_A}, {_BYTES}", "copy_device(ByteCount)"),
    *_copy("cuMemcpyDtoA_v2", f"{_TO_A}, {_FROM_D}, {_BYTES}", "copy_device(ByteCount)"),
    *_both("cuMemcpy2D_v2", "const CUDA_MEMCPY2D *pCopy", "copy_2d(pCopy)"),
    *_copy("cuMemcpy2DUnaligned_v2", "const CUDA_MEMCPY2D *pCopy", "copy_2d(pCopy)"),
    *_both("cuMemcpy3D_v2", "const CUDA_MEMCPY3D *pCopy", "copy_3d(pCopy)"),
    *_both("cuMemcpy3DPeer", "const CUDA_MEMCPY3D_PEER *pCopy", "copy_3d_peer(pCopy)"),
    *_batches(),
    *_WITH_ATTRIBUTES,
    *with_ptsz(
        Fn(
            "cuMemBatchDecompressAsync",
            "CUmemDecompressParams *paramsArray, size_t count, unsigned int flags, "
            "size_t *errorIndex, CUstream stream",
            "copy",
            copy="copy_decompress(paramsArray, count)",
            stream="stream",
        )
    ),
    *_fills(),
)

_CAPTURE = (
    "CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, "
    "const CUgraphEdgeData *dependencyData, size_t numDependencies, CUstreamCaptureMode mode"
)

_RECAPTURE = (
    "CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph, "
    "CUgraphRecaptureCallback callbackFunc, void *userData"
)

_STREAMS: tuple[Fn, ...] = (
    Fn("cuStreamDestroy", "CUstream hStream", "custom"),
    Fn("cuStreamDestroy_v2", "CUstream hStream", "custom"),
    *with_ptsz(
        Fn("cuStreamWaitEvent", "CUstream hStream, CUevent hEvent, unsigned int Flags", "custom")
    ),
    *with_ptsz(Fn("cuStreamBeginCapture", "CUstream hStream", "custom")),
    *with_ptsz(
        Fn("cuStreamBeginCapture_v2", "CUstream hStream, CUstreamCaptureMode mode", "custom")
    ),
    *with_ptsz(Fn("cuStreamBeginCaptureToGraph", _CAPTURE, "custom")),
    *with_ptsz(Fn("cuStreamBeginRecaptureToGraph", _RECAPTURE, "custom")),
    *with_ptsz(Fn("cuStreamEndCapture", "CUstream hStream, CUgraph *phGraph", "custom")),
    *with_ptsz(
        Fn(
            "cuStreamBeginCaptureToCig",
            "CUstream hStream, CUstreamCigCaptureParams *streamCigCaptureParams",
            "custom",
        )
    ),
    *with_ptsz(Fn("cuStreamEndCaptureToCig", "CUstream hStream", "custom")),
)

ROWS: tuple[Fn, ...] = (*_LAUNCHES, *_COPIES, *_FETCHES, *_STREAMS)
