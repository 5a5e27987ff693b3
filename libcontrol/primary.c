/*
 * Charges the primary context of each GPU, and green contexts, which retain it and allocate in it.
 *
 * The driver creates the primary context with the first reference and destroys it with the last. A
 * reset destroys its contents even while it is retained.
 */
#include "contexts.h"
#include "parking.h"

static bool primary_active(CUdevice dev)
{
    unsigned int flags;
    int active = 0;

    return driver->cuDevicePrimaryCtxGetState(dev, &flags, &active) == CUDA_SUCCESS && active;
}

/* The first thread that sees the context alive, or gone, counts the change. Returns whether this is
 * that thread. */
static bool primary_turns(int device, bool alive)
{
    return atomic_exchange_acq_rel(&primaries[device].alive, alive) != alive;
}

CONTROL_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    struct account_charge charge;
    int device = pages_index_of(dev);
    CUresult result;

    if (device < 0) {
        result = real->cuDevicePrimaryCtxRetain(pctx, dev);
        if (result == CUDA_SUCCESS)
            context_log_ungoverned();
        return result;
    }
    if (atomic_load_acquire(&primaries[device].alive) && primary_active(dev)) {
        result = real->cuDevicePrimaryCtxRetain(pctx, dev);
        if (result == CUDA_SUCCESS)
            atomic_add_relaxed(&primaries[device].n_retained, 1);
        return result;
    }
    if (!context_begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = real->cuDevicePrimaryCtxRetain(pctx, dev);
    if (result == CUDA_SUCCESS) {
        atomic_add_relaxed(&primaries[device].n_retained, 1);
        atomic_store_release(&primaries[device].handle, *pctx);
        if (primary_turns(device, true)) {
            account_end(&charge, result);
            context_count(device, 1);
            return result;
        }
    }
    account_cancel(&charge);
    return result;
}

static void primary_forget(int device)
{
    CUcontext handle = device >= 0 ? atomic_load_acquire(&primaries[device].handle) : NULL;

    if (handle)
        gate_forget_context(handle);
}

/* Only the last release ends the context. Until then, work that is held in it stays held. Returns
 * the charges that may end. */
static uint64_t primary_leaves(CUdevice dev)
{
    int device = pages_index_of(dev);

    context_destroy_begin();
    if (device >= 0 && atomic_load_relaxed(&primaries[device].n_retained) <= 1) {
        primary_forget(device);
        context_last_leaves(device);
    }
    /* This is done even if this reference does not seem to be the last one: when two threads
     * release at the same time, it may be that neither sees itself as the last. */
    return account_moves_all(device);
}

static void primary_left(CUdevice dev, uint64_t moving)
{
    if (moving)
        account_landed(pages_index_of(dev), moving, false);
    context_destroy_end();
}

static void primary_ends(CUdevice dev)
{
    int device = pages_index_of(dev);

    if (device >= 0 && !primary_active(dev) && primary_turns(device, false)) {
        pools_hand_over(device);
        atomic_store_relaxed(&primaries[device].n_retained, 0);
        context_gone(device, OWNER_PRIMARY);
    }
}

/* Counts one reference fewer. The reference may be one that this library has not counted. */
static void primary_uncount(int device)
{
    uint32_t *np = &primaries[device].n_retained;
    uint32_t n = atomic_load_relaxed(np);

    while (n &&
           !__atomic_compare_exchange_n(np, &n, n - 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

static void primary_released(CUdevice dev, CUresult result)
{
    int device = pages_index_of(dev);

    if (device < 0 || result != CUDA_SUCCESS)
        return;
    primary_uncount(device);
    primary_ends(dev);
}

/* The resources of the context are destroyed even while it is retained. */
static void primary_reset(CUdevice dev, CUresult result)
{
    int device = pages_index_of(dev);

    if (device < 0 || result != CUDA_SUCCESS)
        return;
    parking_context_gone(OWNER_PRIMARY);
    account_sweep(device, OWNER_PRIMARY);
    account_driver_gives(device, 0);
    primary_ends(dev);
}

CONTROL_EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice dev)
{
    uint64_t moving = primary_leaves(dev);
    CUresult result = real->cuDevicePrimaryCtxRelease(dev);

    primary_released(dev, result);
    primary_left(dev, moving);
    return result;
}

CONTROL_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
    uint64_t moving = primary_leaves(dev);
    CUresult result = real->cuDevicePrimaryCtxRelease_v2(dev);

    primary_released(dev, result);
    primary_left(dev, moving);
    return result;
}

CONTROL_EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice dev)
{
    int device = pages_index_of(dev);
    uint64_t moving;
    CUresult result;

    context_destroy_begin();
    moving = account_moves_all(device);
    primary_forget(device);
    if (device >= 0)
        pools_hand_over(device);
    result = real->cuDevicePrimaryCtxReset(dev);
    primary_reset(dev, result);
    primary_left(dev, moving);
    return result;
}

