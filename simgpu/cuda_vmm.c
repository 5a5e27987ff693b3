/* Entry points: virtual memory management. */
#include "driver.h"

#define HANDLE(number) ((struct handle *)(uintptr_t)(number))

/* Memory is pinned, on a device or on the host. It is exported as a descriptor or not at all. */
static CUresult prop_check(const CUmemAllocationProp *prop)
{
    struct device *device;

    if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->requestedHandleTypes & ~(unsigned int)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    return location_host(&prop->location) ? CUDA_SUCCESS
                                          : location_device(&prop->location, &device);
}

ENTRY(cuMemGetAllocationGranularity, size_t *granularity, const CUmemAllocationProp *prop,
      unsigned int option)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    r = granularity && option <= 1 ? prop_check(prop) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        *granularity = vmm_granularity();
    return driver_leave(r);
}

ENTRY(cuMemCreate, CUmemGenericAllocationHandle *handlep, size_t size,
      const CUmemAllocationProp *prop, unsigned long long flags)
{
    struct handle *handle;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = handlep && !flags ? prop_check(prop) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        r = handle_new(&handle, size, prop);
    if (!r)
        *handlep = (uintptr_t)handle;
    return driver_leave(r);
}

ENTRY(cuMemRelease, CUmemGenericAllocationHandle handle)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!handle_valid(HANDLE(handle)))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    handle_release(HANDLE(handle));
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuMemRetainAllocationHandle, CUmemGenericAllocationHandle *handlep, void *address)
{
    struct handle *handle;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = handlep ? handle_retain(&handle, (uintptr_t)address) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        *handlep = (uintptr_t)handle;
    return driver_leave(r);
}

ENTRY(cuMemGetAllocationPropertiesFromHandle, CUmemAllocationProp *prop,
      CUmemGenericAllocationHandle handle)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!prop || !handle_valid(HANDLE(handle)))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    *prop = *handle_prop(HANDLE(handle));
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuMemExportToShareableHandle, void *shareable, CUmemGenericAllocationHandle handle,
      CUmemAllocationHandleType type, unsigned long long flags)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!shareable || flags || !handle_valid(HANDLE(handle)) ||
        type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    return driver_leave(handle_export(HANDLE(handle), shareable));
}

ENTRY(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle *handlep, void *shareable,
      CUmemAllocationHandleType type)
{
    struct handle *handle;
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!handlep || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    r = handle_import(&handle, (int)(intptr_t)shareable);
    if (!r)
        *handlep = (uintptr_t)handle;
    return driver_leave(r);
}

ENTRY(cuMemAddressReserve, CUdeviceptr *addressp, size_t size, size_t alignment, CUdeviceptr wanted,
      unsigned long long flags)
{
    uintptr_t base;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = addressp && !flags ? vmm_reserve(&base, size, alignment, wanted) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        *addressp = base;
    return driver_leave(r);
}

ENTRY(cuMemAddressFree, CUdeviceptr address, size_t size)
{
    CUresult r = driver_enter();

    return r ? r : driver_leave(vmm_unreserve(address, size));
}

ENTRY(cuMemMap, CUdeviceptr address, size_t size, size_t offset,
      CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    r = handle_valid(HANDLE(handle)) && !flags ? vmm_map(address, size, offset, HANDLE(handle))
                                               : CUDA_ERROR_INVALID_VALUE;
    return driver_leave(r);
}

ENTRY(cuMemUnmap, CUdeviceptr address, size_t size)
{
    CUresult r = driver_enter();

    return r ? r : driver_leave(vmm_unmap(address, size));
}

ENTRY(cuMemSetAccess, CUdeviceptr address, size_t size, const CUmemAccessDesc *wanted, size_t n)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!wanted || n == 0)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; !r && i < n; i++)
        r = vmm_access(address, size, &wanted[i]);
    return driver_leave(r);
}

ENTRY(cuMemGetAccess, unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address)
{
    const struct allocation *item;
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    item = memory_at(address);
    if (!flags || !location || !item || item->kind != ALLOCATION_MAPPED)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    r = location_device(location, &device);
    if (!r)
        *flags = item->access >> 2 * location->id & CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return driver_leave(r);
}
