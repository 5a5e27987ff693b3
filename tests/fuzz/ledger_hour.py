"""Build ledger_hour.c with sanitizers, run it, and check how much time dishonest containers take from their neighbours."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from governor.arbiter import runner_config
from governor.config import Config
from tests.fuzz import arbiter_pages

SOURCES = ("tests/fuzz/ledger_hour.c", *arbiter_pages.POLICY)
SHARES = (50.0, 20.0)
LIARS = 30.0
"""Total share of the dishonest containers, in percent of the GPU."""
MOVED = 1.5
"""Maximum difference between the share of an honest container over 10 seconds and its quota, in percent of the GPU."""


def build(directory: Path) -> Path:
    """Build the program and return its path. Skip the test if there is no compiler with sanitizers."""
    return arbiter_pages.build(directory, SOURCES)


def hold(program: Path, seconds: int, seed: int, *, remains: bool) -> None:
    """Run the program for `seconds` simulated seconds with the default configuration, and check its results.

    With `remains`, the liars may report that their work continues after its grant. That time is
    charged to them instead of the container that has the GPU at that time, so the others may gain
    as much as the liars' own shares, but no more.
    """
    config = runner_config(Config())
    arbiter = config.arbiter
    numbers = (
        arbiter.quantum_ns, arbiter.most_ns, arbiter.longest_ns, arbiter.switch_ns, config.lookahead_ns,
    )  # fmt: skip
    done = subprocess.run(
        ["setarch", "-R", program, *map(str, (seconds, seed, *numbers, int(remains)))],
        capture_output=True, text=True, check=False, timeout=60 + seconds,
    )  # fmt: skip
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-8000:]}"
    result = json.loads(done.stdout)
    print(f"seed {seed}, remains {remains}: {result}")
    gain = LIARS + MOVED if remains else MOVED
    for share, least, most in zip(SHARES, result["least"], result["most"], strict=True):
        assert least["share"] > share - MOVED, f"seed {seed}: {result}"
        assert most["share"] < share + gain, f"seed {seed}: {result}"
