/*
 * The arbiter decides which container may start work on a GPU, and until when.
 *
 * It is pure: it has no clock, no threads and no shared memory. The caller passes the time and the
 * events; arbiter_step() returns the decision and the time of the next call. A test can therefore
 * simulate hours on a virtual clock in milliseconds, and `runner.c` uses the real clock.
 *
 * Times are in nanoseconds, and shares in parts per million of the GPU.
 *
 * Each container has a theoretical arrival time (the GCRA of ATM networks): the time at which
 * everything it has used is paid for at its guaranteed rate. The container is owed GPU time while
 * that time lies in the past. Among the containers that are owed time, the earliest deadline goes
 * first (theoretical arrival plus the period of one quantum at its rate). When none is owed time,
 * idle time is lent in start-time fair order to those below their cap; lent time is not charged
 * against the guarantee. A container is owed the time for which it was kept waiting, but not the
 * time for which it slept.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define ARBITER_N_TENANTS 256
#define ARBITER_NONE      (-1)
#define ARBITER_NEVER     UINT64_MAX
#define ARBITER_WHOLE     1000000u /* share of a whole GPU */

struct arbiter_config {
    uint64_t quantum_ns; /* length of one grant */
    uint64_t most_ns;    /* longest grant, where idle time does not pay for the hand-overs */
    /* An overdue grant is taken away once the holder has shown no sign of life for half of
     * `overdue_ns`, once it has reported no running work for `overdue_ns`, or once the grant has
     * been overdue for `longest_ns`, whatever the holder reports. */
    uint64_t overdue_ns;
    uint64_t longest_ns;
    uint64_t lead_ns;     /* the next holder is decided this long before the end of a grant */
    uint64_t switch_ns;   /* time that the GPU needs to change contexts */
    uint64_t overhead_ns; /* longest part of a grant that a report may declare unused */
    uint64_t beside_ns;   /* longest part of its work that may have run alongside others' */
    /* The container that is expected to hold the GPU next is named at once, and has this long from
     * the expected beginning of its grant to prepare work; 0: none is named before the decision. */
    uint64_t prepare_ns;
};

/* The arbiter's decision as of the last step. */
struct arbiter_view {
    int32_t holder;       /* ARBITER_NONE: none */
    uint32_t epoch;       /* number of the grant */
    uint64_t start_ns;    /* when it began */
    uint64_t deadline_ns; /* ARBITER_NEVER: open */
    uint32_t contended;   /* another container could use the GPU */
    uint32_t beside;      /* the previous holder's last work may run alongside this grant's */
    int32_t standby;      /* the next holder */
    uint32_t expected;    /* `standby` is not decided: it may prepare work, but need not be awake */
    uint64_t standby_ns;  /* until then it may prepare work or, if decided, should be awake */
    uint64_t wake_ns;     /* step again by then */
};

struct arbiter_stats {
    uint64_t grants;
    uint64_t charged_ns;  /* GPU time charged */
    uint64_t lent_ns;     /* of that, beyond the guarantee */
    uint64_t held_ns;     /* time held, in grants that have ended */
    uint64_t overdue;     /* grants that were taken away */
    uint64_t handover_ns; /* time held but not charged, in grants with a settled charge */
    uint64_t since_ns;    /* when the grant that it holds began; 0: it holds none */
    uint64_t open;        /* 1: that grant has no end, and all of it will be charged */
};

/*
 * What a container with several GPUs may do on one of them (gangs.h). In its turn it goes first,
 * until the turn ends; outside of it, it waits.
 */
enum arbiter_role {
    ARBITER_ALONE, /* it is treated as if it had only this GPU */
    ARBITER_BARRED,
    ARBITER_CALLED,
};

struct arbiter_turn {
    enum arbiter_role role;
    bool unasked;      /* it gets the grant before it requests the GPU, because it is expected to */
    bool contended;    /* another container is waiting for the turn to end, on any of its GPUs */
    uint64_t until_ns; /* end of the turn; ARBITER_NEVER: open */
};

/* The state of a container with several GPUs on one of them. */
struct arbiter_standing {
    bool want;
    bool holds;
    bool lent;         /* GPU time granted now would be lent */
    bool rivals;       /* another container is waiting, and is eligible by the end of this grant */
    bool others;       /* another container is waiting, eligible or not */
    bool whole;        /* its cap is the whole GPU */
    bool may_continue; /* its own quota allows it to continue after its grant */
    bool stuck;        /* another container holds the GPU past the end of its grant */
    bool free;         /* no container holds the GPU */
    double due;
    double tag;           /* its place in the order in which idle time is lent */
    double busy;          /* GPU time that it has reported as used, in total */
    uint64_t ready_ns;    /* when it may have GPU time */
    uint64_t first_ns;    /* from then on it goes first; ARBITER_NEVER: another goes first */
    uint64_t deadline_ns; /* of the holder's grant; ARBITER_NEVER: open */
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
/* The holder gave the grant back. `n_active`: number of its processes that did work during the
 * grant; 0: the grant was not used. */
ARBITER_EXPORT void arbiter_released(struct arbiter *arbiter, uint64_t release_ns,
                                     uint64_t residual_ns, uint32_t n_active);
ARBITER_EXPORT void arbiter_alive(struct arbiter *arbiter, uint64_t alive_ns);
ARBITER_EXPORT void arbiter_sign(struct arbiter *arbiter, int32_t tenant, uint64_t sign_ns);
ARBITER_EXPORT void arbiter_overrun(struct arbiter *arbiter, int32_t tenant, bool overruns,
                                    uint64_t now);
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
void arbiter_stop(struct arbiter *arbiter, uint64_t now);
ARBITER_EXPORT void arbiter_stats(const struct arbiter *arbiter, int32_t tenant,
                                  struct arbiter_stats *statsp);
