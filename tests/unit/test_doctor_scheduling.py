"""Test the findings of `tidegate doctor` about how the GPUs' time is divided."""

from __future__ import annotations

from typing import Any

import pytest

from governor.config import Config
from governor.doctor import service
from governor.doctor.node import ExaminedNode
from governor.errors import GovernorError

STEERED = {"index": 0, "uuid": "GPU-1", "scheduling": "hardware", "not_steered": ""}
GRANTS = {"index": 1, "uuid": "GPU-2", "scheduling": "gate", "not_steered": ""}
REFUSED = GRANTS | {"not_steered": "time slices of 8 to 1 had no effect"}
AT_ONCE = {"id": "c1", "class": "latency", "devices": [{"uuid": "GPU-2"}]}


def find(
    monkeypatch: pytest.MonkeyPatch,
    scheduling: str,
    gpus: list[dict[str, Any]],
    *containers: dict[str, Any],
) -> list[str]:
    answers = {"gpus": {"gpus": gpus}, "list": {"containers": list(containers)}}
    monkeypatch.setattr(service, "_ask", lambda _, name: answers[name])
    node = ExaminedNode(config=Config(scheduling=scheduling))
    return [f"{one.state}: {one.found}" for one in service.scheduling(node)]


def test_what_divides_the_time_of_each_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(monkeypatch, "auto", [STEERED, GRANTS]) == [
        "ok: the hardware scheduler divides the time of GPU 0"
    ]
    assert find(monkeypatch, "auto", [GRANTS]) == ["ok: grants divide the GPUs' time"]


def test_a_gpu_that_is_not_steered_is_a_warning_only_if_steering_is_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (found,) = find(monkeypatch, "auto", [REFUSED])
    assert found == "note: GPU 1 is shared by grants: time slices of 8 to 1 had no effect"
    found, other = find(monkeypatch, "hardware", [STEERED, REFUSED])
    assert found == (
        "warning: GPU 1 is shared by grants although scheduling is hardware: "
        "time slices of 8 to 1 had no effect"
    )
    assert other == "ok: the hardware scheduler divides the time of GPU 0"
    # The file says `gate` already, but the governor still runs with its earlier setting.
    assert find(monkeypatch, "gate", [REFUSED]) == ["ok: grants divide the GPUs' time"]


def test_a_class_without_effect_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheduling, remedy in (
        ("gate", "set scheduling: auto, then systemctl restart tidegate-governor"),
        ("auto", None),  # the previous finding states why the GPU is not steered
    ):
        found = find(monkeypatch, scheduling, [GRANTS], AT_ONCE)
        assert found == [
            "note: class latency has no effect for 1 container(s) (c1), because grants divide the GPU's time"
        ]
        (finding,) = service.scheduling(ExaminedNode(config=Config(scheduling=scheduling)))
        assert finding.remedy == remedy


def test_without_a_governor_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise GovernorError("no governor answers", hint="start it")

    monkeypatch.setattr(service, "_ask", refuse)
    (found,) = service.scheduling(ExaminedNode())
    assert found.state == "note"
