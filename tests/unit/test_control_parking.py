"""Memory is parked in host memory and moved back on orders that the test gives as the governor."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from governor.usage import Debt, read_charge
from libcontrol import layout, pages
from simgpu.testing import SimulatedDriver
from tests.unit.memory_node import (
    CONTEXT,
    GIB,
    LAUNCH,
    MIB,
    STOP,
    Agent,
    MemoryNode,
    need_namespaces,
    repeating,
)
from tests.unit.parking_node import (
    CLOSING,
    COMING,
    PARKED,
    RESIDENT,
    WORDS,
    ParkingNode,
    until,
)


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    need_namespaces()


@pytest.fixture
def node(build_dir: Path, tmp_path: Path) -> Iterator[ParkingNode]:
    node = ParkingNode(build_dir, tmp_path, 2 * GIB)
    yield node
    node.close()


@pytest.fixture
def agent(node: ParkingNode) -> Agent:
    agent = node.agent()
    agent.run(WORDS)
    return agent


# ---- blocks ----


def test_a_block_is_charged_as_without_parking(agent: Agent) -> None:
    agent.run("blocks = [driver.allocate(size) for size in (100, 1 << 20, 3 << 20, 100 << 20)]")
    assert agent.charged == (2 + 2 + 4 + 100) * MIB
    assert agent.seen == agent.charged + CONTEXT
    assert agent.field("blocks") == 4
    agent.run("for block in blocks: driver.call('cuMemFree_v2', block)")
    assert agent.charged == 0
    assert agent.seen == CONTEXT
    assert agent.field("blocks") == 0


def test_memory_that_can_be_parked_is_reported(node: ParkingNode, agent: Agent) -> None:
    agent.run("blocks = [driver.allocate(size) for size in (100, 3 << 20, 100 << 20)]")
    assert node.report(agent, "movable") == 104 * MIB
    agent.run("driver.call('cuMemFree_v2', blocks[2])")
    assert node.report(agent, "movable") == 4 * MIB


def test_without_parking_the_driver_allocates(build_dir: Path, tmp_path: Path) -> None:
    node = MemoryNode(build_dir, tmp_path, GIB)
    try:
        agent = node.agent()
        agent.run("block = driver.allocate(100 << 20)")
        base = pages.slot_base(agent.slot or 0)
        assert pages.read(node.ledger, base, "ledger_slot", "movable") == 0
        # The driver knows a handle only for a mapping.
        assert agent.number(
            "driver.try_call('cuMemRetainAllocationHandle', ctypes.byref(ctypes.c_uint64()), block)"
        )
    finally:
        node.close()


def test_a_block_looks_like_a_block_of_the_driver(agent: Agent) -> None:
    agent.run("size = (5 << 20) + 12345; block = driver.allocate(size)")
    agent.run(
        "base, length = ctypes.c_uint64(), ctypes.c_size_t()\n"
        "driver.call('cuMemGetAddressRange_v2', ctypes.byref(base), ctypes.byref(length), block + 4096)"
    )
    assert agent.run("[base.value == block, length.value == size]") == [True, True]
    agent.run(
        "def attribute(number, address):\n"
        "    value = ctypes.c_uint64()\n"
        "    driver.call('cuPointerGetAttribute', ctypes.byref(value), number, address)\n"
        "    return value.value\n"
    )
    assert agent.run("attribute(1, block + 99) == context")
    assert agent.run("attribute(2, block + 99)") == 2
    assert agent.run("attribute(11, block + 99) == block")
    assert agent.run("attribute(12, block + 99) == size")
    for call in (
        "cuMemUnmap', block, 6 << 20",
        "cuMemRetainAllocationHandle', ctypes.byref(base), block",
    ):
        assert agent.number(f"driver.try_call('{call})") == 1
    agent.run("driver.call('cuMemFree_v2', block)")
    assert agent.number("driver.try_call('cuMemFree_v2', block)") == 1


def test_the_number_of_a_block_stays_the_same(node: ParkingNode, agent: Agent) -> None:
    agent.run("block = driver.allocate(5 << 20)")
    agent.run("number = ctypes.c_uint64(); again = ctypes.c_uint64()")
    agent.run("driver.call('cuPointerGetAttribute', ctypes.byref(number), 7, block)")
    node.park(agent)
    node.unpark(agent)
    agent.run("driver.call('cuPointerGetAttribute', ctypes.byref(again), 7, block)")
    assert agent.run("number.value == again.value != 0")


def test_memory_with_synchronous_copies_stays_on_the_gpu(node: ParkingNode, agent: Agent) -> None:
    agent.run("block = driver.allocate(8 << 20); other = driver.allocate(8 << 20)")
    for on in (0, 1):
        agent.run(f"one = ctypes.c_uint({on})")
        agent.run("driver.call('cuPointerSetAttribute', ctypes.byref(one), 6, block + 4096)")
        assert node.report(agent, "movable") == (16, 8)[on] * MIB
    assert agent.number("driver.try_call('cuPointerSetAttribute', None, 6, block)") == 1
    agent.run("fill(block, 8 << 20, 1); fill(other, 8 << 20, 2)")
    node.park(agent)
    assert agent.seen == CONTEXT + 8 * MIB
    node.unpark(agent)
    assert agent.run("[holds(block, 8 << 20, 1), holds(other, 8 << 20, 2)]") == [True, True]


def test_pitched_memory_can_be_parked(node: ParkingNode, agent: Agent) -> None:
    agent.run("pitch = ctypes.c_size_t()")
    agent.run("block = driver.get('cuMemAllocPitch_v2', ctypes.byref(pitch), 1000, 4000, 4)")
    assert agent.number("pitch.value") == 1024
    assert node.report(agent, "movable") == 4 * MIB
    agent.run("fill(block, 1024 * 4000, 3)")
    node.park(agent)
    node.unpark(agent)
    assert agent.run("holds(block, 1024 * 4000, 3)")


def test_blocks_end_with_their_context(node: ParkingNode, agent: Agent) -> None:
    agent.run("other = driver.get('cuCtxCreate_v2', 0, 0)")
    agent.run("block = driver.allocate(100 << 20)")
    agent.run("driver.call('cuCtxDestroy_v2', other)")
    assert agent.charged == 0
    assert agent.seen == CONTEXT
    assert node.report(agent, "movable") == 0


# ---- moves ----


def test_parked_memory_is_not_on_the_gpu_and_comes_back_as_it_was(
    node: ParkingNode, agent: Agent
) -> None:
    agent.run("sizes = [3 << 20, 20 << 20, (64 << 20) + 4096, 100 << 10]")
    agent.run("blocks = [driver.allocate(size) for size in sizes]")
    agent.run("for i, block in enumerate(blocks): fill(block, sizes[i] // 4096 * 4096, i)")
    before = agent.field("memory")
    node.park(agent)
    assert agent.seen == CONTEXT + 2 * MIB  # the small block stays
    assert agent.field("memory") == before  # the quota counts it all the same
    assert node.report(agent, "parked") == 90 * MIB
    assert agent.field("unseen") == 90 * MIB
    assert node.sample() == CONTEXT
    node.unpark(agent)
    assert agent.seen == CONTEXT + 92 * MIB
    assert agent.field("memory") == before
    assert agent.field("unseen") == 0
    assert (
        agent.run("[holds(block, sizes[i] // 4096 * 4096, i) for i, block in enumerate(blocks)]")
        == [True] * 4
    )
    assert node.report(agent, "moved") == 180 * MIB
    assert node.report(agent, "move_ns") > 0


def test_a_sample_during_a_move_attributes_nothing_to_the_driver(
    node: ParkingNode, agent: Agent
) -> None:
    agent.run("blocks = [driver.allocate(128 << 20) for _ in range(4)]")
    debt, found, times = Debt(), set(), []
    assert agent.slot is not None

    def sample() -> None:
        """Sample the process as the governor does."""
        began = time.monotonic_ns()
        before = read_charge(node.ledger, agent.slot or 0, 0, 64 * GIB)
        seen = node.seen().get(agent.process.pid, 0)
        after = read_charge(node.ledger, agent.slot or 0, 0, 64 * GIB)
        debt.update(began, seen, before, after, CONTEXT, ended_ns=time.monotonic_ns())
        found.add((debt.bytes, debt.least))
        times.append(began)

    sample()
    with repeating(sample, 0.0005):
        for n in range(1, 101):
            node.park(agent)
            node.unpark(agent)
            if n >= 4 and len(times) > 100:
                break
    assert len(times) > 100
    assert max(max(one) for one in found) <= CONTEXT


USES = {
    "a copy to the GPU": "driver.call('cuMemcpyHtoD_v2', block, bytes(4096), 4096)",
    "a copy from the GPU": "driver.call('cuMemcpyDtoH_v2', ctypes.create_string_buffer(4096), block, 4096)",
    "a fill": "driver.call('cuMemsetD8_v2', block, 1, 4096)",
    "a launch": "launch(1000)",
    "an allocation": "driver.allocate(2 << 20)",
    "a small allocation": "driver.allocate(200)",
    "a stream-ordered allocation": "driver.get('cuMemAllocAsync', 2 << 20, 0)",
    "a module": "driver.get('cuModuleLoadData', ctypes.c_char_p(b''))",
    "a context": "driver.get('cuCtxCreate_v2', 0, 0)",
    "an attribute": "driver.call('cuPointerGetAttribute', ctypes.byref(ctypes.c_uint64()), 2, block)",
    "a capture": "driver.call('cuStreamBeginCapture_v2', driver.get('cuStreamCreate', 1), 2)",
}


@pytest.mark.parametrize("use", list(USES))
def test_a_call_that_uses_memory_waits_until_it_is_back(
    node: ParkingNode, agent: Agent, use: str
) -> None:
    agent.run(LAUNCH)
    agent.run("block = driver.allocate(8 << 20); fill(block, 8 << 20, 5)")
    node.park(agent)
    agent.send(f"begun = time.monotonic(); {USES[use]}")
    until(lambda: node.report(agent, "awaiting") == 1)
    time.sleep(0.1)
    assert node.report(agent, "awaiting") == 1
    node.order(resident=True)
    agent.answer()
    assert node.report(agent, "awaiting") == 0
    assert node.report(agent, "away_ns") >= 100_000_000
    if use not in ("a copy to the GPU", "a fill", "a capture"):
        assert agent.run("holds(block, 8 << 20, 5)")


def test_a_grant_page_that_does_not_allow_parking_does_not_order_it(
    node: ParkingNode, agent: Agent
) -> None:
    """A process that started with a damaged page must continue when the page is valid again."""
    agent.run("block = driver.allocate(8 << 20); fill(block, 8 << 20, 5)")
    node.park(agent)
    agent.send("holds(block, 8 << 20, 5)")
    until(lambda: node.report(agent, "awaiting") == 1)
    node.write("parking", 0)
    assert agent.answer() is True


def test_memory_is_freed_while_it_is_parked(node: ParkingNode, agent: Agent) -> None:
    agent.run("blocks = [driver.allocate(8 << 20) for _ in range(3)]")
    agent.run("for i, block in enumerate(blocks): fill(block, 8 << 20, i)")
    node.park(agent)
    agent.run("driver.call('cuMemFree_v2', blocks[1])")
    assert agent.field("memory") == agent.field("unseen") == 16 * MIB
    assert node.report(agent, "parked") == 16 * MIB
    assert agent.number("driver.try_call('cuMemFree_v2', blocks[1] + 4096)") == 1
    node.unpark(agent)
    assert agent.charged == 16 * MIB
    assert agent.field("unseen") == 0
    assert agent.run("[holds(blocks[i], 8 << 20, i) for i in (0, 2)]") == [True, True]


def test_a_context_ends_while_its_memory_is_parked(node: ParkingNode, agent: Agent) -> None:
    agent.run("other = driver.get('cuCtxCreate_v2', 0, 0); block = driver.allocate(8 << 20)")
    node.park(agent)
    agent.run("driver.call('cuCtxDestroy_v2', other)")
    assert agent.field("memory") == agent.field("unseen") == 0
    assert agent.seen == CONTEXT
    assert node.report(agent, "movable") == 0


def closes(node: ParkingNode, agent: Agent) -> bool:
    """Order the memory to be parked while work runs; return whether CLOSING was observed.

    This state may last only a second, and the test may miss it on a busy machine.
    """
    node.order(resident=False)
    end = time.monotonic() + 5
    while node.report(agent, "residency") != CLOSING:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_work_in_flight_ends_before_its_memory_is_moved(node: ParkingNode, agent: Agent) -> None:
    agent.run(LAUNCH + STOP)
    agent.run("block = driver.allocate(8 << 20)")

    def is_seen_to_wait() -> bool:
        agent.run("stop(); launch(1000)")
        is_closing = closes(node, agent)
        assert agent.seen == CONTEXT + 8 * MIB
        agent.run("go_on()")
        until(lambda: node.report(agent, "residency") == PARKED)
        assert agent.seen == CONTEXT
        node.unpark(agent)
        return is_closing

    assert any(is_seen_to_wait() for _ in range(5))


def test_a_captured_stream_keeps_memory_resident(node: ParkingNode, agent: Agent) -> None:
    agent.run("block = driver.allocate(8 << 20); graph = ctypes.c_uint64()")
    agent.run(
        "stream = driver.get('cuStreamCreate', 1); driver.call('cuStreamBeginCapture_v2', stream, 2)"
    )
    node.order(resident=False)
    time.sleep(0.8)
    assert node.report(agent, "residency") == RESIDENT
    agent.run("driver.call('cuMemsetD8Async', block, 1, 4096, stream)")
    agent.run("driver.call('cuStreamEndCapture', stream, ctypes.byref(graph))")
    until(lambda: node.report(agent, "residency") == PARKED)


def test_memory_freed_during_a_capture_is_released_after_it(
    node: ParkingNode, agent: Agent
) -> None:
    agent.run("blocks = [driver.allocate(8 << 20) for _ in range(3)]; graph = ctypes.c_uint64()")
    agent.run("fill(blocks[0], 8 << 20, 3)")
    agent.run(
        "stream = driver.get('cuStreamCreate', 1); driver.call('cuStreamBeginCapture_v2', stream, 2)"
    )
    agent.run("driver.call('cuMemFree_v2', blocks[1])")
    # Releasing it would have been a synchronisation, which invalidates the capture.
    assert agent.seen == CONTEXT + 24 * MIB
    assert agent.charged == 24 * MIB
    assert node.report(agent, "movable") == 16 * MIB
    assert agent.number("driver.try_call('cuMemFree_v2', blocks[1])") != 0
    agent.run("driver.call('cuMemsetD8Async', blocks[0], 1, 4096, stream)")
    agent.run("driver.call('cuStreamEndCapture', stream, ctypes.byref(graph))")
    agent.run("driver.call('cuMemFree_v2', blocks[2])")
    agent.run("blocks[2] = driver.allocate(2 << 20)")
    assert agent.seen == CONTEXT + 10 * MIB
    assert agent.charged == 10 * MIB
    assert agent.run("holds(blocks[0], 8 << 20, 3)")
    assert agent.field("moving") == agent.field("unseen") == 0


def test_memory_freed_during_a_capture_is_not_parked(node: ParkingNode, agent: Agent) -> None:
    agent.run("blocks = [driver.allocate(8 << 20) for _ in range(2)]; graph = ctypes.c_uint64()")
    agent.run(
        "stream = driver.get('cuStreamCreate', 1); driver.call('cuStreamBeginCapture_v2', stream, 2)"
    )
    agent.run("driver.call('cuMemFree_v2', blocks[0])")
    agent.run("driver.call('cuStreamEndCapture', stream, ctypes.byref(graph))")
    node.park(agent)
    assert node.report(agent, "parked") == 8 * MIB
    assert agent.seen == CONTEXT
    assert agent.field("memory") == agent.field("unseen") == 8 * MIB
    node.unpark(agent)
    assert agent.seen == CONTEXT + 8 * MIB


def test_a_free_in_a_stream_does_not_wait_for_its_work(agent: Agent) -> None:
    agent.run(LAUNCH + STOP)
    agent.run("block, kept = driver.allocate(8 << 20), driver.allocate(8 << 20)")
    agent.run("stop(); launch(1000)")
    agent.run("driver.call('cuMemFreeAsync', block, 0)")  # returns while the work still waits
    assert agent.seen == CONTEXT + 16 * MIB
    agent.run("go_on(); driver.call('cuCtxSynchronize'); driver.call('cuMemFree_v2', kept)")
    agent.run("driver.allocate(2 << 20)")
    assert agent.seen == CONTEXT + 2 * MIB
    assert agent.charged == 2 * MIB


def test_nothing_is_parked_while_the_governor_is_away(node: ParkingNode, agent: Agent) -> None:
    agent.run("block = driver.allocate(8 << 20)")
    with node.away():
        node.order(resident=False)
        time.sleep(1.5)
        assert node.report(agent, "residency") == RESIDENT
        assert agent.seen == CONTEXT + 8 * MIB
    until(lambda: node.report(agent, "residency") == PARKED)


@pytest.mark.parametrize("state", ["resident", "parked"])
def test_a_process_exits_whether_its_memory_is_parked_or_not(
    node: ParkingNode, agent: Agent, state: str
) -> None:
    agent.run("block = driver.allocate(64 << 20)")
    if state == "parked":
        node.park(agent)
    assert agent.process.stdin is not None
    agent.process.stdin.close()  # the program reads the end of its input, and exits
    assert agent.process.wait(20) == 0
    assert sum(node.seen().values()) == 0


def test_an_order_that_is_revoked_lets_the_program_go_on(node: ParkingNode, agent: Agent) -> None:
    agent.run(STOP)
    agent.run("block = driver.allocate(8 << 20); stream = driver.stream()")

    def goes_on_at_once() -> bool:
        """Without the revocation, the program would be made to wait for at least a second."""
        agent.run("stop(stream)")
        begin = time.monotonic()
        is_closing = closes(node, agent)
        node.order(resident=True)
        until(lambda: node.report(agent, "residency") == RESIDENT)
        seconds = time.monotonic() - begin
        agent.run("go_on(); driver.call('cuStreamSynchronize', stream)")
        return is_closing and seconds < 0.9

    assert any(goes_on_at_once() for _ in range(5))


def test_work_that_waits_for_the_next_call_is_not_waited_for(
    node: ParkingNode, agent: Agent
) -> None:
    agent.run("word = driver.get('cuMemHostAlloc', 4096, 0); block = driver.allocate(8 << 20)")
    agent.run("ctypes.c_uint32.from_address(word).value = 0")
    agent.run("streams = [driver.get('cuStreamCreate', 1) for _ in range(2)]")
    agent.run("driver.call('cuStreamWaitValue32_v2', streams[0], word, 1, 0)")
    node.order(resident=False)
    until(lambda: node.report(agent, "residency") == CLOSING)
    # The program lets the first stream go on only after a call that waits for the memory.
    agent.run("driver.call('cuMemsetD8Async', block, 1, 4096, streams[1])")
    agent.run("ctypes.c_uint32.from_address(word).value = 1")
    agent.run("driver.call('cuStreamSynchronize', streams[0])")
    until(lambda: node.report(agent, "residency") == PARKED)


def test_without_room_on_the_gpu_memory_stays_parked(node: ParkingNode, agent: Agent) -> None:
    agent.run("block = driver.allocate(1 << 30); fill(block, 8 << 20, 5)")
    node.park(agent)
    with SimulatedDriver(node.build).attached(node.work / "gpus") as other:
        other.context()
        taken = other.allocate(63 * GIB)
        node.order(resident=True)
        until(lambda: node.report(agent, "residency") == COMING)
        time.sleep(0.8)
        assert node.report(agent, "residency") == COMING
        node.order(resident=False)
        until(lambda: node.report(agent, "residency") == PARKED)
        assert agent.seen == CONTEXT
        assert agent.field("memory") == agent.field("unseen") == GIB
        node.order(resident=True)
        time.sleep(0.8)
        other.call("cuMemFree_v2", taken)
        until(lambda: node.report(agent, "residency") == RESIDENT)
    assert agent.run("holds(block, 8 << 20, 5)")


def test_a_process_that_starts_without_room_waits(node: ParkingNode) -> None:
    node.order(resident=False)
    agent = node.agent(context=False)
    agent.send("context = driver.get('cuCtxCreate_v2', 0, 0)")
    until(lambda: node.report(agent, "awaiting") == 1)
    assert agent.seen == 0
    node.order(resident=True)
    agent.answer()
    assert agent.seen == CONTEXT


def test_the_processes_of_a_container_move_together(node: ParkingNode) -> None:
    agents = [node.agent() for _ in range(3)]
    for i, agent in enumerate(agents):
        agent.run(WORDS)
        agent.run(f"block = driver.allocate(32 << 20); fill(block, 32 << 20, {i})")
    node.order(resident=False)
    for agent in agents:
        until(lambda agent=agent: node.report(agent, "residency") == PARKED)
    assert sum(node.seen().values()) == 3 * CONTEXT
    assert node.used() == 3 * (CONTEXT + 32 * MIB)
    node.order(resident=True)
    for i, agent in enumerate(agents):
        assert agent.run(f"holds(block, 32 << 20, {i})")


def test_a_forked_child_is_another_process(node: ParkingNode, agent: Agent) -> None:
    agent.run("block = driver.allocate(8 << 20); fill(block, 8 << 20, 5)")
    agent.run("pid = os.fork() or os._exit(0)\nos.waitpid(pid, 0)")
    node.park(agent)
    node.unpark(agent)
    assert agent.run("holds(block, 8 << 20, 5)")


def test_without_host_memory_nothing_leaves_the_gpu(node: ParkingNode) -> None:
    node.has_arena = False
    agent = node.agent()
    agent.run("block = driver.allocate(8 << 20)")
    node.order(resident=False)
    time.sleep(0.8)
    assert node.report(agent, "residency") == RESIDENT
    agent.run("driver.call('cuMemsetD8_v2', block, 1, 4096)")


def test_memory_is_parked_once_there_is_host_memory_for_all_of_it(node: ParkingNode) -> None:
    agent = node.agent()
    agent.run(WORDS)
    assert agent.slot is not None
    node.make_ready(agent.slot, 64 * MIB)
    agent.run("block = driver.allocate(80 << 20); fill(block, 80 << 20, 5)")
    node.order(resident=False)
    time.sleep(0.8)
    assert node.report(agent, "residency") == RESIDENT
    node.make_ready(agent.slot, 128 * MIB)
    until(lambda: node.report(agent, "residency") == PARKED)
    node.unpark(agent)
    assert agent.run("holds(block, 80 << 20, 5)")


@pytest.mark.parametrize("delay_ms", [0, 10, 30, 60, 100, 200])
def test_a_process_that_is_killed_during_a_move_leaves_nothing(
    node: ParkingNode, agent: Agent, delay_ms: int
) -> None:
    other = node.agent()
    other.run(WORDS)
    other.run("block = driver.allocate(32 << 20); fill(block, 32 << 20, 4)")
    agent.run("block = driver.allocate(1 << 30)")
    node.order(resident=False)
    until(lambda: node.report(agent, "residency") != RESIDENT)
    time.sleep(delay_ms / 1000)
    agent.kill()
    until(lambda: node.report(other, "residency") == PARKED)
    assert sum(node.seen().values()) == CONTEXT
    assert node.sample() == CONTEXT
    assert node.used() == CONTEXT + 32 * MIB
    node.unpark(other)
    assert other.run("holds(block, 32 << 20, 4)")


COPY_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

#define NEXT(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t size, void *stream);
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t size, void *stream)
{
    return size == 4 << 20 ? 2 : NEXT(cuMemcpyDtoHAsync_v2)(to, from, size, stream);
}
"""


