"""Charges for the calls that take device memory, their refunds, and allocations that are refused.

The reference is the memory that the simulated GPU attributes to the process, as NVML does on
hardware. The charges of the calls equal that memory, less the process's contexts.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from libcontrol import layout, pages
from simgpu.testing import CudaError
from tests.unit.memory_node import (
    CONTEXT,
    GIB,
    IN_TIME_S,
    KIB,
    LAUNCH,
    MIB,
    STOP,
    Agent,
    MemoryNode,
    need_namespaces,
    repeating,
)

LIMIT = GIB


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    need_namespaces()


@pytest.fixture
def node(build_dir: Path, tmp_path: Path) -> Iterator[MemoryNode]:
    node = MemoryNode(build_dir, tmp_path, LIMIT)
    yield node
    node.close()


@pytest.fixture
def agent(node: MemoryNode) -> Agent:
    return node.agent()


def exact(agent: Agent, charged: int, *, contexts: int = 1) -> None:
    """Check that the process is charged this much, and holds this much plus its contexts."""
    assert agent.charged == charged
    assert agent.seen == charged + contexts * CONTEXT


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def left(node: MemoryNode) -> int:
    return node.limit - node.used()


# ---- blocks ----


@pytest.mark.parametrize(
    ("sizes", "charged"),
    [
        ([1], 2 * MIB),
        ([256] * 5000, 4 * MIB),
        ([600 * KIB] * 4, 4 * MIB),
        ([600 * KIB] * 100, 68 * MIB),
        ([MIB - 1, MIB], 4 * MIB),
        ([MIB + 1], 2 * MIB),
        ([2 * MIB + 1], 4 * MIB),
        ([64 * MIB + 1], 66 * MIB),
        ([3 * MIB, 100, 1536 * KIB], 8 * MIB),
    ],
)
def test_blocks_are_charged_as_the_driver_rounds_them(agent, sizes, charged) -> None:
    agent.run(f"blocks = [driver.allocate(size) for size in {sizes}]")
    exact(agent, charged)
    assert agent.field("blocks") == len(sizes)
    agent.run("for block in blocks: driver.call('cuMemFree_v2', block)")
    exact(agent, 0)
    assert agent.field("blocks") == 0
    assert agent.field("unseen") == 0


def test_a_slab_is_charged_until_its_last_block_is_freed(agent) -> None:
    agent.run("blocks = [driver.allocate(700 << 10) for _ in range(4)]")  # two to a slab
    exact(agent, 4 * MIB)
    agent.run("driver.call('cuMemFree_v2', blocks[0])")
    exact(agent, 4 * MIB)
    agent.run("driver.call('cuMemFree_v2', blocks[1])")
    exact(agent, 2 * MIB)
    agent.run("for block in blocks[2:]: driver.call('cuMemFree_v2', block)")
    exact(agent, 0)


def test_pitched_memory_is_charged_by_the_pitch_that_the_driver_chose(agent) -> None:
    agent.run("pitch = ctypes.c_size_t()")
    agent.run("block = driver.get('cuMemAllocPitch_v2', ctypes.byref(pitch), 1000, 4000, 4)")
    assert agent.number("pitch.value") == 1024
    exact(agent, 4 * MIB)
    agent.run("driver.call('cuMemFree_v2', block)")
    exact(agent, 0)


def test_managed_memory_is_charged_although_no_process_holds_it(agent, node) -> None:
    agent.run("block = driver.get('cuMemAllocManaged', 100 << 20, 1)")
    exact(agent, 0)
    assert agent.field("memory") == agent.field("unseen") == 100 * MIB
    assert node.sample() == CONTEXT  # the charge does not hide the driver's overhead
    agent.run("driver.call('cuMemFree_v2', block)")
    assert agent.field("memory") == agent.field("unseen") == 0


@pytest.mark.parametrize(
    "call",
    [
        "driver.allocate(size)",
        "driver.get('cuMemAllocPitch_v2', ctypes.byref(ctypes.c_size_t()), 1 << 20, size >> 20, 4)",
        "driver.get('cuMemAllocManaged', size, 1)",
        "driver.get('cuMemAllocAsync', size, 0)",
        "driver.get('cuMemCreate', size, prop(), 0)",
        "driver.get('cuArrayCreate_v2', ctypes.create_string_buffer(__import__('struct').pack('<QQiI', 1024, size >> 14, 0x20, 4)))",
    ],
)
def test_an_allocation_that_does_not_fit_is_refused_before_the_driver_is_called(
    agent, node, call
) -> None:
    room = left(node)
    before = agent.seen
    agent.run(f"size = {room + 32 * MIB}")
    assert agent.refuses(call)
    assert agent.seen == before
    assert agent.charged == agent.field("unseen") == 0
    assert agent.field("refused") == 1
    assert node.peak <= LIMIT
    agent.run(f"size = {room // (32 * MIB) * 32 * MIB}")
    agent.run(call)
    assert node.used() <= LIMIT


@pytest.mark.parametrize("size", [0, 2**63, 2**64 - 1])
def test_invalid_sizes_leave_nothing_behind(agent, size) -> None:
    for call in (
        f"driver.allocate({size})",
        f"driver.get('cuMemAllocAsync', {size}, 0)",
        f"driver.get('cuMemAllocManaged', {size}, 1)",
        f"driver.get('cuMemCreate', {size}, prop(), 0)",
        f"driver.get('cuMemAllocPitch_v2', ctypes.byref(ctypes.c_size_t()), {size}, {size}, 4)",
    ):
        with pytest.raises(CudaError):
            agent.run(call)
        exact(agent, 0)
        assert agent.field("unseen") == 0


def test_a_free_that_fails_refunds_nothing(agent) -> None:
    agent.run("block = driver.allocate(4 << 20)")
    agent.run("other = driver.allocate(100)")
    for address in ("block + 512", "other + 512"):
        with pytest.raises(CudaError):
            agent.run(f"driver.call('cuMemFree_v2', {address})")
    agent.run("driver.call('cuStreamBeginCapture_v2', (stream := driver.stream()), 0)")
    for block in ("block", "other"):
        with pytest.raises(CudaError):
            agent.run(f"driver.call('cuMemFree_v2', {block})")
    exact(agent, 6 * MIB)
    agent.run("driver.try_call('cuStreamEndCapture', stream, ctypes.byref(ctypes.c_uint64()))")
    agent.run("driver.call('cuMemFree_v2', block)")
    agent.run("driver.call('cuMemFree_v2', other)")
    exact(agent, 0)


def test_thousands_of_blocks_are_found_again(agent) -> None:
    agent.run("blocks = [driver.allocate(512) for _ in range(10_000)]")
    assert agent.field("blocks") == 10_000
    exact(agent, 6 * MIB)
    agent.run("import random; random.Random(1).shuffle(blocks)")
    agent.run("for block in blocks[:5_000]: driver.call('cuMemFree_v2', block)")
    agent.run("more = [driver.allocate(512) for _ in range(5_000)]")
    agent.run("for block in blocks[5_000:] + more: driver.call('cuMemFree_v2', block)")
    exact(agent, 0)
    assert agent.field("blocks") == 0


# ---- pools ----


def test_what_a_pool_holds_is_charged(agent, node) -> None:
    agent.run("stream = driver.stream()")
    agent.run("first = driver.get('cuMemAllocAsync', 33 << 20, stream)")
    exact(agent, 64 * MIB)
    agent.run("small = [driver.get('cuMemAllocAsync', 1000, stream) for _ in range(2)]")
    exact(agent, 64 * MIB)
    agent.run("more = driver.get('cuMemAllocAsync', 100 << 20, stream)")
    exact(agent, 160 * MIB)
    agent.run("driver.call('cuMemFreeAsync', more, stream)")
    exact(agent, 160 * MIB)
    agent.run("driver.call('cuStreamSynchronize', stream)")
    agent.free()  # asks the pool for its size
    exact(agent, 64 * MIB)
    agent.run("for block in [first, *small]: driver.call('cuMemFree_v2', block)")
    agent.run("driver.call('cuCtxSynchronize')")
    agent.free()
    exact(agent, 0)
    assert node.peak >= 160 * MIB + CONTEXT


def test_a_free_block_of_a_pool_is_used_where_the_quota_has_no_room(agent, node) -> None:
    agent.run("stream = driver.stream()")
    agent.run("pool = driver.get('cuDeviceGetDefaultMemPool', 0)")
    agent.run(
        "driver.call('cuMemPoolSetAttribute', pool, 4, ctypes.byref(ctypes.c_uint64(2**64 - 1)))"
    )
    agent.run("block = driver.get('cuMemAllocAsync', 320 << 20, stream)")
    agent.run(f"rest = driver.allocate({left(node) - 4 * MIB})")
    agent.run("driver.call('cuMemFreeAsync', block, stream)")
    agent.run("driver.call('cuStreamSynchronize', stream)")
    assert left(node) < 32 * MIB
    agent.run("blocks = [driver.get('cuMemAllocAsync', 32 << 20, stream) for _ in range(10)]")
    assert agent.refuses("driver.get('cuMemAllocAsync', 32 << 20, stream)")
    assert node.used() <= LIMIT
    assert agent.charged == agent.seen - CONTEXT


def test_unused_memory_of_pools_is_given_back_before_anything_is_refused(agent) -> None:
    agent.run("stream = driver.stream()")
    agent.run("pool = driver.get('cuMemPoolCreate', pool_props())")
    agent.run(
        "driver.call('cuMemPoolSetAttribute', pool, 4, ctypes.byref(ctypes.c_uint64(2**64 - 1)))"
    )
    agent.run("block = driver.get('cuMemAllocFromPoolAsync', 640 << 20, pool, stream)")
    agent.run("driver.call('cuMemFreeAsync', block, stream)")
    agent.run("driver.call('cuStreamSynchronize', stream)")
    exact(agent, 640 * MIB)
    agent.run("large = driver.allocate(600 << 20)")
    exact(agent, 600 * MIB)
    assert agent.field("refused") == 0


def test_a_trim_is_refunded_and_a_destroyed_pool_is_left_to_nvml(agent, node) -> None:
    agent.run("stream = driver.stream()")
    agent.run("pool = driver.get('cuMemPoolCreate', pool_props())")
    agent.run(
        "blocks = [driver.get('cuMemAllocFromPoolAsync', 32 << 20, pool, stream) for _ in range(2)]"
    )
    exact(agent, 64 * MIB)
    agent.run("driver.call('cuMemFreeAsync', blocks[0], stream)")
    agent.run(
        "driver.call('cuMemPoolSetAttribute', pool, 4, ctypes.byref(ctypes.c_uint64(2**64 - 1)))"
    )
    agent.run("driver.call('cuStreamSynchronize', stream)")
    exact(agent, 64 * MIB)
    agent.run("driver.call('cuMemPoolTrimTo', pool, 0)")
    exact(agent, 32 * MIB)
    node.sample()
    used = node.used()
    agent.run("driver.call('cuMemPoolDestroy', pool)")
    # The pool lives on until the block is freed, but can no longer be queried.
    assert agent.charged == 0
    assert node.used() == used
    node.sample()
    assert node.used() == used
    agent.run("driver.call('cuMemFree_v2', blocks[1])")
    agent.run("driver.call('cuCtxSynchronize')")
    node.sample()
    assert node.used() == used - 32 * MIB


def test_pools_of_the_host_are_not_charged(agent) -> None:
    agent.run("pool = driver.get('cuMemPoolCreate', pool_props(kind=2))")
    agent.run("block = driver.get('cuMemAllocFromPoolAsync', 2 << 30, pool, 0)")
    exact(agent, 0)
    agent.run("driver.call('cuMemFreeAsync', block, 0)")
    agent.run("driver.call('cuMemPoolDestroy', pool)")


def test_the_pool_that_was_set_for_a_device_is_charged(agent) -> None:
    agent.run("pool = driver.get('cuMemPoolCreate', pool_props())")
    agent.run("driver.call('cuDeviceSetMemPool', 0, pool)")
    agent.run("block = driver.get('cuMemAllocAsync', 40 << 20, 0)")
    assert agent.number("info(pool, 5)") == 64 * MIB
    exact(agent, 64 * MIB)
    agent.run("default = driver.get('cuDeviceGetDefaultMemPool', 0)")
    agent.run("other = driver.get('cuMemAllocFromPoolAsync', 1 << 20, default, 0)")
    exact(agent, 96 * MIB)


def test_a_plain_block_may_be_freed_in_a_stream(agent) -> None:
    agent.run("block = driver.allocate(4 << 20)")
    agent.run(
        "driver.try_call('cuMemFreeAsync', block, 0) or driver.call('cuStreamSynchronize', 0)"
    )
    assert agent.charged == agent.seen - CONTEXT


# ---- physical memory ----

VMM = """
def create(size): return driver.get('cuMemCreate', size, prop(), 0)
def reserve(size): return driver.get('cuMemAddressReserve', size, 0, 0, 0)
def mapped(at, size, handle): driver.call('cuMemMap', at, size, 0, handle, 0)
def unmapped(at, size): driver.call('cuMemUnmap', at, size)
def release(handle): driver.call('cuMemRelease', handle)
M = 1 << 20
"""


def test_an_allocation_lives_until_its_handles_and_mappings_are_gone(agent) -> None:
    agent.run(VMM)
    agent.run("handle = create(4 * M); at = reserve(16 * M)")
    exact(agent, 4 * MIB)
    agent.run("mapped(at, 4 * M, handle); mapped(at + 4 * M, 4 * M, handle)")
    agent.run("release(handle)")
    exact(agent, 4 * MIB)
    agent.run("unmapped(at, 4 * M)")
    exact(agent, 4 * MIB)
    agent.run("again = driver.get('cuMemRetainAllocationHandle', at + 4 * M)")
    agent.run("unmapped(at + 4 * M, 4 * M)")
    exact(agent, 4 * MIB)
    agent.run("release(again)")
    exact(agent, 0)
    assert agent.field("blocks") == 0


def test_one_call_unmaps_several_mappings_and_a_failing_call_none(agent) -> None:
    agent.run(VMM)
    agent.run("at = reserve(64 * M); handles = [create(size * M) for size in (2, 4, 6)]")
    agent.run(
        "mapped(at, 2 * M, handles[0]); mapped(at + 2 * M, 4 * M, handles[1]); mapped(at + 6 * M, 6 * M, handles[2])"
    )
    agent.run("for handle in handles: release(handle)")
    exact(agent, 12 * MIB)
    for at, size in (("at", "4 * M"), ("at", "64 * M"), ("at + M", "M"), ("at", "1 << 62")):
        with pytest.raises(CudaError):
            agent.run(f"unmapped({at}, {size})")
        exact(agent, 12 * MIB)
    agent.run("unmapped(at + 2 * M, 10 * M)")
    exact(agent, 2 * MIB)
    agent.run("unmapped(at, 2 * M)")
    exact(agent, 0)


def test_memory_of_the_host_is_not_charged(agent) -> None:
    agent.run(VMM)
    agent.run("handle = driver.get('cuMemCreate', 2 << 30, prop(kind=3), 0); at = reserve(2 << 30)")
    agent.run("mapped(at, 2 << 30, handle); unmapped(at, 2 << 30); release(handle)")
    exact(agent, 0)


def test_failures_of_the_driver_do_not_change_the_account(agent) -> None:
    agent.run(VMM)
    agent.run("handle = create(4 * M); at = reserve(16 * M)")
    for call in (
        "driver.get('cuMemCreate', M, prop(), 0)",
        "mapped(at, 2 * M, handle)",
        "mapped(at + M, 4 * M, handle)",
        "driver.call('cuMemMap', at, 4 * M, 2 * M, handle, 0)",
        "release(0)",
    ):
        with pytest.raises(CudaError):
            agent.run(call)
        exact(agent, 4 * MIB)
    agent.run("release(handle)")
    exact(agent, 0)


def test_imported_memory_is_charged_when_it_is_mapped_and_refused_where_it_does_not_fit(
    node,
) -> None:
    owner, guest = node.agent(), node.agent()
    for agent in (owner, guest):
        agent.run(VMM)
    owner.run("handle = create(200 * M); fd = ctypes.c_int()")
    owner.run("driver.call('cuMemExportToShareableHandle', ctypes.byref(fd), handle, 1, 0)")
    guest.run(
        f"import os; fd = os.open('/proc/{owner.process.pid}/fd/{owner.number('fd.value')}', os.O_RDWR)"
    )
    guest.run("handle = driver.get('cuMemImportFromShareableHandle', fd, 1); at = reserve(400 * M)")
    assert guest.field("memory") == 0
    guest.run("mapped(at, 200 * M, handle)")
    assert guest.field("memory") == guest.field("unseen") == 200 * MIB
    exact(guest, 0)
    guest.run("mapped(at + 200 * M, 200 * M, handle)")
    assert guest.field("memory") == 200 * MIB
    guest.run("release(handle); unmapped(at, 400 * M)")
    assert guest.field("memory") == guest.field("unseen") == 0
    guest.run("handle = driver.get('cuMemImportFromShareableHandle', fd, 1)")
    owner.run(f"rest = driver.allocate({left(node) - 100 * MIB})")
    assert guest.refuses("mapped(at, 200 * M, handle)")
    assert guest.field("memory") == guest.field("unseen") == 0
    guest.run("release(handle)")


# ---- memory of others, arrays ----


def test_memory_opened_by_ipc_is_charged_once_and_closed_again_if_it_does_not_fit(node) -> None:
    owner, guest = node.agent(), node.agent()
    owner.run("block = driver.allocate(100 << 20); handle = ctypes.create_string_buffer(64)")
    owner.run("driver.call('cuIpcGetMemHandle', handle, block)")
    secret = owner.run("handle.raw.hex()")
    guest.run("class Handle(ctypes.Structure): _fields_ = [('reserved', ctypes.c_char * 64)]")
    guest.run(f"handle = Handle.from_buffer_copy(bytes.fromhex('{secret}'))")
    for name in ("cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle"):
        guest.run(f"opened = [driver.get('{name}', handle, 1) for _ in range(2)]")
        assert guest.field("memory") == guest.field("unseen") == 100 * MIB
        guest.run("driver.call('cuIpcCloseMemHandle', opened[0])")
        assert guest.field("memory") == 100 * MIB
        guest.run("driver.call('cuIpcCloseMemHandle', opened[1])")
        assert guest.field("memory") == guest.field("unseen") == 0
    owner.run(f"rest = driver.allocate({left(node) - 50 * MIB})")
    assert guest.refuses("driver.get('cuIpcOpenMemHandle_v2', handle, 1)")
    assert guest.field("memory") == guest.field("unseen") == 0
    owner.run("driver.call('cuMemFree_v2', rest)")
    guest.run("driver.get('cuIpcOpenMemHandle_v2', handle, 1)")


def test_a_failed_close_of_memory_that_is_open_twice_ends_neither_opening(node) -> None:
    owner, guest = node.agent(), node.agent()
    owner.run("block = driver.allocate(100 << 20); handle = ctypes.create_string_buffer(64)")
    owner.run("driver.call('cuIpcGetMemHandle', handle, block)")
    secret = owner.run("handle.raw.hex()")
    guest.run("class Handle(ctypes.Structure): _fields_ = [('reserved', ctypes.c_char * 64)]")
    guest.run(f"handle = Handle.from_buffer_copy(bytes.fromhex('{secret}'))")
    guest.run("opened = [driver.get('cuIpcOpenMemHandle_v2', handle, 1) for _ in range(2)]")
    guest.run("context = ctypes.c_void_p(); driver.call('cuCtxGetCurrent', ctypes.byref(context))")
    guest.run("driver.call('cuCtxSetCurrent', None)")
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):
        guest.run("driver.call('cuIpcCloseMemHandle', opened[0])")
    guest.run("driver.call('cuCtxSetCurrent', context)")
    guest.run("driver.call('cuIpcCloseMemHandle', opened[0])")
    assert guest.field("memory") == guest.field("unseen") == 100 * MIB
    guest.run("driver.call('cuIpcCloseMemHandle', opened[1])")
    assert guest.field("memory") == guest.field("unseen") == guest.field("blocks") == 0


def descriptor(
    width: int, height: int, depth: int, *, form: int = 0x20, channels: int = 4, flags: int = 0
) -> str:
    raw = struct.pack("<QQQiII4x", width, height, depth, form, channels, flags)
    return f"ctypes.create_string_buffer(bytes.fromhex('{raw.hex()}'))"


@pytest.mark.parametrize(
    ("shape", "charged"),
    [((1024, 1024, 0), 16 * MIB), ((333, 777, 33), 203_423_744), ((4096, 0, 0), None)],
)
def test_arrays_are_charged_by_their_shape(agent, shape, charged) -> None:
    agent.run(f"array = driver.get('cuArray3DCreate_v2', {descriptor(*shape)})")
    if charged is None:  # a small array shares a slab with others
        assert 0 < agent.charged <= 2 * MIB
    else:
        exact(agent, charged)
    agent.run("driver.call('cuArrayDestroy', array)")
    exact(agent, 0)


def test_mipmapped_arrays_are_charged_with_their_levels(agent) -> None:
    agent.run(f"array = driver.get('cuMipmappedArrayCreate', {descriptor(2048, 2048, 0)}, 12)")
    exact(agent, 90_177_536)
    agent.run("driver.call('cuMipmappedArrayDestroy', array)")
    exact(agent, 0)


# ---- contexts ----


def contexts(device: int, n: int) -> str:
    """Return a program that makes contexts, none of which stays current."""
    return (
        f"[(out('cuCtxCreate_v2', 0, {device}), out('cuCtxPopCurrent_v2'))[1] for _ in range({n})]"
    )


def test_what_the_driver_takes_is_announced_once_per_sample(agent, node) -> None:
    """The governor takes a sample soon after the announcement."""
    agent.run("others = []")
    for _ in range(2):
        node.write("reconciled_ns", time.monotonic_ns())
        node.poked()
        agent.run("others.append(driver.get('cuCtxCreate_v2', 0, 0))")
        assert node.poked() == 1
        agent.run("others.append(driver.get('cuCtxCreate_v2', 0, 0))")
        assert node.poked() == 0  # no sample was taken since


def test_every_context_counts_and_is_refused_where_it_does_not_fit(agent, node) -> None:
    assert node.used() == CONTEXT
    agent.run("others = [driver.get('cuCtxCreate_v2', 0, 0) for _ in range(2)]")
    assert node.used() == 3 * CONTEXT  # before the first reconciliation
    assert agent.field("contexts") == 3
    node.sample()
    assert node.used() == 3 * CONTEXT
    agent.run(f"rest = driver.allocate({left(node) - CONTEXT // 2 // MIB * MIB})")
    for call in (
        "driver.get('cuCtxCreate_v2', 0, 0)",
        "driver.get('cuCtxCreate_v3', None, 0, 0, 0)",
        "driver.get('cuCtxCreate_v4', None, 0, 0)",
        "driver.get('cuDevicePrimaryCtxRetain', 0)",
    ):
        assert agent.refuses(call)
        assert node.used() <= LIMIT
    assert agent.field("contexts") == 3
    agent.run("driver.call('cuCtxDestroy_v2', others.pop())")
    node.sample()
    assert node.used() == 2 * CONTEXT  # the remaining memory was allocated in this context
    assert agent.field("contexts") == 2


def test_allocations_end_with_their_context(agent) -> None:
    agent.run("first = driver.allocate(4 << 20)")
    agent.run("other = driver.get('cuCtxCreate_v2', 0, 0)")
    agent.run("gone = [driver.allocate(size) for size in (4 << 20, 1000, 2000, 6 << 20)]")
    agent.run("driver.get('cuMemAllocManaged', 8 << 20, 1)")
    agent.run(f"driver.get('cuArray3DCreate_v2', {descriptor(1024, 1024, 0)})")
    exact(agent, 32 * MIB, contexts=2)
    assert agent.field("unseen") == 8 * MIB
    agent.run("driver.call('cuCtxDestroy_v2', other)")
    exact(agent, 4 * MIB)
    assert agent.field("unseen") == 0
    assert agent.field("blocks") == 1
    agent.run("driver.call('cuCtxSetCurrent', context); driver.call('cuMemFree_v2', first)")
    exact(agent, 0)


def test_allocations_end_with_the_hundredth_context_as_well(agent, node) -> None:
    node.write("memory_limit", 64 * GIB)
    agent.run(f"many = {contexts(0, 100)}; driver.call('cuCtxSetCurrent', many[-1])")
    assert agent.field("contexts") == 101
    agent.run("driver.allocate(4 << 20); driver.get('cuMemAllocManaged', 8 << 20, 1)")
    exact(agent, 4 * MIB, contexts=101)
    agent.run("for other in many: driver.call('cuCtxDestroy_v2', other)")
    exact(agent, 0)
    assert agent.field("unseen") == 0
    assert agent.field("contexts") == 1


def test_a_context_beyond_the_last_owner_is_not_taken_for_the_primary_one(
    build_dir, tmp_path
) -> None:
    """254 contexts of a process can own blocks. Memory that is allocated in other contexts is given
    back when it is freed.

    A simulated GPU has 256 contexts at most, so the test uses two GPUs.
    """
    node = MemoryNode(build_dir, tmp_path / "two", 64 * GIB, devices=2)
    try:
        agent = node.agent()
        agent.run(f"near, far = {contexts(0, 200)}, {contexts(1, 100)}")
        assert (agent.field("contexts", 0), agent.field("contexts", 1)) == (201, 100)
        agent.run("driver.call('cuCtxDestroy_v2', near.pop(0))")
        agent.run("driver.call('cuCtxSetCurrent', far[-1])")
        agent.run("kept, freed = driver.allocate(4 << 20), driver.allocate(6 << 20)")
        agent.run("driver.get('cuDevicePrimaryCtxRetain', 1)")
        assert agent.field("contexts", 1) == 101
        agent.run("driver.call('cuDevicePrimaryCtxRelease_v2', 1)")
        assert agent.field("memory", 1) == 10 * MIB
        agent.run("driver.call('cuMemFree_v2', freed)")
        assert agent.field("memory", 1) == 4 * MIB
        agent.run("for other in far: driver.call('cuCtxDestroy_v2', other)")
        assert (agent.field("contexts", 0), agent.field("contexts", 1)) == (200, 0)
        assert agent.field("memory", 1) == 4 * MIB
        assert node.seen(1).get(agent.process.pid, 0) == 0
    finally:
        node.close()


def test_the_primary_context_ends_with_its_last_reference_or_a_reset(node) -> None:
    agent = node.agent(context=False)
    for end in ("cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxReset_v2"):
        agent.run("primary = [driver.get('cuDevicePrimaryCtxRetain', 0) for _ in range(2)][0]")
        assert agent.field("contexts") == 1
        agent.run("driver.call('cuCtxSetCurrent', primary)")
        agent.run("blocks = [driver.allocate(4 << 20), driver.get('cuMemAllocAsync', 5, 0)]")
        exact(agent, 36 * MIB)
        node.sample()
        assert node.used() == 36 * MIB + CONTEXT
        if end == "cuDevicePrimaryCtxRelease_v2":
            agent.run("driver.call('cuDevicePrimaryCtxRelease_v2', 0)")
            assert agent.field("contexts") == 1
        agent.run(f"driver.call('{end}', 0)")
        assert agent.field("contexts") == 0
        assert agent.field("memory") == 0
        node.sample()
        assert node.used() == 0
        if end == "cuDevicePrimaryCtxReset_v2":
            for _ in range(2):
                agent.run("driver.try_call('cuDevicePrimaryCtxRelease_v2', 0)")


def test_stacks_are_refused_beforehand_and_counted_until_the_next_sample(agent, node) -> None:
    before = agent.seen
    assert agent.refuses("driver.call('cuCtxSetLimit', 0, 64 << 10)")
    assert agent.seen == before
    agent.run("driver.call('cuCtxSetLimit', 0, 2048)")
    taken = agent.seen - before
    assert taken > 0
    assert node.used() == CONTEXT + taken
    node.sample()
    assert node.used() == CONTEXT + taken


def test_streams_are_counted_until_the_next_sample(agent, node) -> None:
    agent.run("stream = driver.stream()")
    assert 0 < node.used() - CONTEXT < MIB
    node.sample()
    assert node.used() == CONTEXT


# ---- modules ----


def test_a_module_is_counted_until_the_next_sample(agent, node) -> None:
    agent.run("module = driver.get('cuModuleLoadData', ctypes.c_char_p(b'globals:33554432'))")
    assert node.used() == CONTEXT + 32 * MIB
    assert node.sample() == CONTEXT + 32 * MIB
    assert node.used() == CONTEXT + 32 * MIB
    agent.run("driver.call('cuModuleUnload', module)")
    node.sample()
    assert node.used() == CONTEXT


def test_a_large_module_waits_for_a_sample_and_is_unloaded_if_it_does_not_fit(agent, node) -> None:
    with node.looking():
        agent.run("module = driver.get('cuModuleLoadData', ctypes.c_char_p(b'globals:268435456'))")
        assert node.used() == CONTEXT + 256 * MIB
        agent.run("rest = driver.allocate(640 << 20)")
        before = agent.seen
        assert agent.refuses(
            "driver.get('cuModuleLoadData', ctypes.c_char_p(b'globals:268435456'))"
        )
        assert agent.seen == before
    node.sample()
    assert node.used() == before


# ---- reports ----


def test_the_quota_is_reported_as_the_size_of_the_gpu(agent, node) -> None:
    agent.run("block = driver.allocate(10 << 20)")
    assert agent.free() == (LIMIT - CONTEXT - 10 * MIB, LIMIT)
    assert agent.number("driver.get('cuDeviceTotalMem_v2', 0)") == LIMIT
    node.write("memory_limit", 1 << 50)
    free, total = agent.free()
    assert total == 64 * GIB
    assert free == 64 * GIB - CONTEXT - 10 * MIB
    node.write("memory_limit", 1 * MIB)
    assert agent.free() == (0, MIB)


def test_without_a_context_the_driver_answers(node) -> None:
    agent = node.agent(context=False)
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):
        agent.free()
    agent.run("driver.get('cuCtxCreate_v2', 0, 0)")
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        agent.run("driver.call('cuMemGetInfo_v2', None, None)")


def test_a_refusal_waits_for_the_sample_that_is_due(agent, node) -> None:
    """The memory of a context is usable as soon as the context is gone, not 0.25 s later."""
    agent.run("other = driver.get('cuCtxCreate_v2', 0, 0)")
    node.sample()
    agent.run(f"driver.allocate({left(node) // (2 * MIB) * 2 * MIB})")
    agent.run("driver.call('cuCtxDestroy_v2', other)")
    assert node.read("memory_overhead") == 2 * CONTEXT
    with node.looking():
        agent.run("driver.call('cuCtxSetCurrent', context)")
        agent.run(f"driver.allocate({CONTEXT})")
    assert agent.field("refused") == 0


def test_a_killed_process_leaves_nothing_behind(node) -> None:
    first, second = node.agent(), node.agent()
    first.run("driver.allocate(300 << 20); driver.get('cuMemAllocAsync', 100 << 20, 0)")
    first.run(
        "driver.get('cuMemAllocManaged', 100 << 20, 1); driver.get('cuMemCreate', 64 << 20, prop(), 0)"
    )
    assert second.free()[0] == LIMIT - 2 * CONTEXT - 592 * MIB
    first.kill()
    node.sample()
    assert second.free()[0] == LIMIT - CONTEXT
    second.run(f"driver.allocate({LIMIT - CONTEXT})")


def test_each_gpu_has_a_separate_account(build_dir, tmp_path) -> None:
    node = MemoryNode(build_dir, tmp_path / "two", LIMIT, devices=2)
    try:
        agent = node.agent()
        agent.run("here, there = context, driver.get('cuCtxCreate_v2', 0, 1)")
        node.sample()
        agent.run("driver.call('cuCtxSetCurrent', here); near = driver.stream()")
        agent.run("driver.call('cuCtxSetCurrent', there); far = driver.stream()")
        agent.run("driver.call('cuCtxSetCurrent', here)")
        agent.run("block = driver.get('cuMemAllocAsync', 5, far)")  # on the stream's GPU
        agent.run("handle = driver.get('cuMemCreate', 64 << 20, prop(identity=1), 0)")
        agent.run("pool = driver.get('cuMemPoolCreate', pool_props(identity=1))")
        agent.run("other = driver.get('cuMemAllocFromPoolAsync', 5, pool, far)")
        assert (agent.field("memory", 0), agent.field("memory", 1)) == (0, 128 * MIB)
        agent.run("driver.allocate(4 << 20); driver.get('cuMemAllocAsync', 5, near)")
        assert (agent.field("memory", 0), agent.field("memory", 1)) == (36 * MIB, 128 * MIB)
        node.sample()
        for device, memory in ((0, 36 * MIB), (1, 128 * MIB)):
            assert node.seen(device)[agent.process.pid] == memory + CONTEXT == node.used(device)
        assert agent.refuses("driver.get('cuMemCreate', 900 << 20, prop(identity=1), 0)")
        assert (agent.field("refused", 0), agent.field("refused", 1)) == (0, 1)
        agent.run("driver.get('cuMemCreate', 900 << 20, prop(), 0)")
    finally:
        node.close()


def test_errno_of_the_application_is_preserved(agent) -> None:
    agent.run(
        "ctypes.set_errno(0); raw = ctypes.CDLL(driver.path, use_errno=True); place = ctypes.c_uint64()"
    )
    for call in (
        "raw.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(1000))",
        "raw.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(1 << 40))",
        "raw.cuMemAllocAsync(ctypes.byref(place), ctypes.c_size_t(1 << 29), None)",
        "raw.cuMemAllocAsync(ctypes.byref(place), ctypes.c_size_t(1 << 29), None)",
    ):
        agent.run("ctypes.set_errno(77)")
        agent.run(call)
        assert agent.number("ctypes.get_errno()") == 77


# ---- what NVML attributes to no process, and overhead that the governor overestimated ----


@contextlib.contextmanager
def hiding(node, agent) -> Iterator[None]:
    """Act as a governor for which NVML attributes no further memory to the process from now on."""
    known = node.sample()
    base = node.read("unattributed")

    def write_sample() -> None:
        began = time.monotonic_ns()
        unseen = agent.field("unseen")
        unattributed = agent.seen - agent.charged - known - unseen
        node.write("memory_overhead", known)
        if unseen == agent.field("unseen"):
            node.write("unattributed", (base + unattributed) % 2**64)
            node.write("unattributed_ns", began)
        node.write("reconciled_ns", began)

    with repeating(write_sample):
        yield


def test_module_variables_that_nvml_attributes_to_no_process_are_charged(node) -> None:
    agent = node.agent()
    with hiding(node, agent):
        module = "out('cuModuleLoadData', b'globals:134217728')"
        agent.run(f"first = {module}")
        assert agent.field("unseen") == agent.field("memory") == 128 * MIB
        agent.run("library = out('cuLibraryLoadData', b'globals:134217728', *[None, None, 0] * 2)")
        agent.run("out('cuLibraryGetModule', library)")
        assert agent.field("unseen") == 256 * MIB
        agent.run("driver.call('cuModuleUnload', first)")
        assert agent.field("unseen") == 128 * MIB
        agent.run("driver.call('cuLibraryUnload', library)")
        assert agent.field("unseen") == agent.field("memory") == 0
        agent.run(f"rest = driver.allocate({left(node) - 100 * MIB})")
        for _ in range(3):
            assert agent.refuses(module)
            assert agent.field("unseen") == 0
        agent.run(f"driver.call('cuMemFree_v2', rest); first = {module}")
        assert agent.field("unseen") == 128 * MIB
        agent.run("driver.call('cuCtxDestroy_v2', context)")
        assert agent.field("unseen") == agent.field("memory") == 0


@pytest.mark.parametrize("unattributed", [0, 128 * MIB])
def test_memory_that_may_be_a_neighbours_is_charged_once_it_can_be_attributed(
    node, unattributed
) -> None:
    """While a neighbour starts, the GPU's used memory changes and cannot be attributed to either process."""
    agent = node.agent()
    agent.run(f"rest = driver.allocate({left(node) - 100 * MIB})")
    before = agent.field("memory")
    known = node.read("memory_overhead")
    base = node.read("unattributed")

    def write_sample() -> None:
        node.write("memory_overhead", known)
        node.write("reconciled_ns", time.monotonic_ns())

    def write_attribution() -> None:
        node.write("unattributed", base + unattributed)
        node.write("unattributed_ns", time.monotonic_ns())
        write_sample()

    with repeating(write_sample):
        agent.run("module = out('cuModuleLoadData', b'globals:536870912')")
        assert (agent.field("refused"), agent.field("memory")) == (0, before)
    with repeating(write_attribution):
        deadline = time.monotonic() + 10
        while agent.field("memory") != before + unattributed:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)
        assert agent.field("unseen") == unattributed
        agent.run("driver.call('cuModuleUnload', module)")
        assert agent.field("memory") == before


