"""`python -m tools.cuda_abi [DIRECTORY]` checks that the C parts agree with NVIDIA's cuda.h.

The control library and the simulated driver contain declarations of the types and functions that
they need, because the header's licence keeps it out of the repository. Both sets of declarations,
ours and those in the cuda.h in DIRECTORY (or in nvidia-cuda-runtime, which the tests install), are
compiled, and compared using the debugging information that the compiler generates for them: sizes
of types, offsets and sizes of members by name, sizes of parameters, values of constants. A member
whose name begins with "reserved" or "pad" may differ, on either side.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from libcontrol.api import CUDA
from libcontrol.coverage import read_declarations

ROOT = Path(__file__).resolve().parent.parent
LIBCONTROL, SIMGPU = ROOT / "libcontrol", ROOT / "simgpu"

CONSTANT = re.compile(r"^#define (CU\w+)\s+(0x[0-9a-f]+|\d+)\b", re.MULTILINE)
CALLED = re.compile(r'^\s*FIND\((\w+), "(\w+)"\);', re.MULTILINE)
"""Matches a function that the control library calls but does not hook: its field and its name."""
FILLER = re.compile(r"reserved|pad")
VARIABLE = "abi_"
ELSEWHERE = re.compile(r"cu(GL|VDPAU)")
"""Functions in cudaGL.h and cudaVDPAU.h."""
CUDA_VERSION = re.compile(r"^#define CUDA_VERSION (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Type:
    """A type without its names and qualifiers.

    `kind` is "number", "real", "pointer", "array", "function", "struct" or "nothing" (void).
    `target` is what a pointer points to, or what a function returns.
    """

    kind: str
    size: int = 0
    target: Type | None = None
    parameters: tuple[Type, ...] = ()
    members: Mapping[str, tuple[int, Type]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the type in words."""
        if self.kind == "pointer" and self.target:
            return f"pointer to {self.target}"
        return self.kind if self.kind in ("nothing", "function") else f"{self.kind} of {self.size}"


@dataclass
class Declarations:
    """The declarations in a translation unit, by name."""

    types: dict[str, Type] = field(default_factory=dict)
    functions: dict[str, Type] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)


