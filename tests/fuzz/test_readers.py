"""Test the readers of files that other programs wrote, on damaged files, for TIDEGATE_FUZZ_SECONDS seconds each (default 60)."""

import os
import time

import pytest
from hypothesis import given, seed, settings

from tests.fuzz.mutations import (
    hold_the_cache_to_its_contract,
    hold_to_the_contract,
    mutated_cache,
    mutated_elf,
)

SECONDS = float(os.environ.get("TIDEGATE_FUZZ_SECONDS", "60"))
EXAMPLES = 1000


@pytest.mark.parametrize(
    ("contents", "hold"),
    [
        pytest.param(mutated_elf(), hold_to_the_contract, id="elf"),
        pytest.param(mutated_cache(), hold_the_cache_to_its_contract, id="cache"),
    ],
)
def test_a_damaged_file_is_refused_or_read(contents, hold):
    end = time.monotonic() + SECONDS
    first = time.time_ns()  # different in each run; hypothesis prints the failing example
    rounds = 0
    while rounds == 0 or time.monotonic() < end:

        @seed(first + rounds)
        @settings(max_examples=EXAMPLES, deadline=None)
        @given(content=contents)
        def holds(content):
            hold(content)

        holds()
        rounds += 1
    print(f"{rounds * EXAMPLES} files")