def test_memory_from_before_the_first_sample_is_charged_to_no_load(node) -> None:
    """The driver's own memory, 600 MiB on an H200, is first reported while a neighbour starts."""
    agent = node.agent()
    agent.run(f"rest = driver.allocate({left(node) - 100 * MIB})")
    before = agent.field("memory")
    known = node.read("memory_overhead")
    node.write("unattributed_ns", 0)
    node.write("unattributed", 0)

    def write_sample() -> None:
        node.write("memory_overhead", known)
        node.write("unattributed", 600 * MIB)
        node.write("unattributed_ns", time.monotonic_ns())
        node.write("reconciled_ns", time.monotonic_ns())

    agent.run("image = b'globals:536870912'")
    agent.send("module = out('cuModuleLoadData', image)")
    with repeating(write_sample):
        agent.answer()
        time.sleep(0.3)
        assert (agent.field("refused"), agent.field("memory")) == (0, before)


def test_allocations_and_frees_during_a_load_do_not_hide_its_memory(node) -> None:
    """Otherwise the container could hide the memory of its modules behind its own allocations and
    frees.
    """
    agent, other = node.agent(), node.agent()
    known = node.read("memory_overhead")

    def write_sample() -> None:
        node.write("memory_overhead", known)
        node.write("reconciled_ns", time.monotonic_ns())

    with repeating(write_sample):
        other.send("[driver.call('cuMemFree_v2', driver.allocate(64 << 20)) for _ in range(20000)]")
        agent.run("module = out('cuModuleLoadData', b'globals:268435456')")
        assert agent.field("unseen") >= 190 * MIB
        other.kill()


