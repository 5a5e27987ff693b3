/*
 * The stand-in for libnvidia-ml: the container's quota is the GPU's memory.
 *
 * It reads the grant page only; a monitoring program needs no slot in the ledger. Use is as of the
 * governor's last reconciliation, a quarter of a second old at most.
 */
#include "layout.gen.h"
#include "nvml_abi.h"
#include "prim.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define EXPORT      __attribute__((visibility("default")))
#define ORIGIN_NAME "libnvidia-ml-origin.so.1"

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory);
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory);

static nvmlReturn_t (*real_memory_info)(nvmlDevice_t, nvmlMemory_t *);
static nvmlReturn_t (*real_memory_info_v2)(nvmlDevice_t, nvmlMemory_v2_t *);
static nvmlReturn_t (*real_uuid)(nvmlDevice_t, char *, unsigned int);

__attribute__((constructor)) static void resolve(void)
{
    void *handle = dlopen(ORIGIN_NAME, RTLD_LAZY | RTLD_NOLOAD);

    if (!handle)
        return;
    *(void **)&real_memory_info = dlsym(handle, "nvmlDeviceGetMemoryInfo");
    *(void **)&real_memory_info_v2 = dlsym(handle, "nvmlDeviceGetMemoryInfo_v2");
    *(void **)&real_uuid = dlsym(handle, "nvmlDeviceGetUUID");
}

static const char *map_grant(void)
{
    static const char *mapped;
    const struct grant_header *page;
    struct stat st;
    int fd;

    if (atomic_load_acquire(&mapped))
        return mapped;
    fd = open("/run/tidegate/grant", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    if (syscall(SYS_fstat, fd, &st) < 0 || (uint64_t)st.st_size < GRANT_SIZE) {
        close(fd);
        return NULL;
    }
    page = mmap(NULL, GRANT_SIZE, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (page == MAP_FAILED)
        return NULL;
    if (page->magic != GRANT_MAGIC || page->version != LAYOUT_VERSION) {
        munmap((void *)page, GRANT_SIZE);
        return NULL;
    }
    atomic_store_release(&mapped, (const char *)page);
    return mapped;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

/* "GPU-11111111-2222-..." to 16 bytes. */
static bool parse_uuid(const char *text, uint8_t *bytes)
{
    unsigned n = 0;

    if (strncmp(text, "GPU-", 4))
        return false;
    for (text += 4; *text && n < 32; text++) {
        int digit = hex_digit(*text);

        if (*text == '-')
            continue;
        if (digit < 0)
            return false;
        bytes[n / 2] = (uint8_t)(n % 2 ? bytes[n / 2] | digit : digit << 4);
        n++;
    }
    return n == 32;
}

static const struct grant_device *find_grant(nvmlDevice_t device)
{
    const char *page = map_grant();
    const struct grant_device *grant;
    char text[96] = "";
    uint8_t uuid[16];
    uint32_t n;

    if (!page || !real_uuid || real_uuid(device, text, sizeof text) != NVML_SUCCESS ||
        !parse_uuid(text, uuid))
        return NULL;
    grant = (const struct grant_device *)(page + GRANT_DEVICES);
    n = ((const struct grant_header *)page)->n_devices;
    for (uint32_t i = 0; i < n && i < LAYOUT_N_DEVICES; i++)
        if (!memcmp(grant[i].uuid, uuid, sizeof uuid))
            return &grant[i];
    return NULL;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    const struct grant_device *grant;
    nvmlReturn_t result;

    if (!real_memory_info)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    result = real_memory_info(device, memory);
    grant = result == NVML_SUCCESS ? find_grant(device) : NULL;
    if (grant) {
        memory->total = atomic_load_relaxed(&grant->memory_limit);
        memory->used = atomic_load_relaxed(&grant->memory_used);
        if (memory->used > memory->total)
            memory->used = memory->total;
        memory->free = memory->total - memory->used;
    }
    return result;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    const struct grant_device *grant;
    nvmlReturn_t result;

    if (!real_memory_info_v2)
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    result = real_memory_info_v2(device, memory);
    grant = result == NVML_SUCCESS ? find_grant(device) : NULL;
    if (grant) {
        memory->total = atomic_load_relaxed(&grant->memory_limit);
        memory->reserved = 0;
        memory->used = atomic_load_relaxed(&grant->memory_used);
        if (memory->used > memory->total)
            memory->used = memory->total;
        memory->free = memory->total - memory->used;
    }
    return result;
}
