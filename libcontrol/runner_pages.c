/*
 * Reads the containers' ledgers and writes their grant pages for the runner.
 *
 * The containers write the ledgers. Every number in them is bounded before it is used, and a ledger
 * with arbitrary values harms only its own container.
 */
#include "runner_state.h"

#include "os.h"

#include <string.h>

#define SIGN_NS (500 * NS_PER_MS) /* a process silent for longer may have been stopped */

void runner_read_ledger(const struct runner_tenant *t, uint32_t epoch, uint64_t now,
                        struct report *reportp)
{
    uint32_t n_slots = atomic_load_acquire(&t->ledger->n_slots);

    memset(reportp, 0, sizeof *reportp);
    reportp->released = true;
    if (n_slots > LAYOUT_N_SLOTS)
        n_slots = LAYOUT_N_SLOTS;
    for (uint32_t i = 0; i < n_slots; i++) {
        char *base = (char *)t->ledger + LEDGER_SLOTS + i * sizeof(struct ledger_slot);
        struct ledger_device *d = (struct ledger_device *)(base + LEDGER_SLOT_DEVICES) + t->device;

        if (!atomic_load_relaxed(&((struct ledger_slot *)base)->state))
            continue;
        if (atomic_load_acquire(&d->want))
            reportp->want = true;
        /* A process that is stopped does not report the end of its work. */
        if (atomic_load_relaxed(&((struct ledger_slot *)base)->overruns[t->device]) &&
            (int64_t)(now - atomic_load_relaxed(&d->seen_ns)) < (int64_t)SIGN_NS)
            reportp->overruns = true;
        reportp->busy_ns += atomic_load_relaxed(&d->busy_ns);
        if (atomic_load_relaxed(&d->seen_ns) > reportp->seen_ns)
            reportp->seen_ns = atomic_load_relaxed(&d->seen_ns);
        if (atomic_load_seq_cst(&d->active_epoch) != epoch)
            continue;
        reportp->n_active++;
        if (atomic_load_acquire(&d->released_epoch) != epoch) {
            uint64_t alive = atomic_load_relaxed(&d->alive_ns);

            if (reportp->released || alive < reportp->alive_ns)
                reportp->alive_ns = alive;
            reportp->released = false;
        } else {
            uint64_t release = atomic_load_relaxed(&d->release_ns);
            uint64_t residual = atomic_load_relaxed(&d->residual_ns);

            if (release > reportp->release_ns)
                reportp->release_ns = release;
            if (residual > reportp->residual_ns)
                reportp->residual_ns = residual;
        }
    }
    reportp->released = reportp->released && reportp->n_active;
}

/* Whether a process is waiting for an NVML sample that begins after its request. A time in the
 * future is ignored as invalid. */
bool runner_tenant_due(const struct runner_tenant *t, uint64_t now)
{
    uint64_t since = atomic_load_relaxed(&t->grant->reconciled_ns);
    uint32_t n_slots = atomic_load_acquire(&t->ledger->n_slots);

    for (uint32_t i = 0; i < n_slots && i < LAYOUT_N_SLOTS; i++) {
        const char *base = (char *)t->ledger + LEDGER_SLOTS + i * sizeof(struct ledger_slot);
        const struct ledger_device *d =
            (const struct ledger_device *)(base + LEDGER_SLOT_DEVICES) + t->device;
        uint64_t requested = atomic_load_relaxed(&d->provisional_ns);

        if (atomic_load_relaxed(&((const struct ledger_slot *)base)->state) && requested > since &&
            requested <= now)
            return true;
    }
    return false;
}

/* A full memory barrier for Python, which also reads and writes the pages and has no atomics:
 * accesses before the call are ordered before those after it. */
