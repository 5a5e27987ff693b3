"""From a driver and the control libraries to the list of what a generation holds.

Pure: takes what was found, reads nothing. Every operation says in words what it does. There is one
set for now, for `compute` and `utility`; a library of another capability stays out of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from vdriver.control import ControlLibraries
from vdriver.discover import Driver, DriverFile
from vdriver.elf import Library
from vdriver.errors import MirrorError

CAPABILITIES = ("compute", "utility")
LIB64 = "lib64"
ORIGIN = "lib64/origin"
BIN = "bin"
DIRECTORIES = (LIB64, ORIGIN, BIN)

LINKED = re.compile(r"(lib.+\.so)\.[0-9]+")  # a soname whose development link is customary


@dataclass(frozen=True)
class Copy:
    """A file whose content goes into the generation."""

    path: str
    source: Library
    role: Literal["library", "control", "origin", "program"]
    capability: str
    below_root: str | None

    @property
    def mode(self) -> int:
        """The permission bits that the file gets, whatever the source has."""
        return 0o755 if self.role == "program" else 0o644

    def describe(self) -> str:
        """Say the operation as an operator would."""
        return f"copy {self.source.path} -> {self.path} ({self.role}, {self.capability})"


@dataclass(frozen=True)
class Link:
    """A symbolic link in the generation."""

    path: str
    target: str
    capability: str

    def describe(self) -> str:
        """Say the operation as an operator would."""
        return f"link {self.path} -> {self.target}"


Operation = Copy | Link


@dataclass(frozen=True)
class MirrorPlan:
    """All of a generation before it has a name: what to write, and what it is for."""

    driver: Driver
    control: ControlLibraries
    operations: tuple[Operation, ...]
    left_out: tuple[str, ...]

    def describe(self) -> tuple[str, ...]:
        """Return one line for each operation, in the order in which they are made."""
        return tuple(o.describe() for o in self.operations)

    @property
    def programs(self) -> tuple[str, ...]:
        """Paths of the programs, relative to the generation."""
        return tuple(o.path for o in self.operations if isinstance(o, Copy) and o.role == "program")


def plan_mirror(driver: Driver, control: ControlLibraries) -> MirrorPlan:
    """Return the generation for `driver`, with `control` answering libcuda's and NVML's names."""
    for library in (control.cuda, control.nvml):
        if (library.bits, library.machine) != (64, driver.machine):
            raise MirrorError(
                f"{library.path} is {library.bits}-bit {library.machine}, "
                f"the driver is 64-bit {driver.machine}",
                hint="install tidegate-control for the driver's machine",
            )
    builder = _Builder()
    _answer(builder, driver.cuda, control.cuda, driver.version, "libcuda")
    _answer(builder, driver.nvml, control.nvml, driver.version, "libnvidia-ml")
    # What carries the driver's version goes first: a companion with a version of its own (an
    # older branch's leftover) does not take a name from it.
    ending = f".so.{driver.version}"
    for file in sorted(driver.libraries, key=lambda f: (not f.name.endswith(ending), f.name)):
        if file.capability in CAPABILITIES:
            _library(builder, file)
        else:
            builder.left_out.append(f"{file.name}: {file.capability}")
    for file in driver.programs:
        if file.capability in CAPABILITIES:
            builder.add(
                Copy(f"{BIN}/{file.name}", file.library, "program", file.capability, file.path)
            )
    return MirrorPlan(driver, control, tuple(builder.operations.values()), tuple(builder.left_out))


@dataclass
class _Builder:
    """Operations by path. The first to claim a path has it, so the control library's names hold."""

    operations: dict[str, Operation] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, operation: Operation) -> bool:
        first = self.operations.setdefault(operation.path, operation)
        if first != operation:
            self.left_out.append(f"{operation.describe()}: taken by {first.describe()}")
        return first == operation


def _answer(builder: _Builder, file: DriverFile, control: Library, version: str, stem: str) -> None:
    """Put the control library under every name of a driver's library, and that one aside."""
    builder.add(Copy(f"{LIB64}/{stem}.so.1", control, "control", file.capability, None))
    for name in (f"{stem}.so", f"{stem}.so.{version}"):
        builder.add(Link(f"{LIB64}/{name}", f"{stem}.so.1", file.capability))
    origin = f"{ORIGIN}/{stem}-origin.so.1"
    builder.add(Copy(origin, file.library, "origin", file.capability, file.path))


def _library(builder: _Builder, file: DriverFile) -> None:
    path = f"{LIB64}/{file.name}"
    if not builder.add(Copy(path, file.library, "library", file.capability, file.path)):
        return
    soname = file.library.soname
    if soname is None or soname == file.name:
        return
    linked = builder.add(Link(f"{LIB64}/{soname}", file.name, file.capability))
    if linked and (match := LINKED.fullmatch(soname)):
        builder.add(Link(f"{LIB64}/{match[1]}", soname, file.capability))
