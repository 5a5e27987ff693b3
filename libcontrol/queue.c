/* Models when the work that is queued on a GPU will end; see queue.h. */
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
    q->rise = ESTIMATE_RISE;
    q->asked_era = q->era - 1;
}

/* ---- events, which are reused ---- */

/* Returns an entry with one reference. Its event may still have to be created. */
static int event_take(struct queue *q, CUcontext ctx)
{
    int empty = QUEUE_NO_EVENT;

    for (int i = 0; i < QUEUE_N_EVENTS; i++) {
        if (q->events[i].n_refs)
            continue;
        if (q->events[i].event && q->events[i].ctx == ctx) {
            empty = i;
            break;
        }
        if (!q->events[i].event && empty == QUEUE_NO_EVENT)
            empty = i;
    }
    if (empty != QUEUE_NO_EVENT) {
        q->events[empty].ctx = ctx;
        q->events[empty].serial = ++q->serials;
        q->events[empty].n_refs = 1;
    }
    return empty;
}

static void event_put(struct queue *q, int event)
{
    if (event != QUEUE_NO_EVENT && q->events[event].n_refs)
        q->events[event].n_refs--;
}

static CUevent event_handle(const struct queue *q, int event)
{
    return event == QUEUE_NO_EVENT ? NULL : q->events[event].event;
}

/* ---- streams ---- */

/* The handle CU_STREAM_PER_THREAD names a different stream in each thread. */
const void *queue_thread(CUstream stream)
{
    static __thread char here;

    return stream == CU_STREAM_PER_THREAD ? &here : NULL;
}

static void stream_drop(struct queue *q, struct queue_stream *s)
{
    event_put(q, s->last);
    s->used = false;
    s->serial = 0;
}

/* Whether `a` is dropped rather than `b`: a stream without unmarked work goes first, otherwise the
 * one that was used least recently. */
static bool stream_goes_before(const struct queue_stream *a, const struct queue_stream *b)
{
    return a->unmarked != b->unmarked ? b->unmarked : a->touched < b->touched;
}

/* Returns the stream's entry. If there are more streams than entries, one is dropped; the model
 * keeps what it knows of that stream's work. */
struct queue_stream *queue_find(struct queue *q, CUcontext ctx, CUstream stream)
{
    const void *thread = queue_thread(stream);
    struct queue_stream *empty = NULL, *oldest = NULL;

    for (unsigned i = 0; i < QUEUE_N_STREAMS; i++) {
        struct queue_stream *s = &q->streams[i];

        if (s->used && s->stream == stream && s->ctx == ctx && s->thread == thread) {
            s->touched = ++q->touches;
            return s;
        }
        if (!s->used && !empty)
            empty = s;
        if (s->used && (!oldest || stream_goes_before(s, oldest)))
            oldest = s;
    }
    if (!empty) {
        stream_drop(q, oldest);
        empty = oldest;
    }
    memset(empty, 0, sizeof *empty);
    empty->used = true;
    empty->stream = stream;
    empty->thread = thread;
    empty->ctx = ctx;
    empty->serial = ++q->serials;
    empty->touched = ++q->touches;
    empty->last = QUEUE_NO_EVENT;
    return empty;
}

/* ---- launches ---- */

/*
 * Whether the next launch needs a marker before it, because its duration is unknown, or because it
 * begins an interval and no earlier marker of the stream is outstanding.
 */
bool queue_wants_mark_before(const struct queue *q, const struct queue_stream *s, uint32_t era,
                             bool learn)
{
    bool held = era != q->era;

    if (s->interval.n_parts && s->era == era)
        return learn;
    if (s->last == QUEUE_NO_EVENT || s->last_era != era)
        return true;
    if (held)
        return false;
    /* The model knows whether the last marker was reached, so the GPU is not queried. */
    for (unsigned i = q->n_markers; i-- > 0;) {
        const struct queue_marker *m = &q->markers[(q->head + i) % QUEUE_N_MARKERS];

        if (m->event == s->last)
            return false;
    }
    return true;
}

/*
 * Returns when work that is submitted at `now` to an empty queue begins. Where containers share one
 * context on the GPU, this work starts alongside the last work of the previous holder, which is
 * charged for the time until `begins_ns` and may need more time than it reported. Events do not
 * wait for the holder's work, so the interval between this container's first two events seems
 * longer.
 */
static uint64_t queue_begin(struct queue *q, uint64_t now)
{
    uint64_t begin = q->begins_ns > now ? q->begins_ns : now;

    if (q->begins_ns + q->beside_ns > now) {
        q->shared_ns = q->begins_ns + q->beside_ns - now;
        q->shared_era = q->era;
    }
    return begin;
}

