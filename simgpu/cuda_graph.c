/* Entry points: capture and graphs. */
#include "driver.h"

static CUresult begin(CUstream handle, CUstreamCaptureMode mode)
{
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    return r ? r : driver_leave(capture_begin(stream, mode));
}

ENTRY(cuStreamBeginCapture_v2, CUstream stream, CUstreamCaptureMode mode)
{
    return begin(stream, mode);
}

ENTRY(cuStreamBeginCapture_v2_ptsz, CUstream stream, CUstreamCaptureMode mode)
{
    return begin(PER_THREAD(stream), mode);
}

static CUresult end(CUstream handle, CUgraph *graphp)
{
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    return driver_leave(graphp ? capture_end(stream, graphp) : CUDA_ERROR_INVALID_VALUE);
}

ENTRY(cuStreamEndCapture, CUstream stream, CUgraph *graphp)
{
    return end(stream, graphp);
}

ENTRY(cuStreamEndCapture_ptsz, CUstream stream, CUgraph *graphp)
{
    return end(PER_THREAD(stream), graphp);
}

ENTRY(cuThreadExchangeStreamCaptureMode, CUstreamCaptureMode *modep)
{
    CUstreamCaptureMode mode;

    if (!modep || *modep > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    mode = *modep;
    *modep = thread_capture_mode;
    thread_capture_mode = mode;
    return CUDA_SUCCESS;
}

ENTRY(cuGraphInstantiateWithFlags, CUgraphExec *execp, CUgraph graph, unsigned long long flags)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    /* Other flags choose where a graph is uploaded or launched, and do not apply here. */
    if (!execp || !graph_valid(graph))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    return driver_leave(
        graph_instantiate(graph, flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH, execp));
}

ENTRY(cuGraphCreate, CUgraph *graphp, unsigned int flags)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    return driver_leave(graphp && !flags ? graph_new(graphp) : CUDA_ERROR_INVALID_VALUE);
}

ENTRY(cuGraphAddMemAllocNode, CUgraphNode *nodep, CUgraph graph, const CUgraphNode *dependencies,
      size_t n, CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    struct device *device;
    CUgraphNode node;
    uintptr_t address;
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!nodep || !graph_valid(graph) || !parameters || !parameters->bytesize ||
        parameters->poolProps.allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    r = location_device(&parameters->poolProps.location, &device);
    if (!r)
        r = graph_add(graph, dependencies, n, &node);
    if (r)
        return driver_leave(r);
    r = graphmem_allocate(graph_memory(graph), parameters->poolProps.location.id,
                          parameters->bytesize, &address);
    if (r) {
        graph_remove_last(graph);
        return driver_leave(r);
    }
    *nodep = node;
    parameters->dptr = address;
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuGraphAddMemFreeNode, CUgraphNode *nodep, CUgraph graph, const CUgraphNode *dependencies,
      size_t n, CUdeviceptr address)
{
    CUgraphNode node;
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!nodep || !graph_valid(graph))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    r = graph_add(graph, dependencies, n, &node);
    if (r)
        return driver_leave(r);
    r = graphmem_end(*graph_memory(graph), address);
    if (r)
        graph_remove_last(graph);
    else
        *nodep = node;
    return driver_leave(r);
}

static CUresult graph_memory_enter(CUdevice ordinal, const void *value)
{
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = value ? driver_device(ordinal, &device) : CUDA_ERROR_INVALID_VALUE;
    return r ? driver_leave(r) : CUDA_SUCCESS;
}

ENTRY(cuDeviceGetGraphMemAttribute, CUdevice ordinal, CUgraphMem_attribute attribute, void *value)
{
    CUresult r = graph_memory_enter(ordinal, value);

    return r ? r : driver_leave(graphmem_get(ordinal, attribute, value));
}

ENTRY(cuDeviceSetGraphMemAttribute, CUdevice ordinal, CUgraphMem_attribute attribute, void *value)
{
    CUresult r = graph_memory_enter(ordinal, value);

    return r ? r : driver_leave(graphmem_set(ordinal, attribute, *(const uint64_t *)value));
}

ENTRY(cuDeviceGraphMemTrim, CUdevice ordinal)
{
    CUresult r = graph_memory_enter(ordinal, &ordinal);

    if (r)
        return r;
    graphmem_trim(ordinal);
    return driver_leave(CUDA_SUCCESS);
}

static CUresult upload(CUgraphExec exec, CUstream handle)
{
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    return driver_leave(graph_exec_valid(exec) ? graph_upload(exec) : CUDA_ERROR_INVALID_VALUE);
}

ENTRY(cuGraphUpload, CUgraphExec exec, CUstream stream)
{
    return upload(exec, stream);
}

ENTRY(cuGraphUpload_ptsz, CUgraphExec exec, CUstream stream)
{
    return upload(exec, PER_THREAD(stream));
}

static CUresult launch(CUgraphExec exec, CUstream handle)
{
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (!graph_exec_valid(exec))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    return driver_leave(graph_launch(exec, stream));
}

ENTRY(cuGraphLaunch, CUgraphExec exec, CUstream stream)
{
    return launch(exec, stream);
}

ENTRY(cuGraphLaunch_ptsz, CUgraphExec exec, CUstream stream)
{
    return launch(exec, PER_THREAD(stream));
}

ENTRY(cuGraphExecDestroy, CUgraphExec exec)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    return driver_leave(graph_exec_valid(exec) ? graph_exec_free(exec) : CUDA_ERROR_INVALID_VALUE);
}

ENTRY(cuGraphDestroy, CUgraph graph)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!graph_valid(graph))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    graph_free(graph);
    return driver_leave(CUDA_SUCCESS);
}
