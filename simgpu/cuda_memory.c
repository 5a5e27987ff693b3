/* Entry points: memory in a context, and information about pointers. */
#include "driver.h"

static CUresult allocate(CUdeviceptr *addressp, enum allocation_kind kind, size_t bytes)
{
    struct context *context;
    uintptr_t address;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    r = addressp ? capture_check_unsafe() : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        r = memory_allocate(context, kind, bytes, &address);
    if (!r)
        *addressp = address;
    return driver_leave(r);
}

ENTRY(cuMemAlloc_v2, CUdeviceptr *addressp, size_t bytes)
{
    return allocate(addressp, ALLOCATION_DEVICE, bytes);
}

ENTRY(cuMemAllocPitch_v2, CUdeviceptr *addressp, size_t *pitchp, size_t width, size_t height,
      unsigned int element)
{
    size_t pitch = (width + 511) / 512 * 512;
    CUresult r;

    if (!addressp || !pitchp || !width || !height ||
        (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    if (pitch < width || height > SIZE_MAX / pitch)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r = allocate(addressp, ALLOCATION_DEVICE, pitch * height);
    if (!r)
        *pitchp = pitch;
    return r;
}

/* Managed memory does not migrate here: it stays on the host and takes no device memory. */
ENTRY(cuMemAllocManaged, CUdeviceptr *addressp, size_t bytes, unsigned int flags)
{
    if (flags != 1 && flags != 2)
        return CUDA_ERROR_INVALID_VALUE;
    return allocate(addressp, ALLOCATION_MANAGED, bytes);
}

ENTRY(cuMemFree_v2, CUdeviceptr address)
{
    struct allocation *item;
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    if (!address)
        return driver_leave(CUDA_SUCCESS);
    r = capture_check_unsafe();
    if (r)
        return driver_leave(r);
    if (graphmem_freed(address))
        return driver_leave(CUDA_SUCCESS);
    item = memory_freeable(address);
    if (!item)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    /* As in NVIDIA's driver, work that may still use the memory is completed first. */
    r = context_wait(item->context, context_tail(item->context));
    if (!r)
        r = memory_release(address);
    return driver_leave(r);
}

ENTRY(cuMemHostAlloc, void **addressp, size_t bytes, unsigned int flags)
{
    CUdeviceptr address;
    CUresult r;

    if (!addressp || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    r = allocate(&address, ALLOCATION_HOST, bytes);
    if (!r)
        *addressp = (void *)(uintptr_t)address;
    return r;
}

ENTRY(cuMemFreeHost, void *address)
{
    const struct allocation *item;
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    item = memory_at((uintptr_t)address);
    r = item && item->base == (uintptr_t)address && item->kind == ALLOCATION_HOST && !item->returned
            ? capture_check_unsafe()
            : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        r = context_wait(item->context, context_tail(item->context));
    if (!r)
        r = memory_release((uintptr_t)address);
    return driver_leave(r);
}

ENTRY(cuMemHostRegister_v2, void *address, size_t bytes, unsigned int flags)
{
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    if (!address || flags > 15)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    return driver_leave(memory_register(context, (uintptr_t)address, bytes));
}

ENTRY(cuMemHostUnregister, void *address)
{
    struct context *context;
    CUresult r = driver_enter_context(&context);

    return r ? r : driver_leave(memory_unregister((uintptr_t)address));
}

ENTRY(cuMemGetInfo_v2, size_t *freep, size_t *totalp)
{
    struct context *context;
    struct device *device;
    uint64_t used;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    if (!freep || !totalp)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    device = context->device;
    if (!device_enter(device))
        return driver_leave(CUDA_ERROR_DEINITIALIZED);
    device_reap(device); /* memory of dead processes is free */
    used = device_used(device);
    device_leave(device);
    *totalp = device->gpu->config.memory;
    *freep = used < *totalp ? *totalp - used : 0;
    return driver_leave(CUDA_SUCCESS);
}

static const struct allocation *find_pointer(CUdeviceptr address)
{
    const struct allocation *item = memory_at(address);

    return item && item->kind != ALLOCATION_HIDDEN ? item : NULL;
}

ENTRY(cuMemGetAddressRange_v2, CUdeviceptr *basep, size_t *bytesp, CUdeviceptr address)
{
    const struct allocation *item;
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    item = find_pointer(address);
    if (!item)
        return driver_leave(CUDA_ERROR_NOT_FOUND);
    if (basep)
        *basep = item->base;
    if (bytesp)
        *bytesp = item->bytes;
    return driver_leave(CUDA_SUCCESS);
}

/* Returns the types of handle that a mapped allocation can be exported as; 0 for other memory. */
static uint64_t handle_types(uintptr_t address)
{
    struct handle *handle;
    uint64_t types;

    if (handle_retain(&handle, address) != CUDA_SUCCESS)
        return 0;
    types = (uint64_t)handle_prop(handle)->requestedHandleTypes;
    handle_release(handle);
    return types;
}

/* For memory that belongs to no context, such as that of pools and mappings, the context is
 * NULL. */
static CUresult attribute_get(void *value, CUpointer_attribute attribute, CUdeviceptr address,
                              const struct allocation *item)
{
    bool host = item->kind == ALLOCATION_HOST;
    bool placed = item->kind == ALLOCATION_POOL || item->kind == ALLOCATION_MAPPED;

    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)value = placed ? NULL : item->context;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned int *)value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)value = address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (!host && item->kind != ALLOCATION_MANAGED)
            return CUDA_ERROR_INVALID_VALUE;
        *(CUdeviceptr *)value = address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)value = item->number;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(bool *)value = item->kind == ALLOCATION_MANAGED;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = item->ordinal;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned int *)value = item->kind == ALLOCATION_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(uint64_t *)value = item->kind == ALLOCATION_MAPPED ? handle_types(address) : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)value = item->base;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)value = item->bytes;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(bool *)value = true;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: /* can only be set */
        break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)value = item->mempool;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/*
 * Accepted without effect: a copy of 1 MiB or more within device memory may still end after its
 * call has returned.
 */
ENTRY(cuPointerSetAttribute, const void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
    const struct allocation *item;
    CUresult r = driver_enter();

    if (r)
        return r;
    item = find_pointer(address);
    if (!value || !item || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    return driver_leave(item->kind == ALLOCATION_DEVICE ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED);
}

ENTRY(cuPointerGetAttribute, void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
    const struct allocation *item;
    CUresult r = driver_enter();

    if (r)
        return r;
    item = find_pointer(address);
    r = value && item ? attribute_get(value, attribute, address, item) : CUDA_ERROR_INVALID_VALUE;
    return driver_leave(r);
}