/* Adds `count` launches of `kind` that are about to be made in the stream, or have been. */
void queue_add(struct queue *q, struct queue_stream *s, const struct estimate *e, uint32_t era,
               uint32_t kind, uint32_t count, uint64_t now)
{
    bool held = era != q->era;
    uint64_t predicted = estimate_ns(e, kind) * count;

    if (s->era != era) {
        s->interval.n_parts = 0;
        s->interval.rest_ns = 0;
        s->era = era;
        s->pending_ns = 0;
    }
    estimate_add(e, &s->interval, kind, count);
    s->unmarked = true;
    s->unknown = s->unknown || !estimate_samples(e, kind);
    s->pending_ns += predicted;
    if (held) {
        q->ahead_ns += predicted;
    } else {
        if (q->busy_until <= now)
            now = queue_begin(q, now);
        q->busy_until = (q->busy_until > now ? q->busy_until : now) + predicted;
        q->submitted += predicted;
    }
}

/* Whether enough work has been launched since the last marker to justify another one. */
bool queue_wants_mark_behind(const struct queue_stream *s, uint64_t marker_ns)
{
    return s->interval.n_parts == ESTIMATE_N_PARTS || s->pending_ns >= marker_ns;
}

/* Returns how many outstanding markers are behind work of unknown duration. */
unsigned queue_unknown(const struct queue *q, uint64_t now)
{
    unsigned n = 0;

    for (unsigned i = 0; i < q->n_markers && !queue_stalled(q, now); i++)
        n += q->markers[(q->head + i) % QUEUE_N_MARKERS].unknown;
    return n;
}

/* ---- markers ---- */

/*
 * Prepares a marker. Its interval is what has been launched in the stream since the last event, and
 * can be measured if both events are in one era. If the GPU may have been idle in between, because
 * the queue ran dry before this event was recorded, the measured time is the most that the work can
 * have taken. Returns false if there is no room.
 */
bool queue_mark_begin(struct queue *q, struct queue_stream *s, uint32_t era, uint64_t now,
                      struct queue_mark *mark)
{
    bool held = era != q->era;
    struct queue_marker *m = &mark->marker;
    int event;

    if (q->n_markers == QUEUE_N_MARKERS)
        return false;
    event = event_take(q, s->ctx);
    if (event == QUEUE_NO_EVENT)
        return false;
    mark->stream = s;
    mark->serial = s->serial;
    mark->event = event;
    mark->taken = q->events[event].serial;
    mark->handle = q->events[event].event;
    mark->ctx = s->ctx;
    mark->handle_of_stream = s->stream;
    m->event = event;
    m->before = QUEUE_NO_EVENT;
    m->loose = m->shared = false;
    if (s->interval.n_parts && s->era == era && s->last_era == era) {
        m->before = s->last;
        m->loose = s->gap || !(held || q->busy_until > now);
    }
    if (m->before == QUEUE_NO_EVENT)
        event_put(q, s->last);
    s->last = QUEUE_NO_EVENT;
    m->era = era;
    m->submitted = q->submitted + (held ? q->ahead_ns : 0);
    m->expected = q->busy_until;
    m->look_at = q->busy_until > 10 * NS_PER_US ? q->busy_until - 10 * NS_PER_US : 0;
    m->interval = s->interval;
    m->unknown = s->unknown;
    s->unmarked = false;
    s->unknown = false;
    s->gap = false;
    s->pending_ns = 0;
    s->interval.n_parts = 0;
    s->interval.rest_ns = 0;
    return true;
}

void queue_mark_end(struct queue *q, const struct queue_mark *mark, bool recorded,
                    struct ledger_device *ledger)
{
    struct queue_event *event = &q->events[mark->event];
    struct queue_stream *s = mark->stream;
    struct queue_marker *m;

    /* The context may have ended in the meantime, and its events with it; another context may have
     * its handle. */
    if (event->serial != mark->taken)
        return;
    event->event = mark->handle;
    if (!recorded || q->n_markers == QUEUE_N_MARKERS) {
        event_put(q, mark->event);
        event_put(q, mark->marker.before);
        return;
    }
    if (!q->n_markers)
        q->progress_ns = os_now();
    m = &q->markers[(q->head + q->n_markers++) % QUEUE_N_MARKERS];
    *m = mark->marker;
    m->serial = ++q->serials;
    if (s->used && s->serial == mark->serial) {
        event_put(q, s->last);
        s->last = mark->event;
        s->last_era = m->era;
        event->n_refs++; /* one reference is the marker's, one the stream's */
    }
    atomic_add_relaxed(&ledger->markers, 1);
}

/*
 * Returns the context's next stream that has work running without a marker behind it; another
 * thread's per-thread stream is out of reach. Called only while nothing is held: a stream may
 * already be waiting for an event behind a hold, and a marker would come behind that.
 */
