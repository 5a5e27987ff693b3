/* The stand-in for NVML: the driver's own functions, and what is read of the container's grant. */
#pragma once

#include "layout.gen.h"
#include "nvml.gen.h"

#include <stdbool.h>

#define NVML_EXPORT __attribute__((visibility("default")))

/* nvml.c */
extern struct real_nvml real;
extern nvmlReturn_t (*real_uuid)(nvmlDevice_t device, char *uuid, unsigned int length);

/* nvml_page.c: a GPU of the container. */
struct page_device {
    const struct grant_device *grant;
    unsigned index; /* in the usage part's entries */
    bool usage;     /* the grant has a usage part */
};

/* One process of the container on one GPU. */
struct page_process {
    uint32_t pid;
    uint32_t utilisation, mean_utilisation; /* percent */
    uint64_t memory, memory_peak;           /* bytes */
    uint64_t start_us;
};

/* False: this GPU is none of the container's, or there is no grant. */
bool page_find(nvmlDevice_t device, struct page_device *foundp);

/* Lists the processes that use the GPU, and says when that was. The device has a usage part. */
unsigned page_processes(const struct page_device *device, struct page_process list[LAYOUT_N_SLOTS],
                        uint64_t *time_usp);

/* When the usage part was written, microseconds since 1970. */
uint64_t page_time(void);
