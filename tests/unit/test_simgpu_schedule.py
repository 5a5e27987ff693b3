"""The simulated GPU's timeline on a virtual clock: every number is exact.

Slices take 2 ms and switches 0.13 ms, so two busy contexts repeat every 4.26 ms: 2 ms for one, 0.13
ms, 2 ms for the other, 0.13 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from simgpu import simgpu
from simgpu.testing import MS, Context, CudaError, SimulatedDriver


@pytest.fixture(scope="module")
def library(build_dir: Path) -> SimulatedDriver:
    return SimulatedDriver(build_dir)


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    return simgpu.create(tmp_path / "gpus", virtual_clock=True)[0]


@pytest.fixture
def driver(library: SimulatedDriver, gpu: Path) -> Iterator[SimulatedDriver]:
    with library.attached(gpu.parent):
        yield library


def busy(gpu: Path) -> list[int]:
    return [context.busy for context in simgpu.status(gpu).contexts]


def fill(context: Context, n: int, duration: int = MS) -> None:
    for _ in range(n):
        context.burn(duration)


def test_a_context_alone_pays_for_no_switch(driver: SimulatedDriver, gpu: Path) -> None:
    fill(driver.context(), 50)
    driver.set_clock(20 * MS)
    assert busy(gpu) == [20 * MS]
    driver.set_clock(100 * MS)
    status = simgpu.status(gpu)
    assert (status.busy, status.switches) == (50 * MS, 0)
    assert (status.contexts[0].completed, status.contexts[0].pending) == (50, 0)


def test_a_context_that_comes_back_to_an_idle_gpu_pays_for_no_switch(
    driver: SimulatedDriver, gpu: Path
) -> None:
    context = driver.context()
    driver.context()
    for start in (0, 10 * MS, 20 * MS):
        driver.set_clock(start)
        context.burn(MS)
        context.synchronize()
        assert driver.clock() == start + MS
    assert simgpu.status(gpu).switches == 0


def test_two_busy_contexts_share_evenly_less_the_switches(
    driver: SimulatedDriver, gpu: Path
) -> None:
    for context in (driver.context(), driver.context()):
        fill(context, 60)
    driver.set_clock(100 * MS)
    # 23 periods end at 97.98 ms. Then the first context runs for 2 ms, and the switch to the second
    # begins.
    assert busy(gpu) == [48 * MS, 46 * MS]
    status = simgpu.status(gpu)
    assert status.switches == 47
    assert [context.slices for context in status.contexts] == [24, 24]


def test_slices_do_not_depend_on_the_length_of_kernels(driver: SimulatedDriver, gpu: Path) -> None:
    fill(driver.context(), 600, MS // 10)
    fill(driver.context(), 2, 70 * MS)
    driver.set_clock(100 * MS)
    assert busy(gpu) == [48 * MS, 46 * MS]


def test_four_busy_contexts_lose_six_percent(driver: SimulatedDriver, gpu: Path) -> None:
    for context in [driver.context() for _ in range(4)]:
        fill(context, 300)
    driver.set_clock(852 * MS)  # 100 periods of 4 x 2.13 ms
    # A switch follows each slice: the last slice ends at 851.87 ms, and its switch at 852 ms.
    assert busy(gpu) == [200 * MS] * 4
    status = simgpu.status(gpu)
    assert status.busy / status.now == pytest.approx(2 / 2.13)
    assert status.switches == 400


def test_work_that_ends_gives_way_at_once(driver: SimulatedDriver) -> None:
    first, second = driver.context(), driver.context()
    slot = driver.allocate(8)
    first.burn(MS // 2)
    second.burn(MS, stamp=slot)
    second.synchronize()
    assert driver.read_words(slot, 1) == [500_000 + 130_000 + MS]


def test_a_workload_with_gaps_beside_a_hog_waits_for_its_slices(driver: SimulatedDriver) -> None:
    """A workload that alternates 1 ms of work and 0.5 ms of idle time uses 67 % of the GPU alone.
    Here it gets 1 ms in 3.26 ms; on an H200 it got 29.6 %.
    """
    hog, gaps = driver.context(), driver.context()
    slot = driver.allocate(8)
    ends = []
    fill(hog, 100)
    for _ in range(10):
        gaps.burn(MS, stamp=slot)
        gaps.synchronize()
        ends += driver.read_words(slot, 1)
        driver.set_clock(driver.clock() + MS // 2)
    assert ends == [3_130_000 + 3_260_000 * n for n in range(10)]


def test_a_newcomer_waits_for_the_end_of_the_first_slice(driver: SimulatedDriver) -> None:
    first, second = driver.context(), driver.context()
    fill(first, 100)
    driver.set_clock(MS // 2)
    second.burn(MS)
    second.synchronize()
    assert driver.clock() == 3_130_000


def test_a_later_newcomer_waits_for_a_whole_slice(driver: SimulatedDriver) -> None:
    """As on an H200, a context that was alone gets a whole slice once another starts to wait."""
    first, second = driver.context(), driver.context()
    fill(first, 100)
    driver.set_clock(5 * MS)
    second.burn(MS)
    second.synchronize()
    assert driver.clock() == 8_130_000


def test_a_kernel_continues_where_it_was_interrupted(driver: SimulatedDriver) -> None:
    first, second = driver.context(), driver.context()
    first.burn(5 * MS)
    second.burn(5 * MS)
    first.synchronize()
    # The kernel runs for 2 ms, is off for 2.26 ms, runs for 2 ms, is off for 2.26 ms, and runs for
    # the rest.
    assert driver.clock() == 9_520_000


def test_a_context_that_is_destroyed_leaves_the_gpu_to_the_others(
    driver: SimulatedDriver, gpu: Path
) -> None:
    first, second = driver.context(), driver.context()
    fill(first, 100)
    fill(second, 100)
    driver.set_clock(MS)
    driver.call("cuCtxDestroy_v2", first.handle)
    driver.set_clock(11_130_000)
    assert busy(gpu) == [10 * MS]


def test_the_queue_holds_1024_commands_and_then_blocks(driver: SimulatedDriver) -> None:
    context = driver.context()
    fill(context, 1024)
    assert driver.clock() == 0
    context.burn(MS)
    assert driver.clock() == MS
    event = driver.event()
    driver.call("cuEventRecord", event, 0)
    assert driver.clock() == 2 * MS


def test_the_lengths_of_slices_and_switches_are_set_per_device(
    library: SimulatedDriver, tmp_path: Path
) -> None:
    gpu = simgpu.create(tmp_path, slice_us=1000, switch_us=500, virtual_clock=True)[0]
    with library.attached(tmp_path) as driver:
        for context in (driver.context(), driver.context()):
            fill(context, 60)
        driver.set_clock(30 * MS)
        # The file outlives the processes that use it, but keeps none of their data.
        assert busy(gpu) == [10 * MS, 10 * MS]
    assert busy(gpu) == []


def trace(library: SimulatedDriver, directory: Path, *, seed: int, steps: int) -> list[int]:
    simgpu.create(directory, seed=seed, jitter=100, virtual_clock=True)
    with library.attached(directory) as driver:
        contexts = [driver.context() for _ in range(3)]
        slots = driver.allocate(8 * 90)
        for n in range(90):
            contexts[n % 3].burn((1 + n % 7) * MS // 2, stamp=slots + 8 * n)
        for step in range(1, steps + 1):
            driver.set_clock(1000 * MS * step // steps)
        for context in contexts:
            context.synchronize()
        return driver.read_words(slots, 90)


def test_the_same_seed_and_arrivals_give_the_same_history(
    library: SimulatedDriver, tmp_path: Path
) -> None:
    first = trace(library, tmp_path / "1", seed=7, steps=1)
    assert first == trace(library, tmp_path / "2", seed=7, steps=1)
    assert first == trace(library, tmp_path / "3", seed=7, steps=997)
    assert first != trace(library, tmp_path / "4", seed=8, steps=1)


def test_two_devices_have_separate_clocks(library: SimulatedDriver, tmp_path: Path) -> None:
    paths = simgpu.create(tmp_path, devices=2, virtual_clock=True)
    with library.attached(tmp_path) as driver:
        fill(driver.context(0), 10)
        fill(driver.context(1), 10)
        driver.set_clock(5 * MS, device=0)
        driver.set_clock(9 * MS, device=1)
        assert [simgpu.status(path).busy for path in paths] == [5 * MS, 9 * MS]
        assert [simgpu.status(path).switches for path in paths] == [0, 0]


def test_without_a_device_there_is_no_gpu(library: SimulatedDriver, tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="CUDA_ERROR_NO_DEVICE"), library.attached(tmp_path):
        pass


def test_an_invalid_file_is_not_a_device(library: SimulatedDriver, tmp_path: Path) -> None:
    (tmp_path / "gpu0").write_bytes(bytes(simgpu.FILE_SIZE))
    with pytest.raises(CudaError, match="CUDA_ERROR_NO_DEVICE"), library.attached(tmp_path):
        pass
