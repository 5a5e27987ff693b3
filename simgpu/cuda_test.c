/*
 * For tests: set the clock, detach without exiting, hold the lock, and slow the driver down
 *
 * A real driver does not have these functions, and no program needs them.
 */
#include "driver.h"

#include <unistd.h>

#include "schedule.h"

/* Stop a device's clock, and move it to `now` (ns); it never goes back. */
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
    /* Bring the device's state up to the new time, as the next call from any process would. */
    if (!device_enter(device))
        return driver_leave(CUDA_ERROR_DEINITIALIZED);
    device_leave(device);
    return driver_leave(CUDA_SUCCESS);
}

/* Read a device's clock, in ns. */
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

/* Return to the state before cuInit: end all contexts, handles and attachments of this process. */
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

/* Make each later cuEventRecord in this process take `us` microseconds, without holding a lock. */
ENTRY(simgpu_record_late, unsigned int us)
{
    atomic_store(&driver_record_us, us);
    return CUDA_SUCCESS;
}
