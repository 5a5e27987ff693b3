"""Plans the mounts and files for a container from given facts, without any input or output."""

from __future__ import annotations

from oci_hook import ldcache
from oci_hook.client import Grant
from oci_hook.errors import ImageError, show
from oci_hook.image import Image
from oci_hook.manifest import FixedFiles, MirrorManifest, WantedParts

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from typing import Literal, NamedTuple
else:
    from oci_hook.light_typing import NamedTuple


class BindDirectory(NamedTuple):
    """Mounts a host directory, read-only, nosuid and nodev, on a directory in the container."""

    source: str  # on the host
    target: str  # below the container's root
    held: str = ""  # the source relative to the generation's directory, which the hook holds open
    noexec: bool = False
    volumes: bool = False  # the mount point may be created in a volume
    optional: bool = False  # left out, with a reason in the log, if it fails because of the image
    may_lack: bool = False  # left out if the host has no such directory
    op: Literal["bind-directory"] = "bind-directory"

    def describe(self) -> str:
        """Return the operation in words, for an operator."""
        return f"bind {self.source} -> /{self.target} [{_flags(self)}]"


class BindFile(NamedTuple):
    """Mounts a host file, read-only, nosuid and nodev, on a file in the container."""

    source: str
    target: str
    held: str = ""
    noexec: bool = False
    optional: bool = False
    op: Literal["bind-file"] = "bind-file"

    def describe(self) -> str:
        """Return the operation in words, for an operator."""
        return f"bind {self.source} -> /{self.target} [{_flags(self)},file]"


def _flags(operation: BindDirectory | BindFile) -> str:
    return "ro,nosuid,nodev" + (",noexec" if operation.noexec else "")


class WriteCache(NamedTuple):
    """Writes a new ld.so.cache."""

    content: bytes
    strays: tuple[str, ...]  # other paths that the cache has for the sonames; they must be replaced
    added: int
    by_cache: str = ""  # libraries that programs find only through the cache, in words
    before: bytes = b""  # the image's own cache, to be restored at the container's end
    target: str = "etc/ld.so.cache"
    op: Literal["write-cache"] = "write-cache"

    def describe(self) -> str:
        """Return the operation in words, for an operator."""
        return f"write /{self.target} [{self.added} libraries" + (
            ", required]" if self.strays or self.by_cache else "]"
        )


Operation = BindDirectory | BindFile | WriteCache


class PlacePlan(NamedTuple):
    """The target of a place's files in this image."""

    place: FixedFiles
    how: Literal["directory", "files", "skipped"]
    target: str  # below the container's root; empty if the place is skipped
    others: tuple[str, ...]  # why earlier targets were not chosen, one line each


class Plan(NamedTuple):
    """The operations, in order, and what is left out, with the reasons."""

    operations: tuple[Operation, ...]
    places: tuple[PlacePlan, ...] = ()
    skipped: tuple[str, ...] = ()

    def describe(self) -> list[str]:
        """Return one line for each operation."""
        return [operation.describe() for operation in self.operations]


LIBRARIES_32 = "the driver's 32-bit libraries"
FLAGS = {"x86_64": ldcache.FLAGS_X86_64, "aarch64": ldcache.FLAGS_AARCH64}


class CacheMapping(NamedTuple):
    """Sonames that ld.so.cache has to map to files in a directory."""

    directory: str  # below the container's root
    sonames: tuple[str, ...]
    flags: int = ldcache.FLAGS_X86_64
    required: bool = False  # programs find them only through the cache

    @property
    def what(self) -> str:
        """The libraries in words, for an operator."""
        return LIBRARIES_32 if self.flags == ldcache.FLAGS_I386 else "the driver's libraries"


def plan_cache(cache: bytes | None, mappings: tuple[CacheMapping, ...]) -> WriteCache | None:
    """Plan the new cache; None if the image has no cache, or one that needs no change."""
    required = any(mapping.required for mapping in mappings)
    by_cache = next((mapping.what for mapping in mappings if mapping.required), "")
    if cache is None or not ldcache.is_cache(cache):
        if required:
            raise _no_cache(
                f"the image has no ld.so.cache, and {by_cache} are found only through it", by_cache
            )
        return None
    names = [
        name.encode(errors="surrogateescape") for mapping in mappings for name in mapping.sonames
    ]
    strays: list[bytes] = []
    try:
        before = ldcache.parse(cache)
        if before is None:
            if required:
                raise _no_cache(
                    "/etc/ld.so.cache in the image is in a format from before glibc 2.2", by_cache
                )
            return None
        after = before
        for mapping in mappings:
            directory = b"/" + mapping.directory.encode(errors="surrogateescape")
            sonames = tuple(name.encode(errors="surrogateescape") for name in mapping.sonames)
            if mapping.flags != ldcache.FLAGS_I386 or mapping.required:
                strays += ldcache.strays(before, directory, sonames, mapping.flags)
            after = ldcache.with_libraries(after, directory, sonames, mapping.flags)
        content = ldcache.write(after)
    except ldcache.DamagedCacheError as e:
        if not required and not any(name in cache for name in names):
            return None
        raise ImageError(
            f"/etc/ld.so.cache in the image is damaged ({show(e)})"
            + (
                f", but {by_cache} are found through it"
                if required
                else " and names driver libraries"
            ),
            hint="run ldconfig in the image",
        ) from e
    if after.entries == before.entries:
        return None
    return WriteCache(
        content,
        tuple(show(path.decode("utf-8", "replace")) for path in strays),
        len(names),
        by_cache,
        cache,
    )


