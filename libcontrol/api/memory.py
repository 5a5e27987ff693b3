"""Rows of the API table for functions that take device memory, give it back or report it.

Where a function exists with and without the suffix `_v2`, the one without is the form from before
CUDA 3.2, with 32-bit addresses and sizes.
"""

from __future__ import annotations

from libcontrol.api.row import Fn, with_ptsz

_CREATE = "CUcontext *pctx, unsigned int flags, CUdevice dev"
_INTEROP = "CUcontext *pCtx, unsigned int Flags, CUdevice device"
_VDPAU = (
    "CUcontext *pCtx, unsigned int flags, CUdevice device, uint32_t vdpDevice, "
    "void *vdpGetProcAddress"
)

_CONTEXTS: tuple[Fn, ...] = (
    Fn("cuCtxCreate", _CREATE, "custom"),
    Fn("cuCtxCreate_v2", _CREATE, "custom"),
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
    Fn("cuGLCtxCreate", _INTEROP, "custom"),
    Fn("cuGLCtxCreate_v2", _INTEROP, "custom"),
    Fn("cuVDPAUCtxCreate", _VDPAU, "custom"),
    Fn("cuVDPAUCtxCreate_v2", _VDPAU, "custom"),
    Fn("cuCtxDestroy", "CUcontext ctx", "custom"),
    Fn("cuCtxDestroy_v2", "CUcontext ctx", "custom"),
    Fn("cuCtxAttach", "CUcontext *pctx, unsigned int flags", "custom"),
    Fn("cuCtxDetach", "CUcontext ctx", "custom"),
    Fn("cuDevicePrimaryCtxRetain", "CUcontext *pctx, CUdevice dev", "custom"),
    Fn("cuDevicePrimaryCtxRelease", "CUdevice dev", "custom"),
    Fn("cuDevicePrimaryCtxRelease_v2", "CUdevice dev", "custom"),
    Fn("cuDevicePrimaryCtxReset", "CUdevice dev", "custom"),
    Fn("cuDevicePrimaryCtxReset_v2", "CUdevice dev", "custom"),
    Fn(
        "cuGreenCtxCreate",
        "CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev, unsigned int flags",
        "custom",
    ),
    Fn("cuGreenCtxDestroy", "CUgreenCtx hCtx", "custom"),
    Fn("cuCtxSetLimit", "CUlimit limit, size_t value", "custom"),
    Fn("cuStreamCreate", "CUstream *phStream, unsigned int Flags", "custom"),
    Fn(
        "cuStreamCreateWithPriority",
        "CUstream *phStream, unsigned int flags, int priority",
        "custom",
    ),
    Fn(
        "cuGreenCtxStreamCreate",
        "CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags, int priority",
        "custom",
    ),
)

_BLOCKS: tuple[Fn, ...] = (
    Fn(
        "cuMemAlloc",
        "CUdeviceptr_v1 *dptr, unsigned int bytesize",
        "charge",
        size="bytesize",
        pointer="*dptr",
    ),
    Fn(
        "cuMemAlloc_v2",
        "CUdeviceptr *dptr, size_t bytesize",
        "charge",
        size="bytesize",
        pointer="*dptr",
        instead="parking_allocate(dptr, bytesize)",
    ),
    Fn(
        "cuMemAllocPitch",
        "CUdeviceptr_v1 *dptr, unsigned int *pPitch, unsigned int WidthInBytes, "
        "unsigned int Height, unsigned int ElementSizeBytes",
        "charge",
        size="account_pitch(WidthInBytes, Height)",
        settle="account_product(*pPitch, Height)",
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
        instead="parking_allocate_pitch(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes)",
    ),
    Fn(
        "cuMemAllocManaged",
        "CUdeviceptr *dptr, size_t bytesize, unsigned int flags",
        "charge",
        size="bytesize",
        pointer="*dptr",
        kind="ACCOUNT_MANAGED",
    ),
    Fn("cuMemFree", "CUdeviceptr_v1 dptr", "refund", pointer="dptr"),
    Fn(
        "cuMemFree_v2",
        "CUdeviceptr dptr",
        "refund",
        pointer="dptr",
        instead="parking_free(dptr, &result)",
    ),
    *with_ptsz(
        Fn(
            "cuMemFreeAsync",
            "CUdeviceptr dptr, CUstream hStream",
            "refund",
            stream="hStream",
            pointer="dptr",
            instead="parking_free_async(dptr, {stream}, &result)",
        )
    ),
    Fn(
        "cuIpcOpenMemHandle",
        "CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags",
        "custom",
    ),
    Fn(
        "cuIpcOpenMemHandle_v2",
        "CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags",
        "custom",
    ),
    Fn(
        "cuIpcCloseMemHandle",
        "CUdeviceptr dptr",
        "refund",
        pointer="dptr",
        kind="ACCOUNT_IPC",
        instead="parking_ipc_close(dptr, &result)",
    ),
    Fn(
        "cuImportExternalMemory",
        "CUexternalMemory *extMem_out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc",
        "charge",
        size="memHandleDesc ? memHandleDesc->size : 0",
        pointer="*extMem_out",
        kind="ACCOUNT_EXTERNAL",
    ),
    Fn(
        "cuDestroyExternalMemory",
        "CUexternalMemory extMem",
        "refund",
        pointer="extMem",
        kind="ACCOUNT_EXTERNAL",
    ),
)

