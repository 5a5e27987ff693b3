"""Dataclasses that describe a driver: the files found below a root, and those that are left out.

discover.py, fixed_dirs.py and wsl.py create them; plan.py turns them into a generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from vdriver.elf import Library
from vdriver.manifest import Bind


@dataclass(frozen=True)
class DriverFile:
    """A library or program of the driver; `path` is relative to the driver's root."""

    name: str
    path: str
    capability: str
    library: Library


@dataclass(frozen=True)
class DataFile:
    """A file for one of the places in libraries.toml.

    `host` is the path by which the file is opened. `content` is set if the mirror's copy differs
    from the file. `path` is None if the host has no such file and the content comes from
    libraries.toml. `size` is in bytes.
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
    """A file that looks like one of the driver's but is left out, with the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class Driver:
    """A complete driver: libcuda, libnvidia-ml and all files that came with them.

    `others` are the versions of other drivers that have libraries in the directory of this
    driver's libcuda.
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
