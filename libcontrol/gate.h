/*
 * The gate's state for one GPU, shared by the launches (gate.c, pass.c and the files that
 * gate_parts.h names) and the helper thread (helper.c).
 *
 * The lock guards all of it and is never held across a call into the driver: such a call may block
 * until the helper lets held work run, or call back into the application (a profiler's subscriber),
 * which may launch.
 */
#pragma once

#include "queue.h"

#include <pthread.h>

#define GATE_N_HOLDS 8
/* Maximum number of held launches. The driver's queue has room for twice as many, so no call blocks
 * in it. */
#define GATE_N_HELD    512
#define GATE_N_UNKNOWN 4  /* maximum number of launches of unknown duration under way */
#define GATE_CROSSED   64 /* eras without a dependency between streams until work is held again */
#define GATE_PAUSE_NS                                                                              \
    (30 * NS_PER_US) /* a shorter idle time is not a pause: launches follow each other */
#define GATE_LOST_NS  (1000 * NS_PER_MS) /* with an older heartbeat, the governor counts as lost */
#define GATE_LOCAL_NS (4 * NS_PER_MS)    /* length of the grants that a container gives itself */

/* A word of pinned memory on which the held streams of a context wait. */
struct gate_hold {
    CUcontext ctx;
    uint32_t *word;
};

struct gate {
    struct os_lock lock;
    bool started;   /* the helper was started */
    bool helping;   /* the helper is awake */
    bool active;    /* work was started in this grant */
    bool released;  /* the grant was given back */
    bool drained;   /* the ends of the streams' work were marked when the grant ended */
    bool passing;   /* the grant is open: launches use passes and are not tracked */
    bool blind;     /* such launches have been made, and their ends have not been marked yet */
    bool preparing; /* a thread is making a hold word */
    bool retiring;  /* a thread is querying the oldest marker */
    uint32_t epoch;
    struct pass *metered; /* launches use it on credit, and are not in the queue yet; or NULL */
    unsigned n_calls;     /* threads in a driver call that uses events of the queue */
    unsigned n_marking;   /* threads that are marking streams which other threads use */
    /* Threads with a launch that is not in the queue yet, by the parity of the launch's era. */
    unsigned n_entering[2];
    uint64_t entering_ns; /* when the last of these threads arrived */
    uint64_t last_launch;
    uint64_t granted_ns; /* average planned length of grants; 0: none has been given back yet */
    uint64_t pause_ns;   /* average of the pauses in which the program leaves the GPU idle */
    /* When the GPU went to others although work had not ended; 0: the work has ended, or was found
     * to be long. */
    uint64_t given_up_ns;
    uint32_t given_up; /* marker behind that work; kept when `given_up_ns` is cleared */
    unsigned n_spins;  /* grants left in which late work is not waited for */
    unsigned n_long;   /* grants left in which late work is waited for */
    /* How many times late work has been given up or tried since it was last found to be long. */
    unsigned n_tries;
    uint32_t tried;          /* marker that is waited for as a trial; 0: none */
    uint64_t tried_late;     /* how late that marker was at the last check, in ns */
    uint64_t local_deadline; /* end of the container's own grant, while the governor is away */
    uint64_t local_next;
    bool full;                       /* the next launch does not fit into the grant */
    bool holding;                    /* streams are waiting for `ticket` */
    unsigned n_held;                 /* launches that are held */
    bool crossed;                    /* streams depended on each other: see gate_cross() */
    uint32_t crossed_era;            /* last era in which they did */
    const struct queue_stream *only; /* stream of the last launch */
    bool no_holds;                   /* no stream can be held */
    uint32_t ticket;                 /* value that the next opening writes to the hold words */
    uint32_t turn;                   /* futex word: incremented when held work may run */
    struct gate_hold holds[GATE_N_HOLDS];
    struct queue queue;
    struct estimate estimate;
};

extern struct gate gate_devices[LAYOUT_N_DEVICES];

void gate_adopt(struct gate *g, const struct grant_device *grant);
bool gate_open(struct gate *g, const struct grant_device *grant, struct ledger_device *ledger,
               uint64_t now);
void gate_retire(struct gate *g, struct ledger_device *ledger, uint64_t now, bool force);
void gate_mark_tails(struct gate *g, CUcontext ctx, struct ledger_device *ledger);
bool gate_unmarked(const struct gate *g);
void gate_end_holds(struct gate *g, struct ledger_device *ledger);
uint64_t gate_spin_until(const struct grant_device *grant, uint64_t now);
void helper_start(struct gate *g, unsigned device);

/* Starts a thread of the library. Returns false if that is impossible. */
bool helper_thread(void *(*run)(void *), void *argument);

/* Passes (pass.c). The caller holds the gate's lock. */

enum pass_answer {
    PASS_GO,     /* an ordinary launch of the stream; it counts as the kind that is returned */
    PASS_SAMPLE, /* it is measured on its own */
    PASS_FULL,   /* wait for the queue */
};

/* Decides on a launch in a stream without a pass, under an open grant. Usually the stream gets a
 * pass. */
enum pass_answer pass_open(struct gate *g, struct queue_stream **sp,
                           const struct grant_device *grant, struct ledger_device *ledger,
                           uint64_t now, uint32_t *kindp);
/* Gives the stream of the last launch a metered pass, if more launches may precede the next
 * marker. */
void pass_meter(struct gate *g, const struct queue_stream *s, const struct grant_device *grant,
                struct ledger_device *ledger, uint64_t deadline, uint64_t now);
void pass_collect(struct gate *g);
void pass_stop(struct gate *g, const struct grant_device *grant);
void pass_tell_all(const struct grant_device *grant);
void pass_forget_stream(const struct grant_device *grant, CUstream stream);
void pass_after_fork(void);

static inline void gate_collect(struct gate *g)
{
    if (g->metered)
        pass_collect(g);
}

/* Takes the lock. The queue then contains all launches that a metered pass let through. */
static inline void gate_lock(struct gate *g)
{
    os_lock(&g->lock);
    gate_collect(g);
}

/* Brackets the driver calls that the library adds. They do not break the application's captures,
 * their callbacks are not governed, errno is preserved, and no thread is cancelled in them, because
 * the gate's counters include the thread. */
struct gate_visit {
    CUstreamCaptureMode mode;
    int cancel;
    int saved;
};

/* Whether this thread is in a driver call that the library added. Calls from its callbacks are let
 * through. */
extern __thread bool gate_visiting;

static inline void gate_visit_begin(struct gate_visit *visit)
{
    visit->saved = errno;
    visit->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &visit->cancel);
    gate_visiting = true;
    driver->cuThreadExchangeStreamCaptureMode(&visit->mode);
}

static inline void gate_visit_end(struct gate_visit *visit)
{
    driver->cuThreadExchangeStreamCaptureMode(&visit->mode);
    gate_visiting = false;
    pthread_setcancelstate(visit->cancel, NULL);
    errno = visit->saved;
}
