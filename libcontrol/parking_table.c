/* The table of the blocks that can be moved, or that the library mapped for another reason; see
 * parking.h. */
#include "parking.h"

#include <string.h>

static struct os_lock table_lock;
static struct parking_block *blocks; /* ordered by address */
static size_t n_blocks, capacity;
static uint64_t total;
static uint64_t n_made;
static uint32_t n_freed; /* blocks whose `freed` is true */

/* Called with the lock held. Returns the index of the first block that begins after `address`. */
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

/* Called with the lock held. */
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

bool parking_table_add(const struct parking_block *block)
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
        if (!block->fixed)
            total += block->size;
        parking_note_bytes(total);
    }
    os_unlock(&table_lock);
    return has_room;
}

/* Called with the lock held. */
static void take(struct parking_block *block)
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

/* Called with the lock held, by a call that has entered, so the block is resident. */
static void fix(struct parking_block *block)
{
    if (block->fixed || block->freed)
        return;
    block->fixed = true;
    total -= block->size;
    parking_note_bytes(total);
}

void parking_fix(uint64_t base)
{
    struct parking_block *block;

    os_lock(&table_lock);
    block = block_at(base);
    if (block)
        fix(block);
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

/* ---- the end of a block ---- */

bool parking_table_take(struct parking_block *taken)
{
    struct parking_block *block;
    bool found;

    os_lock(&table_lock);
    block = block_at(taken->base);
    found = block && block->serial == taken->serial;
    if (found) {
        *taken = *block;
        take(block);
    }
    os_unlock(&table_lock);
    return found;
}

bool parking_table_take_owned(uint8_t owner, struct parking_block *taken)
{
    bool found = false;

    os_lock(&table_lock);
    for (size_t i = 0; i < n_blocks && !found; i++) {
        found = blocks[i].owner == owner;
        if (found) {
            *taken = blocks[i];
            take(&blocks[i]);
        }
    }
    os_unlock(&table_lock);
    return found;
}

/* Called with the lock held. */
static void mark_freed(struct parking_block *block)
{
    if (!block->fixed)
        total -= block->size;
    parking_note_bytes(total);
    block->freed = true;
    atomic_add_seq_cst(&n_freed, 1);
}

bool parking_table_free(uint64_t base)
{
    struct parking_block *block;
    bool found;

    os_lock(&table_lock);
    block = block_at(base);
    found = block && block->base == base && !block->freed;
    if (found) {
        account_add(0, block->size, false);
        mark_freed(block);
    }
    os_unlock(&table_lock);
    return found;
}

bool parking_table_has_freed(void)
{
    return unlikely(atomic_load_seq_cst(&n_freed));
}

bool parking_table_next_freed(struct parking_block *block)
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

/* ---- blocks that several processes use ---- */

bool parking_export(uint64_t address, struct parking_block *found)
{
    struct parking_block *block;
    bool ours;

    os_lock(&table_lock);
    block = block_at(address);
    ours = block && !block->freed && !parking_is_import(block);
    if (ours) {
        fix(block);
        block->exported = true;
        *found = *block;
    }
    os_unlock(&table_lock);
    return ours;
}

/* Holds the lock during the export, because the block must not end meanwhile. */
int parking_descriptor(uint64_t serial)
{
    int fd = -1;
    long failed;

    os_lock(&table_lock);
    for (size_t i = 0; i < n_blocks; i++) {
        const struct parking_block *block = &blocks[i];

        if (block->serial != serial || !block->exported || block->freed)
            continue;
        if (real->cuMemExportToShareableHandle(
                &fd, block->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS)
            fd = -1;
        failed = fd < 0 ? 0 : exports_follow(block->handle, fd, false);
        if (failed && failed != -EPERM) {
            os_close(fd);
            fd = -1;
        }
        break;
    }
    os_unlock(&table_lock);
    return fd;
}

bool parking_use(const struct parking_origin *origin, uint64_t *basep)
{
    bool found = false;

    os_lock(&table_lock);
    for (size_t i = 0; i < n_blocks && !found; i++) {
        struct parking_block *block = &blocks[i];

        found = block->origin.process == origin->process &&
                block->origin.serial == origin->serial && !block->freed;
        if (!found)
            continue;
        block->n_opened++;
        *basep = block->base;
    }
    os_unlock(&table_lock);
    return found;
}

bool parking_unuse(uint64_t base, bool later, struct parking_block *found)
{
    struct parking_block *block;
    bool used;

    os_lock(&table_lock);
    block = block_at(base);
    used = block && block->base == base && parking_is_import(block) && !block->freed;
    if (used) {
        if (!--block->n_opened) {
            block->charged = later;
            if (later)
                account_add(0, block->size, true);
            mark_freed(block);
        }
        *found = *block;
    }
    os_unlock(&table_lock);
    return used;
}

/* The blocks are the parent's. Another of its threads may have been changing the table at the time
 * of the fork. */
void parking_table_after_fork(void)
{
    table_lock.word = 0;
    blocks = NULL;
    n_blocks = capacity = 0;
    total = 0;
    n_freed = 0;
}
