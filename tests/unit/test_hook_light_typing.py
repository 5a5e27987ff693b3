"""Tests that the hook's NamedTuple behaves like typing's, as far as the hook uses it."""

from __future__ import annotations

import subprocess
import sys
import typing
from pathlib import Path

import pytest

from oci_hook import light_typing

ROOT = Path(__file__).resolve().parents[2]


class LightRecord(light_typing.NamedTuple):
    name: str
    size: int = 3
    others: tuple[int, ...] = ()

    @property
    def twice(self) -> int:
        return 2 * self.size


class TypingRecord(typing.NamedTuple):
    name: str
    size: int = 3
    others: tuple[int, ...] = ()


GOOD = [
    (("a",), {}),
    (("a", 4), {}),
    (("a", 4, (1,)), {}),
    (("a",), {"others": (2,)}),
    ((), {"size": 1, "name": "b"}),
]


@pytest.mark.parametrize(("values", "named"), GOOD)
def test_instances_behave_like_typings(values, named):
    light, full = LightRecord(*values, **named), TypingRecord(*values, **named)
    assert tuple(light) == tuple(full)
    assert light == full
    assert hash(light) == hash(full)
    assert (light.name, light.size, light.others) == (full.name, full.size, full.others)
    assert repr(light) == repr(full).replace("TypingRecord", "LightRecord")
    assert light._replace(size=9) == full._replace(size=9)
    assert type(light._replace(size=9)) is LightRecord
    name, *_ = light
    assert name == full.name
    assert light.twice == 2 * full.size


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((), {}),
        ((), {"size": 1}),
        (("a", 1, (), 2), {}),
        (("a",), {"length": 1}),
        (("a",), {"name": "b"}),
        (("a", 1, ()), {"size": 2}),
    ],
)
def test_the_same_arguments_are_refused(values, named):
    with pytest.raises(TypeError):
        TypingRecord(*values, **named)
    with pytest.raises(TypeError):
        LightRecord(*values, **named)


def test_a_field_cannot_be_set():
    with pytest.raises(AttributeError):
        LightRecord("a").size = 4


def test_defaults_are_not_shared_between_classes():
    class Other(light_typing.NamedTuple):
        size: int

    with pytest.raises(TypeError):
        Other()
    assert Other(1) == (1,)


def test_a_call_of_assert_never_raises():
    with pytest.raises(AssertionError, match="'x' is of an unexpected type"):
        light_typing.assert_never("x")  # type: ignore[arg-type]


SLOW = (
    "typing",
    "socket",
    "dataclasses",
    "inspect",
    "argparse",
    "logging",
    "pathlib",
    "subprocess",
)


def test_a_start_imports_no_slow_module():
    """Imports are most of the cost of starting a container that asks for a share."""
    names = (
        "apply client edits files image kernel main manifest plan request reserve runtime cleanup"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in {names.split()}: __import__('oci_hook.' + name)\n"
        f"print(*[name for name in {SLOW} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-ISE", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
