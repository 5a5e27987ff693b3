/*
 * The blocks that can be moved: what cuMemAlloc and cuMemAllocPitch return in a container whose
 * memory may be parked, from 1 MiB on.
 *
 * To the application such a block is like any other of cuMemAlloc. Where the driver distinguishes
 * the two, the library answers (pointers.c). A block is allocated by the driver's cuMemAlloc,
 * and cannot be moved, while a stream captures, because the driver then allows or refuses the call
 * according to the capture's mode.
 */
#include "parking.h"

#include "contexts.h"

#include <string.h>

#define BLOCKS_ROOM_NS (5 * NS_PER_S) /* longest wait of an allocation for others that leave */
#define BLOCKS_NAP_NS  (500 * NS_PER_US)

static struct os_lock table_lock;
static struct parking_block *blocks; /* ordered by address */
static size_t n_blocks, capacity;
static uint64_t total;
static uint64_t n_made;
static uint32_t n_freed; /* blocks with `freed` */

/* ---- the table ---- */

/* Called with the lock. Returns the index of the first block that begins after `address`. */
static size_t upper(uint64_t address)
{
    size_t low = 0, high = n_blocks;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (blocks[middle].base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Called with the lock. */
static struct parking_block *block_at(uint64_t address)
{
    size_t after = upper(address);
    struct parking_block *block = after ? &blocks[after - 1] : NULL;

    return block && address - block->base < block->size ? block : NULL;
}

static bool table_grow(void)
{
    size_t larger = capacity ? 2 * capacity : 128;
    struct parking_block *table = os_map_memory(larger * sizeof *table);

    if (!table)
        return false;
    if (blocks) {
        memcpy(table, blocks, n_blocks * sizeof *table);
        os_unmap(blocks, capacity * sizeof *blocks);
    }
    blocks = table;
    capacity = larger;
    return true;
}

static bool table_add(const struct parking_block *block)
{
    bool has_room;
    size_t at;

    os_lock(&table_lock);
    has_room = n_blocks < capacity || table_grow();
    if (has_room) {
        at = upper(block->base);
        memmove(&blocks[at + 1], &blocks[at], (n_blocks - at) * sizeof *blocks);
        blocks[at] = *block;
        blocks[at].serial = ++n_made;
        n_blocks++;
        total += block->size;
        parking_note_bytes(total);
    }
    os_unlock(&table_lock);
    return has_room;
}

/* Called with the lock. */
static void table_remove(struct parking_block *block)
{
    if (!block->fixed && !block->freed)
        total -= block->size;
    if (block->freed)
        atomic_sub_seq_cst(&n_freed, 1);
    parking_note_bytes(total);
    n_blocks--;
    memmove(block, block + 1, (size_t)(blocks + n_blocks - block) * sizeof *blocks);
}

bool parking_find(uint64_t address, struct parking_block *found)
{
    const struct parking_block *block;

    os_lock(&table_lock);
    block = block_at(address);
    if (block)
        *found = *block;
    os_unlock(&table_lock);
    return block && !found->freed;
}

bool parking_first(struct parking_block *found)
{
    bool any = false;

    os_lock(&table_lock);
    for (size_t i = 0; i < n_blocks && !any; i++) {
        any = !blocks[i].fixed && !blocks[i].freed;
        *found = blocks[i];
    }
    os_unlock(&table_lock);
    return any;
}

/* Called by a call that has entered, so the block is resident. */
void parking_fix(uint64_t base)
{
    struct parking_block *block;

    os_lock(&table_lock);
    block = block_at(base);
    if (block && !block->fixed && !block->freed) {
        block->fixed = true;
        total -= block->size;
        parking_note_bytes(total);
    }
    os_unlock(&table_lock);
}

void parking_note_buffer(uint64_t base, uint64_t number)
{
    struct parking_block *block;

    os_lock(&table_lock);
    block = block_at(base);
    if (block && !block->buffer)
        block->buffer = number;
    os_unlock(&table_lock);
}

struct parking_block *parking_blocks(size_t *np)
{
    *np = n_blocks;
    return blocks;
}

uint64_t parking_bytes(void)
{
    uint64_t bytes;

    os_lock(&table_lock);
    bytes = total;
    os_unlock(&table_lock);
    return bytes;
}

/* ---- physical memory ---- */

CUresult parking_map(struct parking_block *block)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, pages_device(0)}};
    CUmemAccessDesc access = {.location = prop.location,
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUresult result = real->cuMemCreate(&handle, block->size, &prop, 0);

    if (result != CUDA_SUCCESS)
        return result;
    result = real->cuMemMap(block->base, block->size, 0, handle, 0);
    if (result == CUDA_SUCCESS) {
        result = driver->cuMemSetAccess(block->base, block->size, &access, 1);
        if (result != CUDA_SUCCESS)
            real->cuMemUnmap(block->base, block->size);
    }
    if (result == CUDA_SUCCESS)
        block->handle = handle;
    else
        real->cuMemRelease(handle);
    return result;
}

