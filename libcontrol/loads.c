/* Measures how much memory a load of a module or library takes; see loads.h. */
#include "loads.h"

#include "parking.h"

#define LOADS_MUCH    (16ull << 20)
#define LOADS_WAIT_NS (2000 * NS_PER_MS)
#define LOADS_N_LOOKS 8
#define LOADS_N_TRIES 50
#define LOADS_N_READS 8
#define LOADS_NAP_NS  (100 * NS_PER_US)

static size_t free_now(void)
{
    CUstreamCaptureMode mode;
    size_t free_bytes = 0, total;

    account_relax(&mode);
    if (driver->cuMemGetInfo(&free_bytes, &total) != CUDA_SUCCESS)
        free_bytes = 0;
    account_unrelax(&mode);
    return free_bytes;
}

static uint64_t charged_now(int device)
{
    return atomic_load_relaxed(&pages_ledger_device((unsigned)device)->memory);
}

static const struct grant_device *grant_of(const struct load *load)
{
    return pages_grant_device((unsigned)load->device);
}

/* Reads free and charged memory as of one moment, because memory that other threads free stays
 * charged a little longer than it stays allocated. */
static void read_free_and_charged(int device, size_t *free_bytes, uint64_t *charged)
{
    uint64_t before;

    *charged = charged_now(device);
    for (int i = 0; i < LOADS_N_READS; i++) {
        before = *charged;
        *free_bytes = free_now();
        *charged = charged_now(device);
        if (likely(*charged == before))
            return;
    }
}

/* Reads how much memory belongs to no process, and the number of processes, both from the same
 * sample. Returns false if there has been no sample yet. */
static bool read_unattributed(const struct grant_device *grant, uint64_t *unattributed,
                              uint32_t *n_processes)
{
    bool sampled = false;

    for (int i = 0; i < LOADS_N_READS; i++) {
        uint64_t since = atomic_load_acquire(&grant->unattributed_ns);

        *unattributed = atomic_load_acquire(&grant->unattributed);
        *n_processes = atomic_load_acquire(&grant->n_processes);
        sampled = since;
        if (likely(atomic_load_acquire(&grant->unattributed_ns) == since))
            break;
    }
    return sampled;
}

/* A load begins only when the container's memory is on the GPU. It may take seconds, so memory may
 * be parked during the load. */
void load_begin(struct load *load)
{
    if (parking_applies())
        parking_wait();
    load->device = pages_index_current();
    load->hidden = load->missing = load->taken = 0;
    if (load->device < 0)
        return;
    load->overhead = atomic_load_relaxed(&grant_of(load)->memory_overhead);
    load->sampled = read_unattributed(grant_of(load), &load->unattributed, &load->n_processes);
    load->returned = account_returned(load->device);
    read_free_and_charged(load->device, &load->before, &load->charged);
}

/* Returns how much the unattributed memory has grown since the load began, less what new processes
 * added. */
uint64_t load_grown(const struct load *load)
{
    const struct grant_device *grant = grant_of(load);
    uint64_t each = atomic_load_relaxed(&grant->unattributed_each);
    uint64_t unattributed;
    uint32_t n_processes;
    int64_t grown;

    read_unattributed(grant, &unattributed, &n_processes);
    grown = (int64_t)(unattributed - load->unattributed) -
            (int64_t)(each * (uint64_t)((int64_t)n_processes - (int64_t)load->n_processes));
    return grown > 0 ? (uint64_t)grown : 0;
}

/*
 * Returns how much GPU memory has been taken since the load began and is not charged to this
 * process, whose other threads may allocate and free meanwhile. If `freed` is true, what they free
 * counts as well. It must not count where no sample will correct the result: memory that a thread
 * was freeing when the load began stays charged a moment longer, and would look like memory that
 * the load took.
 */
static uint64_t load_taken(const struct load *load, bool freed)
{
    uint64_t charged;
    size_t after;
    int64_t taken, more;

    read_free_and_charged(load->device, &after, &charged);
    taken = (int64_t)(load->before - after);
    more = (int64_t)(charged - load->charged);
    if (!freed && taken < 0)
        taken = 0;
    if (!freed && more < 0)
        more = 0;
    return taken > more ? (uint64_t)(taken - more) : 0;
}

/* The same, less memory that other threads are freeing and that is still charged. */
static uint64_t load_taken_for_long(const struct load *load, uint64_t taken, bool freed)
{
    for (int i = 0; i < LOADS_N_TRIES && taken >= LOADS_MUCH; i++) {
        uint64_t again;

        os_sleep(LOADS_NAP_NS);
        again = load_taken(load, freed);
        taken = again < taken ? again : taken;
    }
    return taken;
}

/* Returns the part of the taken memory that no sample has found in the process. */
static uint64_t load_missing(const struct load *load, uint64_t taken)
{
    int64_t found =
        (int64_t)(atomic_load_relaxed(&grant_of(load)->memory_overhead) - load->overhead);

    if (found < 0)
        found = 0;
    return taken > (uint64_t)found ? taken - (uint64_t)found : 0;
}

