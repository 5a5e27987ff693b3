"""The simulated GPU's scheduler, steered from outside: slices, switches and residency, on a virtual clock.

Two processes always have work. A context switch costs 0.13 ms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from governor.hardware.steering import Steering
from governor.hardware.tenant import Share
from simgpu import simgpu
from simgpu.steering import SimulatedHardware
from simgpu.testing import MS, SimulatedDriver, start_python

HOG = """
driver.call("cuInit", 0)
context = driver.context()
for _ in range(500):
    context.burn(100 * MS)
print("ready", flush=True)
input()
"""


@pytest.fixture(scope="module")
def library(build_dir: Path) -> SimulatedDriver:
    return SimulatedDriver(build_dir)


def open_nvml(build_dir: Path, tmp_path: Path) -> SimulatedHardware:
    """Open a copy of the library: once attached to GPUs, a library keeps them and sees no later ones."""
    copy = tmp_path / "libnvidia-ml.so.1"
    copy.write_bytes((build_dir / "simgpu/libnvidia-ml.so.1").read_bytes())
    nvml, handle = ctypes.CDLL(str(copy)), ctypes.c_void_p()
    assert nvml.nvmlInit_v2() == 0
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
    return SimulatedHardware(nvml, handle)


@pytest.fixture
def node(library: SimulatedDriver, build_dir: Path, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A GPU with two processes that have 50 s of work each. `advance` moves its clock."""
    gpu = simgpu.create(tmp_path / "gpus", virtual_clock=True)[0]
    hogs = []
    for _ in range(2):
        hogs.append(start_python(build_dir, gpu.parent, HOG))
        assert hogs[-1].stdout
        assert hogs[-1].stdout.readline() == "ready\n"
    with library.attached(gpu.parent):
        library.call("cuInit", 0)
        hardware = open_nvml(build_dir, tmp_path)
        pids = [hog.pid for hog in hogs]

        def advance(ms: float) -> list[float]:
            """Advance the clock; return how many ms each process was on the GPU."""
            hardware.used_ns()
            library.set_clock(library.clock() + int(ms * MS))
            used = hardware.used_ns()
            return [used.get(pid, 0) / MS for pid in pids]

        try:
            yield SimpleNamespace(
                gpu=gpu, hardware=hardware, pids=pids, advance=advance, library=library, hogs=hogs
            )
        finally:
            for hog in hogs:
                hog.kill()
                hog.communicate()


def held(node: SimpleNamespace, i: int) -> object:
    (found,) = node.hardware.find(node.pids[i])
    return found


def test_time_is_divided_in_proportion_to_slices(node: SimpleNamespace) -> None:
    node.hardware.set_slice(held(node, 0), 6 * MS)
    node.hardware.set_slice(held(node, 1), 3 * MS)
    node.advance(20)
    first, second = node.advance(926)  # 100 rounds of 6 ms, 3 ms and two switches
    assert first == pytest.approx(600, abs=6)
    assert second == pytest.approx(300, abs=6)


def test_a_process_that_is_off_does_nothing_and_continues_where_it_was(
    node: SimpleNamespace,
) -> None:
    node.advance(5)
    node.hardware.switch([held(node, 1)], on=False)
    busy = {c.pid: c.busy for c in simgpu.status(node.gpu).contexts}
    assert node.advance(100)[1] == 0
    assert node.advance(100) == [100, 0]  # the other process is no longer interrupted
    assert {c.pid: c.busy for c in simgpu.status(node.gpu).contexts}[node.pids[1]] == busy[
        node.pids[1]
    ]
    node.hardware.switch([held(node, 1)], on=True)
    assert node.advance(213)[1] == pytest.approx(100, abs=2)


def test_with_both_off_the_gpu_idles_and_no_process_holds_it(node: SimpleNamespace) -> None:
    node.hardware.switch([held(node, 0), held(node, 1)], on=False)
    assert node.advance(50) == [0, 0]


def test_a_switch_interrupts_a_running_kernel(node: SimpleNamespace) -> None:
    """With kernels of 100 ms, the switch does not wait for a kernel to end."""
    node.hardware.switch([held(node, 1)], on=False)
    node.advance(37)
    node.hardware.switch([held(node, 0)], on=False)
    node.hardware.switch([held(node, 1)], on=True)
    first, second = node.advance(30)
    assert first == 0
    assert second == pytest.approx(30, abs=0.2)


def test_events_from_before_the_trace_was_opened_are_not_reported(
    node: SimpleNamespace, build_dir: Path, tmp_path: Path
) -> None:
    """Otherwise a governor that starts would charge them to its first step. The trace of a real GPU
    omits them as well.
    """
    node.advance(5000)
    (tmp_path / "later").mkdir()
    later = open_nvml(build_dir, tmp_path / "later")
    assert sum(later.used_ns().values()) == 0
    node.advance(100)
    assert sum(later.used_ns().values()) == pytest.approx(100 * MS, abs=10 * MS)


def test_a_process_that_is_alone_is_resident_with_or_without_work(
    library: SimulatedDriver, build_dir: Path, tmp_path: Path
) -> None:
    """On a real GPU, the trace has no record of a process that is never interrupted."""
    gpu = simgpu.create(tmp_path / "gpus", virtual_clock=True)[0]
    with library.attached(gpu.parent):
        context = library.context()
        context.burn(10 * MS)
        hardware = open_nvml(build_dir, tmp_path)
        library.set_clock(50 * MS)
        assert list(hardware.used_ns().values()) == [50 * MS]


def test_a_process_that_ended_has_no_time_and_is_not_found(node: SimpleNamespace) -> None:
    assert node.advance(100)[0] > 0
    node.hogs[0].kill()
    node.hogs[0].wait()
    node.advance(10)
    assert node.advance(10) == [0, pytest.approx(10, abs=0.2)]
    assert node.hardware.find(node.pids[0]) == []


def steer(node: SimpleNamespace, shares: list[Share], seconds: float) -> list[float]:
    """Run the policy for half a second, then for the given time; return each process's share of the
    GPU's time in that period, in percent.
    """
    clock: Callable[[], int] = node.library.clock
    steering = Steering(node.hardware, clock=clock)
    for i, share in enumerate(shares):
        steering.add(i, share)
        steering.enter(i, node.pids[i])
        (found,) = node.hardware.find(node.pids[i])
        steering.take(i, node.pids[i], [found])
    begun: dict[int, int] = {}
    begin = 0
    while clock() < (0.5 + seconds) * 1000 * MS:
        wake = steering.step()
        if not begun and clock() >= 500 * MS:
            begun, begin = dict(steering.used_ns), clock()
        node.library.set_clock(wake)
    steering.step()
    passed = clock() - begin
    return [100 * (steering.used_ns[i] - begun[i]) / passed for i in range(len(shares))]


def test_the_policy_shares_the_gpu_by_guarantee(node: SimpleNamespace) -> None:
    first, second = steer(node, [Share(0.6, 1), Share(0.3, 1)], 3)
    assert first + second >= 98
    assert first / (first + second) == pytest.approx(2 / 3, abs=0.01)


def test_the_policy_holds_both_to_their_caps(node: SimpleNamespace) -> None:
    assert steer(node, [Share(0.5, 0.5), Share(0.2, 0.2)], 3) == pytest.approx([50, 20], abs=0.6)
