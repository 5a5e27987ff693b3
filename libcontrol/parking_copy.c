/*
 * Copies the blocks of this process to host memory and back; see parking.h.
 *
 * The copies are made by the GPU's copy engines to and from pinned memory, at the speed of the bus.
 * A block's valid copy is given up only when the other copy is complete.
 *
 * The driver clears released memory on the copy engine that also copies to the GPU, so each block
 * that one process releases slows down another process that is arriving at that time. Copies in the
 * other direction slow it down as well. As long as others are taking memory, a departing process
 * therefore copies and releases only as much as they need: it copies blocks a little ahead, and
 * releases them when the GPU's free memory runs short. (On an H200, 40 GiB arrive at 46.3 GB/s
 * while 40 GiB depart, and at 42.8 GB/s if each block is released after its copy.) If no memory is
 * taken for a moment, it copies and releases everything.
 */
#include "parking.h"

#define COPY_ROOM_NS (5 * NS_PER_S) /* longest wait for room on the GPU within an attempt */
#define COPY_NAP_NS  (100 * NS_PER_US)

/* While others are taking memory, a departing process keeps this much of the GPU's memory free, and
 * the same amount ready to be released; it keeps more if they take larger pieces. */
#define KEEP_BYTES    (2ull << 30)
#define KEEP_STILL_NS (50 * NS_PER_MS) /* others that have taken none for this long need none */
#define KEEP_MOST_NS  (2 * NS_PER_S)   /* longest wait for others to take memory, in total */
#define KEEP_QUERY_NS (1 * NS_PER_MS)  /* between queries of the free memory */

static CUresult copy_block(const struct parking_block *block, bool out, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;

    for (uint64_t at = 0; result == CUDA_SUCCESS && at < block->size;) {
        uint64_t place = block->offset + at;
        uint64_t n = LAYOUT_ARENA_PIECE - place % LAYOUT_ARENA_PIECE;
        char *host = pages_now.arena + place;

        n = n < block->size - at ? n : block->size - at;
        result = out ? driver->cuMemcpyDtoHAsync(host, block->base + at, n, stream)
                     : driver->cuMemcpyHtoDAsync(block->base + at, host, n, stream);
        at += n;
    }
    return result;
}

/* Notes whether the charge for a block is now for memory that NVML attributes to no process
 * (`parked`), or for memory that is about to be on the GPU. The quota counts it in both cases. A
 * sample that is taken during this call or the move finds that memory is moving. */
static void charge_as(uint64_t size, bool parked)
{
    account_hide(0, size, parked);
}

static bool block_copy_out(const struct parking_block *block, CUstream stream)
{
    return copy_block(block, true, stream) == CUDA_SUCCESS &&
           driver->cuStreamSynchronize(stream) == CUDA_SUCCESS;
}

/* Maps memory for a block on the GPU, and begins to copy its contents there. Other containers may
 * be making room for it, so CUDA_ERROR_OUT_OF_MEMORY is retried until `ends`, or until a
 * `revocable` order is revoked. */
static CUresult block_in(struct parking_block *block, CUstream stream, uint64_t ends,
                         bool revocable)
{
    CUresult result;

    charge_as(block->size, false);
    while ((result = parking_map(block)) == CUDA_ERROR_OUT_OF_MEMORY && os_now() < ends &&
           !(revocable && parking_must_leave()))
        os_sleep(COPY_NAP_NS);
    if (result == CUDA_SUCCESS) {
        result = copy_block(block, false, stream);
        if (result == CUDA_SUCCESS)
            return result;
        driver->cuStreamSynchronize(stream); /* part of the contents may be under way */
        parking_unmap(block);
    }
    charge_as(block->size, true);
    return result;
}

/* Blocks that are being moved to the host. Those before `released` are no longer on the GPU; those
 * from there up to `copied` still are, but have been copied. */
struct departure {
    struct parking_block *blocks;
    size_t n, copied, released;
    uint64_t ahead;      /* bytes of the blocks that have been copied but not released */
    uint64_t keep;       /* bytes to keep free, and the same number to copy ahead */
    uint64_t free;       /* the GPU's free memory, as far as it is known */
    uint64_t queried_ns; /* when it was queried */
    uint64_t taken_ns;   /* when a query last found less than the one before */
    uint64_t waited_ns;
    const uint32_t *hurryp; /* 1: nothing delays the move */
};

