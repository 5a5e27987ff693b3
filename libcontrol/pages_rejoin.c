/*
 * Connects to the governor's successor, and if necessary moves to another ledger.
 *
 * When the governor is replaced, the connection ends and a helper makes a new one; the slot and the
 * ledger stay the same. A process that has kept its own ledger moves its counters to the governor's
 * ledger when a governor is back.
 */
#include "pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define PAGES_SLOW_NS (5 * NS_PER_S) /* longest wait for an answer; pause after many attempts */

/* A new connection that has not been answered yet. */
struct pages_return {
    uint32_t busy; /* a helper is working on it */
    int fd;        /* -1: none */
    uint64_t inode;
    uint64_t until; /* the connection is closed if it is not answered by then */
    uint64_t next;  /* no attempt before this time */
    unsigned n_tries;
    bool refused; /* the governor does not know this process's slot */
};

/* The ledger that this process had before: see pages_move_sums(). */
struct pages_moved {
    bool by_itself; /* the ledger in use belongs to this process alone */
    struct ledger_header *ledger;
    struct ledger_slot *old;  /* this process's slot in it; a late thread may still count here */
    struct ledger_slot *seen; /* the part of `old` that has been added to the new slot */
};

static struct pages_return reconnection = {.fd = -1};
static struct pages_moved moved;

void (*pages_changed)(void);

void pages_note_own_ledger(void)
{
    moved.by_itself = true;
}

/* ---- the connection ---- */

static bool pages_hung_up(void)
{
    char byte;

    return !pages_still_ours() ||
           os_call(SYS_recvfrom, governor_fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT, NULL, NULL) == 0;
}

static void pages_give_up(struct pages_return *r, uint64_t now)
{
    if (pages_is_ours(r->fd, r->inode))
        os_close(r->fd);
    r->fd = -1;
    r->next = now + (r->n_tries < 50 ? PAGES_TRY_NS : PAGES_SLOW_NS);
}

static void pages_connect_again(struct pages_return *r, uint64_t now)
{
    const char request = moved.by_itself ? LAYOUT_REGISTER : LAYOUT_AGAIN;

    r->n_tries++;
    r->until = now + PAGES_SLOW_NS;
    r->fd = pages_socket(SOCK_NONBLOCK);
    pages_identify(r->fd, &r->inode, NULL);
    if (r->fd < 0 || pages_connect(r->fd) < 0 || pages_send(r->fd, &request, MSG_DONTWAIT) != 1)
        pages_give_up(r, now);
}

/* The new connection takes over the old one's descriptor number, which other threads may be about
 * to use. */
static void pages_take_connection(struct pages_return *r)
{
    if (pages_still_ours()) {
        os_call(SYS_dup3, r->fd, governor_fd, O_CLOEXEC);
        os_close(r->fd);
    } else {
        atomic_store_relaxed(&governor_fd, r->fd);
    }
    atomic_store_relaxed(&governor_inode, r->inode);
    r->fd = -1;
    r->n_tries = 0;
    pages_poke();
}

/* ---- moving to another ledger ---- */

#define SUM(field) offsetof(struct ledger_device, field)
/* Counters, which are moved by adding differences. Other fields describe only the present. */
static const unsigned short sums[] = {
    SUM(busy_ns),  SUM(memory),    SUM(blocks),         SUM(launches),     SUM(waits),
    SUM(wait_ns),  SUM(refused),   SUM(markers),        SUM(predicted_ns), SUM(error_ns),
    SUM(unseen),   SUM(transfers), SUM(transfer_bytes), SUM(small),        SUM(contexts),
    SUM(returned), SUM(moving),    SUM(pooled),         SUM(taking),       SUM(shrunk),
    SUM(outgrown), SUM(took),      SUM(gave),
};
#undef SUM

static struct ledger_device *pages_device_of(struct ledger_slot *slot, unsigned device)
{
    return (struct ledger_device *)((char *)slot + LEDGER_SLOT_DEVICES) + device;
}

/**
 * pages_before() - where a counter of this process was kept before the move to another ledger
 *
 * Returns NULL if there was no move, or if `sum` is in the old ledger itself.
 */
uint64_t *pages_before(const uint64_t *sum)
{
    struct ledger_slot *old = atomic_load_acquire(&moved.old);
    const struct ledger_slot *now = pages_slot();
    size_t at = (size_t)((const char *)sum - (const char *)now);

    return old && old != now && at < sizeof *old ? (uint64_t *)((char *)old + at) : NULL;
}

/* Adds to `to` what was counted in the old ledger since the last call. */
static void pages_forward(struct ledger_slot *to)
{
    for (unsigned device = 0; device < pages_now.n_devices; device++) {
        struct ledger_device *old = pages_device_of(moved.old, device);
        struct ledger_device *seen = pages_device_of(moved.seen, device);
        struct ledger_device *now = pages_device_of(to, device);
        uint32_t want = atomic_load_seq_cst(&old->want);

        if (want != seen->want)
            atomic_add_seq_cst(&now->want, want - seen->want);
        seen->want = want;
        for (unsigned i = 0; i < sizeof sums / sizeof *sums; i++) {
            uint64_t *word = (uint64_t *)((char *)seen + sums[i]);
            uint64_t value = atomic_load_seq_cst((uint64_t *)((char *)old + sums[i]));

            if (value != *word)
                atomic_add_seq_cst((uint64_t *)((char *)now + sums[i]), value - *word);
            *word = value;
        }
    }
}

