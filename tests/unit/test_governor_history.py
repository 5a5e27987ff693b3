"""Test the web page's history: the values of a step, what is dropped, and the memory bound."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from governor.history import COLUMNS, MAX_SERIES, STEP_NS, STEPS, Cut, History, Use

GPU = "GPU-00000000-0000-0000-0000-000000000001"
SECOND = 1_000_000_000
GIB = 1 << 30
ALONE = Use("key", "one", "", GPU, 0, 40, 100, GIB, 2 * GIB, 4 * GIB, 0)


def only(cut: Cut) -> dict[str, object]:
    (series,) = cut.describe()
    return series


def steps(history: History, *uses: Use, begin: int = 1) -> None:
    """Record one container at the end of each step."""
    for i, use in enumerate(uses, begin):
        history.record(i * STEP_NS, [("who", use)])


def test_a_step_has_the_use_since_the_previous_reading() -> None:
    history = History(0)
    quota = replace(ALONE, limit=60)
    steps(
        history,
        replace(quota, charged_ns=3 * SECOND),
        replace(
            quota, charged_ns=5 * SECOND, memory=2 * GIB, memory_peak=3 * GIB, refused=3, parked=GIB
        ),
        replace(quota, charged_ns=5 * SECOND, guarantee=50, memory_peak=3 * GIB, refused=3),
    )
    assert history.last == 2
    assert only(history.cut(-1)) == {
        "series": 1, "key": "key", "id": "one", "name": "", "gpu": GPU, "first": 0, "ended": False,
        "memory_peak": 3 * GIB,
        "used": [60.0, 40.0, 0.0],
        "lent": [20.0, 0.0, 0.0],
        "guarantee": [40, 40, 50],
        "limit": [60, 60, 60],
        "memory": [GIB, 2 * GIB, GIB],
        "parked": [0, GIB, 0],
        "memory_limit": [4 * GIB] * 3,
        "refused": [0, 3, 0],
    }  # fmt: skip


def test_parked_memory_is_at_most_the_memory_in_use() -> None:
    history = History(0)
    steps(history, replace(ALONE, parked=2 * GIB))
    assert (only(history.cut(-1))["memory"], only(history.cut(-1))["parked"]) == ([GIB], [GIB])


def test_use_beyond_the_guarantee_is_lent() -> None:
    history = History(0)
    steps(history, replace(ALONE, charged_ns=5 * SECOND))
    assert only(history.cut(-1))["used"] == [100.0]
    assert only(history.cut(-1))["lent"] == [60.0]
    strict = History(0)
    # A container that may not exceed its guarantee is not lent time: it only gets what it is owed.
    steps(strict, replace(ALONE, limit=40, charged_ns=5 * SECOND // 2))
    assert only(strict.cut(-1))["used"] == [50.0]
    assert only(strict.cut(-1))["lent"] == [0.0]


def test_missed_steps_share_their_use_evenly() -> None:
    history = History(0)
    history.record(STEP_NS, [("who", ALONE)])
    history.record(4 * STEP_NS + 1, [("who", replace(ALONE, charged_ns=6 * SECOND, refused=2))])
    series = only(history.cut(-1))
    assert series["used"] == [0.0, 39.99, 39.99, 39.99]
    assert series["refused"] == [0, 0, 0, 2]  # not spread: a third of one cannot be shown
    assert history.due_ns() == 5 * STEP_NS


def test_a_reading_within_a_step_changes_nothing() -> None:
    history = History(0)
    history.record(STEP_NS - 1, [("who", ALONE)])
    assert (history.last, history.due_ns(), history.cut(-1).series) == (-1, STEP_NS, [])


def test_fifteen_minutes_are_kept() -> None:
    history = History(0)
    steps(history, *[replace(ALONE, charged_ns=i * STEP_NS * i // 1000) for i in range(1, 501)])
    series = only(history.cut(-1))
    assert STEPS * STEP_NS == 15 * 60 * SECOND
    assert series["first"] == 500 - STEPS
    used = series["used"]
    assert isinstance(used, list)
    assert [round(value, 1) for value in used] == [
        round((2 * i - 1) / 10, 1) for i in range(501 - STEPS, 501)
    ]
    later = only(history.cut(497))
    assert (later["first"], later["used"]) == (498, used[-2:])
    assert only(history.cut(499))["used"] == []
    assert only(history.cut(10**12 - 1))["used"] == []


@pytest.mark.parametrize("n", [1, STEPS - 1, STEPS, STEPS + 1, 2 * STEPS, 2 * STEPS + 7])
def test_a_cut_and_the_following_one_make_up_the_whole(n: int) -> None:
    history = History(0)
    steps(history, *[replace(ALONE, memory=i) for i in range(n)])
    for since in range(n - STEPS - 1, n):
        head = [i for i in range(n) if i <= since][-STEPS:]
        tail = only(history.cut(since))["memory"]
        assert isinstance(tail, list)
        assert (head + tail)[-STEPS:] == list(range(n))[-STEPS:], since


def test_the_use_until_a_containers_end_is_recorded() -> None:
    history = History(0)
    steps(history, ALONE)
    history.part("who", replace(ALONE, charged_ns=SECOND))
    history.record(2 * STEP_NS, [])
    series = only(history.cut(-1))
    assert (series["used"], series["ended"]) == ([0.0, 20.0], True)
    history.record(3 * STEP_NS, [])
    assert only(history.cut(-1))["used"] == [0.0, 20.0]
    history.record((STEPS + 1) * STEP_NS, [])
    assert only(history.cut(-1))["used"] == [20.0]
    history.record((STEPS + 2) * STEP_NS, [])
    assert history.cut(-1).series == []


def test_a_container_that_ran_between_two_readings_is_recorded() -> None:
    history = History(0)
    history.part("who", replace(ALONE, charged_ns=SECOND))
    history.record(STEP_NS, [])
    series = only(history.cut(-1))
    assert (series["used"], series["ended"]) == ([20.0], True)


def test_a_container_that_reuses_a_name_has_a_new_series() -> None:
    history = History(0)
    for i, who in enumerate(("first", "second"), 1):
        history.record(i * STEP_NS, [(who, ALONE)])
    assert [(one["series"], one["ended"]) for one in history.cut(-1).describe()] == [
        (1, True), (2, False)
    ]  # fmt: skip


def test_ended_series_are_dropped_first() -> None:
    history = History(0)
    many = [(i, replace(ALONE, key=str(i))) for i in range(MAX_SERIES)]
    history.record(STEP_NS, many)
    history.record(2 * STEP_NS, many[2:])
    new = [("new", ALONE), ("newer", ALONE), ("newest", ALONE)]
    history.record(3 * STEP_NS, many[2:] + new)
    cut = history.cut(-1)
    assert (len(cut.series), cut.left_out) == (MAX_SERIES, 1)
    assert [about["series"] for about, _ in cut.series][-2:] == [MAX_SERIES + 1, MAX_SERIES + 2]
    history.record(4 * STEP_NS, many[2:])
    assert history.cut(-1).left_out == 0


def test_an_ended_container_is_not_counted_as_left_out() -> None:
    history = History(0)
    many = [(i, replace(ALONE, key=str(i))) for i in range(MAX_SERIES)]
    history.record(STEP_NS, many)
    history.part("brief", ALONE)
    history.record(2 * STEP_NS, many)
    assert history.cut(-1).left_out == 0
    for i in range(3 * MAX_SERIES):
        history.part(("short", i), ALONE)
    history.record(5 * STEP_NS, [])
    assert len(history.cut(-1).series) == MAX_SERIES


def test_memory_is_bounded() -> None:
    """64 containers with names of 1,024 characters, on one GPU each, take less than 1.5 MB."""
    history = History(0)
    uses = [(i, replace(ALONE, key=str(i), container=f"{i:04}" + "x" * 1020)) for i in range(64)]
    for step in range(2 * STEPS):
        history.record((step + 1) * STEP_NS, uses)
    kept = list(history._here.values())
    assert len(kept) == 64
    size = sum(sys.getsizeof(column) for series in kept for column in series.values.values()) + sum(
        sys.getsizeof(series.use.container) for series in kept
    )
    assert size < 1_500_000
    assert {len(column) for series in kept for column in series.values.values()} == {STEPS}


@given(
    st.lists(
        st.tuples(st.integers(0, 2**63), st.integers(0, 2**64 - 1), st.integers(0, 2**64)),
        min_size=1,
        max_size=8,
    )
)
def test_arbitrary_values_are_bounded(looks: list[tuple[int, int, int]]) -> None:
    history = History(0)
    now = 0
    for passed, number, other in looks:
        now += 1 + passed
        use = replace(
            ALONE,
            charged_ns=number, memory=other, memory_peak=other, refused=number, parked=number,
        )  # fmt: skip
        history.record(now, [("who", use)])
    for series in history.cut(-1).describe():
        for name, kind in COLUMNS.items():
            most = {"H": 655.35, "B": 255, "Q": 2**64 - 1, "I": 2**32 - 1}[kind]
            assert all(0 <= value <= most for value in series[name]), name
