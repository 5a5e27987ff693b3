/*
 * Charges the memory that the driver's pools for stream-ordered allocation hold, rather than the
 * blocks that are live in them.
 *
 * A pool grows in units of 32 MiB and may return units at any time. It is therefore queried
 * (CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, 21 ns on an H200) after each allocation in
 * pool_allocations.c, when memory is short, and regularly by a helper.
 *
 * A pool that the application destroys, or that ends with the primary context, may hold memory
 * until its last block is freed, and must not be queried any more. From then on, what it held last
 * is seen only through NVML, as memory that the driver takes on its own.
 */
#include "pools.h"

#include <string.h>
#include <sys/mman.h>

#define POOLS_N_BUCKETS 64
#define POOLS_CHUNK     4096

static struct pool *buckets[POOLS_N_BUCKETS];
static struct pool *spare;
static struct os_lock pools_lock;
static struct pool *last[LAYOUT_N_DEVICES]; /* each GPU's current pool, as far as known */

/* ---- amounts held ---- */

static bool pool_query(const void *queried, uint64_t *bytes)
{
    const struct pool *pool = queried;

    return driver->cuMemPoolGetAttribute(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                                         bytes) == CUDA_SUCCESS;
}

/* Notes that a pool that outgrew the quota is below its level again, or that it ends. */
static void pool_back(struct pool *pool, uint64_t held)
{
    uint64_t level = atomic_load_relaxed(&pool->level);

    if (level && held < level &&
        __atomic_compare_exchange_n(&pool->level, &level, 0, false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_RELAXED))
        atomic_sub_seq_cst(&pages_ledger_device((unsigned)pool->device)->outgrown, 1);
}

void pool_settle(struct pool *pool, uint64_t claimed)
{
    CUstreamCaptureMode mode;

    account_relax(&mode);
    held_settle(&pool->held, pool->device, pool->unseen, claimed, pool_query, pool);
    account_unrelax(&mode);
    if (unlikely(atomic_load_relaxed(&pool->level)))
        pool_back(pool, held_bytes(&pool->held));
}

/* ---- the table of pools ---- */

static struct pool **bucket_of(CUmemoryPool handle)
{
    return &buckets[((uintptr_t)handle * 0x9e3779b97f4a7c15ull) >> 58];
}

static struct pool *pool_find(CUmemoryPool handle)
{
    struct pool *pool = atomic_load_acquire(bucket_of(handle));

    while (pool && (atomic_load_relaxed(&pool->handle) != handle ||
                    atomic_load_acquire(&pool->state) == POOL_FREE))
        pool = pool->next;
    return pool;
}

/* Called with the lock held. Returns an entry in the handle's bucket. An entry is reused, but stays
 * in its bucket for ever. */
static struct pool *pool_place(CUmemoryPool handle)
{
    struct pool **bucket = bucket_of(handle);
    struct pool *pool = *bucket;

    while (pool && atomic_load_acquire(&pool->state) != POOL_FREE)
        pool = pool->next;
    if (pool)
        return pool;
    if (!spare) {
        struct pool *chunk = os_map_memory(POOLS_CHUNK);

        if (!chunk)
            return NULL;
        for (size_t i = 0; i < POOLS_CHUNK / sizeof *chunk; i++) {
            chunk[i].next = spare;
            spare = &chunk[i];
        }
    }
    pool = spare;
    spare = pool->next;
    pool->next = *bucket;
    atomic_store_release(bucket, pool);
    return pool;
}

static cold struct pool *pool_add(CUmemoryPool handle, int device, bool unseen)
{
    struct pool *pool;

    os_lock(&pools_lock);
    pool = pool_find(handle);
    if (!pool)
        pool = pool_place(handle);
    if (pool && atomic_load_acquire(&pool->state) == POOL_FREE) {
        atomic_store_relaxed(&pool->device, device);
        pool->unseen = unseen;
        atomic_store_release(&pool->handle, handle);
        atomic_store_seq_cst(&pool->state, POOL_LIVE);
    }
    os_unlock(&pools_lock);
    if (device >= 0)
        account_watch(device); /* the helper detects what the pool returns on its own */
    return pool;
}

/* Managed pools are charged like cuMemAllocManaged: to the current context's GPU, or else to the
 * first. */
static int pool_managed_device(void)
{
    int device = pages_index_current();

    return device < 0 ? 0 : device;
}

static int pool_device(const CUmemLocation *location, bool managed)
{
    return managed && account_ordinal(location) < 0 ? pool_managed_device()
                                                    : account_location(location);
}

/* Returns the GPU of a pool, such as the default pool of a locality domain, according to the pool's
 * own attributes, which drivers for CUDA 13.2 and later report. */
static cold int pool_location(CUmemoryPool handle, bool *managedp)
{
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_NONE, 0};
    int type = 0;

    *managedp = false;
    if (driver->cuMemPoolGetAttribute(handle, CU_MEMPOOL_ATTR_LOCATION_TYPE, &location.type) !=
            CUDA_SUCCESS ||
        driver->cuMemPoolGetAttribute(handle, CU_MEMPOOL_ATTR_LOCATION_ID, &location.id) !=
            CUDA_SUCCESS)
        return -1;
    *managedp = driver->cuMemPoolGetAttribute(handle, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &type) ==
                    CUDA_SUCCESS &&
                type == CU_MEM_ALLOCATION_TYPE_MANAGED;
    return pool_device(&location, *managedp);
}

