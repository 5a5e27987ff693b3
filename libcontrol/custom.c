/* Functions of the API table that are written by hand, for initialisation and streams. */
#include "parking.h"
#include "queue.h"

#include <stdlib.h>

#define CU_DEVICE_ATTRIBUTE_MPS_ENABLED 133

#define CUSTOM_LOSS_OPEN     2 /* value of grant_header.on_governor_loss */
#define CUSTOM_MPS_VARIABLE  "CUDA_MPS_PIPE_DIRECTORY"
#define CUSTOM_MPS_DIRECTORY PAGES_DIRECTORY "/mps"

static bool custom_mps_granted(void)
{
    return pages_n_devices() > 0 &&
           atomic_load_relaxed(&pages_grant_device(0)->strategy) == STRATEGY_MPS;
}

static struct os_lock mps_lock; /* for the environment */

void custom_after_fork(void)
{
    mps_lock.word = 0;
}

/*
 * The driver looks for the MPS daemon once, in cuInit, and works without MPS if it finds none. A
 * daemon that the program or its image configures is ignored. The environment is changed once, in
 * the first cuInit, which most programs call before they have threads.
 */
static void custom_mps_point(void)
{
    static bool done;
    int saved = errno;

    if (!custom_mps_granted())
        return;
    os_lock(&mps_lock);
    if (!done)
        setenv(CUSTOM_MPS_VARIABLE, CUSTOM_MPS_DIRECTORY, 1);
    done = true;
    os_unlock(&mps_lock);
    errno = saved;
}

/*
 * A client of an MPS server runs in the server's context, as do the server's other clients. A
 * container without the strategy `mps` may not use a daemon that it started itself.
 */
static bool custom_mps_allowed(void)
{
    bool granted = custom_mps_granted();
    bool allowed = true;

    for (unsigned i = 0; i < pages_n_devices(); i++) {
        CUdevice device = pages_device(i);
        int mps = 0;

        if (device >= 0 &&
            driver->cuDeviceGetAttribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device) ==
                CUDA_SUCCESS &&
            (mps != 0) != granted)
            allowed = false;
    }
    if (allowed)
        return true;
    if (granted) {
        control_log("this container's strategy is mps, but the driver found no MPS server "
                    "at " CUSTOM_MPS_DIRECTORY ": see tidegate ps --json on the node");
        /* Outside the server's context, the process would get more GPU time than is granted. */
        if (pages_now.on_governor_loss == CUSTOM_LOSS_OPEN)
            return true;
    } else
        control_log("an MPS daemon is running here, but this container's strategy is not mps: stop "
                    "the daemon, or unset " CUSTOM_MPS_VARIABLE);
    pages_deny();
    return false;
}

CONTROL_EXPORT CUresult cuInit(unsigned int Flags)
{
    CUresult result;

    if (!pages_start())
        return CUDA_ERROR_SYSTEM_NOT_READY;
    lookups_joined();
    custom_mps_point();
    result = real->cuInit(Flags);
    if (result != CUDA_SUCCESS) {
        if (custom_mps_granted())
            control_log("cuInit failed for this client of the container's MPS server: "
                        "see " CUSTOM_MPS_DIRECTORY "/events for the server's state");
        return result;
    }
    pages_match_devices();
    if (!custom_mps_allowed())
        return CUDA_ERROR_SYSTEM_NOT_READY;
    if (!parking_start())
        return CUDA_ERROR_OPERATING_SYSTEM;
    return result;
}

/* ---- streams ---- */

/* The event may belong to a capture, which the stream then joins. */
static bool wait_begin(void)
{
    bool joins = gate_captures();

    gate_note_dependency();
    if (joins)
        gate_join_begin();
    return joins;
}

static CUresult wait_end(bool joins, CUresult result)
{
    if (joins)
        gate_join_end();
    return result;
}

CONTROL_EXPORT CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    bool joins = wait_begin();

    return wait_end(joins, real->cuStreamWaitEvent(hStream, hEvent, Flags));
}

CONTROL_EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    bool joins = wait_begin();

    return wait_end(joins, real->cuStreamWaitEvent_ptsz(hStream, hEvent, Flags));
}

