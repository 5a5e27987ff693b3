"""Finds the NVIDIA driver under a root directory, and the files that belong to it.

Names are examined first, and only files with a driver file's name are opened. The names and
directories are in libraries.toml; this module knows nothing about the mirror.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vdriver.driver import Driver, DriverFile
from vdriver.elf import read_library, version_in_name
from vdriver.errors import DriverError, LibraryError
from vdriver.fixed_dirs import TRIPLETS, alternatives_of, find_data
from vdriver.ldcache import MACHINE_FLAGS, MAX_BYTES, CacheError, parse_cache
from vdriver.manifest import Bind
from vdriver.reader import Read, TreeReader
from vdriver.tables import Tables, read_tables, stem
from vdriver.tree import Tree
from vdriver.wsl import find_wsl

CUDA = "libcuda.so."
NVML = "libnvidia-ml.so."
SIMULATED_NOTE = ".note.tidegate.simgpu"
KERNEL_VERSION_FILE = "/proc/driver/nvidia/version"
MACHINES = ("x86_64", "aarch64")  # as in the manifest's schema
TRIPLETS32 = ("i386-linux-gnu", "arm-linux-gnueabihf")
CLASS32 = {"x86_64": "i386", "aarch64": "arm"}

# "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Mon Jun ..." and, since the open
# modules, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build".
KERNEL_VERSION = re.compile(rb"Kernel Module(?: +for \S+)? +([0-9]+(?:\.[0-9]+){1,3})\s")

Kind = tuple[int, str]  # class and machine

# Paths of loaders in a container. A program with another loader (PT_INTERP) would not start there.
LOADER = re.compile(r"(/usr)?/lib[^/]*/(\S+-linux-gnu\S*/)?ld-linux[^/]*")


@dataclass
class _Found:
    """The paths of libcuda and libnvidia-ml in one tree, by the version in their names."""

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


def find_driver(
    root: str | Path = "/",
    directories: Sequence[str | Path] | None = None,
    *,
    read: Read = read_library,
    sockets: bool = False,
) -> Driver:
    """Return the driver under `root`, searching only `directories` if they are given.

    The driver is complete and of one version, that of the kernel module if one is loaded. Raise
    DriverError if there is no such driver. `read` may cache its results; `sockets` adds the
    directories with the sockets of the driver's services.
    """
    tables = read_tables()
    tree = Tree(str(root))
    _require_directories(tree, directories)
    for board in tables.refused:
        if tree.regular(board.marker):
            raise DriverError(
                f"{tree.host(board.marker)}: this is {board.name}, which Tidegate does not support",
                hint=board.hint,
            )
    if directories is None and (driver := find_wsl(TreeReader(tree, read), tables)):
        return driver
    trees = [tree]
    if directories is None:
        trees += [Tree(tree.host(r)) for t in tables.roots if (r := tree.resolve(t))]
    found = [_scan(t, tables, directories) for t in trees]
    faults: dict[str, DriverError] = {}
    candidates = [c for f in found for c in _candidates(f, read, faults)]
    if not candidates and directories is None:
        # Packages that were unpacked but not installed have no alternatives set.
        beside = [
            _scan(t, tables, _alternatives(t, f.directories))
            for t, f in zip(trees, found, strict=True)
        ]
        candidates = [c for f in beside for c in _candidates(f, read, faults)]
        found = beside if candidates else found
    kernel = next((v for t in trees if (v := read_kernel_version(t))), None)
    # A fault in a version other than the kernel module's does not matter if a driver was found.
    known = {c.version for c in candidates}
    for version in sorted(faults.keys() - known, key=_ordered, reverse=True):
        if not candidates or version == kernel:
            raise faults[version]
    if not candidates:
        raise _not_found(found)
    binds = tuple(Bind(p, c) for p, c in tables.sockets.items()) if sockets else ()
    return _complete(_choose(candidates, kernel), tables, kernel, read, binds)


def _require_directories(tree: Tree, directories: Sequence[str | Path] | None) -> None:
    """Refuse a root or a directory that does not exist, before the search for a driver."""
    if not os.path.isdir(tree.root):  # noqa: PTH112 - strings throughout
        raise DriverError(
            f"{tree.root}: no such directory", hint="name an existing directory with --root"
        )
    for directory in directories or ():
        real = tree.resolve(str(directory))
        if real is None or not os.path.isdir(tree.host(real)):  # noqa: PTH112
            raise DriverError(
                f"{directory}: no such directory under {tree.root}",
                hint="the path given with --library-dir is interpreted relative to --root",
            )


def _alternatives(tree: Tree, directories: Sequence[str]) -> list[str]:
    """Return the directories of Debian's drivers under `directories`, followed by `directories`."""
    below = [f"{d}/nvidia/{name}" for d in directories for name in tree.names(f"{d}/nvidia")]
    return [*below, *directories]


