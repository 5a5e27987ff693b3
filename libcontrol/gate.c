/*
 * The gate: work starts on the GPU only while the container holds GPU time, and only so much of it
 * that it ends with the grant.
 *
 * The governor publishes one word, `deadline_ns`: work may start before it. GRANT_OPEN means that
 * nobody else waits and no cap applies; then a launch passes with little more than a look at that
 * word. Otherwise the gate keeps a model of the GPU's queue, `busy_until`: each launch adds its
 * predicted duration, and markers (events recorded behind every ~0.25 ms of work) correct the
 * model. A launch that would queue more than `inflight_ns` waits for the queue; one that would run
 * past the deadline waits for the next grant.
 *
 * A helper thread per GPU gives the grant back: at the deadline, as soon as no more than
 * `lookahead_ns` of work is left, so that the next container's work arrives while the last of ours
 * drains; and when nothing was launched for `idle_release_ns` while somebody else waits.
 *
 * Streams that capture are neither gated nor marked, and every driver call that we add is made in
 * relaxed capture mode, because in the other modes it would invalidate a capture of the
 * application.
 */
#include "control.h"
#include "estimate.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>

#define GATE_N_STREAMS 64
#define GATE_N_MARKERS 128
#define GATE_N_EVENTS  256
#define GATE_LOST_NS   (1000 * NS_PER_MS) /* a heartbeat older than this: the governor is away */
#define GATE_LOCAL_NS  (4 * NS_PER_MS)    /* slots that a container gives itself meanwhile */
#define GATE_NAP_NS    (250 * NS_PER_US)  /* between two looks at a full queue */
#define GATE_NO_EVENT  (-1)

struct gate_event {
    CUevent event;
    CUcontext ctx;
    unsigned n_refs;
};

struct gate_stream {
    CUcontext ctx;
    CUstream stream;
    bool used;
    bool unmarked;       /* work was launched after the last marker */
    int last;            /* event of the last marker, or GATE_NO_EVENT */
    uint32_t last_epoch; /* grant in which it was recorded */
    uint64_t pending_ns; /* predicted work of the open interval */
    struct estimate_interval interval;
};

struct gate_marker {
    int event;
    int before; /* event that began the interval, GATE_NO_EVENT: not measurable */
    uint64_t submitted;
    uint64_t expected; /* when the model says that it will be reached */
    uint64_t look_at;  /* no query before */
    struct estimate_interval interval;
};

struct gate {
    struct prim_lock lock;
    bool helper;
    uint32_t epoch;
    bool active;   /* work was launched in this grant */
    bool released; /* the grant was given back */
    bool drained;  /* the tails were marked at its end */
    uint64_t busy_until;
    uint64_t submitted; /* predicted work, ever */
    uint64_t last_launch;
    uint64_t local_deadline; /* while the governor is away */
    uint64_t local_next;
    int reference;        /* event of the marker reached last: times are told from it */
    double reference_ns;  /* its time; the origin is arbitrary */
    double covered_until; /* GPU time up to here is in busy_ns */
    unsigned marker_head, n_markers;
    struct gate_marker markers[GATE_N_MARKERS];
    struct gate_stream streams[GATE_N_STREAMS];
    struct gate_event events[GATE_N_EVENTS];
};

static struct gate gates[LAYOUT_N_DEVICES];

/* ---- driver calls of our own: in relaxed capture mode ---- */

static void gate_relax(CUstreamCaptureMode *mode)
{
    *mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver->cuThreadExchangeStreamCaptureMode(mode);
}

static void gate_restore(CUstreamCaptureMode *mode)
{
    driver->cuThreadExchangeStreamCaptureMode(mode);
}

