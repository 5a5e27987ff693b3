"""Read configuration files below a root with their mode and owner, and replace them atomically.

Symbolic links are resolved as for a process with that root, so nothing outside the root is read or
written. The trees belong to root, so no other user can replace a directory in the meantime.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from governor.errors import SetupError
from vdriver.tree import Tree

LIMIT = 4 << 20  # bytes; largest configuration file
TEMPORARY = ".tidegate-tmp"  # suffix of a file that is being written


@dataclass(frozen=True)
class HostFile:
    """A regular file that was read: its real path, content, mode and owner."""

    path: str
    real: str
    data: bytes
    mode: int
    uid: int
    gid: int

    def text(self) -> str:
        """Return the content; raise SetupError if it is not UTF-8."""
        try:
            return self.data.decode()
        except UnicodeDecodeError as e:
            raise SetupError(
                f"{self.path} is not UTF-8 at byte {e.start}", hint="save it as UTF-8"
            ) from e


class Root:
    """The tree at `root`; paths given to its methods are absolute below that root."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)  # noqa: PTH100 - strings throughout
        if not os.path.isdir(self.root):  # noqa: PTH112
            raise SetupError(f"{root} is not a directory", hint="name another one with --root")

    def shown(self, path: str) -> str:
        """Return a path as shown to the operator, with the root prepended."""
        return path if self.root == "/" else self.root + path

    def find(self, path: str) -> str | None:
        """Return the resolved path of a file, which need not exist; None if a directory is missing.

        Raise SetupError for a dangling link, because its purpose is not known.
        """
        parent, _, name = path.rpartition("/")
        where = Tree(self.root).resolve(parent or "/")
        if where is None:
            return None
        here = f"{where.rstrip('/')}/{name}"
        if not os.path.islink(self._host(here)):  # noqa: PTH114
            return here
        real = Tree(self.root).resolve(here)
        if real is None:
            raise SetupError(
                f"{self.shown(path)} is a symbolic link that does not point to a file under"
                f" {self.root}",
                hint="repair or remove the link",
            )
        return real

    def read(self, path: str) -> HostFile | None:
        """Return the regular file at `path`, None if missing; raise SetupError for other types."""
        shown = self.shown(path)
        try:
            real = self.find(path)
            if real is None:
                return None
            fd = os.open(
                self._host(real), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except FileNotFoundError:
            return None
        except OSError as e:
            raise explain(e, shown) from e
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise SetupError(f"{shown} is not a regular file", hint="move it away")
        with os.fdopen(fd, "rb") as file:
            data = file.read(LIMIT + 1)
        if len(data) > LIMIT:
            raise SetupError(
                f"{shown} is larger than {LIMIT >> 20} MiB",
                hint="it is probably not a configuration file",
            )
        return HostFile(
            shown, real, data, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
        )

    def peek(self, path: str) -> str:
        """Return the text of a file, "" if it does not exist or is not a regular file."""
        return (Tree(self.root).read(path, LIMIT) or b"").decode(errors="replace")

    def changed(self, path: str) -> float:
        """Return the ctime of a file, given by its resolved path, in seconds since 1970."""
        with explained(self.shown(path)):
            return os.stat(self._host(path)).st_ctime  # noqa: PTH116

    def names(self, directory: str) -> tuple[str, ...]:
        """Return the sorted names in a directory; none if there is no such directory."""
        return Tree(self.root).names(directory)

    def matching(self, pattern: str) -> list[str]:
        """Return the files that match a pattern; `*` does not match a slash."""
        if "*" not in pattern:
            return [pattern] if self.read(pattern) is not None else []
        found = [""]
        for part in pattern.strip("/").split("/"):
            found = [
                f"{above}/{name}"
                for above in found
                for name in self.names(above or "/")
                if fnmatch.fnmatchcase(name, part)
            ]
        return found

    def runs(self, path: str) -> bool:
        """Return whether there is a program at `path`."""
        real = Tree(self.root).regular(path)
        return real is not None and bool(os.stat(self._host(real)).st_mode & 0o111)  # noqa: PTH116

    def closed(self, path: str) -> str | None:
        """Return the first directory, of `path` and its parents, that other users cannot read."""
        parts = [p for p in path.split("/") if p]
        for n in range(1, len(parts) + 1):
            here = "/" + "/".join(parts[:n])
            real = self.find(here)
            if real is None or not self.is_dir(real):
                return None
            wanted = stat.S_IXOTH | (stat.S_IROTH if n == len(parts) else 0)
            if os.stat(self._host(real)).st_mode & wanted != wanted:  # noqa: PTH116
                return here
        return None

    def missing(self, path: str) -> list[str]:
        """Return which of a directory and its parents do not exist, topmost first."""
        found: list[str] = []
        parts = [p for p in path.split("/") if p]
        for n in range(1, len(parts) + 1):
            here = "/" + "/".join(parts[:n])
            real = None if found else self.find(here)
            if real is None or not os.path.lexists(self._host(real)):
                found.append(here)
            elif not self.is_dir(real):
                raise SetupError(f"{self.shown(here)} is not a directory", hint="move it away")
        return found

    def make_directory(self, path: str, mode: int = 0o755) -> None:
        """Create a directory and its parents; `mode` is that of the directory itself."""
        for here in self.missing(path):
            host = self._host(self.find(here) or here)
            with explained(self.shown(here)):
                os.mkdir(host, 0o700)  # noqa: PTH102
                os.chmod(host, mode if here == path else 0o755)  # noqa: PTH101 - whatever the umask

    def is_dir(self, path: str) -> bool:
        """Return whether a resolved path is a directory."""
        return os.path.isdir(self._host(path))  # noqa: PTH112

    def remove_directory(self, path: str) -> bool:
        """Remove a directory if it is empty; return whether it is gone."""
        real = self.find(path)
        if real is None or not os.path.lexists(self._host(real)):
            return True
        try:
            os.rmdir(self._host(real))  # noqa: PTH106
        except OSError as e:
            if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY):
                return False
            raise explain(e, self.shown(path)) from e
        return True

    def write(self, path: str, data: bytes, *, mode: int = 0o644, keep_mode: bool = True) -> None:
        """Write a file atomically; an existing file keeps its owner, its labels and its mode.

        Unless `keep_mode`, the mode becomes `mode`.
        """
        shown = self.shown(path)
        old = self.read(path)
        real = old.real if old else self.find(path)
        if real is None:
            raise SetupError(
                f"{shown}: its directory is missing",
                hint="create the directory, and run the command again",
            )
        host = self._host(real)
        with explained(shown):
            _sweep(host)
            temporary = f"{_beside(host)}.{os.getpid()}{TEMPORARY}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(temporary, flags, 0o600)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    if old is not None:
                        os.fchown(fd, old.uid, old.gid)
                        _copy_labels(host, fd)
                    os.fchmod(fd, old.mode if old is not None and keep_mode else mode)
                    os.fsync(fd)
                os.rename(temporary, host)  # noqa: PTH104
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)  # noqa: PTH108
                raise
            _sync(os.path.dirname(host))  # noqa: PTH120

    def sweep(self, path: str) -> None:
        """Remove temporary files that killed runs left behind; the file need not exist."""
        real = self.find(path)
        if real is not None:
            with explained(self.shown(path)):
                _sweep(self._host(real))

    def remove(self, path: str) -> None:
        """Remove a file; a missing one is not an error."""
        real = self.find(path)
        if real is None:
            return
        self.sweep(path)
        with explained(self.shown(path)), contextlib.suppress(FileNotFoundError):
            os.unlink(self._host(real))  # noqa: PTH108
            _sync(os.path.dirname(self._host(real)))  # noqa: PTH120

    def open_directory(self, path: str) -> int:
        """Return a descriptor of a directory, to be locked."""
        real = self.find(path)
        with explained(self.shown(path)):
            if real is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return os.open(self._host(real), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _host(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))  # noqa: PTH118


