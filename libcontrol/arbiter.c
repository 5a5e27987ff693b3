/*
 * The arbiter's interface: the events that the caller reports, and the step that decides which
 * container has the grant from then on; see arbiter.h.
 *
 * A step ends a grant that is overdue (arbiter_charge.c), chooses the next holder
 * (arbiter_choice.c), and makes the grant.
 */
#include "arbiter_state.h"

#include <stdlib.h>
#include <string.h>

#define NAP_NS   5000000.0    /* a container that sleeps for longer is not expected back */
#define PATIENCE 0.5          /* rate at which the wait for late work may grow: see taken_at() */
#define AGAIN_NS 200000000ull /* minimum time between two overruns without a grant in between */

struct arbiter *arbiter_new(const struct arbiter_config *config)
{
    struct arbiter *arbiter = calloc(1, sizeof *arbiter);

    if (arbiter) {
        arbiter->config = *config;
        arbiter->holder = ARBITER_NONE;
        arbiter->last_holder = ARBITER_NONE;
        arbiter->standby = ARBITER_NONE;
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
    return ARBITER_NONE;
}

/* Takes over the number of an earlier arbiter's grant, as read from a page. Later grants are
 * numbered from there, because grants are distinguished by their numbers. Numbers wrap around: the
 * later of two is less than half the range ahead of the other. */
void arbiter_begin(struct arbiter *arbiter, uint32_t epoch)
{
    if (epoch && (!arbiter->newest || (int32_t)(epoch - arbiter->newest) > 0))
        arbiter->newest = epoch;
}

void arbiter_remove(struct arbiter *arbiter, int32_t tenant, uint64_t now)
{
    if (arbiter->holder == tenant)
        arbiter_end_grant(arbiter, now, SEVERAL);
    if (arbiter->standby == tenant)
        arbiter->standby = ARBITER_NONE;
    if (arbiter->last_holder == tenant)
        arbiter->last_holder = ARBITER_NONE;
    arbiter->tenants[tenant].used = false;
    arbiter->tenants[tenant].want = false;
}

/* Records that work of a tenant outlasts its grant from now on, or no longer does. */
void arbiter_overrun(struct arbiter *arbiter, int32_t tenant, bool overruns, uint64_t now)
{
    struct tenant *t = &arbiter->tenants[tenant];

    arbiter_accrue(arbiter, now);
    /* Without this limit, a container could claim an overrun whenever one that it favours holds the
     * GPU. */
    if (overruns && !t->overruns && t->overran_grants == t->stats.grants &&
        now < t->overran + AGAIN_NS)
        return;
    if (t->overruns && !overruns)
        t->overran = now;
    if (!t->overruns && overruns)
        t->overran_grants = t->stats.grants;
    t->overruns = overruns;
}

/*
 * Passes over a container that has shown no sign of life since `since`. The ledger of a container
 * that is stopped or frozen still requests the GPU. Such a container is granted nothing until it
 * has shown that it is running, unless no other container wants the GPU.
 */
static void pass_over(struct tenant *t, uint64_t since)
{
    /* This does not apply to a container with several GPUs: one of them may be late, and the work
     * on the others waits for it. */
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
    /* What it is owed is computed as if it had been asleep. */
    t->owed_at = max(t->owed_at, (double)sign_ns - 2.0 * (double)arbiter->config.quantum_ns);
}

/* Handles a container that has begun to want the GPU. If it is owed time, the current grant is cut
 * to a quantum, or to SLICE_NS if the container is far behind the holder. */
static void arrive(struct arbiter *arbiter, const struct tenant *t, uint64_t now)
{
    double least;

    /* The grants of containers with several GPUs begin and end with their turns. */
    if (arbiter->holder == ARBITER_NONE || arbiter->open || t->turn.role != ARBITER_ALONE ||
        arbiter->tenants[arbiter->holder].turn.role == ARBITER_CALLED ||
        t == &arbiter->tenants[arbiter->holder] || t->owed_at > (double)now)
        return;
    least = (double)arbiter->start + (arbiter_is_behind(arbiter, t, (double)now)
                                          ? SLICE_NS
                                          : (double)arbiter->config.quantum_ns);
    least = max(least, (double)now);
    if (least < (double)arbiter->deadline)
        arbiter->deadline = (uint64_t)least;
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
        /* The container keeps what it was owed when it fell asleep, plus at most `grace` of what
         * was added during the sleep. */
        if (away > grace && t->owed_at < (double)now - grace)
            t->owed_at = clamp(t->owed_at + away - grace, t->owed_at, (double)now - grace);
    }
    t->owed_at = max(t->owed_at, (double)now - MAX_LAG_NS);
    /* Time that the others have lost is not made up for at the expense of a container that arrives
     * later, unless that container kept them waiting. */
    if (arbiter->late > 0 && slept &&
        t->owed_at <= (double)now + (double)arbiter->config.overdue_ns / t->guarantee) {
        arbiter->late = 0;
        arbiter_forgive(arbiter, now, t);
    }
    t->asleep = ARBITER_NEVER;
    arrive(arbiter, t, now);
}

