"""The simulated driver's API: memory, the order of streams and events, capture, and look-up."""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simgpu import simgpu
from simgpu.testing import (
    DISABLE_TIMING,
    GLOBAL,
    LEGACY,
    MS,
    NON_BLOCKING,
    PER_THREAD,
    RELAXED,
    ROOT,
    THREAD_LOCAL,
    Context,
    CudaError,
    SimulatedDriver,
)

MIB = 1 << 20
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 1, 2, 3
INVALID_HANDLE, NOT_FOUND, NOT_READY, ILLEGAL_ADDRESS = 400, 500, 600, 700
UNSUPPORTED, INVALIDATED, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = 900, 901, 906, 907, 908


@pytest.fixture(scope="module")
def library(build_dir: Path) -> SimulatedDriver:
    return SimulatedDriver(build_dir)


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    return simgpu.create(tmp_path / "gpus", memory=1024 * MIB, virtual_clock=True)[0]


@pytest.fixture
def driver(library: SimulatedDriver, gpu: Path) -> Iterator[SimulatedDriver]:
    with library.attached(gpu.parent):
        yield library


@pytest.fixture
def context(driver: SimulatedDriver) -> Context:
    return driver.context()


def in_thread(function: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


# Memory


def test_each_context_takes_512_mib_while_it_exists(driver: SimulatedDriver, gpu: Path) -> None:
    assert simgpu.status(gpu).used == 0
    first = driver.context()
    assert driver.free_memory() == 512 * MIB
    second = driver.context()
    assert simgpu.status(gpu).used == 1024 * MIB
    assert driver.free_memory() == 0
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        driver.context()
    driver.call("cuCtxDestroy_v2", second.handle)
    first.make_current()
    assert driver.free_memory() == 512 * MIB


@pytest.mark.usefixtures("context")
def test_a_large_allocation_is_charged_in_units_of_2_mib(driver: SimulatedDriver) -> None:
    for size, charged in ((MIB, 2), (2 * MIB, 2), (2 * MIB + 1, 4), (64 * MIB + 1, 66)):
        address = driver.allocate(size)
        assert driver.free_memory() == (512 - charged) * MIB
        driver.call("cuMemFree_v2", address)
        assert driver.free_memory() == 512 * MIB


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(("n", "size", "slabs"), [(5000, 256, 2), (100, 600 << 10, 34)])
def test_small_allocations_share_slabs_of_2_mib(
    driver: SimulatedDriver, n: int, size: int, slabs: int
) -> None:
    blocks = [driver.allocate(size) for _ in range(n)]
    assert driver.free_memory() == (512 - 2 * slabs) * MIB
    ends = sorted(blocks)
    assert all(b - a >= size for a, b in itertools.pairwise(ends))
    for block in blocks[: n // 2]:
        driver.call("cuMemFree_v2", block)
    again = [driver.allocate(size) for _ in range(n // 2)]
    assert driver.free_memory() == (512 - 2 * slabs) * MIB
    for block in blocks[n // 2 :] + again:
        driver.call("cuMemFree_v2", block)
    assert driver.free_memory() == 512 * MIB
    assert driver.try_call("cuMemFree_v2", blocks[0]) == INVALID_VALUE


@pytest.mark.usefixtures("context")
def test_managed_memory_takes_no_device_memory(driver: SimulatedDriver) -> None:
    address = driver.get("cuMemAllocManaged", 4096 * MIB, 1)
    assert driver.free_memory() == 512 * MIB
    driver.call("cuMemsetD32_v2", address, 7, 2)
    assert ctypes.c_uint64.from_address(address).value == 0x0000000700000007
    driver.call("cuMemFree_v2", address)
    assert driver.try_call("cuMemFree_v2", address) == INVALID_VALUE


@pytest.mark.usefixtures("context")
def test_host_memory_is_not_freed_as_device_memory(driver: SimulatedDriver) -> None:
    pinned = driver.get("cuMemHostAlloc", 16, 0)
    device = driver.allocate(16)
    assert driver.try_call("cuMemFree_v2", pinned) == INVALID_VALUE
    assert driver.try_call("cuMemFreeHost", device) == INVALID_VALUE
    driver.call("cuMemFreeHost", pinned)
    driver.call("cuMemFree_v2", device)


@pytest.mark.usefixtures("context")
def test_a_request_beyond_the_gpus_memory_fails(driver: SimulatedDriver) -> None:
    address = ctypes.c_uint64()
    assert driver.try_call("cuMemAlloc_v2", ctypes.byref(address), 513 * MIB) == OUT_OF_MEMORY
    driver.allocate(512 * MIB)
    assert driver.try_call("cuMemAlloc_v2", ctypes.byref(address), 1) == OUT_OF_MEMORY
    assert driver.try_call("cuMemAlloc_v2", ctypes.byref(address), 1 << 63) == OUT_OF_MEMORY
    assert driver.try_call("cuMemAlloc_v2", ctypes.byref(address), 0) == INVALID_VALUE


def test_a_context_that_does_not_fit_cannot_be_created(
    library: SimulatedDriver, tmp_path: Path
) -> None:
    simgpu.create(tmp_path, memory=511 * MIB, virtual_clock=True)
    with library.attached(tmp_path), pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        library.context()


def test_destroying_a_context_frees_what_it_allocated(
    library: SimulatedDriver, tmp_path: Path
) -> None:
    gpu = simgpu.create(tmp_path, memory=2048 * MIB, virtual_clock=True)[0]
    with library.attached(tmp_path):
        first, second = library.context(), library.context()
        library.allocate(100 * MIB)
        assert simgpu.status(gpu).used == 1124 * MIB
        library.call("cuCtxDestroy_v2", second.handle)
        assert simgpu.status(gpu).used == 512 * MIB
        library.call("cuCtxDestroy_v2", first.handle)
        assert simgpu.status(gpu).used == 0


def test_the_primary_context_lives_while_it_is_retained(driver: SimulatedDriver, gpu: Path) -> None:
    handle = driver.get("cuDevicePrimaryCtxRetain", 0)
    assert driver.get("cuDevicePrimaryCtxRetain", 0) == handle
    assert simgpu.status(gpu).used == 512 * MIB
    driver.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert simgpu.status(gpu).used == 512 * MIB
    driver.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert simgpu.status(gpu).used == 0


@pytest.mark.usefixtures("context")
def test_copies_and_fills_change_the_memory(driver: SimulatedDriver) -> None:
    source = driver.allocate(4 * MIB)
    target = driver.allocate(4 * MIB)
    driver.call("cuMemcpyHtoD_v2", source, ctypes.c_char_p(b"12345678"), 8)
    driver.call("cuMemsetD32_v2", source + 8, 0x01020304, 2)
    driver.call("cuMemcpyDtoD_v2", target, source, 4 * MIB)
    assert driver.read_words(target, 3) == [0x3837363534333231, 0x0102030401020304, 0]


@pytest.mark.usefixtures("context")
def test_a_copy_beyond_an_allocation_is_refused(driver: SimulatedDriver) -> None:
    address = driver.allocate(4096)
    words = (ctypes.c_uint64 * 2)()
    assert driver.try_call("cuMemcpyDtoH_v2", words, address + 4088, 16) == INVALID_VALUE
    assert driver.try_call("cuMemcpyHtoD_v2", 4096, words, 16) == INVALID_VALUE


def test_an_asynchronous_copy_runs_at_its_place_in_the_stream(
    driver: SimulatedDriver, context: Context
) -> None:
    stream = driver.stream()
    slot = driver.allocate(8)
    pinned = driver.get("cuMemHostAlloc", 16, 0)
    words = (ctypes.c_uint64 * 2).from_address(pinned)
    context.burn(MS, stamp=slot, stream=stream)
    driver.call("cuMemcpyDtoHAsync_v2", pinned, slot, 8, stream)
    context.burn(MS, stamp=slot, stream=stream)
    driver.call("cuMemcpyDtoHAsync_v2", pinned + 8, slot, 8, stream)
    driver.call("cuStreamQuery", 0)  # queries another stream
    assert list(words) == [0, 0]
    driver.call("cuStreamSynchronize", stream)
    assert list(words) == [MS, 2 * MS]


def test_pageable_memory_is_read_before_the_call_returns(
    driver: SimulatedDriver, context: Context
) -> None:
    address = driver.allocate(8)
    word = ctypes.c_uint64(1)
    stream = driver.stream()
    context.burn(MS, stream=stream)
    driver.call("cuMemcpyHtoDAsync_v2", address, ctypes.byref(word), 8, stream)
    word.value = 2
    driver.call("cuStreamSynchronize", stream)
    assert driver.read_words(address, 1) == [1]


def test_memory_is_freed_when_the_stream_reaches_the_free(
    driver: SimulatedDriver, context: Context
) -> None:
    address = driver.allocate(2 * MIB)
    context.burn(MS)
    driver.call("cuMemFreeAsync", address, 0)
    assert driver.free_memory() == 510 * MIB
    context.synchronize()
    assert driver.free_memory() == 512 * MIB


def test_a_stamp_outside_allocated_memory_is_a_sticky_fault(
    driver: SimulatedDriver, context: Context
) -> None:
    context.burn(MS, stamp=4096)
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        context.synchronize()
    address = ctypes.c_uint64()
    assert driver.try_call("cuMemAlloc_v2", ctypes.byref(address), 1) == ILLEGAL_ADDRESS


# Streams and events


def test_events_measure_the_time_between_them(driver: SimulatedDriver, context: Context) -> None:
    events = [driver.event() for _ in range(3)]
    driver.call("cuEventRecord", events[0], 0)
    context.burn(3 * MS)
    driver.call("cuEventRecord", events[1], 0)
    context.burn(MS // 2)
    driver.call("cuEventRecord", events[2], 0)
    assert driver.try_call("cuEventQuery", events[1]) == NOT_READY
    driver.set_clock(3 * MS)
    assert driver.try_call("cuEventQuery", events[1]) == 0
    assert driver.try_call("cuEventQuery", events[2]) == NOT_READY
    driver.call("cuEventSynchronize", events[2])
    assert driver.clock() == 3_500_000
    assert driver.elapsed(events[0], events[1]) == 3.0
    assert driver.elapsed(events[0], events[2]) == 3.5


def test_an_event_pair_includes_the_neighbours_slices(driver: SimulatedDriver) -> None:
    first, second = driver.context(), driver.context()
    first.make_current()
    start, end = driver.event(), driver.event()
    driver.call("cuEventRecord", start, 0)
    first.burn(3 * MS)
    driver.call("cuEventRecord", end, 0)
    second.burn(10 * MS)
    first.synchronize()
    assert driver.elapsed(start, end) == pytest.approx(5.26)


def test_events_without_timing_or_without_a_record_have_no_time(
    driver: SimulatedDriver, context: Context
) -> None:
    timed, untimed = driver.event(), driver.event(DISABLE_TIMING)
    milliseconds = ctypes.byref(ctypes.c_float())
    assert driver.try_call("cuEventQuery", timed) == 0
    assert driver.try_call("cuEventElapsedTime", milliseconds, timed, timed) == INVALID_HANDLE
    driver.call("cuEventRecord", untimed, 0)
    assert driver.try_call("cuEventElapsedTime", milliseconds, untimed, untimed) == INVALID_HANDLE
    driver.call("cuEventRecord", timed, 0)
    context.burn(MS)
    end = driver.event()
    driver.call("cuEventRecord", end, 0)
    assert driver.try_call("cuEventElapsedTime", milliseconds, timed, end) == NOT_READY


def test_events_of_two_contexts_have_no_time_between_them_before_both_events_have_happened(
    driver: SimulatedDriver,
) -> None:
    first, second = driver.context(), driver.context()
    first.make_current()
    start, end = driver.event(), driver.event()
    first.burn(10 * MS)
    driver.call("cuEventRecord", start, 0)
    second.make_current()
    second.burn(MS)
    driver.call("cuEventRecord", end, 0)
    driver.set_clock(6 * MS)
    milliseconds = ctypes.byref(ctypes.c_float())
    assert driver.try_call("cuEventElapsedTime", milliseconds, start, end) == NOT_READY
    assert driver.try_call("cuEventQuery", end) == 0


def test_an_event_recorded_again_forgets_its_first_record(
    driver: SimulatedDriver, context: Context
) -> None:
    event = driver.event()
    context.burn(MS)
    driver.call("cuEventRecord", event, 0)
    context.burn(MS)
    driver.call("cuEventRecord", event, 0)
    driver.set_clock(MS)
    assert driver.try_call("cuEventQuery", event) == NOT_READY
    driver.set_clock(2 * MS)
    assert driver.try_call("cuEventQuery", event) == 0


def test_a_destroyed_event_may_still_be_pending(driver: SimulatedDriver, context: Context) -> None:
    event = driver.event()
    context.burn(MS)
    driver.call("cuEventRecord", event, 0)
    driver.call("cuEventDestroy_v2", event)
    again = driver.event()
    context.synchronize()
    assert driver.try_call("cuEventQuery", event if event != again else 0) == INVALID_HANDLE
    assert driver.try_call("cuEventElapsedTime", ctypes.byref(ctypes.c_float()), again, again)


def test_a_stream_may_finish_before_the_others(driver: SimulatedDriver, context: Context) -> None:
    first, second = driver.stream(), driver.stream()
    context.burn(MS, stream=first)
    assert driver.try_call("cuStreamQuery", first) == NOT_READY
    assert driver.try_call("cuStreamQuery", second) == 0
    context.burn(MS, stream=second)
    driver.call("cuStreamSynchronize", first)
    assert driver.clock() == MS


def test_a_stream_waits_for_an_event_of_another(driver: SimulatedDriver, context: Context) -> None:
    first, second = driver.stream(), driver.stream()
    event, late = driver.event(), driver.event()
    context.burn(5 * MS, stream=first)
    driver.call("cuEventRecord", event, first)
    driver.call("cuStreamWaitEvent", second, event, 0)
    driver.call("cuEventRecord", late, second)
    assert driver.try_call("cuEventQuery", late) == NOT_READY
    driver.call("cuStreamSynchronize", second)
    assert driver.clock() == 5 * MS


def test_the_null_stream_is_a_barrier_for_blocking_streams_only(
    driver: SimulatedDriver, context: Context
) -> None:
    blocking, free = driver.stream(0), driver.stream(NON_BLOCKING)
    context.burn(MS, stream=blocking)
    assert driver.try_call("cuStreamQuery", LEGACY) == NOT_READY
    assert driver.try_call("cuStreamQuery", free) == 0
    driver.call("cuStreamSynchronize", 0)
    context.burn(MS, stream=LEGACY)
    assert driver.try_call("cuStreamQuery", blocking) == NOT_READY
    assert driver.try_call("cuStreamQuery", free) == 0
    context.synchronize()
    context.burn(MS, stream=free)
    assert driver.try_call("cuStreamQuery", LEGACY) == 0


def test_each_thread_has_its_own_default_stream(driver: SimulatedDriver, context: Context) -> None:
    def ask() -> int:
        context.make_current()
        return driver.try_call("cuStreamQuery", PER_THREAD)

    context.burn(MS, stream=PER_THREAD)
    assert ask() == NOT_READY
    assert in_thread(ask) == 0
    assert driver.try_call("cuStreamQuery_ptsz", 0) == NOT_READY


def test_a_callback_runs_once_when_its_stream_has_reached_it(
    driver: SimulatedDriver, context: Context
) -> None:
    calls: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: calls.append(driver.clock()))
    context.burn(2 * MS)
    driver.call("cuLaunchHostFunc", 0, function, None)
    driver.call("cuCtxSynchronize")
    driver.call("cuCtxSynchronize")
    assert calls == [2 * MS]


def test_threads_share_a_context(driver: SimulatedDriver, context: Context) -> None:
    def work() -> int:
        for _ in range(200):
            context.burn(1000)
        context.synchronize()
        return 0

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.clock() == 1_600_000


def test_parameters_may_be_passed_in_a_buffer(driver: SimulatedDriver, context: Context) -> None:
    slot = driver.allocate(8)
    buffer = (ctypes.c_uint64 * 2)(4 * MS, slot)
    size = ctypes.c_size_t(16)
    extra = (ctypes.c_void_p * 5)(
        1, ctypes.addressof(buffer), 2, ctypes.addressof(size), None
    )  # fmt: skip
    driver.call("cuLaunchKernel", context.stamper, 1, 1, 1, 1, 1, 1, 0, 0, None, extra)
    assert driver.read_words(slot, 1) == [4 * MS]


def test_a_launch_configuration_names_the_stream(driver: SimulatedDriver, context: Context) -> None:
    class LaunchConfig(ctypes.Structure):
        _fields_ = [
            ("shape", ctypes.c_uint * 7),
            ("stream", ctypes.c_uint64),
            ("attributes", ctypes.c_void_p),
            ("n_attributes", ctypes.c_uint),
        ]

    stream = driver.stream()
    config = LaunchConfig((1, 1, 1, 1, 1, 1, 0), stream, None, 0)
    word = ctypes.c_uint64(MS)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(word))
    driver.call("cuLaunchKernelEx", ctypes.byref(config), context.burner, parameters, None)
    assert driver.try_call("cuStreamQuery", stream) == NOT_READY
    driver.call("cuStreamSynchronize", stream)
    assert driver.clock() == MS


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuLaunchCooperativeKernel"])
@pytest.mark.parametrize(("variant", "stream"), [("", LEGACY), ("_ptsz", PER_THREAD)])
def test_each_form_of_a_launch_has_its_null_stream(
    driver: SimulatedDriver, context: Context, call: str, variant: str, stream: int
) -> None:
    word = ctypes.c_uint64(MS)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(word))
    extra = [None] if call == "cuLaunchKernel" else []
    driver.call(call + variant, context.burner, 1, 1, 1, 1, 1, 1, 0, 0, parameters, *extra)
    assert driver.try_call("cuStreamQuery", stream) == NOT_READY
    driver.call("cuStreamSynchronize", stream)
    assert driver.clock() == MS


@pytest.mark.usefixtures("context")
def test_a_module_that_names_its_kernels_has_only_those(driver: SimulatedDriver) -> None:
    text = ctypes.c_char_p(b"// tidegate simgpu module\nkernel burn\nkernel gemm\n")
    module = driver.get("cuModuleLoadData", text)
    driver.get("cuModuleGetFunction", module, ctypes.c_char_p(b"burn"))
    driver.get("cuModuleGetFunction", module, ctypes.c_char_p(b"gemm"))
    with pytest.raises(CudaError, match="CUDA_ERROR_NOT_FOUND"):
        driver.get("cuModuleGetFunction", module, ctypes.c_char_p(b"burn_stamp"))


# Capture and graphs


def begin(driver: SimulatedDriver, stream: int, mode: int = GLOBAL) -> None:
    driver.call("cuStreamBeginCapture_v2", stream, mode)


def test_a_graph_repeats_its_commands(driver: SimulatedDriver, context: Context) -> None:
    stream = driver.stream()
    slot = driver.allocate(16)
    begin(driver, stream)
    context.burn(MS, stamp=slot, stream=stream)
    context.burn(2 * MS, stamp=slot + 8, stream=stream)
    graph = ctypes.c_uint64()
    driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    assert driver.clock() == 0
    execution = driver.get("cuGraphInstantiateWithFlags", graph.value, 0)
    driver.call("cuGraphDestroy", graph.value)
    for n in range(2):
        driver.call("cuGraphLaunch", execution, stream)
        driver.call("cuStreamSynchronize", stream)
        assert driver.read_words(slot, 2) == [(3 * n + 1) * MS, (3 * n + 3) * MS]
    driver.call("cuGraphExecDestroy", execution)


def capture_status(driver: SimulatedDriver, stream: int) -> int:
    status = ctypes.c_int()
    driver.call("cuStreamIsCapturing", stream, ctypes.byref(status))
    return status.value


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
@pytest.mark.parametrize("call", ["allocate", "query", "synchronize", "event"])
def test_calls_that_cannot_be_captured_invalidate_the_capture(
    driver: SimulatedDriver, context: Context, mode: int, call: str
) -> None:
    stream, other, event = driver.stream(), driver.stream(), driver.event()
    address, graph = ctypes.c_uint64(), ctypes.c_uint64()
    calls = {
        "allocate": ("cuMemAlloc_v2", ctypes.byref(address), 8),
        "query": ("cuStreamQuery", other),
        "synchronize": ("cuStreamSynchronize", other),
        "event": ("cuEventQuery", event),
    }
    assert capture_status(driver, stream) == 0
    begin(driver, stream, mode)
    assert capture_status(driver, stream) == 1
    assert driver.try_call(*calls[call]) == UNSUPPORTED
    assert capture_status(driver, stream) == 2
    assert context.try_burn(MS, stream=stream) == INVALIDATED
    assert driver.try_call("cuStreamEndCapture", stream, ctypes.byref(graph)) == INVALIDATED
    assert graph.value == 0
    driver.call(*calls[call])


@pytest.mark.usefixtures("context")
def test_a_relaxed_thread_or_capture_forbids_nothing(driver: SimulatedDriver) -> None:
    stream = driver.stream()
    graph = ctypes.c_uint64()
    begin(driver, stream, RELAXED)
    driver.allocate(8)
    driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    begin(driver, stream, GLOBAL)
    mode = ctypes.c_int(RELAXED)
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == GLOBAL
    driver.allocate(8)
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))


@pytest.mark.usefixtures("context")
def test_another_threads_query_breaks_a_global_capture_only(driver: SimulatedDriver) -> None:
    """PyTorch's watchdog thread makes such a query."""
    stream, event = driver.stream(), driver.event()
    graph = ctypes.c_uint64()
    begin(driver, stream, THREAD_LOCAL)
    assert in_thread(lambda: driver.try_call("cuEventQuery", event)) == 0
    driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    begin(driver, stream, GLOBAL)
    assert in_thread(lambda: driver.try_call("cuEventQuery", event)) == UNSUPPORTED
    assert driver.try_call("cuStreamEndCapture", stream, ctypes.byref(graph)) == INVALIDATED


@pytest.mark.usefixtures("context")
def test_a_capturing_stream_and_its_events_cannot_be_queried(driver: SimulatedDriver) -> None:
    stream, event = driver.stream(), driver.event()
    graph = ctypes.c_uint64()
    begin(driver, stream, RELAXED)
    driver.call("cuEventRecord", event, stream)
    assert driver.try_call("cuEventQuery", event) == CAPTURED_EVENT
    assert driver.try_call("cuStreamEndCapture", stream, ctypes.byref(graph)) == INVALIDATED
    begin(driver, stream, RELAXED)
    assert driver.try_call("cuStreamSynchronize", stream) == UNSUPPORTED
    assert driver.try_call("cuStreamEndCapture", stream, ctypes.byref(graph)) == INVALIDATED
    driver.call("cuEventRecord", event, stream)
    driver.call("cuEventQuery", event)


def test_a_capture_ends_in_its_own_thread(driver: SimulatedDriver, context: Context) -> None:
    stream = driver.stream()
    graph = ctypes.c_uint64()

    def end() -> int:
        context.make_current()
        return driver.try_call("cuStreamEndCapture", stream, ctypes.byref(graph))

    begin(driver, stream, THREAD_LOCAL)
    assert in_thread(end) == WRONG_THREAD
    assert end() == 0
    begin(driver, stream, RELAXED)
    assert in_thread(end) == 0


def test_the_null_stream_does_not_mix_with_a_capture(
    driver: SimulatedDriver, context: Context
) -> None:
    stream = driver.stream(0)
    graph = ctypes.c_uint64()
    assert driver.try_call("cuStreamBeginCapture_v2", LEGACY, GLOBAL) == UNSUPPORTED
    begin(driver, stream)
    assert context.try_burn(MS) == IMPLICIT
    assert driver.try_call("cuStreamEndCapture", stream, ctypes.byref(graph)) == INVALIDATED


def test_a_second_stream_joins_a_capture_by_an_event(
    driver: SimulatedDriver, context: Context
) -> None:
    first, second, event = driver.stream(), driver.stream(), driver.event()
    graph = ctypes.c_uint64()
    begin(driver, first)
    driver.call("cuEventRecord", event, first)
    driver.call("cuStreamWaitEvent", second, event, 0)
    assert capture_status(driver, second) == 1
    context.burn(MS, stream=second)
    driver.call("cuEventRecord", event, second)
    driver.call("cuStreamWaitEvent", first, event, 0)
    driver.call("cuStreamEndCapture", first, ctypes.byref(graph))
    assert capture_status(driver, second) == 0
    execution = driver.get("cuGraphInstantiateWithFlags", graph.value, 0)
    driver.call("cuGraphLaunch", execution, first)
    context.synchronize()
    assert driver.clock() == MS


# Look-up


def find(driver: SimulatedDriver, name: str, version: int, flags: int = 0) -> tuple[int, int, int]:
    function, status = ctypes.c_void_p(1), ctypes.c_int(-1)
    code = driver.try_call(
        "cuGetProcAddress_v2",
        ctypes.c_char_p(name.encode()),
        ctypes.byref(function),
        version,
        flags,
        ctypes.byref(status),
    )
    return code, function.value or 0, status.value


def address(driver: SimulatedDriver, symbol: str) -> int:
    return ctypes.cast(getattr(driver.library, symbol), ctypes.c_void_p).value or 0


@pytest.mark.parametrize(
    ("name", "version", "flags", "symbol"),
    [
        ("cuMemAlloc", 12000, 0, "cuMemAlloc_v2"),
        ("cuCtxCreate", 11000, 0, "cuCtxCreate_v2"),
        ("cuCtxCreate", 12000, 0, "cuCtxCreate_v3"),
        ("cuCtxCreate", 13000, 0, "cuCtxCreate_v4"),
        ("cuLaunchKernel", 13000, 0, "cuLaunchKernel"),
        ("cuLaunchKernel", 13000, 1, "cuLaunchKernel"),
        ("cuLaunchKernel", 13000, 2, "cuLaunchKernel_ptsz"),
        ("cuMemcpyHtoD", 13000, 2, "cuMemcpyHtoD_v2_ptds"),
        ("cuEventQuery", 13000, 2, "cuEventQuery"),
        ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
        ("cuEventElapsedTime", 12080, 0, "cuEventElapsedTime_v2"),
        ("cuCtxSynchronize", 12090, 0, "cuCtxSynchronize"),
    ],
)
def test_a_base_name_resolves_to_the_newest_function_of_that_version(
    library: SimulatedDriver, name: str, version: int, flags: int, symbol: str
) -> None:
    assert find(library, name, version, flags) == (0, address(library, symbol), 0)


def test_a_failed_look_up_gives_its_reason(library: SimulatedDriver) -> None:
    assert find(library, "cuNoSuchThing", 13000) == (NOT_FOUND, 0, 1)
    assert find(library, "cuMemAlloc_v2", 13000) == (NOT_FOUND, 0, 1)
    assert find(library, "cuMemAllocAsync", 11010) == (NOT_FOUND, 0, 2)
    assert find(library, "cuInit", 13000, 4)[0] == INVALID_VALUE


def test_every_export_can_be_looked_up(library: SimulatedDriver, build_dir: Path) -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(build_dir / "simgpu" / "libcuda.so.1")],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    exports = {line.split()[2] for line in listing.splitlines()}
    ours = {name for name in exports if name.startswith("simgpu_")}
    assert {name[:2] for name in exports - ours} == {"cu"}
    for symbol in sorted(exports - ours):
        base = re.sub(r"(_v\d)?(_ptsz|_ptds)?$", "", symbol)
        flags = 2 if symbol.endswith(("_ptsz", "_ptds")) else 1
        found = {find(library, base, version, flags)[1] for version in range(2000, 13010, 10)}
        assert address(library, symbol) in found, symbol


