"""Where the driver is below a root, and which files belong to it.

Looks at names first and opens only what is named like a driver's file. Knows which directories to
look into (tables.py), nothing about the mirror. 32-bit libraries are seen and left out for now:
they belong into a generation's `lib32/`, which later work fills.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vdriver.elf import Library, read_library, version_in_name
from vdriver.errors import DriverError, LibraryError
from vdriver.ldcache import MACHINE_FLAGS, MAX_BYTES, CacheError, parse_cache
from vdriver.tables import Tables, read_tables
from vdriver.tree import Tree

CUDA = "libcuda.so."
NVML = "libnvidia-ml.so."
SIMULATED_NOTE = ".note.tidegate.simgpu"
KERNEL_VERSION_FILE = "/proc/driver/nvidia/version"
MACHINES = ("x86_64", "aarch64")  # those of the manifest's schema

# "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Mon Jun ..." and, since the open
# modules, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build".
KERNEL_VERSION = re.compile(rb"Kernel Module(?: +for \S+)? +([0-9]+(?:\.[0-9]+){1,3})\s")


@dataclass(frozen=True)
class DriverFile:
    """One file of the driver: where it is below the driver's root, and what it is."""

    name: str
    path: str
    capability: str
    library: Library


@dataclass(frozen=True)
class Skipped:
    """A file that looks like the driver's and is left out, with the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class Driver:
    """A complete driver: libcuda, libnvidia-ml and whatever else came with them."""

    root: str
    version: str
    kind: str
    machine: str
    kernel_version: str | None
    cuda: DriverFile
    nvml: DriverFile
    libraries: tuple[DriverFile, ...]
    programs: tuple[DriverFile, ...]
    skipped: tuple[Skipped, ...]


@dataclass
class _Found:
    """What the names in one tree say: by version, where the two libraries that matter are."""

    tree: Tree
    directories: tuple[str, ...]
    cuda: dict[str, list[str]] = field(default_factory=dict)
    nvml: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Candidate:
    found: _Found
    version: str
    cuda: DriverFile
    nvml: DriverFile

    @property
    def simulated(self) -> bool:
        return SIMULATED_NOTE in self.cuda.library.notes

    @property
    def place(self) -> str:
        return f"{self.version} in {os.path.dirname(self.cuda.library.path)}"  # noqa: PTH120


def find_driver(root: str | Path = "/", directories: Sequence[str | Path] | None = None) -> Driver:
    """Return the driver below `root`, looking only into `directories` when they are given.

    What is returned is complete, of one version, and the kernel module's if that is loaded.
    DriverError says what stands against it.
    """
    tables = read_tables()
    tree = Tree(str(root))
    trees = [tree]
    if directories is None:
        trees += [Tree(tree.host(r)) for t in tables.roots if (r := tree.resolve(t))]
    found = [_scan(t, tables, directories) for t in trees]
    candidates = [c for f in found for c in _candidates(f, tables)]
    kernel = next((v for t in trees if (v := read_kernel_version(t))), None)
    if not candidates:
        raise _nothing(found)
    return _complete(_choose(candidates, kernel), tables, kernel)


def read_kernel_version(tree: Tree) -> str | None:
    """Return the version of the loaded kernel module, None when there is none below the root."""
    match = KERNEL_VERSION.search(tree.read(KERNEL_VERSION_FILE, 4096) or b"")
    return match[1].decode() if match else None


def _scan(tree: Tree, tables: Tables, directories: Sequence[str | Path] | None) -> _Found:
    wanted: Iterable[str]
    if directories is None:
        wanted = [*_cached_directories(tree), *_known_directories(tables)]
    else:
        wanted = [str(d) for d in directories]
    found = _Found(tree, _search_directories(tree, wanted, tables))
    for directory in found.directories:
        for name in tree.names(directory):
            for prefix, versions in ((CUDA, found.cuda), (NVML, found.nvml)):
                version = version_in_name(name) if name.startswith(prefix) else None
                if version and (path := tree.regular(f"{directory}/{name}")):
                    versions.setdefault(version, []).append(path)
    return found


def _search_directories(tree: Tree, wanted: Iterable[str], tables: Tables) -> tuple[str, ...]:
    """Return the directories that exist, each once, and those that their links lead to."""
    real: dict[str, None] = {}
    for directory in wanted:
        # Debian's alternatives: libcuda.so.1 -> /etc/alternatives/... -> nvidia/current/libcuda...
        for name in ("", "libcuda.so.1", "libnvidia-ml.so.1"):
            path = tree.resolve(f"{directory}/{name}")
            if path is not None:
                real[os.path.dirname(path) if name else path] = None  # noqa: PTH120
    for directory in tuple(real):
        for below in tables.below:
            if path := tree.resolve(f"{directory}/{below}"):
                real[path] = None
    return tuple(real)


def _cached_directories(tree: Tree) -> Iterator[str]:
    data = tree.read("/etc/ld.so.cache", MAX_BYTES)
    if data is None:
        return
    try:
        entries = parse_cache(data)
    except CacheError:
        return  # a cache is a hint; the known directories are searched in any case
    for entry in entries:
        if entry.soname.startswith((CUDA, NVML)) and entry.flags in MACHINE_FLAGS.values():
            yield os.path.dirname(entry.path)  # noqa: PTH120


def _known_directories(tables: Tables) -> Iterator[str]:
    own = platform.machine()
    machines = sorted(MACHINES, key=lambda m: m != own)
    for directory in tables.directories:
        if "{triplet}" in directory:
            for machine in machines:
                yield directory.format(triplet=f"{machine}-linux-gnu")
        else:
            yield directory


def _candidates(found: _Found, tables: Tables) -> Iterator[_Candidate]:
    for version in found.cuda.keys() & found.nvml.keys():
        cuda = _first(found.tree, found.cuda[version], f"{CUDA}{version}", tables, None)
        machine = cuda.library.machine
        nvml = _first(found.tree, found.nvml[version], f"{NVML}{version}", tables, machine)
        yield _Candidate(found, version, cuda, nvml)


def _first(
    tree: Tree, paths: Sequence[str], name: str, tables: Tables, machine: str | None
) -> DriverFile:
    """Return the first of several copies that a 64-bit process of this machine can load."""
    error: LibraryError | None = None
    for path in paths:
        try:
            library = read_library(tree.host(path))
        except LibraryError as e:
            error = error or e
            continue
        if library.bits == 64 and library.machine in ((machine,) if machine else MACHINES):
            return DriverFile(name, path, tables.capability(name), library)
    if error is not None:
        raise DriverError(error.message, hint=error.hint) from error
    raise DriverError(
        f"{tree.host(paths[0])} is no 64-bit library for {machine or ' or '.join(MACHINES)}",
        hint="install the driver for this machine",
    )


def _choose(candidates: list[_Candidate], kernel: str | None) -> _Candidate:
    # Newest first, and within one version the tree that was searched first.
    ordered = sorted(candidates, key=lambda c: _ordered(c.version), reverse=True)
    # A simulated driver has no kernel module, so the host's says nothing about it.
    real = [c for c in ordered if not c.simulated]
    if kernel is not None and real:
        for candidate in real:
            if candidate.version == kernel:
                return candidate
        raise DriverError(
            f"the kernel module is {kernel}, but the libraries are {real[0].place}",
            hint="reboot or reload the module after a driver update, then run tidegate refresh",
        )
    if len({c.version for c in ordered}) > 1:
        raise DriverError(
            "two driver versions and no kernel module to choose between them: "
            f"{ordered[0].place} and {ordered[-1].place}",
            hint="remove one, or name the other's directory with --driver-dir",
        )
    return ordered[0]


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _nothing(found: Sequence[_Found]) -> DriverError:
    for one in found:
        for have, lack, prefix in (
            (one.cuda, one.nvml, NVML),
            (one.nvml, one.cuda, CUDA),
        ):
            for version in sorted(have.keys() - lack.keys(), key=_ordered, reverse=True):
                path = one.tree.host(have[version][0])
                return DriverError(
                    f"{path} stands alone: no {prefix}{version} in any directory searched",
                    hint="install the package with the other library of the same version",
                )
    looked = [one.tree.host(d) for one in found for d in one.directories]
    return DriverError(
        f"no libcuda.so.<version> in {', '.join(looked[:6]) or 'any known directory'}",
        hint="install the NVIDIA driver, or name its directory with --driver-dir",
    )


def _complete(chosen: _Candidate, tables: Tables, kernel: str | None) -> Driver:
    skipped: list[Skipped] = []
    libraries: dict[str, DriverFile] = {}
    tree = chosen.found.tree
    machine = chosen.cuda.library.machine
    for directory in chosen.found.directories:
        for name in tree.names(directory):
            if name in libraries or name in (chosen.cuda.name, chosen.nvml.name):
                continue
            if not tables.is_driver_file(name, chosen.version):
                continue
            file = _read(tree, f"{directory}/{name}", tables.capability(name), machine, skipped)
            if file is not None:
                libraries[name] = file
    programs: dict[str, DriverFile] = {}
    for directory in (*chosen.found.directories, *tables.program_directories):
        for name, capability in tables.programs.items():
            if name not in programs and tree.regular(f"{directory}/{name}"):
                file = _read(tree, f"{directory}/{name}", capability, machine, skipped)
                if file is not None:
                    programs[name] = file
    return Driver(
        root=tree.root,
        version=chosen.version,
        kind="simulated" if chosen.simulated else "nvidia",
        machine=machine,
        kernel_version=None if chosen.simulated else kernel,
        cuda=chosen.cuda,
        nvml=chosen.nvml,
        libraries=tuple(libraries[n] for n in sorted(libraries)),
        programs=tuple(programs[n] for n in sorted(programs)),
        # A wrapper script in /usr/bin matters only where no program of its name was found.
        skipped=tuple(
            s
            for s in sorted(skipped, key=lambda s: s.path)
            if os.path.basename(s.path) not in {**libraries, **programs}  # noqa: PTH119
        ),
    )


def _read(
    tree: Tree, path: str, capability: str, machine: str, skipped: list[Skipped]
) -> DriverFile | None:
    """Read one optional file; what is wrong with it leaves it out and never fails a refresh."""
    real = tree.regular(path)
    if real is None:
        skipped.append(Skipped(path, "not a regular file below the root"))
        return None
    try:
        library = read_library(tree.host(real))
    except LibraryError as e:
        skipped.append(Skipped(path, e.message.removeprefix(f"{tree.host(real)}: ")))
        return None
    if library.bits != 64 or library.machine != machine:
        skipped.append(Skipped(path, f"{library.bits}-bit {library.machine}"))
        return None
    return DriverFile(os.path.basename(path), real, capability, library)  # noqa: PTH119
