"""Test the reconciliation of ledgers with NVML: debt, published values, times of samples, and hostile ledgers.

NVML is a stub with settable numbers; the processes are real, and register over the container's
socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

import governor.reconcile
from governor import usage
from governor.account import GpuSample
from governor.arbiter import Runner, RunnerConfig, Stats, Waits, load_library
from governor.audit import Auditor
from governor.config import Config
from governor.container import Container, Wanted
from governor.counters import Tally
from governor.processes import namespace_pid
from governor.quota import Device, Quota
from governor.reconcile import EACH, SAMPLE_NS, SOON_NS, Unattributed, reconcile
from governor.server import Server
from governor.usage import Charge, Debt, Meter, of_limit, read_charge, sampled_percent
from libcontrol import layout, pages
from tests.conftest import examples, lack, need
from vdriver.errors import NvmlError
from vdriver.nvml import ProcessMemory, ProcessUse

MIB = 1 << 20
GIB = 1 << 30
S = 1_000_000_000
MS = 1_000_000
UUID = "GPU-00000000-0000-0000-0000-000000000001"
PATIENCE_S = 10.0

# Registers as a process's first cuInit does, prints its slot, and waits.
PROCESS = """
import socket, struct, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
s.connect(sys.argv[1])
s.send(b"r")
data, fds, _, _ = socket.recv_fds(s, 4, 1)
print(struct.unpack("I", data)[0], len(fds), flush=True)
sys.stdin.read()
"""


class StubRunner(Runner):
    """The arbiter without its thread, with a settable amount of held time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._pages = {}
        self._self = library.runner_new(ctypes.byref(RunnerConfig()), None)
        self.together = None
        self.held_ns = 0
        self.steers = False

    @property
    def is_steered(self) -> bool:
        return self.steers

    def stats(self, _: int) -> Stats:
        return Stats(held_ns=self.held_ns)

    def waits(self, _: int) -> Waits:
        return Waits()


