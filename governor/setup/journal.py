"""Record what setup changes, with the former content, in /var/lib/tidegate/setup/journal.json.

The journal is written before the files, so that the files can be restored no matter when the
process ends. A file has one or more steps; a new step begins if the file has been edited since the
last one.
Configuration files may contain secrets, so only root can read the directory.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from governor.errors import SetupError
from governor.setup.files import Root, explained

DIRECTORY = "/var/lib/tidegate/setup"
FILE = f"{DIRECTORY}/journal.json"
VERSION = 1

Part = dict[str, Any]  # a part of a file that setup wrote, as `takeout` defines it


@dataclass
class Step:
    """A file's content before and after one change; None if there is no file."""

    before: bytes | None
    after: bytes | None


@dataclass
class ChangedFile:
    """A changed file: its steps, and the parts that setup wrote."""

    path: str
    parts: list[Part]
    steps: list[Step]


@dataclass
class Journal:
    """The changed files of each engine, and the created directories."""

    engines: dict[str, list[ChangedFile]] = field(default_factory=dict)
    directories: dict[str, str] = field(default_factory=dict)  # path -> engine, in order

    def entry(self, engine: str, path: str) -> ChangedFile | None:
        """Return the entry for a file."""
        return next((e for e in self.engines.get(engine, ()) if e.path == path), None)

    def record(
        self, engine: str, path: str, before: bytes | None, after: bytes | None, parts: list[Part]
    ) -> None:
        """Record a change that is about to be made."""
        entry = self.entry(engine, path)
        if entry is None:
            self.engines.setdefault(engine, []).append(
                ChangedFile(path, parts, [Step(before, after)])
            )
            return
        last = entry.steps[-1]
        if before in (last.before, last.after):
            last.after = after
        else:
            entry.steps.append(Step(before, after))
        # The parts of earlier changes are kept.
        entry.parts = parts + [p for p in entry.parts if p not in parts]


def read(root: Root) -> Journal:
    """Return the journal, an empty one if there is none; raise SetupError if it is invalid."""
    file = root.read(FILE)
    if file is None:
        return Journal()
    try:
        found = json.loads(file.data)
        if found["version"] != VERSION:
            raise SetupError(
                f"{file.path} has version {found['version']}",
                hint="undo with the version of Tidegate that wrote it",
            )
        engines = {
            engine: [
                ChangedFile(
                    entry["path"],
                    list(entry["parts"]),
                    [Step(_bytes(s["before"]), _bytes(s["after"])) for s in entry["steps"]],
                )
                for entry in entries
            ]
            for engine, entries in found["engines"].items()
        }
        return Journal(engines, dict(found["directories"]))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise SetupError(
            f"{file.path} is damaged: {type(e).__name__}: {e}",
            hint="move it away, and take Tidegate out of the engine's files by hand",
        ) from e


def write(root: Root, journal: Journal) -> None:
    """Write the journal; an empty one is removed."""
    if not journal.engines:
        root.remove(FILE)
        return
    document = {
        "version": VERSION,
        "engines": {
            engine: [
                {
                    "path": entry.path,
                    "parts": entry.parts,
                    "steps": [
                        {"before": _text(s.before), "after": _text(s.after)} for s in entry.steps
                    ],
                }
                for entry in entries
            ]
            for engine, entries in journal.engines.items()
        },
        "directories": journal.directories,
    }
    root.write(FILE, (json.dumps(document, indent=1) + "\n").encode(), mode=0o600)


@contextlib.contextmanager
def exclusive(root: Root) -> Iterator[None]:
    """Hold the lock for changes to engines' files; the journal's directory must exist."""
    fd = root.open_directory(DIRECTORY)
    try:
        with explained(root.shown(DIRECTORY)):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
