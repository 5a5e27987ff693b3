/* Contexts: what they take, and what goes with them. */
#include "control.h"

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
