"""Progress: how delivered shares are computed from stamps."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bench.progress import (
    NS_PER_MS,
    NS_PER_S,
    RECORD,
    Profile,
    Progress,
    ProgressError,
    Stamp,
    check_units,
    common_span,
    mean_abs_error_pp,
    parse_stamps,
    read_stamps,
    solo_profile,
)

MS = NS_PER_MS


def run_of(durations, *, steps, begin=0, slowdown=1):
    """Return the stamps of a job with units of `durations` in each step, each `slowdown` times as long."""
    taken = [int(d * slowdown) for _ in range(steps) for d in durations]
    times = itertools.accumulate(taken, initial=begin)
    kinds = itertools.chain([len(durations) - 1], itertools.cycle(range(len(durations))))
    return [Stamp(time, kind) for time, kind in zip(times, kinds, strict=False)]


durations = st.lists(st.integers(10_000, 2 * MS), min_size=1, max_size=8)


@given(durations, st.integers(2, 20))
def test_a_job_at_a_constant_share_gets_that_share_in_every_window(units, slowdown):
    solo = solo_profile(run_of(units, steps=20), warm_up=0)
    shared = Progress(run_of(units, steps=200 // len(units) + 1, slowdown=slowdown), solo)
    width = (shared.end - shared.begin) // 7
    shares = shared.windows(width)
    assert len(shares) == 7
    assert shares == pytest.approx([1 / slowdown] * 7, rel=1e-9)


@given(st.lists(st.integers(1_000, 3 * MS), min_size=40, max_size=200), st.integers(1, 5))
def test_a_solo_run_has_a_share_of_exactly_one(taken, kinds):
    times = list(itertools.accumulate(taken, initial=5 * NS_PER_S))
    stamps = [Stamp(time, index % kinds) for index, time in enumerate(times)]
    run = Progress(stamps, solo_profile(stamps, warm_up=0))
    assert run.share(run.begin, run.end) == pytest.approx(1, rel=1e-9)


@given(durations, st.lists(st.integers(1, 8), min_size=2, max_size=30), st.data())
def test_progress_never_decreases_and_windows_add_up(units, slowdowns, data):
    solo = solo_profile(run_of(units, steps=3), warm_up=0)
    stamps = [Stamp(100, len(units) - 1)]
    for slowdown, (kind, unit) in zip(slowdowns, itertools.cycle(enumerate(units)), strict=False):
        stamps.append(Stamp(stamps[-1].time + slowdown * unit, kind))
    run = Progress(stamps, solo)
    a, b, c = sorted(data.draw(st.tuples(*[st.integers(0, run.end + 1000)] * 3)))
    assume(a < b < c)
    assert 0 <= run.at(a) <= run.at(b) <= run.at(c)
    both = run.share(a, b) * (b - a) + run.share(b, c) * (c - b)
    assert both == pytest.approx(run.share(a, c) * (c - a), abs=1e-3)


def test_a_unit_counts_in_proportion_to_its_time_in_the_window():
    run = Progress([Stamp(0, 0), Stamp(4 * MS, 0)], Profile({0: 1.0 * MS}, 1.0, 1))
    assert run.at(1 * MS) == 0.25 * MS
    assert run.share(0, 2 * MS) == 0.25


def test_nothing_is_delivered_before_the_first_stamp_or_after_the_last():
    run = Progress([Stamp(10 * MS, 0), Stamp(11 * MS, 0)], Profile({0: 1.0 * MS}, 1.0, 1))
    assert run.share(0, 10 * MS) == 0
    assert run.share(11 * MS, 20 * MS) == 0
    assert run.windows(10 * MS, 0, 30 * MS) == [0, 0.1, 0]


def test_incomplete_windows_are_left_out():
    run = Progress(run_of([1 * MS], steps=25), Profile({0: 1.0 * MS}, 1.0, 25))
    assert run.windows(10 * MS) == [1.0, 1.0]


def test_units_with_equal_times_are_accepted():
    run = Progress([Stamp(0, 0), Stamp(0, 0), Stamp(10, 0)], Profile({0: 5.0}, 1.0, 2))
    assert run.at(10) == 10


def test_the_first_second_of_a_solo_run_is_warm_up():
    slow = run_of([2 * MS], steps=500)
    fast = run_of([1 * MS], steps=500, begin=slow[-1].time)
    assert solo_profile([*slow, *fast[1:]]).durations == {0: 1.0 * MS}


def test_one_interrupted_unit_changes_the_scale_and_not_the_kinds():
    stamps = run_of([1 * MS, 3 * MS], steps=100)
    late = [Stamp(s.time + 4 * MS, s.kind) if i > 50 else s for i, s in enumerate(stamps)]
    profile = solo_profile(late, warm_up=0)
    assert profile.scale == pytest.approx(404 / 400)
    assert profile.durations[1] / profile.durations[0] == pytest.approx(3)


def test_a_solo_run_that_is_too_short_is_an_error():
    with pytest.raises(ProgressError, match=r"1 stamp\(s\) after its first 1 s; let it run longer"):
        solo_profile([Stamp(0, 0), Stamp(NS_PER_S, 0)])


def test_a_clock_that_does_not_advance_is_an_error():
    with pytest.raises(ProgressError, match="clock does not advance"):
        solo_profile([Stamp(5, 0), Stamp(5, 0)], warm_up=0)


def test_a_unit_kind_that_is_not_in_the_solo_run_is_an_error():
    with pytest.raises(ProgressError, match="unit kind 7 is not in the solo run, which has 0, 1"):
        Progress([Stamp(0, 0), Stamp(1, 7)], Profile({0: 1.0, 1: 1.0}, 1.0, 2))


def test_a_unit_longer_than_two_milliseconds_is_an_error():
    profile = solo_profile(run_of([1 * MS, int(2.5 * MS)], steps=9), warm_up=0)
    with pytest.raises(ProgressError, match=r"unit kind 1 takes 2\.50 ms alone, above 2 ms"):
        check_units(profile)
    assert check_units(profile, limit=3 * MS) == 2.5 * MS


@given(st.lists(st.integers(0, 2**63), min_size=1).map(sorted), st.integers(0, 15))
def test_a_torn_last_record_is_left_out(times, torn):
    whole = b"".join(RECORD.pack(time, 3) for time in times)
    stamps = parse_stamps(whole + RECORD.pack(1, 1)[:torn])
    assert [stamp.time for stamp in stamps] == times


def test_a_file_is_read_as_little_endian_pairs(tmp_path):
    path = tmp_path / "job.stamps"
    path.write_bytes(bytes([1, 1, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]))
    assert read_stamps(path) == (Stamp(257, 9),)


def test_time_that_runs_backwards_is_reported_with_its_index():
    data = RECORD.pack(10, 0) + RECORD.pack(12, 0) + RECORD.pack(9, 0)
    with pytest.raises(ProgressError, match="job: stamp 2 is 3 ns before the one it follows"):
        parse_stamps(data, "job")


@pytest.mark.parametrize("data", [b"", b"torn"])
def test_a_file_without_a_stamp_is_an_error(tmp_path, data):
    path = tmp_path / "empty.stamps"
    path.write_bytes(data)
    with pytest.raises(ProgressError, match=r"empty\.stamps contains no stamp"):
        read_stamps(path)


def test_all_jobs_run_during_the_common_span():
    profile = Profile({0: 1.0 * MS}, 1.0, 1)
    one = Progress(run_of([1 * MS], steps=10), profile)
    two = Progress(run_of([1 * MS], steps=10, begin=4 * MS), profile)
    late = Progress(run_of([1 * MS], steps=10, begin=40 * MS), profile)
    assert common_span([one, two]) == (4 * MS, 10 * MS)
    with pytest.raises(ProgressError, match="never ran at the same time"):
        common_span([one, late])


def test_the_error_averages_windows_and_then_containers():
    windows = {"a": [0.44, 0.47], "b": [0.30, 0.30, 0.33]}
    assert mean_abs_error_pp(windows, {"a": 45, "b": 30}) == pytest.approx((1.5 + 1.0) / 2)


def test_a_container_without_a_window_is_an_error():
    with pytest.raises(ProgressError, match="container a has no whole window"):
        mean_abs_error_pp({"a": []}, {"a": 45})
