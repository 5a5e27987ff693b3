/*
 * Charges containers for GPU time, and computes what each of them is owed.
 *
 * The use of a grant is estimated when it ends, because the container reports only later what the
 * GPU's clock measured. arbiter_settle() corrects the estimate before the container's next grant.
 * Work that outlasts its grant is charged while it runs.
 */
#include "arbiter_state.h"

#define MAX_CARRY_NS     20000000.0 /* largest part of a late report that is carried over */
#define IMPATIENT_GRANTS 64         /* grants not waited for after a long one with little work */
#define ALLOWANCE_GRANTS 20         /* allowances that may add up, for unusually long hand-overs */
#define BELIEVED    0.25 /* part of its share that a container may gain by reporting too little */
#define COMMON_NS   50000000.0  /* maximum that all waiting containers are owed in common */
#define SCALE_NS    100000000.0 /* GPU time within which the scale adapts */
#define LEAST_SCALE 0.9
#define FULL        0.985         /* demand that leaves nothing idle */
#define SWITCHES    5.0           /* a grant as long as this many switches is worth one */
#define OVERRUN_NS  60000000000.0 /* debt up to which a reported overrun is believed */
#define ACCRUE_NS   1000000000ull /* longest time between two calls that is charged */

/* Applies a charge of `ns`, or a correction of one. */
static void charge(struct tenant *t, double ns, bool lent)
{
    t->capped_at += ns / t->limit;
    if (!lent)
        t->owed_at += ns / t->guarantee;
}

/*
 * Whether a container is charged for work that outlasted its grant. A gang is not, because its GPUs
 * are granted and taken together, and its work on one GPU waits for the others.
 *
 * Time that is charged to such a container is not charged to the holder, and only the ledger says
 * that such work is running. The report is therefore believed only while the container's debt is
 * below a limit: in the long run, a container that reports falsely can give others no more than its
 * own share.
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
 * evenly between the contexts that have work, so each of them is charged for an equal part, and the
 * holder for the rest of its grant. Such work is paid for like any other, before its container is
 * granted anything.
 */
void arbiter_accrue(struct arbiter *arbiter, uint64_t now)
{
    uint64_t since = arbiter->accrued;
    unsigned n = 0;
    bool held = arbiter->holder != ARBITER_NONE && arbiter->start < now, wanted = held;
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
        since = now - ACCRUE_NS; /* the governor was stopped in between */
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

/*
 * Replaces the estimates made at the end of the last grants with what the GPU's clock measured. The
 * report comes from the container, so it is believed only within bounds.
 *
 * Where the last work of a grant runs alongside the first of the next, the use of all containers
 * adds up to more than the time that has passed. If their shares leave nothing idle, each of them
 * is charged for its proportion of that time: otherwise the GPU would have to stay idle so that no
 * container gets more than its share.
 */
void arbiter_settle(struct arbiter *arbiter, struct tenant *t, bool lent, uint64_t now)
{
    const struct arbiter_config *config = &arbiter->config;
    double busy, actual, scale = arbiter->scale;

    if (!t->n_unsettled)
        return;
    busy = (t->busy_told - t->busy_seen) * scale;
    /* The arbiter waited because the container reported running work. That work may itself have
     * been waiting. */
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
        double excess = arbiter_demand(arbiter, t, now) >= FULL ? actual - t->unsettled_held
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

/* Whether the holder gave the grant back well before its end. */
static bool was_early(const struct arbiter *arbiter, double end)
{
    return end + (double)arbiter->config.switch_ns < (double)arbiter->deadline;
}

/*
 * Returns the length of the grant relative to one that is worth a context switch, from 0 to 1. The
 * result is also 1 if the arbiter ended the grant, or if no other container is owed time at its
 * end.
 *
 * A container that runs for a moment and sleeps again makes the GPU switch contexts twice, and
 * keeps others from the GPU for longer than it runs itself. If that were free, several such
 * containers together could take more than their shares.
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
void arbiter_end_grant(struct arbiter *arbiter, uint64_t end, uint32_t n_active)
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
    /* However short the grant was according to the holder's report, it has cost the others time. */
    cost = max(held, (double)arbiter->config.overhead_ns / 4);
    estimate = max((1 - BELIEVED) * cost, cost - t->overhead);
    if (arbiter->open) {
        /* A container that has the GPU to itself is owed nothing and owes nothing. */
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
        /* Processes that run at the same time each report all of that time. */
        if (n_active == 1)
            t->unsettled_beside += (double)arbiter->config.beside_ns;
        /* If no other container waited, none could have used the time that was left unused.
         * Otherwise the allowance grows in proportion to the time since the last grant, and by one
         * hand-over at most, so shorter grants do not add up to a larger allowance. */
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
        /* Others waited while the holder did nothing. If that were free, the holder would always
         * be the next to get a grant. A container without a sign of life is passed over instead. */
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
    arbiter->holder = ARBITER_NONE;
    arbiter->open = false;
    if (!t->want)
        t->asleep = end;
}

/* Makes an open grant end at `end`, and charges it from now on. */
void arbiter_close_open(struct arbiter *arbiter, uint64_t now, uint64_t end)
{
    arbiter_end_grant(arbiter, now, SEVERAL);
    arbiter->holder = arbiter->last_holder;
    arbiter->start = now;
    arbiter->alive = 0;
    arbiter->deadline = end;
    arbiter->standby = ARBITER_NONE;
}

/* Cancels what all containers are owed in common. Where hand-overs and pauses leave less GPU time
 * than is owed, the time for which all containers wait is owed to none of them, so that the bound
 * on what a container is owed does not erase the differences between them. The time for which they
 * waited because of work that outlasts its grant is not cancelled: the container that submitted
 * that work pays for it later. */
void arbiter_forgive(struct arbiter *arbiter, uint64_t now, const struct tenant *except)
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
    /* No container is owed more than `most`, so any lost time beyond that has been made up for. */
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
