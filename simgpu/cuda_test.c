/*
 * For tests: the clock, an end without an exit, a bad death, and a slow driver
 *
 * No program needs these; a driver does not have them.
 */
#include "driver.h"

#include <unistd.h>

#include "schedule.h"

/* Stop a device's clock at `now` (ns) and move it there; it never goes back. */
ENTRY(simgpu_clock_set, CUdevice ordinal, uint64_t now)
{
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = driver_device(ordinal, &device);
    if (r)
        return driver_leave(r);
    if (!device_enter(device))
        return driver_leave(CUDA_ERROR_DEINITIALIZED);
    if (now > device->gpu->shared.virtual_now)
        atomic_store(&device->gpu->shared.virtual_now, now);
    atomic_store(&device->gpu->shared.clock_mode, 1);
    device_leave(device);
    /* Decide what happened up to the new time, as anybody's next look would. */
    if (!device_enter(device))
        return driver_leave(CUDA_ERROR_DEINITIALIZED);
    device_leave(device);
    return driver_leave(CUDA_SUCCESS);
}

/* Read a device's clock, ns. */
ENTRY(simgpu_clock_get, CUdevice ordinal, uint64_t *nowp)
{
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = driver_device(ordinal, &device);
    if (!r)
        *nowp = device_clock(device);
    return driver_leave(r);
}

/* Back to before cuInit: all of this process's contexts, handles and attachments end. */
ENTRY(simgpu_detach, void)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    driver_forget(true);
    return driver_leave(CUDA_SUCCESS);
}

/* Take a device's lock and never release it. */
ENTRY(simgpu_hold, CUdevice ordinal)
{
    struct device *device;
    CUresult r = driver_enter();

    if (r)
        return r;
    r = driver_device(ordinal, &device);
    if (r || !device_enter(device))
        return driver_leave(r ? r : CUDA_ERROR_DEINITIALIZED);
    for (;;)
        pause();
}

/* From now on each cuEventRecord of this process takes so many microseconds, without a lock. */
ENTRY(simgpu_record_late, unsigned int us)
{
    atomic_store(&driver_record_us, us);
    return CUDA_SUCCESS;
}
