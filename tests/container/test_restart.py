"""A governor that is killed and started again under load: nothing is lost, and nobody notices but by the clock.

Real containers under runc on the simulated GPU, with the real hook and the real governor.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.machine import Simulated
from bench.node import Node, Running, last_json
from bench.progress import Progress, read_stamps, solo_profile
from governor.client import ask
from governor.container import container_key

MIB = 1 << 20
GIB = 1 << 30
MS = 1_000_000
S = 1_000_000_000
WAIT_S = 30


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, build_dir: Path, require: Callable[..., None]
) -> Iterator[Node]:
    require("gcc", "runc")
    machine = Simulated(tmp_path_factory.mktemp("restart"), build_dir)
    machine.programs += [build_dir / "stress", build_dir / "hoard"]
    with Node(machine) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(node: Node) -> Iterator[None]:
    """Leave nothing running and nothing registered."""
    yield
    for container in node.running:
        node.delete(container)
    node.running.clear()
    wait_for(lambda: not ask(node.config, "list")["containers"], "the books to be empty")
    assert not list((node.runtime_dir / "containers").iterdir())


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {WAIT_S} s for {what}")
        time.sleep(0.01)


def start_worker(
    node: Node, name: str, *options: str, seconds: float = 600, **annotations: str
) -> Running:
    """Start the workload; it begins when it is told to."""
    arguments = [
        *node.machine.command("burn", inside=True),
        "--seconds", str(seconds), "--out", "/out/progress.bin", "--wait-file", "/out/begin",
        *options,
    ]  # fmt: skip
    return node.start(name, arguments, {"memory": "2Gi", "compute": "40", **annotations})


def begin(*containers: Running) -> None:
    for container in containers:
        ready = container.out / "begin.ready"
        wait_for(lambda r=ready, c=container: r.exists() or c.process.poll() is not None, "a start")
        assert ready.exists(), (container.bundle / "output").read_text(errors="replace")
        (container.out / "begin").touch()


def restart(node: Node, number: int = signal.SIGKILL, away_s: float = 0.0) -> None:
    node.stop_governor(number)
    time.sleep(away_s)
    node.start_governor()


def known(node: Node) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in ask(node.config, "list")["containers"]}


def same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in ("id", "key", "pid", "confirmed", "compute", "compute_limit", "processes"):
        assert before[name] == after[name], name
    for old, new in zip(before["devices"], after["devices"], strict=True):
        assert (old["uuid"], old["memory_limit"]) == (new["uuid"], new["memory_limit"])


def events(node: Node, name: str) -> list[dict[str, Any]]:
    lines = (node.work / "governor.log").read_text().splitlines()
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if event.get("event") == name:
                found.append(event)
    return found


def test_a_killed_governor_is_replaced_and_nothing_changes(node: Node) -> None:
    pair = [start_worker(node, "a", compute="50"), start_worker(node, "b", compute="25")]
    begin(*pair)
    time.sleep(1)
    before = known(node)
    returned = []
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        restart(node, number)
        returned.append(time.monotonic_ns())
        after = known(node)
        assert set(after) == set(before)
        for identifier in before:
            same(before[identifier], after[identifier])
        time.sleep(3)
    print(known(node))
    for container in pair:
        times = [s.time for s in read_stamps(container.out / "progress.bin")]
        for r in returned:
            w = [sum(1 for t in times if r + S * k < t <= r + S * (k + 1)) for k in range(-2, 3)]
            print(container.name, w)
    print(*[l for l in (node.work / "governor.log").read_text().splitlines() ][-40:], sep="\n")
    print((pair[0].bundle / "output").read_text())
