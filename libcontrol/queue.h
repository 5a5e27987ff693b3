/*
 * A model of the work that this process has queued on a GPU, which predicts when it will end and is
 * corrected by measurements.
 *
 * Each launch adds its predicted duration. Markers, events recorded behind every ~0.25 ms of work,
 * show when the work before them ended and how long it took; they correct the model and teach it
 * durations. Work belongs to an era: that of the grant in which it runs, or the next one while it
 * is held.
 *
 * The gate's lock guards everything here, and nothing here calls the driver. An operation that
 * needs a driver call has two halves: one returns the call to make, the other takes its result.
 */
#pragma once

#include "control.h"
#include "estimate.h"

#define QUEUE_N_STREAMS 64
#define QUEUE_N_MARKERS 256
#define QUEUE_N_EVENTS  512
#define QUEUE_NO_EVENT  (-1)
#define QUEUE_STALL_NS  (200 * NS_PER_MS)
#define QUEUE_DOUBTS    4 /* late intervals after which queue_asks() returns true */

struct queue_event {
    CUevent event;
    CUcontext ctx;
    uint32_t serial; /* identifies this use of the entry; 0: the context has ended */
    unsigned n_refs;
};

/* The work launched in a stream since its last marker is its open interval. */
struct queue_stream {
    bool used;
    bool unmarked; /* work was launched after the last marker */
    bool unknown;  /* the duration of some of its work is not known yet */
    bool gap;      /* the open interval may contain idle time, or others' work */
    CUcontext ctx;
    CUstream stream;
    const void *thread; /* identity of the per-thread stream's thread; NULL: any other stream */
    uint32_t serial;    /* identifies this use of the entry */
    uint64_t touched;   /* value of `touches` when it was last looked up */
    int last;           /* event of the last marker, or QUEUE_NO_EVENT */
    uint32_t last_era;
    uint32_t era;  /* of the open interval */
    uint32_t held; /* the last ticket that the stream waits for */
    uint64_t pending_ns;
    uint32_t n_passed;  /* launches under the open grant since one was measured on its own */
    uint32_t sample_at; /* value of `n_passed` after which a launch is measured */
    uint32_t draw;
    struct estimate_interval interval;
};

struct queue_marker {
    int event;
    int before; /* event that began the interval; QUEUE_NO_EVENT: it cannot be measured */
    uint32_t era;
    uint32_t serial;    /* identifies the marker */
    bool unknown;       /* the duration of some of its work was not known */
    bool loose;         /* the interval may contain idle time, or others' work */
    bool shared;        /* others' work ran alongside its end */
    uint64_t submitted; /* total of predicted work up to here, in ns */
    uint64_t expected;  /* when the model expects it to be reached */
    uint64_t look_at;   /* time before which it is not queried */
    struct estimate_interval interval;
};

struct queue {
    uint32_t era;          /* of the work that is running; held work belongs to the next era */
    uint32_t serials;      /* streams, markers and uses of events so far */
    uint64_t touches;      /* look-ups of streams so far */
    uint64_t busy_until;   /* when the GPU will have finished what is not held */
    uint64_t submitted;    /* total of predicted work that is not held */
    uint64_t ahead_ns;     /* predicted work that is held */
    int reference;         /* event of the last marker that was reached: times are relative to it */
    double reference_ns;   /* its time; the origin is arbitrary */
    double covered_until;  /* GPU time up to here is in busy_ns */
    uint32_t given_up;     /* markers up to this serial were given up and are not learned from */
    uint32_t given_up_era; /* last era of work that was given up */
    uint64_t given_up_until;
    uint64_t progress_ns; /* when a marker was last reached, or the first was put into the queue */
    uint64_t begins_ns;   /* until then the GPU also runs work that another container left */
    uint64_t beside_ns;   /* and possibly for this much longer */
    uint64_t shared_ns;   /* maximum of such time in the first interval of `shared_era` */
    uint32_t shared_era;
    uint32_t n_doubts;  /* late intervals alongside others' work since queue_asks() was last true */
    uint32_t asked_era; /* others wait for the end of this era's work */
    float rise;         /* one of the factors ESTIMATE_RISE, ..._WAITS and ..._BESIDE */
    unsigned head, n_markers;
    struct queue_marker markers[QUEUE_N_MARKERS];
    struct queue_stream streams[QUEUE_N_STREAMS];
    struct queue_event events[QUEUE_N_EVENTS];
};

