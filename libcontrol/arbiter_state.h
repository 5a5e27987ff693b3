/* The arbiter's state and internal functions, shared by its source files. Files outside the arbiter
 * include arbiter.h. */
#pragma once

#include "arbiter.h"

#define MAX_LAG_NS 1000000000.0 /* longest time that a container may be owed, in ns */
#define SLICE_NS   500000.0     /* minimum length of a grant cut short for a returning container */
#define SEVERAL    2            /* assumed number of active processes where it is not known */

struct tenant {
    bool used;
    bool want;
    bool absent;      /* it requests the GPU but does not use its grants: see pass_over() */
    uint64_t sign_ns; /* when it last showed that it was running */
    double guarantee; /* of the GPU, 0..1 */
    double limit;
    double owed_at;   /* theoretical arrival time at the guaranteed rate */
    double capped_at; /* the same at the cap */
    double lent_tag;  /* start tag of the fair order in which idle time is lent */
    uint64_t asleep;  /* since when it has neither wanted nor held the GPU; else ARBITER_NEVER */
    double busy_seen, busy_told; /* GPU time by the GPU's clock: accounted for, and reported */
    /* Grants with an estimated use, which the GPU's clock will correct. */
    double unsettled_charge, unsettled_held;
    double unsettled_beside; /* by how much its use may exceed the time for which it held the GPU */
    unsigned n_unsettled;
    bool was_long;            /* one of them ended more than `overdue_ns` after its deadline */
    unsigned n_impatient;     /* remaining grants whose work is not waited for */
    double allowance;         /* held time that its reports may still declare unused */
    uint64_t allowed;         /* time up to which the allowance has been credited */
    double overhead;          /* estimate of what a grant loses to the hand-over */
    double length;            /* average time for which it holds a grant that is not open */
    double nap;               /* average sleep between two pieces of work; 0: its sleeps are long */
    bool overruns;            /* according to its ledger, work of a past grant is still running */
    uint64_t overran;         /* when the last overrun ended */
    uint64_t overran_grants;  /* number of its grants when the last overrun began */
    struct arbiter_turn turn; /* of a container with several GPUs */
    struct arbiter_stats stats;
};

struct arbiter {
    struct arbiter_config config;
    struct tenant tenants[ARBITER_N_TENANTS];
    int32_t holder;
    int32_t last_holder;
    uint32_t epoch;
    uint32_t newest; /* number of the latest grant, including those of an earlier arbiter */
    uint64_t start, deadline;
    bool beside;       /* the previous holder's work may run alongside this grant's first work */
    uint64_t alive;    /* when the holder last reported that its work was still running */
    uint64_t gpu_free; /* when the previous holder's work ended */
    uint64_t accrued;  /* time up to which work that outlasts its grant has been charged */
    double shared;     /* part of this grant that was charged to such work of others */
    bool lent;         /* this grant is beyond the guarantee */
    bool contended;    /* another container waited during this grant */
    bool open;
    double late;      /* time for which work that outlasts its grant kept the others waiting */
    double patience;  /* longest wait for work that outlasts its grant, for all containers */
    uint64_t patient; /* time up to which `patience` has been increased */
    int32_t standby;
    double lent_clock;
    int32_t n;      /* highest index of a tenant so far, plus one */
    uint64_t align; /* when a container with several GPUs gets its turn; ARBITER_NEVER: none */
    uint64_t kept;  /* time until which the GPU goes only to a container in its turn */
    double scale;   /* factor by which reported use is charged; see arbiter_settle() */
};

static inline double max(double a, double b)
{
    return a > b ? a : b;
}

static inline double clamp(double value, double low, double high)
{
    return value < low ? low : value > high ? high : value;
}

/* An elastic container may have idle time beyond its guarantee. */
static inline bool is_elastic(const struct tenant *t)
{
    return t->limit > t->guarantee;
}

static inline bool wants(const struct tenant *t)
{
    return t->used && t->want && !t->absent;
}

/* Returns when the tenant may have GPU time, as its own or lent. */
static inline double eligible_at(const struct tenant *t)
{
    if (is_elastic(t) && t->capped_at < t->owed_at)
        return t->capped_at;
    return t->owed_at;
}

/* Whether the container is expected to want the GPU again shortly. */
static inline bool is_napping(const struct tenant *t, uint64_t now)
{
    return !t->want && t->nap > 0 && t->asleep != ARBITER_NEVER &&
           (double)now < (double)t->asleep + 2 * t->nap;
}

/* Returns the time by which a tenant that is owed GPU time should have had a grant. If its grants
 * last longer than a quantum, because its work does, it gets them less often, and each is due
 * later: otherwise several such containers would go one after the other while another one waits. */
static inline double due_at(const struct arbiter *arbiter, const struct tenant *t)
{
    return t->owed_at + max((double)arbiter->config.quantum_ns, t->length) / t->guarantee;
}

/* arbiter_choice.c */
int32_t arbiter_choose(const struct arbiter *arbiter, double now, int32_t except, bool *lentp);
bool arbiter_may_continue(const struct arbiter *arbiter, double at);
double arbiter_demand(const struct arbiter *arbiter, const struct tenant *t, uint64_t now);
double arbiter_grant_length(const struct arbiter *arbiter, const struct tenant *t, uint64_t now);
bool arbiter_is_behind(const struct arbiter *arbiter, const struct tenant *t, double at);
uint64_t arbiter_expected_back(const struct arbiter *arbiter, uint64_t now);
uint64_t arbiter_next_eligible(const struct arbiter *arbiter, uint64_t now, int32_t except);
bool arbiter_has_barred(const struct arbiter *arbiter, double now);

/* arbiter_charge.c */
void arbiter_accrue(struct arbiter *arbiter, uint64_t now);
void arbiter_settle(struct arbiter *arbiter, struct tenant *t, bool lent, uint64_t now);
void arbiter_end_grant(struct arbiter *arbiter, uint64_t end, uint32_t n_active);
void arbiter_close_open(struct arbiter *arbiter, uint64_t now, uint64_t end);
void arbiter_forgive(struct arbiter *arbiter, uint64_t now, const struct tenant *except);
