/*
 * A device file: attaching, the lock, the clock, and cleaning up after dead processes
 *
 * There is no server, so only the kernel knows which processes are alive. Each attached library
 * holds a record lock on one byte that represents its slot, and F_GETLK returns the owner's pid in
 * the caller's pid namespace. A record lock is dropped when its process closes any descriptor for
 * the file, so a device is opened once and never closed while it is in use.
 *
 * The lock on the shared state is a futex word that names the holder's slot and generation. A
 * robust pthread mutex would contain the thread id, which means nothing across pid namespaces: if
 * thread 1 of one container died while waiting, its exit would release the lock held by thread 1 of
 * another container. A process that has waited for a long time asks the kernel whether the holder
 * is still alive, and takes the lock over from a dead holder. Nothing needs repair in that case;
 * see layout.h for the reason.
 */
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "schedule.h"

#define LOCK_WAITERS     0x100u /* a process is sleeping on the word */
#define LOCK_SLOT(word)  ((word) & 0xffu)
#define LOCK_GENERATIONS 0x7fffffu

#define LOCK_PATIENCE  4000000u   /* ns to wait before checking that the holder is alive */
#define REAP_INTERVAL  2000000u   /* ns between two searches for dead processes */
#define MAX_SLEEP      20000000u  /* longest sleep, ns: work ends earlier if a process dies */
#define SLEEP_STEERED  500000u    /* the same if steered: steering may end work earlier, too */
#define SAMPLE_LENGTH  500000000u /* ns */
#define DEFAULT_FOLDER "/dev/tidegate-simgpu"

