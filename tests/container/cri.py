"""The parts of gRPC that the kubelet's side of CRI needs: messages as dictionaries, sent by curl over HTTP/2.

A message maps field numbers to values: a string, bytes, a number, another message, or a list of them. The numbers
are those of k8s.io/cri-api/pkg/apis/runtime/v1/api.proto. Debian has no crictl, and this is smaller than a
dependency.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.container.engine_host import EngineHost

Message = Mapping[int, Any]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class CriError(Exception):
    """An error that the engine returned instead of a message: the line that a kubelet shows."""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(message: Message) -> bytes:
    """Return a message's bytes."""
    out = b""
    for number, value in message.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int):
                out += _varint(number << 3 | VARINT) + _varint(one)
                continue
            data = one.encode() if isinstance(one, str) else one
            data = encode(data) if isinstance(data, Mapping) else data
            out += _varint(number << 3 | BYTES) + _varint(len(data)) + data
    return out


def strings(values: Mapping[str, str]) -> list[Message]:
    """Return the value of a map<string, string> field."""
    return [{1: key, 2: value} for key, value in values.items()]


def decode(data: bytes) -> dict[int, list[Any]]:
    """Return the values of each field: numbers, or bytes that may be a message themselves."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    fields: dict[int, list[Any]] = {}
    while at < len(data):
        tag = varint()
        value: Any
        if tag & 7 == VARINT:
            value = varint()
        else:
            length = {FIXED64: 8, FIXED32: 4}.get(tag & 7) or varint()
            value = data[at : at + length]
            at += length
        fields.setdefault(tag >> 3, []).append(value)
    return fields


class Cri:
    """A client of an engine's CRI socket."""

    def __init__(self, host: EngineHost, socket: str) -> None:
        self.host = host
        self.socket = socket

    def call(self, method: str, request: Message, *, timeout: float = 60) -> dict[int, list[Any]]:
        """Call a method such as `RuntimeService/Version`. Raise CriError with the engine's message if it fails."""
        data = encode(request)
        # curl treats trailers as headers: they go to the file, separately from the answer.
        headers = f"{self.host.work}/grpc-headers"
        ran = self.host.run_bytes(
            "curl", "--silent", "--show-error", "--http2-prior-knowledge",
            "--unix-socket", self.socket, "--max-time", f"{timeout:g}",
            "--header", "content-type: application/grpc",
            "--dump-header", headers, "--data-binary", "@-", f"http://localhost/runtime.v1.{method}",
            stdin=b"\0" + len(data).to_bytes(4, "big") + data,
            timeout=timeout + 5,
        )  # fmt: skip
        if ran.returncode:
            raise CriError(f"{method}: {ran.stderr.decode('utf-8', 'replace')}")
        fields = {}
        with open(headers, "rb") as file:  # noqa: PTH123
            for line in file.read().decode("utf-8", "replace").splitlines():
                name, _, value = line.partition(":")
                fields[name.lower()] = value.strip()
        if fields.get("grpc-status") != "0":
            from urllib.parse import unquote

            raise CriError(unquote(fields.get("grpc-message", str(fields))))
        return decode(ran.stdout[5:])
