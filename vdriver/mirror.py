"""Writes a planned generation of the mirror, so that only complete generations are ever in force.

A generation is written under a temporary name, made durable, and renamed to a name that is derived
from its content. Only then is `current` switched to it, also by a rename. If this process is killed
before that, the previous generation stays in force, and the next run removes the temporary files.
The lock on the output directory allows one run at a time.

If the file system allows it, file content is shared: with the previous generation, or with the
driver's file, by a reflink or a hard link. A hard link is made only to a file that no user but root
may write. A program that rewrites the driver's file in place then changes the mirror as well.
Package managers do not rewrite files: they rename new ones over them. `tidegate verify`
reports such a change, and so does the next refresh, which makes a new generation.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vdriver import manifest as manifests
from vdriver.content import check_content, digest
from vdriver.errors import MirrorError
from vdriver.manifest import CURRENT, Manifest, ManifestFile
from vdriver.plan import LIB32, LIB64, ORIGIN, Copy, MirrorPlan, PlannedLink
from vdriver.records import copy_entry, describe_generation, link_entry

FICLONE = 0x40049409  # include/uapi/linux/fs.h
CHUNK = 1 << 20
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
AT_FDCWD = -100
RENAME_EXCHANGE = 2  # include/uapi/linux/fs.h
TEMPORARY = ".tmp-"
DAMAGED = ".damaged"


Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Applied:
    """The generation now in force, the previous one, and whether anything was written.

    `how` counts files by how their content was obtained: shared (with the previous generation, or
    within this one), reflinked, hard-linked or copied. `aside` is the path to which a damaged
    generation was moved.
    """

    manifest: Manifest
    previous: Manifest | None
    changed: bool
    how: dict[str, int]
    aside: Path | None = None


@contextlib.contextmanager
def exclusive(output: str | Path) -> Iterator[Path]:
    """Create the generations' directory if it does not exist, and lock it against other runs.

    Only the owner may open the directory: any process that can open it can lock it, which would
    block refreshes and container starts. An OSError in the body becomes a MirrorError.
    """
    directory = Path(output)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(directory) as fd:
            status = os.fstat(fd)
            if status.st_mode & 0o077 and status.st_uid == os.geteuid():
                os.fchmod(fd, 0o700)
            yield directory
    except OSError as e:
        raise _explain(e, directory) from e


def apply_mirror(
    plan: MirrorPlan,
    directory: Path,
    *,
    repair: bool = False,
    hard_links: bool = True,
    progress: Progress | None = None,
) -> Applied:
    """Make the plan's generation and activate it; change nothing if it is already in force.

    Call this within `exclusive`. With `repair` the content of the generation in force is read, and
    a damaged generation is set aside. `progress` is called with the bytes done and the total.
    Raise MirrorError if a source changes or the file system is full, and OSError for other faults.
    """
    _remove_stale(directory)
    previous = current_manifest(directory)
    if previous is not None and not repair and is_fresh(plan, directory, previous):
        return Applied(previous, previous, changed=False, how={})
    writer = _Writer(plan, directory, previous, hard_links=hard_links, progress=progress)
    try:
        made, written = writer.materialise()
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(e, plan, directory) from e
        raise
    _switch(directory, made.generation)
    same = previous is not None and previous.generation == made.generation
    if repair and previous is not None and not same:
        former = directory / previous.generation
        if not _intact(former, previous):
            writer.aside = _free_name(former)
            former.rename(writer.aside)
    return Applied(made, previous, written or not same, dict(writer.how), writer.aside)


def _full(e: OSError, plan: MirrorPlan, directory: Path) -> MirrorError:
    import shutil

    free = shutil.disk_usage(directory).free >> 20
    return MirrorError(
        f"{e.filename or directory}: {e.strerror}; the mirror takes {plan.size >> 20} MiB, "
        f"but only {free} MiB are free",
        hint=f"make room in {directory} (tidegate gc removes unused generations), "
        "then run tidegate refresh",
    )


def _explain(e: OSError, directory: Path) -> MirrorError:
    """Return an error that states why the mirror cannot be written, with a hint."""
    message = f"{e.filename or directory}: {e.strerror or e}"
    if e.errno == errno.EROFS:
        hint = "mount it writable, or name another directory with --output"
    elif e.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        hint = "move it out of the way, or name another directory with --output"
    elif e.errno in (errno.EACCES, errno.EPERM):
        hint = f"run tidegate refresh as root; root has to be able to write to {directory}"
    else:
        hint = f"find out what is wrong with {directory}, then run tidegate refresh"
    return MirrorError(message, hint=hint)


def current_manifest(output: str | Path) -> Manifest | None:
    """Return the manifest of the generation in force; None if there is none or it is unreadable."""
    try:
        manifest = manifests.read_manifest(Path(output) / CURRENT)
    except MirrorError:
        return None
    where = Path(output).resolve() / manifest.generation
    return manifest if Path(output, CURRENT).resolve() == where else None


def is_fresh(plan: MirrorPlan, output: str | Path, manifest: Manifest) -> bool:
    """Return whether `plan` would make `manifest` again, and whether all of its files still exist.

    Names, sizes, times and build ids are compared: a mirrored file keeps its source's time, and the
    control libraries and the driver's libcuda and libnvidia-ml are in `watch`. No content is read.
    """
    if manifest != describe_generation(plan, manifest.generation, manifest.files):
        return False
    base = Path(output, manifest.generation)
    files = {f.path: f for f in manifest.files}
    return (
        len(files) == len(plan.operations)
        and all(
            (file := files.get(o.path)) is not None and _same(o, file, base / o.path)
            for o in plan.operations
        )
        and all(_names(base / directory) == names for directory, names in _directories(plan))
    )


def _same(operation: Copy | PlannedLink, file: ManifestFile, made: Path) -> bool:
    try:
        status = made.lstat()
        if isinstance(operation, PlannedLink):
            return (
                file == link_entry(operation)
                and stat.S_ISLNK(status.st_mode)
                and str(made.readlink()) == operation.target
            )
    except OSError:
        return False
    content = operation.content
    return (
        file == copy_entry(operation, file.sha256)
        and (content is None or file.sha256 == hashlib.sha256(content).hexdigest())
        and stat.S_ISREG(status.st_mode)
        and _usable(operation, status)
        and (status.st_size, status.st_mtime_ns) == (operation.size, operation.mtime_ns)
    )


def _usable(operation: Copy, status: os.stat_result) -> bool:
    """Return whether all users may read (or run) a file, and only root or this user may write."""
    wanted = 0o555 if operation.role == "program" else 0o444
    owned = status.st_uid in (0, os.geteuid())
    return owned and status.st_mode & 0o7022 == 0 and status.st_mode & wanted == wanted


def _directories(plan: MirrorPlan | Manifest) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each directory of a set, and the names that it has to contain."""
    for s in plan.sets:
        yield s.lib64, tuple(sorted((*s.names64, ORIGIN)))
        if s.lib32 is not None and s.names32 is not None:
            yield s.lib32, s.names32


