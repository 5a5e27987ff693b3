/*
 * The simulated GPU's NVML
 *
 * An observer: it attaches to the device files like a CUDA process, in slots of its own, and only
 * reads. Names, values and layouts are those of NVIDIA's nvml.h of CUDA 13.0. A process outside the
 * observer's pid namespace is not listed, because it has no pid there.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
} nvmlProcessInfo_t;

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
    unsigned long long protected;
} nvmlProcessDetail_t;

typedef struct {
    unsigned int version, mode, count;
    nvmlProcessDetail_t *infos;
} nvmlProcessDetailList_t;

typedef struct {
    unsigned int pid;
    unsigned long long time;
    unsigned int sm, memory, encoder, decoder;
} nvmlProcessUtilizationSample_t;

typedef struct {
    unsigned long long time;
    unsigned int pid, sm, memory, encoder, decoder, jpeg, ofa;
} nvmlProcessUtilizationInfo_t;

typedef struct {
    unsigned int version, count;
    unsigned long long last;
    nvmlProcessUtilizationInfo_t *infos;
} nvmlProcessesUtilizationInfo_t;

typedef struct {
    unsigned int gpu, memory;
    unsigned long long max_memory, time, start;
    unsigned int running, reserved[5];
} nvmlAccountingStats_t;

typedef struct {
    unsigned int gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned int flags;
    struct {
        unsigned int present, percentage, increase, decrease;
    } utilization[8];
} nvmlGpuDynamicPstatesInfo_t;

typedef struct {
    unsigned long long time;
    union {
        unsigned int number;
        unsigned long long wide;
    } value;
} nvmlSample_t;

typedef struct {
    char legacy_bus_id[16];
    unsigned int domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
} nvmlPciInfo_t;

#define MEMORY_V2      (sizeof(nvmlMemory_v2_t) | 2u << 24)
#define DETAILS_V1     (sizeof(nvmlProcessDetailList_t) | 1u << 24)
#define UTILIZATION_V1 (sizeof(nvmlProcessesUtilizationInfo_t) | 1u << 24)
#define NO_INSTANCE    0xffffffffu /* neither a GPU instance nor a compute instance of MIG */

#define GPU_UTILIZATION_SAMPLES 1 /* nvmlSamplingType_t */
#define TYPE_UNSIGNED_INT       1 /* nvmlValueType_t */

#define TOPOLOGY_SINGLE     10 /* nvmlGpuTopologyLevel_t: one PCIe switch */
#define TOPOLOGY_MULTIPLE   20 /* several PCIe switches below one host bridge */
#define TOPOLOGY_HOSTBRIDGE 30
#define TOPOLOGY_NODE       40
#define TOPOLOGY_SYSTEM     50
#define LINK_TO_GPU         0 /* nvmlIntNvLinkDeviceType_t */
#define LINK_TO_SWITCH      2
#define LINK_TO_UNKNOWN     0xff
#define SWITCHES            4    /* number of NVSwitches in an HGX H200 */
#define SWITCH_BUS          0xc0 /* above the buses of all GPUs */

#define HISTORY_LENGTH 500000000 /* ns of GPU time that a process's utilisation covers at least */

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
        char its[41];

        /* NVIDIA's manual: "if any GPU has fallen off the bus", because its UUID cannot be read. */
        if (atomic_load(&nvml.devices[i]->gpu->config.lost))
            return NVML_ERROR_GPU_IS_LOST;
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

    /* There is no device node that could be passed to a container. */
    return r ? r : NVML_ERROR_NOT_SUPPORTED;
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

static nvmlPciInfo_t pci_info(unsigned int bus)
{
    nvmlPciInfo_t info = {.bus = bus & 0xff};

    snprintf(info.legacy_bus_id, sizeof(info.legacy_bus_id), "0000:%02X:00.0", info.bus);
    snprintf(info.bus_id, sizeof(info.bus_id), "00000000:%02X:00.0", info.bus);
    return info;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetPciInfo_v3, nvmlDevice_t device, nvmlPciInfo_t *info)
{
    nvmlReturn_t r = ready_device(device, info);

    if (r)
        return r;
    *info = pci_info(device->gpu->config.pci_bus);
    return NVML_SUCCESS;
}

