"""`tidegate cdi` with a mirror of the simulated GPU's driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from governor import cli
from simgpu import simgpu
from tests.conftest import lack
from vdriver.refresh import refresh


def test_a_missing_simgpu_dir_is_reported_with_a_remedy(
    tmp_path, build_dir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVML's own error would mention a kernel module, which simulated GPUs do not have."""
    output = tmp_path / "driver"
    refresh("/", output, build_dir / "libcontrol", driver_directories=[build_dir / "simgpu"])
    monkeypatch.delenv("SIMGPU_DIR", raising=False)
    monkeypatch.setattr("governor.daemon.SIMULATED", ("SIMGPU_DIR", tmp_path / "none"))
    assert cli.main(["cdi", "list", "--driver-dir", str(output)]) != 0
    assert capsys.readouterr().err == (
        f"tidegate: the mirror at {output}/current holds the simulated GPU's driver, but SIMGPU_DIR is"
        " not set; set SIMGPU_DIR to the directory that `python -m simgpu create` made\n"
    )


def test_a_directory_without_gpus_is_named_and_nothing_is_loaded(
    tmp_path: Path,
    build_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "driver"
    refresh("/", output, build_dir / "libcontrol", driver_directories=[build_dir / "simgpu"])
    monkeypatch.setenv("SIMGPU_DIR", str(tmp_path / "typo"))
    assert cli.main(["cdi", "list", "--driver-dir", str(output)]) != 0
    assert capsys.readouterr().err == (
        f"tidegate: {tmp_path}/typo has no simulated GPU; set SIMGPU_DIR to the directory that"
        " `python -m simgpu create` made\n"
    )


def test_the_specification_mounts_the_simulated_gpus_directory(
    tmp_path: Path, build_dir: Path
) -> None:
    output, gpus = tmp_path / "driver", tmp_path / "gpus"
    refresh("/", output, build_dir / "libcontrol", driver_directories=[build_dir / "simgpu"])
    simgpu.create(gpus, devices=1)
    done = subprocess.run(
        [sys.executable, "-m", "governor.cli", "cdi", "generate", "--driver-dir", output],
        env={**os.environ, "SIMGPU_DIR": str(gpus)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["containerEdits"]["mounts"] == [
        {
            "hostPath": str(gpus),
            "containerPath": "/dev/tidegate-simgpu",
            "options": ["rbind", "rw"],
        }
    ]


@pytest.mark.parametrize("words", [["cdi", "list"], ["verify"]])
def test_a_mirror_that_the_user_may_not_read_is_reported_in_one_line(
    tmp_path: Path, words: list[str]
) -> None:
    if os.geteuid():
        lack("needs root")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    root = Path(__file__).resolve().parents[2]
    # The checkout may be below a directory that only root can enter: import everything before the
    # process changes its user.
    script = (
        "import os, sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "import governor.cli, governor.verbs.cdi, governor.verbs.verify, vdriver.verify, governor.daemon\n"
        "import vdriver.nvml\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(governor.cli.main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, root, *words, "--driver-dir", closed / "driver"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == f"tidegate: {closed}/driver/current: Permission denied; run it as root\n"
    assert done.returncode == os.EX_NOPERM
