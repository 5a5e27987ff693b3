"""A driver as values: what was found below a root, and what was left out.

discover.py, places.py and wsl.py make these; plan.py turns them into a generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from vdriver.elf import Library
from vdriver.manifest import Bind


@dataclass(frozen=True)
class DriverFile:
    """A library or program of the driver: where it is below the driver's root, and what it is."""

    name: str
    path: str
    capability: str
    library: Library


@dataclass(frozen=True)
class DataFile:
    """A file for one of the places of libraries.toml.

    `host` is the name to open it by, `content` what is mirrored where that is not the file's own.
    Without a `path` the host has no such file, and it comes from the table.
    """

    place: str
    name: str
    path: str | None
    host: str
    size: int
    mtime_ns: int
    library: Library | None = None
    content: bytes | None = None


@dataclass(frozen=True)
class Skipped:
    """A file that looks like the driver's and is left out, with the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class Driver:
    """A complete driver: libcuda, libnvidia-ml and whatever else came with them.

    `others` are the versions of other drivers' libraries in the directory of its libcuda.
    """

    root: str
    version: str
    kind: str
    machine: str
    kernel_version: str | None
    cuda: DriverFile
    nvml: DriverFile
    libraries: tuple[DriverFile, ...]
    libraries32: tuple[DriverFile, ...]
    programs: tuple[DriverFile, ...]
    data: tuple[DataFile, ...]
    binds: tuple[Bind, ...]
    skipped: tuple[Skipped, ...]
    others: tuple[str, ...] = ()
