/* Charges memory of other processes that this process opens through CUDA IPC. NVML attributes it to
 * those other processes alone. */
#include "parking.h"

static void ipc_close(CUdeviceptr address)
{
    CUresult result;

    if (!parking_ipc_close(address, &result))
        real->cuIpcCloseMemHandle(address);
}

/* Opened memory is charged within the call that opens it. During the call no memory can be parked,
 * except while the charge waits for room. */
static CUresult ipc_opened(CUresult result, CUdeviceptr *pdptr)
{
    int device = pages_index_current();
    CUdeviceptr base;
    size_t size;

    if (result == CUDA_SUCCESS && device >= 0 &&
        driver->cuMemGetAddressRange(&base, &size, *pdptr) == CUDA_SUCCESS) {
        result = account_open(BLOCK_IPC, device, *pdptr, size);
        if (result != CUDA_SUCCESS) {
            ipc_close(*pdptr);
            *pdptr = 0;
        }
    }
    parking_end();
    return result;
}

CONTROL_EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle,
                                           unsigned int Flags)
{
    parking_begin();
    return ipc_opened(parking_ipc_knows(&handle) ? parking_ipc_open(pdptr, &handle, Flags)
                                                 : real->cuIpcOpenMemHandle(pdptr, handle, Flags),
                      pdptr);
}

CONTROL_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle,
                                              unsigned int Flags)
{
    parking_begin();
    return ipc_opened(parking_ipc_knows(&handle)
                          ? parking_ipc_open(pdptr, &handle, Flags)
                          : real->cuIpcOpenMemHandle_v2(pdptr, handle, Flags),
                      pdptr);
}
