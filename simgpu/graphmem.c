/*
 * The memory of graphs
 *
 * An allocation node gets its address when it is added, in a range that belongs to the graph. It
 * may reuse the addresses of an allocation that a free node ended, if that node was added earlier.
 * Memory is taken, in units of 32 MiB, when the graph is uploaded or first launched. When the
 * executable graph is destroyed, its memory is kept for the next graph until the device is trimmed.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define UNIT       (32ull << 20)
#define BLOCK_UNIT 512ull
#define ROOM       4 /* size of a graph's address range, as a multiple of the device's memory */

struct span {
    size_t start;
    size_t size;
    bool ended;       /* by a free node */
    bool outstanding; /* launched, and left to the application to free */
};

struct graph_memory {
    struct graph_memory *next;
    unsigned int references; /* of the graph, and of its executable graph */
    bool instantiated;
    int ordinal;
    uintptr_t base;
    size_t room;
    size_t extent; /* bytes from the base that nodes use */
    uint64_t held; /* bytes on the device, 0 before the first upload or launch */
    struct span *spans;
    size_t n_spans;
};

static struct graph_memory *memories;
static struct {
    uint64_t cached; /* taken, but used by no graph */
    uint64_t used, used_high;
    uint64_t reserved_high;
} devices[DEVICES];

