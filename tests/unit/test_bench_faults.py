"""A benchmark that fails part of the way: it says why in one line, and leaves nothing behind."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Self

import pytest

from bench import parking, suspension
from bench.machine import MachineError
from bench.report import ReportedGpu


class FakeImage:
    """A machine that counts how often it is closed."""

    made: list[FakeImage]
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed
    python = "python3"

    def __init__(self, work: Path, _build: Path, _tools: Path) -> None:
        self.work = work
        self.closed = 0
        self.programs: list[Path] = []
        FakeImage.made.append(self)

    def close(self) -> None:
        self.closed += 1


class FakeNode:
    """A node that closes its machine unless it is to keep it."""

    def __init__(self, machine: FakeImage, *, keep_machine: bool = False, **_: Any) -> None:
        self.machine = machine
        self._keep = keep_machine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keep:
            self.machine.close()


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeImage.made = []
    for module in (parking, suspension):
        monkeypatch.setattr(module, "SimulatedImage", FakeImage)
        monkeypatch.setattr(module, "BenchNode", FakeNode)
        monkeypatch.setattr(
            module, "name_gpu", lambda _: ReportedGpu("simulated", "SIM", "999.10.1")
        )


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_machine_is_closed_once_whichever_part_fails(
    failing: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(_node: FakeNode, part: str, _args: object) -> dict[str, Any]:
        if part == parking.PARTS[failing]:
            raise MachineError("a holder failed")
        return {}

    monkeypatch.setattr(parking, "measure_part", measure)
    parts = ",".join(parking.PARTS)
    assert parking.main(["--simulated", "--parts", parts, "--output", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "parking: a holder failed\n"
    assert [one.closed for one in FakeImage.made] == [1]


@pytest.mark.parametrize("benchmark", [parking, suspension])
def test_a_program_that_fails_is_reported_in_one_line(
    benchmark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(*_: object) -> None:
        raise subprocess.CalledProcessError(3, ["holder.py"])

    monkeypatch.setattr(benchmark, "measure_native", measure)
    assert benchmark.main(["--simulated", "--output", str(tmp_path / "out")]) == 1
    name = benchmark.__name__.partition(".")[2]
    expected = f"{name}: Command '['holder.py']' returned non-zero exit status 3.\n"
    assert capsys.readouterr().err == expected
    assert [one.closed for one in FakeImage.made] == [1]
