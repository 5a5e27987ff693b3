"""Every suite of bench.quota, shortened, in containers on the simulated GPU: it runs, its results
are kept, and the page has a section for it.

The assertions on shares are coarse: this machine has few processors, and other programs use them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import events, quota, quota_measure, report_docs, run
from bench.arms import Arm, ArmContainer
from bench.machine import Simulated

pytestmark = pytest.mark.slow

SMALL = {
    "table7": ("thirds",),
    "sweep": ("alone-50", "alone-waits"),
    "table8": ("beside-1-launch",),
    "aggregate": ("two-500us",),
    "elastic": ("load-60", "load-60-strict"),
    "longkernels": ("long",),
    "shapes": ("shape-persistent", "shape-cooperative", "shape-graph"),
    "graphs": ("shape-graph", "decode"),
    "settle": ("settle-quota", "settle-neighbour"),
    "killed": ("killed", "stopped"),
}
NATIVE = ("aggregate", "graphs")
LONGER = ("shapes",)
"""Suites that run for longer than one second: within one second, a container that started late on
a busy machine got 17 % instead of its 30 %."""
WAITS = Arm((ArmContainer(90, 50),), settings={"hold_launches": False}, native=False)
"""An arm without held launches: launches that do not fit wait for the end of the grant, which does
not come if the grant is extended.
"""


@pytest.mark.alone
def test_sixty_four_containers_share_a_gpu(
    tmp_path: Path,
    require: Callable[..., None],
    build_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each container has 1 %, all of them want more, and all of them are served."""
    require("runc")
    memory = ["--memory", "64GiB"]
    monkeypatch.setattr(
        quota, "find_machine", lambda _, work, build: Simulated(work, build, options=memory)
    )
    common = ["--simulated", "--seconds", "8", "--solo", "1.3", "--build", str(build_dir)]
    assert quota.main([*common, "--output", str(tmp_path / "out"), "sixty-four"]) == 0
    report = json.loads((tmp_path / "out" / "quota.json").read_text())
    tenants = report["arms"]["sixty-four"]["tenants"]
    assert len(tenants) == 64
    for tenant, share in zip(tenants, report["summary"]["sixty-four"]["delivered"], strict=True):
        assert 0.5 < share < 1.5
        assert tenant["governor"]["held_ns"] < 0.02 * 8e9


@pytest.mark.alone
def test_kernels_that_outlast_their_grants_take_nothing_from_a_neighbours_share(
    tmp_path: Path, require: Callable[..., None], build_dir: Path
) -> None:
    """If overruns are not charged, kernels of 2 s at 10 % get 39 % of this GPU, and the neighbour
    gets 36 % instead of its 50 %.
    """
    require("runc")
    common = ["--simulated", "--solo", "8", "--build", str(build_dir)]
    assert quota.main([*common, "--output", str(tmp_path / "out"), "outlasts-2000ms"]) == 0
    report = json.loads((tmp_path / "out" / "quota.json").read_text())
    late, short = report["summary"]["outlasts-2000ms"]["delivered"]
    assert late < 10 + 3  # 10 % of 40 s are two of its kernels
    assert short > 50 - 3
    # The actual use is charged, and ps shows it.
    charged = report["arms"]["outlasts-2000ms"]["tenants"][0]["governor"]["charged_ns"] / 40e7
    assert charged == pytest.approx(late, abs=3)


Report = dict[str, Any]
Check = Callable[[Report], None]


@pytest.fixture(scope="module")
def measure(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[..., None], build_dir: Path
) -> Callable[..., dict[str, Report]]:
    """Return a function that runs suites, and returns the result of each."""
    require("runc")

    def run_suites(*suites: str) -> dict[str, Report]:
        base = tmp_path_factory.mktemp("suites")
        common = ["--simulated", "--times", "2", "--solo", "1.3", "--build", str(build_dir)]
        rest = [suite for suite in SMALL if suite not in (*NATIVE, *LONGER)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quota, "SUITES", SMALL)
            patch.setitem(quota.ARMS, "alone-waits", WAITS)
            for module in (quota, quota_measure):
                # Kernels of 50 ms get about 20 of their 30 % in the first second, and sometimes 15.
                patch.setattr(module, "SETTLE_S", 0.8)
            patch.setattr(quota, "SPARE_S", 0.4)
            patch.setattr(events, "PHASE_S", 0.8)
            for out, of, more in (
                ("native", NATIVE, ["--seconds", "1", "--native"]),
                ("longer", LONGER, ["--seconds", "4"]),
                ("rest", rest, ["--seconds", "1"]),
            ):
                names = [suite for suite in of if suite in suites]
                if names:
                    options = [*common, "--output", str(base / out), *more]
                    assert quota.main([*options, *names]) == 0
        found = {path.parent.name: path for path in base.glob("*/*/quota.json")}
        assert found.keys() == set(suites)
        for path in found.values():
            assert "<path" in path.with_name("quota.svg").read_text()
        return {suite: json.loads(found[suite].read_text()) for suite in suites}

    return run_suites


@pytest.fixture(scope="module")
def results(measure: Callable[..., dict[str, Report]]) -> dict[str, Report]:
    """The result of a run of each suite."""
    return measure(*SMALL)


