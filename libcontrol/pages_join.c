/*
 * Makes a process join its container at the first cuInit: maps the grant page, registers the
 * process through the container's socket and receives the ledger.
 *
 * The grant page is a file in the directory that the hook mounted, and is mapped read-only. The
 * ledger comes through the socket, together with the number of this process's slot.
 *
 * Without a grant page there is no quota to enforce, and cuInit fails with "system not ready".
 * Without a governor, cuInit waits a limited time for the next governor. After that the process
 * keeps its own ledger, until a governor is back (pages_rejoin.c).
 */
#include "pages.h"

#include <sys/mman.h>
#include <sys/socket.h>

/* If the heartbeat is younger than this, the governor is assumed to be restarting and cuInit waits
 * for it. */
#define PAGES_RESTART_NS (10 * NS_PER_S)
#define PAGES_N_TRIES    10 /* attempts that may fail while the heartbeat continues */

enum pages_answer {
    PAGES_JOINED,
    PAGES_NO_GOVERNOR, /* the governor does not answer */
    PAGES_REFUSED,     /* the governor answers, but refuses this process */
};

static struct os_lock start_lock;

static const struct grant_header *pages_map_grant(void)
{
    const struct grant_header *page;
    uint64_t size = 0;
    int fd = os_open(PAGES_DIRECTORY "/grant");

    if (fd < 0)
        return NULL;
    if (!pages_identify(fd, NULL, &size) || size < GRANT_SIZE) {
        os_close(fd);
        return NULL;
    }
    page = os_map(GRANT_SIZE, PROT_READ, MAP_SHARED, fd);
    os_close(fd);
    if (!page)
        return NULL;
    if (page->magic != GRANT_MAGIC || page->version != LAYOUT_VERSION || page->size < GRANT_SIZE) {
        os_unmap((void *)page, GRANT_SIZE);
        return NULL;
    }
    return page;
}

/* Maps the host memory in which this process parks its memory. The governor extends the file as
 * needed, so the mapping may reach beyond the end of the file. */
static void pages_map_arena(int fd)
{
    uint64_t size = account_round(pages_grant_device(0)->memory_limit, ACCOUNT_UNIT);

    if (fd < 0)
        return;
    pages_now.arena = os_map(size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd);
    pages_now.arena_size = pages_now.arena ? size : 0;
    if (pages_now.arena) /* the contents of device memory are not part of a core file either */
        os_call(SYS_madvise, pages_now.arena, size, MADV_DONTDUMP);
    os_close(fd);
}

/* Sends the first byte, which the governor answers with the number of a slot and descriptors.
 * Returns the descriptor of the ledger, or -1. */
