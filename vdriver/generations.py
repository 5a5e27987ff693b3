"""Removes the generations of the mirror that no container uses any more (`tidegate gc`).

A generation is in use if it is mounted in any mount namespace on the machine, or if a process has
one of its directories open (`vdriver.namespaces` finds both). A generation that might be in use
where the search has no permission to look is kept. The search may take a minute; only the locks on
the generations are held during it, so a refresh does not wait. The lock on the driver directory is
taken for the removal.

A library that is only mapped, because its process lost the mount, does not count as a use: a
removed file stays available to processes that have it open, and to find them, the maps of every
process would have to be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vdriver.errors import MirrorError
from vdriver.manifest import CURRENT
from vdriver.mirror import DAMAGED, TEMPORARY, locked
from vdriver.mountinfo import Location, Sought, locate, parse_mountinfo
from vdriver.namespaces import NamespaceUse, search

# `tidegate refresh` deletes files whose names begin with TEMPORARY, which completes an aborted
# removal.
REMOVING = f"{TEMPORARY}gc-"
NAME = re.compile(rf"[0-9A-Za-z.]+-[0-9a-f]{{12}}({re.escape(DAMAGED)}-.+)?|{REMOVING}.+")

PROC_PID_INIT_INO = 0xEFFFFFFC  # include/linux/proc_ns.h: the first PID namespace
LOCKED = "locked by a starting container, or by tidegate verify"
CHANGED = "moved or removed by a refresh in the meantime"
SEARCH_TIME = 60.0  # longest search in seconds; after an incomplete one all generations are kept


@dataclass(frozen=True)
class GenerationOutcome:
    """The outcome for a generation, predicted for a dry run; `freed` is in bytes, 0 if it is kept.

    `failed` is set if it should have been removed but was not.
    """

    name: str
    removed: bool
    reason: str
    freed: int = 0
    uses: tuple[NamespaceUse, ...] = ()
    failed: bool = False


@dataclass(frozen=True)
class Collection:
    """The result of `collect` or of its dry run; `notes` say what could not be examined."""

    directory: Path
    dry_run: bool
    outcomes: tuple[GenerationOutcome, ...]
    notes: tuple[str, ...]

    @property
    def freed(self) -> int:
        """Bytes that the removal of generations freed, or in a dry run would free."""
        return sum(o.freed for o in self.outcomes)

    def require_removed(self) -> None:
        """Raise MirrorError if a generation could not be removed."""
        for outcome in self.outcomes:
            if outcome.failed:
                raise MirrorError(
                    f"{self.directory / outcome.name}: {outcome.reason}",
                    hint="run tidegate gc as root, and make sure that the file system is writable",
                )


def collect(
    driver_dir: str | Path,
    *,
    dry_run: bool = False,
    nested: bool = False,
    seconds: float = SEARCH_TIME,
) -> Collection:
    """Remove every generation in `driver_dir` that is neither in force nor in use.

    This includes generations that were set aside as damaged and leftovers from earlier runs; no
    other file is touched. `nested` asserts that all containers are in this PID namespace although
    it is not the machine's initial one. The search for uses takes at most `seconds`. Raise
    MirrorError if the directory does not exist, or if it has generations but none of them is in
    force.
    """
    directory = Path(driver_dir).resolve()
    given = os.path.abspath(driver_dir)  # noqa: PTH100 - links stay: mounts may show either name
    usage = _Usage()
    outcomes: dict[str, GenerationOutcome] = {}
    try:
        with contextlib.ExitStack() as stack:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            names = _generations(directory)
            candidates: dict[str, int] = {}
            in_force = _in_force(directory) if names else ""
            for name in names:
                if name == in_force:
                    outcomes[name] = GenerationOutcome(name, False, "in force")
                elif isinstance(lock := _lock(fd, name, stack), str):
                    outcomes[name] = GenerationOutcome(name, False, lock)
                else:
                    candidates[name] = lock
            if candidates:
                paths = {str(directory), given}
                usage = _find_usage(
                    directory, paths, fd, candidates, nested=nested, seconds=seconds
                )
                # The generations' locks, taken before the search, keep the hook from using them.
                stack.enter_context(locked(directory))
                in_force = _in_force(directory)
            for name, lock in candidates.items():
                if name in usage.kept:
                    uses = tuple(usage.uses.get(name, ()))
                    outcomes[name] = GenerationOutcome(name, False, usage.kept[name], uses=uses)
                elif name == in_force:
                    outcomes[name] = GenerationOutcome(name, False, "in force")
                elif not _is_at(directory / name, lock):
                    outcomes[name] = GenerationOutcome(name, False, CHANGED)
                else:
                    outcomes[name] = _remove(directory, name, dry_run=dry_run)
    except OSError as e:
        raise MirrorError(
            f"{e.filename or directory}: {e.strerror or e}",
            hint="run tidegate refresh first, and tidegate gc as root",
        ) from e
    return Collection(
        directory, dry_run, tuple(outcomes[n] for n in sorted(outcomes)), tuple(usage.notes)
    )


def _generations(directory: Path) -> list[str]:
    return sorted(
        entry.name
        for entry in os.scandir(directory)
        if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    )


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _in_force(directory: Path) -> str:
    current = directory / CURRENT
    generation = Path(os.path.realpath(current))  # Path.resolve raises for a loop of links
    # Without `current`, no generation would be in force, and all would be removed. But the link may
    # have been deleted by mistake, or the restoration of a backup may be incomplete.
    if generation.parent != directory or not generation.is_dir():
        raise MirrorError(f"{current}: no generation is in force", hint="run tidegate refresh")
    return generation.name


def _lock(directory: int, name: str, stack: contextlib.ExitStack) -> int | str:
    """Lock a generation against the hook until `stack` closes; return the reason if that fails."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        return CHANGED  # a refresh removes leftovers, and renames a damaged generation
    stack.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return LOCKED
    return fd


