"""Materialises a plan as a generation, so that nothing short of completion is ever in force.

A generation is written under a temporary name, made durable, renamed to what its content is called,
and only then does `current` move to it, by rename too. Ending this process anywhere leaves the
former generation in force; what it left behind goes with the next run. One run at a time has the
output directory's lock.

File content is reflinked where the file system can, and copied elsewhere. Hard links would cost
as little, but a package manager or installer that rewrites the driver's file in place would
rewrite the mirror of a running container with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vdriver import manifest as manifests
from vdriver.errors import MirrorError
from vdriver.manifest import CapabilitySet, File, Manifest, Watched
from vdriver.plan import CAPABILITIES, DIRECTORIES, LIB64, Copy, Link, MirrorPlan

FICLONE = 0x40049409  # include/uapi/linux/fs.h
CHUNK = 1 << 20
CURRENT = "current"
TEMPORARY = ".tmp-"
DAMAGED = ".damaged"


@dataclass(frozen=True)
class Applied:
    """The generation now in force, the one before it, and whether anything was written."""

    manifest: Manifest
    previous: Manifest | None
    changed: bool


def apply_mirror(plan: MirrorPlan, output: str | Path) -> Applied:
    """Make the plan's generation and put it in force; when it already is, change nothing."""
    directory = Path(output)
    try:
        with _locked(directory):
            _remove_stale(directory)
            previous = current_manifest(directory)
            if previous is not None and is_fresh(plan, directory, previous):
                return Applied(previous, previous, changed=False)
            made, written = _materialise(plan, directory)
            _switch(directory, made.generation)
            same = previous is not None and previous.generation == made.generation
            return Applied(made, previous, changed=written or not same)
    except OSError as e:
        raise MirrorError(
            f"{e.filename or directory}: {e.strerror or e}",
            hint=f"make room and give root write access to {directory}, then run it again",
        ) from e


def current_manifest(output: str | Path) -> Manifest | None:
    """Return the manifest of the generation in force, None when there is none that is readable."""
    try:
        manifest = manifests.read_manifest(Path(output) / CURRENT)
    except MirrorError:
        return None
    return manifest if Path(output, CURRENT).resolve().name == manifest.generation else None


def is_fresh(plan: MirrorPlan, output: str | Path, manifest: Manifest) -> bool:
    """Say whether `manifest` is what `plan` would make, and its files are all still there.

    Decided by names, sizes and times: a mirrored file keeps its source's time, and the control
    libraries and the two drivers are in `watch`. Content is read only when one of them differs.
    """
    if manifest != _manifest(plan, manifest.generation, manifest.files):
        return False
    files = {f.path: f for f in manifest.files}
    return len(files) == len(plan.operations) and all(
        (file := files.get(o.path)) is not None
        and _same(o, file, Path(output, manifest.generation, o.path))
        for o in plan.operations
    )


def _same(operation: Copy | Link, file: File, made: Path) -> bool:
    try:
        status = made.lstat()
        if isinstance(operation, Link):
            return (
                file == _link_entry(operation)
                and stat.S_ISLNK(status.st_mode)
                and str(made.readlink()) == operation.target
            )
    except OSError:
        return False
    return (
        file == _copy_entry(operation, file.sha256)
        and stat.S_ISREG(status.st_mode)
        and stat.S_IMODE(status.st_mode) == operation.mode
        and (status.st_size, status.st_mtime_ns)
        == (operation.source.size, operation.source.mtime_ns)
    )


def _materialise(plan: MirrorPlan, output: Path) -> tuple[Manifest, bool]:
    """Write a generation; the flag says whether it is new, false where an intact one was there."""
    work = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=output))
    try:
        for name in DIRECTORIES:
            (work / name).mkdir()
            (work / name).chmod(0o755)
        files = tuple(
            _link(o, work) if isinstance(o, Link) else _copy(o, work) for o in plan.operations
        )
        generation = f"{plan.driver.version}-{digest(files)}"
        manifest = _manifest(plan, generation, files)
        document = manifest.to_json()
        manifests.validate(document)
        _write(work / manifests.NAME, json.dumps(document, indent=1).encode() + b"\n")
        work.chmod(0o755)
        for name in (*reversed(DIRECTORIES), "."):
            _sync(work / name)
        final = output / generation
        written = not final.exists() or not _adopt(work, final, plan, manifest)
        if written:
            work.rename(final)
        _sync(output)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return manifest, written


