"""The simulated driver's memory beyond cuMemAlloc: pools, mappings, IPC, arrays, limits, copies."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from simgpu import simgpu
from simgpu.testing import GLOBAL, MS, Context, CudaError, SimulatedDriver, start_python

MIB = 1 << 20
TOTAL = 4096 * MIB
INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED, UNSUPPORTED = 1, 2, 801, 900
RELEASE_THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = 4, 5, 6, 7, 8  # CUmemPool_attribute
PINNED, DEVICE, HOST_NUMA = 1, 1, 3  # CUmemAllocationType, CUmemLocationType


@pytest.fixture(scope="module")
def library(build_dir: Path) -> SimulatedDriver:
    return SimulatedDriver(build_dir)


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    return simgpu.create(
        tmp_path / "gpus", memory=TOTAL, context_memory=0, devices=2, virtual_clock=True
    )[0]


@pytest.fixture
def driver(library: SimulatedDriver, gpu: Path) -> Iterator[SimulatedDriver]:
    with library.attached(gpu.parent):
        yield library


@pytest.fixture
def context(driver: SimulatedDriver) -> Context:
    return driver.context()


def held(driver: SimulatedDriver) -> int:
    """Return how many bytes of the device are in use. Contexts take none here."""
    return TOTAL - driver.free_memory()


def pool_value(driver: SimulatedDriver, pool: int, attribute: int) -> int:
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


def new_pool(driver: SimulatedDriver, location: int = 0, kind: int = DEVICE, most: int = 0) -> int:
    props = PoolProps(PINNED, 0, kind, location, None, most)
    return driver.get("cuMemPoolCreate", ctypes.byref(props))


# Pools


@pytest.mark.usefixtures("context")
def test_a_pool_grows_in_units_of_32_mib(driver: SimulatedDriver) -> None:
    """The sizes were measured on an H200."""
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


def test_only_units_without_a_block_are_released(driver: SimulatedDriver, context: Context) -> None:
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
def test_a_pool_keeps_memory_up_to_its_threshold(
    driver: SimulatedDriver, context: Context, wait: str
) -> None:
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
    for keep in (33 * MIB, 2**64 - 1):
        driver.call("cuMemPoolTrimTo", pool, keep)
        assert held(driver) == 64 * MIB
    driver.call("cuMemPoolTrimTo", pool, 32 * MIB)
    assert held(driver) == 32 * MIB
    driver.call("cuMemPoolTrimTo", pool, 0)
    assert held(driver) == 0


def test_a_freed_block_is_reused_by_its_stream_at_once_and_by_others_later(
    driver: SimulatedDriver, context: Context
) -> None:
    first, second = driver.stream(), driver.stream()
    block = driver.get("cuMemAllocAsync", 2 * MIB, first)
    context.burn(MS, stream=first)
    driver.call("cuMemFreeAsync", block, first)
    assert driver.try_call("cuMemFreeAsync", block, first) == INVALID_VALUE
    other = driver.get("cuMemAllocAsync", 2 * MIB, second)
    assert other != block
    assert driver.get("cuMemAllocAsync", 2 * MIB, first) == block
    # The pending free belongs to the block's first allocation, and leaves the second alone.
    context.synchronize()
    driver.call("cuMemcpyHtoD_v2", block, ctypes.c_char_p(b"12345678"), 8)
    driver.call("cuMemFreeAsync", block, first)
    assert driver.get("cuMemAllocAsync", 2 * MIB, second) == block


@pytest.mark.usefixtures("context")
def test_a_block_of_a_pool_may_be_freed_like_any_other(driver: SimulatedDriver) -> None:
    pool = driver.get("cuDeviceGetDefaultMemPool", 0)
    driver.call("cuMemFree_v2", driver.get("cuMemAllocAsync", MIB, 0))
    assert pool_value(driver, pool, USED) == 0
    driver.call("cuMemFreeAsync", driver.allocate(4 * MIB), 0)
    driver.call("cuCtxSynchronize")
    assert held(driver) == 0


@pytest.mark.usefixtures("context")
def test_an_application_can_create_pools(driver: SimulatedDriver) -> None:
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
def test_pools_are_selected_by_location(driver: SimulatedDriver) -> None:
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
def test_a_pool_on_the_host_takes_no_device_memory(driver: SimulatedDriver) -> None:
    pool = new_pool(driver, kind=HOST_NUMA)
    driver.get("cuMemAllocFromPoolAsync", 8192 * MIB, pool, 0)
    assert pool_value(driver, pool, RESERVED) == 8192 * MIB
    assert held(driver) == 0


@pytest.mark.usefixtures("context")
def test_a_pool_that_cannot_grow_reports_out_of_memory(driver: SimulatedDriver) -> None:
    address = ctypes.byref(ctypes.c_uint64())
    driver.allocate(TOTAL - 63 * MIB)
    driver.get("cuMemAllocAsync", 1, 0)
    assert driver.try_call("cuMemAllocAsync", address, 32 * MIB, 0) == OUT_OF_MEMORY
    driver.get("cuMemAllocAsync", 31 * MIB, 0)
    assert driver.try_call("cuMemAllocAsync", address, 0, 0) == INVALID_VALUE
    assert driver.try_call("cuMemAllocAsync", address, 1 << 62, 0) == OUT_OF_MEMORY


def test_memory_of_pools_is_freed_with_the_last_context(driver: SimulatedDriver, gpu: Path) -> None:
    first, second = driver.context(), driver.context()
    pool = driver.get("cuDeviceGetDefaultMemPool", 0)
    first.make_current()
    kept = driver.get("cuMemAllocAsync", MIB, 0)
    driver.get("cuMemAllocAsync", 32 * MIB, 0)
    second.burn(1000 * MS)
    driver.call("cuMemFreeAsync", kept, 0)  # the free waits in the stream for the kernel
    assert simgpu.status(gpu).used == 64 * MIB
    driver.call("cuCtxDestroy_v2", first.handle)
    assert pool_value(driver, pool, USED) == MIB
    assert simgpu.status(gpu).used == 64 * MIB
    driver.call("cuCtxDestroy_v2", second.handle)
    assert pool_value(driver, pool, USED) == 0
    assert simgpu.status(gpu).used == 0


@pytest.mark.usefixtures("context")
def test_a_stream_ordered_allocation_cannot_be_captured(driver: SimulatedDriver) -> None:
    stream = driver.stream()
    address, graph = ctypes.byref(ctypes.c_uint64()), ctypes.c_uint64()
    driver.call("cuStreamBeginCapture_v2", stream, GLOBAL)
    assert driver.try_call("cuMemAllocAsync", address, MIB, stream) == UNSUPPORTED
    assert driver.try_call("cuStreamEndCapture", stream, ctypes.byref(graph)) != 0


# Virtual memory management


class Prop(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location", ctypes.c_int),
        ("meta", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


def create(
    driver: SimulatedDriver, size: int, *, exported: bool = False, kind: int = DEVICE
) -> int:
    return driver.get("cuMemCreate", size, ctypes.byref(Prop(PINNED, exported, kind, 0)), 0)


def allow(driver: SimulatedDriver, address: int, size: int) -> None:
    driver.call("cuMemSetAccess", address, size, (ctypes.c_int * 3)(DEVICE, 0, 3), 1)


@pytest.mark.usefixtures("context")
def test_memory_is_charged_when_it_is_created_and_until_it_is_unmapped(
    driver: SimulatedDriver,
) -> None:
    prop = Prop(PINNED, 0, DEVICE, 0)
    assert driver.get("cuMemGetAllocationGranularity", ctypes.byref(prop), 0) == 2 * MIB
    handle = create(driver, 6 * MIB)
    assert held(driver) == 6 * MIB
    base = driver.get("cuMemAddressReserve", 16 * MIB, 0, 0, 0)
    assert base % (2 * MIB) == 0
    driver.call("cuMemMap", base, 6 * MIB, 0, handle, 0)
    driver.call("cuMemMap", base + 8 * MIB, 6 * MIB, 0, handle, 0)
    driver.call("cuMemRelease", handle)
    assert driver.try_call("cuMemRelease", handle) == INVALID_VALUE
    assert driver.try_call("cuMemMap", base, 6 * MIB, 0, handle, 0) == INVALID_VALUE
    allow(driver, base, 6 * MIB)
    allow(driver, base + 8 * MIB, 6 * MIB)
    driver.call("cuMemsetD32_v2", base + 4 * MIB, 5, 2)
    assert driver.read_words(base + 12 * MIB, 1) == [0x0000000500000005]
    driver.call("cuMemUnmap", base, 6 * MIB)
    assert held(driver) == 6 * MIB
    assert driver.try_call("cuMemAddressFree", base, 16 * MIB) == INVALID_VALUE
    driver.call("cuMemUnmap", base + 8 * MIB, 6 * MIB)
    assert held(driver) == 0
    assert driver.try_call("cuMemAddressFree", base, 8 * MIB) == INVALID_VALUE
    driver.call("cuMemAddressFree", base, 16 * MIB)


@pytest.mark.usefixtures("context")
def test_a_failed_creation_gives_its_reason(driver: SimulatedDriver) -> None:
    handle = ctypes.byref(ctypes.c_uint64())
    device, other = Prop(PINNED, 0, DEVICE, 0), Prop(PINNED, 0, DEVICE, 2)
    for size, prop, expected in (
        (0, device, INVALID_VALUE),
        (3 * MIB, device, INVALID_VALUE),
        (2 * MIB, other, 101),
        (2 * MIB, Prop(0, 0, DEVICE, 0), INVALID_VALUE),
        (TOTAL + 2 * MIB, device, OUT_OF_MEMORY),
    ):
        assert driver.try_call("cuMemCreate", handle, size, ctypes.byref(prop), 0) == expected
    create(driver, 2 * TOTAL, kind=HOST_NUMA)
    assert held(driver) == 0
    create(driver, TOTAL)
    assert held(driver) == TOTAL


@pytest.mark.usefixtures("context")
def test_only_whole_allocations_are_mapped_and_unmapped(driver: SimulatedDriver) -> None:
    first, second = create(driver, 4 * MIB), create(driver, 2 * MIB)
    base = driver.get("cuMemAddressReserve", 8 * MIB, 0, 0, 0)
    assert driver.try_call("cuMemMap", base, 2 * MIB, 0, first, 0) == NOT_SUPPORTED
    assert driver.try_call("cuMemMap", base, 2 * MIB, 2 * MIB, first, 0) == NOT_SUPPORTED
    assert driver.try_call("cuMemMap", base + 6 * MIB, 4 * MIB, 0, first, 0) == INVALID_VALUE
    driver.call("cuMemMap", base, 4 * MIB, 0, first, 0)
    assert driver.try_call("cuMemMap", base + 2 * MIB, 2 * MIB, 0, second, 0) == INVALID_VALUE
    driver.call("cuMemMap", base + 4 * MIB, 2 * MIB, 0, second, 0)
    assert driver.try_call("cuMemUnmap", base, 2 * MIB) == INVALID_VALUE
    assert driver.try_call("cuMemUnmap", base, 8 * MIB) == INVALID_VALUE
    driver.call("cuMemUnmap", base, 6 * MIB)
    driver.call("cuMemRelease", first)
    driver.call("cuMemRelease", second)
    assert held(driver) == 0


@pytest.mark.usefixtures("context")
def test_adjacent_mappings_are_accessed_as_one_once_access_is_set(driver: SimulatedDriver) -> None:
    base = driver.get("cuMemAddressReserve", 4 * MIB, 0, 0, 0)
    for at in (base, base + 2 * MIB):
        driver.call("cuMemMap", at, 2 * MIB, 0, create(driver, 2 * MIB), 0)
    assert driver.try_call("cuMemsetD8_v2", base + MIB, 1, 2 * MIB) == INVALID_VALUE
    location, flags = (ctypes.c_int * 2)(DEVICE, 0), ctypes.c_uint64(9)
    driver.call("cuMemGetAccess", ctypes.byref(flags), location, base)
    assert flags.value == 0
    allow(driver, base, 4 * MIB)
    driver.call("cuMemGetAccess", ctypes.byref(flags), location, base)
    assert flags.value == 3
    driver.call("cuMemsetD8_v2", base + MIB, 1, 2 * MIB)
    assert driver.read_words(base + 2 * MIB - 8, 2) == [0x0101010101010101] * 2
    assert driver.try_call("cuMemFree_v2", base) == INVALID_VALUE


def test_unmapping_waits_for_the_work_before_it(driver: SimulatedDriver, context: Context) -> None:
    base = driver.get("cuMemAddressReserve", 2 * MIB, 0, 0, 0)
    driver.call("cuMemMap", base, 2 * MIB, 0, create(driver, 2 * MIB), 0)
    allow(driver, base, 2 * MIB)
    stream = driver.stream()
    context.burn(5 * MS, stamp=base, stream=stream)
    driver.call("cuMemUnmap", base, 2 * MIB)
    assert driver.clock() == 5 * MS
    context.synchronize()


@pytest.mark.usefixtures("context")
def test_the_handle_of_a_mapping_can_be_retained(driver: SimulatedDriver) -> None:
    handle = create(driver, 2 * MIB)
    base = driver.get("cuMemAddressReserve", 2 * MIB, 0, 0, 0)
    driver.call("cuMemMap", base, 2 * MIB, 0, handle, 0)
    driver.call("cuMemRelease", handle)
    again = driver.get("cuMemRetainAllocationHandle", base + MIB)
    assert again == handle
    prop = Prop()
    driver.call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(prop), again)
    assert (prop.type, prop.location_type, prop.location) == (PINNED, DEVICE, 0)
    driver.call("cuMemUnmap", base, 2 * MIB)
    assert held(driver) == 2 * MIB
    driver.call("cuMemRelease", again)
    assert held(driver) == 0


@pytest.mark.usefixtures("context")
def test_a_process_that_imports_its_own_memory_is_charged_once(driver: SimulatedDriver) -> None:
    handle, plain = create(driver, 2 * MIB, exported=True), create(driver, 2 * MIB)
    descriptor = ctypes.c_int()
    where = ctypes.byref(descriptor)
    assert driver.try_call("cuMemExportToShareableHandle", where, plain, 1, 0) == INVALID_VALUE
    driver.call("cuMemRelease", plain)
    driver.call("cuMemExportToShareableHandle", where, handle, 1, 0)
    imported = driver.get("cuMemImportFromShareableHandle", descriptor.value, 1)
    os.close(descriptor.value)
    assert imported != handle
    assert held(driver) == 2 * MIB
    driver.call("cuMemRelease", handle)
    assert held(driver) == 2 * MIB
    driver.call("cuMemRelease", imported)
    assert held(driver) == 0
    with Path("/dev/zero").open("rb") as file:
        other = ctypes.byref(ctypes.c_uint64())
        assert driver.try_call("cuMemImportFromShareableHandle", other, file.fileno(), 1) == 1


EXPORTER = """
import ctypes
driver.call("cuInit", 0)
context = driver.context()
prop = (ctypes.c_int * 8)(1, 1, 1, 0)
handle = driver.get("cuMemCreate", 4 << 20, prop, 0)
base = driver.get("cuMemAddressReserve", 4 << 20, 0, 0, 0)
driver.call("cuMemMap", base, 4 << 20, 0, handle, 0)
driver.call("cuMemSetAccess", base, 4 << 20, (ctypes.c_int * 3)(1, 0, 3), 1)
driver.call("cuMemsetD32_v2", base + 8, 77, 2)
print(driver.get("cuMemExportToShareableHandle", handle, 1, 0), flush=True)
input()
"""


@pytest.mark.usefixtures("context")
def test_exported_memory_is_shared_and_charged_to_its_creator(
    build_dir: Path, driver: SimulatedDriver, gpu: Path
) -> None:
    with start_python(build_dir, gpu.parent, EXPORTER) as process:
        assert process.stdout
        number = int(process.stdout.readline())
        descriptor = os.open(f"/proc/{process.pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        handle = driver.get("cuMemImportFromShareableHandle", descriptor, 1)
        os.close(descriptor)
        base = driver.get("cuMemAddressReserve", 4 * MIB, 0, 0, 0)
        driver.call("cuMemMap", base, 4 * MIB, 0, handle, 0)
        allow(driver, base, 4 * MIB)
        assert driver.read_words(base, 2) == [0, 77 << 32 | 77]
        used = {p.pid: p.memory for p in simgpu.status(gpu).processes}
        process.kill()
    assert used == {process.pid: 4 * MIB, os.getpid(): 0}
    assert held(driver) == 0
    assert driver.read_words(base, 2) == [0, 77 << 32 | 77]


# Pointers


def pointer(driver: SimulatedDriver, attribute: int, address: int) -> int:
    value = ctypes.c_uint64()
    driver.call("cuPointerGetAttribute", ctypes.byref(value), attribute, address)
    return value.value


def address_range(driver: SimulatedDriver, address: int) -> tuple[int, int]:
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    return base.value, size.value


CONTEXT, MEMORY_TYPE, ORDINAL, START, SIZE = 1, 2, 9, 11, 12  # CUpointer_attribute


def test_a_pointer_has_attributes_of_its_target(driver: SimulatedDriver, context: Context) -> None:
    other = driver.context(1)
    there = driver.allocate(3 * MIB)
    assert [pointer(driver, a, there + 5) for a in (CONTEXT, MEMORY_TYPE, ORDINAL, START, SIZE)] == [
        other.handle, 2, 1, there, 3 * MIB,
    ]  # fmt: skip
    context.make_current()
    small = driver.allocate(100)
    assert address_range(driver, small + 99) == (small, 100)
    driver.call("cuMemGetAddressRange_v2", None, None, small)
    pinned = driver.get("cuMemHostAlloc", 16, 0)
    assert (pointer(driver, MEMORY_TYPE, pinned), pointer(driver, ORDINAL, pinned)) == (1, 0)
    block = driver.get("cuMemAllocAsync", 1000, 0)
    assert address_range(driver, block) == (block, 1000)
    assert pointer(driver, CONTEXT, block) == 0
    assert pointer(driver, 17, block) == driver.get("cuDeviceGetDefaultMemPool", 0)


@pytest.mark.usefixtures("context")
def test_a_pointer_to_no_allocation_is_refused(driver: SimulatedDriver) -> None:
    value = ctypes.byref(ctypes.c_uint64())
    address = driver.allocate(4 * MIB)
    driver.call("cuMemFree_v2", address)
    word = ctypes.addressof(ctypes.c_uint64())
    for nowhere in (0, word, address):
        assert driver.try_call("cuPointerGetAttribute", value, CONTEXT, nowhere) == INVALID_VALUE
        assert driver.try_call("cuMemGetAddressRange_v2", value, None, nowhere) == 500


# IPC


class IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


SHARER = """
import ctypes, sys
driver.call("cuInit", 0)
context = driver.context()
address = driver.allocate(3 << 20)
handle = (ctypes.c_ubyte * 64)()
driver.call("cuIpcGetMemHandle", handle, address)
print(bytes(handle).hex(), flush=True)
input()
"""


@pytest.mark.usefixtures("context")
def test_memory_of_another_process_is_opened_and_counted(
    build_dir: Path, driver: SimulatedDriver, gpu: Path
) -> None:
    address = ctypes.byref(ctypes.c_uint64())
    with start_python(build_dir, gpu.parent, SHARER) as process:
        assert process.stdout
        handle = IpcHandle.from_buffer_copy(bytes.fromhex(process.stdout.readline()))
        before = held(driver)
        opened = driver.get("cuIpcOpenMemHandle_v2", handle, 1)
        assert driver.get("cuIpcOpenMemHandle", handle, 1) == opened
        assert (before, held(driver)) == (4 * MIB, 4 * MIB)
        assert address_range(driver, opened) == (opened, 3 * MIB)
        assert driver.try_call("cuIpcOpenMemHandle_v2", address, handle, 0) == INVALID_VALUE
        assert driver.try_call("cuMemFree_v2", opened) == INVALID_VALUE
        driver.call("cuMemsetD8_v2", opened, 1, 3 * MIB)
        driver.call("cuIpcCloseMemHandle", opened)
        driver.call("cuMemsetD8_v2", opened, 2, 3 * MIB)
        driver.call("cuIpcCloseMemHandle", opened)
        assert driver.try_call("cuIpcCloseMemHandle", opened) == INVALID_VALUE
        assert driver.try_call("cuMemsetD8_v2", opened, 1, 1) == INVALID_VALUE
        process.kill()
    with pytest.raises(CudaError, match="CUDA_ERROR_MAP_FAILED"):
        driver.get("cuIpcOpenMemHandle_v2", handle, 1)


@pytest.mark.usefixtures("context")
def test_a_failed_open_returns_its_reason(driver: SimulatedDriver) -> None:
    handle, address = IpcHandle(), ctypes.byref(ctypes.c_uint64())
    own = driver.allocate(MIB)
    driver.call("cuIpcGetMemHandle", ctypes.byref(handle), own)
    assert driver.try_call("cuIpcOpenMemHandle_v2", address, handle, 1) == 201
    assert driver.try_call("cuIpcOpenMemHandle_v2", address, IpcHandle(), 1) == 400
    where = ctypes.byref(handle)
    for wrong in (own + 512, driver.get("cuMemAllocAsync", MIB, 0), 0):
        assert driver.try_call("cuIpcGetMemHandle", where, wrong) == INVALID_VALUE
    assert driver.try_call("cuIpcCloseMemHandle", own) == INVALID_VALUE


# Arrays


class ArrayShape(ctypes.Structure):
    _fields_ = [
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("format", ctypes.c_int),
        ("channels", ctypes.c_uint),
        ("flags", ctypes.c_uint),
    ]


FLOAT = 0x20


def array(
    driver: SimulatedDriver, width: int, height: int, depth: int = 0, channels: int = 4
) -> int:
    shape = ArrayShape(width, height, depth, FLOAT, channels, 0)
    return driver.get("cuArray3DCreate_v2", ctypes.byref(shape))


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("shape", "taken"), [((1024, 1024), 16 * MIB), ((333, 777, 33), 203_423_744), ((1, 1), 2 * MIB)]
)
def test_an_array_takes_as_much_memory_as_on_an_h200(
    driver: SimulatedDriver, shape: tuple[int, ...], taken: int
) -> None:
    made = array(driver, *shape)
    assert held(driver) == taken
    driver.call("cuArrayDestroy", made)
    assert held(driver) == 0
    assert driver.try_call("cuArrayDestroy", made) == 400


@pytest.mark.usefixtures("context")
def test_small_arrays_share_a_slab(driver: SimulatedDriver) -> None:
    arrays = [array(driver, 64, 64) for _ in range(32)]
    assert held(driver) == 2 * MIB
    for made in arrays:
        driver.call("cuArrayDestroy", made)
    assert held(driver) == 0


@pytest.mark.usefixtures("context")
def test_an_array_has_a_descriptor(driver: SimulatedDriver) -> None:
    flat = (ctypes.c_size_t * 3)(100, 50, 1 << 32 | FLOAT)
    made = driver.get("cuArrayCreate_v2", flat)
    shape = ArrayShape()
    driver.call("cuArray3DGetDescriptor_v2", ctypes.byref(shape), made)
    assert (shape.width, shape.height, shape.depth) == (100, 50, 0)
    assert (shape.format, shape.channels) == (FLOAT, 1)
    back = (ctypes.c_size_t * 3)()
    driver.call("cuArrayGetDescriptor_v2", back, made)
    assert list(back) == list(flat)
    where = ctypes.byref(ctypes.c_uint64())
    for wrong in (
        ArrayShape(0, 1, 1, FLOAT, 1),
        ArrayShape(1, 1, 1, FLOAT, 3),
        ArrayShape(1, 1, 1, 0x91, 1),
    ):
        assert driver.try_call("cuArray3DCreate_v2", where, ctypes.byref(wrong)) == INVALID_VALUE


def test_a_mipmapped_array_has_levels(driver: SimulatedDriver, context: Context, gpu: Path) -> None:
    shape = ArrayShape(2048, 2048, 0, FLOAT, 4, 0)
    made = driver.get("cuMipmappedArrayCreate", ctypes.byref(shape), 20)
    assert held(driver) == 90_177_536
    level = driver.get("cuMipmappedArrayGetLevel", made, 11)
    assert driver.get("cuMipmappedArrayGetLevel", made, 11) == level
    where = ctypes.byref(ctypes.c_uint64())
    assert driver.try_call("cuMipmappedArrayGetLevel", where, made, 12) == INVALID_VALUE
    driver.call("cuArray3DGetDescriptor_v2", ctypes.byref(shape), level)
    assert (shape.width, shape.height) == (1, 1)
    assert driver.try_call("cuArrayDestroy", level) == INVALID_VALUE
    driver.call("cuMipmappedArrayDestroy", made)
    assert held(driver) == 0
    assert driver.try_call("cuArray3DGetDescriptor_v2", ctypes.byref(shape), level) == 400
    kept = array(driver, 1024, 1024)
    driver.call("cuCtxDestroy_v2", context.handle)
    assert simgpu.status(gpu).used == 0
    assert driver.try_call("cuArrayDestroy", kept) == 400


# Limits, modules and libraries


def test_larger_stacks_take_memory_for_every_thread(
    library: SimulatedDriver, tmp_path: Path
) -> None:
    gpu = simgpu.create(tmp_path, memory=8 << 30, context_memory=0, virtual_clock=True)[0]
    with library.attached(tmp_path):
        context = library.context()
        assert library.get("cuCtxGetLimit", 0) == 1024
        library.call("cuCtxSetLimit", 0, 16384)
        assert simgpu.status(gpu).used == 4_152_360_960
        library.call("cuCtxSetLimit", 0, 2048)
        assert library.get("cuCtxGetLimit", 0) == 2048
        assert library.try_call("cuCtxSetLimit", 0, 65536) == OUT_OF_MEMORY
        assert library.get("cuCtxGetLimit", 0) == 2048
        library.call("cuCtxSetLimit", 2, 256 * MIB)
        assert library.get("cuCtxGetLimit", 2) == 256 * MIB
        assert simgpu.status(gpu).used == 4_152_360_960
        assert library.try_call("cuCtxSetLimit", 3, 1) == 215
        library.call("cuCtxDestroy_v2", context.handle)
        assert simgpu.status(gpu).used == 0


GLOBALS = ctypes.c_char_p(b"globals:268435456")


def test_a_modules_variables_take_memory_while_it_is_loaded(
    driver: SimulatedDriver, context: Context, gpu: Path
) -> None:
    module = driver.get("cuModuleLoadData", GLOBALS)
    assert held(driver) == 256 * MIB
    driver.get("cuModuleGetFunction", module, ctypes.c_char_p(b"burn"))
    driver.call("cuModuleUnload", module)
    assert held(driver) == 0
    too_large = ctypes.c_char_p(b"globals:68719476736")
    where = ctypes.byref(ctypes.c_uint64())
    assert driver.try_call("cuModuleLoadData", where, too_large) == OUT_OF_MEMORY
    module = driver.get("cuModuleLoadData", GLOBALS)
    driver.call("cuCtxDestroy_v2", context.handle)
    assert simgpu.status(gpu).used == 0
    driver.call("cuModuleUnload", module)
    assert simgpu.status(gpu).used == 0


def load_library(driver: SimulatedDriver, image: ctypes.c_char_p) -> int:
    return driver.get("cuLibraryLoadData", image, None, None, 0, None, None, 0)


@pytest.mark.usefixtures("context")
def test_a_library_is_loaded_when_a_function_is_requested(driver: SimulatedDriver) -> None:
    library = load_library(driver, GLOBALS)
    kernel = driver.get("cuLibraryGetKernel", library, ctypes.c_char_p(b"burn"))
    assert held(driver) == 0
    function = driver.get("cuKernelGetFunction", kernel)
    assert held(driver) == 256 * MIB
    assert driver.get("cuKernelGetFunction", kernel) == function
    module = driver.get("cuLibraryGetModule", library)
    assert driver.get("cuModuleGetFunction", module, ctypes.c_char_p(b"burn")) == function
    assert driver.try_call("cuModuleUnload", module) == 400
    driver.context()
    assert driver.get("cuKernelGetFunction", kernel) != function
    assert held(driver) == 512 * MIB
    driver.call("cuLibraryUnload", library)
    assert held(driver) == 0
    assert driver.try_call("cuKernelGetFunction", ctypes.byref(ctypes.c_uint64()), kernel) == 400


@pytest.mark.usefixtures("context")
def test_a_kernel_of_a_library_may_be_launched_directly(driver: SimulatedDriver) -> None:
    library = load_library(driver, ctypes.c_char_p(b"// tidegate simgpu module\nkernel gemm\n"))
    kernel = driver.get("cuLibraryGetKernel", library, ctypes.c_char_p(b"gemm"))
    word = ctypes.c_uint64(MS)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(word))
    driver.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, 0, parameters, None)
    driver.call("cuCtxSynchronize")
    assert driver.clock() == MS
    for name in (b"gem", b"burn"):
        with pytest.raises(CudaError, match="CUDA_ERROR_NOT_FOUND"):
            driver.get("cuLibraryGetKernel", library, ctypes.c_char_p(name))


# Copies and fills


class Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D; each end is (x, y, z, level, type, host, device, array, context, pitch, height)."""

    _fields_ = [
        (name + end, kind)
        for end in ("_from", "_to")
        for name, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("z", ctypes.c_size_t),
            ("level", ctypes.c_size_t),
            ("type", ctypes.c_int),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_uint64),
            ("context", ctypes.c_uint64),
            ("pitch", ctypes.c_size_t),
            ("height", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("rows", ctypes.c_size_t), ("planes", ctypes.c_size_t)]


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (name + end, kind)
        for end in ("_from", "_to")
        for name, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("type", ctypes.c_int),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_uint64),
            ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("rows", ctypes.c_size_t)]