static CUresult stream_gone(CUstream stream, int device, CUresult result)
{
    if (result == CUDA_SUCCESS) {
        contexts_stream_gone(device);
        if (gate_captures())
            gate_capture_end(stream); /* its capture ended with it */
    }
    return result;
}

CONTROL_EXPORT CUresult cuStreamDestroy_v2(CUstream hStream)
{
    int device = contexts_stream_device(hStream);

    gate_forget_stream(hStream);
    return stream_gone(hStream, device, real->cuStreamDestroy_v2(hStream));
}

CONTROL_EXPORT CUresult cuStreamDestroy(CUstream hStream)
{
    int device = contexts_stream_device(hStream);

    gate_forget_stream(hStream);
    return stream_gone(hStream, device, real->cuStreamDestroy(hStream));
}

/* ---- captures: while there are none, no launch has to ask whether its stream is capturing ---- */

/* No memory is moved while a stream is capturing. */
static enum gate_capture capture_enter(CUstream stream, bool to_graphics)
{
    bool inside = parking_applies();
    enum gate_capture capture;

    if (inside)
        parking_enter(PARKING_MEMORY);
    capture = gate_capture_begin(stream, to_graphics);
    if (inside)
        parking_leave();
    return capture;
}

#define CUSTOM_CAPTURE(name, stream, to_graphics, parameters, ...)                                 \
    CONTROL_EXPORT CUresult name parameters                                                        \
    {                                                                                              \
        enum gate_capture capture = capture_enter(stream, to_graphics);                            \
        CUresult result;                                                                           \
                                                                                                   \
        if (capture == GATE_CAPTURE_REFUSED)                                                       \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                       \
        gate_join_begin();                                                                         \
        result = real->name(__VA_ARGS__);                                                          \
        gate_join_end();                                                                           \
        if (capture == GATE_CAPTURE_NEW && result != CUDA_SUCCESS)                                 \
            gate_capture_end(stream);                                                              \
        return result;                                                                             \
    }

CUSTOM_CAPTURE(cuStreamBeginCapture, hStream, false, (CUstream hStream), hStream)
CUSTOM_CAPTURE(cuStreamBeginCapture_ptsz, gate_ptsz(hStream), false, (CUstream hStream), hStream)
CUSTOM_CAPTURE(cuStreamBeginCapture_v2, hStream, false,
               (CUstream hStream, CUstreamCaptureMode mode), hStream, mode)
CUSTOM_CAPTURE(cuStreamBeginCapture_v2_ptsz, gate_ptsz(hStream), false,
               (CUstream hStream, CUstreamCaptureMode mode), hStream, mode)
CUSTOM_CAPTURE(cuStreamBeginCaptureToGraph, hStream, false,
               (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                const CUgraphEdgeData *dependencyData, size_t numDependencies,
                CUstreamCaptureMode mode),
               hStream, hGraph, dependencies, dependencyData, numDependencies, mode)
CUSTOM_CAPTURE(cuStreamBeginCaptureToGraph_ptsz, gate_ptsz(hStream), false,
               (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                const CUgraphEdgeData *dependencyData, size_t numDependencies,
                CUstreamCaptureMode mode),
               hStream, hGraph, dependencies, dependencyData, numDependencies, mode)

CUSTOM_CAPTURE(cuStreamBeginRecaptureToGraph, hStream, false,
               (CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph,
                CUgraphRecaptureCallback callbackFunc, void *userData),
               hStream, mode, hGraph, callbackFunc, userData)
CUSTOM_CAPTURE(cuStreamBeginRecaptureToGraph_ptsz, gate_ptsz(hStream), false,
               (CUstream hStream, CUstreamCaptureMode mode, CUgraph hGraph,
                CUgraphRecaptureCallback callbackFunc, void *userData),
               hStream, mode, hGraph, callbackFunc, userData)
CUSTOM_CAPTURE(cuStreamBeginCaptureToCig, hStream, true,
               (CUstream hStream, CUstreamCigCaptureParams *streamCigCaptureParams), hStream,
               streamCigCaptureParams)
