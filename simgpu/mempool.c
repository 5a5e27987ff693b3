/*
 * Memory pools: the source of memory for stream-ordered allocation
 *
 * A pool is one range of addresses in units of 32 MiB, some of which hold memory. A block is placed
 * where the fewest units have to be taken for it, at the lowest such address. Units without a block
 * are given back, from the end of the range, when the process synchronises and the pool holds more
 * than its threshold, or when the pool is trimmed.
 *
 * A block that is freed in a stream becomes free for other streams when the stream has reached the
 * free. The same stream can reuse it at once if it requests the same size.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define UNIT       (32ull << 20)
#define BLOCK_UNIT 512ull
#define ROOM       4 /* times the device's memory: enough addresses to tolerate fragmentation */

struct mempool {
    struct object object;
    struct mempool *next;
    struct device *device;
    int ordinal;
    bool host;  /* its memory is host memory, and is not charged to the device */
    bool ended; /* the handle has ended, but blocks are left */
    uintptr_t base;
    size_t n_units;
    bool *held; /* per unit: whether it holds memory */
    size_t n_blocks;
    uint64_t most; /* maximum that it may hold, bytes */
    uint64_t threshold;
    uint64_t reserved, reserved_high;
    uint64_t used, used_high;
    int reuse[3];
};

static struct pool mempools_pool = POOL(mempool, 0x4d504c30);
static struct mempool *mempools;
static struct mempool *standard[DEVICES]; /* created by the driver */
static struct mempool *chosen[DEVICES];   /* for allocations that name no pool, or NULL */

bool mempool_valid(const struct mempool *pool)
{
    return pool_owns(&mempools_pool, pool) && !pool->ended;
}

