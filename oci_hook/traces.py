"""What the hook makes in a container's root file system, and how it goes again at the end.

A mount needs something to be mounted on, and programs ask ld.so.cache where libcuda is, so a start
makes directories, perhaps empty files, and a cache. A file on the host, by the container's id, says
which. Whoever sees the end reads it: the wrapper runtime after `delete`, or `poststop`. By then the
container could have put anything anywhere: only what is empty is removed, and only by confined
descriptors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from binascii import a2b_base64, b2a_base64

from oci_hook import kernel, ldcache
from oci_hook.entry import read_bounded
from oci_hook.files import as_owner, remove, write_all
from oci_hook.letters import DIGITS, LETTERS, consists_of
from oci_hook.notation import dump_json, load_json
from oci_hook.record import suppress
from oci_hook.state import is_text

TYPE_CHECKING = False  # typing itself takes 3 ms
if TYPE_CHECKING:
    from functools import partial
    from typing import Any, NamedTuple
else:
    from _functools import partial  # functools has collections and more

    from oci_hook.record import NamedTuple

DIRECTORY = "traces"  # below the runtime directory
LOCK = "traces.lock"  # beside it
TEMPORARY = ".ld.so.cache.tidegate"
ID_LIMIT = 200  # of a file's name, too
KEPT_LIMIT = 512 << 10  # of a cache; usual ones have tens of KiB, and /run is memory
STORED_LIMIT = 1 << 20  # of a note
HEAD_LIMIT = 32 << 10  # the longest path, as text
SWEEP = 32
LOOKS = 64  # into a cache that the container wrote: each name in it may take a walk
SECONDS = 4.0  # of one end


class Trace(NamedTuple):
    """Something that was not there before, or was another."""

    what: str  # directory, file, cache
    path: str  # below the container's root
    kept: dict[str, Any] = {}  # noqa: RUF012 - of a cache: what was there, and how to tell ours


class Note(NamedTuple):
    """Whose traces they are: in the first line of a note."""

    root: str
    pid: int
    began: int  # when that process did: numbers are used again; 0 of one that had ended
    device: int
    inode: int  # of the root, which may have another name, and other containers
    made: int = 0  # when, by the monotonic clock: of two, the later one met what the other had made


class Attributes(NamedTuple):
    """Of a file."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int


def _attributes(status: os.stat_result) -> Attributes:
    mode = stat.S_IMODE(status.st_mode)
    return Attributes(mode, status.st_uid, status.st_gid, status.st_mtime_ns)


def keep(rootfd: int, path: str, data: bytes) -> dict[str, Any]:
    """Say what is at a path, so that it can be made again: a link, or a file with `data` in it.

    Nothing for all else, and for what is too large: our cache in its place loses what leads to us.
    A file is read once: by now its name may be another's.
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
    """Tell whether an id is as engines make them: a file can have it for a name."""
    return (
        0 < len(ident) <= ID_LIMIT
        and consists_of(ident, LETTERS + DIGITS + "_.+-")
        and ident[0] not in ".+-"
    )


def _directory(runtime_dir: str) -> int:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(f"{runtime_dir}/{DIRECTORY}", flags)


def lock(runtime_dir: str, device: int, inode: int) -> int:
    """Wait until nobody starts or ends a container of this root.

    Until the descriptor that it gives is closed, or the process ends; it has no other of that file.
    Between a look and what is made, or what is made and its note, another's end would take away
    what this one uses, mounts along. -1 where there is no lock to be had.

    A byte of one file stands for a root, so no lock leaves anything.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(f"{runtime_dir}/{LOCK}", flags, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, (device << 40 ^ inode) & ((1 << 62) - 1))
        except BaseException:
            os.close(fd)
            raise
    except OSError:
        return -1
    return fd


