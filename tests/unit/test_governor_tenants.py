"""Test attacks by root in a container on the container's socket: no other container is affected.

The governor runs on a thread of this process, so its descriptors are in this process.
"""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from libcontrol import layout
from tests.conftest import lack
from tests.unit.test_governor_protocol import (
    ADMIT,
    GovernorClient,
    GovernorThread,
    descriptors,
    governor,
    listed,
    pidfd,
    sleeper,
    wait_for,
)

__all__ = ["governor", "pidfd", "sleeper"]  # fixtures

REGISTER = """
import socket, sys
for fd in map(int, sys.argv[2:]):
    s = socket.socket(fileno=fd)
    s.settimeout(10)
    s.connect(sys.argv[1])
    s.send(b"r")
    s.recv(4)
    s.detach()
print("registered", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(governor: GovernorThread, pidfd: int) -> Iterator[str]:
    """Path of the socket of a running container."""
    with GovernorClient(governor) as client:
        yield client.ask(ADMIT, pidfd)["directory"] + "/governor.sock"


def processes(governor: GovernorThread) -> int:
    with GovernorClient(governor) as client:
        [container] = client.ask({"v": 1, "op": "list"})["containers"]
        return len(container["processes"])


def test_a_process_that_ends_leaves_nothing_although_another_keeps_its_connection(
    governor: GovernorThread, path: str
) -> None:
    """Otherwise each round would cost the governor another descriptor, without a limit."""
    with ExitStack() as stack:
        kept = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(20)]
        fds = [s.fileno() for s in kept]
        processes(governor)
        before = descriptors()
        process = subprocess.Popen(
            [sys.executable, "-c", REGISTER, path, *map(str, fds)],
            pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout
        assert process.stdout.readline() == "registered\n"
        assert processes(governor) == 1
        process.communicate("")
        wait_for(lambda: processes(governor) == 0)
        wait_for(lambda: descriptors() <= before)
        for s in kept:  # the governor has closed the other ends
            s.setblocking(False)
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                s.send(b"p")


CONNECT = """
import socket, sys
s = socket.socket(fileno=int(sys.argv[2]))
s.settimeout(10)
s.connect(sys.argv[1])
s.detach()
"""

# The program prints nothing if the PID stays in use: a fork on another CPU may have taken it.
NUMBERED = """
import os, sys
for _ in range(20):
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(int(sys.argv[1]) - 1))
    pid = os.fork()
    if pid == 0:
        sys.stdin.read()
        os._exit(0)
    if pid == int(sys.argv[1]):
        print("there", flush=True)
        sys.stdin.read()
        break
    os.kill(pid, 9)
    os.waitpid(pid, 0)
"""


def test_a_process_with_a_reused_pid_is_not_registered(governor: GovernorThread, path: str) -> None:
    """A process could connect, exit, and wait until its pid is reused by a neighbour's process."""
    for _ in range(20):
        with ExitStack() as stack:
            s = stack.enter_context(socket.socket(socket.AF_UNIX))
            process = subprocess.Popen(
                [sys.executable, "-c", CONNECT, path, str(s.fileno())], pass_fds=[s.fileno()]
            )
            assert process.wait(20) == 0
            stranger = subprocess.Popen(
                [sys.executable, "-c", NUMBERED, str(process.pid)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(stranger.communicate, "")
            assert stranger.stdout
            if stranger.stdout.readline() != "there\n":
                continue
            s.settimeout(10)
            s.send(layout.REGISTER)
            assert s.recv(4) == layout.NO_SLOT.to_bytes(4, "little")
            assert processes(governor) == 0
            return
    lack("this machine does not allow a process to choose a PID")


def test_the_number_of_silent_connections_is_limited(
    governor: GovernorThread, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("governor.slots.ANSWER_S", 60.0)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(400)]
        before = descriptors()
        for s in silent:
            s.connect(path)  # waits while the backlog is full
        begun = time.monotonic()
        listed(governor)  # all of them are accepted before this request
        wait_for(lambda: descriptors() - before < 100)
        assert time.monotonic() - begun < 30  # they were not closed by a timeout
    # The container can use its socket again.
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        s.settimeout(10)
        s.send(layout.REGISTER)
        assert s.recv(4) == bytes(4)


def test_registrations_are_paced(governor: GovernorThread, path: str) -> None:
    """Each registration writes a row to the database and lines to the log."""
    begun = time.monotonic()
    rounds = 0
    while time.monotonic() < begun + 4:
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(path)
            s.settimeout(10)
            s.send(layout.AGAIN)
            rounds += len(s.recv(4)) == 4
    seconds = time.monotonic() - begun
    assert rounds <= 256 + 100 * seconds + 10
    assert processes(governor) == 0


FLOOD = """
import socket, sys
while True:
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(sys.argv[1])
        s.settimeout(10)
        s.send(sys.argv[2].encode())
        s.recv(4)
"""


@pytest.mark.parametrize("says", ["", "r", "a"])
def test_a_process_that_connects_in_a_loop_does_not_affect_others(
    governor: GovernorThread, path: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    flood = [subprocess.Popen([sys.executable, "-c", FLOOD, path, says]) for _ in range(4)]
    try:
        asked, seconds = 0, 0.0
        while seconds < 3 or (asked <= 20 and seconds < 60):
            listed(governor)
            asked += 1
            seconds = time.monotonic() - begun
        lines = capfd.readouterr().out.splitlines()
        seconds = time.monotonic() - begun
        said = [line for line in lines if "process-" in line]
        assert said or not says
        # At most 64 lines of each kind, and one more a second, with a margin.
        assert len(said) <= 3 * (64 + 7 + seconds)
        assert asked > 20
    finally:
        for process in flood:
            process.kill()
            process.wait()
    assert all(process.returncode == -9 for process in flood)  # slowed down, not refused


@contextmanager
def open_files_at_most(number: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_governor_without_free_descriptors_waits_for_some(governor: GovernorThread) -> None:
    with GovernorClient(governor) as first, socket.socket(socket.AF_UNIX) as second:
        assert first.ask({"v": 1, "op": "ping"})["ok"]
        used = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        spare = [socket.socket(socket.AF_UNIX) for _ in range(used)]
        with open_files_at_most(used):
            second.connect(governor.path)
            time.sleep(0.3)
            assert not governor.task.done()
        for s in spare:
            s.close()
        second.settimeout(10)
        second.sendall(b'{"v": 1, "op": "ping"}\n')
        assert b'"ok": true' in second.recv(1000)