def test_a_copy_to_the_host_that_fails_leaves_all_memory_where_it_was(
    build_dir: Path, tmp_path: Path
) -> None:
    """The copy of a block of 4 MiB fails, with other blocks before and after it."""
    shim = tmp_path / "copy_shim.c"
    shim.write_text(COPY_SHIM)
    (tmp_path / "node").mkdir()
    node = ParkingNode(build_dir, tmp_path / "node", 2 * GIB, shim)
    try:
        agent = node.agent()
        agent.run(WORDS)
        agent.run("blocks = [driver.allocate(n << 20) for n in (8, 6, 4, 8, 6)]")
        agent.run("for i, block in enumerate(blocks): fill(block, 2 << 20, i)")
        node.order(resident=False)
        time.sleep(0.8)
        assert node.report(agent, "residency") != PARKED
        node.order(resident=True)
        until(lambda: node.report(agent, "residency") == RESIDENT)
        held = agent.run("[holds(block, 2 << 20, i) for i, block in enumerate(blocks)]")
        assert held == [True] * 5
        assert agent.seen == CONTEXT + 32 * MIB
        assert agent.charged == 32 * MIB
        assert agent.field("unseen") == agent.field("moving") == 0
    finally:
        node.close()


LEAVE_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

static int n_calls[256];

