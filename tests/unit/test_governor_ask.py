"""Test the errors of the command line when no request can be sent to the governor."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from governor.client import ask
from governor.config import Config
from governor.errors import GovernorError


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            ConnectionRefusedError(111, "Connection refused"),
            "start tidegate-governor, or name its directory with --runtime-dir",
        ),
        (PermissionError(13, "Permission denied"), "run it as root"),
    ],
)
def test_a_caller_without_permission_is_not_told_to_start_a_governor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, hint: str
) -> None:
    class Socket(socket.socket):
        def connect(self, _address: object, /) -> None:
            raise error

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(GovernorError) as caught:
        ask(Config(runtime_dir=str(tmp_path)), "list")
    assert caught.value.hint == hint
    assert caught.value.message.endswith(f"governor.sock: {error.strerror}")