void arbiter_busy(struct arbiter *arbiter, int32_t tenant, uint64_t busy_ns)
{
    struct tenant *t = &arbiter->tenants[tenant];

    t->busy_told = (double)busy_ns;
    /* Use before the first grant is not charged. */
    if (!t->stats.grants)
        t->busy_seen = t->busy_told;
}

/* Records that the holder is still watching running work of this grant, and so is not stuck. */
void arbiter_alive(struct arbiter *arbiter, uint64_t alive_ns)
{
    if (alive_ns > arbiter->alive)
        arbiter->alive = alive_ns;
    if (arbiter->holder != ARBITER_NONE)
        arbiter_sign(arbiter, arbiter->holder, alive_ns);
}

void arbiter_released(struct arbiter *arbiter, uint64_t release_ns, uint64_t residual_ns,
                      uint32_t n_active)
{
    if (arbiter->holder == ARBITER_NONE)
        return;
    if (release_ns < arbiter->start)
        release_ns = arbiter->start;
    if (residual_ns > arbiter->config.overdue_ns)
        residual_ns = arbiter->config.overdue_ns;
    if (!n_active)
        pass_over(&arbiter->tenants[arbiter->holder], arbiter->start);
    arbiter_end_grant(arbiter, release_ns + residual_ns, n_active);
}

