"""What takes device memory and gives it back: contexts, blocks."""

from __future__ import annotations

from libcontrol.api.row import Fn, with_ptsz

ROWS: tuple[Fn, ...] = (
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
    *with_ptsz(
        Fn(
            "cuMemAllocAsync",
            "CUdeviceptr *dptr, size_t bytesize, CUstream hStream",
            "charge",
            size="bytesize",
            pointer="*dptr",
        )
    ),
    *with_ptsz(
        Fn(
            "cuMemAllocFromPoolAsync",
            "CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream",
            "charge",
            size="bytesize",
            pointer="*dptr",
        )
    ),
    Fn("cuMemFree_v2", "CUdeviceptr dptr", "refund", pointer="dptr"),
    *with_ptsz(
        Fn("cuMemFreeAsync", "CUdeviceptr dptr, CUstream hStream", "refund", pointer="dptr")
    ),
)
