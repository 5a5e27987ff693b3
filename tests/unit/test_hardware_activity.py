"""Test the charge of a process under hardware scheduling.

It is the process's work according to NVML's samples, which arrive later.
"""

from __future__ import annotations

import itertools

import pytest

from governor.hardware.activity import Activity, Full, Sample

MS = 1_000_000


def always(part):
    return lambda _: float(part)


def play(works, resident, *, full=None, until=3000, delay=100, tells=True, samples_each=200):
    """Run steps of 20 ms.

    `works` and `resident` map each process to a function of the time in ms, which returns the part
    of the time for which the process works, or is on the GPU. A sample is taken every
    `samples_each` ms, in whole percent, and arrives after `delay` ms. Return the charge of each
    process at each step, in ms.
    """
    activity, waiting = Activity(0), []
    charged = {pid: [] for pid in works}
    worked = 0.0
    for at in range(20, until + 1, 20):
        worked += sum(load(at - 20) * 20 for load in works.values())
        if at % samples_each == 0:
            waiting.append(Sample(at * MS, (int(100 * worked / samples_each) + 1) / 100))
            worked = 0.0
        samples = None
        if tells and activity.wants_samples(at * MS):
            samples = [
                one for one in waiting if one.at + delay * MS <= at * MS and one.at > activity.known
            ]
        times = {pid: int(there(at - 20) * 20 * MS) for pid, there in resident.items()}
        told = full(at - 20) if full else ()
        got = activity.step(at * MS, {pid: ns for pid, ns in times.items() if ns}, samples, told)
        for pid, each in charged.items():
            each.append(got.get(pid, 0) / MS)
    return charged


def alone(load, **options):
    """Run one process that is on the GPU all the time."""
    return play({7: load}, {7: always(1)}, **options)[7]


@pytest.mark.parametrize("part", [1.0, 0.6, 0.2, 0.05])
def test_a_process_that_is_alone_is_charged_its_work(part):
    charged = alone(always(part))
    assert sum(charged[100:]) == pytest.approx(part * 1000, abs=11)  # in the third second
    # The surplus charge of the first tenths is given back.
    assert sum(charged) == pytest.approx(part * 3000, abs=3 * 11)


def test_a_process_that_becomes_idle_is_charged_almost_nothing_after_a_while():
    charged = alone(lambda ms: float(ms < 1000))
    assert sum(charged[125:]) < 10  # one percent, which NVML may not have reported


def test_work_that_begins_after_a_pause_is_charged_in_full():
    charged = alone(lambda ms: float(ms < 600 or ms >= 3000), until=4000)
    assert sum(charged[150:]) == pytest.approx(1000, abs=110)
    assert sum(charged[110:150]) < 10


def test_less_work_is_charged_as_less_after_a_second():
    charged = alone(lambda ms: 1.0 if ms < 1000 else 0.3, until=5000)
    assert sum(charged) == pytest.approx(1000 + 4 * 300, abs=5 * 11)
    assert sum(charged[150:200]) == pytest.approx(300, abs=11)


def test_a_process_that_is_off_at_times_is_charged_for_the_rest():
    """The process is on the GPU for 40 of every 100 ms, and works for all of that time."""
    on = lambda ms: float(ms % 100 < 40)  # noqa: E731
    assert sum(play({7: on}, {7: on})[7]) == pytest.approx(1200, abs=1)