TO_HOST, TO_DEVICE, TO_ARRAY = 1, 2, 3  # CUmemorytype


def read(driver: SimulatedDriver, address: int, n: int) -> bytes:
    data = ctypes.create_string_buffer(n)
    driver.call("cuMemcpyDtoH_v2", data, address, n)
    return data.raw


@pytest.mark.parametrize("call", ["cuMemcpy2D_v2", "cuMemcpy2DUnaligned_v2", "cuMemcpy2DAsync_v2"])
def test_rows_are_copied_between_pitches(
    driver: SimulatedDriver, context: Context, call: str
) -> None:
    device = driver.allocate(4096)
    text = ctypes.create_string_buffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    copy = Copy2D(
        x_from=1, y_from=1, type_from=TO_HOST, host_from=ctypes.addressof(text), pitch_from=8,
        x_to=2, type_to=TO_DEVICE, device_to=device, pitch_to=16, width=3, rows=2,
    )  # fmt: skip
    stream = [driver.stream()] if "Async" in call else []
    context.burn(MS, stream=stream[0] if stream else 0)
    driver.call(call, ctypes.byref(copy), *stream)
    text.value = b"read before the return"
    context.synchronize()
    assert read(driver, device, 32) == b"\0\0JKL" + bytes(13) + b"RST" + bytes(11)
    copy.pitch_from = 3
    assert driver.try_call(call, ctypes.byref(copy), *stream) == INVALID_VALUE
    copy.pitch_from, copy.rows = 8, 1000
    assert driver.try_call(call, ctypes.byref(copy), *stream) == INVALID_VALUE
    copy.rows = 0
    driver.call(call, ctypes.byref(copy), *stream)
    copy.rows, copy.host_from = 2, None
    assert driver.try_call(call, ctypes.byref(copy), *stream) == INVALID_VALUE


