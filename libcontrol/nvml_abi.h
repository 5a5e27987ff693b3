/* Types and constants from NVIDIA's nvml.h 13.0, for the NVML answers that Tidegate replaces. */
#pragma once

typedef struct nvmlDevice_st *nvmlDevice_t;
typedef int nvmlReturn_t;
typedef int nvmlSamplingType_t;
typedef int nvmlValueType_t;

#define NVML_SUCCESS                  0
#define NVML_ERROR_UNINITIALIZED      1
#define NVML_ERROR_INVALID_ARGUMENT   2
#define NVML_ERROR_NOT_SUPPORTED      3
#define NVML_ERROR_NOT_FOUND          6
#define NVML_ERROR_INSUFFICIENT_SIZE  7
#define NVML_ERROR_FUNCTION_NOT_FOUND 13

#define NVML_GPU_UTILIZATION_SAMPLES    1
#define NVML_MEMORY_UTILIZATION_SAMPLES 2
#define NVML_VALUE_TYPE_UNSIGNED_INT    1
#define NVML_MAX_GPU_UTILIZATIONS       8
#define NVML_GPU_UTILIZATION_DOMAIN_GPU 0
#define NVML_GPU_UTILIZATION_DOMAIN_FB  1
#define NVML_PROCESS_MODE_COMPUTE       0          /* a value of nvmlProcessDetailList_t.mode */
#define NVML_NO_INSTANCE                0xffffffff /* no GPU instance or compute instance (MIG) */

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned int gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned int flags;
    struct {
        unsigned int bIsPresent, percentage, incThreshold, decThreshold;
    } utilization[NVML_MAX_GPU_UTILIZATIONS];
} nvmlGpuDynamicPstatesInfo_t;

typedef union {
    double dVal;
    unsigned int uiVal;
    unsigned long long ullVal;
} nvmlValue_t;

typedef struct {
    unsigned long long timeStamp; /* microseconds since 1970, like all of NVML's time stamps */
    nvmlValue_t sampleValue;
} nvmlSample_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_v2_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
    unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;

typedef struct {
    unsigned int version, mode, numProcArrayEntries;
    nvmlProcessDetail_v1_t *procArray;
} nvmlProcessDetailList_t;

typedef struct {
    unsigned int pid;
    unsigned long long timeStamp;
    unsigned int smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

typedef struct {
    unsigned long long timeStamp;
    unsigned int pid, smUtil, memUtil, encUtil, decUtil, jpgUtil, ofaUtil;
} nvmlProcessUtilizationInfo_v1_t;

typedef struct {
    unsigned int version, processSamplesCount;
    unsigned long long lastSeenTimeStamp;
    nvmlProcessUtilizationInfo_v1_t *procUtilArray;
} nvmlProcessesUtilizationInfo_t;

typedef struct {
    unsigned int gpuUtilization, memoryUtilization;
    unsigned long long maxMemoryUsage, time, startTime;
    unsigned int isRunning, reserved[5];
} nvmlAccountingStats_t;

_Static_assert(sizeof(nvmlMemory_v2_t) == 40, "as in nvml.h");
_Static_assert(sizeof(nvmlGpuDynamicPstatesInfo_t) == 132, "as in nvml.h");
_Static_assert(sizeof(nvmlSample_t) == 16, "as in nvml.h");
_Static_assert(sizeof(nvmlProcessInfo_v1_t) == 16, "as in nvml.h");
_Static_assert(sizeof(nvmlProcessInfo_v2_t) == 24, "as in nvml.h");
_Static_assert(sizeof(nvmlProcessDetail_v1_t) == 32, "as in nvml.h");
_Static_assert(sizeof(nvmlProcessDetailList_t) == 24, "as in nvml.h");
_Static_assert(sizeof(nvmlProcessUtilizationSample_t) == 32, "as in nvml.h");
_Static_assert(sizeof(nvmlProcessUtilizationInfo_v1_t) == 40, "as in nvml.h");
_Static_assert(sizeof(nvmlProcessesUtilizationInfo_t) == 24, "as in nvml.h");
_Static_assert(sizeof(nvmlAccountingStats_t) == 56, "as in nvml.h");
