/*
 * Resolves the functions of the original, the driver's own libcuda.
 *
 * The control library needs it (DT_NEEDED) as libcuda-origin.so.1. The original is therefore loaded
 * before any code of the library runs, and every name that the library lacks falls through to it.
 */
#include "control.h"

#include <dlfcn.h>

#define ORIGIN_NAME "libcuda-origin.so.1"

struct real_cuda origin_real;
struct driver_cuda origin_driver;

/* Called in place of a function in the table that an older driver lacks. Such a driver answers a
 * look-up with "not found". */
static CUresult origin_missing(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

/*
 * The library's functions, indexed by the driver's functions that they replace. The driver answers
 * look-ups with cuGetProcAddress, and if its answer is in this table, the application gets the
 * library's function instead. The table uses open addressing, is built once and is at most half
 * full, so a look-up costs a multiplication and about one comparison.
 */
#define ORIGIN_TABLE_BITS 10
static struct {
    void *original;
    void *hook;
} origin_table[1 << ORIGIN_TABLE_BITS];
_Static_assert(CONTROL_N_HOOKS * 2 <= 1 << ORIGIN_TABLE_BITS, "origin_table is too small");

static unsigned origin_slot(const void *pointer)
{
    return (unsigned)(((uintptr_t)pointer * 0x9e3779b97f4a7c15ull) >> (64 - ORIGIN_TABLE_BITS));
}

void *origin_replace(void *found)
{
    unsigned at = origin_slot(found);

    while (origin_table[at].original) {
        if (origin_table[at].original == found)
            return origin_table[at].hook;
        at = (at + 1) % (1 << ORIGIN_TABLE_BITS);
    }
    return found;
}

static void origin_insert(void *original, void *hook)
{
    unsigned at = origin_slot(original);

    while (origin_table[at].original) {
        /* If two names resolve to the same function, the first in the table keeps it. */
        if (origin_table[at].original == original)
            return;
        at = (at + 1) % (1 << ORIGIN_TABLE_BITS);
    }
    origin_table[at].original = original;
    origin_table[at].hook = hook;
}

static void *origin_find(void *handle, const char *name)
{
    void *found = handle ? dlsym(handle, name) : NULL;

    return found ? found : (void *)origin_missing;
}

void origin_resolve(const struct control_hook *hooks)
{
    void *handle = dlopen(ORIGIN_NAME, RTLD_LAZY | RTLD_NOLOAD);

    for (size_t i = 0; i < CONTROL_N_HOOKS; i++) {
        const struct control_hook *hook = &hooks[i];
        void *original = handle ? dlsym(handle, hook->name) : NULL;

        *(void **)((char *)&origin_real + hook->real_offset) =
            original ? original : (void *)origin_missing;
        if (original)
            origin_insert(original, hook->function);
    }
#define FIND(field, name) *(void **)&origin_driver.field = origin_find(handle, name)
    FIND(cuDeviceGetCount, "cuDeviceGetCount");
    FIND(cuDeviceGet, "cuDeviceGet");
    FIND(cuDeviceGetUuid, "cuDeviceGetUuid");
    FIND(cuDeviceGetUuid_v2, "cuDeviceGetUuid_v2");
    FIND(cuCtxGetCurrent, "cuCtxGetCurrent");
    FIND(cuCtxSetCurrent, "cuCtxSetCurrent");
    FIND(cuCtxGetDevice, "cuCtxGetDevice");
    FIND(cuStreamIsCapturing, "cuStreamIsCapturing");
    FIND(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
    FIND(cuMemHostAlloc, "cuMemHostAlloc");
    FIND(cuStreamWaitValue32, "cuStreamWaitValue32_v2");
    FIND(cuEventCreate, "cuEventCreate");
    FIND(cuEventRecord, "cuEventRecord");
    FIND(cuEventQuery, "cuEventQuery");
    FIND(cuEventElapsedTime, "cuEventElapsedTime");
    FIND(cuPointerGetAttribute, "cuPointerGetAttribute");
    FIND(cuCtxFromGreenCtx, "cuCtxFromGreenCtx");
    FIND(cuStreamGetCtx, "cuStreamGetCtx");
    FIND(cuCtxPushCurrent, "cuCtxPushCurrent_v2");
    FIND(cuCtxPopCurrent, "cuCtxPopCurrent_v2");
    FIND(cuDeviceGetAttribute, "cuDeviceGetAttribute");
    FIND(cuDeviceGetMemPool, "cuDeviceGetMemPool");
    FIND(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool");
    FIND(cuMemGetDefaultMemPool, "cuMemGetDefaultMemPool");
    FIND(cuMemPoolGetAttribute, "cuMemPoolGetAttribute");
    FIND(cuMemPoolTrimTo, "cuMemPoolTrimTo");
    FIND(cuMemFree, "cuMemFree_v2");
    FIND(cuMemFreeAsync, "cuMemFreeAsync");
    FIND(cuMemGetInfo, "cuMemGetInfo_v2");
    FIND(cuMemGetAddressRange, "cuMemGetAddressRange_v2");
    FIND(cuMemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle");
    FIND(cuCtxGetLimit, "cuCtxGetLimit");
    FIND(cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState");
    FIND(cuDeviceGetGraphMemAttribute, "cuDeviceGetGraphMemAttribute");
    FIND(cuDeviceGraphMemTrim, "cuDeviceGraphMemTrim");
    FIND(cuGraphGetNodes, "cuGraphGetNodes");
    FIND(cuGraphNodeGetType, "cuGraphNodeGetType");
    FIND(cuGraphChildGraphNodeGetGraph, "cuGraphChildGraphNodeGetGraph");
    FIND(cuGraphMemAllocNodeGetParams, "cuGraphMemAllocNodeGetParams");
    FIND(cuKernelGetLibrary, "cuKernelGetLibrary");
    FIND(cuLibraryGetKernelCount, "cuLibraryGetKernelCount");
    FIND(cuMemAddressReserve, "cuMemAddressReserve");
    FIND(cuMemAddressFree, "cuMemAddressFree");
    FIND(cuMemSetAccess, "cuMemSetAccess");
    FIND(cuMemHostRegister, "cuMemHostRegister_v2");
    FIND(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
    FIND(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
    FIND(cuStreamCreate, "cuStreamCreate");
    FIND(cuStreamDestroy, "cuStreamDestroy_v2");
    FIND(cuStreamSynchronize, "cuStreamSynchronize");
    FIND(cuCtxSynchronize, "cuCtxSynchronize");
#undef FIND
}
