/*
 * The part of one GPU's arbiter that concerns containers with several GPUs: their state on this
 * GPU, and the effect of their turns.
 *
 * gangs.c decides when a turn begins and ends, from this state on each of the container's GPUs.
 */
#include "arbiter_state.h"

#include <string.h>

/* Returns the time at which the holder's grant is over, if the tenant goes before all waiting
 * containers, and otherwise ARBITER_NEVER. The holder's work runs until then, whatever is decided:
 * a turn that began earlier would be delayed by a different time on each GPU, and work on the first
 * of them would spin. */
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

/* Returns the state, on this GPU, of a container with several GPUs. */
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
    standingp->free = arbiter->holder == ARBITER_NONE;
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

/* Sets what a container with several GPUs may do on this GPU from now on. If another container
 * holds the GPU when the turn begins, its grant is cut short. */
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
    } else if (arbiter->holder != ARBITER_NONE && turn->role == ARBITER_CALLED &&
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

/* Whether a tenant's GPUs are granted together, according to the last arbiter_turn(). */
bool arbiter_in_gang(const struct arbiter *arbiter, int32_t tenant)
{
    return arbiter->tenants[tenant].turn.role != ARBITER_ALONE;
}

/* Limits later grants: they end by `at`, but last at least SLICE_NS. */
void arbiter_align(struct arbiter *arbiter, uint64_t at)
{
    arbiter->align = at;
}

/* Keeps the GPU until `until` for a container in its turn, which may need it again in a moment
 * while its work on another GPU is waiting. */
void arbiter_keep(struct arbiter *arbiter, uint64_t until)
{
    arbiter->kept = until;
}

/* Ends the grant, because the GPU's own scheduler divides the time from now on. */
void arbiter_stop(struct arbiter *arbiter, uint64_t now)
{
    if (arbiter->holder != ARBITER_NONE)
        arbiter_end_grant(arbiter, now, SEVERAL);
}

/* Takes the grant away. The holder is blocked on a container that is itself waiting for this grant,
 * so the arbiter does not wait for the holder. */
void arbiter_take(struct arbiter *arbiter, uint64_t now)
{
    if (arbiter->holder == ARBITER_NONE)
        return;
    arbiter->tenants[arbiter->holder].stats.overdue++;
    arbiter_end_grant(arbiter, now, SEVERAL);
}
