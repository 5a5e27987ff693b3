"""Records what the hook creates in a container's root file system, and removes it at the end.

A mount needs a mount point, and programs find libcuda through ld.so.cache. So a start creates
directories, a cache and, where needed, empty files. A note on the host, named after the
container's id, lists them. It is read at the container's end, by the wrapper runtime after
`delete` or by `poststop`. By then the container may have put anything at these paths, so only
empty files and directories are removed, and only through confined descriptors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from binascii import a2b_base64, b2a_base64

from oci_hook import kernel, ldcache
from oci_hook.apart import ANSWERS, run_briefly
from oci_hook.errors import MountError
from oci_hook.files import as_owner, remove, write_all
from oci_hook.light_json import dump_json, load_json
from oci_hook.light_re import DIGITS, LETTERS, consists_of
from oci_hook.light_typing import suppress
from oci_hook.quick import read_bounded
from oci_hook.state import is_text

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from functools import partial
    from typing import Any, NamedTuple
else:
    from _functools import partial  # functools imports collections and more

    from oci_hook.light_typing import NamedTuple

DIRECTORY = "traces"  # directory of the notes, below the runtime directory
LOCK = "traces.lock"  # next to DIRECTORY
TEMPORARY = ".ld.so.cache.tidegate"
ID_LIMIT = 200  # characters of an id, which has to fit into a file name
KEPT_LIMIT = 512 << 10  # bytes of a cache that is kept; most take tens of KiB; /run is in memory
STORED_LIMIT = 1 << 20  # bytes of a note
HEAD_LIMIT = 32 << 10  # bytes of a note's first line: the longest path, as JSON
SWEEP = 32  # on average, one in this many starts checks all notes
SWEEPING = 1 << 62  # offset in LOCK of the byte for sweeps; the bytes before it are for roots
LOOKS = 64  # directories resolved for a cache that the container wrote; each takes a path walk
SECONDS = 4.0  # time limit of one container's clean-up


class HookTrace(NamedTuple):
    """Something that the hook created or replaced."""

    what: str  # directory, file, cache
    path: str  # below the container's root
    kept: dict[str, Any] = {}  # noqa: RUF012 - for a cache: the original, and how to identify ours


class NoteHeader(NamedTuple):
    """The first line of a note: the container that the traces belong to."""

    root: str
    pid: int
    began: int  # start time of that process, because pids are reused; 0 if it had ended
    device: int
    inode: int  # with `device`, identifies the root; other paths and containers may share it
    made: int = 0  # monotonic time in ns; a start reuses files that are listed in earlier notes


class Attributes(NamedTuple):
    """File attributes that are restored."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int


def _attributes(status: os.stat_result) -> Attributes:
    mode = stat.S_IMODE(status.st_mode)
    return Attributes(mode, status.st_uid, status.st_gid, status.st_mtime_ns)


