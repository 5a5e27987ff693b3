"""Reads and checks a generation's manifest.json. The format is defined in manifest.schema.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vdriver.errors import MirrorError

SCHEMA = 2
SCHEMA_FILE = Path(__file__).with_name("manifest.schema.json")
NAME = "manifest.json"
CURRENT = "current"  # the link to the generation in force, in the generations' directory


@dataclass(frozen=True)
class ManifestFile:
    """One file or link in a generation; fields that do not apply to its role are None."""

    path: str
    role: str
    capability: str | None = None
    soname: str | None = None
    build_id: str | None = None
    size: int | None = None
    mtime_ns: int | None = None
    sha256: str | None = None
    target: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class CapabilitySet:
    """The directories of libraries, and the names in them, for these capabilities."""

    capabilities: tuple[str, ...]
    lib64: str
    names64: tuple[str, ...]
    lib32: str | None = None
    names32: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Program:
    """A program that is mounted in /usr/bin."""

    path: str
    capability: str


@dataclass(frozen=True)
class Place:
    """Files that programs look for in fixed directories; `looks` is explained in the schema."""

    name: str
    source: str
    capability: str
    targets: tuple[str, ...]
    looks: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Bind:
    """A directory on the host that is mounted in containers at the same path, if it exists."""

    path: str
    capability: str


@dataclass(frozen=True)
class Watched:
    """A file whose change makes the generation stale; `role` is `driver` or `control`."""

    path: str
    role: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Manifest:
    """The description of a generation, as stored in its manifest.json."""

    generation: str
    version: str
    kind: str
    machine: str
    sets: tuple[CapabilitySet, ...]
    programs: tuple[Program, ...]
    places: tuple[Place, ...]
    binds: tuple[Bind, ...]
    files: tuple[ManifestFile, ...]
    root: str
    watch: tuple[Watched, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document that the schema describes."""
        return {
            "schema": SCHEMA,
            "generation": self.generation,
            "driver": {"version": self.version, "kind": self.kind},
            "machine": self.machine,
            **{
                name: [_present(value) for value in getattr(self, name)]
                for name in ("sets", "programs", "places", "binds", "files")
            },
            "source": {"root": self.root, "watch": [_present(w) for w in self.watch]},
        }


def read_manifest(path: str | Path) -> Manifest:
    """Read the manifest at `path`, a file or a generation; raise MirrorError if that fails."""
    file = Path(path)
    if file.is_dir():
        file /= NAME
    try:
        return parse_manifest(file.read_bytes())
    except MirrorError as e:
        raise MirrorError(f"{file}: {e.message}", hint="run tidegate refresh") from e
    except OSError as e:
        reason = e.strerror or str(e)
        raise MirrorError(f"{file}: {reason}", hint="run tidegate refresh") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise MirrorError(
            f"{file}: not a manifest ({type(e).__name__}: {e})", hint="run tidegate refresh"
        ) from e


def parse_manifest(data: bytes) -> Manifest:
    """Return the manifest in `data`.

    Raise ValueError, KeyError, TypeError or MirrorError if it is invalid.
    """
    doc = json.loads(data)
    if doc["schema"] != SCHEMA:
        raise ValueError(f"schema {doc['schema']!r}, but this program reads {SCHEMA}")
    validate(doc)
    return Manifest(
        generation=doc["generation"],
        version=doc["driver"]["version"],
        kind=doc["driver"]["kind"],
        machine=doc["machine"],
        sets=tuple(CapabilitySet(**_tuples(s)) for s in doc["sets"]),
        programs=tuple(Program(**p) for p in doc["programs"]),
        places=tuple(Place(**_tuples(p)) for p in doc["places"]),
        binds=tuple(Bind(**b) for b in doc["binds"]),
        files=tuple(ManifestFile(**f) for f in doc["files"]),
        root=doc["source"]["root"],
        watch=tuple(Watched(**w) for w in doc["source"]["watch"]),
    )


def validate(document: dict[str, Any]) -> None:
    """Validate `document` against the schema; raise MirrorError if it does not match."""
    import jsonschema

    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(document)
    )
    if error is not None:
        raise MirrorError(
            f"manifest: {error.json_path}: {error.message}"[:300],
            hint="report this with the output of tidegate refresh --dry-run --json",
        )


def _present(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields as JSON, without those that are None."""
    return {
        k: list(v) if isinstance(v, tuple) else v for k, v in vars(value).items() if v is not None
    }


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
