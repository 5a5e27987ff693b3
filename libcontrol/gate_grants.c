/*
 * Reads grants: until when work may start, and what changes for the gate when a new grant begins.
 *
 * Both follow from the grant page and this process's slot alone; nothing here calls the driver.
 */
#include "gate_parts.h"

#define GATE_SPIN_NS   (2 * NS_PER_MS)  /* longest time for which a core is kept busy */
#define GATE_BESIDE_NS (20 * NS_PER_MS) /* how long the previous holder's work may still run */

struct gate gate_devices[LAYOUT_N_DEVICES];

/* Notes the time until which the last work of another container runs alongside this one's, and for
 * how much longer it may run. Both times are bounded, whatever the page contains, and are 0 where
 * there is no such work. */
static void gate_beside(struct gate *g, const struct grant_device *grant)
{
    uint64_t lookahead = atomic_load_relaxed(&pages_grant()->lookahead_ns);
    uint64_t start = atomic_load_relaxed(&grant->start_ns);
    uint64_t beside = lookahead < GATE_BESIDE_NS ? lookahead : GATE_BESIDE_NS;
    uint64_t latest = os_now() + beside;

    if (atomic_load_relaxed(&grant->strategy) != STRATEGY_MPS ||
        !atomic_load_relaxed(&grant->beside))
        beside = start = 0;
    g->queue.begins_ns = start < latest ? start : latest;
    g->queue.beside_ns = beside;
}

/* Returns the factor by which one measurement may raise an estimate, because it may include other
 * containers' time. */
static float gate_rise(const struct grant_device *grant)
{
    if (atomic_load_relaxed(&grant->together))
        return ESTIMATE_RISE_WAITS;
    return atomic_load_relaxed(&grant->strategy) == STRATEGY_MPS ? ESTIMATE_RISE_BESIDE
                                                                 : ESTIMATE_RISE;
}

/* Resets the gate's state for a new grant, if one has begun. */
void gate_adopt(struct gate *g, const struct grant_device *grant)
{
    uint32_t epoch = atomic_load_acquire(&grant->epoch);

    if (epoch == g->epoch)
        return;
    if (g->passing)
        pass_stop(g, grant);
    g->epoch = epoch;
    g->active = false;
    g->released = false;
    g->drained = false;
    g->full = false;
    g->tried = 0;
    gate_beside(g, grant);
    g->queue.rise = gate_rise(grant);
    if (g->n_spins)
        g->n_spins--;
    if (g->n_long)
        g->n_long--;
    /* Other containers may have had the GPU since the previous grant, so no interval may span both
     * grants. Held work already has an era of its own (queue.h). */
    if (!g->holding)
        g->queue.era++;
}

/* Whether the governor is not running, its page is invalid (a heartbeat from the future, no page),
 * or this process enforces its quota on its own. */
bool gate_lost(uint64_t now)
{
    const struct grant_header *page = pages_grant();
    uint64_t heartbeat = atomic_load_relaxed(&page->heartbeat_ns);

    return now - heartbeat + GATE_LOST_NS >= 2 * GATE_LOST_NS ||
           atomic_load_relaxed(&page->magic) != GRANT_MAGIC || pages_alone();
}

/*
 * Returns the time until which work may start; 0: none may. While gate_lost() is true, the
 * container gives itself grants at its guaranteed share, unless the node's configuration says
 * otherwise.
 */
uint64_t gate_deadline(struct gate *g, const struct grant_device *grant, uint64_t now)
{
    uint64_t share = atomic_load_relaxed(&grant->compute);

    if (likely(!gate_lost(now)))
        return g->released ? 0 : atomic_load_acquire(&grant->deadline_ns);
    switch (pages_on_governor_loss()) {
    case 1:
        return 0;
    case 2:
        return GRANT_OPEN;
    default:
        if (now >= g->local_next) {
            g->local_deadline = now + GATE_LOCAL_NS;
            /* At least 1 %: a page with a share near 0 must not stop a program for an hour. */
            g->local_next = now + GATE_LOCAL_NS * 1000000 / (share > 10000 ? share : 10000);
        }
        return g->local_deadline;
    }
}

/* Returns the time until which to spin for a grant that the governor has announced; 0: not at all.
 * The time is bounded, whatever the page contains. */
uint64_t gate_spin_until(const struct grant_device *grant, uint64_t now)
{
    uint64_t standby = atomic_load_acquire(&grant->standby_ns);

    return standby < now + GATE_SPIN_NS ? standby : 0;
}
