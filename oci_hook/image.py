"""Inspects an image: its library directories, loader and ld.so.cache, and its own drivers.

It changes nothing. The image is not trusted: every path is opened with openat2(2), confined to the
image's root. A file is opened for reading only after a check, on its descriptor, that it is a
regular file, and it is read up to a limit.
"""

from __future__ import annotations

import errno
import os
import stat
from itertools import islice

from oci_hook import kernel
from oci_hook.elf import run_path
from oci_hook.errors import BundleError, ImageError, UnservedImageError, show
from oci_hook.ldcache import CACHE_LIMIT, is_cache
from oci_hook.loaders import BY_CACHE, LOADERS, LoadersOf, subdirectory
from oci_hook.manifest import LIBDIR, WantedParts
from oci_hook.quick import read_bounded
from oci_hook.state import is_text

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from typing import Any, Literal, NamedTuple
else:
    from oci_hook.light_typing import NamedTuple

LOADER_LIMIT = 8 << 20
ENTRIES_SHOWN = 3
LIBRARY_DIRS_32 = (
    "usr/lib/i386-linux-gnu",
    "lib/i386-linux-gnu",
    "usr/lib32",
    "lib32",
    "usr/lib",
    "lib",
)
ELF_HEAD = 20
VOLUME = "it is on a volume"
# Libraries in an image that a loader must not find before those of the node's driver.
GOVERNED = ("libcuda.so.1", "libnvidia-ml.so.1")
COMPAT = ("compat", "compat/lib", "compat/lib.real")  # from CUDA packages, in /usr/local/cuda*
SEARCH_LIMIT = 256
LISTING_LIMIT = 4096  # entries of /usr/local
LINKS_LIMIT = 40  # the kernel's limit on the links in one path
ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG}
HINT = "use a glibc-based image, or set tidegate.gpu/driver: optional to start without a GPU"


class PathInImage(NamedTuple):
    """The state of a path in an image where a directory could be mounted."""

    state: Literal["absent", "empty", "full", "unusable"]
    reason: str = ""  # why nothing can be mounted or created there


class Image(NamedTuple):
    """The relevant properties of an image; paths are relative to its root."""

    library_dir: str
    target: str  # the directory that the mirror's libraries are mounted on
    cache: bytes | None  # ld.so.cache
    target32: str | None = None  # `target` for 32-bit libraries; if None, see reason32
    reason32: str = "it was not examined"
    looks: dict[str, PathInImage] = {}  # noqa: RUF012 - never modified
    own: tuple[str, ...] = ()  # directories with the image's own driver, searched before the node's
    machine: str = "x86_64"

    @property
    def subdirectory(self) -> str:
        """The subdirectory that this image's loader searches first in each library directory.

        If `by_cache` is true, the loader searches none.
        """
        return self.target[len(self.library_dir) + 1 :]

    @property
    def by_cache(self) -> bool:
        """Whether only ld.so.cache leads this image's loader to the driver."""
        return self.subdirectory == BY_CACHE

    def place(self, target: str) -> str:
        """Return the directory in this image that a target in the manifest stands for."""
        below = target.removeprefix(f"{LIBDIR}/")
        return target if below == target else f"{self.library_dir}/{below}"


def open_root(root: str) -> int:
    """Open a container's root file system by its path on the host; refuse the host's own root."""
    try:
        rootfd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise BundleError(
            f"root.path {show(root)}: {e.strerror}",
            hint="root.path has to name the container's root file system",
        ) from e
    here, host = os.fstat(rootfd), os.stat("/")
    if (here.st_dev, here.st_ino) == (host.st_dev, host.st_ino):
        os.close(rootfd)
        raise BundleError(
            f"root.path {show(root)} is the host's own root",
            hint="root.path has to name the container's root file system",
        )
    return rootfd


def _find(rootfd: int, path: str, flags: int = os.O_PATH, *, as_loader: bool = False) -> int | None:
    """Open a path in the root; None if it does not exist or cannot be reached.

    `as_loader` is for a path that a loader searches: if only a process inside the container can
    reach it, ImageError is raised.
    """
    try:
        return kernel.open_in_root(rootfd, path, flags)
    except OSError as e:
        if e.errno not in ABSENT:
            raise  # a call that a seccomp filter refuses says nothing about the image
        if as_loader and _leads_through_proc(rootfd, path, e.errno):
            raise ImageError(
                f"{show('/' + path.lstrip('/'))} leads through /proc, so its target depends on the"
                " process that follows it",
                hint="name the directory itself",
            ) from None
        return None