static int fails(char letter);

/* Reports no free memory. With FREE, all memory is free at first, and less at each of that many
 * calls; with FREE=error, the call fails. */
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    static long n;
    const char *mode = getenv("FREE");
    long n_falls = mode ? atol(mode) : 0;

    fails('q');
    *total = 100ul << 30;
    *free_bytes = mode ? *total - ((size_t)(n < n_falls ? ++n : n_falls) << 20) : 0;
    return mode && !strcmp(mode, "error") ? 999 : 0;
}

/* Writes a letter to the log, and returns whether this call of its kind is to fail. */
static int fails(char letter)
{
    const char *calls = getenv("CALLS"), *which = getenv("FAILING");

    if (!calls || write(atoi(calls), &letter, 1) != 1)
        return 0;
    return which && which[0] == letter && ++n_calls[(unsigned char)letter] == atoi(which + 1);
}

int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t size, void *stream);
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t size, void *stream)
{
    return fails('c') ? 2 : NEXT(cuMemcpyDtoHAsync_v2)(to, from, size, stream);
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t size, void *stream);
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t size, void *stream)
{
    return fails('h') ? 2 : NEXT(cuMemcpyHtoDAsync_v2)(to, from, size, stream);
}

int cuStreamSynchronize(void *stream);
int cuStreamSynchronize(void *stream)
{
    return fails('s') ? 2 : NEXT(cuStreamSynchronize)(stream);
}

