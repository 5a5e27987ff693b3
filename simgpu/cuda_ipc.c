/*
 * Entry points: memory of another process
 *
 * A handle identifies a block of memory in the process that exported it. Opening it allocates
 * private memory of the same size, which takes no device memory. The contents are therefore not
 * shared.
 */
#include "driver.h"

#include <string.h>

#define HANDLE_MAGIC 0x4350495f55504753ull /* "SGPU_IPC" in memory */

/* The contents of a handle. */
struct name {
    uint64_t magic;
    uint8_t uuid[16];
    uint64_t key; /* of the exporting process */
    uint32_t slot;
    uint32_t generation;
    uint64_t number; /* of the allocation in that process */
    uint64_t base;
    uint64_t bytes;
};

_Static_assert(sizeof(struct name) == sizeof(CUipcMemHandle), "it fills the handle");

ENTRY(cuIpcGetMemHandle, CUipcMemHandle *handlep, CUdeviceptr address)
{
    const struct allocation *item;
    const struct device *device;
    struct context *context;
    struct name name;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    item = memory_at(address);
    if (!handlep || !item || item->kind != ALLOCATION_DEVICE || item->base != address)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    device = driver.devices[item->ordinal];
    name = (struct name){.magic = HANDLE_MAGIC,
                         .key = device->key,
                         .slot = device->slot,
                         .generation = device->generation,
                         .number = item->number,
                         .base = item->base,
                         .bytes = item->bytes};
    memcpy(name.uuid, device->gpu->config.uuid, sizeof(name.uuid));
    memcpy(handlep, &name, sizeof(name));
    return driver_leave(CUDA_SUCCESS);
}

static int named_device(const struct name *name)
{
    for (int i = 0; i < driver.n_devices; i++) {
        if (memcmp(driver.devices[i]->gpu->config.uuid, name->uuid, sizeof(name->uuid)) == 0)
            return i;
    }
    return -1;
}

/* Returns whether the process that exported the handle still exists. */
static bool named_process(struct device *device, const struct name *name)
{
    const struct gpu_slot *slot = &device->gpu->shared.slots[name->slot % GPU_SLOTS];
    bool alive;

    if (!device_enter(device))
        return false;
    device_reap(device);
    alive = slot->attached == name->generation && slot->key == name->key;
    device_leave(device);
    return alive;
}

static struct allocation *find_import(const struct name *name)
{
    for (struct allocation *item = memory_after(1); item; item = memory_after(item->base + 1)) {
        if (item->kind == ALLOCATION_IMPORTED && item->origin == name->number &&
            item->origin_generation == name->generation)
            return item;
    }
    return NULL;
}

ENTRY(cuIpcOpenMemHandle_v2, CUdeviceptr *addressp, CUipcMemHandle handle, unsigned int flags)
{
    struct allocation *item;
    struct context *context;
    struct name name;
    uintptr_t address;
    int ordinal;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    memcpy(&name, &handle, sizeof(name));
    if (!addressp || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (name.magic != HANDLE_MAGIC)
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    ordinal = named_device(&name);
    if (ordinal < 0)
        return driver_leave(CUDA_ERROR_MAP_FAILED);
    if (name.generation == driver.devices[ordinal]->generation)
        return driver_leave(CUDA_ERROR_INVALID_CONTEXT); /* exported by this same process */
    if (!named_process(driver.devices[ordinal], &name))
        return driver_leave(CUDA_ERROR_MAP_FAILED);
    item = find_import(&name);
    if (!item) {
        r = memory_allocate(context, ALLOCATION_IMPORTED, name.bytes, &address);
        if (r)
            return driver_leave(r);
        item = memory_at(address);
        item->ordinal = ordinal;
        item->origin = name.number;
        item->origin_generation = name.generation;
    }
    item->opened++;
    *addressp = item->base;
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuIpcOpenMemHandle, CUdeviceptr *addressp, CUipcMemHandle handle, unsigned int flags)
{
    return cuIpcOpenMemHandle_v2(addressp, handle, flags);
}

ENTRY(cuIpcCloseMemHandle, CUdeviceptr address)
{
    struct allocation *item;
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    item = memory_at(address);
    if (!item || item->kind != ALLOCATION_IMPORTED || item->base != address)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (--item->opened > 0)
        return driver_leave(CUDA_SUCCESS);
    item->origin = 0; /* find_import() no longer finds it */
    r = context_wait(item->context, context_tail(item->context));
    return driver_leave(r ? r : memory_release(address));
}