def test_processes_that_start_during_a_load_are_accounted_for(node) -> None:
    agent = node.agent()
    base = node.read("unattributed")
    known = node.sample()

    def write_sample() -> None:
        node.write("memory_overhead", known)
        for name, value in (
            ("unattributed", base + 30 * MIB),
            ("unattributed_each", 9 * MIB),
            ("n_processes", node.read("n_processes") or 3),
            ("unattributed_ns", time.monotonic_ns()),
            ("reconciled_ns", time.monotonic_ns()),
        ):
            node.write(name, value)

    with repeating(write_sample):
        agent.run("module = out('cuModuleLoadData', b'globals:134217728')")
        assert agent.field("unseen") == 30 * MIB - 3 * 9 * MIB


def test_a_refusal_waits_for_overhead_that_is_about_to_shrink(node) -> None:
    for _ in range(5):
        agent = node.agent()
        room = left(node)
        found = node.read("memory_overhead")
        node.write("memory_overhead", found + 200 * MIB)
        begin = time.monotonic()
        agent.send(f"block = driver.allocate({room})")
        time.sleep(0.3)
        refused = agent.field("refused")
        node.write("memory_overhead", found)
        if time.monotonic() - begin < IN_TIME_S:
            break
        agent.kill()
    else:
        pytest.fail("the machine is too busy")
    assert refused == 0
    agent.answer()
    agent.run("driver.call('cuMemFree_v2', block)")
    # The allocation is refused if the last sample shows the overhead as well, or if the wait did
    # not help.
    for value in ("memory_overhead", "overhead_last"):
        node.write(value, found + 200 * MIB)
    assert agent.refuses(f"driver.allocate({room})")
    node.write("overhead_last", found)
    for _ in range(2):
        assert agent.refuses(f"driver.allocate({room})")


