"""Test the process that switches on what a dead governor left off.

This file's `revive` replaces the driver call.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from governor.hardware import watchdog
from governor.hardware.watchdog import Watchdog

ROOT = Path(__file__).resolve().parents[2]


def revive(path, off):
    with Path(path).open("a") as file:
        file.write(json.dumps(off) + "\n")


def fail_at_first(path, off):
    """Fail three times, then do as `revive` does."""
    tries = Path(f"{path}.tries")
    n = len(tries.read_text()) if tries.exists() else 0
    tries.write_text("x" * (n + 1))
    if n < 3:
        raise RuntimeError("the driver is busy")
    revive(path, off)


def fail_until_the_end(path, off):
    """Fail until the test is about to end the governor, and four more times."""
    watchdog.AGAIN_S = 0.01
    with Path(f"{path}.tries").open("a") as file:
        file.write("x")
    last = Path(f"{path}.last")
    if not last.exists():
        raise RuntimeError("the driver is busy")
    with last.open("a") as file:
        file.write("x")
    if last.stat().st_size < 5:
        raise RuntimeError("the driver is busy")
    revive(path, off)


def revived(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """On a busy machine, the start of Python alone may take five seconds."""
    monkeypatch.setattr("governor.hardware.watchdog.CLOSE_S", 60.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "revived"


GOVERNOR = """
import sys, time
sys.path[:0] = sys.argv[2:]
from governor.hardware.watchdog import Watchdog
dog = Watchdog("tests.unit.test_hardware_watchdog:revive", [sys.argv[1]])
for off in ([1, 2], [2, 3]):
    dog.tell(off)
print(dog._process.pid, flush=True)
time.sleep(60)
"""


def test_channels_that_a_killed_governor_left_off_are_switched_on(path):
    """The governor is started like an installed package's script: only the script itself sets the
    module path.
    """
    with subprocess.Popen(
        [sys.executable, "-I", "-c", GOVERNOR, path, ROOT],
        cwd="/", stdout=subprocess.PIPE, text=True,
    ) as governor:  # fmt: skip
        dog = int(governor.stdout.readline())
        governor.kill()
        wait_for(lambda: revived(path))
        assert revived(path) == [[2, 3]]  # the last announcement
        wait_for(
            lambda: (
                not Path(f"/proc/{dog}").exists()
                or "Z" in Path(f"/proc/{dog}/stat").read_text().split()[2]
            )
        )


def test_channels_of_a_silent_governor_are_switched_on(path):
    dog = Watchdog("tests.unit.test_hardware_watchdog:revive", [str(path)])
    dog.tell([7])
    wait_for(lambda: revived(path))
    assert revived(path) == [[7]]
    dog.tell([8])  # the governor is alive, and is watched again
    wait_for(lambda: len(revived(path)) == 2)
    dog.close()


def test_an_unchanged_list_is_watched_again(path):
    """An unchanged list is sent as an empty line.

    The watchdog must not forget the list once it has switched the channels on.
    """
    dog = Watchdog("tests.unit.test_hardware_watchdog:revive", [str(path)])
    dog.tell([7])
    wait_for(lambda: revived(path))
    dog.tell([7])
    dog.close()
    assert revived(path) == [[7], [7]]


def test_if_nothing_is_off_nothing_is_switched_on(path):
    dog = Watchdog("tests.unit.test_hardware_watchdog:revive", [str(path)])
    dog.tell([7])
    dog.tell([])
    time.sleep(1.5)
    dog.close()
    assert revived(path) == []


def test_channels_that_are_off_are_switched_on_at_a_regular_end(path):
    dog = Watchdog("tests.unit.test_hardware_watchdog:revive", [str(path)])
    dog.tell([7])
    dog.close()
    assert revived(path) == [[7]]


def test_a_signal_to_the_watchdog_changes_nothing(path):
    """A service manager signals all processes of a unit at once."""
    dog = Watchdog("tests.unit.test_hardware_watchdog:revive", [str(path)])
    dog.tell([7])
    wait_for(lambda: int(_status(dog, "SigIgn"), 16) >> (signal.SIGTERM - 1) & 1)
    os.kill(dog._process.pid, signal.SIGTERM)
    dog.close()
    assert revived(path) == [[7]]


def _status(dog, name):
    text = Path(f"/proc/{dog._process.pid}/status").read_text()
    return next(line.split()[1] for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize("is_governor_alive", [True, False])
def test_a_failed_attempt_is_retried(path, is_governor_alive, capfd):
    dog = Watchdog("tests.unit.test_hardware_watchdog:fail_at_first", [str(path)])
    dog.tell([7])
    if not is_governor_alive:
        dog.close()
    wait_for(lambda: revived(path))
    assert revived(path) == [[7]]
    if is_governor_alive:
        dog.close()
    assert capfd.readouterr().err == (
        "tidegate-watchdog: containers are switched off and cannot be switched on: the driver is busy; "
        "retrying every 0.5 s\n"
    )


def test_attempts_before_the_governors_end_do_not_count(path):
    dog = Watchdog("tests.unit.test_hardware_watchdog:fail_until_the_end", [str(path)])
    dog.tell([7])
    tries = Path(f"{path}.tries")
    wait_for(lambda: tries.exists() and tries.stat().st_size > watchdog.N_TRIES)
    Path(f"{path}.last").touch()
    dog.close()
    assert revived(path) == [[7]]


def _kill(dog):
    dog._process.kill()
    dog._process.wait()


def test_a_killed_watchdog_is_replaced(path, monkeypatch):
    monkeypatch.setattr("governor.hardware.watchdog.RESTART_S", 0.0)
    dog = Watchdog("tests.unit.test_hardware_watchdog:revive", [str(path)])
    dog.tell([7])
    _kill(dog)
    dog.tell([7])  # the whole list is sent, although it has not changed
    dog.close()
    assert revived(path) == [[7]]


def test_without_a_watchdog_nothing_may_be_switched_off(path):
    dog = Watchdog("tests.unit.test_hardware_watchdog:revive", [str(path)])
    _kill(dog)
    with pytest.raises(OSError, match="Broken pipe"):  # too soon after its start to be replaced
        dog.tell([7])
    dog.close()


def test_a_watchdog_that_does_not_read_causes_an_error_without_a_wait(path):
    dog = Watchdog("tests.unit.test_hardware_watchdog:revive", [str(path)])
    os.kill(dog._process.pid, signal.SIGSTOP)

    def talk():
        for i in range(1000):
            dog.tell(list(range(i, i + 1000)))

    try:
        with pytest.raises(BlockingIOError):
            talk()
    finally:
        dog._process.kill()
        dog.close()


def test_a_watchdog_that_cannot_be_replaced_writes_to_no_other_file(path, monkeypatch):
    monkeypatch.setattr("governor.hardware.watchdog.RESTART_S", 0.0)
    dog = Watchdog("tests.unit.test_hardware_watchdog:revive", [str(path)])
    _kill(dog)

    def fail(*_, **__):
        raise BlockingIOError("no process can be started")

    monkeypatch.setattr("governor.hardware.watchdog.subprocess.Popen", fail)
    with pytest.raises(BlockingIOError, match="no process"):
        dog.tell([7])
    ends = os.pipe()  # the new pipe may get the number of the pipe that was closed
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            dog.tell([])
    finally:
        for end in ends:
            os.close(end)
