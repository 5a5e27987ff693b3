/*
 * A libcuda with functions that return at once, for measuring the control library's own cost
 *
 * It is neither a driver nor a simulation: the handles of streams, events and contexts refer to
 * nothing, memory consists of addresses that must not be accessed, and every event is complete.
 * Functions that return no value to the caller share one body.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };

static uint64_t pinned[8192];
/* Handles are addresses in this array, because 1 and 2 denote special streams in the driver API. */
static char objects[4096];

EXPORT int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void *stream, void **parameters,
                          void **extra);

#define AT_ONCE(name)                                                                              \
    EXPORT int name(void);                                                                         \
    EXPORT int name(void)                                                                          \
    {                                                                                              \
        return SUCCESS;                                                                            \
    }

AT_ONCE(cuInit)
AT_ONCE(cuCtxSetCurrent)
AT_ONCE(cuCtxPushCurrent_v2)
AT_ONCE(cuCtxDestroy_v2)
AT_ONCE(cuCtxSynchronize)
AT_ONCE(cuDevicePrimaryCtxRelease_v2)
AT_ONCE(cuStreamDestroy_v2)
AT_ONCE(cuStreamSynchronize)
AT_ONCE(cuStreamWaitEvent)
AT_ONCE(cuStreamWaitValue32_v2)
AT_ONCE(cuStreamWriteValue32_v2)
AT_ONCE(cuEventDestroy_v2)
AT_ONCE(cuEventRecord)
AT_ONCE(cuEventQuery)
AT_ONCE(cuEventSynchronize)
AT_ONCE(cuMemFree_v2)
AT_ONCE(cuMemFreeAsync)
AT_ONCE(cuMemFreeHost)
AT_ONCE(cuLaunchKernelEx)
AT_ONCE(cuGraphLaunch)
AT_ONCE(cuThreadExchangeStreamCaptureMode)

/* Defines a function that writes `value` to its first argument, and ignores the others. */
#define GIVES(name, type, value, ...)                                                              \
    EXPORT int name(type *out, ##__VA_ARGS__);                                                     \
    EXPORT int name(type *out, ##__VA_ARGS__)                                                      \
    {                                                                                              \
        *out = (value);                                                                            \
        return SUCCESS;                                                                            \
    }

GIVES(cuDriverGetVersion, int, 13000)
GIVES(cuDeviceGetCount, int, 1)
GIVES(cuDeviceGet, int, 0, int ordinal __attribute__((unused)))
GIVES(cuCtxGetDevice, int, 0)
GIVES(cuCtxGetCurrent, void *, objects)
GIVES(cuCtxPopCurrent_v2, void *, objects)
GIVES(cuStreamGetCtx, void *, objects)
GIVES(cuCtxCreate_v2, void *, objects, unsigned flags __attribute__((unused)),
      int device __attribute__((unused)))
GIVES(cuDevicePrimaryCtxRetain, void *, objects, int device __attribute__((unused)))
GIVES(cuModuleLoadData, void *, objects + 64, const void *image __attribute__((unused)))
GIVES(cuModuleGetFunction, void *, objects + 128, void *module __attribute__((unused)),
      const char *name __attribute__((unused)))
GIVES(cuStreamCreate, void *, objects + 256, unsigned flags __attribute__((unused)))
GIVES(cuEventCreate, void *, objects + 512, unsigned flags __attribute__((unused)))
GIVES(cuDeviceTotalMem_v2, size_t, (size_t)1 << 40, int device __attribute__((unused)))

EXPORT int cuDeviceGetUuid(unsigned char *uuid, int device);
EXPORT int cuDeviceGetUuid(unsigned char *uuid, int device)
{
    (void)device;
    memcpy(uuid, "tidegate stub 0.", 16);
    return SUCCESS;
}

EXPORT int cuStreamIsCapturing(void *stream, int *status);
EXPORT int cuStreamIsCapturing(void *stream, int *status)
{
    (void)stream;
    *status = 0;
    return SUCCESS;
}

EXPORT int cuEventElapsedTime(float *ms, void *begin, void *end);
EXPORT int cuEventElapsedTime(float *ms, void *begin, void *end)
{
    (void)begin;
    (void)end;
    *ms = 0;
    return SUCCESS;
}

EXPORT int cuMemGetInfo_v2(size_t *free, size_t *total);
EXPORT int cuMemGetInfo_v2(size_t *free, size_t *total)
{
    *free = *total = (size_t)1 << 40;
    return SUCCESS;
}

EXPORT int cuMemHostAlloc(void **pointer, size_t size, unsigned flags);
EXPORT int cuMemHostAlloc(void **pointer, size_t size, unsigned flags)
{
    static size_t used;
    size_t at = __atomic_fetch_add(&used, (size + 63) & ~(size_t)63, __ATOMIC_RELAXED);

    (void)flags;
    if (size > sizeof pinned || at > sizeof pinned - size)
        return OUT_OF_MEMORY;
    *pointer = (char *)pinned + at;
    return SUCCESS;
}

/* Addresses are never reused, so a table of live blocks ages as in a long-lived program. */
static int allocate(unsigned long long *pointer, size_t size)
{
    static unsigned long long next = 1ull << 40;

    *pointer = __atomic_fetch_add(&next, (size + 511) & ~511ull, __ATOMIC_RELAXED);
    return SUCCESS;
}

EXPORT int cuMemAlloc_v2(unsigned long long *pointer, size_t size);
EXPORT int cuMemAlloc_v2(unsigned long long *pointer, size_t size)
{
    return allocate(pointer, size);
}

EXPORT int cuMemAllocAsync(unsigned long long *pointer, size_t size, void *stream);
EXPORT int cuMemAllocAsync(unsigned long long *pointer, size_t size, void *stream)
{
    (void)stream;
    return allocate(pointer, size);
}

EXPORT int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void *stream, void **parameters,
                          void **extra)
{
    (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz;
    (void)shared, (void)stream, (void)parameters, (void)extra;
    return SUCCESS;
}

/* Finds only two names: one that the control library replaces, and one that it does not. */
EXPORT int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags,
                               int *status);
EXPORT int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags,
                               int *status)
{
    (void)version;
    (void)flags;
    *found = NULL;
    if (!strcmp(name, "cuLaunchKernel"))
        *found = (void *)cuLaunchKernel;
    else if (!strcmp(name, "cuEventQuery"))
        *found = (void *)cuEventQuery;
    if (status)
        *status = *found ? 0 : 1;
    return *found ? SUCCESS : NOT_FOUND;
}
