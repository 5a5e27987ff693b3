/*
 * The runner drives the arbiter on the real clock: it reads the containers' ledgers and writes
 * their grant pages.
 *
 * There is one thread per GPU, which does not hold Python's interpreter lock. It wakes when a
 * container's process sends a byte (the container wants the GPU, or gives it back), when the next
 * step of the arbiter is due, and ten times a second to write the heartbeat. It reads and writes
 * the pages (runner_pages.c).
 *
 * The mutex is held while pass() runs, and while containers are added or removed, so a page is
 * never touched after runner_remove() has returned.
 *
 * Containers with several GPUs are granted them together. The threads share the state of gangs.c
 * under a mutex that is taken last, for the policy alone; the only system call under it is the
 * write to the eventfd that wakes another GPU's thread. A GPU that belongs to no such container is
 * stepped without that mutex.
 */
#include "runner_state.h"

#include "os.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#define HEARTBEAT_NS (100 * NS_PER_MS)

static void poke(struct runner *runner)
{
    uint64_t one = 1;

    if (write(runner->wake_fd, &one, sizeof one) < 0)
        return; /* full: the thread has been woken already */
}

/* The runners' mutex is held. */
static void poke_each(struct runners *runners, uint64_t gpus)
{
    for (uint32_t i = 0; i < GANGS_N_GPUS && gpus >> i; i++)
        if (gpus >> i & 1 && runners->each[i])
            poke(runners->each[i]);
}

/* Packs the data that epoll returns for a socket: the descriptor in the lower half, and above it
 * the process's other GPUs, which are woken by the thread that reads a byte. */
static uint64_t pack_watch(int fd, uint64_t also)
{
    return also << 32 | (uint32_t)fd;
}

/* Reads only once, so that the socket of a process that keeps writing is read again only after all
 * others. */
static void drain(struct runner *runner, int fd, uint64_t also)
{
    char bytes[4096];

    if (read(fd, bytes, sizeof bytes) < 0)
        return; /* there was nothing to read */
    if (also) {
        pthread_mutex_lock(&runner->runners->mutex);
        poke_each(runner->runners, also);
        pthread_mutex_unlock(&runner->runners->mutex);
    }
}

