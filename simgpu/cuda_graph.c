/* Entries: capture and graphs. */
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
    (void)flags; /* where to free memory, upload and launch from: a list of commands has none */
    if (!execp || !graph_valid(graph))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    return driver_leave(graph_instantiate(graph, execp));
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
