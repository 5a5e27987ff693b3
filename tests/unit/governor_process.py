"""Run a governor in a separate process with the compiled libraries of the simulated GPU: `with
GovernorNode(...) as node`.

A container is an idle process for which admission is requested as the hook requests it. `OwnTenant`
registers as one of its processes and writes into its ledger what a control library would write.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from governor.client import ask
from governor.config import Config
from governor.errors import TidegateError
from libcontrol import layout, pages

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 20.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SOON_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {SOON_S:g} s"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory, build_dir: Path) -> tuple[Path, Path]:
    """Create two simulated GPUs and the mirror of their driver."""
    base = tmp_path_factory.mktemp("g")
    for command in (
        ["simgpu", "create", "--dir", str(base / "gpu"), "--devices", "2"],
        [
            *("governor.cli", "refresh", "--output", str(base / "driver")),
            *("--library-dir", str(build_dir / "simgpu")),
            *("--control-dir", str(build_dir / "libcontrol")),
        ],
    ):
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, capture_output=True)
    return base / "gpu", base / "driver"


class GovernorNode:
    """A governor with its configuration files and its log."""

    def __init__(self, directory: Path, gpus: tuple[Path, Path], build: Path) -> None:
        self.directory = directory
        # The path of a socket must be short.
        self._short = tempfile.TemporaryDirectory(prefix="tg")
        self.config = Config(runtime_dir=f"{self._short.name}/run")
        self.file = directory / "config.yaml"
        self.drop_ins = directory / "config.d"
        self.log = directory / "log"
        self._gpu, driver = gpus
        self._build = build
        self.settings: dict[str, Any] = {
            "runtime_dir": self.config.runtime_dir,
            "state_dir": str(directory / "state"),
            "driver_dir": str(driver),
            "library_dir": str(build / "libcontrol"),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.drop_ins.mkdir()
        self.write()
        with contextlib.ExitStack() as on_failure:
            on_failure.push(self)
            self.start()
            on_failure.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        self.stop()
        self._short.cleanup()

    def write(self, **settings: Any) -> None:
        """Write config.yaml with the options that a node needs and with `settings`."""
        self.file.write_text(yaml.safe_dump({**self.settings, **settings}))

    def start(self, *program: str) -> None:
        """Start the governor, or a program that becomes it, and wait until it answers."""
        environment = {"SIMGPU_DIR": str(self._gpu), "LD_LIBRARY_PATH": str(self._build / "simgpu")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *(program or ("-m", "governor.daemon")), "--config", str(self.file)],
                cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

        def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(TidegateError):
                return bool(self.ask("ping")["ok"])
            return False

        wait_for(answers, "answer of the governor")

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(SOON_S)

    def ask(self, op: str, **fields: object) -> dict[str, Any]:
        return ask(self.config, op, **fields)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events with this name from the log."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line[:1] == "{"]
        return [line for line in lines if line["event"] == name]

    def container(self, name: str = "one", **fields: Any) -> Path:
        """Have a container admitted, confirm it, and return its directory."""
        child = subprocess.Popen(["sleep", "120"])
        self._children.append(child)
        annotations = fields.pop("annotations", {"memory": "4Gi", "compute": "40"})
        request = {
            "v": 1, "op": "admit", "id": name, "pid": child.pid, "bundle": f"/bundles/{name}", "identity": {},
            "annotations": {f"tidegate.gpu/{key}": value for key, value in annotations.items()}, **fields,
        }  # fmt: skip
        pidfd = os.pidfd_open(child.pid)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(SOON_S)
                connection.connect(f"{self.config.runtime_dir}/governor.sock")
                socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [pidfd])
                with connection.makefile("rb") as stream:
                    answer = json.loads(stream.readline())
                    if not answer["ok"]:
                        raise LookupError(answer["error"]["message"])
                    connection.sendall(b'{"v": 1, "op": "confirm"}\n')
                    assert json.loads(stream.readline())["ok"]
        finally:
            os.close(pidfd)
        return Path(answer["directory"])


class OwnTenant:
    """This process, registered as one of a container's processes."""

    def __init__(self, directory: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SOON_S)
        self.socket.connect(str(directory / "governor.sock"))
        self.socket.send(b"r")
        data, fds, _, _ = socket.recv_fds(self.socket, 4, 1)
        (self.slot,) = struct.unpack("I", data)
        self.ledger = mmap.mmap(fds[0], layout.LEDGER_SIZE)
        os.close(fds[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.ledger.close()

    def write(self, **values: int) -> None:
        """Write into the first GPU's part of the ledger and wake the arbiter."""
        for name, value in values.items():
            base = layout.ledger_device(self.slot, 0)
            pages.write(self.ledger, base, "ledger_device", name, value)
        self.socket.send(b"w")


@contextlib.contextmanager
def grant(directory: Path) -> Iterator[mmap.mmap]:
    """Map a container's grant page as the container sees it."""
    with (directory / "grant").open("rb") as file:
        page = mmap.mmap(file.fileno(), layout.GRANT_FILE_SIZE, prot=mmap.PROT_READ)
    try:
        yield page
    finally:
        page.close()


def setting(directory: Path, name: str) -> int:
    """Read one of the node's settings from a container's grant page."""
    with grant(directory) as page:
        return pages.read(page, 0, "grant_header", name)
