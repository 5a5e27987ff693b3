/* The types of NVML that its stand-in passes through, with the values of NVIDIA's nvml.h 13.0. */
#pragma once

typedef struct nvmlDevice_st *nvmlDevice_t;
typedef int nvmlReturn_t;

#define NVML_SUCCESS                  0
#define NVML_ERROR_UNINITIALIZED      1
#define NVML_ERROR_NOT_SUPPORTED      3
#define NVML_ERROR_FUNCTION_NOT_FOUND 13

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;
