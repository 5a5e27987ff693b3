/*
 * The table of the library's functions
 *
 * It is separate from their definitions, because it declares all of them with the same type.
 */
#include <stdint.h>
#include <string.h>

#include "lookup.h"

/*
 * Base name, symbol, and the CUDA version that introduced it. A row with a per-thread variant
 * covers two symbols: P for _ptsz, S for _ptds. The versions are those of NVIDIA's cudaTypedefs.h.
 */
#define FUNCTIONS(F, P, S)                                                                         \
    F(cuInit, cuInit, 2000)                                                                        \
    F(cuDriverGetVersion, cuDriverGetVersion, 2020)                                                \
    F(cuDeviceGetCount, cuDeviceGetCount, 2000)                                                    \
    F(cuDeviceGet, cuDeviceGet, 2000)                                                              \
    F(cuDeviceGetName, cuDeviceGetName, 2000)                                                      \
    F(cuDeviceGetUuid, cuDeviceGetUuid, 9020)                                                      \
    F(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040)                                                  \
    F(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020)                                                 \
    F(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000)                                            \
    F(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010)                                              \
    F(cuCheckpointProcessGetState, cuCheckpointProcessGetState, 12080)                             \
    F(cuCheckpointProcessLock, cuCheckpointProcessLock, 12080)                                     \
    F(cuCheckpointProcessCheckpoint, cuCheckpointProcessCheckpoint, 12080)                         \
    F(cuCheckpointProcessRestore, cuCheckpointProcessRestore, 12080)                               \
    F(cuCheckpointProcessUnlock, cuCheckpointProcessUnlock, 12080)                                 \
    F(cuCtxCreate, cuCtxCreate_v2, 3020)                                                           \
    F(cuCtxCreate, cuCtxCreate_v3, 11040)                                                          \
    F(cuCtxCreate, cuCtxCreate_v4, 12050)                                                          \
    F(cuCtxDestroy, cuCtxDestroy_v2, 4000)                                                         \
    F(cuCtxGetCurrent, cuCtxGetCurrent, 4000)                                                      \
    F(cuCtxSetCurrent, cuCtxSetCurrent, 4000)                                                      \
    F(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000)                                                 \
    F(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000)                                                   \
    F(cuCtxGetDevice, cuCtxGetDevice, 2000)                                                        \
    F(cuCtxGetDevice, cuCtxGetDevice_v2, 13000)                                                    \
    F(cuCtxSynchronize, cuCtxSynchronize, 2000)                                                    \
    F(cuCtxSynchronize, cuCtxSynchronize_v2, 13000)                                                \
    F(cuCtxSetLimit, cuCtxSetLimit, 3010)                                                          \
    F(cuCtxGetLimit, cuCtxGetLimit, 3010)                                                          \
    F(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000)                                    \
    F(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000)                              \
    F(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, 11000)                                  \
    F(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000)                                \
    F(cuMemAlloc, cuMemAlloc_v2, 3020)                                                             \
    F(cuMemAllocPitch, cuMemAllocPitch_v2, 3020)                                                   \
    F(cuMemAllocManaged, cuMemAllocManaged, 6000)                                                  \
    F(cuMemFree, cuMemFree_v2, 3020)                                                               \
    P(cuMemAllocAsync, cuMemAllocAsync, 11020)                                                     \
    P(cuMemFreeAsync, cuMemFreeAsync, 11020)                                                       \
    F(cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, 11020)                                 \
    F(cuDeviceGetMemPool, cuDeviceGetMemPool, 11020)                                               \
    F(cuDeviceSetMemPool, cuDeviceSetMemPool, 11020)                                               \
    F(cuMemGetDefaultMemPool, cuMemGetDefaultMemPool, 13000)                                       \
    F(cuMemGetMemPool, cuMemGetMemPool, 13000)                                                     \
    F(cuMemSetMemPool, cuMemSetMemPool, 13000)                                                     \
    F(cuMemPoolCreate, cuMemPoolCreate, 11020)                                                     \
    F(cuMemPoolDestroy, cuMemPoolDestroy, 11020)                                                   \
    F(cuMemPoolGetAttribute, cuMemPoolGetAttribute, 11020)                                         \
    F(cuMemPoolSetAttribute, cuMemPoolSetAttribute, 11020)                                         \
    F(cuMemPoolTrimTo, cuMemPoolTrimTo, 11020)                                                     \
    P(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, 11020)                                     \
    F(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, 10020)                         \
    F(cuMemCreate, cuMemCreate, 10020)                                                             \
    F(cuMemRelease, cuMemRelease, 10020)                                                           \
    F(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, 11000)                             \
    F(cuMemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle, 10020)       \
    F(cuMemExportToShareableHandle, cuMemExportToShareableHandle, 10020)                           \
    F(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020)                       \
    F(cuMemAddressReserve, cuMemAddressReserve, 10020)                                             \
    F(cuMemAddressFree, cuMemAddressFree, 10020)                                                   \
    F(cuMemMap, cuMemMap, 10020)                                                                   \
    F(cuMemUnmap, cuMemUnmap, 10020)                                                               \
    F(cuMemSetAccess, cuMemSetAccess, 10020)                                                       \
    F(cuMemGetAccess, cuMemGetAccess, 10020)                                                       \
    F(cuIpcGetMemHandle, cuIpcGetMemHandle, 4010)                                                  \
    F(cuIpcOpenMemHandle, cuIpcOpenMemHandle, 4010)                                                \
    F(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, 11000)                                            \
    F(cuIpcCloseMemHandle, cuIpcCloseMemHandle, 4010)                                              \
    F(cuMemGetAddressRange, cuMemGetAddressRange_v2, 3020)                                         \
    F(cuPointerGetAttribute, cuPointerGetAttribute, 4000)                                          \
    F(cuPointerSetAttribute, cuPointerSetAttribute, 6000)                                          \
    F(cuArrayCreate, cuArrayCreate_v2, 3020)                                                       \
    F(cuArray3DCreate, cuArray3DCreate_v2, 3020)                                                   \
    F(cuArrayDestroy, cuArrayDestroy, 2000)                                                        \
    F(cuArrayGetDescriptor, cuArrayGetDescriptor_v2, 3020)                                         \
    F(cuArray3DGetDescriptor, cuArray3DGetDescriptor_v2, 3020)                                     \
    F(cuMipmappedArrayCreate, cuMipmappedArrayCreate, 5000)                                        \
    F(cuMipmappedArrayDestroy, cuMipmappedArrayDestroy, 5000)                                      \
    F(cuMipmappedArrayGetLevel, cuMipmappedArrayGetLevel, 5000)                                    \
    F(cuMemHostAlloc, cuMemHostAlloc, 2020)                                                        \
    F(cuMemFreeHost, cuMemFreeHost, 2000)                                                          \
    F(cuMemHostRegister, cuMemHostRegister_v2, 6050)                                               \
    F(cuMemHostUnregister, cuMemHostUnregister, 4000)                                              \
    F(cuMemGetInfo, cuMemGetInfo_v2, 3020)                                                         \
    S(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020)                                                         \
    P(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020)                                               \
    S(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020)                                                         \
    P(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020)                                               \
    S(cuMemcpyDtoD, cuMemcpyDtoD_v2, 3020)                                                         \
    P(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 3020)                                               \
    S(cuMemcpy, cuMemcpy, 4000)                                                                    \
    P(cuMemcpyAsync, cuMemcpyAsync, 4000)                                                          \
    S(cuMemcpyPeer, cuMemcpyPeer, 4000)                                                            \
    P(cuMemcpyPeerAsync, cuMemcpyPeerAsync, 4000)                                                  \
    S(cuMemcpy2D, cuMemcpy2D_v2, 3020)                                                             \
    P(cuMemcpy2DAsync, cuMemcpy2DAsync_v2, 3020)                                                   \
    S(cuMemcpy2DUnaligned, cuMemcpy2DUnaligned_v2, 3020)                                           \
    S(cuMemcpy3D, cuMemcpy3D_v2, 3020)                                                             \
    P(cuMemcpy3DAsync, cuMemcpy3DAsync_v2, 3020)                                                   \
    S(cuMemcpy3DPeer, cuMemcpy3DPeer, 4000)                                                        \
    P(cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync, 4000)                                              \
    S(cuMemsetD8, cuMemsetD8_v2, 3020)                                                             \
    P(cuMemsetD8Async, cuMemsetD8Async, 3020)                                                      \
    S(cuMemsetD16, cuMemsetD16_v2, 3020)                                                           \
    P(cuMemsetD16Async, cuMemsetD16Async, 3020)                                                    \
    S(cuMemsetD32, cuMemsetD32_v2, 3020)                                                           \
    P(cuMemsetD32Async, cuMemsetD32Async, 3020)                                                    \
    S(cuMemsetD2D8, cuMemsetD2D8_v2, 3020)                                                         \
    P(cuMemsetD2D8Async, cuMemsetD2D8Async, 3020)                                                  \
    S(cuMemsetD2D16, cuMemsetD2D16_v2, 3020)                                                       \
    P(cuMemsetD2D16Async, cuMemsetD2D16Async, 3020)                                                \
    S(cuMemsetD2D32, cuMemsetD2D32_v2, 3020)                                                       \
    P(cuMemsetD2D32Async, cuMemsetD2D32Async, 3020)                                                \
    F(cuStreamCreate, cuStreamCreate, 2000)                                                        \
    F(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050)                                \
    F(cuStreamDestroy, cuStreamDestroy_v2, 4000)                                                   \
    P(cuStreamSynchronize, cuStreamSynchronize, 2000)                                              \
    P(cuStreamQuery, cuStreamQuery, 2000)                                                          \
    P(cuStreamWaitValue32, cuStreamWaitValue32_v2, 11070)                                          \
    P(cuStreamWaitEvent, cuStreamWaitEvent, 3020)                                                  \
    P(cuStreamIsCapturing, cuStreamIsCapturing, 10000)                                             \
    P(cuStreamGetCtx, cuStreamGetCtx, 9020)                                                        \
    P(cuStreamBeginCapture, cuStreamBeginCapture_v2, 10010)                                        \
    P(cuStreamEndCapture, cuStreamEndCapture, 10000)                                               \
    F(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010)                 \
    F(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, 11040)                             \
    F(cuGraphCreate, cuGraphCreate, 10000)                                                         \
    F(cuGraphAddMemAllocNode, cuGraphAddMemAllocNode, 11040)                                       \
    F(cuGraphAddMemFreeNode, cuGraphAddMemFreeNode, 11040)                                         \
    F(cuDeviceGetGraphMemAttribute, cuDeviceGetGraphMemAttribute, 11040)                           \
    F(cuDeviceSetGraphMemAttribute, cuDeviceSetGraphMemAttribute, 11040)                           \
    F(cuDeviceGraphMemTrim, cuDeviceGraphMemTrim, 11040)                                           \
    P(cuGraphUpload, cuGraphUpload, 11010)                                                         \
    P(cuGraphLaunch, cuGraphLaunch, 10000)                                                         \
    F(cuGraphExecDestroy, cuGraphExecDestroy, 10000)                                               \
    F(cuGraphDestroy, cuGraphDestroy, 10000)                                                       \
    F(cuEventCreate, cuEventCreate, 2000)                                                          \
    F(cuEventDestroy, cuEventDestroy_v2, 4000)                                                     \
    P(cuEventRecord, cuEventRecord, 2000)                                                          \
    P(cuEventRecordWithFlags, cuEventRecordWithFlags, 11010)                                       \
    F(cuEventQuery, cuEventQuery, 2000)                                                            \
    F(cuEventSynchronize, cuEventSynchronize, 2000)                                                \
    F(cuEventElapsedTime, cuEventElapsedTime, 2000)                                                \
    F(cuEventElapsedTime, cuEventElapsedTime_v2, 12080)                                            \
    F(cuModuleLoadData, cuModuleLoadData, 2000)                                                    \
    F(cuModuleLoadDataEx, cuModuleLoadDataEx, 2010)                                                \
    F(cuModuleLoad, cuModuleLoad, 2000)                                                            \
    F(cuModuleUnload, cuModuleUnload, 2000)                                                        \
    F(cuModuleGetFunction, cuModuleGetFunction, 2000)                                              \
    F(cuLibraryLoadData, cuLibraryLoadData, 12000)                                                 \
    F(cuLibraryUnload, cuLibraryUnload, 12000)                                                     \
    F(cuLibraryGetKernel, cuLibraryGetKernel, 12000)                                               \
    F(cuLibraryGetModule, cuLibraryGetModule, 12000)                                               \
    F(cuKernelGetFunction, cuKernelGetFunction, 12000)                                             \
    F(cuFuncGetAttribute, cuFuncGetAttribute, 2020)                                                \
    P(cuLaunchKernel, cuLaunchKernel, 4000)                                                        \
    P(cuLaunchKernelEx, cuLaunchKernelEx, 11060)                                                   \
    P(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel, 9000)                                  \
    P(cuLaunchHostFunc, cuLaunchHostFunc, 10000)                                                   \
    F(cuGetErrorName, cuGetErrorName, 6000)                                                        \
    F(cuGetErrorString, cuGetErrorString, 6000)                                                    \
    F(cuGetProcAddress, cuGetProcAddress, 11030)                                                   \
    F(cuGetProcAddress, cuGetProcAddress_v2, 12000)                                                \
    F(cuGetExportTable, cuGetExportTable, 3000)

