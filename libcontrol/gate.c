/*
 * The gate lets work start on the GPU only while the container has a grant, and only as much work
 * as will end by the end of the grant.
 *
 * The governor publishes one word, `deadline_ns`: work may start before it. GRANT_OPEN means that
 * no other container is waiting and no cap applies; then every launch passes (pass.h). Otherwise a
 * launch passes if, according to the model of the GPU's queue (queue.h), it will end by the end of
 * the grant.
 *
 * A launch that does not fit is submitted nevertheless, and held on the GPU (gate_holds.c). When a
 * grant's worth of work is held, or where a stream cannot be held, launches wait here. Streams that
 * are capturing are not gated (gate_captures.c).
 */
#include "gate_parts.h"

#include "parking.h"
#include "pass.h"

#include <string.h>

#define GATE_NAP_NS         (250 * NS_PER_US)  /* interval between two checks of a full queue */
#define GATE_NEW_NS         (20 * NS_PER_US)   /* the same, for work never measured before */
#define GATE_OPEN_MARKER_NS (2500 * NS_PER_US) /* between markers under an open grant */
#define GATE_GAP_NS         (NS_PER_MS)        /* a longer idle time is a gap in an interval */
#define GATE_REST_NS        (50 * NS_PER_MS)   /* a longer pause says nothing about the next */

enum gate_answer {
    GATE_GO,
    GATE_FULL,   /* wait for the queue */
    GATE_NEW,    /* wait for work of unknown duration */
    GATE_CLOSED, /* wait for a grant */
};

static enum gate_answer gate_ask(struct gate *g, uint64_t deadline, uint64_t now, uint32_t kind)
{
    uint64_t predicted = estimate_ns(&g->estimate, kind);
    uint64_t limit = atomic_load_relaxed(&pages_grant()->inflight_ns);
    uint64_t queued = queue_left(&g->queue, now);

    if (g->holding || now >= deadline)
        return GATE_CLOSED;
    if (deadline == GRANT_OPEN)
        return GATE_GO;
    /* Up to half of the work may lie after the deadline, so on average a grant is used to its end.
     * A new grant accepts one piece of work of any length; its time after the deadline is
     * charged. */
    if (now + queued + predicted / 2 > deadline && (queued || (g->active && !gate_lost(now))))
        return GATE_CLOSED;
    if (queued + predicted > limit && queued > limit / 4)
        return GATE_FULL;
    if (!estimate_samples(&g->estimate, kind) && queue_unknown(&g->queue, now) >= GATE_N_UNKNOWN)
        return GATE_NEW;
    return GATE_GO;
}

/* Marks the end of the stream's work before a wait in which the queue may run dry, so that no
 * interval spans the wait. The lock is held before and after. Returns whether the work was marked:
 * the lock was released for that, so the caller has to check again. */
static bool gate_mark_end(struct gate *g, const struct queue_stream *s,
                          struct ledger_device *ledger)
{
    struct gate_visit visit;
    uint32_t serial = s->serial;

    if (g->holding || !s->unmarked)
        return false;
    gate_visit_begin(&visit);
    if (gate_may_mark(g, s->stream) && s->used && s->serial == serial)
        gate_mark(g, queue_find(&g->queue, s->ctx, s->stream), s->era, os_now(), ledger);
    gate_visit_end(&visit);
    return !s->unmarked;
}

/* Waits for the queue, or until the grant may have changed. The lock is held before and after. */
static cold void gate_wait(struct gate *g, const struct grant_device *grant,
                           struct ledger_device *ledger, enum gate_answer answer, uint32_t seen,
                           bool *wantingp)
{
    uint64_t now = os_now();
    uint64_t patience = gate_lost(now) ? 2 * NS_PER_MS : 50 * NS_PER_MS;
    uint64_t standby;
    bool poke = false;

    if (answer == GATE_FULL || answer == GATE_NEW) {
        os_unlock(&g->lock);
        os_sleep(answer == GATE_NEW ? GATE_NEW_NS : GATE_NAP_NS);
        gate_lock(g);
        return;
    }
    if (!*wantingp) {
        *wantingp = true;
        atomic_add_seq_cst(&ledger->want, 1);
        poke = !g->active || g->released;
    }
    if (g->holding) {
        uint32_t turn = atomic_load_acquire(&g->turn);

        /* A grant's worth of work is held. The helper lets it run, and then there is room. */
        os_unlock(&g->lock);
        if (poke)
            pages_poke();
        os_futex_wait(&g->turn, turn, patience);
        gate_lock(g);
        return;
    }
    os_unlock(&g->lock);
    if (poke)
        pages_poke();
    /* The governor has announced the grant: a core that sleeps now would wake up too late. */
    standby = gate_spin_until(grant, now);
    while (os_now() < standby && atomic_load_acquire(&grant->signal) == seen)
        os_relax();
    os_futex_wait(&grant->signal, seen, patience);
    gate_lock(g);
}