/* An event that is to be recorded in a stream: made by queue_mark_begin(), finished by
 * queue_mark_end(). */
struct queue_mark {
    struct queue_stream *stream;
    uint32_t serial; /* of the stream */
    int event;       /* index in events[] */
    uint32_t taken;  /* identifies the use of that entry */
    CUevent handle;  /* NULL: it has to be created first, in `ctx` */
    CUcontext ctx;
    CUstream handle_of_stream;
    struct queue_marker marker;
};

/* The oldest marker, to be queried: made by queue_look_begin(), finished by queue_look_end(). */
struct queue_look {
    uint32_t serial;
    CUevent event, before, reference; /* NULL: there is none */
    bool reached;
    bool timed;            /* `since_reference` is valid */
    bool measured;         /* `length` is valid */
    float since_reference; /* ms */
    float length;          /* ms */
};

void queue_init(struct queue *q);
const void *queue_thread(CUstream stream);
struct queue_stream *queue_find(struct queue *q, CUcontext ctx, CUstream stream);
bool queue_wants_mark_before(const struct queue *q, const struct queue_stream *s, uint32_t era,
                             bool learn);
void queue_add(struct queue *q, struct queue_stream *s, const struct estimate *e, uint32_t era,
               uint32_t kind, uint32_t count, uint64_t now);
bool queue_wants_mark_behind(const struct queue_stream *s, uint64_t marker_ns);
unsigned queue_unknown(const struct queue *q, uint64_t now);
bool queue_mark_begin(struct queue *q, struct queue_stream *s, uint32_t era, uint64_t now,
                      struct queue_mark *mark);
void queue_mark_end(struct queue *q, const struct queue_mark *mark, bool recorded,
                    struct ledger_device *ledger);
struct queue_stream *queue_next_tail(struct queue *q, CUcontext ctx, unsigned *at);
bool queue_look_begin(const struct queue *q, uint64_t now, bool force, struct queue_look *look);
bool queue_look_end(struct queue *q, struct estimate *e, const struct queue_look *look,
                    struct ledger_device *ledger, uint64_t now);
uint64_t queue_late(const struct queue *q, const struct estimate *e, uint64_t now,
                    uint64_t *lengthp, bool *knownp);
void queue_give_up(struct queue *q, uint64_t until);
bool queue_overruns(const struct queue *q);
bool queue_asks(struct queue *q);
void queue_share(struct queue *q);
void queue_open(struct queue *q, uint64_t now);
void queue_forget_stream(struct queue *q, CUstream stream);
void queue_forget_context(struct queue *q, CUcontext ctx);
bool queue_capturing(CUstream stream);

/*
 * Whether no work has ended for a long time, and for longer than predicted. The reason may be a
 * kernel that has never been measured. Or streams may be waiting for the application's next step (a
 * host function, cuStreamWaitValue32, a kernel that spins until another is launched), and would
 * wait for ever if the next launch waited for them.
 */
static inline bool queue_stalled(const struct queue *q, uint64_t now)
{
    return q->n_markers && unlikely(now > q->progress_ns + QUEUE_STALL_NS) &&
           now > q->markers[q->head].expected + QUEUE_STALL_NS;
}

/* Whether there is an outstanding marker that is not waiting for the next grant. */
static inline bool queue_runs(const struct queue *q)
{
    return q->n_markers && q->markers[q->head].era != q->era + 1;
}

/* Returns how much of the work that is not held is left at `now`, in ns; 0 if the queue is
 * stalled. */
static inline uint64_t queue_left(const struct queue *q, uint64_t now)
{
    return q->busy_until > now && likely(!queue_stalled(q, now)) ? q->busy_until - now : 0;
}
