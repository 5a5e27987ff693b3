"""Start, look-up and what is reported."""

from __future__ import annotations

from libcontrol.api.row import Fn

ROWS: tuple[Fn, ...] = (
    Fn("cuInit", "unsigned int Flags", "custom"),
    Fn(
        "cuGetProcAddress",
        "const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags",
        "custom",
    ),
    Fn(
        "cuGetProcAddress_v2",
        "const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, "
        "CUdriverProcAddressQueryResult *symbolStatus",
        "custom",
    ),
    Fn("cuDeviceTotalMem_v2", "size_t *bytes, CUdevice dev", "custom"),
    Fn("cuMemGetInfo_v2", "size_t *free_bytes, size_t *total", "custom"),
)