static bool gate_capturing(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

    if (stream == NULL || stream == CU_STREAM_LEGACY)
        return false; /* the legacy stream cannot capture */
    return driver->cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS &&
           status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* ---- events ---- */

static int event_take(struct gate *g, CUcontext ctx)
{
    int empty = GATE_NO_EVENT;

    for (int i = 0; i < GATE_N_EVENTS; i++) {
        if (g->events[i].n_refs)
            continue;
        if (g->events[i].event && g->events[i].ctx == ctx) {
            g->events[i].n_refs = 1;
            return i;
        }
        if (!g->events[i].event && empty == GATE_NO_EVENT)
            empty = i;
    }
    if (empty == GATE_NO_EVENT || driver->cuEventCreate(&g->events[empty].event, 0) != CUDA_SUCCESS)
        return GATE_NO_EVENT;
    g->events[empty].ctx = ctx;
    g->events[empty].n_refs = 1;
    return empty;
}

static void event_put(struct gate *g, int event)
{
    if (event != GATE_NO_EVENT && g->events[event].n_refs)
        g->events[event].n_refs--;
}

/* ---- streams ---- */

static struct gate_stream *stream_find(struct gate *g, CUcontext ctx, CUstream stream)
{
    struct gate_stream *empty = NULL;

    for (unsigned i = 0; i < GATE_N_STREAMS; i++) {
        struct gate_stream *s = &g->streams[i];

        if (s->used && s->stream == stream && s->ctx == ctx)
            return s;
        if (!s->used && !empty)
            empty = s;
    }
    if (empty) {
        memset(empty, 0, sizeof *empty);
        empty->used = true;
        empty->stream = stream;
        empty->ctx = ctx;
        empty->last = GATE_NO_EVENT;
    }
    return empty;
}

static void stream_drop(struct gate *g, struct gate_stream *s)
{
    event_put(g, s->last);
    s->used = false;
}

/*
 * Records an event in the stream; what was launched since the last one is the interval between. It
 * is measurable if the GPU had work from its beginning to its end: both events in one grant, and
 * this one recorded before the queue runs dry.
 */
static void stream_mark(struct gate *g, struct gate_stream *s, struct ledger_device *ledger,
                        uint64_t now)
{
    struct gate_marker *m;
    int event;

    if (g->n_markers == GATE_N_MARKERS)
        return;
    event = event_take(g, s->ctx);
    if (event == GATE_NO_EVENT)
        return;
    if (driver->cuEventRecord(g->events[event].event, s->stream) != CUDA_SUCCESS) {
        event_put(g, event);
        return;
    }
    m = &g->markers[(g->marker_head + g->n_markers++) % GATE_N_MARKERS];
    m->event = event;
    m->before = GATE_NO_EVENT;
    if (s->last_epoch == g->epoch && s->interval.n_parts && g->busy_until > now)
        m->before = s->last;
    if (m->before == GATE_NO_EVENT)
        event_put(g, s->last);
    m->submitted = g->submitted;
    m->expected = g->busy_until;
    m->look_at = g->busy_until > 10 * NS_PER_US ? g->busy_until - 10 * NS_PER_US : 0;
    m->interval = s->interval;
    g->events[event].n_refs++; /* the marker's and the stream's */
    s->last = event;
    s->last_epoch = g->epoch;
    s->unmarked = false;
    s->pending_ns = 0;
    s->interval.n_parts = 0;
    atomic_add_relaxed(&ledger->markers, 1);
}

/* ---- the model of the queue ---- */

/*
 * GPU time that an interval adds to what is known to be used: streams run at the same time, and a
 * second of two streams is a second of the GPU. Events of one context share a clock.
 */
static bool marker_measure(struct gate *g, const struct gate_marker *m, uint64_t *addedp)
{
    CUevent event = g->events[m->event].event;
    float since_reference = 0, length;
    double end, begin;

    if (g->reference != GATE_NO_EVENT &&
        (g->events[g->reference].ctx != g->events[m->event].ctx ||
         driver->cuEventElapsedTime(&since_reference, g->events[g->reference].event, event) !=
             CUDA_SUCCESS)) {
        event_put(g, g->reference);
        g->reference = GATE_NO_EVENT;
    }
    if (g->reference == GATE_NO_EVENT) {
        since_reference = 0;
        g->covered_until = g->reference_ns;
    }
    end = g->reference_ns + (double)since_reference * 1e6;
    /* A float of milliseconds is exact over short times only: the reference moves along. */
    event_put(g, g->reference);
    g->reference = m->event;
    g->reference_ns = end;
    g->events[m->event].n_refs++;
    if (m->before == GATE_NO_EVENT ||
        driver->cuEventElapsedTime(&length, g->events[m->before].event, event) != CUDA_SUCCESS ||
        length < 0)
        return false;
    begin = end - (double)length * 1e6;
    if (begin < g->covered_until)
        begin = g->covered_until;
    *addedp = end > begin ? (uint64_t)(end - begin) : 0;
    if (end > g->covered_until)
        g->covered_until = end;
    return true;
}

static void marker_resolve(struct gate *g, struct gate_marker *m, struct ledger_device *ledger)
{
    uint64_t measured;

    if (marker_measure(g, m, &measured)) {
        uint64_t predicted = estimate_interval_ns(&m->interval);

        atomic_add_relaxed(&ledger->busy_ns, measured);
        atomic_add_relaxed(&ledger->error_ns,
                           measured > predicted ? measured - predicted : predicted - measured);
        estimate_learn(&m->interval, measured);
    }
    event_put(g, m->before);
    event_put(g, m->event);
}

/* Takes the markers that were reached and corrects busy_until by them. */
static void gate_retire(struct gate *g, uint64_t now, bool force, struct ledger_device *ledger)
{
    struct gate_marker *m;

    while (g->n_markers) {
        CUresult result;

        m = &g->markers[g->marker_head];
        if (!force && now < m->look_at)
            return;
        result = driver->cuEventQuery(g->events[m->event].event);
        if (result == CUDA_ERROR_NOT_READY) {
            uint64_t behind = g->submitted - m->submitted;

            m->look_at = now + 20 * NS_PER_US;
            /* Not reached although the model said so: what is behind it is still to come. */
            if (now > m->expected && g->busy_until < now + behind + 10 * NS_PER_US)
                g->busy_until = now + behind + 10 * NS_PER_US;
            return;
        }
        if (g->busy_until > now + (g->submitted - m->submitted))
            g->busy_until = now + (g->submitted - m->submitted);
        marker_resolve(g, m, ledger);
        g->marker_head = (g->marker_head + 1) % GATE_N_MARKERS;
        g->n_markers--;
    }
}

static uint64_t gate_queued(const struct gate *g, uint64_t now)
{
    return g->busy_until > now ? g->busy_until - now : 0;
}

/* A new grant begins: the books of the last one are closed. */
static void gate_adopt(struct gate *g, const struct grant_device *grant)
{
    uint32_t epoch = atomic_load_acquire(&grant->epoch);

    if (epoch == g->epoch)
        return;
    g->epoch = epoch;
    g->active = false;
    g->released = false;
    g->drained = false;
}

static void gate_release(struct gate *g, struct ledger_device *ledger, uint64_t now)
{
    g->released = true;
    atomic_store_relaxed(&ledger->residual_ns, gate_queued(g, now));
    atomic_store_relaxed(&ledger->release_ns, now);
    if (!g->active)
        atomic_store_seq_cst(&ledger->active_epoch, g->epoch);
    atomic_store_release(&ledger->released_epoch, g->epoch);
    pages_poke();
}

/* ---- the helper ---- */

/* Marks whatever was launched without a marker behind it, in streams that do not capture. */
static void helper_mark_tails(struct gate *g, struct ledger_device *ledger, uint64_t now)
{
    for (unsigned i = 0; i < GATE_N_STREAMS; i++) {
        struct gate_stream *s = &g->streams[i];

        if (!s->used || !s->unmarked)
            continue;
        if (driver->cuCtxSetCurrent(s->ctx) != CUDA_SUCCESS || gate_capturing(s->stream))
            continue;
        stream_mark(g, s, ledger, now);
    }
}

/* Looks at the grant and the queue, gives back what is due, and returns how long it may sleep. */
static uint64_t helper_step(struct gate *g, const struct grant_device *grant,
                            struct ledger_device *ledger)
{
    const struct grant_header *settings = pages_grant();
    uint64_t lookahead = atomic_load_relaxed(&settings->lookahead_ns);
    uint64_t idle = atomic_load_relaxed(&settings->idle_release_ns);
    bool contended = atomic_load_relaxed(&grant->contended);
    uint64_t now = prim_now();
    uint64_t deadline, queued, due;

    gate_adopt(g, grant);
    deadline = atomic_load_acquire(&grant->deadline_ns);
    gate_retire(g, now, true, ledger);
    if (g->released || deadline == GRANT_OPEN)
        return NS_PER_S;
    queued = gate_queued(g, now);
    if (!g->active) {
        /* Granted, but the thread that asked is slow, or went away. */
        if (now >= deadline)
            return NS_PER_S;
        if (contended && !atomic_load_acquire(&ledger->want) &&
            now >= atomic_load_relaxed(&grant->start_ns) + idle) {
            gate_release(g, ledger, now);
            return NS_PER_S;
        }
        due = deadline > now + lookahead ? deadline - lookahead - now : 0;
        return contended && idle < due ? idle : due;
    }
    if (now + lookahead < deadline) {
        due = deadline - lookahead - now;
        if (!contended)
            return due;
        if (queued || now < g->last_launch + idle) {
            uint64_t quiet = queued + idle;

            return quiet < due ? quiet : due;
        }
        helper_mark_tails(g, ledger, now);
        if (!g->n_markers) {
            gate_release(g, ledger, now);
            return NS_PER_S;
        }
        return 50 * NS_PER_US;
    }
    if (!g->drained) {
        g->drained = true;
        helper_mark_tails(g, ledger, now);
        /* After an open grant the model knows nothing: only the markers do. */
        gate_retire(g, now, true, ledger);
        queued = gate_queued(g, now);
    }
    if (queued <= lookahead && (now + queued + 10 * NS_PER_US >= deadline)) {
        struct gate_marker *last = g->n_markers ? &g->markers[g->marker_head] : NULL;

        /* The oldest marker should have been reached unless it is one of those that are left. */
        if (!last || last->expected + 20 * NS_PER_US >= now) {
            gate_release(g, ledger, now);
            return NS_PER_S;
        }
        return 30 * NS_PER_US;
    }
    if (queued > lookahead)
        return queued - lookahead;
    return deadline > now + queued ? deadline - now - queued : 20 * NS_PER_US;
}

static void *helper_run(void *argument)
{
    unsigned device = (unsigned)(uintptr_t)argument;
    struct gate *g = &gates[device];
    const struct grant_device *grant = pages_grant_device(device);
    CUstreamCaptureMode mode;

    gate_relax(&mode);
    prctl(PR_SET_NAME, "tidegate");
    prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul);
    for (;;) {
        uint32_t seen = atomic_load_acquire(&grant->signal);
        uint64_t ns;

        prim_lock(&g->lock);
        ns = helper_step(g, grant, pages_ledger_device(device));
        prim_unlock(&g->lock);
        if (ns < 5 * NS_PER_US)
            ns = 5 * NS_PER_US;
        prim_futex_wait(&grant->signal, seen, ns);
    }
    return NULL;
}