@pytest.mark.usefixtures("context")
def test_planes_go_through_an_array_and_back(driver: SimulatedDriver) -> None:
    """Copy 4 x 3 x 2 bytes into the middle of an array of 8 x 8 x 8, and back as packed rows."""
    shape = ArrayShape(8, 8, 8, 0x01, 1, 0)
    made = driver.get("cuArray3DCreate_v2", ctypes.byref(shape))
    source = ctypes.create_string_buffer(b"abcdefghijklmnopqrstuvwx")
    target = driver.allocate(4096)
    there = Memcpy3D(
        type_from=TO_HOST, host_from=ctypes.addressof(source), pitch_from=4, height_from=3,
        x_to=2, y_to=3, z_to=4, type_to=TO_ARRAY, array_to=made, width=4, rows=3, planes=2,
    )  # fmt: skip
    driver.call("cuMemcpy3D_v2", ctypes.byref(there))
    back = Memcpy3D(
        x_from=2, y_from=3, z_from=4, type_from=TO_ARRAY, array_from=made,
        type_to=TO_DEVICE, device_to=target, pitch_to=4, height_to=3, width=4, rows=3, planes=2,
    )  # fmt: skip
    driver.call("cuMemcpy3DAsync_v2", ctypes.byref(back), 0)
    assert read(driver, target, 25) == b"abcdefghijklmnopqrstuvwx\0"
    back.y_from, back.planes = 4, 1
    driver.call("cuMemcpy3D_v2", ctypes.byref(back))
    assert read(driver, target, 8) == b"efghijkl"
    back.y_from = 6
    assert driver.try_call("cuMemcpy3D_v2", ctypes.byref(back)) == INVALID_VALUE
    back.y_from, back.z_from = 0, 8
    assert driver.try_call("cuMemcpy3D_v2", ctypes.byref(back)) == INVALID_VALUE