def test_samples_that_differ_are_charged_on_average():
    """Samples alternate between 60 and 50 %; at the highest rate, the charge would be 600 ms a second."""
    charged = alone(lambda ms: 0.6 if ms // 200 % 2 else 0.5, until=5000)
    assert sum(charged[150:]) == pytest.approx(1100, abs=25)


def test_no_process_is_given_back_more_than_it_was_charged():
    charged = alone(lambda ms: float(1000 <= ms < 1200), until=3000)
    totals = list(itertools.accumulate(charged))
    assert min(totals) >= 0
    assert totals[-1] == pytest.approx(200 + 28, abs=15)  # one percent more, as NVML rounds down


def halves():
    """Return when each of two processes is on the GPU: 60 and 40 of every 100 ms."""
    return (lambda ms: float(ms % 100 < 60), lambda ms: float(ms % 100 >= 60))


def full_of_8(ms):
    """Report the second process's turns of 40 ms when they have ended."""
    return [Full(8, 40 * MS, 0)] if ms % 100 == 80 else []


def test_pauses_are_not_attributed_to_a_process_whose_turns_end_with_their_slice():
    first, second = halves()
    charged = play({7: lambda ms: first(ms) / 3, 8: second}, {7: first, 8: second}, full=full_of_8)
    assert sum(charged[7][100:]) == pytest.approx(200, abs=15)
    assert sum(charged[8][100:]) == pytest.approx(400, abs=1)


def test_pauses_of_unknown_processes_reduce_no_charge():
    """The charge of one process is not reduced because of what the other one does."""
    first, second = halves()
    charged = play({7: lambda ms: first(ms) / 3, 8: second}, {7: first, 8: second})
    assert sum(charged[7][100:]) == pytest.approx(600, abs=1)
    assert sum(charged[8][100:]) == pytest.approx(400, abs=1)


def test_pauses_that_do_not_fit_into_the_turns_of_others_reduce_the_charge():
    """For 55 % of the time nothing ran, and the first process was on the GPU for only 40 %."""
    first, second = (lambda ms: float(ms % 100 < 40), lambda ms: float(ms % 100 >= 40))
    charged = play({7: lambda _: 0.0, 8: lambda ms: second(ms) * 0.75}, {7: first, 8: second})
    assert sum(charged[8][100:]) == pytest.approx(600 - 150, abs=15)
    assert sum(charged[7][100:]) == pytest.approx(400, abs=15)


def test_two_processes_that_always_work_are_charged_their_residency():
    """The time of a context switch, in which no kernel runs, reduces no charge."""
    charged = play({7: always(0.495), 8: always(0.495)}, {7: always(0.5), 8: always(0.5)})
    assert sum(charged[7]) == sum(charged[8]) == 1500


def test_without_samples_residency_counts():
    assert sum(alone(always(0.1), tells=False)) == 3000


def test_when_samples_stop_time_is_charged_in_full_again():
    activity = Activity(0)
    charged = []
    for at in range(20, 6001, 20):
        told = [Sample(at * MS, 0.2)] if at % 200 == 0 and at <= 2000 else None
        charged.append(activity.step(at * MS, {7: 20 * MS}, told)[7] / MS)
    assert sum(charged[60:100]) == pytest.approx(160, abs=1)
    assert charged[-100:] == [20] * 100


def test_a_missed_sample_leaves_the_charge_unchanged():
    activity = Activity(0)
    for at in range(20, 1001, 20):
        assert activity.step(at * MS, {7: 20 * MS}, None)[7] == 20 * MS
    activity.step(1020 * MS, {7: 20 * MS}, [Sample(1000 * MS, 0.5)])
    assert activity.known == 1000 * MS
    assert activity.step(1040 * MS, {7: 20 * MS}, None)[7] == 10 * MS


def test_samples_of_the_past_and_of_the_future_are_not_used():
    activity = Activity(0)
    activity.step(20 * MS, {7: 20 * MS}, None)
    assert activity.wants_samples(400 * MS)
    told = [Sample(0, 0.1), Sample(900 * MS, 0.1)]
    assert activity.step(400 * MS, {7: 380 * MS}, told) == {7: 380 * MS}
    assert activity.step(420 * MS, {7: 20 * MS}, None) == {7: 20 * MS}


@pytest.mark.parametrize(("last", "wanted"), [(394, False), (380, True)])
def test_samples_are_not_requested_if_turns_show_that_no_process_paused(last, wanted):
    """A sample is exact to 2 percent, here 8 ms; `last` is where the last full turn ends, in ms."""
    activity = Activity(0)
    turns = [Full(7, 400 * MS, 200 * MS), Full(8, 200 * MS, (400 - last) * MS)]
    activity.step(400 * MS, {7: 200 * MS, 8: 200 * MS}, None, turns)
    assert activity.wants_samples(400 * MS) == wanted


def test_a_process_that_seldom_worked_is_charged_in_full_once_it_works_all_the_time():
    """Until a sample shows that, it is charged at its earlier rate; its turns alone show no pause."""
    activity = Activity(0)
    for at in range(20, 1001, 20):
        told = [Sample(at * MS, 0.05)] if at % 200 == 0 else None
        activity.step(at * MS, {7: 20 * MS}, told)
    charged = 0
    for at in range(1020, 3021, 20):
        told = None
        if activity.wants_samples(at * MS):
            told = [Sample(at // 200 * 200 * MS, 1.0)]
        turns = [Full(7, 20 * MS, 10 * MS), Full(8, 10 * MS, 0)]
        charged += activity.step(at * MS, {7: 10 * MS, 8: 10 * MS}, told, turns)[7]
    assert charged == pytest.approx(1000 * MS, abs=30 * MS)
