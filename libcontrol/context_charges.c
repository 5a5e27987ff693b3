/*
 * Charges what a context of any kind takes, at its creation and later, and refunds what ends with
 * it.
 *
 * Every context takes several hundred megabytes that no allocation accounts for. They are claimed
 * before the driver creates the context and are provisional afterwards, until NVML has been sampled
 * (account.c).
 */
#include "contexts.h"
#include "parking.h"

void context_count(int device, int change)
{
    atomic_add_relaxed(&pages_ledger_device((unsigned)device)->contexts, (uint64_t)(int64_t)change);
}

/* Logs once that the process uses a GPU that was not granted to its container, and that it is not
 * governed there. */
cold void context_log_ungoverned(void)
{
    static uint32_t logged;

    if (pages_slot() && !atomic_exchange_acq_rel(&logged, 1))
        control_log("this process uses a GPU that was not granted to its container, and is not "
                    "governed there: set CUDA_VISIBLE_DEVICES to the value in " PAGES_DIRECTORY
                    "/devices");
}

bool context_begin(struct account_charge *charge, CUdevice dev)
{
    int device = pages_index_of(dev);

    return account_begin(
        charge, device,
        device < 0 ? 0 : atomic_load_relaxed(&pages_grant_device((unsigned)device)->context_bytes));
}

void context_destroy_begin(void)
{
    if (!parking_applies())
        return;
    parking_enter(PARKING_STILL);
    parking_lock_contexts();
}

void context_destroy_end(void)
{
    if (!parking_applies())
        return;
    parking_unlock_contexts();
    parking_leave();
}

/* Accounts for the end of a context of this GPU. */
void context_gone(int device, uint8_t owner)
{
    parking_context_gone(owner);
    if (owner != OWNER_NONE)
        account_sweep(device, owner);
    modules_context_gone(owner);
    account_driver_gives(device,
                         atomic_load_relaxed(&pages_grant_device((unsigned)device)->context_bytes));
    context_count(device, -1);
}

/* Pools may end with the last context, so no thread may query them while the driver frees them. */
void context_last_leaves(int device)
{
    if (atomic_load_relaxed(&pages_ledger_device((unsigned)device)->contexts) <= 1)
        pools_hand_over(device);
}

/* ---- what a context takes later ---- */

/* When the limit is raised, the driver takes local memory for every thread that the GPU can run at
 * once. */
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
 * 64 streams took 35.7 MB of an H200. When a stream ends, the driver keeps its memory for the next
 * one, at least for a while, and a sample shows whether it still does. The end of a stream is
 * reported as well, so streams that come and go do not add up.
 */
#define CONTEXTS_STREAM (576ull << 10)

static CUresult stream_made(CUresult result, int device)
{
    if (result == CUDA_SUCCESS)
        account_driver_takes(device, CONTEXTS_STREAM);
    return result;
}

void contexts_stream_gone(int device)
{
    account_driver_gives(device, CONTEXTS_STREAM);
}

int contexts_stream_device(CUstream stream)
{
    CUcontext ctx;
    int device = -1;

    if (unlikely(pages_n_devices() > 1) && stream > CU_STREAM_PER_THREAD &&
        driver->cuStreamGetCtx(stream, &ctx) == CUDA_SUCCESS)
        device = contexts_device(ctx);
    return device >= 0 ? device : pages_index_current();
}

static int green_device(CUgreenCtx green)
{
    struct block *block = blocks_lock(BLOCK_GREEN, (uintptr_t)green);
    int device = block ? block->device : -1;

    blocks_unlock(BLOCK_GREEN, (uintptr_t)green);
    return device;
}

CONTROL_EXPORT CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
    return stream_made(real->cuStreamCreate(phStream, Flags), pages_index_current());
}

CONTROL_EXPORT CUresult cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags,
                                                   int priority)
{
    return stream_made(real->cuStreamCreateWithPriority(phStream, flags, priority),
                       pages_index_current());
}

CONTROL_EXPORT CUresult cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx,
                                               unsigned int flags, int priority)
{
    return stream_made(real->cuGreenCtxStreamCreate(phStream, greenCtx, flags, priority),
                       green_device(greenCtx));
}
