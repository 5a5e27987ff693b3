/*
 * Charges the memory of graphs with nodes that allocate, whether the nodes were added or captured.
 *
 * The driver backs the addresses of such nodes from one pool per GPU, at the first launch or the
 * upload of an executable graph, and keeps the memory until cuDeviceGraphMemTrim. What that pool
 * holds is charged (CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT; a query takes 7 ns on an H200). What an
 * executable graph may need is known when it is instantiated. The driver gives the same address to
 * nodes that can share memory, so the need is the union of their ranges. A graph with such nodes
 * can be instantiated only once, and cannot be cloned.
 */
#include "parking.h"

#include <string.h>
#include <sys/mman.h>

#define GRAPHS_UNIT  (32ull << 20)
#define GRAPHS_DEPTH 8 /* deepest nesting of graphs that is followed */

uint32_t graphs_in_use; /* whether a graph of this process owns memory */
static struct held held[LAYOUT_N_DEVICES];

void graphs_note_memory(void)
{
    if (!atomic_load_relaxed(&graphs_in_use))
        atomic_store_release(&graphs_in_use, 1);
}

void graphs_after_fork(void)
{
    memset(held, 0, sizeof held);
    graphs_in_use = 0;
}

static bool query_reserved(const void *pool, uint64_t *bytes)
{
    int device = (int)((const struct held *)pool - held);

    return driver->cuDeviceGetGraphMemAttribute(pages_device((unsigned)device),
                                                CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
                                                bytes) == CUDA_SUCCESS;
}

static void settle(int device, uint64_t claimed)
{
    CUstreamCaptureMode mode;

    account_relax(&mode);
    held_settle(&held[device], device, false, claimed, query_reserved, &held[device]);
    account_unrelax(&mode);
}

void graphs_refresh(int device)
{
    if (unlikely(atomic_load_relaxed(&graphs_in_use)))
        settle(device, 0);
}

/* Gives back memory that no graph is using. Returns whether there was any. */
bool graphs_squeeze(int device)
{
    uint64_t before = held_bytes(&held[device]);

    if (!before)
        return false;
    driver->cuDeviceGraphMemTrim(pages_device((unsigned)device));
    settle(device, 0);
    return held_bytes(&held[device]) < before;
}

/* ---- memory that an executable graph may need ---- */

struct range {
    CUdeviceptr start, end;
};

struct ranges {
    struct range *items;
    size_t n;
    size_t room;
    int device;
    bool unknown; /* the driver does not list the nodes */
};

static bool ranges_add(struct ranges *ranges, struct range range)
{
    if (ranges->n == ranges->room) {
        size_t room = ranges->room ? 2 * ranges->room : 256;
        struct range *items = os_map_memory(room * sizeof *items);

        if (!items)
            return false;
        if (ranges->items) {
            memcpy(items, ranges->items, ranges->n * sizeof *items);
            os_unmap(ranges->items, ranges->room * sizeof *items);
        }
        ranges->items = items;
        ranges->room = room;
    }
    ranges->items[ranges->n++] = range;
    return true;
}

/* Sorts by start, in place. This is a shell sort, because qsort may allocate. */
static void ranges_sort(struct ranges *ranges)
{
    for (size_t gap = ranges->n / 2; gap; gap /= 2)
        for (size_t i = gap; i < ranges->n; i++) {
            struct range moving = ranges->items[i];
            size_t at = i;

            for (; at >= gap && ranges->items[at - gap].start > moving.start; at -= gap)
                ranges->items[at] = ranges->items[at - gap];
            ranges->items[at] = moving;
        }
}

static uint64_t ranges_union(struct ranges *ranges)
{
    CUdeviceptr reached = 0;
    uint64_t sum = 0;

    ranges_sort(ranges);
    for (size_t i = 0; i < ranges->n; i++) {
        struct range range = ranges->items[i];

        if (range.start < reached)
            range.start = reached;
        if (range.end <= range.start)
            continue;
        sum += range.end - range.start;
        reached = range.end;
    }
    return sum;
}

/* Adds the ranges that the graph's nodes allocate on one GPU, the GPU of the first node that
 * allocates on a governed GPU. */
