"""Checks the table of driver calls against NVIDIA's published source of the kernel module.

    python -m tools.check_driver_calls SOURCE [TAG...]

SOURCE is a checkout of https://github.com/NVIDIA/open-gpu-kernel-modules, or an unpacked source
package of a release. With tags, SOURCE is a git repository of that project, and each tag is
checked. Every number, size and offset in governor/hardware/calls.py becomes an assertion that gcc
evaluates. The program prints a line for each tree and for each difference, and exits with status 1
if there is a difference.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from governor.hardware import calls

INCLUDES = ("src/common/sdk/nvidia/inc", "src/nvidia/arch/nvalloc/unix/include")


def _members() -> Iterator[calls.Call | calls.Constant | calls.Layout]:
    for value in vars(calls).values():
        if isinstance(value, (calls.Call, calls.Constant, calls.Layout)):
            yield value
    yield from calls.STATUSES


def layouts(branch: int) -> list[calls.Layout]:
    """Return the structures that are valid for a branch, including those of calls."""
    found = [m for m in _members() if isinstance(m, calls.Layout)]
    found += [m.parameters for m in _members() if isinstance(m, calls.Call) and m.parameters]
    return [layout for layout in found if layout.since <= branch < layout.before]


def assertions(branch: int) -> str:
    """Return a C file that compiles only if the table agrees with the headers."""
    headers, checks = {"stddef.h": None}, []

    def check(expression: str, message: str) -> None:
        checks.append(f'_Static_assert({expression}, "{message}");')

    for member in _members():
        if isinstance(member, calls.Layout):
            continue
        number = member.number if isinstance(member, calls.Call) else member.value
        headers[member.header] = None
        check(f"({member.name}) == {number:#x}u", f"{member.name} is {number:#x}")
    for layout in layouts(branch):
        headers[layout.header] = None
        check(f"sizeof({layout.name}) == {layout.size}", f"{layout.name} has {layout.size} bytes")
        for field in layout.fields:
            name, size = f"{layout.name}.{field.name}", calls.SIZES[field.type] * field.n
            where = f"offsetof({layout.name}, {field.name})"
            check(f"{where} == {field.offset}", f"{name} is at {field.offset}")
            of = f"sizeof((({layout.name} *)0)->{field.name})"
            check(f"{of} >= {size}", f"{name} has at least {size} bytes")
    lines = [f"#include <{header}>" for header in ("nvtypes.h", *headers)]
    return "\n".join((*lines, *checks, ""))


def differences(tree: Path, branch: int) -> list[str]:
    """Return the errors that the compiler reports for the table and the source in `tree`."""
    command = ["gcc", "-fsyntax-only", "-w", "-x", "c", "-"]
    for include in INCLUDES:
        command += ["-I", str(tree / include)]
    done = subprocess.run(
        command, input=assertions(branch), capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return []
    wrong = re.findall(r'static assertion failed: "(.*)"', done.stderr)
    other = [line for line in done.stderr.splitlines() if "error:" in line and "static" not in line]
    return wrong + other or [done.stderr.strip()]


def branch_of(tree: Path) -> int:
    """Return the branch of a tree, from the version in its makefiles."""
    text = (tree / "version.mk").read_text()
    found = re.search(r"NVIDIA_VERSION\s*=\s*(\d+)\.", text)
    if not found:
        raise SystemExit(f"check_driver_calls: {tree}/version.mk names no version")
    return int(found[1])


def _unpack(repository: str, tag: str, into: Path) -> None:
    archive = subprocess.run(
        ["git", "-C", repository, "archive", tag, "version.mk", *INCLUDES],
        check=True,
        capture_output=True,
    )
    subprocess.run(["tar", "-x", "-C", str(into)], input=archive.stdout, check=True)


def main(arguments: list[str]) -> int:
    """Check each tree that is named; return 1 if one of them differs, else 0."""
    if not arguments:
        raise SystemExit((__doc__ or "").split("\n\n")[1])
    source, tags = arguments[0], arguments[1:]
    failed = False

    def report(name: str, tree: Path) -> bool:
        found = differences(tree, branch_of(tree))
        print(f"{name}: {'agrees with the table' if not found else f'{len(found)} differences'}")
        for line in found:
            print(f"  {line}")
        return bool(found)

    if not tags:
        failed = report(source, Path(source))
    for tag in tags:
        with tempfile.TemporaryDirectory() as directory:
            _unpack(source, tag, Path(directory))
            failed |= report(tag, Path(directory))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
