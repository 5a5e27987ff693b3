"""Parse the version that a program prints for `--version`."""

from __future__ import annotations

import re

# Must match neither the v2 of containerd/v2, a part of a word, nor the 3.4 of v2.3.4.
_VERSION = re.compile(r"(?<![\w.])v?([0-9]+)\.([0-9]+)(?:\.([0-9]+))?")


def parse_version(text: str) -> tuple[int, int, int] | None:
    """Return the major, minor and patch numbers of the first version in the text.

    A missing patch number is 0.
    """
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None
