/*
 * The gate: work starts on the GPU only while the container holds GPU time, and only so much of it
 * that it ends with the grant.
 *
 * The governor publishes one word, `deadline_ns`: work may start before it. GRANT_OPEN means that
 * nobody else waits and no cap applies; then every launch goes. Otherwise a launch goes if the
 * model of the GPU's queue (queue.h) says that it ends with the grant.
 *
 * A launch that does not fit goes ahead all the same, to be held on the GPU: its stream first waits
 * for a word of pinned memory to reach the next ticket (cuStreamWaitValue32), which the next grant
 * writes. So the application prepares its next grant while others use the GPU, and a grant begins
 * with one store instead of a race between the application's launches and the GPU. A context that
 * waits so costs its neighbours nothing (H200: 6,034 units of 0.5 ms in 3 s beside none, one or
 * three of them; 0.7 us for the call, 2 us on the GPU). Once something is held, all later launches
 * are, so what is held never waits for something that is behind it. When a grant's worth is held,
 * or where a stream cannot be held, launches wait here.
 *
 * Streams that capture are neither gated nor marked, and every driver call that we add is made in
 * relaxed capture mode, because in the other modes it would invalidate a capture of the
 * application.
 */
#include "gate.h"

#include <string.h>

#define GATE_NAP_NS               (250 * NS_PER_US) /* between two looks at a full queue */
#define CU_MEMHOSTALLOC_PORTABLE  1
#define CU_MEMHOSTALLOC_DEVICEMAP 2

struct gate gate_devices[LAYOUT_N_DEVICES];

void gate_relax(CUstreamCaptureMode *mode)
{
    *mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver->cuThreadExchangeStreamCaptureMode(mode);
}

static void gate_restore(CUstreamCaptureMode *mode)
{
    driver->cuThreadExchangeStreamCaptureMode(mode);
}

/* A new grant begins: the books of the last one are closed. */
void gate_adopt(struct gate *g, const struct grant_device *grant)
{
    uint32_t epoch = atomic_load_acquire(&grant->epoch);

    if (epoch == g->epoch)
        return;
    g->epoch = epoch;
    g->active = false;
    g->released = false;
    g->drained = false;
    /* Others had the GPU since the last grant: no interval may reach across. Held work has its own
     * era already. */
    if (!g->holding)
        g->queue.era++;
}

/*
 * The first work of a grant is announced before it is submitted: the arbiter waits for its end.
 * Returns false if the grant was taken back in between; then the arbiter saw nobody active.
 */
static bool gate_announce(struct gate *g, const struct grant_device *grant,
                          struct ledger_device *ledger, uint64_t now)
{
    if (g->active)
        return true;
    atomic_store_relaxed(&ledger->first_ns, now);
    atomic_store_seq_cst(&ledger->active_epoch, g->epoch);
    g->active = true;
    return atomic_load_seq_cst(&grant->epoch) == g->epoch;
}

bool gate_lost(uint64_t now)
{
    return now >= atomic_load_relaxed(&pages_grant()->heartbeat_ns) + GATE_LOST_NS;
}

/*
 * The time until which work may start; 0: none. While the governor is away a container gives itself
 * grants at its guaranteed share, or does what the node says.
 */
static uint64_t gate_deadline(struct gate *g, const struct grant_device *grant, uint64_t now)
{
    uint64_t share = atomic_load_relaxed(&grant->compute);

    if (likely(!gate_lost(now)))
        return g->released ? 0 : atomic_load_acquire(&grant->deadline_ns);
    switch (atomic_load_relaxed(&pages_grant()->on_governor_loss)) {
    case 1:
        return 0;
    case 2:
        return GRANT_OPEN;
    default:
        if (now >= g->local_next) {
            g->local_deadline = now + GATE_LOCAL_NS;
            g->local_next = now + GATE_LOCAL_NS * 1000000 / (share ? share : 1);
        }
        return g->local_deadline;
    }
}

/* ---- holding work on the GPU ---- */

static uint32_t *hold_word(struct gate *g, CUcontext ctx)
{
    struct gate_hold *hold = NULL;
    void *memory;

    for (unsigned i = 0; i < GATE_N_HOLDS; i++) {
        if (g->holds[i].word && g->holds[i].ctx == ctx)
            return g->holds[i].word;
        if (!g->holds[i].word && !hold)
            hold = &g->holds[i];
    }
    if (!hold || driver->cuMemHostAlloc(&memory, sizeof *hold->word,
                                        CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP) !=
                     CUDA_SUCCESS)
        return NULL;
    hold->ctx = ctx;
    hold->word = memory;
    atomic_store_release(hold->word, g->ticket - 1);
    return hold->word;
}

