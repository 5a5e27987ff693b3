/* Gives passes to streams and ends them; see pass.h. */
#include "pass.h"

#include "gate.h"
#include "parking.h"

#include <string.h>

#define PASS_LEAST_NS    (5 * NS_PER_US)    /* minimum budget that is worth a pass */
#define PASS_LENGTH_NS   (2500 * NS_PER_US) /* GPU time of an open pass */
#define MAX_PASS         1024               /* maximum number of launches in an open pass */
#define PASS_INFLIGHT_NS (20 * NS_PER_MS)   /* maximum queued work while the grant is open */

struct pass passes[PASS_N];
uint32_t gate_lazy_kernels;

/* Launches on all GPUs share the passes. A thread that changes one holds this lock, which is taken
 * after the gate's. */
static struct os_lock passes_lock;

/* Adds to the ledger the launches that an open pass let through. */
static void pass_report(struct pass *p)
{
    uint32_t used = atomic_load_relaxed(&p->used);

    /* A thread that was delayed between its load and its store may set the number back. */
    if (p->ledger && (int32_t)(used - p->reported) > 0)
        atomic_add_relaxed(&p->ledger->launches, used - p->reported);
    p->reported = used;
}

/* Ends a pass. Either pass_spend() sees this before it notes a launch, or pass_collect() sees the
 * launch. */
static void pass_end(struct pass *p)
{
    atomic_store_seq_cst(&p->limit, 0);
    pass_report(p);
}

static void passes_each(const struct grant_device *grant, void (*act)(struct pass *))
{
    os_lock(&passes_lock);
    for (unsigned i = 0; i < PASS_N; i++)
        if (passes[i].limit && (!grant || passes[i].grant == grant))
            act(&passes[i]);
    os_unlock(&passes_lock);
}

void pass_tell_all(const struct grant_device *grant)
{
    passes_each(grant, pass_report);
}

/* Returns the kind under which a stream's average launch during an open grant is learned. */
static uint32_t pass_kind(struct gate *g, CUstream stream)
{
    return estimate_kind(&g->estimate, (uintptr_t)stream + 1, UINT64_MAX, 0);
}

/* Adds to the model of the queue the launches that an open pass let through. Launches on another
 * GPU are dropped. */
static void pass_count(struct gate *g, struct pass *p)
{
    uint32_t used = atomic_load_relaxed(&p->used);
    uint32_t n = used - p->counted;
    struct queue_stream *s;

    p->counted = used;
    if ((int32_t)n <= 0 || p->gate != g)
        return;
    s = queue_find(&g->queue, p->ctx, p->stream);
    g->last_launch = os_now();
    queue_add(&g->queue, s, &g->estimate, g->queue.era, pass_kind(g, p->stream), n, p->began_ns);
    s->gap = s->gap || g->queue.busy_until < g->last_launch;
    s->n_passed += n;
}

/* Ends the passes of a grant that is no longer open. The gate's lock is held. */
void pass_stop(struct gate *g, const struct grant_device *grant)
{
    g->passing = false;
    passes_each(grant, pass_end);
    os_lock(&passes_lock);
    for (unsigned i = 0; i < PASS_N; i++)
        if (passes[i].gate == g && !passes[i].metered)
            pass_count(g, &passes[i]);
    os_unlock(&passes_lock);
}

/* Makes every launch from here on enter the gate. */
void gate_end_all_passes(void)
{
    passes_each(NULL, pass_end);
}

void pass_forget_stream(const struct grant_device *grant, CUstream stream)
{
    struct pass *p = pass_of(stream);

    os_lock(&passes_lock);
    if (p->stream == stream && p->grant == grant) {
        pass_end(p);
        p->counted = atomic_load_relaxed(&p->used); /* no marker can follow these any more */
    }
    os_unlock(&passes_lock);
}

void pass_after_fork(void)
{
    memset(passes, 0, sizeof passes);
    passes_lock.word = 0;
    gate_lazy_kernels = 0;
}

/* Whether a stream may have a pass. Its handle alone has to determine where its work runs; the
 * handle of a default stream does so only with one GPU and one context. No stream may have a pass
 * while launching a kernel by its own handle would load a library (modules.c), or where each launch
 * has to keep memory on the GPU (parking.h). */
static bool pass_fits(CUstream stream)
{
    return ((uintptr_t)stream > 2 ||
            (pages_n_devices() == 1 && stream != CU_STREAM_PER_THREAD &&
             atomic_load_relaxed(&pages_ledger_device(0)->contexts) <= 1)) &&
           likely(!atomic_load_seq_cst(&gate_lazy_kernels)) && !parking_applies();
}

static void pass_begin(struct pass *p, const struct gate *g, const struct queue_stream *s,
                       const struct grant_device *grant, struct ledger_device *ledger,
                       uint64_t deadline, uint32_t limit)
{
    p->ledger = ledger;
    p->gate = g;
    p->ctx = s->ctx;
    p->began_ns = os_now();
    atomic_store_relaxed(&p->stream, s->stream);
    atomic_store_relaxed(&p->grant, grant);
    atomic_store_relaxed(&p->epoch, g->epoch);
    /* A thread that read the limit of the last pass sees either all of the new pass or none of
     * it. */
    atomic_store_release(&p->deadline_ns, deadline);
    atomic_store_release(&p->limit, limit ? limit : 1);
}

/* ---- while the grant is open ---- */