def _no_cache(reason: str, what: str) -> ImageError:
    if what == LIBRARIES_32:
        return _no_compat32(reason)
    return ImageError(reason, hint="run ldconfig in the image")


def _no_compat32(reason: str) -> ImageError:
    return ImageError(
        reason,
        hint="install 32-bit glibc in the image and run ldconfig in it, or leave compat32 out of"
        " tidegate.gpu/capabilities",
    )


def _choose_target(place: FixedFiles, image: Image, taken: list[str]) -> PlacePlan:
    """Choose the directory for a place, and whether to mount it as a whole or file by file.

    The image's own files in a directory stay visible: only an empty directory is covered.
    """
    reasons: list[str] = []
    full: list[tuple[str, int]] = []  # targets for single files, and the number of reasons so far

    def result(how: Literal["directory", "files", "skipped"], target: str, n: int) -> PlacePlan:
        return PlacePlan(place, how, target, tuple(reasons[:n]))

    absent = ""
    for raw in place.targets:
        target = image.place(raw)
        look = image.looks[target]
        if any(f"{target}/".startswith(f"{t}/") or f"{t}/".startswith(f"{target}/") for t in taken):
            reasons.append(f"/{target}: other driver files are mounted there")
        elif look.state == "unusable":
            reasons.append(f"/{target}: {look.reason}")
        elif look.state == "empty" or (look.state == "absent" and place.looks == "all"):
            return result("directory", target, len(reasons))
        elif look.state == "full":
            if place.looks == "one":
                return result("files", target, len(reasons))
            full.append((target, len(reasons)))
            reasons.append(f"/{target}: the image has files there")
        else:
            if not reasons:
                absent = target  # only the first target; a later one counts only if it exists
            reasons.append(f"/{target}: the image has no such directory")
    if full:
        return result("files", full[0][0], full[0][1])
    if absent:
        return result("directory", absent, 0)
    return result("skipped", "", len(reasons))


def _bind_directory(
    manifest: MirrorManifest,
    held: str,
    target: str,
    *,
    noexec: bool = False,
    optional: bool = False,
) -> BindDirectory:
    """Return the mount of a directory in the generation."""
    source = f"{manifest.directory}/{held}"
    return BindDirectory(source, target, held, noexec=noexec, optional=optional)


def _bind_file(
    manifest: MirrorManifest,
    held: str,
    target: str,
    *,
    noexec: bool = False,
    optional: bool = False,
) -> BindFile:
    """Return the mount of a file in the generation."""
    return BindFile(f"{manifest.directory}/{held}", target, held, noexec, optional)


def _plan_place(manifest: MirrorManifest, choice: PlacePlan, image: Image) -> list[Operation]:
    place, target = choice.place, choice.target
    # Files below the library directory are modules that programs load.
    noexec = not target.startswith(f"{image.library_dir}/")
    if choice.how == "directory":
        return [_bind_directory(manifest, place.source, target, noexec=noexec, optional=True)]
    if choice.how == "files":
        return [
            _bind_file(
                manifest,
                f"{place.source}/{name}",
                f"{target}/{name}",
                noexec=noexec,
                optional=True,
            )
            for name in place.files
        ]
    return []


def plan_container(
    manifest: MirrorManifest, share: WantedParts, grant: Grant, image: Image
) -> Plan:
    """Plan a container. Raise ImageError if it asks for compat32 but the image lacks it."""
    mirror_set = share.mirror_set
    operations: list[Operation] = [
        _bind_directory(manifest, mirror_set.lib64, target)
        for target in (image.target, *(f"{path}/{image.subdirectory}" for path in image.own))
    ]
    operations += [
        BindDirectory(grant.directory, "run/tidegate", noexec=True, volumes=True),
    ]
    flags = FLAGS[image.machine]
    mappings = [CacheMapping(image.target, share.names64, flags, required=image.by_cache)]
    skipped: list[str] = []
    if share.compat32 == "asked" and image.target32 is None:
        raise _no_compat32(image.reason32)
    if share.compat32 != "no" and mirror_set.lib32 is not None:
        if image.target32 is None:
            skipped.append(f"compat32: {image.reason32}")
        else:
            asked = share.compat32 == "asked"
            operations.append(
                _bind_directory(manifest, mirror_set.lib32, image.target32, optional=not asked)
            )
            mappings.append(
                CacheMapping(image.target32, share.names32, ldcache.FLAGS_I386, required=asked)
            )
    operations += [
        _bind_file(manifest, p.path, f"usr/bin/{p.path.rpartition('/')[2]}") for p in share.programs
    ]
    choices = []
    taken = [operation.target for operation in operations]
    for place in share.places:
        choice = _choose_target(place, image, taken)
        choices.append(choice)
        operations += _plan_place(manifest, choice, image)
        if choice.how == "directory":
            taken.append(choice.target)
        if choice.how == "skipped":
            skipped.append(f"place {place.name}: {'; '.join(choice.others)}")
    operations += [
        # In WSL this is the driver store, which has libraries; elsewhere, directories with sockets.
        BindDirectory(
            b.path, b.path[1:], noexec=manifest.kind != "wsl", optional=True, may_lack=True
        )
        for b in share.binds
    ]
    # The cache comes last: the directories that it points to have to be mounted by then.
    cache = plan_cache(image.cache, tuple(mappings))
    if cache is not None:
        operations.append(cache)
    return Plan(tuple(operations), tuple(choices), tuple(skipped))
