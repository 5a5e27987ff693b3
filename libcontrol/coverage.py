"""`python -m libcontrol.coverage --driver FILE`: which functions of a driver are governed.

The program compares three things: what a libcuda exports or an NVIDIA header declares, what is
known about these functions (functions.toml), and which of them the control library replaces, or
hooks (libcontrol.api). A function that takes memory, gives it back, starts work or concerns
captures is ungoverned if it is not hooked. A function that functions.toml does not name is unknown,
and may be ungoverned.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libcontrol.api import CUDA
from vdriver.elf import read_exports
from vdriver.errors import LibraryError

FUNCTIONS = Path(__file__).with_name("functions.toml")
GOVERNED = ("takes", "gives", "works", "captures")
"""Effects of functions that have to be hooked."""

FORM = re.compile(r"(_v[0-9]+)?(_ptsz|_ptds)?$")

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
DECLARED = re.compile(r"\bCUresult\s+CUDAAPI\s+(cu\w+)\s*\(")
DEFINED = re.compile(
    r"^\s*#define (cu\w+)\s+(?:__CUDA_API_(PT[SD][ZS])\()?(cu\w+)\)?\s*$", re.MULTILINE
)
AS_EXPORTED = "\n#if defined(__CUDA_API_VERSION_INTERNAL)\n"
"""Text in cuda.h after which the header undefines its macros and declares the hidden forms."""


@dataclass(frozen=True)
class Function:
    """A function of the driver API, its effect and what the control library does with it.

    `effect` is a table in functions.toml, or None if the function is unknown. `method` is that of
    libcontrol.api, or "forward" if the call goes to the driver directly.
    """

    name: str
    effect: str | None
    method: str

    @property
    def hooked(self) -> bool:
        """Whether the control library has a function of this name."""
        return self.method != "forward"

    @property
    def ungoverned(self) -> bool:
        """Whether the function has an effect that has to be governed, but is not hooked."""
        return self.effect in GOVERNED and not self.hooked


def read_effects(path: Path = FUNCTIONS) -> dict[str, str]:
    """Return the effect of each function, by its name without the suffix of a form."""
    tables: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: effect for effect, table in tables.items() for name in table["functions"]}


def base_name(name: str) -> str:
    """Return the name that all forms of a function share."""
    return FORM.sub("", name)


def effect_of(name: str, effects: Mapping[str, str]) -> str | None:
    """Return the effect of a function, given the name of any of its forms; None if unknown."""
    return effects.get(base_name(name))


def read_declarations(header: Path) -> frozenset[str]:
    """Return the functions that a header of the driver API declares, by their exported names.

    A macro may stand for such a name: a program that requests per-thread default streams gets
    `cuMemFreeAsync_ptsz` for `cuMemFreeAsync`. In that case the driver exports both names.
    """
    text = COMMENT.sub("", header.read_text(encoding="utf-8", errors="replace"))
    public, _, as_exported = text.partition(AS_EXPORTED)
    # The macro cuGraphInstantiate stands for one of two functions. Both are declared under their
    # own names.
    macros = {name: (target, form) for name, form, target in DEFINED.findall(public)}
    names = set(DECLARED.findall(as_exported))
    for name in DECLARED.findall(public):
        target, form = macros.get(name, (name, ""))
        names.add(target)
        if form:
            names.add(f"{target}_{form.lower()}")
    return frozenset(names)


def cover(names: Iterable[str]) -> tuple[Function, ...]:
    """Return the functions of the driver API among these names, sorted by name."""
    effects, methods = read_effects(), {fn.name: fn.method for fn in CUDA}
    return tuple(
        Function(name, effect_of(name, effects), methods.get(name, "forward"))
        for name in sorted(names)
        if name.startswith("cu")
    )


def print_table(functions: Iterable[Function]) -> None:
    """Print a line for each function: its name, effect and method."""
    for f in functions:
        print(f"{f.name:<48} {f.effect or 'unknown':<10} {f.method}")


def print_summary(functions: tuple[Function, ...]) -> None:
    """Print the number of functions of each kind, and the names that need attention."""
    hooked = sum(f.hooked for f in functions)
    ungoverned = [f for f in functions if f.ungoverned]
    unknown = [f.name for f in functions if f.effect is None]
    forwarded = [f for f in functions if not (f.hooked or f.ungoverned or f.effect is None)]
    print(
        f"{len(functions)} functions: {hooked} hooked, {len(forwarded)} forwarded, "
        f"{len(ungoverned)} ungoverned, {len(unknown)} unknown"
    )
    for effect in GOVERNED:
        names = [f.name for f in ungoverned if f.effect == effect]
        if names:
            print(f"ungoverned, {effect}: {' '.join(names)}")
    if unknown:
        print(f"unknown: {' '.join(unknown)}")


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; return 1 if a function is ungoverned or unknown, 0 if none is.

    Any other status means that the input cannot be read or has no function of the API.
    """
    parser = argparse.ArgumentParser(prog="python -m libcontrol.coverage", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--driver", type=Path, metavar="FILE", help="a libcuda.so.<version>")
    source.add_argument(
        "--header", type=Path, metavar="FILE", help="NVIDIA's cuda.h, cudaGL.h, ..."
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON document")
    output.add_argument(
        "--table", action="store_true", help="print the name, effect and method of each function"
    )
    args = parser.parse_args(argv)
    try:
        names = (
            read_declarations(args.header) if args.header else read_exports(args.driver.resolve())
        )
    except LibraryError as e:
        print(f"coverage: {e}", file=sys.stderr)
        return e.status
    except OSError as e:
        print(f"coverage: {e.filename}: {e.strerror}", file=sys.stderr)
        return os.EX_NOINPUT
    functions = cover(names)
    if not functions:
        verb = "declares" if args.header else "exports"
        print(
            f"coverage: {args.header or args.driver} {verb} no function of the CUDA driver API: "
            "specify cuda.h, another of NVIDIA's headers, or a libcuda.so.<version>",
            file=sys.stderr,
        )
        return os.EX_DATAERR
    if args.json:
        document = {
            "header" if args.header else "driver": (args.header or args.driver).resolve().name,
            "functions": [
                vars(f) | {"hooked": f.hooked, "ungoverned": f.ungoverned} for f in functions
            ],
        }
        print(json.dumps(document, indent=1))
    elif args.table:
        print_table(functions)
    else:
        print_summary(functions)
    return 1 if any(f.ungoverned or f.effect is None for f in functions) else 0


if __name__ == "__main__":
    sys.exit(main())
