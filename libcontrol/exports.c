/*
 * Keeps charging physical allocations that were exported as file descriptors.
 *
 * Such an allocation lives as long as the descriptor, whichever process holds the descriptor, and
 * NVML attributes it to no process once its handle is released (H200: 1 GiB that was exported and
 * released disappeared from the process's memory at once, but from the GPU's only when the
 * descriptor was closed). It therefore stays charged until the last copy of the descriptor is
 * closed, in any process.
 *
 * The kernel shows when that happens: an epoll instance watches an open file without keeping it
 * open, and /proc/self/fdinfo lists the files that the instance watches. A file that belongs to the
 * library is in the list as well, under a number that nothing else uses. If that file is missing,
 * the program has closed the library's descriptors, and nothing is refunded. A descriptor that
 * cannot be watched counts as open for ever, unless the driver's descriptors are of a kind that
 * cannot be polled at all.
 */
#include "control.h"

#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#define EXPORTS_N    4096 /* descriptors that can be tracked; beyond that, none counts as closed */
#define EXPORTS_HIGH 500  /* lowest number of the library's descriptors, above those of programs */

static struct os_lock exports_lock;
static int exports_watch = -1;
static uint64_t exports_own;  /* number of the library's own file, which is always in the list */
static uint64_t exports_made; /* number of the latest export; each allocation has its own */
static uint64_t exports_lost; /* nothing is known about exports up to this number */
static uint32_t n_lingering;

/* The files that are open, guarded by the lock. */
static struct {
    bool known;
    bool failed; /* the list could not be read, for lack of descriptors */
    size_t n;
    uint64_t numbers[EXPORTS_N];
} open_files;

static int move_to_high_number(int fd)
{
    int high = (int)os_call(SYS_fcntl, fd, F_DUPFD_CLOEXEC, EXPORTS_HIGH);

    if (high < 0)
        return fd;
    os_close(fd);
    return high;
}

static long watch_file(int fd, uint64_t number)
{
    struct epoll_event event = {.data.u64 = number};

    return os_call(SYS_epoll_ctl, exports_watch, EPOLL_CTL_ADD, fd, &event);
}

/* Reads "tfd: 5 events: 18 data: 7f pos:0 ino:9fbb sdev:f". The number after "data:" is
 * hexadecimal. */
static void read_line(const char *line)
{
    static const char *const name = "data:";
    uint64_t number = 0;
    size_t at = 0;

    if (line[0] != 't')
        return;
    for (; line[at]; at++) {
        size_t same = 0;

        while (name[same] && line[at + same] == name[same])
            same++;
        if (!name[same])
            break;
    }
    if (!line[at])
        return;
    for (at += 5; line[at] == ' '; at++)
        ;
    for (;; at++) {
        unsigned digit = (unsigned char)line[at];

        if (digit - '0' < 10)
            digit -= '0';
        else if (digit - 'a' < 6)
            digit -= 'a' - 10;
        else
            break;
        number = number << 4 | digit;
    }
    if (number == exports_own)
        open_files.known = true;
    else if (open_files.n < EXPORTS_N)
        open_files.numbers[open_files.n++] = number;
}

/* A program that has changed its root may have no /proc. */
static bool has_fdinfo(void)
{
    int fd = os_open("/proc/self/fdinfo");

    if (fd >= 0)
        os_close(fd);
    return fd >= 0;
}

/* Called with the lock held. Determines which of the files are still open in any process. */
static void read_open_files(void)
{
    char path[48], buffer[1024], line[128];
    size_t length = 0;
    long got;
    int fd;

    open_files.known = open_files.failed = false;
    open_files.n = 0;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", exports_watch);
    fd = os_open(path);
    open_files.failed = fd == -EMFILE || fd == -ENFILE || (fd < 0 && !has_fdinfo());
    if (fd < 0)
        return;
    while ((got = os_call(SYS_read, fd, buffer, sizeof buffer)) > 0)
        for (long i = 0; i < got; i++) {
            if (buffer[i] != '\n') {
                if (length < sizeof line - 1)
                    line[length++] = buffer[i];
                continue;
            }
            line[length] = '\0';
            length = 0;
            read_line(line);
        }
    os_close(fd);
    if (got < 0 || open_files.n == EXPORTS_N)
        open_files.known = false;
}

static bool is_open(uint64_t number, uint8_t flags)
{
    if (!open_files.known || number <= exports_lost || flags & BLOCK_FOR_EVER)
        return true;
    for (size_t i = 0; i < open_files.n; i++)
        if (open_files.numbers[i] == number)
            return true;
    return false;
}

/* Called with the lock held. The program may have reused the descriptor's number: the descriptor
 * belongs to the library only if its list contains the library's own file. */
static bool watch_start(void)
{
    int own;

    if (exports_watch >= 0) {
        read_open_files();
        if (open_files.known || open_files.failed)
            return open_files.known;
        exports_lost = exports_made;
        exports_watch = -1;
    }
    own = (int)os_call(SYS_eventfd2, 0, EFD_CLOEXEC);
    if (own < 0)
        return false;
    own = move_to_high_number(own);
    exports_own = 1ull << 63 | (os_now() ^ (uintptr_t)&exports_own << 20);
    exports_watch = (int)os_call(SYS_epoll_create1, EPOLL_CLOEXEC);
    if (exports_watch >= 0)
        exports_watch = move_to_high_number(exports_watch);
    if (exports_watch >= 0 && watch_file(own, exports_own) == 0)
        return true;
    if (exports_watch >= 0)
        os_close(exports_watch);
    os_close(own);
    exports_watch = -1;
    return false;
}

