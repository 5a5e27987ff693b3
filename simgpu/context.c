/*
 * Contexts: creation and end, the view of the device, and the effects of completed kernels
 *
 * Kernels are in the shared queue and are counted; "need" always means a number of kernels that the
 * context must have completed. Commands that take no GPU time (events, copies, callbacks) are
 * attached to the kernel that they need and are performed, in order, when this process learns that
 * the kernel has completed.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

#include "schedule.h"

#define HELD_LOOK 500000u /* ns between two checks of a word that a command waits for */
#define MEET_LOOK 100000u /* the same for a kernel that spins */

struct pool events_pool = POOL(event, 0x45565430);

static CUresult context_place(struct context *context)
{
    struct device *device = context->device;
    struct gpu *gpu = device->gpu;
    uint64_t cost = gpu->config.context_memory;
    uint32_t index = 0;

    if (device_used(device) + cost > gpu->config.memory)
        device_reap(device);
    if (device_used(device) + cost > gpu->config.memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    while (index < GPU_CONTEXTS && gpu->contexts[index].serial)
        index++;
    if (index == GPU_CONTEXTS)
        return CUDA_ERROR_OUT_OF_MEMORY;

    context->index = index;
    context->serial = atomic_fetch_add(&gpu->shared.serials, 1) + 1;
    for (int i = 0; i < 2; i++)
        gpu->shared.timelines[i].lanes[index] = (struct gpu_lane){0};
    gpu->contexts[index].slot = device->slot;
    gpu->contexts[index].generation = device->generation;
    atomic_store(&gpu->contexts[index].slice, 0);
    atomic_store(&gpu->contexts[index].off, 0);
    atomic_store(&gpu->contexts[index].tail, 0);
    if (index >= gpu->shared.n_contexts)
        atomic_store(&gpu->shared.n_contexts, index + 1);
    atomic_store(&gpu->contexts[index].serial, context->serial);
    return CUDA_SUCCESS;
}

/** context_new() - create a context in this process; it takes device memory while it exists */
CUresult context_new(struct context **contextp, CUdevice ordinal, unsigned int flags)
{
    static const size_t limits[CONTEXT_LIMITS] = {
        [CU_LIMIT_STACK_SIZE] = 1024,
        [CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20,
        [CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20,
    };
    struct context *context;
    struct device *device;
    CUresult r;

    r = driver_device(ordinal, &device);
    if (r)
        return r;
    context = pool_take(&contexts_pool);
    if (!context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    context->device = device;
    context->ordinal = ordinal;
    context->flags = flags;
    context->legacy.context = context;
    memcpy(context->limits, limits, sizeof(limits));
    if (!device_enter(device)) {
        pool_give(&contexts_pool, context);
        return CUDA_ERROR_DEINITIALIZED;
    }
    r = context_place(context);
    device_leave(device);
    if (r) {
        pool_give(&contexts_pool, context);
        return r;
    }
    context->next = driver.contexts;
    driver.contexts = context;
    *contextp = context;
    return CUDA_SUCCESS;
}

/*
 * With the device's lock held: release each waiting command whose word has reached its value. The
 * word is in this process's memory, so no other process can see it. A store that is not followed by
 * a driver call from this process is seen late.
 */
void context_unhold(struct context *context)
{
    struct gpu_context *shared = &context->device->gpu->contexts[context->index];
    const struct gpu_lane *lane = &schedule_current(context->device->gpu)->lanes[context->index];
    uint64_t tail = shared->tail;

    for (uint64_t i = context->head; context->n_waits && i < tail; i++) {
        struct place *place = &context->places[i % GPU_QUEUE];

        if (!place->word)
            continue;
        if (place->own) {
            if (i != lane->head || !lane->progress)
                return;
            __atomic_store_n(place->own, place->value, __ATOMIC_RELEASE);
        }
        if ((int32_t)(__atomic_load_n(place->word, __ATOMIC_ACQUIRE) - place->value) < 0)
            return; /* the commands behind it wait for it as well */
        place->word = NULL;
        context->n_waits--;
        if (place->own)
            shared->queue[i % GPU_QUEUE].duration = lane->progress + place->behind;
        else
            shared->queue[i % GPU_QUEUE].duration &= ~GPU_HELD;
    }
}

/* With the device's lock held: collect the commands that have completed since the last call. */
static void context_collect(struct context *context)
{
    struct gpu *gpu = context->device->gpu;
    const struct gpu_timeline *line = schedule_current(gpu);
    uint64_t head = line->lanes[context->index].head;

    for (uint64_t i = context->head; i < head; i++)
        context->places[i % GPU_QUEUE].completed =
            gpu->contexts[context->index].queue[i % GPU_QUEUE].completed;
    context->head = head;
    context->now = line->now;
    context_unhold(context);
}

/** context_displaced() - whether another context is on the GPU; the device's lock is held */
bool context_displaced(const struct context *context)
{
    uint64_t resident = schedule_current(context->device->gpu)->resident;

    return resident && resident != context->serial;
}

uint64_t context_tail(const struct context *context)
{
    return context->device->gpu->contexts[context->index].tail;
}

/** context_look() - collect the commands that have completed, and carry out their effects */
CUresult context_look(struct context *context)
{
    if (!device_enter(context->device))
        return CUDA_ERROR_DEINITIALIZED;
    context_collect(context);
    device_leave(context->device);
    context_settle(context);
    return CUDA_SUCCESS;
}

/* How long to sleep between two checks of the word that the context waits for. */
static uint64_t context_patience(const struct context *context)
{
    const struct place *first = &context->places[context->head % GPU_QUEUE];

    return first->word && first->own ? MEET_LOOK : HELD_LOOK;
}

/*
 * Sleep until `need` kernels may have completed. Called with the device's lock held; it is released
 * first. Returns an error if the context did not survive, or if a virtual clock would never reach
 * that point.
 */
static CUresult context_sleep(struct context *context, uint64_t need)
{
    struct device *device = context->device;
    uint64_t serial = context->serial;
    uint64_t when = schedule_predict(device->gpu, context->index, need, &device->scratch);
    bool passes;

    if (context->n_waits && !atomic_load(&device->gpu->shared.clock_mode)) {
        /* The word may be stored to at any time without notice. */
        uint64_t soon = schedule_current(device->gpu)->now + context_patience(context);

        if (when > soon)
            when = soon;
    }
    device_leave(device);
    context_settle(context);
    (void)driver_leave(CUDA_SUCCESS);
    passes = device_wait(device, when);
    driver_lock();
    if (!driver.initialised || !context_valid(context) || context->serial != serial)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return passes ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

/** context_wait() - wait until the context has completed `need` kernels since its creation */
CUresult context_wait(struct context *context, uint64_t need)
{
    for (;;) {
        CUresult r;

        if (!device_enter(context->device))
            return CUDA_ERROR_DEINITIALIZED;
        context_collect(context);
        if (context->head >= need) {
            device_leave(context->device);
            context_settle(context);
            return context->fault;
        }
        r = context_sleep(context, need);
        if (r)
            return r;
    }
}

/** context_drain() - wait until everything that this process has submitted to a device is done */
CUresult context_drain(int ordinal)
{
    uint64_t last = UINT64_MAX;

    for (;;) { /* newest first, by serial: the list may change while this thread sleeps */
        struct context *next = NULL;
        CUresult r;

        for (struct context *context = driver.contexts; context; context = context->next) {
            if (context->ordinal == ordinal && context->serial < last &&
                (!next || context->serial > next->serial))
                next = context;
        }
        if (!next)
            return CUDA_SUCCESS;
        last = next->serial;
        r = context_wait(next, context_tail(next));
        if (r && r != CUDA_ERROR_ILLEGAL_ADDRESS && r != CUDA_ERROR_CONTEXT_IS_DESTROYED)
            return r;
    }
}

/**
 * context_reserve() - wait until there is room in the queue; returns with the device's lock held
 *
 * The driver's lock may have been released in the meantime: objects that the caller has looked up
 * may be gone, except for the context.
 */
CUresult context_reserve(struct context *context)
{
    for (;;) {
        CUresult r;

        if (!device_enter(context->device))
            return CUDA_ERROR_DEINITIALIZED;
        context_collect(context);
        if (context_tail(context) - context->settled + context->n_effects < GPU_QUEUE)
            return CUDA_SUCCESS;
        if (context->settled < context->head) {
            device_leave(context->device);
            context_settle(context);
            continue;
        }
        r = context_sleep(context, context->head + 1);
        if (r)
            return r;
    }
}

/** context_append() - put a kernel into the reserved place, with the device's lock held */
void context_append(struct context *context, const struct command *command)
{
    struct gpu *gpu = context->device->gpu;
    struct gpu_context *shared = &gpu->contexts[context->index];
    uint64_t tail = shared->tail;
    struct place *place = &context->places[tail % GPU_QUEUE];

    place->stamp = command->stamp;
    place->word =
        command->kind == COMMAND_WAIT || command->kind == COMMAND_MEET ? command->word : NULL;
    place->own = command->kind == COMMAND_MEET ? command->own : NULL;
    place->behind = command->duration;
    place->value = command->value;
    place->first = NULL;
    place->last = &place->first;
    shared->queue[tail % GPU_QUEUE].duration =
        schedule_duration(&gpu->config, context->serial, tail, command->duration);
    if (place->word) {
        if (place->own)
            shared->queue[tail % GPU_QUEUE].duration = GPU_SPINS;
        else
            shared->queue[tail % GPU_QUEUE].duration |= GPU_HELD;
        context->n_waits++;
    }
    atomic_store(&shared->tail, tail + 1);
}

/** command_bytes() - bytes that a copy or a fill writes; SIZE_MAX if the number overflows */
size_t command_bytes(const struct command *command)
{
    size_t bytes;

    if (__builtin_mul_overflow(command->n, command->rows, &bytes) ||
        __builtin_mul_overflow(bytes, command->planes, &bytes))
        return SIZE_MAX;
    return bytes;
}

static size_t span(const struct command *command, size_t pitch, size_t plane)
{
    size_t rows, planes, sum;

    if (command_bytes(command) == 0)
        return 0;
    if (__builtin_mul_overflow(command->rows - 1, pitch, &rows) ||
        __builtin_mul_overflow(command->planes - 1, plane, &planes) ||
        __builtin_add_overflow(rows, planes, &sum) || __builtin_add_overflow(sum, command->n, &sum))
        return SIZE_MAX;
    return sum;
}

/** command_to_span() - bytes from the first to the last that a copy or a fill writes */
size_t command_to_span(const struct command *command)
{
    return span(command, command->to_pitch, command->to_plane);
}

/** command_from_span() - bytes from the first to the last that a copy reads */
size_t command_from_span(const struct command *command)
{
    return span(command, command->from_pitch, command->from_plane);
}

/** copy_bytes() - perform a copy; neither end is checked */
void copy_bytes(const struct command *command)
{
    for (size_t z = 0; z < command->planes; z++) {
        for (size_t y = 0; y < command->rows; y++)
            memmove((char *)command->to + z * command->to_plane + y * command->to_pitch,
                    (const char *)command->from + z * command->from_plane + y * command->from_pitch,
                    command->n);
    }
}

static void fill(const struct command *command)
{
    for (size_t y = 0; y < command->rows; y++) {
        void *row = (char *)command->to + y * command->to_pitch;

        if (command->width == 1)
            memset(row, (int)command->fill, command->n);
        for (size_t x = 0; command->width == 2 && x < command->n / 2; x++)
            ((uint16_t *)row)[x] = (uint16_t)command->fill;
        for (size_t x = 0; command->width == 4 && x < command->n / 4; x++)
            ((uint32_t *)row)[x] = command->fill;
    }
}

static void call_later(const struct command *command)
{
    struct host_call *call = calloc(1, sizeof(*call));

    if (!call)
        return;
    call->function = command->function;
    call->data = command->data;
    if (!driver.host_calls)
        driver.host_calls_last = &driver.host_calls;
    *driver.host_calls_last = call;
    driver.host_calls_last = &call->next;
}

/**
 * context_perform() - perform a command that takes no GPU time; it happened on the GPU at `time`
 *
 * If memory was freed under a pending command, the context becomes faulty, as on the hardware.
 */
void context_perform(struct context *context, const struct command *command, uint64_t time)
{
    const struct allocation *item;

    switch (command->kind) {
    case COMMAND_EVENT:
        if (pool_owns(&events_pool, command->event) && command->event->record == command->record) {
            command->event->completed = true;
            command->event->time = time;
        }
        break;
    case COMMAND_COPY:
        if ((command->device_to && !memory_find(command->to, command_to_span(command))) ||
            (command->device_from && !memory_find(command->from, command_from_span(command))))
            context->fault = CUDA_ERROR_ILLEGAL_ADDRESS;
        else
            copy_bytes(command);
        break;
    case COMMAND_SET:
        if (memory_find(command->to, command_to_span(command)))
            fill(command);
        else
            context->fault = CUDA_ERROR_ILLEGAL_ADDRESS;
        break;
    case COMMAND_FREE:
        item = memory_at((uintptr_t)command->to);
        if (item && item->number == command->record)
            (void)memory_release(item->base);
        break;
    case COMMAND_HOST:
        call_later(command);
        break;
    case COMMAND_KERNEL:
    case COMMAND_WAIT:
    case COMMAND_MEET:
        break;
    }
    free(command->staged);
}

/** context_settle() - carry out the effects of kernels that context_collect() found completed */
void context_settle(struct context *context)
{
    while (context->settled < context->head) {
        struct place *place = &context->places[context->settled % GPU_QUEUE];

        if (place->stamp && memory_find(place->stamp, sizeof(*place->stamp)))
            *place->stamp = place->completed;
        else if (place->stamp)
            context->fault = CUDA_ERROR_ILLEGAL_ADDRESS;
        context->settled++;
        while (place->first) {
            struct effect *effect = place->first;

            place->first = effect->next;
            context->n_effects--;
            context_perform(context, &effect->command, place->completed);
            free(effect);
        }
    }
}
