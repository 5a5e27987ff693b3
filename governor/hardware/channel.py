"""Exchange requests and answers between a governor and the steering service over a stream socket.

Each message is one line of JSON, and may carry file descriptors. On either side a channel is used
by one thread, with one request at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

VERSION = 1
"""Version of the messages; both sides must use the same version."""
SOCKET = "/run/tidegate-steering.sock"
"""Where the service listens (`tidegate-steering.socket`)."""
LONGEST = 1 << 22
"""Longest line, in bytes: enough for the channels of a thousand contexts."""
_PIECE = 1 << 16
_N_DESCRIPTORS = 4


class Channel:
    """One end of a channel, which owns its socket.

    Methods raise OSError if the peer is gone or silent.
    """

    def __init__(self, sock: socket.socket, silence_s: float | None = None) -> None:
        """Take over a socket; `silence_s` is the longest wait for the peer, in seconds."""
        sock.settimeout(silence_s)
        self._socket = sock

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message, and duplicates of the descriptors."""
        line = memoryview(json.dumps(message).encode() + b"\n")
        n = socket.send_fds(self._socket, [line], descriptors) if descriptors else 0
        if n < len(line):  # sending 0 bytes fails if the peer has answered and closed
            self._socket.sendall(line[n:])

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors, which the caller owns; None at EOF."""
        pieces: list[bytes] = []
        descriptors: list[int] = []
        try:
            while not pieces or not pieces[-1].endswith(b"\n"):
                piece, more, _, _ = socket.recv_fds(
                    self._socket, _PIECE, _N_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                descriptors += more
                pieces.append(piece)
                if not piece and len(pieces) == 1:
                    close_all(descriptors)
                    return None
                if not piece or sum(map(len, pieces)) > LONGEST:
                    raise ConnectionError("a message is incomplete or too long")
            message = json.loads(b"".join(pieces))
            if not isinstance(message, dict):
                raise ConnectionError("a message is not a JSON object")
        except BaseException as e:
            close_all(descriptors)
            if isinstance(e, ValueError):
                raise ConnectionError("a message is not JSON") from e
            raise
        return message, descriptors

    def ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request and return its answer; raise OSError with the reason if it was refused.

        After any other error the channel is closed: a late answer would be mistaken for the answer
        to the next request.
        """
        try:
            self.send(message, descriptors)
            received = self.receive()
            if received is None:
                raise ConnectionError("the steering service has ended")
        except TimeoutError as e:
            self.close()
            raise TimeoutError("the steering service does not answer") from e
        except BaseException:
            self.close()
            raise
        answer, unexpected = received
        close_all(unexpected)
        if "error" in answer:
            raise OSError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the connection; a thread that is blocked on it returns."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in descriptors:
        os.close(fd)
