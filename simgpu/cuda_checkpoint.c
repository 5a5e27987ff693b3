/*
 * Entry points: checkpointing another process
 *
 * A process has a state on each of its devices. While it is locked, its threads wait at the
 * beginning of a call (driver_lock). While it is checkpointed, its memory and contexts also do not
 * count as being on the device. Their contents are in the process's own memory all the time.
 *
 * A command that waits for a word in the process's memory completes only while that process is in a
 * call, so a process with such a command cannot be locked. A real GPU notices the written word even
 * without a call.
 */
#include "driver.h"

#include <time.h>

#include "schedule.h"

#define NAP 200000u /* ns between two checks of whether a process is at rest */

/* Visits one attachment of the process, with the device's lock held. */
typedef bool visitor(struct device *device, uint32_t slot);

/* Call `visit` for each attachment of a process until it returns false. Returns the number of
 * attachments, or -1 if `visit` returned false. */
static int visit_each(int pid, visitor *visit)
{
    int n = 0;

    for (int i = 0; i < driver.n_devices; i++) {
        struct device *device = driver.devices[i];
        bool go_on = true;

        if (!device_enter(device))
            continue;
        for (uint32_t slot = 0; go_on && slot < GPU_SLOT_NVML; slot++) {
            if (!device->gpu->shared.slots[slot].attached || device_slot_pid(device, slot) != pid)
                continue;
            n++;
            go_on = visit(device, slot);
        }
        device_leave(device);
        if (!go_on)
            return -1;
    }
    return n;
}

static uint32_t state_of(const struct device *device, uint32_t slot)
{
    return atomic_load(&device->gpu->shared.slots[slot].state);
}

static void set_state(const struct device *device, uint32_t slot, uint32_t state)
{
    atomic_store(&device->gpu->shared.slots[slot].state, state);
}

static bool is_below_locked(struct device *device, uint32_t slot)
{
    return state_of(device, slot) < CU_PROCESS_STATE_LOCKED;
}

static bool is_below_checkpointed(struct device *device, uint32_t slot)
{
    return state_of(device, slot) < CU_PROCESS_STATE_CHECKPOINTED;
}

/*
 * The state of a process is the most advanced state of its attachments: if a caller is killed
 * between two attachments, their states differ.
 */
static CUresult find_state(int pid, CUprocessState *statep)
{
    int n = visit_each(pid, is_below_checkpointed);

    if (n == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (n < 0)
        *statep = CU_PROCESS_STATE_CHECKPOINTED;
    else
        *statep = visit_each(pid, is_below_locked) < 0 ? CU_PROCESS_STATE_LOCKED
                                                       : CU_PROCESS_STATE_RUNNING;
    return CUDA_SUCCESS;
}

static bool unlock(struct device *device, uint32_t slot)
{
    set_state(device, slot, CU_PROCESS_STATE_RUNNING);
    return true;
}

static bool lock(struct device *device, uint32_t slot)
{
    set_state(device, slot, CU_PROCESS_STATE_LOCKED);
    return true;
}

static bool checkpoint(struct device *device, uint32_t slot)
{
    set_state(device, slot, CU_PROCESS_STATE_CHECKPOINTED);
    return true;
}

/* Bring an attachment back, if there is room. Its contexts get new channels, which are
 * switched on and have the device's default slice. */
static bool restore(struct device *device, uint32_t slot)
{
    struct gpu *gpu = device->gpu;

    set_state(device, slot, CU_PROCESS_STATE_LOCKED);
    if (device_used(device) > gpu->config.memory) {
        set_state(device, slot, CU_PROCESS_STATE_CHECKPOINTED);
        return false;
    }
    for (uint32_t i = 0; i < gpu->shared.n_contexts; i++) {
        if (!gpu->contexts[i].serial || gpu->contexts[i].slot != slot)
            continue;
        atomic_store(&gpu->contexts[i].slice, 0);
        atomic_store(&gpu->contexts[i].off, 0);
    }
    return true;
}

/* Returns whether no thread of the process is in a call and all its work is done. */
static bool is_at_rest(struct device *device, uint32_t slot)
{
    const struct gpu *gpu = device->gpu;
    const struct gpu_timeline *line = schedule_current(device->gpu);

    if (atomic_load(&gpu->shared.slots[slot].inside))
        return false;
    for (uint32_t i = 0; i < gpu->shared.n_contexts; i++) {
        if (gpu->contexts[i].serial && gpu->contexts[i].slot == slot &&
            line->lanes[i].head < gpu->contexts[i].tail)
            return false;
    }
    return true;
}

/* Change the state of a process, which has to be in the state `before`. */
static CUresult change(int pid, CUprocessState before, visitor *make)
{
    CUprocessState state = before;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = find_state(pid, &state);
    if (!r && state != before)
        r = CUDA_ERROR_ILLEGAL_STATE;
    if (!r && visit_each(pid, make) < 0) {
        (void)visit_each(pid, checkpoint); /* there was no room to restore one of the attachments */
        r = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return driver_leave(r);
}

ENTRY(cuCheckpointProcessGetState, int pid, CUprocessState *statep)
{
    CUresult r;

    if (!statep)
        return CUDA_ERROR_INVALID_VALUE;
    r = driver_enter();
    if (r)
        return r;
    return driver_leave(find_state(pid, statep));
}

/* Lock a process, and wait until its work is done. After a timeout, unlock it. */
ENTRY(cuCheckpointProcessLock, int pid, CUcheckpointLockArgs *args)
{
    static const struct timespec nap = {.tv_nsec = NAP};
    uint64_t began = clock_monotonic();
    uint64_t most = args && args->timeoutMs ? args->timeoutMs * UINT64_C(1000000) : UINT64_MAX;
    CUresult r = change(pid, CU_PROCESS_STATE_RUNNING, lock);

    if (r)
        return r;
    for (;;) {
        r = driver_enter();
        if (r)
            return r;
        if (visit_each(pid, is_at_rest) >= 0)
            return driver_leave(CUDA_SUCCESS);
        if (clock_monotonic() - began > most) {
            (void)visit_each(pid, unlock);
            return driver_leave(CUDA_ERROR_NOT_READY);
        }
        (void)driver_leave(CUDA_SUCCESS);
        nanosleep(&nap, NULL);
    }
}

ENTRY(cuCheckpointProcessCheckpoint, int pid, CUcheckpointCheckpointArgs *args)
{
    (void)args;
    return change(pid, CU_PROCESS_STATE_LOCKED, checkpoint);
}

ENTRY(cuCheckpointProcessRestore, int pid, CUcheckpointRestoreArgs *args)
{
    (void)args;
    return change(pid, CU_PROCESS_STATE_CHECKPOINTED, restore);
}

ENTRY(cuCheckpointProcessUnlock, int pid, CUcheckpointUnlockArgs *args)
{
    (void)args;
    return change(pid, CU_PROCESS_STATE_LOCKED, unlock);
}
