"""Rows of the API table for initialisation and for the look-up of functions."""

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
)