/* Adds a pool that was not created through this library: a GPU's default pool, or a pool of host
 * memory. */
static cold struct pool *pool_discover(CUmemoryPool handle)
{
    bool managed;
    int device;

    for (device = 0; device < (int)pages_n_devices(); device++) {
        CUdevice dev = pages_device((unsigned)device);
        CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, dev};
        CUmemoryPool known;

        if (driver->cuDeviceGetDefaultMemPool(&known, dev) == CUDA_SUCCESS && known == handle)
            return pool_add(handle, device, false);
        if (driver->cuDeviceGetMemPool(&known, dev) == CUDA_SUCCESS && known == handle)
            return pool_add(handle, device, false);
        if (driver->cuMemGetDefaultMemPool(&known, &location, CU_MEM_ALLOCATION_TYPE_MANAGED) ==
                CUDA_SUCCESS &&
            known == handle)
            return pool_add(handle, device, true);
    }
    /* Pools for managed memory that has no location, or is on the host at first. */
    for (int type = CU_MEM_LOCATION_TYPE_NONE; type <= CU_MEM_LOCATION_TYPE_HOST;
         type += CU_MEM_LOCATION_TYPE_HOST) {
        CUmemLocation location = {type, 0};
        CUmemoryPool known;

        if (driver->cuMemGetDefaultMemPool(&known, &location, CU_MEM_ALLOCATION_TYPE_MANAGED) ==
                CUDA_SUCCESS &&
            known == handle)
            return pool_add(handle, pool_managed_device(), true);
    }
    device = pool_location(handle, &managed);
    return pool_add(handle, device, managed);
}

struct pool *pool_of(CUmemoryPool handle)
{
    struct pool *pool;

    if (!handle || !pages_slot())
        return NULL;
    pool = pool_find(handle);
    if (unlikely(!pool))
        pool = pool_discover(handle);
    if (!pool || pool->device < 0)
        return NULL;
    if (unlikely(atomic_load_relaxed(&pool->state) == POOL_SILENT))
        atomic_store_seq_cst(&pool->state, POOL_LIVE);
    return pool;
}

/* Returns the current pool of the stream's GPU. */
struct pool *pool_of_stream(CUstream stream)
{
    static CUdevice ordinals[LAYOUT_N_DEVICES]; /* the driver's ordinal plus 1; 0: not known yet */
    int device = -1;
    struct pool *pool;
    CUmemoryPool handle;
    CUcontext ctx;
    CUdevice dev;

    if (unlikely(!pages_slot()))
        return NULL;
    if (likely(pages_n_devices() == 1))
        device = 0;
    else if (stream > CU_STREAM_PER_THREAD && driver->cuStreamGetCtx(stream, &ctx) == CUDA_SUCCESS)
        device = contexts_device(ctx);
    if (device < 0)
        device = pages_index_current();
    if (device < 0)
        return NULL;
    dev = atomic_load_relaxed(&ordinals[device]) - 1;
    if (unlikely(dev < 0)) {
        dev = pages_device((unsigned)device);
        atomic_store_relaxed(&ordinals[device], dev + 1);
    }
    if (driver->cuDeviceGetMemPool(&handle, dev) != CUDA_SUCCESS)
        return NULL;
    pool = atomic_load_acquire(&last[device]);
    if (unlikely(!pool || atomic_load_relaxed(&pool->handle) != handle ||
                 atomic_load_relaxed(&pool->state) != POOL_LIVE)) {
        pool_add(handle, device, false);
        pool = pool_of(handle);
        atomic_store_release(&last[device], pool);
    }
    return pool;
}

/* ---- queries outside the application's calls ---- */

/* Announces a query, so that the pool is not destroyed during it: see pool_silence(). Returns false
 * if the pool must not be queried. */
static bool pool_query_begin(struct pool *pool)
{
    if (atomic_load_acquire(&pool->state) != POOL_LIVE || pool->device < 0)
        return false;
    atomic_add_seq_cst(&pool->n_askers, 1);
    if (atomic_load_seq_cst(&pool->state) == POOL_LIVE)
        return true;
    atomic_sub_seq_cst(&pool->n_askers, 1);
    return false;
}

static void pool_query_end(struct pool *pool)
{
    atomic_sub_seq_cst(&pool->n_askers, 1);
}

/* Ends the queries of a pool: when this returns, no thread is querying it any more. */
static void pool_silence(struct pool *pool)
{
    atomic_store_seq_cst(&pool->state, POOL_SILENT);
    while (atomic_load_seq_cst(&pool->n_askers))
        os_sleep(POOLS_WAIT_NS);
}

static void pool_hand_over(struct pool *pool)
{
    uint64_t bytes = held_clear(&pool->held);

    pool_back(pool, 0);
    if (bytes && pool->unseen)
        account_give(pool->device, bytes, true);
    else if (bytes)
        account_convert(pool->device, bytes, false);
    account_pools(pool->device, 0, bytes, pool->unseen);
}

