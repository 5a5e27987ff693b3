/*
 * The substitute for libnvidia-ml in a container, which shows the container's quota as the whole
 * GPU, and the container's processes as the only ones.
 *
 * Functions that are not defined here are the driver's: a look-up by name falls through to it. A
 * function defined here first calls the driver, which checks arguments, versions and what the GPU
 * supports. It then replaces the answer for a GPU of the container. Answers for other GPUs are
 * passed through.
 *
 * Utilisation is relative to the cap: a container with a cap of 30 % that uses 30 % of the GPU
 * shows 100 %. The value is that of the governor's last sample, at most a quarter of a second old.
 */
#include "nvml_stand_in.h"
#include "os.h"

static uint64_t used_memory(const struct grant_device *grant, uint64_t total)
{
    uint64_t used = atomic_load_relaxed(&grant->memory_used);

    return used < total ? used : total;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct page_device own;
    nvmlReturn_t result;

    if (!real.nvmlDeviceGetMemoryInfo)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    result = real.nvmlDeviceGetMemoryInfo(device, memory);
    if (result != NVML_SUCCESS || !page_find(device, &own))
        return result;
    memory->total = atomic_load_relaxed(&own.grant->memory_limit);
    memory->used = used_memory(own.grant, memory->total);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    struct page_device own;
    nvmlReturn_t result;

    if (!real.nvmlDeviceGetMemoryInfo_v2)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    result = real.nvmlDeviceGetMemoryInfo_v2(device, memory);
    if (result != NVML_SUCCESS || !page_find(device, &own))
        return result;
    memory->total = atomic_load_relaxed(&own.grant->memory_limit);
    memory->reserved = 0; /* what the driver sets aside is not part of a quota */
    memory->used = used_memory(own.grant, memory->total);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

static unsigned int percent(uint64_t value)
{
    return value < 100 ? (unsigned int)value : 100;
}

/*
 * Memory utilisation is known only for the whole GPU. The container is shown what it would see if
 * its work moved as much memory per second of GPU time as the work of all containers does. A
 * container that is alone on the GPU sees the driver's own figure, and an idle one sees zero.
 */
static unsigned int memory_part(unsigned int memory, unsigned int gpu, unsigned int own)
{
    return gpu ? percent((uint64_t)memory * own / gpu) : 0;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device,
                                                       nvmlUtilization_t *utilization)
{
    struct page_device own;
    nvmlReturn_t result;
    unsigned int used;

    if (!real.nvmlDeviceGetUtilizationRates)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    result = real.nvmlDeviceGetUtilizationRates(device, utilization);
    if (result != NVML_SUCCESS || !page_find(device, &own) || !own.usage)
        return result;
    used = percent(atomic_load_relaxed(&own.grant->utilisation));
    utilization->memory = memory_part(utilization->memory, utilization->gpu, used);
    utilization->gpu = used;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetDynamicPstatesInfo(nvmlDevice_t device,
                                                         nvmlGpuDynamicPstatesInfo_t *info)
{
    struct page_device own;
    nvmlReturn_t result;
    unsigned int *gpu, *memory;
    unsigned int used;

    if (!real.nvmlDeviceGetDynamicPstatesInfo)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    result = real.nvmlDeviceGetDynamicPstatesInfo(device, info);
    if (result != NVML_SUCCESS || !page_find(device, &own) || !own.usage)
        return result;
    gpu = &info->utilization[NVML_GPU_UTILIZATION_DOMAIN_GPU].percentage;
    memory = &info->utilization[NVML_GPU_UTILIZATION_DOMAIN_FB].percentage;
    used = percent(atomic_load_relaxed(&own.grant->utilisation));
    *memory = memory_part(*memory, *gpu, used);
    *gpu = used;
    return NVML_SUCCESS;
}

/*
 * The driver keeps several seconds' worth of samples. This function returns only the governor's
 * last sample: a program that calls it as often as the governor samples misses none.
 */
NVML_EXPORT nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type,
                                              unsigned long long last, nvmlValueType_t *valueType,
                                              unsigned int *count, nvmlSample_t *samples)
{
    nvmlUtilization_t rates = {0};
    struct page_device own;
    unsigned int room = 0;
    nvmlReturn_t result;
    uint64_t time;

    if (!real.nvmlDeviceGetSamples)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if ((type != NVML_GPU_UTILIZATION_SAMPLES && type != NVML_MEMORY_UTILIZATION_SAMPLES) ||
        !valueType || !count || (samples && !*count) || !page_find(device, &own) || !own.usage)
        return real.nvmlDeviceGetSamples(device, type, last, valueType, count, samples);
    result = real.nvmlDeviceGetSamples(device, type, last, valueType, &room, NULL);
    if (result != NVML_SUCCESS && result != NVML_ERROR_NOT_FOUND &&
        result != NVML_ERROR_INSUFFICIENT_SIZE)
        return result;
    time = page_time();
    if (time <= last)
        return NVML_ERROR_NOT_FOUND;
    *valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    *count = 1;
    if (!samples)
        return NVML_SUCCESS;
    result = nvmlDeviceGetUtilizationRates(device, &rates);
    if (result != NVML_SUCCESS)
        return result;
    samples[0].timeStamp = time;
    samples[0].sampleValue.ullVal = 0;
    samples[0].sampleValue.uiVal = type == NVML_GPU_UTILIZATION_SAMPLES ? rates.gpu : rates.memory;
    return NVML_SUCCESS;
}