static void wait_until(struct runner *runner, uint64_t until)
{
    struct epoll_event events[16];
    uint64_t now = os_now();
    uint64_t ns = until > now ? until - now : 0;
    struct pollfd ready = {.fd = runner->epoll_fd, .events = POLLIN};
    struct timespec timeout;
    int n;

    if (ns > HEARTBEAT_NS)
        ns = HEARTBEAT_NS;
    timeout.tv_sec = (time_t)(ns / NS_PER_S);
    timeout.tv_nsec = (long)(ns % NS_PER_S);
    /* epoll_pwait2 is missing in Linux before 5.11 and in QEMU's user mode, and the timeout of
     * epoll_wait is in milliseconds. */
    if (ppoll(&ready, 1, &timeout, NULL) <= 0)
        return;
    n = epoll_wait(runner->epoll_fd, events, 16, 0);
    for (int i = 0; i < n; i++) {
        int fd = (int)(uint32_t)events[i].data.u64;

        if (events[i].events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) {
            epoll_ctl(runner->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
            close(fd);
        } else {
            drain(runner, fd, events[i].data.u64 >> 32);
        }
    }
}

/* Watches for the holder's report near the end of a grant: a core that was asleep then would
 * respond late. */
static void spin(struct runner *runner, uint64_t deadline)
{
    uint64_t lookahead = runner->config.lookahead_ns;
    uint64_t from = deadline - lookahead - runner->config.spin_ns / 2;
    uint64_t to = deadline - lookahead + runner->config.spin_ns / 2;

    if (os_now() < from)
        wait_until(runner, from);
    while (os_now() < to && !atomic_load_acquire(&runner->stop)) {
        struct report report;
        int32_t holder;

        pthread_mutex_lock(&runner->mutex);
        holder = runner->view.holder;
        if (holder != ARBITER_NONE && runner->tenants[holder].used)
            runner_read_ledger(&runner->tenants[holder], runner->view.epoch, os_now(), &report);
        else
            report.released = true;
        pthread_mutex_unlock(&runner->mutex);
        if (report.released)
            return;
        for (int i = 0; i < 20; i++)
            os_relax();
    }
}

static void step(struct runner *runner, uint64_t now, struct arbiter_view *viewp)
{
    struct runners *runners = runner->runners;
    bool concerned = false;

    if (runners) {
        pthread_mutex_lock(&runners->mutex);
        concerned = gangs_concern(runners->gangs, runner->gpu);
        if (concerned)
            poke_each(runners,
                      gangs_step(runners->gangs, runner->gpu, runner->arbiter, now, viewp));
        pthread_mutex_unlock(&runners->mutex);
    }
    if (!concerned)
        arbiter_step(runner->arbiter, now, viewp);
}

/* Checks whether a process is waiting for an NVML sample. The mutex is held. */
static bool check_due(struct runner *runner, uint64_t now)
{
    bool due = false;

    for (int32_t i = 0; i < runner->n_tenants && !due; i++)
        due = runner->tenants[i].used && runner_tenant_due(&runner->tenants[i], now);
    return due;
}

/* Reports that a process is waiting, but only once between two calls to runner_due(), because a
 * process could otherwise cause any number of reports. */
static void report_due(struct runner *runner, uint64_t now)
{
    uint64_t one = 1;

    if (runner->due || !check_due(runner, now))
        return;
    runner->due = true;
    if (write(runner->due_fd, &one, sizeof one) < 0)
        return; /* full: a report is already pending */
}

/* Reads the ledgers, steps the arbiter, updates the pages, and returns when to do so again. The
 * mutex is held. */
static uint64_t pass(struct runner *runner, uint64_t now)
{
    struct arbiter_view view;

    if (runner->open) {
        view = runner->view;
        view.wake_ns = now + HEARTBEAT_NS;
        runner_open_all(runner, now);
    } else {
        runner_observe(runner, now);
        step(runner, now, &view);
        runner_apply(runner, &view);
    }
    for (int32_t i = 0; i < runner->n_tenants; i++)
        if (runner->tenants[i].used)
            atomic_store_relaxed(&runner->tenants[i].header->heartbeat_ns, now);
    report_due(runner, now);
    if (view.holder != ARBITER_NONE && view.contended && runner->unused_at > now &&
        runner->unused_at < view.wake_ns)
        return runner->unused_at;
    return view.wake_ns;
}

static void *run(void *argument)
{
    struct runner *runner = argument;

    prctl(PR_SET_NAME, "tidegate-arb");
    prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul);
    while (!atomic_load_acquire(&runner->stop)) {
        struct arbiter_view view;
        uint64_t now, until;

        pthread_mutex_lock(&runner->mutex);
        now = os_now();
        until = pass(runner, now);
        view = runner->view;
        pthread_mutex_unlock(&runner->mutex);
        if (runner->config.spin_ns && view.standby != ARBITER_NONE && !view.expected &&
            view.deadline_ns > now + runner->config.lookahead_ns + runner->config.spin_ns &&
            view.deadline_ns != ARBITER_NEVER && view.holder != ARBITER_NONE)
            spin(runner, view.deadline_ns);
        else
            wait_until(runner, until);
    }
    return NULL;
}

RUNNER_EXPORT struct runners *runners_new(const struct runner_config *config)
{
    struct runners *runners = calloc(1, sizeof *runners);

    if (!runners)
        return NULL;
    pthread_mutex_init(&runners->mutex, NULL);
    runners->gangs = gangs_new(&config->arbiter);
    return runners->gangs ? runners : runners_free(runners);
}

/* Called after the last runner has been freed. */
RUNNER_EXPORT struct runners *runners_free(struct runners *runners)
{
    if (!runners)
        return NULL;
    gangs_free(runners->gangs);
    pthread_mutex_destroy(&runners->mutex);
    free(runners);
    return NULL;
}

static void runners_join(struct runners *runners, struct runner *runner)
{
    pthread_mutex_lock(&runners->mutex);
    for (uint32_t i = 0; i < GANGS_N_GPUS && !runner->runners; i++)
        if (!runners->each[i]) {
            runners->each[i] = runner;
            runner->runners = runners;
            runner->gpu = i;
        }
    pthread_mutex_unlock(&runners->mutex);
}

/* Makes a container's tenants a gang, which is granted its GPUs together. Returns its number, or
 * ARBITER_NONE if the GPUs have to be granted one by one. The gang has to be removed before any
 * of the tenants. */
RUNNER_EXPORT int32_t runners_add(struct runners *runners, struct runner *const *each,
                                  const int32_t *tenants, uint32_t n)
{
    uint32_t gpus[GANGS_N_OWN];
    int32_t gang;

    if (n > GANGS_N_OWN)
        return ARBITER_NONE;
    for (uint32_t i = 0; i < n; i++) {
        if (each[i]->runners != runners)
            return ARBITER_NONE;
        gpus[i] = each[i]->gpu;
    }
    pthread_mutex_lock(&runners->mutex);
    gang = gangs_add(runners->gangs, gpus, tenants, n);
    pthread_mutex_unlock(&runners->mutex);
    return gang;
}

