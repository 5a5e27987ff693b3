"""Test the arbiter's threads with ledgers of arbitrary content, for TIDEGATE_FUZZ_SECONDS seconds each (default 60), and its
policy with such ledgers for an hour of simulated time.
"""

import os
import time

import pytest

from tests.fuzz import ledger_hour
from tests.fuzz.arbiter_pages import LIARS, build, hold

SECONDS = int(float(os.environ.get("TIDEGATE_FUZZ_SECONDS", "60")))


@pytest.mark.parametrize("liars", LIARS)
def test_arbitrary_ledgers_do_not_keep_other_containers_from_computing(tmp_path, liars):
    program = build(tmp_path)
    end = time.monotonic() + SECONDS
    while True:
        hold(program, min(10, max(2, SECONDS)), time.time_ns(), liars)
        if time.monotonic() >= end:
            break


@pytest.mark.parametrize("remains", [True, False])
def test_an_hour_of_false_reports_costs_honest_containers_no_time(tmp_path, remains):
    program = ledger_hour.build(tmp_path)
    for _ in range(4):
        ledger_hour.hold(program, 3600, time.time_ns() % (1 << 32), remains=remains)
