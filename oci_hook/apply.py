"""Applies a plan inside a container's mount namespace.

Sources are opened in the host's namespace before anything in the container is examined. Below the
container's root only descriptors are used: no path is resolved twice, and links cannot lead out of
the root. (runc and NVIDIA's toolkit both had a series of CVEs in code without these rules.)
"""

from __future__ import annotations

import errno
import os
import select

from oci_hook import cleanup, kernel
from oci_hook.cleanup import TEMPORARY, HookTrace
from oci_hook.errors import (
    BundleError,
    HookError,
    ImageError,
    MirrorMismatchError,
    MountError,
    show,
)
from oci_hook.files import as_owner, remove, write_all
from oci_hook.image import open_root
from oci_hook.light_typing import suppress
from oci_hook.plan import BindDirectory, BindFile, Operation, Plan, WriteCache
from oci_hook.quick import DeferredDeadline

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from functools import partial
    from typing import Any, assert_never
else:
    from _functools import partial  # functools imports collections and more

    from oci_hook.light_typing import assert_never

READONLY = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
ASIDE = ".ld.so.cache.tidegate-aside"
KERNEL_HINT = "use Linux 5.12 or newer, without a seccomp filter that blocks its mount calls"


def explain(e: OSError, doing: str) -> MountError:
    """Return an error that names the refused operation and, for common errors, the likely cause."""
    message = f"cannot {doing}: {e.strerror}"
    if e.errno == errno.ENOSYS:
        return MountError(message, hint=KERNEL_HINT)
    if e.errno == errno.EPERM:
        return MountError(
            message,
            hint="the hook needs CAP_SYS_ADMIN on the host, and no seccomp filter on openat2 and"
            " the mount calls",
        )
    if e.errno == errno.EROFS:
        return MountError(message, hint="use a root file system that the runtime can write to")
    return MountError(message, hint="see the hook's log on the node")


class CreatedContainer:
    """A container that the runtime is creating, held by descriptors."""

    def __init__(self, pid: int, root: str) -> None:
        """Open the process, its mount namespace and its root, so that a reused pid does no harm."""
        self.pid = pid
        self.root = root
        self.procfd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.pidfd = os.pidfd_open(pid)
            self.mntns = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            self.own_mntns = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise BundleError(
                f"process {pid} of the OCI state: {e.strerror}",
                hint="the runtime has to keep the container's process alive while its hooks run",
            ) from e
        self.require_alive()
        if os.path.sameopenfile(self.mntns, self.own_mntns):
            raise BundleError(
                "the container has no mount namespace of its own",
                hint="give it one: otherwise its mounts would appear on the host",
            )
        self.rootfd = open_root(root)

    def require_alive(self) -> None:
        """Fail if the process has ended, because another process may now have its pid."""
        if select.select([self.pidfd], [], [], 0)[0]:
            raise BundleError(
                f"process {self.pid} of the OCI state has ended",
                hint="find out what ended the container's process",
            )


