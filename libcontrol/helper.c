/*
 * The helper: one thread per GPU that watches the grant for the application.
 *
 * It lets held work run when a grant begins. It gives the grant back at its end, as soon as no more
 * than `lookahead_ns` of work is left, so that the next container's work begins while the last work
 * of this one drains. It gives the grant back earlier if another container is waiting and nothing
 * has been launched for `idle_release_ns`.
 */
#include "gate.h"
#include "parking.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

/* All signals but the two that the C library itself sends to every thread (cancel, setxid): a
 * thread that changes the user ID waits for an answer from each thread. */
#define HELPER_BLOCKED    (~(3ull << 31))
#define HELPER_ALONE_NS   (NS_PER_MS)       /* interval between checks while the governor is away */
#define HELPER_HELD_NS    (50 * NS_PER_MS)  /* interval between checks of whether it is away */
#define HELPER_REFRESH_NS (100 * NS_PER_MS) /* interval between queries of what pools hold */
#define HELPER_OPEN_NS    (200 * NS_PER_MS) /* sleep under an open grant; bounded by the refresh */

/* Interval between heartbeats, which show that overdue work is being watched. */
#define HELPER_SIGN_NS (5 * NS_PER_MS)

/*
 * Work that is this much later than it should be is presumably waiting for something, possibly for
 * a container that is itself waiting for the GPU: a collective's kernel spins until another
 * container runs its counterpart. If the work ends soon after others have had the GPU, it was
 * waiting, and next time the GPU is given back sooner. Otherwise the work is long, and long work is
 * waited for.
 */
#define HELPER_STUCK_NS   (20 * NS_PER_MS)
#define HELPER_NEW_NS     (100 * NS_PER_MS) /* the same, for work never measured before */
#define HELPER_SPINS_NS   (NS_PER_MS)       /* the same, where work waited recently */
#define HELPER_MET_NS     (100 * NS_PER_MS) /* work that waited ends within this time: see above */
#define HELPER_MEMORY     64                /* grants for which either finding is remembered */
#define HELPER_TRIAL_NS   (200 * NS_PER_MS) /* how long work is waited for in a trial */
#define HELPER_TRIALS     64 /* at least one in this many times is a trial; at first, more are */
#define HELPER_ENTER_NS   (20 * NS_PER_MS) /* longest wait for a launch that is on its way */
#define HELPER_LATE_NS    (NS_PER_MS)      /* and at most this long after the end of the grant */
#define HELPER_LOOK_NS    (NS_PER_MS)      /* interval between checks for the end of late work */
#define HELPER_ASK_NS     (20 * NS_PER_US) /* the same, where others are waiting for the end */
#define HELPER_OVERRUN_NS (5 * NS_PER_MS)  /* the same, for work of a grant that is over */

#define HELPER_LAST_NS (100 * NS_PER_MS) /* longest time that exit() waits for a helper */

/* Set when the process ends: from then on no helper calls the driver. */
static uint32_t helpers_end;

/* Gives the grant back. `left`: how much work is still running, in ns. */
static void helper_release(struct gate *g, const struct grant_device *grant,
                           struct ledger_device *ledger, uint64_t now, uint64_t left)
{
    uint64_t start = atomic_load_relaxed(&grant->start_ns);
    uint64_t deadline = atomic_load_relaxed(&grant->deadline_ns);

    gate_collect(g);
    g->released = true;
    /* The planned length, not the actual one: held work overruns the grant. */
    if (deadline > start && deadline != GRANT_OPEN && grant->epoch == g->epoch)
        g->granted_ns = g->granted_ns ? (g->granted_ns + (deadline - start)) / 2 : deadline - start;
    atomic_store_relaxed(&ledger->residual_ns, left);
    atomic_store_relaxed(&ledger->release_ns, now);
    if (!g->active)
        atomic_store_seq_cst(&ledger->active_epoch, g->epoch);
    atomic_store_release(&ledger->released_epoch, g->epoch);
    pages_poke();
}

