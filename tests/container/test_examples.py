"""The examples work as the documents say: they run to their end."""

import json
import subprocess

from bench.provenance import ROOT
from tests.conftest import lack


def test_the_example_of_three_containers_runs_to_its_end(require, build_dir):
    require("runc")
    if not (ROOT / ".venv/bin/python").exists() or build_dir != ROOT / "build/meson":
        lack("the example is for a checkout where `make build` has run")
    done = subprocess.run(
        [ROOT / "examples/three-containers/run"], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[-3:]]
    did = {name: json.loads(said) for name, said in lines}
    assert {one["result"] for one in did.values()} == {"CUDA_SUCCESS"}
    assert did["alpha"]["units"] > did["beta"]["units"] > did["gamma"]["units"] > 0
