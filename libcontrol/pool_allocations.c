/*
 * Charges allocations from pools. Before each allocation, the maximum by which its pool may grow is
 * charged (here called a claim; unrelated to Kubernetes' claims).
 *
 * If that does not fit, but the free memory in the pool may be enough for a small block, the
 * allocation is made without a claim, and is undone if the pool nevertheless grew beyond the quota.
 * Frees need no accounting.
 */
#include "parking.h"
#include "pools.h"

#define POOLS_UNIT        (32ull << 20)
#define POOLS_N_WAITS     200
#define POOLS_DISTRUST_NS (100 * NS_PER_MS)
#define POOLS_TRUST_NS    (100 * NS_PER_MS) /* how long a thread is trusted, even if it is killed */

struct pool_ticket {
    struct pool *pool; /* NULL: nothing to account for */
    uint64_t claimed;
    bool inside;      /* the call keeps parked memory from moving until it ends */
    bool unsure;      /* the pool may have grown by more than was claimed */
    uint64_t trusted; /* value with which pool_trust_end() ends the trust; 0: none */
    uint64_t held;    /* what the pool held before a block was taken on trust */
};

/* Returns the minimum number of bytes by which the pool has to grow. */
static uint64_t pool_growth(struct pool *pool, uint64_t size)
{
    uint64_t live = 0;
    uint64_t held;

    pool_settle(pool, 0);
    driver->cuMemPoolGetAttribute(pool->handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &live);
    held = held_bytes(&pool->held);
    if (__builtin_add_overflow(live, size, &live))
        return UINT64_MAX;
    return live > held ? account_round(live - held, POOLS_UNIT) : 0;
}

/* Returns whether a pool of the container has grown beyond the quota and not shrunk since. */
static bool pool_outgrew(int device)
{
    struct ledger_header *ledger = pages_ledger();
    uint32_t n_slots = atomic_load_acquire(&ledger->n_slots);

    for (uint32_t i = 0; i < n_slots && i < LAYOUT_N_SLOTS; i++)
        if (atomic_load_seq_cst(&pages_slot_device(i, (unsigned)device)->outgrown))
            return true;
    return false;
}

/* Notes that the pool outgrew the quota. Until it has shrunk, no process of the container is
 * trusted beyond the quota. */
