/*
 * Contexts: what they take, and what ends with them.
 *
 * Every context takes some hundreds of megabytes that no allocation shows. They are claimed before
 * the driver creates the context and are provisional afterwards, until NVML has been sampled
 * (account.c). What is allocated in a context ends with it, so each block records its owner: a
 * created context by its place in the table below, the primary one as 0. Green contexts allocate in
 * the primary one.
 */
#include "control.h"

#include <string.h>

static struct context {
    CUcontext handle; /* NULL: free, or about to be destroyed */
    int device;
    uint32_t n_users; /* 1, and cuCtxAttach; 0: the place is free */
    uint64_t moving;  /* charges that may end with it, while it is being destroyed */
} contexts[OWNER_LAST];
static uint32_t n_contexts;
static struct prim_lock contexts_lock;

static struct {
    CUcontext handle;
    uint32_t alive;
    uint32_t n_retained; /* references that this process holds */
} primaries[LAYOUT_N_DEVICES];

static bool is_primary(CUcontext handle)
{
    for (unsigned i = 0; handle && i < pages_n_devices(); i++)
        if (atomic_load_acquire(&primaries[i].handle) == handle)
            return true;
    return false;
}

static struct context *find(CUcontext handle)
{
    if (!handle || !atomic_load_relaxed(&n_contexts))
        return NULL;
    for (struct context *c = contexts; c < contexts + OWNER_LAST; c++)
        if (atomic_load_acquire(&c->handle) == handle)
            return c;
    return NULL;
}

uint8_t contexts_owner(void)
{
    struct context *c;
    CUcontext current = NULL;

    if (likely(!atomic_load_relaxed(&n_contexts)))
        return OWNER_PRIMARY;
    driver->cuCtxGetCurrent(&current);
    c = find(current);
    if (c)
        return (uint8_t)(c - contexts + 1);
    /* It may be a context for which the table had no place. */
    if (atomic_load_relaxed(&n_contexts) == OWNER_LAST && !is_primary(current))
        return OWNER_NONE;
    return OWNER_PRIMARY;
}

bool contexts_several(void)
{
    return atomic_load_relaxed(&n_contexts);
}

int contexts_device(CUcontext handle)
{
    struct context *c = find(handle);

    if (c)
        return c->device;
    for (unsigned i = 0; i < pages_n_devices(); i++)
        if (handle && atomic_load_acquire(&primaries[i].handle) == handle)
            return (int)i;
    return -1;
}

void contexts_after_fork(void)
{
    memset(contexts, 0, sizeof contexts);
    memset(primaries, 0, sizeof primaries);
    n_contexts = 0;
    contexts_lock.word = 0;
}

static void count(int device, int change)
{
    atomic_add_relaxed(&pages_ledger_device((unsigned)device)->contexts, (uint64_t)(int64_t)change);
}

/* The GPU was not granted to this container, and nothing governs the process there. Its operator
 * should know. */
static cold void told_elsewhere(void)
{
    static uint32_t told;

    if (pages_slot() && !atomic_exchange_acq_rel(&told, 1))
        control_log("this process uses a GPU that was not granted to its container, and is not "
                    "governed there: set CUDA_VISIBLE_DEVICES to what " PAGES_DIRECTORY
                    "/devices says");
}

static bool begin(struct account_charge *charge, CUdevice dev)
{
    int device = pages_index_of(dev);

    return account_begin(
        charge, device,
        device < 0 ? 0 : atomic_load_relaxed(&pages_grant_device((unsigned)device)->context_bytes));
}

/* A context that finds the table full stays unknown: its end does not refund its blocks. */
static CUresult made(struct account_charge *charge, CUresult result, const CUcontext *handle)
{
    if (charge->device >= 0 && result == CUDA_SUCCESS) {
        prim_lock(&contexts_lock);
        for (struct context *c = contexts; c < contexts + OWNER_LAST; c++) {
            if (c->n_users)
                continue;
            c->device = charge->device;
            c->moving = 0;
            c->n_users = 1;
            atomic_store_release(&c->handle, *handle);
            atomic_add_relaxed(&n_contexts, 1);
            break;
        }
        prim_unlock(&contexts_lock);
    }
    account_end(charge, result);
    if (charge->device < 0 && result == CUDA_SUCCESS)
        told_elsewhere();
    /* Counted last: a sample that finds the context counted no longer finds it in `taking`. */
    if (charge->device >= 0 && result == CUDA_SUCCESS)
        count(charge->device, 1);
    return result;
}

