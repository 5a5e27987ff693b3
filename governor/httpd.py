"""A minimal HTTP server for metrics and the web page: GET, one request per connection, local only.

It has neither authentication nor TLS, so it listens only on a socket below `runtime_dir`, for root
and its group, or on a loopback address, for every user of this machine.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import errno
import http.client
import io
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from email.message import Message
from pathlib import Path
from typing import TypeVar

import structlog

from governor.errors import GovernorError

log = structlog.get_logger()

Result = TypeVar("Result")

HEAD_LIMIT = 8 << 10
REQUEST_S = 5.0
"""Longest time from a connection to the end of its response, in seconds."""
MAX_CONNECTIONS = 8
AGAIN_S = 10.0
"""Interval at which an unavailable address is tried again, in seconds."""

CLOSE = "Connection: close\r\n"


class Endpoint(abc.ABC):
    """Answers GET requests and refuses all others; subclasses define the content.

    A connection lasts five seconds at most. Eight connections are answered at a time, eight more
    get status 503, and others are closed at once.
    """

    where = ""
    """One line for refusals, with the paths that are served."""
    headers = ""
    """Headers in every answer, including refusals."""

    def __init__(self, name: str) -> None:
        self._connections = 0
        self._executor = ThreadPoolExecutor(1, name)

    @abc.abstractmethod
    async def answer(self, target: str, headers: Message) -> bytes:
        """Return the answer to GET `target`, as made by `content` or `status`."""

    @abc.abstractmethod
    def has(self, target: str) -> bool:
        """Return whether anything is served at `target`."""

    async def in_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run long work, which must not access the governor's state, outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        try:
            server = await asyncio.start_server(self._connection, sock=listener, limit=HEAD_LIMIT)
            async with server:
                await server.serve_forever()
        finally:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > 2 * MAX_CONNECTIONS:
                writer.transport.abort()
                return
            async with asyncio.timeout(REQUEST_S):
                if self._connections > MAX_CONNECTIONS:
                    answer = self.status("503 Service Unavailable")
                else:
                    answer = await self._answer_next(reader)
                writer.write(answer)
                await writer.drain()
                writer.write_eof()
                # Read what the client still sends; otherwise closing the socket would send RST and
                # discard the answer.
                while await reader.read(HEAD_LIMIT):
                    pass
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            # CancelledError is raised when the governor stops; the asyncio of Python 3.11 reports
            # such tasks as errors.
            writer.transport.abort()
        finally:
            self._connections -= 1
            writer.close()

    async def _answer_next(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return self.status("431 Request Header Fields Too Large")
        return await self._answer(head)

    async def _answer(self, head: bytes) -> bytes:
        line, _, rest = head.partition(b"\r\n")
        words = line.decode("latin-1").split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
            return self.status("400 Bad Request")
        try:
            headers = http.client.parse_headers(io.BytesIO(rest))
        except (http.client.HTTPException, ValueError):
            # Python also parses the Content-Type, and fails on some values.
            return self.status("400 Bad Request")
        method, target, _ = words
        if not self.has(target.partition("?")[0]):
            return self.status("404 Not Found")
        if method != "GET":
            return self.status("405 Method Not Allowed", "Allow: GET\r\n")
        return await self.answer(target, headers)

    def status(self, status: str, more: str = "", *, why: str = "") -> bytes:
        """Return an answer with a status and one line of text."""
        text = f"{status}; {why or self.where}"
        return self.content(f"{text}\n".encode(), "text/plain", more, status=status)

    def content(self, body: bytes, kind: str, more: str = "", *, status: str = "200 OK") -> bytes:
        """Return a complete answer; `more` are headers for this answer only."""
        head = (
            f"HTTP/1.1 {status}\r\n{more}{self.headers}Content-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\n{CLOSE}\r\n"
        )
        return head.encode("latin-1") + body


Listening = AbstractContextManager[socket.socket | None]


class Offer:
    """The address of an endpoint.

    An unavailable address is retried, and does not end the governor: quotas hold without it.
    """

    def __init__(self, listening: Callable[[], Listening]) -> None:
        """Open the socket, or log why that is not possible."""
        self._listening = listening
        self._logged = ""
        self._stack = contextlib.ExitStack()
        self._listener = self._open()

    def _open(self) -> socket.socket | None:
        try:
            return self._stack.enter_context(self._listening())
        except GovernorError as e:
            if e.message != self._logged:  # once, not every ten seconds
                log.error("endpoint-not-served", code=e.code, message=e.message, hint=e.hint)
                self._logged = e.message
            return None

    async def serve(self, endpoint: Endpoint) -> None:
        """Serve at the address once it is available, until cancelled."""
        while self._listener is None:
            await asyncio.sleep(AGAIN_S)
            self._listener = self._open()
        await endpoint.serve(self._listener)

    def close(self) -> None:
        """Stop listening."""
        self._stack.close()


@contextlib.contextmanager
def listening(where: str, path: Path, what: str, option: str) -> Iterator[socket.socket | None]:
    """Listen as an option specifies: off (None), unix (at `path`), or an address.

    Raise GovernorError if that is not possible; `what` and `option` are for its message.
    """
    if where == "off":
        yield None
        return
    is_unix = where == "unix"
    try:
        # Early connections wait in the backlog instead of being refused.
        listener = _listen_unix(path) if is_unix else _listen_address(where)
    except OSError as e:
        raise GovernorError(
            f"{what} cannot be served at {path if is_unix else where}: {e.strerror}",
            hint="use unix, or let the unit open a port: `systemctl cat tidegate-governor` says how"
            if e.errno == errno.EAFNOSUPPORT
            else f"choose another {option}",
        ) from e
    with listener:
        listener.setblocking(False)
        try:
            yield listener
        finally:
            if is_unix:
                path.unlink(missing_ok=True)


def _listen_unix(path: Path) -> socket.socket:
    # A runtime_dir has one governor, so an existing socket was left by a dead governor.
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117)
    try:
        listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def _listen_address(where: str) -> socket.socket:
    host, _, port = where.rpartition(":")
    host = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen()  # fails if another program began to listen after the bind
    except OSError:
        listener.close()
        raise
    return listener
