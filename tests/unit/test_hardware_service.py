"""Test the steering service, a process with a simulated GPU: the death of either side, and permitted callers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from governor.hardware import remote, service
from governor.hardware.channel import VERSION, Channel
from governor.hardware.remote import RemoteHardware
from simgpu import simgpu
from simgpu.testing import MS, environment, start_python
from tests.conftest import lack
from tests.unit.test_simgpu_steer import HOG, open_nvml

ROOT = Path(__file__).resolve().parents[2]


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def command(node: SimpleNamespace, *options: str) -> list[str]:
    library = str(node.build / "simgpu/libnvidia-ml.so.1")
    return [sys.executable, "-m", "governor.hardware.service", "--nvml", library, *options]


@pytest.fixture
def node(
    build_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimpleNamespace]:
    """A GPU with a process that has 50 s of work, and a service that listens."""
    gpu = simgpu.create(tmp_path / "gpus")[0]
    monkeypatch.setenv("SIMGPU_DIR", str(gpu.parent))
    hog = start_python(build_dir, gpu.parent, HOG)
    assert hog.stdout
    assert hog.stdout.readline() == "ready\n"
    node = SimpleNamespace(
        gpu=gpu, hog=hog, build=build_dir, path=str(tmp_path / "steering.sock"),
        environment=environment(build_dir, gpu.parent), uuid=simgpu.status(gpu).uuid,
        watch=open_nvml(build_dir, tmp_path),
    )  # fmt: skip
    node.service = subprocess.Popen(
        command(node, "--socket", node.path), env=node.environment, cwd=ROOT
    )
    try:
        wait_for(lambda: Path(node.path).is_socket())
        yield node
    finally:
        for process in (node.service, hog):
            process.kill()
            process.communicate()


def is_off(node: SimpleNamespace) -> bool:
    """Return whether the process with work gets none of the GPU's time."""
    node.watch.used_ns()
    time.sleep(0.05)
    return not node.watch.used_ns().get(node.hog.pid)


def find(node: SimpleNamespace, hardware: RemoteHardware) -> Any:
    pidfd = os.pidfd_open(node.hog.pid)
    try:
        (held,) = hardware.find(node.hog.pid, pidfd)
    finally:
        os.close(pidfd)
    return held


def switch_off(
    node: SimpleNamespace, hardware: RemoteHardware, *, announces: bool = True, n_reports: int = 0
) -> Any:
    """Switch the process with work off, report `n_reports` times that the governor is alive, and
    check that the process is off.

    After a second of silence the watchdog switches the process on. If a busy machine may have
    caused such a silence, the attempt is repeated.
    """
    held = find(node, hardware)
    for _ in range(5):
        reported, silence = time.monotonic(), 0.0
        if announces:
            hardware.watchdog().tell(hardware.tokens([held]))
        hardware.switch([held], on=False)
        for _ in range(n_reports):
            began = time.monotonic()
            hardware.used_ns()
            silence = max(silence, time.monotonic() - reported)
            reported = began
            time.sleep(0.1)
        off = is_off(node)
        silence = max(silence, time.monotonic() - reported)
        if off or silence < 0.7:
            break
    assert off
    return held


def test_the_service_switches_sets_slices_and_reports_used_time(node: SimpleNamespace) -> None:
    hardware = RemoteHardware(node.uuid, node.path)
    held = find(node, hardware)
    assert (held.pid, held.n_groups) == (node.hog.pid, 1)
    hardware.set_slice(held, 5 * MS)
    time.sleep(0.1)
    assert hardware.used_ns()[node.hog.pid] > 50 * MS
    hardware.switch([held], on=False)
    hardware.used_ns()
    assert is_off(node)
    assert hardware.used_ns().get(node.hog.pid, 0) == 0
    hardware.switch([held], on=True)
    assert not is_off(node)
    assert hardware.n_lost == 0
    hardware.close()


def test_a_governor_that_dies_leaves_nothing_off(node: SimpleNamespace) -> None:
    hardware = RemoteHardware(node.uuid, node.path)
    switch_off(node, hardware)
    hardware.close()
    wait_for(lambda: not is_off(node))


def test_a_governor_that_is_silent_leaves_nothing_off_for_long(node: SimpleNamespace) -> None:
    hardware = RemoteHardware(node.uuid, node.path)
    switch_off(node, hardware, n_reports=15)  # for longer than the watchdog waits
    wait_for(lambda: not is_off(node))
    switch_off(node, hardware, announces=False, n_reports=1)  # the governor reports again
    hardware.close()


def test_a_service_that_is_killed_leaves_nothing_off(node: SimpleNamespace) -> None:
    hardware = RemoteHardware(node.uuid, node.path)
    switch_off(node, hardware)
    node.service.kill()
    wait_for(lambda: not is_off(node))
    with pytest.raises(OSError, match=r"has ended|reset|Broken pipe"):
        hardware.used_ns()
    with pytest.raises(OSError, match="Bad file descriptor"):
        hardware.used_ns()
    hardware.close()


