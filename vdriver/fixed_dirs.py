"""Finds the driver's files for fixed directories in a container: configuration, modules, firmware.

All of them are optional. The rules come from libraries.toml; each file found is a DataFile.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from vdriver.driver import DataFile
from vdriver.reader import TreeReader
from vdriver.tables import PlaceRule, fits

TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
ALTERNATIVE = re.compile(r"/nvidia/([^/]+)$")
TABLE = "libraries.toml"  # the source of a file that the host lacks
MAX_TEXT = 1 << 20  # bytes; the largest known file is 7 KiB long


def find_data(
    reader: TreeReader,
    rules: Sequence[PlaceRule],
    version: str,
    machine: str,
    *,
    directories: Sequence[str],
    libraries: Collection[str],
) -> tuple[DataFile, ...]:
    """Return the files for each place, the first one with each name; skip unusable files.

    `libraries` contains the names of the driver's libraries, each without `.so` and what follows.
    """
    found: dict[tuple[str, str], DataFile] = {}
    words = {"version": version, "triplet": TRIPLETS[machine]}
    alternatives = alternatives_of(directories)
    for rule in rules:
        patterns = [p.format(version=version) for p in rule.files]
        for directory in _expanded(rule.host, words, directories, alternatives):
            for name in reader.tree.names(directory):
                if (rule.name, name) in found or not any(fits(name, p) for p in patterns):
                    continue
                file = _file(reader, rule.name, f"{directory}/{name}", machine)
                if file is not None:
                    found[rule.name, name] = file
        if rule.library in libraries and not any(place == rule.name for place, _ in found):
            for name, text in rule.otherwise.items():
                content = text.encode() + b"\n"
                found[rule.name, name] = DataFile(
                    rule.name, name, None, TABLE, len(content), 0, None, content
                )
    return tuple(found[key] for key in sorted(found))


def alternatives_of(directories: Sequence[str]) -> tuple[str, ...]:
    """Return Debian's names for the drivers in these directories, like `current` or `tesla-470`."""
    return tuple(dict.fromkeys(m[1] for d in directories if (m := ALTERNATIVE.search(d))))


def _expanded(
    templates: Sequence[str],
    words: dict[str, str],
    directories: Sequence[str],
    alternatives: Sequence[str],
) -> Iterator[str]:
    for template in templates:
        if "{libraries}" in template:
            yield from (template.format(libraries=d, **words) for d in directories)
        elif "{alternative}" in template:
            yield from (template.format(alternative=a, **words) for a in alternatives)
        else:
            yield template.format(**words)


def _file(reader: TreeReader, place: str, path: str, machine: str) -> DataFile | None:
    tree = reader.tree
    name = os.path.basename(path)  # noqa: PTH119 - a name, not a file
    library = content = None
    if ".so" in name:
        read = reader.library(path)
        if read is None:
            return None
        real, library = read
        # 32-bit libraries have other directories, and libraries for another machine are useless.
        if library.bits != 64 or library.machine != machine:
            return None
    else:
        regular = reader.regular(path)
        if regular is None:
            return None
        real = regular
        if name.endswith((".json", ".icd")):
            text = tree.read(real, MAX_TEXT)
            content = None if text is None else portable(name, text)
    host = tree.host(real)
    try:
        status = os.lstat(host)
    except OSError as e:
        reader.skip(path, e.strerror or str(e))
        return None
    return DataFile(place, name, real, host, status.st_size, status.st_mtime_ns, library, content)


def portable(name: str, text: bytes) -> bytes | None:
    """Return the text with absolute paths of libraries shortened to file names.

    Return None if it has no such path, or if its format is unknown; the file is then mirrored
    unchanged. On NixOS and in some clouds these files name libraries by paths that do not exist in
    containers.
    """
    try:
        if name.endswith(".icd"):
            lines = text.decode().splitlines()
            changed = [_base(line) for line in lines]
            return None if changed == lines else ("\n".join(changed) + "\n").encode()
        document = json.loads(text)
        changed_document = _relative(document)
    except (ValueError, RecursionError):
        return None  # an unknown format
    if changed_document == document:
        return None
    return json.dumps(changed_document, indent=4).encode() + b"\n"


def _relative(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: _base(v) if k == "library_path" and isinstance(v, str) else _relative(v)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_relative(v) for v in value]
    return value


def _base(path: str) -> str:
    return path.rpartition("/")[2] if path.startswith("/") else path