CUSTOM_CAPTURE(cuStreamBeginCaptureToCig_ptsz, gate_ptsz(hStream), true,
               (CUstream hStream, CUstreamCigCaptureParams *streamCigCaptureParams), hStream,
               streamCigCaptureParams)

/* If this call could not end the capture, the capture continues. For a capture to a graph, the
 * driver is queried, because some errors end the capture. A capture to a command list is ended only
 * by a different call. */
static CUresult capture_ended(CUstream stream, CUresult result)
{
    bool continues;

    if (likely(!gate_captures()))
        return result;
    continues = result == CUDA_SUCCESS ? queue_capturing(stream) : gate_capturing(stream);
    if (!continues)
        gate_capture_end(stream);
    return result;
}

CONTROL_EXPORT CUresult cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
    return capture_ended(hStream, real->cuStreamEndCapture(hStream, phGraph));
}

CONTROL_EXPORT CUresult cuStreamEndCapture_ptsz(CUstream hStream, CUgraph *phGraph)
{
    return capture_ended(gate_ptsz(hStream), real->cuStreamEndCapture_ptsz(hStream, phGraph));
}

/* After the end of a capture to a command list, the driver's answers about the stream suffice
 * again. None of the errors that cuda.h lists ends the capture. */
static CUresult capture_to_graphics_ended(CUstream stream, CUresult result)
{
    if (result == CUDA_SUCCESS)
        gate_capture_end(stream);
    return result;
}

CONTROL_EXPORT CUresult cuStreamEndCaptureToCig(CUstream hStream)
{
    return capture_to_graphics_ended(hStream, real->cuStreamEndCaptureToCig(hStream));
}

CONTROL_EXPORT CUresult cuStreamEndCaptureToCig_ptsz(CUstream hStream)
{
    return capture_to_graphics_ended(gate_ptsz(hStream),
                                     real->cuStreamEndCaptureToCig_ptsz(hStream));
}

/* ---- a launch on several GPUs at once ---- */

#define CUSTOM_N_LAUNCHES 64

static bool custom_push_context_of(CUstream stream)
{
    CUcontext ctx;

    return driver->cuStreamGetCtx(stream, &ctx) == CUDA_SUCCESS &&
           driver->cuCtxPushCurrent(ctx) == CUDA_SUCCESS;
}

/* The kernels of such a launch wait for each other, so it starts only once it has passed the gate
 * of every GPU, and is never held. */
CONTROL_EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launchParamsList,
                                                             unsigned int numDevices,
                                                             unsigned int flags)
{
    struct gate_ticket tickets[CUSTOM_N_LAUNCHES];
    unsigned n_entered = 0;
    CUresult result = CUDA_SUCCESS;
    CUcontext ctx;

    /* The driver accepts at most one launch for each GPU. */
    if (numDevices > CUSTOM_N_LAUNCHES)
        return CUDA_ERROR_INVALID_VALUE;
    while (launchParamsList && n_entered < numDevices && result == CUDA_SUCCESS) {
        const CUDA_LAUNCH_PARAMS *p = &launchParamsList[n_entered];
        struct gate_ticket *ticket = &tickets[n_entered++];
        struct gate_work work = {
            .key = (uintptr_t)p->function,
            .blocks = gate_blocks(p->gridDimX, p->gridDimY, p->gridDimZ),
            .stream = p->hStream,
            .together = true,
        };

        ticket->device = -1;
        ticket->inside = false;
        if (custom_push_context_of(p->hStream)) {
            result = gate_enter(ticket, &work);
            driver->cuCtxPopCurrent(&ctx);
        }
    }
    if (result == CUDA_SUCCESS)
        result = real->cuLaunchCooperativeKernelMultiDevice(launchParamsList, numDevices, flags);
    for (unsigned i = 0; i < n_entered; i++) {
        bool pushed = tickets[i].device >= 0 && custom_push_context_of(launchParamsList[i].hStream);

        tickets[i].mark = tickets[i].mark && pushed;
        gate_leave(&tickets[i], result);
        if (pushed)
            driver->cuCtxPopCurrent(&ctx);
    }
    return result;
}