LIBRARY = "out('cuLibraryLoadData', b'globals:134217728', *[None, None, 0] * 2)"


def test_a_library_that_was_loaded_without_a_context_is_charged_when_it_enters_one(node) -> None:
    agent = node.agent(context=False)
    agent.run(f"libraries = [{LIBRARY} for i in range(2)]")
    agent.run("context = driver.get('cuCtxCreate_v2', 0, 0)")
    with hiding(node, agent):
        agent.run("[out('cuLibraryGetModule', library) and None for library in libraries]")
        assert agent.field("unseen") == agent.field("memory") == 256 * MIB


def test_a_kernel_that_is_launched_by_its_handle_charges_its_library(node) -> None:
    agent = node.agent()
    agent.run(
        f"""
libraries = [{LIBRARY} for i in range(3)]
kernels = [ctypes.c_void_p() for i in range(3)]
for library, kernel in zip(libraries, kernels):
    driver.call('cuLibraryGetKernel', ctypes.byref(kernel), library, b'burn')
value = ctypes.c_uint64(1000)
arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p))
def launch(kernel):
    driver.call('cuLaunchKernel', kernel, 1, 1, 1, 1, 1, 1, 0, None, arguments, None)
"""
    )
    with hiding(node, agent):
        for i in range(2):
            agent.run(f"launch(kernels[{i}])")
            assert agent.field("unseen") == agent.field("memory") == (i + 1) * 128 * MIB
        agent.run(f"launch(kernels[0]); rest = driver.allocate({left(node) - 100 * MIB})")
        # The library is loaded by now, which cannot be undone. The kernel still does not run.
        for _ in range(2):
            assert agent.refuses("launch(kernels[2])")
            assert agent.field("unseen") == 384 * MIB
        agent.run("[driver.call('cuLibraryUnload', library) for library in libraries] and None")
        assert agent.field("unseen") == 0