static CUresult memory_new(int ordinal, struct graph_memory **memoryp)
{
    struct graph_memory *memory = calloc(1, sizeof(*memory));

    if (!memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memory->room = ROOM * (driver.devices[ordinal]->gpu->config.memory / UNIT + 1) * UNIT;
    memory->base = memory_range(0, memory->room, false);
    if (!memory->base) {
        free(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memory->ordinal = ordinal;
    memory->references = 1;
    memory->next = memories;
    memories = memory;
    *memoryp = memory;
    return CUDA_SUCCESS;
}

/* The first offset at which a new allocation overlaps none that is still in use. */
static size_t free_place(const struct graph_memory *memory, size_t size)
{
    size_t start = 0;

    for (size_t i = 0; i < memory->n_spans;) {
        const struct span *span = &memory->spans[i++];

        if (span->ended || span->start >= start + size || span->start + span->size <= start)
            continue;
        start = span->start + span->size;
        i = 0;
    }
    return start;
}

/*
 * The table of allocations has one entry for the whole graph, because its nodes' allocations may
 * overlap.
 */
static bool grow(struct graph_memory *memory, size_t extent)
{
    struct allocation *item = memory_at(memory->base);

    if (mprotect((void *)memory->base, (extent + UNIT - 1) / UNIT * UNIT, PROT_READ | PROT_WRITE))
        return false;
    if (item)
        item->bytes = item->size = extent;
    else if (!memory_add(&(struct allocation){.kind = ALLOCATION_GRAPH,
                                              .ordinal = memory->ordinal,
                                              .base = memory->base,
                                              .bytes = extent,
                                              .size = extent}))
        return false;
    memory->extent = extent;
    return true;
}

/** graphmem_allocate() - address of a new allocation node; the first one creates *memoryp */
CUresult graphmem_allocate(struct graph_memory **memoryp, int ordinal, size_t bytes,
                           uintptr_t *addressp)
{
    struct graph_memory *memory;
    struct span *spans;
    size_t size = (bytes + BLOCK_UNIT - 1) / BLOCK_UNIT * BLOCK_UNIT;
    size_t start;
    CUresult r = *memoryp ? CUDA_SUCCESS : memory_new(ordinal, memoryp);

    if (r)
        return r;
    memory = *memoryp;
    if (memory->ordinal != ordinal || memory->instantiated)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (bytes > memory->room)
        return CUDA_ERROR_OUT_OF_MEMORY;
    start = free_place(memory, size);
    if (start + size > memory->room ||
        (start + size > memory->extent && !grow(memory, start + size)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    spans = realloc(memory->spans, (memory->n_spans + 1) * sizeof(*spans));
    if (!spans)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memory->spans = spans;
    spans[memory->n_spans++] = (struct span){.start = start, .size = size};
    *addressp = memory->base + start;
    return CUDA_SUCCESS;
}

/** graphmem_end() - add a free node, which ends the allocation at this address */
CUresult graphmem_end(struct graph_memory *memory, uintptr_t address)
{
    for (size_t i = 0; memory && i < memory->n_spans; i++) {
        struct span *span = &memory->spans[i];

        if (memory->base + span->start != address || span->ended)
            continue;
        if (memory->instantiated)
            return CUDA_ERROR_NOT_SUPPORTED;
        span->ended = true;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/** graphmem_freed() - free memory that a launch left to the application; false for other memory */
bool graphmem_freed(uintptr_t address)
{
    for (struct graph_memory *memory = memories; memory; memory = memory->next) {
        for (size_t i = 0; i < memory->n_spans; i++) {
            struct span *span = &memory->spans[i];

            if (memory->base + span->start != address || !span->outstanding)
                continue;
            span->outstanding = false;
            return true;
        }
    }
    return false;
}

/** graphmem_instantiate() - add the executable graph; only one may use the memory at a time */
CUresult graphmem_instantiate(struct graph_memory *memory)
{
    if (memory->instantiated)
        return CUDA_ERROR_NOT_SUPPORTED;
    memory->instantiated = true;
    memory->references++;
    return CUDA_SUCCESS;
}

static uint64_t reserved(int ordinal)
{
    return devices[ordinal].cached + devices[ordinal].used;
}

/** graphmem_take() - charge the device memory that the graph needs, at its upload or launch */
CUresult graphmem_take(struct graph_memory *memory)
{
    uint64_t need = (memory->extent + UNIT - 1) / UNIT * UNIT;
    uint64_t cached = devices[memory->ordinal].cached;
    CUresult r;

    if (memory->held)
        return CUDA_SUCCESS;
    if (cached > need)
        cached = need;
    r = memory_charge(driver.devices[memory->ordinal], need - cached);
    if (r)
        return r;
    devices[memory->ordinal].cached -= cached;
    devices[memory->ordinal].used += need;
    memory->held = need;
    if (devices[memory->ordinal].used > devices[memory->ordinal].used_high)
        devices[memory->ordinal].used_high = devices[memory->ordinal].used;
    if (reserved(memory->ordinal) > devices[memory->ordinal].reserved_high)
        devices[memory->ordinal].reserved_high = reserved(memory->ordinal);
    return CUDA_SUCCESS;
}

/** graphmem_launch() - begin the nodes' allocations; `again`: end those of the last launch first */
CUresult graphmem_launch(struct graph_memory *memory, bool again)
{
    CUresult r;

    for (size_t i = 0; i < memory->n_spans; i++) {
        if (memory->spans[i].outstanding && !again)
            return CUDA_ERROR_INVALID_VALUE;
    }
    r = graphmem_take(memory);
    for (size_t i = 0; !r && i < memory->n_spans; i++)
        memory->spans[i].outstanding = !memory->spans[i].ended;
    return r;
}

static void give(struct graph_memory *memory)
{
    devices[memory->ordinal].used -= memory->held;
    devices[memory->ordinal].cached += memory->held;
    memory->held = 0;
}

/** graphmem_leave() - drop the reference of a graph or executable graph being destroyed */
void graphmem_leave(struct graph_memory *memory, bool instantiated)
{
    struct graph_memory **link = &memories;

    if (instantiated) {
        give(memory);
        memory->instantiated = false;
    }
    if (--memory->references)
        return;
    while (*link && *link != memory)
        link = &(*link)->next;
    if (*link) { /* otherwise it was forgotten, with the table and the address space */
        *link = memory->next;
        if (memory->extent)
            (void)memory_release(memory->base);
        munmap((void *)memory->base, memory->room);
    }
    free(memory->spans);
    free(memory);
}

/** graphmem_trim() - give back the device memory that is still cached from destroyed graphs */
void graphmem_trim(int ordinal)
{
    memory_refund(driver.devices[ordinal], devices[ordinal].cached);
    devices[ordinal].cached = 0;
}

/** graphmem_context_ended() - release graphs' memory when the process's last context ends */
void graphmem_context_ended(int ordinal)
{
    for (struct graph_memory *memory = memories; memory; memory = memory->next) {
        if (memory->ordinal == ordinal)
            give(memory);
    }
    graphmem_trim(ordinal);
}

CUresult graphmem_get(int ordinal, CUgraphMem_attribute attribute, uint64_t *value)
{
    switch (attribute) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
        *value = devices[ordinal].used;
        return CUDA_SUCCESS;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH:
        *value = devices[ordinal].used_high;
        return CUDA_SUCCESS;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT:
        *value = reserved(ordinal);
        return CUDA_SUCCESS;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH:
        *value = devices[ordinal].reserved_high;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/** graphmem_set() - reset a high-water mark to the current value; `value` must be 0 */
CUresult graphmem_set(int ordinal, CUgraphMem_attribute attribute, uint64_t value)
{
    if (value)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
        devices[ordinal].used_high = devices[ordinal].used;
    else if (attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
        devices[ordinal].reserved_high = reserved(ordinal);
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/** graphmem_forget() - forget all graphs' memory; `owner` is false in the child of a fork */
void graphmem_forget(bool owner)
{
    while (memories) {
        struct graph_memory *memory = memories;

        memories = memory->next;
        if (owner)
            munmap((void *)memory->base, memory->room);
        memory->held = memory->extent = memory->room = 0; /* graphs may still point here */
    }
    memset(devices, 0, sizeof(devices));
}
