"""Ledgers with arbitrary values and false reports, next to containers that compute; tests/fuzz runs
them longer.
"""

from pathlib import Path

import pytest

from tests.fuzz import ledger_hour
from tests.fuzz.arbiter_pages import LIARS, build, hold


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("arbiter"))


@pytest.mark.parametrize("liars", LIARS)
def test_the_others_compute_whatever_a_ledger_contains(program: Path, liars: str) -> None:
    hold(program, 2 if liars == "anything" else 1, 1, liars)


@pytest.mark.parametrize(
    ("remains", "seeds"),
    [
        (True, [0]),
        pytest.param(True, [1, 2], marks=pytest.mark.slow),
        pytest.param(False, [0, 1, 2], marks=pytest.mark.slow),
    ],
)
def test_lies_of_all_kinds_take_nothing_from_a_neighbour(
    tmp_path: Path, *, remains: bool, seeds: list[int]
) -> None:
    made = ledger_hour.build(tmp_path)
    for seed in seeds:
        ledger_hour.hold(made, 600, seed, remains=remains)
