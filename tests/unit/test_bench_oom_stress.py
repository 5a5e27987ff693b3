"""The program that competes for memory, on a driver in which every allocation fails."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

DRIVER = """
#include <stddef.h>
int cuMemAlloc_v2(void) { return 2; }   /* CUDA_ERROR_OUT_OF_MEMORY */
int cuMemAllocAsync(void) { return 1; } /* CUDA_ERROR_INVALID_VALUE */
int cuMemGetInfo_v2(size_t *left, size_t *total)
{
    static size_t calls;
    *left = *total = ++calls << 26; /* memory comes back with each call */
    return 0;
}
"""
OTHERS = (
    "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuStreamCreate",
    "cuStreamSynchronize", "cuMemFree_v2", "cuMemFreeAsync", "cuMemCreate", "cuMemRelease",
    "cuMemAddressReserve", "cuMemAddressFree", "cuMemMap", "cuMemUnmap",
)  # fmt: skip


@pytest.mark.parametrize(("ways", "refused"), [(1, True), (2, False)])
def test_only_a_lack_of_memory_counts_as_a_refusal(
    require: Callable[..., None], build_dir: Path, tmp_path: Path, ways: int, *, refused: bool
) -> None:
    require("gcc")
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER + "".join(f"int {name}(void) {{ return 0; }}\n" for name in OTHERS))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    done = subprocess.run(
        [build_dir / "oom_stress", "--processes", "1", "--threads", "1", "--seconds", "1", "--ways", str(ways)],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        check=True,
        timeout=60,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert told["allocations"] == 0
    assert (told["refused"] > 0, told["wrong"] > 0) == (refused, not refused)
