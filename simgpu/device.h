/* A device file opened by this library; see device.c. */
#pragma once

#include <pthread.h>
#include <stdbool.h>

#include "layout.h"

#define DEVICES 32 /* gpu0 to gpu31 are searched for */

struct device {
    struct gpu *gpu;
    int fd;
    uint32_t slot;
    uint32_t generation;
    uint64_t key;                /* identifies this process */
    pthread_mutex_t local;       /* taken first: the shared lock excludes only other processes */
    struct gpu_timeline scratch; /* for predictions, with the lock held */
};

int device_open(struct device **devicep, const char *directory, unsigned int minor, bool nvml);
void device_detach(struct device *device);
void device_abandon(struct device *device);

bool device_enter(struct device *device);
void device_leave(struct device *device);
uint64_t device_clock(const struct device *device);
void device_reap(struct device *device);
bool device_wait(struct device *device, uint64_t when);

uint64_t device_used(const struct device *device);
uint64_t device_slot_memory(const struct device *device, uint32_t slot);
bool device_slot_away(const struct device *device, uint32_t slot);
unsigned int device_slot_contexts(const struct device *device, uint32_t slot);
int device_slot_pid(const struct device *device, uint32_t slot);
void device_uuid_text(const struct device *device, char text[static 41]);

const char *device_directory(void);
uint64_t clock_monotonic(void);
