/*
 * Keeps track of captures, in which a stream records, as a graph, what is launched into it.
 *
 * Streams that are capturing are neither gated nor marked. Every driver call that the library adds
 * is made in relaxed capture mode (gate_visit_begin()), because in the other modes it would
 * invalidate a capture of the application.
 *
 * A capture to a graphics API's command list (CUDA in graphics) is like one to a graph, except that
 * the driver is not known to report it as a capture, so it is looked up in a table here.
 */
#include "gate_parts.h"
#include "parking.h"

#include <string.h>

#define GATE_N_CAPTURES 64
#define GATE_JOIN_NS    (100 * NS_PER_MS)

uint32_t gate_n_captures;
uint32_t gate_n_joining;
__thread bool gate_visiting;

/* ---- calls by which a stream may join a capture ---- */

/*
 * Called before a call by which a stream may join a capture: a call that begins one, or that waits
 * for an event. From here on no thread records an event in a stream that it has not just launched
 * into, and threads that were doing so have finished. If an event were recorded in the capture, a
 * query of the event would break the capture. A thread that is marking may be blocked behind a full
 * queue that the caller is about to let run, so this function waits for GATE_JOIN_NS at most.
 */
void gate_join_begin(void)
{
    uint64_t end = 0;

    atomic_add_seq_cst(&gate_n_joining, 1);
    gate_end_all_passes(); /* captured launches do not run now */
    for (unsigned device = 0; device < pages_n_devices() && !gate_visiting; device++) {
        struct gate *g = &gate_devices[device];

        if (!atomic_load_seq_cst(&g->started))
            continue;
        gate_lock(g);
        while (g->n_marking && (!end || os_now() < end)) {
            if (!end)
                end = os_now() + GATE_JOIN_NS;
            os_unlock(&g->lock);
            os_sleep(20 * NS_PER_US);
            gate_lock(g);
        }
        os_unlock(&g->lock);
    }
    if (parking_applies() && !gate_visiting)
        parking_await_syncs(os_now() + GATE_JOIN_NS);
}

void gate_join_end(void)
{
    atomic_sub_seq_cst(&gate_n_joining, 1);
}

/* ---- captures under way ---- */

bool gate_captures(void)
{
    return unlikely(atomic_load_relaxed(&gate_n_captures));
}

/* The streams in which captures began; a capture ends only in the stream in which it began. The end
 * of a capture that did not fit into the table is never noticed, and each launch then queries the
 * driver until the process ends. */
static struct capture {
    CUstream stream;
    const void *thread;
    CUcontext ctx;
    bool used;
    bool to_graphics;
} captures[GATE_N_CAPTURES];
static struct os_lock captures_lock;
static uint32_t n_to_graphics; /* captures to command lists */

static struct capture *capture_find(CUstream stream)
{
    const void *thread = queue_thread(stream);

    for (struct capture *c = captures; c < captures + GATE_N_CAPTURES; c++)
        if (c->used && c->stream == stream && c->thread == thread)
            return c;
    return NULL;
}

/* Called with the lock held. */
static void capture_remove(struct capture *c)
{
    c->used = false;
    if (c->to_graphics)
        atomic_add_relaxed(&n_to_graphics, -1u);
    atomic_add_relaxed(&gate_n_captures, -1u);
}

bool capture_is_running(CUstream stream)
{
    struct capture *c;
    bool to_graphics;

    if (queue_capturing(stream))
        return true;
    if (likely(!atomic_load_relaxed(&n_to_graphics)))
        return false;
    os_lock(&captures_lock);
    c = capture_find(stream);
    to_graphics = c && c->to_graphics;
    os_unlock(&captures_lock);
    return to_graphics;
}

static cold void capture_log(void)
{
    static uint32_t logged;

    if (!atomic_exchange_acq_rel(&logged, 1))
        control_log("cuStreamBeginCaptureToCig was refused: 64 streams of this process are "
                    "already capturing, and the library cannot track more");
}

/*
 * Notes a capture. Called before another thread can launch into the stream.
 *
 * If the table is full, a capture to a graph is still recognised by the driver's answers. A capture
 * to a command list would not be recognised, and the library's waits and events would get into the
 * command list, so such a capture must not begin.
 */
enum gate_capture gate_capture_begin(CUstream stream, bool to_graphics)
{
    struct capture *free_place = NULL;
    CUcontext ctx = NULL;
    bool known, refused;

    driver->cuCtxGetCurrent(&ctx);
    os_lock(&captures_lock);
    known = capture_find(stream);
    for (struct capture *c = captures; c < captures + GATE_N_CAPTURES && !free_place; c++)
        if (!c->used)
            free_place = c;
    refused = to_graphics && !known && !free_place;
    if (!known && free_place) {
        *free_place = (struct capture){stream, queue_thread(stream), ctx, true, to_graphics};
        if (to_graphics)
            atomic_add_seq_cst(&n_to_graphics, 1);
    }
    if (!known && !refused)
        atomic_add_seq_cst(&gate_n_captures, 1);
    os_unlock(&captures_lock);
    if (unlikely(refused)) {
        capture_log();
        return GATE_CAPTURE_REFUSED;
    }
    return known ? GATE_CAPTURE_KNOWN : GATE_CAPTURE_NEW;
}

void gate_capture_end(CUstream stream)
{
    struct capture *c;

    os_lock(&captures_lock);
    c = capture_find(stream);
    if (c)
        capture_remove(c);
    os_unlock(&captures_lock);
}

void capture_end_context(CUcontext ctx)
{
    os_lock(&captures_lock);
    for (struct capture *c = captures; c < captures + GATE_N_CAPTURES; c++)
        if (c->used && c->ctx == ctx)
            capture_remove(c);
    os_unlock(&captures_lock);
}

void captures_after_fork(void)
{
    memset(captures, 0, sizeof captures);
    captures_lock.word = 0;
    n_to_graphics = 0;
    gate_n_captures = 0;
    gate_n_joining = 0;
    gate_visiting = false;
}
