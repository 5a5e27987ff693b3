"""Holds a generation against its manifest, and loads its libraries as a container's loader would.

Two questions, and no repair: is the content what the manifest says, and does every library load
with the mirror alone, nothing of it answered by another driver on this host. Nothing is loaded
from a generation whose content is at fault, as loading runs a library's constructors.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import platform
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vdriver import manifest as manifests
from vdriver import mirror
from vdriver.elf import Library, read_library
from vdriver.errors import LibraryError, MirrorError
from vdriver.manifest import File, Manifest
from vdriver.tables import read_tables

LIB64 = "lib64"
LIB32 = "lib32"
ORIGIN = "origin"
# A refresh makes these whether or not there is anything to put into them.
DIRECTORIES = (".", LIB64, f"{LIB64}/{ORIGIN}", LIB32, "bin", "data", "sets")
LOADED = ("library", "control")
LOADER32 = Path("/lib/ld-linux.so.2")
LOAD_TIMEOUT = 60.0  # seconds for one library; the largest of 550.163.01 takes 0.2
WORKERS = 4
CHUNK = 1 << 20

# The X server's own modules: the symbols that they lack are in the program that loads them. Some
# of those are data (serverClient, TimerSet), which RTLD_LAZY asks for too.
MODULES = "display"

# CDLL opens with RTLD_NOW and RTLD_LOCAL. os._exit: destructors are not what is asked about, and a
# library that prints does not disturb the answer.
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
class Fault:
    """Something that is wrong: where, relative to the generation, and what was found."""

    path: str
    reason: str


@dataclass(frozen=True)
class Loaded:
    """What became of one library.

    `detail` is the reason for anything but `loaded`. `not loaded` is no fault of the mirror's:
    this host lacks what an image may have. `mapped` is what of the generation came along.
    """

    path: str
    outcome: Literal["loaded", "not loaded", "failed"]
    detail: str = ""
    mapped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All that was looked at; it is in order when there are no faults."""

    path: Path
    manifest: Manifest
    content: tuple[Fault, ...]
    libraries: tuple[Loaded, ...]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Those of the content first, then the libraries that failed."""
        failed = (Fault(x.path, x.detail) for x in self.libraries if x.outcome == "failed")
        return (*self.content, *failed)

    def require_intact(self) -> None:
        """MirrorError with the first fault and the number of all, when there is any."""
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
    """Return the directory of a generation, of the one in force when none is named.

    `name` is a name in `driver_dir`, or a path when it has a slash. MirrorError when it is none.
    """
    if name is None:
        current = Path(driver_dir, mirror.CURRENT)
        if not current.is_dir():
            raise MirrorError(f"{current}: no generation is in force", hint="run tidegate refresh")
        return current.resolve()
    path = Path(name) if "/" in name else Path(driver_dir, name)
    if not path.is_dir():
        raise MirrorError(f"{path}: no such generation", hint=f"name one of those in {driver_dir}")
    return path.resolve()


def verify(
    generation: str | Path, *, load: bool = True, progress: Progress | None = None
) -> Report:
    """Look at all of a generation, and load its libraries unless told not to.

    `progress` is called with the number of libraries that are done and that of all. MirrorError
    when the manifest cannot be read, or `tidegate gc` is removing the generation.
    """
    path = Path(generation).resolve()
    with _held(path):
        manifest = manifests.read_manifest(path)
        manifests.validate(manifest.to_json())
        content = tuple(check_content(path, manifest))
        libraries: tuple[Loaded, ...] = ()
        if load and not content:
            libraries = load_libraries(path, manifest, progress)
    return Report(path, manifest, content, libraries)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Keep `tidegate gc` from removing the generation meanwhile, as a starting container does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise MirrorError(f"{path}: {e.strerror}", hint="run tidegate refresh") from e
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    except BlockingIOError as e:
        raise MirrorError(
            f"{path} is locked by tidegate gc", hint="wait for it to end, then try again"
        ) from e
    finally:
        os.close(fd)


# Content


def check_content(generation: Path, manifest: Manifest) -> Iterator[Fault]:
    """Yield every difference between a generation's files and its manifest, names included."""
    yield from _check_name(generation, manifest)
    tree = _Tree(generation)
    yield from tree.unreadable
    files: dict[str, File] = {}
    for file in manifest.files:
        if file.path in files:
            yield Fault(file.path, "is in the manifest twice")
        files[file.path] = file
    for file in files.values():
        yield from _check_file(tree, file, manifest)
    expected = {manifests.NAME, *files}
    for entry in manifest.sets:
        for directory, names, base in (
            (entry.lib64, entry.names64, LIB64),
            (entry.lib32, entry.names32, LIB32),
        ):
            if directory is not None:
                yield from _check_set(tree, files, directory, names or (), base, expected)
    for place in manifest.places:
        yield from _check_names(place.source, tree.names(place.source), place.files)
        for name in place.files:
            if f"{place.source}/{name}" not in files:
                yield Fault(f"{place.source}/{name}", f"is of {place.name}, but has no entry")
    for program in manifest.programs:
        if program.path not in files or files[program.path].role != "program":
            yield Fault(program.path, "is a program of the manifest, but has no entry as one")
    yield from _check_rest(tree, expected)


