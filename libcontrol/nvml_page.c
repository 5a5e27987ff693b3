/*
 * Reads the container's grant page, and the usage part after it, for the substitute for NVML.
 *
 * A monitoring program needs neither a slot in the ledger nor a socket: the grant's file is mapped
 * read-only. Only the mapping is kept, so any thread may call these functions at any time.
 */
#include "nvml_stand_in.h"

#include "os.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define GRANT_PATH "/run/tidegate/grant"

/* The governor writes all entries in a single copy. If it is preempted while doing so, a reader
 * waits up to about 0.1 s for it. */
#define READ_TRIES   1000
#define READ_WAIT_NS (50 * NS_PER_US)

static const struct grant_header *map_grant(void)
{
    static const struct grant_header *mapped;
    const struct grant_header *page = atomic_load_acquire(&mapped);
    const struct grant_header *first = NULL;
    struct stat st;
    size_t size = GRANT_SIZE;
    int fd;

    if (page)
        return page;
    fd = os_open(GRANT_PATH);
    if (fd < 0)
        return NULL;
    if (os_call(SYS_fstat, fd, &st) < 0 || (uint64_t)st.st_size < GRANT_SIZE) {
        os_close(fd);
        return NULL;
    }
    if ((uint64_t)st.st_size >= GRANT_FILE_SIZE)
        size = GRANT_FILE_SIZE;
    page = os_map(size, PROT_READ, MAP_SHARED, fd);
    os_close(fd);
    if (!page)
        return NULL;
    if (page->magic == GRANT_MAGIC && page->version == LAYOUT_VERSION && page->size >= GRANT_SIZE &&
        page->size <= (uint64_t)st.st_size &&
        __atomic_compare_exchange_n(&mapped, &first, page, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
        return page;
    os_unmap((void *)page, size);
    return first; /* what another thread mapped first; NULL: this is not a valid grant page */
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

/* Parses "GPU-11111111-2222-..." or "MIG-11111111-2222-..." into 16 bytes. */
static bool parse_uuid(const char *text, uint8_t *bytes)
{
    unsigned n = 0;

    if (strncmp(text, "GPU-", 4) && strncmp(text, "MIG-", 4))
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

bool page_find(nvmlDevice_t device, struct page_device *foundp)
{
    const struct grant_header *page = map_grant();
    const struct grant_device *grants;
    char text[96] = "";
    uint8_t uuid[16];

    if (!page || !real_uuid || real_uuid(device, text, sizeof text) != NVML_SUCCESS ||
        !parse_uuid(text, uuid))
        return false;
    grants = (const struct grant_device *)((const char *)page + GRANT_DEVICES);
    for (unsigned i = 0; i < page->n_devices && i < LAYOUT_N_DEVICES; i++) {
        if (memcmp(grants[i].uuid, uuid, sizeof uuid))
            continue;
        foundp->grant = &grants[i];
        foundp->index = i;
        foundp->usage = page->size >= GRANT_FILE_SIZE;
        return true;
    }
    return false;
}

static unsigned copy_entries(const struct usage_header *header, unsigned device,
                             struct page_process *list)
{
    const struct usage_entry *entries =
        (const struct usage_entry *)((const char *)header + (GRANT_USAGE_ENTRIES - GRANT_USAGE));
    uint32_t n_entries = atomic_load_relaxed(&header->n_entries);
    unsigned n = 0;

    for (uint32_t i = 0; i < n_entries && i < LAYOUT_N_SLOTS; i++) {
        const struct usage_entry *entry = &entries[i];

        /* A process that has taken no memory has no context, and NVML would not list it. */
        if (!atomic_load_relaxed(&entry->state) || !atomic_load_relaxed(&entry->memory[device]))
            continue;
        list[n].pid = atomic_load_relaxed(&entry->pid);
        list[n].utilisation = atomic_load_relaxed(&entry->utilisation[device]);
        list[n].mean_utilisation = atomic_load_relaxed(&entry->mean_utilisation[device]);
        list[n].memory = atomic_load_relaxed(&entry->memory[device]);
        list[n].memory_peak = atomic_load_relaxed(&entry->memory_peak[device]);
        list[n].start_us = atomic_load_relaxed(&entry->start_us);
        n++;
    }
    return n;
}

static const struct usage_header *usage_part(void)
{
    return (const struct usage_header *)((const char *)map_grant() + GRANT_USAGE);
}

uint64_t page_time(void)
{
    return atomic_load_relaxed(&usage_part()->time_us);
}

/*
 * The sequence is odd while the governor is writing. The governor may have been killed at that
 * moment, so the wait is bounded. Each individual number is valid even then, and the next governor
 * writes the entries again.
 */
unsigned page_processes(const struct page_device *device, struct page_process list[LAYOUT_N_SLOTS],
                        uint64_t *time_usp)
{
    const struct usage_header *header = usage_part();
    unsigned n = 0;

    for (int i = 0; i < READ_TRIES; i++) {
        uint32_t sequence = atomic_load_acquire(&header->sequence);

        n = copy_entries(header, device->index, list);
        if (time_usp)
            *time_usp = atomic_load_relaxed(&header->time_us);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (!(sequence & 1) && atomic_load_relaxed(&header->sequence) == sequence)
            break;
        os_sleep(READ_WAIT_NS);
    }
    return n;
}