RUNNER_EXPORT void runners_remove(struct runners *runners, int32_t gang)
{
    pthread_mutex_lock(&runners->mutex);
    gangs_remove(runners->gangs, gang);
    poke_each(runners, UINT64_MAX);
    pthread_mutex_unlock(&runners->mutex);
}

/* Returns NULL on failure. `runners` may be NULL: the GPU then takes part in no gang. */
RUNNER_EXPORT struct runner *runner_new(const struct runner_config *config, struct runners *runners)
{
    struct epoll_event event = {.events = EPOLLIN};
    struct runner *runner = calloc(1, sizeof *runner);

    if (!runner)
        return NULL;
    runner->config = *config;
    runner->view.holder = ARBITER_NONE;
    runner->view.standby = ARBITER_NONE;
    pthread_mutex_init(&runner->mutex, NULL);
    runner->arbiter = arbiter_new(&config->arbiter);
    runner->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    runner->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    runner->due_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    event.data.u64 = pack_watch(runner->wake_fd, 0);
    if (!runner->arbiter || runner->epoll_fd < 0 || runner->wake_fd < 0 || runner->due_fd < 0 ||
        epoll_ctl(runner->epoll_fd, EPOLL_CTL_ADD, runner->wake_fd, &event) < 0)
        return runner_free(runner);
    if (runners)
        runners_join(runners, runner);
    return runner;
}

/* Starts the thread, with all signals blocked in it. Returns 0 or an errno. */
RUNNER_EXPORT int runner_start(struct runner *runner)
{
    uint64_t all = ~(3ull << 31), before = 0; /* except those of the C library itself */
    int error;

    syscall(SYS_rt_sigprocmask, 2 /* SIG_SETMASK */, &all, &before, sizeof all);
    error = pthread_create(&runner->thread, NULL, run, runner);
    syscall(SYS_rt_sigprocmask, 2, &before, NULL, sizeof all);
    runner->running = error == 0;
    return error;
}

RUNNER_EXPORT struct runner *runner_free(struct runner *runner)
{
    if (!runner)
        return NULL;
    if (runner->running) {
        atomic_store_release(&runner->stop, true);
        poke(runner);
        pthread_join(runner->thread, NULL);
    }
    if (runner->runners) {
        pthread_mutex_lock(&runner->runners->mutex);
        runner->runners->each[runner->gpu] = NULL;
        pthread_mutex_unlock(&runner->runners->mutex);
    }
    if (runner->epoll_fd >= 0)
        close(runner->epoll_fd);
    if (runner->wake_fd >= 0)
        close(runner->wake_fd);
    if (runner->due_fd >= 0)
        close(runner->due_fd);
    arbiter_free(runner->arbiter);
    pthread_mutex_destroy(&runner->mutex);
    free(runner);
    return NULL;
}

RUNNER_EXPORT int32_t runner_add(struct runner *runner, uint32_t guarantee, uint32_t limit,
                                 void *grant_page, uint32_t device, void *ledger)
{
    int32_t tenant;

    pthread_mutex_lock(&runner->mutex);
    tenant = device < LAYOUT_N_DEVICES ? arbiter_add(runner->arbiter, guarantee, limit, os_now())
                                       : ARBITER_NONE;
    if (tenant != ARBITER_NONE) {
        struct runner_tenant *t = &runner->tenants[tenant];

        memset(t, 0, sizeof *t);
        t->used = true;
        t->header = grant_page;
        t->grant = (struct grant_device *)((char *)grant_page + GRANT_DEVICES) + device;
        t->ledger = ledger;
        t->device = device;
        /* An earlier governor may have written the page: its grant ends before the heartbeat makes
         * the page valid again. */
        arbiter_begin(runner->arbiter, atomic_load_relaxed(&t->grant->epoch));
        atomic_store_relaxed(&t->grant->standby_ns, 0);
        runner_close_grant(t);
        atomic_store_release(&t->header->heartbeat_ns, os_now());
        if (tenant >= runner->n_tenants)
            runner->n_tenants = tenant + 1;
    }
    pthread_mutex_unlock(&runner->mutex);
    poke(runner);
    return tenant;
}

RUNNER_EXPORT void runner_set(struct runner *runner, int32_t tenant, uint32_t guarantee,
                              uint32_t limit)
{
    pthread_mutex_lock(&runner->mutex);
    arbiter_set(runner->arbiter, tenant, guarantee, limit);
    pthread_mutex_unlock(&runner->mutex);
    poke(runner);
}

