/*
 * Memory: the allocations of a process, and the device memory that they take
 *
 * A device address is an address of private, lazily backed memory of this process, so copies are
 * real and untouched memory costs nothing. What is charged is what the driver takes: blocks
 * below 1 MiB are cut, in units of 512 bytes, from slabs of 2 MiB that belong to one context;
 * larger ones are multiples of 2 MiB.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALL      (1u << 20)
#define LARGE_UNIT (2ull << 20)
#define SMALL_UNIT 512ull
#define PAGE       4096ull

struct slab {
    struct slab *next;
    struct context *context;
    uintptr_t base;
    unsigned int n; /* blocks */
};

/* Sorted by address. */
static struct {
    struct allocation *items;
    size_t n;
    size_t room;
} table;

static struct slab *slabs;

/* Index of the first allocation that begins after `address`. */
static size_t table_upper(uintptr_t address)
{
    size_t low = 0;
    size_t high = table.n;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (table.items[middle].base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/** memory_at() - the allocation that contains an address, or NULL; valid until the table changes */
struct allocation *memory_at(uintptr_t address)
{
    size_t upper = table_upper(address);
    struct allocation *item;

    if (upper == 0)
        return NULL;
    item = &table.items[upper - 1];
    return address - item->base < item->size ? item : NULL;
}

/** memory_after() - the first allocation that begins at or after `address`, or NULL */
struct allocation *memory_after(uintptr_t address)
{
    size_t lower = table_upper(address - 1);

    return lower < table.n ? &table.items[lower] : NULL;
}

/**
 * memory_find() - the allocation that contains the first of these bytes, or NULL
 *
 * All of the bytes must be allocated. Adjacent mappings count as one allocation if they are
 * accessible.
 */
const struct allocation *memory_find(const void *address, size_t bytes)
{
    uintptr_t start = (uintptr_t)address;
    const struct allocation *first = memory_at(start);

    for (const struct allocation *item = first; item; item = memory_at(start)) {
        size_t left = item->size - (start - item->base);

        if (item->kind == ALLOCATION_MAPPED && !item->access)
            return NULL;
        if (bytes <= left)
            return first;
        if (item->kind != ALLOCATION_MAPPED)
            return NULL;
        bytes -= left;
        start += left;
    }
    return NULL;
}

/** memory_freeable() - the allocation that cuMemFree would free at this address, or NULL */
struct allocation *memory_freeable(uintptr_t address)
{
    struct allocation *item = memory_at(address);

    if (!item || item->base != address || item->freed_in)
        return NULL;
    switch (item->kind) {
    case ALLOCATION_DEVICE:
    case ALLOCATION_MANAGED:
    case ALLOCATION_POOL:
        return item;
    default:
        return NULL;
    }
}

/** memory_renumber() - give an allocation a new number, so that it counts as a new allocation */
void memory_renumber(struct allocation *item)
{
    static uint64_t numbers;

    item->number = ++numbers;
}

/** memory_add() - add a copy of `item`, which must not overlap another allocation, and number it */
bool memory_add(const struct allocation *item)
{
    size_t place = table_upper(item->base);

    if (table.n == table.room) {
        size_t room = table.room ? 2 * table.room : 64;
        struct allocation *items = realloc(table.items, room * sizeof(*items));

        if (!items)
            return false;
        table.items = items;
        table.room = room;
    }
    memmove(&table.items[place + 1], &table.items[place],
            (table.n - place) * sizeof(table.items[0]));
    table.items[place] = *item;
    memory_renumber(&table.items[place]);
    table.n++;
    return true;
}

/** memory_charge() - charge device memory to this process */
CUresult memory_charge(struct device *device, size_t bytes)
{
    _Atomic uint64_t *memory = &device->gpu->shared.slots[device->slot].memory;
    uint64_t total = device->gpu->config.memory;
    CUresult r = CUDA_SUCCESS;

    if (bytes == 0)
        return CUDA_SUCCESS;
    if (!device_enter(device))
        return CUDA_ERROR_DEINITIALIZED;
    if (bytes > total || device_used(device) > total - bytes)
        device_reap(device);
    if (bytes > total || device_used(device) > total - bytes)
        r = CUDA_ERROR_OUT_OF_MEMORY;
    else
        atomic_store(memory, *memory + bytes);
    device_leave(device);
    return r;
}

/** memory_refund() - undo memory_charge(); `device` may be NULL if `bytes` is 0 */
void memory_refund(struct device *device, size_t bytes)
{
    _Atomic uint64_t *memory;

    if (bytes == 0 || !device_enter(device))
        return;
    memory = &device->gpu->shared.slots[device->slot].memory;
    atomic_store(memory, *memory - bytes);
    device_leave(device);
}

/** memory_range() - reserve addresses without memory; `replace` replaces a mapping at `base` */
uintptr_t memory_range(uintptr_t base, size_t size, bool replace)
{
    void *range =
        mmap((void *)base, size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (replace ? MAP_FIXED : 0), -1, 0);

    return range == MAP_FAILED ? 0 : (uintptr_t)range;
}

static void *map(size_t size)
{
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return base == MAP_FAILED ? NULL : base;
}

/* Make an allocation with pages of its own. */
static CUresult allocate(struct allocation *item)
{
    void *base;
    CUresult r = memory_charge(item->context->device, item->charged);

    if (r)
        return r;
    item->size = (item->bytes + PAGE - 1) / PAGE * PAGE;
    base = map(item->size);
    item->base = (uintptr_t)base;
    if (base && memory_add(item))
        return CUDA_SUCCESS;
    if (base)
        munmap(base, item->size);
    memory_refund(item->context->device, item->charged);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static void slab_end(struct slab *slab)
{
    struct slab **link = &slabs;

    while (*link != slab)
        link = &(*link)->next;
    *link = slab->next;
    munmap((void *)slab->base, LARGE_UNIT);
    memory_refund(slab->context->device, LARGE_UNIT);
    free(slab);
}

static CUresult slab_new(struct context *context, struct slab **slabp)
{
    struct slab *slab = calloc(1, sizeof(*slab));
    CUresult r;

    if (!slab)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r = memory_charge(context->device, LARGE_UNIT);
    if (r) {
        free(slab);
        return r;
    }
    slab->base = (uintptr_t)map(LARGE_UNIT);
    if (!slab->base) {
        memory_refund(context->device, LARGE_UNIT);
        free(slab);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    slab->context = context;
    slab->next = slabs;
    slabs = slab;
    *slabp = slab;
    return CUDA_SUCCESS;
}

/* The first address in the slab with `size` free bytes, or 0. */
static uintptr_t slab_room(const struct slab *slab, size_t size)
{
    uintptr_t end = slab->base + LARGE_UNIT;
    uintptr_t start = slab->base;

    for (size_t i = table_upper(start - 1); i < table.n && table.items[i].base < end; i++) {
        if (table.items[i].base - start >= size)
            return start;
        start = table.items[i].base + table.items[i].size;
    }
    return end - start >= size ? start : 0;
}

static CUresult allocate_small(struct allocation *item)
{
    struct slab *slab;
    CUresult r;

    item->size = (item->bytes + SMALL_UNIT - 1) / SMALL_UNIT * SMALL_UNIT;
    for (slab = slabs; slab; slab = slab->next) {
        item->base = slab->context == item->context ? slab_room(slab, item->size) : 0;
        if (item->base)
            break;
    }
    if (!slab) {
        r = slab_new(item->context, &slab);
        if (r)
            return r;
        item->base = slab->base;
    }
    item->slab = slab;
    slab->n++;
    if (memory_add(item))
        return CUDA_SUCCESS;
    if (--slab->n == 0)
        slab_end(slab);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/** memory_allocate() - allocate memory in a context, of a kind that needs no pool or mapping */
CUresult memory_allocate(struct context *context, enum allocation_kind kind, size_t bytes,
                         uintptr_t *addressp)
{
    bool takes = kind == ALLOCATION_DEVICE || kind == ALLOCATION_HIDDEN;
    struct allocation item = {
        .kind = kind, .bytes = bytes, .context = context, .ordinal = context->ordinal};
    CUresult r;

    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > SIZE_MAX / 4)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (takes && bytes < SMALL) {
        r = allocate_small(&item);
    } else {
        item.charged = takes ? (bytes + LARGE_UNIT - 1) / LARGE_UNIT * LARGE_UNIT : 0;
        r = allocate(&item);
    }
    if (!r)
        *addressp = item.base;
    return r;
}

/* Does nothing, because the memory belongs to the application. */
static void unregistered(const struct allocation *item)
{
    (void)item;
}

/** memory_register() - record host memory that the application wants pinned */
CUresult memory_register(struct context *context, uintptr_t base, size_t bytes)
{
    struct allocation item = {.kind = ALLOCATION_HOST,
                              .bytes = bytes,
                              .size = bytes,
                              .base = base,
                              .context = context,
                              .ordinal = context->ordinal,
                              .returned = unregistered};
    const struct allocation *after = memory_after(base);

    if (bytes == 0 || base + bytes < base)
        return CUDA_ERROR_INVALID_VALUE;
    if (memory_at(base) || (after && after->base < base + bytes))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    return memory_add(&item) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void table_remove(size_t place)
{
    struct allocation item = table.items[place];

    table.n--;
    memmove(&table.items[place], &table.items[place + 1],
            (table.n - place) * sizeof(table.items[0]));
    if (item.returned) {
        item.returned(&item);
        return;
    }
    if (item.kind == ALLOCATION_GRAPH) /* the graph owns addresses beyond these */
        return;
    if (item.slab) {
        if (--item.slab->n == 0)
            slab_end(item.slab);
        return;
    }
    munmap((void *)item.base, item.size);
    memory_refund(item.context->device, item.charged);
}

/** memory_release() - end the allocation that begins at this address */
CUresult memory_release(uintptr_t address)
{
    size_t upper = table_upper(address);

    if (upper == 0 || table.items[upper - 1].base != address)
        return CUDA_ERROR_INVALID_VALUE;
    table_remove(upper - 1);
    return CUDA_SUCCESS;
}

/** memory_unregister() - undo memory_register() */
CUresult memory_unregister(uintptr_t base)
{
    const struct allocation *item = memory_at(base);

    if (!item || item->base != base || item->returned != unregistered)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    return memory_release(base);
}

/** memory_release_context() - end all allocations of one context */
void memory_release_context(const struct context *context)
{
    for (size_t i = table.n; i-- > 0;) {
        if (table.items[i].context == context)
            table_remove(i);
    }
}

/**
 * memory_forget() - forget all allocations
 *
 * After fork the child's copy of the memory stays mapped, because the application may still have
 * pointers to it.
 */
void memory_forget(void)
{
    while (slabs) {
        struct slab *slab = slabs;

        slabs = slab->next;
        free(slab);
    }
    table.n = 0;
}
