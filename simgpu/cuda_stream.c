/* Entry points: streams and events. */
#include "driver.h"

#include <stdlib.h>
#include <unistd.h>

ENTRY(cuStreamCreateWithPriority, CUstream *streamp, unsigned int flags, int priority)
{
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    if (!streamp || flags & ~(unsigned int)CU_STREAM_NON_BLOCKING)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    return driver_leave(stream_new(context, flags, priority, streamp));
}

ENTRY(cuStreamCreate, CUstream *streamp, unsigned int flags)
{
    return cuStreamCreateWithPriority(streamp, flags, 0);
}

ENTRY(cuStreamDestroy_v2, CUstream handle)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!pool_owns(&streams_pool, handle))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    stream_free(handle);
    return driver_leave(CUDA_SUCCESS);
}

/* Check whether the calling thread may query this stream or wait for it. */
static CUresult may_ask(struct stream *stream)
{
    if (stream->capture) {
        capture_invalidate(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream == &stream->context->legacy) {
        CUresult r = capture_check_legacy(stream->context);

        if (r)
            return r;
    }
    return capture_check_unsafe();
}

static CUresult synchronize(CUstream handle)
{
    const struct device *device;
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    device = stream->context->device;
    r = may_ask(stream);
    if (!r)
        r = context_wait(stream->context, stream_need(stream));
    if (!r)
        mempool_synchronized(device);
    return driver_leave(r);
}

ENTRY(cuStreamSynchronize, CUstream stream)
{
    return synchronize(stream);
}

ENTRY(cuStreamSynchronize_ptsz, CUstream stream)
{
    return synchronize(PER_THREAD(stream));
}

static CUresult query(CUstream handle)
{
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    r = may_ask(stream);
    if (!r)
        r = context_look(stream->context);
    if (!r)
        r = stream->context->fault;
    if (!r && stream->context->head < stream_need(stream))
        r = CUDA_ERROR_NOT_READY;
    return driver_leave(r);
}

ENTRY(cuStreamQuery, CUstream stream)
{
    return query(stream);
}

ENTRY(cuStreamQuery_ptsz, CUstream stream)
{
    return query(PER_THREAD(stream));
}

/* Whether the context in which the event was recorded still exists. */
static bool event_alive(const struct event *event)
{
    return event->context && context_valid(event->context) &&
           event->context->serial == event->context_serial;
}

static CUresult event_wait(struct event *event)
{
    if (event->completed || !event_alive(event))
        return CUDA_SUCCESS;
    return context_wait(event->context, event->need);
}

static CUresult wait_event(CUstream handle, CUevent event, unsigned int flags)
{
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (!pool_owns(&events_pool, event))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    if (flags > 1)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (event->captured) { /* fork or join: the stream becomes part of the capture */
        struct capture *capture = capture_find(event->captured);

        if (!capture)
            return driver_leave(CUDA_ERROR_CAPTURED_EVENT);
        if (stream == &stream->context->legacy) {
            capture_invalidate(capture);
            return driver_leave(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        if (stream->capture && stream->capture != capture) {
            capture_invalidate(stream->capture);
            capture_invalidate(capture);
            return driver_leave(CUDA_ERROR_STREAM_CAPTURE_MERGE);
        }
        stream->capture = capture;
        return driver_leave(CUDA_SUCCESS);
    }
    if (stream->capture) {
        if (event->completed || !event_alive(event))
            return driver_leave(CUDA_SUCCESS);
        capture_invalidate(stream->capture);
        return driver_leave(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    if (event_alive(event) && event->context == stream->context)
        stream_raise(stream, event->need);
    else
        r = event_wait(event); /* the GPU orders no work across contexts: the host waits instead */
    return driver_leave(r);
}

/*
 * The word is in this process's host memory: streams on the simulated GPU can watch no other
 * memory.
 */
static CUresult wait_value(CUstream handle, CUdeviceptr address, uint32_t value, unsigned int flags)
{
    struct command command = {.kind = COMMAND_WAIT, .word = (const uint32_t *)(uintptr_t)address};
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (!address || address % sizeof(uint32_t))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (flags != CU_STREAM_WAIT_VALUE_GEQ || stream->capture)
        return driver_leave(CUDA_ERROR_NOT_SUPPORTED);
    command.value = value;
    return driver_leave(stream_submit(stream, &command));
}

ENTRY(cuStreamWaitValue32_v2, CUstream stream, CUdeviceptr address, uint32_t value,
      unsigned int flags)
{
    return wait_value(stream, address, value, flags);
}

ENTRY(cuStreamWaitValue32_v2_ptsz, CUstream stream, CUdeviceptr address, uint32_t value,
      unsigned int flags)
{
    return wait_value(PER_THREAD(stream), address, value, flags);
}

ENTRY(cuStreamWaitEvent, CUstream stream, CUevent event, unsigned int flags)
{
    return wait_event(stream, event, flags);
}

ENTRY(cuStreamWaitEvent_ptsz, CUstream stream, CUevent event, unsigned int flags)
{
    return wait_event(PER_THREAD(stream), event, flags);
}

static CUresult get_context(CUstream handle, CUcontext *contextp)
{
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (!contextp)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    *contextp = stream->context;
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuStreamGetCtx, CUstream stream, CUcontext *contextp)
{
    return get_context(stream, contextp);
}

ENTRY(cuStreamGetCtx_ptsz, CUstream stream, CUcontext *contextp)
{
    return get_context(PER_THREAD(stream), contextp);
}

ENTRY(cuEventCreate, CUevent *eventp, unsigned int flags)
{
    struct context *context;
    struct event *event;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    if (!eventp || flags > 7 ||
        (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    event = pool_take(&events_pool);
    if (!event)
        return driver_leave(CUDA_ERROR_OUT_OF_MEMORY);
    event->flags = flags;
    *eventp = event;
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuEventDestroy_v2, CUevent event)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!pool_owns(&events_pool, event))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    pool_give(&events_pool, event);
    return driver_leave(CUDA_SUCCESS);
}

_Atomic unsigned int driver_record_us;

static CUresult record(CUevent event, CUstream handle, unsigned int flags)
{
    struct command command;
    struct stream *stream;
    unsigned int us = atomic_load(&driver_record_us);
    CUresult r;

    if (us)
        usleep(us);
    r = stream_enter(handle, &stream);
    if (r)
        return r;
    if (!pool_owns(&events_pool, event))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    if (flags > CU_EVENT_RECORD_EXTERNAL)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (stream->capture && flags != CU_EVENT_RECORD_EXTERNAL) {
        if (stream->capture->invalid)
            return driver_leave(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        event->captured = stream->capture->number;
        return driver_leave(CUDA_SUCCESS);
    }
    if (stream->capture) {
        command = (struct command){.kind = COMMAND_EVENT, .event = event};
        return driver_leave(stream_submit(stream, &command));
    }
    if (flags == CU_EVENT_RECORD_EXTERNAL)
        return driver_leave(CUDA_ERROR_ILLEGAL_STATE);
    event_renew(event, stream->context, &command);
    return driver_leave(stream_submit(stream, &command));
}

ENTRY(cuEventRecord, CUevent event, CUstream stream)
{
    return record(event, stream, 0);
}

ENTRY(cuEventRecord_ptsz, CUevent event, CUstream stream)
{
    return record(event, PER_THREAD(stream), 0);
}

ENTRY(cuEventRecordWithFlags, CUevent event, CUstream stream, unsigned int flags)
{
    return record(event, stream, flags);
}

ENTRY(cuEventRecordWithFlags_ptsz, CUevent event, CUstream stream, unsigned int flags)
{
    return record(event, PER_THREAD(stream), flags);
}

/* Enter with an event that the calling thread may query. */
static CUresult enter_event(CUevent event)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!pool_owns(&events_pool, event))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    if (event->captured) {
        struct capture *capture = capture_find(event->captured);

        if (capture)
            capture_invalidate(capture);
        return driver_leave(CUDA_ERROR_CAPTURED_EVENT);
    }
    r = capture_check_unsafe();
    return r ? driver_leave(r) : CUDA_SUCCESS;
}

ENTRY(cuEventQuery, CUevent event)
{
    CUresult r = enter_event(event);

    if (r)
        return r;
    if (!event->completed && event_alive(event)) {
        r = context_look(event->context);
        if (!r)
            r = event->context->fault;
        if (!r && !event->completed)
            r = CUDA_ERROR_NOT_READY;
    }
    return driver_leave(r);
}

ENTRY(cuEventSynchronize, CUevent event)
{
    const struct device *device;
    CUresult r = enter_event(event);

    if (r)
        return r;
    device = event_alive(event) ? event->context->device : NULL;
    r = event_wait(event);
    if (!r && device)
        mempool_synchronized(device);
    return driver_leave(r);
}

/* In ms; the hardware's resolution of about half a microsecond is not modelled. */
static CUresult elapsed(float *milliseconds, CUevent start, CUevent end)
{
    CUresult r = driver_enter();
    const struct event *events[2] = {start, end};
    bool ready = true;

    if (r)
        return r;
    if (!milliseconds)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < 2; i++) {
        const struct event *event = events[i];

        if (!pool_owns(&events_pool, event))
            return driver_leave(CUDA_ERROR_INVALID_HANDLE);
        if (event->captured)
            return driver_leave(CUDA_ERROR_CAPTURED_EVENT);
        if (event->flags & CU_EVENT_DISABLE_TIMING || !event->context)
            return driver_leave(CUDA_ERROR_INVALID_HANDLE);
        if (!event->completed && event_alive(event)) {
            r = context_look(event->context);
            if (r)
                return driver_leave(r);
        }
        ready = ready && event->completed;
    }
    if (!ready)
        r = CUDA_ERROR_NOT_READY;
    else
        *milliseconds = (float)((double)(int64_t)(end->time - start->time) / 1e6);
    return driver_leave(r);
}

ENTRY(cuEventElapsedTime, float *milliseconds, CUevent start, CUevent end)
{
    return elapsed(milliseconds, start, end);
}

ENTRY(cuEventElapsedTime_v2, float *milliseconds, CUevent start, CUevent end)
{
    return elapsed(milliseconds, start, end);
}

static CUresult is_capturing(CUstream handle, CUstreamCaptureStatus *statusp)
{
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (!statusp)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    *statusp = !stream->capture           ? CU_STREAM_CAPTURE_STATUS_NONE
               : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                          : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuStreamIsCapturing, CUstream stream, CUstreamCaptureStatus *statusp)
{
    return is_capturing(stream, statusp);
}

ENTRY(cuStreamIsCapturing_ptsz, CUstream stream, CUstreamCaptureStatus *statusp)
{
    return is_capturing(PER_THREAD(stream), statusp);
}

static CUresult host_function(CUstream handle, CUhostFn function, void *data)
{
    struct command command = {.kind = COMMAND_HOST, .function = function, .data = data};
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (!function)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    return driver_leave(stream_submit(stream, &command));
}

ENTRY(cuLaunchHostFunc, CUstream stream, CUhostFn function, void *data)
{
    return host_function(stream, function, data);
}

ENTRY(cuLaunchHostFunc_ptsz, CUstream stream, CUhostFn function, void *data)
{
    return host_function(PER_THREAD(stream), function, data);
}
