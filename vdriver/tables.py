"""Reads `libraries.toml`: which capability each driver file belongs to, and where drivers are.

tools/driver_tables.py validates the document against libraries.schema.json. At run time only a
missing key or a value of the wrong type is an error: importing jsonschema takes 60 ms.
"""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vdriver.errors import DriverError

FILE = Path(__file__).with_name("libraries.toml")
UNKNOWN = "compute"
COMPAT32 = "compat32"  # the capability for 32-bit libraries, whatever they are used for


@dataclass(frozen=True)
class PlaceRule:
    """Files that programs look for in fixed directories, on a host and in a container.

    The fields are explained above the first [[place]] in libraries.toml.
    """

    name: str
    capability: str
    files: tuple[str, ...]
    host: tuple[str, ...]
    container: tuple[str, ...]
    looks: str
    library: str | None
    otherwise: Mapping[str, str]


@dataclass(frozen=True)
class Wsl:
    """The location of the Windows driver in WSL 2."""

    marker: str
    directory: str
    libraries: tuple[str, ...]
    programs: tuple[str, ...]
    stores: str
    store: str


@dataclass(frozen=True)
class UnsupportedSystem:
    """A system with a driver that Tidegate does not support, recognised by a file."""

    marker: str
    name: str
    hint: str


@dataclass(frozen=True)
class Tables:
    """The content of `libraries.toml`: facts about driver files of all versions."""

    libraries: Mapping[str, str]
    programs: Mapping[str, str]
    base: tuple[str, ...]
    implies: Mapping[str, tuple[str, ...]]
    companions: tuple[str, ...]
    directories: tuple[str, ...]
    below: tuple[str, ...]
    program_directories: tuple[str, ...]
    roots: tuple[str, ...]
    places: tuple[PlaceRule, ...]
    sockets: Mapping[str, str]
    wsl: Wsl
    refused: tuple[UnsupportedSystem, ...]

    def knows(self, file_name: str) -> bool:
        """Return whether the table names a capability for a library of this name."""
        return stem(file_name) in self.libraries

    def capability(self, file_name: str) -> str:
        """Return the capability of a library by its file name; `compute` if it is unknown."""
        return self.libraries.get(stem(file_name), UNKNOWN)

    def is_companion(self, file_name: str) -> bool:
        """Return whether the name of a driver file has a version other than the driver's."""
        return any(fits(file_name, p) for p in self.companions)

    def is_optional(self, file_name: str) -> bool:
        """Return whether a library of this name may be missing from a complete driver."""
        return stem(file_name) in {stem(p) for p in self.companions}

    def closed(self, capabilities: Iterable[str]) -> tuple[str, ...]:
        """Return `capabilities` with those that they imply and those that every container has."""
        pending, done = [*self.base, *capabilities], set[str]()
        while pending:
            capability = pending.pop()
            if capability not in done:
                done.add(capability)
                pending += self.implies.get(capability, ())
        return tuple(sorted(done))

    def combinations(self, offered: Iterable[str]) -> tuple[tuple[str, ...], ...]:
        """Return every set of capabilities that a container may get, smallest first."""
        optional = sorted(set(offered) - set(self.base))
        sets = {
            self.closed(chosen)
            for n in range(len(optional) + 1)
            for chosen in itertools.combinations(optional, n)
        }
        return tuple(sorted(sets, key=lambda s: (len(s), s)))


def fits(name: str, pattern: str) -> bool:
    """Return whether a file name matches a shell pattern.

    Few names match, so the text before the star is compared first. Compiling a regular expression
    takes longer than this comparison does for all names in a directory.
    """
    head, star, _ = pattern.partition("*")
    return name.startswith(head) and fnmatchcase(name, pattern) if star else name == pattern


def stem(file_name: str) -> str:
    """Return the part of a library's file name before `.so`."""
    return file_name.partition(".so")[0]


