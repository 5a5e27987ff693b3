"""The shape of the code: unique class names, functions and files of a readable size, no cycles."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

PRODUCT = ("bench", "governor", "kube", "libcontrol", "oci_hook", "simgpu", "tools", "vdriver")
GENERATED = ("kube/api/",)
MAX_LINES_OF_A_FUNCTION = 60
MAX_LINES_OF_A_FILE = 600


def sources(*endings: str, of: tuple[str, ...] = ()) -> list[Path]:
    """Return the files of the tree, without those that are generated; `of` names top directories."""
    try:
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):  # a tree without its history
        listed = [
            str(p.relative_to(ROOT))
            for top in (*PRODUCT, "tests", "examples")
            for p in (ROOT / top).rglob("*")
        ]
    return [
        ROOT / name
        for name in listed
        if name.endswith(endings)
        and not name.startswith(GENERATED)
        and ".gen." not in name
        and (not of or name.split("/")[0] in of)
        and (ROOT / name).is_file()
    ]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def trees(of: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    for path in sources(".py", of=of):
        yield str(path.relative_to(ROOT)), parse(path)


def classes(path: Path) -> set[str]:
    return {node.name for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)}


def test_no_class_name_is_defined_twice() -> None:
    # Text is searched first, because parsing all files takes ten seconds.
    where: dict[str, set[Path]] = defaultdict(set)
    for path in sources(".py"):
        for name in re.findall(r"\bclass\s+(\w+)", path.read_text()):
            where[name].add(path)
    twice = {
        name: sorted(str(path.relative_to(ROOT)) for path in paths if name in classes(path))
        for name, paths in where.items()
        if len(paths) > 1
    }
    assert {name: found for name, found in twice.items() if len(found) > 1} == {}


def test_no_function_of_the_product_is_longer_than_a_screen_or_two() -> None:
    long = {
        f"{name}:{node.name}": lines
        for name, tree in trees(PRODUCT)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_LINES_OF_A_FUNCTION
    }
    assert long == {}


def test_no_file_of_the_product_is_longer_than_can_be_read_in_one_go() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources(".py", ".c", ".h", ".html", ".css", ".js", of=PRODUCT)
        if (lines := path.read_bytes().count(b"\n")) > MAX_LINES_OF_A_FILE
    }
    assert long == {}


def imported(tree: ast.Module, modules: frozenset[str]) -> set[str]:
    """Return those of `modules` that a module imports, also in functions and for annotations."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    # A package's __init__ is not a separate layer.
    return {name for name in found if name in modules and f"{name}.__init__" not in modules}


@pytest.mark.parametrize("package", PRODUCT)
def test_modules_import_each_other_in_one_direction(package: str) -> None:
    parsed = {name.removesuffix(".py").replace("/", "."): tree for name, tree in trees((package,))}
    modules = frozenset(parsed)
    graph = {name: imported(tree, modules) - {name} for name, tree in parsed.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(f"a cycle: {' -> '.join(e.args[1])}", pytrace=False)


def references(build: Path, target: str) -> dict[str, dict[str, list[str]]]:
    """Return, for each C file of a library or a program, the names that it uses from other files.

    The names are read from the object files, and grouped by the file that defines them.
    """
    objects = build / f"{target}.p"
    defined, used = {}, defaultdict(list)
    for path in sorted(objects.glob("*.c.o")):
        file = path.name.removesuffix(".c.o")
        if not (ROOT / objects.parent.relative_to(build) / f"{file}.c").exists():
            continue  # built before the file was renamed
        listed = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout
        for kind, name in (line.split()[-2:] for line in listed.splitlines()):
            if kind == "U":
                used[name].append(file)
            elif kind.isupper():
                defined[name] = file
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for name, files in used.items():
        for file in files if name in defined else ():
            found[file].setdefault(defined[name], []).append(name)
    return found


@pytest.mark.parametrize(
    "target",
    [
        "libcontrol/libcuda.so.1",
        "libcontrol/libnvidia-ml.so.1",
        "libcontrol/libtidegate-arbiter.so",
        "simgpu/libcuda.so.999.10.1",
        "simgpu/libnvidia-ml.so.999.10.1",
        "oci_hook/front/tidegate-hook",
        "oci_hook/front/tidegate-runtime",
    ],
)
def test_c_files_use_each_other_in_one_direction(build_dir: Path, target: str) -> None:
    """A lower file calls a higher one only through a pointer that a higher file sets.

    libcontrol/lifecycle.c is an example.
    """
    used = references(build_dir, target)
    assert used
    try:
        list(TopologicalSorter({file: set(others) for file, others in used.items()}).static_order())
    except CycleError as e:
        circle = e.args[1]  # each file is used by the next
        pytest.fail(
            "\n".join(
                f"{user}.c uses {', '.join(used[user][file])} of {file}.c"
                for file, user in itertools.pairwise(circle)
            )
        )