void pools_refresh(int device)
{
    for (unsigned i = 0; i < POOLS_N_BUCKETS; i++)
        for (struct pool *pool = atomic_load_acquire(&buckets[i]); pool; pool = pool->next)
            if (atomic_load_relaxed(&pool->device) == device && pool_query_begin(pool)) {
                pool_settle(pool, 0);
                pool_query_end(pool);
            }
}

/* Gives unused memory in the pools back to the driver, without waiting for the GPU. Returns whether
 * there was any. */
cold bool pools_squeeze(int device)
{
    uint64_t *memory = &pages_ledger_device((unsigned)device)->memory;
    uint64_t before = atomic_load_relaxed(memory);
    CUstreamCaptureMode mode;

    account_relax(&mode);
    for (unsigned i = 0; i < POOLS_N_BUCKETS; i++)
        for (struct pool *pool = atomic_load_acquire(&buckets[i]); pool; pool = pool->next)
            if (atomic_load_relaxed(&pool->device) == device && pool_query_begin(pool)) {
                driver->cuMemPoolTrimTo(pool->handle, 0);
                pool_settle(pool, 0);
                pool_query_end(pool);
            }
    graphs_squeeze(device);
    account_unrelax(&mode);
    return atomic_load_relaxed(memory) < before;
}

/* Called when the pools of this GPU may be about to end. Those that do not end are queried again
 * when the application uses them. */
cold void pools_hand_over(int device)
{
    int saved = errno;

    for (unsigned i = 0; i < POOLS_N_BUCKETS; i++)
        for (struct pool *pool = atomic_load_acquire(&buckets[i]); pool; pool = pool->next)
            if (atomic_load_acquire(&pool->state) == POOL_LIVE && pool->device == device) {
                pool_silence(pool);
                pool_hand_over(pool);
            }
    errno = saved;
}

void pools_after_fork(void)
{
    memset(buckets, 0, sizeof buckets);
    memset(last, 0, sizeof last);
    spare = NULL;
    pools_lock.word = 0;
}

/* ---- pools that the application creates ---- */

CONTROL_EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
    CUresult result = real->cuMemPoolCreate(pool, poolProps);
    bool managed;

    if (result == CUDA_SUCCESS && pages_slot()) {
        managed = poolProps->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
        pool_add(*pool, pool_device(&poolProps->location, managed), managed);
    }
    return result;
}

/* The memory of an imported pool belongs to the exporter. Only the pointers that are imported are
 * charged. */
CONTROL_EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle,
                                                           CUmemAllocationHandleType handleType,
                                                           unsigned long long flags)
{
    CUresult result = real->cuMemPoolImportFromShareableHandle(pool_out, handle, handleType, flags);

    if (result == CUDA_SUCCESS && pages_slot())
        pool_add(*pool_out, -1, false);
    return result;
}

/* The entry loses its handle before the call, because another pool may get the same handle
 * afterwards. */
CONTROL_EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    struct pool *known = pages_slot() ? pool_find(pool) : NULL;
    CUstreamCaptureMode mode;
    CUresult result;

    if (!known)
        return real->cuMemPoolDestroy(pool);
    if (known->device >= 0) {
        account_relax(&mode);
        driver->cuMemPoolTrimTo(pool, 0);
        account_unrelax(&mode);
        pool_settle(known, 0);
    }
    pool_silence(known);
    atomic_store_release(&known->handle, NULL);
    result = real->cuMemPoolDestroy(pool);
    if (result != CUDA_SUCCESS) {
        atomic_store_release(&known->handle, pool);
        atomic_store_seq_cst(&known->state, POOL_LIVE);
        return result;
    }
    if (known->device >= 0)
        pool_hand_over(known);
    atomic_store_seq_cst(&known->state, POOL_FREE);
    return result;
}

CONTROL_EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
    CUresult result = real->cuMemPoolTrimTo(pool, minBytesToKeep);
    struct pool *known = result == CUDA_SUCCESS ? pool_of(pool) : NULL;

    if (known)
        pool_settle(known, 0);
    return result;
}

/* Imports one block from another process's pool. cuMemFree or cuMemFreeAsync ends it. */
CONTROL_EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool pool,
                                               CUmemPoolPtrExportData *shareData)
{
    CUresult result = real->cuMemPoolImportPointer(ptr_out, pool, shareData);
    CUdeviceptr base;
    int ordinal = -1;
    int device;
    size_t size;

    if (result != CUDA_SUCCESS ||
        driver->cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, *ptr_out) !=
            CUDA_SUCCESS)
        return result;
    device = pages_index_of(ordinal);
    if (device < 0 || driver->cuMemGetAddressRange(&base, &size, *ptr_out) != CUDA_SUCCESS)
        return result;
    result = account_open(BLOCK_MEMORY, device, *ptr_out, size);
    if (result != CUDA_SUCCESS) {
        driver->cuMemFree(*ptr_out);
        *ptr_out = 0;
    }
    return result;
}