def _names(directory: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(directory)))  # noqa: PTH208 - names, not paths
    except OSError:
        return ()


class _Writer:
    """Writes one generation."""

    def __init__(
        self,
        plan: MirrorPlan,
        output: Path,
        previous: Manifest | None,
        *,
        hard_links: bool,
        progress: Progress | None,
    ) -> None:
        self.plan = plan
        self.output = output
        self.hard_links = hard_links
        self.progress = progress or (lambda _done, _total: None)
        self.done = 0
        self.how: Counter[str] = Counter()
        self.aside: Path | None = None
        self.written: dict[str, tuple[Path, str]] = {}  # by host file: its copy and its SHA-256
        self.previous: dict[
            tuple[str | None, int | None, str | None, str], tuple[Path, ManifestFile]
        ] = {}
        if previous is not None:
            base = output / previous.generation
            self.previous = {
                (f.source, f.size, f.build_id, f.role): (base / f.path, f)
                for f in previous.files
                if f.sha256 is not None
            }

    def materialise(self) -> tuple[Manifest, bool]:
        """Write the generation; return its manifest, and False if an intact one already existed."""
        plan, output = self.plan, self.output
        import shutil

        work = output / f"{TEMPORARY}{os.getpid()}"  # used by this run only: the lock is held
        work.mkdir(mode=0o700)
        try:
            directories = _parents(plan)
            for name in directories:
                (work / name).mkdir()
                (work / name).chmod(0o755)
            files = tuple(
                _link(o, work) if isinstance(o, PlannedLink) else self._copy(o, work)
                for o in plan.operations
            )
            self._fill_sets(work)
            unnamed = describe_generation(plan, f"{plan.driver.version}-{'0' * 12}", files)
            generation = f"{plan.driver.version}-{digest(unnamed)}"
            manifest = describe_generation(plan, generation, files)
            document = manifest.to_json()
            manifests.validate(document)
            _write(work / manifests.NAME, json.dumps(document, indent=1).encode() + b"\n")
            work.chmod(0o755)
            for name in (*reversed(directories), "."):
                _sync(work / name)
            final = output / generation
            written = not _intact(final, manifest)
            if not written:
                _adopt(work, final, plan)
            elif os.path.lexists(final):
                self.aside = _exchange(work, final)
            else:
                work.rename(final)
            _sync(output)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        return manifest, written

    def _copy(self, operation: Copy, work: Path) -> ManifestFile:
        """Write one file's content and time, and return its entry.

        The entry has the hash of the written content. If a source has changed since the search,
        MirrorError is raised: a package is being upgraded, and a mixture of both versions would be
        worse than either.
        """
        target = work / operation.path
        host = operation.host
        if operation.content is not None:
            _write(target, operation.content)
            os.utime(target, ns=(operation.mtime_ns, operation.mtime_ns))
            self._count("copied", operation)
            return copy_entry(operation, hashlib.sha256(operation.content).hexdigest())
        if host in self.written and self._linked(self.written[host][0], target):
            self._count("shared", operation)
            return copy_entry(operation, self.written[host][1])
        sha256 = self._reuse_previous(operation, target) or self._read(operation, target)
        self.written[host] = target, sha256
        return copy_entry(operation, sha256)

    def _reuse_previous(self, operation: Copy, target: Path) -> str | None:
        """Share the file with the previous generation if it is unchanged; return its SHA-256."""
        source = None if operation.role == "control" else operation.below_root
        key = (source, operation.size, operation.build_id, operation.role)
        if source is None or key not in self.previous:
            return None
        path, file = self.previous[key]
        try:
            status = path.lstat()
            if (status.st_size, status.st_mtime_ns) != (operation.size, operation.mtime_ns):
                return None
            _require_unchanged(operation, os.lstat(operation.host))
            if not (stat.S_ISREG(status.st_mode) and _usable(operation, status)):
                return None
            with path.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                    return None
        except OSError:
            return None
        if not self._linked(path, target):
            return None
        self._count("shared", operation)
        return file.sha256

    def _read(self, operation: Copy, target: Path) -> str:
        try:
            read = os.open(operation.host, READ)
        except FileNotFoundError as e:
            raise _changed(operation) from e
        with os.fdopen(read, "rb", buffering=0) as reader:
            status = os.fstat(reader.fileno())
            _require_unchanged(operation, status)
            with target.open("xb+", buffering=0) as writer:
                how = "reflinked" if _reflink(reader.fileno(), writer.fileno()) else "copied"
                if how == "copied" and self._hard_link(operation, status, target):
                    how = "hard-linked"
                elif how == "copied":
                    _transfer(reader.fileno(), writer.fileno())
                if how == "hard-linked":
                    os.fsync(reader.fileno())
                else:
                    os.fchmod(writer.fileno(), operation.mode)
                    os.utime(writer.fileno(), ns=(operation.mtime_ns, operation.mtime_ns))
                    os.fsync(writer.fileno())
            with target.open("rb") as made:
                sha256 = hashlib.file_digest(made, "sha256").hexdigest()
            _require_unchanged(operation, os.fstat(reader.fileno()))
            if target.lstat().st_size != operation.size:
                raise _changed(operation)
        self._count(how, operation)
        return sha256

    def _hard_link(self, operation: Copy, status: os.stat_result, target: Path) -> bool:
        """Link to the driver's file if that is as safe as a copy; return whether it was linked."""
        if not self.hard_links or operation.role == "control":
            return False
        if status.st_uid != 0 or not _usable(operation, status):
            return False
        link = target.with_name(f"{TEMPORARY}{target.name}")
        try:
            # By name, since linkat(2) by descriptor needs a privilege; the inode is compared below.
            os.link(operation.host, link, follow_symlinks=False)
        except OSError:
            return False  # another file system, or one without links
        if not os.path.samestat(link.lstat(), status):
            link.unlink()
            raise _changed(operation)
        link.replace(target)
        return True

    def _linked(self, path: Path, target: Path) -> bool:
        try:
            os.link(path, target)
        except OSError:
            return False
        return True

    def _fill_sets(self, work: Path) -> None:
        """Fill the directories of the smaller sets with links to the files in lib64 and lib32."""
        import shutil

        origin = tuple(f"{ORIGIN}/{n}" for n in _names(work / LIB64 / ORIGIN))
        made = {LIB64, LIB32}
        for s in self.plan.sets:
            for full, directory, names in (
                (LIB64, s.lib64, (*s.names64, *origin)),
                (LIB32, s.lib32, s.names32),
            ):
                if directory is None or names is None or directory in made:
                    continue
                made.add(directory)
                for name in names:
                    source, target = work / full / name, work / directory / name
                    if source.is_symlink():
                        target.symlink_to(source.readlink())
                    elif not self._linked(source, target):
                        shutil.copy2(source, target)
                        _sync(target)

    def _count(self, how: str, operation: Copy) -> None:
        self.how[how] += 1
        self.done += operation.size
        self.progress(self.done, self.plan.size)


