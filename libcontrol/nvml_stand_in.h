/* Internal declarations of the substitute for NVML: the driver's own functions, and the readers of
 * the container's grant page. */
#pragma once

#include "layout.gen.h"
#include "nvml.gen.h"

#include <stdbool.h>

#define NVML_EXPORT __attribute__((visibility("default")))

/* nvml_origin.c */
extern struct real_nvml real;
extern nvmlReturn_t (*real_uuid)(nvmlDevice_t device, char *uuid, unsigned int length);

/* nvml_page.c: one GPU of the container. */
struct page_device {
    const struct grant_device *grant;
    unsigned index; /* of the GPU in the entries of the usage part */
    bool usage;     /* whether the grant has a usage part */
};

/* One process of the container on one GPU. */
struct page_process {
    uint32_t pid;
    uint32_t utilisation, mean_utilisation; /* percent */
    uint64_t memory, memory_peak;           /* bytes */
    uint64_t start_us;
};

/* Returns false if the GPU was not granted to the container, or if there is no grant page. */
bool page_find(nvmlDevice_t device, struct page_device *foundp);

/* Lists the processes that use the GPU, and returns their number. Stores the time of the sample if
 * `time_usp` is not NULL. The device must have a usage part. */
unsigned page_processes(const struct page_device *device, struct page_process list[LAYOUT_N_SLOTS],
                        uint64_t *time_usp);

/* Returns when the usage part was written, in microseconds since 1970. */
uint64_t page_time(void);
