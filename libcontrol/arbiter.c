/* The arbiter's policy; see arbiter.h. */
#include "arbiter.h"

#include <stdlib.h>
#include <string.h>

#define MAX_LAG_NS       1000000000.0 /* longest time by which a container may be owed, in ns */
#define MAX_CARRY_NS     20000000.0   /* most of a late report that is carried over */
#define IMPATIENT_GRANTS 64           /* grants not waited for after a long one with little work */
#define ALLOWANCE_GRANTS 20           /* allowances that add up, for unusually long hand-overs */
#define BELIEVED    0.25 /* part of its share that a container may gain by reporting too little */
#define COMMON_NS   50000000.0  /* most that all that want the GPU may be owed alike */
#define NAP_NS      5000000.0   /* a container that sleeps for longer is not expected back */
#define SLICE_NS    500000.0    /* least length of a grant cut short for one that was just away */
#define SCALE_NS    100000000.0 /* GPU time within which the scale adapts */
#define LEAST_SCALE 0.9
#define FULL        0.985 /* demand that leaves nothing idle */
#define PATIENCE    0.5 /* by how much the time grows in which work is waited for: see taken_at() */
#define SWITCHES    5.0 /* a grant as long as this many of them is worth its own */
#define OVERRUN_NS  60000000000.0 /* GPU time owed for which an overrun is believed */
#define ACCRUE_NS   1000000000ull /* most of the time between two looks that is charged */
#define AGAIN_NS    200000000ull /* an overrun that ended begins again no sooner, without a grant */
#define SEVERAL     2            /* processes, perhaps: how many worked is not known */

struct tenant {
    bool used;
    bool want;
    bool absent;      /* it wants the GPU, and does not use what it is granted: see pass_over() */
    uint64_t sign_ns; /* when it last showed that it runs */
    double guarantee; /* of the GPU, 0..1 */
    double limit;
    double owed_at;   /* theoretical arrival time at the guaranteed rate */
    double capped_at; /* the same at the cap */
    double lent_tag;  /* start tag of the fair order in which idle time is lent */
    uint64_t asleep;  /* since when it neither wants nor holds the GPU; ARBITER_NEVER: it does */
    double busy_seen, busy_told; /* GPU time by the GPU's clock: accounted for, and reported */
    /* Grants with an estimated use, which the GPU's clock will correct. */
    double unsettled_charge, unsettled_held;
    double unsettled_beside; /* by how much its use may exceed what it held */
    unsigned n_unsettled;
    bool was_long;           /* one of them was overdue for longer than an unwatched grant may be */
    unsigned n_impatient;    /* grants left that are not waited for */
    double allowance;        /* how much of what it held its reports may still call unused */
    uint64_t allowed;        /* until when that has grown */
    double overhead;         /* estimate of what a grant loses to the hand-over */
    double length;           /* average time that it holds a grant which it has to give back */
    double nap;              /* average sleep between two pieces of work; 0: it sleeps for long */
    bool overruns;           /* work of a grant that is over still runs, as its ledger says */
    uint64_t overran;        /* when it last ended */
    uint64_t overran_grants; /* grants that the container had had when it began */
    struct arbiter_turn turn; /* of a container with several GPUs */
    struct arbiter_stats stats;
};

struct arbiter {
    struct arbiter_config config;
    struct tenant tenants[ARBITER_N_TENANTS];
    int32_t holder;
    int32_t last_holder;
    uint32_t epoch;
    uint32_t newest; /* number of the last grant of all, also of an earlier arbiter */
    uint64_t start, deadline;
    bool beside;       /* the previous holder's work may run alongside the first of this grant */
    uint64_t alive;    /* when the holder last said that its work still runs */
    uint64_t gpu_free; /* when the last holder's work ended */
    uint64_t accrued;  /* until then, work that outlasts its grant is charged */
    double shared;     /* part of this grant that was charged to such work of others */
    bool lent;         /* this grant is beyond the guarantee */
    bool contended;    /* another container waited during this grant */
    bool open;
    double late;      /* time for which work that outlasts its grant kept the others waiting */
    double patience;  /* how long work that outlasts its grant is waited for, of all containers */
    uint64_t patient; /* until then that has grown */
    int32_t standby;
    double lent_clock;
    int32_t n;      /* highest tenant ever, plus one */
    uint64_t align; /* a container with several GPUs gets its turn then; ARBITER_NEVER: none */
    uint64_t kept;  /* until then the GPU goes only to a container in its turn */
    double scale;   /* factor by which reported use is charged; see settle() */
};

struct arbiter *arbiter_new(const struct arbiter_config *config)
{
    struct arbiter *arbiter = calloc(1, sizeof *arbiter);

    if (arbiter) {
        arbiter->config = *config;
        arbiter->holder = ARBITER_NOBODY;
        arbiter->last_holder = ARBITER_NOBODY;
        arbiter->standby = ARBITER_NOBODY;
        arbiter->align = ARBITER_NEVER;
        arbiter->scale = 1;
        arbiter->patience = (double)config->longest_ns;
    }
    return arbiter;
}

struct arbiter *arbiter_free(struct arbiter *arbiter)
{
    free(arbiter);
    return NULL;
}

static double max(double a, double b)
{
    return a > b ? a : b;
}

static double clamp(double value, double low, double high)
{
    return value < low ? low : value > high ? high : value;
}

void arbiter_set(struct arbiter *arbiter, int32_t tenant, uint32_t guarantee, uint32_t limit)
{
    struct tenant *t = &arbiter->tenants[tenant];

    t->guarantee = clamp(guarantee, 1, ARBITER_WHOLE) / ARBITER_WHOLE;
    t->limit = max(t->guarantee, clamp(limit, 1, ARBITER_WHOLE) / ARBITER_WHOLE);
}

