"""The step of tests/gpu/run that examines control groups, on the simulated GPU and with this machine's control
groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import wrapper


@pytest.mark.slow
@pytest.mark.usefixtures("build_dir")
def test_a_container_of_the_wrapper_is_identified_by_its_control_group(
    tmp_path: Path, require: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    require("runc", "gcc")
    output = tmp_path / "wrapper"
    status = wrapper.main(["--simulated", "--output", str(output)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    report = json.loads((output / "wrapper.json").read_text())
    assert report["wrong"] == []
    assert report["a process that joined the group"].startswith("accused: unregistered")
    assert len(report["processes, with one by exec"]) == 2