def test_memory_is_copied_between_devices(driver: SimulatedDriver, context: Context) -> None:
    source = driver.allocate(4096)
    driver.call("cuMemsetD8_v2", source, 65, 4096)
    other = driver.context(1)
    target = driver.allocate(4096)
    driver.call("cuMemcpyPeer", target, other.handle, source, context.handle, 2)
    driver.call("cuMemcpyPeerAsync", target + 2, other.handle, source, context.handle, 2, 0)
    copy = Memcpy3D(
        type_from=TO_DEVICE, device_from=source, context_from=context.handle, type_to=TO_DEVICE,
        x_to=4, device_to=target, context_to=other.handle, width=2, rows=1, planes=1,
    )  # fmt: skip
    driver.call("cuMemcpy3DPeer", ctypes.byref(copy))
    copy.x_to = 6
    driver.call("cuMemcpy3DPeerAsync", ctypes.byref(copy), 0)
    assert read(driver, target, 10) == b"AAAAAAAA\0\0"
    driver.call("cuCtxDestroy_v2", context.handle)
    assert driver.try_call("cuMemcpyPeer", target, other.handle, target, context.handle, 2) == 201


@pytest.mark.usefixtures("context")
def test_a_copy_detects_the_type_of_its_addresses(driver: SimulatedDriver) -> None:
    word, device = ctypes.c_uint64(0x1234), driver.allocate(16)
    driver.call("cuMemcpy", device, ctypes.addressof(word), 8)
    driver.call("cuMemcpy", device + 8, device, 8)
    driver.call("cuMemcpyAsync", ctypes.addressof(word), device + 8, 4, 0)
    assert driver.read_words(device, 2) == [0x1234, 0x1234]
    driver.call("cuMemsetD8_v2", device, 0xFF, 8)
    driver.call("cuMemcpyAsync", ctypes.addressof(word), device, 8, 0)
    assert word.value == 0xFFFFFFFFFFFFFFFF
    assert driver.try_call("cuMemcpy", device, ctypes.addressof(word), 513) == INVALID_VALUE


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("form", ["_v2", "Async"])
@pytest.mark.parametrize(
    ("bits", "bytes_"), [(8, b"\x44"), (16, b"\x44\x33"), (32, b"\x44\x33\x22\x11")]
)
def test_fills_have_three_widths_and_two_shapes(
    driver: SimulatedDriver, form: str, bits: int, bytes_: bytes
) -> None:
    address = driver.allocate(4096)
    value = 0x11223344 & (1 << bits) - 1
    stream = [0] if form == "Async" else []
    driver.call(f"cuMemsetD{bits}{form}", address, value, 3, *stream)
    driver.call(f"cuMemsetD2D{bits}{form}", address + 64, 32, value, 2, 2, *stream)
    data = read(driver, address, 128)
    row = bytes_ * 2 + bytes(32 - 2 * len(bytes_))
    assert data == bytes_ * 3 + bytes(64 - 3 * len(bytes_)) + row + row
    assert driver.try_call(f"cuMemsetD2D{bits}{form}", address, 0, 0, 2, 2, *stream) == 1
    assert driver.try_call(f"cuMemsetD{bits}{form}", address, 0, 4097, *stream) == 1


