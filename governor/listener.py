"""A listening Unix socket for a container's processes.

A `RateLimiter` limits how much of the governor's time the processes take, whatever they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import structlog

from governor.pace import RateLimiter

log = structlog.get_logger()

BACKLOG = 100
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors that mean that the governor lacks resources for a connection."""
SHORT_S = 1.0
"""Pause in accepting connections after such an error, in seconds."""


def start_serving(
    tasks: set[asyncio.Task[None]], serve: Coroutine[None, None, None], connection: socket.socket
) -> None:
    """Start a task that serves an accepted connection, and keep it in `tasks` until it ends.

    `serve` closes the connection when it returns, unless the connection is still needed. A task
    that is cancelled before its first step never enters `serve`, so the connection is closed here.
    """

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if task.cancelled():
            connection.close()

    task = asyncio.get_running_loop().create_task(serve)
    tasks.add(task)
    task.add_done_callback(ended)


class Listener:
    """Accepts connections one at a time; if they come too fast, they wait in the backlog.

    Once the backlog is full, `connect` blocks, so a process that connects in a loop slows itself
    down.
    """

    def __init__(
        self,
        path: Path,
        pace: RateLimiter,
        serve: Callable[[socket.socket], Coroutine[None, None, None]],
    ) -> None:
        """Listen on `path`; `serve` is called with each connection and has to close it."""
        self._path, self._pace, self._serve = path, pace, serve
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            self._socket.bind(str(path))
            # Any user in the container may connect; no other container can reach the directory.
            path.chmod(0o666)
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._listen()

    def close(self) -> None:
        """Stop accepting connections, and cancel the tasks that serve the accepted ones."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for task in self._tasks:
            task.cancel()

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._socket, self._accept)

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._socket)
        self._timer = self._loop.call_later(seconds, self._listen)

    def _accept(self) -> None:
        now = time.monotonic()
        if (wait := self._pace.wait(now)) > 0:
            self._rest(wait)
            return
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as e:
            if e.errno not in SHORT:
                raise
            log.error("connection-not-accepted", path=str(self._path), error=e.strerror)
            self._rest(SHORT_S)
            return
        self._pace.take(now)
        connection.setblocking(False)
        start_serving(self._tasks, self._serve(connection), connection)
