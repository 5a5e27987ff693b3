"""The arbiter's threads with ledgers of arbitrary content, for TIDEGATE_FUZZ_SECONDS seconds (60 each)."""

import os
import time

import pytest

from tests.fuzz.arbiter_pages import LIARS, build, hold

SECONDS = int(float(os.environ.get("TIDEGATE_FUZZ_SECONDS", "60")))


@pytest.mark.parametrize("liars", LIARS)
def test_whatever_a_ledger_says_the_others_compute(tmp_path, liars):
    program = build(tmp_path)
    end = time.monotonic() + SECONDS
    while True:
        hold(program, min(10, max(2, SECONDS)), time.time_ns(), liars)
        if time.monotonic() >= end:
            break
