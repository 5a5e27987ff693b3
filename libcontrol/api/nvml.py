"""Rows of the API table for the functions of libnvidia-ml that Tidegate's own library answers.

They are the functions in version 13.0 of NVIDIA's header that report the memory in use, the
utilisation or the processes of a GPU. BAR 1, the video engines, GPM's metrics and the fields of
nvmlDeviceGetFieldValues (none of which is about memory in use or processes) concern the whole GPU
and are left to the driver.
"""

from __future__ import annotations

from libcontrol.api.row import Fn


def _lists(kind: str) -> tuple[Fn, ...]:
    """Return the three forms of a list of processes; from the second on, entries have MIG ids."""
    name = f"nvmlDeviceGet{kind}RunningProcesses"
    return tuple(
        Fn(
            name + suffix,
            f"nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_{entry}_t *infos",
            "custom",
        )
        for suffix, entry in (("", "v1"), ("_v2", "v2"), ("_v3", "v2"))
    )


ROWS: tuple[Fn, ...] = (
    Fn("nvmlDeviceGetMemoryInfo", "nvmlDevice_t device, nvmlMemory_t *memory", "custom"),
    Fn("nvmlDeviceGetMemoryInfo_v2", "nvmlDevice_t device, nvmlMemory_v2_t *memory", "custom"),
    Fn(
        "nvmlDeviceGetUtilizationRates",
        "nvmlDevice_t device, nvmlUtilization_t *utilization",
        "custom",
    ),
    Fn(
        "nvmlDeviceGetDynamicPstatesInfo",
        "nvmlDevice_t device, nvmlGpuDynamicPstatesInfo_t *info",
        "custom",
    ),
    Fn(
        "nvmlDeviceGetSamples",
        "nvmlDevice_t device, nvmlSamplingType_t type, unsigned long long last,"
        " nvmlValueType_t *valueType, unsigned int *count, nvmlSample_t *samples",
        "custom",
    ),
    *_lists("Compute"),
    *_lists("Graphics"),
    *_lists("MPSCompute"),
    Fn(
        "nvmlDeviceGetRunningProcessDetailList",
        "nvmlDevice_t device, nvmlProcessDetailList_t *list",
        "custom",
    ),
    Fn(
        "nvmlDeviceGetProcessUtilization",
        "nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count,"
        " unsigned long long last",
        "custom",
    ),
    Fn(
        "nvmlDeviceGetProcessesUtilizationInfo",
        "nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info",
        "custom",
    ),
    Fn(
        "nvmlDeviceGetAccountingPids",
        "nvmlDevice_t device, unsigned int *count, unsigned int *pids",
        "custom",
    ),
    Fn(
        "nvmlDeviceGetAccountingStats",
        "nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats",
        "custom",
    ),
)
