"""The simulated cluster follows kube-scheduler's rules, allocates nothing twice, and adds up."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import scale
from bench.scale import CLAIMS, count_requests
from kube.simulate import (
    ARMS,
    GPUS,
    MEAN_S,
    MEDIAN_S,
    MIX,
    PARTS,
    SIGMA,
    WHOLE,
    ClusterPolicy,
    PodShape,
    Scenario,
    SimulatedCluster,
    mix_for,
    simulate,
)
from tests.conftest import examples

ROOT = Path(__file__).resolve().parents[2]
SHARED = ClusterPolicy("shares", shares=True, packs=False)
PACKED = ClusterPolicy("shares, packed", shares=True, packs=True)
SMALL = Scenario(nodes=12, load=0.95, hours=1.0, warm_hours=0.2)


def cluster(nodes: int, arm: ClusterPolicy = SHARED) -> SimulatedCluster:
    return SimulatedCluster(nodes, arm, random.Random(1))  # noqa: S311


def test_the_first_gpu_with_room_for_both_amounts_is_taken() -> None:
    one = cluster(1)
    one.change(0, [0], PodShape(1, 60, 10), 0, -1)
    one.change(0, [1], PodShape(1, 10, 60), 0, -1)
    assert one.fit(0, PodShape(1, 40, 90)) == [0]
    assert one.fit(0, PodShape(1, 90, 40)) == [1]
    assert one.fit(0, PodShape(1, 50, 50)) == [2]
    assert one.fit(0, PodShape(6, WHOLE, WHOLE)) == [2, 3, 4, 5, 6, 7]
    assert one.fit(0, PodShape(7, WHOLE, WHOLE)) == []


def test_the_policy_decides_whether_the_emptier_or_the_fuller_node_is_chosen() -> None:
    for arm, chosen in ((SHARED, 2), (PACKED, 1)):
        three = cluster(3, arm)
        for node, cpu in ((0, 20_000), (1, 40_000), (2, 10_000)):
            three.change(node, [], PodShape(0, 0, 0), cpu, -1)
        found = three.choose(PodShape(1, 50, 50))
        assert found is not None
        assert found[0] == chosen


def test_as_many_feasible_nodes_are_scored_as_kube_scheduler_scores() -> None:
    assert [cluster(n)._enough for n in (50, 100, 500, 1000, 5000, 10_000)] == [100, 100, 230, 420, 500, 500]  # fmt: skip
    many = cluster(1000)
    first = many.choose(PodShape(1, 50, 50))
    assert first is not None
    assert first[0] < 420
    second = many.choose(PodShape(1, 50, 50))
    assert second is not None
    assert 420 <= second[0] < 840


def test_a_search_of_all_nodes_does_not_move_the_beginning_of_the_next() -> None:
    """kube-scheduler begins as many nodes later as it examined, which is once around the cluster."""
    many = cluster(1000)
    many.choose(PodShape(1, 50, 50))
    begin = many._next
    assert begin == 420
    assert many.choose(PodShape(9, 50, 50)) is None
    assert many._next == begin


def test_a_pod_that_shares_takes_a_whole_gpu_where_gpus_are_not_shared() -> None:
    assert cluster(1, ARMS[0]).needs(PodShape(1, 20, 30)) == PodShape(1, WHOLE, WHOLE)
    assert cluster(1, SHARED).needs(PodShape(1, 20, 30)) == PodShape(1, 20, 30)


@settings(deadline=None, max_examples=examples(20))
@given(st.integers(0, 1000), st.sampled_from(ARMS), st.floats(0.3, 1.5))
def test_nothing_is_allocated_twice(seed: int, arm: ClusterPolicy, load: float) -> None:
    kept = SimulatedCluster.change

    def change(self: SimulatedCluster, node: int, gpus, shape: PodShape, *more: int) -> None:
        kept(self, node, gpus, shape, *more)
        assert len(set(gpus)) == shape.count
        assert all(0 <= left <= WHOLE for left in (*self._compute[node], *self._memory[node]))
        assert self._cpu[node] >= 0

    SimulatedCluster.change = change  # type: ignore[method-assign]
    try:
        outcome = simulate(Scenario(nodes=4, load=load, hours=0.5, warm_hours=0.1, seed=seed), arm)
    finally:
        SimulatedCluster.change = kept  # type: ignore[method-assign]
    assert 0 <= outcome.running <= outcome.taken + 1e-9 <= 1 + 2e-9
    assert outcome.pods == len(outcome.waits)
    assert outcome.waits == sorted(outcome.waits)
    if arm.shares:
        assert outcome.running == pytest.approx(outcome.taken)


def test_pods_do_not_depend_on_the_arm_and_a_run_can_be_repeated() -> None:
    outcomes = [simulate(SMALL, arm) for arm in ARMS]
    assert len({outcome.pods for outcome in outcomes}) == 1
    again = simulate(SMALL, ARMS[2])
    assert (again.running, again.waits) == (outcomes[2].running, outcomes[2].waits)


def test_no_pod_waits_at_low_load_and_at_high_load_shares_run_more() -> None:
    # If nodes are filled evenly, pods for eight GPUs may wait while most of the cluster is free.
    for arm in (ARMS[1], ARMS[3]):
        calm = simulate(Scenario(nodes=30, load=0.3, hours=1.0, warm_hours=0.2), arm)
        assert calm.mean_wait == 0
    busy = Scenario(nodes=60, load=0.88, hours=1.0, warm_hours=0.2)
    whole, packed = (simulate(busy, arm) for arm in (ARMS[0], ARMS[3]))
    assert packed.running > whole.running + 0.03
    assert packed.mean_wait < whole.mean_wait / 2


def test_the_mix_matches_the_page() -> None:
    part = sum(PARTS) / len(PARTS) / WHOLE
    asked = {kind: weight * (kind or part) for kind, weight in MIX.items()}
    assert asked[0] / sum(asked.values()) == pytest.approx(0.281, abs=0.001)
    assert sum(MIX.values()) == pytest.approx(86.7)
    for wanted in (0.4, 0.6, 0.8):
        asked = {kind: weight * (kind or part) for kind, weight in mix_for(wanted).items()}
        assert asked[0] / sum(asked.values()) == pytest.approx(wanted)
    assert list(mix_for(1.0)) == [0]


def test_run_times_have_the_published_mean_and_median() -> None:
    import math

    draw = random.Random(3)  # noqa: S311
    lengths = sorted(draw.lognormvariate(math.log(MEDIAN_S), SIGMA) for _ in range(200_000))
    assert lengths[len(lengths) // 2] == pytest.approx(MEDIAN_S, rel=0.03)
    assert sum(lengths) / len(lengths) == pytest.approx(MEAN_S, rel=0.06)
    assert GPUS == 8


def test_the_page_agrees_with_the_results() -> None:
    subprocess.run([sys.executable, "-m", "bench.scale", "docs", "--check"], cwd=ROOT, check=True)


@pytest.mark.parametrize("mark", ["<!-- mix: python", "<!-- end of mix"])
def test_a_page_without_a_mark_is_not_written(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "scale.md"
    page.write_text(scale.PAGE.read_text().replace(mark, "<!-- other"))
    before = page.read_text()
    monkeypatch.setattr(scale, "PAGE", page)
    monkeypatch.setattr(scale, "FIGURES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["scale", "docs"])
    assert scale.main() == 1
    assert mark in capsys.readouterr().err
    assert page.read_text() == before


def test_requests_do_not_grow_with_the_number_of_nodes(tmp_path: Path) -> None:
    found = [count_requests(nodes, tmp_path / str(nodes)) for nodes in (1, 3)]
    for one in found:
        counts, nodes = one["counts"], one["nodes"]
        assert counts["create slice"] == nodes
        # One update for the loss, one for the recovery, and one for each claim except the last,
        # after which the hour ends.
        updates = 2 + CLAIMS - 1
        assert counts["update slice"] == updates * nodes
        assert counts["watch event"] == (1 + updates) * nodes
        assert counts["get claim"] == CLAIMS * nodes
        assert not {what for what in counts if "claim" in what} - {"get claim", "get claim bytes"}