static void pool_outgrows(struct pool *pool)
{
    uint64_t level = 0;

    if (__atomic_compare_exchange_n(&pool->level, &level, held_bytes(&pool->held), false,
                                    __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        atomic_add_seq_cst(&pages_ledger_device((unsigned)pool->device)->outgrown, 1);
}

/* Ends the trust that pool_trust() gave. If the pool grew, its growth has been charged by then, so
 * that the check for the next thread includes it. */
static void pool_trust_end(struct pool *pool, uint64_t until)
{
    __atomic_compare_exchange_n(&pages_ledger()->trust_ns[pool->device], &until, 0, false,
                                __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

/*
 * Trusts a thread to take a small block without a claim. Only one thread of the container at a time
 * is trusted, so the quota is exceeded by one unit at most. Returns the value that ends the trust,
 * or 0 if the thread is not trusted. A container that is already over its quota, because the driver
 * took memory, may use the free memory of its pools, unless one of them outgrew the quota and has
 * not shrunk since. After a block has been revoked, no thread is trusted with its pool for
 * POOLS_DISTRUST_NS.
 */
static uint64_t pool_trust(struct pool *pool)
{
    uint64_t *word = &pages_ledger()->trust_ns[pool->device];

    for (int attempt = 0; attempt < POOLS_N_WAITS; attempt++) {
        uint64_t now = os_now(), until = atomic_load_acquire(word);

        if (now < atomic_load_relaxed(&pool->trust_at))
            return 0;
        /* A time further in the future was not written by this library. */
        if ((until <= now || until > now + POOLS_TRUST_NS) &&
            __atomic_compare_exchange_n(word, &until, now + POOLS_TRUST_NS, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED)) {
            /* Checked only now, because the thread that was trusted before may have made a pool
             * grow. */
            if (account_used(pool->device) <= account_limit(pool->device) ||
                !pool_outgrew(pool->device))
                return now + POOLS_TRUST_NS;
            pool_trust_end(pool, now + POOLS_TRUST_NS);
            return 0;
        }
        os_sleep(POOLS_WAIT_NS);
    }
    return 0;
}

/*
 * Begins an allocation while memory is short. A block that is smaller than a unit may still fit
 * into what the pool holds. It is allocated without a claim, and freed if the pool grew beyond the
 * quota to hold it. A larger block needs a claim for its whole size: the free memory of the pool is
 * given back first, then claimed again, because it is not known whether it would be enough.
 */
static cold CUresult pool_enter_tight(struct pool_ticket *ticket, uint64_t size)
{
    struct pool *pool = ticket->pool;
    uint64_t whole = account_round(size, POOLS_UNIT);

    for (int attempt = 0; attempt < 2; attempt++) {
        uint64_t growth = pool_growth(pool, size);

        ticket->claimed = whole;
        if (account_try(pool->device, whole, pool->unseen))
            return CUDA_SUCCESS;
        if (size < POOLS_UNIT && !growth && (ticket->trusted = pool_trust(pool))) {
            ticket->claimed = 0;
            ticket->unsure = true;
            ticket->held = held_bytes(&pool->held);
            return CUDA_SUCCESS;
        }
        if (!attempt && size <= account_limit(pool->device))
            pools_squeeze(pool->device);
    }
    if (account_claim(pool->device, whole, pool->unseen))
        return CUDA_SUCCESS;
    return account_refuse(pool->device);
}

static CUresult pool_claim(struct pool_ticket *ticket, struct pool *pool, uint64_t size,
                           CUstream stream)
{
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;

    if (!pool)
        return CUDA_SUCCESS;
    if (driver->cuStreamIsCapturing(stream, &capturing) == CUDA_SUCCESS &&
        unlikely(capturing != CU_STREAM_CAPTURE_STATUS_NONE)) {
        graphs_note_memory();
        return CUDA_SUCCESS;
    }
    ticket->pool = pool;
    ticket->claimed = account_round(size, POOLS_UNIT);
    ticket->unsure = false;
    if (likely(account_try(pool->device, ticket->claimed, pool->unseen)))
        return CUDA_SUCCESS;
    return pool_enter_tight(ticket, size);
}

static CUresult pool_enter(struct pool_ticket *ticket, struct pool *pool, uint64_t size,
                           CUstream stream)
{
    CUresult result;

    ticket->pool = NULL;
    ticket->inside = parking_applies();
    if (ticket->inside)
        parking_enter(PARKING_MEMORY);
    result = pool_claim(ticket, pool, size, stream);
    if (result != CUDA_SUCCESS && ticket->inside)
        parking_leave();
    return result;
}

/* Frees, in stream order, a block that made its pool grow beyond the quota. */
static cold CUresult pool_revoke(struct pool *pool, CUdeviceptr *dptr, CUstream stream)
{
    atomic_store_relaxed(&pool->trust_at, os_now() + POOLS_DISTRUST_NS);
    driver->cuMemFreeAsync(*dptr, stream);
    *dptr = 0;
    pools_squeeze(pool->device);
    return account_refuse(pool->device);
}

static CUresult pool_end(struct pool_ticket *ticket, CUresult result, CUdeviceptr *dptr,
                         CUstream stream)
{
    bool grown, over;

    if (!ticket->pool)
        return result;
    pool_settle(ticket->pool, ticket->claimed);
    if (likely(!ticket->unsure))
        return result;
    grown = held_bytes(&ticket->pool->held) > ticket->held;
    /* A sample taken before the pool was queried may have attributed its growth to the driver. */
    if (grown)
        account_driver_takes(ticket->pool->device, 0);
    over = result == CUDA_SUCCESS && grown && account_over(ticket->pool->device, 0);
    if (over)
        pool_outgrows(ticket->pool);
    pool_trust_end(ticket->pool, ticket->trusted);
    if (over)
        return pool_revoke(ticket->pool, dptr, stream);
    return result == CUDA_ERROR_OUT_OF_MEMORY ? account_refuse(ticket->pool->device) : result;
}

static CUresult pool_leave(struct pool_ticket *ticket, CUresult result, CUdeviceptr *dptr,
                           CUstream stream)
{
    result = pool_end(ticket, result, dptr, stream);
    if (ticket->inside)
        parking_leave();
    return result;
}

CONTROL_EXPORT CUresult cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
    struct pool_ticket ticket;
    CUresult result = pool_enter(&ticket, pool_of_stream(hStream), bytesize, hStream);

    if (unlikely(result != CUDA_SUCCESS))
        return result;
    result = real->cuMemAllocAsync(dptr, bytesize, hStream);
    return pool_leave(&ticket, result, dptr, hStream);
}

CONTROL_EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
    CUstream stream = gate_ptsz(hStream);
    struct pool_ticket ticket;
    CUresult result = pool_enter(&ticket, pool_of_stream(stream), bytesize, stream);

    if (unlikely(result != CUDA_SUCCESS))
        return result;
    result = real->cuMemAllocAsync_ptsz(dptr, bytesize, hStream);
    return pool_leave(&ticket, result, dptr, stream);
}

CONTROL_EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize,
                                                CUmemoryPool pool, CUstream hStream)
{
    struct pool_ticket ticket;
    CUresult result = pool_enter(&ticket, pool_of(pool), bytesize, hStream);

    if (unlikely(result != CUDA_SUCCESS))
        return result;
    result = real->cuMemAllocFromPoolAsync(dptr, bytesize, pool, hStream);
    return pool_leave(&ticket, result, dptr, hStream);
}

CONTROL_EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t bytesize,
                                                     CUmemoryPool pool, CUstream hStream)
{
    CUstream stream = gate_ptsz(hStream);
    struct pool_ticket ticket;
    CUresult result = pool_enter(&ticket, pool_of(pool), bytesize, stream);

    if (unlikely(result != CUDA_SUCCESS))
        return result;
    result = real->cuMemAllocFromPoolAsync_ptsz(dptr, bytesize, pool, hStream);
    return pool_leave(&ticket, result, dptr, stream);
}
