/*
 * Streams and their order
 *
 * A stream is a number: how many kernels of its context must have completed for it to be done.
 * Kernels of all streams are in one queue in order of submission, so waiting for another stream
 * means waiting for a larger number, and the barrier of the NULL stream is a maximum.
 */
#include "driver.h"

#include <stdlib.h>

struct pool streams_pool = POOL(stream, 0x53545230);

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static bool is_legacy(const struct stream *stream)
{
    return stream == &stream->context->legacy;
}

/** stream_need() - number of the context's kernels for which the stream's next command waits */
uint64_t stream_need(const struct stream *stream)
{
    if (is_legacy(stream))
        return stream->context->blocking_need;
    if (stream->flags & CU_STREAM_NON_BLOCKING)
        return stream->need;
    return larger(stream->need, stream->context->legacy_need);
}

/** stream_raise() - make the stream's next command wait for at least `need` kernels */
void stream_raise(struct stream *stream, uint64_t need)
{
    struct context *context = stream->context;

    stream->need = larger(stream->need, need);
    if (is_legacy(stream))
        context->legacy_need = larger(context->legacy_need, need);
    if (!(stream->flags & CU_STREAM_NON_BLOCKING))
        context->blocking_need = larger(context->blocking_need, need);
}

/* The calling thread's default stream in the current context, created on first use. */
static struct stream *thread_stream(struct context *context)
{
    struct stream *stream;

    for (stream = context->streams; stream; stream = stream->next) {
        if (stream->thread == current_thread())
            return stream;
    }
    stream = pool_take(&streams_pool);
    if (!stream)
        return NULL;
    stream->context = context;
    stream->thread = current_thread();
    stream->next = context->streams;
    context->streams = stream;
    return stream;
}

/** stream_find() - resolve a handle; NULL and 1 are the legacy stream, 2 is the thread's own */
CUresult stream_find(CUstream handle, struct context *current, struct stream **streamp)
{
    if (!handle || handle == CU_STREAM_LEGACY) {
        *streamp = &current->legacy;
    } else if (handle == CU_STREAM_PER_THREAD) {
        *streamp = thread_stream(current);
        if (!*streamp)
            return CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        if (!pool_owns(&streams_pool, handle))
            return CUDA_ERROR_INVALID_HANDLE;
        *streamp = handle;
    }
    return (*streamp)->context->fault;
}

/** stream_enter() - take the lock, and resolve a stream handle in the current context */
CUresult stream_enter(CUstream handle, struct stream **streamp)
{
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    r = stream_find(handle, context, streamp);
    return r ? driver_leave(r) : CUDA_SUCCESS;
}

CUresult stream_new(struct context *context, unsigned int flags, int priority,
                    struct stream **streamp)
{
    struct stream *stream = pool_take(&streams_pool);

    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->next = context->streams;
    context->streams = stream;
    *streamp = stream;
    return CUDA_SUCCESS;
}

/** stream_free() - invalidate the handle at once; pending work in the stream continues */
void stream_free(struct stream *stream)
{
    struct stream **link = &stream->context->streams;

    capture_drop_stream(stream);
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    mempool_forget_stream(stream);
    pool_give(&streams_pool, stream);
}

/**
 * stream_submit() - append a command to a stream, or to the graph being captured from it
 *
 * Takes ownership of `command->staged`. Blocks while the context's queue is full.
 */
CUresult stream_submit(struct stream *stream, const struct command *command)
{
    struct context *context = stream->context;
    struct effect *effect;
    struct place *place;
    uint64_t need;
    CUresult r;

    r = is_legacy(stream) ? capture_check_legacy(context) : CUDA_SUCCESS;
    if (!r && stream->capture)
        return capture_add(stream->capture, command);
    effect = calloc(1, sizeof(*effect));
    if (!r && !effect)
        r = CUDA_ERROR_OUT_OF_MEMORY;
    if (!r)
        r = context_reserve(context);
    if (!r && !is_legacy(stream) && !pool_owns(&streams_pool, stream)) {
        device_leave(context->device);
        r = CUDA_ERROR_INVALID_HANDLE; /* destroyed by another thread while this one slept */
    }
    if (r) {
        free(command->staged);
        free(effect);
        return r;
    }

    if (command->kind == COMMAND_KERNEL || command->kind == COMMAND_WAIT ||
        command->kind == COMMAND_MEET) {
        need = context_tail(context) + 1;
        context_append(context, command);
        device_leave(context->device);
        context_settle(context);
        free(effect);
        stream_raise(stream, need);
        return CUDA_SUCCESS;
    }

    /*
     * An event with no work ahead of it is recorded when the context has the GPU, not before. On
     * the H200 an interval that begins with such an event does not include the switch. A large copy
     * is made when a kernel of the same duration has ended.
     */
    if (command->duration || (command->kind == COMMAND_EVENT &&
                              context->head >= stream_need(stream) && context_displaced(context))) {
        need = context_tail(context) + 1;
        context_append(context,
                       &(struct command){.kind = COMMAND_KERNEL, .duration = command->duration});
        stream_raise(stream, need);
    }
    device_leave(context->device);
    context_settle(context);
    need = stream_need(stream);
    if (command->kind == COMMAND_EVENT)
        command->event->need = need;
    if (context->head >= need) {
        context_perform(context, command, context->now);
        free(effect);
        return CUDA_SUCCESS;
    }
    effect->command = *command;
    place = &context->places[(need - 1) % GPU_QUEUE];
    *place->last = effect;
    place->last = &effect->next;
    context->n_effects++;
    stream_raise(stream, need);
    return CUDA_SUCCESS;
}

/**
 * event_renew() - prepare an event to be recorded again by `command`
 *
 * Its earlier record is forgotten, even if it is still pending.
 */
void event_renew(struct event *event, struct context *context, struct command *command)
{
    static uint64_t records;

    event->context = context;
    event->context_serial = context->serial;
    event->record = ++records;
    event->completed = false;
    event->captured = 0;
    *command = (struct command){.kind = COMMAND_EVENT, .event = event, .record = event->record};
}