static void ranges_collect(struct ranges *ranges, CUgraph graph, unsigned depth)
{
    CUgraphNode *nodes;
    size_t n = 0, room;

    if (driver->cuGraphGetNodes(graph, NULL, &n) != CUDA_SUCCESS)
        ranges->unknown = true;
    if (!n)
        return;
    room = n * sizeof *nodes;
    nodes = os_map_memory(room);
    if (!nodes) {
        ranges->unknown = true;
        return;
    }
    if (driver->cuGraphGetNodes(graph, nodes, &n) != CUDA_SUCCESS) {
        ranges->unknown = true;
        n = 0;
    }
    for (size_t i = 0; i < n; i++) {
        CUDA_MEM_ALLOC_NODE_PARAMS params;
        CUgraph child;
        int type, device;

        if (driver->cuGraphNodeGetType(nodes[i], &type) != CUDA_SUCCESS)
            continue;
        if (type == CU_GRAPH_NODE_TYPE_GRAPH && depth &&
            driver->cuGraphChildGraphNodeGetGraph(nodes[i], &child) == CUDA_SUCCESS)
            ranges_collect(ranges, child, depth - 1);
        if (type != CU_GRAPH_NODE_TYPE_MEM_ALLOC ||
            driver->cuGraphMemAllocNodeGetParams(nodes[i], &params) != CUDA_SUCCESS)
            continue;
        device = account_location(&params.poolProps.location);
        if (ranges->device < 0)
            ranges->device = device;
        if (device >= 0 && device == ranges->device)
            ranges_add(ranges, (struct range){params.dptr, params.dptr + params.bytesize});
    }
    os_unmap(nodes, room);
}

static void instantiated(CUgraphExec exec, CUgraph graph)
{
    struct ranges ranges = {.device = -1};
    struct block block = {.key = (uintptr_t)exec, .kind = BLOCK_EXEC, .owner = OWNER_NONE};
    int saved = errno;
    struct block *stale;

    ranges_collect(&ranges, graph, GRAPHS_DEPTH);
    /* Even if the needs of a graph are unknown, what its launches took is charged. */
    if (!ranges.n && ranges.unknown)
        ranges.device = pages_index_current();
    if (ranges.n || (ranges.unknown && ranges.device >= 0)) {
        block.device = (int8_t)ranges.device;
        block.size = account_round(ranges_union(&ranges), GRAPHS_UNIT);
        stale = blocks_lock(BLOCK_EXEC, block.key);
        if (stale)
            blocks_remove(stale);
        blocks_add(&block);
        blocks_unlock(BLOCK_EXEC, block.key);
        /* The driver may not take the memory until the GPU reaches the graph. */
        account_watch(ranges.device);
    }
    if (ranges.items)
        os_unmap(ranges.items, ranges.room * sizeof *ranges.items);
    errno = saved;
}

/* ---- launches ---- */

/* Replaces the claim of a launch, which lasts from before the launch until after it, and returns
 * the former claim. Launches of one executable graph never overlap. */
static uint64_t exec_exchange(CUgraphExec exec, uint64_t claim, struct block *found)
{
    struct block *block = blocks_lock(BLOCK_EXEC, (uintptr_t)exec);
    uint64_t before = 0;

    found->key = 0;
    if (block) {
        *found = *block;
        before = block->value;
        block->value = claim;
    }
    blocks_unlock(BLOCK_EXEC, (uintptr_t)exec);
    return before;
}

static cold CUresult graph_claim(CUgraphExec exec)
{
    struct block block;
    uint64_t before = exec_exchange(exec, 0, &block);
    uint64_t now, missing;

    if (!block.key)
        return CUDA_SUCCESS;
    account_give(block.device, before, false);
    account_landed(block.device, before, false);
    settle(block.device, 0);
    now = held_bytes(&held[block.device]);
    missing = block.size > now ? block.size - now : 0;
    if (missing && !account_claim(block.device, missing, false))
        return account_refuse(block.device);
    exec_exchange(exec, missing, &block);
    return CUDA_SUCCESS;
}

static cold void graph_settle(CUgraphExec exec)
{
    struct block block;
    uint64_t claimed = exec_exchange(exec, 0, &block);

    if (block.key)
        settle(block.device, claimed);
}

CUresult account_graph_before(CUgraphExec exec)
{
    return likely(!atomic_load_relaxed(&graphs_in_use)) ? CUDA_SUCCESS : graph_claim(exec);
}

void account_graph_after(CUgraphExec exec)
{
    if (unlikely(atomic_load_relaxed(&graphs_in_use)))
        graph_settle(exec);
}

/* ---- the functions ---- */

static CUresult added(CUresult result, int type)
{
    if (result == CUDA_SUCCESS && type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        graphs_note_memory();
    return result;
}

CONTROL_EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph,
                                               const CUgraphNode *dependencies,
                                               size_t numDependencies,
                                               CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)
{
    return added(real->cuGraphAddMemAllocNode(phGraphNode, hGraph, dependencies, numDependencies,
                                              nodeParams),
                 CU_GRAPH_NODE_TYPE_MEM_ALLOC);
}

CONTROL_EXPORT CUresult cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph,
                                       const CUgraphNode *dependencies, size_t numDependencies,
                                       CUgraphNodeParams *nodeParams)
{
    CUresult result;

    parking_begin();
    result = real->cuGraphAddNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
    parking_end();

    return result == CUDA_SUCCESS ? added(result, nodeParams->type) : result;
}