/* Returns how much work may be held, in ns. All of it runs when the next grant begins, and that
 * grant may be short. */
static uint64_t gate_hold_ns(const struct gate *g)
{
    uint64_t most = atomic_load_relaxed(&pages_grant()->inflight_ns);
    uint64_t least = 2 * atomic_load_relaxed(&pages_grant()->marker_ns);

    if (!g->granted_ns || g->granted_ns > most)
        return most;
    return g->granted_ns > least ? g->granted_ns : least;
}

/*
 * Whether work may be put into the stream to be held: a grant's worth of known work, or one piece
 * of unknown duration. Nothing is held where several GPUs are granted together: a grant releases
 * all work that is held on its GPU, although only the counterpart of a kernel on another GPU is
 * needed, and the work released with it would itself spin.
 *
 * Where containers share one context of the GPU, only the next holder holds work: waiting streams
 * delay each launch of the running container (H200, 25 us kernels: by 2 us with three such
 * streams, and not at all with one).
 */
static bool gate_may_hold(struct gate *g, const struct queue_stream *s, uint32_t kind, uint64_t now)
{
    const struct grant_device *grant = pages_grant_device((unsigned)(g - gate_devices));
    uint64_t predicted = estimate_ns(&g->estimate, kind);
    uint64_t ahead = g->queue.ahead_ns;

    if (g->crossed && g->queue.era - g->crossed_era >= GATE_CROSSED)
        g->crossed = false;
    return !g->no_holds && !g->crossed && !atomic_load_relaxed(&grant->together) &&
           atomic_load_relaxed(&pages_grant()->holds) && hold_find(g, s->ctx) &&
           (atomic_load_relaxed(&grant->strategy) != STRATEGY_MPS ||
            atomic_load_acquire(&grant->standby_ns) > now) &&
           g->n_held < GATE_N_HELD &&
           (!ahead ||
            (estimate_samples(&g->estimate, kind) && ahead + predicted <= gate_hold_ns(g)));
}

/* Makes the driver calls that precede the launch. The lock is held before and after. While it is
 * released, the stream's entry in the queue may be given to another stream. */
static void gate_prepare(struct gate *g, const struct gate_ticket *ticket, bool first, bool hold,
                         bool mark, struct ledger_device *ledger)
{
    uint32_t value = g->ticket;

    if (first)
        gate_mark_tails(g, ticket->ctx, ledger);
    if (hold) {
        uint32_t *word = hold_find(g, ticket->ctx);

        gate_unlock_for_call(g);
        if (word && driver->cuStreamWaitValue32(ticket->stream, (CUdeviceptr)(uintptr_t)word, value,
                                                0) != CUDA_SUCCESS)
            g->no_holds = true;
        gate_lock_after_call(g);
    }
    if (mark)
        gate_mark(g, queue_find(&g->queue, ticket->ctx, ticket->stream), ticket->era, os_now(),
                  ledger);
}

/* Initialises the gate of a GPU on its first use, and starts the helper. The lock is held before
 * and after, but not while the helper is started. */
static cold void gate_start(struct gate *g, unsigned device)
{
    /* Either gate_join_begin() sees this gate, or a thread that records a marker here sees that a
     * join is under way. */
    atomic_store_seq_cst(&g->started, true);
    g->ticket = 1;
    queue_init(&g->queue);
    os_unlock(&g->lock);
    helper_start(g, device);
    gate_lock(g);
}

void gate_watch(int device)
{
    struct gate *g = &gate_devices[device];

    gate_lock(g);
    if (!g->started)
        gate_start(g, (unsigned)device);
    os_unlock(&g->lock);
}

/* Returns the GPU on which work runs: the stream's own, whatever context is current; -1 if it is
 * not governed. */