void parking_unmap(struct parking_block *block)
{
    real->cuMemUnmap(block->base, block->size);
    real->cuMemRelease(block->handle);
    block->handle = 0;
}

/* ---- allocation ---- */

/* The memory is part of the container's quota, which is reserved on the GPU while the container is
 * resident. So if the driver has no room, another container is about to leave. */
static CUresult map_patiently(struct parking_block *block)
{
    uint64_t ends = os_now() + BLOCKS_ROOM_NS;
    CUresult result;

    while ((result = parking_map(block)) == CUDA_ERROR_OUT_OF_MEMORY && os_now() < ends)
        os_sleep(BLOCKS_NAP_NS);
    return result;
}

/* Returns false if the block has to be the driver's own. */
static bool block_make(struct parking_block *block, size_t bytes)
{
    CUdeviceptr base;

    *block = (struct parking_block){
        .size = account_round(bytes, ACCOUNT_UNIT), .bytes = bytes, .owner = contexts_owner()};
    if (driver->cuCtxGetCurrent(&block->ctx) != CUDA_SUCCESS || !block->ctx ||
        driver->cuMemAddressReserve(&base, block->size, 0, 0, 0) != CUDA_SUCCESS)
        return false;
    block->base = base;
    if (map_patiently(block) == CUDA_SUCCESS) {
        if (table_add(block))
            return true;
        parking_unmap(block);
    }
    driver->cuMemAddressFree(base, block->size);
    return false;
}

CUresult parking_allocate(CUdeviceptr *addressp, size_t bytes)
{
    struct parking_block block;
    CUresult result = CUDA_SUCCESS;

    parking_enter(PARKING_MEMORY);
    parking_reap(false);
    if (addressp && bytes >= ACCOUNT_SMALL && !gate_captures() && pages_index_current() == 0 &&
        block_make(&block, bytes)) {
        *addressp = block.base;
        parking_publish();
    } else {
        result = real->cuMemAlloc_v2(addressp, bytes);
    }
    parking_leave();
    return result;
}

/* Rows are aligned to 512 bytes, as by the driver on every GPU since Kepler. */
CUresult parking_allocate_pitch(CUdeviceptr *addressp, size_t *pitchp, size_t width, size_t height,
                                unsigned int element)
{
    uint64_t bytes = account_pitch(width, height);
    CUresult result;

    if (!addressp || !pitchp || bytes < ACCOUNT_SMALL || bytes == UINT64_MAX ||
        (element != 4 && element != 8 && element != 16))
        return real->cuMemAllocPitch_v2(addressp, pitchp, width, height, element);
    result = parking_allocate(addressp, bytes);
    if (result == CUDA_SUCCESS)
        *pitchp = account_round(width, 512);
    return result;
}

/* ---- the end of a block ---- */

/* A block that ends while it is parked is charged like a resident one again, because the caller
 * gives back the charge as for a resident one. */
static void block_end(struct parking_block *block)
{
    if (block->handle) {
        parking_unmap(block);
    } else {
        account_add(0, block->size, false);
        account_give(0, block->size, true);
    }
    driver->cuMemAddressFree(block->base, block->size);
    parking_publish();
}

/* Removes a block from the table, and renews the copy of it. Returns false if another thread was
 * faster. */
static bool block_take(struct parking_block *taken)
{
    struct parking_block *block;
    bool found;

    os_lock(&table_lock);
    block = block_at(taken->base);
    found = block && block->serial == taken->serial;
    if (found) {
        *taken = *block;
        table_remove(block);
    }
    os_unlock(&table_lock);
    return found;
}

/* ---- synchronisation ---- */

bool parking_sync_begin(void)
{
    atomic_add_seq_cst(&parking_n_syncs, 1);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!gate_captures())
        return true;
    atomic_sub_seq_cst(&parking_n_syncs, 1);
    return false;
}

void parking_sync_end(void)
{
    atomic_sub_seq_cst(&parking_n_syncs, 1);
}

/* A block of a green context is one of the primary context, and outlives the green one. A
 * synchronisation of the primary context includes its green ones. */
CUcontext parking_context(const struct parking_block *block)
{
    CUcontext primary = atomic_load_acquire(&primaries[0].handle);

    return block->owner == OWNER_PRIMARY && primary ? primary : block->ctx;
}