/* Notes that late work waited for others, or that it is long. */
static void helper_learn(struct gate *g, bool waited)
{
    g->n_spins = waited ? HELPER_MEMORY : 0;
    g->n_long = waited ? 0 : HELPER_MEMORY;
    g->tried = 0;
    if (!waited)
        g->n_tries = 0;
}

/* Notes that the GPU goes to others although the work that is running there has not ended. */
static void helper_give_up(struct gate *g, uint64_t now)
{
    uint32_t oldest = g->queue.n_markers ? g->queue.markers[g->queue.head].serial : 0;

    if (g->given_up == oldest)
        return; /* given up before, and still running */
    g->n_tries++;
    g->tried = 0;
    g->given_up_ns = now;
    g->given_up = oldest;
    queue_give_up(&g->queue, now + HELPER_MET_NS);
}

/* Learns whether work that was given up waited for others, or is long. */
static void helper_follow(struct gate *g, uint64_t now)
{
    const struct queue *q = &g->queue;
    bool ended = !q->n_markers || q->markers[q->head].serial != g->given_up;
    bool soon = now < g->given_up_ns + HELPER_MET_NS;

    if (!g->given_up_ns || ended != soon) {
        /* It has ended, but no check came in time, so nothing can be concluded. */
        if (ended)
            g->given_up_ns = 0;
        return;
    }
    helper_learn(g, ended);
    g->given_up_ns = 0;
}

/* Whether late work that should be given up is waited for as a trial: the second time, the fourth,
 * the eighth and so on. It may have been chance that the work ended soon after others had the GPU,
 * and the duration of work that is always given up is never learned. */
static bool helper_tries(const struct gate *g)
{
    unsigned n = g->n_tries % HELPER_TRIALS;

    return n && !(n & (n + 1));
}

/* Gives the GPU back if another container is waiting for it and the running work seems to be
 * waiting as well. How much work is left is then not known. */
static bool helper_stuck(struct gate *g, const struct grant_device *grant,
                         struct ledger_device *ledger, uint64_t now)
{
    bool known = false;
    uint64_t length = 0;
    uint64_t late = queue_late(&g->queue, &g->estimate, now, &length, &known);
    uint64_t most = known ? HELPER_STUCK_NS : HELPER_NEW_NS;
    uint32_t oldest = queue_runs(&g->queue) ? g->queue.markers[g->queue.head].serial : 0;

    if (g->n_long && late >= HELPER_STUCK_NS)
        g->n_long = HELPER_MEMORY;
    if (!atomic_load_relaxed(&grant->deadline_ns))
        g->tried = 0; /* the grant was taken */
    /* The work ended while no other container had the GPU, and not because of work that another
     * container had left there. */
    if (g->tried && g->tried != oldest) {
        if (g->tried_late > HELPER_STUCK_NS)
            helper_learn(g, false);
        else
            g->n_tries++;
        g->tried = 0;
    }
    /* Work that waits for another GPU of this container is the governor's concern. */
    if (g->n_spins)
        most = atomic_load_relaxed(&grant->together) ? HELPER_STUCK_NS
               : length / 2 > HELPER_SPINS_NS        ? length / 2
                                                     : HELPER_SPINS_NS;
    if (late < most || g->n_long || !atomic_load_relaxed(&grant->contended))
        return false;
    if (g->n_spins && helper_tries(g) && late < HELPER_TRIAL_NS) {
        g->tried = oldest;
        g->tried_late = late;
        return false;
    }
    helper_give_up(g, now);
    helper_release(g, grant, ledger, now, 0);
    return true;
}

