/*
 * Memory: what a process allocated, and what it takes of the device
 *
 * A device address is an address of private, lazily backed memory of this process, so copies are
 * real and memory that nobody touches costs nothing. What is charged to the device is rounded as
 * the driver does: up to 512 bytes below 1 MiB, up to 2 MiB from there on.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALL      (1u << 20)
#define LARGE_UNIT (2ull << 20)
#define SMALL_UNIT 512ull
#define PAGE       4096ull

/* Sorted by address. */
static struct {
    struct allocation *items;
    size_t n;
    size_t room;
} table;

/* The first allocation behind `address`. */
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

/** memory_find() - the allocation that holds all of these bytes, or NULL */
const struct allocation *memory_find(const void *address, size_t bytes)
{
    uintptr_t start = (uintptr_t)address;
    size_t upper = table_upper(start);
    const struct allocation *item;

    if (upper == 0)
        return NULL;
    item = &table.items[upper - 1];
    if (start - item->base > item->size || item->size - (start - item->base) < bytes)
        return NULL;
    return item;
}

static bool table_add(const struct allocation *item)
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
    table.n++;
    return true;
}

static CUresult charge(struct context *context, size_t bytes)
{
    struct device *device = context->device;
    _Atomic uint64_t *memory = &device->gpu->shared.slots[device->slot].memory;
    uint64_t total = device->gpu->config.memory;
    CUresult r = CUDA_SUCCESS;

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

static void refund(struct context *context, size_t bytes)
{
    struct device *device = context->device;
    _Atomic uint64_t *memory = &device->gpu->shared.slots[device->slot].memory;

    if (bytes == 0 || !device_enter(device))
        return;
    atomic_store(memory, *memory - bytes);
    device_leave(device);
}

static CUresult allocate(struct context *context, size_t bytes, size_t charged, uintptr_t *addressp)
{
    struct allocation item = {.charged = charged, .context = context};
    void *base;
    CUresult r;

    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > SIZE_MAX / 4)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r = charged ? charge(context, charged) : CUDA_SUCCESS;
    if (r)
        return r;
    item.size = (bytes + PAGE - 1) / PAGE * PAGE;
    base = mmap(NULL, item.size, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        refund(context, charged);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    item.base = (uintptr_t)base;
    if (!table_add(&item)) {
        munmap(base, item.size);
        refund(context, charged);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *addressp = item.base;
    return CUDA_SUCCESS;
}

/** memory_allocate() - device memory of a context's process */
CUresult memory_allocate(struct context *context, size_t bytes, CUdeviceptr *addressp)
{
    uint64_t unit = bytes < SMALL ? SMALL_UNIT : LARGE_UNIT;
    uintptr_t address;
    CUresult r;

    if (bytes > SIZE_MAX / 4)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r = allocate(context, bytes, (bytes + unit - 1) / unit * unit, &address);
    if (!r)
        *addressp = address;
    return r;
}

/** memory_allocate_host() - pinned memory: copies from it and to it are asynchronous */
CUresult memory_allocate_host(struct context *context, size_t bytes, void **addressp)
{
    uintptr_t address;
    CUresult r = allocate(context, bytes, 0, &address);

    if (!r)
        *addressp = (void *)address;
    return r;
}

static void table_remove(size_t place)
{
    struct allocation item = table.items[place];

    table.n--;
    memmove(&table.items[place], &table.items[place + 1],
            (table.n - place) * sizeof(table.items[0]));
    munmap((void *)item.base, item.size);
    refund(item.context, item.charged);
}

/** memory_release() - end the allocation that begins at this address */
CUresult memory_release(const void *address)
{
    size_t upper = table_upper((uintptr_t)address);

    if (upper == 0 || table.items[upper - 1].base != (uintptr_t)address)
        return CUDA_ERROR_INVALID_VALUE;
    table_remove(upper - 1);
    return CUDA_SUCCESS;
}

/** memory_release_context() - end all allocations of one context */
void memory_release_context(const struct context *context)
{
    for (size_t i = table.n; i-- > 0;) {
        if (table.items[i].context == context)
            table_remove(i);
    }
}

/** memory_forget() - after fork: the copies stay mapped, for whoever still points there */
void memory_forget(void)
{
    table.n = 0;
}
