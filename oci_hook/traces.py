"""What the hook makes in a container's root file system, and how it goes again at the end.

A mount needs something to be mounted on, and programs ask ld.so.cache where libcuda is, so a start
makes directories, perhaps empty files, and a cache. A file on the host, by the container's id, says
which. Whoever sees the end reads it: the wrapper runtime after `delete`, or `poststop`. By then the
container could have put anything anywhere: only what is empty is removed, and only by confined
descriptors.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from binascii import a2b_base64, b2a_base64

from oci_hook import kernel, ldcache
from oci_hook.state import read_bounded

TYPE_CHECKING = False  # typing itself takes 3 ms
if TYPE_CHECKING:
    from typing import Any, NamedTuple
else:
    from oci_hook.record import NamedTuple

DIRECTORY = "traces"  # below the runtime directory
TEMPORARY = ".ld.so.cache.tidegate"
ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")  # what runc and crun accept, and a file name
STORED_LIMIT = 8 << 20  # a cache of 4 MiB, as text
ROOT_LIMIT = 8192
SWEEP = 32
LOOKS = 64  # into a cache that the container wrote: each name in it may take a walk
SECONDS = 4.0  # of one end


class Trace(NamedTuple):
    """Something that was not there before, or was another."""

    what: str  # directory, file, cache
    path: str  # below the container's root
    kept: dict[str, Any] = {}  # noqa: RUF012 - of a cache: what was there, and how to tell ours


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

    Nothing for all else.  A file is read once: by now its name may be another's.
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
    if not stat.S_ISREG(status.st_mode) or status.st_size != len(data):
        return {}
    return kept | {"data": b2a_base64(data, newline=False).decode()}


def _directory(runtime_dir: str) -> int:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(f"{runtime_dir}/{DIRECTORY}", flags)


def _path(runtime_dir: str, ident: str) -> str:
    return f"{runtime_dir}/{DIRECTORY}/{ident}"


def remember(runtime_dir: str, ident: str, pid: int, root: str, traces: list[Trace]) -> None:
    """Write down what was made for a container; OSError where that cannot be."""
    if not traces or ID.fullmatch(ident) is None:
        return
    data = json.dumps([root, pid]).encode() + b"\n" + json.dumps(traces).encode()
    above = os.open(runtime_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileExistsError):
            kernel.mkdirat(above, DIRECTORY, 0o700)
        dirfd = _directory(runtime_dir)
    finally:
        os.close(above)
    temporary = f"~{ident}"  # no id begins so
    try:
        with contextlib.suppress(FileNotFoundError):
            kernel.unlinkat(dirfd, temporary)
        fd = kernel.create(dirfd, temporary, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        kernel.renameat(dirfd, temporary, ident)
    finally:
        os.close(dirfd)
    # Some engines tell nobody of an end: what they leave here is looked through now and then.
    if pid % SWEEP == 0:
        sweep(runtime_dir)


def forget(runtime_dir: str, ident: str) -> None:
    """Forget a container: what it left is gone, or stays."""
    with contextlib.suppress(OSError):
        dirfd = _directory(runtime_dir)
        try:
            kernel.unlinkat(dirfd, ident)
        finally:
            os.close(dirfd)


def _runs(pid: int) -> bool:
    """Tell whether a process has not ended, as one has that nobody has waited for yet."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError:
        return False
    return text.rpartition(b") ")[2][:1] not in (b"", b"Z", b"X")


def take_back(runtime_dir: str, ident: str) -> None:
    """Take away what a container left, as far as it can be, and forget it.

    A directory that goes takes its mounts along, so nothing is done for a container whose process
    runs: it is another engine's of the same id.
    """
    if ID.fullmatch(ident) is None:
        return
    data = _read(_path(runtime_dir, ident), STORED_LIMIT)
    if data is None:
        return
    try:
        first, _, rest = data.partition(b"\n")
        root, pid = json.loads(first)
        if _runs(int(pid)):
            return
        traces = [Trace(*trace) for trace in json.loads(rest)]
        rootfd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError, TypeError):
        traces, rootfd = [], -1  # the root is gone, and all that was in it
    try:
        if rootfd >= 0:
            _take_all(rootfd, traces)
    finally:
        forget(runtime_dir, ident)  # or the next start meets what held this one


def _take_all(rootfd: int, traces: list[Trace]) -> None:
    """Take traces away, the last first, for as long as an end may take."""
    until = time.monotonic() + SECONDS
    procfd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    here, host = os.fstat(rootfd), os.stat("/")
    if (here.st_dev, here.st_ino) != (host.st_dev, host.st_ino):
        for trace in reversed(traces):
            # ValueError: a damaged cache or note
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if time.monotonic() < until:
                    _take_back(procfd, rootfd, trace, traces)
    os.close(procfd)
    os.close(rootfd)


def sweep(runtime_dir: str) -> None:
    """Forget the containers whose root is gone: nobody told of their end."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{runtime_dir}/{DIRECTORY}"):
            data = _read(_path(runtime_dir, name), ROOT_LIMIT, part=True)
            with contextlib.suppress(ValueError):
                if data and not os.path.isdir(json.loads(data.partition(b"\n")[0])[0]):
                    forget(runtime_dir, name)


def _read(path: str, limit: int, *, part: bool = False) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, limit) if part else read_bounded(fd, limit)
    finally:
        os.close(fd)


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
            if [status.st_size, status.st_mtime_ns] != trace.kept["ours"]:
                readable = kernel.reopen(procfd, fd, os.O_RDONLY | os.O_NONBLOCK)
                try:
                    data = read_bounded(readable, ldcache.CACHE_LIMIT) or b""
                finally:
                    os.close(readable)
        finally:
            os.close(fd)
        if data is not None:
            ours = [trace.path for trace in traces if trace.what == "directory"]
            content = _without(rootfd, data, ours)
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
    _remove_temporary(dirfd)
    _, uid, gid, mtime_ns = attributes
    kernel.symlinkat(kept["link"], dirfd, TEMPORARY, (uid, gid), mtime_ns)
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


def _remove_temporary(dirfd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        kernel.unlinkat(dirfd, TEMPORARY)


def _put(dirfd: int, name: str, content: bytes, attributes: Attributes) -> None:
    _remove_temporary(dirfd)
    fd = kernel.create(dirfd, TEMPORARY, 0o600)
    try:
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            os.fchown(fd, attributes.uid, attributes.gid)
            os.fchmod(fd, attributes.mode)
            os.utime(fd, ns=(attributes.mtime_ns, attributes.mtime_ns))
        finally:
            os.close(fd)
        kernel.renameat(dirfd, TEMPORARY, name)
    except OSError:
        _remove_temporary(dirfd)
        raise
