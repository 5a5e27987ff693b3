"""Command lines of child processes that run a module of this package as root."""

from __future__ import annotations

import sys
from collections.abc import Sequence

START = """\
import importlib, sys
sys.path[:] = sys.argv.pop(1).split("\\n")
importlib.import_module(sys.argv.pop(1)).main()
"""
"""The program of the process. -I makes Python ignore the environment, as is needed for code that
runs as root. The scripts of a package set the module path themselves, so it is an argument."""


def module_command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that calls `main` of a module with arguments in `sys.argv`."""
    paths = "\n".join(path for path in sys.path if path.startswith("/"))
    return [sys.executable, "-I", "-c", START, paths, module, *arguments]
