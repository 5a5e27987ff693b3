"""Functions that a container's programs looked up and that the control library does not know.

The names are in the header of the container's ledger, where any of its processes may write
anything at any time. So only so many are ever remembered of a container, and only what could be the
name of a function of the driver.
"""

from __future__ import annotations

import re
from mmap import mmap

from libcontrol import layout, pages

MOST = layout.N_UNKNOWN
"""Number of names that are remembered of a container, however often it writes others."""

_NAME = re.compile(rb"cu[A-Za-z0-9_]{1,44}(?:@[0-9]{1,6})?")
"""A name, and the CUDA version that was asked for where a form of a known function is meant."""


class UnknownFunctions:
    """Finds new names in a ledger."""

    def __init__(self) -> None:
        self._names: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names that were found so far, in the order in which they were."""
        return tuple(self._names)

    def read(self, ledger: mmap) -> list[str]:
        """Return the names that are in the ledger for the first time."""
        found = []
        for place in pages.read_unknown(ledger):
            name = place.partition(b"\0")[0]
            if not _NAME.fullmatch(name) or len(self._names) >= MOST:
                continue
            text = name.decode("ascii")
            if text not in self._names:
                self._names.append(text)
                found.append(text)
        return found
