"""The hook's error line under crun, which sends the output of hooks to /dev/null."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.container.bundles import Runtime
from tests.container.conftest import HookNode

WRONG = {"tidegate.gpu/memory": "much"}


@pytest.fixture
def crun(tmp_path: Path, require) -> Runtime:
    require("crun")
    return Runtime("crun", tmp_path / "state")


def test_the_line_is_in_the_standard_error_of_crun(node: HookNode, crun: Runtime) -> None:
    ran = crun.run(node.bundle("true", annotations=WRONG))
    assert ran.status != 0
    (line,) = [one for one in ran.stderr.splitlines() if one.startswith("tidegate: ")]
    assert "tidegate.gpu/memory is 'much'" in line


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("name", ["crun", "runc"])
def test_a_child_of_the_fork_server_recognises_crun_from_its_caller(
    node: HookNode, fronts: Path, tmp_path: Path, name: str
) -> None:
    """A shell stands in for the runtime, because the tests run crun in a mount namespace, which
    the server does not serve.
    """
    bundle = node.bundle("true", annotations=WRONG)
    bundle.write()
    node.program = fronts / "tidegate-hook"
    state = {"ociVersion": "1.0", "id": "one", "pid": os.getpid(), "bundle": str(bundle.path)}
    (tmp_path / "state.json").write_text(json.dumps({**state, "annotations": WRONG}))
    script = '"$@" 2>/dev/null <"$0"; exit $?'
    ran = subprocess.run(
        ["bash", "-c", f"exec -a {name} bash -c '{script}' \"$@\"", "bash",
         str(tmp_path / "state.json"), *node.hook, "createRuntime"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 64
    assert ran.stderr.count("tidegate: ") == (name == "crun")


def test_the_log_of_crun_contains_it_too(node: HookNode, crun: Runtime, tmp_path: Path) -> None:
    """Podman shows crun's log if that is one JSON document, and otherwise standard error."""
    bundle = node.bundle("true", annotations=WRONG)
    bundle.write()
    log = tmp_path / "log"
    log.touch()
    command = crun.command("run", "--bundle", str(bundle.path), f"tidegate-line-{os.getpid()}")
    at = command.index("--root")
    command[at:at] = ["--log-format=json", "--log", str(log)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    hook_line, crun_line = log.read_text().splitlines()
    assert hook_line.startswith("tidegate: ")
    assert "error executing hook" in json.loads(crun_line)["msg"]


def test_a_log_that_is_a_link_is_left_alone(node: HookNode, crun: Runtime, tmp_path: Path) -> None:
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
