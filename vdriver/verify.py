"""Verifies a generation: compares it with its manifest and loads its libraries as in a container.

It checks whether the content matches the manifest, and whether every library loads from the mirror
alone, without a library from another driver on this host; it repairs nothing. Nothing is loaded
from a generation with wrong content, because loading runs a library's constructors.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vdriver import manifest as manifests
from vdriver.content import LOADED, Fault, check_content
from vdriver.elf import Library, read_library
from vdriver.errors import LibraryError, MirrorError
from vdriver.manifest import CURRENT, Manifest
from vdriver.plan import LIB32, LIB64, ORIGIN
from vdriver.tables import read_tables

LOADER32 = Path("/lib/ld-linux.so.2")
LOAD_TIMEOUT = 60.0  # seconds for one library; the largest in 550.163.01 takes 0.2
WORKERS = 4

# Capability of the X server's modules: their undefined symbols are defined in the program that
# loads them. Some are data or have their address taken; even RTLD_LAZY resolves these at once.
MODULES = "display"

# CDLL opens with RTLD_NOW and RTLD_LOCAL. Standard output is replaced so that a library that prints
# does not disturb the answer; os._exit skips destructors, which are not tested.
LOAD = """
import ctypes, json, os, sys
answer = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
error = None
try:
    ctypes.CDLL(sys.argv[1])
except OSError as e:
    error = str(e)
with open("/proc/self/maps", errors="surrogateescape") as file:
    rows = (line.rstrip("\\n").split(maxsplit=5) for line in file)
    mapped = sorted({row[5] for row in rows if len(row) == 6 and row[5].startswith("/")})
os.write(answer, json.dumps([error, mapped]).encode())
os._exit(0)
"""

MISSING = re.compile(r"([^:\s]+): cannot open shared object file: No such file or directory")
UNDEFINED = re.compile(r"undefined symbol: ([^\s,]+)")
TOO_OLD = re.compile(r"(?P<file>\S+): version `(?P<version>[^']+)' not found")
LISTED = re.compile(r"\s+(?P<name>\S+) => (?:(?P<missing>not found)|(?P<path>/.*) \(0x[0-9a-f]+\))")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Loaded:
    """The result for one library.

    `detail` is the reason for any outcome but `loaded`. `not loaded` is not a fault in the mirror:
    this host lacks something that an image may have. `mapped` lists the generation's files that
    were mapped.
    """

    path: str
    outcome: Literal["loaded", "not loaded", "failed"]
    detail: str = ""
    mapped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The result for a generation, which is intact if there are no faults."""

    path: Path
    manifest: Manifest
    content: tuple[Fault, ...]
    libraries: tuple[Loaded, ...]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults in the content first, then the libraries that failed."""
        failed = (Fault(x.path, x.detail) for x in self.libraries if x.outcome == "failed")
        return (*self.content, *failed)

    def require_intact(self) -> None:
        """Raise MirrorError with the first fault and the number of others, if there are any."""
        if not self.faults:
            return
        first, more = self.faults[0], len(self.faults) - 1
        others = f" (and {more} more fault{'s' if more > 1 else ''})" if more else ""
        hint = (
            "run tidegate refresh --repair"
            if self.content
            else "reinstall the driver's packages, then run tidegate refresh"
        )
        where = self.path if first.path == "." else self.path / first.path
        raise MirrorError(f"{where}: {first.reason}{others}", hint=hint)


def find_generation(driver_dir: str | Path, name: str | None = None) -> Path:
    """Return the directory of a generation, by default of the one in force.

    `name` is a name in `driver_dir`, or a path if it has a slash. Raise MirrorError if the
    generation does not exist.
    """
    if name is None:
        current = Path(driver_dir, CURRENT)
        if not current.is_dir():
            raise MirrorError(f"{current}: no generation is in force", hint="run tidegate refresh")
        return current.resolve()
    path = Path(name) if "/" in name else Path(driver_dir, name)
    if not path.is_dir():
        raise MirrorError(f"{path}: no such generation", hint=f"name one of those in {driver_dir}")
    return path.resolve()


def verify(
    generation: str | Path,
    *,
    load: bool = True,
    read: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Check a generation's content and, with `load`, load its libraries.

    Without `read` the content of files is not read, which saves reading a gigabyte.
    `progress` is called with the number of libraries done and the total. Raise MirrorError if the
    manifest cannot be read, or if `tidegate gc` is removing the generation.
    """
    path = Path(generation).resolve()
    with _held(path):
        manifest = manifests.read_manifest(path)
        manifests.validate(manifest.to_json())
        content = tuple(check_content(path, manifest, read=read))
        libraries: tuple[Loaded, ...] = ()
        if load and not content:
            libraries = load_libraries(path, manifest, progress)
    return Report(path, manifest, content, libraries)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Keep `tidegate gc` from removing the generation, as a starting container does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise MirrorError(f"{path}: {e.strerror}", hint="run tidegate refresh") from e
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise MirrorError(
                f"{path} is locked by tidegate gc", hint="wait for it to end, then try again"
            ) from e
        yield
    finally:
        os.close(fd)


