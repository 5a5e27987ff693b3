"""The hook's system calls for mounts and confined path walks; this module contains no policy.

Constants and structures are named as in the kernel's headers. Each function is a thin wrapper that
takes plain values and raises OSError, with the path, when a system call fails. No other module of
the hook uses ctypes, or opens, creates or removes files below a container's root: every function
that does so takes a directory descriptor and either a single name or a path that openat2(2)
confines.
"""

from __future__ import annotations

import errno
import os
import stat
import time

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    import ctypes
else:
    from oci_hook import light_ctypes as ctypes

AT_EMPTY_PATH = 0x1000
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
AT_SYMLINK_NOFOLLOW = 0x100
CLONE_NEWNS = 0x00020000
MNT_DETACH = 2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_RDONLY = 0x1
MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOVE_MOUNT_T_EMPTY_PATH = 0x40
MS_PRIVATE = 1 << 18
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
PR_SET_DUMPABLE = 4
PR_SET_PDEATHSIG = 1
RENAME_EXCHANGE = 2
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_NO_XDEV = 0x01
SIGKILL = 9
STATX_MNT_ID = 0x1000
STATX_ATTR_MOUNT_ROOT = 0x2000
TRIES = 1000  # attempts at a path walk that races with renames and mounts

_MACHINE = os.uname().machine
# Calls numbered 424 and up have one number on all architectures; these two are older.
NR_statx = {"x86_64": 332, "aarch64": 291}.get(_MACHINE, -1)
NR_renameat2 = {"x86_64": 316, "aarch64": 276}.get(_MACHINE, -1)
NR_open_tree = 428
NR_move_mount = 429
NR_openat2 = 437
NR_mount_setattr = 442


class open_how(ctypes.Structure):  # noqa: N801
    """struct open_how."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class mount_attr(ctypes.Structure):  # noqa: N801
    """struct mount_attr."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class statx_result(ctypes.Structure):  # noqa: N801
    """struct statx; several members that the hook does not use are combined into one."""

    _fields_ = (
        ("stx_mask", ctypes.c_uint32),
        ("stx_blksize", ctypes.c_uint32),
        ("stx_attributes", ctypes.c_uint64),
        ("_status", ctypes.c_uint8 * 40),
        ("stx_attributes_mask", ctypes.c_uint64),
        ("_times", ctypes.c_uint8 * 80),
        ("stx_mnt_id", ctypes.c_uint64),
        ("_after", ctypes.c_uint8 * 104),
    )


