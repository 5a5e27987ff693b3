"""Test that no allocation within the quota is refused because a sample raced with the container's
calls.

The governor's part, `Debt`, is driven by hand: a test decides when a sample begins and what happens
during it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from governor.usage import Charge, Debt, read_charge
from libcontrol import layout, pages
from simgpu.testing import CudaError
from tests.unit.memory_node import (
    CONTEXT,
    GIB,
    IN_TIME_S,
    MIB,
    Agent,
    MemoryNode,
    need_namespaces,
    repeating,
)

BLOCK = 64 * MIB
N_BLOCKS = (GIB - CONTEXT) // BLOCK
"""Number of blocks that fit into the quota next to a context."""
EXPECTED = CONTEXT + 8 * MIB
"""Memory that a context is expected to take. If it took that much, one block less would fit."""

TAKE = f"driver.allocate({BLOCK})"


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    need_namespaces()


@pytest.fixture
def node(build_dir: Path, tmp_path: Path) -> Iterator[MemoryNode]:
    shim = Path(__file__).with_name("slow_shim.c")
    node = MemoryNode(build_dir, tmp_path, GIB, shim=shim)
    node.environment["SLOW_CALLS"] = str(tmp_path)
    node.write("context_bytes", EXPECTED)
    yield node
    node.close()


@pytest.fixture
def agent(node: MemoryNode) -> Agent:
    return start(node)


def start(node: MemoryNode) -> Agent:
    """Start a process with a context of which nothing but the expected size is known."""
    agent = node.agent(context=False)
    agent.run("context = driver.get('cuCtxCreate_v2', 0, 0)")
    return agent


class Governor:
    """Samples one process, and publishes the result in the governor's order."""

    def __init__(self, node: MemoryNode, agent: Agent) -> None:
        self.node, self.agent = node, agent
        self.debt = Debt()

    def sample(self, *, during: Callable[[], object] = lambda: None) -> None:
        """Take a sample; `during` is called between the ledger's first reading and NVML's."""
        began = time.monotonic_ns()
        before = self._charge()
        during()
        seen = self.agent.seen
        self.debt.update(began, seen, before, self._charge(), EXPECTED)
        self.publish(self.debt.bytes, self.debt.least)
        self.node.write("reconciled_ns", began)

    def publish(self, overhead: int, least: int) -> None:
        self.node.write("memory_overhead", overhead)
        self.node.write("overhead_last", least)

    def _charge(self) -> Charge:
        assert self.agent.slot is not None
        return read_charge(self.node.ledger, self.agent.slot, 0, 64 * GIB)


@pytest.fixture
def governor(node: MemoryNode, agent: Agent) -> Governor:
    return Governor(node, agent)


def rounds(node: MemoryNode) -> Iterator[tuple[Agent, Governor]]:
    """Yield a new process and its governor, and others as long as the test samples too late."""
    for _ in range(5):
        agent = start(node)
        governor = Governor(node, agent)
        governor.publish(0, 0)
        yield agent, governor
        agent.kill()
    pytest.fail("the machine is too busy")


@contextlib.contextmanager
def stopped(node: MemoryNode, agent: Agent, call: str, program: str) -> Iterator[None]:
    """Run the block while `program` is stopped in a driver call; afterwards the program has
    ended.
    """
    (node.work / call).touch()
    reached = node.work / f"{call}.reached"
    agent.send(program)
    wait_for(reached.exists)
    try:
        yield
    finally:
        reached.unlink()
    agent.answer()


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def until_it_waits(node: MemoryNode, agent: Agent) -> None:
    """Wait until an agent waits for a sample."""
    wait_for(lambda: agent.field("provisional_ns") > node.read("reconciled_ns"))


def take(agent: Agent, n: int) -> None:
    agent.run(f"blocks = [{TAKE} for _ in range({n})]")


def raced(governor: Governor, agent: Agent, *, overhead: int = BLOCK) -> int:
    """Fill the quota except for one block, and publish an overhead that is too high by `overhead`,
    as a sample that raced would. Return the correct overhead.
    """
    governor.sample()
    assert (governor.debt.bytes, governor.debt.least) == (CONTEXT, CONTEXT)
    take(agent, N_BLOCKS - 1)
    governor.publish(CONTEXT + overhead, CONTEXT)
    return CONTEXT


