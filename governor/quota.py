"""What is granted and of what: a container's quota, and a GPU of the node."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Quota:
    """What one container may use of each of its GPUs: bytes, percent."""

    memory: int
    compute: int
    compute_limit: int


@dataclass(frozen=True)
class Device:
    """One GPU of the node."""

    index: int
    uuid: str
    name: str
    memory: int
    minor: int | None = None  # of its device node, where it has one
