/*
 * The part of NVML that the simulated GPU offers
 *
 * Values and layouts are those in NVIDIA's nvml.h from CUDA 13.0. Names of members and macros are
 * shortened.
 */
#pragma once

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

typedef struct device *nvmlDevice_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned int pid;
    unsigned long long used;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
} nvmlProcessInfo_t;

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
    unsigned long long protected;
} nvmlProcessDetail_t;

typedef struct {
    unsigned int version, mode, count;
    nvmlProcessDetail_t *infos;
} nvmlProcessDetailList_t;

typedef struct {
    unsigned int pid;
    unsigned long long time;
    unsigned int sm, memory, encoder, decoder;
} nvmlProcessUtilizationSample_t;

typedef struct {
    unsigned long long time;
    unsigned int pid, sm, memory, encoder, decoder, jpeg, ofa;
} nvmlProcessUtilizationInfo_t;

typedef struct {
    unsigned int version, count;
    unsigned long long last;
    nvmlProcessUtilizationInfo_t *infos;
} nvmlProcessesUtilizationInfo_t;

typedef struct {
    unsigned int gpu, memory;
    unsigned long long max_memory, time, start;
    unsigned int running, reserved[5];
} nvmlAccountingStats_t;

typedef struct {
    unsigned int gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned int flags;
    struct {
        unsigned int present, percentage, increase, decrease;
    } utilization[8];
} nvmlGpuDynamicPstatesInfo_t;

typedef struct {
    unsigned long long time;
    union {
        unsigned int number;
        unsigned long long wide;
    } value;
} nvmlSample_t;

typedef struct {
    char legacy_bus_id[16];
    unsigned int domain, bus, device, pci_device, pci_subsystem;
    char bus_id[32];
} nvmlPciInfo_t;

#define MEMORY_V2      (sizeof(nvmlMemory_v2_t) | 2u << 24)
#define DETAILS_V1     (sizeof(nvmlProcessDetailList_t) | 1u << 24)
#define UTILIZATION_V1 (sizeof(nvmlProcessesUtilizationInfo_t) | 1u << 24)
#define NO_INSTANCE    0xffffffffu /* neither a GPU instance nor a compute instance of MIG */

#define GPU_UTILIZATION_SAMPLES 1 /* nvmlSamplingType_t */
#define TYPE_UNSIGNED_INT       1 /* nvmlValueType_t */

#define TOPOLOGY_SINGLE     10 /* nvmlGpuTopologyLevel_t: one PCIe switch */
#define TOPOLOGY_MULTIPLE   20 /* several PCIe switches below one host bridge */
#define TOPOLOGY_HOSTBRIDGE 30
#define TOPOLOGY_NODE       40
#define TOPOLOGY_SYSTEM     50
#define LINK_TO_GPU         0 /* nvmlIntNvLinkDeviceType_t */
#define LINK_TO_SWITCH      2
#define LINK_TO_UNKNOWN     0xff
