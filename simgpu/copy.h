/*
 * Definitions that copies and fills share
 *
 * A copy or fill of 1 MiB or more that stays on the device takes time on the GPU, and it is carried
 * out when that time has passed. All others take no time, and keep the order of their stream.
 */
#pragma once

#include "driver.h"

/* Roughly as on an H200. */
#define TIMED         (1u << 20) /* bytes */
#define OVERHEAD      5000u      /* ns */
#define COPY_PER_NS   2000u      /* bytes: 2 TB/s */
#define FILL_PER_NS   4000u
#define ADDRESS(from) ((void *)(uintptr_t)(from))

/* cuda_copy.c */
bool on_device(const void *address);