/* Marks the running work in every context that the application has used. */
static void helper_mark_tails(struct gate *g, struct ledger_device *ledger)
{
    CUcontext ctx = NULL;

    if (g->holding)
        return;
    g->n_marking++; /* nothing is held from here on */
    for (unsigned i = 0; i < QUEUE_N_STREAMS; i++) {
        struct queue_stream *s = &g->queue.streams[i];
        CUcontext next = s->ctx;
        bool current;

        if (!s->used || !s->unmarked || next == ctx)
            continue;
        g->n_calls++;
        os_unlock(&g->lock);
        current = driver->cuCtxSetCurrent(next) == CUDA_SUCCESS;
        gate_lock(g);
        g->n_calls--;
        if (!current)
            continue;
        ctx = next;
        gate_mark_tails(g, ctx, ledger);
    }
    if (ctx) {
        /* This thread keeps no context current, because a context may end. */
        os_unlock(&g->lock);
        driver->cuCtxSetCurrent(NULL);
        gate_lock(g);
    }
    g->n_marking--;
    g->blind = false;
}

/* Handles a grant that has not been used yet: the thread that requested it is slow, or is no longer
 * waiting. In the latter case the grant is given back. */
static uint64_t helper_unused(struct gate *g, const struct grant_device *grant,
                              struct ledger_device *ledger, uint64_t now, uint64_t due)
{
    uint64_t idle = atomic_load_relaxed(&pages_grant()->idle_release_ns);

    if (!atomic_load_relaxed(&grant->contended))
        return due;
    if (!atomic_load_acquire(&ledger->want) &&
        now >= atomic_load_relaxed(&grant->start_ns) + idle) {
        helper_release(g, grant, ledger, now, queue_left(&g->queue, now));
        return NS_PER_S;
    }
    return idle < due ? idle : due;
}

/* Returns how long an idle holder waits for the program: `idle_release_ns`, or hardly at all if the
 * program usually pauses for longer than that. */
static uint64_t helper_idle(const struct gate *g)
{
    uint64_t idle = atomic_load_relaxed(&pages_grant()->idle_release_ns);

    return g->pause_ns > idle && idle > GATE_PAUSE_NS ? GATE_PAUSE_NS : idle;
}

/* Handles the middle of a grant: an idle holder gives it back if another container is waiting. */
static uint64_t helper_middle(struct gate *g, const struct grant_device *grant,
                              struct ledger_device *ledger, uint64_t now, uint64_t due)
{
    uint64_t idle = helper_idle(g);
    uint64_t left = queue_left(&g->queue, now);
    uint32_t epoch = g->epoch;

    if (!atomic_load_relaxed(&grant->contended))
        return due;
    if (g->n_spins) {
        if (helper_stuck(g, grant, ledger, now))
            return HELPER_LOOK_NS;
        if (due > HELPER_SPINS_NS / 2)
            due = HELPER_SPINS_NS / 2;
    }
    if (left || now < g->last_launch + idle)
        return left + idle < due ? left + idle : due;
    helper_mark_tails(g, ledger);
    if (g->epoch != epoch)
        return 0;
    /* Only the model can tell when work without a marker ends, and it learns from markers. */
    if (gate_unmarked(g))
        return due;
    if (queue_runs(&g->queue))
        return 50 * NS_PER_US;
    helper_release(g, grant, ledger, now, queue_left(&g->queue, now));
    return NS_PER_S;
}

/* Returns the time until the next check of work that takes longer than predicted: the longer it is
 * overdue, the less a late answer matters. */
static uint64_t helper_patience(uint64_t deadline, uint64_t now)
{
    uint64_t overdue = now > deadline ? now - deadline : 0;

    if (overdue / 20 < 30 * NS_PER_US)
        return 30 * NS_PER_US;
    return overdue / 20 < NS_PER_MS ? overdue / 20 : NS_PER_MS;
}

/* Handles the end of a grant: gives it back when little enough work is left. */
static uint64_t helper_end(struct gate *g, const struct grant_device *grant,
                           struct ledger_device *ledger, uint64_t now, uint64_t deadline)
{
    uint64_t lookahead = atomic_load_relaxed(&pages_grant()->lookahead_ns);
    struct queue *q = &g->queue;
    uint32_t epoch = g->epoch;
    uint64_t left;

