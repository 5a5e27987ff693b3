"""Test how documents from outside are judged, for TIDEGATE_FUZZ_SECONDS seconds each (default 60): mutations of the corpus, and
coverage-guided inputs.

Both kinds are checked with `tests.fuzz.documents.hold`. Coverage guidance comes from Atheris (libFuzzer for Python), which the
usual environment does not include: `tools/fuzz-environment` makes a separate one next to .venv, from requirements-fuzz.lock.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.conftest import lack
from tests.fuzz.documents import KINDS, ROOT, corpus, hold, mutated

SECONDS = float(os.environ.get("TIDEGATE_FUZZ_SECONDS", "60"))
EXAMPLES = 1000
ATHERIS = ROOT / "build/fuzz/bin/python"
MIB = 512
"""Memory limit in MiB. Atheris, the schemas and a document take 200. Exceeding the limit shows a bug."""


@pytest.mark.parametrize("kind", KINDS)
def test_any_document_is_judged_as_its_schema_says(kind):
    end = time.monotonic() + SECONDS
    first = time.time_ns()  # different in each run; hypothesis prints the failing example
    rounds = 0
    while rounds == 0 or time.monotonic() < end:

        @seed(first + rounds)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(data=mutated(kind))
        def holds(data):
            hold(kind, data)

        holds()
        rounds += 1
    print(f"{rounds * EXAMPLES} documents")


@pytest.mark.parametrize("kind", KINDS)
def test_any_coverage_guided_document_is_judged_as_its_schema_says(kind, tmp_path):
    if not ATHERIS.exists():
        lack("needs Atheris: run tools/fuzz-environment")
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    for n, entry in enumerate(corpus("config" if kind == "edit" else kind)):
        if len(entry.data) < 10000:
            (seeds / str(n)).write_bytes(entry.data)
    done = subprocess.run(
        [
            ATHERIS, "-m", "tests.fuzz.guided", kind, seeds,
            f"-max_total_time={max(1, int(SECONDS))}", f"-rss_limit_mb={MIB}", "-timeout=20", "-max_len=10000",
            f"-artifact_prefix={tmp_path}/", "-print_final_stats=1", "-verbosity=1",
        ],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS + 120,
    )  # fmt: skip
    left = [p.read_bytes()[:2000] for p in Path(tmp_path).glob("*-*")]
    assert done.returncode == 0, f"{left}\n{done.stderr[-4000:]}"
    [runs] = [
        line for line in done.stderr.splitlines() if line.startswith("stat::number_of_executed")
    ]
    print(f"{kind}: {runs.split()[-1]} documents")
