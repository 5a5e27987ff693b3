"""Tests of oci_hook.client; tests/unit/test_governor_protocol.py tests the answers of the protocol."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from oci_hook.client import LINE_LIMIT, Client, parse_admission
from oci_hook.errors import UnreachableError

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
        with pytest.raises(UnreachableError, match=f"the limit is {LINE_LIMIT}|bytes"):
            client.release("x" * LINE_LIMIT)
        client.close()
        server, _ = listener.accept()
        with server:
            assert server.recv(1) == b""


@pytest.mark.parametrize("directory", ["", "run/tidegate/k1", "../k1", 3, None])
def test_a_grant_with_a_relative_directory_is_refused(directory: object) -> None:
    """A relative path would depend on the runtime's working directory."""
    assert parse_admission(ANSWER).directory == "/run/tidegate/k1"
    with pytest.raises((ValueError, TypeError)):
        parse_admission({**ANSWER, "directory": directory})


def queue_up(path: Path) -> list[socket.socket]:
    """Fill the queue of a listener that accepts no connection; return the listener and clients."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(1)
    made = [listener]
    while True:
        made.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        made[-1].setblocking(False)
        try:
            made[-1].connect(str(path))
        except BlockingIOError:
            return made


def test_a_client_waits_while_the_queue_of_connections_is_full(tmp_path: Path) -> None:
    """A booting node starts more containers at once than fit in the kernel's queue of connections."""
    made = queue_up(tmp_path / "governor.sock")
    accepting = threading.Timer(0.3, lambda: made.append(made[0].accept()[0]))
    accepting.start()
    try:
        Client(str(tmp_path), 10.0).close()
    finally:
        accepting.join()
        for one in made:
            one.close()


def test_a_governor_that_accepts_no_connection_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oci_hook.client.PATIENCE", 60.0)
    made = queue_up(tmp_path / "governor.sock")
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"accepted no connection at .* within 0\.5 s"):
        Client(str(tmp_path), 0.5, 60.0)
    assert 0.5 <= time.monotonic() - began < 30
    for one in made:
        one.close()


def test_a_missing_socket_is_reported_without_the_systems_message(tmp_path: Path) -> None:
    # Podman searches for "no such file or directory" and reports a missing program.
    with pytest.raises(UnreachableError) as caught:
        Client(str(tmp_path), 0.2)
    where = f"{tmp_path}/governor.sock"
    assert caught.value.message == (
        f"the governor is not reachable at {where} (connect: there is no socket)"
    )


def serve(listener: socket.socket, *answers: dict | None) -> None:
    """Answer one request after another. `None` closes the connection, as a killed governor does."""
    for answer in answers:
        connection, _ = listener.accept()
        with connection:
            connection.recv(LINE_LIMIT)
            if answer is not None:
                connection.sendall(json.dumps(answer).encode() + b"\n")


def admit(client: Client) -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        client.admit(ident="c", pid=1, pidfd=pidfd, bundle="/", annotations={}, identity={})
    finally:
        os.close(pidfd)
        client.close()


@pytest.mark.parametrize("losses", [1, 3])
def test_a_governor_that_ends_while_it_admits_is_asked_again_when_it_is_back(
    tmp_path: Path, losses: int
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "governor.sock"))
        listener.listen()
        listener.settimeout(10)
        answers = [None] * losses + [ANSWER]
        serving = threading.Thread(target=serve, args=(listener, *answers), daemon=True)
        serving.start()
        admit(Client(str(tmp_path), 10.0, 5.0))
        serving.join()


def test_a_governor_that_ends_while_it_admits_and_stays_away_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "governor.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        client = Client(str(tmp_path), 10.0, 0.3)
        path.unlink()
        serving = threading.Thread(target=serve, args=(listener, None), daemon=True)
        serving.start()
        with pytest.raises(UnreachableError, match="connect: there is no socket"):
            admit(client)
        serving.join()