_libc = ctypes.CDLL(None, use_errno=True)
# syscall is variadic and has no argtypes, so every argument below is passed with its type.
_libc.syscall.restype = ctypes.c_long
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.prctl.argtypes = (
    ctypes.c_int,
    ctypes.c_ulong,
    ctypes.c_ulong,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_libc.setfsuid.argtypes = (ctypes.c_uint,)
_libc.setfsgid.argtypes = (ctypes.c_uint,)


def _check(result: int, path: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result


def _int(value: int) -> ctypes.c_long:
    return ctypes.c_long(value)


def openat2(dirfd: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """Open a path that `resolve` confines; the descriptor is close-on-exec.

    While any process on the node renames a directory or mounts a file system, the kernel cannot
    tell whether a ".." in the path stayed inside the root, and returns EAGAIN: openat2(2). The call
    is then repeated for about a second.
    """
    how = open_how(flags | os.O_CLOEXEC, mode, resolve)
    for attempt in range(TRIES):
        result = _libc.syscall(
            _int(NR_openat2),
            _int(dirfd),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if result >= 0 or ctypes.get_errno() != errno.EAGAIN:
            break
        if attempt >= TRIES // 2:
            time.sleep(0.002)
    return _check(result, path)


def open_in_root(
    rootfd: int,
    path: str,
    flags: int = os.O_PATH,
    *,
    same_mount: bool = False,
    links: bool = True,
) -> int:
    """Open `path` as a process with the root `rootfd` would; links cannot lead out of it.

    Without `links`, a link in the path is an error, ELOOP.
    """
    resolve = RESOLVE_IN_ROOT | (RESOLVE_NO_MAGICLINKS if links else RESOLVE_NO_SYMLINKS)
    return openat2(rootfd, path, flags, resolve | (RESOLVE_NO_XDEV if same_mount else 0))


def open_straight(path: str) -> int:
    """Open a directory on the host by a path without links; ELOOP if the path contains one."""
    resolve = RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
    return openat2(AT_FDCWD, path, os.O_PATH | os.O_DIRECTORY, resolve)


def path_of(procfd: int, fd: int) -> str:
    """Return the path of `fd`, without links; opening that path may lead to another file."""
    return os.readlink(f"self/fd/{fd}", dir_fd=procfd)


def open_child(dirfd: int, name: str, flags: int = os.O_PATH) -> int:
    """Open one entry of a directory, on the same mount, without following links."""
    _require_name(name)
    return openat2(
        dirfd, name, flags | os.O_NOFOLLOW, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV
    )


def reopen(procfd: int, fd: int, flags: int) -> int:
    """Open the file of an O_PATH descriptor with `flags`; `procfd` is the host's own /proc."""
    return os.open(f"self/fd/{fd}", flags | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=procfd)


def _require_name(name: str) -> None:
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is not the name of one entry")


def mkdirat(dirfd: int, name: str, mode: int) -> None:
    """Create the directory `name` in the directory `dirfd`."""
    _require_name(name)
    os.mkdir(name, mode, dir_fd=dirfd)


def create(dirfd: int, name: str, mode: int) -> int:
    """Create a regular file, which must not exist yet, and open it for writing."""
    _require_name(name)
    return os.open(
        name,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
        mode,
        dir_fd=dirfd,
    )


def unlinkat(dirfd: int, name: str, *, directory: bool = False) -> None:
    """Remove one name from a directory."""
    _require_name(name)
    if directory:
        os.rmdir(name, dir_fd=dirfd)
    else:
        os.unlink(name, dir_fd=dirfd)


def readlink(fd: int) -> str:
    """Return the target of the symbolic link that a descriptor refers to."""
    return os.readlink("", dir_fd=fd)


def symlinkat(text: str, dirfd: int, name: str) -> None:
    """Create a symbolic link, which must not exist yet, in a directory."""
    _require_name(name)
    os.symlink(text, name, dir_fd=dirfd)


def set_link(dirfd: int, name: str, owner: tuple[int, int], mtime: int) -> None:
    """Set the owner and group of a symbolic link, and its modification time in nanoseconds."""
    _require_name(name)
    os.chown(name, *owner, dir_fd=dirfd, follow_symlinks=False)
    os.utime(name, ns=(mtime, mtime), dir_fd=dirfd, follow_symlinks=False)


def renameat(dirfd: int, old: str, new: str) -> None:
    """Rename an entry within a directory."""
    _require_name(old)
    _require_name(new)
    os.rename(old, new, src_dir_fd=dirfd, dst_dir_fd=dirfd)


def exchange(dirfd: int, one: str, other: str) -> None:
    """Exchange two names in a directory; EINVAL if the file system cannot do that."""
    _require_name(one)
    _require_name(other)
    _check(
        _libc.syscall(
            _int(NR_renameat2),
            _int(dirfd),
            ctypes.c_char_p(os.fsencode(one)),
            _int(dirfd),
            ctypes.c_char_p(os.fsencode(other)),
            ctypes.c_uint(RENAME_EXCHANGE),
        ),
        other,
    )


def open_tree(path: str, *, dirfd: int = AT_FDCWD) -> int:
    """Return a detached copy of the mount at `path`, without the mounts below it."""
    return _check(
        _libc.syscall(
            _int(NR_open_tree),
            _int(dirfd),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.c_uint(OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_SYMLINK_NOFOLLOW),
        ),
        path,
    )


def mount_setattr(fd: int, attr_set: int, propagation: int, path: str) -> None:
    """Set a mount's attributes by descriptor; `path` is used only in the error."""
    attr = mount_attr(attr_set, 0, propagation, 0)
    _check(
        _libc.syscall(
            _int(NR_mount_setattr),
            _int(fd),
            ctypes.c_char_p(b""),
            ctypes.c_uint(AT_EMPTY_PATH),
            ctypes.byref(attr),
            ctypes.c_size_t(ctypes.sizeof(attr)),
        ),
        path,
    )


def move_mount(from_fd: int, to_fd: int, path: str) -> None:
    """Attach a detached mount at `to_fd`; `path` is used only in the error."""
    _check(
        _libc.syscall(
            _int(NR_move_mount),
            _int(from_fd),
            ctypes.c_char_p(b""),
            _int(to_fd),
            ctypes.c_char_p(b""),
            ctypes.c_uint(MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH),
        ),
        path,
    )


def umount(procfd: int, fd: int) -> None:
    """Unmount the mount that `fd` refers to."""
    os.fchdir(procfd)  # umount2(2) takes only paths; this one begins in the host's own /proc
    _check(_libc.umount2(f"self/fd/{fd}".encode(), MNT_DETACH), f"mount at descriptor {fd}")


def mount_id(fd: int) -> int:
    """Return the id, as in mountinfo, of the mount that `fd` is on."""
    return int(_statx(fd).stx_mnt_id)


def is_mount_root(fd: int) -> bool:
    """Return whether `fd` is the root of its mount; true if the kernel cannot tell (before 5.8)."""
    found = _statx(fd)
    tells = found.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT
    return not tells or bool(found.stx_attributes & STATX_ATTR_MOUNT_ROOT)


def _statx(fd: int) -> statx_result:
    result = statx_result()
    _check(
        _libc.syscall(
            _int(NR_statx),
            _int(fd),
            ctypes.c_char_p(b""),
            ctypes.c_int(AT_EMPTY_PATH),
            ctypes.c_uint(STATX_MNT_ID),
            ctypes.byref(result),
        ),
        f"descriptor {fd}",
    )
    return result


def setns(fd: int, nstype: int, path: str) -> None:
    """Enter a namespace; `path` is used only in the error."""
    _check(_libc.setns(fd, nstype), path)


def set_undumpable() -> None:
    """Protect this process's /proc/PID from processes in the namespaces that it enters."""
    _check(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, even after an execve."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "prctl")


def set_fs_ids(uid: int, gid: int) -> tuple[int, int]:
    """Set the user and group that own files this process creates; return the previous ones."""
    before_gid = int(_libc.setfsgid(gid))
    return int(_libc.setfsuid(uid)), before_gid


def is_regular(fd: int) -> bool:
    """Return whether a descriptor refers to a regular file."""
    return stat.S_ISREG(os.fstat(fd).st_mode)


def is_directory(fd: int) -> bool:
    """Return whether a descriptor refers to a directory."""
    return stat.S_ISDIR(os.fstat(fd).st_mode)