/* All signals are blocked while the thread is made: none of the application's may land on it. */
static cold void helper_start(struct gate *g, unsigned device)
{
    uint64_t all = ~0ull, before = 0;
    pthread_t thread;

    g->helper = true;
    g->reference = GATE_NO_EVENT;
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof all);
    if (pthread_create(&thread, NULL, helper_run, (void *)(uintptr_t)device) == 0)
        pthread_detach(thread);
    else
        control_log("no thread for the gate; GPU time is given back late");
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof all);
}

/* ---- launches ---- */

/* While the governor is away a container gives itself its own share, or what the node says. */
static cold bool gate_alone(struct gate *g, const struct grant_device *grant, uint64_t now)
{
    const struct grant_header *settings = pages_grant();
    uint64_t heard = atomic_load_relaxed(&settings->heartbeat_ns);
    uint64_t share = atomic_load_relaxed(&grant->compute);

    if (now < heard + GATE_LOST_NS)
        return false;
    switch (atomic_load_relaxed(&settings->on_governor_loss)) {
    case 1:
        return false;
    case 2:
        return true;
    default:
        if (now < g->local_deadline)
            return true;
        if (now < g->local_next)
            return false;
        g->local_deadline = now + GATE_LOCAL_NS;
        g->local_next = now + GATE_LOCAL_NS * 1000000 / (share ? share : 1);
        return true;
    }
}

