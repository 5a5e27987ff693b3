"""Plans a generation of the mirror: lists its files, from a driver and the control libraries.

The functions are pure: they use the description of the driver, and read none of its files. Every
operation has a `describe` method for operators.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vdriver.control import ControlLibraries
from vdriver.driver import DataFile, Driver, DriverFile
from vdriver.elf import Library
from vdriver.errors import MirrorError
from vdriver.manifest import Bind, CapabilitySet, Place, Program
from vdriver.tables import Tables, read_tables, stem

LIB64 = "lib64"
LIB32 = "lib32"
ORIGIN = "origin"  # in lib64; only the control library searches it
BIN = "bin"
DATA = "data"
SETS = "sets"

SONAME = re.compile(r"(lib.+\.so)\.[0-9.]+")  # the group is the name of a development link
# 32-bit libraries that are left out: there is no 32-bit control library, and without one they
# would bypass every quota.
UNGOVERNED = ("libcuda", "libnvidia-ml")


@dataclass(frozen=True)
class Copy:
    """A file in the generation; `content` is set if it differs from the source's."""

    path: str
    host: str
    size: int
    mtime_ns: int
    role: Literal["library", "control", "origin", "program", "data"]
    capability: str
    below_root: str | None
    soname: str | None = None
    build_id: str | None = None
    content: bytes | None = None

    @property
    def mode(self) -> int:
        """The permission bits of the copy, independent of the source's."""
        return 0o755 if self.role == "program" else 0o644

    def describe(self) -> str:
        """Return the operation in words, for an operator."""
        how = (
            "mirror" if self.content is None else "write" if self.below_root is None else "rewrite"
        )
        return f"{how} {self.host} -> {self.path} ({self.role}, {self.capability})"


@dataclass(frozen=True)
class PlannedLink:
    """A symbolic link in the generation."""

    path: str
    target: str
    capability: str

    def describe(self) -> str:
        """Return the operation in words, for an operator."""
        return f"link {self.path} -> {self.target}"


Operation = Copy | PlannedLink


@dataclass(frozen=True)
class MirrorPlan:
    """The content of a generation before it has a name: its files, and how containers use them."""

    driver: Driver
    control: ControlLibraries
    operations: tuple[Operation, ...]
    sets: tuple[CapabilitySet, ...]
    programs: tuple[Program, ...]
    places: tuple[Place, ...]
    binds: tuple[Bind, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]

    def describe(self) -> tuple[str, ...]:
        """Return one line for each operation, in the order of execution."""
        return tuple(o.describe() for o in self.operations)

    @property
    def size(self) -> int:
        """Size of all content in bytes."""
        return sum(o.size for o in self.operations if isinstance(o, Copy))


def plan_mirror(
    driver: Driver, control: ControlLibraries, tables: Tables | None = None
) -> MirrorPlan:
    """Return the generation for `driver`, with `control` under the names of libcuda and NVML.

    Raise MirrorError if a control library is for another machine.
    """
    tables = tables or read_tables()
    for library in (control.cuda, control.nvml):
        if (library.bits, library.machine) != (64, driver.machine):
            raise MirrorError(
                f"{library.path} is {library.bits}-bit {library.machine}, "
                f"but the driver is 64-bit {driver.machine}",
                hint="install the tidegate package for the driver's architecture",
            )
    builder = _Builder()
    cuda, nvml = (control.cuda, control.cuda_content), (control.nvml, control.nvml_content)
    _add_control(builder, driver.cuda, *cuda, driver.version, "libcuda")
    _add_control(builder, driver.nvml, *nvml, driver.version, "libnvidia-ml")
    _libraries(builder, LIB64, driver.libraries, driver.version)
    governed = [f for f in driver.libraries32 if stem(f.name) not in UNGOVERNED]
    _libraries(builder, LIB32, governed, driver.version)
    builder.left_out += [
        f"{f.name} (32-bit): no control library would govern it"
        for f in driver.libraries32
        if f not in governed
    ]
    programs = []
    for file in driver.programs:
        path = f"{BIN}/{file.name}"
        builder.add(_copy(path, file, "program"))
        programs.append(Program(path, file.capability))
    places = _places(builder, driver.data, driver.version, tables)
    return MirrorPlan(
        driver=driver,
        control=control,
        operations=tuple(builder.operations.values()),
        sets=_sets(builder, driver, programs, places, tables),
        programs=tuple(programs),
        places=places,
        binds=driver.binds,
        left_out=tuple(builder.left_out),
        notes=(*_missing(driver), *_unknown(driver, tables)),
    )


@dataclass
class _Builder:
    """Operations by path. For each path the first operation counts; control libraries go first.

    `names` maps each name in lib64 and lib32 to the library that it belongs to.
    """

    operations: dict[str, Operation] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    names: dict[str, dict[str, Library]] = field(default_factory=lambda: {LIB64: {}, LIB32: {}})

    def add(self, operation: Operation) -> bool:
        first = self.operations.setdefault(operation.path, operation)
        if first != operation:
            self.left_out.append(
                f"{operation.describe()}: its path is already taken by {first.describe()}"
            )
        return first == operation

    def add_name(self, directory: str, name: str, operation: Operation, library: Library) -> bool:
        if name == ORIGIN:  # the name of a directory
            self.left_out.append(f"{operation.describe()}: not a name for a library")
            return False
        if not self.add(operation):
            return False
        self.names[directory][name] = library
        return True


def _copy(path: str, file: DriverFile, role: Literal["library", "origin", "program"]) -> Copy:
    library = file.library
    return Copy(
        path,
        library.path,
        library.size,
        library.mtime_ns,
        role,
        file.capability,
        file.path,
        library.soname,
        library.build_id,
    )