def read_kernel_version(tree: Tree) -> str | None:
    """Return the version of the loaded kernel module, or None if the tree does not show one."""
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
    """Return the directories that exist, and those that links in them point to, each once."""
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
        return  # the cache is only a hint: the known directories are searched in any case
    for entry in entries:
        if entry.soname.startswith((CUDA, NVML)) and entry.flags in MACHINE_FLAGS.values():
            yield os.path.dirname(entry.path)  # noqa: PTH120


def _known_directories(tables: Tables) -> Iterator[str]:
    own = platform.machine()
    machines = sorted(MACHINES, key=lambda m: m != own)
    triplets = [*(TRIPLETS[m] for m in machines), *TRIPLETS32]
    for directory in tables.directories:
        if "{triplet}" in directory:
            yield from (directory.format(triplet=t) for t in triplets)
        else:
            yield directory


def _candidates(found: _Found, read: Read, faults: dict[str, DriverError]) -> Iterator[_Candidate]:
    """Yield the complete drivers; add the faults in other versions to `faults`."""
    for version in found.cuda.keys() & found.nvml.keys():
        try:
            cuda = _first(found, found.cuda[version], f"{CUDA}{version}", read, MACHINES)
            if cuda is None:
                path = found.tree.host(found.cuda[version][0])
                raise DriverError(  # noqa: TRY301 - all faults are collected the same way
                    f"{path} is not a 64-bit library for {' or '.join(MACHINES)}",
                    hint="install the driver for this machine",
                )
            machine = cuda.library.machine
            nvml = _first(found, found.nvml[version], f"{NVML}{version}", read, (machine,))
            if nvml is None:
                raise _lacks_counterpart(found.tree.host(cuda.path), f"64-bit {NVML}{version}")
        except DriverError as e:
            faults.setdefault(version, e)
            continue
        yield _Candidate(found, version, cuda, nvml)


def _first(
    found: _Found, paths: Sequence[str], name: str, read: Read, machines: Sequence[str]
) -> DriverFile | None:
    """Return the first of several copies that a 64-bit process on one of `machines` can load.

    Return None if there is none; raise DriverError if that is because a copy cannot be read.
    """
    error: LibraryError | None = None
    for path in paths:
        try:
            library = read(found.tree.host(path))
        except LibraryError as e:
            error = error or e
            continue
        if library.bits == 64 and library.machine in machines:
            return DriverFile(name, path, read_tables().capability(name), library)
    if error is not None:
        raise DriverError(error.message, hint=error.hint) from error
    return None


def _lacks_counterpart(path: str, other: str) -> DriverError:
    return DriverError(
        f"{path} has no counterpart: {other} is in none of the directories searched",
        hint="install the package with the other library of the same version",
    )


def _choose(candidates: list[_Candidate], kernel: str | None) -> _Candidate:
    # Newest first; within one version, in the order in which the trees were searched.
    ordered = sorted(candidates, key=lambda c: _ordered(c.version), reverse=True)
    # A simulated driver has no kernel module, so the host's module does not apply to it.
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
            hint="remove one, or choose a directory with --library-dir",
        )
    return ordered[0]


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _not_found(found: Sequence[_Found]) -> DriverError:
    for one in found:
        for have, lack, prefix in (
            (one.cuda, one.nvml, NVML),
            (one.nvml, one.cuda, CUDA),
        ):
            for version in sorted(have.keys() - lack.keys(), key=_ordered, reverse=True):
                path = one.tree.host(have[version][0])
                return _lacks_counterpart(path, f"{prefix}{version}")
    looked = [one.tree.host(d) for one in found for d in one.directories]
    return DriverError(
        f"no libcuda.so.<version> in {', '.join(looked[:6]) or 'any known directory'}",
        hint="install the NVIDIA driver, or name its directory with --library-dir",
    )