@pytest.mark.parametrize("others", [0, 70])  # 62 contexts have a bit each
def test_a_library_is_charged_in_each_context_until_that_ends(node, others: int) -> None:
    node.write("memory_limit", 64 * GIB)
    agent = node.agent(context=False)
    agent.run(f"others = {contexts(0, others)}")
    agent.run("context = driver.get('cuCtxCreate_v2', 0, 0)")
    node.sample()
    agent.run(
        "second = driver.get('cuCtxCreate_v2', 0, 0); driver.call('cuCtxSetCurrent', context)"
    )
    with hiding(node, agent):
        agent.run(f"library = {LIBRARY}; out('cuLibraryGetModule', library)")
        assert agent.field("unseen") == 128 * MIB
        agent.run("driver.call('cuCtxSetCurrent', second); out('cuLibraryGetModule', library)")
        assert agent.field("unseen") == 256 * MIB
        agent.run("driver.call('cuCtxDestroy_v2', context)")
        assert agent.field("unseen") == 128 * MIB
        agent.run(
            "context = driver.get('cuCtxCreate_v2', 0, 0); out('cuLibraryGetModule', library)"
        )
        assert agent.field("unseen") == 256 * MIB
        agent.run("driver.call('cuLibraryUnload', library)")
        assert agent.field("unseen") == 0


