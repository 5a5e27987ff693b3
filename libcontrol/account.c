/*
 * Device memory: what the container's processes hold, against the quota.
 *
 * Each process keeps its own sum in its slot of the ledger; the container's use is the sum over the
 * slots. A reservation is made by adding to the own slot first and summing afterwards, so two
 * processes that race see each other and the quota is never passed; the one that cannot have it
 * takes its reservation back. There is no lock to die with: when a process is killed, the governor
 * clears its slot.
 *
 * The sizes of live blocks are kept in this process, in an open-addressing table by address: charge
 * and refund cost the same with ten blocks as with a hundred thousand.
 */
#include "control.h"

#include <string.h>
#include <sys/mman.h>

struct account_block {
    CUdeviceptr pointer; /* 0 free, 1 deleted */
    uint64_t size;
    int32_t device;
};

#define BLOCK_FREE    0
#define BLOCK_DELETED 1

static struct account_block *blocks;
static size_t n_capacity; /* a power of two */
static size_t n_live;
static size_t n_taken; /* live and deleted */
static struct prim_lock blocks_lock;

static size_t blocks_hash(CUdeviceptr pointer, size_t capacity)
{
    return (size_t)((pointer >> 9) * 0x9e3779b97f4a7c15ull >> 20) & (capacity - 1);
}

static void blocks_put(struct account_block *table, size_t capacity, struct account_block block)
{
    size_t at = blocks_hash(block.pointer, capacity);

    while (table[at].pointer > BLOCK_DELETED)
        at = (at + 1) & (capacity - 1);
    table[at] = block;
}