/* The first component in which two places differ decides: NUMA nodes share only the system. */
ENTRY(nvmlReturn_t, nvmlDeviceGetTopologyCommonAncestor, nvmlDevice_t one, nvmlDevice_t other,
      int *level)
{
    static const int levels[] = {TOPOLOGY_SYSTEM, TOPOLOGY_NODE, TOPOLOGY_HOSTBRIDGE,
                                 TOPOLOGY_MULTIPLE, TOPOLOGY_SINGLE};
    nvmlReturn_t r = ready_device(one, level);
    size_t same = 0;

    if (!r)
        r = ready_device(other, level);
    if (r)
        return r;
    if (!one->gpu->config.place[0] || !other->gpu->config.place[0])
        return NVML_ERROR_NOT_SUPPORTED;
    while (same < 4 && one->gpu->config.place[same] == other->gpu->config.place[same])
        same++;
    *level = levels[same];
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetMemoryAffinity, nvmlDevice_t device, unsigned int n,
      unsigned long *nodes, int scope)
{
    nvmlReturn_t r = ready_device(device, nodes);
    unsigned int node;

    if (r)
        return r;
    if (!n || scope < 0 || scope > 1) /* of the node or of the socket, which are the same here */
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!device->gpu->config.place[0])
        return NVML_ERROR_NOT_SUPPORTED;
    memset(nodes, 0, n * sizeof(*nodes));
    node = device->gpu->config.place[0] - 1;
    if (node / (8 * sizeof(*nodes)) < n)
        nodes[node / (8 * sizeof(*nodes))] = 1ul << node % (8 * sizeof(*nodes));
    return NVML_SUCCESS;
}

/* Only a GPU with memory that is a NUMA node has an answer, such as a Grace Hopper. */
ENTRY(nvmlReturn_t, nvmlDeviceGetNumaNodeId, nvmlDevice_t device, unsigned int *node)
{
    nvmlReturn_t r = ready_device(device, node);

    return r ? r : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t link_end(nvmlDevice_t device, unsigned int link, const void *result,
                             uint8_t *endp)
{
    nvmlReturn_t r = ready_device(device, result);
    bool any = false;

    if (r)
        return r;
    for (unsigned int i = 0; i < GPU_NVLINKS; i++)
        any |= device->gpu->config.nvlinks[i] != GPU_LINK_NONE;
    if (!any)
        return NVML_ERROR_NOT_SUPPORTED;
    if (link >= GPU_NVLINKS)
        return NVML_ERROR_INVALID_ARGUMENT;
    *endp = device->gpu->config.nvlinks[link];
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetNvLinkState, nvmlDevice_t device, unsigned int link, int *active)
{
    uint8_t end;
    nvmlReturn_t r = link_end(device, link, active, &end);

    if (!r)
        *active = end != GPU_LINK_NONE;
    return r;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetNvLinkRemoteDeviceType, nvmlDevice_t device, unsigned int link,
      int *type)
{
    uint8_t end;
    nvmlReturn_t r = link_end(device, link, type, &end);

    if (r)
        return r;
    if (end == GPU_LINK_NONE)
        return NVML_ERROR_NOT_SUPPORTED;
    *type = end == GPU_LINK_SWITCH   ? LINK_TO_SWITCH
            : end == GPU_LINK_UNSEEN ? LINK_TO_UNKNOWN
                                     : LINK_TO_GPU;
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetNvLinkRemotePciInfo_v2, nvmlDevice_t device, unsigned int link,
      nvmlPciInfo_t *info)
{
    uint8_t end;
    nvmlReturn_t r = link_end(device, link, info, &end);

    if (r)
        return r;
    if (end == GPU_LINK_NONE)
        return NVML_ERROR_NOT_SUPPORTED;
    if (end == GPU_LINK_UNSEEN) {
        *info = (nvmlPciInfo_t){.domain = ~0u, .bus = ~0u, .device = ~0u};
        strcpy(info->bus_id, "FFFFFFF:FFFF:FF");
    } else if (end == GPU_LINK_SWITCH) {
        *info = pci_info(SWITCH_BUS + link % SWITCHES);
    } else {
        *info = pci_info(end); /* simgpu.py gives GPU n the bus n + 1 */
    }
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

/* One row per process: copies of libcuda in one process have a slot each. */
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

/* Only the driver API creates contexts here: no process does graphics or is under MPS. */
static nvmlReturn_t list_processes(nvmlDevice_t device, unsigned int *count, void *infos,
                                   size_t size, bool compute)
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
    *count = compute ? processes(device, found) : 0;
    device_leave(device);
    if (*count > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < *count; i++) /* a struct begins like its older version */
        memcpy((char *)infos + i * size, &found[i],
               size < sizeof(found[i]) ? size : sizeof(found[i]));
    return NVML_SUCCESS;
}

#define LIST(name, type, compute)                                                                  \
    ENTRY(nvmlReturn_t, name, nvmlDevice_t device, unsigned int *count, type *infos)               \
    {                                                                                              \
        return list_processes(device, count, infos, sizeof(type), compute);                        \
    }

LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, true)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t, true)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, true)
LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, false)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t, false)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t, false)

