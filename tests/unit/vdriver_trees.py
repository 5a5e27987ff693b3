"""Drivers made of real ELF files, in trees laid out like hosts."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

NOTE = """
__attribute__((section(".note.tidegate.simgpu"), used, aligned(4)))
static const struct { unsigned n, d, t; char name[12]; int x; } note = {9, 4, 1, "tidegate", 1};
"""
EM_AARCH64 = 183


@functools.cache
def elf(
    soname: str | None = None,
    needed: tuple[str, ...] = (),
    *,
    tag: str = "",
    simulated: bool = False,
    bits: int = 64,
    runpath: str | None = None,
    program: bool = False,
) -> bytes:
    """Compile a library (or a program) and return its bytes; `tag` makes two of them differ."""
    with tempfile.TemporaryDirectory() as work:
        source, made = Path(work, "a.c"), Path(work, "a.so")
        text = (NOTE if simulated else "") + f'const char tag[] = "{tag}";'
        source.write_text(text + ("void _start(void) {}" if program else ""))
        command = ["gcc", f"-m{bits}", "-nostdlib", "-Wl,--build-id=sha1", "-o", made, source]
        command += ["-static"] if program else ["-shared", "-fPIC"]
        if soname:
            command.append(f"-Wl,-soname,{soname}")
        if runpath:
            command += ["-Wl,--enable-new-dtags", f"-Wl,-rpath,{runpath}"]
        for name in needed:
            stub = Path(work, name)
            subprocess.run(
                [
                    "gcc",
                    f"-m{bits}",
                    "-nostdlib",
                    "-shared",
                    f"-Wl,-soname,{name}",
                    "-x",
                    "c",
                    "/dev/null",
                    "-o",
                    stub,
                ],
                check=True,
            )
            command += ["-Wl,--no-as-needed", stub]
        subprocess.run(command, check=True)
        return made.read_bytes()


def put(path: Path, content: bytes, mode: int = 0o644) -> Path:
    """Write a file and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
    return path


def link(path: Path, target: str) -> Path:
    """Make a link and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def for_aarch64(content: bytes) -> bytes:
    """Say of a library that it is for another machine."""
    return content[:18] + EM_AARCH64.to_bytes(2, "little") + content[20:]


def put_driver(
    directory: Path, version: str, *, simulated: bool = False, links: bool = True
) -> None:
    """Put libcuda and libnvidia-ml of a version into a directory, with an installer's links."""
    for stem in ("libcuda", "libnvidia-ml"):
        content = elf(f"{stem}.so.1", ("libc.so.6",), tag=version, simulated=simulated)
        put(directory / f"{stem}.so.{version}", content)
        if links:
            link(directory / f"{stem}.so.1", f"{stem}.so.{version}")
            link(directory / f"{stem}.so", f"{stem}.so.1")


def put_kernel(root: Path, version: str, *, opened: bool = False) -> None:
    """Say that the kernel module of a version is loaded."""
    what = (
        f"Open Kernel Module for x86_64  {version}"
        if opened
        else f"x86_64 Kernel Module  {version}"
    )
    text = (
        f"NVRM version: NVIDIA UNIX {what}  Release Build  (root@host)\nGCC version:  gcc 12.2.0\n"
    )
    put(root / "proc/driver/nvidia/version", text.encode())


def put_control(directory: Path) -> Path:
    """Put two small stand-ins for the control libraries into a directory."""
    for stem in ("libcuda", "libnvidia-ml"):
        content = elf(f"{stem}.so.1", tag="control", runpath="$ORIGIN/origin")
        put(directory / f"{stem}.so.1", content)
    return directory


def tree(directory: Path) -> dict[str, str]:
    """Return what is below a directory: a link's text, else the octal mode."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        found[name] = (
            str(path.readlink()) if path.is_symlink() else oct(path.stat().st_mode & 0o7777)
        )
    return found