def test_a_sample_during_an_allocation_causes_no_later_refusal(node, agent, governor) -> None:
    """According to that sample, a context may have its expected size. A sample without calls in
    progress shows that it is smaller.
    """
    with stopped(node, agent, "allocate", TAKE):
        governor.sample()
    assert (governor.debt.bytes, governor.debt.least) == (EXPECTED, CONTEXT)
    take(agent, N_BLOCKS - 2)
    agent.send(TAKE)
    until_it_waits(node, agent)
    # A process that waits does not change its charges, however long NVML takes.
    governor.sample(during=lambda: time.sleep(0.1))
    assert (governor.debt.bytes, governor.debt.least) == (CONTEXT, CONTEXT)
    agent.answer()
    assert agent.field("refused") == 0
    assert agent.refuses(TAKE)


def test_samples_that_race_again_are_followed_by_others(node) -> None:
    for agent, governor in rounds(node):
        raced(governor, agent)
        end = time.monotonic() + IN_TIME_S
        agent.send(TAKE)
        for _ in range(3):
            while agent.field("provisional_ns") <= node.read("reconciled_ns"):
                if time.monotonic() > end:
                    break
                time.sleep(0.001)
            node.write("reconciled_ns", time.monotonic_ns())
        governor.sample()
        if time.monotonic() < end:
            break
    agent.answer()


def test_a_sample_that_is_due_may_be_late(node) -> None:
    """A busy machine delays the governor, and thereby the process."""
    for agent, governor in rounds(node):
        take(agent, N_BLOCKS - 1)
        end = time.monotonic() + IN_TIME_S
        agent.send(TAKE)
        time.sleep(0.3)
        refused = agent.field("refused")
        governor.sample()
        if time.monotonic() < end:
            break
    assert refused == 0
    agent.answer()


def test_a_sample_that_comes_just_before_the_wait_counts(node, agent, governor) -> None:
    """The allocation did not fit at first, but fits while the library searches pools for unused
    memory.
    """
    agent.run("driver.call('cuMemFree_v2', driver.get('cuMemAllocAsync', 32 << 20, None))")
    agent.run("driver.call('cuMemPoolTrimTo', driver.get('cuDeviceGetDefaultMemPool', 0), 0)")
    found = raced(governor, agent)
    with stopped(node, agent, "trim", TAKE):
        governor.publish(found, found)
    assert agent.field("refused") == 0


def test_memory_that_is_charged_after_the_driver_took_it_counts_once(node, agent, governor) -> None:
    """A driver may choose another pitch than the one that was reserved."""
    governor.sample()
    pitched = "driver.get('cuMemAllocPitch_v2', ctypes.byref(ctypes.c_uint64()), 1 << 20, 64, 4)"
    with stopped(node, agent, "allocate", pitched):
        governor.sample()
    assert (governor.debt.bytes, agent.field("memory")) == (CONTEXT + BLOCK, 2 * BLOCK)
    take(agent, N_BLOCKS - 3)
    agent.send(TAKE)
    time.sleep(0.1)
    governor.sample()
    agent.answer()
    assert agent.field("refused") == 0


def test_a_pool_that_grew_without_a_claim_counts_once(node, agent, governor) -> None:
    agent.run("stream = driver.stream(); block = out('cuMemAllocAsync', 20 << 20, stream)")
    agent.run("blocks = [out('cuMemAllocAsync', 1 << 20, stream) for i in range(12)]")
    governor.sample()
    agent.run("small = driver.allocate(2 << 20)")
    agent.run(f"rest = driver.allocate({(GIB - node.used()) // (2 * MIB) * 2 * MIB})")
    # Three blocks of 1 MiB are free, but there is no contiguous room for 2 MiB.
    agent.run("for i in (10, 7, 4): driver.call('cuMemFreeAsync', blocks.pop(i), stream)")
    agent.run("driver.call('cuStreamSynchronize', stream)")
    with (
        pytest.raises(CudaError),
        stopped(node, agent, "allocate", "out('cuMemAllocAsync', 2 << 20, stream)"),
    ):
        governor.sample()
    assert governor.debt.least == governor.debt.bytes == CONTEXT + 32 * MIB
    agent.run("driver.call('cuStreamSynchronize', stream); driver.call('cuMemFree_v2', small)")
    refused = agent.field("refused")
    agent.send("driver.allocate(2 << 20)")
    until_it_waits(node, agent)
    with repeating(governor.sample):  # until the pool was queried as well
        agent.answer()
    assert agent.field("refused") == refused