struct queue_stream *queue_next_tail(struct queue *q, CUcontext ctx, unsigned *at)
{
    for (; *at < QUEUE_N_STREAMS; ++*at) {
        struct queue_stream *s = &q->streams[*at];

        if (!s->used || !s->unmarked || s->era != q->era || s->ctx != ctx)
            continue;
        if (s->thread && s->thread != queue_thread(CU_STREAM_PER_THREAD))
            continue;
        ++*at;
        return s;
    }
    return NULL;
}

/* ---- corrections according to the GPU's answers ---- */

/* Returns in `look` which marker to query, if one is due. */
bool queue_look_begin(const struct queue *q, uint64_t now, bool force, struct queue_look *look)
{
    const struct queue_marker *m = &q->markers[q->head];

    if (!queue_runs(q) || (!force && now < m->look_at))
        return false;
    memset(look, 0, sizeof *look);
    look->serial = m->serial;
    look->event = event_handle(q, m->event);
    look->before = event_handle(q, m->before);
    if (q->reference != QUEUE_NO_EVENT && q->events[q->reference].ctx == q->events[m->event].ctx)
        look->reference = event_handle(q, q->reference);
    return true;
}

/*
 * Returns in `addedp` the GPU time that an interval adds to the known use. Streams run at the same
 * time, so a second in which two streams run is one second of GPU time. Events of one context share
 * a clock. Returns false if the interval was not measured.
 */
static bool marker_measure(struct queue *q, const struct queue_marker *m,
                           const struct queue_look *look, uint64_t *addedp)
{
    double end, begin;

    if (!look->timed) {
        event_put(q, q->reference);
        q->reference = QUEUE_NO_EVENT;
        q->covered_until = q->reference_ns;
    }
    end = q->reference_ns + (look->timed ? (double)look->since_reference * 1e6 : 0);
    /* A float in milliseconds is accurate only over short intervals, so the reference moves
     * along. */
    event_put(q, q->reference);
    q->reference = m->event;
    q->events[m->event].n_refs++;
    q->reference_ns = end;
    if (!look->measured)
        return false;
    begin = end - (double)look->length * 1e6;
    if (begin < q->covered_until)
        begin = q->covered_until;
    *addedp = end > begin ? (uint64_t)(end - begin) : 0;
    if (end > q->covered_until)
        q->covered_until = end;
    return true;
}

/* Corrects the model according to the GPU's answer. Returns whether the marker was retired; if so,
 * the next one may be due. */
bool queue_look_end(struct queue *q, struct estimate *e, const struct queue_look *look,
                    struct ledger_device *ledger, uint64_t now)
{
    struct queue_marker *m = &q->markers[q->head];
    uint64_t behind, measured, shared = 0;

    if (!q->n_markers || m->serial != look->serial)
        return false;
    behind = q->submitted > m->submitted ? q->submitted - m->submitted : 0;
    if (!look->reached) {
        m->look_at = now + 20 * NS_PER_US;
        /* Not reached, although the model expected it: the work behind it is still to come. */
        if (now > m->expected && q->busy_until < now + behind + 10 * NS_PER_US)
            q->busy_until = now + behind + 10 * NS_PER_US;
        return false;
    }
    q->progress_ns = now;
    if (q->busy_until > now + behind)
        q->busy_until = now + behind;
    if (q->shared_ns && m->era == q->shared_era && m->before != QUEUE_NO_EVENT) {
        shared = q->shared_ns;
        q->shared_ns = 0;
    }
    if (marker_measure(q, m, look, &measured)) {
        uint64_t predicted = estimate_interval_ns(e, &m->interval);
        float rise = q->rise;
        bool learns = (int32_t)(q->given_up - m->serial) < 0 || now >= q->given_up_until;

        bool late = measured > shared + predicted + predicted / 4;

        if (!m->loose && !late)
            estimate_check(e, &m->interval, m->era);
        else if (m->shared && late && estimate_unchecked(e, &m->interval, m->era))
            q->n_doubts++;
        /* The work took at most the measured time, and at least that minus the idle time or other
         * containers' time that it may include. Between these bounds the prediction is kept. */
        if (m->loose || (shared && !m->unknown)) {
            uint64_t least = m->loose || measured < shared ? 0 : measured - shared;

            if (predicted >= least && predicted <= measured)
                learns = false;
            if (predicted < measured)
                measured = predicted > least ? predicted : least;
        }
        atomic_add_relaxed(&ledger->busy_ns, measured);
        atomic_add_relaxed(&ledger->error_ns,
                           measured > predicted ? measured - predicted : predicted - measured);
        /* Other containers' work that ran alongside for a moment cannot have doubled the
         * duration. */
        if (rise == ESTIMATE_RISE_BESIDE && measured / 2 > predicted)
            rise = ESTIMATE_RISE;
        if (learns)
            estimate_learn(e, &m->interval, measured, rise);
    }
    event_put(q, m->before);
    event_put(q, m->event);
    q->head = (q->head + 1) % QUEUE_N_MARKERS;
    q->n_markers--;
    return true;
}