static int gate_place(CUstream stream, CUcontext *ctxp, bool *currentp)
{
    bool one = pages_n_devices() == 1;
    CUcontext current = NULL;
    int device = -1;

    if (driver->cuCtxGetCurrent(&current) != CUDA_SUCCESS)
        current = NULL;
    *ctxp = current;
    *currentp = true;
    if (likely(one && current))
        return 0;
    if (stream > CU_STREAM_PER_THREAD && driver->cuStreamGetCtx(stream, ctxp) == CUDA_SUCCESS)
        device = contexts_device(*ctxp);
    *currentp = *ctxp && *ctxp == current;
    if (device >= 0)
        return device;
    return one ? 0 : pages_index_current();
}

/* Learns how long the program's pauses are, from a launch that follows a pause. Launches that a
 * metered pass let through have no recorded times; they count as made just now, so nothing is
 * learned from them. */
static void gate_note_pause(struct gate *g, uint64_t now)
{
    uint64_t end = g->queue.busy_until > g->last_launch ? g->queue.busy_until : g->last_launch;
    uint64_t pause = now > end ? now - end : 0;

    if (pause > GATE_PAUSE_NS && pause < GATE_REST_NS && !g->holding)
        g->pause_ns = g->pause_ns ? (3 * g->pause_ns + pause) / 4 : pause;
}

bool gate_capturing(CUstream stream)
{
    return unlikely(atomic_load_relaxed(&gate_n_captures)) && capture_is_running(stream);
}

static cold CUresult gate_refuse(struct gate_ticket *ticket, CUresult result)
{
    if (ticket->inside)
        parking_leave();
    ticket->inside = false;
    return result;
}

/* Waits until the memory is resident, without asking for GPU time. The lock is held before and
 * after. */
static cold void gate_enter_parking(struct gate *g, struct ledger_device *ledger, bool *wantingp)
{
    if (*wantingp)
        atomic_sub_seq_cst(&ledger->want, 1);
    *wantingp = false;
    os_unlock(&g->lock);
    parking_enter(PARKING_MEMORY);
    gate_lock(g);
}