def test_one_wait_after_another_may_succeed(node, agent, governor) -> None:
    found = raced(governor, agent)
    for _ in range(3):
        governor.publish(found + BLOCK, found)
        agent.send(f"block = {TAKE}")
        until_it_waits(node, agent)
        governor.publish(found, found)
        agent.answer()
        agent.run("driver.call('cuMemFree_v2', block)")
        node.write("reconciled_ns", time.monotonic_ns())


THREADS = f"""
done = []
def work():
    driver.call('cuCtxSetCurrent', context)
    done.append({TAKE})
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_several_threads_wait_at_the_same_time(node) -> None:
    for agent, governor in rounds(node):
        found = raced(governor, agent, overhead=3 * BLOCK)
        agent.run("for block in blocks[:2]: driver.call('cuMemFree_v2', block)")
        end = time.monotonic() + IN_TIME_S
        agent.send(THREADS)
        time.sleep(0.3)
        refused = agent.field("refused")
        governor.publish(found, found)
        if time.monotonic() < end:
            break
    assert refused == 0
    agent.answer()
    assert agent.number("len(done)") == 3


def test_a_process_that_waits_writes_no_charges(node, agent, governor) -> None:
    """A sample during a claim is uncertain, so a process that waits must not keep its claim."""
    found = raced(governor, agent)
    agent.send(TAKE)
    until_it_waits(node, agent)
    before = [agent.field(name) for name in ("memory", "returned", "moving")]
    time.sleep(0.1)
    assert [agent.field(name) for name in ("memory", "returned", "moving")] == before
    assert before[2] == 0
    governor.publish(found, found)
    agent.answer()


def test_an_allocation_that_a_sample_rules_out_requests_no_other_sample(agent, governor) -> None:
    found = raced(governor, agent)
    asked = agent.field("provisional_ns")
    governor.publish(found + 2 * MIB, found + 2 * MIB)
    assert agent.refuses(TAKE)
    governor.publish(found + BLOCK, found)
    assert agent.refuses(f"driver.allocate({BLOCK + 2 * MIB})")
    assert agent.field("provisional_ns") == asked


def test_a_refusal_waits_for_one_sample_however_many_are_due(node, agent, governor) -> None:
    """Another process of the container may always have something to report, or claim to.

    Without a sample the wait ends after 1.2 s, and the waits of the next 4 s are short.
    """
    found = raced(governor, agent)
    governor.publish(found + BLOCK, found + BLOCK)
    base = layout.ledger_device(agent.slot, 0)
    pages.write(node.ledger, base, "ledger_device", "provisional_ns", 2**63)
    seconds = []
    for _ in range(5):
        before, sent = agent.field("refused"), time.monotonic()
        agent.send(TAKE)
        time.sleep(0.1)
        refused = agent.field("refused") - before
        node.write("reconciled_ns", time.monotonic_ns())
        begin = time.monotonic()
        with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
            agent.answer()
        if begin - sent < 0.8:  # otherwise the sample came too late: the wait may have ended
            assert refused == 0
            seconds.append(time.monotonic() - begin)
            if seconds[-1] < 0.6:
                break
        time.sleep(4.1)
    assert any(took < 0.6 for took in seconds), seconds


def test_a_wait_without_a_result_is_long_only_occasionally(node) -> None:
    """On a busy machine the heartbeat may be late, and then the refusal does not wait at all."""
    for agent, governor in rounds(node):
        raced(governor, agent)
        seconds = []
        for _ in range(3):
            begin = time.monotonic()
            assert agent.refuses(TAKE)
            seconds.append(time.monotonic() - begin)
        if seconds[0] >= 1.2 and min(seconds[1:]) < 0.6:
            break