RUNNER_EXPORT void runner_fence(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static void publish(struct runner_tenant *t, uint64_t deadline)
{
    atomic_store_release(&t->grant->deadline_ns, deadline);
    atomic_add_seq_cst(&t->grant->signal, 1);
    os_futex_wake(&t->grant->signal);
}

void runner_close_grant(struct runner_tenant *t)
{
    t->granted = false;
    atomic_store_relaxed(&t->grant->contended, 0);
    publish(t, 0);
}

static void count_wait(struct runner_waits *waits, uint64_t ns)
{
    uint64_t most = RUNNER_WAIT_LEAST_NS;
    int i = 0;

    while (i < RUNNER_N_WAITS - 1 && ns > most) {
        most *= 2;
        i++;
    }
    waits->counts[i]++;
    waits->ns += ns;
}

/* Tells the next holder that it may prepare work, or should be awake. A new grant clears the
 * notice, so a holder that is itself the next one is told in each of its grants. */
static void name_next(struct runner *runner, const struct arbiter_view *view)
{
    const struct arbiter_view *old = &runner->view;
    bool is_new = view->standby != old->standby || view->expected != old->expected ||
                  (view->standby == view->holder && view->epoch != old->epoch);
    struct runner_tenant *t;

    if (old->standby != ARBITER_NONE && view->standby != old->standby) {
        t = &runner->tenants[old->standby];
        if (t->used)
            atomic_store_relaxed(&t->grant->standby_ns, 0);
    }
    if (view->standby == ARBITER_NONE || !is_new || !(view->expected || runner->config.spin_ns))
        return;
    t = &runner->tenants[view->standby];
    atomic_store_release(&t->grant->standby_ns, view->standby_ns);
    atomic_add_seq_cst(&t->grant->signal, 1);
    os_futex_wake(&t->grant->signal);
}

/* Writes the arbiter's decision into the pages. */
void runner_apply(struct runner *runner, const struct arbiter_view *view)
{
    const struct arbiter_view *old = &runner->view;
    struct runner_tenant *t;

    for (int32_t i = 0; i < runner->n_tenants; i++) {
        t = &runner->tenants[i];
        if (t->used && t->together != arbiter_in_gang(runner->arbiter, i)) {
            t->together = !t->together;
            atomic_store_relaxed(&t->grant->together, t->together);
        }
    }
    if (old->holder != ARBITER_NONE && (view->holder != old->holder || view->epoch != old->epoch) &&
        runner->tenants[old->holder].used && runner->tenants[old->holder].granted)
        runner_close_grant(&runner->tenants[old->holder]);
    if (view->holder != ARBITER_NONE) {
        uint64_t deadline = view->deadline_ns == ARBITER_NEVER ? GRANT_OPEN : view->deadline_ns;

        t = &runner->tenants[view->holder];
        if (!t->granted || view->epoch != old->epoch) {
            t->granted = true;
            if (t->waiting_ns)
                count_wait(&t->waits,
                           view->start_ns > t->waiting_ns ? view->start_ns - t->waiting_ns : 0);
            t->waiting_ns = 0;
            runner->unused_at = view->start_ns + runner->config.unused_ns;
            atomic_store_relaxed(&t->grant->start_ns, view->start_ns);
            atomic_store_relaxed(&t->grant->contended, view->contended);
            atomic_store_relaxed(&t->grant->beside, view->beside);
            atomic_store_relaxed(&t->grant->standby_ns, 0);
            atomic_store_release(&t->grant->epoch, view->epoch);
            publish(t, deadline);
        } else if (view->contended != old->contended || deadline != old->deadline_ns) {
            /* This includes a grant that becomes longer: a launch that did not fit waits for it. */
            atomic_store_relaxed(&t->grant->contended, view->contended);
            publish(t, deadline);
        }
    }
    name_next(runner, view);
    runner->view = *view;
}

/* Reports the contents of the ledgers to the arbiter. */
void runner_observe(struct runner *runner, uint64_t now)
{
    for (int32_t i = 0; i < runner->n_tenants; i++) {
        struct runner_tenant *t = &runner->tenants[i];
        struct report report;

        if (!t->used)
            continue;
        runner_read_ledger(t, runner->view.epoch, now, &report);
        arbiter_overrun(runner->arbiter, i, report.overruns, now);
        arbiter_busy(runner->arbiter, i, report.busy_ns);
        arbiter_sign(runner->arbiter, i, report.seen_ns < now ? report.seen_ns : 0);
        report.want = report.want && !t->paused;
        arbiter_want(runner->arbiter, i, report.want, now);
        if (!report.want || t->granted)
            t->waiting_ns = 0;
        else if (!t->waiting_ns)
            t->waiting_ns = now;
        if (i != runner->view.holder)
            continue;
        arbiter_alive(runner->arbiter, report.alive_ns < now ? report.alive_ns : 0);
        if (report.released) {
            /* Otherwise a container could give its grant back late, and report an earlier time. */
            if (report.release_ns < runner->held_at)
                report.release_ns = runner->held_at;
            if (report.release_ns > now)
                report.release_ns = now;
            arbiter_released(runner->arbiter, report.release_ns, report.residual_ns,
                             report.n_active);
        } else if (!report.n_active && now >= runner->unused_at &&
                   (runner->view.contended || now >= runner->view.deadline_ns)) {
            arbiter_released(runner->arbiter, now, 0, 0);
        } else {
            runner->held_at = now;
        }
    }
}

/* Gives every container an open grant that stays in place, so that nothing is decided at a
 * launch. */
void runner_open_all(struct runner *runner, uint64_t now)
{
    for (int32_t i = 0; i < runner->n_tenants; i++) {
        struct runner_tenant *t = &runner->tenants[i];

        if (!t->used || t->paused || t->granted)
            continue;
        t->granted = true;
        t->waiting_ns = 0;
        atomic_store_relaxed(&t->grant->start_ns, now);
        atomic_store_relaxed(&t->grant->contended, 0);
        atomic_store_relaxed(&t->grant->beside, 0);
        atomic_store_relaxed(&t->grant->standby_ns, 0);
        atomic_store_release(&t->grant->epoch, atomic_load_relaxed(&t->grant->epoch) + 1);
        publish(t, GRANT_OPEN);
    }
}

/* Closes all open grants, because the arbiter makes grants again. Its grants have higher
 * numbers. */
void runner_close_all(struct runner *runner)
{
    for (int32_t i = 0; i < runner->n_tenants; i++) {
        struct runner_tenant *t = &runner->tenants[i];

        if (!t->used || !t->granted)
            continue;
        arbiter_begin(runner->arbiter, atomic_load_relaxed(&t->grant->epoch));
        runner_close_grant(t);
    }
}