static void grant(struct arbiter *arbiter, int32_t tenant, bool lent, uint64_t now)
{
    struct tenant *t = &arbiter->tenants[tenant];
    uint64_t begins = now > arbiter->gpu_free ? now : arbiter->gpu_free;
    bool others = false;
    uint64_t back;

    arbiter_settle(arbiter, t, lent, now);
    arbiter_forgive(arbiter, now, NULL);
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
    arbiter->beside = arbiter->last_holder != ARBITER_NONE && arbiter->last_holder != tenant &&
                      arbiter->config.beside_ns &&
                      now < arbiter->gpu_free + arbiter->config.beside_ns;
    arbiter->holder = tenant;
    arbiter->lent = lent;
    arbiter->epoch = ++arbiter->newest;
    arbiter->start = begins;
    arbiter->alive = 0;
    arbiter->contended = others;
    arbiter->standby = ARBITER_NONE;
    arbiter->open = !others && t->limit >= 1.0;
    arbiter->deadline = begins + (uint64_t)arbiter_grant_length(arbiter, t, now);
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
    back = arbiter_expected_back(arbiter, now);
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
 * Returns when the grant is taken from a holder that does not give it back. The arbiter waits no
 * longer than `overdue_ns` for a lent grant to be given back, because another container may be owed
 * that time.
 *
 * Work that is not waited for continues alongside the next holder's, and is charged
 * (arbiter_accrue()). The wait is bounded for all containers of the GPU together: otherwise several
 * containers that hold on to their grants one after the other could keep the rest waiting for
 * longer than any one of them may.
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
    /* If no sign of life comes for half of `overdue_ns` after the end or the last sign, no process
     * of the holder is awake to give the grant back. */
    return latest < seen + config->overdue_ns / 2 ? latest : seen + config->overdue_ns / 2;
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
        /* A cap has been set since the grant began, and applies from now on. */
        arbiter_close_open(arbiter, now, now + config->quantum_ns);
        arbiter->contended = false;
    }
    if (arbiter->open) {
        rival = arbiter_choose(arbiter, (double)now, arbiter->holder, &lent);
        if (rival == ARBITER_NONE && !arbiter_has_barred(arbiter, (double)now)) {
            viewp->wake_ns = arbiter_next_eligible(arbiter, now, arbiter->holder);
            return;
        }
        /* Another container wants its share, so the open grant ends now. */
        arbiter_close_open(arbiter, now, now);
        arbiter->contended = true;
        arbiter->standby = rival;
    }
    decide = arbiter->deadline > config->lead_ns ? arbiter->deadline - config->lead_ns : 0;
    rival = arbiter_choose(arbiter, (double)(now > arbiter->deadline ? now : arbiter->deadline),
                           arbiter->holder, &lent);
    if (rival != ARBITER_NONE || arbiter_has_barred(arbiter, (double)now))
        arbiter->contended = true;
    if (now < decide) {
        viewp->wake_ns = decide;
        return;
    }
    if (arbiter->standby == ARBITER_NONE && now < arbiter->deadline) {
        const struct tenant *t = &arbiter->tenants[arbiter->holder];

        if (rival != ARBITER_NONE) {
            arbiter->standby = rival;
        } else if (arbiter_expected_back(arbiter, now) == ARBITER_NEVER &&
                   !arbiter_has_barred(arbiter, (double)arbiter->deadline) &&
                   arbiter_may_continue(arbiter, (double)arbiter->deadline)) {
            /* No other container can use the GPU, so the grant is extended without a drain. */
            if (t->limit >= 1.0 &&
                arbiter_next_eligible(arbiter, now, arbiter->holder) == ARBITER_NEVER &&
                !arbiter_has_barred(arbiter, 1e300)) {
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

/* While no work outlasts its grant, extends the time for which such work is waited for. */
static void regain_patience(struct arbiter *arbiter, uint64_t now)
{
    bool late = arbiter->holder != ARBITER_NONE && !arbiter->open && now > arbiter->deadline;

    if (arbiter->patient && now > arbiter->patient && !late)
        arbiter->patience += PATIENCE * (double)(now - arbiter->patient);
    arbiter->patience = clamp(arbiter->patience, 0, (double)arbiter->config.longest_ns);
    arbiter->patient = now;
}

/*
 * Returns the tenant that is expected to hold the GPU next, and in `beginsp` when its grant begins.
 *
 * The holder may be named if others want the GPU but have to wait longer: it then prepares its next
 * grant while its queue is full. If it is alone, it has until its next grant to do so.
 */
static int32_t expect_next(const struct arbiter *arbiter, uint64_t now, uint64_t *beginsp)
{
    uint64_t end = arbiter->holder != ARBITER_NONE ? arbiter->deadline : now;
    int32_t next = ARBITER_NONE;
    double first = 1e300;
    bool lent, alone = true;

    if (end < now)
        end = now;
    *beginsp = end;
    if (arbiter->holder != ARBITER_NONE)
        next = arbiter_choose(arbiter, (double)end, arbiter->holder, &lent);
    if (next != ARBITER_NONE)
        return next;
    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *t = &arbiter->tenants[i];
        double at = eligible_at(t);

        if (i == arbiter->holder)
            at += (double)(end - arbiter->start) / (arbiter->lent ? t->limit : t->guarantee);
        else
            alone = alone && !wants(t);
        if (wants(t) && t->turn.role == ARBITER_ALONE && at < first) {
            next = i;
            first = at;
        }
    }
    if (next == arbiter->holder && alone)
        next = ARBITER_NONE;
    if (next != ARBITER_NONE && first > (double)end)
        *beginsp = (uint64_t)first;
    return next;
}

/* Names the next holder: the container that was chosen, or else the one that is expected. */
static void name_next(const struct arbiter *arbiter, uint64_t now, struct arbiter_view *viewp)
{
    uint64_t begins;

    viewp->standby = arbiter->standby;
    viewp->standby_ns = arbiter->deadline + arbiter->config.lead_ns;
    if (arbiter->standby != ARBITER_NONE || !arbiter->config.prepare_ns || arbiter->open)
        return;
    viewp->standby = expect_next(arbiter, now, &begins);
    viewp->expected = viewp->standby != ARBITER_NONE;
    viewp->standby_ns = begins + arbiter->config.prepare_ns;
}

void arbiter_step(struct arbiter *arbiter, uint64_t now, struct arbiter_view *viewp)
{
    bool lent;

    arbiter_accrue(arbiter, now);
    regain_patience(arbiter, now);
    memset(viewp, 0, sizeof *viewp);
    viewp->wake_ns = ARBITER_NEVER;
    if (arbiter->holder != ARBITER_NONE && !arbiter->open && now >= taken_at(arbiter)) {
        arbiter->tenants[arbiter->holder].stats.overdue++;
        pass_over(&arbiter->tenants[arbiter->holder], arbiter->deadline);
        arbiter_end_grant(arbiter, now, SEVERAL);
    }
    if (arbiter->holder == ARBITER_NONE) {
        int32_t next = arbiter_choose(arbiter, (double)now, ARBITER_NONE, &lent);

        if (next != ARBITER_NONE)
            grant(arbiter, next, lent, now);
        else
            viewp->wake_ns = arbiter_next_eligible(arbiter, now, ARBITER_NONE);
        if (viewp->wake_ns < arbiter->kept)
            viewp->wake_ns = arbiter->kept;
    }
    if (arbiter->holder != ARBITER_NONE)
        step_holder(arbiter, now, viewp);
    viewp->holder = arbiter->holder;
    viewp->epoch = arbiter->epoch;
    viewp->start_ns = arbiter->start;
    viewp->deadline_ns = arbiter->open ? ARBITER_NEVER : arbiter->deadline;
    viewp->contended = arbiter->holder != ARBITER_NONE && arbiter->contended;
    viewp->beside = arbiter->beside;
    name_next(arbiter, now, viewp);
}

void arbiter_stats(const struct arbiter *arbiter, int32_t tenant, struct arbiter_stats *statsp)
{
    *statsp = arbiter->tenants[tenant].stats;
    if (arbiter->holder == tenant) {
        statsp->since_ns = arbiter->start + (uint64_t)arbiter->shared;
        statsp->open = arbiter->open;
    }
}
