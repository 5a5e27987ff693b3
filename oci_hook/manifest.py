"""The generation of the driver mirror in force, as its manifest describes it.

`tidegate refresh` writes manifests (vdriver/manifest.schema.json); the hook takes from one what it
needs and checks that the driver is still the one it was made from.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from oci_hook.errors import DriverError, MirrorError, show
from oci_hook.state import read_bounded

MANIFEST_LIMIT = 16 << 20
REFRESH = "run `tidegate refresh`"


class MirrorSet(NamedTuple):
    """What a container with certain capabilities gets.  Paths are relative to the generation."""

    capabilities: tuple[str, ...]
    lib64: str
    programs: tuple[str, ...]
    sonames: tuple[str, ...]  # what ld.so.cache has to lead to `lib64`


class Watched(NamedTuple):
    """A file of the host that makes the generation stale when it changes."""

    path: str
    size: int
    mtime_ns: int


class Manifest(NamedTuple):
    """One generation."""

    directory: str  # absolute; never through `current`, which may be switched while we work
    generation: str
    version: str
    machine: str
    sets: tuple[MirrorSet, ...]
    watch: tuple[Watched, ...]


def _confined(path: str) -> str:
    """Check a relative path of the manifest: it stays below the generation and has no odd parts."""
    parts = path.split("/")
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"path {path!r}")
    return path


def _sonames(lib64: str, files: list[dict[str, Any]]) -> tuple[str, ...]:
    """Name what ldconfig would find in `lib64`: sonames, and links for linking against them."""
    here = {}
    for file in files:
        directory, _, name = file["path"].rpartition("/")
        if directory == lib64:
            here[name] = file
    names = {f["soname"] for f in here.values() if f.get("soname") in here}
    names |= {n for n, f in here.items() if f["role"] == "link" and n.endswith(".so")}
    return tuple(sorted(names))


def parse_manifest(data: bytes, directory: str) -> Manifest:
    """Take what the hook needs; ValueError, KeyError and TypeError stand for a damaged manifest."""
    document = json.loads(data.decode())
    if document["schema"] != 1:
        raise ValueError(f"schema {document['schema']!r}")
    files = document["files"]
    sets = []
    for entry in document["sets"]:
        lib64 = _confined(entry["lib64"])
        sets.append(
            MirrorSet(
                capabilities=tuple(sorted(map(str, entry["capabilities"]))),
                lib64=lib64,
                programs=tuple(_confined(program) for program in entry["bin"]),
                sonames=_sonames(lib64, files),
            )
        )
    watch = tuple(
        Watched(str(w["path"]), int(w["size"]), int(w["mtime_ns"]))
        for w in document["source"]["watch"]
    )
    return Manifest(
        directory=directory,
        generation=str(document["generation"]),
        version=str(document["driver"]["version"]),
        machine=str(document["machine"]),
        sets=tuple(sets),
        watch=watch,
    )


def read_manifest(driver_dir: str) -> Manifest:
    """Read the manifest of the generation in force."""
    link = f"{driver_dir}/current"
    try:
        name = os.readlink(link)
    except FileNotFoundError as e:
        raise DriverError(f"no driver mirror at {link}", hint=REFRESH) from e
    except OSError as e:
        raise MirrorError(f"{link}: {e.strerror}, accepted is a symbolic link", hint=REFRESH) from e
    directory = os.path.join(driver_dir, name)
    path = f"{directory}/manifest.json"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = read_bounded(fd, MANIFEST_LIMIT)
        finally:
            os.close(fd)
    except OSError as e:
        raise MirrorError(f"{path}: {e.strerror}", hint=REFRESH) from e
    if data is None:
        raise MirrorError(f"{path} is larger than {MANIFEST_LIMIT} bytes", hint=REFRESH)
    try:
        return parse_manifest(data, directory)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise MirrorError(f"{path} is not a manifest ({show(repr(e))})", hint=REFRESH) from e


def check_fresh(manifest: Manifest) -> None:
    """Refuse a mirror whose driver has changed since: it would not match the kernel module."""
    for file in manifest.watch:
        try:
            found = os.stat(file.path)
        except OSError as e:
            raise MirrorError(
                f"mirror {manifest.generation} is stale: {file.path}: {e.strerror}", hint=REFRESH
            ) from e
        if (found.st_size, found.st_mtime_ns) != (file.size, file.mtime_ns):
            raise MirrorError(
                f"mirror {manifest.generation} is stale: {file.path} has changed since it was made",
                hint=REFRESH,
            )


def choose_set(manifest: Manifest, capabilities: tuple[str, ...]) -> MirrorSet:
    """Find the set for exactly these capabilities."""
    for candidate in manifest.sets:
        if candidate.capabilities == capabilities:
            return candidate
    offered = " or ".join(",".join(s.capabilities) for s in manifest.sets)
    raise DriverError(
        f"mirror {manifest.generation} has nothing for capabilities {','.join(capabilities)},"
        f" it has {show(offered, 300)}",
        hint="ask for one of these in tidegate.gpu/capabilities",
    )
