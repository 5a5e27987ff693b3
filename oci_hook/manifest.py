"""Reads the manifest of the driver mirror's current generation, and locks that generation.

`tidegate refresh` writes manifests (vdriver/manifest.schema.json). The lock keeps the generation
from being removed while the hook runs. The hook also checks that the node still has the driver from
which the mirror was made.
"""

from __future__ import annotations

import fcntl
import os

from oci_hook.errors import MirrorMismatchError, NoMirrorError, show
from oci_hook.light_json import load_json
from oci_hook.light_re import DIGITS, HEX, LETTERS, consists_of, is_below, is_path, is_version
from oci_hook.quick import read_bounded
from oci_hook.request import ALL_CAPABILITIES

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Literal, NamedTuple
else:
    from oci_hook.light_typing import NamedTuple

SCHEMA = 2
MANIFEST_LIMIT = 16 << 20
VERSION_LIMIT = 4096
REFRESH = "run `tidegate refresh`"
TRIES = 8
COMPAT32 = "compat32"
LIBDIR = "{libdir}"
MODULE_VERSION = "/proc/driver/nvidia/version"
ROLES = ("library", "control", "origin", "program", "data", "link")
# The members of each object, as in vdriver/manifest.schema.json.
DOCUMENT = frozenset(
    ("schema", "generation", "driver", "machine", "sets", "programs", "places", "binds")
) | {"files", "source"}
DRIVER = frozenset(("version", "kind"))
SET = frozenset(("capabilities", "lib64", "names64"))
SET_32 = frozenset(("lib32", "names32"))
PROGRAM = frozenset(("path", "capability"))
PLACE = frozenset(("name", "source", "capability", "targets", "looks", "files"))
FILE = frozenset(("path", "role"))
FILE_TEXTS = ("capability", "soname", "build_id", "target", "source")
FILE_MORE = frozenset(FILE_TEXTS) | {"size", "mtime_ns", "sha256"}
FILE_ALL = FILE | FILE_MORE
SOURCE = frozenset(("root", "watch"))
WATCHED = frozenset(("role", "path", "size", "mtime_ns"))


class MirrorSet(NamedTuple):
    """The libraries for a set of capabilities. Directories are relative to the generation."""

    capabilities: tuple[str, ...]  # without compat32
    lib64: str
    names64: frozenset[str]
    lib32: str | None = None
    names32: frozenset[str] = frozenset()


class MirrorProgram(NamedTuple):
    """A program that is mounted in /usr/bin; `path` is relative to the generation."""

    path: str
    capability: str


class FixedFiles(NamedTuple):
    """Files that programs look for in fixed directories of a container."""

    name: str
    source: str  # directory, relative to the generation
    capability: str
    targets: tuple[str, ...]  # relative to the container's root, or below {libdir}/; best first
    looks: str  # all: programs look in every target; one: in only one of them
    files: tuple[str, ...]


class MirrorBind(NamedTuple):
    """A directory on the host that is mounted at the same path; the path is absolute."""

    path: str
    capability: str


class WatchedFile(NamedTuple):
    """A file on the host that makes the generation stale when it changes."""

    path: str
    role: str  # driver, control
    size: int
    mtime_ns: int


class MirrorManifest(NamedTuple):
    """One generation."""

    directory: str  # absolute; never through `current`, which may be switched in the meantime
    generation: str
    version: str
    kind: str
    machine: str
    sets: tuple[MirrorSet, ...]
    programs: tuple[MirrorProgram, ...]
    places: tuple[FixedFiles, ...]
    binds: tuple[MirrorBind, ...]
    cached64: frozenset[str]  # names that ldconfig would find in lib64: sonames, development links
    cached32: frozenset[str]
    watch: tuple[WatchedFile, ...]
    hold: int = -1  # descriptor of `directory`, locked against removal; open until the hook ends


class WantedParts(NamedTuple):
    """The parts of a generation that a container gets."""

    mirror_set: MirrorSet
    programs: tuple[MirrorProgram, ...]
    places: tuple[FixedFiles, ...]
    binds: tuple[MirrorBind, ...]
    names64: tuple[str, ...]  # names that ld.so.cache has to resolve to the set's lib64
    names32: tuple[str, ...]
    compat32: Literal["no", "asked", "offered"]  # offered: used if the image has 32-bit glibc


