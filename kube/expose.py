"""`python3 -m kube.expose`: forwards requests for metrics to the governor's socket.

    python3 -m kube.expose --listen 0.0.0.0:9731 --socket /run/tidegate/metrics.sock

The governor listens only on its own machine, because it does not authenticate clients. In a cluster
a network policy restricts which pods may scrape. Those pods connect to this proxy, which serves
nothing but `GET /metrics`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re

MAX_REQUEST = 8192
"""Maximum size of a request's head, in bytes."""
MAX_ANSWER = 64 << 20
"""Number of bytes after which an answer is cut off."""
MAX_SERVED = 8
TIMEOUT_S = 10.0
_LINE = re.compile(rb"GET /metrics(\?[\x21-\x7e]*)? HTTP/1\.[01]")
_HEADER = re.compile(rb"[\t\x20-\x7e]*")  # no line feed, which some servers take for a line end
_KEPT = (b"accept", b"accept-encoding")


def rewritten(head: bytes) -> bytes | None:
    """Return the request to send to the governor, or None if it is not for metrics."""
    line, *headers = head.split(b"\r\n")
    if not _LINE.fullmatch(line):
        return None
    kept = [
        header
        for header in headers
        if header.partition(b":")[0].lower() in _KEPT and _HEADER.fullmatch(header)
    ]
    return b"\r\n".join([b"GET /metrics HTTP/1.1", b"Host: tidegate", *kept, b"Connection: close"])


def status(line: str) -> bytes:
    """Return an HTTP response without content."""
    return f"HTTP/1.1 {line}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


class Proxy:
    """Serves one request per connection, and up to MAX_SERVED connections at a time."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._served = asyncio.Semaphore(MAX_SERVED)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection."""
        try:
            if self._served.locked():
                return  # the scraper will try again
            async with self._served, asyncio.timeout(TIMEOUT_S):
                await self._answer(reader, writer)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(TIMEOUT_S):
                    writer.close()
                    await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = rewritten((await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n"))
        if request is None:
            writer.write(status("404 Not Found"))
            return
        try:
            source, sink = await asyncio.open_unix_connection(self._socket)
        except OSError:  # the governor is being replaced
            writer.write(status("502 Bad Gateway"))
            return
        try:
            sink.write(request + b"\r\n\r\n")
            passed = 0
            while passed < MAX_ANSWER and (part := await source.read(1 << 16)):
                passed += len(part)
                writer.write(part)
                await writer.drain()
        finally:
            sink.close()


async def run(host: str, port: int, socket: str) -> None:
    """Serve until cancelled."""
    proxy = Proxy(socket)
    server = await asyncio.start_server(proxy.serve, host, port, limit=MAX_REQUEST)
    async with server:
        await server.serve_forever()


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal arrives; return the exit status."""
    parser = argparse.ArgumentParser(prog="kube.expose", description="Forwards metrics requests.")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--socket", default="/run/tidegate/metrics.sock", metavar="FILE")
    args = parser.parse_args(argv)
    host, _, port = args.listen.rpartition(":")
    if not port.isdigit():
        parser.error("--listen must be HOST:PORT")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(host.strip("[]"), int(port), args.socket))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