int32_t arbiter_add(struct arbiter *arbiter, uint32_t guarantee, uint32_t limit, uint64_t now)
{
    for (int32_t i = 0; i < ARBITER_N_TENANTS; i++) {
        struct tenant *t = &arbiter->tenants[i];

        if (t->used)
            continue;
        memset(t, 0, sizeof *t);
        t->used = true;
        t->owed_at = t->capped_at = (double)now;
        t->lent_tag = arbiter->lent_clock;
        t->asleep = t->allowed = now;
        arbiter_set(arbiter, i, guarantee, limit);
        if (i >= arbiter->n)
            arbiter->n = i + 1;
        return i;
    }
    return ARBITER_NOBODY;
}

/* Tells the number of a grant of an earlier arbiter, as a page says it: the grants to come are
 * numbered beyond it. A number tells two grants apart. Where numbers wrap around, the later one is
 * the nearer one ahead. */
void arbiter_begin(struct arbiter *arbiter, uint32_t epoch)
{
    if (epoch && (!arbiter->newest || (int32_t)(epoch - arbiter->newest) > 0))
        arbiter->newest = epoch;
}

/* An elastic container may have idle time beyond its guarantee. */
static bool is_elastic(const struct tenant *t)
{
    return t->limit > t->guarantee;
}

/* Applies a charge of `ns`, or a correction of one. */
static void charge(struct tenant *t, double ns, bool lent)
{
    t->capped_at += ns / t->limit;
    if (!lent)
        t->owed_at += ns / t->guarantee;
}

static bool wants(const struct tenant *t)
{
    return t->used && t->want && !t->absent;
}

/* Returns when the tenant may have GPU time, as its own or lent. */
static double eligible_at(const struct tenant *t)
{
    if (is_elastic(t) && t->capped_at < t->owed_at)
        return t->capped_at;
    return t->owed_at;
}

/*
 * Whether it is charged for work that outlasted its grant. The GPUs of a gang are given and taken
 * together, and its work waits for the others.
 *
 * What one is charged the holder is not, and only the ledger says that such work runs. So it is
 * believed only up to a debt: in the long run, a container that says so untruly can give others no
 * more than its own share.
 */
static bool is_overrunning(const struct arbiter *arbiter, int32_t i)
{
    const struct tenant *t = &arbiter->tenants[i];
    double debt = (t->owed_at - (double)arbiter->accrued) * t->guarantee;

    return t->used && t->overruns && i != arbiter->holder && t->turn.role == ARBITER_ALONE &&
           debt < OVERRUN_NS;
}

/*
 * Charges the time since the last call to work that outlasts its grant. The GPU divides its time
 * evenly between the contexts that have work, so each of them has an equal part of it, and the
 * holder has what is left of its grant. Such work is paid for like any other, before its container
 * is granted anything.
 */
static void accrue(struct arbiter *arbiter, uint64_t now)
{
    uint64_t since = arbiter->accrued;
    unsigned n = 0;
    bool held = arbiter->holder != ARBITER_NOBODY && arbiter->start < now, wanted = held;
    double each;

    if (now <= since)
        return;
    arbiter->accrued = now;
    for (int32_t i = 0; i < arbiter->n; i++) {
        n += is_overrunning(arbiter, i);
        wanted = wanted || (wants(&arbiter->tenants[i]) && !is_overrunning(arbiter, i) &&
                            eligible_at(&arbiter->tenants[i]) <= (double)since);
    }
    if (!n || !since)
        return;
    if (now - since > ACCRUE_NS)
        since = now - ACCRUE_NS; /* the governor was stopped meanwhile */
    if (held && arbiter->start > since)
        since = arbiter->start;
    each = (double)(now - since) / (n + held);
    for (int32_t i = 0; i < arbiter->n; i++) {
        struct tenant *t = &arbiter->tenants[i];
        bool lent = is_elastic(t) && !wanted;

        if (!is_overrunning(arbiter, i))
            continue;
        charge(t, each, lent);
        t->stats.charged_ns += (uint64_t)each;
        t->stats.held_ns += (uint64_t)each;
        t->stats.lent_ns += lent ? (uint64_t)each : 0;
    }
    if (held) {
        arbiter->shared += (double)(now - since) - each;
        arbiter->late = clamp(arbiter->late + each * n, 0, MAX_LAG_NS);
    }
}

/* Says whether work of a tenant runs although its grant is over, from now on. */
void arbiter_overrun(struct arbiter *arbiter, int32_t tenant, bool overruns, uint64_t now)
{
    struct tenant *t = &arbiter->tenants[tenant];

    accrue(arbiter, now);
    /* Otherwise it could say so whenever a container that it favours holds the GPU. */
    if (overruns && !t->overruns && t->overran_grants == t->stats.grants &&
        now < t->overran + AGAIN_NS)
        return;
    if (t->overruns && !overruns)
        t->overran = now;
    if (!t->overruns && overruns)
        t->overran_grants = t->stats.grants;
    t->overruns = overruns;
}

/* Whether it is away for a moment, as far as is known. */
static bool is_napping(const struct tenant *t, uint64_t now)
{
    return !t->want && t->nap > 0 && t->asleep != ARBITER_NEVER &&
           (double)now < (double)t->asleep + 2 * t->nap;
}

/* Returns what part of the GPU `t` and all others that want it, or soon will, may have. */
static double demand_with(const struct arbiter *arbiter, const struct tenant *t, uint64_t now)
{
    double demand = 0;

    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *other = &arbiter->tenants[i];

        if (other->used && (other == t || wants(other) || is_napping(other, now)))
            demand += other->limit;
    }
    return demand;
}

