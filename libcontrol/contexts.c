/*
 * The calls by which the application creates and destroys contexts. What is allocated in a context
 * ends with it: see context_table.c.
 */
#include "contexts.h"

/* Called with the lock held. If the table is full, a context stays unknown: its end is not noticed,
 * and it counts for the life of the process. */
static void context_enter(CUcontext handle, int device)
{
    struct context *c = contexts;

    while (c < contexts + MAX_CONTEXTS && c->n_users)
        c++;
    if (c < contexts + MAX_CONTEXTS) {
        c->device = device;
        c->moving = 0;
        c->n_users = 1;
        if (c >= contexts + n_places)
            atomic_store_relaxed(&n_places, (uint32_t)(c - contexts) + 1);
        atomic_store_release(&c->handle, handle);
    } else {
        atomic_store_relaxed(&contexts_lost, true);
    }
    atomic_add_relaxed(&n_contexts, 1);
}

static CUresult created(struct account_charge *charge, CUresult result, const CUcontext *handle)
{
    if (charge->device >= 0 && result == CUDA_SUCCESS) {
        os_lock(&contexts_lock);
        context_enter(*handle, charge->device);
        os_unlock(&contexts_lock);
    }
    account_end(charge, result);
    if (charge->device < 0 && result == CUDA_SUCCESS)
        context_log_ungoverned();
    /* Counted last, so that a sample that finds the context counted does not find it in `taking`
     * as well. */
    if (charge->device >= 0 && result == CUDA_SUCCESS)
        context_count(charge->device, 1);
    return result;
}

CONTROL_EXPORT CUresult cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    struct account_charge charge;

    if (!context_begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return created(&charge, real->cuCtxCreate(pctx, flags, dev), pctx);
}

CONTROL_EXPORT CUresult cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    struct account_charge charge;

    if (!context_begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return created(&charge, real->cuCtxCreate_v2(pctx, flags, dev), pctx);
}

CONTROL_EXPORT CUresult cuCtxCreate_v3(CUcontext *pctx, void *paramsArray, int numParams,
                                       unsigned int flags, CUdevice dev)
{
    struct account_charge charge;

    if (!context_begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return created(&charge, real->cuCtxCreate_v3(pctx, paramsArray, numParams, flags, dev), pctx);
}

CONTROL_EXPORT CUresult cuCtxCreate_v4(CUcontext *pctx, void *ctxCreateParams, unsigned int flags,
                                       CUdevice dev)
{
    struct account_charge charge;

    if (!context_begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return created(&charge, real->cuCtxCreate_v4(pctx, ctxCreateParams, flags, dev), pctx);
}

CONTROL_EXPORT CUresult cuGLCtxCreate(CUcontext *pCtx, unsigned int Flags, CUdevice device)
{
    struct account_charge charge;

    if (!context_begin(&charge, device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return created(&charge, real->cuGLCtxCreate(pCtx, Flags, device), pCtx);
}

CONTROL_EXPORT CUresult cuGLCtxCreate_v2(CUcontext *pCtx, unsigned int Flags, CUdevice device)
{
    struct account_charge charge;

    if (!context_begin(&charge, device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return created(&charge, real->cuGLCtxCreate_v2(pCtx, Flags, device), pCtx);
}

CONTROL_EXPORT CUresult cuVDPAUCtxCreate(CUcontext *pCtx, unsigned int flags, CUdevice device,
                                         uint32_t vdpDevice, void *vdpGetProcAddress)
{
    struct account_charge charge;

    if (!context_begin(&charge, device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return created(&charge,
                   real->cuVDPAUCtxCreate(pCtx, flags, device, vdpDevice, vdpGetProcAddress), pCtx);
}

CONTROL_EXPORT CUresult cuVDPAUCtxCreate_v2(CUcontext *pCtx, unsigned int flags, CUdevice device,
                                            uint32_t vdpDevice, void *vdpGetProcAddress)
{
    struct account_charge charge;

    if (!context_begin(&charge, device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return created(&charge,
                   real->cuVDPAUCtxCreate_v2(pCtx, flags, device, vdpDevice, vdpGetProcAddress),
                   pCtx);
}

/*
 * The place is kept until the blocks are swept, but has no handle from here on: as soon as the
 * driver has destroyed the context, another thread may get one with the same handle.
 */
static struct context *begin_destroy(CUcontext handle)
{
    struct context *c;

    context_destroy_begin();
    os_lock(&contexts_lock);
    c = context_find(handle);
    if (c)
        atomic_store_release(&c->handle, NULL);
    os_unlock(&contexts_lock);
    /* The driver does not destroy a primary context here, so launches held in it stay held. */
    if (handle && !context_is_primary(handle))
        gate_forget_context(handle);
    if (c) {
        context_last_leaves(c->device);
        c->moving = account_moves_all(c->device);
    }
    return c;
}

static CUresult end_destroy(struct context *c, CUcontext handle, CUresult result)
{
    uint64_t moving;
    int device;

    if (c && result != CUDA_SUCCESS) {
        /* As soon as the handle is back, another thread may end the context and reuse its place. */
        moving = c->moving;
        device = c->device;
        atomic_store_release(&c->handle, handle);
        account_landed(device, moving, false);
    } else if (c) {
        moving = c->moving;
        context_gone(c->device, context_owner(c));
        account_landed(c->device, moving, false);
        os_lock(&contexts_lock);
        c->n_users = 0;
        atomic_add_relaxed(&n_contexts, -1u);
        os_unlock(&contexts_lock);
    }
    context_destroy_end();
    return result;
}

CONTROL_EXPORT CUresult cuCtxDestroy(CUcontext ctx)
{
    struct context *c = begin_destroy(ctx);

    return end_destroy(c, ctx, real->cuCtxDestroy(ctx));
}

CONTROL_EXPORT CUresult cuCtxDestroy_v2(CUcontext ctx)
{
    struct context *c = begin_destroy(ctx);

    return end_destroy(c, ctx, real->cuCtxDestroy_v2(ctx));
}

CONTROL_EXPORT CUresult cuCtxAttach(CUcontext *pctx, unsigned int flags)
{
    CUresult result = real->cuCtxAttach(pctx, flags);

    if (result == CUDA_SUCCESS) {
        struct context *c;

        os_lock(&contexts_lock);
        c = context_find(*pctx);
        if (c)
            c->n_users++;
        os_unlock(&contexts_lock);
    }
    return result;
}

CONTROL_EXPORT CUresult cuCtxDetach(CUcontext ctx)
{
    struct context *c;
    bool last = false;
    CUresult result;

    context_destroy_begin();
    os_lock(&contexts_lock);
    c = context_find(ctx);
    if (c && c->n_users > 1) {
        c->n_users--;
    } else if (c) {
        atomic_store_release(&c->handle, NULL);
        last = true;
    }
    os_unlock(&contexts_lock);
    if (last) {
        gate_forget_context(ctx);
        context_last_leaves(c->device);
        c->moving = account_moves_all(c->device);
    }
    result = real->cuCtxDetach(ctx);
    if (last)
        return end_destroy(c, ctx, result);
    if (c && result != CUDA_SUCCESS) {
        /* Another thread may have destroyed it in the meantime, and another context may be in its
         * place. */
        os_lock(&contexts_lock);
        if (context_find(ctx) == c)
            c->n_users++;
        os_unlock(&contexts_lock);
    }
    context_destroy_end();
    return result;
}
