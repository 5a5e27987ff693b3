"""System calls, for namespaces and files, that Python's standard library does not offer."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from typing import NamedTuple

CLONE_NEWNS = 0x00020000  # include/uapi/linux/sched.h
SYS_KCMP = {"x86_64": 312, "aarch64": 272}
KCMP_FILES = 2  # include/uapi/linux/kcmp.h
AT_STATX_DONT_SYNC = 0x4000  # include/uapi/linux/stat.h
STATX_INO = 0x100
STATX_MNT_ID = 0x1000


class MountedFile(NamedTuple):
    """The identity of a file; `mount` is the id of its mount, or None before Linux 5.8."""

    device: int
    inode: int
    mount: int | None


libc = ctypes.CDLL(None, use_errno=True)


def next_namespace(fd: int, request: int) -> int | None:
    """Open the mount namespace after or before that of `fd`; None if `fd` is the last or first.

    `request` is NS_MNT_GET_NEXT or NS_MNT_GET_PREV. Raise OSError if the kernel has no list.
    """
    try:
        following: int = fcntl.ioctl(fd, request, bytearray(16))
    except FileNotFoundError:
        return None
    return following


def enter_namespace(fd: int, kind: int) -> None:
    """Enter a namespace; raise OSError if that is not permitted."""
    if libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)):  # os.setns is new in Python 3.12
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def identify_link(directory: int, path: str) -> MountedFile:
    """Identify a link's target from the kernel's cache, without a request to a file server.

    Raise OSError if the link cannot be followed.
    """
    buffer = ctypes.create_string_buffer(256)
    if libc.statx(
        directory, os.fsencode(path), AT_STATX_DONT_SYNC, STATX_INO | STATX_MNT_ID, buffer
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    (mask,) = struct.unpack_from("I", buffer, 0)
    (inode,) = struct.unpack_from("Q", buffer, 32)
    major, minor, mount = struct.unpack_from("IIQ", buffer, 136)
    return MountedFile(os.makedev(major, minor), inode, mount if mask & STATX_MNT_ID else None)


def share_files(one: int, other: int) -> bool:
    """Return whether two threads share a descriptor table, or False if the kernel cannot tell."""
    number = SYS_KCMP.get(os.uname().machine)
    return number is not None and libc.syscall(number, one, other, KCMP_FILES, 0, 0) == 0
