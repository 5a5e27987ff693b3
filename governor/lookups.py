"""Collect functions that programs looked up but the control library does not recognise.

The names are in the header of the container's ledger, where any of its processes may write anything
at any time. Therefore the number of names per container is limited, and only possible names of
driver functions are accepted.
"""

from __future__ import annotations

import re
from mmap import mmap

from libcontrol import layout, pages

MOST = layout.N_UNKNOWN
"""Maximum number of names that are kept for a container."""

_NAME = re.compile(rb"cu[A-Za-z0-9_]{1,44}(?:@[0-9]{1,6})?")
"""A name, with the requested CUDA version if it is an unknown form of a known function."""


class UnknownFunctions:
    """Collects new names from a ledger."""

    def __init__(self) -> None:
        self._names: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names that have been found so far, in order."""
        return tuple(self._names)

    def read(self, ledger: mmap) -> list[str]:
        """Return the names in the ledger that were not found before."""
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
