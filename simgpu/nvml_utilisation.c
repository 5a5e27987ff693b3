/*
 * NVML: how busy a GPU is, and which processes use it
 *
 * A percentage needs two readings of the timeline. The device file keeps an earlier reading only
 * for the GPU as a whole; the observer itself keeps all others, beginning with the first query.
 */
#include "nvml_observer.h"

#include <time.h>

#include "schedule.h"

#define HISTORY_LENGTH 500000000 /* minimum interval between two kept readings, ns */

/* The rates are in whole percent, and cover the time since the older of the device's two samples.
 * Memory traffic is not simulated. */
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
 * Samples of a device, taken when this process requests them; a real driver takes them
 * periodically. The first sample is the rate that nvmlDeviceGetUtilizationRates() returns; each
 * later one covers the time since the previous one.
 */
static struct marks {
    uint64_t now, busy; /* as of the newest sample */
    unsigned int n;     /* number of samples ever taken */
    struct {
        unsigned long long time;
        unsigned int percent;
    } each[N_MARKS];
} marks[DEVICES];

static nvmlReturn_t mark(struct device *device, struct marks *series)
{
    nvmlUtilization_t rates;
    nvmlReturn_t r = nvmlDeviceGetUtilizationRates(device, &rates);
    const struct gpu_timeline *line;

    if (r)
        return r;
    if (!device_enter(device))
        return NVML_ERROR_GPU_IS_LOST;
    line = schedule_current(device->gpu);
    if (!series->n || line->now - series->now >= MARK_LENGTH) {
        unsigned int at = series->n % N_MARKS;

        if (series->n)
            rates.gpu =
                (unsigned int)((line->busy - series->busy) * 100 / (line->now - series->now));
        series->each[at].time = microseconds();
        series->each[at].percent = rates.gpu;
        series->now = line->now;
        series->busy = line->busy;
        series->n++;
    }
    device_leave(device);
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetSamples, nvmlDevice_t device, int type, unsigned long long last,
      int *value_type, unsigned int *count, nvmlSample_t *samples)
{
    nvmlReturn_t r = ready_device(device, count);
    struct marks *series;
    unsigned int n = 0, kept;

    if (r)
        return r;
    if (!value_type || (samples && !*count))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (type != GPU_UTILIZATION_SAMPLES)
        return NVML_ERROR_NOT_SUPPORTED;
    series = &marks[index_of(device)];
    r = mark(device, series);
    if (r)
        return r;
    kept = series->n < N_MARKS ? series->n : N_MARKS;
    for (unsigned int i = series->n - kept; i < series->n; i++) {
        if (series->each[i % N_MARKS].time <= last)
            continue;
        if (samples && n < *count)
            samples[n] = (nvmlSample_t){.time = series->each[i % N_MARKS].time,
                                        .value.number = series->each[i % N_MARKS].percent};
        n += !samples || n < *count;
    }
    if (!n)
        return NVML_ERROR_NOT_FOUND;
    *value_type = TYPE_UNSIGNED_INT;
    *count = n;
    return NVML_SUCCESS;
}

/*
 * Busy time of each context at an earlier query by this process. The device file keeps no such
 * history, so there is no data for the time before the first query.
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

/* The processes that have used the GPU since the query `from`, with their percentages of that
 * time. */
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