    if (!g->drained) {
        g->drained = true;
        helper_mark_tails(g, ledger);
        gate_retire(g, ledger, now, true);
        if (g->epoch != epoch)
            return 0;
        now = os_now();
    }
    if (helper_stuck(g, grant, ledger, now))
        return HELPER_LOOK_NS;
    atomic_store_relaxed(&ledger->alive_ns, now);
    left = queue_left(q, now);
    if (left > lookahead && g->n_spins)
        return left - lookahead < HELPER_LOOK_NS ? left - lookahead : HELPER_LOOK_NS;
    if (left > lookahead)
        return left - lookahead < HELPER_SIGN_NS ? left - lookahead : HELPER_SIGN_NS;
    /* No more work comes in this grant once work is held, or once the next launch does not fit. */
    if (g->holding || g->full || now + left + 10 * NS_PER_US >= deadline) {
        struct queue_marker *oldest = q->n_markers ? &q->markers[q->head] : NULL;

        /* This marker should have been reached by now: more work is left than predicted. */
        if (oldest && oldest->era == q->era && oldest->expected + 20 * NS_PER_US < now)
            return helper_patience(deadline, now);
        if (atomic_load_relaxed(&grant->strategy) == STRATEGY_MPS) {
            if (queue_asks(q) && queue_runs(q))
                return left > HELPER_ASK_NS ? left : HELPER_ASK_NS;
            queue_share(q);
        }
        helper_release(g, grant, ledger, now, queue_left(&g->queue, now));
        return NS_PER_S;
    }
    return deadline - now - left;
}

/* Checks the grant and the queue, does what is due, and returns how long the helper may sleep, in
 * ns. The lock is held before and after, and released around calls into the driver. */
static uint64_t helper_step(struct gate *g, const struct grant_device *grant,
                            struct ledger_device *ledger)
{
    uint64_t lookahead = atomic_load_relaxed(&pages_grant()->lookahead_ns);
    uint64_t now = os_now();
    uint64_t deadline, end;
    bool lost;

    gate_adopt(g, grant);
    atomic_store_relaxed(&ledger->seen_ns, now);
    deadline = atomic_load_acquire(&grant->deadline_ns);
    gate_open(g, grant, ledger, now);
    lost = gate_lost(now);
    if (g->passing && (lost || deadline != GRANT_OPEN))
        pass_stop(g, grant);
    /* After an open grant the model knows little, so it depends on the markers. */
    if (g->blind && !g->passing)
        helper_mark_tails(g, ledger);
    gate_retire(g, ledger, now, true);
    /* The lock was released in between. */
    gate_adopt(g, grant);
    deadline = atomic_load_acquire(&grant->deadline_ns);
    now = os_now();
    if (unlikely(lost))
        return g->holding ? HELPER_ALONE_NS : HELPER_HELD_NS;
    helper_follow(g, now);
    if (!deadline && g->active && !g->released && !g->given_up_ns && queue_runs(&g->queue))
        helper_give_up(g, now); /* the grant was taken */
    if (g->given_up_ns && (g->released || !deadline))
        return HELPER_LOOK_NS;
    if (g->released || (!g->active && now >= deadline))
        return queue_overruns(&g->queue) ? HELPER_OVERRUN_NS
               : g->holding              ? HELPER_HELD_NS
                                         : NS_PER_S;
    if (deadline == GRANT_OPEN) {
        pass_tell_all(grant);
        return HELPER_OPEN_NS;
    }
    end = now + lookahead < deadline ? deadline - lookahead - now : 0;
    if (!g->active)
        return helper_unused(g, grant, ledger, now, end);
    /* The holder looks idle but is not: a launch is on its way. */
    if (g->n_entering[g->queue.era & 1] && now < g->entering_ns + HELPER_ENTER_NS &&
        now < deadline + HELPER_LATE_NS)
        return 20 * NS_PER_US;
    /* Once something is held or does not fit, the grant ends when the queue does. */
    if ((g->holding || g->full) && queue_left(&g->queue, now) < end + lookahead)
        return helper_end(g, grant, ledger, now, deadline);
    if (end)
        return helper_middle(g, grant, ledger, now, end);
    return helper_end(g, grant, ledger, now, deadline);
}

