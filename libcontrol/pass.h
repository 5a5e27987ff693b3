/*
 * The short way: launches that may go at sight, because the grant is open.
 *
 * While nobody else waits and no cap applies the governor's page says GRANT_OPEN, and a launch
 * needs no more than to see that: it takes no lock, reads no clock and calls no driver. What
 * remains to be known is which streams have work without a marker behind it, so a pass is for one
 * stream that is noted as such, and lasts a few hundred launches: then one launch goes the long way
 * round, is measured, and is a sample of what the program launches.
 */
#pragma once

#include "control.h"

#define PASS_N 16 /* by the stream's handle */

struct pass {
    CUstream stream;
    const struct grant_device *grant;
    uint32_t epoch; /* of the grant in which this was announced */
    uint32_t used;  /* launches that ever went here; two threads at once may count as one */
    uint32_t begun; /* what that was when the pass began */
    uint32_t told;  /* how many of them the ledger knows */
    struct ledger_device *ledger;
    uint32_t limit; /* of `used`; 0: none may go */
};

extern struct pass passes[PASS_N];

static inline struct pass *pass_of(CUstream stream)
{
    uintptr_t handle = (uintptr_t)stream;

    return &passes[(handle >> 4 ^ handle >> 9) % PASS_N];
}

/* Whether a launch into the stream may go at once. */
static inline bool pass_launch(CUstream stream)
{
    struct pass *p = pass_of(stream);
    uint32_t used = atomic_load_relaxed(&p->used);
    uint32_t limit = atomic_load_acquire(&p->limit);
    const struct grant_device *grant;

    if (unlikely(!limit || (int32_t)(limit - used) <= 0) ||
        unlikely(atomic_load_relaxed(&p->stream) != stream))
        return false;
    grant = atomic_load_relaxed(&p->grant);
    if (unlikely(atomic_load_relaxed(&grant->deadline_ns) != GRANT_OPEN) ||
        unlikely(atomic_load_relaxed(&grant->epoch) != atomic_load_relaxed(&p->epoch)))
        return false;
    atomic_store_relaxed(&p->used, used + 1);
    return true;
}