_ARRAYS: tuple[Fn, ...] = (
    Fn(
        "cuArrayCreate",
        "CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR_v1 *pAllocateArray",
        "charge",
        size="array_size_v1(pAllocateArray)",
        pointer="*pHandle",
        kind="ACCOUNT_ARRAY",
    ),
    Fn(
        "cuArrayCreate_v2",
        "CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray",
        "charge",
        size="array_size(pAllocateArray)",
        pointer="*pHandle",
        kind="ACCOUNT_ARRAY",
    ),
    Fn(
        "cuArray3DCreate",
        "CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR_v1 *pAllocateArray",
        "charge",
        size="array_size_3d_v1(pAllocateArray)",
        pointer="*pHandle",
        kind="ACCOUNT_ARRAY",
    ),
    Fn(
        "cuArray3DCreate_v2",
        "CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray",
        "charge",
        size="array_size_3d(pAllocateArray)",
        pointer="*pHandle",
        kind="ACCOUNT_ARRAY",
    ),
    Fn(
        "cuMipmappedArrayCreate",
        "CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc, "
        "unsigned int numMipmapLevels",
        "charge",
        size="array_size_mipmapped(pMipmappedArrayDesc, numMipmapLevels)",
        pointer="*pHandle",
        kind="ACCOUNT_ARRAY",
    ),
    Fn("cuArrayDestroy", "CUarray hArray", "custom"),
    Fn("cuMipmappedArrayDestroy", "CUmipmappedArray hMipmappedArray", "custom"),
)

_POOLS: tuple[Fn, ...] = (
    *with_ptsz(
        Fn("cuMemAllocAsync", "CUdeviceptr *dptr, size_t bytesize, CUstream hStream", "custom")
    ),
    *with_ptsz(
        Fn(
            "cuMemAllocFromPoolAsync",
            "CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream",
            "custom",
        )
    ),
    Fn("cuMemPoolCreate", "CUmemoryPool *pool, const CUmemPoolProps *poolProps", "custom"),
    Fn("cuMemPoolDestroy", "CUmemoryPool pool", "custom"),
    Fn("cuMemPoolTrimTo", "CUmemoryPool pool, size_t minBytesToKeep", "custom"),
    Fn(
        "cuMemPoolImportFromShareableHandle",
        "CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType, "
        "unsigned long long flags",
        "custom",
    ),
    Fn(
        "cuMemPoolImportPointer",
        "CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData",
        "custom",
    ),
)

_PHYSICAL: tuple[Fn, ...] = (
    Fn(
        "cuMemCreate",
        "CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, "
        "unsigned long long flags",
        "custom",
    ),
    Fn("cuMemRelease", "CUmemGenericAllocationHandle handle", "custom"),
    Fn("cuMemRetainAllocationHandle", "CUmemGenericAllocationHandle *handle, void *addr", "custom"),
    Fn(
        "cuMemImportFromShareableHandle",
        "CUmemGenericAllocationHandle *handle, void *osHandle, "
        "CUmemAllocationHandleType shHandleType",
        "custom",
    ),
    Fn(
        "cuMemExportToShareableHandle",
        "void *shareableHandle, CUmemGenericAllocationHandle handle, "
        "CUmemAllocationHandleType handleType, unsigned long long flags",
        "custom",
    ),
    Fn(
        "cuMulticastCreate",
        "CUmemGenericAllocationHandle *mcHandle, const void *prop",
        "custom",
    ),
    Fn(
        "cuMulticastBindMem",
        "CUmemGenericAllocationHandle mcHandle, size_t mcOffset, "
        "CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size, "
        "unsigned long long flags",
        "custom",
    ),
    Fn(
        "cuMulticastBindAddr",
        "CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size, "
        "unsigned long long flags",
        "custom",
    ),
    Fn(
        "cuMulticastBindMem_v2",
        "CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, "
        "CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size, "
        "unsigned long long flags",
        "custom",
    ),
    Fn(
        "cuMulticastBindAddr_v2",
        "CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, "
        "CUdeviceptr memptr, size_t size, unsigned long long flags",
        "custom",
    ),
    Fn(
        "cuMulticastUnbind",
        "CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, size_t size",
        "custom",
    ),
    Fn(
        "cuLogicalEndpointBindMem",
        "CUlogicalEndpointId leId, CUdevice dev, cuuint64_t offset, "
        "CUmemGenericAllocationHandle memHandle, cuuint64_t memOffset, cuuint64_t size, "
        "unsigned long long flags",
        "custom",
    ),
    Fn(
        "cuLogicalEndpointBindAddr",
        "CUlogicalEndpointId leId, CUdevice dev, cuuint64_t offset, void *ptr, cuuint64_t size, "
        "unsigned long long flags",
        "custom",
    ),
    Fn(
        "cuLogicalEndpointUnbind",
        "CUlogicalEndpointId leId, CUdevice dev, cuuint64_t offset, cuuint64_t size",
        "custom",
    ),
    Fn("cuLogicalEndpointDestroy", "CUlogicalEndpointId leId", "custom"),
    Fn(
        "cuMemMap",
        "CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, "
        "unsigned long long flags",
        "custom",
    ),
    Fn("cuMemUnmap", "CUdeviceptr ptr, size_t size", "custom"),
    *with_ptsz(
        Fn(
            "cuMemMapArrayAsync",
            "CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream",
            "custom",
        )
    ),
)

