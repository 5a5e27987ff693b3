"""Test the rate limits for connections and log lines that a container causes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from governor import listener, pace
from governor.listener import BACKLOG, Listener
from governor.pace import LINES, RateLimitedLog, RateLimiter


@given(
    st.floats(0.001, 10),
    st.integers(1, 100),
    st.lists(st.floats(0, 5), min_size=1, max_size=200),
)
def test_no_interval_exceeds_its_rate_and_one_burst(
    each_s: float, burst: int, pauses: list[float]
) -> None:
    one = RateLimiter(each_s, burst)
    now, taken = 1000.0, []
    for pause in pauses:
        now += pause
        if one.may(now):
            taken.append(now)
        else:
            assert one.wait(now) > 0
    for i, begin in enumerate(taken):
        for j, end in enumerate(taken[i:]):
            assert j <= burst + (end - begin) / each_s + 1e-6


def test_a_burst_passes_and_later_events_pass_at_the_rate() -> None:
    one = RateLimiter(0.5, 3)
    assert [one.may(100.0) for _ in range(4)] == [True, True, True, False]
    assert one.wait(100.0) == pytest.approx(0.5)
    assert one.may(100.51)
    assert not one.may(100.52)
    assert [one.may(200.0) for _ in range(4)] == [True, True, True, False]


def test_lines_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    with capture_logs() as logs:
        lines = RateLimitedLog(structlog.get_logger())
        for i in range(LINES + 100):
            lines.info("came", number=i)
        assert len(logs) == LINES
        now += 1.5
        lines.warning("gone", number=-1)
        lines.warning("gone", number=-2)
        now += 1.5
        lines.info("came", number=-3)
    assert logs[LINES:] == [
        {"event": "gone", "log_level": "warning", "number": -1, "left_out": 100},
        {"event": "came", "log_level": "info", "number": -3, "left_out": 1},
    ]


Play = Callable[[Callable[[Path], Awaitable[None]]], None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Callable[[Path], Awaitable[None]]) -> None:
        async def whole() -> None:
            await asyncio.wait_for(scene(tmp_path / "socket"), 20)

        asyncio.run(whole())

    return run


def client(path: Path) -> socket.socket:
    """Return a connection that is in the listener's queue."""
    made = socket.socket(socket.AF_UNIX)
    made.setblocking(False)
    try:
        made.connect(str(path))
    except OSError:
        made.close()
        raise
    return made


def fill(path: Path) -> list[socket.socket]:
    """Connect until the listener's queue is full; return the connections."""
    clients = []
    with contextlib.suppress(BlockingIOError):
        clients.extend(client(path) for _ in range(2 * BACKLOG))
    return clients


async def settle() -> None:
    for _ in range(5 * BACKLOG):
        await asyncio.sleep(0)


def test_connections_beyond_the_rate_wait_in_the_queue(play: Play) -> None:
    async def scene(path: Path) -> None:
        served = []

        async def serve(connection: socket.socket) -> None:
            served.append(connection)
            connection.send(b"x")
            connection.close()

        made = Listener(path, RateLimiter(0.2, 3), serve)
        clients = [client(path) for _ in range(5)]
        await settle()
        assert len(served) == 3
        loop = asyncio.get_running_loop()
        for one in clients:  # the others are served later
            assert await loop.sock_recv(one, 1) == b"x"
            one.close()
        made.close()
        with pytest.raises(ConnectionRefusedError):
            client(path)

    play(scene)


def test_a_full_queue_holds_up_the_process_that_connects(play: Play) -> None:
    async def scene(path: Path) -> None:
        async def serve(connection: socket.socket) -> None:
            connection.close()

        made = Listener(path, RateLimiter(1000, 1), serve)
        client(path).close()
        await settle()
        clients = fill(path)
        assert BACKLOG <= len(clients) < BACKLOG + 10
        for one in clients:
            one.close()
        made.close()

    play(scene)


def test_served_connections_end_with_the_listener(play: Play) -> None:
    async def scene(path: Path) -> None:
        ended = asyncio.Event()

        async def serve(connection: socket.socket) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                connection.close()
                ended.set()

        made = Listener(path, RateLimiter(0.01, 10), serve)
        one = client(path)
        await settle()
        made.close()
        await ended.wait()
        assert one.recv(1) == b""
        one.close()

    play(scene)


def test_a_connection_whose_task_has_not_begun_ends_with_the_listener(play: Play) -> None:
    """If a task is cancelled before its first step, no `finally` of its coroutine runs."""

    async def scene(path: Path) -> None:
        accepted = []

        class Noted(RateLimiter):
            def take(self, now: float) -> None:
                super().take(now)
                # This runs before the task's first step.
                asyncio.get_running_loop().call_soon(made.close)

        async def serve(connection: socket.socket) -> None:
            accepted.append(connection)
            connection.close()

        made = Listener(path, Noted(0.01, 10), serve)
        one = client(path)
        await settle()
        assert not accepted
        assert one.recv(1) == b""
        one.close()

    play(scene)


def test_without_descriptors_the_listener_pauses_and_continues(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "SHORT_S", 0.01)

    async def scene(path: Path) -> None:
        served = asyncio.Event()

        async def serve(connection: socket.socket) -> None:
            connection.close()
            served.set()

        made = Listener(path, RateLimiter(0.01, 10), serve)

        class Short:
            """The listener's socket; in its first two calls, the table of descriptors is full."""

            left = 2

            def fileno(self) -> int:
                return inner.fileno()

            def accept(self) -> object:
                if self.left:
                    self.left -= 1
                    raise OSError(errno.EMFILE, "Too many open files")
                return inner.accept()

            def close(self) -> None:
                inner.close()

        inner, made._socket = made._socket, Short()  # type: ignore[assignment]
        with capture_logs() as logs:
            one = client(path)
            await served.wait()
        assert [line["event"] for line in logs] == ["connection-not-accepted"] * 2
        one.close()
        made.close()

    play(scene)


def test_a_socket_of_an_earlier_listener_is_replaced(play: Play) -> None:
    async def scene(path: Path) -> None:
        served = asyncio.Event()

        async def serve(connection: socket.socket) -> None:
            connection.close()
            served.set()

        Listener(path, RateLimiter(0.01, 10), serve).close()
        made = Listener(path, RateLimiter(0.01, 10), serve)
        client(path).close()
        await served.wait()
        made.close()

    play(scene)
