"""The proxy for the governor's metrics: which requests it forwards, and which it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kube.expose import MAX_SERVED, Proxy, rewritten


async def exchange(tmp_path: Path, request: bytes, answer: bytes = b"HTTP/1.1 200 OK\r\n\r\nmetrics") -> tuple[bytes, bytes]:  # fmt: skip
    seen = b""

    async def governor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen = await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    source = await asyncio.start_unix_server(governor, tmp_path / "m.sock")
    server = await asyncio.start_server(
        Proxy(str(tmp_path / "m.sock")).serve, "127.0.0.1", 0, limit=8192
    )
    host, port = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    received = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    for one in (server, source):
        one.close()
        await one.wait_closed()
    return received, seen


def test_metrics_requests_keep_their_negotiation_headers(tmp_path: Path) -> None:
    request = (
        b"GET /metrics HTTP/1.1\r\nHost: evil\r\nAccept: text/plain\r\nAccept-Encoding: gzip\r\n"
        b"Cookie: x\r\nTransfer-Encoding: chunked\r\n\r\nbody"
    )
    received, seen = asyncio.run(exchange(tmp_path, request))
    assert received.endswith(b"\r\n\r\nmetrics")
    assert seen == (
        b"GET /metrics HTTP/1.1\r\nHost: tidegate\r\nAccept: text/plain\r\nAccept-Encoding: gzip\r\n"
        b"Connection: close\r\n\r\n"
    )


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.1", b"POST /metrics HTTP/1.1", b"GET /metrics/../x HTTP/1.1", b"GET http://x/metrics HTTP/1.1", b"", b"GET /metrics HTTP/1.1\nX: y"],
)  # fmt: skip
def test_other_requests_are_refused(head: bytes, tmp_path: Path) -> None:
    assert rewritten(head) is None
    received, seen = asyncio.run(exchange(tmp_path, head + b"\r\n\r\n"))
    assert received.startswith(b"HTTP/1.1 404 ")
    assert seen == b""


@pytest.mark.parametrize(
    "header",
    [b"Accept: a\nHost: b", b"Accept: a\n\nGET /other HTTP/1.1", b"Accept: a\rX: b", b"Accept: \0", b"Accept\n: a", b"Accept: \xff"],
)  # fmt: skip
def test_a_header_cannot_contain_another_header(header: bytes) -> None:
    assert rewritten(b"GET /metrics HTTP/1.1\r\n" + header) == (
        b"GET /metrics HTTP/1.1\r\nHost: tidegate\r\nConnection: close"
    )


def test_an_endless_request_head_closes_the_connection(tmp_path: Path) -> None:
    received, seen = asyncio.run(
        exchange(tmp_path, b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 4000)
    )
    assert (received, seen) == (b"", b"")


def test_an_absent_governor_causes_status_502(tmp_path: Path) -> None:
    async def ask() -> bytes:
        server = await asyncio.start_server(Proxy(str(tmp_path / "none")).serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        received = await reader.read()
        writer.close()
        server.close()
        await server.wait_closed()
        return received

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 502 ")


def test_concurrent_connections_are_limited(tmp_path: Path) -> None:
    async def crowd() -> bytes:
        server = await asyncio.start_server(Proxy(str(tmp_path / "none")).serve, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        silent = [await asyncio.open_connection(*address) for _ in range(MAX_SERVED)]
        await asyncio.sleep(0.2)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        try:
            received = await reader.read()
        except ConnectionResetError:
            received = b""
        for _, each in [*silent, (reader, writer)]:
            each.close()
        server.close()
        await asyncio.sleep(0.2)
        return received

    assert asyncio.run(crowd()) == b""