# Loading


def load_libraries(
    generation: Path, manifest: Manifest, progress: Progress | None = None
) -> tuple[Loaded, ...]:
    """Load every library in lib64, each in a separate process, and return the results.

    For a library in lib32, only list what the 32-bit loader finds for it, without running its code.
    The results are sorted by path, lib64 first. Raise MirrorError if the loader does not accept the
    generation's path.
    """
    if re.search(r"[:;$]", str(generation)):
        raise MirrorError(
            f"{generation}: the loader does not accept a path with ':', ';' or '$'",
            hint="move the driver's directory, or skip loading with --no-load",
        )
    mirror64 = _read_libraries(generation, manifest, LIB64)
    mirror32 = _read_libraries(generation, manifest, LIB32)
    jobs = [
        *((p, mirror64) for p in sorted(mirror64.files)),
        *((p, mirror32) for p in sorted(mirror32.files)),
    ]
    lock, done = threading.Lock(), itertools.count(1)

    def load(job: tuple[str, _Libraries]) -> Loaded:
        path, libraries = job
        outcome = _load64(path, libraries) if libraries.base == LIB64 else _load32(path, libraries)
        with lock:
            if progress is not None:
                progress(next(done), len(jobs))
        return outcome

    with ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool:
        outcomes = list(pool.map(load, jobs))
    return tuple(_require_origins(outcomes, manifest))


@dataclass(frozen=True)
class _Libraries:
    """The libraries of lib64 or lib32: the files to load, and all names by which they are found."""

    generation: Path
    manifest: Manifest
    base: str
    files: dict[str, Library]  # by path; each of them is loaded on its own
    answers: dict[str, Library]  # by name, including those in origin/
    sonames: dict[str, str | None] = field(default_factory=dict)  # of other files, by path

    @property
    def directory(self) -> Path:
        return self.generation / self.base

    def is_driver(self, name: str) -> bool:
        """Return whether a file name is that of a driver library, even if the mirror lacks it."""
        stem = name.partition(".so")[0]
        return (
            name in self.answers
            or "nvidia" in name.lower()
            or stem in ("libcuda", "libnvcuvid", "libnvoptix")
            or name.endswith(f".so.{self.manifest.version}")
        )

    def is_foreign(self, path: str) -> bool:
        """Return whether a mapped file is a driver's library from outside the generation."""
        if path.startswith(f"{self.generation}/"):
            return False
        name = path.rpartition("/")[2]
        stems = {n.partition(".so")[0] for n in self.answers}
        if self.is_driver(name) or name.partition(".so")[0] in stems:
            return True
        if path not in self.sonames:
            try:
                self.sonames[path] = read_library(path).soname
            except LibraryError:  # not a library, or gone
                self.sonames[path] = None
        return self.sonames[path] in self.answers

    def missing(self, path: str) -> str | None:
        """Return a driver library that `path` needs and the mirror lacks; None if there is none."""
        pending, seen = [self.files[path]], set[str]()
        while pending:
            for name in pending.pop().needed:
                if name in seen:
                    continue
                seen.add(name)
                if name in self.answers:
                    pending.append(self.answers[name])
                elif self.is_driver(name) and not read_tables().is_optional(name):
                    return name
        return None


def _read_libraries(generation: Path, manifest: Manifest, base: str) -> _Libraries:
    known: dict[str, Library] = {}
    links: dict[str, str] = {}
    files: dict[str, Library] = {}
    for file in manifest.files:
        directory, _, name = file.path.rpartition("/")
        if directory not in (base, f"{base}/{ORIGIN}"):
            continue
        if file.target is not None:
            links[name] = file.target
            continue
        known[name] = read_library(generation / file.path)
        if file.role in LOADED:
            files[file.path] = known[name]
    answers = dict(known)
    for name in links:
        target = name
        for _ in range(len(links)):
            target = links.get(target, target)
        if target in known:
            answers[name] = known[target]
    return _Libraries(generation, manifest, base, files, answers)


def _load64(path: str, libraries: _Libraries) -> Loaded:
    if missing := libraries.missing(path):
        return Loaded(path, "failed", f"needs {missing}, which is not in the mirror")
    if libraries.manifest.machine != platform.machine():
        return Loaded(path, "not loaded", f"is for {libraries.manifest.machine}")
    try:
        error, mapped = _dlopen(libraries, path)
    except OSError as e:
        return Loaded(path, "not loaded", f"no process can be started for it: {e.strerror}")
    foreign = [m for m in mapped if libraries.is_foreign(m)]
    if foreign:
        return Loaded(path, "failed", f"maps {foreign[0]}, which is not part of the mirror")
    own = tuple(
        m.removeprefix(f"{libraries.generation}/")
        for m in mapped
        if m.startswith(f"{libraries.generation}/")
    )
    if error is not None:
        lacks = _host_lacks(error, libraries)
        if (symbol := UNDEFINED.search(error)) and _is_module(path, libraries):
            lacks = f"needs {symbol[1]}, which the X server defines"
        return Loaded(path, "not loaded" if lacks else "failed", lacks or error, own)
    return Loaded(path, "loaded", mapped=own)