class _Tree:
    """What is in a generation: every name with its status, links not followed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries: dict[str, os.stat_result] = {".": root.lstat()}
        self.unreadable: list[Fault] = []
        todo = ["."]
        while todo:
            directory = todo.pop()
            try:
                with os.scandir(root / directory) as found:
                    for entry in found:
                        path = entry.name if directory == "." else f"{directory}/{entry.name}"
                        self.entries[path] = entry.stat(follow_symlinks=False)
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(path)
            except OSError as e:
                self.unreadable.append(Fault(directory, f"cannot be read: {e.strerror}"))

    def names(self, directory: str) -> set[str]:
        """Names in a directory, without those of directories."""
        prefix = f"{directory}/"
        return {
            path.removeprefix(prefix)
            for path, status in self.entries.items()
            if path.startswith(prefix)
            and "/" not in path.removeprefix(prefix)
            and not stat.S_ISDIR(status.st_mode)
        }

    def text(self, path: str) -> str:
        """The text of a link."""
        return str((self.root / path).readlink())

    def leads_nowhere(self, path: str) -> str | None:
        """Say that a link leads out of the generation or to nothing; None when it does not."""
        text = self.text(path)
        target = os.path.normpath(f"{Path(path).parent}/{text}")
        if text.startswith("/") or target not in self.entries:
            return f"is a link to {text}, which is not in the generation"
        return None

    def sha256(self, path: str) -> str:
        """The hash of a regular file's content."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(self.root / path, flags), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def _check_name(generation: Path, manifest: Manifest) -> Iterator[Fault]:
    if generation.name != manifest.generation:
        yield Fault(".", f"its manifest is that of {manifest.generation}")
    named = f"{manifest.version}-{mirror.digest(manifest)}"
    if manifest.generation != named:
        yield Fault(manifests.NAME, f"says {manifest.generation}, its entries make {named}")


def _check_file(tree: _Tree, file: File, manifest: Manifest) -> Iterator[Fault]:
    status = tree.entries.get(file.path)
    if status is None:
        yield Fault(file.path, "is not there")
        return
    if file.role == "link":
        if not stat.S_ISLNK(status.st_mode):
            yield Fault(file.path, f"is {_kind(status)}, the manifest has a link to {file.target}")
        elif tree.text(file.path) != file.target:
            yield Fault(
                file.path,
                f"is a link to {tree.text(file.path)}, the manifest has one to {file.target}",
            )
        elif reason := tree.leads_nowhere(file.path):
            yield Fault(file.path, reason)
        return
    if not stat.S_ISREG(status.st_mode):
        yield Fault(file.path, f"is {_kind(status)}, the manifest has a file ({file.role})")
        return
    if file.role == "program" and status.st_mode & 0o111 != 0o111:
        yield Fault(file.path, f"has mode {_mode(status)}, not everybody can execute it")
    if status.st_size != file.size:
        yield Fault(file.path, f"has {status.st_size} bytes, the manifest {file.size}")
        return
    try:
        found = tree.sha256(file.path)
    except OSError as e:
        yield Fault(file.path, f"cannot be read: {e.strerror}")
        return
    if found != file.sha256:
        yield Fault(
            file.path, f"has the SHA-256 {found[:12]}..., the manifest {str(file.sha256)[:12]}..."
        )
    elif file.role in (*LOADED, "origin"):
        yield from _check_library(tree.root, file, manifest)


def _check_library(root: Path, file: File, manifest: Manifest) -> Iterator[Fault]:
    try:
        library = read_library(root / file.path)
    except LibraryError as e:
        yield Fault(file.path, e.message.removeprefix(f"{root / file.path}: "))
        return
    bits = 32 if file.path.startswith(f"{LIB32}/") else 64
    if library.bits != bits or (bits == 64 and library.machine != manifest.machine):
        yield Fault(
            file.path,
            f"is {library.bits}-bit {library.machine}, which does not belong there",
        )
    if file.soname is not None and library.soname != file.soname:
        yield Fault(file.path, f"has the soname {library.soname}, the manifest {file.soname}")