@pytest.fixture(scope="module")
def try_twice(
    results: dict[str, Report], measure: Callable[..., dict[str, Report]]
) -> Callable[[str, Check], None]:
    """Return a function that checks the result of a suite, and if that fails, the result of a
    second run.

    Other programs on this machine may have disturbed the first run.
    """

    def check_one_of_two(suite: str, check: Check) -> None:
        try:
            check(results[suite])
        except AssertionError:
            check(measure(suite)[suite])

    return check_one_of_two


def keep(report: Report, where: Path) -> Report:
    """Return what bench.run keeps of a run."""
    where.mkdir()
    (where / "quota.json").write_text(json.dumps(report))
    out = where / "kept.json"
    arguments = ["--suite", "quota", "--from", str(where), "--out", str(out)]
    assert run.main(arguments) == 0
    kept = json.loads(out.read_text())
    assert run.result_name(kept) == f"{kept['date'][:10]}-quota-{where.name}-simulated.json"
    return kept


def test_each_suite_is_kept_and_has_a_section_of_the_page(
    results: dict[str, Report], tmp_path: Path
) -> None:
    kept = {f"x-{suite}": keep(report, tmp_path / suite) for suite, report in results.items()}
    page = report_docs.build_page(kept)
    assert sorted(page.figures) == sorted(f"{stem}.svg" for stem in kept)
    assert {one["configuration"]["quantum_ms"] for one in kept.values()} == {4.0}


@pytest.mark.parametrize("suite", SMALL)
def test_every_container_did_work(
    results: dict[str, Report], try_twice: Callable[[str, Check], None], suite: str
) -> None:
    # Decoding needs PyTorch and a GPU that computes.
    assert list(results[suite]["arms"]) == [name for name in SMALL[suite] if name != "decode"]

    def check(report: Report) -> None:
        for name, arm in report["arms"].items():
            for share in report["summary"][name]["delivered"]:
                assert share > 1, name
            for tenant in arm["tenants"]:
                assert tenant["governor"]["launches"] > 0, name

    try_twice(suite, check)


def test_a_container_alone_below_its_cap_continues_to_work(
    try_twice: Callable[[str, Check], None],
) -> None:
    """If the extension of a grant wakes no waiting launch, 3.7 % are delivered instead of 90 % (3
    to 5 % on an H200).
    """

    def check(report: Report) -> None:
        assert report["summary"]["alone-waits"]["delivered"][0] > 60

    try_twice("sweep", check)


@pytest.mark.parametrize("name", SMALL["shapes"])
def test_a_shape_of_work_gets_about_its_share(
    results: dict[str, Report], try_twice: Callable[[str, Check], None], name: str
) -> None:
    # However busy this machine is, the container does not get more than its share.
    assert results["shapes"]["summary"][name]["delivered"][0] < 30 + 12

    def check(report: Report) -> None:
        assert report["summary"][name]["delivered"][0] == pytest.approx(30, abs=12)

    try_twice("shapes", check)


def test_the_same_work_ran_without_tidegate(try_twice: Callable[[str, Check], None]) -> None:
    """Time slices ignore quotas: containers with 30 % and with 70 % get the same."""

    def check_parts(report: Report) -> None:
        native = report["summary"]["shape-graph"]["native"]["delivered"]
        assert native[0] == pytest.approx(native[1], abs=12)

    def check_sum(report: Report) -> None:
        assert report["summary"]["two-500us"]["native"]["sum"] > 60

    try_twice("graphs", check_parts)
    try_twice("aggregate", check_sum)


def test_events_fall_within_the_samples_and_shares_follow_the_events(
    results: dict[str, Report], try_twice: Callable[[str, Check], None]
) -> None:
    arms = results["settle"]["arms"]
    assert [event["share"] for event in arms["settle-quota"]["events"]] == [60, 30]
    assert [event["share"] for event in arms["settle-neighbour"]["events"]] == [30, 100] * 2
    for arm in arms.values():
        samples = len(arm["tenants"][0]["work_us"]) * arm["step_ns"]
        for event in arm["events"]:
            assert event["at_ns"] < event["until_ns"]
            assert event["until_ns"] < samples + 500_000_000

    def check(report: Report) -> None:
        # The container is lent the GPU again after the neighbour has ended.
        arm = report["arms"]["settle-neighbour"]
        work = arm["tenants"][0]["work_us"]
        # All stretches of 0.4 s are compared, because a busy machine may start and end the
        # neighbour late.
        stretches = [
            [sum(work[i : i + 40]) / 4000 for i in range(begin, end - 40)]
            for event in arm["events"][:2]
            for begin, end in [(event["at_ns"] // 10_000_000, event["until_ns"] // 10_000_000)]
        ]
        assert all(stretches)
        assert min(stretches[0]) < 60 < max(stretches[1])

    try_twice("settle", check)


def test_stalls_after_kills_and_stops_are_measured(
    results: dict[str, Report], try_twice: Callable[[str, Check], None]
) -> None:
    arms, summary = results["killed"]["arms"], results["killed"]["summary"]
    for name, arm in arms.items():
        assert len(arm["events"]) == len(summary[name]["stall"]["ms"]) == 2

    def check(report: Report) -> None:
        assert report["summary"]["killed"]["stall"]["longest_ms"] < 200

    try_twice("killed", check)