def _beside(host: str) -> str:
    """Return the prefix of the temporary file, which is renamed to `host`.

    CRI-O reads every file in its directory, whatever the name, so the temporary file is not in a
    directory of drop-ins, unless that is a separate file system.
    """
    directory, name = os.path.split(host)
    above = os.path.dirname(directory)  # noqa: PTH120
    if directory.endswith(".d") and os.stat(above).st_dev == os.stat(directory).st_dev:  # noqa: PTH116
        return f"{above}/.{os.path.basename(directory)}.{name}"  # noqa: PTH119
    return host


def _sweep(host: str) -> None:
    """Remove temporary files left by killed runs; only one run is active at a time."""
    if not os.path.isdir(os.path.dirname(host)):  # noqa: PTH112, PTH120
        return
    for start in {host, _beside(host)}:
        directory, name = os.path.split(start)
        for other in os.listdir(directory):  # noqa: PTH208
            if other.startswith(f"{name}.") and other.endswith(TEMPORARY):
                os.unlink(f"{directory}/{other}")  # noqa: PTH108


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Convert an OSError in the block to a one-line SetupError."""
    try:
        yield
    except OSError as e:
        raise explain(e, path) from e


def explain(e: OSError, path: str) -> SetupError:
    """Return an error for a file that cannot be read or written, with a hint."""
    if e.errno in (errno.EACCES, errno.EPERM):
        hint = (
            "run the command as root; if it is already running as root, check whether the file is"
            " immutable (lsattr)"
        )
    elif e.errno == errno.EROFS:
        hint = "make the change where this system is configured: its files are read-only here"
    elif e.errno == errno.EBUSY:
        hint = "it is a mount point: edit the file that is mounted there"
    elif e.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, and run the command again"
    else:
        hint = "check what exists at that path"
    return SetupError(f"{path}: {e.strerror or e}", hint=hint)


def _copy_labels(source: str, fd: int) -> None:
    """Copy extended attributes (SELinux label, ACLs), as far as the file system supports them."""
    try:
        names = os.listxattr(source)
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            os.setxattr(fd, name, os.getxattr(source, name))


def _sync(directory: str) -> None:
    """Make a rename or a removal durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
