/* Entry points: initialisation, version and devices. */
#include "driver.h"
#include "mps.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

ENTRY(cuInit, unsigned int flags)
{
    CUresult r;

    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    driver_lock();
    r = driver_init();
    driver_unlock();
    return r;
}

ENTRY(cuDriverGetVersion, int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

ENTRY(cuDeviceGetCount, int *count)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!count)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    *count = driver.n_devices;
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuDeviceGet, CUdevice *device, int ordinal)
{
    struct device *found;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = device ? driver_device(ordinal, &found) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        *device = ordinal;
    return driver_leave(r);
}

/* The constant part of a device is read without its lock. */
static CUresult config_of(CUdevice ordinal, const void *result, const struct gpu_config **configp)
{
    struct device *device;
    CUresult r;

    *configp = NULL;
    r = driver_enter();
    if (r)
        return r;
    r = result ? driver_device(ordinal, &device) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        *configp = &device->gpu->config;
    return driver_leave(r);
}

ENTRY(cuDeviceGetName, char *name, int length, CUdevice device)
{
    const struct gpu_config *config;
    CUresult r = config_of(device, length > 0 ? name : NULL, &config);

    if (!r)
        snprintf(name, (size_t)length, "%.*s", (int)sizeof(config->name) - 1, config->name);
    return r;
}

ENTRY(cuDeviceGetUuid_v2, CUuuid *uuid, CUdevice device)
{
    const struct gpu_config *config;
    CUresult r = config_of(device, uuid, &config);

    if (!r)
        memcpy(uuid->bytes, config->uuid, sizeof(uuid->bytes));
    return r;
}

ENTRY(cuDeviceGetUuid, CUuuid *uuid, CUdevice device)
{
    return cuDeviceGetUuid_v2(uuid, device);
}

ENTRY(cuDeviceTotalMem_v2, size_t *bytes, CUdevice device)
{
    const struct gpu_config *config;
    CUresult r = config_of(device, bytes, &config);

    if (!r)
        *bytes = config->memory;
    return r;
}

ENTRY(cuDeviceGetPCIBusId, char *text, int length, CUdevice device)
{
    const struct gpu_config *config;
    CUresult r = config_of(device, length > 0 ? text : NULL, &config);

    if (!r)
        snprintf(text, (size_t)length, "0000:%02X:00.0", config->pci_bus);
    return r;
}

ENTRY(cuDeviceGetAttribute, int *value, CUdevice_attribute attribute, CUdevice device)
{
    /* The values of an H200; the simulated GPU lacks the features that are not listed here. */
    static const int values[CU_DEVICE_ATTRIBUTE_MAX] = {
        [CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024,
        [CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X] = 1024,
        [CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y] = 1024,
        [CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z] = 64,
        [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X] = 2147483647,
        [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y] = 65535,
        [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z] = 65535,
        [CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK] = 49152,
        [CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY] = 65536,
        [CU_DEVICE_ATTRIBUTE_WARP_SIZE] = 32,
        [CU_DEVICE_ATTRIBUTE_MAX_PITCH] = 2147483647,
        [CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK] = 65536,
        [CU_DEVICE_ATTRIBUTE_CLOCK_RATE] = 1980000,
        [CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT] = 512,
        [CU_DEVICE_ATTRIBUTE_GPU_OVERLAP] = 1,
        [CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT] = 132,
        [CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY] = 1,
        [CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE] = 3201000,
        [CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH] = 6144,
        [CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE] = 62914560,
        [CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR] = 2048,
        [CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT] = 3,
        [CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING] = 1,
        [CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = 9,
        [CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR] = 233472,
        [CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR] = 65536,
        [CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY] = 1,
        [CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED] = 1,
        [CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH] = 1,
        [CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] = 1,
        [CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED] = 1,
        [CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR] = 32,
        [CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED] = 1,
    };
    const struct gpu_config *config;
    CUresult r = config_of(device, value, &config);

    if (r)
        return r;
    if (attribute < 1 || attribute >= CU_DEVICE_ATTRIBUTE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    *value = attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? (int)config->pci_bus : values[attribute];
    if (attribute == CU_DEVICE_ATTRIBUTE_MPS_ENABLED) { /* MPS changes only this answer */
        const char *wanted = getenv("SIMGPU_MPS");

        *value = wanted ? strcmp(wanted, "1") == 0 : mps_client();
    }
    return CUDA_SUCCESS;
}
