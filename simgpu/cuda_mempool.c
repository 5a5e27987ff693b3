/* Entry points: memory pools and stream-ordered allocation. */
#include "driver.h"

static CUresult get_pool(struct mempool **poolp, CUdevice ordinal,
                         CUresult (*which)(int ordinal, struct mempool **poolp))
{
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = poolp ? driver_device(ordinal, &device) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        r = which(ordinal, poolp);
    return driver_leave(r);
}

ENTRY(cuDeviceGetDefaultMemPool, CUmemoryPool *poolp, CUdevice device)
{
    return get_pool(poolp, device, mempool_standard);
}

ENTRY(cuDeviceGetMemPool, CUmemoryPool *poolp, CUdevice device)
{
    return get_pool(poolp, device, mempool_chosen);
}

ENTRY(cuDeviceSetMemPool, CUdevice ordinal, CUmemoryPool pool)
{
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = mempool_valid(pool) ? driver_device(ordinal, &device) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        r = mempool_choose(ordinal, pool);
    return driver_leave(r);
}

/* Only a device's pools of pinned memory can be requested by location. */
static CUresult located(const CUmemLocation *location, CUmemAllocationType type)
{
    if (!location)
        return CUDA_ERROR_INVALID_VALUE;
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

ENTRY(cuMemGetDefaultMemPool, CUmemoryPool *poolp, CUmemLocation *location,
      CUmemAllocationType type)
{
    CUresult r = located(location, type);

    return r ? r : cuDeviceGetDefaultMemPool(poolp, location->id);
}

ENTRY(cuMemGetMemPool, CUmemoryPool *poolp, CUmemLocation *location, CUmemAllocationType type)
{
    CUresult r = located(location, type);

    return r ? r : cuDeviceGetMemPool(poolp, location->id);
}

ENTRY(cuMemSetMemPool, CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    CUresult r = located(location, type);

    return r ? r : cuDeviceSetMemPool(location->id, pool);
}

ENTRY(cuMemPoolCreate, CUmemoryPool *poolp, const CUmemPoolProps *props)
{
    bool host;
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!poolp || !props || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (props->handleTypes & ~(unsigned int)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return driver_leave(CUDA_ERROR_NOT_SUPPORTED);
    host = location_host(&props->location);
    r = host ? CUDA_SUCCESS : location_device(&props->location, &device);
    if (!r)
        r = mempool_new(poolp, host ? 0 : props->location.id, host, props->maxSize);
    return driver_leave(r);
}

ENTRY(cuMemPoolDestroy, CUmemoryPool pool)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    return driver_leave(mempool_valid(pool) ? mempool_destroy(pool) : CUDA_ERROR_INVALID_VALUE);
}

ENTRY(cuMemPoolGetAttribute, CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    r = mempool_valid(pool) && value ? mempool_get(pool, attribute, value)
                                     : CUDA_ERROR_INVALID_VALUE;
    return driver_leave(r);
}

ENTRY(cuMemPoolSetAttribute, CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    r = mempool_valid(pool) && value ? mempool_set(pool, attribute, value)
                                     : CUDA_ERROR_INVALID_VALUE;
    return driver_leave(r);
}

ENTRY(cuMemPoolTrimTo, CUmemoryPool pool, size_t keep)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!mempool_valid(pool))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    mempool_trim(pool, keep);
    return driver_leave(CUDA_SUCCESS);
}

/* The memory exists at once: work that uses it in stream order cannot tell the difference. */
static CUresult allocate(CUdeviceptr *addressp, size_t bytes, CUmemoryPool pool, bool named,
                         CUstream handle)
{
    struct stream *stream;
    uintptr_t address;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (!addressp || (named && !mempool_valid(pool)))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (stream->capture) { /* allocations cannot be captured here */
        capture_invalidate(stream->capture);
        return driver_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    if (!named)
        r = mempool_chosen(stream->context->ordinal, &pool);
    if (!r)
        r = mempool_allocate(pool, stream, bytes, &address);
    if (!r)
        *addressp = address;
    return driver_leave(r);
}

ENTRY(cuMemAllocAsync, CUdeviceptr *addressp, size_t bytes, CUstream stream)
{
    return allocate(addressp, bytes, NULL, false, stream);
}

ENTRY(cuMemAllocAsync_ptsz, CUdeviceptr *addressp, size_t bytes, CUstream stream)
{
    return allocate(addressp, bytes, NULL, false, PER_THREAD(stream));
}

ENTRY(cuMemAllocFromPoolAsync, CUdeviceptr *addressp, size_t bytes, CUmemoryPool pool,
      CUstream stream)
{
    return allocate(addressp, bytes, pool, true, stream);
}

ENTRY(cuMemAllocFromPoolAsync_ptsz, CUdeviceptr *addressp, size_t bytes, CUmemoryPool pool,
      CUstream stream)
{
    return allocate(addressp, bytes, pool, true, PER_THREAD(stream));
}

static CUresult free_async(CUdeviceptr address, CUstream handle)
{
    struct command command = {.kind = COMMAND_FREE, .to = (void *)(uintptr_t)address};
    struct context *owner;
    struct allocation *item;
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (!stream->capture && graphmem_freed(address))
        return driver_leave(CUDA_SUCCESS);
    item = memory_freeable(address);
    if (!item)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (stream->capture) {
        capture_invalidate(stream->capture);
        return driver_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    command.record = item->number;
    owner = item->context;
    if (item->mempool) { /* a context that ends takes its pending frees with it */
        item->context = stream->context;
        item->freed_in = stream;
    }
    r = stream_submit(stream, &command);
    if (r) {
        item = memory_at(address);
        if (item && item->number == command.record && context_valid(owner)) {
            item->context = owner;
            item->freed_in = NULL;
        }
    }
    return driver_leave(r);
}

ENTRY(cuMemFreeAsync, CUdeviceptr address, CUstream stream)
{
    return free_async(address, stream);
}

ENTRY(cuMemFreeAsync_ptsz, CUdeviceptr address, CUstream stream)
{
    return free_async(address, PER_THREAD(stream));
}
