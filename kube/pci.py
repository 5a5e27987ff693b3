"""Finds the PCIe root of each GPU in sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def find_roots(addresses: Iterable[str | None], sysfs: str = "/sys") -> dict[str, str]:
    """Return the PCIe root (`pci0000:3a`) of each PCI address; omit addresses that sysfs lacks."""
    roots = {}
    for address in addresses:
        if not address or not _ADDRESS.fullmatch(address):
            continue
        try:
            path = (Path(sysfs) / "bus/pci/devices" / address).resolve(strict=True)
        except OSError:
            continue
        root = next((part for part in path.parts if _ROOT.fullmatch(part)), None)
        if root is not None and path.name == address:
            roots[address] = root
    return roots