class DebugInformation:
    """The declarations in one compiled file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            dwarf = ELFFile(file).get_dwarf_info()
            self._made: dict[int, Type] = {}
            self.found = Declarations()
            for unit in dwarf.iter_CUs():
                for die in unit.get_top_DIE().iter_children():
                    self._visit(die)

    def _visit(self, die: Any) -> None:
        name = _text(die)
        if die.tag == "DW_TAG_enumeration_type":
            self._enumerators(die)
        elif die.tag == "DW_TAG_typedef":
            self.found.types[name] = self._type(die)
            self._enumerators(_stripped(die))
        elif die.tag == "DW_TAG_structure_type" and name == "driver_cuda":
            members = self._members(die)
            self.found.functions |= {f".{n}": t.target for n, (_, t) in members.items() if t.target}
        elif die.tag == "DW_TAG_variable" and name.startswith(VARIABLE):
            target = self._type(die.get_DIE_from_attribute("DW_AT_type")).target
            if target:
                self.found.functions[name.removeprefix(VARIABLE)] = target

    def _enumerators(self, die: Any) -> None:
        for child in die.iter_children() if die and die.tag == "DW_TAG_enumeration_type" else ():
            self.found.constants[_text(child)] = child.attributes["DW_AT_const_value"].value

    def _type(self, die: Any) -> Type:
        die = _stripped(die)
        if die is None:
            return Type("nothing")
        if die.offset not in self._made:
            self._made[die.offset] = Type("struct")  # for members that point to the same type
            self._made[die.offset] = self._make(die)
        return self._made[die.offset]

    def _make(self, die: Any) -> Type:
        size = die.attributes["DW_AT_byte_size"].value if "DW_AT_byte_size" in die.attributes else 0
        match die.tag:
            case "DW_TAG_base_type":
                return Type(
                    "real" if die.attributes["DW_AT_encoding"].value == 4 else "number", size
                )
            case "DW_TAG_enumeration_type":
                return Type("number", size)
            case "DW_TAG_pointer_type":
                return Type("pointer", size, self._pointee(die))
            case "DW_TAG_array_type":
                return Type("array", self._array_size(die))
            case "DW_TAG_subroutine_type":
                children = [c for c in die.iter_children() if c.tag == "DW_TAG_formal_parameter"]
                parameters = tuple(
                    self._type(c.get_DIE_from_attribute("DW_AT_type")) for c in children
                )
                return Type("function", 0, self._pointee(die), parameters)
            case _:
                return Type("struct", size, members=self._members(die))

    def _pointee(self, die: Any) -> Type:
        if "DW_AT_type" not in die.attributes:
            return Type("nothing")
        return self._type(die.get_DIE_from_attribute("DW_AT_type"))

    def _array_size(self, die: Any) -> int:
        size = self._pointee(die).size
        for child in die.iter_children():
            bound = child.attributes.get("DW_AT_upper_bound")
            size *= bound.value + 1 if bound else 0
        return size

    def _members(self, die: Any) -> dict[str, tuple[int, Type]]:
        """Return the members with their offsets, including the members of anonymous members."""
        members: dict[str, tuple[int, Type]] = {}
        for child in die.iter_children():
            if child.tag != "DW_TAG_member":
                continue
            where = child.attributes.get("DW_AT_data_member_location")
            at, made = where.value if where else 0, self._pointee(child)
            if "DW_AT_name" in child.attributes:
                members[_text(child)] = at, made
            else:
                members |= {n: (at + offset, t) for n, (offset, t) in made.members.items()}
        return members


def _text(die: Any) -> str:
    name = die.attributes.get("DW_AT_name")
    return name.value.decode() if name else ""


def _stripped(die: Any) -> Any:
    """Return a type without names and qualifiers; None for void."""
    while die is not None and die.tag in (
        "DW_TAG_typedef",
        "DW_TAG_const_type",
        "DW_TAG_volatile_type",
    ):
        named = "DW_AT_type" in die.attributes
        die = die.get_DIE_from_attribute("DW_AT_type") if named else None
    return die


def compiled(includes: list[str], names: list[str], options: list[str]) -> Declarations:
    """Return the declarations in these headers. Raise RuntimeError if they do not compile."""
    lines = [f"#include {name}" for name in includes]
    lines += [f"__typeof__(&{name}) {VARIABLE}{name};" for name in names]
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory, "abi.o")
        done = subprocess.run(
            ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-c", "-g", "-gno-strict-dwarf", "-w",
             "-fno-eliminate-unused-debug-types", *options, "-x", "c", "-", "-o", str(made)],
            input="\n".join(lines), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"does not compile: {done.stderr.strip()[:300]}")
        return DebugInformation(made).found


def read_header(include: Path) -> Declarations:
    """Return the declarations in NVIDIA's header, each form under its exported name."""
    options = ["-D__CUDA_API_VERSION_INTERNAL", f"-I{include}"]
    header = include / "cuda.h"
    found = compiled(["<cuda.h>"], sorted(read_declarations(header)), options)
    text = header.read_text(encoding="utf-8", errors="replace")
    found.constants |= {name: int(value, 0) for name, value in CONSTANT.findall(text)}
    return found


def read_control() -> Declarations:
    """Return the declarations in the control library, with the functions that it hooks or calls."""
    names = [fn.name for fn in CUDA if not ELSEWHERE.match(fn.name)]
    found = compiled(['"control.h"'], names, [f"-I{LIBCONTROL}", "-DOS_INTERPOSED"])
    called = dict(CALLED.findall((LIBCONTROL / "origin.c").read_text(encoding="utf-8")))
    fields = {name for name in found.functions if name.startswith(".")}
    for name in fields:
        found.functions[called[name[1:]]] = found.functions.pop(name)
    for source in sorted([*LIBCONTROL.glob("*.h"), *LIBCONTROL.glob("*.c")]):
        text = source.read_text(encoding="utf-8")
        found.constants |= {name: int(value, 0) for name, value in CONSTANT.findall(text)}
    return found


def read_simulated() -> Declarations:
    """Return the types and constants of the simulated driver."""
    found = compiled(['"cuda_abi.h"'], [], [f"-I{SIMGPU}"])
    text = (SIMGPU / "cuda_abi.h").read_text(encoding="utf-8")
    found.constants |= {name: int(value, 0) for name, value in CONSTANT.findall(text)}
    found.constants.pop("CUDA_VERSION", None)  # the simulated driver's own version
    return found


