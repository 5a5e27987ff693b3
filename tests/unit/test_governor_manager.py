"""Test the governor's notifications to the service manager, whose socket the test provides."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from governor.manager import feed_watchdog, notify, watchdog_s
from tests.unit.governor_process import SOON_S, GovernorNode, gpus

__all__ = ["gpus"]  # fixtures


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(SOON_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield heard


def signs(manager: socket.socket) -> int:
    """Return the number of keep-alive messages that have arrived."""
    manager.setblocking(False)
    n = 0
    while True:
        try:
            assert manager.recv(100) == b"WATCHDOG=1"
        except BlockingIOError:
            return n
        n += 1


@pytest.mark.parametrize(
    ("usec", "pid", "within"),
    [
        ("30000000", None, 30.0),
        ("30000000", "own", 30.0),
        ("30000000", "1", None),  # meant for another process
        ("0", None, None),
        ("soon", None, None),
        (None, None, None),
    ],
)
def test_keep_alive_messages_are_sent_if_configured(
    monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, within: float | None
) -> None:
    for name, value in (("USEC", usec), ("PID", str(os.getpid()) if pid == "own" else pid)):
        monkeypatch.delenv(f"WATCHDOG_{name}", raising=False)
        if value is not None:
            monkeypatch.setenv(f"WATCHDOG_{name}", value)
    assert watchdog_s() == within


def test_a_stuck_event_loop_sends_no_keep_alive_message(manager: socket.socket) -> None:
    async def scene() -> None:
        task = asyncio.ensure_future(feed_watchdog(0.1))
        await asyncio.sleep(0.3)
        assert signs(manager) >= 2
        time.sleep(0.2)  # noqa: ASYNC251 - blocks the event loop
        assert signs(manager) == 0
        task.cancel()

    asyncio.run(scene())


def test_no_notification_is_sent_without_a_service_manager(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    notify("READY=1")


def test_a_stuck_service_manager_does_not_block_the_governor(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("governor.manager.PATIENCE_S", 0.01)
    # The length of the manager's queue; systemd raises it from 10 to 512 when it boots.
    n = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 20
    for _ in range(n):
        notify("WATCHDOG=1")
    assert 0 < signs(manager) < n


def test_a_governor_notifies_readiness_and_feeds_the_watchdog(
    manager: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpus: tuple[Path, Path],
    build_dir: Path,
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    with GovernorNode(tmp_path, gpus, build_dir):
        assert manager.recv(100) == b"READY=1"
        for _ in range(3):
            assert manager.recv(100) == b"WATCHDOG=1"
