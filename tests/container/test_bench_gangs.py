"""bench.gangs in containers on two simulated GPUs: what it measures, and that a failing part does not affect the
others.

The assertions on shares are coarse: this machine has few processors, and other programs use them.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import gangs
from bench.gang_bench import Bench
from bench.gangs import GangPart, Keep
from bench.machine import MachineError


def run(build: Path, output: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = gangs.main(["--simulated", "--build", str(build), "--output", str(output), *arguments])
    return status, json.loads((output / "gangs.json").read_text())


@pytest.mark.slow
@pytest.mark.alone
def test_all_parts(
    build_dir: Path,
    tmp_path: Path,
    require: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require("runc")
    monkeypatch.setattr(gangs, "AWAY_S", (0.0, 0.6))
    status, report = run(build_dir, tmp_path / "out", "--seconds", "3")
    summary = report["summary"]
    assert {name: part["error"] for name, part in report["parts"].items()} == dict.fromkeys(
        gangs.PARTS
    )
    assert status == 0
    assert summary["topology"]["own"] == {"ways": {"0-1": "NV18"}, "nodes": {"0": 0, "1": 0}}
    assert [one["processes"] for one in summary["samples"]["rounds"]] == [0, 8]
    for part in ("hogs", "restart", "rivals"):
        for arm in summary[part]["arms"].values():
            for job in arm["jobs"]:
                assert (job["status"], job["wrong"]) == (0, 0), part
                assert job["checked"] > 20, part
                assert job["longest_s"] < 5, part
            for tenant in arm["tenants"]:
                assert 1 < tenant["delivered"] < tenant["compute"] + 15, (part, tenant)
    [trained] = summary["restart"]["arms"]["train"]["jobs"]
    same, of = trained["same_as_native"].split(" of ")
    assert same == of
    assert int(of) >= 1
    for tenant in summary["restart"]["arms"]["train"]["tenants"]:
        assert None not in tenant["second_s"]
    assert (tmp_path / "out/logs/governor.log").exists()


@pytest.mark.slow
@pytest.mark.alone
def test_the_gpus_own_schedulers_give_a_job_its_share_of_both_gpus_at_once(
    build_dir: Path, tmp_path: Path, require: Callable[..., None]
) -> None:
    """Each unit of the job waits for its counterpart on the other GPU, so time that the job has on
    only one of the GPUs is not delivered.
    """
    require("runc")
    parts = ("native", "hogs", "rivals")
    options = ("--scheduling", "hardware", "--seconds", "4")
    status, report = run(build_dir, tmp_path / "out", *options, *parts)
    assert (status, report["scheduling"]) == (0, "hardware")
    for part in parts[1:]:
        for arm in report["summary"][part]["arms"].values():
            for job in arm["jobs"]:
                assert (job["status"], job["wrong"]) == (0, 0), part
            for tenant in arm["tenants"]:
                assert tenant["delivered"] == pytest.approx(tenant["compute"], abs=2.5), part


def hangs(bench: Bench, keep: Keep) -> None:
    container = bench.start_hog(0, 50, 60)
    bench.node.wait_ready([container.out / "begin.ready"], 30)
    keep["far"] = "so far"
    # The limit expires here, and not while a busy machine is still starting the container.
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    time.sleep(60)


def fails(bench: Bench, keep: Keep) -> None:
    keep["began"] = True
    bench.node.stop_governor()
    raise MachineError("it is broken")


def test_a_part_that_hangs_or_fails_is_reported_and_the_next_part_runs(
    build_dir: Path,
    tmp_path: Path,
    require: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require("runc")
    parts = {
        "hangs": GangPart(hangs, 90),
        "fails": GangPart(fails, 20),
        "topology": gangs.PARTS["topology"],
    }
    monkeypatch.setattr(gangs, "PARTS", parts)
    status, report = run(build_dir, tmp_path / "out")
    assert status == 1
    hung, failed, topology = (report["parts"][name] for name in parts)
    assert hung["error"] == "PartError: hangs took more than 90 s"
    assert hung["far"] == "so far"
    assert "hog-1" in hung["outputs"]["end"]
    assert failed["error"] == "MachineError: it is broken"
    assert "governor-started" in " ".join(failed["outputs"]["end"]["governor"])
    # The governor runs again, and its GPUs have no containers.
    assert topology["error"] is None
    assert [gpu["containers"] for gpu in topology["check_json"]["gpus"]] == [0, 0]


def test_no_part_begins_when_no_time_is_left(
    build_dir: Path, tmp_path: Path, require: Callable[..., None]
) -> None:
    require("runc")
    status, report = run(build_dir, tmp_path / "out", "--limit", "9", "topology", "hogs")
    assert status == 1
    assert [part["error"] for part in report["parts"].values()] == ["no time was left"] * 2
