"""The parts of the container tier that are built once (tools, a mirror, a root file system to copy), and a node
for each test.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.container.bundles import (
    HOOK,
    ROOT,
    DiskBundle,
    Runtime,
    add_hook,
    base_config,
    make_mirror,
    make_rootfs,
)
from tests.container.stub_governor import StubGovernor


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, require: Callable[..., None]) -> Path:
    """A directory with `rootfs`, and with the mirror in `node/driver`."""
    require("gcc", "runc", "ldconfig")
    # Compile the hook's modules, as an installation does: otherwise the first hook writes bytecode next to them, and a
    # normal start does not.
    code = ["-I", "-m", "compileall", "-q", HOOK.parent]
    subprocess.run(["/usr/bin/python3", *code], check=True)
    base = tmp_path_factory.mktemp("made")
    make_mirror(base / "driver")
    make_rootfs(base / "rootfs", base / "tools")
    return base


@dataclass
class HookNode:
    """A node: a driver mirror, a runtime directory with a governor, a log of the hook, and bundles."""

    base: Path
    made: Path
    governor: StubGovernor
    timeout: float = 10.0
    program: Path = HOOK

    @property
    def driver_dir(self) -> Path:
        return self.base / "driver"

    @property
    def log(self) -> Path:
        return self.base / "hook.log"

    @property
    def hook(self) -> list[str]:
        return [
            str(self.program),
            "--runtime-dir",
            str(self.base / "run"),
            "--driver-dir",
            str(self.driver_dir),
            "--module-version",
            str(self.base / "module-version"),
            "--log",
            str(self.log),
            "--timeout",
            str(self.timeout),
        ]

    def bundle(
        self,
        command: str,
        *,
        stage: str = "createRuntime",
        annotations: dict[str, str] | None = None,
        name: str = "bundle",
    ) -> DiskBundle:
        """Make a bundle with a copy of the root file system and with the hook registered."""
        path = self.base / name
        path.mkdir()
        subprocess.run(["cp", "-a", str(self.made / "rootfs"), str(path / "rootfs")], check=True)
        wanted = {"tidegate.gpu/memory": "8Gi", "tidegate.gpu/compute": "50"}
        bundle = DiskBundle(
            path,
            path / "rootfs",
            base_config(command, annotations=wanted if annotations is None else annotations),
        )
        add_hook(bundle.config, self.hook, stage=stage)
        return bundle

    def own_mirror(self) -> Path:
        """Copy the mirror, so that the test may damage it; return the generation."""
        self.driver_dir.unlink()
        shutil.copytree(self.made / "driver", self.driver_dir, symlinks=True)
        return self.driver_dir / (self.driver_dir / "current").readlink()

    def events(self) -> list[dict[str, Any]]:
        """Return what the hook logged."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def node(tmp_path: Path, made_once: Path) -> Iterator[HookNode]:
    (tmp_path / "driver").symlink_to(made_once / "driver")
    governor = StubGovernor(tmp_path / "run")
    yield HookNode(tmp_path, made_once, governor)
    governor.wait_idle()
    governor.close()
    assert governor.misfits == []  # every request of the hook follows the protocol


def as_the_unit() -> list[str]:
    """Return a command prefix that limits a program to the privileges of the fork server's unit."""
    unit = (ROOT / "packaging/systemd/tidegate-forkserver.service").read_text()
    lines = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    kept = [name.removeprefix("CAP_").lower() for line in lines for name in line.split()]
    assert "sys_admin" in kept
    return ["setpriv", "--no-new-privs", f"--bounding-set=-all,+{',+'.join(kept)}"]


FORKSERVER = HOOK.with_name("tidegate-forkserver")


class ForkServer:
    """The fork server of a node, with the code of this checkout or a copy of it."""

    def __init__(
        self,
        runtime_dir: Path,
        program: Path = FORKSERVER,
        *,
        under: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.socket = runtime_dir / "forkserver.sock"
        self.process = subprocess.Popen(
            [*under, *as_the_unit(), str(program), "--runtime-dir", str(runtime_dir)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (environment or {}),
        )
        deadline = time.monotonic() + 30
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(self.process)
            on_failure.callback(self.process.kill)
            while not self.socket.exists():
                assert self.process.poll() is None, self.process.communicate()[1]
                assert time.monotonic() < deadline, "the fork server is not listening"
                time.sleep(0.01)
            on_failure.pop_all()

    def stop(self) -> None:
        """Stop the server as systemd does, and require a clean end."""
        self.process.terminate()
        _, errors = self.process.communicate(timeout=40)
        assert (self.process.returncode, errors) == (0, "")


@pytest.fixture
def fronts(build_dir: Path) -> Path:
    """The directory with the C programs that runtimes and engines execute."""
    return build_dir / "oci_hook/front"


@pytest.fixture
def forkserver(node: HookNode) -> Iterator[ForkServer]:
    """A fork server on the node."""
    server = ForkServer(node.base / "run")
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.fixture(params=["runc", "crun"])
def runtime(
    request: pytest.FixtureRequest, tmp_path: Path, require: Callable[..., None]
) -> Runtime:
    require(request.param)
    return Runtime(request.param, tmp_path / "state")


@pytest.fixture
def runc(tmp_path: Path, require: Callable[..., None]) -> Runtime:
    require("runc")
    return Runtime("runc", tmp_path / "state")
