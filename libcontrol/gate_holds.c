/*
 * Holds work on the GPU until the next grant.
 *
 * A launch that does not fit is submitted all the same, and held on the GPU: its stream first waits
 * for a word of pinned memory to reach the next ticket (cuStreamWaitValue32), which is written when
 * the next grant begins. The application thus prepares its next grant while others use the GPU, and
 * a grant begins with one store instead of a race between the application's launches and the GPU. A
 * context that waits in this way costs its neighbours nothing (H200: a neighbour completed 6,034
 * 0.5 ms units in 3 s, whether none, one or three contexts waited; a wait takes 0.7 us for the
 * call, and 2 us on the GPU). Once something is held, all later launches are held too, so held work
 * never waits for something that was submitted after it. When a grant's worth of work is held, or
 * where a stream cannot be held, launches wait (gate.c).
 */
#include "gate_parts.h"

#define CU_MEMHOSTALLOC_PORTABLE  1
#define CU_MEMHOSTALLOC_DEVICEMAP 2

/* Allocates the word that streams of the current context can wait for, before any work is held. The
 * lock is held before and after. */
cold void hold_prepare(struct gate *g, CUcontext ctx)
{
    struct gate_hold *hold = NULL;
    void *memory = NULL;
    CUresult result;

    for (unsigned i = 0; i < GATE_N_HOLDS && !hold; i++)
        if (!g->holds[i].word)
            hold = &g->holds[i];
    if (!hold || g->preparing)
        return;
    g->preparing = true;
    gate_unlock_for_call(g);
    result = driver->cuMemHostAlloc(&memory, sizeof *hold->word,
                                    CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    gate_lock_after_call(g);
    g->preparing = false;
    if (result != CUDA_SUCCESS) {
        g->no_holds = true;
        return;
    }
    atomic_store_release((uint32_t *)memory, g->ticket - 1);
    hold->ctx = ctx;
    hold->word = memory;
}

/* Lets held work run. */
static void gate_let(struct gate *g, struct ledger_device *ledger, uint64_t now)
{
    queue_open(&g->queue, now);
    g->last_launch = now;
    for (unsigned i = 0; i < GATE_N_HOLDS; i++)
        if (g->holds[i].word)
            atomic_store_release(g->holds[i].word, g->ticket);
    g->ticket++;
    g->holding = false;
    g->n_held = 0;
    atomic_sub_seq_cst(&ledger->want, 1);
    atomic_add_seq_cst(&g->turn, 1);
    os_futex_wake(&g->turn);
}

/* Lets held work run now and prevents further holds, because no helper would end them. */
void gate_end_holds(struct gate *g, struct ledger_device *ledger)
{
    g->no_holds = true;
    if (g->holding)
        gate_let(g, ledger, os_now());
}

/* Lets held work run if the grant has room for it. Returns whether it did. */
bool gate_open(struct gate *g, const struct grant_device *grant, struct ledger_device *ledger,
               uint64_t now)
{
    struct queue *q = &g->queue;
    bool lost;
    uint64_t deadline, left;

    if (!g->holding)
        return false;
    lost = gate_lost(now);
    left = queue_left(q, now);
    deadline = gate_deadline(g, grant, now);
    if (now >= deadline)
        return false;
    if ((lost ? left > 0 : g->active) && deadline != GRANT_OPEN &&
        now + left + q->ahead_ns / 2 > deadline)
        return false;
    if (!lost && !gate_announce(g, grant, ledger, now))
        return false;
    gate_let(g, ledger, now);
    return true;
}

void gate_note_dependency(void)
{
    for (unsigned device = 0; device < pages_n_devices(); device++) {
        struct gate *g = &gate_devices[device];

        if (!g->started)
            continue;
        gate_lock(g);
        gate_cross(g);
        os_unlock(&g->lock);
    }
}
