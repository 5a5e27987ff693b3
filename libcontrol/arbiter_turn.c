/*
 * A container with several GPUs, on one of them: how it stands here, and what its turn changes.
 *
 * gangs.c decides when the turn is, from how the container stands on each of its GPUs.
 */
#include "arbiter_state.h"

#include <string.h>

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
        !standingp->holds ||
        arbiter_may_continue(arbiter, max((double)now, (double)arbiter->deadline));
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
            arbiter_close_open(arbiter, now, turn->until_ns);
        else
            arbiter->deadline = turn->until_ns;
    } else if (arbiter->holder != ARBITER_NOBODY && turn->role == ARBITER_CALLED &&
               (t->want || turn->unasked)) {
        least = arbiter->start + (uint64_t)SLICE_NS;
        if (least < now)
            least = now;
        if (arbiter->open)
            arbiter_close_open(arbiter, now, now);
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
    arbiter_end_grant(arbiter, now, SEVERAL);
}
