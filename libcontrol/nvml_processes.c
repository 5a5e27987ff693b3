/*
 * The NVML functions that list processes: each shows only the container's own.
 *
 * These are the processes that the usage part of the grant page lists, by their PIDs in the
 * container. All of them use libcuda, so they are compute processes. None is listed under MPS or as
 * part of a MIG instance.
 */
#include "nvml_stand_in.h"
#include "os.h"

#include <string.h>

/* Whether the driver accepted the call, which passed no array. */
static bool is_list_answer(nvmlReturn_t result)
{
    return result == NVML_SUCCESS || result == NVML_ERROR_INSUFFICIENT_SIZE;
}

/* Sets *count to `n`. Returns NVML_SUCCESS if the caller's array has room for that many entries,
 * otherwise an error. If *count is not 0 but there is no array, *count is left alone. */
static nvmlReturn_t check_room(unsigned int *count, const void *array, unsigned n)
{
    unsigned int room = *count;

    if (room && !array)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = n;
    return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* An entry of the first version is a prefix of an entry of the later versions. */
static nvmlReturn_t put_processes(const struct page_device *own, bool compute, unsigned int *count,
                                  void *infos, size_t size)
{
    struct page_process list[LAYOUT_N_SLOTS];
    unsigned n = compute ? page_processes(own, list, NULL) : 0;
    nvmlReturn_t result = check_room(count, infos, n);

    for (unsigned i = 0; result == NVML_SUCCESS && i < n; i++) {
        nvmlProcessInfo_v2_t info = {
            .pid = list[i].pid,
            .usedGpuMemory = list[i].memory,
            .gpuInstanceId = NVML_NO_INSTANCE,
            .computeInstanceId = NVML_NO_INSTANCE,
        };

        memcpy((char *)infos + i * size, &info, size);
    }
    return result;
}

#define LIST(name, entry, compute)                                                                 \
    NVML_EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, entry *infos)          \
    {                                                                                              \
        struct page_device own;                                                                    \
        unsigned int none = 0;                                                                     \
        nvmlReturn_t result;                                                                       \
                                                                                                   \
        if (!real.name)                                                                            \
            return NVML_ERROR_FUNCTION_NOT_FOUND;                                                  \
        if (!count || !page_find(device, &own) || !own.usage)                                      \
            return real.name(device, count, infos);                                                \
        result = real.name(device, &none, NULL);                                                   \
        return is_list_answer(result) ? put_processes(&own, compute, count, infos, sizeof(entry))  \
                                      : result;                                                    \
    }

LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, true)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, true)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_v2_t, true)
LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, false)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t, false)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_v2_t, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_v2_t, false)

NVML_EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device,
                                                               nvmlProcessDetailList_t *list)
{
    struct page_process own_list[LAYOUT_N_SLOTS];
    nvmlProcessDetailList_t none;
    struct page_device own;
    nvmlReturn_t result;
    unsigned n = 0;

    if (!real.nvmlDeviceGetRunningProcessDetailList)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!list || !page_find(device, &own) || !own.usage)
        return real.nvmlDeviceGetRunningProcessDetailList(device, list);
    none = (nvmlProcessDetailList_t){.version = list->version, .mode = list->mode};
    result = real.nvmlDeviceGetRunningProcessDetailList(device, &none);
    if (!is_list_answer(result))
        return result;
    if (list->mode == NVML_PROCESS_MODE_COMPUTE)
        n = page_processes(&own, own_list, NULL);
    result = check_room(&list->numProcArrayEntries, list->procArray, n);
    for (unsigned i = 0; result == NVML_SUCCESS && i < n; i++)
        list->procArray[i] = (nvmlProcessDetail_v1_t){
            .pid = own_list[i].pid,
            .usedGpuMemory = own_list[i].memory,
            .gpuInstanceId = NVML_NO_INSTANCE,
            .computeInstanceId = NVML_NO_INSTANCE,
        };
    return result;
}

/* Fills `list` as the driver does: with the processes that used the GPU, and only if the sample is
 * newer than `last`. Returns their number. */
static unsigned busy_processes(const struct page_device *own, unsigned long long last,
                               struct page_process list[LAYOUT_N_SLOTS], uint64_t *time_usp)
{
    unsigned n = page_processes(own, list, time_usp);
    unsigned kept = 0;

    if (*time_usp <= last)
        return 0;
    for (unsigned i = 0; i < n; i++)
        if (list[i].utilisation)
            list[kept++] = list[i];
    return kept;
}

