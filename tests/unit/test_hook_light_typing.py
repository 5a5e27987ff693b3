"""The hook's NamedTuple behaves like typing's, as far as the hook uses it."""

from __future__ import annotations

import subprocess
import sys
import typing
from pathlib import Path

import pytest

from oci_hook import light_typing

ROOT = Path(__file__).resolve().parents[2]


class Ours(light_typing.NamedTuple):
    name: str
    size: int = 3
    others: tuple[int, ...] = ()

    @property
    def twice(self) -> int:
        return 2 * self.size


class Theirs(typing.NamedTuple):
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
def test_it_is_made_and_read_like_typing_s(values, named):
    ours, theirs = Ours(*values, **named), Theirs(*values, **named)
    assert tuple(ours) == tuple(theirs)
    assert ours == theirs
    assert hash(ours) == hash(theirs)
    assert (ours.name, ours.size, ours.others) == (theirs.name, theirs.size, theirs.others)
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    assert ours._replace(size=9) == theirs._replace(size=9)
    assert type(ours._replace(size=9)) is Ours
    name, *_ = ours
    assert name == theirs.name
    assert ours.twice == 2 * theirs.size


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
def test_what_typing_s_refuses_is_refused(values, named):
    with pytest.raises(TypeError):
        Theirs(*values, **named)
    with pytest.raises(TypeError):
        Ours(*values, **named)


def test_a_field_cannot_be_set():
    with pytest.raises(AttributeError):
        Ours("a").size = 4


def test_defaults_are_of_the_class_alone():
    class Other(light_typing.NamedTuple):
        size: int

    with pytest.raises(TypeError):
        Other()
    assert Other(1) == (1,)


def test_what_is_impossible_is_said():
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


def test_a_start_imports_nothing_slow():
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
