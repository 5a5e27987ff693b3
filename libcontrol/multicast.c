/*
 * Keeps charging memory that is bound to a multicast object or to a logical endpoint.
 *
 * Neither takes any memory itself. Memory that is bound to either stays allocated until it is
 * unbound or the object ends. A multicast object ends like an allocation: with the last of its
 * references and mappings. A logical endpoint is destroyed by its number, and this process's
 * bindings end with it.
 */
#include "bindings.h"
#include "parking.h"

/* The key of an endpoint in the table of bindings. It cannot be the handle of a multicast object,
 * because the driver's handles are addresses. */
#define ENDPOINT(id) (0xe9ull << 56 | (id))

static void bindings_end(struct binding_range range)
{
    uint64_t handle;

    while ((handle = binding_take_any(range)))
        vmm_let_go(handle);
}

static uint64_t device_of(uint64_t handle)
{
    CUmemAllocationProp prop;
    int ordinal = driver->cuMemGetAllocationPropertiesFromHandle(&prop, handle) == CUDA_SUCCESS
                      ? account_ordinal(&prop.location)
                      : 0;

    return ordinal < 0 ? 0 : (uint64_t)ordinal;
}

/* Completes a call that binds memory. The allocation was kept before the driver's call, so that a
 * release in the meantime does not end its charge. */
static CUresult end_binding(uint64_t object, uint64_t offset, uint64_t device, uint64_t handle,
                            CUresult result)
{
    if (handle && !(result == CUDA_SUCCESS && binding_put(object, offset, device, handle)))
        vmm_let_go(handle);
    return result;
}

/* Returns the handle, or 0 if the allocation is not in the table. */
static uint64_t keep(uint64_t handle)
{
    return pages_slot() && vmm_keep(handle) ? handle : 0;
}

static uint64_t keep_mapped(void *address)
{
    CUmemGenericAllocationHandle handle = 0;
    uint64_t kept;

    if (!pages_slot() || real->cuMemRetainAllocationHandle(&handle, address) != CUDA_SUCCESS)
        return 0;
    kept = keep(handle);
    real->cuMemRelease(handle);
    return kept;
}

/* ---- multicast objects ---- */

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
    uint64_t kept = keep(memHandle);

    return end_binding(
        mcHandle, mcOffset, kept ? device_of(kept) : 0, kept,
        real->cuMulticastBindMem(mcHandle, mcOffset, memHandle, memOffset, size, flags));
}

CONTROL_EXPORT CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev,
                                              size_t mcOffset,
                                              CUmemGenericAllocationHandle memHandle,
                                              size_t memOffset, size_t size,
                                              unsigned long long flags)
{
    uint64_t kept = keep(memHandle);

    return end_binding(
        mcHandle, mcOffset, (uint32_t)dev, kept,
        real->cuMulticastBindMem_v2(mcHandle, dev, mcOffset, memHandle, memOffset, size, flags));
}

CONTROL_EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
                                            CUdeviceptr memptr, size_t size,
                                            unsigned long long flags)
{
    uint64_t kept = keep_mapped((void *)(uintptr_t)memptr);
    CUresult result;

    parking_begin();
    result = real->cuMulticastBindAddr(mcHandle, mcOffset, memptr, size, flags);
    if (parking_applies() && result == CUDA_SUCCESS)
        parking_fix(memptr); /* bound memory stays where it is */
    parking_end();
    return end_binding(mcHandle, mcOffset, kept ? device_of(kept) : 0, kept, result);
}

CONTROL_EXPORT CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev,
                                               size_t mcOffset, CUdeviceptr memptr, size_t size,
                                               unsigned long long flags)
{
    uint64_t kept = keep_mapped((void *)(uintptr_t)memptr);
    CUresult result;

    parking_begin();
    result = real->cuMulticastBindAddr_v2(mcHandle, dev, mcOffset, memptr, size, flags);
    if (parking_applies() && result == CUDA_SUCCESS)
        parking_fix(memptr); /* bound memory stays where it is */
    parking_end();
    return end_binding(mcHandle, mcOffset, (uint32_t)dev, kept, result);
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

/* ---- logical endpoints ---- */

CONTROL_EXPORT CUresult cuLogicalEndpointBindMem(CUlogicalEndpointId leId, CUdevice dev,
                                                 cuuint64_t offset,
                                                 CUmemGenericAllocationHandle memHandle,
                                                 cuuint64_t memOffset, cuuint64_t size,
                                                 unsigned long long flags)
{
    uint64_t kept = keep(memHandle);

    return end_binding(
        ENDPOINT(leId), offset, (uint32_t)dev, kept,
        real->cuLogicalEndpointBindMem(leId, dev, offset, memHandle, memOffset, size, flags));
}

CONTROL_EXPORT CUresult cuLogicalEndpointBindAddr(CUlogicalEndpointId leId, CUdevice dev,
                                                  cuuint64_t offset, void *ptr, cuuint64_t size,
                                                  unsigned long long flags)
{
    uint64_t kept = keep_mapped(ptr);
    CUresult result;

    parking_begin();
    result = real->cuLogicalEndpointBindAddr(leId, dev, offset, ptr, size, flags);
    if (parking_applies() && result == CUDA_SUCCESS)
        parking_fix((uintptr_t)ptr); /* bound memory stays where it is */
    parking_end();
    return end_binding(ENDPOINT(leId), offset, (uint32_t)dev, kept, result);
}

/* One call may unbind what several calls have bound. */
CONTROL_EXPORT CUresult cuLogicalEndpointUnbind(CUlogicalEndpointId leId, CUdevice dev,
                                                cuuint64_t offset, cuuint64_t size)
{
    CUresult result = real->cuLogicalEndpointUnbind(leId, dev, offset, size);

    if (result == CUDA_SUCCESS && pages_slot())
        bindings_end((struct binding_range){
            .object = ENDPOINT(leId), .count = (uint32_t)dev + 1, .from = offset, .size = size});
    return result;
}

CONTROL_EXPORT CUresult cuLogicalEndpointDestroy(CUlogicalEndpointId leId)
{
    CUresult result = real->cuLogicalEndpointDestroy(leId);

    if (result == CUDA_SUCCESS && pages_slot())
        bindings_end((struct binding_range){.object = ENDPOINT(leId)});
    return result;
}
