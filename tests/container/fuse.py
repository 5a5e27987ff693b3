"""A FUSE file system that passes another directory through, with a server that can withhold replies.

A process whose request gets no reply waits in the kernel, and neither a deadline nor SIGKILL ends
the wait. The server is a thread that speaks the kernel's protocol (include/uapi/linux/fuse.h) as
far as a hook and a small container need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.conftest import lack
from tests.container.nodes import wait_for

DEVICE = "/dev/fuse"
MNT_FORCE, MNT_DETACH = 1, 2
ROOT = 1  # node number of the root
HEADER = struct.Struct("=IIQQIIIHH")  # struct fuse_in_header
ANSWER = struct.Struct("=IiQ")  # struct fuse_out_header
MAX_WRITE = 64 << 10
LIMIT_S = 120.0  # after this, pending requests fail, so that a failed test can end
OPCODES = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 9: "mkdir",
    10: "unlink", 11: "rmdir", 12: "rename", 14: "open", 15: "read", 16: "write", 17: "statfs",
    18: "release", 26: "init", 27: "opendir", 28: "readdir", 29: "releasedir", 35: "create",
    36: "interrupt", 38: "destroy", 42: "batch_forget", 45: "rename2",
}  # fmt: skip
UNANSWERED = {"forget", "interrupt", "batch_forget"}
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class FuseRequest:
    """A request from the kernel: an operation on the file at a path."""

    operation: str
    path: str  # relative to the root
    unique: int
    node: int
    pid: int
    body: bytes

    @property
    def names(self) -> list[str]:
        """The names at the end of the body, for an operation on a directory entry."""
        skip = {"mkdir": 8, "create": 16, "rename": 8, "rename2": 16}.get(self.operation, 0)
        return [os.fsdecode(name) for name in self.body[skip:].split(b"\0")[:-1]]


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Fuse:
    """`with Fuse(directory, mountpoint) as fuse`: `fuse.stall("open", "name")`, and `fuse.resume()`."""

    def __init__(self, directory: Path, mountpoint: Path) -> None:
        self.directory = directory
        self.mountpoint = mountpoint
        self.paths = {ROOT: ""}
        self.rule: tuple[str, str] | None = None
        self.held: list[FuseRequest] = []
        self.lock = threading.Lock()
        self.operations: dict[str, Callable[[FuseRequest], bytes]] = {
            name: operation for name in OPCODES.values() if (operation := getattr(self, f"_{name}", None))
        }  # fmt: skip

    def __enter__(self) -> Self:
        try:
            self.fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            lack(f"needs {DEVICE} ({e.strerror})")
        options = f"fd={self.fd},rootmode=40000,user_id=0,group_id=0,allow_other"
        target = os.fsencode(self.mountpoint)
        if _libc.mount(b"tidegate-test", target, b"fuse", 0, options.encode()) < 0:
            error = _os_error(ctypes.get_errno())
            os.close(self.fd)
            raise error
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.limit = threading.Timer(LIMIT_S, self._abort)
        self.limit.daemon = True
        self.limit.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.limit.cancel()
        self._abort()
        _libc.umount2(os.fsencode(self.mountpoint), MNT_DETACH)
        self.thread.join(30)
        os.close(self.fd)
        for pid in {request.pid for request in self.held}:
            wait_for(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "the stuck process to end")

    def _abort(self) -> None:
        """Fail all waiting requests, as /sys/fs/fuse/connections/N/abort does."""
        _libc.umount2(os.fsencode(self.mountpoint), MNT_FORCE)

    def stall(self, operation: str, name: str) -> None:
        """From now on, leave requests for this operation on entries with this name unanswered."""
        self.rule = (operation, name)

    def stuck(self) -> int:
        """Wait until a request is left unanswered, and return the PID of the process that made it."""
        return wait_for(lambda: self.held, "a request that stalls")[0].pid

    def resume(self) -> None:
        """Answer all requests that were left unanswered, and all later ones."""
        with self.lock:
            self.rule = None
            held, self.held = self.held, []
        for request in held:
            self._answer(request)

    def _serve(self) -> None:
        while True:
            try:
                data = os.read(self.fd, MAX_WRITE + (64 << 10))
            except OSError as e:
                if e.errno in (errno.ENOENT, errno.EINTR):
                    continue  # the request was interrupted
                return
            length, opcode, unique, node, _, _, pid, _, _ = HEADER.unpack_from(data)
            request = FuseRequest(
                OPCODES.get(opcode, str(opcode)), self.paths.get(node, "?"), unique, node, pid,
                data[HEADER.size : length],
            )  # fmt: skip
            with self.lock:
                stalls = self._stalls(request)
                if stalls:
                    self.held.append(request)
            if not stalls:
                self._answer(request)

    def _stalls(self, request: FuseRequest) -> bool:
        if self.rule is None or request.operation != self.rule[0]:
            return False
        on_entry = ("lookup", "mkdir", "create", "unlink", "rmdir", "rename", "rename2")
        names = request.names if request.operation in on_entry else [Path(request.path).name]
        return self.rule[1] in names

    def _answer(self, request: FuseRequest) -> None:
        if request.operation in UNANSWERED:
            return
        operation = self.operations.get(request.operation)
        error, body = 0, b""
        try:
            if operation is None:
                raise _os_error(errno.ENOSYS)
            body = operation(request)
        except OSError as e:
            error = -(e.errno or errno.EIO)
        size = ANSWER.size + len(body)
        with contextlib.suppress(OSError):  # the process or the connection is gone
            os.write(self.fd, ANSWER.pack(size, error, request.unique) + body)

    def _place(self, path: str) -> Path:
        return self.directory / path

    @staticmethod
    def _below(request: FuseRequest, name: str) -> str:
        return f"{request.path}/{name}" if request.path else name

    @staticmethod
    def _attributes(status: os.stat_result) -> bytes:
        times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
        return struct.pack(
            "=6Q10I",
            status.st_ino, status.st_size, status.st_blocks,
            *(time // 10**9 for time in times), *(time % 10**9 for time in times),
            status.st_mode, status.st_nlink, status.st_uid, status.st_gid, status.st_rdev, 4096, 0,
        )  # fmt: skip

    def _entry(self, path: str) -> bytes:
        """Return an entry that the kernel must not cache, so that it asks for the entry
        each time.
        """
        status = self._place(path).lstat()
        self.paths[status.st_ino] = path
        return struct.pack("=4Q2I", status.st_ino, 0, 0, 0, 0, 0) + self._attributes(status)

    def _init(self, request: FuseRequest) -> bytes:
        _, _, readahead, _ = struct.unpack_from("=4I", request.body)
        limits = (16, 12, MAX_WRITE, 1)
        return struct.pack("=4I2H2I2H8I", 7, 31, readahead, 0, *limits, 0, 0, *[0] * 8)[:64]

    def _lookup(self, request: FuseRequest) -> bytes:
        return self._entry(self._below(request, request.names[0]))

    def _getattr(self, request: FuseRequest) -> bytes:
        status = self._place(request.path).lstat()
        return struct.pack("=Q2I", 0, 0, 0) + self._attributes(status)

    def _setattr(self, request: FuseRequest) -> bytes:
        valid, _, _, size = struct.unpack_from("=2I2Q", request.body)
        atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid = struct.unpack_from(
            "=3Q3I4I", request.body, 32
        )
        place = self._place(request.path)
        if valid & 1:
            place.chmod(stat.S_IMODE(mode))
        if valid & 6:
            os.chown(
                place, uid if valid & 2 else -1, gid if valid & 4 else -1, follow_symlinks=False
            )
        if valid & 8:
            os.truncate(place, size)
        if valid & 0x20 and not valid & 0x100:
            os.utime(
                place,
                ns=(atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns),
                follow_symlinks=False,
            )
        return self._getattr(request)

    def _readlink(self, request: FuseRequest) -> bytes:
        return os.fsencode(self._place(request.path).readlink())

    def _symlink(self, request: FuseRequest) -> bytes:
        name, target = request.names
        path = self._below(request, name)
        self._place(path).symlink_to(target)
        return self._entry(path)

    def _mkdir(self, request: FuseRequest) -> bytes:
        path = self._below(request, request.names[0])
        self._place(path).mkdir(0o755)
        return self._entry(path)

    def _create(self, request: FuseRequest) -> bytes:
        _, mode, _, _ = struct.unpack_from("=4I", request.body)
        path = self._below(request, request.names[0])
        os.close(os.open(self._place(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode & 0o777))
        return self._entry(path) + self._open(request)

    def _unlink(self, request: FuseRequest) -> bytes:
        self._place(self._below(request, request.names[0])).unlink()
        return b""

    def _rmdir(self, request: FuseRequest) -> bytes:
        self._place(self._below(request, request.names[0])).rmdir()
        return b""

    def _rename(self, request: FuseRequest) -> bytes:
        (directory,) = struct.unpack_from("=Q", request.body)
        old, new = request.names
        above = self.paths[directory]
        path = f"{above}/{new}" if above else new
        self._place(self._below(request, old)).rename(self._place(path))
        self._entry(path)
        return b""

    def _rename2(self, request: FuseRequest) -> bytes:
        if struct.unpack_from("=Q2I", request.body)[1]:
            raise _os_error(errno.EINVAL)
        return self._rename(request)

    def _open(self, _: FuseRequest) -> bytes:
        return struct.pack("=Q2I", 0, 0, 0)

    _opendir = _open

    def _read(self, request: FuseRequest) -> bytes:
        _, offset, size = struct.unpack_from("=2QI", request.body)
        with self._place(request.path).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def _write(self, request: FuseRequest) -> bytes:
        _, offset, size = struct.unpack_from("=2QI", request.body)
        with self._place(request.path).open("r+b") as file:
            file.seek(offset)
            file.write(request.body[40 : 40 + size])
        return struct.pack("=2I", size, 0)

    def _readdir(self, request: FuseRequest) -> bytes:
        _, offset, size = struct.unpack_from("=2QI", request.body)
        entries = b""
        with os.scandir(self._place(request.path)) as found:
            listed = sorted(found, key=lambda entry: entry.name)
        for number, entry in enumerate(listed[offset:], offset + 1):
            name = os.fsencode(entry.name)
            kind = stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) >> 12
            one = struct.pack("=2Q2I", entry.inode(), number, len(name), kind) + name
            one += bytes(-len(one) % 8)
            if len(entries) + len(one) > size:
                break
            entries += one
        return entries

    def _statfs(self, _: FuseRequest) -> bytes:
        return struct.pack(
            "=5Q10I", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, *[0] * 7
        )

    def _done(self, _: FuseRequest) -> bytes:
        return b""

    _release = _releasedir = _destroy = _done