/*
 * Replaces what was estimated at the end of the last grants by what the GPU's clock measured. The
 * report comes from the container, so it is believed within bounds only.
 *
 * Where the last work of a grant runs alongside the first of the next, the use of all containers
 * adds up to more than the time that has passed. If their shares leave nothing idle, they are
 * charged for that time together, in proportion: otherwise the GPU would have to rest so that no
 * container gets more than its share.
 */
static void settle(struct arbiter *arbiter, struct tenant *t, bool lent, uint64_t now)
{
    const struct arbiter_config *config = &arbiter->config;
    double busy, actual, scale = arbiter->scale;

    if (!t->n_unsettled)
        return;
    busy = (t->busy_told - t->busy_seen) * scale;
    /* It was waited for because its work was said to run. Perhaps that work was waiting itself. */
    if (t->was_long)
        t->n_impatient = busy < t->unsettled_held / 2 ? IMPATIENT_GRANTS : 0;
    t->was_long = false;
    actual = clamp(busy, max(0, t->unsettled_held - t->allowance),
                   t->unsettled_held + t->unsettled_beside);
    t->allowance -= max(0, t->unsettled_held - actual);
    charge(t, actual - t->unsettled_charge, lent);
    t->overhead += 0.1 * ((t->unsettled_held - actual) / t->n_unsettled - t->overhead);
    t->overhead = clamp(t->overhead, 0, (double)config->overhead_ns);
    t->stats.charged_ns += (uint64_t)max(0, actual);
    t->stats.handover_ns += (uint64_t)max(0, t->unsettled_held - actual);
    if (lent)
        t->stats.lent_ns += (uint64_t)max(0, actual);
    if (config->beside_ns) {
        double excess = demand_with(arbiter, t, now) >= FULL ? actual - t->unsettled_held
                                                             : (scale - 1) * t->unsettled_held;

        arbiter->scale = clamp(scale - excess / SCALE_NS, LEAST_SCALE, 1);
    }
    /* The last markers of a grant are often reported after it, so what was above or below the
     * bounds is carried over. */
    t->busy_seen = clamp(t->busy_seen + actual / scale, t->busy_told - MAX_CARRY_NS,
                         t->busy_told + MAX_CARRY_NS);
    t->unsettled_charge = t->unsettled_held = t->unsettled_beside = 0;
    t->n_unsettled = 0;
}

/*
 * Passes over a container that has shown nothing since `since`. One that is stopped or frozen keeps
 * saying that it wants the GPU. It is granted nothing until it has shown that it runs, unless no
 * other container wants the GPU.
 */
static void pass_over(struct tenant *t, uint64_t since)
{
    /* Not with several GPUs: one of them may be late, and the work on the others waits for it. */
    t->absent = t->want && t->sign_ns < since && t->turn.role == ARBITER_ALONE;
}

void arbiter_sign(struct arbiter *arbiter, int32_t tenant, uint64_t sign_ns)
{
    struct tenant *t = &arbiter->tenants[tenant];

    if (sign_ns <= t->sign_ns)
        return;
    t->sign_ns = sign_ns;
    if (!t->absent)
        return;
    t->absent = false;
    /* As far as what it is owed goes, it was asleep. */
    t->owed_at = max(t->owed_at, (double)sign_ns - 2.0 * (double)arbiter->config.quantum_ns);
}

/* Returns by when a tenant that is owed GPU time should have had a grant. If its grants last longer
 * than a quantum, because its work does, it has them less often, and each is due later: otherwise
 * several such containers would go one after the other while another has to wait. */
static double due_at(const struct arbiter *arbiter, const struct tenant *t)
{
    return t->owed_at + max((double)arbiter->config.quantum_ns, t->length) / t->guarantee;
}

/* Whether the holder gave the grant back well before its end. */
static bool was_early(const struct arbiter *arbiter, double end)
{
    return end + (double)arbiter->config.switch_ns < (double)arbiter->deadline;
}

/*
 * Returns how long the grant was, as a part of what is worth a change of contexts: 0 to 1. It is 1
 * also if the arbiter ended the grant, or no other container is owed time at its end.
 *
 * A container that works for a moment and sleeps again makes the GPU change contexts twice, and
 * keeps the other from it for longer than it works itself. If that were free, some such containers
 * together could take more than their shares.
 */
static double worth_its_switch(const struct arbiter *arbiter, double held, double end)
{
    double least = SWITCHES * (double)arbiter->config.switch_ns;

    if (held >= least || !was_early(arbiter, end))
        return 1;
    for (int32_t i = 0; i < arbiter->n; i++)
        if (i != arbiter->holder && wants(&arbiter->tenants[i]) &&
            arbiter->tenants[i].owed_at <= end)
            return held / least;
    return 1;
}

