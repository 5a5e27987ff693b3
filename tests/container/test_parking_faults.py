"""A governor or container ends while memory is parked: real containers and a simulated GPU."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.images import SimulatedImage
from bench.node import BenchNode, Running
from bench.parking import ANSWER_S, MIB, finish, parking_of, start_model

pytestmark = pytest.mark.slow

HELD = 256 * MIB
N_MODELS = 4
SETTINGS = {"memory": {"overbook": 1.7, "host": "8Gi"}, "memory_reserve": "13Gi"}
"""Of the GPU's 16 GiB, 3 GiB are granted 1.7 times. A model has a quota of 1 GiB."""


@pytest.fixture
def node(require: Callable[..., None], build_dir: Path, tmp_path: Path) -> Iterator[BenchNode]:
    require("runc")
    (tmp_path / "out/tools").mkdir(parents=True)
    machine = SimulatedImage(tmp_path / "out", build_dir, tmp_path / "out/tools")
    with BenchNode(machine, settings=SETTINGS) as node:
        yield node


@pytest.fixture
def models(node: BenchNode) -> list[Running]:
    """Containers that do not fit on the GPU together."""
    return [start_model(node, f"model-{i}", HELD) for i in range(N_MODELS)]


def residency(node: BenchNode, model: Running) -> str:
    return str(parking_of(node, model)["residency"])


def parked_ones(node: BenchNode, models: list[Running]) -> list[Running]:
    """Wait until the memory of some models is parked, and return these models."""
    deadline = time.monotonic() + 30
    while not (found := [one for one in models if residency(node, one) == "parked"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def leaving_one(node: BenchNode, models: list[Running]) -> Running:
    """Wait until a model has been ordered to leave the GPU, and return it."""
    deadline = time.monotonic() + 20
    while not (found := [one for one in models if residency(node, one) == "leaving"]):
        assert time.monotonic() < deadline
    return found[0]


def ask(model: Running, number: int) -> None:
    (model.out / f"ask.{number}").touch()


def answer_of(model: Running, number: int) -> dict[str, Any]:
    path = model.out / f"answer.{number}"
    deadline = time.monotonic() + ANSWER_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{model.name} does not answer"
        time.sleep(0.01)
    return dict(json.loads(path.read_text()))


def host_memory(node: BenchNode) -> int:
    """Return how many bytes the governor's files for parked memory occupy."""
    found = 0
    for link in Path(f"/proc/{node.governor_pid}/fd").iterdir():
        try:
            if "tidegate-arena" in str(link.readlink()):
                found += link.stat().st_blocks * 512
        except OSError:
            continue
    return found


def test_parked_memory_waits_for_the_next_governor(node: BenchNode, models: list[Running]) -> None:
    parked = parked_ones(node, models)[0]
    node.stop_governor(signal.SIGKILL)
    ask(parked, 0)
    time.sleep(2)
    assert not (parked.out / "answer.0").exists()
    node.start_governor()
    assert answer_of(parked, 0)["wrong"] == 0
    assert [finish(node, one)["wrong"] for one in models] == [0] * N_MODELS


def test_a_governor_that_is_killed_during_moves_loses_nothing(
    node: BenchNode, models: list[Running]
) -> None:
    draw = random.Random(5)  # noqa: S311 - delays, no secret
    asked = dict.fromkeys(range(N_MODELS), 0)
    for _ in range(8):
        for i in (draw.randrange(N_MODELS), draw.randrange(N_MODELS)):
            ask(models[i], asked[i])
            asked[i] += 1
        time.sleep(draw.uniform(0, 0.3))
        node.stop_governor(signal.SIGKILL)
        time.sleep(draw.uniform(0, 0.3))
        node.start_governor()
        time.sleep(0.5)
    for i, n in asked.items():
        assert [answer_of(models[i], k)["wrong"] for k in range(n)] == [0] * n
    assert sum(parking_of(node, one)["moved"] for one in models) > 0
    assert [finish(node, one)["wrong"] for one in models] == [0] * N_MODELS


@pytest.mark.parametrize("removed", ["the one that comes", "the one that leaves"])
def test_a_container_that_is_removed_while_it_moves_leaves_nothing(
    node: BenchNode, models: list[Running], removed: str
) -> None:
    comes = parked_ones(node, models)[0]
    ask(comes, 0)
    gone = comes if removed == "the one that comes" else leaving_one(node, models)
    node.kill(gone)
    node.wait(gone, 30)
    models.remove(gone)
    for model in models:
        if model is not comes:
            ask(model, 0)
        assert answer_of(model, 0)["wrong"] == 0
    assert [finish(node, one)["wrong"] for one in models] == [0] * (N_MODELS - 1)
    deadline = time.monotonic() + 10
    while host_memory(node) or node.list_containers():
        assert time.monotonic() < deadline
        time.sleep(0.05)
