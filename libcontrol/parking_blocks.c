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

#include <string.h>

static struct os_lock table_lock;
static struct parking_block *blocks; /* ordered by address */
static size_t n_blocks, capacity;
static uint64_t total;

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
    if (!block->fixed)
        total -= block->size;
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
    return block;
}

bool parking_first(struct parking_block *found)
{
    bool any = false;

    os_lock(&table_lock);
    for (size_t i = 0; i < n_blocks && !any; i++) {
        any = !blocks[i].fixed;
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
    if (block && !block->fixed) {
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
    if (parking_map(block) == CUDA_SUCCESS) {
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

static bool block_take(uint64_t address, struct parking_block *taken)
{
    struct parking_block *block;
    bool found;

    os_lock(&table_lock);
    block = block_at(address);
    found = block && block->base == address;
    if (found) {
        *taken = *block;
        table_remove(block);
    }
    os_unlock(&table_lock);
    return found;
}

/* Like the driver's cuMemFree, this waits for the work that may use the block. */
static CUresult await_work(CUcontext ctx)
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

/* Returns false if the block is not in the table, so that the driver has to free it. */
bool parking_free(CUdeviceptr address, CUresult *resultp)
{
    struct parking_block block;
    bool found;

    if (!parking_applies() || !address || !parking_find(address, &block) || block.base != address)
        return false;
    parking_enter(PARKING_STILL);
    /* No work uses a parked block. */
    *resultp = parking_now() == PARKING_PARKED ? CUDA_SUCCESS : await_work(block.ctx);
    found = *resultp != CUDA_SUCCESS || block_take(address, &block);
    if (found && *resultp == CUDA_SUCCESS)
        block_end(&block);
    parking_leave();
    return found;
}

/* The block is freed at once, after the stream's work. */
bool parking_free_async(CUdeviceptr address, CUstream stream, CUresult *resultp)
{
    struct parking_block block;

    if (!parking_applies() || !parking_find(address, &block) || block.base != address)
        return false;
    *resultp = driver->cuStreamSynchronize(stream);
    return *resultp != CUDA_SUCCESS || parking_free(address, resultp);
}

/* A context has ended, and with it the blocks that were allocated in it. The caller has entered. */
void parking_context_gone(uint8_t owner)
{
    struct parking_block block;
    bool found;

    if (!parking_applies())
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
        if (found)
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
}
