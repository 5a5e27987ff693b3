"""Checks vdriver/libraries.toml against vdriver/libraries.schema.json; prints a line per fault.

At run time only the parts that are needed are checked (`vdriver.tables`), because importing
jsonschema takes 60 ms.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "vdriver/libraries.toml"
SCHEMA = ROOT / "vdriver/libraries.schema.json"


def faults(document: dict[str, Any]) -> list[str]:
    """Return the schema's objections to a document like `libraries.toml`, one line each."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{_place(document, list(e.absolute_path))}: {e.message}" for e in errors]


def _place(document: Any, path: list[str | int]) -> str:
    """Return the path to a value in the notation of the file: `[[place]] gbm, looks`."""
    words: list[str] = []
    for i, step in enumerate(path):
        within, document = document, document[step]
        if isinstance(step, int) and i == 1 and isinstance(document, dict):
            names = (document[k] for k in ("name", "version", "path", "marker") if k in document)
            words[-1] = f"[[{words[-1]}]] {next(names, f'number {step + 1}')}"
        elif isinstance(within, list):
            words.append(f"entry {int(step) + 1}")
        else:
            words.append(str(step))
    return ", ".join(words) or "the file"


def main() -> int:
    """Check the file; return the exit status."""
    try:
        found = faults(tomllib.loads(TABLES.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as e:
        found = [str(e)]
    for fault in found:
        print(f"{TABLES.relative_to(ROOT)}: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