class MountNamespace:
    """Runs the body of `with MountNamespace(container) as rootfd` in the container's namespace."""

    def __init__(self, container: CreatedContainer) -> None:
        self.container = container

    def __enter__(self) -> int:
        """Enter the namespace, and open the same root as seen from there."""
        c = self.container
        kernel.setns(c.mntns, kernel.CLONE_NEWNS, f"mount namespace of process {c.pid}")
        try:
            rootfd = os.open(c.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            here, there = os.fstat(c.rootfd), os.fstat(rootfd)
            if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
                os.close(rootfd)
                raise BundleError(  # noqa: TRY301 - all errors leave the namespace the same way
                    f"root.path {show(c.root)} is another directory in the container's namespace",
                    hint="the runtime has to mount the root file system before it runs hooks",
                )
            # If a user can write to a directory above the root, its name may now lead elsewhere:
            # to the same directory in both namespaces, but to one that the runtime has not mounted.
            if not kernel.is_mount_root(rootfd):
                os.close(rootfd)
                raise BundleError(  # noqa: TRY301
                    f"root.path {show(c.root)} is not a mount in the container's namespace",
                    hint="the runtime has to mount the root file system before it runs hooks",
                )
        except BaseException:
            self.__exit__()
            raise
        self.rootfd = rootfd
        return rootfd

    def __exit__(self, *_: object) -> None:
        """Return to the host's mount namespace."""
        kernel.setns(self.container.own_mntns, kernel.CLONE_NEWNS, "the host's mount namespace")


class Undo:
    """The steps that undo what was done; they run in reverse order."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.remains: list[Callable[[], None]] = []
        self.noted: list[tuple[int, HookTrace]] = []

    def add(self, step: Callable[[], None]) -> None:
        """Add a step that undoes the last action."""
        self.steps.append(step)

    def at_success(self, step: Callable[[], None]) -> None:
        """Add a step that removes what is needed only for undoing; it may use only descriptors."""
        self.remains.append(step)

    def note(self, trace: HookTrace) -> None:
        """Record what the last action leaves in the container's root file system."""
        self.noted.append((len(self.steps), trace))

    def traces(self) -> list[HookTrace]:
        """Return what the actions so far leave in the container's root file system."""
        return [trace for _, trace in self.noted]

    def forget(self) -> None:
        """Drop all steps and remove what only they needed; the next run removes any leftovers."""
        self.steps.clear()
        while self.remains:
            with suppress(OSError):
                self.remains.pop()()

    def back_to(self, count: int) -> None:
        """Undo all but the first `count` steps, within the namespace; failures are ignored."""
        self.noted = [(n, trace) for n, trace in self.noted if n <= count]
        while len(self.steps) > count:
            with suppress(OSError):
                self.steps.pop()()

    def run(self, container: CreatedContainer) -> list[str]:
        """Undo everything; return the errors."""
        failed: list[str] = []
        if not self.steps:
            return failed
        try:
            with MountNamespace(container):
                while self.steps:
                    try:
                        self.steps.pop()()
                    except OSError as e:
                        failed.append(show(e))
        except (OSError, HookError) as e:
            failed.append(show(e))
        return failed


def open_source(operation: BindDirectory | BindFile, hold: int) -> int | None:
    """Open a detached, read-only, private copy of a mount on the host.

    `hold` is a descriptor of the generation that the manifest was read from, because the path may
    now lead to another generation.

    Return None for a `may_lack` directory that does not exist or does not answer. A link counts
    as missing, because one of these directories is below /tmp, where any user may create links.
    """
    may_lack = isinstance(operation, BindDirectory) and operation.may_lack
    try:
        if operation.held:
            fd = kernel.open_tree(operation.held, dirfd=hold)
        else:
            fd = kernel.open_tree(operation.source)
    except OSError as e:
        if may_lack:
            return None
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            raise MirrorMismatchError(
                f"{operation.source}: {e.strerror}", hint="run `tidegate refresh`"
            ) from e
        raise explain(e, f"open {operation.source}") from e
    directory = isinstance(operation, BindDirectory)
    if not (kernel.is_directory(fd) if directory else kernel.is_regular(fd)):
        if may_lack:
            os.close(fd)
            return None
        raise MirrorMismatchError(
            f"{operation.source} is not a {'directory' if directory else 'regular file'}",
            hint="run `tidegate refresh`",
        )
    flags = READONLY | (kernel.MOUNT_ATTR_NOEXEC if operation.noexec else 0)
    try:
        kernel.mount_setattr(fd, flags, kernel.MS_PRIVATE, operation.source)
    except OSError as e:
        raise explain(e, f"make {operation.source} read-only") from e
    return fd


def _own_like(dirfd: int, fd: int) -> None:
    """Give a new file the owner of its directory: in a user namespace, the container's root."""
    parent, child = os.fstat(dirfd), os.fstat(fd)
    if (parent.st_uid, parent.st_gid) != (child.st_uid, child.st_gid):
        os.fchown(fd, parent.st_uid, parent.st_gid)


def _exchange(dirfd: int, name: str) -> None:
    """Exchange `name` and TEMPORARY."""
    try:
        kernel.exchange(dirfd, TEMPORARY, name)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        # NFS and some other file systems cannot exchange names. The name is missing for a moment,
        # but no program in the container is running yet.
        kernel.renameat(dirfd, name, ASIDE)
        try:
            kernel.renameat(dirfd, TEMPORARY, name)
        except OSError:
            kernel.renameat(dirfd, ASIDE, name)
            raise
        kernel.renameat(dirfd, ASIDE, TEMPORARY)


class Applier:
    """Applies operations below one root."""

    def __init__(
        self, container: CreatedContainer, rootfd: int, undo: Undo, kept: dict[str, Any]
    ) -> None:
        """`kept` describes the image's own cache (`cleanup.keep`)."""
        self.container = container
        self.rootfd = rootfd
        self.undo = undo
        self.kept = kept
        self.shared = self._shared_mounts()
        self.root_mount = kernel.mount_id(rootfd)
        self.skipped: list[str] = []

    def _shared_mounts(self) -> frozenset[int]:
        """Return the ids of the shared mounts: their changes propagate to other namespaces."""
        fd = os.open(
            "thread-self/mountinfo", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.container.procfd
        )
        with os.fdopen(fd, "rb") as f:
            rows = [line.split(b" ") for line in f.read().splitlines()]
        return frozenset(
            int(row[0])
            for row in rows
            if any(o.startswith(b"shared:") for o in row[6 : row.index(b"-")])
        )

    def require_ours(self, dirfd: int, path: str, *, volumes: bool) -> None:
        """Refuse to create files on a volume: it belongs to the host, and a link may lead to it.

        With `volumes`, a volume that the configuration mounts on `path` itself is accepted if
        `path` contains no link.
        """
        if kernel.mount_id(dirfd) == self.root_mount or (volumes and self.is_direct(dirfd, path)):
            return
        raise OSError(errno.EXDEV, "it is on a volume", path)

    def is_direct(self, fd: int, path: str) -> bool:
        """Return whether `path` leads to the file that `fd` refers to, without following a link."""
        try:
            other = kernel.openat2(
                self.rootfd,
                path or ".",
                os.O_PATH,
                kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_SYMLINKS,
            )
        except OSError as e:
            if e.errno != errno.ELOOP:
                raise
            return False
        direct = kernel.mount_id(other) == kernel.mount_id(fd) and os.path.sameopenfile(other, fd)
        os.close(other)
        return direct

    def make_directory(self, path: str, *, volumes: bool = False) -> int:
        """Open the directory at `path`; create it and its parents if they are missing."""
        try:
            return kernel.open_in_root(self.rootfd, path, os.O_PATH | os.O_DIRECTORY)
        except OSError as e:
            if e.errno != errno.ENOENT:
                raise
        parts = path.split("/")
        fd = kernel.open_in_root(self.rootfd, ".", os.O_PATH | os.O_DIRECTORY)
        for depth in range(1, len(parts) + 1):
            try:
                below = kernel.open_in_root(
                    self.rootfd, "/".join(parts[:depth]), os.O_PATH | os.O_DIRECTORY
                )
            except OSError as e:
                if e.errno != errno.ENOENT:
                    raise
                self.require_ours(fd, "/".join(parts[: depth - 1]), volumes=volumes)
                return self._make_below(fd, parts, depth - 1)
            os.close(fd)
            fd = below
        return fd

    def make_own_directory(self, path: str) -> int:
        """Open or create the directory at `path`; refuse it on a volume."""
        fd = self.make_directory(path)
        self.require_ours(fd, path, volumes=False)
        return fd

    def _make_below(self, fd: int, parts: list[str], done: int) -> int:
        """Create the parts of a path after the first `done`, below `fd`, which is their parent."""
        for depth, name in enumerate(parts[done:], done + 1):
            parent = fd
            with DeferredDeadline():
                as_owner(parent, partial(kernel.mkdirat, parent, name, 0o755))
                self.undo.add(partial(kernel.unlinkat, parent, name, directory=True))
            self._note(parent, HookTrace("directory", "/".join(parts[:depth])))
            readable = kernel.open_child(parent, name, os.O_RDONLY | os.O_DIRECTORY)
            _own_like(parent, readable)
            os.close(readable)
            fd = kernel.open_child(parent, name, os.O_PATH | os.O_DIRECTORY)
        return fd

    def _note(self, dirfd: int, trace: HookTrace) -> None:
        """Record what was created, unless it is on a volume, which is not visible from outside."""
        if kernel.mount_id(dirfd) == self.root_mount:
            self.undo.note(trace)

    def make_file(self, path: str, *, own: bool = False) -> int:
        """Open the regular file at `path`; create an empty one if it is missing.

        With `own`, the file must be an entry of its directory: not a link and not on a volume.
        """
        parent, _, name = path.rpartition("/")
        dirfd = -1
        try:
            if own:
                dirfd = self.make_own_directory(parent)
                fd = kernel.open_child(dirfd, name)
            else:
                fd = kernel.open_in_root(self.rootfd, path)
        except OSError as e:
            if e.errno != errno.ENOENT:
                raise
            if dirfd < 0:
                dirfd = self.make_own_directory(parent)
            with DeferredDeadline():
                made = as_owner(dirfd, lambda: kernel.create(dirfd, name, 0o755))
                self.undo.add(lambda: kernel.unlinkat(dirfd, name))
            assert made is not None  # noqa: S101
            self._note(dirfd, HookTrace("file", path))
            _own_like(dirfd, made)
            os.close(made)
            fd = kernel.open_child(dirfd, name)
        if not kernel.is_regular(fd):
            raise ImageError(
                f"/{path} in the image is not a regular file, but a driver file has to be"
                " mounted there",
                hint="remove it from the image",
            )
        return fd

    def attach(self, source: int, target: int, path: str) -> None:
        """Mount `source` on `target`.

        A link in the image must not decide which of the runtime's mounts is covered: a mount on
        /dev or /proc would cover files that the runtime later mounts over other files to mask them.
        """
        mount = kernel.mount_id(target)
        if mount in self.shared:
            # The mount would appear in every namespace of the peer group, including the host's.
            raise MountError(
                f"/{path} in the container is on a shared mount",
                hint="mount it with private or slave propagation",
            )
        if mount != self.root_mount:
            self.require_ours(target, path, volumes=True)
        elif os.path.sameopenfile(target, self.rootfd):
            raise OSError(errno.EXDEV, "it is the container's root itself", path)
        with DeferredDeadline():
            kernel.move_mount(source, target, path)
            self.undo.add(lambda: kernel.umount(self.container.procfd, source))

    def write_cache(self, operation: WriteCache) -> None:
        """Replace the cache, with a single rename where the file system can exchange names.

        The previous file or link is kept under the temporary name until the container is certain to
        start, so that it can be restored with all its attributes.
        """
        parent, _, name = operation.target.rpartition("/")
        # Fails for a volume over /etc, which does not belong to the container.
        dirfd = kernel.open_in_root(
            self.rootfd, parent, os.O_PATH | os.O_DIRECTORY, same_mount=True
        )
        for left in (TEMPORARY, ASIDE):  # left by a run that was killed
            remove(dirfd, left)
        with DeferredDeadline():
            fd = as_owner(dirfd, lambda: kernel.create(dirfd, TEMPORARY, 0o600))
            self.undo.add(partial(remove, dirfd, TEMPORARY))
        assert fd is not None  # noqa: S101
        try:
            try:
                write_all(fd, operation.content)
                _own_like(dirfd, fd)
                os.fchmod(fd, 0o644)
                ours = os.fstat(fd)
            finally:
                os.close(fd)
            with DeferredDeadline():
                _exchange(dirfd, name)
                self.undo.add(partial(kernel.renameat, dirfd, TEMPORARY, name))
        except OSError:
            with suppress(OSError):
                remove(dirfd, TEMPORARY)
            raise
        kept = self.kept | {"ours": [ours.st_size, ours.st_mtime_ns]}
        self.undo.note(HookTrace("cache", operation.target, kept))
        self.undo.at_success(partial(remove, dirfd, TEMPORARY))

    def execute(self, operation: Operation, source: int) -> None:
        """Apply one operation; an optional one is skipped if it fails because of the image."""
        done = len(self.undo.steps)
        optional = not isinstance(operation, WriteCache) and operation.optional
        try:
            match operation:
                case BindDirectory():
                    target = (
                        self.make_own_directory(operation.target)
                        if optional
                        else self.make_directory(operation.target, volumes=operation.volumes)
                    )
                    self.attach(source, target, operation.target)
                case BindFile():
                    target = self.make_file(operation.target, own=optional)
                    self.attach(source, target, operation.target)
                case WriteCache():
                    self.write_cache(operation)
                case _:
                    assert_never(operation)
        except (OSError, ImageError) as e:
            reason = e.message if isinstance(e, ImageError) else str(e.strerror)
            if optional:
                self.undo.back_to(done)
                self.skipped.append(f"/{operation.target}: {reason}")
                return
            if isinstance(e, ImageError):
                raise
            if isinstance(operation, WriteCache):
                if not (operation.strays or operation.by_cache):
                    return  # the loader searches the directory even without the cache
                leads = (
                    f"leads to {operation.strays[0]}"
                    if operation.strays
                    else f"does not lead to {operation.by_cache}"
                )
                raise ImageError(
                    f"/etc/ld.so.cache in the image {leads} and cannot be replaced ({reason})",
                    hint="remove that library from the image and run ldconfig in it"
                    if operation.strays
                    else "use a root file system that the runtime can write to",
                ) from e
            if isinstance(operation, BindFile) and e.errno in (errno.EROFS, errno.EXDEV):
                # Programs are optional, so the container starts without them.
                self.skipped.append(f"/{operation.target}: {reason}")
                return
            if e.errno in (errno.EEXIST, errno.ELOOP, errno.ENOTDIR, errno.EXDEV):
                raise ImageError(
                    f"/{operation.target} in the image cannot be reached or created ({reason})",
                    hint="make it a plain path without dangling or circular links",
                ) from e
            raise explain(e, operation.describe()) from e


def _describe_cache(plan: Plan, container: CreatedContainer) -> dict[str, Any]:
    """Describe the image's own cache, so that it can be restored; {} if none will be written."""
    for operation in plan.operations:
        if isinstance(operation, WriteCache):
            with suppress(OSError):
                return cleanup.keep(container.rootfd, operation.target, operation.before)
    return {}


def apply_plan(plan: Plan, hold: int, container: CreatedContainer, undo: Undo) -> list[str]:
    """Apply the plan; return what was left out, with the reasons.

    `hold` is a descriptor of the generation that the plan uses. `undo` receives the steps that
    revert the plan, whether this function returns or raises.
    """
    kept = _describe_cache(plan, container)
    sources = [
        -1 if isinstance(operation, WriteCache) else open_source(operation, hold)
        for operation in plan.operations
    ]
    container.require_alive()
    try:
        inside = MountNamespace(container)
        with inside as rootfd:
            applier = Applier(container, rootfd, undo, kept)
            for operation, source in zip(plan.operations, sources, strict=True):
                if source is None:
                    continue
                applier.execute(operation, source)
    except OSError as e:
        raise explain(e, "enter the container's mount namespace") from e
    return applier.skipped
