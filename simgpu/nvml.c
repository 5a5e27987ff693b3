/*
 * The simulated GPU's NVML: the library, and each device's name and memory
 *
 * The library is an observer: it attaches to the device files like a CUDA process, in separate
 * slots, and only reads.
 */
#include "nvml_observer.h"

#include <string.h>

#include "cuda_abi.h"

static struct {
    pthread_mutex_t lock;
    unsigned int references;
    unsigned int n_devices;
    struct device *devices[DEVICES];
} nvml = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void after_fork(void)
{
    pthread_mutex_init(&nvml.lock, NULL);
    for (unsigned int i = 0; i < nvml.n_devices; i++)
        device_abandon(nvml.devices[i]);
    nvml.n_devices = 0;
    nvml.references = 0;
}

/* Attachments outlive nvmlShutdown: closing a device would end those of libcuda as well. */
static void attach(void)
{
    static bool fork_handled;

    if (!fork_handled && pthread_atfork(NULL, NULL, after_fork) == 0)
        fork_handled = true;
    for (unsigned int minor = 0; nvml.n_devices < DEVICES && minor < DEVICES; minor++) {
        struct device *device;

        if (device_open(&device, device_directory(), minor, true) == 0)
            nvml.devices[nvml.n_devices++] = device;
    }
}

ENTRY(nvmlReturn_t, nvmlInitWithFlags, unsigned int flags)
{
    nvmlReturn_t r = NVML_SUCCESS;

    pthread_mutex_lock(&nvml.lock);
    if (nvml.n_devices == 0)
        attach();
    if (nvml.n_devices == 0 && !(flags & 1)) /* 1: the absence of a GPU is not an error */
        r = NVML_ERROR_DRIVER_NOT_LOADED;
    else
        nvml.references++;
    pthread_mutex_unlock(&nvml.lock);
    return r;
}

ENTRY(nvmlReturn_t, nvmlInit_v2, void)
{
    return nvmlInitWithFlags(0);
}

ENTRY(nvmlReturn_t, nvmlInit, void)
{
    return nvmlInitWithFlags(0);
}

ENTRY(nvmlReturn_t, nvmlShutdown, void)
{
    nvmlReturn_t r = NVML_SUCCESS;

    pthread_mutex_lock(&nvml.lock);
    if (nvml.references)
        nvml.references--;
    else
        r = NVML_ERROR_UNINITIALIZED;
    pthread_mutex_unlock(&nvml.lock);
    return r;
}