def _parents(plan: MirrorPlan) -> tuple[str, ...]:
    """Return every directory of a generation, parents first."""
    leaves = {o.path.rpartition("/")[0] for o in plan.operations}
    for s in plan.sets:
        leaves |= {s.lib64, f"{s.lib64}/{ORIGIN}", *((s.lib32,) if s.lib32 else ())}
    every = {"/".join(d.split("/")[:n]) for d in leaves for n in range(1, d.count("/") + 2)}
    return tuple(sorted(every))


def _require_unchanged(operation: Copy, status: os.stat_result) -> None:
    if (status.st_size, status.st_mtime_ns) != (operation.size, operation.mtime_ns):
        raise _changed(operation)


def _changed(operation: Copy) -> MirrorError:
    return MirrorError(
        f"{operation.host} changed while it was being read",
        hint="wait for the driver's installation to end, then run tidegate refresh",
    )


def _adopt(work: Path, final: Path, plan: MirrorPlan) -> None:
    """Give the intact generation `final` the new times and manifest, and remove `work`.

    The generation is not replaced, because containers may have it mounted.
    """
    import shutil

    for operation in plan.operations:
        if isinstance(operation, Copy):
            os.utime(final / operation.path, ns=(operation.mtime_ns, operation.mtime_ns))
    (work / manifests.NAME).replace(final / manifests.NAME)
    _sync(final)
    shutil.rmtree(work)


