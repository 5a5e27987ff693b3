"""Write a generation of the second manifest schema from given libraries, as a refresh would."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.unit.vdriver_trees import elf, put
from vdriver import manifest as manifests
from vdriver.content import digest
from vdriver.elf import read_library
from vdriver.manifest import CapabilitySet, Manifest, ManifestFile, Place, Program, Watched


def put_control_with_origin(directory: Path) -> Path:
    """Write two stand-ins for the control libraries, which load the driver's own libraries as the
    real ones do.
    """
    for stem in ("libcuda", "libnvidia-ml"):
        needed = (f"{stem}-origin.so.1",)
        put(directory / f"{stem}.so.1", elf(f"{stem}.so.1", needed, runpath="$ORIGIN/origin"))
    return directory


def small_driver(version: str) -> dict[str, bytes]:
    """Return the four libraries of a small driver, one of which needs another."""
    return {
        f"libcuda.so.{version}": elf("libcuda.so.1", ("libc.so.6",), tag=version),
        f"libnvidia-ml.so.{version}": elf("libnvidia-ml.so.1", ("libc.so.6",), tag=version),
        f"libnvcuvid.so.{version}": elf("libnvcuvid.so.1", ("libc.so.6",), tag=version),
        f"libnvidia-encode.so.{version}": elf(
            "libnvidia-encode.so.1", ("libnvcuvid.so.1", "libc.so.6"), tag=version
        ),
    }


def put_generation(
    driver_dir: Path,
    version: str,
    libraries: Mapping[str, bytes | Path],
    control: Path,
    *,
    libraries32: Mapping[str, bytes | Path] | None = None,
    capabilities: Mapping[str, str] | None = None,
    sets: Mapping[Sequence[str], Sequence[str]] | None = None,
    programs: Mapping[str, bytes] | None = None,
    places: Mapping[str, Mapping[str, bytes]] | None = None,
    machine: str = "x86_64",
    in_force: bool = True,
) -> Path:
    """Write a generation and return its directory.

    `libraries` are the driver's own by file name, including libcuda and libnvidia-ml of `version`.
    `capabilities` maps file names to capabilities; files that it omits have compute. `sets` maps
    the capabilities of each further set to its names in lib64. The set with everything always
    exists.
    """
    work = driver_dir / "making"
    files: list[ManifestFile] = []
    of = dict(capabilities or {})

    def add(path: str, content: bytes | Path, role: str, capability: str) -> None:
        if isinstance(content, Path):
            put(work / path, b"")
            shutil.copyfile(content, work / path)
        else:
            put(work / path, content)
        if role == "program":
            (work / path).chmod(0o755)
        data = (work / path).read_bytes()
        soname = None
        if role in ("library", "control", "origin"):
            soname = read_library(work / path).soname
        sha256 = hashlib.sha256(data).hexdigest()
        files.append(ManifestFile(path, role, capability, soname, size=len(data), sha256=sha256))

    def link(path: str, target: str, capability: str) -> None:
        if not os.path.lexists(work / path):
            (work / path).symlink_to(target)
            files.append(ManifestFile(path, "link", capability, target=target))

    for directory in ("lib64/origin", "bin"):
        (work / directory).mkdir(parents=True)
    for stem in ("libcuda", "libnvidia-ml"):
        add(f"lib64/{stem}.so.1", control / f"{stem}.so.1", "control", "compute")
        for name in (f"{stem}.so", f"{stem}.so.{version}"):
            link(f"lib64/{name}", f"{stem}.so.1", "compute")
        own = libraries[f"{stem}.so.{version}"]
        add(f"lib64/origin/{stem}-origin.so.1", own, "origin", "compute")
    for base, given in (("lib64", libraries), ("lib32", libraries32 or {})):
        for name, content in given.items():
            if base == "lib64" and name.partition(".so")[0] in ("libcuda", "libnvidia-ml"):
                continue
            capability = of.get(name, "compute")
            add(f"{base}/{name}", content, "library", capability)
            soname = files[-1].soname
            if soname is not None and soname != name:
                link(f"{base}/{soname}", name, capability)
                link(f"{base}/{soname.partition('.so')[0]}.so", soname, capability)
    for name, content in (programs or {}).items():
        add(f"bin/{name}", content, "program", "utility")
    for place, contents in (places or {}).items():
        for name, content in contents.items():
            add(f"data/{place}/{name}", content, "data", "graphics")

    names32 = _names(work / "lib32") if libraries32 else None
    lib32 = "lib32" if libraries32 else None
    made = [CapabilitySet(("compute", "utility"), "lib64", _names(work / "lib64"), lib32, names32)]
    for wanted, names in (sets or {}).items():
        below = f"sets/{'-'.join(wanted)}/lib64"
        (work / below / "origin").mkdir(parents=True)
        for path in (*names, *(f"origin/{n}" for n in _names(work / "lib64/origin"))):
            os.link(work / "lib64" / path, work / below / path, follow_symlinks=False)
        made.append(CapabilitySet(tuple(wanted), below, tuple(sorted(names))))
    manifest = Manifest(
        generation="",
        version=version,
        kind="nvidia",
        machine=machine,
        sets=tuple(made),
        programs=tuple(Program(f"bin/{n}", "utility") for n in programs or ()),
        places=tuple(
            Place(n, f"data/{n}", "graphics", ("/usr/share/x",), "all", tuple(sorted(c)))
            for n, c in (places or {}).items()
        ),
        binds=(),
        files=tuple(files),
        root="/",
        watch=(Watched("/nowhere", "driver", 0, 0),),
    )
    generation = f"{version}-{digest(manifest)}"
    write_manifest(work, manifest, generation)
    for directory in (work, *(p for p in work.rglob("*") if p.is_dir() and not p.is_symlink())):
        directory.chmod(0o755)
    work.rename(driver_dir / generation)
    if in_force:
        switch(driver_dir, generation)
    return driver_dir / generation


def write_manifest(directory: Path, manifest: Manifest, generation: str) -> None:
    """Write a manifest under the name `generation` after checking it against the schema."""
    document = {**manifest.to_json(), "generation": generation}
    manifests.validate(document)
    put(directory / manifests.NAME, json.dumps(document).encode())


def switch(driver_dir: Path, generation: str) -> None:
    """Put a generation in force."""
    new = driver_dir / ".tmp-current"
    new.symlink_to(generation)
    new.replace(driver_dir / "current")


def _names(directory: Path) -> tuple[str, ...]:
    return tuple(sorted(p.name for p in directory.iterdir() if not p.is_dir()))