/*
 * Moves the counters of this process into the ledger that it receives, if it started while the
 * governor was away, or with a ledger that the governor has lost. This happens only once. Other
 * threads continue to count in the meantime, without a lock. What they count in the old ledger
 * after it was read is added to the new one by a later call of pages_forward(), so each sum is
 * eventually correct. The old ledger stays mapped. A thread that is waiting for GPU time announces
 * its next launch in the old ledger, so the arbiter does not see that launch begin.
 */
static bool pages_move_sums(uint32_t index, int ledger_fd, const struct pages_file *file)
{
    struct ledger_header *mapped;
    struct ledger_slot *seen, *slot;

    if (moved.old)
        return false;
    mapped = os_map(LEDGER_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, ledger_fd);
    seen = os_map(sizeof *seen, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (!mapped || !seen) {
        if (mapped)
            os_unmap(mapped, LEDGER_SIZE);
        if (seen)
            os_unmap(seen, sizeof *seen);
        return false;
    }
    slot = (struct ledger_slot *)((char *)mapped + LEDGER_SLOTS) + index;
    slot->pid = (uint32_t)os_pid();
    moved.ledger = pages_now.ledger;
    atomic_store_release(&moved.old, pages_now.slot);
    moved.seen = seen;
    pages_forward(slot);
    for (unsigned device = 0; device < pages_now.n_devices; device++) {
        struct ledger_device *old = pages_device_of(moved.old, device);
        struct ledger_device *now = pages_device_of(slot, device);

        atomic_store_relaxed(&now->provisional, atomic_load_relaxed(&old->provisional));
        atomic_store_release(&now->provisional_ns, atomic_load_relaxed(&old->provisional_ns));
    }
    atomic_store_release(&pages_now.ledger, mapped);
    atomic_store_release(&pages_now.slot, slot);
    moved.by_itself = false;
    ledger_file = *file;
    atomic_store_release(&pages_now.alone, false);
    pages_changed();
    control_log("the governor is back; this process shares its container's quota from now on");
    return true;
}

static void pages_receive_answer(struct pages_return *r, uint64_t now)
{
    struct pages_file file = {0};
    uint32_t slot = LAYOUT_NO_SLOT;
    int fds[PAGES_N_FDS];
    bool same = false;
    int ledger_fd;
    long n;

    if (!pages_is_ours(r->fd, r->inode)) {
        pages_give_up(r, now);
        return;
    }
    n = pages_receive(r->fd, MSG_DONTWAIT, &slot, fds);
    ledger_fd = fds[PAGES_LEDGER];
    if (fds[PAGES_ARENA] >= 0)
        os_close(fds[PAGES_ARENA]); /* the arena was mapped when joining, or comes too late */
    if (n == -EAGAIN && now < r->until)
        return;
    if (n != (long)sizeof slot) {
        pages_give_up(r, now);
        return;
    }
    if (ledger_fd >= 0 && slot < LAYOUT_N_SLOTS && pages_identify_file(ledger_fd, &file)) {
        same = file.device == ledger_file.device && file.inode == ledger_file.inode &&
               pages_now.slot ==
                   (struct ledger_slot *)((char *)pages_now.ledger + LEDGER_SLOTS) + slot;
        if (!same)
            same = pages_move_sums(slot, ledger_fd, &file);
    }
    if (ledger_fd >= 0)
        os_close(ledger_fd);
    if (same) {
        pages_take_connection(r);
        return;
    }
    pages_give_up(r, now);
    r->refused = true;
    atomic_store_relaxed(&pages_now.alone, true);
    control_log("the current governor has no ledger for this process; the process enforces its "
                "quota on its own");
}

static bool pages_governor_lives(uint64_t now)
{
    uint64_t heartbeat = atomic_load_relaxed(&pages_now.grant->heartbeat_ns);

    return now - heartbeat + NS_PER_S < 2 * NS_PER_S; /* a time in the future is invalid */
}

/* Takes one step per call, because a helper must not wait. */
void pages_rejoin(void)
{
    struct pages_return *r = &reconnection;
    uint64_t now = os_now();

    if (atomic_load_acquire(&pages_started) != 1 || atomic_exchange_acq_rel(&r->busy, 1))
        return;
    if (moved.old)
        pages_forward(pages_now.slot);
    if (!r->refused && pages_governor_lives(now)) {
        if (r->fd >= 0)
            pages_receive_answer(r, now);
        else if (now >= r->next && pages_hung_up())
            pages_connect_again(r, now);
    }
    atomic_store_release(&r->busy, 0);
}

void pages_rejoin_after_fork(void)
{
    if (pages_is_ours(reconnection.fd, reconnection.inode))
        os_close(reconnection.fd);
    reconnection = (struct pages_return){.fd = -1};
    if (moved.ledger)
        os_unmap(moved.ledger, LEDGER_SIZE);
    if (moved.seen)
        os_unmap(moved.seen, sizeof *moved.seen);
    moved = (struct pages_moved){0};
}
