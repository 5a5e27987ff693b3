"""What an image offers: library directory, loader, ld.so.cache.  Looks, and changes nothing.

The image is hostile.  Everything is opened through openat2(2) confined to its root, checked to be a
regular file by its descriptor before it is opened for reading, and read up to a limit.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from oci_hook import kernel
from oci_hook.errors import ImageError, UnservedImageError, show
from oci_hook.ldcache import CACHE_LIMIT
from oci_hook.state import read_bounded

LOADER_LIMIT = 8 << 20
ENTRIES_SHOWN = 3
LIBRARY_DIRS = {
    "x86_64": ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib64", "lib64"),
}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2"}
MUSL = {"x86_64": "lib/ld-musl-x86_64.so.1"}
HWCAPS = {"x86_64": "glibc-hwcaps/x86-64-v2"}
ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG}
HINT = "use a glibc-based image, or set tidegate.gpu/driver: optional to start without a GPU"


class Image(NamedTuple):
    """What matters of an image; paths are relative to its root."""

    library_dir: str
    target: str  # the directory that the mirror's libraries are mounted on
    cache: bytes | None  # ld.so.cache


def _find(rootfd: int, path: str, flags: int = os.O_PATH) -> int | None:
    """Open in root; None when there is nothing, or nothing that can be walked to."""
    try:
        return kernel.open_in_root(rootfd, path, flags)
    except OSError as e:
        if e.errno not in ABSENT:
            raise  # a call that a seccomp filter refuses says nothing about the image
        return None


def _read_file(rootfd: int, procfd: int, path: str, limit: int) -> bytes | None:
    """Read a regular file of the image; None for anything else, and for one over the limit."""
    fd = _find(rootfd, path)
    if fd is None:
        return None
    try:
        if not kernel.is_regular(fd):
            return None
        readable = kernel.reopen(procfd, fd, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return read_bounded(readable, limit)
        finally:
            os.close(readable)
    finally:
        os.close(fd)


def _require_empty(rootfd: int, path: str) -> None:
    """Refuse a directory that has entries: a mount would hide them from the image."""
    fd = _find(rootfd, path, os.O_RDONLY | os.O_DIRECTORY)
    if fd is None:
        entry = _find(rootfd, path, os.O_PATH | os.O_NOFOLLOW)
        if entry is None:
            return
        os.close(entry)
        raise ImageError(
            f"/{path} in the image is not a directory, the driver's libraries are mounted there",
            hint="remove it from the image",
        )
    try:
        names = sorted(os.listdir(fd))
    finally:
        os.close(fd)
    if names:
        found = show(", ".join(names[:ENTRIES_SHOWN]), 120) + (
            ", ..." if len(names) > ENTRIES_SHOWN else ""
        )
        raise ImageError(
            f"/{path} in the image is not empty ({found}), the driver is mounted there",
            hint="move these files to the directory above it in the image",
        )


def inspect_image(rootfd: int, procfd: int, machine: str) -> Image:
    """Find where the mirror goes in this image."""
    if machine not in LIBRARY_DIRS:
        raise ImageError(
            f"containers of machine {show(machine)} are not served yet, only x86_64",
            hint="run it on x86_64",
        )
    library_dir = None
    for candidate in LIBRARY_DIRS[machine]:
        fd = _find(rootfd, f"{candidate}/libc.so.6")
        if fd is not None:
            regular = kernel.is_regular(fd)
            os.close(fd)
            if regular:
                library_dir = candidate
                break
    if library_dir is None:
        fd = _find(rootfd, MUSL[machine])
        if fd is not None:
            os.close(fd)
            raise UnservedImageError(
                "the image is built on musl, the driver needs glibc", hint=HINT
            )
        where = ", ".join("/" + d for d in LIBRARY_DIRS[machine])
        raise UnservedImageError(f"the image has no glibc (no libc.so.6 in {where})", hint=HINT)
    loader = None
    for directory in ("lib64", library_dir):
        loader = _read_file(rootfd, procfd, f"{directory}/{LOADERS[machine]}", LOADER_LIMIT)
        if loader is not None:
            break
    if loader is None:
        raise UnservedImageError(
            f"the image has no loader (/lib64/{LOADERS[machine]} is not a regular file)", hint=HINT
        )
    # glibc before 2.33 does not know glibc-hwcaps and looks into tls
    subdirectory = HWCAPS[machine] if b"glibc-hwcaps" in loader else "tls"
    target = f"{library_dir}/{subdirectory}"
    _require_empty(rootfd, target)
    return Image(
        library_dir=library_dir,
        target=target,
        cache=_read_file(rootfd, procfd, "etc/ld.so.cache", CACHE_LIMIT),
    )
