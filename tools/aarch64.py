"""Compiles the control library for aarch64, and checks that old containers can load it.

The libraries are not run, because this machine cannot run them. The compiler's package
(gcc-aarch64-linux-gnu) takes 160 MB, so `make bootstrap` does not install it; without it the check
is skipped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "aarch64"
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libtidegate-arbiter.so")
GUEST = LIBRARIES[:2]
"""Libraries that are loaded in containers, and therefore in images with any glibc from 2.17 on."""
GLIBC_LIMIT = (2, 17)


def build() -> None:
    """Build the libraries; raise CalledProcessError with the compiler's output."""
    meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
    commands = [["ninja", "-C", str(FOLDER), *(f"libcontrol/{name}" for name in LIBRARIES)]]
    if not (FOLDER / "build.ninja").exists():
        cross = ["--cross-file", str(ROOT / "tools" / "aarch64.ini")]
        commands.insert(0, [*meson, "setup", str(FOLDER), *cross])
    for command in commands:
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)


def faults(name: str) -> list[str]:
    """Return the faults in a built library, one line each."""
    with (FOLDER / "libcontrol" / name).open("rb") as file:
        elf = ELFFile(file)
        found = [] if elf["e_machine"] == "EM_AARCH64" else [f"{name} is {elf['e_machine']}"]
        for section in elf.iter_sections():
            if not isinstance(section, GNUVerNeedSection) or name not in GUEST:
                continue
            for needed, auxiliaries in section.iter_versions():
                for version in auxiliaries:
                    match = re.fullmatch(r"GLIBC_([0-9]+)\.([0-9]+)(\.[0-9]+)?", version.name)
                    if not match or (int(match[1]), int(match[2])) > GLIBC_LIMIT:
                        found.append(f"{name} needs {version.name} from {needed.name}")
    return found


def main() -> int:
    """Build, check and print the faults; return the exit status."""
    if shutil.which("aarch64-linux-gnu-gcc") is None:
        print("skipped: no aarch64-linux-gnu-gcc (Debian: gcc-aarch64-linux-gnu)")
        return 0
    try:
        build()
    except subprocess.CalledProcessError as e:
        output = e.stdout + e.stderr
        print(output[max(output.find("FAILED:"), 0) :][:4000])
        return 1
    found = [fault for name in LIBRARIES for fault in faults(name)]
    print("\n".join(found) or f"{', '.join(LIBRARIES)}: no warning, nothing newer than glibc 2.17")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
