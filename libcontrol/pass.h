/*
 * Passes: the fast path of a stream, for launches that may start immediately.
 *
 * A pass belongs to one stream, and is valid for one value of `deadline_ns` in the grant page, as
 * long as the page has that value. A launch that uses it takes no lock, reads no clock and makes no
 * driver call.
 *
 * While no other container is waiting and no cap applies, `deadline_ns` is GRANT_OPEN, and a launch
 * that uses a pass is only counted. The average duration of a stream's launches is learned, and a
 * pass is valid for as many launches as take a few milliseconds. When too much is queued, the next
 * launch waits: another container may want the GPU at any time, and would have to wait for all of
 * that work. Now and then a launch is measured on its own, as a sample of what the program
 * launches.
 *
 * Under a grant with a deadline, a pass is metered: it has a budget, the GPU time that may be
 * queued before the next marker. The learned duration of each launch is deducted from it. The
 * launches are noted, and are added to the model of the GPU's queue when a thread next takes the
 * gate's lock, which ends the pass.
 */
#pragma once

#include "control.h"

#define PASS_N     16 /* number of passes; that of a stream is found by its handle */
#define PASS_N_LOG 96 /* maximum number of launches with one metered pass */

struct estimate;
struct gate;

struct pass {
    _Alignas(64) CUstream stream;
    const struct grant_device *grant;
    uint64_t deadline_ns; /* valid while the page has this value */
    uint32_t epoch;       /* and this epoch, that of the grant in which the work was announced */
    uint32_t limit;       /* 0: not valid. Open: maximum of `used`; metered: number of the pass */
    uint32_t used;        /* launches counted here; two simultaneous ones may count as one */
    uint32_t reported;    /* how many of them are in the ledger */
    uint32_t counted;     /* how many of them are in the model of the queue */
    uint64_t began_ns;
    struct ledger_device *ledger;
    CUcontext ctx;
    const struct gate *gate; /* of the GPU */
    /* Metered: */
    bool metered; /* until the launches that it let through are in the model */
    const struct estimate *estimate;
    uint64_t budget_ns;
    uint64_t spent;           /* launches, times PASS_ONE, plus their nanoseconds */
    uint32_t log[PASS_N_LOG]; /* kind of each launch, plus 1; 0: launch not noted yet */
};

#define PASS_ONE (1ull << 40)

extern struct pass passes[PASS_N];

static inline struct pass *pass_of(CUstream stream)
{
    uintptr_t handle = (uintptr_t)stream;

    return &passes[(handle >> 4 ^ handle >> 9) % PASS_N];
}

bool pass_spend(struct pass *p, uint32_t limit, uintptr_t key, uint64_t blocks);

/* Whether a launch of `key` with `blocks` blocks into the stream may start immediately; if so, the
 * launch is counted. `single`: a graph, to which the stream's average does not apply. */
static inline bool pass_launch(CUstream stream, uintptr_t key, uint64_t blocks, bool single)
{
    struct pass *p = pass_of(stream);
    uint32_t used = atomic_load_relaxed(&p->used);
    uint32_t limit = atomic_load_acquire(&p->limit);
    const struct grant_device *grant;
    uint64_t deadline;

    if (unlikely(!limit) || unlikely(atomic_load_relaxed(&p->stream) != stream))
        return false;
    grant = atomic_load_relaxed(&p->grant);
    /* The epoch is written first, so a deadline is never seen with an earlier grant's epoch. */
    deadline = atomic_load_acquire(&grant->deadline_ns);
    if (unlikely(deadline != atomic_load_acquire(&p->deadline_ns)) ||
        unlikely(atomic_load_relaxed(&grant->epoch) != atomic_load_relaxed(&p->epoch)))
        return false;
    if (unlikely(deadline != GRANT_OPEN))
        return pass_spend(p, limit, key, blocks);
    if (single || unlikely((int32_t)(limit - used) <= 0))
        return false;
    atomic_store_relaxed(&p->used, used + 1);
    return true;
}