CUresult gate_enter(struct gate_ticket *ticket, const struct gate_work *work)
{
    const struct grant_device *grant;
    struct ledger_device *ledger;
    struct queue_stream *s;
    struct gate *g;
    struct gate_visit visit;
    CUcontext ctx = NULL;
    bool held = false, first = false, wait = false, learn = false, mark = false, wanting = false;
    bool looked = false, dry = false;
    uint64_t began = 0, now, predicted;
    uint32_t kind;
    bool current;
    int device;

    ticket->device = -1;
    ticket->inside = false;
    if (unlikely(!pages_slot()) || unlikely(gate_visiting))
        return CUDA_SUCCESS;
    /* During a capture the driver may check whether the memory that the work uses is present. */
    ticket->inside = parking_applies();
    if (ticket->inside)
        parking_enter(PARKING_MEMORY);
    if (gate_capturing(work->stream))
        return CUDA_SUCCESS;
    if (unlikely(pages_denied()))
        return gate_refuse(ticket, CUDA_ERROR_SYSTEM_NOT_READY);
    if (unlikely(atomic_load_relaxed(&gate_lazy_kernels)) &&
        modules_launch(work->key) == CUDA_ERROR_OUT_OF_MEMORY)
        return gate_refuse(ticket, CUDA_ERROR_OUT_OF_MEMORY);
    device = gate_place(work->stream, &ctx, &current);
    if (device < 0)
        return CUDA_SUCCESS;
    g = &gate_devices[device];
    grant = pages_grant_device((unsigned)device);
    ledger = pages_ledger_device((unsigned)device);
    gate_lock(g);
    if (unlikely(!g->started))
        gate_start(g, (unsigned)device);
    kind = estimate_kind(&g->estimate, work->key, work->blocks, work->guess_ns);
    gate_note_pause(g, os_now());
    for (;;) {
        uint32_t seen = atomic_load_acquire(&grant->signal);
        enum gate_answer answer;
        uint64_t deadline;

        gate_adopt(g, grant);
        now = os_now();
        /* Pinned memory is freed with the context in which it was allocated, so each context has
         * its own word. */
        if (unlikely(!g->no_holds && current && !hold_find(g, ctx)) &&
            atomic_load_relaxed(&pages_grant()->holds)) {
            gate_visit_begin(&visit);
            hold_prepare(g, ctx);
            gate_visit_end(&visit);
            if (hold_find(g, ctx))
                continue;
        }
        s = queue_find(&g->queue, ctx, work->stream);
        deadline = gate_deadline(g, grant, now);
        if (deadline == GRANT_OPEN && !g->holding) {
            enum pass_answer open;
            uint32_t average;

            if (!gate_lost(now) && !gate_announce(g, grant, ledger, now))
                continue;
            if (g->queue.n_markers && now >= g->queue.markers[g->queue.head].look_at) {
                gate_visit_begin(&visit);
                gate_retire(g, ledger, now, false);
                gate_visit_end(&visit);
                s = queue_find(&g->queue, ctx, work->stream);
            }
            open = pass_open(g, &s, grant, ledger, now, &average);
            if (open == PASS_FULL && !looked) {
                /* The queue may be full only in the model: markers may have been reached since. */
                looked = true;
                gate_visit_begin(&visit);
                gate_retire(g, ledger, now, true);
                gate_visit_end(&visit);
                continue;
            }
            if (open == PASS_FULL) {
                looked = false;
                if (!began)
                    began = now;
                gate_wait(g, grant, ledger, GATE_FULL, seen, &wanting);
                continue;
            }
            learn = open == PASS_SAMPLE;
            if (!learn && !work->single)
                kind = average;
            break;
        }
        if (g->passing)
            pass_stop(g, grant);
        if (!gate_open(g, grant, ledger, now) && g->queue.n_markers &&
            now >= g->queue.markers[g->queue.head].look_at) {
            gate_visit_begin(&visit);
            gate_retire(g, ledger, now, false);
            gate_visit_end(&visit);
            s = queue_find(&g->queue, ctx, work->stream);
        }
        if (s != g->only) {
            if (g->only)
                gate_cross(g);
            g->only = s;
        }
        answer = gate_ask(g, gate_deadline(g, grant, now), now, kind);
        if (answer == GATE_GO) {
            if (gate_lost(now) || gate_announce(g, grant, ledger, now))
                break;
            continue;
        }
        if (answer == GATE_CLOSED && !work->together && gate_may_hold(g, s, kind, now)) {
            /* The helper records events, and those calls block while the queue is full of held
             * work. */
            if (!g->holding && g->n_marking) {
                os_unlock(&g->lock);
                os_sleep(20 * NS_PER_US);
                gate_lock(g);
                continue;
            }
            held = true;
            first = !g->holding;
            wait = s->held != g->ticket;
            s->held = g->ticket;
            g->n_held++;
            if (first) {
                gate_collect(g); /* ends the pass: no launch overtakes what is held */
                g->holding = true;
                atomic_add_seq_cst(&ledger->want, 1);
            }
            break;
        }
        if (answer == GATE_CLOSED && gate_mark_end(g, s, ledger))
            continue;
        if (!began)
            began = now;
        g->full = answer == GATE_CLOSED && g->active;
        if (ticket->inside)
            parking_leave(); /* the wait may be long */
        gate_wait(g, grant, ledger, answer, seen, &wanting);
        if (ticket->inside && !parking_try(PARKING_MEMORY))
            gate_enter_parking(g, ledger, &wanting);
        gate_visit_begin(&visit);
        gate_retire(g, ledger, os_now(), true);
        gate_visit_end(&visit);
        s = queue_find(&g->queue, ctx, work->stream);
        dry = !queue_runs(&g->queue);
        s->gap = s->gap || dry;
    }
    g->full = false;
    predicted = estimate_ns(&g->estimate, kind);
    if (wanting) {
        atomic_sub_seq_cst(&ledger->want, 1);
        atomic_add_relaxed(&ledger->waits, 1);
    }
    if (began)
        atomic_add_relaxed(&ledger->wait_ns, now - began);
    ticket->device = device;
    ticket->stream = work->stream;
    ticket->ctx = ctx;
    ticket->era = g->queue.era + held;
    ticket->mark = false;
    learn = learn || estimate_samples(&g->estimate, kind) < ESTIMATE_N_LEARN;
    /* Under an open grant the last marker suffices, however long ago it was reached. */
    mark = (!g->passing || learn) &&
           (dry || queue_wants_mark_before(&g->queue, s, ticket->era, learn));
    if (first || wait || mark) {
        bool poke = first && (!g->active || g->released);

        g->n_entering[ticket->era & 1]++;
        g->entering_ns = now;
        gate_visit_begin(&visit);
        gate_prepare(g, ticket, first, wait, mark, ledger);
        gate_visit_end(&visit);
        s = queue_find(&g->queue, ctx, work->stream);
        if (poke) {
            os_unlock(&g->lock);
            pages_poke();
            gate_lock(g);
        }
        g->n_entering[ticket->era & 1]--;
    }
    /* Under an open grant, no marker precedes work that comes late. Under any other grant, no
     * marker precedes work that comes after a pause, unless that work begins an interval. In both
     * cases the interval has a gap. */
    s->gap =
        s->gap || (!mark && !held && g->queue.busy_until + (g->passing ? 0 : GATE_GAP_NS) < now);
    queue_add(&g->queue, s, &g->estimate, ticket->era, kind, 1, now);
    ticket->mark = learn || queue_wants_mark_behind(
                                s, g->passing ? GATE_OPEN_MARKER_NS
                                              : atomic_load_relaxed(&pages_grant()->marker_ns));
    /* The lock may have been released since, so all conditions for a pass are checked again. */
    if (!g->passing && !g->holding && !ticket->mark && g->active && !g->released &&
        ticket->era == g->queue.era && g->epoch == atomic_load_acquire(&grant->epoch) &&
        !gate_lost(now))
        pass_meter(g, s, grant, ledger, gate_deadline(g, grant, now), now);
    g->last_launch = now;
    atomic_add_relaxed(&ledger->launches, 1);
    atomic_bump(&ledger->predicted_ns, predicted);
    os_unlock(&g->lock);
    return CUDA_SUCCESS;
}