def _check_set(  # noqa: PLR0917 - private, and called once
    tree: _Tree,
    files: dict[str, File],
    directory: str,
    names: tuple[str, ...],
    base: str,
    expected: set[str],
) -> Iterator[Fault]:
    """Hold a set's directory against its names, and each entry against that of lib64 or lib32.

    Adds what belongs to the set to `expected`.
    """
    if directory not in tree.entries:
        yield Fault(directory, "is not there")
        return
    yield from _check_names(directory, tree.names(directory), names)
    pairs = [(f"{directory}/{name}", f"{base}/{name}") for name in names]
    if base == LIB64:
        origins = tree.names(f"{directory}/{ORIGIN}")
        known = tree.names(f"{LIB64}/{ORIGIN}")
        pairs += [(f"{directory}/{ORIGIN}/{n}", f"{LIB64}/{ORIGIN}/{n}") for n in origins & known]
        for name in names:
            file = files.get(f"{LIB64}/{name}")
            if file is not None and file.role == "control":
                origin = f"{name.partition('.so')[0]}-origin.so.1"
                if origin not in origins:
                    yield Fault(f"{directory}/{ORIGIN}/{origin}", f"is not there, {name} needs it")
    for path, like in pairs:
        expected.add(path)
        if like not in files:
            yield Fault(path, f"has no entry as {like}")
        elif path != like and path in tree.entries and like in tree.entries:
            yield from _check_same(tree, path, like, files[like])


def _check_same(tree: _Tree, path: str, like: str, file: File) -> Iterator[Fault]:
    status, other = tree.entries[path], tree.entries[like]
    if stat.S_IFMT(status.st_mode) != stat.S_IFMT(other.st_mode):
        yield Fault(path, f"is {_kind(status)}, {like} is {_kind(other)}")
    elif stat.S_ISLNK(status.st_mode):
        if tree.text(path) != tree.text(like):
            yield Fault(path, f"is a link to {tree.text(path)}, {like} is one to {tree.text(like)}")
        elif reason := tree.leads_nowhere(path):
            yield Fault(path, reason)
    elif (status.st_dev, status.st_ino) != (other.st_dev, other.st_ino):
        try:
            if tree.sha256(path) != file.sha256:
                yield Fault(path, f"has another content than {like}")
        except OSError as e:
            yield Fault(path, f"cannot be read: {e.strerror}")


def _check_names(directory: str, found: set[str], names: tuple[str, ...]) -> Iterator[Fault]:
    for name in sorted(set(names) - found):
        yield Fault(f"{directory}/{name}", "is not there")
    for name in sorted(found - set(names)):
        yield Fault(f"{directory}/{name}", f"is not among the manifest's names of {directory}")


def _check_rest(tree: _Tree, expected: set[str]) -> Iterator[Fault]:
    """Refuse what the manifest does not name, and permissions and owners of all that is there."""
    directories = set(DIRECTORIES)
    for path in expected:
        directories |= {str(p) for p in Path(path).parents}
    for path, status in sorted(tree.entries.items()):
        if stat.S_ISDIR(status.st_mode):
            if path not in directories:
                yield Fault(path, "is a directory that the manifest does not name")
        elif path not in expected:
            yield Fault(path, "is not in the manifest")
        if stat.S_ISLNK(status.st_mode):
            continue
        wanted = 0o555 if stat.S_ISDIR(status.st_mode) else 0o444
        if status.st_mode & wanted != wanted or status.st_mode & 0o7022:
            yield Fault(
                path, f"has mode {_mode(status)}: readable by all, writable by its owner is right"
            )
        if status.st_uid not in (0, os.geteuid()):
            yield Fault(path, f"belongs to user {status.st_uid}, root is right")


