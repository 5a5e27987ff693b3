"""Run a program in a private view of the node's files, to check changes before they are made.

The program runs in its own mount namespace. There, a tmpfs covers each directory in which a file
changes. It contains the changed files with their new content, and bind mounts of all other entries
of the directory. Nothing changes on the node, and the view ends with the program.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
from collections.abc import Mapping

TIMEOUT_S = 30
# The caller's other variables are not passed: an engine that runs as a service does not have them
# either.
ENVIRONMENT = {"HOME": "/root", "LC_ALL": "C.UTF-8"}
CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p),
    *(ctypes.c_ulong, ctypes.c_char_p),
)


class ViewError(Exception):
    """No private view is possible on this node; the message gives the reason."""


def run(command: list[str], files: Mapping[str, bytes | None]) -> subprocess.CompletedProcess[str]:
    """Run a program that sees these files with this content; None means no file.

    Paths are absolute and contain no symbolic links. Raise ViewError if the view cannot be created,
    and OSError and TimeoutExpired as subprocess.run does.
    """
    reading, writing = os.pipe()

    def enter() -> None:
        try:
            _enter(files)
        except OSError as e:
            os.write(writing, f"{e.filename or 'unshare'}: {e.strerror}".encode()[:1000])
            raise

    try:
        return subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            env={**ENVIRONMENT, "PATH": os.environ.get("PATH", os.defpath)},
            preexec_fn=enter,  # this process has one thread
        )
    except subprocess.SubprocessError as e:
        if isinstance(e, subprocess.TimeoutExpired):
            raise
        os.close(writing)
        writing = -1
        reason = os.read(reading, 1000).decode(errors="replace")
        raise ViewError(reason or str(e)) from e
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def _enter(files: Mapping[str, bytes | None]) -> None:
    """Enter a new mount namespace in which the files have this content."""
    if _libc.unshare(CLONE_NEWNS) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "unshare")
    _mount("none", "/", MS_REC | MS_PRIVATE)
    # Parents come first: their subdirectories are bound into them, and covered after that.
    for directory in sorted({_existing(path) for path in files}):
        _cover(directory, {path for path in files if _parent(path) == directory})
    for path, data in files.items():
        if data is not None:
            os.makedirs(_parent(path), exist_ok=True)  # noqa: PTH103 - strings throughout
            with open(path, "wb") as file:  # noqa: PTH123
                file.write(data)


def _cover(directory: str, without: set[str]) -> None:
    """Cover a directory with a tmpfs that contains all its entries except these files."""
    below = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    mode = stat.S_IMODE(os.fstat(below).st_mode)
    _mount("tmpfs", directory, 0, "tmpfs", f"mode={mode:o}")
    if os.path.samestat(os.stat(directory), os.fstat(below)):  # noqa: PTH116
        # A process does not see a mount over its own root directory, and would write to the node's
        # files.
        raise OSError(errno.EBUSY, "cannot be covered", directory)
    for name in os.listdir(below):  # noqa: PTH208 - a descriptor
        here = f"{directory.rstrip('/')}/{name}"
        if here in without:
            continue
        kind = os.stat(name, dir_fd=below, follow_symlinks=False).st_mode
        if stat.S_ISLNK(kind):
            os.symlink(os.readlink(name, dir_fd=below), here)  # noqa: PTH211
            continue
        if stat.S_ISDIR(kind):
            os.mkdir(here)  # noqa: PTH102
        else:
            os.close(os.open(here, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        _mount(f"/proc/self/fd/{below}/{name}", here, MS_BIND | MS_REC)
    os.close(below)


def _existing(path: str) -> str:
    """Return the nearest existing directory above a path."""
    directory = _parent(path)
    while not os.path.isdir(directory):  # noqa: PTH112
        directory = _parent(directory)
    return directory


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _mount(source: str, target: str, flags: int, kind: str = "", options: str = "") -> None:
    words = [os.fsencode(text) or None for text in (source, target, kind)]
    if _libc.mount(*words, flags, os.fsencode(options) or None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)