/* Ends the grant. The holder's work ends (or ended) at `end`. */
static void end_grant(struct arbiter *arbiter, uint64_t end, uint32_t n_active)
{
    struct tenant *t = &arbiter->tenants[arbiter->holder];
    double held = end > arbiter->start ? (double)(end - arbiter->start) : 0;
    double cost, estimate, part, fee,
        believed = BELIEVED * t->guarantee * max(0, (double)end - (double)t->allowed);

    held = max(0, held - arbiter->shared);
    part = worth_its_switch(arbiter, held, (double)end);
    fee = (1 - part) * (double)arbiter->config.switch_ns;
    believed *= part;
    if (end > arbiter->deadline + arbiter->config.overdue_ns && !arbiter->open) {
        arbiter->late = clamp(arbiter->late + (double)(end - arbiter->deadline), 0, MAX_LAG_NS);
        arbiter->patience -= (double)(end - arbiter->deadline) - (double)arbiter->config.overdue_ns;
        arbiter->patience = max(0, arbiter->patience);
    }
    arbiter->shared = 0;
    /* However short the holder says that the grant was, it has cost the others something. */
    cost = max(held, (double)arbiter->config.overhead_ns / 4);
    estimate = max((1 - BELIEVED) * cost, cost - t->overhead);
    if (arbiter->open) {
        /* Alone, it is owed nothing and owes nothing. */
        t->owed_at = max(t->owed_at, (double)end);
        t->capped_at = max(t->capped_at, (double)end);
        t->busy_seen = t->busy_told;
        t->stats.charged_ns += (uint64_t)held;
    } else if (n_active) {
        charge(t, estimate + fee, arbiter->lent);
        t->stats.charged_ns += (uint64_t)fee;
        t->was_long = t->was_long || end > arbiter->deadline + arbiter->config.overdue_ns;
        t->unsettled_charge += estimate;
        t->unsettled_held += cost;
        /* Processes that work at the same time each report all of that time. */
        if (n_active == 1)
            t->unsettled_beside += (double)arbiter->config.beside_ns;
        /* If no other container waited, none could have used what it left unused. Otherwise it gets
         * one allowance for each grant, and no more of them by making its grants shorter. */
        believed = believed < (double)arbiter->config.overhead_ns
                       ? believed
                       : (double)arbiter->config.overhead_ns;
        t->allowance += arbiter->contended ? believed : held;
        t->allowed = end;
        t->allowance =
            clamp(t->allowance, 0, ALLOWANCE_GRANTS * (double)arbiter->config.overhead_ns + held);
        t->n_unsettled++;
        if (arbiter->lent) {
            t->lent_tag = max(t->lent_tag, arbiter->lent_clock) + estimate / t->guarantee;
        }
    } else {
        t->stats.handover_ns += (uint64_t)held;
        /* Others waited while it did nothing. If that were free, it would be the first in line for
         * ever. A container that showed no sign either is passed over instead. */
        if (arbiter->contended && !t->absent) {
            charge(t, held, arbiter->lent);
            if (arbiter->lent)
                t->lent_tag = max(t->lent_tag, arbiter->lent_clock) + held / t->guarantee;
        }
    }
    t->stats.held_ns += (uint64_t)held;
    if (!arbiter->open)
        t->length = t->length > 0 ? t->length + 0.25 * (held - t->length) : held;
    if (end > arbiter->gpu_free)
        arbiter->gpu_free = end;
    arbiter->last_holder = arbiter->holder;
    arbiter->holder = ARBITER_NOBODY;
    arbiter->open = false;
    if (!t->want)
        t->asleep = end;
}

void arbiter_remove(struct arbiter *arbiter, int32_t tenant, uint64_t now)
{
    if (arbiter->holder == tenant)
        end_grant(arbiter, now, SEVERAL);
    if (arbiter->standby == tenant)
        arbiter->standby = ARBITER_NOBODY;
    if (arbiter->last_holder == tenant)
        arbiter->last_holder = ARBITER_NOBODY;
    arbiter->tenants[tenant].used = false;
    arbiter->tenants[tenant].want = false;
}

/* Whether `t` is so far behind the holder, once the holder has worked until `at`, that it goes
 * first although that costs a hand-over. */
static bool is_behind(const struct arbiter *arbiter, const struct tenant *t, double at)
{
    const struct tenant *holder = &arbiter->tenants[arbiter->holder];
    double used = max(0, at - (double)arbiter->start);

    if (t->owed_at > at)
        return false;
    return arbiter->lent || due_at(arbiter, t) + (double)arbiter->config.quantum_ns / t->guarantee <
                                due_at(arbiter, holder) + used / holder->guarantee;
}

/* A container has begun to want the GPU. If it is owed time, the current grant is cut to a quantum,
 * or to SLICE_NS if the container is far behind the holder. */
static void arrive(struct arbiter *arbiter, const struct tenant *t, uint64_t now)
{
    double least;

    /* Containers with several GPUs come when it is their turn, and go when it ends. */
    if (arbiter->holder == ARBITER_NOBODY || arbiter->open || t->turn.role != ARBITER_ALONE ||
        arbiter->tenants[arbiter->holder].turn.role == ARBITER_CALLED ||
        t == &arbiter->tenants[arbiter->holder] || t->owed_at > (double)now)
        return;
    least = (double)arbiter->start +
            (is_behind(arbiter, t, (double)now) ? SLICE_NS : (double)arbiter->config.quantum_ns);
    least = max(least, (double)now);
    if (least < (double)arbiter->deadline)
        arbiter->deadline = (uint64_t)least;
}

/* Forgives what all are owed alike. Where hand-overs and pauses leave less GPU time than is owed,
 * the time for which all containers are kept waiting is owed to none, so that the bound on what one
 * is owed leaves the differences alone. Time for which work that outlasts its grant kept them
 * waiting is not forgiven, because the container that caused it pays for it later. */
static void forgive(struct arbiter *arbiter, uint64_t now, const struct tenant *except)
{
    double common = 1e300, most = 0;
    int n = 0;

    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *t = &arbiter->tenants[i];

        if (t == except || !t->used || !(wants(t) || is_napping(t, now)))
            continue;
        n++;
        if ((double)now - t->owed_at < common)
            common = (double)now - t->owed_at;
        most = max(most, (double)now - t->owed_at);
    }
    common -= COMMON_NS;
    /* None is owed more than that which is owed most, so what was lost beyond it has been had. */
    arbiter->late = clamp(arbiter->late, 0, most);
    if (!n || common <= 0)
        return;
    arbiter->late = clamp(arbiter->late, 0, common);
    common -= arbiter->late;
    if (common <= 0)
        return;
    for (int32_t i = 0; i < arbiter->n; i++) {
        struct tenant *t = &arbiter->tenants[i];

        if (t != except && t->used && (wants(t) || is_napping(t, now)))
            t->owed_at += common;
    }
}

