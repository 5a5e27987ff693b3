/* Start, look-up and streams: functions of the table that are written by hand. */
#include "control.h"

#define CU_DEVICE_ATTRIBUTE_MPS_ENABLED 133

/*
 * A client of an MPS server works in the server's context, together with whoever else uses it.
 * Where the container was not given that strategy, a daemon that it started by itself is not used.
 */
static bool custom_mps_allowed(void)
{
    bool allowed = true;

    for (unsigned i = 0; i < pages_n_devices(); i++) {
        CUdevice device = pages_device(i);
        int mps = 0;

        if (device < 0 || atomic_load_relaxed(&pages_grant_device(i)->strategy) == STRATEGY_MPS)
            continue;
        if (driver->cuDeviceGetAttribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device) ==
                CUDA_SUCCESS &&
            mps)
            allowed = false;
    }
    if (!allowed) {
        pages_deny();
        control_log(
            "an MPS daemon runs here, but this container has not the strategy mps: stop it, "
            "or unset CUDA_MPS_PIPE_DIRECTORY");
    }
    return allowed;
}

CONTROL_EXPORT CUresult cuInit(unsigned int Flags)
{
    CUresult result;

    if (!pages_start())
        return CUDA_ERROR_SYSTEM_NOT_READY;
    result = real->cuInit(Flags);
    if (result != CUDA_SUCCESS)
        return result;
    pages_match_devices();
    if (!custom_mps_allowed())
        return CUDA_ERROR_SYSTEM_NOT_READY;
    return result;
}

static void lookup_replace(void **pfn)
{
    struct ledger_slot *slot;
    void *ours;

    if (!pfn || !*pfn)
        return;
    ours = origin_replace(*pfn);
    if (ours == *pfn)
        return;
    *pfn = ours;
    slot = pages_slot();
    if (slot)
        atomic_add_relaxed(&slot->lookups, 1);
}

CONTROL_EXPORT CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion,
                                         cuuint64_t flags)
{
    CUresult result = real->cuGetProcAddress(symbol, pfn, cudaVersion, flags);

    if (result == CUDA_SUCCESS)
        lookup_replace(pfn);
    return result;
}

CONTROL_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion,
                                            cuuint64_t flags,
                                            CUdriverProcAddressQueryResult *symbolStatus)
{
    CUresult result = real->cuGetProcAddress_v2(symbol, pfn, cudaVersion, flags, symbolStatus);

    if (result == CUDA_SUCCESS)
        lookup_replace(pfn);
    return result;
}

/* ---- streams ---- */

CONTROL_EXPORT CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    gate_note_dependency();
    return real->cuStreamWaitEvent(hStream, hEvent, Flags);
}

CONTROL_EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    gate_note_dependency();
    return real->cuStreamWaitEvent_ptsz(hStream, hEvent, Flags);
}

static void stream_gone(bool was_capturing, CUresult result)
{
    if (result != CUDA_SUCCESS)
        return;
    contexts_stream_gone();
    if (was_capturing)
        gate_capture_failed(); /* it ended with its stream */
}

CONTROL_EXPORT CUresult cuStreamDestroy_v2(CUstream hStream)
{
    bool was = gate_capturing(hStream);
    CUresult result;

    gate_forget_stream(hStream);
    result = real->cuStreamDestroy_v2(hStream);
    stream_gone(was, result);
    return result;
}

CONTROL_EXPORT CUresult cuStreamDestroy(CUstream hStream)
{
    bool was = gate_capturing(hStream);
    CUresult result;

    gate_forget_stream(hStream);
    result = real->cuStreamDestroy(hStream);
    stream_gone(was, result);
    return result;
}

/* ---- captures: while there are none, no launch has to ask whether its stream captures ---- */

#define CUSTOM_CAPTURE(name, parameters, ...)                                                      \
    CONTROL_EXPORT CUresult name parameters                                                        \
    {                                                                                              \
        CUresult result;                                                                           \
                                                                                                   \
        gate_capture_began(); /* before another thread can launch into it */                       \
        result = real->name(__VA_ARGS__);                                                          \
        if (result != CUDA_SUCCESS)                                                                \
            gate_capture_failed();                                                                 \
        return result;                                                                             \
    }

CUSTOM_CAPTURE(cuStreamBeginCapture, (CUstream hStream), hStream)
CUSTOM_CAPTURE(cuStreamBeginCapture_ptsz, (CUstream hStream), hStream)
CUSTOM_CAPTURE(cuStreamBeginCapture_v2, (CUstream hStream, CUstreamCaptureMode mode), hStream, mode)
CUSTOM_CAPTURE(cuStreamBeginCapture_v2_ptsz, (CUstream hStream, CUstreamCaptureMode mode), hStream,
               mode)
CUSTOM_CAPTURE(cuStreamBeginCaptureToGraph,
               (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                const CUgraphEdgeData *dependencyData, size_t numDependencies,
                CUstreamCaptureMode mode),
               hStream, hGraph, dependencies, dependencyData, numDependencies, mode)
CUSTOM_CAPTURE(cuStreamBeginCaptureToGraph_ptsz,
               (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                const CUgraphEdgeData *dependencyData, size_t numDependencies,
                CUstreamCaptureMode mode),
               hStream, hGraph, dependencies, dependencyData, numDependencies, mode)

CONTROL_EXPORT CUresult cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
    bool was = gate_capturing(hStream);
    CUresult result = real->cuStreamEndCapture(hStream, phGraph);

    gate_capture_ended(hStream, was);
    return result;
}

CONTROL_EXPORT CUresult cuStreamEndCapture_ptsz(CUstream hStream, CUgraph *phGraph)
{
    CUstream stream = gate_ptsz(hStream);
    bool was = gate_capturing(stream);
    CUresult result = real->cuStreamEndCapture_ptsz(hStream, phGraph);

    gate_capture_ended(stream, was);
    return result;
}

/* ---- a launch on several GPUs at once ---- */

#define CUSTOM_N_LAUNCHES 64

static bool custom_push_context_of(CUstream stream)
{
    CUcontext ctx;

    return driver->cuStreamGetCtx(stream, &ctx) == CUDA_SUCCESS &&
           driver->cuCtxPushCurrent(ctx) == CUDA_SUCCESS;
}

/* Its kernels wait for each other, so it goes when each GPU has let it, and is then not held. */
CONTROL_EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launchParamsList,
                                                             unsigned int numDevices,
                                                             unsigned int flags)
{
    struct gate_ticket tickets[CUSTOM_N_LAUNCHES];
    unsigned n = launchParamsList && numDevices <= CUSTOM_N_LAUNCHES ? numDevices : 0;
    CUcontext ctx;
    CUresult result;

    for (unsigned i = 0; i < n; i++) {
        const CUDA_LAUNCH_PARAMS *p = &launchParamsList[i];
        struct gate_work work = {
            .key = (uintptr_t)p->function,
            .blocks = gate_blocks(p->gridDimX, p->gridDimY, p->gridDimZ),
            .stream = p->hStream,
            .together = true,
        };

        tickets[i].device = -1;
        if (custom_push_context_of(p->hStream)) {
            gate_enter(&tickets[i], &work);
            driver->cuCtxPopCurrent(&ctx);
        }
    }
    result = real->cuLaunchCooperativeKernelMultiDevice(launchParamsList, numDevices, flags);
    for (unsigned i = 0; i < n; i++) {
        if (tickets[i].device >= 0 && custom_push_context_of(launchParamsList[i].hStream)) {
            gate_leave(&tickets[i], result);
            driver->cuCtxPopCurrent(&ctx);
        }
    }
    return result;
}
