"""What `tidegate ps`, `top` and `inspect` show about busy containers, compared with their quotas
and their work.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.machine import Simulated
from bench.node import BenchNode
from tests.container.nodes import begin, clear, start_worker, wait_for

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, build_dir: Path, require: Callable[..., None]
) -> Iterator[BenchNode]:
    require("runc")
    with BenchNode(Simulated(tmp_path_factory.mktemp("seen"), build_dir)) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(node: BenchNode) -> Iterator[None]:
    yield
    clear(node)


def tidegate(node: BenchNode, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "governor.cli", *arguments, "--runtime-dir", str(node.runtime_dir)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def devices(node: BenchNode) -> dict[str, dict]:
    """Return what `ps --json` shows of each container's GPU, by the name that the test gave it."""
    listed = json.loads(tidegate(node, "ps", "--json"))
    return {one["id"].rpartition("-")[2]: one["devices"][0] for one in listed}


def test_delivered_time_and_waits_are_shown_correctly(node: BenchNode) -> None:
    """Two containers always have work. One may not have more than a quarter of the time, and the
    other is lent the idle time.
    """
    small = start_worker(node, "small", compute="25")
    large = start_worker(node, "large", **{"compute": "50", "compute-limit": "100"})
    begin(small, large)
    time.sleep(2.5)  # the period that a rate covers
    # On a busy machine, programs may request their time too late, and so get less than their share
    # for a while, but never more.
    for _ in range(5):
        seen = [devices(node) for _ in range(5) if time.sleep(0.5) is None]
        mean = {
            name: {field: sum(one[name][field] for one in seen) / len(seen) for field in ("delivered", "lent", "waited")}
            for name in ("small", "large")
        }  # fmt: skip
        assert mean["small"]["delivered"] < 30
        assert mean["small"]["lent"] == 0
        assert mean["large"]["delivered"] <= 100
        for one in seen:
            beyond = max(0, one["large"]["delivered"] - 50)
            assert one["large"]["lent"] == pytest.approx(beyond, abs=0.2)
        assert mean["small"]["delivered"] + mean["large"]["delivered"] <= 102
        is_usual = (
            10 < mean["small"]["delivered"] < mean["large"]["delivered"]
            # A container that always has more work waits, for a grant or for room in the queue.
            and mean["small"]["waited"] > 40
            and mean["large"]["waited"] > 5
        )
        if is_usual:
            break
    assert is_usual, mean
    row = next(line for line in tidegate(node, "ps").splitlines() if "small" in line)
    cells = re.split("  +", row)
    assert re.fullmatch(r"[0-9]+/2048 MiB", cells[2])
    assert re.fullmatch(r"[0-9]+/25/25 %", cells[3])
    assert cells[-1] == "ok"


def test_an_idle_container_gets_no_time(node: BenchNode) -> None:
    idle = start_worker(node, "idle", compute="60")
    busy = start_worker(node, "busy", compute="40")
    begin(busy)
    wait_for((idle.out / "begin.ready").exists, "the idle container to be ready")
    time.sleep(2.5)
    seen = devices(node)
    assert seen["idle"]["delivered"] < 5
    assert seen["idle"]["waited"] < 5
    assert 15 < seen["busy"]["delivered"] < 48
    top = tidegate(node, "top", "--count", "1")
    used = sum(one["memory_used"] for one in seen.values()) / MIB
    assert used > 500
    assert re.search(
        r"^GPU 0  .*  time \[#+\.+\] [0-9]+ %  memory \[#+\.+\] [0-9]+/[0-9]+ MiB",
        top,
        re.MULTILINE,
    )
    shown = tidegate(node, "inspect", busy.identifier)
    assert re.search(
        r"^process +[0-9]+ /usr/bin/simgpu-workload .*--wait-file", shown, re.MULTILINE
    )
    assert f"bundle          {busy.bundle}" in shown