enum gate_answer {
    GATE_GO,
    GATE_QUEUE_FULL, /* wait for the queue */
    GATE_CLOSED,     /* wait for a grant */
};

static enum gate_answer gate_ask(struct gate *g, const struct grant_device *grant, uint64_t now,
                                 uint64_t predicted)
{
    uint64_t limit = atomic_load_relaxed(&pages_grant()->inflight_ns);
    uint64_t deadline = atomic_load_acquire(&grant->deadline_ns);
    uint64_t queued = gate_queued(g, now);

    if (deadline == GRANT_OPEN)
        return g->released ? GATE_CLOSED : GATE_GO;
    if (g->released || now >= deadline)
        return gate_alone(g, grant, now) ? GATE_GO : GATE_CLOSED;
    /* Half of it before the deadline, half behind: on average the grant is used to its end. A fresh
     * grant takes one piece of work of any length; what it overruns is charged. */
    if (now + queued + predicted / 2 > deadline && (g->active || queued))
        return GATE_CLOSED;
    if (queued + predicted > limit && queued > limit / 4)
        return GATE_QUEUE_FULL;
    return GATE_GO;
}

/* Waits until the grant may have changed. The gate's lock is not held. */
static void gate_sleep(const struct grant_device *grant, uint32_t seen)
{
    uint64_t standby = atomic_load_acquire(&grant->standby_ns);

    /* The governor said that the grant is near: a core that sleeps now would answer late. */
    while (prim_now() < standby) {
        for (int i = 0; i < 50; i++) {
            if (atomic_load_acquire(&grant->signal) != seen)
                return;
            prim_relax();
        }
    }
    prim_futex_wait(&grant->signal, seen, 50 * NS_PER_MS);
}