def _add_control(  # noqa: PLR0917 - private, and called twice
    builder: _Builder,
    file: DriverFile,
    control: Library,
    content: bytes | None,
    version: str,
    name: str,
) -> None:
    """Add the control library under every name of the driver's library, which is the origin."""
    soname = f"{name}.so.1"
    copy = Copy(
        f"{LIB64}/{soname}",
        control.path,
        control.size,
        control.mtime_ns,
        "control",
        file.capability,
        None,
        control.soname,
        control.build_id,
        content,
    )
    builder.add_name(LIB64, soname, copy, file.library)
    for other in dict.fromkeys((f"{name}.so", f"{name}.so.{version}", file.name)):
        if other != soname:
            link = PlannedLink(f"{LIB64}/{other}", soname, file.capability)
            builder.add_name(LIB64, other, link, file.library)
    builder.add(_copy(f"{LIB64}/{ORIGIN}/{name}-origin.so.1", file, "origin"))


def _libraries(
    builder: _Builder, directory: str, files: Iterable[DriverFile], version: str
) -> None:
    # Libraries with the driver's version go first, so that a companion with another version (left
    # over from an older branch) does not take a name from them.
    ending = f".so.{version}"
    for file in sorted(files, key=lambda f: (not f.name.endswith(ending), f.name)):
        copy = _copy(f"{directory}/{file.name}", file, "library")
        if not builder.add_name(directory, file.name, copy, file.library):
            continue
        soname = file.library.soname or file.name
        if soname != file.name:
            link = PlannedLink(f"{directory}/{soname}", file.name, file.capability)
            if not builder.add_name(directory, soname, link, file.library):
                continue
        if match := SONAME.fullmatch(soname):
            link = PlannedLink(f"{directory}/{match[1]}", soname, file.capability)
            builder.add_name(directory, match[1], link, file.library)


def _places(
    builder: _Builder, data: Sequence[DataFile], version: str, tables: Tables
) -> tuple[Place, ...]:
    places = []
    for rule in tables.places:
        files = [f for f in data if f.place == rule.name]
        for file in files:
            builder.add(
                Copy(
                    f"{DATA}/{rule.name}/{file.name}",
                    file.host,
                    file.size if file.content is None else len(file.content),
                    file.mtime_ns,
                    "data",
                    rule.capability,
                    file.path,
                    build_id=file.library.build_id if file.library else None,
                    content=file.content,
                )
            )
        if files:
            targets = tuple(t.replace("{version}", version) for t in rule.container)
            names = tuple(f.name for f in files)
            source = f"{DATA}/{rule.name}"
            places.append(Place(rule.name, source, rule.capability, targets, rule.looks, names))
    return tuple(places)


def _sets(
    builder: _Builder,
    driver: Driver,
    programs: Sequence[Program],
    places: Sequence[Place],
    tables: Tables,
) -> tuple[CapabilitySet, ...]:
    """Return the set of libraries for each combination of the driver's capabilities."""
    files = (driver.cuda, driver.nvml, *driver.libraries, *driver.libraries32)
    offered = {f.capability for f in files}
    offered |= {p.capability for p in programs} | {p.capability for p in places}
    made: dict[tuple[tuple[str, ...], tuple[str, ...]], CapabilitySet] = {}
    sets = []
    for capabilities in tables.combinations(offered):
        names64 = _chosen(builder.names[LIB64], capabilities, tables)
        names32 = _chosen(builder.names[LIB32], capabilities, tables)
        # A capability that adds no library, such as display, does not need a separate directory.
        same = made.get((names64, names32))
        if same is None:
            below = f"{SETS}/{'+'.join(capabilities)}"
            all64 = len(names64) == len(builder.names[LIB64])
            all32 = len(names32) == len(builder.names[LIB32])
            same = made[names64, names32] = CapabilitySet(
                capabilities,
                LIB64 if all64 else f"{below}/{LIB64}",
                names64,
                (LIB32 if all32 else f"{below}/{LIB32}") if names32 else None,
                names32 or None,
            )
        sets.append(CapabilitySet(capabilities, same.lib64, same.names64, same.lib32, same.names32))
    return tuple(sets)


def _chosen(
    names: Mapping[str, Library], capabilities: Sequence[str], tables: Tables
) -> tuple[str, ...]:
    """Return the names of the libraries with these capabilities, and of those that they need."""
    pending = [n for n in names if tables.capability(n) in capabilities]
    chosen: set[str] = set()
    while pending:
        library = names[pending.pop()]
        if library.path not in chosen:
            chosen.add(library.path)
            pending += [n for n in library.needed if n in names]
    return tuple(sorted(n for n, library in names.items() if library.path in chosen))


def _missing(driver: Driver) -> list[str]:
    """Return a note for each driver library that is needed but not installed."""
    notes = []
    ending = f".so.{driver.version}"
    for files in ((driver.cuda, driver.nvml, *driver.libraries), driver.libraries32):
        here = {f.name for f in files} | {f.library.soname for f in files}
        notes += [
            f"{f.path} needs {needed}, which is not installed"
            for f in files
            for needed in f.library.needed
            if needed.endswith(ending) and needed not in here
        ]
    return notes


def _unknown(driver: Driver, tables: Tables) -> list[str]:
    """Return a note for each library that is not in the tables: its capability is assumed."""
    names = dict.fromkeys(
        f.name for f in (*driver.libraries, *driver.libraries32) if not tables.knows(f.name)
    )
    return [f"{n} is not in libraries.toml and counts as compute" for n in names]
