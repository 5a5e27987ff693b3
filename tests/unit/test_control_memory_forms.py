"""Older and rarer forms of the memory functions, which a shim adds to the simulated driver."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simgpu.testing import CudaError
from tests.conftest import ROOT, need
from tests.unit.memory_node import CONTEXT, GIB, KIB, MIB, Agent, MemoryNode, need_namespaces

LIMIT = GIB
SHIM = ROOT / "tests" / "unit" / "memory_shim.c"
STREAM = 576 * KIB  # bytes that a stream is assumed to take


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    need("gcc")
    need_namespaces()


@pytest.fixture
def node(build_dir: Path, tmp_path: Path) -> Iterator[MemoryNode]:
    node = MemoryNode(build_dir, tmp_path, LIMIT, shim=SHIM)
    yield node
    node.close()


@pytest.fixture
def agent(node: MemoryNode) -> Agent:
    return node.agent()


def raw(layout: str, *values: int) -> str:
    return f"ctypes.create_string_buffer(bytes.fromhex('{struct.pack(layout, *values).hex()}'))"


def filled(node: MemoryNode, leave: int) -> str:
    """Return a program that allocates the rest of the quota, except `leave` bytes."""
    return f"driver.allocate({(node.limit - node.used() - leave) // (2 * MIB) * 2 * MIB})"


def test_blocks_of_the_first_function_versions_are_charged(agent, node) -> None:
    agent.run("block = driver.get('cuMemAlloc', 3 << 20)")
    agent.run("pitch = ctypes.c_uint()")
    agent.run("other = driver.get('cuMemAllocPitch', ctypes.byref(pitch), 1000, 4000, 4)")
    assert agent.charged == 8 * MIB
    free, total = ctypes_pair(agent)
    assert (free, total) == (LIMIT - CONTEXT - 8 * MIB, LIMIT)
    assert agent.number("driver.get('cuDeviceTotalMem', 0)") == LIMIT
    agent.run("driver.call('cuMemFree', block); driver.call('cuMemFree', other)")
    assert agent.charged == 0
    agent.run(filled(node, 4 * MIB))
    assert agent.refuses("driver.get('cuMemAlloc', 6 << 20)")


def ctypes_pair(agent: Agent) -> tuple[int, int]:
    agent.run("pair = (ctypes.c_uint(), ctypes.c_uint())")
    agent.run("driver.call('cuMemGetInfo', ctypes.byref(pair[0]), ctypes.byref(pair[1]))")
    return agent.number("pair[0].value"), agent.number("pair[1].value")


def test_arrays_of_the_first_function_versions_are_charged(agent) -> None:
    agent.run(f"flat = driver.get('cuArrayCreate', {raw('<IIiI', 1024, 1024, 0x20, 4)})")
    assert agent.charged == 16 * MIB
    agent.run(f"deep = driver.get('cuArray3DCreate', {raw('<IIIiII', 333, 777, 33, 0x20, 4, 0)})")
    assert agent.charged == 16 * MIB + 203_423_744
    agent.run("driver.call('cuArrayDestroy', flat); driver.call('cuArrayDestroy', deep)")
    assert agent.charged == 0


@pytest.mark.parametrize(
    ("create", "destroy"),
    [
        ("driver.get('cuCtxCreate', 0, 0)", "cuCtxDestroy"),
        ("driver.get('cuGLCtxCreate_v2', 0, 0)", "cuCtxDestroy_v2"),
        ("driver.get('cuCtxCreate_v2', 0, 0)", "cuCtxDetach"),
    ],
)
def test_contexts_of_all_kinds_are_charged(agent, node, create, destroy) -> None:
    agent.run(f"other = {create}")
    assert node.used() == 2 * CONTEXT
    assert agent.field("contexts") == 2
    agent.run("driver.allocate(4 << 20)")
    if destroy == "cuCtxDetach":
        agent.run("driver.get('cuCtxAttach', 0)")
        agent.run("driver.call('cuCtxDetach', other)")
        assert agent.charged == 4 * MIB
    agent.run(f"driver.call('{destroy}', other)")
    assert agent.charged == 0
    assert agent.field("contexts") == 1
    node.sample()
    assert node.used() == CONTEXT
    agent.run("driver.call('cuCtxSetCurrent', context)")
    agent.run(filled(node, CONTEXT // 2))
    assert agent.refuses(create)


def test_first_function_versions_end_the_primary_context(node) -> None:
    agent = node.agent(context=False)
    for end in ("cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset"):
        agent.run("driver.call('cuCtxSetCurrent', driver.get('cuDevicePrimaryCtxRetain', 0))")
        agent.run("driver.allocate(4 << 20)")
        assert agent.charged == 4 * MIB
        agent.run(f"driver.call('{end}', 0)")
        assert agent.charged == agent.field("contexts") == 0


def test_a_green_context_keeps_the_primary_context(node) -> None:
    agent = node.agent(context=False)
    agent.run("green = driver.get('cuGreenCtxCreate', 0, 0, 0)")
    assert agent.field("contexts") == 2
    assert node.used() == CONTEXT
    agent.run("driver.call('cuCtxSetCurrent', driver.get('cuDevicePrimaryCtxRetain', 0))")
    agent.run("driver.allocate(4 << 20)")
    agent.run("driver.call('cuDevicePrimaryCtxRelease_v2', 0)")
    assert agent.charged == 4 * MIB
    agent.run("driver.call('cuGreenCtxDestroy', green)")
    assert agent.charged == agent.field("contexts") == 0
    node.sample()
    assert node.used() == 0


def test_what_a_stream_takes_is_noted_for_the_gpu_of_the_stream(build_dir, tmp_path) -> None:
    node = MemoryNode(build_dir, tmp_path / "two", LIMIT, shim=SHIM, devices=2)
    try:
        agent = node.agent()
        agent.run("here, there = context, driver.get('cuCtxCreate_v2', 0, 1)")
        agent.run("green = driver.get('cuGreenCtxCreate', 0, 1, 0)")
        agent.run("driver.call('cuCtxSetCurrent', here)")
        node.sample()
        before = [node.used(device) for device in range(2)]
        agent.run("stream = driver.get('cuGreenCtxStreamCreate', green, 1, 0)")
        assert [node.used(device) for device in range(2)] == [before[0], before[1] + STREAM]
        agent.run("near = driver.get('cuStreamCreate', 1)")
        agent.run("driver.call('cuCtxSetCurrent', there); far = driver.get('cuStreamCreate', 1)")
        agent.run("driver.call('cuStreamDestroy_v2', near)")
        assert [node.used(device) for device in range(2)] == [before[0], before[1] + 2 * STREAM]
        agent.run("driver.call('cuCtxSetCurrent', here); driver.call('cuStreamDestroy_v2', far)")
        assert [node.used(device) for device in range(2)] == [before[0], before[1] + STREAM]
    finally:
        node.close()


def test_external_memory_is_charged_by_its_description(agent, node) -> None:
    def description(size: int) -> str:
        return raw("<i4xQQQ68x", 1, 0, 0, size)

    agent.run(f"memory = driver.get('cuImportExternalMemory', {description(100 * MIB)})")
    assert agent.field("memory") == agent.field("unseen") == 100 * MIB
    assert agent.refuses(f"driver.get('cuImportExternalMemory', {description(LIMIT)})")
    agent.run("driver.call('cuDestroyExternalMemory', memory)")
    assert agent.field("memory") == agent.field("unseen") == 0
    with pytest.raises(CudaError):
        agent.run("driver.get('cuImportExternalMemory', None)")
    assert node.used() == CONTEXT


def test_a_block_of_another_processs_pool_is_charged_until_it_is_freed(agent, node) -> None:
    agent.run("pool = driver.get('cuMemPoolImportFromShareableHandle', None, 1, 0)")
    for free in (
        "driver.call('cuMemFree_v2', block)",
        # The simulated driver accepts only blocks of its own pools here.
        "driver.try_call('cuMemFreeAsync', block, 0) and driver.call('cuMemFree_v2', block)",
    ):
        agent.run(
            "block = driver.get('cuMemPoolImportPointer', pool, ctypes.create_string_buffer(64))"
        )
        assert agent.field("memory") == agent.field("unseen") == 10 * MIB
        agent.run(free)
        assert agent.field("memory") == agent.field("unseen") == 0
    agent.run(filled(node, 4 * MIB))
    assert agent.refuses(
        "driver.get('cuMemPoolImportPointer', pool, ctypes.create_string_buffer(64))"
    )
    assert agent.field("unseen") == 0


def test_memory_that_is_mapped_into_an_array_lives_until_the_array_ends(agent) -> None:
    agent.run("handle = driver.get('cuMemCreate', 4 << 20, prop(), 0)")
    sparse = raw("<QQQiII4x", 512, 512, 0, 0x20, 4, 0)
    agent.run(f"array = driver.get('cuArray3DCreate_v2', {sparse})")
    held = agent.charged
    pack = "<i4xQi4x32si4xQQII8x"
    agent.run(
        f"import struct; entry = ctypes.create_string_buffer(struct.pack({pack!r}, 0, array, 0, bytes(32), 1, handle, 0, 1, 0))"
    )
    assert agent.number("len(entry.raw)") == 97  # 96 and a terminator
    agent.run("driver.call('cuMemMapArrayAsync', entry, 1, 0)")
    agent.run("driver.call('cuMemMapArrayAsync', entry, 1, 0)")
    agent.run("driver.call('cuMemRelease', handle)")
    assert agent.charged == held
    agent.run("driver.call('cuArrayDestroy', array)")
    assert agent.charged == 0


def test_arrays_that_have_no_memory_of_their_own_are_not_charged(agent) -> None:
    for flags in (0x40, 0x80):
        agent.run(
            f"driver.try_call('cuArray3DCreate_v2', ctypes.byref(ctypes.c_uint64()), {raw('<QQQiII4x', 65536, 65536, 0, 0x20, 4, flags)})"
        )
        assert agent.field("refused") == 0


# ---- libraries ----


def test_a_library_takes_its_memory_with_its_first_kernel(agent, node) -> None:
    load = "driver.get('cuLibraryLoadData', ctypes.c_char_p(b'globals:{}'), None, None, 0, None, None, 0)"
    kernel = "driver.get('cuLibraryGetKernel', library, ctypes.c_char_p(b'burn'))"
    agent.run(f"library = {load.format(32 * MIB)}; kernel = {kernel}")
    assert node.used() == CONTEXT
    agent.run("driver.get('cuKernelGetFunction', kernel)")
    assert node.used() == CONTEXT + 32 * MIB
    agent.run("driver.get('cuKernelGetFunction', kernel)")
    node.sample()
    assert node.used() == CONTEXT + 32 * MIB
    agent.run("driver.call('cuLibraryUnload', library)")
    node.sample()
    assert node.used() == CONTEXT
    with node.looking():
        agent.run(filled(node, 128 * MIB))
        agent.run(f"library = {load.format(300 * MIB)}; kernel = {kernel}")
        for _ in range(2):
            assert agent.refuses("driver.get('cuKernelGetFunction', kernel)")
        agent.run("driver.call('cuLibraryUnload', library)")
        # A small excess becomes debt, like all memory that the driver takes on its own.
        agent.run(f"library = {load.format(200 * MIB)}; kernel = {kernel}")
        agent.run("driver.get('cuKernelGetFunction', kernel)")
        assert node.used() == LIMIT + 72 * MIB
        assert agent.refuses("driver.allocate(2 << 20)")
        agent.run("driver.call('cuLibraryUnload', library)")


@pytest.mark.parametrize(
    "touch",
    [
        "driver.call('cuLibraryGetGlobal', ctypes.byref(ctypes.c_uint64()), None, library, b'x')",
        "driver.call('cuLibraryGetManaged', ctypes.byref(ctypes.c_uint64()), None, library, b'x')",
        "driver.get('cuLibraryGetUnifiedFunction', library, b'x') and None",
        "driver.get('cuLibraryGetModule', library)",
    ],
)
def test_a_library_takes_its_memory_with_whatever_is_requested_first(agent, node, touch) -> None:
    agent.run(
        "library = driver.get('cuLibraryLoadData', b'globals:33554432', None, None, 0, None, None, 0)"
    )
    assert node.used() == CONTEXT
    agent.run(touch)
    assert node.used() == CONTEXT + 32 * MIB


# ---- graphs ----

GRAPHS = """
def node_of(graph, size):
    raw = ctypes.create_string_buffer(120)
    raw[:88] = pool_props().raw[:88]
    raw[104:112] = size.to_bytes(8, 'little')
    driver.get('cuGraphAddMemAllocNode', graph, None, 0, raw)
    return int.from_bytes(raw[112:120], 'little')