int cuMemUnmap(unsigned long long address, size_t size);
int cuMemUnmap(unsigned long long address, size_t size)
{
    fails('u');
    return NEXT(cuMemUnmap)(address, size);
}
"""


@pytest.fixture
def leaving(build_dir: Path, tmp_path: Path) -> Iterator[tuple[ParkingNode, Agent]]:
    """Provide a process with five blocks of 6 MiB, whose driver logs its calls."""
    shim = tmp_path / "leave_shim.c"
    shim.write_text(LEAVE_SHIM)
    (tmp_path / "node").mkdir()
    node = ParkingNode(build_dir, tmp_path / "node", 2 * GIB, shim)
    try:
        agent = node.agent()
        agent.run(WORDS)
        agent.run("os.environ['CALLS'] = str(os.memfd_create('calls'))")
        agent.run("blocks = [driver.allocate(6 << 20) for _ in range(5)]")
        agent.run("for i, block in enumerate(blocks): fill(block, 6 << 20, i)")
        agent.run("os.ftruncate(int(os.environ['CALLS']), 0)")
        agent.run("os.lseek(int(os.environ['CALLS']), 0, os.SEEK_SET)")
        yield node, agent
    finally:
        node.close()


def all_calls_of(agent: Agent) -> str:
    """Return the letters of the calls that were logged."""
    calls = agent.run("os.pread(int(os.environ['CALLS']), 10000, 0).decode()")
    assert isinstance(calls, str)
    return calls


def calls_of(agent: Agent) -> str:
    """Return the letters of the calls that were logged, without the queries of free memory."""
    return all_calls_of(agent).replace("q", "")


def test_memory_is_released_after_its_copy(leaving: tuple[ParkingNode, Agent]) -> None:
    """Each of five blocks is copied, waited for and unmapped before the next."""
    node, agent = leaving
    node.park(agent)
    assert calls_of(agent) == 5 * "csu"
    assert agent.seen == CONTEXT


def n_waits(calls: str) -> int:
    """Return how often the free memory was queried between the last copy and the first release."""
    return calls[calls.rindex("s") : calls.index("u")].count("q")


def test_memory_that_no_process_takes_is_released_after_its_copy(
    leaving: tuple[ParkingNode, Agent],
) -> None:
    """The GPU has much free memory. Blocks stay for 50 ms only, in case another process comes."""
    node, agent = leaving
    agent.run("os.environ['FREE'] = '0'")
    node.park(agent)
    calls = calls_of(agent)
    assert sorted(calls) == sorted(5 * "csu")
    assert all(calls[: i + 1].count("u") <= calls[: i + 1].count("s") for i in range(len(calls)))
    assert agent.seen == CONTEXT


def test_memory_is_kept_while_others_take_free_memory(leaving: tuple[ParkingNode, Agent]) -> None:
    """It is released once they take no more, although there is enough."""
    node, agent = leaving
    agent.run("os.environ['FREE'] = '200'")
    node.park(agent)
    assert calls_of(agent) == 5 * "cs" + 5 * "u"
    assert 150 < n_waits(all_calls_of(agent)) < 1000
    assert agent.seen == CONTEXT


def test_memory_is_released_even_if_others_keep_taking_free_memory(
    leaving: tuple[ParkingNode, Agent],
) -> None:
    """The wait ends after about 2000 queries, one in each millisecond."""
    node, agent = leaving
    agent.run("os.environ['FREE'] = '90000'")
    node.park(agent)
    assert calls_of(agent) == 5 * "cs" + 5 * "u"
    assert 1000 < n_waits(all_calls_of(agent)) < 2100
    assert agent.seen == CONTEXT


def test_kept_memory_is_released_as_soon_as_it_may_return(
    leaving: tuple[ParkingNode, Agent],
) -> None:
    """The order may be revoked while the blocks are on both sides."""
    node, agent = leaving
    agent.run("os.environ['FREE'] = '90000'")
    node.order(resident=False)
    until(lambda: calls_of(agent).startswith(5 * "cs"))
    node.unpark(agent)
    assert agent.run("[holds(block, 6 << 20, i) for i, block in enumerate(blocks)]") == [True] * 5
    assert agent.seen == CONTEXT + 30 * MIB
    assert agent.charged == 30 * MIB


def test_memory_is_released_at_once_where_free_memory_cannot_be_queried(
    leaving: tuple[ParkingNode, Agent],
) -> None:
    """The driver returns an error."""
    node, agent = leaving
    agent.run("os.environ['FREE'] = 'error'")
    node.park(agent)
    assert calls_of(agent) == 5 * "csu"


def test_a_copy_that_fails_leaves_memory_that_was_kept_where_it_is(
    leaving: tuple[ParkingNode, Agent],
) -> None:
    """No block was released before the last copy failed; the second attempt succeeds."""
    node, agent = leaving
    agent.run("os.environ.update(FREE='90000', FAILING='c5')")
    node.park(agent)
    assert calls_of(agent) == 4 * "cs" + "cs" + 5 * "cs" + 5 * "u"
    node.unpark(agent)
    assert agent.run("[holds(block, 6 << 20, i) for i, block in enumerate(blocks)]") == [True] * 5


@pytest.mark.parametrize("failing", ["c1", "c3", "c5", "s1", "s3", "s5"])
def test_after_any_failed_call_memory_stays_and_can_be_parked_later(
    leaving: tuple[ParkingNode, Agent], failing: str
) -> None:
    """One copy, or the wait for it, fails in the first attempt."""
    node, agent = leaving
    agent.run(f"os.environ['FAILING'] = {failing!r}")
    node.park(agent)
    assert calls_of(agent).count("c") > 5
    assert agent.seen == CONTEXT
    node.unpark(agent)
    held = agent.run("[holds(block, 6 << 20, i) for i, block in enumerate(blocks)]")
    assert held == [True] * 5
    assert agent.seen == CONTEXT + 30 * MIB
    assert agent.charged == 30 * MIB
    assert agent.field("unseen") == agent.field("moving") == 0


def test_a_block_that_is_copied_in_part_is_waited_for_before_it_is_released(
    leaving: tuple[ParkingNode, Agent],
) -> None:
    """The second of the two copies of a sixth block, which is in two pieces of the arena, fails."""
    node, agent = leaving
    agent.run("blocks.append(driver.allocate(68 << 20)); fill(blocks[5], 68 << 20, 5)")
    node.park(agent)
    agent.run("os.environ['FAILING'] = 'h7'")
    node.unpark(agent)
    assert 5 * "h" + "hhsu" in calls_of(agent)
    assert agent.run("holds(blocks[5], 68 << 20, 5)") is True
    assert agent.seen == CONTEXT + 98 * MIB
    assert agent.charged == 98 * MIB


RETURN_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

#define NEXT(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t size, void *stream);
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t size, void *stream)
{
    return size == 4 << 20 ? 719 : NEXT(cuMemcpyHtoDAsync_v2)(to, from, size, stream);
}
"""


