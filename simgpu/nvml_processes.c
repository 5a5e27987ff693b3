/*
 * NVML: the processes that have contexts on a GPU, and their memory
 *
 * A process outside the observer's pid namespace is not listed, because it has no pid there.
 */
#include "nvml_observer.h"

#include <stdlib.h>
#include <string.h>

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

/* Only the driver API creates contexts here: no process uses graphics or MPS. */
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
    /* Each version of the struct extends the previous version. */
    for (unsigned int i = 0; i < *count; i++)
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