def graph_of(*sizes):
    graph = driver.get('cuGraphCreate', 0)
    for size in sizes:
        address = node_of(graph, size << 20)
        driver.get('cuGraphAddMemFreeNode', graph, None, 0, address)
    return graph
"""


@pytest.mark.parametrize(
    "instantiate",
    [
        "driver.get('cuGraphInstantiateWithFlags', graph, 0)",
        "driver.get('cuGraphInstantiateWithParams', graph, None)",
        "driver.get('cuGraphInstantiate', graph, None, None, 0)",
        "driver.get('cuGraphInstantiate_v2', graph, None, None, 0)",
    ],
)
def test_memory_of_graphs_is_charged_when_it_is_taken(agent, node, instantiate) -> None:
    agent.run(GRAPHS)
    agent.run("stream = driver.stream()")
    node.sample()
    agent.run(f"graph = graph_of(100, 80); graph_exec = {instantiate}")
    assert agent.charged == 0
    agent.run("driver.call('cuGraphUpload', graph_exec, stream)")
    assert agent.charged == agent.seen - CONTEXT == 128 * MIB
    agent.run("driver.call('cuGraphExecDestroy', graph_exec)")
    assert agent.charged == 128 * MIB
    agent.run("driver.call('cuGraphDestroy', graph); driver.call('cuDeviceGraphMemTrim', 0)")
    assert agent.charged == agent.seen - CONTEXT == 0


def test_a_graph_that_does_not_fit_is_refused_and_unused_memory_of_graphs_is_given_back(
    agent, node
) -> None:
    agent.run(GRAPHS)
    agent.run("stream = driver.stream()")
    node.sample()
    agent.run("graph = graph_of(100); small = driver.get('cuGraphInstantiateWithFlags', graph, 0)")
    agent.run("driver.call('cuGraphUpload', small, stream)")
    agent.run("driver.call('cuGraphExecDestroy', small); driver.call('cuGraphDestroy', graph)")
    agent.run(filled(node, 64 * MIB))
    assert agent.charged == agent.seen - CONTEXT
    agent.run("graph = graph_of(300); large = driver.get('cuGraphInstantiateWithFlags', graph, 0)")
    assert agent.refuses("driver.call('cuGraphUpload', large, stream)")
    assert agent.charged == agent.seen - CONTEXT  # without the 128 MiB of the other graph
    agent.run("graph = graph_of(150); fits = driver.get('cuGraphInstantiateWithFlags', graph, 0)")
    agent.run("driver.call('cuGraphUpload', fits, stream)")
    assert agent.charged == agent.seen - CONTEXT
    assert node.used() <= LIMIT


def test_an_allocation_node_that_is_added_by_the_general_function_is_charged(agent) -> None:
    agent.run(GRAPHS)
    agent.run(
        """
