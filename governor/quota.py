"""Basic types: a container's quota, and a GPU of the node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
"""Units of a quantity in annotations and the configuration, in ascending order."""


def show_memory(amount: int) -> str:
    """Return a number of bytes as text: `256Mi` or, rounded down, `286.1 MiB`."""
    if amount < UNITS["Ki"]:
        return f"{amount} byte{'s' * (amount != 1)}"
    unit, size = next((u, s) for u, s in reversed(UNITS.items()) if amount % s == 0)
    if unit:
        return f"{amount // size}{unit}"
    unit, size = next((u, s) for u, s in reversed(UNITS.items()) if amount >= s)
    return f"{amount * 10 // size / 10:.1f} {unit}B"


THROUGHPUT, LATENCY = CLASSES = ("throughput", "latency")
"""Classes of work: batch work, and work that has to run immediately."""


_PARKABLE = frozenset({"compute", "utility", "compat32"})


def unparkable(capabilities: Iterable[str]) -> list[str]:
    """Return the capabilities with which a container's memory cannot be parked in host memory.

    Their libraries call the driver through interfaces that the control library does not see: a
    video decoder writes to memory that CUDA has allocated.
    """
    return sorted(set(capabilities) - _PARKABLE)


@dataclass(frozen=True)
class Quota:
    """A container's quota on each of its GPUs: bytes, percent, and the class of its work.

    `parking` tells whether its memory may be parked in host memory.
    """

    memory: int
    compute: int
    compute_limit: int
    work_class: str = THROUGHPUT
    parking: bool = False

    @property
    def is_latency(self) -> bool:
        """Whether the container may use its guarantee at any instant."""
        return self.work_class == LATENCY

    def describe(self) -> dict[str, Any]:
        """Return the quota in the form that is used in answers and in the log."""
        return {
            "memory": self.memory,
            "compute": self.compute,
            "compute_limit": self.compute_limit,
            "class": self.work_class,
            **({"parking": True} if self.parking else {}),
        }


@dataclass(frozen=True)
class Device:
    """One GPU of the node."""

    index: int
    uuid: str
    name: str
    memory: int
    minor: int | None = None  # of its device node, if it has one
