"""The two control libraries that a mirror puts in the driver's place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vdriver.elf import Library, read_library
from vdriver.errors import LibraryError, MirrorError
from vdriver.reader import Read

CUDA = "libcuda.so.1"
NVML = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class ControlLibraries:
    """The stand-in for libcuda and the one for NVML."""

    cuda: Library
    nvml: Library


def read_control(directory: str | Path, read: Read = read_library) -> ControlLibraries:
    """Read both from `directory`; MirrorError when one is missing or would not answer its name."""
    return ControlLibraries(
        _read(Path(directory) / CUDA, read), _read(Path(directory) / NVML, read)
    )


def _read(path: Path, read: Read) -> Library:
    hint = "install tidegate-control, or name its directory with --control-dir"
    try:
        library = read(str(path.resolve()))
    except (LibraryError, OSError, RuntimeError) as e:
        reason = e.message if isinstance(e, LibraryError) else f"{path}: {e}"
        raise MirrorError(f"no control library: {reason}", hint=hint) from e
    if library.soname != path.name:
        raise MirrorError(
            f"{path} has the soname {library.soname}, which no application looks for", hint=hint
        )
    # A driver's own library in its place would serve containers without any limit.
    origin = f"{path.name.partition('.so')[0]}-origin.so.1"
    if origin not in library.needed:
        raise MirrorError(
            f"{path} is no control library of Tidegate's: it does not need {origin}", hint=hint
        )
    return library