def _object(
    value: Any, required: frozenset[str], optional: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Check that an object has all required members, and no others except the optional ones."""
    if type(value) is not dict:
        raise TypeError(f"{type(value).__name__}, not an object")
    if not required <= value.keys() <= required | optional:
        wrong = (value.keys() ^ required) - optional
        raise ValueError(f"missing or unexpected members: {show(sorted(wrong))}")
    return value


def _list(value: Any, least: int = 0) -> list[Any]:
    if type(value) is not list or len(value) < least:
        raise TypeError(f"{show(value, 40)}, not a list of at least {least} elements")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{show(value, 40)}, not a string")
    return value


def _texts(value: Any) -> list[str]:
    return [_text(item) for item in _list(value)]


def _is_generation(text: str) -> bool:
    version, _, digest = text.rpartition("-")
    return consists_of(version, DIGITS + LETTERS + ".") and _is_digest(digest, 12)


def _is_digest(text: str, digits: int) -> bool:
    return len(text) == digits and consists_of(text, HEX)


def _is_absolute(text: str) -> bool:
    return text.startswith("/") and is_path(text)


def _checked(value: Any, fits: Callable[[str], bool]) -> str:
    if not fits(_text(value)):
        raise ValueError(f"{show(value)}")
    return value  # type: ignore[no-any-return]


def _whole(value: Any, least: int | None = None) -> int:
    if type(value) is not int or (least is not None and value < least):
        raise TypeError(f"{show(value, 40)}, not a whole number in the permitted range")
    return value


def _confined(path: Any) -> str:
    """Check that a relative path of the manifest stays below the generation (`is_below`)."""
    return _checked(path, is_below)


def _absolute(path: Any) -> str:
    """Check an absolute path, and return it without its first slash."""
    return _confined(_text(path)[1:]) if _text(path)[:1] == "/" else _confined("")


def _target(path: Any) -> str:
    rest = _text(path).removeprefix(f"{LIBDIR}/")
    return _absolute(path) if rest == path else f"{LIBDIR}/{_confined(rest)}"


def _names(value: Any, least: int = 0) -> frozenset[str]:
    """Check the names of a directory's entries, all at once: a manifest has a thousand of them."""
    result = frozenset(_list(value, least))
    joined = "".join(result)
    if result & {"", ".", ".."} or "/" in joined or not is_path(joined):
        raise ValueError(f"not all of these are valid file names: {show(sorted(result))}")
    return result


def _choice(value: Any, *accepted: str) -> str:
    if value not in accepted:
        raise ValueError(f"{show(value, 40)}, not one of {', '.join(accepted)}")
    return str(value)


def _parse_set(value: Any) -> MirrorSet:
    entry = _object(value, SET, SET_32)
    lib32 = entry.get("lib32")
    names32 = _names(entry["names32"]) if "names32" in entry else None
    if (lib32 is None) != (names32 is None):
        raise ValueError("lib32 and names32 belong together")
    return MirrorSet(
        capabilities=tuple(sorted(_texts(entry["capabilities"]))),
        lib64=_confined(entry["lib64"]),
        names64=_names(entry["names64"]),
        lib32=_confined(entry["lib32"]) if "lib32" in entry else None,
        names32=names32 or frozenset(),
    )


def _parse_place(value: Any) -> FixedFiles:
    entry = _object(value, PLACE)
    return FixedFiles(
        name=_text(entry["name"]),
        source=_confined(entry["source"]),
        capability=_text(entry["capability"]),
        targets=tuple(_target(target) for target in _list(entry["targets"], 1)),
        looks=_choice(entry["looks"], "all", "one"),
        files=tuple(sorted(_names(entry["files"], 1))),
    )


def _parse_files(value: Any) -> list[dict[str, Any]]:
    """Check the files, all at once where possible: a driver has hundreds of them."""
    files = _list(value)
    texts: list[str] = []
    digests: list[str] = []
    for entry in files:
        if type(entry) is not dict or not FILE <= entry.keys() <= FILE_ALL:
            _object(entry, FILE, FILE_MORE)
        texts += [entry[name] for name in FILE_TEXTS if name in entry]
        if entry["role"] not in ROLES:
            _choice(entry["role"], *ROLES)
        if type(entry.get("size", 0)) is not int or entry.get("size", 0) < 0:
            _whole(entry["size"], 0)
        if type(entry.get("mtime_ns", 0)) is not int:
            _whole(entry["mtime_ns"])
        if "sha256" in entry:
            digests.append(entry["sha256"])
    "".join(texts)  # raises TypeError if one of them is not a string
    if not {64}.issuperset(map(len, digests)) or "".join(digests).strip(HEX):
        for digest in digests:
            _checked(digest, lambda text: _is_digest(text, 64))
    if files:
        _confined("/".join([entry["path"] for entry in files]))  # fails if one path is not confined
    return files


def _parse_watched(value: Any) -> WatchedFile:
    entry = _object(value, WATCHED)
    return WatchedFile(
        _checked(entry["path"], _is_absolute),
        _choice(entry["role"], "driver", "control"),
        _whole(entry["size"], 0),
        _whole(entry["mtime_ns"]),
    )


def _cached(files: list[dict[str, Any]], directory: str) -> frozenset[str]:
    """Return the names that ldconfig would find in a directory: sonames and development links."""
    names = set()
    prefix = f"{directory}/"
    for file in files:
        if not file["path"].startswith(prefix):
            continue
        name = file["path"][len(prefix) :]
        if "/" in name:
            continue  # origin/ is only for the control library
        if file["role"] == "link":
            if name.endswith(".so"):
                names.add(name)
        elif file.get("soname"):
            names.add(file["soname"])
    return frozenset(names)


def parse_manifest(data: bytes, directory: str) -> MirrorManifest:
    """Parse a manifest; ValueError, TypeError and the like mean that it is damaged.

    Whatever vdriver/manifest.schema.json rejects is rejected here as well: a manifest with one
    wrong entry was not written by `tidegate refresh`, so its other entries cannot be trusted.
    """
    found = load_json(data)
    if type(found) is dict and found.get("schema") != SCHEMA:
        raise ValueError(f"schema {show(found.get('schema'), 40)}, not {SCHEMA}")
    document = _object(found, DOCUMENT)
    files = _parse_files(document["files"])
    driver = _object(document["driver"], DRIVER)
    source = _object(document["source"], SOURCE)
    _text(source["root"])
    programs = [_object(p, PROGRAM) for p in _list(document["programs"])]
    binds = [_object(b, PROGRAM) for b in _list(document["binds"])]
    return MirrorManifest(
        directory=directory,
        generation=_checked(document["generation"], _is_generation),
        version=_checked(driver["version"], is_version),
        kind=_choice(driver["kind"], "nvidia", "simulated", "wsl"),
        machine=_choice(document["machine"], "x86_64", "aarch64"),
        sets=tuple(map(_parse_set, _list(document["sets"], 1))),
        programs=tuple(
            MirrorProgram(_confined(p["path"]), _text(p["capability"])) for p in programs
        ),
        places=tuple(map(_parse_place, _list(document["places"]))),
        binds=tuple(MirrorBind(f"/{_absolute(b['path'])}", _text(b["capability"])) for b in binds),
        cached64=_cached(files, "lib64"),
        cached32=_cached(files, "lib32"),
        watch=tuple(map(_parse_watched, _list(source["watch"], 1))),
    )


def hold_generation(driver_dir: str) -> tuple[str, int]:
    """Open and lock the current generation; return its directory and the descriptor.

    `tidegate gc` takes the lock exclusively before it moves a generation away, so a generation that
    is held here stays until the descriptor is closed. If a generation is removed between reading
    the link and taking the lock, the link already points to another generation, and is read
    again.
    """
    link = f"{driver_dir}/current"
    for _ in range(TRIES):
        try:
            directory = os.path.join(driver_dir, os.readlink(link))
        except FileNotFoundError as e:
            raise NoMirrorError(f"no driver mirror at {link}", hint=REFRESH) from e
        except OSError as e:
            raise MirrorMismatchError(
                f"{link}: {e.strerror} (it must be a symbolic link)", hint=REFRESH
            ) from e
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as e:
            raise MirrorMismatchError(f"{directory}: {e.strerror}", hint=REFRESH) from e
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(fd), os.stat(directory)):
                return directory, fd
        except FileNotFoundError:
            pass
        except OSError as e:
            os.close(fd)
            raise MirrorMismatchError(f"{directory}: {e.strerror}", hint=REFRESH) from e
        os.close(fd)
    raise MirrorMismatchError(
        f"{link} points to {show(directory)}, which no longer exists", hint=REFRESH
    )