def test_calls_before_cuinit_fail(library: SimulatedDriver) -> None:
    count = ctypes.c_int()
    assert library.try_call("cuDeviceGetCount", ctypes.byref(count)) == NOT_INITIALIZED


def test_a_device_describes_itself(driver: SimulatedDriver) -> None:
    name = ctypes.create_string_buffer(64)
    uuid = ctypes.create_string_buffer(16)
    value = ctypes.c_int()
    driver.call("cuDeviceGetName", name, 64, 0)
    driver.call("cuDeviceGetUuid_v2", uuid, 0)
    assert name.value == b"Tidegate Simulated GPU"
    assert uuid.raw == simgpu.device_uuid(1, 0).bytes
    assert driver.get("cuDeviceTotalMem_v2", 0) == 1024 * MIB
    for attribute, expected in ((75, 9), (76, 0), (16, 132), (1, 1024)):
        driver.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, 0)
        assert value.value == expected
    assert driver.try_call("cuDeviceGetName", name, 64, 1) == 101


@pytest.mark.parametrize(("wanted", "answer"), [(None, 0), ("0", 0), ("1", 1)])
def test_the_environment_decides_whether_the_device_has_mps(
    driver: SimulatedDriver, monkeypatch: pytest.MonkeyPatch, wanted: str | None, answer: int
) -> None:
    monkeypatch.delenv("SIMGPU_MPS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("SIMGPU_MPS", wanted)
    value = ctypes.c_int(-1)
    driver.call("cuDeviceGetAttribute", ctypes.byref(value), 133, 0)
    assert value.value == answer


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("0", [0]),
        ("1,0", [1, 0]),
        ("2,5,0", [2]),  # up to the first that does not exist
        ("1,1,0", [1]),
        ("-1", []),
        ("", []),
        ("5", []),
    ],
)
def test_visible_devices_select_and_order_the_devices(
    library: SimulatedDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    seen: list[int],
) -> None:
    simgpu.create(tmp_path, devices=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not seen:
        with pytest.raises(CudaError, match="NO_DEVICE"), library.attached(tmp_path):
            pass
        return
    with library.attached(tmp_path):
        count = ctypes.c_int()
        library.call("cuDeviceGetCount", ctypes.byref(count))
        found = []
        for ordinal in range(count.value):
            uuid = ctypes.create_string_buffer(16)
            library.call("cuDeviceGetUuid_v2", uuid, ordinal)
            found.append(uuid.raw)
        assert found == [simgpu.device_uuid(1, index).bytes for index in seen]


def test_a_uuid_makes_a_device_visible(
    library: SimulatedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simgpu.create(tmp_path, devices=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{simgpu.device_uuid(1, 1)}")
    with library.attached(tmp_path):
        uuid = ctypes.create_string_buffer(16)
        library.call("cuDeviceGetUuid_v2", uuid, 0)
        assert uuid.raw == simgpu.device_uuid(1, 1).bytes


def test_the_python_module_and_the_library_agree_on_the_layout() -> None:
    text = (ROOT / "simgpu" / "layout.h").read_text()
    offsets = {n: int(v, 0) for n, v in re.findall(r"GPU_OFFSET\(([\w.]+), (\w+)\);", text)}
    assert offsets["shared.clock_mode"] == simgpu.CLOCK_OFFSET
    assert offsets["shared.n_contexts"] == simgpu.N_CONTEXTS_OFFSET
    assert offsets["shared.slots"] == simgpu.SLOTS_OFFSET
    assert offsets["shared.timelines"] == simgpu.TIMELINES_OFFSET
    assert offsets["contexts"] == simgpu.CONTEXTS_OFFSET
    assert offsets["config.lost"] == simgpu.LOST_OFFSET
    assert offsets["config.nvlinks"] == simgpu.CONFIG.size - 20
    assert int(re.findall(r"SIMGPU_LAYOUT_VERSION (\d+)", text)[0]) == simgpu.VERSION


def test_kernels_on_two_gpus_meet(library: SimulatedDriver, tmp_path: Path) -> None:
    """The first kernel spins, using GPU time, until the other begins. Then both work and end."""
    gpus = simgpu.create(tmp_path / "gpus", memory=2048 * MIB, devices=2)
    with library.attached(gpus[0].parent) as driver:
        contexts = [driver.context(device) for device in range(2)]
        words = (ctypes.c_uint32 * 2)()
        at = [ctypes.addressof(words), ctypes.addressof(words) + 4]

        def meet(rank: int) -> None:
            contexts[rank].make_current()
            module = driver.get("cuModuleLoadData", ctypes.c_char_p(b"any image"))
            kernel = driver.get("cuModuleGetFunction", module, ctypes.c_char_p(b"meet"))
            values = [ctypes.c_uint64(v) for v in (MS, at[rank], at[1 - rank], 1)]
            parameters = (ctypes.c_void_p * 4)(*[ctypes.addressof(v) for v in values])
            driver.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, 0, parameters, None)

        def ended(rank: int) -> bool:
            contexts[rank].make_current()
            return driver.try_call("cuStreamQuery", 0) == 0

        meet(0)
        begin = time.monotonic()
        while time.monotonic() < begin + 0.1:
            assert not ended(0)
        assert list(words) == [1, 0]
        assert simgpu.status(gpus[0]).busy >= 90 * MS
        meet(1)
        while not all([ended(0), ended(1)]):
            assert time.monotonic() < begin + 20
        assert list(words) == [1, 1]
