"""Test the search for processes' GPU contexts: its times and frequency, false reports, and errors."""

from __future__ import annotations

import os
import threading
import time

import pytest

from governor.hardware.driver import DriverCallError
from governor.hardware.finder import BURST_S, COST, NEW_S, POLL_S, QUIET_S, Finder


class FinderWorld:
    """Processes by PID. The test sets the contexts that each has on the GPU."""

    def __init__(self):
        self.has = {}
        self.looks = []
        self.told = []
        self.takes_s = 0.0  # processor time of a search
        self.waits_s = 0.0
        self.may_end = threading.Event()  # a search ends only once this is set
        self.may_end.set()
        self.fails = None

    def find(self, pid, pidfd, *, thorough):
        os.fstat(pidfd)
        self.looks.append((pid, thorough))
        ends = time.thread_time() + self.takes_s
        while time.thread_time() < ends:
            pass
        time.sleep(self.waits_s)
        self.may_end.wait(30)
        if self.fails:
            raise self.fails
        return self.has.get(pid, [])


@pytest.fixture
def world():
    world = FinderWorld()
    world.finder = Finder(world.find, world.told.append)
    world.finder.start()
    yield world
    world.finder.close()


def enter(world, pid, says=lambda: 1, *, tenant=1, slot=0):
    pidfd = os.pidfd_open(os.getpid())
    world.finder.enter(tenant, slot, pid, pidfd, says)
    os.close(pidfd)


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_process_seen_once_is_searched_once(world):
    """The process's context is gone before the search: there is one search, and no thorough one."""
    enter(world, 11, lambda: 0)
    world.finder.saw({11})
    wait_for(lambda: world.looks)
    time.sleep(0.4)
    assert world.looks == [(11, False)]


def test_a_process_seen_repeatedly_gets_a_thorough_search(world):
    enter(world, 11, lambda: 0)

    def is_thorough():
        world.finder.saw({11})
        return (11, True) in world.looks

    wait_for(is_thorough)
    assert [thorough for _, thorough in world.looks][:2] == [False, False]


def test_an_error_of_the_driver_does_not_end_the_finder(world):
    world.fails = DriverCallError("a call", 0x51)
    enter(world, 11)
    wait_for(lambda: len(world.looks) > 1)
    world.fails = None
    world.has[12] = ["a context"]
    enter(world, 12)
    wait_for(lambda: any(found.held for found in world.told))
    assert world.told[-1].pid == 12


def test_repeated_registration_does_not_cause_more_searches(world):
    world.takes_s = 0.03
    begin = time.monotonic()
    while time.monotonic() < begin + 1.0:
        enter(world, 11)
        time.sleep(0.01)
        world.finder.leave(1, 0)
    assert 1 <= len(world.looks) <= 1 + 1.2 / (world.takes_s * COST)


def test_a_search_that_waits_for_the_driver_hardly_postpones_the_next(world):
    """If the whole duration counted, the next search would be COST times 0.5 s later."""
    world.waits_s = 0.5
    enter(world, 11)
    wait_for(lambda: world.told)
    world.finder.leave(1, 0)
    world.has[11] = ["a context"]
    enter(world, 11)
    wait_for(lambda: world.told[-1].held, seconds=COST * world.waits_s * 0.8)


def test_the_counts_are_read_less_often_once_no_process_is_new(world):
    world.finder._ended.set()
    world.finder._thread.join()  # from here on, the test makes the thread's steps
    says = [0]
    now = time.monotonic()
    enter(world, 11, lambda: says[0])
    assert world.finder._next(now) is None
    assert world.finder._pause_s == POLL_S
    assert world.finder._next(now + 2 * NEW_S) is None
    assert world.finder._pause_s == QUIET_S
    says[0] = 1
    process, pidfd, *_ = world.finder._next(now + 2 * NEW_S)
    os.close(pidfd)
    assert process.pid == 11
    assert world.finder._pause_s == POLL_S


def test_a_process_whose_context_is_known_is_not_new(world):
    """Many processes may have been found already while others are registered."""
    world.has[11] = ["a context"]
    enter(world, 11, lambda: 1)
    wait_for(lambda: world.told)
    world.finder._ended.set()
    world.finder._thread.join()
    [process] = world.finder._processes.values()
    assert world.finder._next(process.next_at) is None
    assert world.finder._pause_s == QUIET_S
    # Until then it is not searched, whatever it reports.
    assert world.finder._next(process.next_at - 0.1) is None
    assert world.finder._pause_s == pytest.approx(0.1)