def _is_module(path: str, libraries: _Libraries) -> bool:
    return any(f.path == path and f.capability == MODULES for f in libraries.manifest.files)


def _dlopen(libraries: _Libraries, path: str) -> tuple[str | None, list[str]]:
    """Load a library with only the mirror as the library path; return error and mapped files."""
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                LOAD,
                str(libraries.generation / path),
            ],
            env={"LD_LIBRARY_PATH": str(libraries.directory), "LC_ALL": "C"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LOAD_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not load within {LOAD_TIMEOUT:.0f} s", []
    try:
        error, mapped = json.loads(done.stdout)
    except ValueError:
        if done.returncode < 0:
            return f"its process was killed by signal {-done.returncode} during loading", []
        return f"its process exited with status {done.returncode} during loading", []
    prefix = f"{libraries.generation / path}: "
    return (None if error is None else str(error).removeprefix(prefix)), list(mapped)


def _host_lacks(error: str, libraries: _Libraries) -> str | None:
    """Return which requirement of a library this host lacks, or None if the mirror is at fault."""
    if match := MISSING.match(error):
        if read_tables().is_optional(match[1]):
            return f"needs {match[1]}, which is not installed with this driver"
        if not libraries.is_driver(match[1]):
            return f"needs {match[1]}, which the host lacks"
    if (match := TOO_OLD.match(error)) and not match["file"].startswith(f"{libraries.generation}/"):
        name = match["file"].rpartition("/")[2]
        return f"needs {match['version']}, which the host's {name} lacks"
    return None


def _load32(path: str, libraries: _Libraries) -> Loaded:
    if missing := libraries.missing(path):
        return Loaded(path, "failed", f"needs {missing}, which is not in the mirror")
    if not LOADER32.exists():
        return Loaded(path, "not loaded", f"the host has no 32-bit loader ({LOADER32})")
    return list_needed(LOADER32, path, libraries)


def list_needed(loader: Path, path: str, libraries: _Libraries) -> Loaded:
    """Run a loader to find out where it finds a library's dependencies and symbols."""
    try:
        done = subprocess.run(
            [
                str(loader),
                "--library-path",
                str(libraries.directory),
                str(libraries.generation / path),
            ],
            # As in `ldd -r`; not with --list, which stops at the first name that is not found.
            env={
                "LC_ALL": "C",
                "LD_TRACE_LOADED_OBJECTS": "1",
                "LD_WARN": "yes",
                "LD_BIND_NOW": "yes",
            },
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LOAD_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        why = f"{loader} cannot be run, or did not finish ({type(e).__name__})"
        return Loaded(path, "not loaded", why)
    text = done.stdout.decode(errors="replace")
    own: list[str] = []
    lacking: list[str] = []
    for match in LISTED.finditer(text):
        if match["missing"]:
            lacking.append(match["name"])
        elif match["path"].startswith(f"{libraries.generation}/"):
            own.append(match["path"].removeprefix(f"{libraries.generation}/"))
        elif libraries.is_foreign(match["path"]):
            return Loaded(path, "failed", f"maps {match['path']}, which is not part of the mirror")
    if lacking:
        optional = read_tables().is_optional(lacking[0])
        outcome: Literal["not loaded", "failed"] = (
            "failed" if libraries.is_driver(lacking[0]) and not optional else "not loaded"
        )
        why = "is not installed with this driver" if optional else "the host lacks"
        return Loaded(path, outcome, f"needs {lacking[0]}, which {why}", tuple(own))
    if symbol := UNDEFINED.search(text):
        return Loaded(path, "failed", f"undefined symbol: {symbol[1]}", tuple(own))
    if done.returncode:
        line = (text.strip().splitlines() or ["no reason given"])[-1]
        lacks = _host_lacks(line.partition(": ")[2], libraries)
        return Loaded(path, "not loaded" if lacks else "failed", lacks or line, tuple(own))
    return Loaded(path, "loaded", mapped=tuple(sorted({path, *own})))


def _require_origins(outcomes: list[Loaded], manifest: Manifest) -> Iterator[Loaded]:
    """Yield the outcomes; a control library that did not load the driver's library has failed."""
    control = {f.path: f for f in manifest.files if f.role == "control"}
    for outcome in outcomes:
        stem = outcome.path.partition(".so")[0].rpartition("/")[2]
        origin = f"{LIB64}/{ORIGIN}/{stem}-origin.so.1"
        if outcome.outcome == "loaded" and outcome.path in control and origin not in outcome.mapped:
            yield Loaded(outcome.path, "failed", f"does not load {origin}", outcome.mapped)
        else:
            yield outcome