def test_calls_do_not_wait_for_ever_if_the_driver_fails_to_move_memory_back(
    build_dir: Path, tmp_path: Path
) -> None:
    """The GPU has an error while the memory is parked."""
    shim = tmp_path / "return_shim.c"
    shim.write_text(RETURN_SHIM)
    (tmp_path / "node").mkdir()
    node = ParkingNode(build_dir, tmp_path / "node", 2 * GIB, shim)
    try:
        agent = node.agent()
        agent.run("block = driver.allocate(4 << 20)")
        node.park(agent)
        node.unpark(agent)
        assert agent.number("driver.try_call('cuMemsetD8_v2', block, 1, 4096)") != 0
        agent.run("driver.call('cuMemFree_v2', block)")
        assert agent.charged == 0
        # After the error, no memory is moved any more.
        node.order(resident=False)
        time.sleep(0.8)
        assert node.report(agent, "residency") == RESIDENT
    finally:
        node.close()


def test_blocks_that_come_and_go_between_moves_keep_their_contents(
    node: ParkingNode, agent: Agent
) -> None:
    draw = random.Random(7)  # noqa: S311 - the same sequence each time
    live: dict[int, int] = {}
    agent.run("blocks = {}")
    for n in range(40):
        (node.park if n % 2 else node.unpark)(agent)
        size = draw.choice([1, 2, 3, 5, 17, 70]) * MIB
        if n % 2 == 0 and sum(live.values()) + size < 400 * MIB:
            agent.run(f"blocks[{n}] = driver.allocate({size}); fill(blocks[{n}], {size}, {n})")
            live[n] = size
        while live and draw.random() < 0.4:
            gone = draw.choice(list(live))
            agent.run(f"driver.call('cuMemFree_v2', blocks.pop({gone}))")
            del live[gone]
        if n % 2:
            continue
        for key, size in live.items():
            assert agent.run(f"holds(blocks[{key}], {size}, {key})"), (n, key)


