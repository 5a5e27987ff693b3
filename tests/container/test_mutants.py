"""Mutants of the hook, each of which removes one rule from a copy of the code: the tests that the
rule names must fail.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.container.bundles import ROOT
from tools.mutate import read_table


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule.id for rule in read_table()[0]])
def test_no_mutant_of_a_rule_survives(rule: str) -> None:
    done = subprocess.run(
        [sys.executable, "tools/mutate.py", rule],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