def test_memory_that_is_freed_during_a_load_hides_nothing(node) -> None:
    """On a busy machine, late samples may miss a load or two.

    If frees were not counted, 14 or more of 20 would be missed.
    """
    agent = node.agent()
    found = []
    with hiding(node, agent):
        for _ in range(3):
            before = agent.field("unseen")
            agent.run(
                """
def free():
    driver.call('cuCtxSetCurrent', context)
    while block:
        driver.call('cuMemFree_v2', block.pop())
modules, block = [], []
for i in range(20):
    block.append(driver.allocate(32 << 20))
    thread = threading.Thread(target=free)
    thread.start()
    modules.append(out('cuModuleLoadData', b'globals:33554432'))
    thread.join()
"""
            )
            found.append(agent.field("unseen") - before)
            if found[-1] in {n * 32 * MIB for n in (18, 19, 20)}:
                return
            agent.run("for module in modules: driver.call('cuModuleUnload', module)")
    pytest.fail(f"{found} of {20 * 32 * MIB} bytes were charged")


def test_a_managed_block_that_was_freed_makes_no_room_for_hidden_memory(node) -> None:
    agent = node.agent()
    with hiding(node, agent):
        for i in range(3):
            agent.run(
                "driver.call('cuMemFree_v2', out('cuMemAllocManaged', 256 << 20, 1))\n"
                "out('cuModuleLoadData', b'globals:134217728')"
            )
            assert agent.field("unseen") == (i + 1) * 128 * MIB