/* Waits for a sample that shows how much memory belongs to no process. Samples during which the
 * GPU's memory changed do not show it. */
static bool load_await_unattributed(const struct load *load, uint64_t since)
{
    const struct grant_device *grant = grant_of(load);

    for (int i = 0; i < LOADS_N_LOOKS && atomic_load_acquire(&grant->unattributed_ns) < since;
         i++) {
        account_driver_takes(load->device, 0);
        if (!account_await_sample(load->device, os_now(), LOADS_WAIT_NS))
            break;
    }
    return atomic_load_acquire(&grant->unattributed_ns) >= since;
}

/*
 * Called after a sample. If the sample did not find the memory in the process, what belongs to no
 * process is charged. If that cannot be determined because the container itself keeps allocating
 * and freeing, everything that is missing is charged; if other containers are the reason, nothing
 * is charged for now.
 */
static void load_reveal(struct load *load, uint64_t taken, uint64_t since)
{
    uint64_t missing, grown;
    bool sampled;

    if (load_missing(load, taken) < LOADS_MUCH)
        return;
    sampled = load_await_unattributed(load, since) && load->sampled;
    missing = load_missing(load, taken);
    if (missing < LOADS_MUCH)
        return;
    grown = load_grown(load);
    if (sampled)
        load->hidden = grown < missing ? grown : missing;
    else if ((int64_t)(account_returned(load->device) - load->returned) >= (int64_t)LOADS_MUCH)
        load->hidden = load_missing(load, load_taken_for_long(load, taken, true));
    else
        load->missing = load_missing(load, load_taken_for_long(load, taken, true));
    if (load->hidden < ACCOUNT_UNIT) {
        load->hidden = 0;
        return;
    }
    account_add(load->device, load->hidden, true);
    /* The next load begins with a sample that includes this charge. */
    load_await_unattributed(load, os_now());
}

/* Returns false if the container now exceeds its quota by more than `debt`; the load then has to be
 * undone as far as possible. LOADS_DEBT applies instead of `debt` after a small load, and 0 if
 * memory that belongs to no process was charged. */
bool load_end(struct load *load, CUresult result, uint64_t debt)
{
    uint64_t now, taken;

    if (load->device < 0 || result != CUDA_SUCCESS)
        return true;
    load->taken = taken = load_taken(load, true);
    now = os_now();
    if (taken < LOADS_MUCH) {
        account_driver_takes(load->device, taken);
        /* Many small loads add up, but others may have given back memory, which only a sample
         * shows. */
        if (likely(!account_over(load->device, LOADS_DEBT)))
            return true;
        account_await_sample(load->device, now, LOADS_WAIT_NS);
        return !account_over(load->device, LOADS_DEBT);
    }
    account_driver_takes(load->device, 0);
    if (account_await_sample(load->device, now, LOADS_WAIT_NS))
        load_reveal(load, taken, now);
    else
        account_driver_takes(load->device, load_taken_for_long(load, taken, false));
    load->taken -= load->hidden < load->taken ? load->hidden : load->taken;
    return !account_over(load->device, load->hidden ? 0 : debt);
}

/* Records what a load took, to be given back when the module or library is unloaded. Otherwise
 * modules that come and go would add up. */
void loaded_note(const struct load *load, uint64_t handle)
{
    struct block block = {.key = handle,
                          .value = load->taken,
                          .kind = BLOCK_LOADED,
                          .device = -1,
                          .owner = OWNER_NONE};
    struct block *known;

    if (load->device < 0 || !load->taken)
        return;
    known = blocks_lock(BLOCK_LOADED, handle);
    if (known)
        known->value += block.value;
    else
        blocks_add(&block);
    blocks_unlock(BLOCK_LOADED, handle);
}

uint64_t loaded_forget(uint64_t handle)
{
    struct block *known = blocks_lock(BLOCK_LOADED, handle);
    uint64_t taken = known ? known->value : 0;

    if (known)
        blocks_remove(known);
    blocks_unlock(BLOCK_LOADED, handle);
    return taken;
}

/*
 * The driver gives back what is unloaded, or keeps it for the next load. The governor's next sample
 * shows which. While no governor is sampling, the library measures what was given back, because
 * nothing else would ever lower the sum of the loads.
 */
void unload_begin(struct load *load)
{
    load->device = pages_index_current();
    load->before = load->device >= 0 && account_alone() ? free_now() : 0;
}

void unload_end(struct load *load, uint64_t handle, CUresult result)
{
    uint64_t given;
    size_t after;

    if (result != CUDA_SUCCESS)
        return;
    given = loaded_forget(handle);
    if (load->device < 0)
        return;
    if (load->before) {
        after = free_now();
        given = after > load->before ? after - load->before : 0;
    }
    account_driver_gives(load->device, given);
}
