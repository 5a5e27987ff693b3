"""Locate Tidegate's own files, relative to this code: in a checkout, a wheel or a package.

There is no search path, except /usr as a fallback: code uses the libraries and files that were
installed with it.
"""

from __future__ import annotations

import platform
from pathlib import Path

CODE = Path(__file__).resolve().parents[1]
"""The directory of Tidegate's Python packages."""
PRIVATE = Path("/usr/lib/tidegate")
"""Directory in which packages install code (below `python`) and libraries."""

_BUILT = CODE / "build/meson/libcontrol"
_IN_WHEEL = CODE / "libcontrol/lib"


def triplet(machine: str | None = None) -> str:
    """Return a machine's multiarch triplet, as Debian names it."""
    return f"{machine or platform.machine()}-linux-gnu"


def is_checkout() -> bool:
    """Return whether this code is running from its repository."""
    return (CODE / "meson.build").is_file()


def is_wheel() -> bool:
    """Return whether this code was installed by pip, with its libraries inside."""
    return _IN_WHEEL.is_dir()


def library_dir() -> Path:
    """Return the directory of the arbiter library."""
    if is_checkout() and _BUILT.is_dir():
        return _BUILT
    if is_wheel():
        return _IN_WHEEL
    # A prefix other than /usr has the same layout.
    return CODE.parent if (CODE.parent.name, CODE.name) == ("tidegate", "python") else PRIVATE


def control_dir() -> Path:
    """Return the directory of the control libraries, which are copied into a mirror."""
    directory = library_dir()
    return directory if directory == _BUILT else directory / triplet()


def shared_file(name: str) -> Path | None:
    """Return the path of a file in packaging/, or None if it is missing."""
    if is_checkout():
        directories = [CODE / "packaging"]
    elif is_wheel():
        directories = [CODE / "governor/share"]
    else:
        directories = [library_dir().parents[1] / "share/tidegate", Path("/usr/share/tidegate")]
    return next((d / name for d in directories if (d / name).is_file()), None)
