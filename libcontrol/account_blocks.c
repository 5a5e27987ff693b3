/*
 * Charges blocks of memory, each from the call that allocates it to the one that frees it or to the
 * end of its context.
 *
 * The charges themselves are in account.c, and the table of blocks in blocks.c.
 */
#include "control.h"

/* Determines what the driver takes for a block. Small blocks are cut from slabs, and a slab is
 * charged as a whole. */
static void account_measure(struct account_charge *charge, enum account_kind kind, uint64_t size)
{
    charge->kind = BLOCK_MEMORY;
    charge->flags = 0;
    charge->size = size;
    switch (kind) {
    case ACCOUNT_BLOCK:
        if (size && size < ACCOUNT_SMALL)
            charge->flags = BLOCK_SMALL;
        charge->size = account_round(size, ACCOUNT_UNIT);
        break;
    case ACCOUNT_MANAGED:
        charge->flags = BLOCK_UNSEEN;
        charge->size = account_round(size, size < ACCOUNT_SMALL ? 512 : ACCOUNT_UNIT);
        break;
    case ACCOUNT_ARRAY:
        charge->kind = BLOCK_ARRAY;
        charge->size = account_round(size, size < ACCOUNT_SMALL ? 512 : ACCOUNT_UNIT);
        break;
    case ACCOUNT_EXTERNAL:
        charge->kind = BLOCK_EXTERNAL;
        charge->flags = BLOCK_UNSEEN;
        break;
    case ACCOUNT_IPC:
        charge->kind = BLOCK_IPC;
        charge->flags = BLOCK_UNSEEN;
        break;
    }
}

CUresult account_reserve(struct account_charge *charge, enum account_kind kind, uint64_t size)
{
    *charge = (struct account_charge){.device = pages_index_current()};
    if (charge->device < 0)
        return CUDA_SUCCESS;
    account_measure(charge, kind, size);
    charge->claimed = charge->size;
    if (!charge->size ||
        likely(account_claim(charge->device, charge->size, charge->flags & BLOCK_UNSEEN)))
        return CUDA_SUCCESS;
    return account_refuse(charge->device);
}

/* Charges or returns the difference if the driver took a size other than the reserved one. */
void account_settle(struct account_charge *charge, enum account_kind kind, uint64_t size)
{
    uint64_t before = charge->size;

    if (charge->device < 0)
        return;
    account_measure(charge, kind, size);
    if (charge->size > before) {
        account_add(charge->device, charge->size - before, charge->flags & BLOCK_UNSEEN);
        /* A sample taken before this charge attributes the difference to the driver, so a new
         * sample is requested. */
        account_driver_takes(charge->device, 0);
    } else {
        account_give(charge->device, before - charge->size, charge->flags & BLOCK_UNSEEN);
    }
}

/* Called with the part locked. Returns the bytes to subtract from the charges. */
static uint64_t slab_leave(uint64_t address)
{
    struct block *slab = blocks_peer(BLOCK_SLAB, address & ~(ACCOUNT_UNIT - 1));

    if (!slab || --slab->count)
        return 0;
    blocks_remove(slab);
    return ACCOUNT_UNIT;
}

/* A block in an existing slab needs no additional charge. Returns the bytes to give back. */
static uint64_t slab_enter(const struct account_charge *charge, uint64_t address)
{
    uint64_t base = address & ~(ACCOUNT_UNIT - 1);
    struct block *slab = blocks_peer(BLOCK_SLAB, base);

    if (slab) {
        slab->count++;
        return ACCOUNT_UNIT;
    }
    blocks_add(&(struct block){.key = base,
                               .size = ACCOUNT_UNIT,
                               .count = 1,
                               .kind = BLOCK_SLAB,
                               .device = (int8_t)charge->device,
                               .owner = OWNER_NONE});
    return 0;
}

/* A block for which the table has no room stays charged for the life of the process. */
void account_record(const struct account_charge *charge, uint64_t key)
{
    struct block block = {.key = key,
                          .size = charge->flags & BLOCK_SMALL ? 0 : charge->size,
                          .count = 1,
                          .kind = charge->kind,
                          .device = (int8_t)charge->device,
                          .flags = charge->flags,
                          .owner = OWNER_NONE};
    struct block *stale;
    struct block gone = {0};
    uint64_t returned = 0;

    if (charge->device < 0 || !charge->size)
        return;
    account_landed(charge->device, charge->claimed, charge->flags & BLOCK_UNSEEN);
    if (!key)
        return;
    block.owner = contexts_owner();
    stale = blocks_lock(charge->kind, key);
    if (unlikely(stale)) {
        /* The driver has returned this address again, so the old block ended unnoticed. */
        gone = *stale;
        blocks_remove(stale);
        if (gone.flags & BLOCK_SMALL)
            returned += slab_leave(key);
    }
    if (likely(blocks_add(&block)) && block.flags & BLOCK_SMALL)
        returned += slab_enter(charge, key);
    blocks_unlock(charge->kind, key);
    if (unlikely(gone.key))
        account_give(gone.device, gone.size, gone.flags & BLOCK_UNSEEN);
    else
        atomic_add_relaxed(&pages_ledger_device((unsigned)charge->device)->blocks, 1);
    account_give(charge->device, returned, false);
    if (charge->size > returned)
        account_note_peak(charge->device);
}

