"""The effects of a change, a kill and a stop, computed from stamps with a known result."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from bench import report_docs, report_suites
from bench.arms import ARMS, SUITES, ArmContainer
from bench.events import (
    AFTER_NS,
    BEFORE_NS,
    keep_ends,
    off_after,
    place_events,
    settle_times,
    settled_after,
    stall_of,
    stalls,
)
from bench.plot import Chart, Series, render
from bench.progress import Stamp
from bench.quota_measure import summarise

MS = 1_000_000


def steps(*stretches: tuple[int, float]) -> list[int]:
    """Return work in steps of 10 ms from stretches of (number of steps, percent of the GPU)."""
    return [round(share * 100) for n, share in stretches for _ in range(n)]


def test_a_change_is_settled_when_a_whole_window_is_within_three_points() -> None:
    # The new share holds from 50 ms after the change. The window of 100 ms then needs 90 ms more:
    # nine steps at 60 and one at 30 average 57.
    work = steps((100, 30), (5, 30), (200, 60))
    assert settled_after(work, 1000 * MS, 60, 3000 * MS) == 140 * MS


def test_a_container_that_already_has_the_new_share_is_settled_at_once() -> None:
    assert settled_after(steps((300, 60)), 1000 * MS, 60, 3000 * MS) == 0


def test_a_container_that_only_passes_the_new_share_has_not_settled() -> None:
    """The first good window alone would give 140 ms."""
    work = steps((100, 30), (5, 30), (30, 60), (20, 90), (200, 60))
    # The windows are good again when nine of ten steps are at 60 and one is at 90: 63 on average.
    assert settled_after(work, 1000 * MS, 60, 4000 * MS) == (5 + 30 + 20 + 9) * 10 * MS
    assert settled_after(work, 1000 * MS, 60, 4000 * MS, 0) == 140 * MS


def test_a_change_that_never_settles_has_no_settling_time() -> None:
    work = steps((100, 30), (200, 50))
    assert settled_after(work, 1000 * MS, 60, 3000 * MS) is None


def test_half_a_second_of_work_after_a_change_is_compared_with_the_new_share() -> None:
    assert off_after(steps((120, 30), (25, 60), (25, 50)), 1200 * MS, 60) == -5.0
    assert off_after(steps((120, 30), (49, 60)), 1200 * MS, 60) is None


def test_half_a_second_of_data_is_needed_to_find_that_a_change_settled() -> None:
    assert settled_after(steps((100, 30), (55, 60)), 1000 * MS, 60, 1550 * MS) is None
    assert settled_after(steps((100, 30), (65, 60)), 1000 * MS, 60, 1650 * MS) == 90 * MS


def settling_arm(work: list[int], *events: tuple[int, int, int]) -> dict[str, Any]:
    return {
        "script": "set",
        "tenants": [
            {**asdict(ArmContainer(30)), "unit_ns": 500_000, "work_us": work, "busy_ns": []}
        ],
        "step_ns": 10 * MS,
        "processors": {"governor": 0.05, "helpers": 0.1},
        "visitors": [],
        "events": [
            {"at_ns": at * MS, "tenant": 0, "share": share, "until_ns": until * MS}
            for at, share, until in events
        ],
    }


def test_an_arm_settles_as_late_as_its_slowest_change() -> None:
    work = steps((100, 30), (2, 30), (98, 60), (8, 60), (92, 30))
    arm = settling_arm(work, (1000, 60, 2000), (2000, 30, 3000))
    told = {"ms": [110.0, 170.0], "longest_ms": 170.0, "outside_percent": 0.0}
    assert settle_times(arm) == {
        **told, "reached_ms": [110.0, 170.0], "reached_longest_ms": 170.0, "off_points": [0.0, 0.0]
    }  # fmt: skip
    summary = summarise(arm)
    assert summary["settle"]["longest_ms"] == 170.0
    assert "1s" not in summary


def test_later_windows_that_are_off_are_counted() -> None:
    arm = settling_arm(steps((100, 30), (80, 60), (10, 80), (10, 60)), (1000, 60, 2000))
    told = settle_times(arm)
    assert told["ms"] == [90.0]
    # It settles at step 109. Of the windows up to step 200, those with two or more of their ten
    # steps at 80 are off by 4 or more: 17 windows, which end at steps 182 to 198.
    assert told["outside_percent"] == round(100 * 17 / 92, 2)


def test_a_wait_is_the_part_of_a_pause_after_the_event_less_one_unit() -> None:
    at = 5_000_000_000
    before = [Stamp(at - 2 * MS + i * MS, 0) for i in range(3)]
    after = [Stamp(at + 12 * MS + i * MS, 0) for i in range(400)]
    ends = keep_ends([*before, *after], at)
    assert ends[:5] == [-2000, 1000, 1000, 12_000, 1000]
    assert stall_of({"ends_us": ends}, MS) == (11.0, 11.0, True)
    # If a pause began before the event, only the part after the event counts as a wait.
    ends = keep_ends([*(one for one in before if one.time < at - MS), *after], at)
    assert stall_of({"ends_us": ends}, MS) == (11.0, 13.0, True)


def test_a_later_and_longer_wait_counts_too() -> None:
    at = 5_000_000_000
    stamps = [Stamp(at + i * MS, 0) for i in (-1, 4, 5, 19, *range(20, 400))]
    assert stall_of({"ends_us": keep_ends(stamps, at)}, MS) == (13.0, 13.0, True)


def test_a_container_that_never_works_again_stalls_until_the_end_of_the_observation() -> None:
    at = 5_000_000_000
    ends = keep_ends([Stamp(at - 10 * MS, 0), Stamp(at + 4 * MS, 0)], at)
    wait = AFTER_NS / MS - 4 - 1
    assert stall_of({"ends_us": ends}, MS) == (wait, wait, True)
    assert stall_of({"ends_us": []}, MS)[:2] == (
        AFTER_NS / MS - 1,
        (AFTER_NS + BEFORE_NS) / MS - 1,
    )


def test_a_container_that_was_working_did_not_have_to_wait() -> None:
    at = 5_000_000_000
    ends = keep_ends([Stamp(at + i * MS - MS // 2, 0) for i in range(-20, 400)], at)
    assert stall_of({"ends_us": ends}, MS) == (0.0, 0.0, False)


def test_only_stamps_around_the_event_are_kept() -> None:
    at = 5_000_000_000
    ends = keep_ends([Stamp(at + i * 10 * MS, 0) for i in range(-100, 100)], at)
    assert ends[0] == -50_000
    assert len(ends) == 36


def test_the_longest_stall_of_an_arm_of_kills_is_reported() -> None:
    arm = {
        "script": "kill",
        "tenants": [{"unit_ns": MS}],
        "events": [{"ends_us": [-1000, 9000, *[1000] * 300]}, {"ends_us": [-500, *[1000] * 310]}],
    }
    assert stalls(arm) == {
        "ms": [7.0, 0.0],
        "longest_ms": 7.0,
        "longest_pause_ms": 8.0,
        "at_work": 1,
    }


def test_events_are_placed_on_the_clock_of_the_gpu() -> None:
    """The GPU's clock is 7 s ahead. The neighbour's end is that of its last unit."""
    ahead, begin = 7_000 * MS, 8_000 * MS
    placed = place_events(
        [
            {"at_ns": 1500 * MS, "tenant": 0, "share": 30, "until_ns": 0, "end_of": "t9"},
            {"at_ns": 0, "tenant": 0, "share": 100, "until_ns": 4000 * MS},
        ],
        "neighbour",
        ahead_ns=ahead,
        stamps=[],
        begin=begin,
        last_of={"t9": 10_000 * MS}.__getitem__,
    )
    assert [(one["at_ns"] // MS, one["until_ns"] // MS) for one in placed] == [
        (500, 2000),
        (2000, 3000),
    ]
    [one] = place_events(
        [{"at_ns": 1500 * MS}],
        "kill",
        ahead_ns=ahead,
        stamps=[Stamp(8_499 * MS, 0), Stamp(8_502 * MS, 0)],
        begin=begin,
        last_of=str.__len__,
    )
    assert one == {"at_ns": 500 * MS, "ends_us": [-1000, 3000]}


# ---- a suite on the page ----


def arm_of(name: str, seconds: int = 2) -> dict[str, Any]:
    """Return an arm in the format of quota.json; each container got exactly its guarantee."""
    arm = ARMS[name]
    tenants = [
        {
            **asdict(tenant),
            "unit_ns": 1_000_000,
            "work_us": [tenant.compute * 100] * (100 * seconds),
            "busy_ns": [[0, seconds * 1000 * MS]] if tenant.bursts else [],
        }
        for tenant in arm.tenants
    ]
    told: dict[str, Any] = {
        "processors": {"governor": 0.05, "helpers": 0.1},
        "step_ns": 10 * MS,
        "tenants": tenants,
    }
    if arm.script:
        share = arm.tenants[0].compute
        told |= {"script": arm.script, "visitors": []}
        told["events"] = (
            [{"at_ns": 500 * MS, "tenant": 0, "share": share, "until_ns": 1900 * MS}]
            if arm.script in {"set", "neighbour"}
            else [{"at_ns": 500 * MS, "ends_us": [-1000, 4000, *[1000] * 300]}]
        )
    elif arm.native:
        told["native"] = {
            "step_ns": 100 * MS,
            "tenants": [{"compute": 0, "work_us": [9000] * 20, "busy_ns": []} for _ in tenants],
        }
    return told


def result_of(suite: str) -> dict[str, Any]:
    arms = {name: arm_of(name) for name in SUITES[suite]}
    return {
        "suite": "quota",
        "command": "python -m bench.quota",
        "date": "2026-01-02T00:00:00+00:00",
        "commit": "a" * 40,
        "machine": {"processor": "one", "cores": 2, "memory": 1 << 30, "kernel": "6"},
        "gpu": {"kind": "simulated", "name": "simulated", "driver": "1"},
        "configuration": {"generation": "1-a", "suite": suite, "quantum_ms": 4.0},
        "raw": {"arms": arms},
        "summary": {name: summarise(arm) for name, arm in arms.items()},
    }


@pytest.mark.parametrize("suite", SUITES)
def test_each_suite_has_its_text_a_table_and_a_figure(suite: str) -> None:
    page = report_docs.build_page({f"2026-01-02-quota-{suite}-simulated": result_of(suite)})
    assert report_suites.WORDS[suite] in page.text
    [(name, svg)] = page.figures.items()
    assert name == f"2026-01-02-quota-{suite}-simulated.svg"
    assert svg.count("<path") >= 1


@pytest.mark.parametrize(
    ("suite", "line"),
    [
        pytest.param(
            "table8",
            "| GPU-bound | 50.00 (+0.0 %; without 9.00) | 50.00 (+0.0 %; without 9.00) |",
            id="a target that lost nothing",
        ),
        pytest.param(
            "elastic",
            "| load-30 | 30 % / 30 % / 30 % / 30 % | 100.00 | 100.00 | +0.0 % | 100.0 % |",
            id="lending that gains nothing",
        ),
        pytest.param(
            "shapes", "| 30.00 | +0.00 | 70.00 | 9.00 / 9.00 |", id="a shape that is served"
        ),
        pytest.param("graphs", "| decode | 8,000 | 2,400 | 720 |", id="tokens a second"),
        pytest.param(
            "settle", "| 1 of 1 | 0.0 ms | 0.0 ms | 0.0 ms | 0.00 | 0.0 % |", id="settled at once"
        ),
        pytest.param("killed", "| 1 | 1 | 2.0 ms | 2.0 ms | 3.0 ms |", id="a wait of 2 ms"),
    ],
)
def test_the_page_shows_the_figures_that_follow_from_the_data(suite: str, line: str) -> None:
    assert line in report_docs.build_page({f"x-{suite}": result_of(suite)}).text


def test_a_chart_line_that_goes_back_starts_a_new_segment() -> None:
    series = Series("one", [(0, 1), (1, 2), (0, 3), (1, 4)])
    svg = render(Chart("t", "s", "d", "x", "y", [series]))
    [path] = [line for line in svg.splitlines() if line.startswith("<path")]
    assert path.count("M") == 2
    assert path.count("L") == 2