CONTROL_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
    int device = pages_index_of(dev);
    uint64_t moving;
    CUresult result;

    context_destroy_begin();
    moving = account_moves_all(device);
    primary_forget(device);
    if (device >= 0)
        pools_hand_over(device);
    result = real->cuDevicePrimaryCtxReset_v2(dev);
    primary_reset(dev, result);
    primary_left(dev, moving);
    return result;
}

/* ---- green contexts ---- */

/* The library waits for the work of green contexts by synchronising the primary context
 * (parking_blocks.c). */
static void primary_note_handle(int device, CUdevice dev)
{
    CUcontext handle;

    if (!parking_applies() || atomic_load_acquire(&primaries[device].handle) ||
        real->cuDevicePrimaryCtxRetain(&handle, dev) != CUDA_SUCCESS)
        return;
    atomic_store_release(&primaries[device].handle, handle);
    real->cuDevicePrimaryCtxRelease_v2(dev);
}

/* A green context retains the primary context, and creates it if there is none. */
CONTROL_EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev,
                                         unsigned int flags)
{
    struct account_charge charge;
    int n_made = 0;
    CUresult result;

    if (!context_begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = real->cuGreenCtxCreate(phCtx, desc, dev, flags);
    if (charge.device >= 0 && result == CUDA_SUCCESS) {
        struct block block = {.key = (uintptr_t)*phCtx,
                              .kind = BLOCK_GREEN,
                              .device = (int8_t)charge.device,
                              .value = (uint64_t)dev,
                              .owner = OWNER_NONE};

        n_made = 1;
        primary_note_handle(charge.device, dev);
        atomic_add_relaxed(&primaries[charge.device].n_retained, 1);
        if (primary_active(dev) && primary_turns(charge.device, true))
            n_made = 2;
        if (!blocks_lock(BLOCK_GREEN, block.key))
            blocks_add(&block);
        blocks_unlock(BLOCK_GREEN, block.key);
    }
    account_end(&charge, result);
    if (n_made)
        context_count(charge.device, n_made);
    return result;
}

CONTROL_EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx hCtx)
{
    struct block *found = blocks_lock(BLOCK_GREEN, (uintptr_t)hCtx);
    struct block green = {.device = -1};
    uint64_t moving;
    CUcontext ctx;
    CUresult result;

    if (found) {
        green = *found;
        blocks_remove(found);
    }
    blocks_unlock(BLOCK_GREEN, (uintptr_t)hCtx);
    context_destroy_begin();
    if (found && driver->cuCtxFromGreenCtx(&ctx, hCtx) == CUDA_SUCCESS)
        gate_forget_context(ctx);
    moving = account_moves_all(green.device);
    result = real->cuGreenCtxDestroy(hCtx);
    if (green.device < 0) {
        context_destroy_end();
        return result;
    }
    if (result != CUDA_SUCCESS) {
        blocks_lock(BLOCK_GREEN, green.key);
        blocks_add(&green);
        blocks_unlock(BLOCK_GREEN, green.key);
        account_landed(green.device, moving, false);
        context_destroy_end();
        return result;
    }
    context_count(green.device, -1);
    primary_uncount(green.device);
    account_driver_gives(
        green.device,
        atomic_load_relaxed(&pages_grant_device((unsigned)green.device)->context_bytes));
    primary_ends((CUdevice)green.value);
    account_landed(green.device, moving, false);
    context_destroy_end();
    return result;
}