/* Makes the stream wait for the next ticket. What runs is marked before the first one does. */
static bool hold_stream(struct gate *g, struct queue_stream *s, struct ledger_device *ledger,
                        uint64_t now)
{
    uint32_t *word;

    if (g->holding && s->held == g->ticket)
        return true;
    word = hold_word(g, s->ctx);
    if (!word)
        return false;
    if (!g->holding)
        queue_mark_tails(&g->queue, s->ctx, ledger, now);
    if (driver->cuStreamWaitValue32(s->stream, (CUdeviceptr)(uintptr_t)word, g->ticket, 0) !=
        CUDA_SUCCESS)
        return false;
    s->held = g->ticket;
    if (!g->holding) {
        g->holding = true;
        atomic_add_seq_cst(&ledger->want, 1);
        if (!g->active || g->released)
            pages_poke();
    }
    return true;
}

/* Lets what is held run, if the grant has room for it. Returns whether it did. */
bool gate_open(struct gate *g, const struct grant_device *grant, struct ledger_device *ledger,
               uint64_t now)
{
    struct queue *q = &g->queue;
    bool lost = gate_lost(now);
    uint64_t deadline, left = queue_left(q, now);

    if (!g->holding)
        return false;
    deadline = gate_deadline(g, grant, now);
    if (now >= deadline)
        return false;
    if ((lost ? left > 0 : g->active) && deadline != GRANT_OPEN &&
        now + left + q->ahead_ns / 2 > deadline)
        return false;
    if (!lost && !gate_announce(g, grant, ledger, now))
        return false;
    queue_open(q, now);
    g->last_launch = now;
    for (unsigned i = 0; i < GATE_N_HOLDS; i++)
        if (g->holds[i].word)
            atomic_store_release(g->holds[i].word, g->ticket);
    g->ticket++;
    g->holding = false;
    atomic_sub_seq_cst(&ledger->want, 1);
    atomic_add_seq_cst(&g->turn, 1);
    prim_futex_wake(&g->turn);
    return true;
}

/* ---- launches ---- */

enum gate_answer {
    GATE_GO,
    GATE_FULL,   /* wait for the queue */
    GATE_CLOSED, /* wait for a grant */
};

static enum gate_answer gate_ask(struct gate *g, const struct grant_device *grant, uint64_t now,
                                 uint64_t predicted)
{
    uint64_t limit = atomic_load_relaxed(&pages_grant()->inflight_ns);
    uint64_t deadline = gate_deadline(g, grant, now);
    uint64_t queued = queue_left(&g->queue, now);

    if (g->holding || now >= deadline)
        return GATE_CLOSED;
    if (deadline == GRANT_OPEN)
        return GATE_GO;
    /* Half of it before the deadline, half behind: on average the grant is used to its end. A fresh
     * grant takes one piece of work of any length; what it overruns is charged. */
    if (now + queued + predicted / 2 > deadline && (queued || (g->active && !gate_lost(now))))
        return GATE_CLOSED;
    if (queued + predicted > limit && queued > limit / 4)
        return GATE_FULL;
    return GATE_GO;
}

/* Waits for the queue, or until the grant may have changed. Called and returns with the lock held.
 */
static cold void gate_wait(struct gate *g, const struct grant_device *grant,
                           struct ledger_device *ledger, enum gate_answer answer, uint32_t seen,
                           bool *wantingp)
{
    uint64_t patience = gate_lost(prim_now()) ? 2 * NS_PER_MS : 50 * NS_PER_MS;
    uint64_t standby;

    if (answer == GATE_FULL) {
        prim_unlock(&g->lock);
        prim_sleep(GATE_NAP_NS);
        prim_lock(&g->lock);
        return;
    }
    if (!*wantingp) {
        *wantingp = true;
        atomic_add_seq_cst(&ledger->want, 1);
        if (!g->active || g->released)
            pages_poke();
    }
    if (g->holding) {
        uint32_t turn = atomic_load_acquire(&g->turn);

        /* A grant's worth is held: the helper lets it run, and then there is room. */
        prim_unlock(&g->lock);
        prim_futex_wait(&g->turn, turn, patience);
        prim_lock(&g->lock);
        return;
    }
    standby = atomic_load_acquire(&grant->standby_ns);
    prim_unlock(&g->lock);
    /* The governor said that the grant is near: a core that sleeps now would answer late. */
    while (prim_now() < standby && atomic_load_acquire(&grant->signal) == seen)
        prim_relax();
    prim_futex_wait(&grant->signal, seen, patience);
    prim_lock(&g->lock);
}

/*
 * Streams depend on each other: held work in one makes others wait for an event, and such a wait
 * does take turns on the GPU (H200: a GRU of cuDNN, which runs on several streams, cost a neighbour
 * 14 of 30 points while it was held; nothing when its launches waited instead). So nothing is held
 * for a while.
 */
static void gate_cross(struct gate *g)
{
    g->crossed = true;
    g->crossed_era = g->queue.era;
}

void gate_note_dependency(void)
{
    for (unsigned device = 0; device < pages_n_devices(); device++) {
        struct gate *g = &gate_devices[device];

        prim_lock(&g->lock);
        gate_cross(g);
        prim_unlock(&g->lock);
    }
}

/* Whether work of that length may be put into the stream to be held. */
static bool gate_may_hold(struct gate *g, const struct queue_stream *s, uint64_t predicted)
{
    uint64_t ahead = g->queue.ahead_ns;

    if (g->crossed && g->queue.era - g->crossed_era >= GATE_CROSSED)
        g->crossed = false;
    return s && !g->no_holds && !g->crossed && atomic_load_relaxed(&pages_grant()->holds) &&
           (!ahead || ahead + predicted <= atomic_load_relaxed(&pages_grant()->inflight_ns));
}