def keep(rootfd: int, path: str, data: bytes) -> dict[str, Any]:
    """Describe the file or link at a path so that it can be restored; `data` is a file's content.

    The result is empty for anything else and for a file that is too large: the cache that
    replaces it is then left in place when the container ends, without the entries for the driver.
    The file is not read again, because its name may now belong to another file.
    """
    parent, _, name = path.rpartition("/")
    dirfd = kernel.open_in_root(rootfd, parent, os.O_PATH | os.O_DIRECTORY, same_mount=True)
    try:
        fd = kernel.open_child(dirfd, name)
    finally:
        os.close(dirfd)
    try:
        status = os.fstat(fd)
        kept: dict[str, Any] = {"attributes": _attributes(status)}
        if stat.S_ISLNK(status.st_mode):
            return kept | {"link": kernel.readlink(fd)}
    finally:
        os.close(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != len(data) or len(data) > KEPT_LIMIT:
        return {}
    return kept | {"data": b2a_base64(data, newline=False).decode()}


def is_name(ident: str) -> bool:
    """Return whether an id has the form that engines use, so that it can be a file name."""
    return (
        0 < len(ident) <= ID_LIMIT
        and consists_of(ident, LETTERS + DIGITS + "_.+-")
        and ident[0] not in ".+-"
    )


def _directory(runtime_dir: str) -> int:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(f"{runtime_dir}/{DIRECTORY}", flags)


def lock(runtime_dir: str, device: int, inode: int) -> int:
    """Lock a root, so that no other process starts or ends a container on it; return a descriptor.

    The lock lasts until the descriptor is closed or the process ends; the process must not have
    another descriptor of that file. Without the lock, the clean-up of another container could
    remove what a start uses, mounts included, between the start's examination of the image and the
    writing of its note. Return -1 if locking is not possible. If the process that has the lock is
    stuck because the root does not answer, the deadline raises a MountError with that reason.

    Each root corresponds to a byte of one file, so locks leave no files behind.
    """
    try:
        return _lock_byte(runtime_dir, (device << 40 ^ inode) & (SWEEPING - 1), fcntl.LOCK_EX)
    except MountError as e:
        raise MountError(
            "the start or end of another container on the same root file system is unfinished, and"
            f" {e.message}",
            hint=ANSWERS,
        ) from e
    except OSError:
        return -1


def _lock_byte(runtime_dir: str, byte: int, how: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(f"{runtime_dir}/{LOCK}", flags, 0o600)
    try:
        fcntl.lockf(fd, how, 1, byte)
    except BaseException:
        os.close(fd)
        raise
    return fd


def remember(runtime_dir: str, ident: str, pid: int, root: str, traces: list[HookTrace]) -> None:
    """Write a note that lists what was created, even if nothing was. Raise OSError on failure.

    `root` has no link in it, and a link that appears later is not followed: otherwise a user with
    write access to a directory above it could redirect the clean-up.
    """
    if not is_name(ident):
        raise OSError(errno.EINVAL, "the container's id cannot be used as a file name")
    rootfd = kernel.open_straight(root)
    place = os.fstat(rootfd)
    os.close(rootfd)
    note = NoteHeader(root, pid, _began(pid), place.st_dev, place.st_ino, time.monotonic_ns())
    data = dump_json(note).encode() + b"\n" + dump_json(traces).encode()
    if len(data) > STORED_LIMIT:
        raise OSError(errno.EFBIG, f"the description takes {len(data)} bytes")
    above = os.open(runtime_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(FileExistsError):
            kernel.mkdirat(above, DIRECTORY, 0o700)
        dirfd = _directory(runtime_dir)
    finally:
        os.close(above)
    temporary = f"~{ident}"  # no id begins with ~
    try:
        remove(dirfd, temporary)
        fd = kernel.create(dirfd, temporary, 0o600)
        try:
            write_all(fd, data)
        finally:
            os.close(fd)
        # Files of an earlier container with this id may be in use by other containers on the same
        # root. The earlier container's note is kept until those containers end.
        with suppress(FileNotFoundError):
            kernel.renameat(dirfd, ident, f"{ident}@{note.made}")
        kernel.renameat(dirfd, temporary, ident)
    except OSError:
        with suppress(OSError):
            remove(dirfd, temporary)
        raise
    finally:
        os.close(dirfd)


def forget(runtime_dir: str, ident: str) -> None:
    """Remove a container's note, whether or not everything that it lists was removed."""
    with suppress(OSError):
        dirfd = _directory(runtime_dir)
        try:
            kernel.unlinkat(dirfd, ident)
        finally:
            os.close(dirfd)


def _began(pid: int) -> int:
    """Return the start time of a process; 0 if it has ended, even if it is still a zombie."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError:
        return 0
    fields = text.rpartition(b") ")[2].split()  # from the third field on: proc(5)
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _runs(note: NoteHeader) -> bool:
    return note.began > 0 and _began(note.pid) == note.began


def _read(runtime_dir: str, ident: str, limit: int = STORED_LIMIT) -> bytes:
    """Read a note, or its first `limit` bytes; b"" if there is none or it is not a file."""
    path = f"{runtime_dir}/{DIRECTORY}/{ident}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.read(fd, limit)
        finally:
            os.close(fd)
    except OSError:
        return b""


def _parse_note(data: bytes) -> NoteHeader | None:
    """Parse the first line of a note; None if it is malformed."""
    if not data:
        return None  # the usual case; parsing an empty string takes as long as all other work here
    try:
        note = NoteHeader(*load_json(data.partition(b"\n")[0]))
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = all(type(number) is int for number in note[1:])
    return note if numbers and is_text(note.root) else None


def _parse_traces(data: bytes) -> list[HookTrace]:
    """Parse the rest of a note; the result is empty if it is malformed."""
    try:
        found = [HookTrace(*trace) for trace in load_json(data.partition(b"\n")[2])]
    except (ValueError, TypeError, RecursionError):
        return []
    return [t for t in found if is_text(t.what) and is_text(t.path) and type(t.kept) is dict]


def _notes(runtime_dir: str) -> dict[str, NoteHeader | None]:
    """Return all notes by file name; None for a file that is not a note."""
    names = os.listdir(f"{runtime_dir}/{DIRECTORY}")
    return {name: _parse_note(_read(runtime_dir, name, HEAD_LIMIT)) for name in names}


def take_back(runtime_dir: str, ident: str) -> None:
    """Remove what the hook created for a container, as far as possible, and its note.

    Removing a directory removes the mounts on it in every container. So nothing is removed while
    another container is running on the same root; when the last one ends, everything is removed.
    """
    if not is_name(ident):
        return
    own = _parse_note(_read(runtime_dir, ident, HEAD_LIMIT))
    if own is None:
        forget(runtime_dir, ident)
        return
    held = lock(runtime_dir, own.device, own.inode)
    try:
        _take_from_root(runtime_dir, ident, own)
    finally:
        if held >= 0:
            os.close(held)


def _take_from_root(runtime_dir: str, ident: str, own: NoteHeader) -> None:
    """Remove what the hook created for the containers on one root, if none of them is running."""
    place = own.device, own.inode
    notes = _notes(runtime_dir).items()
    shared = [(n, note) for n, note in notes if note and (note.device, note.inode) == place]
    running = {(note.device, note.inode) for _, note in notes if note and _runs(note)}
    if place in running:
        # A start that found everything in place created nothing. Its note is removed; otherwise the
        # notes of the container's restarts would pile up.
        if not _runs(own) and not _parse_traces(_read(runtime_dir, ident)):
            forget(runtime_dir, ident)
        return
    until = time.monotonic() + SECONDS
    for name, note in sorted(shared, key=lambda item: (item[1].made, item[1].began), reverse=True):
        try:
            with suppress(OSError):  # the root is gone, with everything in it
                rootfd = kernel.open_straight(note.root)
                here = os.fstat(rootfd)
                if (here.st_dev, here.st_ino) in running:  # the name now leads to another root
                    os.close(rootfd)
                    continue
                _take_all(rootfd, _parse_traces(_read(runtime_dir, name)), until)
        finally:
            forget(runtime_dir, name)  # in any case: the next clean-up would fail at the same point


def _take_all(rootfd: int, traces: list[HookTrace], until: float) -> None:
    """Remove traces, last one first, until the time `until`."""
    procfd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    here, host = os.fstat(rootfd), os.stat("/")
    if (here.st_dev, here.st_ino) != (host.st_dev, host.st_ino):
        for trace in reversed(traces):
            # The errors other than OSError come from a damaged cache or note.
            with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
                if time.monotonic() < until:
                    _remove_trace(procfd, rootfd, trace, traces)
    os.close(procfd)
    os.close(rootfd)


def sweep(runtime_dir: str) -> None:
    """Remove stale notes, and files that are not notes.

    A note is stale if its container's end was not reported and the root is gone.
    """
    with suppress(OSError):
        for name, note in _notes(runtime_dir).items():
            if note is None:
                stays = name.startswith("~")  # another process may be writing it
            else:
                # A running container may have its root in another mount namespace.
                stays = _runs(note) or os.path.isdir(note.root)
            # A start may have written a new note under this name in the meantime.
            if not stays and _parse_note(_read(runtime_dir, name, HEAD_LIMIT)) == note:
                forget(runtime_dir, name)


def sweep_apart(runtime_dir: str) -> None:
    """Sweep in another process, because a root may be on a file system that does not answer.

    Only one process sweeps at a time: a second one would get stuck on the same root.
    """

    def work() -> None:
        _lock_byte(runtime_dir, SWEEPING, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sweep(runtime_dir)

    run_briefly(work)


def _remove_trace(procfd: int, rootfd: int, trace: HookTrace, traces: list[HookTrace]) -> None:
    """Remove one trace if it is still what was created. Raise OSError if that fails."""
    parent, _, name = trace.path.rpartition("/")
    dirfd = kernel.open_in_root(rootfd, parent or ".", os.O_PATH | os.O_DIRECTORY, same_mount=True)
    try:
        if trace.what == "directory":
            kernel.unlinkat(dirfd, name, directory=True)
            return
        fd = kernel.open_child(dirfd, name)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return
            if trace.what == "file":
                if status.st_size == 0 and status.st_nlink == 1:
                    kernel.unlinkat(dirfd, name)
                return
            data = None
            ours = [status.st_size, status.st_mtime_ns] == trace.kept["ours"]
            if not ours or "attributes" not in trace.kept:
                readable = kernel.reopen(procfd, fd, os.O_RDONLY | os.O_NONBLOCK)
                try:
                    data = read_bounded(readable, ldcache.CACHE_LIMIT) or b""
                finally:
                    os.close(readable)
        finally:
            os.close(fd)
        if data is not None:
            made = [trace.path for trace in traces if trace.what == "directory"]
            content = _without_entries(rootfd, data, made)
            if content is not None:
                _replace_file(dirfd, name, content, _attributes(status))
        else:
            _restore_cache(dirfd, name, trace.kept)
    finally:
        os.close(dirfd)


def _restore_cache(dirfd: int, name: str, kept: dict[str, Any]) -> None:
    """Restore the file or link that the cache replaced."""
    attributes = Attributes(*map(int, kept["attributes"]))
    if "link" not in kept:
        _replace_file(dirfd, name, a2b_base64(kept["data"]), attributes)
        return
    remove(dirfd, TEMPORARY)
    _, uid, gid, mtime_ns = attributes
    as_owner(dirfd, partial(kernel.symlinkat, kept["link"], dirfd, TEMPORARY))
    kernel.set_link(dirfd, TEMPORARY, (uid, gid), mtime_ns)
    kernel.renameat(dirfd, TEMPORARY, name)


def _without_entries(rootfd: int, data: bytes, ours: list[str]) -> bytes | None:
    """Return a cache that the container wrote, without the entries for the hook's directories.

    Return None if the cache is to stay unchanged, because it has only the old format, because no
    entry leads there, or because more than LOOKS directories would have to be resolved.
    """
    cache = ldcache.parse(data)
    if cache is None:
        return None
    places = {_identity(rootfd, path) for path in ours} - {None}
    names = {path.rpartition("/")[2] for path in ours}
    directories = {entry.path: _directory_of(entry.path) for entry in cache.entries}
    # A directory may have other names, too: /lib may be a link to /usr/lib.
    looked = {d for d in directories.values() if d.rpartition("/")[2] in names}
    if len(looked) > LOOKS:
        return None
    leading = {directory for directory in looked if _identity(rootfd, directory) in places}
    kept = tuple(e for e in cache.entries if directories[e.path] not in leading)
    return None if kept == cache.entries else ldcache.write(cache._replace(entries=kept))


def _directory_of(path: bytes) -> str:
    """Return a path's directory in a normalised spelling."""
    text = os.fsdecode(path)
    return "/".join(part for part in text.split("/")[:-1] if part not in ("", "."))


def _identity(rootfd: int, path: str) -> tuple[int, int] | None:
    try:
        fd = kernel.open_in_root(rootfd, path)
    except OSError:
        return None
    status = os.fstat(fd)
    os.close(fd)
    return status.st_dev, status.st_ino


def _replace_file(dirfd: int, name: str, content: bytes, attributes: Attributes) -> None:
    remove(dirfd, TEMPORARY)
    fd = as_owner(dirfd, partial(kernel.create, dirfd, TEMPORARY, 0o600))
    assert fd is not None  # noqa: S101
    try:
        try:
            write_all(fd, content)
            os.fchown(fd, attributes.uid, attributes.gid)
            os.fchmod(fd, attributes.mode)
            os.utime(fd, ns=(attributes.mtime_ns, attributes.mtime_ns))
        finally:
            os.close(fd)
        kernel.renameat(dirfd, TEMPORARY, name)
    except OSError:
        remove(dirfd, TEMPORARY)
        raise
