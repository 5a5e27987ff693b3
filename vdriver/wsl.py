"""Finds the driver in WSL 2, where Windows provides it.

Its libraries have no version in their names, and there is no NVIDIA kernel module. The version is
that of the newest driver store, whose INF file has it in Windows' notation ("32.0.15.6094" is
560.94: the last five digits). The libraries open the store by its path, so a container gets the
store at the same path.
"""

from __future__ import annotations

import re

from vdriver.driver import Driver, DriverFile
from vdriver.errors import DriverError
from vdriver.manifest import Bind
from vdriver.reader import TreeReader
from vdriver.tables import Tables, fits
from vdriver.tree import Tree

MAX_INF = 4 << 20
DRIVER_VERSION = re.compile(r"^\s*DriverVer\s*=[^,\n]*,\s*([0-9.]+)", re.MULTILINE | re.IGNORECASE)


def find_wsl(reader: TreeReader, tables: Tables) -> Driver | None:
    """Return the WSL driver below the root, or None if this is not WSL."""
    tree, wsl = reader.tree, tables.wsl
    if tree.regular(wsl.marker) is None:
        return None
    store, version = _store(tree, tables)
    libraries: dict[str, DriverFile] = {}
    for name in tree.names(wsl.directory):
        if any(fits(name, p) for p in wsl.libraries) and (
            read := reader.library(f"{wsl.directory}/{name}")
        ):
            libraries[name] = DriverFile(name, read[0], tables.capability(name), read[1])
    try:
        cuda, nvml = libraries.pop("libcuda.so.1"), libraries.pop("libnvidia-ml.so.1")
    except KeyError as e:
        raise DriverError(
            f"{tree.host(wsl.directory)} has no {e.args[0]} that can be read",
            hint="update the NVIDIA driver in Windows",
        ) from e
    libraries.pop("libcuda.so.1.1", None)  # the file behind libcuda.so.1
    programs = [
        DriverFile(name, read[0], tables.programs[name], read[1])
        for name in wsl.programs
        if (read := reader.library(f"{wsl.directory}/{name}"))
    ]
    return Driver(
        root=tree.root,
        version=version,
        kind="wsl",
        machine=cuda.library.machine,
        kernel_version=None,
        cuda=cuda,
        nvml=nvml,
        libraries=tuple(libraries[n] for n in sorted(libraries)),
        libraries32=(),
        programs=tuple(programs),
        data=(),
        binds=(Bind(store, "compute"),),
        skipped=tuple(reader.skipped),
    )


def _store(tree: Tree, tables: Tables) -> tuple[str, str]:
    """Return the path and version of the newest driver store."""
    found = []
    for name in tree.names(tables.wsl.stores):
        if not fits(name, tables.wsl.store):
            continue
        store = f"{tables.wsl.stores}/{name}"
        for inf in tree.names(store):
            text = tree.read(f"{store}/{inf}", MAX_INF) if inf.endswith(".inf") else None
            if text is not None and (version := windows_version(text)):
                found.append((tuple(int(p) for p in version.split(".")), store, version))
    if not found:
        raise DriverError(
            f"no driver store in {tree.host(tables.wsl.stores)} states its version",
            hint="update the NVIDIA driver in Windows",
        )
    _, store, version = max(found)
    return store, version


def windows_version(text: bytes) -> str | None:
    """Return the NVIDIA version that an INF file states as its DriverVer; None if it has none."""
    encoding = "utf-16" if text[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    match = DRIVER_VERSION.search(text.decode(encoding, "replace"))
    digits = "".join(match[1].split(".")[-2:]) if match else ""
    if len(digits) < 5 or not digits.isdigit():
        return None
    return f"{int(digits[-5:-2])}.{digits[-2:]}"