_JIT = "unsigned int numOptions, CUjit_option *options, void **optionValues"
_LIBRARY_OPTIONS = (
    "CUjit_option *jitOptions, void **jitOptionsValues, unsigned int numJitOptions, "
    "CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions"
)

_MODULES: tuple[Fn, ...] = (
    Fn("cuModuleLoad", "CUmodule *module, const char *fname", "custom"),
    Fn("cuModuleLoadData", "CUmodule *module, const void *image", "custom"),
    Fn("cuModuleLoadDataEx", f"CUmodule *module, const void *image, {_JIT}", "custom"),
    Fn("cuModuleLoadFatBinary", "CUmodule *module, const void *fatCubin", "custom"),
    Fn("cuModuleUnload", "CUmodule hmod", "custom"),
    Fn("cuLibraryLoadData", f"CUlibrary *library, const void *code, {_LIBRARY_OPTIONS}", "custom"),
    Fn(
        "cuLibraryLoadFromFile",
        f"CUlibrary *library, const char *fileName, {_LIBRARY_OPTIONS}",
        "custom",
    ),
    Fn("cuLibraryUnload", "CUlibrary library", "custom"),
    Fn("cuLibraryGetModule", "CUmodule *pMod, CUlibrary library", "custom"),
    Fn(
        "cuLibraryGetGlobal",
        "CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name",
        "custom",
    ),
    Fn(
        "cuLibraryGetManaged",
        "CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name",
        "custom",
    ),
    Fn(
        "cuLibraryGetUnifiedFunction",
        "void **fptr, CUlibrary library, const char *symbol",
        "custom",
    ),
    Fn("cuKernelGetFunction", "CUfunction *pFunc, CUkernel kernel", "custom"),
    Fn(
        "cuLibraryGetKernel",
        "CUkernel *pKernel, CUlibrary library, const char *name",
        "custom",
    ),
    Fn(
        "cuLibraryEnumerateKernels",
        "CUkernel *kernels, unsigned int numKernels, CUlibrary lib",
        "custom",
    ),
    Fn("cuFuncLoad", "CUfunction function", "custom"),
)

_NODE = (
    "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "{}size_t numDependencies, {} *nodeParams"
)
_INSTANTIATE = (
    "CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, "
    "size_t bufferSize"
)

_GRAPHS: tuple[Fn, ...] = (
    Fn("cuGraphAddMemAllocNode", _NODE.format("", "CUDA_MEM_ALLOC_NODE_PARAMS"), "custom"),
    Fn("cuGraphAddNode", _NODE.format("", "CUgraphNodeParams"), "custom"),
    Fn(
        "cuGraphAddNode_v2",
        _NODE.format("const void *dependencyData, ", "CUgraphNodeParams"),
        "custom",
    ),
    Fn(
        "cuGraphAddNode_v3",
        _NODE.format("const void *dependencyData, ", "CUgraphNodeParams"),
        "custom",
    ),
    Fn("cuGraphInstantiate", _INSTANTIATE, "custom"),
    Fn("cuGraphInstantiate_v2", _INSTANTIATE, "custom"),
    Fn(
        "cuGraphInstantiateWithFlags",
        "CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags",
        "custom",
    ),
    *with_ptsz(
        Fn(
            "cuGraphInstantiateWithParams",
            "CUgraphExec *phGraphExec, CUgraph hGraph, void *instantiateParams",
            "custom",
        )
    ),
    *with_ptsz(Fn("cuGraphUpload", "CUgraphExec hGraphExec, CUstream hStream", "custom")),
    Fn("cuGraphExecDestroy", "CUgraphExec hGraphExec", "custom"),
    Fn("cuDeviceGraphMemTrim", "CUdevice device", "custom"),
)

_REPORTS: tuple[Fn, ...] = (
    Fn("cuDeviceTotalMem", "unsigned int *bytes, CUdevice dev", "custom"),
    Fn("cuDeviceTotalMem_v2", "size_t *bytes, CUdevice dev", "custom"),
    Fn("cuMemGetInfo", "unsigned int *free_bytes, unsigned int *total", "custom"),
    Fn("cuMemGetInfo_v2", "size_t *free_bytes, size_t *total", "custom"),
)

ROWS: tuple[Fn, ...] = (
    *_CONTEXTS,
    *_BLOCKS,
    *_ARRAYS,
    *_POOLS,
    *_PHYSICAL,
    *_MODULES,
    *_GRAPHS,
    *_REPORTS,
)
