/*
 * The grant page and the ledger, as this process sees them.
 *
 * The grant page is a file in the directory that the hook mounted, and is mapped read-only. The
 * ledger comes through the container's socket at the first cuInit, together with the number of this
 * process's slot. The socket stays open for the life of the process: a byte on it tells the arbiter
 * to read the ledger. When the governor is replaced, the connection ends and a helper makes a new
 * one; slot and ledger stay.
 *
 * Without a grant page there is no quota to enforce, and cuInit answers that the system is not
 * ready. Without a governor cuInit waits for the next one for a while. After that the process keeps
 * a ledger of its own, and moves its counters when a governor is back.
 */
#include "control.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

/* If the heartbeat is younger than this, the governor is taken to be restarting and cuInit waits
 * for it. */
#define PAGES_RESTART_NS (10 * NS_PER_S)
#define PAGES_TRY_NS     (100 * NS_PER_MS) /* interval between two attempts to connect */
#define PAGES_N_TRIES    10                /* attempts that may fail while its heartbeat goes on */
#define PAGES_SLOW_NS    (5 * NS_PER_S) /* longest wait for an answer; interval of late attempts */

struct pages_file {
    uint64_t device, inode;
};

/* A new connection that is not answered yet. */
struct pages_return {
    uint32_t busy; /* a helper is working on it */
    int fd;        /* -1: none */
    uint64_t inode;
    uint64_t until; /* the connection is given up if not answered by then */
    uint64_t next;  /* no attempt before this time */
    unsigned n_tries;
    bool refused; /* the governor does not know this process's slot */
};

/* The ledger that this process had before: see pages_move_books(). */
struct pages_moved {
    bool by_itself; /* the ledger in use belongs to this process alone */
    struct ledger_header *ledger;
    struct ledger_slot *old;  /* our slot in it; a late thread may still count here */
    struct ledger_slot *seen; /* what of `old` has been counted in the new one */
};

struct pages pages_now;
static struct pages_return coming_back = {.fd = -1};
static struct pages_moved moved;
static int governor_fd = -1;
static uint64_t governor_inode;
static struct pages_file ledger_file;
static int device_index[LAYOUT_N_DEVICES * 4]; /* by CUdevice ordinal: index in the grant plus 1 */
static struct prim_lock start_lock;
static uint32_t started; /* 0 not yet, 1 ready, 2 no grant or refused */

enum pages_answer {
    PAGES_JOINED,
    PAGES_NOBODY,  /* the governor does not answer */
    PAGES_REFUSED, /* it does, and refuses this process */
};

static bool pages_identify(int fd, uint64_t *inodep, uint64_t *sizep)
{
    struct stat st;

    if (prim_call(SYS_fstat, fd, &st) < 0)
        return false;
    if (inodep)
        *inodep = st.st_ino;
    if (sizep)
        *sizep = (uint64_t)st.st_size;
    return true;
}

static bool pages_identify_file(int fd, struct pages_file *filep)
{
    struct stat st;

    if (prim_call(SYS_fstat, fd, &st) < 0)
        return false;
    filep->device = st.st_dev;
    filep->inode = st.st_ino;
    return true;
}

cold void control_log(const char *message)
{
    static uint32_t n_lines;
    char line[256];
    int n;

    if (atomic_add_relaxed(&n_lines, 1) < 16) {
        n = snprintf(line, sizeof line, "tidegate: %s\n", message);
        if (n > 0)
            prim_call(SYS_write, 2, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
    }
}

static const struct grant_header *pages_map_grant(void)
{
    const struct grant_header *page;
    uint64_t size = 0;
    int fd = prim_open(PAGES_DIRECTORY "/grant");

    if (fd < 0)
        return NULL;
    if (!pages_identify(fd, NULL, &size) || size < GRANT_SIZE) {
        prim_close(fd);
        return NULL;
    }
    page = prim_map(GRANT_SIZE, PROT_READ, MAP_SHARED, fd);
    prim_close(fd);
    if (!page)
        return NULL;
    if (page->magic != GRANT_MAGIC || page->version != LAYOUT_VERSION || page->size < GRANT_SIZE) {
        prim_unmap((void *)page, GRANT_SIZE);
        return NULL;
    }
    return page;
}

static long pages_send(int fd, const char *byte, int flags)
{
    return prim_call(SYS_sendto, fd, byte, 1, MSG_NOSIGNAL | flags, NULL, 0);
}

/* Returns a socket with a high number, to keep clear of programs that manage low descriptors
 * themselves. */
static int pages_socket(int flags)
{
    int fd = (int)prim_call(SYS_socket, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
    int high;

    if (fd < 0)
        return -1;
    high = (int)prim_call(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 500);
    if (high < 0)
        return fd;
    prim_close(fd);
    return high;
}

static long pages_connect(int fd)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX,
                                  .sun_path = PAGES_DIRECTORY "/governor.sock"};

    return prim_call(SYS_connect, fd, &address, sizeof address);
}

