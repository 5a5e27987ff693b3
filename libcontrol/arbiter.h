/*
 * The arbiter: which container may start work on a GPU, and until when.
 *
 * It is pure: it has no clock, no thread and no memory of others. The caller tells it the time and
 * what happened, `arbiter_step` says what holds from now on and when to call again. So a test runs
 * hours of it on a virtual clock in milliseconds; `runner.c` runs it on the real one.
 *
 * Times are nanoseconds, shares are parts per million of the GPU.
 *
 * Each container has a theoretical arrival time (the GCRA of ATM networks): the time at which all
 * that it has used is paid for at its guaranteed rate. It is owed GPU time while that time lies in
 * the past. Among those that are owed, the earliest deadline goes first (theoretical arrival plus
 * the period of one quantum at its rate). When nobody is owed, idle time is lent in start-time fair
 * order to those below their cap; lent time is not charged against the guarantee. A container that
 * was kept waiting keeps what it is owed, one that slept does not.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define ARBITER_N_TENANTS 256
#define ARBITER_NOBODY    (-1)
#define ARBITER_NEVER     UINT64_MAX
#define ARBITER_WHOLE     1000000u /* share of a whole GPU */

struct arbiter_config {
    uint64_t quantum_ns;  /* length of one grant */
    uint64_t most_ns;     /* the same, where what hand-overs cost cannot come off idle time */
    uint64_t overdue_ns;  /* a grant is taken when it, and the holder's last sign, is older */
    uint64_t longest_ns;  /* and when it is so long overdue, whatever the holder says */
    uint64_t lead_ns;     /* the next holder is decided so long before the end of a grant */
    uint64_t switch_ns;   /* what the GPU needs to change contexts */
    uint64_t overhead_ns; /* of a grant, what a report may call not used, at most */
    uint64_t beside_ns;   /* of a grant, what its work may have run beside others', at most */
};

/* What holds now. */
struct arbiter_view {
    int32_t holder;       /* ARBITER_NOBODY */
    uint32_t epoch;       /* number of the grant */
    uint64_t start_ns;    /* when it began */
    uint64_t deadline_ns; /* ARBITER_NEVER: open */
    uint32_t contended;   /* somebody else could use the GPU */
    uint32_t beside;      /* another's last work may run beside the first of this grant */
    int32_t standby;      /* who is next, if that is decided */
    uint64_t standby_ns;  /* let it be awake until then */
    uint64_t wake_ns;     /* step again by then */
};

struct arbiter_stats {
    uint64_t grants;
    uint64_t charged_ns;  /* GPU time charged */
    uint64_t lent_ns;     /* of that, beyond the guarantee */
    uint64_t held_ns;     /* of grants that ended */
    uint64_t overdue;     /* grants that had to be taken */
    uint64_t handover_ns; /* held, but not charged: of grants whose charge is settled */
    uint64_t since_ns;    /* when the grant that it holds began; 0: it holds none */
    uint64_t open;        /* 1: that one has no end, and all of it will be charged */
};

/*
 * What a container with several GPUs may do on one of them (gangs.h): with its turn it goes first
 * and until the turn ends, without it waits.
 */
enum arbiter_role {
    ARBITER_ALONE, /* as if it had this GPU only */
    ARBITER_BARRED,
    ARBITER_CALLED,
};

struct arbiter_turn {
    enum arbiter_role role;
    bool unasked;      /* granted before it wants the GPU: it will in a moment */
    bool contended;    /* somebody waits for the turn's end, here or on another GPU */
    uint64_t until_ns; /* end of the turn; ARBITER_NEVER: open */
};

/* How a container with several GPUs stands on one of them. */
struct arbiter_standing {
    bool want;
    bool holds;
    bool lent;         /* what it could have now would be lent */
    bool rivals;       /* somebody else waits here who may have the GPU by the end of this grant */
    bool others;       /* somebody else waits here, or will */
    bool whole;        /* its cap is the whole GPU */
    bool may_continue; /* after its grant, as far as its own quota goes */
    bool stuck;        /* another holds the GPU past the end of his grant */
    bool free;         /* nobody holds the GPU */
    double due;
    double tag;           /* its place in the order in which idle time is lent */
    double busy;          /* GPU time that it says it has used, ever */
    uint64_t ready_ns;    /* when it may have GPU time */
    uint64_t first_ns;    /* when nobody waits, or holds the GPU, whose turn is before its own */
    uint64_t deadline_ns; /* of who holds the GPU; ARBITER_NEVER: open */
};

struct arbiter;

#define ARBITER_EXPORT __attribute__((visibility("default")))

ARBITER_EXPORT struct arbiter *arbiter_new(const struct arbiter_config *config);
ARBITER_EXPORT struct arbiter *arbiter_free(struct arbiter *arbiter);
ARBITER_EXPORT int32_t arbiter_add(struct arbiter *arbiter, uint32_t guarantee, uint32_t limit,
                                   uint64_t now);
ARBITER_EXPORT void arbiter_begin(struct arbiter *arbiter, uint32_t epoch);
ARBITER_EXPORT void arbiter_set(struct arbiter *arbiter, int32_t tenant, uint32_t guarantee,
                                uint32_t limit);
ARBITER_EXPORT void arbiter_remove(struct arbiter *arbiter, int32_t tenant, uint64_t now);
ARBITER_EXPORT void arbiter_want(struct arbiter *arbiter, int32_t tenant, bool want, uint64_t now);
/* The holder gave the grant back; so many of its processes had worked in it, 0: it was not used. */
ARBITER_EXPORT void arbiter_released(struct arbiter *arbiter, uint64_t release_ns,
                                     uint64_t residual_ns, uint32_t n_active);
ARBITER_EXPORT void arbiter_alive(struct arbiter *arbiter, uint64_t alive_ns);
ARBITER_EXPORT void arbiter_sign(struct arbiter *arbiter, int32_t tenant, uint64_t sign_ns);
ARBITER_EXPORT void arbiter_busy(struct arbiter *arbiter, int32_t tenant, uint64_t busy_ns);
ARBITER_EXPORT void arbiter_step(struct arbiter *arbiter, uint64_t now, struct arbiter_view *viewp);
void arbiter_look(const struct arbiter *arbiter, int32_t tenant, uint64_t now,
                  struct arbiter_standing *standingp);
void arbiter_turn(struct arbiter *arbiter, int32_t tenant, const struct arbiter_turn *turn,
                  uint64_t now);
bool arbiter_in_gang(const struct arbiter *arbiter, int32_t tenant);
void arbiter_align(struct arbiter *arbiter, uint64_t at);
void arbiter_keep(struct arbiter *arbiter, uint64_t until);
void arbiter_take(struct arbiter *arbiter, uint64_t now);
ARBITER_EXPORT void arbiter_stats(const struct arbiter *arbiter, int32_t tenant,
                                  struct arbiter_stats *statsp);
