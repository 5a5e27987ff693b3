"""Play each story on the simulated GPU, and check that the results are those that the story and its
page state.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.machine import ROOT
from tests.examples.story_files import EXAMPLES, STORIES, table, told

pytestmark = pytest.mark.container

TIMES = 3
"""Number of attempts. A story measures time on a machine that others use as well, so a single failure may be
due to that.
"""
LIMIT_S = 120


def play(run: Path, build_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [run, "--build", build_dir],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip


SLOW = {"ci-runners", "many-models", "several-gpus"}
"""Stories that take the most processor time; they run in `make test-full`."""


@pytest.mark.parametrize(
    "story", [pytest.param(s, marks=[pytest.mark.slow] if s in SLOW else []) for s in STORIES]
)
def test_a_story_has_the_stated_results(require, build_dir, story):
    require("runc")
    for _ in range(TIMES):
        done = play(EXAMPLES / story / "run", build_dir)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(done.stdout)
    assert sum(row.met == "yes" for row in rows) >= 4
    assert all(row.met == ("" if row.expected == "-" else "yes") for row in rows)

    def judged(rows):
        return [(row.what, row.expected) for row in rows if row.met]

    # The page has the same rows, and the output of `tidegate ps`.
    written = table(told(story, "what"))
    assert [row.what for row in written] == [row.what for row in rows]
    assert judged(written) == judged(rows)
    seen = told(story, "CONTAINER").splitlines()
    assert seen[0].split() == next(
        line.split() for line in done.stderr.splitlines() if line.startswith("CONTAINER")
    )
    assert len(seen) > 1


SCRATCH = """#!/usr/bin/env python3
import sys

sys.path[0:0] = [{examples!r}, {root!r}]
from bench import stories


def scene(stage):
    quick = stage.contain("quick", "burner-500", 0.2)
    stage.begin(quick)
    stage.wait(quick)
    stage.at_most("the answer", 42.0, 41, "ms")
    stage.at_least("the rest", 42.0, 42, "%")
    {more}


stories.play(__file__, scene)
"""


@pytest.fixture
def scratch(tmp_path):
    """Return a function that writes a story with one expectation that is not met."""
    name = f"scratch-{os.getpid()}"

    def write(more: str = "pass") -> Path:
        run = tmp_path / name / "run"
        run.parent.mkdir(exist_ok=True)
        run.write_text(SCRATCH.format(examples=str(EXAMPLES), root=str(ROOT), more=more))
        run.chmod(0o755)
        (run.parent / "containers.yaml").write_text(
            "quick: {tidegate.gpu/memory: 1Gi, tidegate.gpu/compute: '10'}\n"
        )
        return run

    yield write
    shutil.rmtree(ROOT / "build/stories" / name, ignore_errors=True)


def test_a_story_with_unexpected_results_reports_them_and_exits_with_1(require, build_dir, scratch):
    require("runc")
    done = play(scratch(), build_dir)
    assert done.returncode == 1, done.stderr
    assert [row.met for row in table(done.stdout)] == ["NO", "yes"]
    assert done.stderr.endswith("run: not as expected: the answer\n")


def test_a_container_that_fails_ends_a_story_with_one_line_and_leaves_nothing(
    require, build_dir, scratch
):
    require("runc")
    run = scratch('stage.begin(stage.run("lost", ["/no/such/program"], like="quick"))')
    done = play(run, build_dir)
    assert done.returncode == 1
    assert "run: lost ended before it began: " in done.stderr
    assert "/no/such/program" in done.stderr
    assert done.stdout == ""
    left = [p for p in Path("/run").glob("tidegate-*") if (p / "governor.sock").exists()]
    assert not [p for p in left if not Path(f"/proc/{p.name.rpartition('-')[2]}").exists()]
