"""Run ledgers full of nonsense and lies beside containers that compute; tests/fuzz does so at length."""

from pathlib import Path

import pytest

from tests.fuzz.arbiter_pages import LIARS, build, hold


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("arbiter"))


@pytest.mark.parametrize("liars", LIARS)
def test_whatever_a_ledger_says_the_others_compute(program: Path, liars: str) -> None:
    hold(program, 2 if liars == "anything" else 1, 1, liars)