def _kind(status: os.stat_result) -> str:
    kinds = {stat.S_IFREG: "a file", stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory"}
    return kinds.get(stat.S_IFMT(status.st_mode), "no file")


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"


# Loading


def load_libraries(
    generation: Path, manifest: Manifest, progress: Progress | None = None
) -> tuple[Loaded, ...]:
    """Load every library of lib64 and lib32 in a process of its own, and say what became of each.

    Sorted by path. MirrorError when the loader cannot be given the generation's path.
    """
    if re.search(r"[:;$]", str(generation)):
        raise MirrorError(
            f"{generation}: the loader takes no path with ':', ';' or '$'",
            hint="move the driver's directory, or leave loading out with --no-load",
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
    """The libraries of lib64 or lib32: those to load by path, and all names that they answer."""

    generation: Path
    manifest: Manifest
    base: str
    files: dict[str, Library]  # by path; what is loaded by itself
    answers: dict[str, Library]  # by name, origin/ included
    sonames: dict[str, str | None] = field(default_factory=dict)  # of files elsewhere, by path

    @property
    def directory(self) -> Path:
        return self.generation / self.base

    def is_driver(self, name: str) -> bool:
        """Say whether a file name is one of the driver's, in this mirror or forgotten by it."""
        stem = name.partition(".so")[0]
        return (
            name in self.answers
            or "nvidia" in name.lower()
            or stem in ("libcuda", "libnvcuvid", "libnvoptix")
            or name.endswith(f".so.{self.manifest.version}")
        )

    def is_stranger(self, path: str) -> bool:
        """Say whether a mapped file is a driver's library from outside of the generation."""
        if path.startswith(f"{self.generation}/"):
            return False
        name = path.rpartition("/")[2]
        stems = {n.partition(".so")[0] for n in self.answers}
        if self.is_driver(name) or name.partition(".so")[0] in stems:
            return True
        if path not in self.sonames:
            try:
                self.sonames[path] = read_library(path).soname
            except LibraryError:  # no library, or gone
                self.sonames[path] = None
        return self.sonames[path] in self.answers

    def missing(self, path: str) -> str | None:
        """Return a library of the driver's that is needed and not in the mirror, None for none."""
        todo, seen = [self.files[path]], set[str]()
        while todo:
            for name in todo.pop().needed:
                if name in seen:
                    continue
                seen.add(name)
                if name in self.answers:
                    todo.append(self.answers[name])
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
    error, mapped = _dlopen(libraries, path)
    strangers = [m for m in mapped if libraries.is_stranger(m)]
    if strangers:
        return Loaded(path, "failed", f"maps {strangers[0]}, which is not of the mirror")
    own = tuple(
        m.removeprefix(f"{libraries.generation}/")
        for m in mapped
        if m.startswith(f"{libraries.generation}/")
    )
    if error is not None:
        lacks = _host_lacks(error, libraries)
        if (symbol := UNDEFINED.search(error)) and _is_module(path, libraries):
            lacks = f"needs {symbol[1]}, which the X server has"
        return Loaded(path, "not loaded" if lacks else "failed", lacks or error, own)
    return Loaded(path, "loaded", mapped=own)


def _is_module(path: str, libraries: _Libraries) -> bool:
    return any(f.path == path and f.capability == MODULES for f in libraries.manifest.files)


def _dlopen(libraries: _Libraries, path: str) -> tuple[str | None, list[str]]:
    """Load a library in a process that knows nothing but the mirror; give error, mapped files."""
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
            return f"ended its process with signal {-done.returncode} while it loaded", []
        return f"ended its process with status {done.returncode} while it loaded", []
    prefix = f"{libraries.generation / path}: "
    return (None if error is None else str(error).removeprefix(prefix)), list(mapped)


def _host_lacks(error: str, libraries: _Libraries) -> str | None:
    """Say what an image has to have and this host does not; None when the mirror is to blame."""
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
    """Have a loader say where it would find all that a library needs, symbols included."""
    try:
        done = subprocess.run(
            [
                str(loader),
                "--library-path",
                str(libraries.directory),
                str(libraries.generation / path),
            ],
            # As `ldd -r` asks, and not by --list, which ends at the first name that is not found.
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
        return Loaded(path, "not loaded", f"{loader} does not answer ({type(e).__name__})")
    text = done.stdout.decode(errors="replace")
    own: list[str] = []
    lacking: list[str] = []
    for match in LISTED.finditer(text):
        if match["missing"]:
            lacking.append(match["name"])
        elif match["path"].startswith(f"{libraries.generation}/"):
            own.append(match["path"].removeprefix(f"{libraries.generation}/"))
        elif libraries.is_stranger(match["path"]):
            return Loaded(path, "failed", f"maps {match['path']}, which is not of the mirror")
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
    """Yield the outcomes, a control library that left the driver's own out as a failure."""
    control = {f.path: f for f in manifest.files if f.role == "control"}
    for outcome in outcomes:
        stem = outcome.path.partition(".so")[0].rpartition("/")[2]
        origin = f"{LIB64}/{ORIGIN}/{stem}-origin.so.1"
        if outcome.outcome == "loaded" and outcome.path in control and origin not in outcome.mapped:
            yield Loaded(outcome.path, "failed", f"does not load {origin}", outcome.mapped)
        else:
            yield outcome
