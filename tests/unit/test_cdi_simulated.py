"""`tidegate cdi` with a mirror of the simulated GPU's driver."""

from __future__ import annotations

import pytest

from governor import cli
from vdriver.refresh import refresh


def test_without_the_simulated_gpus_directory_it_is_asked_for(
    tmp_path, build_dir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVML alone would say that a kernel module is to be loaded, of which there is none."""
    output = tmp_path / "driver"
    refresh("/", output, build_dir / "libcontrol", driver_directories=[build_dir / "simgpu"])
    monkeypatch.delenv("SIMGPU_DIR", raising=False)
    monkeypatch.setattr("governor.daemon.SIMULATED", ("SIMGPU_DIR", tmp_path / "none"))
    assert cli.main(["cdi", "list", "--driver-dir", str(output)]) != 0
    assert capsys.readouterr().err == (
        f"tidegate: the mirror at {output}/current is of the simulated GPU's driver, and SIMGPU_DIR is"
        " not set; set SIMGPU_DIR to the directory that `python -m simgpu create` made\n"
    )
