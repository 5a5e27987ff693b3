"""GPU time divided among containers by the (simulated) GPU's own scheduler: `scheduling: hardware`.

GPU time is read from the device file, not from the governor or a container. The tests compare
fractions of the delivered time, or of the time on the GPU's clock, over seconds. A busy machine
hardly affects them, because the GPU decides, not a process.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.machine import Simulated
from bench.node import BenchNode, Running
from simgpu import simgpu
from tests.container.nodes import begin, clear, start_worker, wait_for


@pytest.fixture(scope="module")
def node(require, build_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchNode]:
    require("runc")
    machine = Simulated(tmp_path_factory.mktemp("hardware"), build_dir)
    with BenchNode(machine, settings={"scheduling": "hardware"}) as node:
        yield node


@pytest.fixture(autouse=True)
def tidy(node: BenchNode) -> Iterator[None]:
    yield
    clear(node)


WINDOWS = 5

numbers = itertools.count()


def work(node: BenchNode, compute: int, limit: int, *options: str) -> Running:
    quota = {"compute": str(compute), "compute-limit": str(limit)}
    return start_worker(node, f"worker-{next(numbers)}", *options, **quota)


def pid_of(node: BenchNode, container: Running) -> int:
    (pid,) = node.list_containers()[container.identifier]["processes"]
    return int(pid)


def busy(node: BenchNode) -> tuple[int, dict[int, int]]:
    status = simgpu.status(node.machine.directory / "gpu0")
    return status.now, {context.pid: context.busy for context in status.contexts}


def shares(node: BenchNode, seconds: float, *containers: Running) -> list[float]:
    """Return the percentage of the GPU's time that each container used in the next `seconds`
    seconds.
    """
    pids = [pid_of(node, container) for container in containers]
    begun, before = busy(node)
    time.sleep(seconds)
    ended, after = busy(node)
    return [100 * (after[pid] - before[pid]) / (ended - begun) for pid in pids]


def expect(
    node: BenchNode, seconds: float, *wanted: tuple[Running, float], most: float = 1.5
) -> None:
    """Require that in one of several windows every container has the wanted share."""
    containers = [container for container, _ in wanted]
    wants = [want for _, want in wanted]
    expect_that(node, seconds, containers, lambda got: got == pytest.approx(wants, abs=most))


def expect_that(
    node: BenchNode,
    seconds: float,
    containers: list[Running],
    is_right: Callable[[list[float]], bool],
) -> None:
    """Require that the containers' shares are right in one of several windows.

    If a busy machine delays the steering thread, the thread switches late, and excess time is
    deducted later: a container may have more or less in other windows. A container that is itself
    delayed leaves time unused.
    """
    windows = []
    for _ in range(WINDOWS):
        windows.append(shares(node, seconds, *containers))
        if is_right(windows[-1]):
            return
    pytest.fail(f"the shares were right in no window: {windows}")


def charged(node: BenchNode, *containers: Running) -> list[int]:
    """Return what each container has been charged so far, in nanoseconds."""
    listed = node.list_containers()
    return [listed[one.identifier]["devices"][0]["charged_ns"] for one in containers]


def used(node: BenchNode, *containers: Running) -> list[int]:
    """Return how long each container has been on the GPU so far, in nanoseconds."""
    times = busy(node)[1]
    return [times[pid_of(node, one)] for one in containers]


def first_part(before: list[int], after: list[int]) -> float:
    """Return the first container's fraction of what two containers gained between two readings."""
    first, second = (b - a for a, b in zip(before, after, strict=True))
    return first / (first + second)


def test_caps_hold_and_no_launch_waits(node: BenchNode) -> None:
    one, two = work(node, 60, 60), work(node, 30, 30)
    begin(one, two)
    time.sleep(0.5)
    before = node.list_containers()
    charged_before, used_before = charged(node, one, two), used(node, one, two)
    expect(node, 2, (one, 60), (two, 30))
    after = node.list_containers()
    for container in (one, two):
        first, last = (look[container.identifier]["devices"][0] for look in (before, after))
        assert first["waits"] == last["waits"]
    # The governor's charges match the GPU's measurement, and do not depend on what a container
    # reports. A governor that is delayed charges later; that matters less over a longer time.
    for _ in range(WINDOWS):
        parts = (
            first_part(charged_before, charged(node, one, two)),
            first_part(used_before, used(node, one, two)),
        )
        if parts[0] == pytest.approx(parts[1], abs=0.02):
            return
        time.sleep(1)
    pytest.fail(f"the first has {parts[0]:.3f} of the charges, and {parts[1]:.3f} of the use")


def test_idle_time_is_lent_in_the_ratio_of_the_guarantees(node: BenchNode) -> None:
    one, two = work(node, 40, 100), work(node, 20, 100)
    begin(one, two)
    time.sleep(0.5)
    expect_that(
        node,
        3,
        [one, two],
        lambda got: sum(got) >= 95 and got[0] / sum(got) == pytest.approx(2 / 3, abs=0.02),
    )


def test_a_changed_quota_takes_effect(node: BenchNode) -> None:
    from governor.client import ask

    one = work(node, 50, 50)
    begin(one)
    ask(node.config, "set", id=one.identifier, compute=20, compute_limit=20)
    time.sleep(0.5)
    expect(node, 2, (one, 20))


def test_kernels_of_any_length_are_interrupted(node: BenchNode) -> None:
    """Units take 50 ms: gated launches could not divide a tenth of a second at all."""
    long = work(node, 30, 30, "--unit-us", "50000")
    short = work(node, 60, 60)
    begin(long, short)
    time.sleep(0.5)
    expect(node, 2, (long, 30), (short, 60))


def test_a_container_left_off_by_a_killed_governor_is_on_again_within_two_seconds(
    node: BenchNode,
) -> None:
    one = work(node, 5, 5)
    begin(one)
    pid = pid_of(node, one)

    def is_off() -> bool:
        """Return whether the container did no work in 30 ms, of which it has 1.5 ms on average."""
        before = busy(node)[1][pid]
        time.sleep(0.03)
        return busy(node)[1][pid] == before

    delays = []
    for _ in range(3):
        wait_for(is_off, "the container to be off")
        node.stop_governor(signal.SIGKILL)
        try:
            killed = time.monotonic()
            before = busy(node)[1][pid]
            wait_for(lambda b=before: busy(node)[1][pid] > b, "its work without a governor", 20)
            delays.append(time.monotonic() - killed)
        finally:
            node.start_governor()
        # The next governor holds it to its share again, whatever state the previous one left.
        wait_for(lambda: one.identifier in node.list_containers(), "it to be adopted")
        time.sleep(1.0)
        expect(node, 1, (one, 5))
    # A busy machine may delay the watchdog, but hardly in every round.
    assert min(delays) < 2.0, delays


def test_a_governor_that_stops_cleanly_leaves_no_container_off(node: BenchNode) -> None:
    one = work(node, 5, 5)
    begin(one)
    pid = pid_of(node, one)
    node.stop_governor()
    try:
        before = busy(node)[1][pid]
        wait_for(lambda: busy(node)[1][pid] > before, "it to work on")
    finally:
        node.start_governor()


def test_a_container_that_is_killed_while_it_is_off_leaves_nothing(node: BenchNode) -> None:
    one = work(node, 5, 5)
    begin(one)
    pid = pid_of(node, one)
    os.kill(pid, signal.SIGKILL)
    node.wait(one, 20)
    wait_for(lambda: pid not in busy(node)[1], "its contexts to be gone")
    two = work(node, 50, 100)
    begin(two)
    expect_that(node, 1, [two], lambda got: got[0] >= 95)