def _complete(
    chosen: _Candidate, tables: Tables, kernel: str | None, read: Read, binds: tuple[Bind, ...]
) -> Driver:
    reader = TreeReader(chosen.found.tree, read)
    machine = chosen.cuda.library.machine
    # Most files are next to libcuda; the other directories are searched for the rest.
    own = os.path.dirname(chosen.cuda.path)  # noqa: PTH120
    directories = tuple(dict.fromkeys((own, *chosen.found.directories)))
    libraries = _libraries(reader, directories, chosen.version, tables)
    programs = _programs(reader, directories, machine, tables)
    taken = {chosen.cuda.name, chosen.nvml.name}
    ours = {n: f for (m, n), f in libraries.items() if m == (64, machine) and n not in taken}
    stems = {stem(n) for n in ours}
    data = find_data(
        reader, tables.places, chosen.version, machine, directories=directories, libraries=stems
    )
    kind32 = (32, CLASS32[machine])
    ours32 = {n: f for (m, n), f in libraries.items() if m == kind32}
    for (m, _), file in libraries.items():
        if m not in ((64, machine), kind32):
            reader.skip(file.path, f"{m[0]}-bit {m[1]}")
    return Driver(
        root=chosen.found.tree.root,
        version=chosen.version,
        kind="simulated" if chosen.simulated else "nvidia",
        machine=machine,
        kernel_version=None if chosen.simulated else kernel,
        cuda=chosen.cuda,
        nvml=chosen.nvml,
        libraries=tuple(ours[n] for n in sorted(ours)),
        libraries32=tuple(ours32[n] for n in sorted(ours32)),
        programs=tuple(programs[n] for n in sorted(programs)),
        data=data,
        binds=binds,
        # A wrapper script in /usr/bin is reported only if no program with its name was found.
        skipped=tuple(
            s
            for s in sorted(set(reader.skipped), key=lambda s: s.path)
            if os.path.basename(s.path) not in programs  # noqa: PTH119
        ),
        others=_others(reader.tree.names(own), chosen.version, tables),
    )


def _others(names: Sequence[str], version: str, tables: Tables) -> tuple[str, ...]:
    """Return the other driver versions among the libraries `names`, newest first."""
    found = {
        v
        for n in names
        if tables.knows(n) and not tables.is_companion(n) and (v := version_in_name(n))
    }
    # A version like 1.0 or 4.0.0 is that of a soname, not of a driver: driver versions have begun
    # with three digits since 2012.
    found = {
        v
        for v in found
        if v != version and len(v.partition(".")[0]) == len(version.partition(".")[0])
    }
    return tuple(sorted(found, key=_ordered, reverse=True))


def _libraries(
    reader: TreeReader, directories: Sequence[str], version: str, tables: Tables
) -> dict[tuple[Kind, str], DriverFile]:
    """Return the libraries of this driver version, by class and machine, and file name."""
    libraries: dict[tuple[Kind, str], DriverFile] = {}
    companions: dict[tuple[Kind, str], list[tuple[str, DriverFile]]] = {}
    ending = f".so.{version}"
    for directory in directories:
        for name in reader.tree.names(directory):
            own = name.endswith(ending)
            if not own and not tables.is_companion(name):
                continue
            read = reader.library(f"{directory}/{name}")
            if read is None:
                continue
            path, library = read
            file = DriverFile(name, path, tables.capability(name), library)
            kind = (library.bits, library.machine)
            if own:
                libraries.setdefault((kind, name), file)
            elif os.path.basename(path) == name:  # noqa: PTH119 - false for a link
                companions.setdefault((kind, stem(name)), []).append((directory, file))
    for (kind, name), files in companions.items():
        chosen = None
        # If the driver has a library of that name, the companion is left over from an older branch.
        if not any(k == kind and stem(n) == name for k, n in libraries):
            chosen = _companion(reader.tree, files)
            libraries[kind, chosen.name] = chosen
        for _, file in files:
            if chosen is None or file.path != chosen.path:
                reader.skip(file.path, "this driver has another version of it")
    return libraries


def _companion(tree: Tree, files: Sequence[tuple[str, DriverFile]]) -> DriverFile:
    """Return the file to which the soname link points, or the newest if there is no such link."""
    for directory, file in files:
        if tree.regular(f"{directory}/{file.library.soname}") == file.path:
            return file
    return max((f for _, f in files), key=lambda f: _ordered(f.library.version or "0"))


def _programs(
    reader: TreeReader, directories: Sequence[str], machine: str, tables: Tables
) -> dict[str, DriverFile]:
    programs: dict[str, DriverFile] = {}
    where = [*directories]
    for directory in tables.program_directories:
        if "{alternative}" in directory:
            where += [directory.format(alternative=a) for a in alternatives_of(directories)]
        else:
            where.append(directory)
    for directory in where:
        for name, capability in tables.programs.items():
            path = f"{directory}/{name}"
            if name in programs or not reader.tree.regular(path):
                continue
            read = reader.library(path)
            if read is None:
                continue
            real, library = read
            loader = library.interpreter
            if (library.bits, library.machine) != (64, machine):
                reader.skip(path, f"{library.bits}-bit {library.machine}")
            elif loader is not None and not LOADER.fullmatch(loader):
                reader.skip(path, f"its loader {loader} is this host's own")
            else:
                programs[name] = DriverFile(name, real, capability, library)
    return programs