@pytest.mark.slow
def test_a_thousand_moves_change_no_bit(node: ParkingNode, agent: Agent) -> None:
    draw = random.Random(11)  # noqa: S311 - the same sequence each time
    sizes = [draw.choice([1, 2, 3, 5, 8, 13]) * MIB + draw.choice([0, 4096]) for _ in range(16)]
    agent.run(
        "blocks = []\n"
        "def renew(i):\n"
        "    address, size = blocks[i][:2]\n"
        "    words = os.urandom(size)\n"
        "    driver.call('cuMemcpyHtoD_v2', address, words, size)\n"
        "    blocks[i] = address, size, words\n"
        "def differs(i):\n"
        "    address, size, words = blocks[i]\n"
        "    found = ctypes.create_string_buffer(size)\n"
        "    driver.call('cuMemcpyDtoH_v2', found, address, size)\n"
        "    return found.raw != words\n"
    )
    for i, size in enumerate(sizes):
        agent.run(f"blocks.append((driver.allocate({size}), {size}, b'')); renew({i})")
    for n in range(500):
        node.park(agent)
        node.unpark(agent)
        i = draw.randrange(len(sizes))
        assert agent.run(f"differs({i})") is False, (n, i)
        agent.run(f"renew({i})")
    assert agent.run("[i for i in range(len(blocks)) if differs(i)]") == []
    assert node.report(agent, "moved") >= 1000 * sum(sizes)