stream = driver.stream()
for name, more in (('cuGraphAddNode', ()), ('cuGraphAddNode_v2', (None,)), ('cuGraphAddNode_v3', (None,))):
    graph = driver.get('cuGraphCreate', 0)
    params = ctypes.create_string_buffer(256)
    params[0:4] = (10).to_bytes(4, 'little')
    params[16:104] = pool_props().raw[:88]
    params[120:128] = (20 << 20).to_bytes(8, 'little')
    driver.get(name, graph, None, *more, 0, params)
    graph_exec = driver.get('cuGraphInstantiateWithFlags', graph, 0)
    driver.call('cuGraphUpload_ptsz', graph_exec, stream)
"""
    )
    assert agent.charged == agent.seen - CONTEXT > 0


def test_memory_allocated_while_capturing_belongs_to_the_graph(agent, node) -> None:
    agent.run("stream = driver.stream()")
    node.sample()
    agent.run(filled(node, 4 * MIB))
    before = agent.charged
    agent.run("driver.call('cuStreamBeginCapture_v2', stream, 2)")
    assert (
        agent.number(
            "driver.try_call('cuMemAllocAsync', ctypes.byref(ctypes.c_uint64()), 100 << 20, stream)"
        )
        != 2
    )
    agent.run("driver.try_call('cuStreamEndCapture', stream, ctypes.byref(ctypes.c_uint64()))")
    assert agent.charged == before
    assert agent.field("refused") == 0


# ---- descriptors, multicast objects ----

EXPORTS = """
import subprocess
M = 1 << 20
def create():
    return out('cuMemCreate', 100 * M, prop(), 0)