def remember(runtime_dir: str, ident: str, pid: int, root: str, traces: list[Trace]) -> None:
    """Write down what was made for a container, be it nothing; OSError where that cannot be.

    `root` has no link in it, and is not followed where it has one later: a user with the right to
    write above it could lead the end elsewhere.
    """
    if not is_name(ident):
        raise OSError(errno.EINVAL, "its id is not taken for a file's name")
    rootfd = kernel.open_straight(root)
    place = os.fstat(rootfd)
    os.close(rootfd)
    note = Note(root, pid, _began(pid), place.st_dev, place.st_ino, time.monotonic_ns())
    data = dump_json(note).encode() + b"\n" + dump_json(traces).encode()
    if len(data) > STORED_LIMIT:
        raise OSError(errno.EFBIG, f"they take {len(data)} bytes to write down")
    above = os.open(runtime_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(FileExistsError):
            kernel.mkdirat(above, DIRECTORY, 0o700)
        dirfd = _directory(runtime_dir)
    finally:
        os.close(above)
    temporary = f"~{ident}"  # no id begins so
    try:
        remove(dirfd, temporary)
        fd = kernel.create(dirfd, temporary, 0o600)
        try:
            write_all(fd, data)
        finally:
            os.close(fd)
        # What an earlier one of this id made may be in use by others of its root, who take it away.
        with suppress(FileNotFoundError):
            kernel.renameat(dirfd, ident, f"{ident}@{note.made}")
        kernel.renameat(dirfd, temporary, ident)
    except OSError:
        with suppress(OSError):
            remove(dirfd, temporary)
        raise
    finally:
        os.close(dirfd)
    # Some engines tell nobody of an end: what they leave here is looked through now and then.
    if pid % SWEEP == 0:  # one start of so many, by chance
        sweep(runtime_dir)


def forget(runtime_dir: str, ident: str) -> None:
    """Forget a container: what it left is gone, or stays."""
    with suppress(OSError):
        dirfd = _directory(runtime_dir)
        try:
            kernel.unlinkat(dirfd, ident)
        finally:
            os.close(dirfd)


def _began(pid: int) -> int:
    """Give when a process began; 0 of one that has ended, if somebody has waited for it or not."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError:
        return 0
    fields = text.rpartition(b") ")[2].split()  # from the third on: proc(5)
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _runs(note: Note) -> bool:
    return note.began > 0 and _began(note.pid) == note.began


def _read(runtime_dir: str, ident: str, limit: int = STORED_LIMIT) -> bytes:
    """Read a note, or how it begins; nothing where there is none, or something else."""
    path = f"{runtime_dir}/{DIRECTORY}/{ident}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.read(fd, limit)
        finally:
            os.close(fd)
    except OSError:
        return b""


def _parse_note(data: bytes) -> Note | None:
    """Take the first line of a note; None where it is none."""
    if not data:
        return None  # most often; to parse nothing takes as long as all else
    try:
        note = Note(*load_json(data.partition(b"\n")[0]))
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = all(type(number) is int for number in note[1:])
    return note if numbers and is_text(note.root) else None


def _parse_traces(data: bytes) -> list[Trace]:
    """Take the rest of a note; there are no traces where it is none."""
    try:
        found = [Trace(*trace) for trace in load_json(data.partition(b"\n")[2])]
    except (ValueError, TypeError, RecursionError):
        return []
    return [t for t in found if is_text(t.what) and is_text(t.path) and type(t.kept) is dict]


def _notes(runtime_dir: str) -> dict[str, Note | None]:
    """Give all notes; None for what is there and is none."""
    names = os.listdir(f"{runtime_dir}/{DIRECTORY}")
    return {name: _parse_note(_read(runtime_dir, name, HEAD_LIMIT)) for name in names}


def take_back(runtime_dir: str, ident: str) -> None:
    """Take away what a container left, as far as it can be, and forget it.

    A directory that goes takes its mounts along, in every container: nothing is done while one of
    the same root runs. The last of them takes away what all have left.
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


def _take_from_root(runtime_dir: str, ident: str, own: Note) -> None:
    """Take away what all containers of one root left, if none of them runs."""
    place = own.device, own.inode
    notes = _notes(runtime_dir).items()
    shared = [(n, note) for n, note in notes if note and (note.device, note.inode) == place]
    running = {(note.device, note.inode) for _, note in notes if note and _runs(note)}
    if place in running:
        # Whoever meets all that it needs made nothing: notes of its restarts would pile up.
        if not _runs(own) and not _parse_traces(_read(runtime_dir, ident)):
            forget(runtime_dir, ident)
        return
    until = time.monotonic() + SECONDS
    for name, note in sorted(shared, key=lambda item: (item[1].made, item[1].began), reverse=True):
        try:
            with suppress(OSError):  # it is gone, and all that was in it
                rootfd = kernel.open_straight(note.root)
                here = os.fstat(rootfd)
                if (here.st_dev, here.st_ino) in running:  # its name leads to another one by now
                    os.close(rootfd)
                    continue
                _take_all(rootfd, _parse_traces(_read(runtime_dir, name)), until)
        finally:
            forget(runtime_dir, name)  # or the next start meets what held this one


def _take_all(rootfd: int, traces: list[Trace], until: float) -> None:
    """Take traces away, the last first, for as long as an end may take."""
    procfd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    here, host = os.fstat(rootfd), os.stat("/")
    if (here.st_dev, here.st_ino) != (host.st_dev, host.st_ino):
        for trace in reversed(traces):
            # Others than OSError: a damaged cache or note
            with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
                if time.monotonic() < until:
                    _take_back(procfd, rootfd, trace, traces)
    os.close(procfd)
    os.close(rootfd)


def sweep(runtime_dir: str) -> None:
    """Forget the containers whose root is gone, nobody told of their end, and what is no note."""
    with suppress(OSError):
        for name, note in _notes(runtime_dir).items():
            if note is None:
                stays = name.startswith("~")  # somebody writes it
            else:
                # One that runs may have its root in another mount namespace.
                stays = _runs(note) or os.path.isdir(note.root)
            # What was no note, or of a root that is gone, may by now be one of a start.
            if not stays and _parse_note(_read(runtime_dir, name, HEAD_LIMIT)) == note:
                forget(runtime_dir, name)


def _take_back(procfd: int, rootfd: int, trace: Trace, traces: list[Trace]) -> None:
    """Take one trace away; OSError where it is no longer what was made."""
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
            content = _without(rootfd, data, made)
            if content is not None:
                _put(dirfd, name, content, _attributes(status))
        else:
            _put_back(dirfd, name, trace.kept)
    finally:
        os.close(dirfd)


def _put_back(dirfd: int, name: str, kept: dict[str, Any]) -> None:
    """Put what was there before our cache in its place."""
    attributes = Attributes(*map(int, kept["attributes"]))
    if "link" not in kept:
        _put(dirfd, name, a2b_base64(kept["data"]), attributes)
        return
    remove(dirfd, TEMPORARY)
    _, uid, gid, mtime_ns = attributes
    as_owner(dirfd, partial(kernel.symlinkat, kept["link"], dirfd, TEMPORARY))
    kernel.set_link(dirfd, TEMPORARY, (uid, gid), mtime_ns)
    kernel.renameat(dirfd, TEMPORARY, name)


def _without(rootfd: int, data: bytes, ours: list[str]) -> bytes | None:
    """Give a cache that the container made itself without what leads to our directories.

    None where it stays: nothing leads there, or it names more directories than are looked at.
    """
    cache = ldcache.parse(data)
    if cache is None:
        return None
    places = {_identity(rootfd, path) for path in ours} - {None}
    names = {path.rpartition("/")[2] for path in ours}
    directories = {entry.path: _directory_of(entry.path) for entry in cache.entries}
    # By another name, too: /lib may be a link to /usr/lib.
    looked = {d for d in directories.values() if d.rpartition("/")[2] in names}
    if len(looked) > LOOKS:
        return None
    leading = {directory for directory in looked if _identity(rootfd, directory) in places}
    kept = tuple(e for e in cache.entries if directories[e.path] not in leading)
    return None if kept == cache.entries else ldcache.write(cache._replace(entries=kept))


def _directory_of(path: bytes) -> str:
    """Give a path's directory, spelled in one way."""
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


def _put(dirfd: int, name: str, content: bytes, attributes: Attributes) -> None:
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