/* Whether copied blocks stay on the GPU for now, because others are still taking free memory. */
static bool departure_keeps(const struct departure *d, uint64_t now)
{
    return now - d->taken_ns < KEEP_STILL_NS && parking_must_leave() &&
           !atomic_load_seq_cst(d->hurryp);
}

static void departure_release(struct departure *d)
{
    struct parking_block *block = &d->blocks[d->released++];

    if (block->fixed)
        return;
    parking_unmap(block);
    charge_as(block->size, true);
    d->ahead -= block->size;
    d->free += block->size;
}

/* Releases blocks that have been copied, to the extent that others need their memory. */
static void departure_make_room(struct departure *d)
{
    uint64_t now = os_now();
    size_t free = 0, total;

    if (now - d->queried_ns >= KEEP_QUERY_NS) {
        if (driver->cuMemGetInfo(&free, &total) != CUDA_SUCCESS)
            free = 0;
        if (free < d->free) {
            d->taken_ns = now;
            if (d->queried_ns && d->free - free > d->keep)
                d->keep = d->free - free;
        }
        d->queried_ns = now;
        d->free = free;
    }
    while (d->released < d->copied && (d->free < d->keep || !departure_keeps(d, now)))
        departure_release(d);
}

/* Waits while others are taking memory and enough of it is ready for them; with `all`, until they
 * have taken all of it. */
static void departure_wait(struct departure *d, bool all)
{
    while ((all || d->ahead >= d->keep) && d->released < d->copied && d->waited_ns < KEEP_MOST_NS) {
        os_sleep(KEEP_QUERY_NS);
        d->waited_ns += KEEP_QUERY_NS;
        departure_make_room(d);
    }
}

enum parking_moved parking_move_out(CUstream stream, const uint32_t *hurryp)
{
    struct departure d = {.keep = KEEP_BYTES, .taken_ns = os_now(), .hurryp = hurryp};
    enum parking_moved moved = PARKING_MOVED;

    d.blocks = parking_blocks(&d.n);
    while (d.copied < d.n && moved == PARKING_MOVED) {
        const struct parking_block *block = &d.blocks[d.copied];

        if (!block->fixed && !block_copy_out(block, stream)) {
            moved = PARKING_MOVED_BACK;
        } else {
            d.copied++;
            d.ahead += block->fixed ? 0 : block->size;
            departure_make_room(&d);
            departure_wait(&d, false);
        }
    }
    if (moved == PARKING_MOVED)
        departure_wait(&d, true);
    while (moved == PARKING_MOVED && d.released < d.n)
        departure_release(&d);
    for (size_t i = 0; moved != PARKING_MOVED && i < d.n; i++)
        if (!d.blocks[i].handle &&
            block_in(&d.blocks[i], stream, os_now() + COPY_ROOM_NS, false) != CUDA_SUCCESS)
            moved = PARKING_MOVED_PART;
    if (moved != PARKING_MOVED)
        driver->cuStreamSynchronize(stream);
    return moved;
}

enum parking_moved parking_move_in(CUstream stream)
{
    uint64_t ends = os_now() + COPY_ROOM_NS;
    struct parking_block *blocks;
    CUresult result = CUDA_SUCCESS, synchronized;
    size_t n, i;

    blocks = parking_blocks(&n);
    for (i = 0; i < n && result == CUDA_SUCCESS; i++) {
        if (blocks[i].handle)
            continue;
        result = block_in(&blocks[i], stream, ends, true);
        blocks[i].arriving = result == CUDA_SUCCESS;
    }
    synchronized = driver->cuStreamSynchronize(stream);
    if (result == CUDA_SUCCESS)
        result = synchronized;
    for (i = 0; i < n; i++) {
        if (blocks[i].arriving && result != CUDA_SUCCESS) {
            parking_unmap(&blocks[i]);
            charge_as(blocks[i].size, true);
        }
        blocks[i].arriving = false;
    }
    return result == CUDA_SUCCESS               ? PARKING_MOVED
           : result == CUDA_ERROR_OUT_OF_MEMORY ? PARKING_MOVED_BACK
                                                : PARKING_MOVE_FAILED;
}
