"""What will be done to a container, as values.  Reads nothing and changes nothing."""

from __future__ import annotations

from typing import Literal, NamedTuple

from oci_hook import ldcache
from oci_hook.client import Grant
from oci_hook.errors import ImageError, show
from oci_hook.image import Image
from oci_hook.manifest import Manifest, MirrorSet


class BindDirectory(NamedTuple):
    """A directory of the host, read-only, nosuid and nodev, on one in the container."""

    source: str  # on the host
    target: str  # below the container's root
    noexec: bool = False
    volumes: bool = False  # may be made on a volume that the container's configuration mounts there
    op: Literal["bind-directory"] = "bind-directory"

    def describe(self) -> str:
        """Say it as an operator would."""
        noexec = ",noexec" if self.noexec else ""
        return f"bind {self.source} -> /{self.target} [ro,nosuid,nodev{noexec}]"


class BindFile(NamedTuple):
    """A file of the host, read-only, nosuid and nodev, on one in the container."""

    source: str
    target: str
    op: Literal["bind-file"] = "bind-file"

    def describe(self) -> str:
        """Say it as an operator would."""
        return f"bind {self.source} -> /{self.target} [ro,nosuid,nodev,file]"


class WriteCache(NamedTuple):
    """A new ld.so.cache."""

    content: bytes
    previous: bytes
    strays: tuple[str, ...]  # where the cache leads our sonames now; nothing works when it stays so
    added: int
    target: str = "etc/ld.so.cache"
    op: Literal["write-cache"] = "write-cache"

    def describe(self) -> str:
        """Say it as an operator would."""
        return f"write /{self.target} [{self.added} libraries" + (
            ", required]" if self.strays else "]"
        )


Operation = BindDirectory | BindFile | WriteCache


class Plan(NamedTuple):
    """Operations, in order."""

    operations: tuple[Operation, ...]

    def describe(self) -> list[str]:
        """Give one line for each operation."""
        return [operation.describe() for operation in self.operations]


def plan_cache(cache: bytes | None, target: str, sonames: tuple[str, ...]) -> WriteCache | None:
    """Plan the new cache; None when the image has none or it already says what it has to."""
    if cache is None or not ldcache.is_cache(cache):
        return None
    directory = b"/" + target.encode()
    names = tuple(name.encode() for name in sonames)
    try:
        before = ldcache.parse(cache)
        if before is None:
            return None
        strays = ldcache.strays(before, directory, names)
        after = ldcache.with_libraries(before, directory, names)
        content = ldcache.write(after)
    except ldcache.CacheError as e:
        if not any(name in cache for name in names):
            return None
        raise ImageError(
            f"/etc/ld.so.cache in the image is damaged ({show(e)}) and names driver libraries",
            hint="run ldconfig in the image",
        ) from e
    if after.entries == before.entries:
        return None
    return WriteCache(
        content, cache, tuple(show(path.decode("utf-8", "replace")) for path in strays), len(names)
    )


def plan_container(manifest: Manifest, mirror_set: MirrorSet, grant: Grant, image: Image) -> Plan:
    """Plan one container."""
    directory = manifest.directory
    operations: list[Operation] = [
        BindDirectory(f"{directory}/{mirror_set.lib64}", image.target),
        BindDirectory(grant.directory, "run/tidegate", noexec=True, volumes=True),
    ]
    operations += [
        BindFile(f"{directory}/{program}", f"usr/bin/{program.rpartition('/')[2]}")
        for program in mirror_set.programs
    ]
    # last, because it is the only one that has no clean way back
    cache = plan_cache(image.cache, image.target, mirror_set.sonames)
    if cache is not None:
        operations.append(cache)
    return Plan(tuple(operations))
