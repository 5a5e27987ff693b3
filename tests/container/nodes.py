"""Operations on a node of bench.node: start work in containers, wait for it, and read what the governor reports."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bench.node import BenchNode, Running
from governor.client import ask
from governor.container import container_key

WAIT_S = 30

Value = TypeVar("Value")


def wait_for(condition: Callable[[], Value], awaited: str, seconds: float = WAIT_S) -> Value:
    """Wait until a condition is true, and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {awaited}"
        time.sleep(0.01)
    return value


def clear(node: BenchNode) -> None:
    """Delete all containers, and wait until none is registered."""
    for container in node.running:
        node.delete(container)
    node.running.clear()
    wait_for(lambda: not ask(node.config, "list")["containers"], "no container to be registered")


def start_worker(
    node: BenchNode, name: str, *options: str, seconds: float = 600, **annotations: str
) -> Running:
    """Start the workload; it begins on request."""
    arguments = [
        *node.machine.command("burn", inside=True),
        "--seconds", str(seconds), "--out", "/out/progress.bin", "--wait-file", "/out/begin",
        *options,
    ]  # fmt: skip
    return node.start(name, arguments, {"memory": "2Gi", "compute": "40", **annotations})


def wait_ready(*containers: Running) -> None:
    """Wait until these containers are set up. `Node.wait_ready` would require every container that
    was ever started to be alive.
    """
    for container in containers:
        ready = container.out / "begin.ready"
        wait_for(
            lambda r=ready, c=container: r.exists() or c.process.poll() is not None, "a container"
        )
        assert ready.exists(), show_output(container)


def begin(*containers: Running) -> None:
    """Let workloads begin, and wait until each has done some work."""
    wait_ready(*containers)
    for container in containers:
        (container.out / "begin").touch()
    wait_for(lambda: all(units(container) > 20 for container in containers), "work to be done")


def units(container: Running) -> int:
    """Return how many units a container has done so far."""
    try:
        return (container.out / "progress.bin").stat().st_size // 16
    except FileNotFoundError:
        return 0


def show_output(container: Running) -> str:
    """Return what a container has printed so far."""
    return (container.bundle / "output").read_text(errors="replace")


def directory(node: BenchNode, container: Running) -> Path:
    """Return the governor's directory that is mounted in a container."""
    return node.runtime_dir / "containers" / container_key(container.identifier)


def events(node: BenchNode, *names: str) -> list[dict]:
    """Return the events with these names from the governor's log."""
    found = []
    for line in (node.work / "governor.log").read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last line may be incomplete
            event = json.loads(line)
            if event["event"] in names:
                found.append(event)
    return found