void arbiter_want(struct arbiter *arbiter, int32_t tenant, bool want, uint64_t now)
{
    struct tenant *t = &arbiter->tenants[tenant];
    double grace = 2.0 * (double)arbiter->config.quantum_ns;
    bool slept = false;

    if (t->want == want)
        return;
    t->want = want;
    if (!want) {
        if (arbiter->holder != tenant)
            t->asleep = now;
        return;
    }
    if (t->asleep != ARBITER_NEVER && now > t->asleep) {
        double away = (double)(now - t->asleep);

        slept = away > NAP_NS;
        t->nap = away > NAP_NS ? 0 : t->nap > 0 ? t->nap + 0.2 * (away - t->nap) : away;
        /* It keeps what it was owed when it fell asleep, and up to the grace of what the sleep
         * added. */
        if (away > grace && t->owed_at < (double)now - grace)
            t->owed_at = clamp(t->owed_at + away - grace, t->owed_at, (double)now - grace);
    }
    t->owed_at = max(t->owed_at, (double)now - MAX_LAG_NS);
    /* What the others lack is not made up for at the expense of one that comes later, unless that
     * one kept them waiting. */
    if (arbiter->late > 0 && slept &&
        t->owed_at <= (double)now + (double)arbiter->config.overdue_ns / t->guarantee) {
        arbiter->late = 0;
        forgive(arbiter, now, t);
    }
    t->asleep = ARBITER_NEVER;
    arrive(arbiter, t, now);
}

void arbiter_busy(struct arbiter *arbiter, int32_t tenant, uint64_t busy_ns)
{
    struct tenant *t = &arbiter->tenants[tenant];

    t->busy_told = (double)busy_ns;
    /* What it did before its first grant is not charged. */
    if (!t->stats.grants)
        t->busy_seen = t->busy_told;
}

/* The holder says that it watches work of this grant that still runs: it is not stuck. */
void arbiter_alive(struct arbiter *arbiter, uint64_t alive_ns)
{
    if (alive_ns > arbiter->alive)
        arbiter->alive = alive_ns;
    if (arbiter->holder != ARBITER_NOBODY)
        arbiter_sign(arbiter, arbiter->holder, alive_ns);
}

void arbiter_released(struct arbiter *arbiter, uint64_t release_ns, uint64_t residual_ns,
                      uint32_t n_active)
{
    if (arbiter->holder == ARBITER_NOBODY)
        return;
    if (release_ns < arbiter->start)
        release_ns = arbiter->start;
    if (residual_ns > arbiter->config.overdue_ns)
        residual_ns = arbiter->config.overdue_ns;
    if (!n_active)
        pass_over(&arbiter->tenants[arbiter->holder], arbiter->start);
    end_grant(arbiter, release_ns + residual_ns, n_active);
}

static bool somebody_wants(const struct arbiter *arbiter)
{
    for (int32_t i = 0; i < ARBITER_N_TENANTS; i++)
        if (wants(&arbiter->tenants[i]) || (arbiter->open && i == arbiter->holder))
            return true;
    return false;
}

/* Returns the tenant other than `except` that should have the GPU at `now`; tells whether its time
 * would be lent. */
static int32_t choose(const struct arbiter *arbiter, double now, int32_t except, bool *lentp)
{
    int32_t owed = ARBITER_NOBODY, lent = ARBITER_NOBODY;
    double best_owed = 0, best_lent = 0;
    bool present = somebody_wants(arbiter);

    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *t = &arbiter->tenants[i];

        if (!t->used || i == except || t->turn.role == ARBITER_BARRED)
            continue;
        if (t->turn.role == ARBITER_CALLED && (t->want || t->turn.unasked) &&
            (double)t->turn.until_ns > now) {
            /* Half of a collective may go beyond the cap; the container then owes that time. */
            *lentp = is_elastic(t) && t->owed_at > now;
            return i;
        }
        if (!t->want || (t->absent && present) || t->turn.role == ARBITER_CALLED ||
            now < (double)arbiter->kept)
            continue;
        if (t->owed_at <= now) {
            double due = due_at(arbiter, t);

            if (owed == ARBITER_NOBODY || due < best_owed) {
                owed = i;
                best_owed = due;
            }
        } else if (is_elastic(t) && t->capped_at <= now) {
            double tag = max(t->lent_tag, arbiter->lent_clock);

            if (lent == ARBITER_NOBODY || tag < best_lent) {
                lent = i;
                best_lent = tag;
            }
        }
    }
    *lentp = owed == ARBITER_NOBODY;
    return owed != ARBITER_NOBODY ? owed : lent;
}

/* Whether the holder may go on after its deadline, as far as its own quota goes. */
static bool may_continue(const struct arbiter *arbiter, double at)
{
    const struct tenant *t = &arbiter->tenants[arbiter->holder];
    double used = max(0, at - (double)arbiter->start);

    if (t->limit >= 1.0)
        return true;
    return (arbiter->lent ? t->capped_at : t->owed_at) +
               used / (arbiter->lent ? t->limit : t->guarantee) <=
           at;
}