/* Reads the answer: the number of a slot, and the ledger's descriptor or -1. Returns what recvmsg
 * does. */
static long pages_receive(int fd, int flags, uint32_t *slotp, int *ledger_fdp)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec iov = {slotp, sizeof *slotp};
    struct msghdr message = {
        .msg_iov = &iov,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof control.bytes,
    };
    struct cmsghdr *header;
    long n = prim_call(SYS_recvmsg, fd, &message, MSG_CMSG_CLOEXEC | flags);

    *ledger_fdp = -1;
    if (n < 0)
        return n;
    header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_type == SCM_RIGHTS &&
        header->cmsg_len == CMSG_LEN(sizeof *ledger_fdp))
        memcpy(ledger_fdp, CMSG_DATA(header), sizeof *ledger_fdp);
    return n;
}

/* Sends the first byte, to which the governor answers with the number of a slot and the ledger's
 * descriptor. Returns the descriptor, or -1. */
static int pages_register(int fd, uint32_t *slotp)
{
    static const char request = LAYOUT_REGISTER;
    struct timeval patience = {5, 0};
    int ledger_fd;

    prim_call(SYS_setsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (pages_send(fd, &request, 0) != 1 ||
        pages_receive(fd, 0, slotp, &ledger_fd) != (long)sizeof *slotp)
        return -1;
    if (*slotp >= LAYOUT_N_SLOTS && ledger_fd >= 0) {
        prim_close(ledger_fd);
        return -1;
    }
    return ledger_fd;
}

static enum pages_answer pages_join(void)
{
    struct ledger_header *mapped;
    enum pages_answer answer = PAGES_NOBODY;
    struct timeval patience = {5, 0}; /* connect() blocks if the backlog is full */
    uint32_t index = 0;
    int ledger_fd = -1;
    int fd = pages_socket(0);

    if (fd < 0)
        return PAGES_NOBODY;
    prim_call(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (pages_connect(fd) < 0)
        goto fail;
    ledger_fd = pages_register(fd, &index);
    if (index == LAYOUT_NO_SLOT)
        answer = PAGES_REFUSED;
    if (ledger_fd < 0 || !pages_identify_file(ledger_fd, &ledger_file))
        goto fail;
    mapped = prim_map(LEDGER_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, ledger_fd);
    if (!mapped)
        goto fail;
    prim_close(ledger_fd);
    pages_now.ledger = mapped;
    pages_now.slot =
        (struct ledger_slot *)((char *)mapped + LEDGER_SLOTS + index * sizeof *pages_now.slot);
    pages_now.slot->pid = (uint32_t)prim_pid();
    pages_identify(fd, &governor_inode, NULL);
    governor_fd = fd;
    return PAGES_JOINED;
fail:
    if (ledger_fd >= 0)
        prim_close(ledger_fd);
    prim_close(fd);
    return answer;
}

/* Joins, and waits for a governor that is being restarted. Does not wait for one that has been away
 * for longer, and not for long for one that runs but cannot be reached. */
static enum pages_answer pages_join_patiently(void)
{
    uint64_t until = prim_now() + PAGES_RESTART_NS;
    unsigned n_in_vain = 0;

    for (;;) {
        uint64_t before = atomic_load_relaxed(&pages_now.grant->heartbeat_ns);
        enum pages_answer answer = pages_join();
        uint64_t heartbeat;

        if (answer != PAGES_NOBODY)
            return answer;
        prim_sleep(PAGES_TRY_NS);
        heartbeat = atomic_load_relaxed(&pages_now.grant->heartbeat_ns);
        n_in_vain += heartbeat != before;
        if (prim_now() >= until || prim_now() - heartbeat >= PAGES_RESTART_NS ||
            n_in_vain >= PAGES_N_TRIES)
            return answer;
    }
}

static bool pages_keep_own_books(void)
{
    void *mapped = prim_map(LEDGER_SIZE, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);

    if (!mapped)
        return false;
    pages_now.ledger = mapped;
    pages_now.ledger->n_slots = 1;
    pages_now.slot = (struct ledger_slot *)((char *)mapped + LEDGER_SLOTS);
    pages_now.slot->state = 1;
    pages_now.alone = true;
    moved.by_itself = true;
    control_log("the governor does not answer; this process keeps its quota by itself");
    return true;
}

/* Returns whether the descriptor is still ours. A program that closes every descriptor has closed
 * it, and may have opened another file under its number since. */
static bool pages_is_ours(int fd, uint64_t ours)
{
    uint64_t inode = 0;

    return fd >= 0 && pages_identify(fd, &inode, NULL) && inode == ours;
}

static bool pages_still_ours(void)
{
    return pages_is_ours(atomic_load_relaxed(&governor_fd), atomic_load_relaxed(&governor_inode));
}

/* ---- another governor ---- */

static bool pages_hung_up(void)
{
    char byte;

    return !pages_still_ours() ||
           prim_call(SYS_recvfrom, governor_fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT, NULL, NULL) == 0;
}

static void pages_give_up(struct pages_return *r, uint64_t now)
{
    if (pages_is_ours(r->fd, r->inode))
        prim_close(r->fd);
    r->fd = -1;
    r->next = now + (r->n_tries < 50 ? PAGES_TRY_NS : PAGES_SLOW_NS);
}

static void pages_call_again(struct pages_return *r, uint64_t now)
{
    const char request = moved.by_itself ? LAYOUT_REGISTER : LAYOUT_AGAIN;

    r->n_tries++;
    r->until = now + PAGES_SLOW_NS;
    r->fd = pages_socket(SOCK_NONBLOCK);
    pages_identify(r->fd, &r->inode, NULL);
    if (r->fd < 0 || pages_connect(r->fd) < 0 || pages_send(r->fd, &request, MSG_DONTWAIT) != 1)
        pages_give_up(r, now);
}

/* The new connection takes over the number of the old one, which other threads may be about to
 * use. */
static void pages_take_connection(struct pages_return *r)
{
    if (pages_still_ours()) {
        prim_call(SYS_dup3, r->fd, governor_fd, O_CLOEXEC);
        prim_close(r->fd);
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
/* Counters, which move by their differences. The rest of a slot describes only the present. */
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
 * A process that started while the governor was away, or with a ledger that the governor has lost,
 * moves its counters into the ledger that it is given. It does so only once. Other threads go on
 * counting meanwhile, without a lock. What they count in the old ledger after it was read is added
 * to the new one by a later call of pages_forward(), so each sum is right in the end. The old
 * ledger stays mapped. A thread that is waiting for GPU time announces its next launch in the old
 * ledger, so the arbiter does not see that launch begin.
 */
static bool pages_move_books(uint32_t index, int ledger_fd, const struct pages_file *file)
{
    struct ledger_header *mapped;
    struct ledger_slot *seen, *slot;

    if (moved.old)
        return false;
    mapped = prim_map(LEDGER_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, ledger_fd);
    seen = prim_map(sizeof *seen, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (!mapped || !seen) {
        if (mapped)
            prim_unmap(mapped, LEDGER_SIZE);
        if (seen)
            prim_unmap(seen, sizeof *seen);
        return false;
    }
    slot = (struct ledger_slot *)((char *)mapped + LEDGER_SLOTS) + index;
    slot->pid = (uint32_t)prim_pid();
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
    control_log("the governor is back; this process shares its container's quota from now on");
    return true;
}

static void pages_hear_again(struct pages_return *r, uint64_t now)
{
    struct pages_file file = {0};
    uint32_t slot = LAYOUT_NO_SLOT;
    int ledger_fd = -1;
    bool same = false;
    long n;

    if (!pages_is_ours(r->fd, r->inode)) {
        pages_give_up(r, now);
        return;
    }
    n = pages_receive(r->fd, MSG_DONTWAIT, &slot, &ledger_fd);
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
            same = pages_move_books(slot, ledger_fd, &file);
    }
    if (ledger_fd >= 0)
        prim_close(ledger_fd);
    if (same) {
        pages_take_connection(r);
        return;
    }
    pages_give_up(r, now);
    r->refused = true;
    atomic_store_relaxed(&pages_now.alone, true);
    control_log("the governor that runs now has no books of this process; it keeps its quota by "
                "itself");
}

static bool pages_governor_lives(uint64_t now)
{
    uint64_t heartbeat = atomic_load_relaxed(&pages_now.grant->heartbeat_ns);

    return now - heartbeat + NS_PER_S < 2 * NS_PER_S; /* a time in the future is invalid */
}

/* Takes one step per call, because a helper must not wait. */
void pages_rejoin(void)
{
    struct pages_return *r = &coming_back;
    uint64_t now = prim_now();

    if (atomic_load_acquire(&started) != 1 || atomic_exchange_acq_rel(&r->busy, 1))
        return;
    if (moved.old)
        pages_forward(pages_now.slot);
    if (!r->refused && pages_governor_lives(now)) {
        if (r->fd >= 0)
            pages_hear_again(r, now);
        else if (now >= r->next && pages_hung_up())
            pages_call_again(r, now);
    }
    atomic_store_release(&r->busy, 0);
}

/* A forked child shares the parent's mappings but is another process, so it registers on its
 * own. */
static void pages_after_fork(void)
{
    if (pages_still_ours())
        prim_close(governor_fd);
    if (pages_is_ours(coming_back.fd, coming_back.inode))
        prim_close(coming_back.fd);
    coming_back = (struct pages_return){.fd = -1};
    if (moved.ledger)
        prim_unmap(moved.ledger, LEDGER_SIZE);
    if (moved.seen)
        prim_unmap(moved.seen, sizeof *moved.seen);
    moved = (struct pages_moved){0};
    if (pages_now.ledger)
        prim_unmap(pages_now.ledger, LEDGER_SIZE);
    governor_fd = -1;
    pages_now.ledger = NULL;
    pages_now.slot = NULL;
    pages_now.alone = false;
    started = 0;
    start_lock.word = 0;
    gate_after_fork();
    account_after_fork();
}

extern int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void),
                             void *dso);
extern void *__dso_handle;

bool pages_start(void)
{
    static bool registered;
    uint32_t state = atomic_load_acquire(&started);

    if (likely(state))
        return state == 1;
    prim_lock(&start_lock);
    if (!started) {
        if (!pages_now.grant)
            pages_now.grant = pages_map_grant();
        if (!registered) {
            registered = true;
            __register_atfork(NULL, NULL, pages_after_fork, &__dso_handle);
        }
        if (!pages_now.grant) {
            control_log("no grant at " PAGES_DIRECTORY "/grant: this container was started without "
                        "the tidegate hook, or with another version of it");
            atomic_store_release(&started, 2);
        } else {
            enum pages_answer answer;

            pages_now.n_devices = pages_now.grant->n_devices;
            if (pages_now.n_devices > LAYOUT_N_DEVICES)
                pages_now.n_devices = LAYOUT_N_DEVICES;
            pages_now.on_governor_loss = pages_now.grant->on_governor_loss;
            answer = pages_join_patiently();
            /* A ledger of its own is only for a process that starts while the governor is away. */
            if (answer == PAGES_NOBODY && !gate_lost(prim_now())) {
                control_log(
                    "the governor runs, and this process cannot reach it at " PAGES_DIRECTORY
                    "/governor.sock");
                answer = PAGES_REFUSED;
            } else if (answer == PAGES_REFUSED)
                control_log(
                    "the governor does not take this process: it is not in the container's control "
                    "group (as with nsenter), 64 of this container use the GPU already, or it "
                    "cannot be watched; see the governor's log");
            if (answer == PAGES_JOINED || (answer == PAGES_NOBODY && pages_keep_own_books()))
                atomic_store_release(&started, 1);
            else
                atomic_store_release(&started, 2);
        }
    }
    prim_unlock(&start_lock);
    return atomic_load_acquire(&started) == 1;
}

void pages_match_devices(void)
{
    int count = 0;

    if (driver->cuDeviceGetCount(&count) != CUDA_SUCCESS)
        return;
    for (int ordinal = 0; ordinal < count && ordinal < (int)(sizeof device_index / sizeof(int));
         ordinal++) {
        CUdevice device;
        CUuuid uuid;

        /* Under MIG the second form names the slice of a GPU where the first names the GPU. */
        if (driver->cuDeviceGet(&device, ordinal) != CUDA_SUCCESS ||
            (driver->cuDeviceGetUuid_v2(&uuid, device) != CUDA_SUCCESS &&
             driver->cuDeviceGetUuid(&uuid, device) != CUDA_SUCCESS))
            continue;
        for (unsigned i = 0; i < pages_now.n_devices; i++)
            if (!memcmp(uuid.bytes, pages_grant_device(i)->uuid, sizeof uuid.bytes))
                device_index[ordinal] = (int)i + 1;
    }
}

void pages_deny(void)
{
    atomic_store_release(&pages_now.denied, true);
}

CUdevice pages_device(unsigned index)
{
    for (size_t ordinal = 0; ordinal < sizeof device_index / sizeof(int); ordinal++)
        if (device_index[ordinal] == (int)index + 1)
            return (CUdevice)ordinal;
    return -1;
}

int pages_index_of(CUdevice dev)
{
    if (!pages_slot() || dev < 0 || dev >= (int)(sizeof device_index / sizeof(int)))
        return -1;
    return device_index[dev] - 1;
}

int pages_index_current(void)
{
    CUdevice dev;

    if (unlikely(!pages_slot()))
        return -1;
    if (driver->cuCtxGetDevice(&dev) != CUDA_SUCCESS)
        return -1;
    return pages_index_of(dev);
}

void pages_poke(void)
{
    if (pages_still_ours())
        pages_send(atomic_load_relaxed(&governor_fd), "p", MSG_DONTWAIT);
}
