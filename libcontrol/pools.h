/*
 * The record of one of the driver's pools, shared by the table of pools (pools.c) and the
 * allocations from them (pool_allocations.c).
 */
#pragma once

#include "control.h"

#define POOLS_WAIT_NS (10 * NS_PER_US)

enum pool_state {
    POOL_FREE,   /* the entry is unused */
    POOL_LIVE,   /* may be queried */
    POOL_SILENT, /* must not be queried before the application uses it again */
};

/* Entries are reused but never unmapped, so readers need no lock. */
struct pool {
    struct pool *next;
    CUmemoryPool handle;
    int device;  /* -1: what it holds is not charged */
    bool unseen; /* NVML attributes its memory to no process */
    uint32_t state;
    uint32_t n_askers; /* threads that query it outside the application's calls */
    /* Until this time, free memory in the pool is no reason to let an allocation through: the last
     * allocation that was let through for that reason made the pool grow. */
    uint64_t trust_at;
    uint64_t level; /* not 0: it outgrew the quota, and has not held less than this since */
    struct held held;
};

/* Return NULL if there is nothing to account for. */
struct pool *pool_of(CUmemoryPool handle);
struct pool *pool_of_stream(CUstream stream);

/* Replaces the charge with what the pool holds now, and gives back a claim of `claimed` bytes. */
void pool_settle(struct pool *pool, uint64_t claimed);