def exported(handle):
    fd = ctypes.c_int()
    driver.call('cuMemExportToShareableHandle', ctypes.byref(fd), handle, 1, 0)
    return fd.value
def release(handle):
    driver.call('cuMemRelease', handle)
"""


def until_charged(agent: Agent, size: int) -> None:
    end = time.monotonic() + 20
    while agent.field("memory") != size:
        assert time.monotonic() < end, agent.field("memory")
        time.sleep(0.01)


def test_memory_that_lives_on_in_a_descriptor_stays_charged(agent) -> None:
    agent.run(EXPORTS)
    agent.run("handle = create(); first, second = exported(handle), exported(handle)")
    agent.run("copy = os.dup(second); os.close(second); release(handle)")
    assert agent.field("memory") == agent.field("unseen") == 100 * MIB
    agent.run("os.close(first)")
    time.sleep(0.5)  # several checks of the descriptors
    assert agent.field("memory") == 100 * MIB
    agent.run("other = subprocess.Popen(['sleep', '1000'], pass_fds=[copy]); os.close(copy)")
    time.sleep(0.5)
    assert agent.field("memory") == 100 * MIB
    agent.run("other.kill(); other.wait(); None")
    until_charged(agent, 0)
    assert agent.field("unseen") == 0


def test_memory_whose_descriptors_are_closed_ends_with_its_handle(agent) -> None:
    agent.run(EXPORTS)
    agent.run("handle = create(); os.close(exported(handle))")
    assert agent.field("memory") == 100 * MIB
    agent.run("release(handle)")
    assert agent.field("memory") == agent.field("unseen") == 0


def test_a_closed_descriptor_makes_room_for_an_allocation(agent, node) -> None:
    agent.run(EXPORTS)
    agent.run("handle = create(); fd = exported(handle); release(handle)")
    room = LIMIT - node.used()
    assert agent.refuses(f"driver.allocate({room + 2 * MIB})")
    for _ in range(20):
        agent.run("handle = create(); fd2 = exported(handle); release(handle); os.close(fd2)")
        agent.run(f"driver.call('cuMemFree_v2', driver.allocate({room}))")


def test_a_program_that_closes_the_librarys_descriptors_gains_no_memory(agent) -> None:
    agent.run(EXPORTS)
    agent.run("handle = create(); fd = exported(handle); release(handle)")
    agent.run("os.closerange(500, 600); os.close(fd)")
    time.sleep(0.5)
    assert agent.field("memory") == 100 * MIB


@pytest.mark.parametrize("bind", ["handle, 0", "at"])
@pytest.mark.parametrize(
    "end", ["driver.call('cuMulticastUnbind', many, 0, 8 * M, 100 * M)", "release(many)"]
)
def test_memory_that_is_bound_to_a_multicast_object_stays_charged(agent, bind, end) -> None:
    agent.run(EXPORTS)
    agent.run(
        "handle = create(); many = out('cuMulticastCreate', None)\n"
        "at = out('cuMemAddressReserve', 100 * M, 0, 0, 0)\n"
        "driver.call('cuMemMap', at, 100 * M, 0, handle, 0)"
    )
    name = "cuMulticastBindMem" if "handle" in bind else "cuMulticastBindAddr"
    call = f"driver.try_call('{name}', many, 8 * M, {bind}, {{}}, 0)"
    assert agent.run(call.format(0)) != 0
    assert agent.run(call.format("100 * M")) == 0
    agent.run("driver.call('cuMemUnmap', at, 100 * M); release(handle)")
    assert agent.field("memory") == 100 * MIB
    agent.run(end)
    assert agent.field("memory") == 0


BOUND = """
handle = create()
at = out('cuMemAddressReserve', 100 * M, 0, 0, 0)
driver.call('cuMemMap', at, 100 * M, 0, handle, 0)
"""


@pytest.mark.parametrize("bind", ["handle, 0", "at"])
@pytest.mark.parametrize(
    "end", ["driver.call('cuMulticastUnbind', many, 0, 8 * M, 100 * M)", "release(many)"]
)
def test_a_binding_that_names_its_gpu_keeps_the_charge_too(agent, bind, end) -> None:
    agent.run(EXPORTS + BOUND + "many = out('cuMulticastCreate', None)")
    name = "cuMulticastBindMem_v2" if "handle" in bind else "cuMulticastBindAddr_v2"
    call = f"driver.try_call('{name}', many, {{}}, 8 * M, {bind}, 100 * M, 0)"
    assert agent.run(call.format(1)) != 0
    assert agent.run(call.format(0)) == 0
    agent.run("driver.call('cuMemUnmap', at, 100 * M); release(handle)")
    assert agent.field("memory") == 100 * MIB
    agent.run(end)
    assert agent.field("memory") == 0


@pytest.mark.parametrize("bind", ["handle, 0", "at"])
@pytest.mark.parametrize(
    "end", ["'cuLogicalEndpointUnbind', 7, 0, 8 * M, 100 * M", "'cuLogicalEndpointDestroy', 7"]
)
def test_memory_that_is_bound_to_an_endpoint_stays_charged(agent, bind, end) -> None:
    agent.run(EXPORTS + BOUND)
    name = "cuLogicalEndpointBindMem" if "handle" in bind else "cuLogicalEndpointBindAddr"
    call = f"driver.try_call('{name}', {{}}, 0, 8 * M, {bind}, 100 * M, 0)"
    assert agent.run(call.format(100)) != 0
    assert agent.run(call.format(7)) == 0
    agent.run("driver.call('cuMemUnmap', at, 100 * M); release(handle)")
    assert agent.field("memory") == 100 * MIB
    # The end of another binding changes nothing: neither that of another endpoint, nor that of
    # another range of this endpoint, nor that of an endpoint that does not exist.
    agent.run("driver.call('cuLogicalEndpointDestroy', 8)")
    agent.run("driver.call('cuLogicalEndpointUnbind', 7, 0, 108 * M, 100 * M)")
    assert agent.run("driver.try_call('cuLogicalEndpointDestroy', 100)") != 0
    assert agent.field("memory") == 100 * MIB
    agent.run(f"driver.call({end})")
    assert agent.field("memory") == 0


def test_one_call_unbinds_all_memory_in_a_range_of_an_endpoint(agent) -> None:
    agent.run(EXPORTS)
    agent.run(
        "handles = [create() for _ in range(4)]\n"
        "for i, handle in enumerate(handles):\n"
        "    driver.call('cuLogicalEndpointBindMem', 7, 0, i * 100 * M, handle, 0, 100 * M, 0)\n"
        "for handle in handles:\n"
        "    release(handle)"
    )
    assert agent.field("memory") == 400 * MIB
    agent.run("driver.call('cuLogicalEndpointUnbind', 7, 0, 100 * M, 200 * M)")
    assert agent.field("memory") == 200 * MIB
    agent.run("driver.call('cuLogicalEndpointDestroy', 7)")
    assert agent.field("memory") == 0


def test_memory_of_a_locality_domain_counts_as_memory_of_its_gpu(agent, node) -> None:
    """The location of such memory is a separate type, with the GPU's ordinal in the lowest byte."""
    agent.run("handle = out('cuMemCreate', 100 << 20, prop(6, 0x100), 0)")
    assert agent.charged == agent.seen - CONTEXT == 100 * MIB
    agent.run("driver.call('cuMemRelease', handle); stream = driver.stream()")
    assert agent.refuses(f"out('cuMemCreate', {LIMIT}, prop(6, 0x100), 0)")
    agent.run(
        "own = out('cuMemPoolCreate', pool_props(6, 0x100))\n"
        "theirs = out('cuMemGetDefaultMemPool', (ctypes.c_int * 2)(6, 0x100), 1)"
    )
    for pool in ("own", "theirs"):
        before = agent.charged
        agent.run(f"p = out('cuMemAllocFromPoolAsync', 64 << 20, {pool}, stream)")
        assert agent.charged == agent.seen - CONTEXT
        assert agent.charged - before >= 64 * MIB
        assert agent.refuses(f"out('cuMemAllocFromPoolAsync', {LIMIT}, {pool}, stream)")
    assert node.used() <= LIMIT


