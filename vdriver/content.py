"""Compares a generation's files with its manifest, for both refresh and verify."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vdriver import manifest as manifests
from vdriver.elf import read_library
from vdriver.errors import LibraryError
from vdriver.manifest import Manifest, ManifestFile
from vdriver.plan import BIN, DATA, LIB32, LIB64, ORIGIN, SETS

# Directories that a generation may have even if no file in the manifest is in them.
DIRECTORIES = (".", LIB64, f"{LIB64}/{ORIGIN}", LIB32, BIN, DATA, SETS)
LOADED = ("library", "control")  # roles of the files that programs load


@dataclass(frozen=True)
class Fault:
    """A difference from the manifest: `path` is relative to the generation."""

    path: str
    reason: str


def digest(manifest: Manifest) -> str:
    """Return the digest in a generation's name: the first 12 hex digits of a SHA-256.

    The hash covers the manifest, and through it all content. It excludes the generation's name and
    the fields for the origin and the time of the content.
    """
    document = manifest.to_json()
    del document["generation"], document["source"]
    for file in document["files"]:
        for field in ("source", "mtime_ns"):
            file.pop(field, None)
    document["files"].sort(key=lambda f: f["path"])
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_content(generation: Path, manifest: Manifest, *, read: bool = True) -> Iterator[Fault]:
    """Yield every difference between a generation and its manifest, in names as well as content.

    Without `read` no file is opened: only names, file types, links, modes, owners and sizes are
    compared.
    """
    yield from _check_name(generation, manifest)
    tree = _Tree(generation, read=read)
    yield from tree.unreadable
    files: dict[str, ManifestFile] = {}
    for file in manifest.files:
        if file.path in files:
            yield Fault(file.path, "is in the manifest twice")
        files[file.path] = file
    for file in files.values():
        yield from _check_file(tree, file, manifest)
    expected = {manifests.NAME, *files}
    for entry in manifest.sets:
        for directory, names, base in (
            (entry.lib64, entry.names64, LIB64),
            (entry.lib32, entry.names32, LIB32),
        ):
            if directory is not None:
                yield from _check_set(tree, files, directory, names or (), base, expected)
    for place in manifest.places:
        yield from _check_names(place.source, tree.names(place.source), place.files)
        for name in place.files:
            if f"{place.source}/{name}" not in files:
                yield Fault(f"{place.source}/{name}", f"belongs to {place.name}, but has no entry")
    for program in manifest.programs:
        if program.path not in files or files[program.path].role != "program":
            yield Fault(
                program.path,
                "is among the manifest's programs, but has no file entry with the role 'program'",
            )
    yield from _check_unnamed(tree, expected)


class _Tree:
    """All names in a generation, each with its status; links are not followed."""

    def __init__(self, root: Path, *, read: bool) -> None:
        self.root = root
        self.read = read  # whether file content is read
        self.entries: dict[str, os.stat_result] = {".": root.lstat()}
        self.unreadable: list[Fault] = []
        pending = ["."]
        while pending:
            directory = pending.pop()
            try:
                with os.scandir(root / directory) as found:
                    for entry in found:
                        path = entry.name if directory == "." else f"{directory}/{entry.name}"
                        self.entries[path] = entry.stat(follow_symlinks=False)
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(path)
            except OSError as e:
                self.unreadable.append(Fault(directory, f"cannot be read: {e.strerror}"))

    def names(self, directory: str) -> set[str]:
        """Return the names in a directory, except those of subdirectories."""
        prefix = f"{directory}/"
        return {
            path.removeprefix(prefix)
            for path, status in self.entries.items()
            if path.startswith(prefix)
            and "/" not in path.removeprefix(prefix)
            and not stat.S_ISDIR(status.st_mode)
        }

    def text(self, path: str) -> str:
        """Return the target of a link, unresolved."""
        return str((self.root / path).readlink())

    def find_link_fault(self, path: str) -> str | None:
        """Return the reason if a link is dangling or points outside the generation, else None."""
        text = self.text(path)
        target = os.path.normpath(f"{Path(path).parent}/{text}")
        if text.startswith("/") or target not in self.entries:
            return f"is a link to {text}, which is not in the generation"
        return None

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a regular file's content."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(self.root / path, flags), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def _check_name(generation: Path, manifest: Manifest) -> Iterator[Fault]:
    if generation.name != manifest.generation:
        yield Fault(".", f"its manifest is that of {manifest.generation}")
    named = f"{manifest.version}-{digest(manifest)}"
    if manifest.generation != named:
        yield Fault(manifests.NAME, f"names {manifest.generation}, but its entries give {named}")


def _check_file(tree: _Tree, file: ManifestFile, manifest: Manifest) -> Iterator[Fault]:
    status = tree.entries.get(file.path)
    if status is None:
        yield Fault(file.path, "is missing")
        return
    if file.role == "link":
        if not stat.S_ISLNK(status.st_mode):
            yield Fault(
                file.path, f"is {_kind(status)}, but the manifest has a link to {file.target}"
            )
        elif tree.text(file.path) != file.target:
            yield Fault(
                file.path,
                f"is a link to {tree.text(file.path)}, but the manifest has one to {file.target}",
            )
        elif reason := tree.find_link_fault(file.path):
            yield Fault(file.path, reason)
        return
    if not stat.S_ISREG(status.st_mode):
        yield Fault(file.path, f"is {_kind(status)}, but the manifest has a file ({file.role})")
        return
    if file.role == "program" and status.st_mode & 0o111 != 0o111:
        yield Fault(file.path, f"has mode {_mode(status)}, but must be executable by all")
    if status.st_size != file.size:
        yield Fault(file.path, f"has {status.st_size} bytes, but {file.size} in the manifest")
        return
    if not tree.read:
        return
    try:
        found = tree.sha256(file.path)
    except OSError as e:
        yield Fault(file.path, f"cannot be read: {e.strerror}")
        return
    if found != file.sha256:
        yield Fault(
            file.path,
            f"has the SHA-256 {found[:12]}..., but {str(file.sha256)[:12]}... in the manifest",
        )
    elif file.role in (*LOADED, "origin"):
        yield from _check_library(tree.root, file, manifest)


def _check_library(root: Path, file: ManifestFile, manifest: Manifest) -> Iterator[Fault]:
    try:
        library = read_library(root / file.path)
    except LibraryError as e:
        yield Fault(file.path, e.message.removeprefix(f"{root / file.path}: "))
        return
    bits = 32 if file.path.startswith(f"{LIB32}/") else 64
    if library.bits != bits or (bits == 64 and library.machine != manifest.machine):
        yield Fault(
            file.path,
            f"is {library.bits}-bit {library.machine}, which does not belong there",
        )
    if file.soname is not None and library.soname != file.soname:
        yield Fault(
            file.path, f"has the soname {library.soname}, but {file.soname} in the manifest"
        )


def _check_set(  # noqa: PLR0917 - private, and called once
    tree: _Tree,
    files: dict[str, ManifestFile],
    directory: str,
    names: tuple[str, ...],
    base: str,
    expected: set[str],
) -> Iterator[Fault]:
    """Compare a set's directory with the set's names, and each entry with the one in `base`.

    `base` is lib64 or lib32. The paths that belong to the set are added to `expected`.
    """
    if directory not in tree.entries:
        yield Fault(directory, "is missing")
        return
    yield from _check_names(directory, tree.names(directory), names)
    pairs = [(f"{directory}/{name}", f"{base}/{name}") for name in names]
    if base == LIB64:
        origins = tree.names(f"{directory}/{ORIGIN}")
        known = tree.names(f"{LIB64}/{ORIGIN}")
        pairs += [(f"{directory}/{ORIGIN}/{n}", f"{LIB64}/{ORIGIN}/{n}") for n in origins & known]
        for name in names:
            file = files.get(f"{LIB64}/{name}")
            if file is not None and file.role == "control":
                origin = f"{name.partition('.so')[0]}-origin.so.1"
                if origin not in origins:
                    yield Fault(
                        f"{directory}/{ORIGIN}/{origin}", f"is missing, but {name} needs it"
                    )
    for path, like in pairs:
        expected.add(path)
        if like not in files:
            yield Fault(path, f"has no entry in the manifest, where its name would be {like}")
        elif path != like and path in tree.entries and like in tree.entries:
            yield from _check_same(tree, path, like, files[like])


def _check_same(tree: _Tree, path: str, like: str, file: ManifestFile) -> Iterator[Fault]:
    status, other = tree.entries[path], tree.entries[like]
    if stat.S_IFMT(status.st_mode) != stat.S_IFMT(other.st_mode):
        yield Fault(path, f"is {_kind(status)}, but {like} is {_kind(other)}")
    elif stat.S_ISLNK(status.st_mode):
        if tree.text(path) != tree.text(like):
            yield Fault(
                path, f"is a link to {tree.text(path)}, but {like} is one to {tree.text(like)}"
            )
        elif reason := tree.find_link_fault(path):
            yield Fault(path, reason)
    elif (status.st_dev, status.st_ino) != (other.st_dev, other.st_ino):
        if not tree.read:
            if status.st_size != other.st_size:
                yield Fault(path, f"has {status.st_size} bytes, but {like} has {other.st_size}")
            return
        try:
            if tree.sha256(path) != file.sha256:
                yield Fault(path, f"differs from {like} in content")
        except OSError as e:
            yield Fault(path, f"cannot be read: {e.strerror}")


def _check_names(directory: str, found: set[str], names: tuple[str, ...]) -> Iterator[Fault]:
    for name in sorted(set(names) - found):
        yield Fault(f"{directory}/{name}", "is missing")
    for name in sorted(found - set(names)):
        yield Fault(f"{directory}/{name}", f"is not among the manifest's names for {directory}")


def _check_unnamed(tree: _Tree, expected: set[str]) -> Iterator[Fault]:
    """Yield entries that the manifest does not name, and those with wrong permissions or owners."""
    directories = set(DIRECTORIES)
    for path in expected:
        directories |= {str(p) for p in Path(path).parents}
    for path, status in sorted(tree.entries.items()):
        if stat.S_ISDIR(status.st_mode):
            if path not in directories:
                yield Fault(path, "is a directory that the manifest does not name")
        elif path not in expected:
            yield Fault(path, "is not in the manifest")
        if stat.S_ISLNK(status.st_mode):
            continue
        wanted = 0o555 if stat.S_ISDIR(status.st_mode) else 0o444
        if status.st_mode & wanted != wanted or status.st_mode & 0o7022:
            yield Fault(
                path,
                f"has mode {_mode(status)}, but must be readable by all and writable only by its"
                " owner",
            )
        if status.st_uid not in (0, os.geteuid()):
            yield Fault(path, f"belongs to user {status.st_uid}, but must belong to root")


def _kind(status: os.stat_result) -> str:
    kinds = {stat.S_IFREG: "a file", stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a special file")


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"
