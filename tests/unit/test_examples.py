"""Random tests use the same examples in every run of `make test`, and new ones in a search."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.conftest import ROOT, SEARCH, TESTS

# This does what conftest does for a run by pytest, and then runs one test and prints its examples.
RUN = """
import sys
from hypothesis import given, settings, strategies as st
from tests import conftest
settings.load_profile(sys.argv[1])
for name in sys.argv[2:]:
    __import__(name)
conftest.pytest_sessionstart(None)
drawn = []
@given(st.text(max_size=5), st.integers(), st.binary(max_size=5), st.floats())
def test(text, number, data, real):
    drawn.append((text, number, data, real))
test()
for values in drawn:
    print(ascii(values))
"""


def drawn(profile: str, *modules: str) -> str:
    """Return the examples of a test in a process that has these modules loaded."""
    return subprocess.run(
        [sys.executable, "-c", RUN, profile, *modules],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_a_test_has_the_same_examples_whatever_else_is_loaded() -> None:
    """Hypothesis takes constants from the project's loaded modules, and these differ between workers."""
    alone = drawn("fixed")
    assert len(alone.splitlines()) == settings.get_profile("fixed").max_examples
    assert drawn("fixed", "governor.allocations", "kube.convert", "vdriver.discover") == alone


def test_each_search_has_more_and_different_examples() -> None:
    one, other = drawn("search"), drawn("search")
    assert one != other
    assert len(one.splitlines()) >= SEARCH * settings.get_profile("fixed").max_examples
    assert settings.get_profile("search").print_blob


def _settings() -> Iterator[tuple[Path, ast.Call]]:
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        if "hypothesis" in text and path not in {Path(__file__), TESTS / "conftest.py"}:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "settings":
                    yield path.relative_to(TESTS), node


def test_no_test_overrides_the_settings_of_the_profile() -> None:
    """The number of examples must grow in a search. The profile alone sets everything else."""
    wrong, found = [], 0
    for path, call in _settings():
        found += 1
        for keyword in call.keywords:
            value = ast.unparse(keyword.value)
            right = {
                "max_examples": value.startswith("examples(") or path.parts[0] == "fuzz",
                "deadline": value == "None",
                "suppress_health_check": "too_slow" in value or value == "list(HealthCheck)",
                "phases": True,
                "stateful_step_count": True,
            }
            if not right.get(str(keyword.arg), False):
                wrong.append(f"{path}:{call.lineno}: {keyword.arg}={value}")
    assert wrong == []
    assert found > 30


@pytest.mark.parametrize("name", ["fixed", "search"])
def test_no_profile_depends_on_a_clock_or_on_earlier_runs(name: str) -> None:
    profile = settings.get_profile(name)
    assert profile.deadline is None
    assert profile.database is None
    assert profile.derandomize is (name == "fixed")
