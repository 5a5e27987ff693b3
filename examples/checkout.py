"""Restarts a story with the checkout's own Python, so that it can import the project's modules.

Each story imports this first. `make build` creates that Python, `.venv`, with the packages that
the governor needs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("elftools", "jsonschema", "structlog", "yaml")
NOT_BUILT = 69

own = ROOT / ".venv/bin/python"
if own.exists() and Path(sys.prefix) != ROOT / ".venv":
    os.execv(own, [str(own), *sys.argv])  # noqa: S606 - the same program again
if not all(importlib.util.find_spec(module) for module in NEEDED):
    print(f"run: Python packages are missing; run 'make build' in {ROOT}", file=sys.stderr)
    sys.exit(NOT_BUILT)
sys.path.insert(0, str(ROOT))
