"""Test the runner of a GPU that its own scheduler divides: the arbiter is idle, and takes over when steering fails.

Each test runs with a governor that makes the driver calls itself, and with one that asks the
steering service.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import Counter
from contextlib import closing
from mmap import mmap
from typing import ClassVar

import pytest

from governor.arbiter import WHOLE, Runners, load_library
from governor.config import Config
from governor.hardware.driver import DriverCallError
from governor.hardware.probe import NotProbedError, WithoutEffectError
from governor.hardware.remote import RemoteHardware
from governor.hardware.runner import GangCoordinator, HardwareRunner
from governor.hardware.service import SteeringService
from governor.hardware.steering import Steering
from governor.hardware.watchdog import Watchdog
from libcontrol import layout, pages

MS = 1_000_000


class StubProcess:
    def __init__(self, pid):
        self.pid, self.key, self.n_groups = pid, pid, 1


class PlayedGpu:
    """A GPU with processes that always have work.

    Processes that are switched on share the time evenly.
    """

    n_lost = 0
    elsewhere_s = 0.0
    returned_ns: ClassVar[dict[int, int]] = {}
    early_turns: ClassVar[dict[int, int]] = {}
    full_turns = ()

    def watchdog(self):
        return Watchdog("tests.unit.test_hardware_runner:nothing", ())

    def __init__(self):
        self.contexts = set()
        self.n_contexts = 1
        self.hidden, self.old = set(), set()
        self.thorough_s = 0.0
        self.n_finds = self.n_thorough = 0
        self.find_s = 0.0
        self._off = Counter()  # number of switch-offs not yet undone, as the driver counts
        self.slices = {}
        self.failure = None
        self.closed = False
        self._used = Counter()
        self._at = time.monotonic_ns()

    def _fail(self):
        if self.failure:
            raise self.failure

    def find(self, pid, pidfd, *, thorough):
        os.fstat(pidfd)  # must be open
        if thorough:
            time.sleep(self.thorough_s)
        ends = time.thread_time() + self.find_s
        while time.thread_time() < ends:
            pass
        self.n_finds += 1
        self.n_thorough += thorough
        if pid in self.old and not thorough:
            return []
        return [StubProcess(pid)] if pid in self.contexts - self.hidden else []

    def switch(self, held, *, on):
        self._pass()
        for one in held:
            self._off[one.pid] = max(0, self._off[one.pid] - 1) if on else self._off[one.pid] + 1

    @property
    def off(self):
        return {pid for pid, n in self._off.items() if n}

    def set_slice(self, held, ns):
        self._fail()
        self.slices[held.pid] = ns

    def _pass(self):
        self._fail()
        now = time.monotonic_ns()
        running = self.contexts - self.off
        for pid in running:
            self._used[pid] += (now - self._at) // len(running)
        self._at = now

    def used_ns(self):
        self._pass()
        used, self._used = self._used, Counter()
        return used

    def tokens(self, held):
        return [one.pid for one in held]

    def name(self, held):
        return [held.pid]

    def named(self, data):
        return StubProcess(*data)

    def close(self):
        self.closed = True


def nothing(_off):
    """The function that the watchdog would call."""


class StubContainer:
    def __init__(self, runner, share, limit, **more):
        self.grant, self.ledger = mmap(-1, layout.GRANT_FILE_SIZE), mmap(-1, layout.LEDGER_SIZE)
        self.runner = runner
        self.tenant = runner.add(
            WHOLE * share // 100, WHOLE * limit // 100, self.grant, 0, self.ledger, **more
        )

    def read(self, field):
        return pages.read(self.grant, layout.grant_device(0), "grant_device", field)

    def enter(self, gpu, pid, *, slot=0, says=None):
        pidfd = os.pidfd_open(os.getpid())  # a stand-in, because these processes are only numbers
        contexts = says or (lambda: gpu.n_contexts if pid in gpu.contexts else 0)
        self.runner.enter(self.tenant, slot, pid, pidfd, contexts)
        os.close(pidfd)


class WaitingContainer(StubContainer):
    """A container with one process that waits for a GPU from the start."""

    def __init__(self, runner, share, grant=None, ledger=None, device=0):
        self.runner, self.device = runner, device
        self.grant = grant or mmap(-1, layout.GRANT_FILE_SIZE)
        self.ledger = ledger or mmap(-1, layout.LEDGER_SIZE)
        guarantee = WHOLE * share // 100
        self.tenant = runner.add(guarantee, WHOLE, self.grant, device, self.ledger)
        pages.write(self.ledger, 0, "ledger_header", "n_slots", 1)
        pages.write(self.ledger, layout.LEDGER_SLOTS, "ledger_slot", "state", 1)
        where = layout.ledger_device(0, device)
        pages.write(self.ledger, where, "ledger_device", "want", 1)

    def read(self, field):
        return pages.read(self.grant, layout.grant_device(self.device), "grant_device", field)


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def gpu():
    return PlayedGpu()


@pytest.fixture(params=["itself", "by the service"])
def hardware(request, gpu, tmp_path):
    """The hardware of the runner: the GPU, or a connection to a service that has it."""
    if request.param == "itself":
        yield gpu
        return
    path = tmp_path / "steering.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        service = SteeringService(listener, lambda _: gpu, is_passed=True)
        thread = threading.Thread(target=service.run)
        thread.start()
        hardware = RemoteHardware("GPU-played", str(path))
        yield hardware
        hardware.close()
        thread.join(10)  # it ends with its last session
        assert not thread.is_alive()


def make_runner(build_dir, opens, **more):
    return HardwareRunner(load_library(build_dir / "libcontrol"), Config(), opens, gpu=0, **more)


@pytest.fixture
def runner(build_dir, gpu, hardware):
    runner = make_runner(build_dir, lambda _: hardware)
    runner.wait_opened(20)
    yield runner
    runner.close()
    wait_for(lambda: gpu.closed)


def test_every_container_has_an_open_grant_at_once(runner):
    containers = [StubContainer(runner, 30, 30) for _ in range(3)]
    wait_for(lambda: all(c.read("deadline_ns") == layout.OPEN for c in containers))
    assert all(c.read("contended") == 0 for c in containers)
    before = pages.read(containers[0].grant, 0, "grant_header", "heartbeat_ns")
    wait_for(lambda: pages.read(containers[0].grant, 0, "grant_header", "heartbeat_ns") > before)


def test_a_process_is_searched_when_it_has_a_context(runner, gpu):
    container = StubContainer(runner, 60, 100)
    container.enter(gpu, 11)
    time.sleep(0.1)
    assert gpu.slices == {}
    gpu.contexts.add(11)
    wait_for(lambda: 11 in gpu.slices)


def wait_for_last_search(gpu, most):
    """Return the number of searches, at most `most`, once there was none for 0.3 s."""
    n, since = gpu.n_finds, time.monotonic()
    while time.monotonic() - since < 0.3:
        time.sleep(0.01)
        if gpu.n_finds != n:
            n, since = gpu.n_finds, time.monotonic()
        assert n <= most
    return n


def test_a_process_is_searched_again_only_when_it_has_more_contexts(runner, gpu):
    container = StubContainer(runner, 60, 100)
    gpu.contexts.add(11)
    container.enter(gpu, 11)
    wait_for(lambda: 11 in gpu.slices)
    # If its work was seen before the first search ended, a second search follows.
    before = wait_for_last_search(gpu, most=2)
    gpu.n_contexts = 2
    wait_for(lambda: gpu.n_finds > before)
    assert wait_for_last_search(gpu, most=before + 1) == before + 1


def test_the_charged_time_comes_from_the_gpus_trace(runner, gpu):
    container = StubContainer(runner, 60, 100)
    gpu.contexts.add(11)
    container.enter(gpu, 11)
    wait_for(lambda: runner.stats(container.tenant).charged_ns > 50 * MS)
    stats = runner.stats(container.tenant)
    assert (stats.since_ns, stats.open, stats.held_ns) == (0, 0, stats.charged_ns)


def test_a_cap_switches_a_process_off_until_it_is_raised(runner, gpu):
    container = StubContainer(runner, 20, 20)
    gpu.contexts.add(11)
    container.enter(gpu, 11)
    wait_for(lambda: 11 in gpu.off)
    runner.set(container.tenant, WHOLE // 5, WHOLE)
    wait_for(lambda: 11 not in gpu.off)
    time.sleep(0.3)
    assert 11 not in gpu.off


def test_a_removed_container_is_switched_on(runner, gpu):
    container = StubContainer(runner, 10, 10)
    gpu.contexts.add(11)
    container.enter(gpu, 11)
    wait_for(lambda: 11 in gpu.off)
    runner.remove(container.tenant)
    wait_for(lambda: 11 not in gpu.off)


def test_a_process_that_ends_before_it_was_found_is_not_searched(runner, gpu):
    container = StubContainer(runner, 10, 10)
    container.enter(gpu, 11)
    runner.leave(container.tenant, 0)
    gpu.contexts.add(11)
    time.sleep(0.1)
    assert gpu.slices == {}


def test_a_process_that_denies_its_contexts_is_found_by_the_trace(runner, gpu):
    container = StubContainer(runner, 10, 10)
    gpu.contexts.add(11)
    container.enter(gpu, 11, says=lambda: 0)
    wait_for(lambda: 11 in gpu.off)


def test_a_process_that_claims_contexts_and_has_none_costs_little(runner, gpu):
    container = StubContainer(runner, 10, 10)
    began = time.monotonic()
    container.enter(gpu, 11, says=lambda: 3)
    time.sleep(1.5)
    wait_for(lambda: gpu.n_finds > 1)
    assert gpu.n_finds <= 3 + time.monotonic() - began  # three, and then one per second
    assert gpu.n_thorough == 0


def test_a_process_with_a_long_search_is_not_searched_for_some_time(runner, gpu):
    gpu.find_s = 0.05
    says = itertools.count()
    began = time.monotonic()
    StubContainer(runner, 10, 10).enter(gpu, 11, says=lambda: next(says))
    time.sleep(1.2)
    wait_for(lambda: gpu.n_finds > 1)
    # Each search takes 0.05 s of a processor, and the pause between two is 20 times as long.
    assert gpu.n_finds <= 1 + time.monotonic() - began


def test_steering_ends_if_a_working_process_cannot_be_switched_off(runner, gpu):
    container = StubContainer(runner, 10, 10)
    gpu.contexts.add(11)
    gpu.hidden.add(11)
    container.enter(gpu, 11)
    wait_for(lambda: not runner.is_steered)
    assert gpu.n_thorough
    wait_for(lambda: container.read("deadline_ns") != layout.OPEN)
    # The container was nevertheless charged for the time that it used.
    assert runner.stats(container.tenant).charged_ns > 400 * MS


def test_an_old_client_is_found_before_it_is_considered_hidden(runner, gpu):
    """Only a thorough search finds it, which takes longer than the time for which a hidden process is tolerated."""
    gpu.thorough_s = 1.0
    gpu.old.add(11)
    container = StubContainer(runner, 10, 10)
    gpu.contexts.add(11)
    container.enter(gpu, 11)
    wait_for(lambda: 11 in gpu.off)
    assert runner.is_steered


def test_a_process_in_two_slots_is_removed_with_the_last(runner, gpu):
    container = StubContainer(runner, 10, 10)
    gpu.contexts.add(11)
    container.enter(gpu, 11, slot=0, says=lambda: 1)
    container.enter(gpu, 11, slot=1, says=lambda: 1)
    wait_for(lambda: 11 in gpu.off)
    runner.leave(container.tenant, 0)
    wait_for(lambda: 11 not in gpu.off)
    wait_for(lambda: 11 in gpu.off)  # steered as before


def test_the_charge_of_a_reused_tenant_number_begins_at_zero(runner, gpu):
    container = StubContainer(runner, 10, 100)
    gpu.contexts.add(11)
    container.enter(gpu, 11)
    wait_for(lambda: runner.stats(container.tenant).charged_ns > 20 * MS)
    runner.remove(container.tenant)
    other = StubContainer(runner, 10, 100)
    assert other.tenant == container.tenant
    assert runner.stats(other.tenant).charged_ns == 0
    time.sleep(0.25)
    assert runner.stats(other.tenant).charged_ns == 0


@pytest.mark.parametrize(
    "failure", [DriverCallError("a call", 0x65), OSError("the device is gone")]
)
def test_where_steering_fails_grants_divide_the_time(runner, gpu, failure):
    containers = [StubContainer(runner, 40, 40) for _ in range(2)]
    wait_for(lambda: all(c.read("deadline_ns") == layout.OPEN for c in containers))
    for container in containers:
        pages.write(container.ledger, 0, "ledger_header", "n_slots", 1)
        pages.write(container.ledger, layout.LEDGER_SLOTS, "ledger_slot", "state", 1)
        pages.write(container.ledger, layout.ledger_device(0, 0), "ledger_device", "want", 1)
    gpu.failure = failure
    wait_for(lambda: not runner.is_steered)
    # From then on, at most one container has a grant, and the grant ends.
    wait_for(lambda: all(c.read("deadline_ns") != layout.OPEN for c in containers))
    wait_for(lambda: any(c.read("deadline_ns") for c in containers))
    assert sum(c.read("deadline_ns") > time.monotonic_ns() + 50 * MS for c in containers) == 0


@pytest.fixture
def tried(build_dir, gpu):
    """A runner that tries again 0.1 s after a failure, with three objects for the attempts to open
    the GPU: their times, the errors that the next ones raise, and the event that they wait for.
    """
    opened = []
    refusals = []
    may_open = threading.Event()
    may_open.set()

    def opens(_):
        opened.append(time.monotonic())
        if refusals:
            raise refusals.pop(0)
        may_open.wait(30)
        gpu.closed = False
        return gpu

    runner = make_runner(build_dir, opens, again_s=0.1)
    runner.wait_opened(20)
    assert runner.is_steered
    opened.clear()
    yield runner, opened, refusals, may_open
    may_open.set()
    runner.close()
    assert gpu.closed


def test_after_a_failure_steering_is_tried_again(tried, gpu):
    """Changes made in the meantime take effect, and a container's charge is kept."""
    runner, opened, refusals, may_open = tried
    first = StubContainer(runner, 60, 100)
    second, third = (StubContainer(runner, 10, 10) for _ in range(2))
    gpu.contexts |= {11, 12, 13}
    first.enter(gpu, 11)
    second.enter(gpu, 12)
    third.enter(gpu, 13)
    wait_for(lambda: gpu.off)
    wait_for(lambda: runner.stats(first.tenant).charged_ns > 900 * MS)
    refusals += [OSError("not yet"), DriverCallError("nor now", 0x65)]
    may_open.clear()
    gpu.failure = OSError("the device is gone")
    wait_for(lambda: not runner.is_steered)
    wait_for(lambda: gpu.closed)
    charged = runner.stats(first.tenant).charged_ns
    runner.remove(second.tenant)
    runner.leave(third.tenant, 0)
    runner.set(first.tenant, WHOLE // 2, WHOLE // 2)
    fourth = StubContainer(runner, 10, 10)
    fourth.enter(gpu, 14)
    gpu.contexts.add(14)
    gpu.failure = None
    gpu.slices.clear()
    gpu._off.clear()  # the watchdog is a stand-in
    may_open.set()
    wait_for(lambda: runner.is_steered)
    assert len(opened) == 3
    assert opened[1] - opened[0] > 0.15  # the pauses double
    assert opened[2] - opened[1] > 0.35
    wait_for(lambda: runner.not_steered == "")
    wait_for(lambda: all(c.read("deadline_ns") == layout.OPEN for c in (first, fourth)))
    wait_for(lambda: {11, 14} <= gpu.slices.keys() | gpu.off)
    assert runner.stats(first.tenant).charged_ns >= charged
    assert not {12, 13} & (gpu.slices.keys() | gpu.off)
    wait_for(lambda: runner.stats(first.tenant).charged_ns > charged)
    wait_for(lambda: runner.stats(fourth.tenant).charged_ns)


def test_after_a_failure_the_slices_of_known_containers_are_not_taken_for_the_default_one(
    tried, gpu, monkeypatch
):
    added = []
    add = Steering.add
    monkeypatch.setattr(Steering, "add", lambda *a, is_adopted: added.append(is_adopted) or add(*a))
    runner, _, _, may_open = tried
    StubContainer(runner, 10, 10)
    wait_for(lambda: added == [False])
    may_open.clear()
    gpu.failure = OSError("the device is gone")
    wait_for(lambda: not runner.is_steered)
    wait_for(lambda: gpu.closed)
    gpu.failure = None
    may_open.set()
    wait_for(lambda: runner.is_steered)
    assert added == [False, True]


def test_containers_that_were_added_before_the_first_opening_have_the_default_slice(
    build_dir, gpu, monkeypatch
):
    added = []
    add = Steering.add
    monkeypatch.setattr(Steering, "add", lambda *a, is_adopted: added.append(is_adopted) or add(*a))
    opening = Opening(gpu)
    runner = make_runner(build_dir, opening)
    try:
        StubContainer(runner, 10, 10)
        StubContainer(runner, 10, 10, is_adopted=True)
        opening.may_end.set()
        wait_for(lambda: added == [False, True])
    finally:
        runner.close()


def test_a_second_failure_is_tried_again_as_well(tried, gpu):
    runner, opened, _, may_open = tried
    container = StubContainer(runner, 10, 10)
    gpu.contexts.add(11)
    container.enter(gpu, 11)
    for n in (1, 2):
        wait_for(lambda: 11 in gpu.slices)
        may_open.clear()
        gpu.failure = OSError("the device is gone")
        wait_for(lambda: not runner.is_steered)
        wait_for(lambda: container.read("deadline_ns") != layout.OPEN)
        wait_for(lambda: gpu.closed)
        gpu.failure = None
        gpu.slices.clear()
        gpu._off.clear()
        may_open.set()
        wait_for(lambda: runner.is_steered)
        assert len(opened) == n


def test_closing_does_not_wait_for_the_next_attempt(build_dir, gpu):
    runner = make_runner(build_dir, lambda _: gpu, again_s=60)
    runner.wait_opened(20)
    gpu.failure = OSError("the device is gone")
    StubContainer(runner, 10, 10)
    wait_for(lambda: not runner.is_steered)
    began = time.monotonic()
    runner.close()
    assert time.monotonic() - began < 10


class Opening:
    """A GPU whose opening takes as long as the test wants."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.may_end = threading.Event()
        self.result = None

    def __call__(self, ending):
        while not self.may_end.wait(0.01):
            if ending.is_set():
                raise NotProbedError("the governor is stopping")
        if self.result:
            raise self.result
        return self.gpu


@pytest.fixture
def opening(build_dir, gpu):
    """A runner with a GPU that is not open yet."""
    opening = Opening(gpu)
    runner = make_runner(build_dir, opening, again_s=0.1)
    yield runner, opening
    runner.close()


def test_grants_divide_the_time_until_a_gpu_is_open(opening, gpu):
    runner, opening = opening
    first, second = (WaitingContainer(runner, 10) for _ in range(2))
    gpu.contexts |= {11, 12}
    first.enter(gpu, 11)
    wait_for(lambda: any(c.read("deadline_ns") for c in (first, second)))
    assert not all(c.read("deadline_ns") == layout.OPEN for c in (first, second))
    assert not runner.is_steered
    assert "being opened" in runner.not_steered
    opening.may_end.set()
    second.enter(gpu, 12)
    wait_for(lambda: all(c.read("deadline_ns") == layout.OPEN for c in (first, second)))
    wait_for(lambda: {11, 12} <= gpu.slices.keys() | gpu.off)
    assert runner.is_steered
    assert runner.not_steered == ""


def test_closing_does_not_wait_for_a_test(opening):
    runner, _ = opening
    began = time.monotonic()
    runner.close()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("where", ["log.info", "Steering"])
def test_an_error_at_the_beginning_of_steering_leaves_no_open_grant(
    opening, gpu, monkeypatch, where
):
    """For instance, the log is a closed pipe."""

    def fails(*_, **__):
        raise OSError("broken pipe")

    runner, opening = opening
    containers = [WaitingContainer(runner, 10) for _ in range(2)]
    monkeypatch.setattr(f"governor.hardware.runner.{where}", fails)
    opening.may_end.set()
    wait_for(lambda: runner.not_steered == "broken pipe")
    wait_for(lambda: gpu.closed)
    assert not runner.is_steered
    runner.wait_opened(20)
    wait_for(lambda: not all(c.read("deadline_ns") == layout.OPEN for c in containers))
    monkeypatch.undo()
    wait_for(lambda: runner.is_steered)


def test_a_gpu_on_which_calls_have_no_effect_is_not_tried_again(opening):
    runner, opening = opening
    opening.result = WithoutEffectError("no effect")
    opening.may_end.set()
    wait_for(lambda: runner.not_steered == "no effect")
    opening.result = None
    time.sleep(0.5)
    assert not runner.is_steered


@pytest.mark.parametrize(
    "reason",
    [NotProbedError("other processes are using it"), OSError("no rights"), KeyError("a bug")],
)
def test_a_gpu_that_cannot_be_tested_or_opened_is_tried_again(opening, reason):
    runner, opening = opening
    opening.result = reason
    opening.may_end.set()
    wait_for(lambda: runner.not_steered in (str(reason), repr(reason)))
    opening.result = None
    wait_for(lambda: runner.is_steered)


def test_without_a_watchdog_nothing_is_steered(opening, gpu, monkeypatch):
    def fails():
        raise OSError("no process can be started")

    runner, opening = opening
    monkeypatch.setattr(gpu, "watchdog", fails)
    opening.may_end.set()
    wait_for(lambda: runner.not_steered == "no process can be started")
    assert gpu.closed
    monkeypatch.undo()
    wait_for(lambda: runner.is_steered)


class Turns:
    """Gives grants back as the processes of waiting containers would, and counts them."""

    def __init__(self, *containers):
        self.n = dict.fromkeys(containers, 0)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ending.set()
        self._thread.join()

    def _run(self):
        seen = dict.fromkeys(self.n, 0)
        while not self._ending.wait(0.001):
            for container in self.n:
                epoch, where = container.read("epoch"), layout.ledger_device(0, container.device)
                if epoch == seen[container]:
                    continue
                seen[container] = epoch
                self.n[container] += 1
                for field, value in (
                    ("active_epoch", epoch),
                    ("seen_ns", time.monotonic_ns()),
                    ("release_ns", time.monotonic_ns()),
                    ("released_epoch", epoch),
                ):
                    pages.write(container.ledger, where, "ledger_device", field, value)


def test_a_container_with_a_steered_gpu_keeps_its_turns_on_another_one(build_dir, gpu):
    """As long as grants divide the time of both GPUs, it has its turns on both at once."""
    library = load_library(build_dir / "libcontrol")
    grants = Runners(library, Config())
    together = GangCoordinator(grants)
    openings = [Opening(gpu), Opening(gpu)]
    first, second = (
        HardwareRunner(library, Config(), opening, gpu=i, together=together)
        for i, opening in enumerate(openings)
    )
    one = WaitingContainer(first, 50)
    other = WaitingContainer(second, 50, one.grant, one.ledger, device=1)
    rivals = WaitingContainer(first, 50), WaitingContainer(second, 50)
    gang = together.add([first, second], [one.tenant, other.tenant])
    with closing(grants), closing(first), closing(second), Turns(one, other, *rivals) as turns:
        wait_for(lambda: min(turns.n.values()) > 10)
        openings[0].may_end.set()
        wait_for(lambda: first.is_steered and one.read("deadline_ns") == layout.OPEN)
        before = dict(turns.n)
        wait_for(lambda: all(turns.n[c] > before[c] + 20 for c in (other, rivals[1])))
        together.remove(gang)


def test_closing_switches_everything_on(build_dir, gpu, hardware):
    runner = make_runner(build_dir, lambda _: hardware)
    container = StubContainer(runner, 10, 10)
    gpu.contexts.add(11)
    container.enter(gpu, 11)
    wait_for(lambda: 11 in gpu.off)
    runner.close()
    assert gpu.off == set()
    wait_for(lambda: gpu.closed)