static CUresult synchronize(CUcontext ctx)
{
    CUcontext current = NULL;
    CUresult result;

    driver->cuCtxGetCurrent(&current);
    if (current == ctx)
        return driver->cuCtxSynchronize();
    result = driver->cuCtxPushCurrent(ctx);
    if (result != CUDA_SUCCESS)
        return result;
    result = driver->cuCtxSynchronize();
    driver->cuCtxPopCurrent(&current);
    return result;
}

/* ---- blocks whose memory is released later ---- */

/* Marks a block as freed. It stays charged until its memory is released, so the charge that the
 * caller gives back is added once more. */
static bool free_later(uint64_t address)
{
    struct parking_block *block;
    bool found;

    os_lock(&table_lock);
    block = block_at(address);
    found = block && block->base == address && !block->freed;
    if (found) {
        account_add(0, block->size, false);
        if (!block->fixed)
            total -= block->size;
        parking_note_bytes(total);
        block->freed = true;
        atomic_add_seq_cst(&n_freed, 1);
    }
    os_unlock(&table_lock);
    parking_publish();
    return found;
}

static void release(struct parking_block *block)
{
    bool parked = !block->handle;

    account_moves(0, block->size, parked);
    if (!parked)
        parking_unmap(block);
    driver->cuMemAddressFree(block->base, block->size);
    account_give(0, block->size, parked);
    account_landed(0, block->size, parked);
}

/* Copies the first freed block after the copied one. Returns false if there is none. */
static bool next_freed(struct parking_block *block)
{
    bool found = false;

    os_lock(&table_lock);
    for (size_t i = upper(block->base); i < n_blocks && !found; i++) {
        found = blocks[i].freed;
        if (found)
            *block = blocks[i];
    }
    os_unlock(&table_lock);
    return found;
}

bool parking_reap(bool idle)
{
    struct parking_block block = {.base = 0};
    bool any = false;

    if (likely(!atomic_load_seq_cst(&n_freed)))
        return false;
    parking_enter(PARKING_STILL);
    while (next_freed(&block)) {
        bool done = idle;

        if (!idle && parking_sync_begin()) {
            done = synchronize(parking_context(&block)) == CUDA_SUCCESS;
            parking_sync_end();
        }
        if (!done || !block_take(&block))
            continue;
        release(&block);
        any = true;
    }
    parking_leave();
    return any;
}

/* ---- cuMemFree ---- */

/*
 * Like the driver's cuMemFree, this waits for the work that may use the block. While a stream
 * captures, that would invalidate the capture, so the memory is released later. Returns false if
 * the block is not in the table, so that the driver has to free it.
 */
bool parking_free(CUdeviceptr address, CUresult *resultp)
{
    struct parking_block block;
    bool found;

    if (!parking_applies() || !address || !parking_find(address, &block) || block.base != address)
        return false;
    parking_enter(PARKING_STILL);
    *resultp = CUDA_SUCCESS;
    /* No work uses a parked block. */
    if (parking_now() != PARKING_PARKED) {
        if (!parking_sync_begin()) {
            found = free_later(address);
            parking_leave();
            return found;
        }
        *resultp = synchronize(parking_context(&block));
        parking_sync_end();
    }
    found = *resultp != CUDA_SUCCESS || block_take(&block);
    if (found && *resultp == CUDA_SUCCESS)
        block_end(&block);
    parking_leave();
    return found;
}

/* The memory is released later, when no work can use it any more. */
bool parking_free_async(CUdeviceptr address, CUstream stream, CUresult *resultp)
{
    struct parking_block block;
    bool found;

    (void)stream;
    if (!parking_applies() || !parking_find(address, &block) || block.base != address)
        return false;
    *resultp = CUDA_SUCCESS;
    parking_enter(PARKING_STILL);
    found = free_later(address);
    parking_leave();
    return found;
}

/* A context has ended, and with it the blocks that were allocated in it. The caller has entered. */
void parking_context_gone(uint8_t owner)
{
    struct parking_block block;
    bool found;

    if (!parking_applies() || owner == OWNER_NONE)
        return;
    do {
        found = false;
        os_lock(&table_lock);
        for (size_t i = 0; i < n_blocks && !found; i++) {
            found = blocks[i].owner == owner;
            if (found) {
                block = blocks[i];
                table_remove(&blocks[i]);
            }
        }
        os_unlock(&table_lock);
        if (found && block.freed)
            release(&block);
        else if (found)
            block_end(&block);
    } while (found);
}

/* The blocks are the parent's. Another thread of it may have been changing the table at the time of
 * the fork. */
void parking_blocks_after_fork(void)
{
    table_lock.word = 0;
    blocks = NULL;
    n_blocks = capacity = 0;
    total = 0;
    n_freed = 0;
}