def test_large_copies_and_fills_on_the_device_take_its_time(
    driver: SimulatedDriver, context: Context
) -> None:
    first, second = driver.allocate(64 * MIB), driver.allocate(64 * MIB)
    pinned = driver.get("cuMemHostAlloc", 2 * MIB, 0)
    driver.call("cuMemcpyDtoD_v2", second, first, MIB - 1)
    driver.call("cuMemsetD8_v2", first, 3, MIB - 1)
    driver.call("cuMemcpyHtoD_v2", first, pinned, 2 * MIB)
    driver.call("cuMemcpyDtoHAsync_v2", pinned, first, 2 * MIB, 0)
    context.synchronize()
    assert driver.clock() == 0
    driver.call("cuMemsetD32_v2", first, 0x01010101, 16 * MIB)
    driver.call("cuMemcpyDtoDAsync_v2", second, first, 64 * MIB, 0)
    assert driver.try_call("cuStreamQuery", 0) == 600
    driver.set_clock(21_777)
    assert driver.try_call("cuStreamQuery", 0) == 600
    context.synchronize()
    assert driver.clock() == 21_777 + 38_554
    assert driver.read_words(second + 64 * MIB - 8, 1) == [0x0101010101010101]


def test_a_graph_repeats_large_copies(driver: SimulatedDriver, context: Context) -> None:
    first, second, stream = driver.allocate(2 * MIB), driver.allocate(2 * MIB), driver.stream()
    graph = ctypes.c_uint64()
    driver.call("cuStreamBeginCapture_v2", stream, GLOBAL)
    driver.call("cuMemsetD8Async", first, 1, 2 * MIB, stream)
    driver.call("cuMemcpyAsync", second, first, 2 * MIB, stream)
    driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    execution = driver.get("cuGraphInstantiateWithFlags", graph.value, 0)
    for n in (1, 2):
        driver.call("cuMemsetD8_v2", second, 0, 8)
        driver.call("cuGraphLaunch", execution, stream)
        context.synchronize()
        assert driver.read_words(second, 1) == [0x0101010101010101]
        assert driver.clock() == n * (5000 + 524 + 5000 + 1048)