static int pages_register(int fd, uint32_t *slotp)
{
    static const char request = LAYOUT_REGISTER;
    struct timeval patience = {5, 0};
    int fds[PAGES_N_FDS];
    long n;

    os_call(SYS_setsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (pages_send(fd, &request, 0) != 1)
        return -1;
    n = pages_receive(fd, 0, slotp, fds);
    pages_map_arena(fds[PAGES_ARENA]);
    if ((n != (long)sizeof *slotp || *slotp >= LAYOUT_N_SLOTS) && fds[PAGES_LEDGER] >= 0) {
        os_close(fds[PAGES_LEDGER]);
        return -1;
    }
    return fds[PAGES_LEDGER];
}

static enum pages_answer pages_join(void)
{
    struct ledger_header *mapped;
    struct ledger_slot *slot;
    enum pages_answer answer = PAGES_NO_GOVERNOR;
    struct timeval patience = {5, 0}; /* connect() blocks if the backlog is full */
    uint32_t index = 0;
    int ledger_fd = -1;
    int fd = pages_socket(0);

    if (fd < 0)
        return PAGES_NO_GOVERNOR;
    os_call(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (pages_connect(fd) < 0)
        goto fail;
    ledger_fd = pages_register(fd, &index);
    if (index == LAYOUT_NO_SLOT)
        answer = PAGES_REFUSED;
    if (ledger_fd < 0 || !pages_identify_file(ledger_fd, &ledger_file))
        goto fail;
    mapped = os_map(LEDGER_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, ledger_fd);
    if (!mapped)
        goto fail;
    os_close(ledger_fd);
    pages_now.ledger = mapped;
    slot = (struct ledger_slot *)((char *)mapped + LEDGER_SLOTS) + index;
    slot->pid = (uint32_t)os_pid();
    pages_identify(fd, &governor_inode, NULL);
    governor_fd = fd;
    /* Stored last, because a thread that finds a slot uses everything else. */
    atomic_store_release(&pages_now.slot, slot);
    return PAGES_JOINED;
fail:
    if (pages_now.arena)
        os_unmap(pages_now.arena, pages_now.arena_size);
    pages_now.arena = NULL;
    pages_now.arena_size = 0;
    if (ledger_fd >= 0)
        os_close(ledger_fd);
    os_close(fd);
    return answer;
}

/* Joins, and waits for a governor that is being restarted. Does not wait for a governor that has
 * been away for longer, and waits only briefly for a governor that is running but cannot be
 * reached. */
static enum pages_answer pages_join_patiently(void)
{
    uint64_t until = os_now() + PAGES_RESTART_NS;
    unsigned n_in_vain = 0;

    for (;;) {
        uint64_t before = atomic_load_relaxed(&pages_now.grant->heartbeat_ns);
        enum pages_answer answer = pages_join();
        uint64_t heartbeat;

        if (answer != PAGES_NO_GOVERNOR)
            return answer;
        os_sleep(PAGES_TRY_NS);
        heartbeat = atomic_load_relaxed(&pages_now.grant->heartbeat_ns);
        n_in_vain += heartbeat != before;
        if (os_now() >= until || os_now() - heartbeat >= PAGES_RESTART_NS ||
            n_in_vain >= PAGES_N_TRIES)
            return answer;
    }
}

static bool pages_keep_own_ledger(void)
{
    void *mapped = os_map(LEDGER_SIZE, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    struct ledger_slot *slot;

    if (!mapped)
        return false;
    pages_now.ledger = mapped;
    pages_now.ledger->n_slots = 1;
    slot = (struct ledger_slot *)((char *)mapped + LEDGER_SLOTS);
    slot->state = 1;
    pages_now.alone = true;
    pages_note_own_ledger();
    atomic_store_release(&pages_now.slot, slot);
    control_log("the governor does not answer; this process enforces its quota without it");
    return true;
}

/* A forked child shares the parent's mappings but is another process, so it registers itself. */
void pages_after_fork(void)
{
    if (pages_still_ours())
        os_close(governor_fd);
    pages_rejoin_after_fork();
    if (pages_now.ledger)
        os_unmap(pages_now.ledger, LEDGER_SIZE);
    if (pages_now.arena)
        os_unmap(pages_now.arena, pages_now.arena_size);
    pages_now.arena = NULL;
    pages_now.arena_size = 0;
    governor_fd = -1;
    pages_now.ledger = NULL;
    pages_now.slot = NULL;
    pages_now.alone = false;
    pages_started = 0;
    start_lock.word = 0;
}

/* Called with the lock held. */
static void pages_map_once(void)
{
    if (!pages_now.grant)
        atomic_store_release(&pages_now.grant, pages_map_grant());
}

const struct grant_header *pages_peek(void)
{
    const struct grant_header *grant = atomic_load_acquire(&pages_now.grant);

    if (unlikely(!grant)) {
        os_lock(&start_lock);
        pages_map_once();
        grant = pages_now.grant;
        os_unlock(&start_lock);
    }
    return grant;
}

bool pages_start(void)
{
    uint32_t state = atomic_load_acquire(&pages_started);

    if (likely(state))
        return state == 1;
    os_lock(&start_lock);
    if (!pages_started) {
        pages_map_once();
        if (!pages_now.grant) {
            control_log("no grant at " PAGES_DIRECTORY "/grant: this container was started without "
                        "the tidegate hook, or with another version of it");
            atomic_store_release(&pages_started, 2);
        } else {
            enum pages_answer answer;

            pages_now.n_devices = pages_now.grant->n_devices;
            if (pages_now.n_devices > LAYOUT_N_DEVICES)
                pages_now.n_devices = LAYOUT_N_DEVICES;
            pages_now.on_governor_loss = pages_now.grant->on_governor_loss;
            answer = pages_join_patiently();
            /* Only a process that starts while the governor is away keeps its own ledger. */
            if (answer == PAGES_NO_GOVERNOR && !gate_lost(os_now())) {
                control_log(
                    "the governor is running, but this process cannot reach it at " PAGES_DIRECTORY
                    "/governor.sock");
                answer = PAGES_REFUSED;
            } else if (answer == PAGES_REFUSED)
                control_log("the governor does not accept this process: it is not in the "
                            "container's control group (as with nsenter), 64 of this container's "
                            "processes are already using the GPU, or it cannot be watched; see the "
                            "governor's log");
            if (answer == PAGES_JOINED || (answer == PAGES_NO_GOVERNOR && pages_keep_own_ledger()))
                atomic_store_release(&pages_started, 1);
            else
                atomic_store_release(&pages_started, 2);
        }
    }
    os_unlock(&start_lock);
    return atomic_load_acquire(&pages_started) == 1;
}