static void *helper_run(void *argument)
{
    unsigned device = (unsigned)(uintptr_t)argument;
    struct gate *g = &gate_devices[device];
    const struct grant_device *grant = pages_grant_device(device);
    struct gate_visit visit;
    uint64_t refresh_at = 0;

    gate_visit_begin(&visit); /* for the life of the thread */
    parking_exempt();
    os_call(SYS_prctl, PR_SET_NAME, "tidegate");
    os_call(SYS_prctl, PR_SET_TIMERSLACK, 1000);
    for (;;) {
        uint32_t seen = atomic_load_acquire(&grant->signal);
        uint64_t standby, ns;

        atomic_store_seq_cst(&g->helping, true);
        if (atomic_load_seq_cst(&helpers_end))
            break;
        gate_lock(g);
        ns = helper_step(g, grant, pages_ledger_device(device));
        standby = g->holding ? gate_spin_until(grant, os_now()) : 0;
        atomic_store_relaxed(&pages_ledger_device(device)->pending, g->queue.n_markers);
        atomic_store_relaxed(&pages_slot()->overruns[device], queue_overruns(&g->queue));
        os_unlock(&g->lock);
        /* This detects what pools gave back on their own. */
        if (os_now() >= refresh_at) {
            uint64_t began = os_now();

            account_refresh((int)device);
            atomic_store_release(&pages_ledger_device(device)->asked_ns, began);
            pages_rejoin();
            refresh_at = os_now() + HELPER_REFRESH_NS;
        }
        atomic_store_seq_cst(&g->helping, false);
        if (ns > HELPER_REFRESH_NS)
            ns = HELPER_REFRESH_NS;
        /* The governor has announced the grant: a core that sleeps now would answer late. */
        while (os_now() < standby && atomic_load_acquire(&grant->signal) == seen)
            os_relax();
        if (ns < 5 * NS_PER_US)
            ns = 5 * NS_PER_US;
        os_futex_wait(&grant->signal, seen, ns);
    }
    atomic_store_seq_cst(&g->helping, false);
    return NULL;
}

/*
 * Runs during exit(). The library's destructors run before the driver's own. When the latter run,
 * no helper may be in one of the driver's functions, and no work may still be held, because no
 * helper would let it run. Destructors of other libraries may still launch afterwards. The call to
 * exit() may have interrupted a thread that holds the lock, so nothing here waits for ever.
 */
__attribute__((destructor)) static void helpers_finish(void)
{
    uint64_t end = os_now() + HELPER_LAST_NS;

    atomic_store_seq_cst(&helpers_end, true);
    for (unsigned device = 0; device < LAYOUT_N_DEVICES; device++) {
        struct gate *g = &gate_devices[device];
        bool locked = false;

        if (!atomic_load_acquire(&g->started))
            continue;
        while (atomic_load_seq_cst(&g->helping) && os_now() < end)
            os_sleep(20 * NS_PER_US);
        while (!(locked = os_trylock(&g->lock)) && os_now() < end)
            os_sleep(20 * NS_PER_US);
        if (!locked)
            continue;
        gate_end_holds(g, pages_ledger_device(device));
        os_unlock(&g->lock);
    }
}

/* Signals are blocked at the thread's creation, so that it receives none of the application's
 * signals. */
cold bool helper_thread(void *(*run)(void *), void *argument)
{
    uint64_t all = HELPER_BLOCKED, before = 0;
    int saved = errno;
    pthread_t thread;
    bool runs;

    os_call(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof all);
    runs = pthread_create(&thread, NULL, run, argument) == 0;
    if (runs)
        pthread_detach(thread);
    os_call(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof all);
    errno = saved;
    return runs;
}

cold void helper_start(struct gate *g, unsigned device)
{
    if (helper_thread(helper_run, (void *)(uintptr_t)device))
        return;
    g->no_holds = true; /* no helper would let held work run */
    control_log("cannot start a thread for the gate: GPU time will be given back late");
}