def _free_name(final: Path) -> Path:
    """Return a free name for a damaged generation, which containers may still have mounted."""
    names = (Path(f"{final}{DAMAGED}-{n}") for n in itertools.count())
    return next(p for p in names if not os.path.lexists(p))


def _exchange(work: Path, final: Path) -> Path:
    """Replace a damaged generation with `work` in one step; return the damaged one's new path."""
    import ctypes

    aside = _free_name(final)
    work.rename(aside)
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(aside), os.fsencode(final)
    if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) != 0:
        # The file system lacks RENAME_EXCHANGE: for a moment the name does not exist, and no
        # container can start.
        beside = _free_name(final)
        final.rename(beside)
        aside.rename(final)
        return beside
    return aside


def _intact(final: Path, manifest: Manifest) -> bool:
    """Return whether a generation matches its manifest exactly (`content.check_content`)."""
    if final.is_symlink() or not final.is_dir():
        return False
    return next(check_content(final, manifest), None) is None


def _switch(output: Path, generation: str) -> None:
    current = output / CURRENT
    with contextlib.suppress(OSError):
        if str(current.readlink()) == generation:
            return
    link = output / f"{TEMPORARY}{CURRENT}"
    link.symlink_to(generation)
    link.replace(current)
    _sync(output)


def _reflink(reader: int, writer: int) -> bool:
    try:
        fcntl.ioctl(writer, FICLONE, reader)
    except OSError:  # another file system, or one without shared extents
        return False
    return True


def _transfer(reader: int, writer: int) -> None:
    while data := os.read(reader, CHUNK):
        view = memoryview(data)
        while view:
            view = view[os.write(writer, view) :]


def _link(operation: PlannedLink, work: Path) -> ManifestFile:
    (work / operation.path).symlink_to(operation.target)
    return link_entry(operation)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Hold the lock on the generations' directory, and yield the directory's descriptor."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _remove_stale(output: Path) -> None:
    """Remove an interrupted run's temporary files; the lock ensures that no run is using them.

    A file that cannot be removed (a hard link to an immutable file) stays, which does no harm.
    """
    for name in os.listdir(output):  # noqa: PTH208 - names, not paths
        if not name.startswith(TEMPORARY):
            continue
        import shutil

        path = output / name
        if path.is_symlink() or not path.is_dir():
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