/* Only their addresses matter here. */
#define DECLARE(base, symbol, since)      void symbol(void);
#define DECLARE_PTSZ(base, symbol, since) DECLARE(base, symbol, since) void symbol##_ptsz(void);
#define DECLARE_PTDS(base, symbol, since) DECLARE(base, symbol, since) void symbol##_ptds(void);
#define ROW(base, symbol, since)          {#base, since, symbol, symbol},
#define ROW_PTSZ(base, symbol, since)     {#base, since, symbol, symbol##_ptsz},
#define ROW_PTDS(base, symbol, since)     {#base, since, symbol, symbol##_ptds},

FUNCTIONS(DECLARE, DECLARE_PTSZ, DECLARE_PTDS)

static const struct row {
    const char *base;
    int since;
    any_function *function;
    any_function *per_thread;
} rows[] = {FUNCTIONS(ROW, ROW_PTSZ, ROW_PTDS)};

/**
 * newest() - find the newest function with this base name that a program for CUDA `version` may use
 *
 * A name with a version suffix is not a base name and is not found, as in the driver.
 */
static any_function *newest(const char *name, int version, uint64_t flags,
                            CUdriverProcAddressQueryResult *statusp)
{
    const struct row *best = NULL;

    *statusp = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (strcmp(rows[i].base, name) != 0)
            continue;
        if (!best)
            *statusp = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        if (rows[i].since <= version && (!best || rows[i].since > best->since))
            best = &rows[i];
        if (best)
            *statusp = CU_GET_PROC_ADDRESS_SUCCESS;
    }
    if (!best)
        return NULL;
    return flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM ? best->per_thread
                                                                 : best->function;
}

__attribute__((constructor)) static void offer(void)
{
    lookup = newest;
}