@functools.cache
def read_tables(path: Path = FILE) -> Tables:
    """Read the file, or raise DriverError with a one-line description of the first fault."""
    try:
        return parse_tables(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as e:  # ValueError: not UTF-8, or not TOML
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise _fault(reason or "cannot be read") from e


def parse_tables(data: Mapping[str, Any]) -> Tables:
    """Return the tables in a document in the format of `libraries.toml`.

    Raise DriverError for the first key that is missing or has a value of the wrong type.
    """
    document = _Table("", data)
    libraries: dict[str, str] = {}
    programs: dict[str, str] = {}
    for capability, entry in document.table("capability").tables():
        libraries |= dict.fromkeys(entry.texts("libraries"), capability)
        programs |= dict.fromkeys(entry.texts("programs", ()), capability)
    capabilities = document.table("capabilities")
    implies = capabilities.table("implies")
    layouts = document.array("layout")
    search = document.table("search")
    wsl = document.table("wsl")
    return Tables(
        libraries=libraries,
        programs=programs,
        base=capabilities.texts("base"),
        implies={k: implies.texts(k) for k in implies.content},
        companions=document.table("companions").texts("patterns"),
        directories=_each_once(d for one in layouts for d in one.texts("libraries")),
        below=search.texts("below"),
        program_directories=_each_once(d for one in layouts for d in one.texts("programs")),
        roots=search.texts("roots"),
        places=tuple(_place(p) for p in document.array("place")),
        sockets={s.text("path"): s.text("capability") for s in document.array("socket")},
        wsl=Wsl(
            wsl.text("marker"),
            wsl.text("directory"),
            wsl.texts("libraries"),
            wsl.texts("programs"),
            wsl.text("stores"),
            wsl.text("store"),
        ),
        refused=tuple(
            UnsupportedSystem(r.text("marker"), r.text("name"), r.text("hint"))
            for r in document.array("refused")
        ),
    )


def _place(place: _Table) -> PlaceRule:
    otherwise = place.table("otherwise") if "otherwise" in place.content else None
    return PlaceRule(
        place.text("name"),
        place.text("capability"),
        place.texts("files"),
        place.texts("host"),
        place.texts("container"),
        place.text("looks"),
        place.text("library") if "library" in place.content else None,
        {k: otherwise.text(k) for k in otherwise.content} if otherwise else {},
    )


class _Table:
    """A table in the document; a missing key or a value of the wrong type raises DriverError."""

    def __init__(self, name: str, content: Mapping[str, Any]) -> None:
        self.name = name  # as written in the file: [wsl], [[place]] number 3
        self.content = content

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self._other(key, "a string")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        if default is not None and key not in self.content:
            return default
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self._other(key, "a list of strings")
        return tuple(value)

    def table(self, key: str) -> _Table:
        value = self._get(key)
        if not isinstance(value, Mapping):
            raise self._other(key, "a table")
        if self.name.endswith("]"):
            return _Table(f"{self.name[:-1]}.{key}]", value)
        return _Table(f"{self.name}, {key}" if self.name else f"[{key}]", value)

    def tables(self) -> tuple[tuple[str, _Table], ...]:
        return tuple((key, self.table(key)) for key in self.content)

    def array(self, key: str) -> tuple[_Table, ...]:
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(v, Mapping) for v in value):
            raise self._other(key, f"tables, each under [[{key}]]")
        return tuple(_Table(f"[[{key}]] number {i}", v) for i, v in enumerate(value, 1))

    def _get(self, key: str) -> Any:
        if key not in self.content:
            raise _fault(f"{self.name or 'the file'} has no {key}")
        return self.content[key]

    def _other(self, key: str, kind: str) -> DriverError:
        where = f"{self.name}, {key}" if self.name else key
        return _fault(f"{where}: must be {kind}, not {self.content[key]!r:.40}")


def _fault(what: str) -> DriverError:
    return DriverError(
        f"vdriver/libraries.toml: {what}",
        hint="correct it according to vdriver/libraries.schema.json, or reinstall Tidegate",
    )


def _each_once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