/* Called with the lock held; returns with it held once the work may go. */
static cold void gate_wait(struct gate *g, unsigned device, uint64_t predicted)
{
    const struct grant_device *grant = pages_grant_device(device);
    struct ledger_device *ledger = pages_ledger_device(device);
    uint64_t limit = atomic_load_relaxed(&pages_grant()->inflight_ns);
    uint64_t began = prim_now();
    bool wanting = false;

    for (;;) {
        uint32_t seen = atomic_load_acquire(&grant->signal);
        uint64_t now = prim_now();
        enum gate_answer answer;

        gate_adopt(g, grant);
        gate_retire(g, now, false, ledger);
        answer = gate_ask(g, grant, now, predicted);
        if (answer == GATE_GO)
            break;
        if (answer == GATE_QUEUE_FULL) {
            uint64_t excess = gate_queued(g, now) - limit / 4;

            prim_unlock(&g->lock);
            if (excess > GATE_NAP_NS)
                excess = GATE_NAP_NS;
            prim_sleep(excess > 20 * NS_PER_US ? excess : 20 * NS_PER_US);
        } else {
            if (!wanting) {
                wanting = true;
                atomic_add_seq_cst(&ledger->want, 1);
                if (!g->active || g->released)
                    pages_poke();
            }
            prim_unlock(&g->lock);
            gate_sleep(grant, seen);
        }
        prim_lock(&g->lock);
    }
    if (wanting) {
        atomic_sub_seq_cst(&ledger->want, 1);
        atomic_add_relaxed(&ledger->waits, 1);
        atomic_add_relaxed(&ledger->wait_ns, prim_now() - began);
    }
}

/* The first work of a grant is announced before it is submitted: the arbiter waits for its end. */
static bool gate_announce(struct gate *g, const struct grant_device *grant,
                          struct ledger_device *ledger, uint64_t now)
{
    if (g->active)
        return true;
    atomic_store_relaxed(&ledger->first_ns, now);
    atomic_store_seq_cst(&ledger->active_epoch, g->epoch);
    g->active = true;
    /* The grant may have been taken back in between; then the arbiter saw nobody active. */
    return atomic_load_seq_cst(&grant->epoch) == g->epoch;
}