def is_stopped(pid: int) -> bool:
    """Return whether all threads are stopped: one thread takes the signal and stops the others."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)


def test_a_call_to_a_service_that_hangs_times_out(node: SimpleNamespace) -> None:
    hardware = RemoteHardware(node.uuid, node.path)
    switch_off(node, hardware)
    sock = hardware._channel._socket
    assert sock.gettimeout() == remote.CALL_S
    sock.settimeout(0.5)  # a service that does not hang may be late as well
    node.service.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_stopped(node.service.pid))
    with pytest.raises(TimeoutError, match="the steering service does not answer"):
        hardware.used_ns()
    wait_for(lambda: not is_off(node))  # switched on by the watchdog, a separate process
    hardware.close()


def test_the_next_governor_begins_when_the_watchdog_of_the_previous_one_has_ended(
    node: SimpleNamespace,
) -> None:
    """The watchdog would switch on what the next governor has switched off."""
    for _ in range(5):
        hardware = RemoteHardware(node.uuid, node.path)
        switch_off(node, hardware)
        hardware.close()
        after = RemoteHardware(node.uuid, node.path)
        assert not is_off(node)
        after.close()


def test_the_socket_appears_when_it_accepts_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.sock"
    listen = socket.socket.listen
    seen: list[bool] = []

    def listen_later(listener: socket.socket) -> None:
        seen.append(path.exists())
        listen(listener)

    monkeypatch.setattr(socket.socket, "listen", listen_later)
    with service._bound(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))
    assert seen == [False]


def test_two_governors_do_not_steer_one_gpu(
    node: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.BUSY_S < remote.START_S  # so the governor gets the refusal
    path = str(tmp_path / "own.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        own = service.SteeringService(listener, lambda _: node.watch, is_passed=False)
        threading.Thread(target=own.run, daemon=True).start()
        first = RemoteHardware(node.uuid, path)
        with monkeypatch.context() as patch:
            patch.setattr(service, "BUSY_S", 0.2)
            with pytest.raises(OSError, match="another governor is steering this GPU"):
                RemoteHardware(node.uuid, path)
        first.close()
        RemoteHardware(node.uuid, path).close()


NO_REQUESTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"no": 1}, "does not support the request 'no'"),
    ({}, "does not support the request ''"),
    ({"switch": 5, "on": True}, "does not understand the request: TypeError"),
    ({"switch": [["a", "b"]], "on": True}, "does not understand the request: ValueError"),
    ({"slice": [1]}, "does not understand the request"),
    ({"slice": [1, 1]}, "does not understand the request: KeyError"),
    ({"off": [[1, 2, 3]]}, "does not understand the request: ValueError"),
)


def test_an_invalid_request_is_refused_and_the_session_continues(node: SimpleNamespace) -> None:
    hardware = RemoteHardware(node.uuid, node.path)
    for message, answer in NO_REQUESTS:
        with pytest.raises(OSError, match=answer):
            hardware._channel.ask(message)
    hardware.used_ns()
    hardware.close()


def connect(node: SimpleNamespace) -> Channel:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(node.path)
    return Channel(sock, 10)


def test_a_gpu_that_does_not_exist_is_refused(node: SimpleNamespace) -> None:
    with pytest.raises(OSError, match="the steering service has ended"):
        RemoteHardware("GPU-00000000-0000-0000-0000-000000000000", node.path)
    assert node.service.poll() is None
    RemoteHardware(node.uuid, node.path).close()


def test_another_version_is_reported_and_retried(
    node: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(connect(node)) as channel:
        assert channel.ask({"open": node.uuid, "version": VERSION + 1}) == {"version": VERSION}
    monkeypatch.setattr(remote, "RETRY_S", 0.01)
    monkeypatch.setattr(remote, "VERSION", VERSION + 1)
    with pytest.raises(OSError, match="has a different version; restart tidegate-steering, then"):
        RemoteHardware(node.uuid, node.path)


def test_an_invalid_first_message_ends_only_its_connection(node: SimpleNamespace) -> None:
    for data in (b"", b"x", b"[]\n", b'{"open": 3}\n', b"\xff\n", b"{}\n" * 3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(node.path)
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(10)
            answer = sock.recv(4096)
            assert not answer or "version" in json.loads(answer)
    RemoteHardware(node.uuid, node.path).close()


def test_another_user_is_not_answered(node: SimpleNamespace) -> None:
    if os.geteuid():
        lack("needs root")
    Path(node.path).chmod(0o666)  # otherwise the mode alone keeps other users away
    for directory in Path(node.path).parents:
        directory.chmod(directory.stat().st_mode | 0o011)
    program = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM); s.connect(sys.argv[1])\n"
        "try: s.sendall(b'{\"version\": 0}\\n'); print(s.recv(100))\n"
        "except OSError: print(b'')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, node.path], capture_output=True, text=True, check=True
    )
    assert done.stdout == "b''\n"


def test_where_no_service_listens_the_reason_names_the_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    with pytest.raises(OSError, match=f"no steering service answers at {path}: No such file"):
        RemoteHardware("GPU-1", path)


HANDS_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_a_passed_socket_is_served_until_the_last_session_ends(
    node: SimpleNamespace, tmp_path: Path
) -> None:
    """The service manager keeps the socket, and starts the service again at the next connection."""
    path = str(tmp_path / "passed.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, "-c", HANDS_OVER, str(listener.fileno()), *command(node)],
                env=node.environment, cwd=ROOT, pass_fds=[listener.fileno()],
            )  # fmt: skip

        for _ in range(2):
            process = start()
            hardware = RemoteHardware(node.uuid, path)
            switch_off(node, hardware)
            hardware.close()
            assert process.wait(10) == 0
            assert not is_off(node)


def test_a_socket_that_was_passed_to_another_process_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", "1")
    assert service.passed_socket() is None
