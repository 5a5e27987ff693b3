"""The hook's line under crun, which sends what hooks write to /dev/null."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.container.bundles import Runtime
from tests.container.conftest import Node

WRONG = {"tidegate.gpu/memory": "much"}


@pytest.fixture
def crun(tmp_path: Path, require) -> Runtime:
    require("crun")
    return Runtime("crun", tmp_path / "state")


def test_the_line_is_in_crun_s_own_standard_error(node: Node, crun: Runtime) -> None:
    ran = crun.run(node.bundle("true", annotations=WRONG))
    assert ran.status != 0
    (line,) = [one for one in ran.stderr.splitlines() if one.startswith("tidegate: ")]
    assert "tidegate.gpu/memory is 'much'" in line


def test_a_log_of_crun_s_has_it_as_well(node: Node, crun: Runtime, tmp_path: Path) -> None:
    """Podman shows crun's log where that is one JSON document, and standard error where it is not."""
    bundle = node.bundle("true", annotations=WRONG)
    bundle.write()
    log = tmp_path / "log"
    log.touch()
    command = crun.command("run", "--bundle", str(bundle.path), f"tidegate-line-{os.getpid()}")
    at = command.index("--root")
    command[at:at] = ["--log-format=json", "--log", str(log)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    ours, theirs = log.read_text().splitlines()
    assert ours.startswith("tidegate: ")
    assert "error executing hook" in json.loads(theirs)["msg"]


def test_a_log_that_is_a_link_is_left_alone(node: Node, crun: Runtime, tmp_path: Path) -> None:
    bundle = node.bundle("true", annotations=WRONG)
    bundle.write()
    log, target = tmp_path / "log", tmp_path / "target"
    target.touch()
    log.symlink_to(target)
    command = crun.command("run", "--bundle", str(bundle.path), f"tidegate-link-{os.getpid()}")
    at = command.index("--root")
    command[at:at] = ["--log", str(log)]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
    assert "tidegate: " not in target.read_text()
