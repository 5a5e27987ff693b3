/* What an application may see of the GPU's memory: the quota is its size. */
#include "control.h"

/* The quota is the GPU's size, unless the GPU is smaller. */
CONTROL_EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
    CUresult result = real->cuDeviceTotalMem_v2(bytes, dev);
    int device = pages_index_of(dev);

    if (result == CUDA_SUCCESS && device >= 0) {
        uint64_t limit = atomic_load_relaxed(&pages_grant_device((unsigned)device)->memory_limit);

        if (limit < *bytes)
            *bytes = limit;
    }
    return result;
}

CONTROL_EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUresult result = real->cuMemGetInfo_v2(free_bytes, total);
    int device;

    if (result != CUDA_SUCCESS)
        return result;
    device = pages_index_current();
    if (device >= 0) {
        const struct grant_device *grant = pages_grant_device((unsigned)device);
        uint64_t limit = atomic_load_relaxed(&grant->memory_limit);
        uint64_t used = account_used(device);
        uint64_t left;

        if (__builtin_add_overflow(used, atomic_load_relaxed(&grant->memory_overhead), &used))
            used = UINT64_MAX;
        left = used < limit ? limit - used : 0;
        if (limit < *total)
            *total = limit;
        if (left < *free_bytes)
            *free_bytes = left;
    }
    return result;
}