CONTROL_EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph,
                                          const CUgraphNode *dependencies,
                                          const void *dependencyData, size_t numDependencies,
                                          CUgraphNodeParams *nodeParams)
{
    CUresult result;

    parking_begin();
    result = real->cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, dependencyData,
                                     numDependencies, nodeParams);
    parking_end();

    return result == CUDA_SUCCESS ? added(result, nodeParams->type) : result;
}

CONTROL_EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *phGraphNode, CUgraph hGraph,
                                          const CUgraphNode *dependencies,
                                          const void *dependencyData, size_t numDependencies,
                                          CUgraphNodeParams *nodeParams)
{
    CUresult result;

    parking_begin();
    result = real->cuGraphAddNode_v3(phGraphNode, hGraph, dependencies, dependencyData,
                                     numDependencies, nodeParams);
    parking_end();

    return result == CUDA_SUCCESS ? added(result, nodeParams->type) : result;
}

static void after_instantiation(CUresult result, const CUgraphExec *exec, CUgraph graph)
{
    if (likely(!atomic_load_relaxed(&graphs_in_use)) || result != CUDA_SUCCESS)
        return;
    instantiated(*exec, graph);
    graph_settle(*exec); /* the instantiation may have uploaded it */
}

CONTROL_EXPORT CUresult cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph,
                                           CUgraphNode *phErrorNode, char *logBuffer,
                                           size_t bufferSize)
{
    CUresult result;

    parking_begin();
    result = real->cuGraphInstantiate(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize);
    parking_end();

    after_instantiation(result, phGraphExec, hGraph);
    return result;
}

CONTROL_EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph,
                                              CUgraphNode *phErrorNode, char *logBuffer,
                                              size_t bufferSize)
{
    CUresult result;

    parking_begin();
    result = real->cuGraphInstantiate_v2(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize);
    parking_end();

    after_instantiation(result, phGraphExec, hGraph);
    return result;
}

CONTROL_EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph,
                                                    unsigned long long flags)
{
    CUresult result;

    parking_begin();
    result = real->cuGraphInstantiateWithFlags(phGraphExec, hGraph, flags);
    parking_end();

    after_instantiation(result, phGraphExec, hGraph);
    return result;
}

CONTROL_EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
                                                     void *instantiateParams)
{
    CUresult result;

    parking_begin();
    result = real->cuGraphInstantiateWithParams(phGraphExec, hGraph, instantiateParams);
    parking_end();

    after_instantiation(result, phGraphExec, hGraph);
    return result;
}

CONTROL_EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *phGraphExec, CUgraph hGraph,
                                                          void *instantiateParams)
{
    CUresult result;

    parking_begin();
    result = real->cuGraphInstantiateWithParams_ptsz(phGraphExec, hGraph, instantiateParams);
    parking_end();

    after_instantiation(result, phGraphExec, hGraph);
    return result;
}

CONTROL_EXPORT CUresult cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream)
{
    CUresult result = account_graph_before(hGraphExec);

    if (result != CUDA_SUCCESS)
        return result;
    parking_begin();
    result = real->cuGraphUpload(hGraphExec, hStream);
    parking_end();
    account_graph_after(hGraphExec);
    return result;
}

CONTROL_EXPORT CUresult cuGraphUpload_ptsz(CUgraphExec hGraphExec, CUstream hStream)
{
    CUresult result = account_graph_before(hGraphExec);

    if (result != CUDA_SUCCESS)
        return result;
    parking_begin();
    result = real->cuGraphUpload_ptsz(hGraphExec, hStream);
    parking_end();
    account_graph_after(hGraphExec);
    return result;
}

CONTROL_EXPORT CUresult cuGraphExecDestroy(CUgraphExec hGraphExec)
{
    struct block gone = {.device = -1};
    struct block *block;
    CUresult result;

    if (unlikely(atomic_load_relaxed(&graphs_in_use))) {
        block = blocks_lock(BLOCK_EXEC, (uintptr_t)hGraphExec);
        if (block) {
            gone = *block;
            blocks_remove(block);
        }
        blocks_unlock(BLOCK_EXEC, (uintptr_t)hGraphExec);
    }
    result = real->cuGraphExecDestroy(hGraphExec);
    if (gone.device < 0)
        return result;
    if (result == CUDA_SUCCESS) {
        settle(gone.device, gone.value);
    } else {
        blocks_lock(BLOCK_EXEC, gone.key);
        blocks_add(&gone);
        blocks_unlock(BLOCK_EXEC, gone.key);
    }
    return result;
}

CONTROL_EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    CUresult result = real->cuDeviceGraphMemTrim(device);
    int index = pages_index_of(device);

    if (result == CUDA_SUCCESS && index >= 0)
        graphs_refresh(index);
    return result;
}
