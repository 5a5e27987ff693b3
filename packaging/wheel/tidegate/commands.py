"""The entry points of the commands that pip creates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

CODE = Path(__file__).resolve().parent / "python"


def _run(module: str) -> int:
    sys.path.insert(0, str(CODE))
    return cast("Callable[[], int]", import_module(module).main)()


def tidegate() -> int:
    """Run `tidegate`."""
    return _run("governor.cli")


def tidegate_governor() -> int:
    """Run `tidegate-governor`."""
    return _run("governor.daemon")


def tidegate_dra() -> int:
    """Run `tidegate-dra`."""
    return _run("kube.main")


def tidegate_device_plugin() -> int:
    """Run `tidegate-device-plugin`."""
    return _run("kube.plugin")
