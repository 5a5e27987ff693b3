"""Mutants of the hook, each of which removes one rule from a copy of the code: the tests that the
rule names must fail.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.container.bundles import ROOT
from tools.mutate import read_table

SLOWEST = ("R22", "R14", "R3", "R4", "R2")
"""Rules whose mutants take 4 to 10 minutes. They begin first, so that no worker is alone with one of
them at the end."""


def rules() -> list[str]:
    """Return the ids of all rules, in the order in which their mutants begin."""
    ids = [rule.id for rule in read_table()[0]]
    return [*(one for one in SLOWEST if one in ids), *(one for one in ids if one not in SLOWEST)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", rules())
def test_no_mutant_of_a_rule_survives(rule: str) -> None:
    done = subprocess.run(
        [sys.executable, "tools/mutate.py", rule],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
