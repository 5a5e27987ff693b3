"""A node with the real driver process, between stand-ins for the API server, the kubelet and the
governor.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kube.resync import SEARCH_DELAYS_S
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.documents import NODE
from tests.kubernetes.governor import GovernorStandIn
from tests.kubernetes.kubelet import Kubelet, wait_for

ROOT = Path(__file__).resolve().parent.parent.parent


class Stand:
    """The environment of a driver on a node, and the driver after its start."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.api = ApiServer(base, NODE)
        self.governor = GovernorStandIn(base / "run")
        self.kubelet = Kubelet(base / "kubelet")
        self.cdi = base / "cdi"
        self.ready = base / "ready"
        self.log = base / "driver.log"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *more: str) -> list[str]:
        """Return the driver's command line."""
        return [
            sys.executable, "-m", "kube.main",
            "--node-name", NODE,
            "--kubeconfig", str(self.api.kubeconfig),
            "--runtime-dir", str(self.base / "run"),
            "--kubelet-dir", str(self.kubelet.directory),
            "--cdi-dir", str(self.cdi),
            "--ready-file", str(self.ready),
            "--look-every", "0.3",
            *more,
        ]  # fmt: skip

    def start(self, *more: str, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start the driver; `before` precedes it on the command line."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*before, *self.command(*more)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.process

    def up(self, *more: str) -> None:
        """Start the driver, have the kubelet register it, and wait until it is ready."""
        self.start(*more)
        self.kubelet.register()
        wait_for(self.ready.exists, f"ready\n{self.text()}")

    def await_searches(self) -> None:
        """Wait for the last search for waiting pods that the only registration causes.

        If the machine is busy, one search may replace several.
        """
        last = self.kubelet.registered + SEARCH_DELAYS_S[-1]
        wait_for(
            lambda: self.api.latest.get(("list", "pods"), 0.0) >= last, "the last look at pods"
        )
        assert self.api.counts()["list", "pods"] <= len(SEARCH_DELAYS_S)

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal to the driver, wait for its end, and return its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(15)
        self.process = None
        return status

    def die(self) -> None:
        """Kill the driver immediately, from any thread; `kill` still returns its exit status."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(15)

    def text(self) -> str:
        """Return the driver's log."""
        return self.log.read_text() if self.log.exists() else ""

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return the logged events with this name."""
        lines = [line for line in self.text().splitlines() if line.startswith("{")]
        return [one for one in map(json.loads, lines) if one["event"] == event]

    def files(self) -> list[str]:
        """Return the names in the CDI directory."""
        return sorted(path.name for path in self.cdi.iterdir()) if self.cdi.exists() else []

    def close(self) -> None:
        """Stop everything."""
        if self.process is not None:
            self.kill()
        self.kubelet.close()
        self.api.close()
        self.governor.close()


@pytest.fixture
def stand(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stand]:
    """Yield stand-ins that answer, and a driver that is not started yet."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    made = Stand(tmp_path_factory.mktemp("k"))  # short, for the paths of sockets
    yield made
    made.close()
    assert made.governor.failed == []
    assert made.api.misfits == []


@pytest.fixture
def wait() -> Callable[..., Any]:
    """Return the function `wait_for`."""
    return wait_for
