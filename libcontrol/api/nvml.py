"""What the stand-in for libnvidia-ml answers."""

from __future__ import annotations

from libcontrol.api.row import Fn

ROWS: tuple[Fn, ...] = (
    Fn("nvmlDeviceGetMemoryInfo", "nvmlDevice_t device, nvmlMemory_t *memory", "custom"),
    Fn("nvmlDeviceGetMemoryInfo_v2", "nvmlDevice_t device, nvmlMemory_v2_t *memory", "custom"),
)
