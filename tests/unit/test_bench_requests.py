"""Requests of the services in PyTorch (examples/workloads/request_loop.py), and the arms of `python -m bench.latency`."""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import statistics
import sys
import threading
import time

import pytest

from bench import latency
from tests.conftest import ROOT


@pytest.fixture
def loop(monkeypatch):
    """The module as a workload imports it: from its own directory."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/workloads"))
    yield importlib.import_module("request_loop")
    sys.modules.pop("request_loop")


def test_arrivals_are_the_same_for_the_same_seed_and_poisson(loop):
    times = list(loop.arrivals(20_000, 100, 1))
    assert times == list(loop.arrivals(20_000, 100, 1))
    assert times != list(loop.arrivals(20_000, 100, 2))
    assert times == sorted(times)
    assert times[-1] <= 100e9
    gaps = [(b - a) / 1e6 for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(20, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(20, rel=0.1)  # as long as the mean


def test_a_request_that_arrives_during_another_one_waits_for_it(loop):
    out = io.BytesIO()
    n = loop.serve(lambda: time.sleep(0.05), [0, 1_000_000], out, threading.Event())
    assert n == 2
    (_, first), (at, second) = loop.RECORD.iter_unpack(out.getvalue())
    assert at == 1_000_000
    assert first >= 50e6
    assert second >= 99e6


def test_a_service_that_is_stopped_answers_no_further_requests(loop):
    stop = threading.Event()
    stop.set()
    assert loop.serve(pytest.fail, [3600 * 10**9], io.BytesIO(), stop) == 0


def test_each_number_of_services_has_its_arms_and_shares_the_guarantee():
    args = argparse.Namespace(
        mean_us=[20_000],
        services=[1, 4],
        jobs=[3],
        ways=["alone", "native", "hardware"],
        guarantees=[None, 40],
    )
    arms = [
        (way.name, load.n_services, load.n_jobs, load.guarantee)
        for way, load in latency.plan(args, latency.ArmLoad(0, 0, 1))
    ]
    assert arms == [
        (name, n, n_jobs, guarantee)
        for n in (1, 4)
        for name, n_jobs, guarantee in (
            ("alone", 0, 20),
            ("native", 3, 20),
            ("hardware", 3, 20),
            ("hardware", 3, 40),
        )
    ]


def test_every_other_round_is_reversed_and_all_rounds_count_together():
    args = argparse.Namespace(
        mean_us=[20_000],
        services=[1],
        jobs=[1],
        ways=["alone", "native"],
        guarantees=[None],
        rounds=3,
    )
    order = [(n, way.name) for n, way, _ in latency.rounds(args, latency.ArmLoad(0, 0, 1))]
    assert order == [
        *((0, "alone"), (0, "native")),
        *((1, "native"), (1, "alone")),
        *((2, "alone"), (2, "native")),
    ]
    arms = [
        {
            "arm": name,
            "jobs": n_jobs,
            "mean_us": 20_000,
            "requests_ms": [ms, ms + 1],
            "units_per_s": [units] * n_jobs,
        }
        for name, n_jobs, ms, units in (
            ("alone", 0, 1.0, 0),
            ("native", 1, 2.0, 80),
            ("native", 1, 4.0, 100),
            ("alone", 0, 3.0, 0),
        )
    ]
    alone, native = latency.summarise({"arms": arms, "solo_units_per_s": 100.0}).values()
    assert alone == {"n": 4, "mean_ms": 2.5, "p99_ms": 4.0, "jobs": []}
    assert native == {
        "n": 4, "mean_ms": 3.5, "p99_ms": 5.0, "jobs": [90.0], "jobs_from": 80.0, "jobs_to": 100.0,
    }  # fmt: skip


def test_the_guarantee_is_ten_points_more_than_requests_of_a_model_take():
    load = latency.ArmLoad(1, 10_000, 1, service="service-resnet18", request_us=2_345.6)
    assert load.guarantee == 33
    assert load._replace(mean_us=2_000).guarantee == 90
    assert load._replace(mean_us=0).guarantee == 10