/*
 * Returns how long a grant is. Where there is enough idle time, that pays for the hand-overs, and
 * grants are short, so that shares are right over short times. The less is idle, the longer grants
 * are: the part of the time that is work, length / (length + cost), has to reach the demand.
 */
static double grant_length(const struct arbiter *arbiter, const struct tenant *t, uint64_t now)
{
    double least = (double)arbiter->config.quantum_ns, most = (double)arbiter->config.most_ns;
    double cost = max((double)arbiter->config.switch_ns, t->overhead);
    double demand = demand_with(arbiter, t, now);

    if (demand >= 1)
        return most;
    return clamp(cost * demand / (1 - demand), least, max(least, most));
}

/* Returns when the holder's grant should end for a container that sleeps, is expected back soon and
 * will be behind the holder then; ARBITER_NEVER: there is none. */
static uint64_t expected_back(const struct arbiter *arbiter, uint64_t now)
{
    uint64_t first = ARBITER_NEVER;

    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *t = &arbiter->tenants[i];
        double at;

        if (!t->used || t->want || i == arbiter->holder || !is_napping(t, now))
            continue;
        at = max((double)t->asleep + t->nap, (double)now);
        if (at < (double)first && is_behind(arbiter, t, at))
            first = (uint64_t)at;
    }
    return first;
}

static void grant(struct arbiter *arbiter, int32_t tenant, bool lent, uint64_t now)
{
    struct tenant *t = &arbiter->tenants[tenant];
    uint64_t begins = now > arbiter->gpu_free ? now : arbiter->gpu_free;
    bool others = false;
    uint64_t back;

    settle(arbiter, t, lent, now);
    forgive(arbiter, now, NULL);
    if (t->n_impatient)
        t->n_impatient--;
    for (int32_t i = 0; i < arbiter->n; i++)
        if (i != tenant && wants(&arbiter->tenants[i]))
            others = true;
    if (t->turn.role == ARBITER_CALLED)
        others = t->turn.contended;
    if (is_elastic(t))
        t->capped_at = max(t->capped_at, (double)now - 2.0 * (double)arbiter->config.quantum_ns);
    if (lent)
        arbiter->lent_clock = max(arbiter->lent_clock, t->lent_tag);
    arbiter->beside = arbiter->last_holder != ARBITER_NOBODY && arbiter->last_holder != tenant &&
                      arbiter->config.beside_ns &&
                      now < arbiter->gpu_free + arbiter->config.beside_ns;
    arbiter->holder = tenant;
    arbiter->lent = lent;
    arbiter->epoch = ++arbiter->newest;
    arbiter->start = begins;
    arbiter->alive = 0;
    arbiter->contended = others;
    arbiter->standby = ARBITER_NOBODY;
    arbiter->open = !others && t->limit >= 1.0;
    arbiter->deadline = begins + (uint64_t)grant_length(arbiter, t, now);
    if (arbiter->last_holder != tenant)
        arbiter->deadline += arbiter->config.switch_ns;
    if (t->turn.role == ARBITER_CALLED) {
        arbiter->open = t->turn.until_ns == ARBITER_NEVER;
        if (!arbiter->open)
            arbiter->deadline = t->turn.until_ns;
        t->asleep = ARBITER_NEVER;
        t->stats.grants++;
        return;
    }
    back = expected_back(arbiter, now);
    if (arbiter->align < back)
        back = arbiter->align;
    if (back < begins + (uint64_t)SLICE_NS)
        back = begins + (uint64_t)SLICE_NS;
    if (back < arbiter->deadline)
        arbiter->deadline = back;
    t->asleep = ARBITER_NEVER;
    t->stats.grants++;
}

/*
 * Returns when the grant is taken from a holder that does not give it back. A lent grant is waited
 * for no longer than `overdue_ns`: a container may be owed that time.
 *
 * Work that is not waited for runs on beside the next holder's, and is charged (accrue()). So how
 * long is waited is bounded for all containers of the GPU together: several that hold their grants
 * one after the other could keep the others waiting for longer than any of them may.
 */
static uint64_t taken_at(const struct arbiter *arbiter)
{
    const struct arbiter_config *config = &arbiter->config;
    const struct tenant *t = &arbiter->tenants[arbiter->holder];
    uint64_t end = arbiter->deadline;
    uint64_t sign = arbiter->alive > end ? arbiter->alive : end;
    uint64_t seen = t->sign_ns > sign ? t->sign_ns : sign;
    uint64_t latest = end + config->overdue_ns;

    if (!arbiter->lent && !t->n_impatient) {
        if (latest < end + config->longest_ns)
            latest = end + config->longest_ns;
        if (latest > sign + config->overdue_ns)
            latest = sign + config->overdue_ns;
        if (t->turn.role == ARBITER_ALONE &&
            latest > end + config->overdue_ns + (uint64_t)arbiter->patience)
            latest = end + config->overdue_ns + (uint64_t)arbiter->patience;
    }
    /* If no sign comes for half of `overdue_ns` after the end or the last sign, no process there is
     * awake to give the grant back. */
    return latest < seen + config->overdue_ns / 2 ? latest : seen + config->overdue_ns / 2;
}

/* Returns the earliest time at which a tenant other than `except` that wants the GPU may have it. A
 * barred tenant does not count: it may have the GPU when it is called. */
static uint64_t next_eligible(const struct arbiter *arbiter, uint64_t now, int32_t except)
{
    double best = 1e300;
    bool present = somebody_wants(arbiter);

    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *t = &arbiter->tenants[i];

        if (t->used && t->want && (!t->absent || !present) && i != except &&
            t->turn.role != ARBITER_BARRED && eligible_at(t) < best)
            best = eligible_at(t);
    }
    if (best > 1e18)
        return ARBITER_NEVER;
    return best > (double)now ? (uint64_t)best + 1 : now;
}

