"""The driver API as a table: what the control library does with each function of libcuda.

A function that is not in the table reaches the driver directly: the control library needs
(DT_NEEDED) the driver's own library, so a look-up of such a name falls through to it.
"""

from __future__ import annotations

from libcontrol.api import core, memory, nvml, uses, work
from libcontrol.api.row import Fn

CUDA: tuple[Fn, ...] = (*core.ROWS, *memory.ROWS, *uses.ROWS, *work.ROWS)
NVML: tuple[Fn, ...] = nvml.ROWS

__all__ = ["CUDA", "NVML", "Fn"]