RUNNER_EXPORT void runner_remove(struct runner *runner, int32_t tenant)
{
    pthread_mutex_lock(&runner->mutex);
    arbiter_remove(runner->arbiter, tenant, os_now());
    runner->tenants[tenant].used = false;
    if (runner->view.holder == tenant)
        runner->view.holder = ARBITER_NONE;
    if (runner->view.standby == tenant)
        runner->view.standby = ARBITER_NONE;
    pthread_mutex_unlock(&runner->mutex);
    poke(runner);
}

/* A container that is paused is granted nothing. If it holds the GPU, its grant ends at once. */
RUNNER_EXPORT void runner_pause(struct runner *runner, int32_t tenant, bool paused)
{
    struct runner_tenant *t = &runner->tenants[tenant];

    pthread_mutex_lock(&runner->mutex);
    t->paused = paused;
    if (paused) {
        if (runner->view.holder == tenant) {
            arbiter_stop(runner->arbiter, os_now());
            runner->view.holder = ARBITER_NONE;
        }
        /* Its page may contain a grant that runner_open_all() wrote or is about to replace. */
        arbiter_begin(runner->arbiter, atomic_load_relaxed(&t->grant->epoch));
        runner_close_grant(t);
    }
    pthread_mutex_unlock(&runner->mutex);
    poke(runner);
}

/* Excludes the GPU from its gangs, which must not wait for an arbiter that is not stepped. */
static void leave_gangs(struct runner *runner)
{
    if (!runner->runners)
        return;
    pthread_mutex_lock(&runner->runners->mutex);
    gangs_leave(runner->runners->gangs, runner->gpu);
    poke_each(runner->runners, UINT64_MAX);
    pthread_mutex_unlock(&runner->runners->mutex);
}

/*
 * With `open`, lets all containers start work at any time, because the GPU's own scheduler divides
 * the time between them. Without it, the arbiter divides the time again. While the runner is open,
 * the heartbeat continues, and no container has a grant from the arbiter.
 */
RUNNER_EXPORT void runner_open(struct runner *runner, bool open)
{
    pthread_mutex_lock(&runner->mutex);
    if (open && !runner->open) {
        if (runner->view.holder != ARBITER_NONE) {
            arbiter_stop(runner->arbiter, os_now());
            runner->tenants[runner->view.holder].granted = false;
        }
        runner->view.holder = ARBITER_NONE;
        runner->view.standby = ARBITER_NONE;
        leave_gangs(runner);
    } else if (!open && runner->open) {
        runner_close_all(runner);
    }
    runner->open = open;
    pthread_mutex_unlock(&runner->mutex);
    poke(runner);
}

/*
 * Watches a process's socket: each byte on it wakes this thread, and those of the process's `n`
 * other GPUs. One thread reads for all, because two readers would take each other's wake-ups. Takes
 * ownership of the descriptor and returns 0, or returns an errno.
 */
RUNNER_EXPORT int runner_watch(struct runner *runner, int fd, struct runner *const *others,
                               uint32_t n)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP};
    uint64_t also = 0;

    for (uint32_t i = 0; i < n; i++)
        if (others[i]->runners && others[i]->runners == runner->runners)
            also |= 1ull << others[i]->gpu;
    event.data.u64 = pack_watch(fd, also);
    return epoll_ctl(runner->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0 ? errno : 0;
}

/* Returns whether a process is waiting for an NVML sample. If none is, the next process that begins
 * to wait is reported on runner_due_fd(). */
RUNNER_EXPORT bool runner_due(struct runner *runner)
{
    bool due;

    pthread_mutex_lock(&runner->mutex);
    due = runner->due = check_due(runner, os_now());
    pthread_mutex_unlock(&runner->mutex);
    return due;
}

RUNNER_EXPORT int runner_due_fd(const struct runner *runner)
{
    return runner->due_fd;
}

RUNNER_EXPORT void runner_stats(struct runner *runner, int32_t tenant, struct arbiter_stats *statsp)
{
    pthread_mutex_lock(&runner->mutex);
    arbiter_stats(runner->arbiter, tenant, statsp);
    pthread_mutex_unlock(&runner->mutex);
}

RUNNER_EXPORT void runner_waits(struct runner *runner, int32_t tenant, struct runner_waits *waitsp)
{
    pthread_mutex_lock(&runner->mutex);
    *waitsp = runner->tenants[tenant].waits;
    pthread_mutex_unlock(&runner->mutex);
}