/* Whether a tenant wants the GPU that has to wait for its turn. */
static bool has_barred(const struct arbiter *arbiter, double now)
{
    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *t = &arbiter->tenants[i];

        if (wants(t) && i != arbiter->holder && t->turn.role == ARBITER_BARRED &&
            eligible_at(t) <= now)
            return true;
    }
    return false;
}

/* Lets an open grant end at `end`, and charges it from now on. */
static void close_open(struct arbiter *arbiter, uint64_t now, uint64_t end)
{
    end_grant(arbiter, now, SEVERAL);
    arbiter->holder = arbiter->last_holder;
    arbiter->start = now;
    arbiter->alive = 0;
    arbiter->deadline = end;
    arbiter->standby = ARBITER_NOBODY;
}

static void step_holder(struct arbiter *arbiter, uint64_t now, struct arbiter_view *viewp)
{
    const struct arbiter_config *config = &arbiter->config;
    uint64_t decide;
    int32_t rival;
    bool lent;

    if (arbiter->tenants[arbiter->holder].turn.role == ARBITER_CALLED) {
        viewp->wake_ns = arbiter->open ? ARBITER_NEVER : taken_at(arbiter);
        return;
    }
    if (arbiter->open && arbiter->tenants[arbiter->holder].limit < 1.0) {
        /* A cap was set meanwhile, and applies from now on. */
        close_open(arbiter, now, now + config->quantum_ns);
        arbiter->contended = false;
    }
    if (arbiter->open) {
        rival = choose(arbiter, (double)now, arbiter->holder, &lent);
        if (rival == ARBITER_NOBODY && !has_barred(arbiter, (double)now)) {
            viewp->wake_ns = next_eligible(arbiter, now, arbiter->holder);
            return;
        }
        /* The owner of a share returns, so the open grant ends now. */
        close_open(arbiter, now, now);
        arbiter->contended = true;
        arbiter->standby = rival;
    }
    decide = arbiter->deadline > config->lead_ns ? arbiter->deadline - config->lead_ns : 0;
    rival = choose(arbiter, (double)(now > arbiter->deadline ? now : arbiter->deadline),
                   arbiter->holder, &lent);
    if (rival != ARBITER_NOBODY || has_barred(arbiter, (double)now))
        arbiter->contended = true;
    if (now < decide) {
        viewp->wake_ns = decide;
        return;
    }
    if (arbiter->standby == ARBITER_NOBODY && now < arbiter->deadline) {
        const struct tenant *t = &arbiter->tenants[arbiter->holder];

        if (rival != ARBITER_NOBODY) {
            arbiter->standby = rival;
        } else if (expected_back(arbiter, now) == ARBITER_NEVER &&
                   !has_barred(arbiter, (double)arbiter->deadline) &&
                   may_continue(arbiter, (double)arbiter->deadline)) {
            /* No other container can use the GPU: the grant goes on without a drain. */
            if (t->limit >= 1.0 && next_eligible(arbiter, now, arbiter->holder) == ARBITER_NEVER &&
                !has_barred(arbiter, 1e300)) {
                arbiter->open = true;
                viewp->wake_ns = ARBITER_NEVER;
                return;
            }
            arbiter->deadline += config->quantum_ns;
            viewp->wake_ns = arbiter->deadline - config->lead_ns;
            return;
        }
    }
    viewp->wake_ns = taken_at(arbiter);
}

/* Lets grow how long work that outlasts its grant is waited for, while none does. */
static void regain_patience(struct arbiter *arbiter, uint64_t now)
{
    bool late = arbiter->holder != ARBITER_NOBODY && !arbiter->open && now > arbiter->deadline;

    if (arbiter->patient && now > arbiter->patient && !late)
        arbiter->patience += PATIENCE * (double)(now - arbiter->patient);
    arbiter->patience = clamp(arbiter->patience, 0, (double)arbiter->config.longest_ns);
    arbiter->patient = now;
}

void arbiter_step(struct arbiter *arbiter, uint64_t now, struct arbiter_view *viewp)
{
    bool lent;

    accrue(arbiter, now);
    regain_patience(arbiter, now);
    memset(viewp, 0, sizeof *viewp);
    viewp->wake_ns = ARBITER_NEVER;
    if (arbiter->holder != ARBITER_NOBODY && !arbiter->open && now >= taken_at(arbiter)) {
        arbiter->tenants[arbiter->holder].stats.overdue++;
        pass_over(&arbiter->tenants[arbiter->holder], arbiter->deadline);
        end_grant(arbiter, now, SEVERAL);
    }
    if (arbiter->holder == ARBITER_NOBODY) {
        int32_t next = choose(arbiter, (double)now, ARBITER_NOBODY, &lent);

        if (next != ARBITER_NOBODY)
            grant(arbiter, next, lent, now);
        else
            viewp->wake_ns = next_eligible(arbiter, now, ARBITER_NOBODY);
        if (viewp->wake_ns < arbiter->kept)
            viewp->wake_ns = arbiter->kept;
    }
    if (arbiter->holder != ARBITER_NOBODY)
        step_holder(arbiter, now, viewp);
    viewp->holder = arbiter->holder;
    viewp->epoch = arbiter->epoch;
    viewp->start_ns = arbiter->start;
    viewp->deadline_ns = arbiter->open ? ARBITER_NEVER : arbiter->deadline;
    viewp->contended = arbiter->holder != ARBITER_NOBODY && arbiter->contended;
    viewp->beside = arbiter->beside;
    viewp->standby = arbiter->standby;
    viewp->standby_ns = arbiter->deadline + arbiter->config.lead_ns;
}