uint64_t clock_monotonic(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

const char *device_directory(void)
{
    const char *directory = getenv("SIMGPU_DIR");

    return directory && *directory ? directory : DEFAULT_FOLDER;
}

/*
 * A number that all libraries in one process share and that no other process has. AT_RANDOM changes
 * with each exec, so an attachment made before an exec does not count as alive after it.
 */
static uint64_t process_key(void)
{
    const unsigned char *random = (const unsigned char *)getauxval(AT_RANDOM);
    uint64_t key = 14695981039346656037ull ^ (uint64_t)getpid();

    for (int i = 0; random && i < 16; i++)
        key = (key ^ random[i]) * 1099511628211ull;
    return key ? key : 1;
}

/* Makes the system call itself: fcntl64 requires a newer C library than the real driver does. */
static int byte_lock(int fd, int command, short type, uint32_t slot, pid_t *pidp)
{
    struct flock lock = {
        .l_type = type, .l_whence = SEEK_SET, .l_start = GPU_SLOT_LOCK + slot, .l_len = 1};

    if (syscall(SYS_fcntl, fd, command, &lock) < 0)
        return -errno;
    if (pidp)
        *pidp = lock.l_pid;
    return lock.l_type;
}

/*
 * Ask the kernel for the byte's owner: its pid in this pid namespace, 0 if it is not visible here,
 * -1 if there is none.
 */
static int byte_owner(int fd, uint32_t slot)
{
    pid_t pid = 0;
    int r = byte_lock(fd, F_GETLK, F_WRLCK, slot, &pid);

    if (r < 0)
        return 0; /* if the kernel reports an error, the owner counts as alive */
    if (r == F_UNLCK)
        return -1;
    return pid > 0 ? (int)pid : 0;
}

/* The kernel never reports a process's own locks to it, hence the key. */
static bool slot_mine(const struct device *device, uint32_t slot)
{
    return device->gpu->shared.slots[slot].key == device->key;
}

/** device_slot_pid() - the owner's pid in this namespace, 0 if invisible, -1 if dead */
int device_slot_pid(const struct device *device, uint32_t slot)
{
    return slot_mine(device, slot) ? getpid() : byte_owner(device->fd, slot);
}

static long futex(_Atomic uint32_t *word, int operation, uint32_t value,
                  const struct timespec *time)
{
    return syscall(SYS_futex, word, operation, value, time, NULL, 0);
}

static uint32_t lock_word(const struct device *device)
{
    return (device->generation & LOCK_GENERATIONS) << 9 | device->slot;
}

static void shared_lock(struct device *device)
{
    static const struct timespec patience = {.tv_nsec = LOCK_PATIENCE};
    struct gpu_shared *shared = &device->gpu->shared;
    uint32_t mine = lock_word(device);
    uint32_t seen = 0;

    if (atomic_compare_exchange_strong(&shared->lock, &seen, mine))
        return;
    for (;;) {
        bool dead = false;

        if (seen == 0) {
            /* Other processes may be asleep on the word; a superfluous wake-up does no harm. */
            if (atomic_compare_exchange_strong(&shared->lock, &seen, mine | LOCK_WAITERS))
                return;
            continue;
        }
        if (LOCK_SLOT(seen) == device->slot) {
            dead = true; /* a former owner of this slot: this process now has its byte */
        } else if (!(seen & LOCK_WAITERS)) {
            if (!atomic_compare_exchange_strong(&shared->lock, &seen, seen | LOCK_WAITERS))
                continue;
            seen |= LOCK_WAITERS;
        }
        if (!dead && futex(&shared->lock, FUTEX_WAIT, seen, &patience) < 0 && errno == ETIMEDOUT)
            dead = device_slot_pid(device, LOCK_SLOT(seen)) < 0;
        if (dead && atomic_compare_exchange_strong(&shared->lock, &seen, mine | LOCK_WAITERS)) {
            atomic_fetch_add(&shared->recoveries, 1);
            return;
        }
        seen = atomic_load(&shared->lock);
    }
}

static void shared_unlock(struct device *device)
{
    if (atomic_exchange(&device->gpu->shared.lock, 0) & LOCK_WAITERS)
        futex(&device->gpu->shared.lock, FUTEX_WAKE, 1, NULL);
}

/** device_clock() - the time on the GPU's clock, in ns */
uint64_t device_clock(const struct device *device)
{
    struct gpu_shared *shared = &device->gpu->shared;

    return atomic_load(&shared->clock_mode) ? atomic_load(&shared->virtual_now) : clock_monotonic();
}

/*
 * Remove everything that one attachment left behind. If this process is killed half-way, the
 * next process that clears the slot starts over.
 */
static void slot_clear(struct gpu *gpu, uint32_t slot)
{
    for (uint32_t i = 0; i < gpu->shared.n_contexts; i++) {
        if (gpu->contexts[i].serial && gpu->contexts[i].slot == slot)
            atomic_store(&gpu->contexts[i].serial, 0);
    }
    atomic_store(&gpu->shared.slots[slot].memory, 0);
    atomic_store(&gpu->shared.slots[slot].state, 0);
    atomic_store(&gpu->shared.slots[slot].inside, 0);
    atomic_store(&gpu->shared.slots[slot].attached, 0);
}

/** device_reap() - with the lock held: remove the contexts and the memory of dead processes */
void device_reap(struct device *device)
{
    struct gpu *gpu = device->gpu;

    for (uint32_t i = 0; i < GPU_SLOTS; i++) {
        if (gpu->shared.slots[i].attached && device_slot_pid(device, i) < 0)
            slot_clear(gpu, i);
    }
    atomic_store(&gpu->shared.reaped, clock_monotonic());
}

static void sample_take(struct gpu *gpu)
{
    const struct gpu_timeline *line = schedule_current(gpu);
    struct gpu_sample *samples = gpu->shared.samples;

    if (samples[1].now == 0) /* first sample of this device: nothing earlier is known */
        samples[1] = (struct gpu_sample){.now = line->now, .busy = line->busy};
    else if (line->now - samples[1].now < SAMPLE_LENGTH)
        return;
    samples[0] = samples[1];
    samples[1] = (struct gpu_sample){.now = line->now, .busy = line->busy};
}

/**
 * device_enter() - take the lock and bring the timeline up to date
 *
 * Returns false, without the lock, if this library's attachment is gone because the process closed
 * a descriptor for the device file.
 */
bool device_enter(struct device *device)
{
    struct gpu *gpu = device->gpu;
    uint64_t now;

    pthread_mutex_lock(&device->local);
    shared_lock(device);
    if (gpu->shared.slots[device->slot].attached != device->generation) {
        device_leave(device);
        return false;
    }
    now = clock_monotonic();
    if (now - gpu->shared.reaped > REAP_INTERVAL)
        device_reap(device);
    schedule_advance(gpu, device_clock(device));
    sample_take(gpu);
    return true;
}

void device_leave(struct device *device)
{
    shared_unlock(device);
    pthread_mutex_unlock(&device->local);
}

/**
 * device_wait() - without the lock: sleep until `when` on the GPU's clock, or wake earlier
 *
 * A virtual clock does not advance on its own: waiting advances it. Returns false if the clock
 * would never reach `when`.
 */
bool device_wait(struct device *device, uint64_t when)
{
    struct gpu_shared *shared = &device->gpu->shared;
    struct timespec until;
    uint64_t now, most;

    if (atomic_load(&shared->clock_mode)) {
        now = atomic_load(&shared->virtual_now);
        if (when == UINT64_MAX)
            return false;
        while (now < when && !atomic_compare_exchange_weak(&shared->virtual_now, &now, when))
            continue;
        return true;
    }
    now = clock_monotonic();
    most = atomic_load(&shared->steered) ? SLEEP_STEERED : MAX_SLEEP;
    if (when > now + most)
        when = now + most;
    until = (struct timespec){.tv_sec = (time_t)(when / 1000000000u),
                              .tv_nsec = (long)(when % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        continue;
    return true;
}

/** device_slot_away() - whether the memory and contexts of one attachment are checkpointed */
bool device_slot_away(const struct device *device, uint32_t slot)
{
    return device->gpu->shared.slots[slot].state == CU_PROCESS_STATE_CHECKPOINTED;
}

/** device_slot_contexts() - contexts of one attachment that are on the device */
unsigned int device_slot_contexts(const struct device *device, uint32_t slot)
{
    const struct gpu *gpu = device->gpu;
    unsigned int n = 0;

    if (device_slot_away(device, slot))
        return 0;
    for (uint32_t i = 0; i < gpu->shared.n_contexts; i++)
        n += gpu->contexts[i].serial && gpu->contexts[i].slot == slot;
    return n;
}

/** device_slot_memory() - bytes that one attachment takes, including those of its contexts */
uint64_t device_slot_memory(const struct device *device, uint32_t slot)
{
    const struct gpu *gpu = device->gpu;

    if (device_slot_away(device, slot))
        return 0;
    return gpu->shared.slots[slot].memory +
           device_slot_contexts(device, slot) * gpu->config.context_memory;
}

/** device_used() - bytes in use on the whole device */
uint64_t device_used(const struct device *device)
{
    uint64_t used = 0;

    for (uint32_t i = 0; i < GPU_SLOTS; i++) {
        if (device->gpu->shared.slots[i].attached)
            used += device_slot_memory(device, i);
    }
    return used;
}

/** device_uuid_text() - the UUID in the form that NVML uses */
void device_uuid_text(const struct device *device, char text[static 41])
{
    const uint8_t *u = device->gpu->config.uuid;
    int n = snprintf(text, 41, "GPU-");

    for (int i = 0; i < 16; i++)
        n += snprintf(text + n, 41u - (size_t)n, "%s%02x",
                      i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", u[i]);
}

static int slot_attach(struct device *device, bool nvml)
{
    struct gpu_shared *shared = &device->gpu->shared;
    uint32_t first = nvml ? GPU_SLOT_NVML : 0;
    uint32_t last = nvml ? GPU_SLOTS : GPU_SLOT_NVML;

    for (uint32_t i = first; i < last; i++) {
        /*
         * Another copy of this library in this process may own the slot; the kernel would not
         * report that.
         */
        if (shared->slots[i].attached && slot_mine(device, i))
            continue;
        if (byte_lock(device->fd, F_SETLK, F_WRLCK, i, NULL) < 0)
            continue;
        device->slot = i;
        do {
            device->generation = (atomic_fetch_add(&shared->generations, 1) + 1) & LOCK_GENERATIONS;
        } while (device->generation == 0);
        /*
         * Set before the lock is first taken, so that other libraries in this process see a live
         * holder.
         */
        atomic_store(&shared->slots[i].key, device->key);
        pthread_mutex_lock(&device->local);
        shared_lock(device);
        slot_clear(device->gpu, i);
        atomic_store(&shared->slots[i].attached, device->generation);
        device_leave(device);
        return 0;
    }
    return -EUSERS;
}

static bool config_fits(const struct gpu_config *config, off_t size)
{
    return config->magic == SIMGPU_MAGIC && config->version == SIMGPU_LAYOUT_VERSION &&
           config->file_size == sizeof(struct gpu) && config->slice > 0 &&
           (uint64_t)size >= sizeof(struct gpu);
}

/** device_open() - attach to DIRECTORY/gpuMINOR; returns 0 or -errno */
int device_open(struct device **devicep, const char *directory, unsigned int minor, bool nvml)
{
    struct device *device;
    struct gpu_config config;
    char path[4096];
    int r;

    if (snprintf(path, sizeof(path), "%s/gpu%u", directory, minor) >= (int)sizeof(path))
        return -ENAMETOOLONG;
    device = calloc(1, sizeof(*device));
    if (!device)
        return -ENOMEM;
    pthread_mutex_init(&device->local, NULL);
    device->key = process_key();
    device->fd = open(path, O_RDWR | O_CLOEXEC);
    if (device->fd < 0) {
        r = -errno;
        goto free;
    }
    if (pread(device->fd, &config, sizeof(config), 0) != (ssize_t)sizeof(config) ||
        !config_fits(&config, lseek(device->fd, 0, SEEK_END))) {
        r = -EINVAL;
        goto close;
    }
    device->gpu = mmap(NULL, sizeof(struct gpu), PROT_READ | PROT_WRITE, MAP_SHARED, device->fd, 0);
    /* From here on, closing the descriptor could drop the record locks of another copy of this
     * library, which has accepted the file as well. */
    if (device->gpu == MAP_FAILED) {
        r = -errno;
        goto free;
    }
    r = slot_attach(device, nvml);
    if (r < 0) {
        munmap(device->gpu, sizeof(struct gpu));
        goto free;
    }
    *devicep = device;
    return 0;
close:
    close(device->fd);
free:
    free(device);
    return r;
}

/**
 * device_detach() - release everything that this library holds on a device, and forget the device
 *
 * The descriptor stays open: closing it would end the attachments of other libraries in this
 * process.
 */
void device_detach(struct device *device)
{
    if (device_enter(device)) {
        slot_clear(device->gpu, device->slot);
        atomic_store(&device->gpu->shared.slots[device->slot].key, 0);
        device_leave(device);
    }
    (void)byte_lock(device->fd, F_SETLK, F_UNLCK, device->slot, NULL);
    munmap(device->gpu, sizeof(struct gpu));
    free(device);
}

/** device_abandon() - after fork: forget a device that belongs to the parent process */
void device_abandon(struct device *device)
{
    munmap(device->gpu, sizeof(struct gpu));
    close(device->fd);
    free(device);
}
