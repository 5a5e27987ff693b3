/*
 * Resolves the functions of the driver's own libnvidia-ml, which the substitute library needs
 * (DT_NEEDED) under another name.
 */
#include "nvml_stand_in.h"
#include "os.h"

#include <dlfcn.h>

#define ORIGIN_NAME "libnvidia-ml-origin.so.1"

struct real_nvml real;
nvmlReturn_t (*real_uuid)(nvmlDevice_t device, char *uuid, unsigned int length);

__attribute__((constructor)) static void resolve(void)
{
    void *handle = dlopen(ORIGIN_NAME, RTLD_LAZY | RTLD_NOLOAD);

    if (!handle)
        return;
#define RESOLVE(name) *(void **)&real.name = dlsym(handle, #name);
    NVML_FUNCTIONS(RESOLVE)
#undef RESOLVE
    *(void **)&real_uuid = dlsym(handle, "nvmlDeviceGetUUID");
}