enum pass_answer pass_open(struct gate *g, struct queue_stream **sp,
                           const struct grant_device *grant, struct ledger_device *ledger,
                           uint64_t now, uint32_t *kindp)
{
    struct queue_stream *s = *sp;
    struct pass *p = pass_of(s->stream);
    CUstream stream = s->stream;
    CUcontext ctx = s->ctx;
    enum pass_answer answer = PASS_GO;
    bool known;
    uint64_t n;

    os_lock(&passes_lock);
    if (!p->metered) {
        pass_end(p);
        pass_count(g, p);
        s = *sp = queue_find(&g->queue, ctx, stream); /* another stream may have taken its entry */
    }
    *kindp = pass_kind(g, s->stream);
    known = estimate_samples(&g->estimate, *kindp);
    g->passing = true;
    g->blind = true;
    if (known ? queue_left(&g->queue, now) > PASS_INFLIGHT_NS
              : queue_unknown(&g->queue, now) >= GATE_N_UNKNOWN) {
        answer = PASS_FULL;
    } else if (++s->n_passed > s->sample_at) {
        /* The interval varies, so that samples from a loop are not always of the same launch. */
        s->draw = s->draw * 1103515245 + 12345;
        s->sample_at = 192 + (s->draw >> 16) % 128;
        s->n_passed = 0;
        answer = PASS_SAMPLE;
    } else if (known && pass_fits(s->stream) && !p->metered) {
        n = PASS_LENGTH_NS / estimate_ns(&g->estimate, *kindp);
        if (n > 1)
            pass_begin(p, g, s, grant, ledger, GRANT_OPEN,
                       atomic_load_relaxed(&p->used) + (uint32_t)(n < MAX_PASS ? n : MAX_PASS));
    }
    os_unlock(&passes_lock);
    return answer;
}

/* ---- under a grant with a deadline ---- */

void pass_meter(struct gate *g, const struct queue_stream *s, const struct grant_device *grant,
                struct ledger_device *ledger, uint64_t deadline, uint64_t now)
{
    static uint32_t serial;
    const struct grant_header *page = pages_grant();
    uint64_t queued = queue_left(&g->queue, now);
    uint64_t inflight = atomic_load_relaxed(&page->inflight_ns);
    uint64_t marker = atomic_load_relaxed(&page->marker_ns);
    struct pass *p = pass_of(s->stream);
    uint64_t budget;

    if (deadline == GRANT_OPEN || deadline <= now + queued || inflight <= queued ||
        marker <= s->pending_ns)
        return;
    budget = deadline - now - queued;
    if (budget > inflight - queued)
        budget = inflight - queued;
    if (budget > marker - s->pending_ns)
        budget = marker - s->pending_ns;
    if (budget < PASS_LEAST_NS)
        return;
    os_lock(&passes_lock);
    if (!p->metered && pass_fits(s->stream)) {
        pass_end(p);
        p->metered = true;
        atomic_store_relaxed(&p->estimate, &g->estimate);
        atomic_store_relaxed(&p->budget_ns, budget);
        atomic_store_relaxed(&p->spent, 0);
        g->metered = p;
        pass_begin(p, g, s, grant, ledger, deadline, ++serial);
    }
    os_unlock(&passes_lock);
}

/* Pays for a launch from the budget of a metered pass. A launch that does not fit enters the gate,
 * where the pass ends. */
bool pass_spend(struct pass *p, uint32_t limit, uintptr_t key, uint64_t blocks)
{
    uint64_t budget = atomic_load_relaxed(&p->budget_ns);
    uint64_t ns, spent, n;
    uint32_t kind;

    if (!estimate_look(atomic_load_relaxed(&p->estimate), key, blocks, &kind, &ns) || ns > budget)
        return false;
    spent = atomic_add_seq_cst(&p->spent, PASS_ONE + ns);
    n = spent / PASS_ONE;
    if (n >= PASS_N_LOG || spent % PASS_ONE + ns > budget ||
        atomic_load_seq_cst(&p->limit) != limit)
        return false;
    atomic_store_relaxed(&p->log[n], kind + 1);
    return true;
}

/*
 * Ends the metered pass and adds to the model the launches that it let through. The times of these
 * launches are not known, except that they came after the pass began. The next marker corrects the
 * model.
 */
void pass_collect(struct gate *g)
{
    struct pass *p = g->metered;
    struct queue_stream *s = NULL;
    uint64_t predicted = 0, n;
    uint32_t n_noted = 0;

    os_lock(&passes_lock);
    pass_end(p);
    n = atomic_exchange_acq_rel(&p->spent, 0) / PASS_ONE;
    for (uint64_t i = 0; i < n && i < PASS_N_LOG; i++) {
        uint32_t kind = atomic_load_relaxed(&p->log[i]);

        if (!kind--)
            continue;
        atomic_store_relaxed(&p->log[i], 0);
        if (!s)
            s = queue_find(&g->queue, p->ctx, p->stream);
        queue_add(&g->queue, s, &g->estimate, g->queue.era, kind, 1, p->began_ns);
        predicted += estimate_ns(&g->estimate, kind);
        n_noted++;
    }
    if (n_noted) {
        g->last_launch = os_now();
        atomic_add_relaxed(&p->ledger->launches, n_noted);
        atomic_bump(&p->ledger->predicted_ns, predicted);
    }
    p->metered = false;
    g->metered = NULL;
    os_unlock(&passes_lock);
}
