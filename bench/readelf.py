"""Reads ELF files with readelf, in the terms of `vdriver.elf`, as a check on that module."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from vdriver.elf import Library

MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "i386": "Intel 80386"}
KINDS = ("NOTYPE", "OBJECT", "FUNC", "COMMON", "TLS", "IFUNC")


def readelf(path: str | Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run readelf, with output in English."""
    return subprocess.run(
        ["readelf", "-W", *options, str(path)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )


def fields_by_readelf(path: str | Path) -> dict[str, Any]:
    """Return the fields of a Library that readelf prints, in readelf's form."""
    text = readelf(path, "-dhnl").stdout

    def first(pattern: str) -> str | None:
        found = re.search(pattern, text)
        return found[1] if found else None

    system, version = first(r"OS: (Linux), ABI:"), first(r"OS: Linux, ABI: ([\d.]+)")
    return {
        "bits": first(r"Class:\s+ELF(\d+)"),
        "machine": first(r"Machine:\s+(.*)"),
        "soname": first(r"\(SONAME\).*\[(.*)\]"),
        "needed": tuple(re.findall(r"\(NEEDED\).*\[(.*)\]", text)),
        "runpath": first(r"\(RUNPATH\).*\[(.*)\]") or first(r"\(RPATH\).*\[(.*)\]"),
        "interpreter": first(r"Requesting program interpreter: (.*)\]"),
        "build_id": first(r"Build ID: (\w+)"),
        "abi": f"{system} {version}" if system else None,
    }


def fields_of(library: Library) -> dict[str, Any]:
    """Return the same fields as `vdriver.elf` reads them."""
    return {
        "bits": str(library.bits),
        "machine": MACHINES.get(library.machine, library.machine),
        "soname": library.soname,
        "needed": library.needed,
        "runpath": library.runpath,
        "interpreter": library.interpreter,
        "build_id": library.build_id,
        "abi": library.abi,
    }


def exports_by_readelf(path: str | Path) -> tuple[str, ...]:
    """Return the names in `readelf --dyn-syms` that a lookup by name finds, sorted."""
    found = set()
    for line in readelf(path, "--dyn-syms").stdout.splitlines():
        words = line.split()
        if len(words) < 8 or not words[0][:-1].isdigit():
            continue
        value, _, kind, bind, visibility, index, name = words[1:8]
        if (
            index != "UND"
            and (int(value, 16) or kind == "TLS")
            and kind in KINDS
            and bind in ("GLOBAL", "WEAK", "UNIQUE")
            and visibility in ("DEFAULT", "PROTECTED")
        ):
            found.add(name.partition("@")[0])
    return tuple(sorted(found))