def test_one_block_of_a_container_at_a_time_is_taken_without_a_claim(node) -> None:
    """A small block may fit into what is free in a pool, or the pool grows by a unit.

    Which of the two happens is not known beforehand.
    """
    agent = node.agent()
    agent.run("stream = driver.stream(); block = out('cuMemAllocAsync', 20 << 20, stream)")
    node.sample()
    agent.run(f"rest = driver.allocate({left(node) // (2 * MIB) * 2 * MIB})")
    small = "driver.call('cuMemFreeAsync', out('cuMemAllocAsync', 1 << 20, stream), stream)"

    def trust(until: int) -> None:
        pages.write(node.ledger, 0, "ledger_header", "trust_ns", until)

    agent.run(small)
    assert pages.read(node.ledger, 0, "ledger_header", "trust_ns", 0) == 0

    def refuses_while_another_has_it() -> bool:
        trust(time.monotonic_ns() + 90_000_000)  # as if another process, possibly dead, had it
        return agent.refuses(small)

    # On a busy machine, the call may take longer than the other process is trusted.
    assert any(refuses_while_another_has_it() for _ in range(10))
    time.sleep(0.1)
    agent.run(small)
    trust(2**63)  # an invalid time
    agent.run(small)


BEYOND = 10 * MIB  # what the driver takes for itself, in the test below


