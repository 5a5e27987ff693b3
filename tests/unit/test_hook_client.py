"""The hook's half of the governor's protocol; what it makes of answers shows tests/unit/test_governor_protocol.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from oci_hook.client import LINE_LIMIT, Client, parse_admission
from oci_hook.errors import GovernorError

ANSWER = {
    "ok": True,
    "key": "k1",
    "directory": "/run/tidegate/k1",
    "devices": [],
    "memory": 1,
    "compute": 1,
}


def test_a_request_that_the_governor_would_refuse_is_not_sent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "governor.sock"))
        listener.listen()
        client = Client(str(tmp_path), 0.2)
        with pytest.raises(GovernorError, match=f"{LINE_LIMIT} are accepted|bytes"):
            client.release("x" * LINE_LIMIT)
        client.close()
        server, _ = listener.accept()
        with server:
            assert server.recv(1) == b""


@pytest.mark.parametrize("directory", ["", "run/tidegate/k1", "../k1", 3, None])
def test_a_directory_is_mounted_by_its_whole_path_alone(directory: object) -> None:
    """What is relative would begin where the runtime happens to stand."""
    assert parse_admission(ANSWER).directory == "/run/tidegate/k1"
    with pytest.raises((ValueError, TypeError)):
        parse_admission({**ANSWER, "directory": directory})