/* Memory traffic and the load on the video engines are known only for the whole GPU, not per
 * process. */
NVML_EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                                         nvmlProcessUtilizationSample_t *samples,
                                                         unsigned int *count,
                                                         unsigned long long last)
{
    struct page_process list[LAYOUT_N_SLOTS];
    struct page_device own;
    unsigned int room = 0;
    nvmlReturn_t result;
    uint64_t time;
    unsigned n;

    if (!real.nvmlDeviceGetProcessUtilization)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!count || !page_find(device, &own) || !own.usage)
        return real.nvmlDeviceGetProcessUtilization(device, samples, count, last);
    result = real.nvmlDeviceGetProcessUtilization(device, NULL, &room, last);
    if (!is_list_answer(result) && result != NVML_ERROR_NOT_FOUND)
        return result;
    n = busy_processes(&own, last, list, &time);
    if (!n)
        return NVML_ERROR_NOT_FOUND;
    room = samples ? *count : 0;
    *count = n;
    if (n > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < n; i++)
        samples[i] = (nvmlProcessUtilizationSample_t){
            .pid = list[i].pid, .timeStamp = time, .smUtil = list[i].utilisation};
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device,
                                                               nvmlProcessesUtilizationInfo_t *info)
{
    struct page_process list[LAYOUT_N_SLOTS];
    nvmlProcessesUtilizationInfo_t none;
    struct page_device own;
    nvmlReturn_t result;
    unsigned int room;
    uint64_t time;
    unsigned n;

    if (!real.nvmlDeviceGetProcessesUtilizationInfo)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!info || !page_find(device, &own) || !own.usage)
        return real.nvmlDeviceGetProcessesUtilizationInfo(device, info);
    none = (nvmlProcessesUtilizationInfo_t){.version = info->version,
                                            .lastSeenTimeStamp = info->lastSeenTimeStamp};
    result = real.nvmlDeviceGetProcessesUtilizationInfo(device, &none);
    if (!is_list_answer(result) && result != NVML_ERROR_NOT_FOUND)
        return result;
    n = busy_processes(&own, info->lastSeenTimeStamp, list, &time);
    if (!n)
        return NVML_ERROR_NOT_FOUND;
    room = info->procUtilArray ? info->processSamplesCount : 0;
    info->processSamplesCount = n;
    if (n > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < n; i++)
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){
            .timeStamp = time, .pid = list[i].pid, .smUtil = list[i].utilisation};
    return NVML_SUCCESS;
}

/* The driver would list every process on the node, including those that have ended. Only the
 * container's live ones are listed here. */
NVML_EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count,
                                                     unsigned int *pids)
{
    struct page_process list[LAYOUT_N_SLOTS];
    struct page_device own;
    unsigned int none = 0;
    nvmlReturn_t result;
    unsigned n;

    if (!real.nvmlDeviceGetAccountingPids)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!count || !page_find(device, &own) || !own.usage)
        return real.nvmlDeviceGetAccountingPids(device, count, pids);
    result = real.nvmlDeviceGetAccountingPids(device, &none, NULL);
    if (!is_list_answer(result))
        return result;
    n = page_processes(&own, list, NULL);
    result = check_room(count, pids, n);
    for (unsigned i = 0; result == NVML_SUCCESS && i < n; i++)
        pids[i] = list[i].pid;
    return result;
}

/*
 * The driver knows processes by their PIDs on the host, where the same PID may belong to another
 * process. Its answer is used only to find out whether accounting is available.
 */
NVML_EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid,
                                                      nvmlAccountingStats_t *stats)
{
    struct page_process list[LAYOUT_N_SLOTS];
    nvmlAccountingStats_t foreign;
    struct page_device own;
    nvmlReturn_t result;
    unsigned n;

    if (!real.nvmlDeviceGetAccountingStats)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    if (!stats || !page_find(device, &own) || !own.usage)
        return real.nvmlDeviceGetAccountingStats(device, pid, stats);
    result = real.nvmlDeviceGetAccountingStats(device, pid, &foreign);
    if (result != NVML_SUCCESS && result != NVML_ERROR_NOT_FOUND)
        return result;
    n = page_processes(&own, list, NULL);
    for (unsigned i = 0; i < n; i++) {
        if (list[i].pid != pid)
            continue;
        *stats = (nvmlAccountingStats_t){
            .gpuUtilization = list[i].mean_utilisation,
            .maxMemoryUsage = list[i].memory_peak,
            .startTime = list[i].start_us,
            .isRunning = 1, /* `time` is 0 while it runs, as with the driver */
        };
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}