/* malloc is the application's; a mapping of our own cannot meet its hooks or its locks. */
static cold bool blocks_grow(void)
{
    struct account_block *table;
    size_t capacity = 4096;

    while (capacity < n_live * 4)
        capacity *= 2;
    table = mmap(NULL, capacity * sizeof *table, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (table == MAP_FAILED)
        return false;
    for (size_t i = 0; i < n_capacity; i++)
        if (blocks[i].pointer > BLOCK_DELETED)
            blocks_put(table, capacity, blocks[i]);
    if (blocks)
        munmap(blocks, n_capacity * sizeof *blocks);
    blocks = table;
    n_capacity = capacity;
    n_taken = n_live;
    return true;
}

uint64_t account_used(int device)
{
    struct ledger_header *ledger = pages_ledger();
    uint32_t n_slots = atomic_load_relaxed(&ledger->n_slots);
    uint64_t sum = 0;

    if (n_slots > LAYOUT_N_SLOTS)
        n_slots = LAYOUT_N_SLOTS;
    for (uint32_t i = 0; i < n_slots; i++) {
        struct ledger_device *entry =
            (struct ledger_device *)((char *)ledger + LEDGER_SLOTS +
                                     i * sizeof(struct ledger_slot) + LEDGER_SLOT_DEVICES) +
            device;

        if (__builtin_add_overflow(sum, atomic_load_seq_cst(&entry->memory), &sum))
            return UINT64_MAX;
    }
    return sum;
}

uint64_t account_product(uint64_t a, uint64_t b)
{
    uint64_t product;

    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

/* The driver chooses the pitch; rows are aligned to 512 bytes on every GPU since Kepler. */
uint64_t account_pitch(uint64_t width, uint64_t height)
{
    uint64_t row;

    if (__builtin_add_overflow(width, 511, &row))
        return UINT64_MAX;
    return account_product(row & ~511ull, height);
}

static void account_note_peak(int device, uint64_t sum)
{
    uint64_t *peak = &pages_ledger()->memory_peak[device];
    uint64_t seen = atomic_load_relaxed(peak);

    while (sum > seen &&
           !__atomic_compare_exchange_n(peak, &seen, sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

CUresult account_reserve_on(struct account_charge *charge, int device, uint64_t size)
{
    const struct grant_device *grant;
    struct ledger_device *entry;
    uint64_t limit, overhead, sum;

    charge->device = device;
    charge->size = 0;
    if (device < 0)
        return CUDA_SUCCESS;
    grant = pages_grant_device((unsigned)device);
    entry = pages_ledger_device((unsigned)device);
    limit = atomic_load_relaxed(&grant->memory_limit);
    overhead = atomic_load_relaxed(&grant->memory_overhead);
    /* Two processes that reserve at once may each see the other and both step back although one of
     * them fits: the loser looks again a few times before it refuses. */
    for (int attempt = 0;; attempt++) {
        if (size <= limit) {
            atomic_add_seq_cst(&entry->memory, size);
            sum = account_used(device);
            if (!__builtin_add_overflow(sum, overhead, &sum) && sum <= limit) {
                charge->size = size;
                account_note_peak(device, sum);
                return CUDA_SUCCESS;
            }
            atomic_sub_seq_cst(&entry->memory, size);
            sum = account_used(device);
        } else {
            sum = UINT64_MAX;
        }
        if (attempt == 3 || __builtin_add_overflow(sum, overhead, &sum) ||
            __builtin_add_overflow(sum, size, &sum) || sum > limit)
            break;
        prim_sleep(20 * NS_PER_US * (uint64_t)(1 + (getpid() + attempt) % 4));
    }
    atomic_add_relaxed(&entry->refused, 1);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult account_reserve(struct account_charge *charge, uint64_t size)
{
    return account_reserve_on(charge, pages_index_current(), size);
}

/* Never below zero: the sum belongs to a page that others can reset. */
static void account_return(int device, uint64_t size)
{
    uint64_t *memory = &pages_ledger_device((unsigned)device)->memory;
    uint64_t seen = atomic_load_relaxed(memory);

    while (!__atomic_compare_exchange_n(memory, &seen, seen > size ? seen - size : 0, true,
                                        __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        ;
}

void account_cancel(struct account_charge *charge)
{
    if (charge->device >= 0 && charge->size)
        account_return(charge->device, charge->size);
    charge->size = 0;
}

/* The driver took `size` where another size was reserved: the difference is charged or returned. */
uint64_t account_settle(struct account_charge *charge, uint64_t size)
{
    struct ledger_device *entry;

    if (charge->device < 0)
        return 0;
    entry = pages_ledger_device((unsigned)charge->device);
    if (size > charge->size)
        atomic_add_seq_cst(&entry->memory, size - charge->size);
    else
        account_return(charge->device, charge->size - size);
    return size;
}

void account_record(const struct account_charge *charge, CUdeviceptr pointer)
{
    struct account_block block = {pointer, charge->size, charge->device};

    if (charge->device < 0 || pointer <= BLOCK_DELETED)
        return;
    prim_lock(&blocks_lock);
    if (unlikely((n_taken + 1) * 2 > n_capacity) && !blocks_grow() && n_taken + 1 >= n_capacity) {
        /* No memory for the table: the block stays charged for the life of the process. */
        prim_unlock(&blocks_lock);
        return;
    }
    blocks_put(blocks, n_capacity, block);
    n_live++;
    n_taken++;
    prim_unlock(&blocks_lock);
    atomic_add_relaxed(&pages_ledger_device((unsigned)charge->device)->blocks, 1);
}

/* Takes the block out of the table; a pointer that is not ours is left to the driver to judge. */
void account_forget(struct account_charge *charge, CUdeviceptr pointer)
{
    charge->device = -1;
    charge->size = 0;
    if (pointer <= BLOCK_DELETED || !n_capacity)
        return;
    prim_lock(&blocks_lock);
    for (size_t at = blocks_hash(pointer, n_capacity); blocks[at].pointer != BLOCK_FREE;
         at = (at + 1) & (n_capacity - 1)) {
        if (blocks[at].pointer != pointer)
            continue;
        charge->device = blocks[at].device;
        charge->size = blocks[at].size;
        blocks[at].pointer = BLOCK_DELETED;
        n_live--;
        break;
    }
    prim_unlock(&blocks_lock);
    if (charge->device >= 0)
        atomic_add_relaxed(&pages_ledger_device((unsigned)charge->device)->blocks, -1ull);
}

/* A process's first context on a GPU takes memory that no allocation shows. */
void account_context(CUdevice dev)
{
    static uint32_t charged[LAYOUT_N_DEVICES];
    int device = pages_index_of(dev);

    if (device < 0 || atomic_exchange_acq_rel(&charged[device], 1))
        return;
    atomic_add_seq_cst(&pages_ledger_device((unsigned)device)->memory,
                       atomic_load_relaxed(&pages_grant_device((unsigned)device)->context_bytes));
    account_note_peak(device, account_used(device));
}
