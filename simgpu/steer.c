/*
 * The GPU's scheduler, steered from outside
 *
 * What a root process does to a real GPU's channel groups by the kernel module's calls, by the pid
 * of the process that has the contexts: time slices, switching off and on, and how long each was on
 * the GPU. Contexts that are made later have the device's slice, and are on.
 */
#include <string.h>

#include "device.h"
#include "schedule.h"

#define ENTRY(name, ...)                                                                           \
    __attribute__((visibility("default"))) int name(__VA_ARGS__);                                  \
    int name(__VA_ARGS__)

#define FAILED (-1)

static bool belongs(const struct device *device, uint32_t index, int pid)
{
    const struct gpu_context *context = &device->gpu->contexts[index];

    return context->serial && device_slot_pid(device, context->slot) == pid;
}

/* As the driver counts (docs/reference/driver-calls.md). The device's lock is held. */
static void count_off(struct gpu_context *context, bool on)
{
    uint32_t off = atomic_load(&context->off);

    if (!on)
        atomic_store(&context->off, off + 1);
    else if (off)
        atomic_store(&context->off, off - 1);
}

/* Sets the contexts of a process; returns how many there are, or FAILED where the GPU is lost. */
static int steer(struct device *device, int pid, const uint64_t *slicep, const bool *onp)
{
    struct gpu *gpu = device->gpu;
    int n = 0;

    if (!device_enter(device))
        return FAILED;
    atomic_store(&gpu->shared.steered, 1);
    for (uint32_t i = 0; i < gpu->shared.n_contexts; i++) {
        if (!belongs(device, i, pid))
            continue;
        if (slicep)
            atomic_store(&gpu->contexts[i].slice, *slicep);
        if (onp)
            count_off(&gpu->contexts[i], *onp);
        n++;
    }
    device_leave(device);
    return n;
}

/** nvmlSimgpuSetTimeslice() - of a process's contexts, ns; 0: the device's */
ENTRY(nvmlSimgpuSetTimeslice, struct device *device, int pid, uint64_t ns)
{
    return steer(device, pid, &ns, NULL);
}

/** nvmlSimgpuSwitch() - a process's contexts on or off; what was off twice is on after two calls */
ENTRY(nvmlSimgpuSwitch, struct device *device, int pid, int on)
{
    bool is_on = on;

    return steer(device, pid, NULL, &is_on);
}

/* What a context had of the GPU since it was made; simgpu/steering.py has the same. */
struct simgpu_residency {
    uint64_t pid;
    uint64_t ns;    /* on the GPU, with work or without */
    uint64_t early; /* turns that ended with its work */
    uint64_t full;  /* ns of turns that ended with their slice */
    uint64_t ended; /* when the last of those did, on the GPU's clock */
};

/**
 * nvmlSimgpuResidency() - how long contexts have been on the GPU, until `*nowp` on its clock
 *
 * A row for each context that exists. Returns how many rows, `most` at most.
 */
ENTRY(nvmlSimgpuResidency, struct device *device, uint64_t *nowp, struct simgpu_residency rows[],
      int most)
{
    const struct gpu *gpu = device->gpu;
    const struct gpu_timeline *line;
    int n = 0;

    if (!device_enter(device))
        return FAILED;
    device_reap(device); /* as NVML's lists of processes do */
    line = schedule_current(device->gpu);
    *nowp = line->now;
    for (uint32_t i = 0; i < gpu->shared.n_contexts && n < most; i++) {
        int pid = gpu->contexts[i].serial ? device_slot_pid(device, gpu->contexts[i].slot) : 0;
        const struct gpu_lane *lane = &line->lanes[i];

        if (pid <= 0)
            continue;
        rows[n++] = (struct simgpu_residency){
            .pid = (uint64_t)pid,
            .ns = lane->resident,
            .early = lane->early,
            .full = lane->full,
            .ended = lane->ended,
        };
    }
    device_leave(device);
    return n;
}