def _remove(directory: Path, name: str, *, dry_run: bool) -> GenerationOutcome:
    path = directory / name
    try:
        freed = blocks(path)
        if dry_run:
            return GenerationOutcome(name, True, "not in use", freed)
        if not name.startswith(REMOVING):
            aside = (directory / f"{REMOVING}{name}{n}" for n in ("", *_suffixes()))
            path = path.rename(next(p for p in aside if not os.path.lexists(p)))
        shutil.rmtree(path)
    except OSError as e:
        reason = f"cannot be removed: {e.filename or path}: {e.strerror or e}"
        return GenerationOutcome(name, False, reason, failed=True)
    return GenerationOutcome(name, True, "not in use", freed)


def _suffixes() -> Iterator[str]:
    return (f"-{n}" for n in range(1, 1000))


def blocks(directory: Path) -> int:
    """Return the bytes on disk that removing a directory frees.

    A file counts if all of its hard links are in the directory. Extents that a file shares with
    another (reflinks) count in full, so on btrfs and XFS less may be freed.
    """
    total = 0
    links: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(directory):
        total += os.lstat(parent).st_blocks
        # os.walk lists links to directories as directories; they occupy no block.
        for name in names:
            status = os.lstat(os.path.join(parent, name))  # noqa: PTH118 - strings throughout
            key = (status.st_dev, status.st_ino)
            links[key] = links.get(key, 0) + 1
            if links[key] == status.st_nlink:
                total += status.st_blocks
    return total * 512


# Search for uses


@dataclass
class _Usage:
    """Uses of generations and reasons to keep them, by name; `notes` say what was not examined."""

    kept: dict[str, str] = field(default_factory=dict)
    uses: dict[str, list[NamespaceUse]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _find_usage(
    directory: Path,
    paths: set[str],
    fd: int,
    candidates: dict[str, int],
    *,
    nested: bool,
    seconds: float,
) -> _Usage:
    usage = _Usage()
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_bytes(), usage.notes)
    own = _mount_id(fd)
    mount = next((m for m in mounts if m.ident == own), None)
    if mount is None or os.readlink("/proc/self") != str(os.getpid()):  # noqa: PTH115
        faults = ["/proc does not belong to this process's PID and mount namespaces"]
        mount = None
    elif os.stat("/proc/self/ns/pid").st_ino != PROC_PID_INIT_INO and not nested:  # noqa: PTH116
        faults = ["processes outside this PID namespace cannot be seen (see --nested)"]
    else:
        faults = []
    opened: dict[str, list[NamespaceUse]] = {}
    if mount is not None:
        base = locate(mount, str(directory))
        sought = Sought(
            base,
            tuple(sorted(paths)),
            {n: Location(base.device, f"{base.path}/{n}") for n in candidates},
            _directories(directory, candidates),
        )
        found = search(sought, seconds=seconds)
        faults += found.faults
        usage.notes += found.notes
        usage.uses, opened = found.mounted, found.opened
    for name, lock in candidates.items():
        below = f"{directory}/{name}"
        users = usage.uses.get(name)
        if _mount_id(lock) != own or any(f"{m.point}/".startswith(f"{below}/") for m in mounts):
            usage.kept[name] = "something is mounted on it"
        elif users:
            plural = "s" if len(users) > 1 else ""
            usage.kept[name] = (
                f"mounted in {len(users)} namespace{plural}, e.g. {users[0].describe()}"
            )
        elif name in opened:
            usage.uses[name] = opened[name]
            plural = "es" if len(opened[name]) > 1 else ""
            usage.kept[name] = (
                f"open in {len(opened[name])} process{plural}, e.g. {opened[name][0].describe()}"
            )
        elif faults:
            usage.kept[name] = f"may be in use: {faults[0]}"
    usage.notes += faults
    return usage


def _directories(directory: Path, names: dict[str, int]) -> dict[tuple[int, int], str]:
    """Return every directory in the generations as NAME/PATH, by (st_dev, st_ino).

    A refresh may remove leftovers in the meantime; it does not respect their locks.
    """
    found = {}
    for name in names:
        for parent, _, _ in os.walk(directory / name):
            try:
                status = os.lstat(parent)
            except FileNotFoundError:
                continue
            found[status.st_dev, status.st_ino] = os.path.relpath(parent, directory)
    return found


def _mount_id(fd: int) -> int:
    text = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
    return int(dict(line.split(":", 1) for line in text.splitlines())["mnt_id"])