# The memory of graphs


class AllocNode(ctypes.Structure):
    _fields_ = [
        ("props", PoolProps),
        ("access", ctypes.c_void_p),
        ("n_access", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("address", ctypes.c_uint64),
    ]


def add_allocation(driver: SimulatedDriver, graph: int, size: int, *before: int) -> tuple[int, int]:
    """Add a node that allocates `size` bytes after others; return the node and the address."""
    parameters = AllocNode(PoolProps(PINNED, 0, DEVICE, 0), None, 0, size)
    nodes = (ctypes.c_uint64 * len(before))(*before)
    node = driver.get("cuGraphAddMemAllocNode", graph, nodes, len(before), ctypes.byref(parameters))
    return node, parameters.address


def add_free(driver: SimulatedDriver, graph: int, address: int, *before: int) -> int:
    nodes = (ctypes.c_uint64 * len(before))(*before)
    return driver.get("cuGraphAddMemFreeNode", graph, nodes, len(before), address)


def graph_bytes(driver: SimulatedDriver) -> list[int]:
    """Return, in MiB, the memory that graphs use, its peak, the memory reserved, and its peak."""
    values = []
    for attribute in range(4):
        value = ctypes.c_uint64()
        driver.call("cuDeviceGetGraphMemAttribute", 0, attribute, ctypes.byref(value))
        values.append(value.value // MIB)
    return values


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("call", ["cuGraphUpload", "cuGraphLaunch"])
def test_a_graph_takes_memory_at_its_first_launch(driver: SimulatedDriver, call: str) -> None:
    """The sizes were measured on an H200."""
    graph = driver.get("cuGraphCreate", 0)
    first, address = add_allocation(driver, graph, 100 * MIB)
    freed = add_free(driver, graph, address, first)
    second, again = add_allocation(driver, graph, 80 * MIB, freed)
    assert again == address
    add_free(driver, graph, again, second)
    execution = driver.get("cuGraphInstantiateWithFlags", graph, 0)
    assert (held(driver), graph_bytes(driver)) == (0, [0, 0, 0, 0])
    driver.call(call, execution, 0)
    assert (held(driver), graph_bytes(driver)) == (128 * MIB, [128] * 4)
    driver.call("cuGraphLaunch", execution, 0)
    driver.call("cuDeviceGraphMemTrim", 0)
    assert held(driver) == 128 * MIB
    driver.call("cuGraphExecDestroy", execution)
    driver.call("cuGraphDestroy", graph)
    assert (held(driver), graph_bytes(driver)) == (128 * MIB, [0, 128, 128, 128])
    driver.call("cuDeviceGraphMemTrim", 0)
    assert (held(driver), graph_bytes(driver)) == (0, [0, 128, 0, 128])
    driver.call("cuDeviceSetGraphMemAttribute", 0, 3, ctypes.byref(ctypes.c_uint64(0)))
    assert graph_bytes(driver) == [0, 128, 0, 0]


def test_graphs_reuse_memory_that_earlier_graphs_released(
    driver: SimulatedDriver, context: Context, gpu: Path
) -> None:
    for size, reserved in ((100, 128), (20, 128), (150, 160)):
        graph = driver.get("cuGraphCreate", 0)
        node, address = add_allocation(driver, graph, size * MIB)
        add_free(driver, graph, address, node)
        execution = driver.get("cuGraphInstantiateWithFlags", graph, 0)
        driver.call("cuGraphLaunch", execution, 0)
        assert held(driver) == reserved * MIB
        driver.call("cuGraphExecDestroy", execution)
    driver.call("cuCtxDestroy_v2", context.handle)
    assert simgpu.status(gpu).used == 0


@pytest.mark.usefixtures("context")
def test_the_application_frees_what_a_graph_does_not(driver: SimulatedDriver) -> None:
    graph = driver.get("cuGraphCreate", 0)
    node, address = add_allocation(driver, graph, MIB)
    other = add_allocation(driver, graph, MIB, node)[1]
    assert abs(other - address) >= MIB
    execution = driver.get("cuGraphInstantiateWithFlags", graph, 0)
    assert driver.try_call("cuMemFree_v2", address) == INVALID_VALUE
    driver.call("cuGraphLaunch", execution, 0)
    driver.call("cuMemsetD8_v2", address, 1, MIB)
    assert driver.try_call("cuGraphLaunch", execution, 0) == INVALID_VALUE
    driver.call("cuMemFree_v2", address)
    driver.call("cuMemFreeAsync", other, 0)
    driver.call("cuGraphLaunch", execution, 0)
    where = ctypes.byref(ctypes.c_uint64())
    assert driver.try_call("cuGraphInstantiateWithFlags", where, graph, 0) == NOT_SUPPORTED
    driver.call("cuGraphExecDestroy", execution)
    execution = driver.get("cuGraphInstantiateWithFlags", graph, 1)  # AUTO_FREE_ON_LAUNCH
    driver.call("cuGraphLaunch", execution, 0)
    driver.call("cuGraphLaunch", execution, 0)


@pytest.mark.usefixtures("context")
def test_a_graph_that_does_not_fit_is_not_launched(driver: SimulatedDriver) -> None:
    graph = driver.get("cuGraphCreate", 0)
    add_allocation(driver, graph, 100 * MIB)
    execution = driver.get("cuGraphInstantiateWithFlags", graph, 0)
    address = driver.allocate(TOTAL - 127 * MIB)
    assert driver.try_call("cuGraphLaunch", execution, 0) == OUT_OF_MEMORY
    assert driver.try_call("cuGraphUpload", execution, 0) == OUT_OF_MEMORY
    driver.call("cuMemFree_v2", address)
    driver.call("cuGraphLaunch", execution, 0)
    stranger = driver.get("cuGraphCreate", 0)
    node = ctypes.byref(ctypes.c_uint64())
    assert driver.try_call("cuGraphAddMemFreeNode", node, stranger, None, 0, address) == 1


@pytest.mark.usefixtures("context")
def test_a_node_whose_memory_is_refused_is_not_part_of_the_graph(driver: SimulatedDriver) -> None:
    graph = driver.get("cuGraphCreate", 0)
    node = ctypes.c_uint64()
    parameters = ctypes.byref(AllocNode(PoolProps(PINNED, 0, DEVICE, 0), None, 0, 5 * TOTAL))
    where = ctypes.byref(node)
    call = ("cuGraphAddMemAllocNode", where, graph, None, 0, parameters)
    assert driver.try_call(*call) == OUT_OF_MEMORY
    assert node.value == 0
    call = ("cuGraphAddMemFreeNode", where, graph, None, 0, 4096)
    assert driver.try_call(*call) == INVALID_VALUE
    assert node.value == 0


# The end of processes


HOLDER = """
import ctypes
driver.call("cuInit", 0)
context = driver.context()
driver.get("cuMemAllocAsync", 1 << 20, 0)
driver.get("cuMemCreate", 2 << 20, (ctypes.c_int * 8)(1, 0, 1, 0), 0)
driver.get("cuModuleLoadData", ctypes.c_char_p(b"globals:4194304"))
driver.get("cuArrayCreate_v2", (ctypes.c_size_t * 3)(1024, 1024, 1 << 32 | 0x20))
driver.call("cuCtxSetLimit", 0, 1088)
print("ready", flush=True)
input()
"""


@pytest.mark.usefixtures("context")
def test_all_memory_of_a_killed_process_is_free(
    build_dir: Path, driver: SimulatedDriver, gpu: Path
) -> None:
    with start_python(build_dir, gpu.parent, HOLDER) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        before = held(driver)
        process.kill()
    assert before == (32 + 2 + 4 + 4) * MIB + 132 * 2048 * 64
    assert held(driver) == 0


FORKER = """
import ctypes, os
driver.call("cuInit", 0)
context = driver.context()
block = driver.get("cuMemAllocAsync", 1 << 20, 0)
handle = driver.get("cuMemCreate", 2 << 20, (ctypes.c_int * 8)(1, 0, 1, 0), 0)
pool = driver.get("cuDeviceGetDefaultMemPool", 0)
base = driver.get("cuMemAddressReserve", 2 << 20, 0, 0, 0)
child = os.fork()
if child == 0:
    driver.call("cuInit", 0)
    own = driver.context()
    assert driver.try_call("cuMemRelease", handle) == 1
    assert driver.try_call("cuMemPoolTrimTo", pool, 0) == 1
    assert driver.try_call("cuMemFreeAsync", block, 0) == 1
    assert driver.try_call("cuMemAddressFree", base, 2 << 20) == 1
    driver.get("cuMemCreate", 2 << 20, (ctypes.c_int * 8)(1, 0, 1, 0), 0)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
driver.call("cuMemMap", base, 2 << 20, 0, handle, 0)
driver.call("cuMemFreeAsync", block, 0)
driver.call("cuCtxSynchronize")
driver.call("cuMemRelease", handle)
driver.call("cuMemUnmap", base, 2 << 20)
print((4096 << 20) - driver.free_memory())
"""


def test_a_forked_child_has_none_of_its_parents_memory(build_dir: Path, gpu: Path) -> None:
    process = start_python(build_dir, gpu.parent, FORKER)
    output, _ = process.communicate()
    assert (process.returncode, output) == (0, "7\n0\n")


def test_memory_of_the_application_is_registered_once(driver):
    driver.context()
    buffer = ctypes.create_string_buffer(3 * 4096)
    address = ctypes.addressof(buffer)
    driver.call("cuMemHostRegister_v2", address, 8192, 0)
    kind = ctypes.c_uint()
    driver.call("cuPointerGetAttribute", ctypes.byref(kind), 2, address + 8191)
    assert kind.value == 1
    for inside in (address, address + 4096, address - 1):
        assert driver.try_call("cuMemHostRegister_v2", inside, 4096, 0) == 712
    assert driver.try_call("cuMemFreeHost", address) == INVALID_VALUE
    driver.call("cuMemHostUnregister", address)
    assert driver.try_call("cuMemHostUnregister", address) == 713
    assert driver.try_call("cuPointerGetAttribute", ctypes.byref(kind), 2, address) == INVALID_VALUE
    buffer[0] = b"x"  # the memory is still the application's
