/*
 * Internal declarations of the gate. Each of its files calls only those named before it:
 *
 *   gate_grants.c     what the grant allows, and when a new one has begun
 *   gate_captures.c   which streams are capturing
 *   gate_markers.c    markers: recorded behind work, and queried
 *   gate_holds.c      work that is held on the GPU
 *   gate.c            launches
 *
 * Short functions on the path of a launch are inline, so that they cost no call.
 */
#pragma once

#include "gate.h"

/* Release and retake the lock around a driver call. */
static inline void gate_unlock_for_call(struct gate *g)
{
    g->n_calls++;
    os_unlock(&g->lock);
}

static inline void gate_lock_after_call(struct gate *g)
{
    gate_lock(g);
    g->n_calls--;
}

/* ---- gate_grants.c ---- */

uint64_t gate_deadline(struct gate *g, const struct grant_device *grant, uint64_t now);

/*
 * Announces the first work of a grant before it is submitted, so that the arbiter waits for its
 * end. Returns false if the grant was taken back in between; the arbiter then saw no active
 * process.
 */
static inline bool gate_announce(struct gate *g, const struct grant_device *grant,
                                 struct ledger_device *ledger, uint64_t now)
{
    if (g->active)
        return true;
    atomic_store_relaxed(&ledger->seen_ns, now);
    atomic_store_seq_cst(&ledger->active_epoch, g->epoch);
    g->active = true;
    return atomic_load_seq_cst(&grant->epoch) == g->epoch;
}

/* ---- gate_captures.c ---- */

/* Number of captures that may be under way. While it is 0, no launch queries its stream. */
extern uint32_t gate_n_captures;
extern uint32_t gate_n_joining; /* threads in calls by which a stream may join a capture */

/* Whether a stream is capturing. Called without a gate's lock, because it queries the driver. */
bool capture_is_running(CUstream stream);
void capture_end_context(CUcontext ctx);
void captures_after_fork(void);

/* ---- gate_markers.c ---- */

void gate_mark(struct gate *g, struct queue_stream *s, uint32_t era, uint64_t now,
               struct ledger_device *ledger);

/* Whether an event may be recorded in a stream that other threads may use: not if the stream is
 * capturing, and not in the legacy stream while any stream is, because the legacy stream waits for
 * that stream. The lock is held before and after. */
static inline bool gate_may_mark(struct gate *g, CUstream stream)
{
    bool captures_now;

    if (likely(!atomic_load_relaxed(&gate_n_captures)))
        return true;
    if (!stream || stream == CU_STREAM_LEGACY)
        return false;
    gate_unlock_for_call(g);
    captures_now = capture_is_running(stream);
    gate_lock_after_call(g);
    return !captures_now;
}

/* ---- gate_holds.c ---- */

void hold_prepare(struct gate *g, CUcontext ctx) cold;

static inline uint32_t *hold_find(struct gate *g, CUcontext ctx)
{
    for (unsigned i = 0; i < GATE_N_HOLDS; i++)
        if (g->holds[i].word && g->holds[i].ctx == ctx)
            return g->holds[i].word;
    return NULL;
}

/*
 * Notes that streams depend on each other, so that nothing is held for a while. Work held in one
 * stream makes other streams wait for an event, and such a wait does take time slices on the GPU
 * (H200: a GRU in cuDNN, which runs on several streams, cost a neighbour 14 of 30 percentage points
 * while it was held, and nothing when its launches waited instead).
 */
static inline void gate_cross(struct gate *g)
{
    g->crossed = true;
    g->crossed_era = g->queue.era;
}
