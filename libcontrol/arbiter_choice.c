/*
 * Chooses which container gets the GPU next, when, and for how long.
 *
 * Nothing here changes the arbiter's state, so each function may be called for a time in the
 * future, or as if the holder did not exist.
 */
#include "arbiter_state.h"

static bool any_wants(const struct arbiter *arbiter)
{
    for (int32_t i = 0; i < ARBITER_N_TENANTS; i++)
        if (wants(&arbiter->tenants[i]) || (arbiter->open && i == arbiter->holder))
            return true;
    return false;
}

/* Returns the tenant other than `except` that should have the GPU at `now`, and in `lentp` whether
 * its time would be lent. */
int32_t arbiter_choose(const struct arbiter *arbiter, double now, int32_t except, bool *lentp)
{
    int32_t owed = ARBITER_NONE, lent = ARBITER_NONE;
    double best_owed = 0, best_lent = 0;
    bool present = any_wants(arbiter);

    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *t = &arbiter->tenants[i];

        if (!t->used || i == except || t->turn.role == ARBITER_BARRED)
            continue;
        if (t->turn.role == ARBITER_CALLED && (t->want || t->turn.unasked) &&
            (double)t->turn.until_ns > now) {
            /* The cap does not apply, because a collective may have begun on another GPU. The
             * container then owes that time. */
            *lentp = is_elastic(t) && t->owed_at > now;
            return i;
        }
        if (!t->want || (t->absent && present) || t->turn.role == ARBITER_CALLED ||
            now < (double)arbiter->kept)
            continue;
        if (t->owed_at <= now) {
            double due = due_at(arbiter, t);

            if (owed == ARBITER_NONE || due < best_owed) {
                owed = i;
                best_owed = due;
            }
        } else if (is_elastic(t) && t->capped_at <= now) {
            double tag = max(t->lent_tag, arbiter->lent_clock);

            if (lent == ARBITER_NONE || tag < best_lent) {
                lent = i;
                best_lent = tag;
            }
        }
    }
    *lentp = owed == ARBITER_NONE;
    return owed != ARBITER_NONE ? owed : lent;
}

/* Whether the holder's own quota allows it to continue after its deadline. */
bool arbiter_may_continue(const struct arbiter *arbiter, double at)
{
    const struct tenant *t = &arbiter->tenants[arbiter->holder];
    double used = max(0, at - (double)arbiter->start);

    if (t->limit >= 1.0)
        return true;
    return (arbiter->lent ? t->capped_at : t->owed_at) +
               used / (arbiter->lent ? t->limit : t->guarantee) <=
           at;
}

/* Returns the sum of the caps of `t` and of all other tenants that want the GPU or soon will. */
double arbiter_demand(const struct arbiter *arbiter, const struct tenant *t, uint64_t now)
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
 * Returns the length of a grant. Where there is enough idle time to pay for the hand-overs, grants
 * are short, so that shares are accurate over short intervals. The less idle time there is, the
 * longer grants are: the fraction of time spent on work, length / (length + cost), has to reach the
 * demand.
 */
double arbiter_grant_length(const struct arbiter *arbiter, const struct tenant *t, uint64_t now)
{
    double least = (double)arbiter->config.quantum_ns, most = (double)arbiter->config.most_ns;
    double cost = max((double)arbiter->config.switch_ns, t->overhead);
    double demand = arbiter_demand(arbiter, t, now);

    if (demand >= 1)
        return most;
    return clamp(cost * demand / (1 - demand), least, max(least, most));
}

/* Whether ending the holder's grant at `at` is worth a hand-over: whether `t` will then be far
 * enough behind the holder, if the holder runs until then. */
bool arbiter_is_behind(const struct arbiter *arbiter, const struct tenant *t, double at)
{
    const struct tenant *holder = &arbiter->tenants[arbiter->holder];
    double used = max(0, at - (double)arbiter->start);

    if (t->owed_at > at)
        return false;
    return arbiter->lent || due_at(arbiter, t) + (double)arbiter->config.quantum_ns / t->guarantee <
                                due_at(arbiter, holder) + used / holder->guarantee;
}

/* Returns when the holder's grant should end in favour of an idle container that is expected to
 * want the GPU soon and will then be behind the holder; ARBITER_NEVER if there is none. */
uint64_t arbiter_expected_back(const struct arbiter *arbiter, uint64_t now)
{
    uint64_t first = ARBITER_NEVER;

    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *t = &arbiter->tenants[i];
        double at;

        if (!t->used || t->want || i == arbiter->holder || !is_napping(t, now))
            continue;
        at = max((double)t->asleep + t->nap, (double)now);
        if (at < (double)first && arbiter_is_behind(arbiter, t, at))
            first = (uint64_t)at;
    }
    return first;
}

/* Returns the earliest time at which a tenant that wants the GPU, other than `except`, may have it.
 * A barred tenant is skipped: it may have the GPU when its gang's turn comes. */
uint64_t arbiter_next_eligible(const struct arbiter *arbiter, uint64_t now, int32_t except)
{
    double best = 1e300;
    bool present = any_wants(arbiter);

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

/* Whether a tenant other than the holder wants the GPU and its quota allows that, but it has to
 * wait for its turn. */
bool arbiter_has_barred(const struct arbiter *arbiter, double now)
{
    for (int32_t i = 0; i < arbiter->n; i++) {
        const struct tenant *t = &arbiter->tenants[i];

        if (wants(t) && i != arbiter->holder && t->turn.role == ARBITER_BARRED &&
            eligible_at(t) <= now)
            return true;
    }
    return false;
}
