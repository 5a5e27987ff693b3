"""Creates and removes files below a directory descriptor, for a container's start and end."""

from __future__ import annotations

import errno
import os

from oci_hook import kernel
from oci_hook.light_typing import suppress

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def remove(dirfd: int, name: str) -> None:
    """Remove a name if it exists."""
    with suppress(FileNotFoundError):
        kernel.unlinkat(dirfd, name)


def as_owner(dirfd: int, create: Callable[[], int | None]) -> int | None:
    """Call `create` as root, or as the directory's owner on a mount that does not map root."""
    try:
        return create()
    except OSError as e:
        if e.errno != errno.EOVERFLOW:
            raise
    owner = os.fstat(dirfd)
    before = kernel.set_fs_ids(owner.st_uid, owner.st_gid)
    try:
        return create()
    finally:
        kernel.set_fs_ids(*before)
