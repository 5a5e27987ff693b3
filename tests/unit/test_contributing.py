"""CONTRIBUTING.md names only things that exist: files, tests, and targets of make."""

from __future__ import annotations

import ast
import re
import shlex

import pytest

from bench.arms import Arm, ArmContainer
from bench.provenance import ROOT
from governor.verbs import setup

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TOP = {path.name for path in ROOT.iterdir()}
CODE = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL))


def exists(name: str) -> bool:
    """Return whether a path of the repository exists. The path may have wildcards."""
    return any(ROOT.glob(name.rstrip("/")))


@pytest.mark.parametrize(
    "name", sorted({c for c in CODE if c.split("/")[0] in TOP and "ENGINE" not in c})
)
def test_a_path_in_the_text_exists(name: str) -> None:
    assert name.startswith("build/") or exists(name)


def test_tests_in_the_table_of_directories_exist() -> None:
    rows = [line for line in TEXT.splitlines() if re.match(r"\| `.*\| .*\|", line)]
    found = 0
    for row in rows:
        tier = "unit"
        for name in re.findall(r"`([^`]+)`", row.split("|")[3] if row.count("|") == 4 else ""):
            tier, _, rest = name.rpartition("/") if "/" in name else (tier, "", name)
            stem = rest.rstrip("*")
            assert exists(f"tests/{tier}/{stem}*") or exists(f"tests/*/{stem}*"), name
            found += 1
    assert found > 20


def test_tests_that_commands_name_exist() -> None:
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", TEXT)
    assert named
    for path, test in named:
        if "ENGINE" in path:
            continue
        tree = ast.parse((ROOT / path).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not test or test in names, f"{path}::{test}"


def test_make_commands_name_existing_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    used = [
        shlex.split(line, comments=True) for line in TEXT.splitlines() if line.startswith("make ")
    ]
    used += [code.split() for code in CODE if code.startswith("make ")]
    assert {words[1] for words in used} <= targets
    assert [words[1] for words in used[:3]] == ["build", "check", "test"]


def test_the_example_of_an_arm_is_valid() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    arms = eval("{" + block + "}", {"Arm": Arm, "ArmContainer": ArmContainer})  # noqa: S307 - the page's own
    assert all(isinstance(arm, Arm) for arm in arms.values())


def test_the_names_in_the_steps_for_a_new_engine_exist() -> None:
    assert "docker" in setup.ENGINES
    assert "config" in setup.FOR
    assert (ROOT / "governor/setup/docker.py").exists()