def faults_of_type(name: str, ours: Type, theirs: Type) -> Iterator[str]:
    """Yield each difference between one of our structures and the header's."""
    if ours.kind != "struct" or theirs.kind != "struct":
        if ours.size != theirs.size:
            yield f"{name}: {ours}, in cuda.h {theirs}"
        return
    if not ours.members:
        return  # opaque: only pointers to it are used
    if ours.size != theirs.size:
        yield f"{name}: {ours.size} bytes, in cuda.h {theirs.size}"
    for member, (at, made) in ours.members.items():
        if FILLER.match(member):
            continue
        if member not in theirs.members:
            fillers = [p for n, p in theirs.members.items() if FILLER.match(n)]
            if not any((at, made.size) == (there, filler.size) for there, filler in fillers):
                yield f"{name}.{member}: not in cuda.h"
            continue
        their_at, their = theirs.members[member]
        if (at, made.size) != (their_at, their.size):
            here, there = f"{made.size} bytes at {at}", f"{their.size} at {their_at}"
            yield f"{name}.{member}: {here}, in cuda.h {there}"
        elif made.members:
            yield from faults_of_type(f"{name}.{member}", made, their)


def passes_alike(ours: Type, theirs: Type) -> bool:
    """Return whether a value of one type can be passed as a value of the other."""
    if (ours.kind, ours.size) != (theirs.kind, theirs.size):
        return False
    if ours.kind != "pointer" or not ours.target or not theirs.target:
        return True
    here, there = ours.target, theirs.target
    if "number" in (here.kind, there.kind):
        return here.kind != there.kind or here.size == there.size
    return True


def faults_of_function(name: str, ours: Type, theirs: Type) -> Iterator[str]:
    """Yield each difference between one of our prototypes and the header's."""
    if len(ours.parameters) != len(theirs.parameters):
        count = len(theirs.parameters)
        yield f"{name}: {len(ours.parameters)} parameters, in cuda.h {count}"
        return
    for i, (here, there) in enumerate(zip(ours.parameters, theirs.parameters, strict=True), 1):
        if not passes_alike(here, there):
            yield f"{name}: parameter {i} is {here}, in cuda.h {there}"


def compare(ours: Declarations, theirs: Declarations) -> tuple[list[str], str]:
    """Return the differences, and the number of declarations that were compared, in words."""
    faults: list[str] = []
    types = [n for n in ours.types if n in theirs.types and n.startswith(("CU", "cu"))]
    for name in types:
        faults += faults_of_type(name, ours.types[name], theirs.types[name])
    functions = [name for name in ours.functions if name in theirs.functions]
    for name in functions:
        faults += faults_of_function(name, ours.functions[name], theirs.functions[name])
    # The highest value of an enumeration grows with the version.
    constants = [n for n in ours.constants if n in theirs.constants and not n.endswith("_MAX")]
    faults += [
        f"{name} is {ours.constants[name]}, in cuda.h {theirs.constants[name]}"
        for name in constants
        if ours.constants[name] != theirs.constants[name]
    ]
    counts = f"{len(types)} types, {len(functions)} prototypes, {len(constants)} constants"
    return faults, counts


def missing(ours: Declarations, theirs: Declarations) -> list[str]:
    """Return the names that look like NVIDIA's but that only Tidegate declares."""
    names = [*ours.functions, *(n for n in ours.constants if re.match(r"CUD?A?_", n))]
    known = {*theirs.functions, *theirs.constants}
    return sorted(name for name in names if name not in known)


def examine(include: Path) -> tuple[list[str], list[str]]:
    """Compare all declarations with a header; return the differences, and what was compared."""
    theirs = read_header(include)
    faults: list[str] = []
    said: list[str] = []
    for where, ours in (("libcontrol", read_control()), ("simgpu", read_simulated())):
        found, counts = compare(ours, theirs)
        faults += [f"{where}: {fault}" for fault in found]
        faults += [f"{where}: {name} is not in cuda.h" for name in missing(ours, theirs)]
        said.append(f"{where}: {counts}")
    return faults, said


def packaged_include() -> Path | None:
    """Return the directory of the header that is installed with the tests' packages."""
    found = [d for p in sys.path for d in sorted(Path(p or ".").glob("nvidia/*/include"))]
    return next((d for d in found if (d / "cuda.h").exists()), None)


def header_version(include: Path) -> str:
    """Return the CUDA version of a header, such as 13.5."""
    text = (include / "cuda.h").read_text(encoding="utf-8", errors="replace")
    match = CUDA_VERSION.search(text)
    number = int(match[1]) if match else 0
    return f"{number // 1000}.{number % 1000 // 10}"


def main() -> int:
    """Compare with a header; return 1 if something differs, and 77 if there is no header."""
    include = Path(sys.argv[1]) if sys.argv[1:] else packaged_include()
    if include is None:
        print("cuda_abi: no cuda.h found; install nvidia-cuda-runtime, or give a directory")
        return 77
    faults, said = examine(include)
    print(*faults, sep="\n", end="\n" if faults else "")
    print(f"cuda.h {header_version(include)}: {'; '.join(said)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
