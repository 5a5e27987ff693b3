/*
 * Steering the GPU's scheduler from outside
 *
 * Models what a root process does to the channel groups of a real GPU through ioctls of the kernel
 * module. Contexts are selected by the pid of their process. The calls set time slices, switch
 * contexts off and on, and return how long each context has been on the GPU. Contexts that are
 * created later have the device's slice and are switched on.
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

    return context->serial && !device_slot_away(device, context->slot) &&
           device_slot_pid(device, context->slot) == pid;
}

/* Count as the driver does (docs/reference/driver-calls.md). The device's lock is held. */
static void count_off(struct gpu_context *context, bool on)
{
    uint32_t off = atomic_load(&context->off);

    if (!on)
        atomic_store(&context->off, off + 1);
    else if (off)
        atomic_store(&context->off, off - 1);
}

/* Steer the contexts of a process. Returns their number, or FAILED if the attachment is gone. */
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

/** nvmlSimgpuSetTimeslice() - set the slice of a process's contexts, in ns; 0: the default */
ENTRY(nvmlSimgpuSetTimeslice, struct device *device, int pid, uint64_t ns)
{
    return steer(device, pid, &ns, NULL);
}

/**
 * nvmlSimgpuSwitch() - switch a process's contexts on or off
 *
 * A context that was switched off twice is on again after it has been switched on twice.
 */
ENTRY(nvmlSimgpuSwitch, struct device *device, int pid, int on)
{
    bool is_on = on;

    return steer(device, pid, NULL, &is_on);
}

/* GPU time and turns of a context since its creation; ContextRow in steering.py is a copy. */
struct simgpu_residency {
    uint64_t pid;
    uint64_t ns;    /* on the GPU, with or without work */
    uint64_t early; /* turns that ended because it ran out of work */
    uint64_t full;  /* ns of turns that lasted their whole slice */
    uint64_t ended; /* when the last of those ended, on the GPU's clock */
};

/**
 * nvmlSimgpuResidency() - how long contexts have been on the GPU, up to `*nowp` on its clock
 *
 * Writes one row per existing context. Returns the number of rows, which is at most `most`.
 */
ENTRY(nvmlSimgpuResidency, struct device *device, uint64_t *nowp, struct simgpu_residency rows[],
      int most)
{
    const struct gpu *gpu = device->gpu;
    const struct gpu_timeline *line;
    int n = 0;

    if (!device_enter(device))
        return FAILED;
    device_reap(device); /* as NVML's process lists do */
    line = schedule_current(device->gpu);
    *nowp = line->now;
    for (uint32_t i = 0; i < gpu->shared.n_contexts && n < most; i++) {
        uint32_t slot = gpu->contexts[i].slot;
        bool exists = gpu->contexts[i].serial && !device_slot_away(device, slot);
        int pid = exists ? device_slot_pid(device, slot) : 0;
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
