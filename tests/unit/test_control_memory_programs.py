"""Programs that allocate and free at random, and processes that race for the last free memory.

The model is short: what a process should be charged follows from the memory that it holds. The GPU
has as much memory as the quota, so an allocation that the driver itself has to refuse shows that
the library admitted too much.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simgpu.testing import CudaError
from tests.conftest import ROOT, examples, need
from tests.unit.memory_node import CONTEXT, GIB, MIB, Agent, MemoryNode, need_namespaces

LIMIT = GIB
UNIT = 2 * MIB
POOL = 32 * MIB


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    need_namespaces()


@pytest.fixture
def node(build_dir: Path, tmp_path: Path) -> Iterator[MemoryNode]:
    node = MemoryNode(build_dir, tmp_path, LIMIT, memory=LIMIT)
    yield node
    node.close()


SETUP = """
stream = driver.stream()
M = 1 << 20
pool = driver.get('cuDeviceGetDefaultMemPool', 0)
at = driver.get('cuMemAddressReserve', 64 << 30, 0, 0, 0)
"""


class ModelProcess:
    """A process: its agent, and what it should be charged."""

    def __init__(self, node: MemoryNode) -> None:
        self.node = node
        self.agent = node.agent()
        self.agent.run(SETUP)
        node.sample()
        self.small: list[int] = []
        self.large: dict[int, int] = {}
        self.managed: dict[int, int] = {}
        self.asynchronous: list[int] = []
        self.handles: dict[int, list[int]] = {}  # handle to size, references, mappings
        self.mappings: dict[int, tuple[int, int]] = {}  # address to handle, size
        self.imports: dict[int, list[int]] = {}  # size is 0 until it is mapped
        self.sizes: dict[int, int] = {}  # sizes that the exporters created
        self.next = self.agent.number("at")

    @property
    def held(self) -> int:
        """Bytes that the GPU should report."""
        slabs = {address // UNIT for address in self.small}
        physical = sum(size for size, references, mappings in self.handles.values())
        return len(slabs) * UNIT + sum(self.large.values()) + physical + self.pooled

    @property
    def pooled(self) -> int:
        return self.agent.number("info(pool, 5)")

    @property
    def unseen(self) -> int:
        return sum(self.managed.values()) + sum(
            size for size, references, mappings in self.imports.values()
        )

    def check(self) -> None:
        """Check that the charges, the model and the GPU agree."""
        self.agent.free()
        assert self.agent.field("unseen") == self.unseen
        assert self.agent.charged == self.held
        assert self.agent.seen == self.held + CONTEXT

    def fits(self, size: int) -> bool:
        return self.node.used() + size <= self.node.limit

    def take(self, program: str, size: int) -> int | None:
        """Allocate; this must succeed if and only if there is room."""
        room = self.fits(size)
        try:
            value = self.agent.number(program)
        except CudaError as error:
            if room or error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            return None
        assert self.node.used() <= self.node.limit
        return value

    def leave(self, handle: int, place: int) -> None:
        table = self.handles if handle in self.handles else self.imports
        table[handle][place] -= 1
        if table[handle][1:] == [0, 0]:
            del table[handle]


def round_up(size: int, unit: int = UNIT) -> int:
    return (size + unit - 1) // unit * unit


def perform(models: list[ModelProcess], process: int, action: str, size: int, which: int) -> None:
    """Run one step of a program. A step for which there is no memory to act on does nothing."""
    model = models[process % len(models)]
    agent = model.agent

    def pick(items: Any) -> Any:
        items = list(items)
        return items[which % len(items)] if items else None

    if action == "small":
        size = size % (MIB - 1) + 1
        slabs = {address // UNIT for address in model.small}
        try:
            address = agent.number(f"driver.allocate({size})")
        except CudaError:
            assert not model.fits(UNIT)
        else:
            model.small.append(address)
            assert model.fits(0) or address // UNIT in slabs
    elif action == "large":
        size = size % (300 * MIB) + MIB
        if address := model.take(f"driver.allocate({size})", round_up(size)):
            model.large[address] = round_up(size)
    elif action == "managed":
        size = size % (100 * MIB) + MIB
        if address := model.take(f"driver.get('cuMemAllocManaged', {size}, 1)", round_up(size)):
            model.managed[address] = round_up(size)
    elif action == "async":
        size = size % (60 * MIB) + 1
        try:
            model.asynchronous.append(
                agent.number(f"driver.get('cuMemAllocAsync', {size}, stream)")
            )
        except CudaError:
            assert not model.fits(round_up(size, POOL))
    elif action == "free":
        for table in (model.large, model.managed):
            if (address := pick(table)) is not None:
                agent.run(f"driver.call('cuMemFree_v2', {address})")
                del table[address]
        if (address := pick(model.small)) is not None:
            agent.run(f"driver.call('cuMemFree_v2', {address})")
            model.small.remove(address)
    elif action == "free async" and model.asynchronous:
        address = pick(model.asynchronous)
        agent.run(f"driver.call('cuMemFreeAsync', {address}, stream)")
        model.asynchronous.remove(address)
        if which % 2:
            agent.run("driver.call('cuStreamSynchronize', stream)")
        if which % 3 == 0:
            agent.run("driver.call('cuMemPoolTrimTo', pool, 0)")
    elif action == "create":
        size = round_up(size % (200 * MIB) + 1)
        if handle := model.take(f"driver.get('cuMemCreate', {size}, prop(), 0)", size):
            model.handles[handle] = [size, 1, 0]
    elif action == "map":
        usable = [h for h, (_, n, _) in (model.handles | model.imports).items() if n]
        if (handle := pick(usable)) is None:
            return
        table = model.handles if handle in model.handles else model.imports
        first = handle in model.imports and not table[handle][0]
        size = table[handle][0] or model.sizes[handle]
        call = f"driver.call('cuMemMap', {model.next}, {size}, 0, {handle}, 0) or 1"
        if model.take(call, size if first else 0) is None:
            return
        table[handle][0] = size
        table[handle][2] += 1
        model.mappings[model.next] = handle, size
        model.next += size
    elif action == "unmap" and model.mappings:
        start = pick(model.mappings)
        end = start
        spans = []
        while end in model.mappings and len(spans) <= which % 3:
            spans.append(end)
            end += model.mappings[end][1]
        agent.run(f"driver.call('cuMemUnmap', {start}, {end - start})")
        for address in spans:
            handle, _ = model.mappings.pop(address)
            model.leave(handle, 2)
    elif action == "release":
        usable = [h for h, (_, n, _) in (model.handles | model.imports).items() if n]
        if (handle := pick(usable)) is not None:
            agent.run(f"driver.call('cuMemRelease', {handle})")
            model.leave(handle, 1)
    elif action == "retain" and model.mappings:
        address = pick(model.mappings)
        handle = agent.number(f"driver.get('cuMemRetainAllocationHandle', {address})")
        assert handle == model.mappings[address][0]
        (model.handles if handle in model.handles else model.imports)[handle][1] += 1
    elif action == "import":
        other = models[(process + 1) % len(models)]
        usable = [h for h, (_, n, _) in other.handles.items() if n]
        if (handle := pick(usable)) is None:
            return
        other.agent.run("fd = ctypes.c_int()")
        other.agent.run(
            f"driver.call('cuMemExportToShareableHandle', ctypes.byref(fd), {handle}, 1, 0)"
        )
        path = f"/proc/{other.agent.process.pid}/fd/{other.agent.number('fd.value')}"
        agent.run(f"import os; fd = os.open({path!r}, os.O_RDWR)")
        mine = agent.number("driver.get('cuMemImportFromShareableHandle', fd, 1)")
        agent.run("os.close(fd)")
        other.agent.run("import os; os.close(fd.value)")
        model.imports[mine] = [0, 1, 0]
        model.sizes[mine] = other.handles[handle][0]
    elif action == "kill":
        agent.kill()
        model.node.sample()
        models[process % len(models)] = ModelProcess(model.node)
    model.node.sample()


# fmt: off
KINDS = ("small", "large", "managed", "async", "free", "free async", "create", "map", "unmap", "release", "retain",
         "import", "kill")
# fmt: on
STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(KINDS),
        st.integers(0, 2**31),
        st.integers(0, 2**16),
    ),
    max_size=40,
)


def run_programs(node: MemoryNode, steps: list[tuple[int, str, int, int]]) -> None:
    models = [ModelProcess(node) for _ in range(2)]
    try:
        for who, what, size, which in steps:
            perform(models, who, what, size, which)
            for model in models:
                model.check()
    finally:
        for model in models:
            model.agent.kill()
    node.sample()
    assert node.used() == 0
    assert not any(node.seen().values())


@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(STEPS)
def test_the_charge_agrees_with_the_model_and_the_gpu(node, steps) -> None:
    run_programs(node, steps)


@pytest.mark.slow
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(STEPS)
def test_the_charge_agrees_in_many_more_programs(node, steps) -> None:
    run_programs(node, steps)


RACER = """
import random
M = 1 << 20
counts = {'refused': 0, 'done': 0, 'other': []}
def racer(seed, rounds, kinds):
    chance = random.Random(seed)
    driver.call('cuCtxSetCurrent', context)
    stream = 0
    held = []
    def attempt():
        kind = chance.choice(kinds)
        size = chance.choice([700, 300 << 10, 3 * M, 40 * M, 150 * M])
        if kind == 0:
            return 'cuMemFree_v2', (driver.allocate(size),)
        if kind == 1:
            return 'cuMemFreeAsync', (driver.get('cuMemAllocAsync', size, stream), stream)
        if kind == 2:
            return 'cuMemRelease', (driver.get('cuMemCreate', -(-size // (2 * M)) * 2 * M, prop(), 0),)
        return 'cuMemFree_v2', (driver.get('cuMemAllocManaged', size, 1),)
    for _ in range(rounds):
        try:
            held.append(attempt())
            counts['done'] += 1
        except CudaError as error:
            if error.name == 'CUDA_ERROR_OUT_OF_MEMORY':
                counts['refused'] += 1
            else:
                counts['other'].append(str(error))
        while len(held) > chance.randrange(12):
            name, arguments = held.pop(chance.randrange(len(held)))
            driver.call(name, *arguments)
    for name, arguments in held:
        driver.call(name, *arguments)
def race(seed, threads, rounds, kinds):
    workers = [threading.Thread(target=racer, args=(seed * 100 + i, rounds, kinds)) for i in range(threads)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    driver.call('cuCtxSynchronize')
    driver.call('cuMemPoolTrimTo', driver.get('cuDeviceGetDefaultMemPool', 0), 0)
    return counts
"""


def start_race(node: MemoryNode, n: int, rounds: int, *, kinds: str = "0123") -> list[Agent]:
    agents = [node.agent() for _ in range(n)]
    node.sample()
    for i, agent in enumerate(agents):
        agent.run(RACER)
        agent.send(f"race({i}, 8, {rounds}, {[int(kind) for kind in kinds]})")
    return agents


def finish_race(node: MemoryNode, agents: list[Agent]) -> int:
    """Wait for the end, check that no memory is left, and return how many calls were refused."""
    refused = 0
    for agent in agents:
        counts = agent.answer()
        assert isinstance(counts, dict)
        assert counts["other"] == []
        refused += counts["refused"]
    for agent in agents:
        assert agent.field("memory") == agent.field("unseen") == agent.field("blocks") == 0
        assert agent.seen == CONTEXT
    assert node.sample() == len(agents) * CONTEXT == node.used()
    assert node.peak <= LIMIT
    return refused


def test_eight_processes_of_eight_threads_never_exceed_the_quota(node) -> None:
    agents = start_race(node, 8, 200, kinds="023")
    refused = finish_race(node, agents)
    # The driver had nothing to refuse: every refusal came from the control library.
    assert refused == sum(agent.field("refused") for agent in agents) > 0


HAMMER = """
def hammer(rounds):
    driver.call('cuCtxSetCurrent', context)
    place = ctypes.c_uint64()
    where, size = ctypes.byref(place), ctypes.c_size_t(2 << 20)
    allocate, free = driver.library.cuMemAlloc_v2, driver.library.cuMemFree_v2
    for _ in range(rounds):
        if not allocate(where, size):
            free(place)
"""


def test_the_sum_is_within_the_quota_at_every_moment(build_dir, tmp_path) -> None:
    need("gcc")
    room = 6  # blocks, for 64 threads
    counter = tmp_path / "counter"
    counter.write_bytes(bytes(4096))
    shim = ROOT / "tests" / "unit" / "memory_counter.c"
    node = MemoryNode(build_dir, tmp_path / "node", 8 * CONTEXT + room * UNIT, shim=shim)
    node.environment["MEMORY_COUNTER"] = str(counter)
    try:
        agents = [node.agent() for _ in range(8)]
        node.sample()
        for agent in agents:
            agent.run(HAMMER)
            agent.run("workers = [threading.Thread(target=hammer, args=(2000,)) for _ in range(8)]")
        for agent in agents:
            agent.send(
                "[worker.start() for worker in workers] and [worker.join() for worker in workers] and None"
            )
        for agent in agents:
            agent.answer()
        live, most = struct.unpack_from("<QQ", counter.read_bytes())
        assert live == 0
        assert 2 <= most <= room
        assert [agent.field("memory") for agent in agents] == [0] * 8
    finally:
        node.close()


def test_pools_that_race_for_their_units_are_charged_for_what_they_hold(
    build_dir, tmp_path
) -> None:
    """A pool may grow although its free memory seemed to suffice.

    In that case the block is freed again. Until then, this GPU has room for it.
    """
    node = MemoryNode(build_dir, tmp_path, LIMIT, memory=2 * LIMIT)
    try:
        agents = start_race(node, 4, 200)
        refused = finish_race(node, agents)
        assert refused == sum(agent.field("refused") for agent in agents) > 0
    finally:
        node.close()


def test_the_memory_of_processes_killed_in_a_race_is_free_again(node) -> None:
    agents = start_race(node, 4, 100_000)
    for agent in agents:
        end = time.monotonic() + 20
        while agent.field("blocks") < 3:  # in the middle of the race
            assert time.monotonic() < end
        agent.kill()
    node.sample()
    assert node.used() == 0
    fresh = node.agent()
    fresh.run(f"driver.allocate({LIMIT - CONTEXT})")


def test_a_forked_child_starts_with_an_empty_account(node) -> None:
    agent = node.agent()
    agent.run("blocks = [driver.allocate(size) for size in (100, 4 << 20)]")
    agent.run("driver.get('cuMemAllocAsync', 100, 0)")
    agent.run(
        """
import os
def child():
    driver.call('cuInit', 0)
    driver.get('cuCtxCreate_v2', 0, 0)
    block = driver.allocate(8 << 20)
    driver.call('cuMemFree_v2', block)
    again = driver.allocate(6 << 20)
    free, total = memory_info()
    os.write(told, str(total - free).encode())
    os._exit(0)
asked, told = os.pipe()
pid = os.fork()
if not pid:
    try:
        child()
    finally:
        os._exit(1)
"""
    )
    value = agent.number("int(os.read(asked, 100) or 0)")
    pid = agent.number("pid")
    assert agent.number("os.waitpid(pid, 0)[1]") == 0
    assert value == (38 + 6) * MIB + 2 * CONTEXT
    node.clear(pid)
    assert agent.charged == 38 * MIB
