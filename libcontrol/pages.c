/*
 * Records where the grant page and the ledger are mapped in this process, and which of the driver's
 * devices are those of the grant.
 */
#include "pages.h"

#include <string.h>

struct pages pages_now;
uint32_t pages_started;
struct pages_file ledger_file;
static int device_index[LAYOUT_N_DEVICES * 4]; /* by CUdevice ordinal: index in the grant plus 1 */

void pages_match_devices(void)
{
    int count = 0;

    if (driver->cuDeviceGetCount(&count) != CUDA_SUCCESS)
        return;
    for (int ordinal = 0; ordinal < count && ordinal < (int)(sizeof device_index / sizeof(int));
         ordinal++) {
        CUdevice device;
        CUuuid uuid;

        /* Under MIG, cuDeviceGetUuid_v2 returns the UUID of the instance, and cuDeviceGetUuid that
         * of the GPU. */
        if (driver->cuDeviceGet(&device, ordinal) != CUDA_SUCCESS ||
            (driver->cuDeviceGetUuid_v2(&uuid, device) != CUDA_SUCCESS &&
             driver->cuDeviceGetUuid(&uuid, device) != CUDA_SUCCESS))
            continue;
        for (unsigned i = 0; i < pages_now.n_devices; i++)
            if (!memcmp(uuid.bytes, pages_grant_device(i)->uuid, sizeof uuid.bytes))
                device_index[ordinal] = (int)i + 1;
    }
}

void pages_deny(void)
{
    atomic_store_release(&pages_now.denied, true);
}

CUdevice pages_device(unsigned index)
{
    for (size_t ordinal = 0; ordinal < sizeof device_index / sizeof(int); ordinal++)
        if (device_index[ordinal] == (int)index + 1)
            return (CUdevice)ordinal;
    return -1;
}

int pages_index_of(CUdevice dev)
{
    if (!pages_slot() || dev < 0 || dev >= (int)(sizeof device_index / sizeof(int)))
        return -1;
    return device_index[dev] - 1;
}

int pages_index_current(void)
{
    CUdevice dev;

    if (unlikely(!pages_slot()))
        return -1;
    if (driver->cuCtxGetDevice(&dev) != CUDA_SUCCESS)
        return -1;
    return pages_index_of(dev);
}
