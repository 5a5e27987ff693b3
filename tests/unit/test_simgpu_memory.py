"""The simulated driver's memory beyond cuMemAlloc: pools, mappings, IPC, arrays, limits, copies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from simgpu import simgpu
from simgpu.testing import GLOBAL, MS, Context, Driver

MIB = 1 << 20
TOTAL = 4096 * MIB
INVALID_VALUE, OUT_OF_MEMORY, UNSUPPORTED = 1, 2, 900
RELEASE_THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = 4, 5, 6, 7, 8  # CUmemPool_attribute
PINNED, DEVICE, HOST_NUMA = 1, 1, 3  # CUmemAllocationType, CUmemLocationType


@pytest.fixture(scope="module")
def library(build_dir: Path) -> Driver:
    return Driver(build_dir)


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    return simgpu.create(
        tmp_path / "gpus", memory=TOTAL, context_memory=0, devices=2, virtual_clock=True
    )[0]


@pytest.fixture
def driver(library: Driver, gpu: Path) -> Iterator[Driver]:
    with library.attached(gpu.parent):
        yield library


@pytest.fixture
def context(driver: Driver) -> Context:
    return driver.context()


def held(driver: Driver) -> int:
    """Bytes of the device that are in use; its contexts take none."""
    return TOTAL - driver.free_memory()


def pool_value(driver: Driver, pool: int, attribute: int) -> int:
    value = ctypes.c_uint64()
    driver.call("cuMemPoolGetAttribute", pool, attribute, ctypes.byref(value))
    return value.value


class PoolProps(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location", ctypes.c_int),
        ("security", ctypes.c_void_p),
        ("most", ctypes.c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    ]


def new_pool(driver: Driver, location: int = 0, kind: int = DEVICE, most: int = 0) -> int:
    props = PoolProps(PINNED, 0, kind, location, None, most)
    return driver.get("cuMemPoolCreate", ctypes.byref(props))


# Pools


@pytest.mark.usefixtures("context")
def test_a_pool_grows_in_units_of_32_mib(driver: Driver) -> None:
    """The sizes are those of a measurement on an H200."""
    pool = driver.get("cuDeviceGetDefaultMemPool", 0)
    assert driver.get("cuDeviceGetMemPool", 0) == pool
    blocks = [driver.get("cuMemAllocAsync", size, 0) for size in (33 * MIB, 1000, 1000)]
    assert held(driver) == pool_value(driver, pool, RESERVED) == 64 * MIB
    assert pool_value(driver, pool, USED) == 33 * MIB + 2048
    blocks.append(driver.get("cuMemAllocAsync", 100 * MIB, 0))
    assert held(driver) == pool_value(driver, pool, RESERVED) == 160 * MIB
    for block in blocks:
        driver.call("cuMemFreeAsync", block, 0)
    assert pool_value(driver, pool, USED) == 0
    assert held(driver) == 160 * MIB
    driver.call("cuStreamSynchronize", 0)
    assert held(driver) == pool_value(driver, pool, RESERVED) == 0
    assert pool_value(driver, pool, RESERVED_HIGH) == 160 * MIB
    assert pool_value(driver, pool, USED_HIGH) == 133 * MIB + 2048


def test_only_units_without_a_block_are_released(driver: Driver, context: Context) -> None:
    first = driver.get("cuMemAllocAsync", 32 * MIB, 0)
    small = driver.get("cuMemAllocAsync", 512, 0)
    last = driver.get("cuMemAllocAsync", 64 * MIB, 0)
    assert held(driver) == 128 * MIB
    driver.call("cuMemFreeAsync", first, 0)
    driver.call("cuMemFreeAsync", last, 0)
    context.synchronize()
    assert held(driver) == 32 * MIB
    assert driver.get("cuMemAllocAsync", MIB, 0) // (32 * MIB) == small // (32 * MIB)
    assert held(driver) == 32 * MIB


@pytest.mark.parametrize("wait", ["stream", "context", "event"])
def test_a_pool_keeps_up_to_its_threshold(driver: Driver, context: Context, wait: str) -> None:
    pool = driver.get("cuDeviceGetDefaultMemPool", 0)
    threshold = ctypes.c_uint64(64 * MIB)
    driver.call("cuMemPoolSetAttribute", pool, RELEASE_THRESHOLD, ctypes.byref(threshold))
    assert pool_value(driver, pool, RELEASE_THRESHOLD) == 64 * MIB
    event = driver.event()
    driver.call("cuMemFreeAsync", driver.get("cuMemAllocAsync", 160 * MIB, 0), 0)
    driver.call("cuEventRecord", event, 0)
    assert held(driver) == 160 * MIB
    calls = {
        "stream": ("cuStreamSynchronize", 0),
        "context": ("cuCtxSynchronize",),
        "event": ("cuEventSynchronize", event),
    }
    context.make_current()
    driver.call(*calls[wait])
    assert held(driver) == 64 * MIB
    driver.call("cuMemPoolTrimTo", pool, 33 * MIB)
    assert held(driver) == 64 * MIB
    driver.call("cuMemPoolTrimTo", pool, 32 * MIB)
    assert held(driver) == 32 * MIB
    driver.call("cuMemPoolTrimTo", pool, 0)
    assert held(driver) == 0


def test_a_freed_block_is_its_streams_at_once_and_others_later(
    driver: Driver, context: Context
) -> None:
    first, second = driver.stream(), driver.stream()
    block = driver.get("cuMemAllocAsync", 2 * MIB, first)
    context.burn(MS, stream=first)
    driver.call("cuMemFreeAsync", block, first)
    assert driver.try_call("cuMemFreeAsync", block, first) == INVALID_VALUE
    other = driver.get("cuMemAllocAsync", 2 * MIB, second)
    assert other != block
    assert driver.get("cuMemAllocAsync", 2 * MIB, first) == block
    # The free that was on its way meant the first life of the block.
    context.synchronize()
    driver.call("cuMemcpyHtoD_v2", block, ctypes.c_char_p(b"12345678"), 8)
    driver.call("cuMemFreeAsync", block, first)
    assert driver.get("cuMemAllocAsync", 2 * MIB, second) == block


@pytest.mark.usefixtures("context")
def test_a_block_of_a_pool_may_be_freed_as_any_other(driver: Driver) -> None:
    pool = driver.get("cuDeviceGetDefaultMemPool", 0)
    driver.call("cuMemFree_v2", driver.get("cuMemAllocAsync", MIB, 0))
    assert pool_value(driver, pool, USED) == 0
    driver.call("cuMemFreeAsync", driver.allocate(4 * MIB), 0)
    driver.call("cuCtxSynchronize")
    assert held(driver) == 0


@pytest.mark.usefixtures("context")
def test_an_application_makes_pools(driver: Driver) -> None:
    pool = new_pool(driver, most=64 * MIB)
    block = driver.get("cuMemAllocFromPoolAsync", 40 * MIB, pool, 0)
    assert held(driver) == pool_value(driver, pool, RESERVED) == 64 * MIB
    address = ctypes.byref(ctypes.c_uint64())
    too_much = driver.try_call("cuMemAllocFromPoolAsync", address, 40 * MIB, pool, 0)
    assert too_much == OUT_OF_MEMORY
    driver.call("cuDeviceSetMemPool", 0, pool)
    assert driver.get("cuDeviceGetMemPool", 0) == pool
    small = driver.get("cuMemAllocAsync", MIB, 0)
    assert held(driver) == 64 * MIB
    driver.call("cuMemPoolDestroy", pool)
    assert driver.get("cuDeviceGetMemPool", 0) == driver.get("cuDeviceGetDefaultMemPool", 0)
    assert driver.try_call("cuMemAllocFromPoolAsync", address, 1, pool, 0) == INVALID_VALUE
    driver.call("cuMemFreeAsync", small, 0)
    assert held(driver) == 64 * MIB
    driver.call("cuMemFreeAsync", block, 0)
    assert held(driver) == 0


@pytest.mark.usefixtures("context")
def test_pools_are_named_by_location(driver: Driver) -> None:
    device = (ctypes.c_int * 2)(DEVICE, 1)
    pool = new_pool(driver, location=1)
    driver.call("cuMemSetMemPool", device, PINNED, pool)
    assert driver.get("cuMemGetMemPool", device, PINNED) == pool
    assert driver.get("cuDeviceGetMemPool", 1) == pool
    standard = driver.get("cuMemGetDefaultMemPool", device, PINNED)
    assert standard == driver.get("cuDeviceGetDefaultMemPool", 1) != pool
    assert driver.try_call("cuDeviceSetMemPool", 0, pool) == INVALID_VALUE
    assert driver.try_call("cuMemPoolDestroy", standard) == INVALID_VALUE


@pytest.mark.usefixtures("context")
def test_a_pool_of_the_host_takes_nothing(driver: Driver) -> None:
    pool = new_pool(driver, kind=HOST_NUMA)
    driver.get("cuMemAllocFromPoolAsync", 8192 * MIB, pool, 0)
    assert pool_value(driver, pool, RESERVED) == 8192 * MIB
    assert held(driver) == 0


@pytest.mark.usefixtures("context")
def test_a_pool_that_cannot_grow_is_out_of_memory(driver: Driver) -> None:
    address = ctypes.byref(ctypes.c_uint64())
    driver.allocate(TOTAL - 63 * MIB)
    driver.get("cuMemAllocAsync", 1, 0)
    assert driver.try_call("cuMemAllocAsync", address, 32 * MIB, 0) == OUT_OF_MEMORY
    driver.get("cuMemAllocAsync", 31 * MIB, 0)
    assert driver.try_call("cuMemAllocAsync", address, 0, 0) == INVALID_VALUE
    assert driver.try_call("cuMemAllocAsync", address, 1 << 62, 0) == OUT_OF_MEMORY


def test_what_pools_hold_goes_with_the_last_context(driver: Driver, gpu: Path) -> None:
    first, second = driver.context(), driver.context()
    pool = driver.get("cuDeviceGetDefaultMemPool", 0)
    first.make_current()
    kept = driver.get("cuMemAllocAsync", MIB, 0)
    driver.get("cuMemAllocAsync", 32 * MIB, 0)
    second.burn(1000 * MS)
    driver.call("cuMemFreeAsync", kept, 0)  # there it waits for the kernel
    assert simgpu.status(gpu).used == 64 * MIB
    driver.call("cuCtxDestroy_v2", first.handle)
    assert pool_value(driver, pool, USED) == MIB
    assert simgpu.status(gpu).used == 64 * MIB
    driver.call("cuCtxDestroy_v2", second.handle)
    assert pool_value(driver, pool, USED) == 0
    assert simgpu.status(gpu).used == 0


@pytest.mark.usefixtures("context")
def test_stream_ordered_memory_is_not_captured(driver: Driver) -> None:
    stream = driver.stream()
    address, graph = ctypes.byref(ctypes.c_uint64()), ctypes.c_uint64()
    driver.call("cuStreamBeginCapture_v2", stream, GLOBAL)
    assert driver.try_call("cuMemAllocAsync", address, MIB, stream) == UNSUPPORTED
    assert driver.try_call("cuStreamEndCapture", stream, ctypes.byref(graph)) != 0
