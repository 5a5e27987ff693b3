"""bench.programs on the simulated GPU: the programs that use only the driver API, and one that shows its quota."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import images, programs

GIB = 1 << 30

TELLTALE = """
from driver_api import Cuda
from program import run


def body(program):
    cuda = Cuda()
    cuda.start()
    program.value("total", cuda.total_memory())
    print("a line of mine" if program.governed else "", flush=True)


run(body)
"""


def run(build: Path, output: Path, *names: str) -> tuple[int, dict[str, dict]]:
    status = programs.main(["--simulated", "--build", str(build), "--output", str(output), *names])
    report = json.loads((output / "programs.json").read_text())
    return status, {one["name"]: one for one in report["programs"]}


def test_programs_give_the_same_results_under_a_quota(
    build_dir: Path, tmp_path: Path, require: Callable[..., None]
) -> None:
    require("gcc", "runc")
    names = [name for name in programs.ON_SIMULATED if name not in programs.ENGINES]
    status, ran = run(build_dir, tmp_path / "out", *names)
    assert {name: one["differences"] for name, one in ran.items()} == {name: [] for name in names}
    assert status == 0
    threads, driver, forks = (ran[name] for name in ("threads", "driver", "forks"))
    assert threads["seen"]["launches"] == 2 * 320  # fills of 1 MiB pass the gate, too
    library = driver["governed"]["answer"]["notes"]["library"]
    assert library.endswith("/glibc-hwcaps/x86-64-v2/libcuda.so.1")
    assert driver["native"]["answer"]["notes"]["library"].startswith(str(build_dir))
    assert (
        "a program with an RPATH finds the same library" in driver["governed"]["answer"]["checks"]
    )
    # The process itself and a child: two contexts, of 512 MiB here, and the child's block.
    assert forks["seen"]["memory_peak"] >= 2 * (512 << 20) + (256 << 20)


@pytest.mark.slow
def test_programs_like_serving_engines_give_the_same_results_under_a_quota(
    build_dir: Path, tmp_path: Path, require: Callable[..., None]
) -> None:
    require("gcc", "runc")
    names = [name for name in programs.ENGINES if name in programs.ON_SIMULATED]
    status, ran = run(build_dir, tmp_path / "out", *names)
    assert {name: one["differences"] for name, one in ran.items()} == {name: [] for name in names}
    assert status == 0
    # Two caches of 35 %, two contexts of 512 MiB, and two tensors of 4 MiB: a third worker has no
    # room.
    peak = ran["processes"]["seen"]["memory_peak"]
    assert peak + (2 << 20) >= 2 * (8 * GIB * 35 // 100) + GIB
    assert peak <= 8 * GIB
    # Eight contexts at a time, and the memory of those that have ended is free before it is needed.
    assert ran["many"]["seen"]["memory_peak"] <= 8 * GIB


@pytest.fixture
def source(tmp_path: Path, require: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the programs, to which a test can add its own."""
    require("gcc", "runc")
    path = tmp_path / "programs"
    shutil.copytree(images.SOURCE, path)
    for module in (images, programs):
        monkeypatch.setattr(module, "SOURCE", path)
    return path


def test_a_program_that_shows_its_quota_is_reported(
    build_dir: Path,
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (source / "telltale.py").write_text(TELLTALE)
    monkeypatch.setitem(programs.PROGRAMS, "telltale", programs.ProgramKind(60))
    status, ran = run(build_dir, tmp_path / "out", "telltale")
    assert status == 1
    assert ran["telltale"]["differences"] == [
        f"value “total” is {16 * GIB} in the native run, {8 * GIB} in the governed run",
        "new line: a line of mine",
        "the governor counted 0 launches, but there were at least 1",
    ]
    assert "telltale: new line: a line of mine" in capsys.readouterr().out


def test_a_program_that_hangs_is_ended_in_both_runs_and_the_next_one_runs(
    build_dir: Path,
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (source / "hangs.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setitem(programs.PROGRAMS, "hangs", programs.ProgramKind(1))
    status, ran = run(build_dir, tmp_path / "out", "hangs", "threads")
    assert status == 1
    assert ran["hangs"]["differences"][:2] == [
        "the native run did not end within its time limit",
        "the governed run did not end within its time limit",
    ]
    assert ran["threads"]["differences"] == []
