/*
 * The simulated GPU's NVML
 *
 * An observer: it attaches to the device files like a CUDA process, in slots of its own, and reads.
 * Names, values and layouts are those of NVIDIA's nvml.h of CUDA 13.0. A process outside of the
 * observer's pid namespace is not listed, for it has no pid there.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_abi.h"
#include "device.h"
#include "schedule.h"

#define ENTRY(type, name, ...)                                                                     \
    __attribute__((visibility("default"))) type name(__VA_ARGS__);                                 \
    type name(__VA_ARGS__)

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

typedef struct device *nvmlDevice_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
} nvmlProcessInfo_t;

typedef struct {
    unsigned int gpu, memory;
} nvmlUtilization_t;

typedef struct {
    char legacy_bus_id[16];
    unsigned int domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
} nvmlPciInfo_t;

#define MEMORY_V2   (sizeof(nvmlMemory_v2_t) | 2u << 24)
#define NO_INSTANCE 0xffffffffu /* neither MIG's GPU instance nor its compute instance */

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

/* Attachments outlive nvmlShutdown: closing a device would end those of libcuda, too. */
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
    if (nvml.n_devices == 0 && !(flags & 1)) /* 1: no GPU is no error */
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

static int index_of(nvmlDevice_t device)
{
    for (unsigned int i = 0; i < nvml.n_devices; i++) {
        if (nvml.devices[i] == device)
            return (int)i;
    }
    return -1;
}

static nvmlReturn_t ready_device(nvmlDevice_t device, const void *result)
{
    nvmlReturn_t r = ready(result);

    return r ? r : index_of(device) < 0 ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
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
        char its[41];

        device_uuid_text(nvml.devices[i], its);
        if (strcmp(its, uuid) == 0) {
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

    if (!r)
        *minor = device->gpu->config.minor;
    return r;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetName, nvmlDevice_t device, char *name, unsigned int length)
{
    char its[sizeof(device->gpu->config.name) + 1] = "";
    nvmlReturn_t r = ready_device(device, name);

    if (r)
        return r;
    memcpy(its, device->gpu->config.name, sizeof(device->gpu->config.name));
    return text(name, length, its);
}

ENTRY(nvmlReturn_t, nvmlDeviceGetUUID, nvmlDevice_t device, char *uuid, unsigned int length)
{
    char its[41];
    nvmlReturn_t r = ready_device(device, uuid);

    if (r)
        return r;
    device_uuid_text(device, its);
    return text(uuid, length, its);
}

ENTRY(nvmlReturn_t, nvmlDeviceGetPciInfo_v3, nvmlDevice_t device, nvmlPciInfo_t *info)
{
    nvmlReturn_t r = ready_device(device, info);

    if (r)
        return r;
    *info = (nvmlPciInfo_t){.bus = device->gpu->config.pci_bus & 0xff};
    snprintf(info->legacy_bus_id, sizeof(info->legacy_bus_id), "0000:%02X:00.0", info->bus);
    snprintf(info->bus_id, sizeof(info->bus_id), "00000000:%02X:00.0", info->bus);
    return NVML_SUCCESS;
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

static int by_pid(const void *left, const void *right)
{
    const nvmlProcessInfo_t *a = left;
    const nvmlProcessInfo_t *b = right;

    return (a->pid > b->pid) - (a->pid < b->pid);
}

/* One line a process: copies of libcuda in one process have a slot each. */
static unsigned int processes(const struct device *device, nvmlProcessInfo_t infos[GPU_SLOTS])
{
    unsigned int n = 0;
    unsigned int kept = 0;

    for (uint32_t i = 0; i < GPU_SLOTS; i++) {
        int pid;

        if (!device->gpu->shared.slots[i].attached || !device_slot_contexts(device, i))
            continue;
        pid = device_slot_pid(device, i);
        if (pid > 0)
            infos[n++] = (nvmlProcessInfo_t){.pid = (unsigned int)pid,
                                             .used = device_slot_memory(device, i),
                                             .gpu_instance = NO_INSTANCE,
                                             .compute_instance = NO_INSTANCE};
    }
    qsort(infos, n, sizeof(infos[0]), by_pid);
    for (unsigned int i = 0; i < n; i++) {
        if (kept && infos[kept - 1].pid == infos[i].pid)
            infos[kept - 1].used += infos[i].used;
        else
            infos[kept++] = infos[i];
    }
    return kept;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetComputeRunningProcesses_v3, nvmlDevice_t device,
      unsigned int *count, nvmlProcessInfo_t *infos)
{
    nvmlProcessInfo_t found[GPU_SLOTS];
    unsigned int room;
    nvmlReturn_t r = ready_device(device, count);

    if (r)
        return r;
    if (*count && !infos)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!device_enter(device))
        return NVML_ERROR_GPU_IS_LOST;
    device_reap(device);
    room = *count;
    *count = processes(device, found);
    device_leave(device);
    if (*count > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (*count)
        memcpy(infos, found, *count * sizeof(found[0]));
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetComputeRunningProcesses_v2, nvmlDevice_t device,
      unsigned int *count, nvmlProcessInfo_t *infos)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, infos);
}

/* Of the last half second to second, as whole percent; memory traffic is not simulated. */
ENTRY(nvmlReturn_t, nvmlDeviceGetUtilizationRates, nvmlDevice_t device, nvmlUtilization_t *rates)
{
    const struct gpu_timeline *line;
    const struct gpu_sample *from;
    nvmlReturn_t r = ready_device(device, rates);

    if (r)
        return r;
    if (!device_enter(device))
        return NVML_ERROR_GPU_IS_LOST;
    line = schedule_current(device->gpu);
    from = device->gpu->shared.samples;
    *rates = (nvmlUtilization_t){0};
    if (line->now > from->now)
        rates->gpu = (unsigned int)((line->busy - from->busy) * 100 / (line->now - from->now));
    device_leave(device);
    return NVML_SUCCESS;
}