static nvmlReturn_t ready(const void *result)
{
    if (!nvml.references)
        return NVML_ERROR_UNINITIALIZED;
    return result ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

/** index_of() - the number of a device among those of this observer, or -1 */
int index_of(nvmlDevice_t device)
{
    for (unsigned int i = 0; i < nvml.n_devices; i++) {
        if (nvml.devices[i] == device)
            return (int)i;
    }
    return -1;
}

/** ready_device() - check whether this device can be queried and `result` is not NULL */
nvmlReturn_t ready_device(nvmlDevice_t device, const void *result)
{
    nvmlReturn_t r = ready(result);

    if (r)
        return r;
    if (index_of(device) < 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    return atomic_load(&device->gpu->config.lost) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

static nvmlReturn_t text(char *to, unsigned int length, const char *from)
{
    if (strlen(from) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, from);
    return NVML_SUCCESS;
}

ENTRY(const char *, nvmlErrorString, nvmlReturn_t error)
{
    switch (error) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NO_PERMISSION:
        return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_ERROR_FUNCTION_NOT_FOUND:
        return "Function Not Found";
    case NVML_ERROR_GPU_IS_LOST:
        return "GPU is lost";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
        return "Argument version mismatch";
    case NVML_ERROR_UNKNOWN:
        break;
    }
    return "Unknown Error";
}

ENTRY(nvmlReturn_t, nvmlSystemGetDriverVersion, char *version, unsigned int length)
{
    nvmlReturn_t r = ready(version);

    return r ? r : text(version, length, SIMGPU_VERSION);
}

ENTRY(nvmlReturn_t, nvmlSystemGetNVMLVersion, char *version, unsigned int length)
{
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    return text(version, length, "13." SIMGPU_VERSION);
}

ENTRY(nvmlReturn_t, nvmlSystemGetCudaDriverVersion_v2, int *version)
{
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = CUDA_VERSION;
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlSystemGetCudaDriverVersion, int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

ENTRY(nvmlReturn_t, nvmlDeviceGetCount_v2, unsigned int *count)
{
    nvmlReturn_t r = ready(count);

    if (!r)
        *count = nvml.n_devices;
    return r;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetHandleByIndex_v2, unsigned int index, nvmlDevice_t *device)
{
    nvmlReturn_t r = ready(device);

    if (r)
        return r;
    if (index >= nvml.n_devices)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (atomic_load(&nvml.devices[index]->gpu->config.lost))
        return NVML_ERROR_GPU_IS_LOST;
    *device = nvml.devices[index];
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetHandleByUUID, const char *uuid, nvmlDevice_t *device)
{
    nvmlReturn_t r = ready(device);

    if (r)
        return r;
    if (!uuid)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int i = 0; i < nvml.n_devices; i++) {
        char found[41];

        /* NVIDIA's manual specifies this error "if any GPU has fallen off the bus", because the
         * UUID of such a GPU cannot be read. */
        if (atomic_load(&nvml.devices[i]->gpu->config.lost))
            return NVML_ERROR_GPU_IS_LOST;
        device_uuid_text(nvml.devices[i], found);
        if (strcmp(found, uuid) == 0) {
            *device = nvml.devices[i];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetIndex, nvmlDevice_t device, unsigned int *index)
{
    nvmlReturn_t r = ready_device(device, index);

    if (!r)
        *index = (unsigned int)index_of(device);
    return r;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetMinorNumber, nvmlDevice_t device, unsigned int *minor)
{
    nvmlReturn_t r = ready_device(device, minor);

    /* There is no device node that could be passed to a container. */
    return r ? r : NVML_ERROR_NOT_SUPPORTED;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetName, nvmlDevice_t device, char *name, unsigned int length)
{
    char found[sizeof(device->gpu->config.name) + 1] = "";
    nvmlReturn_t r = ready_device(device, name);

    if (r)
        return r;
    memcpy(found, device->gpu->config.name, sizeof(device->gpu->config.name));
    return text(name, length, found);
}

ENTRY(nvmlReturn_t, nvmlDeviceGetUUID, nvmlDevice_t device, char *uuid, unsigned int length)
{
    char found[41];
    nvmlReturn_t r = ready_device(device, uuid);

    if (r)
        return r;
    device_uuid_text(device, found);
    return text(uuid, length, found);
}

static nvmlReturn_t memory(nvmlDevice_t device, const void *result, nvmlMemory_t *memory)
{
    nvmlReturn_t r = ready_device(device, result);

    if (r)
        return r;
    if (!device_enter(device))
        return NVML_ERROR_GPU_IS_LOST;
    device_reap(device);
    memory->total = device->gpu->config.memory;
    memory->used = device_used(device);
    memory->free = memory->total > memory->used ? memory->total - memory->used : 0;
    device_leave(device);
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetMemoryInfo, nvmlDevice_t device, nvmlMemory_t *info)
{
    return memory(device, info, info);
}

ENTRY(nvmlReturn_t, nvmlDeviceGetMemoryInfo_v2, nvmlDevice_t device, nvmlMemory_v2_t *info)
{
    nvmlMemory_t now;
    nvmlReturn_t r;

    if (info && info->version != MEMORY_V2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    r = memory(device, info, &now);
    if (r)
        return r;
    info->total = now.total;
    info->reserved = 0;
    info->free = now.free;
    info->used = now.used;
    return NVML_SUCCESS;
}
