"""Build the commands and environments of child processes that run a Tidegate module as root."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

START = """\
import importlib, sys
sys.path[:] = sys.argv.pop(1).split("\\n")
importlib.import_module(sys.argv.pop(1)).main()
"""
"""The program that the process runs. -I makes Python ignore the environment, as is needed for code
that runs as root. The module path is an argument, because the packaged scripts that set it are not
run in the child."""


def module_command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that calls `main` of a module with arguments in `sys.argv`."""
    paths = "\n".join(path for path in sys.path if path.startswith("/"))
    return [sys.executable, "-I", "-c", START, paths, module, *arguments]


def driver_environment(libcuda: Path) -> dict[str, str]:
    """Return the environment of a child that loads a driver's own libcuda.

    libcuda opens other libraries by name, such as the PTX compiler. These are in libcuda's own
    directory or, in the mirror, in the directory above it.
    """
    return {**os.environ, "LD_LIBRARY_PATH": f"{libcuda.parent}:{libcuda.parent.parent}"}
