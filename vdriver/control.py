"""The two control libraries that a mirror puts in the driver's place.

A control library exports what the newest driver has. An older driver lacks some of that, and a
program that asks for a name then has to hear that it is not there: programs choose their way by
that answer. So those names are made undefined in the mirror's copy.
"""

from __future__ import annotations

import dataclasses
import io
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vdriver.driver import Driver, DriverFile
from vdriver.elf import Library, read_exports, read_library
from vdriver.errors import LibraryError, MirrorError
from vdriver.reader import Read

CUDA = "libcuda.so.1"
NVML = "libnvidia-ml.so.1"
HINT = "install the package tidegate, or name its directory with --control-dir"

Exports = Callable[[str | Path], tuple[str, ...]]

# An Elf64_Sym: name, kind, visibility; then section and value, which are 0 where it is undefined.
SYMBOL = 24
SECTION_AT, VALUE_AT = 6, 8


@dataclass(frozen=True)
class ControlLibraries:
    """The stand-in for libcuda and the one for NVML.

    The contents are those of the copies in the mirror; None where they are the files' own.
    """

    cuda: Library
    nvml: Library
    cuda_content: bytes | None = None
    nvml_content: bytes | None = None


def read_control(directory: str | Path, read: Read = read_library) -> ControlLibraries:
    """Read both from `directory`; MirrorError when one is missing or would not answer its name."""
    return ControlLibraries(
        _read(Path(directory) / CUDA, read), _read(Path(directory) / NVML, read)
    )


def fit_control(
    control: ControlLibraries, driver: Driver, exports: Exports = read_exports
) -> ControlLibraries:
    """Return the libraries without the names that `driver` does not export.

    MirrorError when one cannot be patched; LibraryError when a file cannot be read. A driver that
    exports nothing is taken for one that was not understood, and hides nothing.
    """
    return dataclasses.replace(
        control,
        cuda_content=_fit(control.cuda, driver.cuda, exports),
        nvml_content=_fit(control.nvml, driver.nvml, exports),
    )


def _fit(control: Library, file: DriverFile, exports: Exports) -> bytes | None:
    offered = exports(file.library.path)
    lacking = frozenset(exports(control.path)) - frozenset(offered)
    if not offered or not lacking:
        return None
    try:
        return hide_exports(Path(control.path).read_bytes(), lacking)
    except (OSError, ValueError) as e:
        raise MirrorError(f"{control.path}: {e}", hint=HINT) from e


def hide_exports(content: bytes, names: Collection[str]) -> bytes:
    """Return a 64-bit library that no longer defines the dynamic symbols `names`; ValueError.

    The loader passes over an undefined symbol in a search, so the hash table stays as it is. A
    library that itself looks one of them up by name would no longer load, and is refused.
    """
    from elftools.elf.relocation import RelocationSection

    elf, table = _symbols(content)
    patched = bytearray(content)
    hidden: dict[int, str] = {}
    for number, symbol in enumerate(table.iter_symbols()):
        if symbol.name in names and symbol["st_shndx"] != "SHN_UNDEF":
            at = table["sh_offset"] + number * SYMBOL
            struct.pack_into("<H", patched, at + SECTION_AT, 0)
            struct.pack_into("<Q", patched, at + VALUE_AT, 0)
            hidden[number] = symbol.name
    for section in elf.iter_sections():
        if isinstance(section, RelocationSection):
            for relocation in section.iter_relocations():
                if relocation["r_info_sym"] in hidden:
                    name = hidden[relocation["r_info_sym"]]
                    raise ValueError(f"looks {name} up by name itself, and the driver lacks it")
    result = bytes(patched)
    if _defined(result) != _defined(content) - frozenset(names):
        raise ValueError("cannot be rid of the names that the driver lacks, and of them alone")
    return result


def _symbols(content: bytes) -> tuple[Any, Any]:
    """Return an ELF file and its table of dynamic symbols."""
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(content))
    table = elf.get_section_by_name(".dynsym")
    if table is None or table["sh_entsize"] != SYMBOL:
        raise ValueError("has no table of dynamic symbols of 64 bit")
    return elf, table


def _defined(content: bytes) -> frozenset[str]:
    """Return the names that a library's dynamic symbols define."""
    _, table = _symbols(content)
    return frozenset(s.name for s in table.iter_symbols() if s["st_shndx"] != "SHN_UNDEF")


def _read(path: Path, read: Read) -> Library:
    try:
        library = read(str(path.resolve()))
    except (LibraryError, OSError, RuntimeError) as e:
        reason = e.message if isinstance(e, LibraryError) else f"{path}: {e}"
        raise MirrorError(f"no control library: {reason}", hint=HINT) from e
    if library.soname != path.name:
        raise MirrorError(
            f"{path} has the soname {library.soname}, which no application looks for", hint=HINT
        )
    # A driver's own library in its place would serve containers without any limit.
    origin = f"{path.name.partition('.so')[0]}-origin.so.1"
    if origin not in library.needed:
        raise MirrorError(
            f"{path} is no control library of Tidegate's: it does not need {origin}", hint=HINT
        )
    return library