@pytest.mark.parametrize("threads", [8])
def test_many_threads_use_memory_while_it_moves(
    node: ParkingNode, agent: Agent, threads: int
) -> None:
    agent.run(
        "def work(i):\n"
        "    driver.call('cuCtxSetCurrent', context)\n"
        "    n = 0\n"
        "    while not done:\n"
        "        block = driver.allocate(2 << 20)\n"
        "        fill(block, 2 << 20, i + n)\n"
        "        if not holds(block, 2 << 20, i + n): raise SystemExit(3)\n"
        "        driver.call('cuMemFree_v2', block)\n"
        "        n += 1\n"
        "    counts.append(n)\n"
        "counts, done = [], False\n"
        "kept = driver.allocate(64 << 20); fill(kept, 64 << 20, 9)\n"
    )
    agent.run(
        f"ts = [threading.Thread(target=work, args=(i,)) for i in range({threads})]\n"
        "for t in ts: t.start()\n"
    )
    end = time.monotonic() + 2.5
    n = 0
    while n < 2 or time.monotonic() < end:
        node.park(agent)
        node.unpark(agent)
        n += 1
    agent.run("done = True\nfor t in ts: t.join()")
    assert agent.number("len(counts)") == threads
    assert agent.run("holds(kept, 64 << 20, 9)")
    assert agent.charged == 64 * MIB
    assert agent.seen == CONTEXT + 64 * MIB
    assert agent.field("unseen") == agent.field("moving") == agent.field("taking") == 0


def test_the_layout_has_room_for_what_a_process_reports() -> None:
    assert layout.offsets(layout.LEDGER_SLOT)["awaiting"] + 4 <= layout.LEDGER_SLOT_DEVICES
