"""`libraries.toml`, read once: which capability a driver file serves, and where drivers are."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

UNKNOWN = "compute"


@dataclass(frozen=True)
class Tables:
    """What is known about driver files before looking at any."""

    libraries: dict[str, str]
    programs: dict[str, str]
    companions: tuple[str, ...]
    directories: tuple[str, ...]
    below: tuple[str, ...]
    program_directories: tuple[str, ...]
    roots: tuple[str, ...]

    def capability(self, file_name: str) -> str:
        """Return the capability of a library by its file name; `compute` for an unknown one."""
        return self.libraries.get(file_name.partition(".so")[0], UNKNOWN)

    def is_driver_file(self, file_name: str, version: str) -> bool:
        """Say whether a file of this name belongs to the driver of this version."""
        return file_name.endswith(f".so.{version}") or any(
            fnmatchcase(file_name, p) for p in self.companions
        )


@functools.cache
def read_tables() -> Tables:
    """Read the data file that is installed beside this module."""
    path = Path(__file__).with_name("libraries.toml")
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    libraries: dict[str, str] = {}
    programs: dict[str, str] = {}
    for capability, entry in data["capability"].items():
        libraries |= dict.fromkeys(entry["libraries"], capability)
        programs |= dict.fromkeys(entry.get("programs", ()), capability)
    search = data["search"]
    return Tables(
        libraries=libraries,
        programs=programs,
        companions=tuple(data["companions"]["patterns"]),
        directories=tuple(search["directories"]),
        below=tuple(search["below"]),
        program_directories=tuple(search["programs"]),
        roots=tuple(search["roots"]),
    )
