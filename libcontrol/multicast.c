/*
 * Memory that is bound to a multicast object.
 *
 * The object itself takes none. What is bound to it stays allocated until it is unbound or the
 * object ends. An object ends like an allocation: with the last of its references and mappings.
 */
#include "control.h"

static uint64_t binding_key(uint64_t object, uint64_t offset, uint64_t device)
{
    return object ^ (offset << 13 | offset >> 51) ^ (device + 1) << 56;
}

/* Removes a binding to the object, which is the entry's `size`. Returns the allocation, or 0 if
 * none of ours is bound there. */
static uint64_t binding_take(uint64_t object, uint64_t offset, uint64_t device)
{
    uint64_t key = binding_key(object, offset, device);
    struct block *block = blocks_lock(BLOCK_BINDING, key);
    uint64_t handle = block && block->size == object ? block->value : 0;

    if (handle)
        blocks_remove(block);
    blocks_unlock(BLOCK_BINDING, key);
    return handle;
}

static void binding_put(uint64_t object, uint64_t offset, uint64_t device, uint64_t handle)
{
    struct block entry = {.key = binding_key(object, offset, device),
                          .size = object,
                          .value = handle,
                          .kind = BLOCK_BINDING,
                          .device = -1,
                          .owner = OWNER_NONE};
    bool known = blocks_lock(BLOCK_BINDING, entry.key);
    bool added = !known && blocks_add(&entry);

    blocks_unlock(BLOCK_BINDING, entry.key);
    if (!added)
        vmm_let_go(handle);
}

static bool binding_visit(const struct block *block, void *data)
{
    struct block *found = data;

    if (block->kind != BLOCK_BINDING || block->size != found->size || found->key)
        return false;
    *found = *block;
    return true;
}

void multicast_ends(uint64_t object)
{
    for (;;) {
        struct block found = {.size = object};

        blocks_sweep(binding_visit, &found);
        if (!found.key)
            return;
        vmm_let_go(found.value);
    }
}

static uint64_t device_of(uint64_t handle)
{
    CUmemAllocationProp prop;

    return driver->cuMemGetAllocationPropertiesFromHandle(&prop, handle) == CUDA_SUCCESS
               ? (uint64_t)(uint32_t)prop.location.id
               : 0;
}

/* The allocation was kept before the driver's call, so that a release meanwhile does not end its
 * charge. */
static CUresult bound(uint64_t object, uint64_t offset, uint64_t handle, bool kept, CUresult result)
{
    if (kept && result == CUDA_SUCCESS)
        binding_put(object, offset, device_of(handle), handle);
    else if (kept)
        vmm_let_go(handle);
    return result;
}

CONTROL_EXPORT CUresult cuMulticastCreate(CUmemGenericAllocationHandle *mcHandle, const void *prop)
{
    CUresult result = real->cuMulticastCreate(mcHandle, prop);

    if (result == CUDA_SUCCESS && pages_slot())
        vmm_note_object(*mcHandle);
    return result;
}

CONTROL_EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
                                           CUmemGenericAllocationHandle memHandle, size_t memOffset,
                                           size_t size, unsigned long long flags)
{
    bool kept = pages_slot() && vmm_keep(memHandle);

    return bound(mcHandle, mcOffset, memHandle, kept,
                 real->cuMulticastBindMem(mcHandle, mcOffset, memHandle, memOffset, size, flags));
}

CONTROL_EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
                                            CUdeviceptr memptr, size_t size,
                                            unsigned long long flags)
{
    CUmemGenericAllocationHandle handle = 0;
    bool kept = false;
    CUresult result;

    if (pages_slot() &&
        real->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)memptr) == CUDA_SUCCESS) {
        kept = vmm_keep(handle);
        real->cuMemRelease(handle);
    }
    result = real->cuMulticastBindAddr(mcHandle, mcOffset, memptr, size, flags);
    return bound(mcHandle, mcOffset, handle, kept, result);
}

CONTROL_EXPORT CUresult cuMulticastUnbind(CUmemGenericAllocationHandle mcHandle, CUdevice dev,
                                          size_t mcOffset, size_t size)
{
    CUresult result = real->cuMulticastUnbind(mcHandle, dev, mcOffset, size);
    uint64_t handle = 0;

    if (result == CUDA_SUCCESS && pages_slot())
        handle = binding_take(mcHandle, mcOffset, (uint64_t)(uint32_t)dev);
    if (handle)
        vmm_let_go(handle);
    return result;
}