static void gate_mark_launch(const struct gate_ticket *ticket)
{
    struct ledger_device *ledger;
    struct gate_visit visit;
    struct queue_stream *s;
    struct gate *g;

    g = &gate_devices[ticket->device];
    ledger = pages_ledger_device((unsigned)ticket->device);
    gate_visit_begin(&visit);
    gate_lock(g);
    s = queue_find(&g->queue, ticket->ctx, ticket->stream);
    /* The stream gets no marker if another thread has marked it since, or if a hold would lie
     * between the work and the marker. */
    if (s->unmarked && s->era == ticket->era)
        gate_mark(g, s, s->era, os_now(), ledger);
    os_unlock(&g->lock);
    gate_visit_end(&visit);
}

void gate_leave(const struct gate_ticket *ticket, CUresult result)
{
    if (ticket->device >= 0 && ticket->mark && result == CUDA_SUCCESS)
        gate_mark_launch(ticket);
    if (unlikely(ticket->inside))
        parking_leave();
}

/* ---- ends of streams, contexts and processes ---- */

void gate_forget_stream(CUstream stream)
{
    if (!pages_slot())
        return;
    for (unsigned device = 0; device < pages_n_devices(); device++) {
        struct gate *g = &gate_devices[device];

        if (!g->started)
            continue;
        gate_lock(g);
        pass_forget_stream(pages_grant_device(device), stream);
        queue_forget_stream(&g->queue, stream);
        os_unlock(&g->lock);
    }
}

/* Forgets a context. Its events and pinned words end with it, and no thread is still using them
 * when this function returns. */
void gate_forget_context(CUcontext ctx)
{
    capture_end_context(ctx);
    if (!pages_slot())
        return;
    for (unsigned device = 0; device < pages_n_devices(); device++) {
        struct gate *g = &gate_devices[device];

        if (!g->started)
            continue;
        gate_lock(g);
        pass_stop(g, pages_grant_device(device));
        queue_forget_context(&g->queue, ctx);
        for (unsigned i = 0; i < GATE_N_HOLDS; i++) {
            if (!g->holds[i].word || g->holds[i].ctx != ctx)
                continue;
            /* Work that is still held in the context must not outlive the word that it waits
             * for. */
            atomic_store_release(g->holds[i].word, g->ticket);
            g->holds[i].word = NULL;
        }
        while (g->n_calls && !gate_visiting) {
            os_unlock(&g->lock);
            os_sleep(20 * NS_PER_US);
            gate_lock(g);
        }
        os_unlock(&g->lock);
    }
}

/* Resets the gate in a forked child: the threads that held locks do not exist there, nor do the
 * GPU's contexts. A gate that has not been used is left alone, so that its many pages are
 * not touched. */
void gate_after_fork(void)
{
    for (unsigned device = 0; device < pages_n_devices(); device++) {
        if (gate_devices[device].started)
            memset(&gate_devices[device], 0, sizeof gate_devices[device]);
        gate_devices[device].lock.word = 0;
    }
    pass_after_fork();
    captures_after_fork();
}