def test_a_long_interval_ends_when_the_trace_shows_a_process(world, monkeypatch):
    monkeypatch.setattr("governor.hardware.finder.NEW_S", 0.0)
    monkeypatch.setattr("governor.hardware.finder.QUIET_S", 600.0)
    enter(world, 11, lambda: 0)
    time.sleep(0.3)  # by now the long interval has begun
    world.has[11] = ["a context"]
    world.finder.saw({11})
    wait_for(lambda: world.told)
    assert world.told[0].held == ["a context"]


def test_a_search_that_ends_after_a_new_registration_is_used(world):
    world.takes_s = 0.1
    world.has[11] = ["a context"]
    enter(world, 11)
    wait_for(lambda: world.looks)
    world.finder.leave(1, 0)
    enter(world, 11)
    wait_for(lambda: world.told)
    assert world.told[0].held == ["a context"]


def test_a_result_for_a_process_that_has_left_is_dropped(world):
    world.may_end.clear()
    world.has = {11: ["a context"], 12: ["a context"]}
    enter(world, 11)
    wait_for(lambda: world.looks)
    assert world.finder.leave(1, 0) == 11
    enter(world, 12, tenant=2)
    world.may_end.set()
    wait_for(lambda: world.told)
    assert [found.pid for found in world.told] == [12]


def test_a_search_that_does_not_end_does_not_block_closing(monkeypatch):
    monkeypatch.setattr("governor.hardware.finder.CLOSE_S", 0.1)
    world = FinderWorld()
    world.may_end.clear()
    finder = world.finder = Finder(world.find, world.told.append)
    finder.start()
    enter(world, 11)
    wait_for(lambda: world.looks)
    finder.close()
    assert finder._thread.is_alive()  # the search has not ended
    world.may_end.set()
    finder._thread.join()


def test_a_container_that_causes_constant_searches_delays_no_other(world):
    """64 processes report changing context counts.

    Their container gets a burst of searches, and 1/COST of the time afterwards.
    """
    world.takes_s = 0.01
    numbers = iter(range(1, 10**9))
    for pid in range(100, 164):
        enter(world, pid, lambda: next(numbers), slot=pid)
    begin = time.monotonic()
    wait_for(lambda: len(world.looks) >= BURST_S / world.takes_s * 0.5)
    world.has[11] = ["a context"]
    enter(world, 11, tenant=2)
    n = len(world.looks)
    wait_for(lambda: (11, False) in world.looks)
    assert world.looks.index((11, False)) <= n + 1  # after the search that was in progress
    time.sleep(1.0)
    took = len([pid for pid, _ in world.looks if pid != 11]) * world.takes_s
    # A search costs a little more than its processor time, so this is an upper bound.
    assert took <= BURST_S + world.takes_s + (time.monotonic() - begin) / COST


def test_processes_of_a_container_that_start_together_are_all_found_at_once(world):
    world.takes_s = 0.007
    for pid in range(100, 108):
        world.has[pid] = ["a context"]
        enter(world, pid, slot=pid)
    wait_for(lambda: {found.pid for found in world.told} == set(world.has))
    assert len(world.looks) == 8


def test_a_search_among_all_clients_is_rare_however_many_processes_there_are(world):
    world.takes_s = 0.005
    for pid in range(100, 116):
        enter(world, pid, lambda: 0, slot=pid)

    def thorough():
        world.finder.saw(range(100, 116))
        return [pid for pid, is_thorough in world.looks if is_thorough]

    wait_for(thorough)
    begin = time.monotonic()
    while time.monotonic() < begin + 1.0:
        thorough()
        time.sleep(0.01)
    most = 2 + (time.monotonic() - begin) / (world.takes_s * COST)
    assert 1 <= len(thorough()) <= most


def test_a_process_registered_before_the_finder_started_is_searched_like_a_new_one(world):
    """While the GPU is not steered, no search can find anything, so none counts as a miss."""
    world.finder.stop()
    enter(world, 11)
    world.has[11] = [1]
    world.finder.saw([11])
    time.sleep(0.3)
    assert world.looks == []
    world.finder.start()
    wait_for(lambda: world.told)
    assert world.looks == [(11, False)]
