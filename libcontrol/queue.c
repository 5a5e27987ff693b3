/* The model of a GPU's queue; see queue.h. */
#include "queue.h"

#include <string.h>

bool queue_capturing(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

    if (stream == NULL || stream == CU_STREAM_LEGACY)
        return false; /* the legacy stream cannot capture */
    return driver->cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS &&
           status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void queue_init(struct queue *q)
{
    q->reference = QUEUE_NO_EVENT;
}

/* ---- events: made once, used again ---- */

static int event_take(struct queue *q, CUcontext ctx)
{
    int empty = QUEUE_NO_EVENT;

    for (int i = 0; i < QUEUE_N_EVENTS; i++) {
        if (q->events[i].n_refs)
            continue;
        if (q->events[i].event && q->events[i].ctx == ctx) {
            q->events[i].n_refs = 1;
            return i;
        }
        if (!q->events[i].event && empty == QUEUE_NO_EVENT)
            empty = i;
    }
    if (empty == QUEUE_NO_EVENT ||
        driver->cuEventCreate(&q->events[empty].event, 0) != CUDA_SUCCESS)
        return QUEUE_NO_EVENT;
    q->events[empty].ctx = ctx;
    q->events[empty].n_refs = 1;
    return empty;
}

static void event_put(struct queue *q, int event)
{
    if (event != QUEUE_NO_EVENT && q->events[event].n_refs)
        q->events[event].n_refs--;
}

/* ---- streams ---- */

/* The handle CU_STREAM_PER_THREAD is another stream in each thread. */
static const void *stream_thread(CUstream stream)
{
    static __thread char here;

    return stream == CU_STREAM_PER_THREAD ? &here : NULL;
}

/* Returns NULL when there are more streams than can be followed. */
struct queue_stream *queue_find(struct queue *q, CUcontext ctx, CUstream stream)
{
    const void *thread = stream_thread(stream);
    struct queue_stream *empty = NULL;

    for (unsigned i = 0; i < QUEUE_N_STREAMS; i++) {
        struct queue_stream *s = &q->streams[i];

        if (s->used && s->stream == stream && s->ctx == ctx && s->thread == thread)
            return s;
        if (!s->used && !empty)
            empty = s;
    }
    if (empty) {
        memset(empty, 0, sizeof *empty);
        empty->used = true;
        empty->stream = stream;
        empty->thread = thread;
        empty->ctx = ctx;
        empty->last = QUEUE_NO_EVENT;
    }
    return empty;
}

static void stream_drop(struct queue *q, struct queue_stream *s)
{
    event_put(q, s->last);
    s->used = false;
}

/*
 * Records an event in the stream; what was launched since the last one is the interval between. It
 * can be measured if the GPU had work from its beginning to its end: both events in one era, and
 * this one recorded before the queue runs dry.
 */
void queue_mark(struct queue *q, struct queue_stream *s, uint32_t era, struct ledger_device *ledger,
                uint64_t now)
{
    bool held = era != q->era;
    struct queue_marker *m;
    int event;

    if (q->n_markers == QUEUE_N_MARKERS)
        return;
    event = event_take(q, s->ctx);
    if (event == QUEUE_NO_EVENT)
        return;
    if (driver->cuEventRecord(q->events[event].event, s->stream) != CUDA_SUCCESS) {
        event_put(q, event);
        return;
    }
    m = &q->markers[(q->head + q->n_markers++) % QUEUE_N_MARKERS];
    m->event = event;
    m->before = QUEUE_NO_EVENT;
    if (s->interval.n_parts && s->era == era && s->last_era == era && (held || q->busy_until > now))
        m->before = s->last;
    if (m->before == QUEUE_NO_EVENT)
        event_put(q, s->last);
    m->era = era;
    m->submitted = q->submitted + (held ? q->ahead_ns : 0);
    m->expected = q->busy_until;
    m->look_at = q->busy_until > 10 * NS_PER_US ? q->busy_until - 10 * NS_PER_US : 0;
    m->interval = s->interval;
    q->events[event].n_refs++; /* the marker's and the stream's */
    s->last = event;
    s->last_era = era;
    s->unmarked = false;
    s->pending_ns = 0;
    s->interval.n_parts = 0;
    atomic_add_relaxed(&ledger->markers, 1);
}

/*
 * A launch of `kind` is about to be made in the stream. Returns whether a marker belongs behind it:
 * when enough work was launched since the last one, and around work of a kind that is still
 * unknown.
 */
bool queue_add(struct queue *q, struct queue_stream *s, uint32_t era, uint32_t kind,
               struct ledger_device *ledger, uint64_t now)
{
    bool held = era != q->era;
    bool learn = estimate_samples(kind) < 2;
    bool fresh = !s->interval.n_parts || s->era != era;
    uint64_t predicted = estimate_ns(kind);

    if (learn && !fresh) {
        queue_mark(q, s, era, ledger, now);
        fresh = true;
    }
    if (fresh) {
        /* It begins with the last marker if that one is still ahead of the GPU, with one of its own
         * otherwise. */
        s->interval.n_parts = 0;
        s->era = era;
        if (s->last == QUEUE_NO_EVENT || s->last_era != era ||
            (!held && driver->cuEventQuery(q->events[s->last].event) != CUDA_ERROR_NOT_READY))
            queue_mark(q, s, era, ledger, now);
    }
    estimate_add(&s->interval, kind);
    s->unmarked = true;
    s->pending_ns += predicted;
    if (held) {
        q->ahead_ns += predicted;
    } else {
        q->busy_until = (q->busy_until > now ? q->busy_until : now) + predicted;
        q->submitted += predicted;
    }
    return learn || s->interval.n_parts == ESTIMATE_N_PARTS ||
           s->pending_ns >= atomic_load_relaxed(&pages_grant()->marker_ns);
}

/*
 * Marks what runs without a marker behind it in the current context's streams; another thread's
 * per-thread stream is out of reach. Only while nothing is held: a stream may already have been
 * told to wait for an event behind a hold, and a marker would come behind that.
 */
void queue_mark_tails(struct queue *q, CUcontext ctx, struct ledger_device *ledger, uint64_t now)
{
    for (unsigned i = 0; i < QUEUE_N_STREAMS; i++) {
        struct queue_stream *s = &q->streams[i];

        if (!s->used || !s->unmarked || s->era != q->era || s->ctx != ctx)
            continue;
        if ((s->thread && s->thread != stream_thread(CU_STREAM_PER_THREAD)) ||
            queue_capturing(s->stream))
            continue;
        queue_mark(q, s, q->era, ledger, now);
    }
}

/*
 * GPU time that an interval adds to what is known to be used: streams run at the same time, and a
 * second of two streams is a second of the GPU. Events of one context share a clock.
 */
static bool marker_measure(struct queue *q, const struct queue_marker *m, uint64_t *addedp)
{
    CUevent event = q->events[m->event].event;
    float since_reference = 0, length;
    double end, begin;

    if (q->reference != QUEUE_NO_EVENT &&
        (q->events[q->reference].ctx != q->events[m->event].ctx ||
         driver->cuEventElapsedTime(&since_reference, q->events[q->reference].event, event) !=
             CUDA_SUCCESS)) {
        event_put(q, q->reference);
        q->reference = QUEUE_NO_EVENT;
    }
    if (q->reference == QUEUE_NO_EVENT) {
        since_reference = 0;
        q->covered_until = q->reference_ns;
    }
    end = q->reference_ns + (double)since_reference * 1e6;
    /* A float of milliseconds is exact over short times only: the reference moves along. */
    event_put(q, q->reference);
    q->reference = m->event;
    q->reference_ns = end;
    q->events[m->event].n_refs++;
    if (m->before == QUEUE_NO_EVENT ||
        driver->cuEventElapsedTime(&length, q->events[m->before].event, event) != CUDA_SUCCESS ||
        length < 0)
        return false;
    begin = end - (double)length * 1e6;
    if (begin < q->covered_until)
        begin = q->covered_until;
    *addedp = end > begin ? (uint64_t)(end - begin) : 0;
    if (end > q->covered_until)
        q->covered_until = end;
    return true;
}

static void marker_resolve(struct queue *q, struct queue_marker *m, struct ledger_device *ledger)
{
    uint64_t measured;

    if (marker_measure(q, m, &measured)) {
        uint64_t predicted = estimate_interval_ns(&m->interval);

        atomic_add_relaxed(&ledger->busy_ns, measured);
        atomic_add_relaxed(&ledger->error_ns,
                           measured > predicted ? measured - predicted : predicted - measured);
        estimate_learn(&m->interval, measured);
    }
    event_put(q, m->before);
    event_put(q, m->event);
}

/* Takes the markers that were reached and corrects busy_until by them. */
void queue_retire(struct queue *q, uint64_t now, bool force, struct ledger_device *ledger)
{
    while (q->n_markers) {
        struct queue_marker *m = &q->markers[q->head];
        uint64_t behind;

        if (m->era != q->era && m->era == q->era + 1)
            return; /* held */
        if (!force && now < m->look_at)
            return;
        behind = q->submitted > m->submitted ? q->submitted - m->submitted : 0;
        if (driver->cuEventQuery(q->events[m->event].event) == CUDA_ERROR_NOT_READY) {
            m->look_at = now + 20 * NS_PER_US;
            /* Not reached although the model said so: what is behind it is still to come. */
            if (now > m->expected && q->busy_until < now + behind + 10 * NS_PER_US)
                q->busy_until = now + behind + 10 * NS_PER_US;
            return;
        }
        if (q->busy_until > now + behind)
            q->busy_until = now + behind;
        marker_resolve(q, m, ledger);
        q->head = (q->head + 1) % QUEUE_N_MARKERS;
        q->n_markers--;
    }
}

/* What was held runs from `now` on. */
void queue_open(struct queue *q, uint64_t now)
{
    q->era++;
    q->busy_until = (q->busy_until > now ? q->busy_until : now) + q->ahead_ns;
    q->submitted += q->ahead_ns;
    q->ahead_ns = 0;
    for (unsigned i = 0; i < q->n_markers; i++) {
        struct queue_marker *m = &q->markers[(q->head + i) % QUEUE_N_MARKERS];

        if (m->era == q->era) {
            m->expected = q->busy_until - (q->submitted - m->submitted);
            m->look_at = m->expected;
        }
    }
}

void queue_forget_stream(struct queue *q, CUstream stream)
{
    for (unsigned i = 0; i < QUEUE_N_STREAMS; i++)
        if (q->streams[i].used && q->streams[i].stream == stream)
            stream_drop(q, &q->streams[i]);
}

/* A context's events go with it: the markers that use them are forgotten. NULL: every context. */
void queue_forget_context(struct queue *q, CUcontext ctx)
{
    unsigned n_kept = 0;

    for (unsigned i = 0; i < QUEUE_N_STREAMS; i++)
        if (q->streams[i].used && (!ctx || q->streams[i].ctx == ctx))
            stream_drop(q, &q->streams[i]);
    for (unsigned i = 0; i < q->n_markers; i++) {
        struct queue_marker m = q->markers[(q->head + i) % QUEUE_N_MARKERS];

        if (ctx && q->events[m.event].ctx != ctx)
            q->markers[(q->head + n_kept++) % QUEUE_N_MARKERS] = m;
    }
    q->n_markers = n_kept;
    if (q->reference != QUEUE_NO_EVENT && (!ctx || q->events[q->reference].ctx == ctx))
        q->reference = QUEUE_NO_EVENT;
    for (unsigned i = 0; i < QUEUE_N_EVENTS; i++)
        if (!ctx || q->events[i].ctx == ctx)
            memset(&q->events[i], 0, sizeof q->events[i]);
}
