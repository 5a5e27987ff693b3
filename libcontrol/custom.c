/* The functions of the table whose method is `custom`: start, look-up, what is reported, contexts.
 */
#include "control.h"

CONTROL_EXPORT CUresult cuInit(unsigned int Flags)
{
    CUresult result;

    if (!pages_start())
        return CUDA_ERROR_SYSTEM_NOT_READY;
    result = real->cuInit(Flags);
    if (result == CUDA_SUCCESS)
        pages_match_devices();
    return result;
}

static void lookup_replace(void **pfn)
{
    struct ledger_slot *slot;
    void *ours;

    if (!pfn || !*pfn)
        return;
    ours = origin_replace(*pfn);
    if (ours == *pfn)
        return;
    *pfn = ours;
    slot = pages_slot();
    if (slot)
        atomic_add_relaxed(&slot->lookups, 1);
}

CONTROL_EXPORT CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion,
                                         cuuint64_t flags)
{
    CUresult result = real->cuGetProcAddress(symbol, pfn, cudaVersion, flags);

    if (result == CUDA_SUCCESS)
        lookup_replace(pfn);
    return result;
}

CONTROL_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion,
                                            cuuint64_t flags,
                                            CUdriverProcAddressQueryResult *symbolStatus)
{
    CUresult result = real->cuGetProcAddress_v2(symbol, pfn, cudaVersion, flags, symbolStatus);

    if (result == CUDA_SUCCESS)
        lookup_replace(pfn);
    return result;
}

/* The quota is the GPU's size, unless the GPU is smaller. */
CONTROL_EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
    CUresult result = real->cuDeviceTotalMem_v2(bytes, dev);
    int device = pages_index_of(dev);

    if (result == CUDA_SUCCESS && device >= 0) {
        uint64_t limit = atomic_load_relaxed(&pages_grant_device((unsigned)device)->memory_limit);

        if (limit < *bytes)
            *bytes = limit;
    }
    return result;
}

CONTROL_EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUresult result = real->cuMemGetInfo_v2(free_bytes, total);
    int device;

    if (result != CUDA_SUCCESS)
        return result;
    device = pages_index_current();
    if (device >= 0) {
        const struct grant_device *grant = pages_grant_device((unsigned)device);
        uint64_t limit = atomic_load_relaxed(&grant->memory_limit);
        uint64_t used = account_used(device);
        uint64_t left;

        if (__builtin_add_overflow(used, atomic_load_relaxed(&grant->memory_overhead), &used))
            used = UINT64_MAX;
        left = used < limit ? limit - used : 0;
        if (limit < *total)
            *total = limit;
        if (left < *free_bytes)
            *free_bytes = left;
    }
    return result;
}

/* A context on a governed GPU needs room for itself, checked before the driver makes it. */
static bool context_fits(CUdevice dev)
{
    int device = pages_index_of(dev);
    struct account_charge charge;
    const struct grant_device *grant;

    if (device < 0)
        return true;
    grant = pages_grant_device((unsigned)device);
    if (account_used(device) > 0)
        return true;
    if (account_reserve_on(&charge, device, atomic_load_relaxed(&grant->context_bytes)) !=
        CUDA_SUCCESS)
        return false;
    account_cancel(&charge);
    return true;
}

CONTROL_EXPORT CUresult cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    CUresult result;

    if (!context_fits(dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = real->cuCtxCreate_v2(pctx, flags, dev);
    if (result == CUDA_SUCCESS)
        account_context(dev);
    return result;
}

CONTROL_EXPORT CUresult cuCtxCreate_v3(CUcontext *pctx, void *paramsArray, int numParams,
                                       unsigned int flags, CUdevice dev)
{
    CUresult result;

    if (!context_fits(dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = real->cuCtxCreate_v3(pctx, paramsArray, numParams, flags, dev);
    if (result == CUDA_SUCCESS)
        account_context(dev);
    return result;
}

CONTROL_EXPORT CUresult cuCtxCreate_v4(CUcontext *pctx, void *ctxCreateParams, unsigned int flags,
                                       CUdevice dev)
{
    CUresult result;

    if (!context_fits(dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = real->cuCtxCreate_v4(pctx, ctxCreateParams, flags, dev);
    if (result == CUDA_SUCCESS)
        account_context(dev);
    return result;
}

CONTROL_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    CUresult result;

    if (!context_fits(dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = real->cuDevicePrimaryCtxRetain(pctx, dev);
    if (result == CUDA_SUCCESS)
        account_context(dev);
    return result;
}

CONTROL_EXPORT CUresult cuCtxDestroy_v2(CUcontext ctx)
{
    if (ctx)
        gate_forget_context(ctx);
    return real->cuCtxDestroy_v2(ctx);
}

/* Which context is the primary one is not known here: markers of all of them are forgotten. */
CONTROL_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
    gate_forget_context(NULL);
    return real->cuDevicePrimaryCtxRelease_v2(dev);
}

CONTROL_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
    gate_forget_context(NULL);
    return real->cuDevicePrimaryCtxReset_v2(dev);
}

CONTROL_EXPORT CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    gate_note_dependency();
    return real->cuStreamWaitEvent(hStream, hEvent, Flags);
}

CONTROL_EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    gate_note_dependency();
    return real->cuStreamWaitEvent_ptsz(hStream, hEvent, Flags);
}

CONTROL_EXPORT CUresult cuStreamDestroy_v2(CUstream hStream)
{
    gate_forget_stream(hStream);
    return real->cuStreamDestroy_v2(hStream);
}
