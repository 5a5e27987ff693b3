"""The figures of bench.quota follow from its raw data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench import report_docs, run
from bench.arms import ARMS, SUITES, ArmContainer, strict
from bench.events import SAMPLE_NS
from bench.machine import MachineError, burner_command
from bench.node import BenchNode
from bench.progress import Profile, Progress, Stamp
from bench.provenance import describe_run
from bench.quota import group, main, process_tree, processor_time, processor_times, try_arm
from bench.quota_measure import spans_of, summarise, waits, windows, work
from bench.report_quota import describe_arm, row_of
from governor.config import Config

MS = 1_000_000


def arm(
    *shares: tuple[int, list[int]], busy: list[list[list[int]]] | None = None
) -> dict[str, Any]:
    spans = busy or [[] for _ in shares]
    return {
        "tenants": [
            {"compute": compute, "work_us": done, "busy_ns": own}
            for (compute, done), own in zip(shares, spans, strict=True)
        ]
    }


def test_windows_are_percent_of_the_gpu() -> None:
    assert windows([1000, 2000, 3000, 4000, 5000], 2 * SAMPLE_NS) == [15.0, 35.0]


def test_errors_are_distances_from_the_quota_in_points() -> None:
    told = summarise(arm((40, [4000] * 100), (50, [6000] * 100)))
    assert told["delivered"] == [40.0, 60.0]
    assert told["sum"] == 100.0
    assert told["1s"] == {"mean": 5.0, "p95": 10.0}


def test_a_run_that_is_shorter_than_a_window_has_no_error() -> None:
    assert "1s" not in summarise(arm((40, [4000] * 20)))


def test_the_ideal_uses_the_gpu_whenever_a_container_has_work() -> None:
    # One container has work for 2 s, and the other for the second of these seconds and one more:
    # 3 s in all.
    busy = [[[0, 2000 * MS]], [[1000 * MS, 3000 * MS]]]
    one = [10_000] * 100 + [5000] * 100 + [0] * 100
    two = [0] * 100 + [5000] * 100 + [10_000] * 100
    told = summarise(arm((50, one), (50, two), busy=busy))
    assert (told["of_ideal"], told["short_windows"]) == (1.0, 0)
    short = [0] * 100 + [4800] * 100 + [10_000] * 100
    assert summarise(arm((50, one), (50, short), busy=busy))["short_windows"] == 1


def test_a_burst_begins_with_its_first_unit_and_ends_with_its_last() -> None:
    stamps = [Stamp(at, 0) for at in (10, 20, 30, 500, 510, 520)]
    assert spans_of(stamps, [[0, 2], [3, 5], [6, 9]], 10) == [[0, 30], [460, 520]]


def test_a_unit_that_spans_two_steps_is_divided_between_them() -> None:
    stamps = [Stamp(i * 3 * MS, 0) for i in range(100)]
    run = Progress(stamps, Profile({0: 1.5 * MS}, 1.0, 100))
    done = work(run, 0, 10 * SAMPLE_NS)
    assert len(done) == 10
    assert sum(done) == 50_000
    assert set(done) == {5000}


def test_arms_with_the_same_settings_share_a_governor() -> None:
    arms = {"a": strict(10), "b": strict(20)}
    assert group(arms) == [({}, ["a", "b"])]


@pytest.mark.parametrize("name", ARMS)
def test_no_arm_guarantees_more_than_the_whole_gpu(name: str) -> None:
    arm = ARMS[name]
    at_once = arm.times if arm.script == "kill" else 1
    visitors = at_once * sum(tenant.compute for tenant in arm.visitors)
    raised = arm.tenants[0].compute if arm.script == "set" else 0
    assert sum(tenant.compute for tenant in arm.tenants) + visitors + raised <= 100


def test_all_suites_run_with_one_configuration() -> None:
    """A suite that needs a special quantum proves nothing."""
    assert {json.dumps(dict(ARMS[arm].settings)) for arms in SUITES.values() for arm in arms} == {
        "{}"
    }


def test_lending_is_compared_on_the_same_bursts() -> None:
    for name in SUITES["elastic"][::2]:
        work = [
            [(tenant.bursts, tenant.duty, tenant.compute) for tenant in ARMS[one].tenants]
            for one in (name, f"{name}-strict")
        ]
        assert work[0] == work[1]
        assert {tenant.limit for tenant in ARMS[f"{name}-strict"].tenants} == {None}
        assert {tenant.limit for tenant in ARMS[name].tenants} == {100}


def test_the_burners_command_defines_the_unit() -> None:
    assert burner_command("b", "burner-500", {}) == ["b", "--unit-us", "500"]
    assert burner_command("b", "burner-500-null", {}) == [
        "b", "--unit-us", "500", "--stream", "null",
    ]  # fmt: skip
    assert burner_command("b", ArmContainer(30, form="graph").job, {"burner-500-graph": "7"}) == [
        "b", "--unit-us", "500", "--form", "graph", "--iterations", "7",
    ]  # fmt: skip


def test_suites_and_arms_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "settle: settle-quota settle-neighbour" in lines
    assert "thirds" in lines


def test_a_tenant_determines_the_burners_options() -> None:
    tenant = ArmContainer(30, 1000, gap_us=500, bursts=3)
    assert tenant.job == "burner-1000"
    assert tenant.options == [
        "--depth", "64", "--gap-us", "500", "--bursts", "3", "--duty", "70",
    ]  # fmt: skip


def test_processor_time_covers_a_process_and_its_threads() -> None:
    # The program works for longer than the test needs: the kernel accounts in whole ticks,
    # separately for user and system time.
    code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as child:
        assert child.pid in process_tree(os.getpid())
        while processor_time(child.pid) < 0.2:
            assert child.poll() is None
        assert processor_time(child.pid, "no-such-thread") == 0
        [(name, seconds)] = processor_times(child.pid).items()
        assert name == (Path("/proc") / str(child.pid) / "comm").read_text().strip()
        assert seconds >= 0.2
        child.communicate(b"\n")


def told_arm(**tenant: Any) -> dict[str, Any]:
    """Return an arm in the format of quota.json; its one container works for a whole second."""
    one = {**asdict(ArmContainer(40)), "work_us": [4000] * 100, "busy_ns": [], **tenant}
    return {
        "processors": {"governor": 0.05, "helpers": 0.1},
        "step_ns": SAMPLE_NS,
        "tenants": [one],
    }


def test_a_row_has_the_tenants_their_work_and_their_distance_from_the_quota() -> None:
    arm = told_arm()
    assert row_of("alone", arm, summarise(arm)) == (
        "alone", "40 %, 0.5 ms", "40.00", "40.00", "0.00 / 0.00", "0.00 / 0.00", "", "5.0 + 10.0",
    )  # fmt: skip
    arm = told_arm(limit=100, bursts=7, gap_us=300, busy_ns=[[0, 1000 * MS]])
    *_, error, _, ideal, _ = row_of("elastic", arm, summarise(arm))
    assert (error, ideal) == ("", "40.0 %, 0 short")
    arm["tenants"] *= 3
    assert list(describe_arm(arm)) == [
        "3 x 40 to 100 %, 0.5 ms and a pause of 0.3 ms in bursts, 70 % of the time"
    ]


def test_a_result_whose_figures_do_not_follow_from_its_samples_is_not_kept(tmp_path: Path) -> None:
    arm = told_arm()
    report = {
        "arms": {"alone-40": arm},
        "gpu": {"kind": "simulated", "name": "simulated", "driver": "1"},
        "generation": "1-a",
        "run": {**describe_run(), "command": "python -m bench.quota"},
        "summary": {"alone-40": summarise(arm)},
    }
    keep = ["--suite", "quota", "--from", str(tmp_path), "--out", str(tmp_path / "kept.json")]
    report["summary"]["alone-40"]["sum"] += 1
    (tmp_path / "quota.json").write_text(json.dumps(report))
    assert run.main(keep) == 1
    report["summary"]["alone-40"]["sum"] -= 1
    (tmp_path / "quota.json").write_text(json.dumps(report))
    assert run.main(keep) == 0
    page = report_docs.build_page({"one": json.loads((tmp_path / "kept.json").read_text())})
    assert "| alone-40 | 40 %, 0.5 ms | 40.00 |" in page.text


class LeftNode(BenchNode):
    def __init__(self) -> None:
        self.n_cleared = 0

    def clear(self) -> None:
        self.n_cleared += 1


@pytest.mark.parametrize(
    ("left_by", "said"),
    [
        (lambda: time.sleep(30), "PartError: alone-40 took more than 0.2 s"),
        (lambda: one_fails("it is broken"), "MachineError: it is broken"),
    ],
)
def test_an_arm_that_hangs_or_fails_does_not_end_the_run(
    left_by: Callable[[], object],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("bench.quota.run_arm", lambda *_: left_by())
    node = LeftNode()
    arguments = Namespace(limit=0.2, native=False)
    assert try_arm(node, "alone-40", ARMS["alone-40"], {}, arguments) is None
    assert node.n_cleared == 1
    assert said in capsys.readouterr().out


def test_an_arm_that_fails_ends_a_run_without_a_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.quota.run_arm", lambda *_: one_fails("it is broken"))
    with pytest.raises(MachineError, match="it is broken"):
        try_arm(LeftNode(), "alone-40", ARMS["alone-40"], {}, Namespace(limit=0.0, native=False))


def one_fails(why: str) -> None:
    raise MachineError(why)


def test_waits_are_the_gaps_between_units_beyond_their_own_time() -> None:
    profile = Profile({0: MS, 1: 3 * MS}, 1.0, 10)
    times, now = [(5 * MS, 0)], 5 * MS
    for wait, kind in [(0, 0), (10, 1), (0.4, 0), (20, 0), (0, 1)]:
        now += round(wait * MS) + (3 if kind else 1) * MS
        times.append((now, kind))
    stamps = [Stamp(*one) for one in times]
    found = waits(stamps, profile, 0, now)
    assert found == {"n": 2, "p50_us": 10_000, "p99_us": 20_000, "most_us": 20_000}
    # Waits that begin or end outside of the window do not count.
    assert waits(stamps, profile, 6 * MS, now)["n"] == 2
    assert waits(stamps, profile, 7 * MS, now)["n"] == 1
    assert waits(stamps, profile, 0, 0) == {"n": 0, "p50_us": 0, "p99_us": 0, "most_us": 0}


def test_an_arm_of_the_gpus_own_scheduler_fails_if_grants_divided_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = object.__new__(BenchNode)
    node.settings, node.config = {"scheduling": "hardware"}, Config()
    gpu: dict[str, object] = {"index": 0, "scheduling": "hardware", "not_steered": ""}
    monkeypatch.setattr("bench.node.ask", lambda *_: {"gpus": [gpu]})
    node.check_scheduling()
    gpu |= {"scheduling": "gate", "not_steered": "the trace of context switches: NV_ERR_TIMEOUT"}
    with pytest.raises(MachineError, match="grants divided the time of GPU 0: the trace of con"):
        node.check_scheduling()
    node.settings = {}
    node.check_scheduling()
