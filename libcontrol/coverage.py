"""`python -m libcontrol.coverage --driver FILE`: which functions of a driver are governed.

Holds three things against each other: what a libcuda exports, what is known of its functions
(functions.toml), and which of them the control library takes (libcontrol.api). A function that
takes memory, gives it back or starts work and is not taken is ungoverned; one that nobody knows may
be.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from libcontrol.api import CUDA
from vdriver.elf import read_exports
from vdriver.errors import LibraryError

FUNCTIONS = Path(__file__).with_name("functions.toml")
GOVERNED = ("takes", "gives", "works")
"""Effects that must not pass by the control library."""

FORM = re.compile(r"(_v[0-9]+)?(_ptsz|_ptds)?$")


@dataclass(frozen=True)
class Function:
    """One export: its effect (a table of functions.toml, None for an unknown) and who answers."""

    name: str
    effect: str | None
    hooked: bool

    @property
    def ungoverned(self) -> bool:
        """Whether a program gets memory or GPU time by it without being asked."""
        return self.effect in GOVERNED and not self.hooked


def read_effects(path: Path = FUNCTIONS) -> dict[str, str]:
    """Return the effect of each name, or pattern of names, in the order in which they count."""
    tables: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: effect for effect, table in tables.items() for name in table["functions"]}


def effect_of(name: str, effects: Mapping[str, str]) -> str | None:
    """Return what a function does, whichever of its forms it is; None when nobody says so."""
    base = FORM.sub("", name)
    if base in effects:
        return effects[base]
    return next((e for pattern, e in effects.items() if fnmatchcase(base, pattern)), None)


def cover(exports: Iterable[str]) -> tuple[Function, ...]:
    """Return each function of the driver API among these names."""
    effects, hooked = read_effects(), {fn.name for fn in CUDA}
    return tuple(
        Function(name, effect_of(name, effects), name in hooked)
        for name in sorted(exports)
        if name.startswith("cu")
    )


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; the status is 1 while a function is ungoverned or unknown."""
    parser = argparse.ArgumentParser(prog="python -m libcontrol.coverage", description=__doc__)
    parser.add_argument("--driver", required=True, metavar="FILE", help="a libcuda.so.<version>")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    try:
        functions = cover(read_exports(Path(args.driver).resolve()))
    except LibraryError as e:
        print(f"coverage: {e}", file=sys.stderr)
        return e.status
    ungoverned = [f for f in functions if f.ungoverned]
    unknown = [f.name for f in functions if f.effect is None]
    forwarded = [f for f in functions if not (f.hooked or f.ungoverned or f.effect is None)]
    if args.json:
        document = {
            "driver": Path(args.driver).resolve().name,
            "functions": [vars(f) | {"ungoverned": f.ungoverned} for f in functions],
        }
        print(json.dumps(document, indent=1))
    else:
        hooked = sum(f.hooked for f in functions)
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
    return 1 if ungoverned or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