class StubNvml:
    """NVML: bytes by pid, utilisation samples, failures, and a callback during each sample."""

    def __init__(self) -> None:
        self.used: dict[int, int | None] = {}
        self.samples: tuple[ProcessUse, ...] = ()
        self.failing = False
        self.during: Callable[[], None] = lambda: None
        self.looks: list[int] = []
        self.unattributed: Callable[[], int | None] = lambda: None

    def memory_used(self, uuid: str) -> int | None:
        assert uuid == UUID
        own = self.unattributed()
        return None if own is None else own + sum(used or 0 for used in self.used.values())

    def processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        assert uuid == UUID
        self.looks.append(time.monotonic_ns())
        self.during()
        if self.failing:
            raise NvmlError("GPU is lost", hint="see the kernel log")
        return tuple(ProcessMemory(pid, used) for pid, used in self.used.items())

    def utilisation(self, uuid: str, since_us: int) -> tuple[ProcessUse, ...]:
        assert uuid == UUID
        assert abs(since_us - (time.time_ns() // 1000 - 1_000_000)) < 5_000_000
        return self.samples


def spawn(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class World:
    """A governor without its socket: containers, the stubs, and the reconciliation loop."""

    def __init__(self, directory: Path, library: ctypes.CDLL) -> None:
        self.directory = directory
        self.runner = StubRunner(library)
        self.nvml = StubNvml()
        self.device = Device(0, UUID, "stub", 16 * GIB)
        self.answers: list[str | None] = []
        self.server = cast(
            "Server",
            SimpleNamespace(
                containers={},
                admissions=SimpleNamespace(on_begin=lambda: None),
                allocations=SimpleNamespace(set_lost=lambda _, error: self.answers.append(error)),
            ),
        )
        self.children: list[subprocess.Popen[str]] = []

    async def admit(
        self, name: str = "one", *, limit: int = 100, pid: int | None = None
    ) -> Container:
        container = Container(
            Wanted(
                name,
                os.pidfd_open(pid or os.getpid()),
                Quota(8 * GIB, limit // 2, limit),
                (self.device,),
            ),
            runners={UUID: self.runner},
            config=Config(runtime_dir=str(self.directory)),
        )
        await container.listen(lambda *_: None)
        self.server.containers[container.key] = container
        self.server.admissions.on_begin()
        return container

    async def answer(self, container: Container, *prefix: str) -> tuple[subprocess.Popen[str], Any]:
        """Start a process of a container; return it, with its slot and its number of descriptors."""
        child = spawn(
            *prefix, sys.executable, "-c", PROCESS, str(container.directory / "governor.sock")
        )
        self.children.append(child)
        assert child.stdout
        line = await asyncio.to_thread(child.stdout.readline)
        return child, tuple(map(int, line.split()))

    async def join(self, container: Container, *prefix: str) -> tuple[subprocess.Popen[str], int]:
        """Start a process that is registered; return it and its slot."""
        child, (slot, descriptors) = await self.answer(container, *prefix)
        assert descriptors == 1
        return child, slot

    async def reconcile(self, tally: Tally | None = None, auditor: Auditor | None = None) -> None:
        runners = {UUID: self.runner}
        await reconcile(
            self.server, self.nvml, [self.device], runners, tally=tally, auditor=auditor
        )

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.reconcile())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def close(self) -> None:
        for container in self.server.containers.values():
            container.close()
        for child in self.children:
            child.kill()
            child.communicate()
        self.runner.close()


@pytest.fixture
def play(
    tmp_path: Path, build_dir: Path
) -> Iterator[Callable[[Callable[[World], Awaitable[None]]], None]]:
    """Run a coroutine function with a separate `World`."""

    def run(scene: Callable[[World], Awaitable[None]]) -> None:
        async def whole() -> None:
            world = World(tmp_path, load_library(build_dir / "libcontrol"))
            try:
                await asyncio.wait_for(scene(world), 60)
            finally:
                world.close()

        asyncio.run(whole())

    return run


Play = Callable[[Callable[[World], Awaitable[None]]], None]


async def until(condition: Callable[[], object]) -> float:
    """Wait until a condition holds; return how long that took, in seconds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < PATIENCE_S, "the condition does not hold"
        await asyncio.sleep(0.001)
    return time.monotonic() - begin


def write(container: Container, slot: int, **fields: int) -> None:
    base = layout.ledger_device(slot, 0)
    for name, value in fields.items():
        pages.write(container.ledger, base, "ledger_device", name, value)


def read(container: Container, name: str) -> int:
    return pages.read(container.grant, layout.grant_device(0), "grant_device", name)


def look_once(container: Container, seen: dict[int, int] | None = None, **more: Any) -> None:
    """Reconcile as the loop does while nothing else changes."""
    before = container.account.charges(0)
    look = None if seen is None else GpuSample(time.monotonic_ns(), seen, **more)
    container.account.reconcile(0, before, look)


# One process


@pytest.mark.parametrize(
    ("seen", "memory", "unseen", "overhead", "used"),
    [
        (0, 0, 0, 0, 0),
        (500, 0, 0, 500, 500),  # a context before it is charged
        (500, 400, 0, 100, 500),
        (500, 600, 0, 0, 600),  # charged before the driver took it
        (500, 600, 100, 0, 600),  # managed memory, which NVML attributes to no process
        (600, 600, 100, 100, 700),
        (0, 600, 600, 0, 600),
    ],
)
def test_debt_is_nvmls_value_beyond_the_attributed_charge(
    seen: int, memory: int, unseen: int, overhead: int, used: int
) -> None:
    charge = Charge(memory, unseen)
    assert Debt().update(1, seen, charge, charge) == overhead
    assert charge.used(overhead, 0) == used


def test_memory_taken_after_a_sample_counts_until_the_next() -> None:
    charge = Charge(memory=100, provisional=50, provisional_ns=1000)
    assert [charge.used(20, since) for since in (999, 1000, 1001)] == [170, 120, 120]


SECOND = 1_000_000_000


def test_a_ledger_that_changes_during_a_sample_hides_no_debt() -> None:
    """A block is allocated and freed during a sample, so that NVML may or may not have shown it."""
    context = Charge(provisional=500, provisional_ns=1)
    debt = Debt()
    assert debt.update(2, 500, context, context) == 500
    # A block of 300 was allocated and freed while NVML was read. NVML showed only the context, or
    # both.
    came = Charge(memory=300, provisional=500, provisional_ns=1)
    went = Charge(memory=0, returned=300, provisional=500, provisional_ns=1)
    assert debt.update(SECOND, 500, came, went) == 500
    assert debt.update(2 * SECOND, 800, came, went) == 500
    # Whatever happened in between, the driver took at least this much.
    assert debt.update(3 * SECOND, 1000, came, went) == 700


def test_a_charge_before_the_allocation_hides_no_debt() -> None:
    debt = Debt()
    still = Charge(memory=0)
    assert debt.update(1, 500, still, still) == 500
    claimed = Charge(memory=200, moving=200)
    assert debt.update(SECOND // 4, 500, claimed, claimed) == 500
    assert debt.update(5 * SECOND, 500, claimed, claimed) == 500
    made = Charge(memory=200)
    assert debt.update(6 * SECOND, 700, made, made) == 500


def test_a_block_that_is_freed_but_still_charged_hides_no_debt() -> None:
    debt = Debt()
    still = Charge(memory=500)
    assert debt.update(1, 1000, still, still) == 500
    assert debt.update(2, 500, still, still._replace(moving=500)) == 500


def test_calls_in_progress_in_a_new_process_hide_no_part_of_its_context() -> None:
    debt = Debt()
    new = Charge(memory=300, moving=300, told=500, provisional=500, provisional_ns=1, contexts=1)
    assert debt.update(2, 500, new, new, 500) == 500
    assert debt.update(SECOND, 500, new, new, 500) == 500


def test_memory_that_a_pool_freed_unnoticed_hides_no_debt() -> None:
    debt = Debt()
    holds = Charge(memory=300, pooled=300, told=500, provisional=500, provisional_ns=1)
    assert debt.update(2, 800, holds, holds) == 500
    assert debt.update(SECOND // 4, 600, holds, holds) == 500  # the driver trimmed it
    found = holds._replace(
        memory=100,
        pooled=100,
        returned=200,
        returned_before=200,
        shrunk=200,
        shrunk_before=200,
    )
    assert debt.update(SECOND // 2, 600, found, found) == 500


def test_a_pools_reduction_found_during_a_sample_applies_to_the_previous_one() -> None:
    debt = Debt()
    holds = Charge(memory=300, pooled=300, told=500, provisional=500, provisional_ns=1)
    assert debt.update(2, 800, holds, holds, ended_ns=3) == 500
    assert debt.update(10, 600, holds, holds, ended_ns=20) == 500  # the driver has trimmed it
    found = holds._replace(memory=100, pooled=100, returned=200, shrunk=200, asked_ns=25)
    assert debt.update(30, 600, holds, found, ended_ns=40) == 500


def test_a_ledger_that_changes_while_it_is_read_is_uncertain_by_that_amount() -> None:
    """Between reads of two fields, a pool is found to have 200 bytes less."""
    guest = BusyProcess()
    for name in ("memory", "pooled"):
        guest.write(name, 300)

    fields = usage.read_ledger.fields

    def read(page: mmap.mmap, base: int) -> list[int]:
        values = []
        for name in fields:
            values.append(pages.read(page, base, "ledger_device", name))
            if name == "memory":
                for other, sign in (("returned", 1), ("memory", -1), ("shrunk", 1), ("pooled", -1)):
                    guest.add(other, sign * 200)()
        return values

    with patch.object(usage, "read_ledger", Mock(side_effect=read)):
        charge = read_charge(guest.ledger, 0, 0, 2**40)
    assert (charge.memory, charge.pooled) == (300, 300)
    assert (charge.returned_before, charge.returned) == (0, 200)
    assert (charge.shrunk_before, charge.shrunk) == (0, 200)


def test_memory_freed_by_the_driver_is_noticed_once_pools_were_queried() -> None:
    debt = Debt()
    holds = Charge(memory=300, pooled=300, told=500, provisional=500, provisional_ns=1)
    assert debt.update(2, 800, holds, holds) == 500
    assert debt.update(SECOND // 4, 700, holds, holds) == 500  # or a pool was trimmed
    asked = holds._replace(asked_ns=SECOND // 3)
    assert debt.update(SECOND // 2, 700, asked, asked) == 400


def test_modules_loaded_and_unloaded_beside_pools_add_up_no_debt() -> None:
    """Both loading and unloading are reported, and the driver keeps none of their memory."""
    debt = Debt()
    holds = Charge(memory=300, pooled=300, told=500, provisional=500, provisional_ns=1)
    assert debt.update(2, 800, holds, holds) == 500
    for i in range(1, 200):
        loaded = holds._replace(told=530, provisional=30, provisional_ns=i * SECOND // 50)
        assert debt.update(i * SECOND // 50 + 1, 830, loaded, loaded) == 530
        gone = holds._replace(provisional=0, provisional_ns=i * SECOND // 50 + 2)
        assert debt.update(i * SECOND // 50 + 3, 800, gone, gone) == 500


def test_memory_that_a_sample_shows_before_it_is_reported_counts_once() -> None:
    debt = Debt()
    holds = Charge(memory=300, pooled=300, told=500, provisional=500, provisional_ns=1)
    assert debt.update(2, 800, holds, holds) == 500
    assert debt.update(3, 840, holds, holds) == 540  # just taken
    told = holds._replace(told=540, provisional=40, provisional_ns=4)
    assert debt.update(5, 840, told, told) == 540
    assert debt.update(6, 840, told, told) == 540
    alone = told._replace(pooled=0)
    assert debt.update(7, 800, alone, alone) == 500  # just given back
    gave = alone._replace(told=500, provisional=0, provisional_ns=8)
    assert debt.update(9, 800, gave._replace(moving=99), gave) == 500


def test_memory_freed_by_the_driver_is_no_debt_after_the_next_sample() -> None:
    debt = Debt()
    still = Charge()
    assert debt.update(1, 500, still, still) == 500
    gave = Charge(provisional_ns=5)
    assert debt.update(10, 0, gave, gave) == 0


def test_a_context_counts_before_nvml_lists_it() -> None:
    debt = Debt()
    new = Charge(provisional=500, provisional_ns=SECOND, contexts=1)
    assert debt.update(SECOND + 1, 0, new, new, 500) == 500
    # Another context is being made, and one is reported during the sample: both count in addition.
    making = new._replace(memory=500, unseen=500, taking=500)
    assert making.used(debt.update(SECOND + 2, 0, making, making, 500), SECOND + 2) == 1000
    late = new._replace(provisional=300, provisional_ns=SECOND + 9)
    assert late.used(debt.update(SECOND + 5, 0, new, late, 500), SECOND + 5) == 800
    assert debt.update(SECOND + SECOND // 10, 480, new, new, 500) == 480
    two = new._replace(contexts=2)
    assert debt.update(SECOND + SECOND // 5, 480, two, two, 500) == 1000
    assert debt.update(3 * SECOND, 960, two, two, 500) == 960


def test_a_context_sampled_during_its_creation_counts_once() -> None:
    """A context is charged as a claim while the driver makes it, and as provisional afterwards."""
    debt = Debt()
    making = Charge(memory=500, unseen=500, taking=500)
    for seen in (0, 300, 500):
        assert making.used(debt.update(SECOND, seen, making, making, 500), SECOND) == 500
    made = Charge(told=500, provisional=500, provisional_ns=SECOND + 5, contexts=1)
    assert made.used(debt.update(SECOND, 500, making, made, 500), SECOND) == 500  # made in between
    # The next sample is taken while the process fills its memory.
    made = made._replace(memory=300)
    more = made._replace(memory=400)
    assert debt.update(SECOND + 10, 850, made, more, 500) == 500
    assert debt.update(SECOND + 20, 900, more, more, 500) == 500


def test_memory_taken_by_the_driver_is_debt_although_the_ledger_changes() -> None:
    debt = Debt()
    before = Charge(memory=300, told=500, provisional=500, provisional_ns=5)
    after = before._replace(memory=0, returned=300)
    assert debt.update(10, 600, before, after) == 500
    assert debt.update(20, 600, before, after) == 500  # it is not counted a second time


class BusyProcess:
    """A process with many concurrent calls, run step by step.

    `there` is the memory that the driver holds for it.
    """

    OVERHEAD = 40

    def __init__(self) -> None:
        self.ledger = mmap.mmap(-1, layout.LEDGER_SIZE)
        self.there = 0
        self.steps: list[list[Callable[[], None]]] = []  # steps left of each call in progress
        self.live: list[int] = []
        self.pool = 0  # what the pool really holds
        self.clock = 1
        self.asking: list[Callable[[], None]] = []  # one call at a time changes its charge
        self.write("took", self.OVERHEAD)
        self.write("provisional", self.OVERHEAD)
        self.write("provisional_ns", 1)

    def read(self, name: str) -> int:
        return pages.read(self.ledger, layout.ledger_device(0, 0), "ledger_device", name)

    def write(self, name: str, value: int) -> None:
        pages.write(self.ledger, layout.ledger_device(0, 0), "ledger_device", name, value)

    def add(self, name: str, change: int) -> Callable[[], None]:
        return lambda: self.write(name, self.read(name) + change)

    def driver(self, change: int) -> Callable[[], None]:
        def act() -> None:
            self.there += change

        return act

    def take(self, size: int) -> list[Callable[[], None]]:
        return [
            self.add("moving", size), self.add("memory", size), self.driver(size),
            lambda: self.live.append(size), self.add("moving", -size),
        ]  # fmt: skip

    def give(self, size: int) -> list[Callable[[], None]]:
        return [
            self.add("moving", size), self.driver(-size), self.add("returned", size),
            self.add("memory", -size), self.add("moving", -size),
        ]  # fmt: skip

    def pool_change(self, change: int) -> Callable[[], None]:
        def act() -> None:
            self.pool += change
            self.there += change

        return act

    def grow(self, size: int) -> list[Callable[[], None]]:
        return [
            self.add("moving", size), self.add("memory", size), self.pool_change(size),
            *self.settle(size), self.add("moving", -size),
        ]  # fmt: skip

    def settle(self, claimed: int = 0) -> list[Callable[[], None]]:
        """Query the pool and charge what it holds, in the order of held_settle()."""
        found: list[int] = []

        def ask() -> None:
            found.append(self.pool - self.read("pooled"))

        def pool(sign: int) -> Callable[[], None]:
            def act() -> None:
                if found[0] * sign > 0:
                    self.write("pooled", self.read("pooled") + found[0])

            return act

        def less(name: str, sign: int) -> Callable[[], None]:
            return lambda: self.write(name, self.read(name) + sign * (claimed - found[0]))

        return [
            ask, pool(1), less("returned", 1), less("memory", -1), less("shrunk", 1), pool(-1),
        ]  # fmt: skip

    def refresh(self) -> list[Callable[[], None]]:
        """Do the helper's work, which is due ten times a second."""
        self.clock += 1
        began = self.clock
        return [*self.settle(), lambda: self.write("asked_ns", began)]

    def step(self, draw: int) -> None:
        """Begin a call, or advance one that is in progress."""
        kind, size = draw % 8, 1 + draw // 8 % 60
        if kind == 0:
            self.steps.append(self.take(size))
        elif kind == 1 and self.live:
            self.steps.append(self.give(self.live.pop(size % len(self.live))))
        elif kind == 2 and self.pool < 60 and not any(self.asking):
            self.asking = self.grow(size)
            self.steps.append(self.asking)
        elif kind == 3:
            self.pool_change(-(self.pool // 2))()  # the driver trims the pool without notice
        elif kind == 4 and not any(self.asking):
            self.asking = self.refresh()
            self.steps.append(self.asking)
        elif any(self.steps):
            under_way = [steps for steps in self.steps if steps]
            under_way[size % len(under_way)].pop(0)()


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**64), st.sampled_from([0.3, 1, 5]))
def test_debt_is_what_the_driver_took_despite_concurrent_calls(seed: int, often: float) -> None:
    """The process continues between any two numbers that the governor reads."""
    draw = random.Random(seed)  # noqa: S311
    guest, debt = BusyProcess(), Debt()
    original = pages.read

    def go_on() -> None:
        for _ in range(int(draw.random() * 2 * often + 0.5)):
            guest.step(draw.randrange(480))

    def read(*arguments: Any) -> int:
        with patch.object(pages, "read", original):
            go_on()
        return original(*arguments)

    for look in range(1, 25):
        with patch.object(pages, "read", read):
            before = read_charge(guest.ledger, 0, 0, 2**40)
        go_on()
        seen = BusyProcess.OVERHEAD + guest.there
        go_on()
        with patch.object(pages, "read", read):
            after = read_charge(guest.ledger, 0, 0, 2**40)
        guest.clock += 1
        assert (
            debt.update(2 + look, seen, before, after, ended_ns=guest.clock) == BusyProcess.OVERHEAD
        )


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(min_size=layout.LEDGER_DEVICE.size, max_size=layout.LEDGER_DEVICE.size), st.data())
def test_nonsense_in_a_ledger_is_bounded(entry: bytes, data: st.DataObject) -> None:
    whole = data.draw(st.integers(1, 2**50))
    seen = data.draw(st.integers(0, whole))
    with mmap.mmap(-1, layout.LEDGER_SIZE) as ledger:
        base = layout.ledger_device(3, 2)
        ledger[base : base + len(entry)] = entry
        charge = read_charge(ledger, 3, 2, whole)
    assert 0 <= charge.unseen <= charge.memory <= whole
    assert 0 <= Debt().update(2**63, seen, Charge(), charge) <= seen
    assert 0 <= charge.used(seen, 0) <= 3 * whole


# A container


def test_a_surplus_of_one_process_does_not_offset_the_debt_of_another(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        (one, first), (two, second) = await world.join(container), await world.join(container)
        write(container, first, memory=100 * MIB)
        write(container, second, memory=100 * MIB, unseen=30 * MIB)
        look_once(container, {one.pid: 150 * MIB, two.pid: 20 * MIB, 1: 999 * MIB})
        assert read(container, "memory_overhead") == 50 * MIB
        assert read(container, "memory_used") == 250 * MIB
        assert container.describe()[0]["devices"][0]["memory_used"] == 250 * MIB

    play(scene)


def test_a_process_that_nvml_does_not_list_has_no_debt(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        child, slot = await world.join(container)
        write(container, slot, memory=100)
        look_once(container, {child.pid: 300})
        assert (read(container, "memory_overhead"), read(container, "memory_used")) == (200, 300)
        look_once(container, {})
        assert (read(container, "memory_overhead"), read(container, "memory_used")) == (0, 100)

    play(scene)


@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_process_that_is_checkpointed_keeps_what_the_driver_had_taken(
    play: Play, *, is_suspended: bool
) -> None:
    """The memory returns with the process; a container may also checkpoint its own processes."""

    async def scene(world: World) -> None:
        container = await world.admit()
        child, slot = await world.join(container)
        write(container, slot, memory=100, contexts=1)
        look_once(container, {child.pid: 300})
        container.suspension = "suspended" if is_suspended else ""
        look_once(container, {})
        assert (read(container, "memory_overhead"), read(container, "memory_used")) == (200, 300)
        container.suspension = ""
        look_once(container, {})  # NVML lists it late
        assert read(container, "memory_used") == 300
        look_once(container, {child.pid: 310})
        assert read(container, "memory_used") == 310
        write(container, slot, contexts=0)
        look_once(container, {})
        assert read(container, "memory_used") == 100

    play(scene)


def test_a_suspended_process_that_this_governor_never_saw_counts_with_its_contexts(
    play: Play,
) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        _, slot = await world.join(container)
        write(container, slot, memory=100, contexts=2)
        container.suspension = "suspended"
        look_once(container, {})
        assert read(container, "memory_used") == 100 + 2 * container.context_memory

    play(scene)


@pytest.mark.parametrize(("before", "after"), [((512, 0), (0, 0)), ((0, 0), (512, 0))])
def test_a_block_allocated_or_freed_during_a_sample_is_no_debt(
    play: Play, before: tuple[int, int], after: tuple[int, int]
) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        child, slot = await world.join(container)
        write(container, slot, memory=before[0] * MIB)
        world.nvml.used = {child.pid: 512 * MIB}
        returned = max(0, before[0] - after[0]) * MIB
        world.nvml.during = lambda: write(container, slot, memory=after[0] * MIB, returned=returned)
        debts = set()
        async with world.looking():
            await until(lambda: read(container, "reconciled_ns"))
            debts.add(read(container, "memory_overhead"))
        assert debts == {0}

    play(scene)


def test_the_time_of_a_sample_is_its_beginning(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        child, slot = await world.join(container)
        world.nvml.used = {child.pid: 700 * MIB}
        look_once(container, world.nvml.used)
        # Taken while NVML is read, so this sample may have missed it.
        world.nvml.during = lambda: write(
            container, slot, provisional=40 * MIB, provisional_ns=time.monotonic_ns()
        )
        async with world.looking():
            await until(lambda: len(world.nvml.looks) > 1)
            assert read(container, "reconciled_ns") < world.nvml.looks[-1]
            assert read(container, "memory_used") == 740 * MIB
            world.nvml.during = lambda: None
            await until(lambda: read(container, "memory_used") == 700 * MIB)
            assert read(container, "memory_overhead") == 700 * MIB

    play(scene)


def test_if_nvml_fails_the_last_sample_stays_and_the_ledger_counts(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        child, slot = await world.join(container)
        world.nvml.used = {child.pid: 600 * MIB}
        async with world.looking():
            await until(lambda: read(container, "memory_used") == 600 * MIB)
            world.nvml.failing = True
            n = len(world.nvml.looks)
            await until(lambda: len(world.nvml.looks) > n)
            await until(lambda: len(world.answers) == 1)  # once, and not again while NVML fails
            known = read(container, "reconciled_ns")
            write(container, slot, memory=900 * MIB)
            # The debt from NVML's last reading stays, and the ledger's charges are added to it.
            await until(lambda: read(container, "memory_used") == 1500 * MIB)
            assert read(container, "memory_overhead") == 600 * MIB
            assert read(container, "reconciled_ns") == known
            world.nvml.failing = False
            await until(lambda: read(container, "reconciled_ns") > known)
            await until(lambda: read(container, "memory_overhead") == 0)
        [lost, regained] = world.answers
        assert lost is not None
        assert regained is None

    play(scene)


def test_an_unshared_gpu_is_checked_at_intervals(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governor.reconcile, "ALONE_NS", 300_000_000)

    async def scene(world: World) -> None:
        world.nvml.failing = True
        async with world.looking():
            await until(lambda: len(world.answers) == 1)
            world.nvml.failing = False
            await until(lambda: len(world.answers) == 2)
        assert world.answers[1] is None

    play(scene)


def test_a_process_whose_memory_nvml_hides_uses_what_its_ledger_shows(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        child, slot = await world.join(container)
        write(container, slot, memory=300)
        world.nvml.used = {child.pid: None}
        async with world.looking():
            await until(lambda: read(container, "memory_used") == 300)
        assert read(container, "memory_overhead") == 0

    play(scene)


def test_a_slot_full_of_ones_affects_only_its_own_container(play: Play) -> None:
    async def scene(world: World) -> None:
        hostile, honest = await world.admit("hostile"), await world.admit("honest")
        (_, slot), (child, own) = await world.join(hostile), await world.join(honest)
        base = pages.slot_base(slot)
        hostile.ledger[base + 4 : base + layout.LEDGER_SLOT.size] = b"\xff" * (
            layout.LEDGER_SLOT.size - 4
        )
        hostile.ledger[8:4096] = b"\xff" * 4088
        write(honest, own, memory=5 * MIB)
        world.nvml.used = {child.pid: 7 * MIB}
        async with world.looking():
            await until(lambda: read(honest, "memory_overhead") == 2 * MIB)
            await until(lambda: read(hostile, "reconciled_ns"))
        assert read(hostile, "memory_overhead") == 0
        assert read(hostile, "memory_used") <= 3 * world.device.memory
        hostile.describe()

    play(scene)


# When NVML is read


def gaps(begins: set[int]) -> list[int]:
    """Return the times between the beginnings of samples; 0 means that there was none yet."""
    return [b - a for a, b in itertools.pairwise(sorted(begins - {0}))]


def test_a_shared_gpu_is_sampled_four_times_a_second(play: Play) -> None:
    async def scene(world: World) -> None:
        begins: set[int] = set()
        async with world.looking():
            await until(lambda: world.nvml.looks)
            await asyncio.sleep(0.3)
            assert len(world.nvml.looks) == 1  # only unattributed memory is read for an unused GPU
            container = await world.admit()

            def are_enough() -> bool:
                begins.add(read(container, "reconciled_ns"))
                return len(begins) > 4

            await until(are_enough)
        assert min(gaps(begins)) >= SAMPLE_NS * 0.9

    play(scene)


def test_a_process_that_waits_for_a_sample_gets_one_soon(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        child, slot = await world.join(container)
        world.nvml.used = {child.pid: 512 * MIB}
        most = 0.010 + 0.020
        n = n_in_time = 0
        async with world.looking():
            await until(lambda: read(container, "reconciled_ns"))
            # On a busy machine some samples are late; then more are requested.
            while n < 15 or (n < 60 and n_in_time < 0.3 * n):
                await asyncio.sleep(0.03)
                now = time.monotonic_ns()
                write(container, slot, provisional=MIB, provisional_ns=now)
                os.eventfd_write(world.runner.due_fd, 1)  # as the arbiter's thread does
                waited = await until(lambda t=now: read(container, "reconciled_ns") >= t)
                n += 1
                n_in_time += waited <= most
        # Each wait begins 0.03 s after a sample, so with only four samples a second it would take
        # 0.2 s.
        assert n_in_time >= 0.3 * n

    play(scene)


@pytest.mark.parametrize(("announcing", "most"), [(False, 12), (True, 220)])
def test_nothing_is_checked_more_often_than_necessary(
    play: Play, monkeypatch: pytest.MonkeyPatch, *, announcing: bool, most: int
) -> None:
    """A hostile process announces continually that it waits, but does not wait."""
    checks: list[int] = []
    due = StubRunner.due
    monkeypatch.setattr(StubRunner, "due", lambda self: checks.append(1) or due(self))

    async def scene(world: World) -> None:
        container = await world.admit()
        await world.join(container)
        async with world.looking():
            end = time.monotonic() + 1
            while time.monotonic() < end:
                if announcing:
                    os.eventfd_write(world.runner.due_fd, 1)
                await asyncio.sleep(0.001)
        assert len(checks) < most  # one in each round of the loop, and one after each sample

    play(scene)


@pytest.mark.parametrize("ahead_ns", [0, 3600 * S])
def test_a_container_that_always_waits_does_not_cause_more_samples(
    play: Play, ahead_ns: int
) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        _, slot = await world.join(container)
        begins: set[int] = set()
        async with world.looking():
            end = time.monotonic() + 1
            while time.monotonic() < end:
                write(container, slot, provisional_ns=time.monotonic_ns() + ahead_ns)
                begins.add(read(container, "reconciled_ns"))
                await asyncio.sleep(0.001)
        assert all(gap >= SOON_NS * 0.9 for gap in gaps(begins))
        assert len(world.nvml.looks) <= (7 if ahead_ns else 52)

    play(scene)


# Processes come and go


def test_the_memory_of_a_process_is_free_soon_after_its_end(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        (one, first), (two, _) = await world.join(container), await world.join(container)
        write(container, first, memory=100)
        look_once(container, {one.pid: 1100, two.pid: 500})
        assert (read(container, "memory_overhead"), read(container, "memory_used")) == (1500, 1600)
        n_looks = len(world.nvml.looks)
        one.send_signal(signal.SIGKILL)
        await until(lambda: read(container, "memory_overhead") == 500)
        assert len(world.nvml.looks) == n_looks  # no sample was needed
        assert read(container, "memory_used") == 500
        assert pages.device_sums(container.ledger, ["memory"], 0)["memory"] == 0
        assert [entry["pid"] for entry in pages.read_usage(container.grant)] == [two.pid]

    play(scene)


def test_a_process_that_ended_during_a_sample_leaves_no_debt(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        child, _ = await world.join(container)
        before = container.account.charges(0)
        child.kill()
        await until(lambda: not container.pids())
        again, slot = await world.join(container)
        assert slot == 0  # the slot of the process that was killed
        container.account.reconcile(
            0, before, GpuSample(time.monotonic_ns(), {child.pid: 5000, again.pid: 70})
        )
        assert read(container, "memory_overhead") == 70

    play(scene)


def test_the_65th_process_is_explicitly_refused(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        path = str(container.directory / "governor.sock")

        connections = contextlib.ExitStack()

        def ask() -> tuple[int, int]:
            own = connections.enter_context(socket.socket(socket.AF_UNIX))
            own.settimeout(PATIENCE_S)
            own.connect(path)
            own.send(b"r")
            data, fds, _, _ = socket.recv_fds(own, 4, 1)
            for fd in fds:
                os.close(fd)
            return struct.unpack("I", data)[0], len(fds)

        answers = [await asyncio.to_thread(ask) for _ in range(layout.N_SLOTS - 1)]
        child, last = await world.join(container)
        assert [*answers, (last, 1)] == [(slot, 1) for slot in range(layout.N_SLOTS)]
        assert await asyncio.to_thread(ask) == (layout.NO_SLOT, 0)
        child.kill()
        await until(lambda: len(container.account.charges(0)) == layout.N_SLOTS - 1)
        assert await asyncio.to_thread(ask) == (last, 1)
        # A process that disconnects and registers again under the same pid has executed another
        # program, so its earlier slots are free.
        connections.close()
        assert (await asyncio.to_thread(ask))[1] == 1
        assert len(container.account.charges(0)) == 1
        connections.close()

    play(scene)


def test_a_process_that_cannot_be_watched_is_refused_and_has_no_slot(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()

        def fail(_: int, __: object = ()) -> None:
            raise OSError(28, "No space left on device")

        cast("Any", world.runner).watch = fail
        _, answer = await world.answer(container)
        assert answer == (layout.NO_SLOT, 0)
        assert container.pids() == frozenset()
        assert pages.read(container.ledger, pages.slot_base(0), "ledger_slot", "state") == 0

    play(scene)


def numbers_of(pid: int) -> list[int]:
    """Return a process's pids, from this pid namespace inwards."""
    status = Path(f"/proc/{pid}/status").read_text()
    return [int(number) for number in status.split("NSpid:")[1].split("\n")[0].split()]


def only_child(pid: int) -> int:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(listed[0]) if listed else 0


def test_a_process_is_listed_by_its_number_in_the_container(play: Play) -> None:
    need("unshare", "nsenter")
    prefix = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        lack("needs a pid namespace")

    async def scene(world: World) -> None:
        outer = spawn(*prefix, "sleep", "60")
        world.children.append(outer)
        await until(lambda: only_child(outer.pid))
        first = only_child(outer.pid)
        container = await world.admit(pid=first)
        enter = ["nsenter", "--target", str(first), "--pid"]
        await world.join(container, *enter)
        await world.join(container, *enter, *prefix)  # in a nested pid namespace
        same, deeper = (process.pid for process in container.account.charges(0))
        assert [len(numbers_of(pid)) for pid in (first, same, deeper)] == [2, 2, 3]
        look_once(container, {same: 5, deeper: 6})
        listed = {
            entry["pid"]: cast("tuple[int, ...]", entry["memory"])[0]
            for entry in pages.read_usage(container.grant)
        }
        assert listed == {numbers_of(same)[1]: 5, numbers_of(deeper)[1]: 6}
        # PID 1 is the container's first process, and also the deeper one in its own namespace.
        assert 1 not in listed
        assert namespace_pid(same, os.getpid()) == same  # in the governor's namespace
        assert namespace_pid(deeper, 2**22) == 1  # the first process is gone
        assert namespace_pid(2**22, first) == 2**22  # the process itself is gone

    play(scene)


# Time


def test_a_container_is_measured_by_its_reports_up_to_its_held_time() -> None:
    meter: Meter[str] = Meter()
    quarter = S // 4
    for i in range(9):
        now = 10 * S + i * quarter
        # Each of the two processes reports half of the time. The container held the GPU for 40 %
        # of the time.
        busy = {"a": i * quarter // 2, "b": i * quarter // 2}
        _, parts = meter.update(now, busy, i * quarter * 2 // 5, None)
    assert parts == pytest.approx({"a": 20, "b": 20})


def test_use_more_than_a_second_ago_is_forgotten() -> None:
    meter: Meter[str] = Meter()
    busy = 0
    for i in range(12):
        busy += S // 4 if i in (1, 2, 3, 4) else 0
        _, parts = meter.update(i * S // 4, {"a": busy}, busy, None)
        if i == 4:
            assert parts["a"] == pytest.approx(100)
        if i == 6:
            assert parts["a"] == pytest.approx(50)
    assert parts["a"] == 0


def test_a_report_that_decreases_or_jumps_is_bounded() -> None:
    meter: Meter[str] = Meter()
    for i, busy in enumerate((2**64 - 1, 0, 2**64 - 1, 5)):
        _, parts = meter.update(i * S // 4, {"a": busy}, 10 * S * i, None)
        assert 0 <= parts["a"] <= 100


def test_a_container_alone_is_measured_by_nvml() -> None:
    meter: Meter[str] = Meter()
    meter.update(0, {"a": 0, "b": 0}, 0, {"a": 60, "b": 30})
    use = meter.update(S // 4, {"a": 5, "b": 0}, 0, {"a": 60, "b": 30})
    assert use == (90, {"a": 60, "b": 30})
    use = meter.update(S // 2, {"a": 5, "b": 0}, 0, {"a": 90, "b": 90})
    assert use == (100, {"a": 50, "b": 50})


@pytest.mark.parametrize(
    ("reported", "parts"),
    [
        ((3, 1), {"a": 30, "b": 10}),
        ((9, 9), {"a": 20, "b": 20}),  # more than the container used
        ((0, 0), {"a": 20, "b": 20}),
    ],
)
def test_on_a_steered_gpu_reports_only_divide_the_traced_time(
    reported: tuple[int, int], parts: dict[str, float]
) -> None:
    meter: Meter[str] = Meter()
    tenth = S // 10
    for i in range(21):
        busy = {"a": i * tenth * reported[0] // 10, "b": i * tenth * reported[1] // 10}
        use = meter.update(i * tenth, busy, i * tenth * 4 // 10, None, is_traced=True)
    assert use == (pytest.approx(40), pytest.approx(parts))


@pytest.mark.parametrize(("every_ms", "used"), [(250, 100), (250, 90), (20, 50)])
def test_on_a_steered_gpu_the_trace_is_read_in_steps_of_any_length(
    every_ms: int, used: int
) -> None:
    """The time of a step of 100 ms may arrive in one reading, and none in the next ones."""
    meter: Meter[str] = Meter()
    shown = []
    for ms in range(0, 5001, every_ms):
        total, _ = meter.update(ms * MS, {}, ms // 100 * used * MS, None, is_traced=True)
        shown.append(total)
    assert all(used - 10 <= total <= min(100, used + 10) for total in shown[2000 // every_ms :])


def test_on_a_steered_gpu_the_time_of_a_process_that_has_ended_is_not_the_others() -> None:
    meter: Meter[str] = Meter()
    tenth = S // 10
    for i in range(11):
        busy = {"a": i * tenth * 8 // 10, "b": i * tenth // 100}
        meter.update(i * tenth, busy, i * tenth * 81 // 100, None, is_traced=True)
    total, parts = meter.update(
        11 * tenth, {"b": 11 * tenth // 100}, 11 * tenth * 81 // 100, None, is_traced=True
    )
    assert total == pytest.approx(81)
    assert parts == {"b": pytest.approx(1, rel=0.2)}


def test_on_a_steered_gpu_a_container_without_registered_processes_has_used_its_traced_time() -> (
    None
):
    meter: Meter[str] = Meter()
    for i in range(5):
        use = meter.update(i * S // 4, {}, i * S // 10, None, is_traced=True)
    assert use == (pytest.approx(40), {})


def test_samples_are_averaged_over_their_times() -> None:
    samples = (
        ProcessUse(5, 1, 90),
        ProcessUse(6, 2, 99),
        ProcessUse(6, 3, 200),
        ProcessUse(7, 4, 50),
    )
    assert sampled_percent(samples, frozenset({5, 6})) == {5: 30, 6: 66}
    assert sampled_percent((), frozenset({5})) == {}


def test_utilisation_is_relative_to_the_cap() -> None:
    assert [of_limit(part, 40) for part in (0.0, 10.0, 20.0, 40.0, 41.0)] == [0, 25, 50, 100, 100]
    assert of_limit(5.0, 0) == 0


def test_utilisation_is_published_in_total_and_by_process(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        container = await world.admit(limit=50)
        (one, first), (two, second) = await world.join(container), await world.join(container)
        begin, passed = time.monotonic_ns(), S // 5
        clock = SimpleNamespace(monotonic_ns=lambda: begin, time_ns=time.time_ns)
        monkeypatch.setattr("governor.account.time", clock)
        seen = {one.pid: MIB, two.pid: MIB}
        look_once(container, seen)
        clock.monotonic_ns = lambda: begin + passed
        write(container, first, busy_ns=passed // 4)
        world.runner.held_ns = passed
        look_once(container, seen)
        assert read(container, "utilisation") == 50  # a quarter of the time, cap of a half
        by_pid = {
            entry["pid"]: cast("tuple[int, ...]", entry["utilisation"])[0]
            for entry in pages.read_usage(container.grant)
        }
        assert by_pid == {one.pid: read(container, "utilisation"), two.pid: 0}
        assert second != first

    play(scene)


def test_on_a_steered_gpu_utilisation_is_the_traced_time_however_little_is_reported(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        world.runner.steers = True
        container = await world.admit(limit=50)
        (one, first), (two, _) = await world.join(container), await world.join(container)
        begin, passed = time.monotonic_ns(), S // 5
        clock = SimpleNamespace(monotonic_ns=lambda: begin, time_ns=time.time_ns)
        monkeypatch.setattr("governor.account.time", clock)
        write(container, first, contexts=1)
        seen = {one.pid: MIB, two.pid: MIB}
        look_once(container, seen)
        for n_passed, reported in ((1, 0), (2, passed // 50)):
            clock.monotonic_ns = lambda n=n_passed: begin + n * passed
            write(container, first, busy_ns=reported)
            world.runner.held_ns = n_passed * passed // 2
            look_once(container, seen)
            assert read(container, "utilisation") == 100  # half of the time, cap of a half
            by_pid = {
                entry["pid"]: cast("tuple[int, ...]", entry["utilisation"])[0]
                for entry in pages.read_usage(container.grant)
            }
            assert by_pid == {one.pid: 100, two.pid: 0}  # the second has no context

    play(scene)


def test_utilisation_samples_of_neighbours_do_not_count(play: Play) -> None:
    async def scene(world: World) -> None:
        container = await world.admit()
        child, slot = await world.join(container)
        write(container, slot, busy_ns=5)
        base = layout.grant_device(0)
        pages.write(container.grant, base, "grant_device", "deadline_ns", layout.OPEN)
        world.nvml.used = {child.pid: MIB}
        world.nvml.samples = (ProcessUse(child.pid, 1, 37), ProcessUse(os.getpid(), 1, 60))
        async with world.looking():
            await until(lambda: read(container, "utilisation") == 37)

    play(scene)


def test_unattributed_memory_is_published_unless_it_changed_during_the_sample(play):
    async def scene(world: World) -> None:
        container = await world.admit()
        world.nvml.used = {1: 100, 2: 200}
        world.nvml.unattributed = lambda: 700
        async with world.looking():
            await until(lambda: read(container, "unattributed") == 700)
            world.nvml.unattributed = lambda: len(world.nvml.looks)  # changes with each sample
            looks = len(world.nvml.looks)
            await until(lambda: len(world.nvml.looks) > looks + 3)
            assert read(container, "unattributed") == 700
            world.nvml.unattributed = lambda: None
            world.nvml.used[2] = None
            looks = len(world.nvml.looks)
            await until(lambda: len(world.nvml.looks) > looks + 2)
            assert read(container, "unattributed") == 700
            world.nvml.unattributed = lambda: 900
            world.nvml.used[2] = 300
            await until(lambda: read(container, "unattributed") == 900)

    play(scene)


def test_unattributed_memory_is_not_published_while_a_context_is_created(play: Play) -> None:
    """NVML shows a new context's memory before it attributes it to a process."""

    async def scene(world: World) -> None:
        container = await world.admit()
        child, slot = await world.join(container)
        base = layout.ledger_device(slot, 0)
        world.nvml.used = {1: 100}
        world.nvml.unattributed = lambda: 500 * MIB
        for name in ("memory", "unseen", "taking"):
            pages.write(container.ledger, base, "ledger_device", name, 520 * MIB)
        async with world.looking():
            looks = len(world.nvml.looks)
            await until(lambda: len(world.nvml.looks) > looks + 3)
            assert read(container, "unattributed_ns") == 0
            world.nvml.unattributed = lambda: 9 * MIB
            world.nvml.used[child.pid] = 511 * MIB
            for name in ("memory", "unseen", "taking"):
                pages.write(container.ledger, base, "ledger_device", name, 0)
            await until(lambda: read(container, "unattributed") == 9 * MIB)
            assert read(container, "n_processes") == 2

    play(scene)


def test_a_new_container_gets_the_unattributed_memory_at_once(play: Play) -> None:
    """The container's first module load is compared with this value, and no new value is published
    while neighbours start.
    """

    async def scene(world: World) -> None:
        calls: list[int] = []
        world.nvml.unattributed = lambda: calls.append(1) or 600 * MIB
        async with world.looking():
            await until(lambda: len(calls) == 2)  # before and after the processes are listed
            world.nvml.unattributed = lambda: None
            container = await world.admit()
            await until(lambda: read(container, "unattributed") == 600 * MIB)

    play(scene)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 64))))
def test_unattributed_memory_per_process_is_the_least_increase(
    looks: list[tuple[int, int]],
) -> None:
    """The estimate is at most what one process causes, whatever other memory appears.

    Two samples, one without processes and one with a single process, bound it.
    """
    unattributed = Unattributed()
    for n, hidden in looks:
        unattributed.record(1, (9 * n + hidden) * MIB, n)
        assert 0 <= unattributed.each <= EACH
    unattributed.record(2, 0, 0)
    unattributed.record(3, 9 * MIB, 1)
    assert unattributed.each <= 9 * MIB


def test_memory_is_sampled_although_nvml_reports_no_utilisation(
    play: Play,
) -> None:
    async def scene(world: World) -> None:
        one = await world.admit()
        child, slot = await world.join(one)
        write(one, slot, memory=100)
        world.nvml.used = {child.pid: 300}
        tally = Tally()
        auditor = Auditor(world.server.containers, tally, Config(runtime_dir=str(world.directory)))
        refuse = Mock(side_effect=NvmlError("Unknown Error", hint="see the kernel log"))
        with patch.object(world.nvml, "utilisation", refuse), capture_logs() as logs:
            task = asyncio.create_task(world.reconcile(tally, auditor))
            await until(lambda: refuse.call_count >= 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert read(one, "memory_overhead") == 200
        assert [event["event"] for event in logs].count("nvml-utilisation-failed") == 1
        assert one.findings.seen == [300]
        assert tally.looks[UUID].made >= 2
        assert tally.looks[UUID].failed == 0
        assert 0 < tally.looks[UUID].seconds < PATIENCE_S

    play(scene)


def test_failed_samples_are_counted(play: Play) -> None:
    async def scene(world: World) -> None:
        await world.admit()
        world.nvml.failing = True
        tally = Tally()
        task = asyncio.create_task(world.reconcile(tally))
        await until(lambda: UUID in tally.looks and tally.looks[UUID].failed >= 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert tally.looks[UUID].failed == tally.looks[UUID].made

    play(scene)
