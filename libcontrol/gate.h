/*
 * The gate's state for one GPU, shared by the launches (gate.c, pass.c) and the helper thread
 * (helper.c).
 *
 * The lock guards all of it and is never held across a call into the driver: such a call may block
 * until the helper lets held work run, and may call back into the application (a profiler's
 * subscriber), which may launch.
 */
#pragma once

#include "queue.h"

#define GATE_N_HOLDS   8
#define GATE_N_HELD    512 /* the driver's queue has room for twice as many: no call blocks in it */
#define GATE_N_UNKNOWN 4   /* launches under way of which it is not known how long they take */
#define GATE_CROSSED   64  /* eras without a dependency between streams until work is held again */
#define GATE_PAUSE_NS                                                                              \
    (30 * NS_PER_US) /* an idle time that is shorter is none: launches follow each other */
#define GATE_LOST_NS  (1000 * NS_PER_MS) /* a heartbeat older than this: the governor is away */
#define GATE_LOCAL_NS (4 * NS_PER_MS)    /* grants that a container gives itself meanwhile */

/* A word of pinned memory that held streams of a context wait for. */
struct gate_hold {
    CUcontext ctx;
    uint32_t *word;
};

struct gate {
    struct prim_lock lock;
    bool started;   /* the helper runs */
    bool helping;   /* it is not asleep */
    bool active;    /* work was started in this grant */
    bool released;  /* the grant was given back */
    bool drained;   /* the tails were marked at its end */
    bool passing;   /* launches go by without being followed: the grant is open */
    bool blind;     /* and their ends are not marked yet */
    bool preparing; /* a thread is making a hold word */
    bool retiring;  /* a thread is asking the driver about the oldest marker */
    uint32_t epoch;
    struct pass *metered;   /* launches go by on credit; what they are is not in the queue yet */
    unsigned n_calls;       /* threads in a driver call that uses events of the queue */
    unsigned n_marking;     /* threads that mark streams which others use */
    unsigned n_entering[2]; /* threads with a launch in an era, even or odd, that is not in the
                               queue yet */
    uint64_t entering_ns;   /* when the last of them came */
    uint64_t last_launch;
    uint64_t granted_ns;     /* how long grants last of late; 0: none was given back yet */
    uint64_t pause_ns;       /* how long the program leaves the GPU idle when it does, on average */
    uint64_t given_up_ns;    /* when work was left that did not end; 0: it ended, or is long */
    uint32_t given_up;       /* the marker behind it; the last one of these that there was */
    unsigned n_spins;        /* grants in which what does not end is not waited for */
    unsigned n_long;         /* grants in which it is */
    unsigned n_tries;        /* how often that was so */
    uint32_t tried;          /* the marker that is waited for all the same, to see; 0: none */
    uint64_t tried_late;     /* how late that one was at the last look */
    uint64_t local_deadline; /* while the governor is away */
    uint64_t local_next;
    bool full;                       /* what comes next does not fit into the grant */
    bool holding;                    /* streams wait for `ticket` */
    unsigned n_held;                 /* launches that do */
    bool crossed;                    /* streams depended on each other: see gate_cross() */
    uint32_t crossed_era;            /* when they did last */
    const struct queue_stream *only; /* the stream of the last launch */
    bool no_holds;                   /* the driver cannot hold streams */
    uint32_t ticket;                 /* what the next opening writes */
    uint32_t turn;                   /* futex word: moves when held work was let run */
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

/* Passes (pass.c), for one who holds the gate's lock. */

enum pass_answer {
    PASS_GO,     /* it is one of the stream's launches like all others, of the kind that is told */
    PASS_SAMPLE, /* it is measured by itself */
    PASS_FULL,   /* wait for the queue */
};

/* A launch under an open grant that came without a pass; mostly its stream gets one. */
enum pass_answer pass_open(struct gate *g, struct queue_stream **sp,
                           const struct grant_device *grant, struct ledger_device *ledger,
                           uint64_t now, uint32_t *kindp);
/* Gives the stream of the last launch a pass, if more may go before the next marker. */
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

/* Who takes the lock finds in the queue all that was launched. */
static inline void gate_lock(struct gate *g)
{
    prim_lock(&g->lock);
    gate_collect(g);
}

/* Around calls into the driver that we add: no capture of the application may be broken by them,
 * what they call back is not ours to govern, errno stays as it was, and no thread is cancelled in
 * them, because the gate's books say that it is there. */
struct gate_visit {
    CUstreamCaptureMode mode;
    int cancel;
    int saved;
};

void gate_visit_begin(struct gate_visit *visit);
void gate_visit_end(struct gate_visit *visit);