/* Accounts for the end of a context of this GPU. */
static void gone(int device, uint8_t owner)
{
    account_sweep(device, owner);
    modules_context_gone(owner);
    account_driver_gives(device,
                         atomic_load_relaxed(&pages_grant_device((unsigned)device)->context_bytes));
    count(device, -1);
}

CONTROL_EXPORT CUresult cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    struct account_charge charge;

    if (!begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return made(&charge, real->cuCtxCreate(pctx, flags, dev), pctx);
}

CONTROL_EXPORT CUresult cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    struct account_charge charge;

    if (!begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return made(&charge, real->cuCtxCreate_v2(pctx, flags, dev), pctx);
}

CONTROL_EXPORT CUresult cuCtxCreate_v3(CUcontext *pctx, void *paramsArray, int numParams,
                                       unsigned int flags, CUdevice dev)
{
    struct account_charge charge;

    if (!begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return made(&charge, real->cuCtxCreate_v3(pctx, paramsArray, numParams, flags, dev), pctx);
}

CONTROL_EXPORT CUresult cuCtxCreate_v4(CUcontext *pctx, void *ctxCreateParams, unsigned int flags,
                                       CUdevice dev)
{
    struct account_charge charge;

    if (!begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return made(&charge, real->cuCtxCreate_v4(pctx, ctxCreateParams, flags, dev), pctx);
}

CONTROL_EXPORT CUresult cuGLCtxCreate(CUcontext *pCtx, unsigned int Flags, CUdevice device)
{
    struct account_charge charge;

    if (!begin(&charge, device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return made(&charge, real->cuGLCtxCreate(pCtx, Flags, device), pCtx);
}

CONTROL_EXPORT CUresult cuGLCtxCreate_v2(CUcontext *pCtx, unsigned int Flags, CUdevice device)
{
    struct account_charge charge;

    if (!begin(&charge, device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return made(&charge, real->cuGLCtxCreate_v2(pCtx, Flags, device), pCtx);
}

CONTROL_EXPORT CUresult cuVDPAUCtxCreate(CUcontext *pCtx, unsigned int flags, CUdevice device,
                                         uint32_t vdpDevice, void *vdpGetProcAddress)
{
    struct account_charge charge;

    if (!begin(&charge, device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return made(&charge, real->cuVDPAUCtxCreate(pCtx, flags, device, vdpDevice, vdpGetProcAddress),
                pCtx);
}

CONTROL_EXPORT CUresult cuVDPAUCtxCreate_v2(CUcontext *pCtx, unsigned int flags, CUdevice device,
                                            uint32_t vdpDevice, void *vdpGetProcAddress)
{
    struct account_charge charge;

    if (!begin(&charge, device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return made(&charge,
                real->cuVDPAUCtxCreate_v2(pCtx, flags, device, vdpDevice, vdpGetProcAddress), pCtx);
}

/* Pools may end with the last context, so no thread may ask them while the driver ends them. */
static void last_leaves(int device)
{
    if (atomic_load_relaxed(&pages_ledger_device((unsigned)device)->contexts) <= 1)
        pools_hand_over(device);
}

/*
 * The place is kept until the blocks are swept, but has no handle from here on: as soon as the
 * driver has destroyed the context, another thread may get one with the same handle.
 */
static struct context *leave(CUcontext handle)
{
    struct context *c;

    prim_lock(&contexts_lock);
    c = find(handle);
    if (c)
        atomic_store_release(&c->handle, NULL);
    prim_unlock(&contexts_lock);
    /* The driver does not destroy a primary context here, so what is held in it stays held. */
    if (handle && !is_primary(handle))
        gate_forget_context(handle);
    if (c) {
        last_leaves(c->device);
        c->moving = account_moves_all(c->device);
    }
    return c;
}

static CUresult left(struct context *c, CUcontext handle, CUresult result)
{
    uint64_t moving;

    if (!c)
        return result;
    moving = c->moving;
    if (result != CUDA_SUCCESS) {
        atomic_store_release(&c->handle, handle);
        account_landed(c->device, moving, false);
        return result;
    }
    gone(c->device, (uint8_t)(c - contexts + 1));
    account_landed(c->device, moving, false);
    prim_lock(&contexts_lock);
    c->n_users = 0;
    atomic_add_relaxed(&n_contexts, -1u);
    prim_unlock(&contexts_lock);
    return result;
}

CONTROL_EXPORT CUresult cuCtxDestroy(CUcontext ctx)
{
    struct context *c = leave(ctx);

    return left(c, ctx, real->cuCtxDestroy(ctx));
}

CONTROL_EXPORT CUresult cuCtxDestroy_v2(CUcontext ctx)
{
    struct context *c = leave(ctx);

    return left(c, ctx, real->cuCtxDestroy_v2(ctx));
}

CONTROL_EXPORT CUresult cuCtxAttach(CUcontext *pctx, unsigned int flags)
{
    CUresult result = real->cuCtxAttach(pctx, flags);

    if (result == CUDA_SUCCESS) {
        struct context *c;

        prim_lock(&contexts_lock);
        c = find(*pctx);
        if (c)
            c->n_users++;
        prim_unlock(&contexts_lock);
    }
    return result;
}

CONTROL_EXPORT CUresult cuCtxDetach(CUcontext ctx)
{
    struct context *c;
    bool last = false;
    CUresult result;

    prim_lock(&contexts_lock);
    c = find(ctx);
    if (c && c->n_users > 1) {
        c->n_users--;
    } else if (c) {
        atomic_store_release(&c->handle, NULL);
        last = true;
    }
    prim_unlock(&contexts_lock);
    if (last) {
        gate_forget_context(ctx);
        last_leaves(c->device);
        c->moving = account_moves_all(c->device);
    }
    result = real->cuCtxDetach(ctx);
    if (last)
        return left(c, ctx, result);
    if (c && result != CUDA_SUCCESS) {
        prim_lock(&contexts_lock);
        c->n_users++;
        prim_unlock(&contexts_lock);
    }
    return result;
}

/* ---- the primary context ---- */

static bool primary_active(CUdevice dev)
{
    unsigned int flags;
    int active = 0;

    return driver->cuDevicePrimaryCtxGetState(dev, &flags, &active) == CUDA_SUCCESS && active;
}

/* The first thread that sees the context alive, or dead, counts it. Returns whether this one
 * does. */
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
            told_elsewhere();
        return result;
    }
    if (atomic_load_acquire(&primaries[device].alive) && primary_active(dev)) {
        result = real->cuDevicePrimaryCtxRetain(pctx, dev);
        if (result == CUDA_SUCCESS)
            atomic_add_relaxed(&primaries[device].n_retained, 1);
        return result;
    }
    if (!begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = real->cuDevicePrimaryCtxRetain(pctx, dev);
    if (result == CUDA_SUCCESS) {
        atomic_add_relaxed(&primaries[device].n_retained, 1);
        atomic_store_release(&primaries[device].handle, *pctx);
        if (primary_turns(device, true)) {
            account_end(&charge, result);
            count(device, 1);
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

/* Only the last release ends the context. Until then, what is held in it stays held. Returns the
 * charges that may end. */
static uint64_t primary_leaves(CUdevice dev)
{
    int device = pages_index_of(dev);

    if (device >= 0 && atomic_load_relaxed(&primaries[device].n_retained) <= 1) {
        primary_forget(device);
        last_leaves(device);
    }
    /* Also where it does not seem the last: of two threads that release at once, perhaps neither
     * does. */
    return account_moves_all(device);
}

static void primary_left(CUdevice dev, uint64_t moving)
{
    if (moving)
        account_landed(pages_index_of(dev), moving, false);
}

static void primary_ends(CUdevice dev)
{
    int device = pages_index_of(dev);

    if (device >= 0 && !primary_active(dev) && primary_turns(device, false)) {
        pools_hand_over(device);
        atomic_store_relaxed(&primaries[device].n_retained, 0);
        gone(device, OWNER_PRIMARY);
    }
}

static void primary_released(CUdevice dev, CUresult result)
{
    int device = pages_index_of(dev);
    uint32_t *n;

    if (device < 0 || result != CUDA_SUCCESS)
        return;
    n = &primaries[device].n_retained;
    if (atomic_load_relaxed(n))
        atomic_add_relaxed(n, -1u);
    primary_ends(dev);
}

/* The resources of the context are destroyed even while it is retained. */
static void primary_reset(CUdevice dev, CUresult result)
{
    int device = pages_index_of(dev);

    if (device < 0 || result != CUDA_SUCCESS)
        return;
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
    uint64_t moving = account_moves_all(device);
    CUresult result;

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
    uint64_t moving = account_moves_all(device);
    CUresult result;

    primary_forget(device);
    if (device >= 0)
        pools_hand_over(device);
    result = real->cuDevicePrimaryCtxReset_v2(dev);
    primary_reset(dev, result);
    primary_left(dev, moving);
    return result;
}

/* ---- green contexts ---- */

/* A green context retains the primary context, and creates it if there is none. */
CONTROL_EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev,
                                         unsigned int flags)
{
    struct account_charge charge;
    int n_made = 0;
    CUresult result;

    if (!begin(&charge, dev))
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = real->cuGreenCtxCreate(phCtx, desc, dev, flags);
    if (charge.device >= 0 && result == CUDA_SUCCESS) {
        struct block block = {.key = (uintptr_t)*phCtx,
                              .kind = BLOCK_GREEN,
                              .device = (int8_t)charge.device,
                              .value = (uint64_t)dev,
                              .owner = OWNER_NONE};

        n_made = 1;
        atomic_add_relaxed(&primaries[charge.device].n_retained, 1);
        if (primary_active(dev) && primary_turns(charge.device, true))
            n_made = 2;
        if (!blocks_lock(BLOCK_GREEN, block.key))
            blocks_add(&block);
        blocks_unlock(BLOCK_GREEN, block.key);
    }
    account_end(&charge, result);
    if (n_made)
        count(charge.device, n_made);
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
    if (found && driver->cuCtxFromGreenCtx(&ctx, hCtx) == CUDA_SUCCESS)
        gate_forget_context(ctx);
    moving = account_moves_all(green.device);
    result = real->cuGreenCtxDestroy(hCtx);
    if (green.device < 0)
        return result;
    if (result != CUDA_SUCCESS) {
        blocks_lock(BLOCK_GREEN, green.key);
        blocks_add(&green);
        blocks_unlock(BLOCK_GREEN, green.key);
        account_landed(green.device, moving, false);
        return result;
    }
    count(green.device, -1);
    if (atomic_load_relaxed(&primaries[green.device].n_retained))
        atomic_add_relaxed(&primaries[green.device].n_retained, -1u);
    account_driver_gives(
        green.device,
        atomic_load_relaxed(&pages_grant_device((unsigned)green.device)->context_bytes));
    primary_ends((CUdevice)green.value);
    account_landed(green.device, moving, false);
    return result;
}

/* ---- what a context takes later ---- */

/* Raising the limit takes local memory for every thread that the GPU can run at once. */
CONTROL_EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    int device = limit == CU_LIMIT_STACK_SIZE ? pages_index_current() : -1;
    struct account_charge charge;
    uint64_t bytes = 0;
    CUresult result;
    CUdevice dev;
    size_t before;
    int n_sms = 0, n_threads = 0;

    if (device < 0 || driver->cuCtxGetDevice(&dev) != CUDA_SUCCESS ||
        driver->cuCtxGetLimit(&before, limit) != CUDA_SUCCESS)
        return real->cuCtxSetLimit(limit, value);
    if (value > before &&
        driver->cuDeviceGetAttribute(&n_sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, dev) ==
            CUDA_SUCCESS &&
        driver->cuDeviceGetAttribute(&n_threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
                                     dev) == CUDA_SUCCESS)
        bytes = account_product(value - before, (uint64_t)n_sms * (uint64_t)n_threads);
    if (!account_begin(&charge, device, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = real->cuCtxSetLimit(limit, value);
    account_end(&charge, result);
    return result;
}

/*
 * 64 streams took 35.7 MB of an H200. The driver keeps what a stream took for the next one, at
 * least for a while, and a sample shows that. Because the end of a stream is reported, too, streams
 * that come and go do not add up.
 */
#define CONTEXTS_STREAM (576ull << 10)

static CUresult stream_made(CUresult result)
{
    if (result == CUDA_SUCCESS)
        account_driver_takes(pages_index_current(), CONTEXTS_STREAM);
    return result;
}

void contexts_stream_gone(void)
{
    account_driver_gives(pages_index_current(), CONTEXTS_STREAM);
}

CONTROL_EXPORT CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
    return stream_made(real->cuStreamCreate(phStream, Flags));
}

CONTROL_EXPORT CUresult cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags,
                                                   int priority)
{
    return stream_made(real->cuStreamCreateWithPriority(phStream, flags, priority));
}

CONTROL_EXPORT CUresult cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx,
                                               unsigned int flags, int priority)
{
    return stream_made(real->cuGreenCtxStreamCreate(phStream, greenCtx, flags, priority));
}
