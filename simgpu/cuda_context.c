/* Entry points: contexts, the thread's context stack, and each device's primary context. */
#include "driver.h"

static CUresult create(CUcontext *contextp, unsigned int flags, CUdevice device)
{
    struct context *context;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = contextp ? context_new(&context, device, flags) : CUDA_ERROR_INVALID_VALUE;
    if (!r && !current_push(context)) {
        context_free(context);
        r = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!r)
        *contextp = context;
    return driver_leave(r);
}

ENTRY(cuCtxCreate_v2, CUcontext *context, unsigned int flags, CUdevice device)
{
    return create(context, flags, device);
}

ENTRY(cuCtxCreate_v3, CUcontext *context, void *affinity, int n_affinity, unsigned int flags,
      CUdevice device)
{
    if (affinity || n_affinity)
        return CUDA_ERROR_NOT_SUPPORTED;
    return create(context, flags, device);
}

/* The parameters request execution affinity or a graphics queue; the simulated GPU has neither. */
ENTRY(cuCtxCreate_v4, CUcontext *context, void *parameters, unsigned int flags, CUdevice device)
{
    struct {
        void *affinity;
        int n_affinity;
        void *graphics;
    } *asked = parameters;

    if (asked && (asked->affinity || asked->n_affinity || asked->graphics))
        return CUDA_ERROR_NOT_SUPPORTED;
    return create(context, flags, device);
}

ENTRY(cuCtxDestroy_v2, CUcontext context)
{
    struct context *popped;
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!context_valid(context) || context->primary)
        return driver_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (current_context() == context)
        current_pop(&popped);
    context_free(context);
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuCtxGetCurrent, CUcontext *contextp)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!contextp)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    *contextp = current_context();
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuCtxSetCurrent, CUcontext context)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (context && !context_valid(context))
        return driver_leave(CUDA_ERROR_INVALID_CONTEXT);
    current_set(context);
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuCtxPushCurrent_v2, CUcontext context)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!context_valid(context) || !current_push(context))
        r = CUDA_ERROR_INVALID_CONTEXT;
    return driver_leave(r);
}

ENTRY(cuCtxPopCurrent_v2, CUcontext *contextp)
{
    struct context *context;
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!current_pop(&context))
        return driver_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (contextp)
        *contextp = context;
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuCtxGetDevice, CUdevice *device)
{
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    if (!device)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    *device = context->ordinal;
    return driver_leave(CUDA_SUCCESS);
}

/* Enter with a named context, or with the current one if none is named. */
static CUresult enter_named(CUcontext named, struct context **contextp)
{
    CUresult r;

    if (!named)
        return driver_enter_context(contextp);
    r = driver_enter();
    if (r)
        return r;
    if (!context_valid(named))
        return driver_leave(CUDA_ERROR_INVALID_CONTEXT);
    *contextp = named;
    return CUDA_SUCCESS;
}

ENTRY(cuCtxGetDevice_v2, CUdevice *device, CUcontext named)
{
    struct context *context;
    CUresult r = enter_named(named, &context);

    if (r)
        return r;
    if (!device)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    *device = context->ordinal;
    return driver_leave(CUDA_SUCCESS);
}

static CUresult synchronize(struct context *context)
{
    CUresult r = capture_check_unsafe();

    if (!r)
        r = context_wait(context, context_tail(context));
    if (!r)
        mempool_synchronized(context->device);
    return driver_leave(r);
}

ENTRY(cuCtxSynchronize, void)
{
    struct context *context;
    CUresult r = driver_enter_context(&context);

    return r ? r : synchronize(context);
}

ENTRY(cuCtxSynchronize_v2, CUcontext named)
{
    struct context *context;
    CUresult r = enter_named(named, &context);

    return r ? r : synchronize(context);
}

#define STACK_START 1024u /* bytes of each thread's stack that the context's memory includes */
#define MAX_STACK   (512u << 10)
#define THREADS     (132u * 2048u) /* multiprocessors, and threads per multiprocessor */

/* The stacks of all threads that the device can run grow together; they never shrink. */
static CUresult set_stack(struct context *context, size_t size)
{
    size_t grown = context->stacks;
    CUresult r;

    if (size > MAX_STACK)
        return CUDA_ERROR_INVALID_VALUE;
    if (size > STACK_START && (size - STACK_START) * THREADS > grown)
        grown = (size - STACK_START) * THREADS;
    r = memory_charge(context->device, grown - context->stacks);
    if (r)
        return r;
    context->limits[CU_LIMIT_STACK_SIZE] = size;
    context->stacks = grown;
    return CUDA_SUCCESS;
}

ENTRY(cuCtxSetLimit, CUlimit limit, size_t value)
{
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    if (limit >= CONTEXT_LIMITS)
        return driver_leave(CUDA_ERROR_UNSUPPORTED_LIMIT);
    if (limit == CU_LIMIT_STACK_SIZE)
        r = set_stack(context, value);
    else
        context->limits[limit] = value;
    return driver_leave(r);
}

ENTRY(cuCtxGetLimit, size_t *value, CUlimit limit)
{
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    if (!value)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (limit >= CONTEXT_LIMITS)
        return driver_leave(CUDA_ERROR_UNSUPPORTED_LIMIT);
    *value = context->limits[limit];
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuDevicePrimaryCtxRetain, CUcontext *contextp, CUdevice ordinal)
{
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = contextp ? driver_device(ordinal, &device) : CUDA_ERROR_INVALID_VALUE;
    if (!r && !driver.primaries[ordinal]) {
        r = context_new(&driver.primaries[ordinal], ordinal, 0);
        if (!r)
            driver.primaries[ordinal]->primary = true;
    }
    if (!r) {
        driver.primary_references[ordinal]++;
        *contextp = driver.primaries[ordinal];
    }
    return driver_leave(r);
}

static void primary_end(CUdevice ordinal)
{
    if (driver.primaries[ordinal])
        context_free(driver.primaries[ordinal]);
    driver.primaries[ordinal] = NULL;
    driver.primary_references[ordinal] = 0;
}

ENTRY(cuDevicePrimaryCtxRelease_v2, CUdevice ordinal)
{
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = driver_device(ordinal, &device);
    if (!r && driver.primary_references[ordinal] == 0)
        r = CUDA_ERROR_INVALID_CONTEXT;
    if (!r && --driver.primary_references[ordinal] == 0)
        primary_end(ordinal);
    return driver_leave(r);
}

ENTRY(cuDevicePrimaryCtxReset_v2, CUdevice ordinal)
{
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = driver_device(ordinal, &device);
    if (!r)
        primary_end(ordinal);
    return driver_leave(r);
}

ENTRY(cuDevicePrimaryCtxGetState, CUdevice ordinal, unsigned int *flags, int *active)
{
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = flags && active ? driver_device(ordinal, &device) : CUDA_ERROR_INVALID_VALUE;
    if (!r) {
        *flags = 0;
        *active = driver.primaries[ordinal] != NULL;
    }
    return driver_leave(r);
}