CUresult gate_enter(struct gate_ticket *ticket, uintptr_t key, uint64_t blocks, CUstream stream)
{
    int device = pages_n_devices() == 1 && pages_slot() ? 0 : pages_index_current();
    const struct grant_device *grant;
    struct ledger_device *ledger;
    struct queue_stream *s;
    struct gate *g;
    CUstreamCaptureMode mode;
    CUcontext ctx = NULL;
    bool held = false, wanting = false;
    uint64_t began = 0, now, predicted;
    uint32_t kind;
    int saved = errno;

    ticket->device = -1;
    if (unlikely(device < 0))
        return CUDA_SUCCESS;
    if (queue_capturing(stream))
        return CUDA_SUCCESS;
    driver->cuCtxGetCurrent(&ctx);
    g = &gate_devices[device];
    grant = pages_grant_device((unsigned)device);
    ledger = pages_ledger_device((unsigned)device);
    gate_relax(&mode);
    prim_lock(&g->lock);
    if (unlikely(!g->started))
        helper_start(g, (unsigned)device);
    kind = estimate_kind(key, blocks);
    for (;;) {
        uint32_t seen = atomic_load_acquire(&grant->signal);
        enum gate_answer answer;

        predicted = estimate_ns(kind);
        gate_adopt(g, grant);
        now = prim_now();
        if (!gate_open(g, grant, ledger, now))
            queue_retire(&g->queue, now, false, ledger);
        s = queue_find(&g->queue, ctx, stream);
        if (s != g->only) {
            if (g->only)
                gate_cross(g);
            g->only = s;
        }
        answer = gate_ask(g, grant, now, predicted);
        if (answer == GATE_GO) {
            if (gate_lost(now) || gate_announce(g, grant, ledger, now))
                break;
            continue;
        }
        if (answer == GATE_CLOSED && gate_may_hold(g, s, predicted)) {
            held = hold_stream(g, s, ledger, now);
            if (held)
                break;
            g->no_holds = !g->holding;
        }
        if (!began)
            began = now;
        gate_wait(g, grant, ledger, answer, seen, &wanting);
    }
    if (wanting) {
        atomic_sub_seq_cst(&ledger->want, 1);
        atomic_add_relaxed(&ledger->waits, 1);
    }
    if (began)
        atomic_add_relaxed(&ledger->wait_ns, now - began);
    ticket->era = g->queue.era + held;
    ticket->mark = s && queue_add(&g->queue, s, ticket->era, kind, ledger, now);
    if (!s && !held) {
        g->queue.busy_until = now + queue_left(&g->queue, now) + predicted;
        g->queue.submitted += predicted;
    }
    g->last_launch = now;
    prim_unlock(&g->lock);
    gate_restore(&mode);
    atomic_add_relaxed(&ledger->launches, 1);
    atomic_add_relaxed(&ledger->predicted_ns, predicted);
    ticket->device = device;
    ticket->stream = stream;
    ticket->ctx = ctx;
    errno = saved;
    return CUDA_SUCCESS;
}

void gate_leave(struct gate_ticket *ticket, CUresult result)
{
    CUstreamCaptureMode mode;
    struct queue_stream *s;
    struct gate *g;
    int saved = errno;

    if (ticket->device < 0 || !ticket->mark || result != CUDA_SUCCESS)
        return;
    g = &gate_devices[ticket->device];
    gate_relax(&mode);
    prim_lock(&g->lock);
    s = queue_find(&g->queue, ticket->ctx, ticket->stream);
    /* Not if another thread has marked it since, or a hold stands between the work and here. */
    if (s && s->unmarked && s->era == ticket->era)
        queue_mark(&g->queue, s, s->era, pages_ledger_device((unsigned)ticket->device), prim_now());
    prim_unlock(&g->lock);
    gate_restore(&mode);
    errno = saved;
}

void gate_forget_stream(CUstream stream)
{
    for (unsigned device = 0; device < pages_n_devices(); device++) {
        struct gate *g = &gate_devices[device];

        prim_lock(&g->lock);
        queue_forget_stream(&g->queue, stream);
        prim_unlock(&g->lock);
    }
}

/* The context's events and pinned words go with it. NULL: every context's. */
void gate_forget_context(CUcontext ctx)
{
    for (unsigned device = 0; device < pages_n_devices(); device++) {
        struct gate *g = &gate_devices[device];

        prim_lock(&g->lock);
        queue_forget_context(&g->queue, ctx);
        for (unsigned i = 0; i < GATE_N_HOLDS; i++) {
            if (!g->holds[i].word || (ctx && g->holds[i].ctx != ctx))
                continue;
            /* What is still held in it must not outlive the word that it waits for. */
            atomic_store_release(g->holds[i].word, g->ticket);
            g->holds[i].word = NULL;
        }
        prim_unlock(&g->lock);
    }
}