ENTRY(nvmlReturn_t, nvmlDeviceGetRunningProcessDetailList, nvmlDevice_t device,
      nvmlProcessDetailList_t *list)
{
    nvmlReturn_t r = ready_device(device, list);

    if (r)
        return r;
    if (list->version != DETAILS_V1 || list->mode > 2) /* compute, graphics, MPS */
        return NVML_ERROR_INVALID_ARGUMENT;
    if (list->infos)
        memset(list->infos, 0, list->count * sizeof(list->infos[0]));
    return list_processes(device, &list->count, list->infos, sizeof(list->infos[0]),
                          list->mode == 0);
}

/* Over the last 0.5 to 1 s, in whole percent; memory traffic is not simulated. */
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

static unsigned long long microseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetDynamicPstatesInfo, nvmlDevice_t device,
      nvmlGpuDynamicPstatesInfo_t *info)
{
    nvmlUtilization_t rates;
    nvmlReturn_t r = ready_device(device, info);

    if (!r)
        r = nvmlDeviceGetUtilizationRates(device, &rates);
    if (r)
        return r;
    *info = (nvmlGpuDynamicPstatesInfo_t){0};
    info->utilization[0].present = 1;
    info->utilization[0].percentage = rates.gpu;
    return NVML_SUCCESS;
}

#define N_MARKS     16
#define MARK_LENGTH 200000000 /* minimum time between two samples of the device, ns */

/*
 * Samples of a device, taken when this process asks for them; a real driver takes them on its own.
 * The first one is the utilisation, and each later one covers the time since the one before.
 */
static struct marks {
    uint64_t now, busy; /* as of the newest sample */
    unsigned int n;     /* number of samples ever taken */
    struct {
        unsigned long long time;
        unsigned int percent;
    } each[N_MARKS];
} marks[DEVICES];

static nvmlReturn_t mark(struct device *device, struct marks *of)
{
    nvmlUtilization_t rates;
    nvmlReturn_t r = nvmlDeviceGetUtilizationRates(device, &rates);
    const struct gpu_timeline *line;

    if (r)
        return r;
    if (!device_enter(device))
        return NVML_ERROR_GPU_IS_LOST;
    line = schedule_current(device->gpu);
    if (!of->n || line->now - of->now >= MARK_LENGTH) {
        unsigned int at = of->n % N_MARKS;

        if (of->n)
            rates.gpu = (unsigned int)((line->busy - of->busy) * 100 / (line->now - of->now));
        of->each[at].time = microseconds();
        of->each[at].percent = rates.gpu;
        of->now = line->now;
        of->busy = line->busy;
        of->n++;
    }
    device_leave(device);
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetSamples, nvmlDevice_t device, int type, unsigned long long last,
      int *value_type, unsigned int *count, nvmlSample_t *samples)
{
    nvmlReturn_t r = ready_device(device, count);
    struct marks *of;
    unsigned int n = 0, kept;

    if (r)
        return r;
    if (!value_type || (samples && !*count))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (type != GPU_UTILIZATION_SAMPLES)
        return NVML_ERROR_NOT_SUPPORTED;
    of = &marks[index_of(device)];
    r = mark(device, of);
    if (r)
        return r;
    kept = of->n < N_MARKS ? of->n : N_MARKS;
    for (unsigned int i = of->n - kept; i < of->n; i++) {
        if (of->each[i % N_MARKS].time <= last)
            continue;
        if (samples && n < *count)
            samples[n] = (nvmlSample_t){.time = of->each[i % N_MARKS].time,
                                        .value.number = of->each[i % N_MARKS].percent};
        n += !samples || n < *count;
    }
    if (!n)
        return NVML_ERROR_NOT_FOUND;
    *value_type = TYPE_UNSIGNED_INT;
    *count = n;
    return NVML_SUCCESS;
}

/*
 * Busy time of each context at an earlier look of this observer. The device file keeps no such
 * history, so an observer knows nothing of the time before its first look.
 */
struct history {
    uint64_t now;
    uint64_t serials[GPU_CONTEXTS];
    uint64_t busy[GPU_CONTEXTS];
};

static struct history histories[DEVICES][2]; /* the older one is at least HISTORY_LENGTH old */

static void remember(const struct gpu *gpu, const struct gpu_timeline *line,
                     struct history history[2])
{
    if (history[1].now && line->now - history[1].now < HISTORY_LENGTH)
        return;
    history[0] = history[1];
    history[1].now = line->now;
    for (uint32_t i = 0; i < GPU_CONTEXTS; i++) {
        history[1].serials[i] = gpu->contexts[i].serial;
        history[1].busy[i] = line->lanes[i].busy;
    }
}