CUresult gate_enter(struct gate_ticket *ticket, uintptr_t key, uint64_t blocks, CUstream stream)
{
    int device = pages_n_devices() == 1 && pages_slot() ? 0 : pages_index_current();
    const struct grant_device *grant;
    struct ledger_device *ledger;
    struct gate_stream *s;
    struct gate *g;
    CUstreamCaptureMode mode;
    CUcontext ctx = NULL;
    bool learn, fresh;
    uint64_t now, predicted;
    int saved = errno;

    ticket->device = -1;
    if (unlikely(device < 0))
        return CUDA_SUCCESS;
    if (gate_capturing(stream))
        return CUDA_SUCCESS;
    driver->cuCtxGetCurrent(&ctx);
    g = &gates[device];
    grant = pages_grant_device((unsigned)device);
    ledger = pages_ledger_device((unsigned)device);
    gate_relax(&mode);
    prim_lock(&g->lock);
    if (unlikely(!g->helper))
        helper_start(g, (unsigned)device);
    ticket->kind = estimate_kind(key, blocks);
    predicted = estimate_ns(ticket->kind);
    for (;;) {
        gate_adopt(g, grant);
        now = prim_now();
        if (gate_ask(g, grant, now, predicted) != GATE_GO) {
            gate_wait(g, (unsigned)device, predicted);
            now = prim_now();
        }
        if (gate_announce(g, grant, ledger, now))
            break;
    }
    gate_retire(g, now, false, ledger);
    s = stream_find(g, ctx, stream);
    if (s) {
        learn = estimate_samples(ticket->kind) < 2;
        fresh = !s->interval.n_parts;
        /* An interval is measurable if the GPU had work of this stream from its first event on: it
         * begins with an event of its own unless the last marker is still ahead of the GPU. */
        if (learn && !fresh)
            stream_mark(g, s, ledger, now);
        if (fresh && (s->last == GATE_NO_EVENT || s->last_epoch != g->epoch ||
                      driver->cuEventQuery(g->events[s->last].event) != CUDA_ERROR_NOT_READY))
            stream_mark(g, s, ledger, now);
        estimate_add(&s->interval, ticket->kind);
        s->unmarked = true;
        s->pending_ns += predicted;
        ticket->mark = learn || s->interval.n_parts == ESTIMATE_N_PARTS ||
                       s->pending_ns >= atomic_load_relaxed(&pages_grant()->marker_ns);
    } else {
        ticket->mark = false;
    }
    g->busy_until = (g->busy_until > now ? g->busy_until : now) + predicted;
    g->submitted += predicted;
    g->last_launch = now;
    prim_unlock(&g->lock);
    gate_restore(&mode);
    atomic_add_relaxed(&ledger->launches, 1);
    atomic_add_relaxed(&ledger->predicted_ns, predicted);
    ticket->device = device;
    ticket->stream = stream;
    ticket->ctx = ctx;
    ticket->predicted_ns = predicted;
    errno = saved;
    return CUDA_SUCCESS;
}

void gate_leave(struct gate_ticket *ticket, CUresult result)
{
    CUstreamCaptureMode mode;
    struct gate_stream *s;
    struct gate *g;
    int saved = errno;

    if (ticket->device < 0 || !ticket->mark || result != CUDA_SUCCESS)
        return;
    g = &gates[ticket->device];
    gate_relax(&mode);
    prim_lock(&g->lock);
    s = stream_find(g, ticket->ctx, ticket->stream);
    if (s && s->unmarked)
        stream_mark(g, s, pages_ledger_device((unsigned)ticket->device), prim_now());
    prim_unlock(&g->lock);
    gate_restore(&mode);
    errno = saved;
}

void gate_forget_stream(CUstream stream)
{
    for (unsigned device = 0; device < pages_n_devices(); device++) {
        struct gate *g = &gates[device];

        prim_lock(&g->lock);
        for (unsigned i = 0; i < GATE_N_STREAMS; i++)
            if (g->streams[i].used && g->streams[i].stream == stream)
                stream_drop(g, &g->streams[i]);
        prim_unlock(&g->lock);
    }
}

/* The context's events go with it: markers that use them are forgotten first. */
void gate_forget_context(CUcontext ctx)
{
    for (unsigned device = 0; device < pages_n_devices(); device++) {
        struct gate *g = &gates[device];
        unsigned n_kept = 0;

        prim_lock(&g->lock);
        for (unsigned i = 0; i < GATE_N_STREAMS; i++)
            if (g->streams[i].used && (!ctx || g->streams[i].ctx == ctx))
                stream_drop(g, &g->streams[i]);
        for (unsigned i = 0; i < g->n_markers; i++) {
            struct gate_marker m = g->markers[(g->marker_head + i) % GATE_N_MARKERS];

            if (ctx && g->events[m.event].ctx != ctx)
                g->markers[(g->marker_head + n_kept++) % GATE_N_MARKERS] = m;
        }
        g->n_markers = n_kept;
        if (g->reference != GATE_NO_EVENT && (!ctx || g->events[g->reference].ctx == ctx))
            g->reference = GATE_NO_EVENT;
        for (unsigned i = 0; i < GATE_N_EVENTS; i++)
            if (!ctx || g->events[i].ctx == ctx)
                memset(&g->events[i], 0, sizeof g->events[i]);
        prim_unlock(&g->lock);
    }
}
