"""Reads the control libraries for a mirror, and hides the exports that the driver lacks.

A control library exports every function of the newest driver. An older driver lacks some of them,
and then a program must not find the missing functions in the control library, because programs
choose their code path by the result of the lookup. Their names are therefore made undefined in the
mirror's copy.
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
HINT = "install the tidegate package, or name the libraries' directory with --control-dir"

Exports = Callable[[str | Path], tuple[str, ...]]

# Size of an Elf64_Sym and the offsets of its section and value, which are 0 in an undefined symbol.
SYMBOL = 24
SECTION_AT, VALUE_AT = 6, 8


@dataclass(frozen=True)
class ControlLibraries:
    """The control libraries for libcuda and for NVML.

    `cuda_content` and `nvml_content` are the contents of the mirror's copies; None if a copy is the
    same as the library.
    """

    cuda: Library
    nvml: Library
    cuda_content: bytes | None = None
    nvml_content: bytes | None = None


def read_control(directory: str | Path, read: Read = read_library) -> ControlLibraries:
    """Read both libraries from `directory`; raise MirrorError if one is missing or invalid."""
    return ControlLibraries(
        _read(Path(directory) / CUDA, read), _read(Path(directory) / NVML, read)
    )


def fit_control(
    control: ControlLibraries, driver: Driver, exports: Exports = read_exports
) -> ControlLibraries:
    """Return the libraries without the names that `driver` does not export.

    Raise MirrorError if a library cannot be patched, and LibraryError if a file cannot be read. A
    driver without any exports was not parsed correctly, so in that case no name is hidden.
    """
    return dataclasses.replace(
        control,
        cuda_content=_fit(control.cuda, driver.cuda, exports),
        nvml_content=_fit(control.nvml, driver.nvml, exports),
    )


def _fit(control: Library, file: DriverFile, exports: Exports) -> bytes | None:
    exported = exports(file.library.path)
    lacking = frozenset(exports(control.path)) - frozenset(exported)
    if not exported or not lacking:
        return None
    try:
        return hide_exports(Path(control.path).read_bytes(), lacking)
    except (OSError, ValueError) as e:
        raise MirrorError(f"{control.path}: {e}", hint=HINT) from e


def hide_exports(content: bytes, names: Collection[str]) -> bytes:
    """Return the 64-bit library `content` without definitions of the dynamic symbols `names`.

    The loader's search skips undefined symbols, so the hash table can stay unchanged. A library
    that itself refers to one of the names would no longer load, so it is refused with ValueError.
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
                    raise ValueError(f"uses its own function {name}, which the driver lacks")
    result = bytes(patched)
    if _defined(result) != _defined(content) - frozenset(names):
        raise ValueError("cannot be patched: hiding the names also changes other symbols")
    return result


def _symbols(content: bytes) -> tuple[Any, Any]:
    """Return the ELF file and its table of dynamic symbols; ValueError if it has none."""
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(content))
    table = elf.get_section_by_name(".dynsym")
    if table is None or table["sh_entsize"] != SYMBOL:
        raise ValueError("has no 64-bit table of dynamic symbols")
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
    # A driver's library in place of the control library would enforce no limits.
    origin = f"{path.name.partition('.so')[0]}-origin.so.1"
    if origin not in library.needed:
        raise MirrorError(
            f"{path} is not a Tidegate control library: it does not need {origin}", hint=HINT
        )
    return library
