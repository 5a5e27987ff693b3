"""Build arbiter_pages.c with sanitizers, run it, and check that honest containers get their promised shares."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import ROOT, lack, need

POLICY = tuple(
    f"libcontrol/{name}.c"
    for name in ("arbiter", "arbiter_charge", "arbiter_choice", "arbiter_turn", "gangs")
)
SOURCES = (
    "tests/fuzz/arbiter_pages.c",
    "libcontrol/runner.c",
    "libcontrol/runner_pages.c",
    *POLICY,
)
FLAGS = (
    "-g", "-O1", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Ilibcontrol", "-pthread",
    "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all",
)  # fmt: skip
LIARS = ("anything", "idle", "done")
PROMISED = 25  # percent of each GPU, promised to each of three containers


def build(directory: Path, sources: Sequence[str] = SOURCES) -> Path:
    """Build the program and return its path. Skip the test if there is no compiler with sanitizers."""
    need("cc", "setarch")
    program = directory / Path(sources[0]).stem
    made = subprocess.run(
        ["cc", *FLAGS, *sources, "-o", program],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "cannot find" in made.stderr:
        lack("needs the sanitizers' libraries")
    assert made.returncode == 0, made.stderr
    return program


def hold(program: Path, seconds: int, seed: int, liars: str) -> None:
    """Run the program with one kind of liars, and check its results.

    The bound is half of the promised share. A busy machine delivers less than the promise, but a
    container that steals time would leave nothing.
    """
    done = subprocess.run(
        # Addresses are not randomised: random mappings may collide with the shadow memory of the
        # sanitizers.
        ["setarch", "-R", program, str(seconds), str(seed), liars],
        capture_output=True, text=True, check=False, timeout=seconds + 60,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1"},
    )  # fmt: skip
    assert done.returncode == 0, f"seed {seed}, {liars}: {done.stderr[-8000:]}"
    result = json.loads(done.stdout)
    assert min(result["shares"]) > PROMISED / 2, f"seed {seed}, {liars}: {result}"
    assert result["silence_ms"] < 1000, (
        f"seed {seed}, {liars}: {result}"
    )  # after that, processes consider the governor gone
    if liars == "anything":
        assert result["resting"] < 0.6, f"seed {seed}: {result}"
    print(f"seed {seed}, {liars}: {result}")