def test_free_memory_of_a_pool_may_be_used_beyond_the_quota_unless_a_pool_grew(node) -> None:
    agent = node.agent()
    agent.run("stream = driver.stream(); block = out('cuMemAllocAsync', 20 << 20, stream)")
    node.sample()
    agent.run(f"rest = driver.allocate({left(node) // (2 * MIB) * 2 * MIB})")
    node.write("memory_overhead", node.read("memory_overhead") + BEYOND)
    assert node.used() > LIMIT
    agent.run("blocks = [out('cuMemAllocAsync', 1 << 20, stream) for i in range(12)]")
    held = agent.field("memory")
    # Three blocks of 1 MiB are free, but there is no contiguous room for 2 MiB.
    agent.run("for i in (10, 7, 4): driver.call('cuMemFreeAsync', blocks.pop(i), stream)")
    agent.run("driver.call('cuStreamSynchronize', stream)")
    assert agent.refuses("out('cuMemAllocAsync', 2 << 20, stream)")
    agent.run("driver.call('cuStreamSynchronize', stream)")
    until(lambda: agent.field("outgrown") == 0)
    time.sleep(0.11)  # for a moment, the pool itself is not trusted
    agent.run("blocks.append(out('cuMemAllocAsync', 1 << 20, stream))")
    assert agent.field("memory") == held


def test_pools_outgrow_the_quota_by_one_unit_however_long_their_streams_are_busy(node) -> None:
    """A refused block is freed only when its stream reaches the free."""
    agent = node.agent()
    agent.run(LAUNCH + STOP)
    agent.run("stream = driver.stream(); busy = driver.stream()")
    agent.run("blocks = [out('cuMemAllocAsync', 1 << 20, stream) for i in range(80)]")
    agent.run("for b in blocks[::2]: driver.call('cuMemFreeAsync', b, stream)")
    agent.run("driver.call('cuStreamSynchronize', stream)")
    node.sample()
    agent.run(f"rest = driver.allocate({left(node) // (2 * MIB) * 2 * MIB})")
    agent.run("stop(busy); launch(1000, busy)")
    with node.looking():
        for i in range(8):
            assert agent.refuses(f"out('cuMemAllocAsync', {(31 << 20) - i * 4096}, busy)")
            assert node.used() <= LIMIT + 32 * MIB
            time.sleep(0.25)
    assert agent.field("outgrown") == 1
    agent.run("go_on(); driver.call('cuStreamSynchronize', busy)")
    until(lambda: agent.field("outgrown") == 0)
    assert node.used() <= LIMIT


# ---- claims for memory that the driver is about to take ----


def test_threads_that_retain_a_context_at_the_same_time_leave_no_claim(node) -> None:
    agent = node.agent(context=False)
    agent.run(
        """
sys.setswitchinterval(1e-5)
barrier = threading.Barrier(4)
def retain():
    for i in range(300):
        barrier.wait()
        assert driver.library.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0) == 0
        barrier.wait()
        driver.library.cuDevicePrimaryCtxRelease_v2(0)
threads = [threading.Thread(target=retain) for i in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads] and None
"""
    )
    assert agent.field("taking") == 0
    assert agent.field("moving") == 0


def test_a_context_that_the_driver_does_not_create_leaves_no_claim(
    build_dir: Path, tmp_path: Path
) -> None:
    need_namespaces()
    node = MemoryNode(build_dir, tmp_path, LIMIT, memory=256 * MIB)  # the GPU itself is full
    try:
        node.agent().run("block = driver.allocate(160 << 20)")
        agent = node.agent(context=False)
        for call in ("cuDevicePrimaryCtxRetain", "cuCtxCreate_v2"):
            arguments = "ctypes.byref(ctypes.c_void_p()), 0" + (", 0" if "Ctx" in call[:5] else "")
            assert agent.run(f"driver.try_call('{call}', {arguments})") == 2
        assert agent.field("taking") == 0
        assert agent.field("memory") == 0
    finally:
        node.close()


def test_the_end_of_a_context_keeps_claims_of_other_calls(build_dir: Path, tmp_path: Path) -> None:
    node = MemoryNode(build_dir, tmp_path, LIMIT, shim=Path(__file__).with_name("memory_shim.c"))
    try:
        agent = node.agent(context=False)
        agent.run("a = driver.get('cuCtxCreate_v2', 0, 0); block = driver.allocate(512 << 20)")
        agent.run("driver.call('cuCtxDestroy_v2', a)")
        agent.run("b = driver.get('cuCtxCreate_v2', 0, 0); block = driver.allocate(4 << 20)")
        # Charged by another thread.
        base = layout.ledger_device(agent.slot, 0)
        pages.write(node.ledger, base, "ledger_device", "moving", 64 * MIB)
        agent.run("driver.call('cuCtxDetach', b)")
        assert agent.field("moving") == 64 * MIB
    finally:
        node.close()


@pytest.mark.parametrize(
    "load",
    [
        "out('cuModuleLoadData', b'globals:12582912')",
        "driver.get('cuLibraryGetModule', library(12582912))",
    ],
)
def test_many_small_modules_do_not_bypass_the_quota(node, load: str) -> None:
    agent = node.agent()
    agent.run(
        "def library(size):\n"
        "    image = b'globals:%d' % size\n"
        "    return out('cuLibraryLoadData', image, None, None, 0, None, None, 0)"
    )
    with node.looking():
        agent.run(f"rest = driver.allocate({left(node) // (2 * MIB) * 2 * MIB})")
        assert agent.refuses(f"[{load} for i in range(50)]")
        node.sample()
        assert node.used() <= LIMIT + (128 + 12) * MIB