/* The processes that worked since the older look, with their percentage of that time. */
static unsigned int utilisations(const struct device *device, const struct history *from,
                                 unsigned int pids[GPU_CONTEXTS], unsigned int sm[GPU_CONTEXTS])
{
    const struct gpu *gpu = device->gpu;
    const struct gpu_timeline *line = schedule_current(device->gpu);
    uint64_t busy[GPU_CONTEXTS];
    unsigned int n = 0;
    unsigned int kept = 0;

    for (uint32_t i = 0; i < gpu->shared.n_contexts; i++) {
        uint64_t serial = gpu->contexts[i].serial;
        uint64_t before = from->serials[i] == serial ? from->busy[i] : 0;
        int pid = serial ? device_slot_pid(device, gpu->contexts[i].slot) : 0;
        unsigned int at = 0;

        if (pid <= 0 || line->lanes[i].busy <= before)
            continue;
        while (at < n && pids[at] != (unsigned int)pid)
            at++;
        if (at == n) {
            pids[n] = (unsigned int)pid;
            busy[n++] = 0;
        }
        busy[at] += line->lanes[i].busy - before;
    }
    for (unsigned int i = 0; i < n; i++) {
        uint64_t percent = busy[i] * 100 / (line->now - from->now);

        if (!percent)
            continue;
        pids[kept] = pids[i];
        sm[kept++] = percent < 100 ? (unsigned int)percent : 100;
    }
    return kept;
}

static nvmlReturn_t sample_processes(nvmlDevice_t device, unsigned long long last, unsigned int *np,
                                     unsigned int pids[GPU_CONTEXTS], unsigned int sm[GPU_CONTEXTS])
{
    struct history *history = histories[index_of(device)];
    const struct history *from;
    const struct gpu_timeline *line;

    *np = 0;
    if (!device_enter(device))
        return NVML_ERROR_GPU_IS_LOST;
    line = schedule_current(device->gpu);
    remember(device->gpu, line, history);
    from = history[0].now ? &history[0] : &history[1];
    if (line->now > from->now && microseconds() > last)
        *np = utilisations(device, from, pids, sm);
    device_leave(device);
    return *np ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetProcessUtilization, nvmlDevice_t device,
      nvmlProcessUtilizationSample_t *samples, unsigned int *count, unsigned long long last)
{
    unsigned int pids[GPU_CONTEXTS], sm[GPU_CONTEXTS];
    unsigned int room, n;
    nvmlReturn_t r = ready_device(device, count);

    if (!r)
        r = sample_processes(device, last, &n, pids, sm);
    if (r)
        return r;
    room = samples ? *count : 0;
    *count = n;
    if (n > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < n; i++)
        samples[i] =
            (nvmlProcessUtilizationSample_t){.pid = pids[i], .time = microseconds(), .sm = sm[i]};
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetProcessesUtilizationInfo, nvmlDevice_t device,
      nvmlProcessesUtilizationInfo_t *info)
{
    unsigned int pids[GPU_CONTEXTS], sm[GPU_CONTEXTS];
    unsigned int room, n;
    nvmlReturn_t r = ready_device(device, info);

    if (r)
        return r;
    if (info->version != UTILIZATION_V1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    r = sample_processes(device, info->last, &n, pids, sm);
    if (r)
        return r;
    room = info->infos ? info->count : 0;
    info->count = n;
    if (n > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < n; i++)
        info->infos[i] =
            (nvmlProcessUtilizationInfo_t){.time = microseconds(), .pid = pids[i], .sm = sm[i]};
    return NVML_SUCCESS;
}

/* Accounting is off by default, as on a real machine. If on, it covers only live processes. */
static bool accounting(void)
{
    const char *value = getenv("SIMGPU_ACCOUNTING");

    return value && strcmp(value, "1") == 0;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetAccountingPids, nvmlDevice_t device, unsigned int *count,
      unsigned int *pids)
{
    nvmlProcessInfo_t found[GPU_SLOTS];
    unsigned int n = GPU_SLOTS;
    unsigned int room;
    nvmlReturn_t r = ready_device(device, count);

    if (r)
        return r;
    if (!accounting())
        return NVML_ERROR_NOT_SUPPORTED;
    r = list_processes(device, &n, found, sizeof(found[0]), true);
    if (r)
        return r;
    room = pids ? *count : 0;
    *count = n;
    if (n > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < n; i++)
        pids[i] = found[i].pid;
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetAccountingStats, nvmlDevice_t device, unsigned int pid,
      nvmlAccountingStats_t *stats)
{
    nvmlProcessInfo_t found[GPU_SLOTS];
    unsigned int n = GPU_SLOTS;
    nvmlReturn_t r = ready_device(device, stats);

    if (r)
        return r;
    if (!accounting())
        return NVML_ERROR_NOT_SUPPORTED;
    r = list_processes(device, &n, found, sizeof(found[0]), true);
    for (unsigned int i = 0; !r && i < n; i++) {
        if (found[i].pid != pid)
            continue;
        *stats = (nvmlAccountingStats_t){.max_memory = found[i].used, .running = 1};
        return NVML_SUCCESS;
    }
    return r ? r : NVML_ERROR_NOT_FOUND;
}
