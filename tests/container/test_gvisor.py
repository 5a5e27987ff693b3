"""gVisor's runsc in the place of runc, by a stand-in (runsc.py): a container that asks for a GPU is refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.container.bundles import HOOK, Runtime
from tests.container.conftest import Node
from tests.container.test_runtime import Wrapped, plain, write_settings

WRAPPER = HOOK.with_name("tidegate-runtime")
REFUSAL = (
    "tidegate: the runtime {} (gVisor) is not supported: its containers have a kernel of their own, which no mount and"
    " no device of the host's reaches; start containers that ask for a GPU with runc or crun\n"
)


@pytest.fixture
def runsc(tmp_path: Path) -> Path:
    path = tmp_path / "runsc"
    shutil.copy(Path(__file__).with_name("runsc.py"), path)
    path.chmod(0o755)
    return path


def test_the_hook_says_that_runsc_is_not_supported(node: Node, runsc: Path, tmp_path: Path) -> None:
    ran = Runtime(str(runsc), tmp_path / "state").run(node.bundle("true"))
    assert ran.status == 1
    assert ran.stderr.endswith(f"stderr: {REFUSAL.format('runsc')}\n")
    (failed,) = node.events()
    assert failed["code"] == "bundle"
    assert node.governor.requests == []


def test_the_hook_lets_runsc_start_what_asks_for_nothing(
    node: Node, runsc: Path, tmp_path: Path
) -> None:
    ran = Runtime(str(runsc), tmp_path / "state").run(node.bundle("true", annotations={}))
    assert (ran.status, ran.stderr) == (0, "")


@pytest.fixture
def wrapped(node: Node, runsc: Path, tmp_path: Path) -> Wrapped:
    (tmp_path / "dev").mkdir()
    wrapper = Wrapped("runsc", tmp_path / "state")
    wrapper.program = WRAPPER
    wrapper.settings = tmp_path / "runtime.conf"
    write_settings(wrapper.settings, node, tmp_path / "dev", str(runsc))
    return wrapper


def test_the_wrapper_says_so_before_runsc_starts(node: Node, runsc: Path, wrapped: Wrapped) -> None:
    ran = wrapped.run(plain(node, "true"))
    assert (ran.status, ran.stderr) == (66, REFUSAL.format(runsc))
    assert node.governor.requests == []


def test_the_wrapper_lets_runsc_start_what_asks_for_nothing(node: Node, wrapped: Wrapped) -> None:
    ran = wrapped.run(plain(node, "true", {"tidegate.example/x": "1"}))
    assert (ran.status, ran.stderr) == (0, "")
