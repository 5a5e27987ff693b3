"""Drivers made of real ELF files, in trees that are laid out like hosts."""

from __future__ import annotations

import functools
import struct
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
    interpreter: str | None = None,
) -> bytes:
    """Compile a library (or a program) and return its bytes; files with different tags differ."""
    with tempfile.TemporaryDirectory() as work:
        source, made = Path(work, "a.c"), Path(work, "a.so")
        text = (NOTE if simulated else "") + f'const char tag[] = "{tag}";'
        source.write_text(text + ("void _start(void) {}" if program else ""))
        command = ["gcc", f"-m{bits}", "-nostdlib", "-Wl,--build-id=sha1", "-o", made, source]
        if interpreter:
            command += ["-pie", "-fPIE", f"-Wl,--dynamic-linker={interpreter}"]
        else:
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
    """Mark a library as built for aarch64."""
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
    """Make the kernel module of a version appear loaded."""
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
        needed = (f"{stem}-origin.so.1",)
        content = elf(f"{stem}.so.1", needed, tag="control", runpath="$ORIGIN/origin")
        put(directory / f"{stem}.so.1", content)
    return directory


def tree(directory: Path) -> dict[str, str]:
    """Return the entries below a directory: a link's target, or the mode in octal, by name."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        found[name] = (
            str(path.readlink()) if path.is_symlink() else oct(path.stat().st_mode & 0o7777)
        )
    return found


RICH = """
__attribute__((section(".note.ABI-tag"), used, aligned(4)))
static const struct { unsigned n, d, t; char name[4]; unsigned abi[4]; } abi
    = {4, 16, 1, "GNU", {0, 2, 3, 99}};
#ifdef INTERPRETER
__attribute__((section(".interp"), used)) static const char interpreter[] = "/lib/ld-test.so.2";
#endif
int undefined_function(void);
static int local_function(void) { return undefined_function(); }
int defined_function(void) { return local_function(); }
int defined_object = 1;
__thread int thread_local_object = 1;
__attribute__((weak)) int weak_function(void) { return 2; }
__attribute__((visibility("hidden"))) int hidden_function(void) { return 3; }
__attribute__((visibility("protected"))) int protected_function(void) { return 4; }
static int (*resolve(void))(void) { return weak_function; }
__attribute__((ifunc("resolve"))) int indirect_function(void);
"""
RICH_EXPORTS = (
    "defined_function",
    "defined_object",
    "indirect_function",
    "protected_function",
    "thread_local_object",
    "weak_function",
)


@functools.cache
def rich_elf(bits: int = 64, hash_style: str = "both", *, interpreter: bool = False) -> bytes:
    """Compile a library that has one of everything that is read: names, notes, symbols, tables."""
    with tempfile.TemporaryDirectory() as work:
        source, made = Path(work, "a.c"), Path(work, "a.so")
        source.write_text(("#define INTERPRETER\n" if interpreter else "") + RICH)
        names = ["-Wl,-soname,librich.so.1", "-Wl,-rpath,$ORIGIN/origin", "-Wl,--build-id=sha1"]
        kind = [f"-m{bits}", "-nostdlib", "-shared", "-fPIC", f"-Wl,--hash-style={hash_style}"]
        subprocess.run(["gcc", *kind, *names, "-o", made, source], check=True)
        return made.read_bytes()


def elf_parts(content: bytes) -> dict[str, tuple[int, int]]:
    """Return the parts of an ELF file as (offset, size). Tables of unknown size have size 16."""
    wide = content[4] == 2
    word = "<Q" if wide else "<I"
    header = 64 if wide else 52
    table, size, count = header, 56 if wide else 32, int.from_bytes(content[44:46], "little")
    if wide:
        count = int.from_bytes(content[56:58], "little")
    sections, section_size = (40, 64) if wide else (32, 40)
    (start,) = struct.unpack_from(word, content, sections)
    found = {"header": (0, header), "segments": (table, size * count)}
    found["sections"] = (start, len(content) - start - (len(content) - start) % section_size)
    loads = []
    for at in range(table, table + size * count, size):
        if wide:
            kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", content, at)
        else:
            kind, offset, address, _, length = struct.unpack_from("<IIIII", content, at)
        name = {1: "load", 2: "dynamic", 3: "interpreter", 4: "note"}.get(kind)
        if kind == 1:
            loads.append((address, offset, length))
        elif name:
            found.setdefault(name, (offset, length))
            found.setdefault(f"{name} segment", (at, size))
    offset, length = found.get("dynamic", (0, 0))
    step = struct.calcsize(word)
    names = {4: "hash", 5: "strings", 6: "symbols", 0x6FFFFEF5: "gnu hash"}
    for at in range(offset, offset + length, 2 * step):
        tag, value = (struct.unpack_from(word, content, at + i)[0] for i in (0, step))
        for address, begin, size in loads:
            if tag in names and address <= value < address + size:
                found[names[tag]] = (begin + value - address, 16)
                found[f"{names[tag]} tag"] = (at, 2 * step)
    return found
