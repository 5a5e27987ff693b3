/* Charges memory of other processes that this one opens through CUDA IPC. NVML attributes it to
 * those processes alone. */
#include "control.h"

static CUresult ipc_opened(CUresult result, CUdeviceptr *pdptr)
{
    int device = pages_index_current();
    CUdeviceptr base;
    size_t size;

    if (result != CUDA_SUCCESS || device < 0 ||
        driver->cuMemGetAddressRange(&base, &size, *pdptr) != CUDA_SUCCESS)
        return result;
    result = account_open(BLOCK_IPC, device, *pdptr, size);
    if (result != CUDA_SUCCESS) {
        real->cuIpcCloseMemHandle(*pdptr);
        *pdptr = 0;
    }
    return result;
}

CONTROL_EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle,
                                           unsigned int Flags)
{
    return ipc_opened(real->cuIpcOpenMemHandle(pdptr, handle, Flags), pdptr);
}

CONTROL_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle,
                                              unsigned int Flags)
{
    return ipc_opened(real->cuIpcOpenMemHandle_v2(pdptr, handle, Flags), pdptr);
}
