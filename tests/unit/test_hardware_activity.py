"""What processes are charged: as much as they work by NVML's samples of the GPU, some time afterwards."""

from __future__ import annotations

import pytest

from governor.hardware.activity import Activity, Full, Sample

MS = 1_000_000


def always(part):
    return lambda _: float(part)


def play(works, resident, *, full=None, until=3000, delay=100, tells=True, samples_each=200):
    """Step each 20 ms.

    `works` and `resident` have a function for each process: the part of the time from a ms on for which it works, and for which
    it is on the GPU. Samples are taken each `samples_each` ms, in whole percent, and come after `delay`. Returns what each process
    was charged at each step.
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
    """One process that is on the GPU all the time."""
    return play({7: load}, {7: always(1)}, **options)[7]


@pytest.mark.parametrize("part", [1.0, 0.6, 0.2, 0.05])
def test_one_that_is_alone_is_charged_what_it_works(part):
    charged = alone(always(part))
    assert sum(charged[100:]) == pytest.approx(part * 1000, abs=11)  # of the third second
    assert min(charged) >= 0  # what the first tenths were charged too much is not given back


def test_one_that_does_nothing_is_charged_hardly_anything_in_the_end():
    charged = alone(lambda ms: float(ms < 1000))
    assert sum(charged[125:]) < 10  # a percent, which NVML may not have told


def test_work_that_begins_after_a_pause_is_charged_in_full():
    charged = alone(lambda ms: float(ms < 600 or ms >= 3000), until=4000)
    assert sum(charged[150:]) == pytest.approx(1000, abs=110)
    assert sum(charged[110:150]) < 10


def test_less_work_is_charged_as_less_after_a_second():
    charged = alone(lambda ms: 1.0 if ms < 1000 else 0.3, until=4000)
    assert sum(charged[125:175]) == pytest.approx(300, abs=20)


def test_one_that_is_switched_off_for_a_part_is_charged_for_the_rest():
    """40 of each 100 ms on the GPU, and at work all the time that it is there."""
    on = lambda ms: float(ms % 100 < 40)  # noqa: E731
    assert sum(play({7: on}, {7: on})[7]) == pytest.approx(1200, abs=1)


def halves():
    """60 of each 100 ms the one is on the GPU, and 40 the other."""
    return (lambda ms: float(ms % 100 < 60), lambda ms: float(ms % 100 >= 60))


def full_of_8(ms):
    """The second one's turns of 40 ms, told of when they have ended."""
    return [Full(8, 40 * MS, 0)] if ms % 100 == 80 else []


def test_pauses_are_not_those_of_a_process_whose_turns_end_with_their_slice():
    first, second = halves()
    charged = play({7: lambda ms: first(ms) / 3, 8: second}, {7: first, 8: second}, full=full_of_8)
    assert sum(charged[7][100:]) == pytest.approx(200, abs=15)
    assert sum(charged[8][100:]) == pytest.approx(400, abs=1)


def test_pauses_that_may_be_anybodys_are_taken_off_none():
    """However the one behaves, it is not charged less for what another one does."""
    first, second = halves()
    charged = play({7: lambda ms: first(ms) / 3, 8: second}, {7: first, 8: second})
    assert sum(charged[7][100:]) == pytest.approx(600, abs=1)
    assert sum(charged[8][100:]) == pytest.approx(400, abs=1)


def test_pauses_that_have_no_room_in_the_turns_of_others_are_taken_off():
    """55 % of the time nothing ran, and the first one was there for 40 only."""
    first, second = (lambda ms: float(ms % 100 < 40), lambda ms: float(ms % 100 >= 40))
    charged = play({7: lambda _: 0.0, 8: lambda ms: second(ms) * 0.75}, {7: first, 8: second})
    assert sum(charged[8][100:]) == pytest.approx(600 - 150, abs=15)
    assert sum(charged[7][100:]) == pytest.approx(400, abs=15)


def test_two_that_always_work_are_charged_what_they_were_there_for():
    """A change of the context, in which no kernel runs, is taken off no charge."""
    charged = play({7: always(0.495), 8: always(0.495)}, {7: always(0.5), 8: always(0.5)})
    assert sum(charged[7]) == sum(charged[8]) == 1500


def test_where_nvml_tells_nothing_residency_counts():
    assert sum(alone(always(0.1), tells=False)) == 3000


def test_what_nvml_stops_telling_is_charged_in_full_again():
    activity = Activity(0)
    charged = []
    for at in range(20, 6001, 20):
        told = [Sample(at * MS, 0.2)] if at % 200 == 0 and at <= 2000 else None
        charged.append(activity.step(at * MS, {7: 20 * MS}, told)[7] / MS)
    assert sum(charged[60:100]) == pytest.approx(160, abs=1)
    assert charged[-100:] == [20] * 100


def test_a_sample_that_was_missed_leaves_what_was_charged():
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