def _leads_through_proc(rootfd: int, path: str, reason: int) -> bool:
    """Return whether a path that was not found may exist for a process inside the container.

    A loader follows /proc/self, which does not exist for a process outside, and the links in it to
    roots and descriptors, which the hook never follows.
    """
    remaining, here, links = path.split("/")[::-1], list[str](), 0
    if reason in (errno.ENOENT, errno.ENOTDIR) and "proc" not in remaining:
        # One call instead of one per component, because most of the paths do not exist.
        try:
            fd = kernel.open_in_root(rootfd, path, links=False)
            os.close(fd)
        except OSError as e:
            if e.errno == reason:
                return False  # the path contains no link up to the missing component
    while remaining:
        part = remaining.pop()
        if part in ("", "."):
            continue
        if part == "..":
            here = here[:-1]
            continue
        if here == ["proc"]:
            return True
        try:
            fd = kernel.open_in_root(rootfd, "/".join((*here, part)), os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            break
        try:
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                links += 1
                if links > LINKS_LIMIT:
                    return False  # no process can follow this many links
                target = kernel.readlink(fd)
                here = [] if target.startswith("/") else here
                remaining += target.split("/")[::-1]
            else:
                here = [*here, part]
        finally:
            os.close(fd)
    return reason == errno.ELOOP  # from a link that only the kernel resolves


def _open_regular(rootfd: int, procfd: int, path: str) -> int | None:
    """Open a regular file in the image for reading; None for anything else."""
    fd = _find(rootfd, path)
    if fd is None:
        return None
    try:
        if not kernel.is_regular(fd):
            return None
        return kernel.reopen(procfd, fd, os.O_RDONLY | os.O_NONBLOCK)
    finally:
        os.close(fd)


def _read_file(rootfd: int, procfd: int, path: str, limit: int) -> bytes | None:
    """Read a regular file in the image; None for anything else, and for one over the limit."""
    fd = _open_regular(rootfd, procfd, path)
    if fd is None:
        return None
    try:
        return read_bounded(fd, limit)
    finally:
        os.close(fd)


def _require_empty(rootfd: int, path: str) -> None:
    """Refuse a directory that has entries: a mount would hide them from the container."""
    fd = _find(rootfd, path, os.O_RDONLY | os.O_DIRECTORY)
    if fd is None:
        entry = _find(rootfd, path, os.O_PATH | os.O_NOFOLLOW)
        if entry is None:
            return
        os.close(entry)
        raise ImageError(
            f"/{path} in the image is not a directory, but the driver's libraries"
            " have to be mounted there",
            hint="remove it from the image",
        )
    try:
        with os.scandir(fd) as entries:  # a few suffice for the message; there may be millions
            names = sorted(entry.name for entry in islice(entries, ENTRIES_SHOWN + 1))
    finally:
        os.close(fd)
    if names:
        found = show(", ".join(names[:ENTRIES_SHOWN]), 120) + (
            ", ..." if len(names) > ENTRIES_SHOWN else ""
        )
        raise ImageError(
            f"/{path} in the image is not empty ({found}), but the driver has to be mounted there",
            hint="move these files to the directory above it in the image",
        )


def look_at(rootfd: int, path: str) -> PathInImage:
    """Return the state of `path`: what it contains, or why no directory can be created there.

    A mount below the root is a volume, which belongs to the user.
    """
    try:
        return _look_at(rootfd, path)
    except OSError as e:
        return PathInImage("unusable", f"/{path}: {e.strerror}")


def _look_at(rootfd: int, path: str) -> PathInImage:
    own = kernel.mount_id(rootfd)
    fd = _find(rootfd, path, os.O_RDONLY | os.O_DIRECTORY)
    if fd is not None:
        try:
            if kernel.mount_id(fd) != own:
                return PathInImage("unusable", VOLUME)
            with os.scandir(fd) as entries:  # the first one decides; there may be millions
                return PathInImage("full" if any(True for _ in entries) else "empty")
        finally:
            os.close(fd)
    parts = path.split("/")
    volume = False
    for depth in range(1, len(parts) + 1):
        prefix = "/".join(parts[:depth])
        entry = _find(rootfd, prefix, os.O_PATH | os.O_NOFOLLOW)
        if entry is None:
            return PathInImage("unusable", VOLUME) if volume else PathInImage("absent")
        os.close(entry)
        fd = _find(rootfd, prefix, os.O_PATH | os.O_DIRECTORY)
        if fd is None:
            return PathInImage("unusable", f"/{prefix} is not a directory")
        volume = kernel.mount_id(fd) != own
        os.close(fd)
    return PathInImage("unusable", f"/{path} changed while it was being examined")


def _is_libc32(rootfd: int, procfd: int, path: str) -> bool:
    """Return whether a file is a library for i386, according to its ELF header."""
    fd = _open_regular(rootfd, procfd, path)
    if fd is None:
        return False
    try:
        head = os.read(fd, ELF_HEAD)
    finally:
        os.close(fd)
    # magic, ELFCLASS32, and little-endian e_machine EM_386
    return head.startswith(b"\x7fELF\x01") and head[18:ELF_HEAD] == b"\x03\x00"


def _find_32(rootfd: int, procfd: int, cache: bytes | None) -> tuple[str | None, str]:
    """Return where 32-bit libraries are to be mounted, or why they cannot be."""
    for directory in LIBRARY_DIRS_32:
        if _is_libc32(rootfd, procfd, f"{directory}/libc.so.6"):
            break
    else:
        where = ", ".join(f"/{d}" for d in LIBRARY_DIRS_32)
        return None, f"the image has no 32-bit glibc (no libc.so.6 for i386 in {where})"
    if cache is None or not is_cache(cache):
        return None, "the image has no ld.so.cache, by which 32-bit libraries are found"
    target = f"{directory}/{BY_CACHE}"
    look = look_at(rootfd, target)
    if look.state == "full":
        reason = "is not empty, but 32-bit libraries have to be mounted there"
        return None, f"/{target} in the image {reason}"
    return (target, "") if look.state != "unusable" else (None, f"{look.reason} in the image")


def _find_libc(rootfd: int, loaders: LoadersOf) -> str:
    """Return the directory of the image's glibc."""
    for candidate in loaders.library_dirs:
        fd = _find(rootfd, f"{candidate}/libc.so.6")
        if fd is not None:
            regular = kernel.is_regular(fd)
            os.close(fd)
            if regular:
                return candidate
    fd = _find(rootfd, loaders.musl)
    if fd is not None:
        os.close(fd)
        raise UnservedImageError(
            "the image is built on musl, but the driver needs glibc", hint=HINT
        )
    where = ", ".join("/" + d for d in loaders.library_dirs)
    raise UnservedImageError(f"the image has no glibc (no libc.so.6 in {where})", hint=HINT)


def inspect_image(
    rootfd: int,
    procfd: int,
    machine: str,
    *,
    compat32: bool = False,
) -> Image:
    """Find where the mirror's libraries are to be mounted in this image.

    With `compat32`, also look for a 32-bit glibc.
    """
    if machine not in LOADERS:
        raise ImageError(
            f"containers for {show(machine)} are not supported, only those for x86_64 and aarch64",
            hint="run the container on one of these",
        )
    loaders = LOADERS[machine]
    library_dir = _find_libc(rootfd, loaders)
    loader = None
    for directory in (loaders.directory, library_dir):
        loader = _read_file(rootfd, procfd, f"{directory}/{loaders.name}", LOADER_LIMIT)
        if loader is not None:
            break
    if loader is None:
        raise UnservedImageError(
            f"the image has no loader (/{loaders.directory}/{loaders.name} is not a regular file)",
            hint=HINT,
        )
    target = f"{library_dir}/{subdirectory(loaders, loader)}"
    _require_empty(rootfd, target)
    image = Image(
        library_dir=library_dir,
        target=target,
        cache=_read_file(rootfd, procfd, "etc/ld.so.cache", CACHE_LIMIT),
        machine=machine,
    )
    if image.by_cache and not (image.cache and is_cache(image.cache)):
        raise UnservedImageError(
            f"the image has no ld.so.cache, by which glibc on {machine} finds the driver",
            hint="run ldconfig where the image is built, or set tidegate.gpu/driver: optional to"
            " start without a GPU",
        )
    if compat32 and machine != "x86_64":
        image = image._replace(reason32="32-bit libraries are served on x86_64 only")
    elif compat32:
        target32, reason32 = _find_32(rootfd, procfd, image.cache)
        image = image._replace(target32=target32, reason32=reason32)
    return image


def _process(document: dict[str, Any]) -> tuple[str, str, dict[str, str]]:
    """Return the working directory, program and relevant environment from config.json."""
    process = document.get("process")
    if type(process) is not dict:
        return "/", "", {}
    cwd, arguments, variables = (process.get(name) for name in ("cwd", "args", "env"))
    texts = [v for v in (variables if type(variables) is list else ()) if type(v) is str]
    environment = dict(v.partition("=")[::2] for v in texts)
    used = {name: environment.get(name, "") for name in ("LD_LIBRARY_PATH", "PATH")}
    used["cwd"] = cwd if type(cwd) is str else "/"
    used["args"] = str(arguments[0]) if type(arguments) is list and arguments else ""
    for name, value in used.items():
        if not is_text(value):
            raise BundleError(
                f"{name} of the process in config.json is {show(value)}, not a path",
                hint="the program that wrote config.json has to write valid Unicode",
            )
    return used["cwd"], used["args"], used


def _join(at: str, path: str) -> str:
    """Return a path relative to the root, without empty and `.` components."""
    whole = path if path.startswith("/") else f"{at}/{path}"
    return "/".join(part for part in whole.split("/") if part not in ("", "."))


def search_path(rootfd: int, procfd: int, image: Image, document: dict[str, Any]) -> list[str]:
    """Return the directories, relative to the root, that a loader searches before the default ones.

    LD_LIBRARY_PATH in config.json and the RPATH of its program name them. Call this in the
    container's mount namespace, because the program may be in a volume.
    """
    cwd, name, environment = _process(document)
    value = environment.get("LD_LIBRARY_PATH", "")
    entries = value.replace(";", ":").split(":") if value else []
    if len(entries) > SEARCH_LIMIT:
        raise ImageError(
            f"LD_LIBRARY_PATH names {len(entries)} directories",
            hint=f"make it shorter: the limit is {SEARCH_LIMIT} directories",
        )
    origin, text = "", ""
    if name:
        parts = [""] if "/" in name else environment["PATH"].split(":")[:SEARCH_LIMIT]
        for part in parts:
            found = _look_at_program(rootfd, procfd, _join(cwd, f"{part}/{name}" if part else name))
            if found is not None:
                origin, text = found
                break
    entries += text.split(":")[:SEARCH_LIMIT] if text else []
    tokens = (("ORIGIN", (origin,)), ("LIB", (image.library_dir.removeprefix("usr/"),)))
    for token, meanings in (*tokens, ("PLATFORM", LOADERS[image.machine].platforms)):
        entries = [
            e.replace(f"${{{token}}}", meaning).replace(f"${token}", meaning)
            for e in entries
            for meaning in (meanings if token in e else meanings[:1])
        ]
    return [_join(cwd, entry) for entry in entries]  # an empty one is the working directory


def _look_at_program(rootfd: int, procfd: int, path: str) -> tuple[str, str] | None:
    """Return a program's directory, with all links resolved as a loader would, and its RPATH."""
    try:
        fd = _open_regular(rootfd, procfd, path)
        if fd is None:
            return None
        try:
            # Only a string: the result is resolved again, confined to the root.
            root, place = (kernel.path_of(procfd, n) for n in (rootfd, fd))
            return place.removeprefix(root).rpartition("/")[0] or "/", run_path(fd)
        finally:
            os.close(fd)
    except OSError:
        return "", ""


def _compat_directories(rootfd: int) -> list[str]:
    fd = _find(rootfd, "usr/local", os.O_RDONLY | os.O_DIRECTORY)
    if fd is None:
        return []
    try:
        with os.scandir(fd) as entries:
            listed = [e.name for e in islice(entries, LISTING_LIMIT + 1)]
    finally:
        os.close(fd)
    names = [name for name in listed if name.startswith("cuda")]
    if len(listed) > LISTING_LIMIT or len(names) > SEARCH_LIMIT:
        raise ImageError(
            f"/usr/local in the image has more than {LISTING_LIMIT} entries, or more than"
            f" {SEARCH_LIMIT} whose names start with cuda",
            hint="remove some of them: the hook searches that directory for drivers from CUDA"
            " packages",
        )
    return [f"usr/local/{name}/{directory}" for name in sorted(names) for directory in COMPAT]


def look_for_drivers(rootfd: int, image: Image, search: list[str]) -> Image:
    """Find the directories with a driver, in `search`, the defaults and CUDA's compat packages.

    A loader searches Tidegate's subdirectory of each first, so the node's driver can be mounted
    there. Raise ImageError if it cannot. Call this in the container's mount namespace, because its
    volumes are visible only there.
    """
    if image.by_cache:
        return _refuse_own(rootfd, image, search)
    behind = LOADERS[image.machine].behind
    own = kernel.mount_id(rootfd)
    seen: set[tuple[int, int, int]] = set()
    found: list[str] = []
    default = LOADERS[image.machine].library_dirs
    for path in (image.library_dir, *default, *search, *_compat_directories(rootfd)):
        place = _identify(rootfd, path)
        if place is None or place in seen:
            continue
        seen.add(place)
        _refuse_before(rootfd, path, image)
        if path == image.library_dir:
            continue
        name = _find_driver(rootfd, path, (image.subdirectory, *_behind(rootfd, path, behind)))
        if not name:
            continue
        volume = place[0] != own
        plain = os.path.normpath(path)  # the meaning of a path with `..`, if it contains no links
        if volume or _identify(rootfd, plain) != place:
            raise ImageError(
                f"{show('/' + path)} has a driver of its own ({name}), which would be found"
                f" before the node's, and {VOLUME if volume else 'is named through links and ..'}",
                hint="leave that directory out of the container and of LD_LIBRARY_PATH",
            )
        if not _is_main(rootfd, image, plain):
            _require_empty(rootfd, f"{plain}/{image.subdirectory}")
            found.append(plain)
    return image._replace(own=tuple(found))


def _refuse_own(rootfd: int, image: Image, search: list[str]) -> Image:
    """Refuse a driver that a loader finds without ld.so.cache: it precedes the node's driver."""
    for path in search + _compat_directories(rootfd):
        driver = _find_driver(rootfd, path)
        if driver:
            raise ImageError(
                f"{show('/' + path)} has a driver of its own ({driver}), which would be found"
                f" before the node's: on {image.machine}, glibc 2.37 and later have no subdirectory"
                " that is searched first",
                hint="remove it from the image, and leave the directory out of LD_LIBRARY_PATH",
            )
    return image


def _refuse_before(rootfd: int, path: str, image: Image) -> None:
    """Refuse a driver in a subdirectory that a loader searches before the node's driver.

    Mounting the node's driver there instead would hide the other files in that directory.
    """
    loaders = LOADERS[image.machine]
    if image.subdirectory != loaders.hwcaps:
        return
    for name in loaders.before:
        driver = _find_driver(rootfd, f"{path}/{name}")
        if driver:
            raise ImageError(
                f"{show(f'/{path}/{name}')} has a driver of its own ({driver}), which would be"
                " found before the node's",
                hint="remove it from the image",
            )


def _behind(rootfd: int, path: str, names: tuple[str, ...]) -> list[str]:
    """Return the existing subdirectories with these names; loaders up to glibc 2.36 search them."""
    found = []
    for place, name in enumerate(names, 1):
        if _identify(rootfd, f"{path}/{name}") is not None:
            below = _behind(rootfd, f"{path}/{name}", names[place:])
            found += [name, *(f"{name}/{more}" for more in below)]
    return found


def _find_driver(rootfd: int, path: str, below: tuple[str, ...] = ()) -> str:
    """Return the first driver library in a directory or its subdirectories `below`; "" if none."""
    for directory in ("", *below):
        for library in GOVERNED:
            name = f"{directory}/{library}" if directory else library
            if _is_file(rootfd, f"{path}/{name}"):
                return name
    return ""


def _is_main(rootfd: int, image: Image, directory: str) -> bool:
    """Return whether a link in a directory leads to where the driver is mounted anyway."""
    parts = image.subdirectory.split("/")
    for below in ("/".join(parts[:depth]) for depth in range(1, len(parts) + 1)):
        place = _identify(rootfd, f"{directory}/{below}")
        if place is not None and place == _identify(rootfd, f"{image.library_dir}/{below}"):
            return True
    return False


def _identify(rootfd: int, path: str) -> tuple[int, int, int] | None:
    """Return mount id, device and inode of a directory; None if it does not exist."""
    fd = _find(rootfd, path or ".", os.O_PATH | os.O_DIRECTORY, as_loader=True)
    if fd is None:
        return None
    status, mount = os.fstat(fd), kernel.mount_id(fd)
    os.close(fd)
    return mount, status.st_dev, status.st_ino


def _is_file(rootfd: int, path: str) -> bool:
    fd = _find(rootfd, path, as_loader=True)
    if fd is None:
        return False
    regular = kernel.is_regular(fd)
    os.close(fd)
    return regular


def look_at_places(rootfd: int, image: Image, share: WantedParts) -> Image:
    """Examine every directory where a place of the share could be mounted.

    Call this in the container's mount namespace, because its volumes are visible only there.
    """
    targets = (target for place in share.places for target in place.targets)
    paths = sorted({image.place(target) for target in targets})
    return image._replace(looks={path: look_at(rootfd, path) for path in paths})