def read_manifest(driver_dir: str) -> MirrorManifest:
    """Read the manifest of the current generation, and hold that generation."""
    directory, hold = hold_generation(driver_dir)
    path = f"{directory}/manifest.json"
    try:
        fd = os.open("manifest.json", os.O_RDONLY | os.O_CLOEXEC, dir_fd=hold)
        try:
            data = read_bounded(fd, MANIFEST_LIMIT)
        finally:
            os.close(fd)
    except OSError as e:
        raise MirrorMismatchError(f"{path}: {e.strerror}", hint=REFRESH) from e
    if data is None:
        raise MirrorMismatchError(f"{path} is larger than {MANIFEST_LIMIT} bytes", hint=REFRESH)
    try:
        return parse_manifest(data, directory)._replace(hold=hold)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise MirrorMismatchError(
            f"{path} is not a manifest ({show(repr(e))})", hint=REFRESH
        ) from e


def module_version(path: str = MODULE_VERSION) -> str | None:
    """Return the version of the loaded NVIDIA kernel module; None if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return find_version(os.read(fd, VERSION_LIMIT))
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise MirrorMismatchError(
            f"{path}: {e.strerror}", hint="check whether the kernel module works"
        ) from e


def find_version(text: bytes) -> str | None:
    """Return the version in the kernel module's description of itself; None if it has none.

    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Mon Jun ..." and, since the open
    modules, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build".
    """
    for suffix in text.split(b"Kernel Module")[1:]:
        words = suffix.lstrip(b" ")
        if words.startswith(b"for ") and words != suffix:
            machine, blank, behind = words[len(b"for ") :].partition(b" ")
            if machine.split() != [machine]:
                continue
            suffix, words = blank + behind, behind.lstrip(b" ")  # noqa: PLW2901 - drops the machine
        if words == suffix or not words[:1].isdigit():
            continue
        version = words.split(None, 1)[0].decode("ascii", "replace")
        if is_version(version) and words[len(version) :][:1].isspace():
            return version
    return None


def check_fresh(manifest: MirrorManifest, module: str | None) -> None:
    """Refuse a mirror that does not match the loaded kernel module.

    `module` is that module's version. If it is the mirror's version, changed files do not matter:
    an upgraded package leaves the module unchanged until a reboot, and the mirror keeps the
    libraries that match the module, and the control libraries mirrored with them. If no module
    reports a version, the files from which the mirror was made must be unchanged.
    """
    if module is not None and manifest.kind == "nvidia":
        if module != manifest.version:
            raise MirrorMismatchError(
                f"mirror {manifest.generation} is for driver {manifest.version}, but"
                f" the kernel module is {module}",
                hint="reboot or reload the module after a driver update, then run"
                " `tidegate refresh`",
            )
        return
    for _, changed in changed_files(manifest):
        raise MirrorMismatchError(f"mirror {manifest.generation} is stale: {changed}", hint=REFRESH)


def changed_files(manifest: MirrorManifest) -> Iterator[tuple[str, str]]:
    """Yield the role of each watched file that has changed, and a description of the change."""
    for file in manifest.watch:
        try:
            found = os.stat(file.path)
        except OSError as e:
            yield file.role, f"{file.path}: {e.strerror}"
        else:
            if (found.st_size, found.st_mtime_ns) != (file.size, file.mtime_ns):
                yield file.role, f"{file.path} has changed since the mirror was made"


def _choose_set(manifest: MirrorManifest, asked: frozenset[str]) -> MirrorSet:
    """Return the smallest set that has all of `asked`; for `all`, the largest set."""
    if asked == {ALL_CAPABILITIES}:
        return max(manifest.sets, key=lambda s: len(s.capabilities))
    fitting = [s for s in manifest.sets if asked <= set(s.capabilities)]
    if fitting:
        return min(fitting, key=lambda s: len(s.capabilities))
    offered = {c for s in manifest.sets for c in s.capabilities}
    missing = ",".join(sorted(asked - offered)) or f"{','.join(sorted(asked))} together"
    raise NoMirrorError(
        f"this node's driver {manifest.version} does not provide {missing}, only"
        f" {show(','.join(sorted(offered)), 300)}",
        hint="ask for these in tidegate.gpu/capabilities, or run `tidegate refresh` after"
        " installing the rest of the driver",
    )


def choose_share(manifest: MirrorManifest, capabilities: tuple[str, ...]) -> WantedParts:
    """Choose the parts of the mirror for a container that asks for these capabilities.

    The set determines the other parts: a container that gets the set's libraries also gets the
    files that belong to these libraries.
    """
    asked = frozenset(capabilities)
    chosen = _choose_set(manifest, asked - {COMPAT32})
    compat32: Literal["no", "asked", "offered"] = "no"
    if COMPAT32 in asked:
        if chosen.lib32 is None:
            raise NoMirrorError(
                f"this node's driver {manifest.version} has no 32-bit libraries",
                hint="install them and run `tidegate refresh`, or leave compat32 out of"
                " tidegate.gpu/capabilities",
            )
        compat32 = "asked"
    elif ALL_CAPABILITIES in asked and chosen.lib32 is not None:
        compat32 = "offered"
    return WantedParts(
        mirror_set=chosen,
        programs=tuple(p for p in manifest.programs if p.capability in chosen.capabilities),
        places=tuple(p for p in manifest.places if p.capability in chosen.capabilities),
        binds=tuple(b for b in manifest.binds if b.capability in chosen.capabilities),
        names64=tuple(sorted(manifest.cached64 & chosen.names64)),
        names32=tuple(sorted(manifest.cached32 & chosen.names32)) if compat32 != "no" else (),
        compat32=compat32,
    )