/* ---- containers with several GPUs ---- */

/* Returns from when on the tenant goes before all that wait, and the holder is done: what the
 * holder has launched runs until the end of its grant, whatever is decided. The gang would wait for
 * that on each of its GPUs for a different time, and what it runs on the first would spin.
 * ARBITER_NEVER: a container that waits goes before it. */
static uint64_t first_at(const struct arbiter *arbiter, int32_t tenant, double now)
{
    const struct tenant *t = &arbiter->tenants[tenant];
    bool lent = is_elastic(t) && t->owed_at > now;
    double at = now;

    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *other = &arbiter->tenants[i];
        bool other_lent = other->owed_at > now;

        if (!other->used || i == tenant || other->turn.role != ARBITER_ALONE || arbiter->open)
            continue;
        if (i == arbiter->holder) {
            at = max(at, (double)arbiter->deadline);
        } else if (wants(other) && eligible_at(other) <= now) {
            if (lent != other_lent ? lent
                : lent             ? max(other->lent_tag, arbiter->lent_clock) <
                                         max(t->lent_tag, arbiter->lent_clock)
                                   : due_at(arbiter, other) < due_at(arbiter, t))
                return ARBITER_NEVER;
        }
    }
    return (uint64_t)at;
}

/* Tells how a container with several GPUs stands here. */
void arbiter_look(const struct arbiter *arbiter, int32_t tenant, uint64_t now,
                  struct arbiter_standing *standingp)
{
    const struct tenant *t = &arbiter->tenants[tenant];
    double ready = eligible_at(t), end;

    memset(standingp, 0, sizeof *standingp);
    standingp->want = wants(t);
    standingp->holds = arbiter->holder == tenant;
    standingp->lent = is_elastic(t) && t->owed_at > (double)now;
    standingp->whole = t->limit >= 1.0;
    standingp->free = arbiter->holder == ARBITER_NOBODY;
    standingp->due = due_at(arbiter, t);
    standingp->tag = max(t->lent_tag, arbiter->lent_clock);
    standingp->busy = t->busy_told;
    standingp->ready_ns = ready > 0 ? (uint64_t)ready + 1 : 0;
    standingp->first_ns = first_at(arbiter, tenant, (double)now);
    standingp->deadline_ns = arbiter->open ? ARBITER_NEVER : arbiter->deadline;
    standingp->may_continue =
        !standingp->holds || may_continue(arbiter, max((double)now, (double)arbiter->deadline));
    standingp->stuck = !standingp->free && !standingp->holds && !arbiter->open &&
                       now > arbiter->deadline + arbiter->config.lead_ns;
    end = standingp->holds && !arbiter->open ? max((double)now, (double)arbiter->deadline)
                                             : (double)now;
    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *other = &arbiter->tenants[i];

        if (!wants(other) || i == tenant || other->turn.role != ARBITER_ALONE)
            continue;
        standingp->others = true;
        if (eligible_at(other) <= end)
            standingp->rivals = true;
    }
}

/* Says what a container with several GPUs may do here from now on. A holder that is in the way of
 * its turn gives the GPU back after a moment. */
void arbiter_turn(struct arbiter *arbiter, int32_t tenant, const struct arbiter_turn *turn,
                  uint64_t now)
{
    struct tenant *t = &arbiter->tenants[tenant];
    uint64_t least;

    if (arbiter->holder == tenant && turn->role == ARBITER_CALLED) {
        arbiter->contended = turn->contended;
        if (turn->until_ns == ARBITER_NEVER)
            arbiter->open = true;
        else if (arbiter->open)
            close_open(arbiter, now, turn->until_ns);
        else
            arbiter->deadline = turn->until_ns;
    } else if (arbiter->holder != ARBITER_NOBODY && turn->role == ARBITER_CALLED &&
               (t->want || turn->unasked)) {
        least = arbiter->start + (uint64_t)SLICE_NS;
        if (least < now)
            least = now;
        if (arbiter->open)
            close_open(arbiter, now, now);
        else if (least < arbiter->deadline)
            arbiter->deadline = least;
        arbiter->contended = true;
        arbiter->standby = tenant;
    }
    t->turn = *turn;
}

/* Whether a tenant's GPUs are granted together, as arbiter_turn() said last. */
bool arbiter_in_gang(const struct arbiter *arbiter, int32_t tenant)
{
    return arbiter->tenants[tenant].turn.role != ARBITER_ALONE;
}

/* Grants that begin from now on end at `at` at the latest, but not within SLICE_NS. */
void arbiter_align(struct arbiter *arbiter, uint64_t at)
{
    arbiter->align = at;
}

/* Until `until` the GPU goes only to a container in its turn. One with several GPUs may need it
 * again in a moment, and waits for that on another GPU. */
void arbiter_keep(struct arbiter *arbiter, uint64_t until)
{
    arbiter->kept = until;
}

/* Takes the grant away. The holder is blocked on a container that itself waits for this grant, so
 * the arbiter does not wait for it. */
void arbiter_take(struct arbiter *arbiter, uint64_t now)
{
    if (arbiter->holder == ARBITER_NOBODY)
        return;
    arbiter->tenants[arbiter->holder].stats.overdue++;
    end_grant(arbiter, now, SEVERAL);
}

void arbiter_stats(const struct arbiter *arbiter, int32_t tenant, struct arbiter_stats *statsp)
{
    *statsp = arbiter->tenants[tenant].stats;
    if (arbiter->holder == tenant) {
        statsp->since_ns = arbiter->start + (uint64_t)arbiter->shared;
        statsp->open = arbiter->open;
    }
}
