/* Definitions that the files of the simulated NVML share; see nvml.c. */
#pragma once

#include "device.h"
#include "nvml_abi.h"

/* Declares and begins a function that the library exports. If it has no parameters, pass `void`. */
#define ENTRY(type, name, ...)                                                                     \
    __attribute__((visibility("default"))) type name(__VA_ARGS__);                                 \
    type name(__VA_ARGS__)

nvmlReturn_t ready_device(nvmlDevice_t device, const void *result);
int index_of(nvmlDevice_t device);