@pytest.mark.parametrize("how", ["ours are closed", "there is no other"])
def test_a_descriptor_that_cannot_be_watched_keeps_its_memory_charged(agent, how) -> None:
    agent.run(EXPORTS + "import resource")
    if how == "ours are closed":
        agent.run("handle = create(); os.close(exported(handle)); os.closerange(500, 600)")
    else:
        agent.run(
            "top = os.open('/dev/null', 0); os.close(top)\n"
            "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, before[1]))"
        )
    agent.run("handle = create(); fd = exported(handle); release(handle)")
    charged = agent.field("memory")
    assert charged == (200 if how == "ours are closed" else 100) * MIB
    # Exports from before the library's descriptors were closed are no longer tracked, but later
    # ones are.
    if how == "ours are closed":
        agent.run("os.close(fd)")
        until_charged(agent, 100 * MIB)


def test_an_epoll_instance_of_the_program_is_left_alone(agent) -> None:
    agent.run(EXPORTS + "import select")
    agent.run("os.close(exported(create())); os.closerange(500, 600)")
    agent.run(
        "theirs = [select.epoll() for i in range(4)]\n"
        "for i, one in enumerate(theirs):\n"
        "    os.dup2(one.fileno(), 500 + i)\n"
        "kept = exported(create())"
    )
    assert (
        agent.run("'tfd' in ''.join(open(f'/proc/self/fdinfo/{500 + i}').read() for i in range(4))")
        is False
    )