/* Returns for how long the oldest marker has been overdue, in ns; in `lengthp` the predicted
 * duration of its interval, and in `knownp` whether all of its work has been measured. */
uint64_t queue_late(const struct queue *q, const struct estimate *e, uint64_t now,
                    uint64_t *lengthp, bool *knownp)
{
    const struct queue_marker *m = &q->markers[q->head];
    uint64_t due;

    if (!queue_runs(q))
        return 0;
    *lengthp = estimate_interval_ns(e, &m->interval);
    due = q->progress_ns + *lengthp;
    if (due < m->expected)
        due = m->expected;
    *knownp = !m->unknown;
    return now > due ? now - due : 0;
}

/* Notes that the GPU goes to others while this container's work is still running. If the work ends
 * before `until`, it was waiting, and its duration is not learned. */
void queue_give_up(struct queue *q, uint64_t until)
{
    q->given_up = q->serials;
    q->given_up_era = q->era;
    q->given_up_until = until;
}

/* Whether work that was given up is still running. Work that was held at the time waits for the
 * next grant. */
bool queue_overruns(const struct queue *q)
{
    const struct queue_marker *m = &q->markers[q->head];

    return q->given_up && q->n_markers && (int32_t)(q->given_up - m->serial) >= 0 &&
           (int32_t)(q->given_up_era - m->era) >= 0;
}

/*
 * Whether other containers should wait for the end of the remaining work. Alongside their work it
 * takes longer, so its end does not show whether it now takes longer even when it runs alone. Work
 * that is not the last of its grant does show that. Where there is no such work, as when a grant is
 * one interval, this returns true once in a while.
 */
bool queue_asks(struct queue *q)
{
    if (q->n_doubts >= QUEUE_DOUBTS) {
        q->n_doubts = 0;
        q->asked_era = q->era;
    }
    return q->asked_era == q->era;
}

/* Notes that from now on other containers' work runs alongside the remaining work, which may
 * therefore take longer than it is charged for. */
void queue_share(struct queue *q)
{
    for (unsigned i = 0; i < q->n_markers; i++) {
        struct queue_marker *m = &q->markers[(q->head + i) % QUEUE_N_MARKERS];

        m->shared = m->shared || m->era == q->era;
        m->loose = m->loose || m->shared;
    }
    for (unsigned i = 0; i < QUEUE_N_STREAMS; i++) {
        struct queue_stream *s = &q->streams[i];

        s->gap = s->gap || (s->unmarked && s->era == q->era);
    }
}

/* Notes that held work starts to run at `now`. */
void queue_open(struct queue *q, uint64_t now)
{
    uint64_t begin;

    q->era++;
    q->progress_ns = now; /* held work could not have ended earlier */
    begin = queue_begin(q, now);
    q->busy_until = (q->busy_until > begin ? q->busy_until : begin) + q->ahead_ns;
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

/* ---- streams and contexts that end ---- */

void queue_forget_stream(struct queue *q, CUstream stream)
{
    for (unsigned i = 0; i < QUEUE_N_STREAMS; i++)
        if (q->streams[i].used && q->streams[i].stream == stream)
            stream_drop(q, &q->streams[i]);
}

/* Forgets a context: its events end with it, and so do the markers that use them. */
void queue_forget_context(struct queue *q, CUcontext ctx)
{
    unsigned n_kept = 0;

    for (unsigned i = 0; i < QUEUE_N_STREAMS; i++)
        if (q->streams[i].used && q->streams[i].ctx == ctx)
            stream_drop(q, &q->streams[i]);
    for (unsigned i = 0; i < q->n_markers; i++) {
        struct queue_marker m = q->markers[(q->head + i) % QUEUE_N_MARKERS];

        if (q->events[m.event].ctx != ctx)
            q->markers[(q->head + n_kept++) % QUEUE_N_MARKERS] = m;
    }
    q->n_markers = n_kept;
    if (q->reference != QUEUE_NO_EVENT && q->events[q->reference].ctx == ctx)
        q->reference = QUEUE_NO_EVENT;
    for (unsigned i = 0; i < QUEUE_N_EVENTS; i++)
        if (q->events[i].ctx == ctx)
            memset(&q->events[i], 0, sizeof q->events[i]);
}