/** mempool_new() - create an empty pool of at most `most` bytes; 0 means no limit */
CUresult mempool_new(struct mempool **poolp, int ordinal, bool host, uint64_t most)
{
    struct mempool *pool = pool_take(&mempools_pool);
    uint64_t memory;

    if (!pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pool->device = driver.devices[ordinal];
    pool->ordinal = ordinal;
    pool->host = host;
    pool->most = most ? most : UINT64_MAX;
    memory = pool->device->gpu->config.memory;
    pool->n_units = ROOM * (memory / UNIT + 1);
    pool->held = calloc(pool->n_units, sizeof(pool->held[0]));
    pool->base = pool->held ? memory_range(0, pool->n_units * UNIT, false) : 0;
    if (!pool->base) {
        free(pool->held);
        pool_give(&mempools_pool, pool);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (int i = 0; i < 3; i++)
        pool->reuse[i] = 1;
    pool->next = mempools;
    mempools = pool;
    *poolp = pool;
    return CUDA_SUCCESS;
}

static void mempool_free(struct mempool *pool)
{
    struct mempool **link = &mempools;

    while (*link != pool)
        link = &(*link)->next;
    *link = pool->next;
    munmap((void *)pool->base, pool->n_units * UNIT);
    if (!pool->host)
        memory_refund(pool->device, pool->reserved);
    free(pool->held);
    pool_give(&mempools_pool, pool);
}

/** mempool_standard() - the default pool of a device */
CUresult mempool_standard(int ordinal, struct mempool **poolp)
{
    CUresult r = CUDA_SUCCESS;

    if (!standard[ordinal])
        r = mempool_new(&standard[ordinal], ordinal, false, 0);
    *poolp = standard[ordinal];
    return r;
}

/** mempool_chosen() - the pool of a device for allocations that name no pool */
CUresult mempool_chosen(int ordinal, struct mempool **poolp)
{
    if (!chosen[ordinal])
        return mempool_standard(ordinal, poolp);
    *poolp = chosen[ordinal];
    return CUDA_SUCCESS;
}

/** mempool_choose() - set the pool that mempool_chosen() returns; it must belong to the device */
CUresult mempool_choose(int ordinal, struct mempool *pool)
{
    if (pool->host || pool->ordinal != ordinal)
        return CUDA_ERROR_INVALID_VALUE;
    chosen[ordinal] = pool;
    return CUDA_SUCCESS;
}

/** mempool_destroy() - invalidate the handle; the memory is released with the last block */
CUresult mempool_destroy(struct mempool *pool)
{
    if (pool == standard[pool->ordinal])
        return CUDA_ERROR_INVALID_VALUE;
    if (chosen[pool->ordinal] == pool)
        chosen[pool->ordinal] = NULL;
    pool->ended = true;
    if (pool->n_blocks == 0)
        mempool_free(pool);
    return CUDA_SUCCESS;
}

static uintptr_t pool_end(const struct mempool *pool)
{
    return pool->base + pool->n_units * UNIT;
}

static struct allocation *first_block(const struct mempool *pool)
{
    struct allocation *item = memory_after(pool->base);

    return item && item->base < pool_end(pool) ? item : NULL;
}

static struct allocation *next_block(const struct mempool *pool, const struct allocation *block)
{
    struct allocation *item = memory_after(block->base + 1);

    return item && item->base < pool_end(pool) ? item : NULL;
}

/* Number of units in this range of addresses that have no memory. */
static size_t units_missing(const struct mempool *pool, uintptr_t start, size_t size)
{
    size_t n = 0;

    for (size_t i = (start - pool->base) / UNIT; i <= (start + size - 1 - pool->base) / UNIT; i++)
        n += !pool->held[i];
    return n;
}

static uintptr_t best_place(const struct mempool *pool, size_t size)
{
    const struct allocation *block = first_block(pool);
    uintptr_t start = pool->base;
    uintptr_t best = 0;
    size_t fewest = SIZE_MAX;

    for (;;) {
        uintptr_t end = block ? block->base : pool_end(pool);

        if (end - start >= size && units_missing(pool, start, size) < fewest) {
            fewest = units_missing(pool, start, size);
            best = start;
        }
        if (!block || fewest == 0)
            return best;
        start = block->base + block->size;
        block = next_block(pool, block);
    }
}

static CUresult units_take(struct mempool *pool, uintptr_t start, size_t size)
{
    uint64_t bytes = units_missing(pool, start, size) * UNIT;
    CUresult r;

    if (bytes == 0)
        return CUDA_SUCCESS;
    if (bytes > pool->most - pool->reserved)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r = pool->host ? CUDA_SUCCESS : memory_charge(pool->device, bytes);
    if (r)
        return r;
    for (size_t i = (start - pool->base) / UNIT; i <= (start + size - 1 - pool->base) / UNIT; i++) {
        if (pool->held[i])
            continue;
        /*
         * The range is private and not reserved, so this fails only if the machine is out of
         * memory.
         */
        if (mprotect((void *)(pool->base + i * UNIT), UNIT, PROT_READ | PROT_WRITE) < 0) {
            if (!pool->host)
                memory_refund(pool->device, bytes);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        pool->held[i] = true;
        pool->reserved += UNIT;
        bytes -= UNIT;
    }
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    return CUDA_SUCCESS;
}

static void count_used(struct mempool *pool, size_t size)
{
    pool->used += size;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
}

/* Reuse a block of this size whose free is pending in the same stream. */
static bool take_again(struct mempool *pool, const struct stream *stream, size_t bytes, size_t size,
                       uintptr_t *addressp)
{
    for (struct allocation *block = first_block(pool); block; block = next_block(pool, block)) {
        if (block->freed_in != stream || block->size != size)
            continue;
        block->freed_in = NULL;
        block->context = stream->context;
        block->bytes = bytes;
        memory_renumber(block);
        *addressp = block->base;
        return true;
    }
    return false;
}

/** mempool_returned() - take back a block that was removed from the table */
static void mempool_returned(const struct allocation *block)
{
    struct mempool *pool = block->mempool;

    pool->used -= block->size;
    if (--pool->n_blocks == 0 && pool->ended)
        mempool_free(pool);
}

/** mempool_allocate() - allocate a block that the stream may use at once */
CUresult mempool_allocate(struct mempool *pool, struct stream *stream, size_t bytes,
                          uintptr_t *addressp)
{
    size_t size = (bytes + BLOCK_UNIT - 1) / BLOCK_UNIT * BLOCK_UNIT;
    struct allocation item = {.kind = ALLOCATION_POOL,
                              .ordinal = pool->ordinal,
                              .bytes = bytes,
                              .size = size,
                              .context = stream->context,
                              .mempool = pool,
                              .returned = mempool_returned};
    CUresult r;

    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > SIZE_MAX / 4)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (take_again(pool, stream, bytes, size, addressp))
        return CUDA_SUCCESS;
    item.base = best_place(pool, size);
    if (!item.base)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r = units_take(pool, item.base, size);
    if (r)
        return r;
    if (!memory_add(&item))
        return CUDA_ERROR_OUT_OF_MEMORY;
    pool->n_blocks++;
    count_used(pool, size);
    *addressp = item.base;
    return CUDA_SUCCESS;
}

/**
 * mempool_forget_stream() - forget a stream that is ending
 *
 * Blocks whose free is pending in the stream remain allocated until it takes effect, and no stream
 * can reuse them before that.
 */
void mempool_forget_stream(const struct stream *stream)
{
    for (struct mempool *pool = mempools; pool; pool = pool->next) {
        for (struct allocation *block = first_block(pool); block; block = next_block(pool, block)) {
            if (block->freed_in == stream)
                block->freed_in = MEMPOOL_ENDED;
        }
    }
}

static bool unit_used(const struct mempool *pool, size_t i)
{
    uintptr_t start = pool->base + i * UNIT;
    const struct allocation *block = memory_after(start);

    return memory_at(start) || (block && block->base < start + UNIT);
}

/* Give back units without a block while the pool holds more than `keep` bytes. */
static void units_release(struct mempool *pool, uint64_t keep)
{
    uint64_t freed = 0;

    for (size_t i = pool->n_units; i-- > 0 && pool->reserved > keep;) {
        if (!pool->held[i] || unit_used(pool, i))
            continue;
        if (!memory_range(pool->base + i * UNIT, UNIT, true))
            continue;
        pool->held[i] = false;
        pool->reserved -= UNIT;
        freed += UNIT;
    }
    if (!pool->host)
        memory_refund(pool->device, freed);
}

/** mempool_trim() - give back units without a block, but keep at least `keep` bytes */
void mempool_trim(struct mempool *pool, uint64_t keep)
{
    if (keep < pool->reserved) /* else rounding up could overflow */
        units_release(pool, keep / UNIT * UNIT + (keep % UNIT ? UNIT : 0));
}

/** mempool_synchronized() - trim pools to their thresholds after the process waited for a device */
void mempool_synchronized(const struct device *device)
{
    for (struct mempool *pool = mempools; pool; pool = pool->next) {
        if (pool->device == device && pool->reserved > pool->threshold)
            units_release(pool, pool->threshold);
    }
}

/**
 * mempool_context_ended() - release unused memory in pools and graphs when a context has ended
 *
 * The memory is kept while this process has another context on the device.
 */
void mempool_context_ended(int ordinal)
{
    const struct device *device = driver.devices[ordinal];

    for (const struct context *context = driver.contexts; context; context = context->next) {
        if (context->device == device)
            return;
    }
    for (struct mempool *pool = mempools; pool; pool = pool->next) {
        if (pool->device == device)
            units_release(pool, 0);
    }
    graphmem_context_ended(ordinal);
}

CUresult mempool_get(const struct mempool *pool, CUmemPool_attribute attribute, void *value)
{
    const uint64_t values[] = {
        [CU_MEMPOOL_ATTR_RELEASE_THRESHOLD] = pool->threshold,
        [CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT] = pool->reserved,
        [CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH] = pool->reserved_high,
        [CU_MEMPOOL_ATTR_USED_MEM_CURRENT] = pool->used,
        [CU_MEMPOOL_ATTR_USED_MEM_HIGH] = pool->used_high,
    };

    if (attribute < CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES ||
        attribute > CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute < CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        *(int *)value = pool->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
    else
        *(uint64_t *)value = values[attribute];
    return CUDA_SUCCESS;
}

/** mempool_set() - set an attribute; a high-water mark accepts only 0, which resets it */
CUresult mempool_set(struct mempool *pool, CUmemPool_attribute attribute, const void *value)
{
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        pool->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] =
            *(const int *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        pool->threshold = *(const uint64_t *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        if (*(const uint64_t *)value)
            return CUDA_ERROR_INVALID_VALUE;
        if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
            pool->reserved_high = pool->reserved;
        else
            pool->used_high = pool->used;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/** mempool_forget() - invalidate all handles; `owner` is false if the parent process owns the pools
 */
void mempool_forget(bool owner)
{
    while (mempools) {
        struct mempool *pool = mempools;

        if (owner) {
            mempool_free(pool);
            continue;
        }
        mempools = pool->next;
        pool->object.magic = 0;
    }
    memset(standard, 0, sizeof(standard));
    memset(chosen, 0, sizeof(chosen));
}
