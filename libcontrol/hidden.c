/*
 * Charges the memory of modules and libraries that NVML attributes to no process: managed
 * variables.
 *
 * No sample attributes such memory to a process, so it is charged separately. Each charge is in the
 * table of blocks until its module, library or context ends. If the amount of such memory cannot be
 * determined yet for a load, the load is noted here, and the memory is charged after the first
 * sample that shows it.
 */
#include "loads.h"

#include <string.h>

#define HIDDEN_N_OPEN 16

static bool hidden_any; /* a module or library has memory that NVML does not attribute */

/* A load for which it is not yet known how much memory NVML attributes to no process. */
struct open_load {
    uint64_t handle; /* 0: none */
    uint8_t owner;
    uint64_t since;
    struct load load;
};

static struct open_load open_loads[HIDDEN_N_OPEN];
static uint32_t n_open;
static struct os_lock open_lock;

void hidden_after_fork(void)
{
    hidden_any = false;
    memset(open_loads, 0, sizeof open_loads);
    n_open = 0;
    open_lock.word = 0;
}

static uint64_t hidden_key(uint64_t handle, uint8_t owner)
{
    return handle ^ (uint64_t)(owner + 1) << 56;
}

/* Adds a charge that ends with the module or with its context. */
static void hidden_add(const struct load *load, uint64_t handle, uint8_t owner)
{
    struct block block = {.key = hidden_key(handle, owner),
                          .size = load->hidden,
                          .value = handle,
                          .kind = BLOCK_HIDDEN,
                          .device = (int8_t)load->device,
                          .flags = BLOCK_UNSEEN,
                          .owner = owner};
    struct block *known;
    bool added;

    known = blocks_lock(BLOCK_HIDDEN, block.key);
    added = !known && blocks_add(&block);
    if (known)
        known->size += block.size;
    blocks_unlock(BLOCK_HIDDEN, block.key);
    if (added) {
        atomic_store_relaxed(&hidden_any, true);
        atomic_add_relaxed(&pages_ledger_device((unsigned)load->device)->blocks, 1);
    }
    account_note_peak(load->device);
}

/* If there is no free entry, the load that has been open longest is dropped: the program has loaded
 * sixteen others since. */
static void open_add(const struct load *load, uint64_t handle, uint8_t owner)
{
    struct open_load *place = open_loads;

    os_lock(&open_lock);
    for (struct open_load *o = open_loads; o < open_loads + HIDDEN_N_OPEN; o++)
        if (!o->handle || (place->handle && o->since < place->since))
            place = o;
    if (!place->handle)
        atomic_add_relaxed(&n_open, 1);
    *place = (struct open_load){.handle = handle, .owner = owner, .since = os_now(), .load = *load};
    os_unlock(&open_lock);
    account_watch(load->device);
}

static void open_close(struct open_load *o)
{
    o->handle = 0;
    atomic_add_relaxed(&n_open, -1u);
}

void modules_refresh(int device)
{
    uint64_t sampled = atomic_load_acquire(&pages_grant_device((unsigned)device)->unattributed_ns);

    if (likely(!atomic_load_relaxed(&n_open)))
        return;
    os_lock(&open_lock);
    for (struct open_load *o = open_loads; o < open_loads + HIDDEN_N_OPEN; o++) {
        uint64_t grown;

        if (!o->handle || o->load.device != device || sampled < o->since)
            continue;
        grown = load_grown(&o->load);
        o->load.hidden = grown < o->load.missing ? grown : o->load.missing;
        if (o->load.hidden >= ACCOUNT_UNIT) {
            account_add(device, o->load.hidden, true);
            hidden_add(&o->load, o->handle, o->owner);
        }
        open_close(o);
    }
    os_unlock(&open_lock);
}

void hidden_note(const struct load *load, uint64_t handle)
{
    if (likely(load->device < 0))
        return;
    if (load->hidden)
        hidden_add(load, handle, contexts_owner());
    if (load->missing && load->sampled)
        open_add(load, handle, contexts_owner());
}

/* Drops the open loads of a module, library or context that ends, so that no charge is added for
 * them. */
void hidden_forget(uint64_t handle, int owner)
{
    if (likely(!atomic_load_relaxed(&n_open)))
        return;
    os_lock(&open_lock);
    for (struct open_load *o = open_loads; o < open_loads + HIDDEN_N_OPEN; o++)
        if (o->handle && (handle ? o->handle == handle : o->owner == owner))
            open_close(o);
    os_unlock(&open_lock);
}

struct hidden_end {
    uint64_t handle;
    uint64_t bytes[LAYOUT_N_DEVICES];
};

static bool hidden_visit(const struct block *block, void *data)
{
    struct hidden_end *end = data;

    if (block->kind != BLOCK_HIDDEN || block->value != end->handle)
        return false;
    end->bytes[block->device] += block->size;
    atomic_add_relaxed(&pages_ledger_device((unsigned)block->device)->blocks, -1ull);
    return true;
}

/* Ends the charges for a module or library, in all contexts. */
void hidden_ends(uint64_t handle)
{
    struct hidden_end end = {.handle = handle};

    hidden_forget(handle, 0);
    if (likely(!atomic_load_relaxed(&hidden_any)))
        return;
    blocks_sweep(hidden_visit, &end);
    for (int device = 0; device < (int)pages_n_devices(); device++)
        account_give(device, end.bytes[device], true);
}