OPEN = """
def n_open():
    valid = 0
    for fd in range(500, 700):
        try:
            os.fstat(fd)
        except OSError:
            continue
        valid += 1
    return valid
"""


def test_exports_of_a_program_without_proc_leak_no_descriptors(agent) -> None:
    agent.run(EXPORTS + OPEN)
    agent.run("handle = create(); fd = exported(handle); release(handle); os.close(fd)")
    until_charged(agent, 0)  # without /proc, its end would not be noticed
    before = agent.number("n_open()")
    agent.run("os.mkdir('/run/empty'); os.chroot('/run/empty')")
    for _ in range(3):
        agent.run("handle = create(); fd = exported(handle); release(handle); os.close(fd)")
    assert agent.number("n_open()") == before
    assert agent.field("memory") == 300 * MIB


def test_a_multicast_object_released_before_it_is_unmapped_keeps_no_charge(agent) -> None:
    """Its mapping does not hide a later mapping at the same addresses either."""
    agent.run(EXPORTS)
    agent.run(
        "handle = create(); many = out('cuMulticastCreate', None)\n"
        "at = out('cuMemAddressReserve', 100 * M, 0, 0, 0)\n"
        "driver.call('cuMulticastBindMem', many, 0, handle, 0, 100 * M, 0); release(handle)\n"
        "driver.call('cuMemMap', at, 100 * M, 0, many, 0); release(many)"
    )
    assert agent.field("memory") == 100 * MIB
    agent.run("driver.call('cuMemUnmap', at, 100 * M)")
    assert agent.field("memory") == 0
    agent.run("handle = create(); driver.call('cuMemMap', at, 100 * M, 0, handle, 0)")
    agent.run("release(handle); driver.call('cuMemUnmap', at, 100 * M)")
    assert agent.field("memory") == 0


def test_an_exported_multicast_object_keeps_the_charge_of_what_is_bound_to_it(agent) -> None:
    agent.run(EXPORTS)
    agent.run(
        "handle = create(); many = out('cuMulticastCreate', None)\n"
        "driver.call('cuMulticastBindMem', many, 0, handle, 0, 100 * M, 0)\n"
        "fd = exported(many); release(handle); release(many)"
    )
    assert agent.field("memory") == 100 * MIB
    agent.run("driver.call('cuMulticastUnbind', many, 0, 0, 100 * M)")
    assert agent.field("memory") == 0
