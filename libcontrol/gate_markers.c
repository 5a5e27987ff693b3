/*
 * Records and queries markers: events behind work, whose times correct the model of the GPU's queue
 * (queue.h).
 *
 * The driver is called without the gate's lock, so each function here that calls it releases the
 * lock for the call, and the caller of that function has to read again what the lock guards.
 */
#include "gate_parts.h"

/* Records a marker in the stream. The lock is held before and after. */
void gate_mark(struct gate *g, struct queue_stream *s, uint32_t era, uint64_t now,
               struct ledger_device *ledger)
{
    struct queue_mark mark;
    bool recorded;

    if (!queue_mark_begin(&g->queue, s, era, now, &mark))
        return;
    gate_unlock_for_call(g);
    recorded = (mark.handle || driver->cuEventCreate(&mark.handle, 0) == CUDA_SUCCESS) &&
               driver->cuEventRecord(mark.handle, mark.handle_of_stream) == CUDA_SUCCESS;
    gate_lock_after_call(g);
    queue_mark_end(&g->queue, &mark, recorded, ledger);
}

/* Marks the unmarked work in the current context's streams, unless a stream may be joining a
 * capture. The lock is held before and after. */
void gate_mark_tails(struct gate *g, CUcontext ctx, struct ledger_device *ledger)
{
    struct queue_stream *s;

    g->n_marking++;
    for (unsigned at = 0;
         !atomic_load_seq_cst(&gate_n_joining) && (s = queue_next_tail(&g->queue, ctx, &at));) {
        uint32_t serial = s->serial;

        if (gate_may_mark(g, s->stream) && s->used && s->serial == serial)
            gate_mark(g, s, s->era, os_now(), ledger);
    }
    g->n_marking--;
}

/* Whether work of this grant runs without a marker behind it because streams are capturing. */
bool gate_unmarked(const struct gate *g)
{
    const struct queue *q = &g->queue;

    for (unsigned i = 0; i < QUEUE_N_STREAMS && atomic_load_relaxed(&gate_n_captures); i++)
        if (q->streams[i].used && q->streams[i].unmarked && q->streams[i].era == q->era)
            return true;
    return false;
}

/* Retires the markers that have been reached and corrects the model with their times. The lock is
 * held before and after. */
void gate_retire(struct gate *g, struct ledger_device *ledger, uint64_t now, bool force)
{
    struct queue_look look;
    bool again = true;

    while (again && !g->retiring && queue_look_begin(&g->queue, now, force, &look)) {
        g->retiring = true;
        gate_unlock_for_call(g);
        look.reached = driver->cuEventQuery(look.event) != CUDA_ERROR_NOT_READY;
        if (look.reached && look.reference)
            look.timed = driver->cuEventElapsedTime(&look.since_reference, look.reference,
                                                    look.event) == CUDA_SUCCESS;
        if (look.timed && look.before == look.reference) {
            look.length = look.since_reference;
            look.measured = true;
        } else if (look.reached && look.before)
            look.measured =
                driver->cuEventElapsedTime(&look.length, look.before, look.event) == CUDA_SUCCESS;
        gate_lock_after_call(g);
        g->retiring = false;
        again = queue_look_end(&g->queue, &g->estimate, &look, ledger, now);
    }
}
