"""Containers that are suspended and resumed with the driver's checkpoint calls, on the simulated
GPU.

The GPU's memory and work are read from the device file. The containers run under runc, with the
real hook, control library and governor.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.machine import Simulated
from bench.node import BenchNode, Running
from governor import cli
from governor.client import ask
from governor.errors import RefusedError
from simgpu import simgpu
from simgpu.testing import SimulatedDriver
from tests.container.nodes import begin, clear, events, start_worker, units, wait_for, wait_ready

MIB = 1 << 20
WHOLE = 16384 * MIB
MEMORY = str(256 * MIB)

numbers = itertools.count()


@pytest.fixture(scope="module", params=["gate", "hardware"])
def node(
    request: pytest.FixtureRequest,
    require,
    build_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[BenchNode]:
    require("runc")
    machine = Simulated(tmp_path_factory.mktemp("suspension"), build_dir)
    with BenchNode(machine, settings={"scheduling": request.param}) as node:
        yield node


@pytest.fixture(autouse=True)
def tidy(node: BenchNode) -> Iterator[None]:
    yield
    clear(node)


def worker(node: BenchNode, *options: str, **quota: str) -> Running:
    container = start_worker(node, f"worker-{next(numbers)}", "--memory", MEMORY, *options, **quota)
    begin(container)
    return container


def used(node: BenchNode) -> int:
    return simgpu.status(node.machine.directory / "gpu0").used


def state(node: BenchNode, container: Running) -> str:
    return str(node.list_containers()[container.identifier]["suspension"])


def suspend(node: BenchNode, container: Running, **options: float) -> dict:
    return ask(node.config, "suspend", timeout=60, id=container.identifier, **options)


def resume(node: BenchNode, container: Running) -> dict:
    return ask(node.config, "resume", timeout=60, id=container.identifier)


def expect_work(container: Running) -> None:
    before = units(container)
    wait_for(lambda: units(container) > before + 20, "more work")


def expect_rest(*containers: Running) -> None:
    before = [units(one) for one in containers]
    time.sleep(0.5)
    assert [units(one) for one in containers] == before


def test_a_suspended_container_has_nothing_on_the_gpu_and_works_again_when_it_is_resumed(
    node: BenchNode,
) -> None:
    container = worker(node, "--processes", "2")
    before = used(node)
    assert before >= 2 * 512 * MIB + 256 * MIB
    answer = suspend(node, container)
    assert answer["processes"] == 2
    assert answer["memory"] == before
    assert used(node) == 0
    assert state(node, container) == "suspended"
    expect_rest(container)
    assert resume(node, container)["processes"] == 2
    assert used(node) == before
    assert state(node, container) == ""
    expect_work(container)
    names = ("container-suspended", "container-resumed")
    logged = [e["event"] for e in events(node, *names) if e["container"] == container.identifier]
    assert logged == list(names)


def test_other_containers_get_the_time_of_a_suspended_one(node: BenchNode) -> None:
    one, two = worker(node), worker(node, **{"compute-limit": "100"})
    suspend(node, one)

    def busy_part() -> float:
        """Return the fraction of the next second for which the GPU works."""
        before = simgpu.status(node.machine.directory / "gpu0")
        time.sleep(1)
        after = simgpu.status(node.machine.directory / "gpu0")
        return (after.busy - before.busy) / (after.now - before.now)

    # On a busy machine the other container may not launch in time.
    assert any(busy_part() > 0.85 for _ in range(5))
    expect_work(two)
    resume(node, one)
    expect_work(one)
    expect_work(two)


def test_a_suspended_container_stays_suspended_under_the_next_governor(node: BenchNode) -> None:
    container = worker(node)
    suspend(node, container)
    node.stop_governor(signal.SIGKILL)
    node.start_governor()
    assert state(node, container) == "suspended"
    expect_rest(container)
    assert used(node) == 0
    resume(node, container)
    expect_work(container)


def test_a_container_whose_work_does_not_end_keeps_running(node: BenchNode) -> None:
    options = ("--unit-us", "1000000", "--depth", "4")
    container = start_worker(node, f"worker-{next(numbers)}", *options, **{"compute-limit": "100"})
    wait_ready(container)
    (container.out / "begin").touch()
    wait_for(lambda: units(container) > 0, "the first kernel")
    with pytest.raises(RefusedError, match=r"process \d+: its work did not end within 0.05 s"):
        suspend(node, container, wait=0.05)
    assert state(node, container) == ""
    before = units(container)
    wait_for(lambda: units(container) > before, "the next kernel")
    failures = events(node, "container-not-suspended", "request-refused")
    logged = [e["event"] for e in failures if e["container"] == container.identifier]
    assert logged == ["container-not-suspended"]


def test_a_suspended_container_can_be_killed(node: BenchNode) -> None:
    container = worker(node)
    suspend(node, container)
    node.kill(container)
    container.process.wait(30)
    wait_for(lambda: container.identifier not in node.list_containers(), "the end")
    other = worker(node)
    suspend(node, other)
    resume(node, other)
    expect_work(other)


def test_only_a_running_container_is_suspended_and_only_a_suspended_one_resumed(
    node: BenchNode,
) -> None:
    container = worker(node)
    with pytest.raises(RefusedError, match="the container is not suspended"):
        resume(node, container)
    suspend(node, container)
    with pytest.raises(RefusedError, match="the container is already suspended"):
        suspend(node, container)
    resume(node, container)
    for op in ("suspend", "resume"):
        with pytest.raises(RefusedError, match="no container 'nobody' shares a GPU"):
            ask(node.config, op, id="nobody")


def test_the_commands_report_what_was_done(
    node: BenchNode, capsys: pytest.CaptureFixture[str]
) -> None:
    container = worker(node)
    options = [container.identifier, "--runtime-dir", node.config.runtime_dir]
    memory = used(node) // MIB
    assert cli.main(["suspend", *options, "--wait", "20"]) == 0
    assert cli.main(["ps", *options[1:]]) == 0
    assert cli.main(["top", "--count", "1", *options[1:]]) == 0
    [device] = node.list_containers()[container.identifier]["devices"]
    assert device["contexts"] == 0
    assert cli.main(["resume", *options]) == 0
    suspended, *table, resumed = capsys.readouterr().out.splitlines()
    assert suspended.startswith(f"{container.identifier}: suspended, 1 process, {memory} MiB, ")
    assert any("suspended" in line for line in table)
    [gpu] = [line for line in table if line.startswith("GPU 0") and "memory [" in line]
    assert "] 0/" in gpu.partition("memory [")[2]  # nothing of it is on the GPU
    assert resumed.startswith(f"{container.identifier}: resumed, 1 process, ")
    expect_work(container)


def test_an_interrupted_command_reports_that_the_governor_continues(
    node: BenchNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    container = worker(node)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("governor.verbs.suspend.ask", interrupt)
    options = [container.identifier, "--runtime-dir", node.config.runtime_dir]
    assert cli.main(["suspend", *options]) == 130
    assert "the governor continues to suspend it" in capsys.readouterr().err


def test_memory_of_a_suspended_container_stays_charged(node: BenchNode) -> None:
    """Otherwise the container's other processes could allocate as much, and it would exceed its
    quota when it is resumed.
    """
    container = worker(node, "--processes", "2")

    def held() -> int:
        (device,) = node.list_containers()[container.identifier]["devices"]
        return int(device["memory_used"])

    whole = 2 * (512 + 256) * MIB
    # At first the contexts are charged with their expected size, which is larger.
    wait_for(lambda: whole <= held() < whole + 8 * MIB, "a sample")
    suspend(node, container)
    time.sleep(0.6)  # two samples
    assert held() >= whole
    with pytest.raises(RefusedError, match="the container uses 1540 MiB"):
        ask(node.config, "set", id=container.identifier, memory=whole - 256 * MIB)
    resume(node, container)
    time.sleep(0.6)
    assert held() >= whole
    wait_for(lambda: held() < whole + 64 * MIB, "a sample of the new contexts")
    assert node.list_containers()[container.identifier]["violations"] == []


def test_a_container_that_undoes_its_suspension_gains_nothing(
    node: BenchNode, build_dir: Path
) -> None:
    """The driver lets the container's processes restore each other; here the test restores them."""
    container = worker(node, "--depth", "8", compute="20", **{"compute-limit": "20"})
    suspend(node, container)
    (pid,) = node.list_containers()[container.identifier]["processes"]
    driver = SimulatedDriver(build_dir)
    with driver.attached(node.machine.directory):
        for call in ("Restore", "Unlock"):
            driver.call(f"cuCheckpointProcess{call}", pid, None)
    gpu = node.machine.directory / "gpu0"
    time.sleep(1)
    before = simgpu.status(gpu)
    time.sleep(1)
    after = simgpu.status(gpu)
    assert after.busy == before.busy
    assert state(node, container) == "suspended"
    resume(node, container)
    expect_work(container)