/* Watches the descriptor of an exported allocation, to which the caller holds a reference. Returns
 * 0; or -EPERM if the descriptor cannot be polled, so its closing cannot be noticed; or another
 * negative errno. After an error other than -EPERM, the descriptor counts as open for ever if
 * `for_ever` is true; otherwise the caller has to close it. */
cold long exports_follow(uint64_t handle, int fd, bool for_ever)
{
    struct block entry = {.key = handle, .kind = BLOCK_EXPORT, .device = -1, .owner = OWNER_NONE};
    struct block *block;
    long failed;

    os_lock(&exports_lock);
    block = blocks_lock(BLOCK_EXPORT, handle);
    if (block)
        entry = *block;
    blocks_unlock(BLOCK_EXPORT, handle);
    failed = !watch_start();
    if (!entry.value)
        entry.value = ++exports_made;
    if (failed)
        failed = -EMFILE;
    else
        failed = watch_file(fd, entry.value);
    if (failed && failed != -EPERM)
        entry.flags |= BLOCK_FOR_EVER;
    if (!failed || (failed != -EPERM && for_ever)) {
        block = blocks_lock(BLOCK_EXPORT, handle);
        if (block)
            *block = entry;
        else
            blocks_add(&entry);
        blocks_unlock(BLOCK_EXPORT, handle);
    }
    os_unlock(&exports_lock);
    return failed;
}

/* Called after an allocation has been exported as a descriptor, while the caller holds a reference
 * to it. */
cold void exports_note(uint64_t handle, int fd)
{
    struct block *block = blocks_lock(BLOCK_HANDLE, handle);
    bool object = block && block->flags & BLOCK_OBJECT;
    bool charged = block && block->device >= 0;

    if (block && object)
        block->flags |= BLOCK_EXPORTED;
    blocks_unlock(BLOCK_HANDLE, handle);
    if (!charged || object || exports_follow(handle, fd, true) == -EPERM)
        return;
    block = blocks_lock(BLOCK_HANDLE, handle);
    if (block)
        block->flags |= BLOCK_EXPORTED;
    blocks_unlock(BLOCK_HANDLE, handle);
}

/* Called when the last reference and mapping of an exported allocation in this process are gone.
 * Returns whether the allocation lives on; if so, it stays charged. */
cold bool exports_outlive(const struct block *gone)
{
    struct block *block = blocks_lock(BLOCK_EXPORT, gone->key);
    struct block lingering = {.size = gone->size,
                              .kind = BLOCK_LINGERING,
                              .device = gone->device,
                              .flags = BLOCK_UNSEEN,
                              .owner = OWNER_NONE};
    bool lives;

    if (block) {
        lingering.key = block->value;
        lingering.flags |= block->flags & BLOCK_FOR_EVER;
        blocks_remove(block);
    }
    blocks_unlock(BLOCK_EXPORT, gone->key);
    if (!lingering.key)
        return false;
    os_lock(&exports_lock);
    read_open_files();
    lives = is_open(lingering.key, lingering.flags);
    os_unlock(&exports_lock);
    if (!lives)
        return false;
    if (!(gone->flags & BLOCK_UNSEEN)) {
        account_add(gone->device, gone->size, true);
        account_give(gone->device, gone->size, false);
    }
    blocks_lock(BLOCK_LINGERING, lingering.key);
    lives = blocks_add(&lingering);
    blocks_unlock(BLOCK_LINGERING, lingering.key);
    if (lives)
        atomic_add_relaxed(&n_lingering, 1);
    account_watch(gone->device); /* the helper notices when the descriptor is closed */
    return true;
}

static bool closed_visit(const struct block *block, void *data)
{
    uint64_t *bytes = data;

    if (block->kind != BLOCK_LINGERING || is_open(block->key, block->flags))
        return false;
    bytes[block->device] += block->size;
    atomic_add_relaxed(&n_lingering, -1u);
    return true;
}

/* Refunds allocations whose descriptors have been closed since the last call. Returns whether
 * there were any. */
cold static bool exports_settle(void)
{
    uint64_t bytes[LAYOUT_N_DEVICES] = {0};
    bool any = false;

    os_lock(&exports_lock);
    read_open_files();
    if (open_files.known)
        blocks_sweep(closed_visit, bytes);
    os_unlock(&exports_lock);
    for (int device = 0; device < (int)pages_n_devices(); device++) {
        account_give(device, bytes[device], true);
        any = any || bytes[device];
    }
    return any;
}

bool exports_refresh(void)
{
    return unlikely(atomic_load_relaxed(&n_lingering)) && exports_settle();
}

/* The descriptors also belong to the parent, so the child does not touch them. */
void exports_after_fork(void)
{
    exports_lock.word = 0;
    exports_watch = -1;
    n_lingering = 0;
    exports_lost = exports_made;
}
