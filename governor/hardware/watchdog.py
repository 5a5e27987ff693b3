"""Watchdog process: switches on the containers that a dead governor left switched off.

A container that is off does nothing until it is switched on, and a governor that was killed cannot
do that. So the governor starts this process and writes to a pipe what it is about to switch off:
each time, one line of JSON with everything that is off. When the pipe is closed, or silent for
SILENCE_S while something is off, everything in the last line is switched on. If that fails, it is
retried every AGAIN_S: without limit while the governor is alive, and N_TRIES times otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from governor.hardware.child import module_command

SILENCE_S = 1.0
"""Longest silence of a working governor, in seconds: turns and periods last 0.1 s."""

AGAIN_S = 0.5
N_TRIES = 10
"""Maximum number of attempts without a governor. It is bounded because the service manager starts
the next governor, which also switches everything on, only when this process has ended."""
RESTART_S = 10.0
"""Shortest interval, in seconds, between two watchdogs of one governor."""
CLOSE_S = 5.0
"""Longest wait for the end of the process, in seconds."""
PIPE_BYTES = 1 << 20
"""Size of the pipe, in bytes: a few lines with all channels of a thousand contexts fit."""


class Watchdog:
    """The governor's end of the pipe."""

    def __init__(self, reviver: str, arguments: Sequence[str]) -> None:
        """Start the process.

        It calls `reviver` (`module:function`) with `arguments` and what is off.
        """
        self._command = module_command(__name__, [reviver, *arguments])
        self._announced: list[Any] = []
        self._fd = -1
        self._start()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            start_new_session=True,  # a signal to the governor's process group does not end it
        )
        assert self._process.stdin is not None  # noqa: S101
        fd = self._process.stdin.fileno()
        try:
            # A watchdog that is stopped must not block the thread that steers the GPU.
            os.set_blocking(fd, False)
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            self.close()
            raise
        self._fd = fd

    def tell(self, off: Sequence[Any]) -> None:
        """Announce what is about to be switched off; raise OSError if the watchdog is not reading.

        A watchdog that has ended, for instance because of the OOM killer, is replaced.
        """
        try:
            self._write(off, is_news=off != self._announced)
        except BrokenPipeError:
            if time.monotonic() < self._started_at + RESTART_S:
                raise
            self.close()
            self._start()
            self._write(off, is_news=True)
        self._announced = list(off)

    def _write(self, off: Sequence[Any], *, is_news: bool) -> None:
        # If nothing has changed, an empty line shows that the governor is working.
        line = json.dumps(list(off)).encode() + b"\n" if is_news else b"\n"
        if os.write(self._fd, line) != len(line):
            raise BlockingIOError("the watchdog is not reading")

    def close(self) -> None:
        """Stop the process, after it has switched on what is off."""
        assert self._process.stdin is not None  # noqa: S101
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._fd = -1  # the number may be reused for another file
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)


def watch(reviver: str, arguments: Sequence[str]) -> None:
    """Read what is off until the pipe is closed; switch it on then, or when the pipe is silent."""
    module, _, function = reviver.partition(":")
    revive = getattr(importlib.import_module(module), function)
    off: list[Any] = []
    is_revived = False
    n_failed = n_alone = 0
    buffer = b""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    while True:
        silence_s = AGAIN_S if n_failed else SILENCE_S
        ready = poll.poll(silence_s * 1000 if off and not is_revived else None)
        data = os.read(0, 1 << 16) if ready else b""
        if data:
            lines = (buffer + data).split(b"\n")
            buffer = lines.pop()
            for line in lines:
                off = json.loads(line) if line else off
            is_revived, n_failed = False, 0
            continue
        if off and not is_revived:
            is_revived = _is_done(revive, [*arguments, off], n_failed)
            n_failed += not is_revived
        if ready:  # the pipe was closed
            n_alone += 1
            if not off or is_revived or n_alone >= N_TRIES:
                return
            time.sleep(AGAIN_S)


def main() -> None:
    """Run the watchdog; the command line gives the reviver and its arguments.

    This process ends with the pipe, and ignores signals: a service manager signals it and the
    governor at the same time.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.argv[1], sys.argv[2:])


def _is_done(revive: Callable[..., None], arguments: Sequence[Any], n_failed: int) -> bool:
    """Switch on what is off; print the first failure; return whether it succeeded."""
    try:
        revive(*arguments)
    except Exception as e:  # noqa: BLE001 - retried, or the containers would stay switched off
        if not n_failed:
            print(
                f"tidegate-watchdog: containers are switched off and cannot be switched on: {e}; "
                f"retrying every {AGAIN_S:g} s",
                file=sys.stderr,
                flush=True,
            )
        return False
    return True