/* Removes the block from the table, or leaves it there if it is open more than once. A key that is
 * not in the table is left for the driver to check. */
void account_forget(struct account_charge *charge, enum account_kind kind, uint64_t key)
{
    struct block *block;

    *charge = (struct account_charge){.device = -1};
    if (unlikely(!pages_slot()))
        return;
    account_measure(charge, kind, 0);
    block = blocks_lock(charge->kind, key);
    if (block && block->count > 1) {
        charge->device = block->device;
        charge->shared = true;
    } else if (block) {
        charge->device = block->device;
        charge->flags = block->flags;
        charge->owner = block->owner;
        charge->size = block->size;
        charge->claimed = block->flags & BLOCK_SMALL ? ACCOUNT_UNIT : block->size;
        account_moves(block->device, charge->claimed, block->flags & BLOCK_UNSEEN);
        blocks_remove(block);
    }
    blocks_unlock(charge->kind, key);
}

/* A block that was open more than once has been closed once. Other threads may have closed it too
 * while the driver was called, so it may have to be refunded. */
static void account_closed(const struct account_charge *charge, uint64_t key)
{
    struct block *block = blocks_lock(charge->kind, key);
    struct block gone = {0};

    if (block && !--block->count) {
        gone = *block;
        blocks_remove(block);
    }
    blocks_unlock(charge->kind, key);
    if (likely(!gone.key))
        return;
    account_give(gone.device, gone.size, gone.flags & BLOCK_UNSEEN);
    atomic_add_relaxed(&pages_ledger_device((unsigned)gone.device)->blocks, -1ull);
}

/* Refunds the block if the driver has freed it, and otherwise puts it back. */
void account_forgotten(struct account_charge *charge, uint64_t key, CUresult result)
{
    uint64_t returned = charge->size;

    if (charge->device < 0)
        return;
    if (unlikely(charge->shared)) {
        if (result == CUDA_SUCCESS)
            account_closed(charge, key);
        return;
    }
    blocks_lock(charge->kind, key);
    if (unlikely(result != CUDA_SUCCESS)) {
        blocks_add(&(struct block){.key = key,
                                   .size = charge->size,
                                   .count = 1,
                                   .kind = charge->kind,
                                   .device = (int8_t)charge->device,
                                   .flags = charge->flags,
                                   .owner = charge->owner});
        blocks_unlock(charge->kind, key);
        account_landed(charge->device, charge->claimed, charge->flags & BLOCK_UNSEEN);
        return;
    }
    if (charge->flags & BLOCK_SMALL)
        returned = slab_leave(key);
    blocks_unlock(charge->kind, key);
    account_give(charge->device, returned, charge->flags & BLOCK_UNSEEN);
    account_landed(charge->device, charge->claimed, charge->flags & BLOCK_UNSEEN);
    atomic_add_relaxed(&pages_ledger_device((unsigned)charge->device)->blocks, -1ull);
}

CUresult account_open(enum block_kind kind, int device, uint64_t key, uint64_t size)
{
    struct block block = {.key = key,
                          .size = size,
                          .count = 1,
                          .kind = (uint8_t)kind,
                          .device = (int8_t)device,
                          .flags = BLOCK_UNSEEN,
                          .owner = kind == BLOCK_IPC ? contexts_owner() : OWNER_NONE};
    bool known;

    for (;;) {
        struct block *open = blocks_lock(kind, key);

        known = open;
        if (open)
            open->count++;
        blocks_unlock(kind, key);
        if (known)
            return CUDA_SUCCESS;
        if (!account_claim(device, size, true))
            return account_refuse(device);
        if (!blocks_lock(kind, key)) {
            blocks_add(&block);
            blocks_unlock(kind, key);
            atomic_add_relaxed(&pages_ledger_device((unsigned)device)->blocks, 1);
            account_note_peak(device);
            return CUDA_SUCCESS;
        }
        /* Another thread was faster. */
        blocks_unlock(kind, key);
        account_give(device, size, true);
    }
}

struct sweep {
    int device;
    uint8_t owner;
    uint64_t seen, unseen, n;
};

static bool sweep_visit(const struct block *block, void *data)
{
    struct sweep *sweep = data;
    struct block *slab;

    if (block->device != sweep->device)
        return false;
    if (block->kind == BLOCK_SLAB && !block->count) {
        sweep->seen += block->size;
        return true;
    }
    if (block->owner != sweep->owner)
        return false;
    if (block->flags & BLOCK_SMALL) {
        slab = blocks_peer(BLOCK_SLAB, block->key & ~(ACCOUNT_UNIT - 1));
        if (slab)
            slab->count--;
    }
    *(block->flags & BLOCK_UNSEEN ? &sweep->unseen : &sweep->seen) += block->size;
    sweep->n++;
    return true;
}

/* A context has ended, and with it everything that was allocated in it. */
bool account_sweep(int device, uint8_t owner)
{
    struct sweep sweep = {.device = device, .owner = owner};

    blocks_sweep(sweep_visit, &sweep);
    account_give(device, sweep.seen, false);
    account_give(device, sweep.unseen, true);
    atomic_add_relaxed(&pages_ledger_device((unsigned)device)->blocks, -sweep.n);
    return sweep.n;
}