def _adopt(work: Path, final: Path, plan: MirrorPlan, manifest: Manifest) -> bool:
    """Keep the generation of this name that is there already, if its content is what it says.

    Containers may have it mounted, so an intact one stays and gets the new times and manifest. One
    that somebody changed is moved aside, and `work` has to take its place: False.
    """
    if not _intact(final, manifest):
        aside = (Path(f"{final}{DAMAGED}-{n}") for n in itertools.count())
        final.rename(next(p for p in aside if not p.exists()))
        return False
    for operation in plan.operations:
        if isinstance(operation, Copy):
            time = operation.source.mtime_ns
            os.utime(final / operation.path, ns=(time, time))
    (work / manifests.NAME).replace(final / manifests.NAME)
    _sync(final)
    shutil.rmtree(work)
    return True


def _intact(final: Path, manifest: Manifest) -> bool:
    """Say whether the generation holds exactly the content that its name stands for."""
    for file in manifest.files:
        path = final / file.path
        try:
            if file.target is not None:
                if str(path.readlink()) != file.target:
                    return False
                continue
            if not stat.S_ISREG(path.lstat().st_mode):
                return False
            with path.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                    return False
        except OSError:
            return False
    return True


def _switch(output: Path, generation: str) -> None:
    current = output / CURRENT
    with contextlib.suppress(OSError):
        if str(current.readlink()) == generation:
            return
    link = output / f"{TEMPORARY}{CURRENT}"
    link.symlink_to(generation)
    link.replace(current)
    _sync(output)


def digest(files: tuple[File, ...]) -> str:
    """Return what names a generation: the first 12 hex digits of a SHA-256 over all its content."""
    total = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.path):
        kind, content = ("link", file.target) if file.target else ("file", file.sha256)
        total.update(f"{file.path}\0{kind}\0{content}\n".encode())
    return total.hexdigest()[:12]


def _manifest(plan: MirrorPlan, generation: str, files: tuple[File, ...]) -> Manifest:
    driver = plan.driver
    watched = (driver.cuda.library, driver.nvml.library, plan.control.cuda, plan.control.nvml)
    return Manifest(
        generation=generation,
        version=driver.version,
        kind=driver.kind,
        machine=driver.machine,
        sets=(CapabilitySet(CAPABILITIES, LIB64, plan.programs),),
        files=files,
        root=str(Path(driver.root).absolute()),
        watch=tuple(Watched(os.path.realpath(w.path), w.size, w.mtime_ns) for w in watched),
    )


def _copy(operation: Copy, work: Path) -> File:
    """Copy one file's content, with its time, and return its entry.

    The hash is of what was written. A source that changed since it was found fails the run: a
    package is being upgraded, and half of each version would be worse than either.
    """
    source = operation.source
    target = work / operation.path
    read = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(read, "rb") as reader, target.open("xb+", buffering=0) as writer:
        sha256 = _transfer(reader.fileno(), writer.fileno())
        status = os.fstat(reader.fileno())
        written = os.fstat(writer.fileno()).st_size
        if (status.st_size, status.st_mtime_ns, written) != (
            source.size,
            source.mtime_ns,
            source.size,
        ):
            raise MirrorError(
                f"{source.path} changed while it was being read",
                hint="wait for the driver's installation to end, then run tidegate refresh",
            )
        os.fchmod(writer.fileno(), operation.mode)
        os.utime(writer.fileno(), ns=(source.mtime_ns, source.mtime_ns))
        os.fsync(writer.fileno())
    return _copy_entry(operation, sha256)


def _transfer(reader: int, writer: int) -> str:
    try:
        fcntl.ioctl(writer, FICLONE, reader)
    except OSError:  # another file system, or one without shared extents
        while data := os.read(reader, CHUNK):
            view = memoryview(data)
            while view:
                view = view[os.write(writer, view) :]
    total = hashlib.sha256()
    os.lseek(writer, 0, os.SEEK_SET)
    while data := os.read(writer, CHUNK):
        total.update(data)
    return total.hexdigest()


def _link(operation: Link, work: Path) -> File:
    (work / operation.path).symlink_to(operation.target)
    return _link_entry(operation)


def _copy_entry(operation: Copy, sha256: str | None) -> File:
    return File(
        path=operation.path,
        role=operation.role,
        capability=operation.capability,
        soname=operation.source.soname,
        size=operation.source.size,
        sha256=sha256,
        source=operation.below_root,
    )


def _link_entry(operation: Link) -> File:
    return File(
        path=operation.path,
        role="link",
        capability=operation.capability,
        target=operation.target,
    )


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    output.mkdir(mode=0o755, parents=True, exist_ok=True)
    fd = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(output: Path) -> None:
    """Remove what an interrupted run left; the lock says that no other run is using it."""
    for path in output.glob(f"{TEMPORARY}*"):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Make a directory's names durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
