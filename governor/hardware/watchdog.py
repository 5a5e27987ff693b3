"""Switch on what a governor that died has left switched off.

A container that is off does nothing until it is switched on, and a governor that was killed cannot
do that. So the governor starts this process, and tells it through a pipe what it is about to switch
off: each time one line of JSON with everything that is off. When the pipe ends, or is silent for
SILENCE_S while something is off, everything in the last line is switched on.

    python -m governor.hardware.watchdog REVIVER ARGUMENT...
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
from collections.abc import Sequence
from typing import Any

SILENCE_S = 1.0
"""Longest silence of a governor that works, in seconds: turns and periods last 0.1 s."""


PIPE_BYTES = 1 << 20
"""Size of the pipe: a few lines with all channels of a thousand contexts."""


class Watchdog:
    """The governor's end of the pipe."""

    def __init__(self, reviver: str, arguments: Sequence[str]) -> None:
        """Start it; `reviver` is `module:function`, called with `arguments` and what is off."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "governor.hardware.watchdog", reviver, *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a signal to the governor's process group does not end it
        )
        assert self._process.stdin is not None  # noqa: S101
        self._fd = self._process.stdin.fileno()
        # A watchdog that is stopped must not block the thread that switches on.
        os.set_blocking(self._fd, False)
        fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._told: list[Any] = []

    def tell(self, off: Sequence[Any]) -> None:
        """Say what is off from now on, before it is switched off; OSError if nothing listens."""
        # If nothing has changed, an empty line says that the governor works.
        line = b"\n" if off == self._told else json.dumps(list(off)).encode() + b"\n"
        if os.write(self._fd, line) != len(line):
            raise BlockingIOError("the watchdog does not read")
        self._told = list(off)

    def close(self) -> None:
        """Stop the process, after everything was switched on."""
        assert self._process.stdin is not None  # noqa: S101
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def watch(reviver: str, arguments: Sequence[str]) -> None:
    """Read what is off until the pipe ends; switch it on then, or when the pipe is silent."""
    module, _, function = reviver.partition(":")
    revive = getattr(importlib.import_module(module), function)
    off: list[Any] = []
    is_revived = False
    buffer = b""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    while True:
        ready = poll.poll(SILENCE_S * 1000 if off and not is_revived else None)
        data = os.read(0, 1 << 16) if ready else b""
        if ready and data:
            lines = (buffer + data).split(b"\n")
            buffer = lines.pop()
            for line in lines:
                off = json.loads(line) if line else off
            is_revived = False
            continue
        if off and not is_revived:
            revive(*arguments, off)
            is_revived = True  # until the governor says again what is off
        if ready:
            return


if __name__ == "__main__":
    # This process ends with the pipe. A service manager signals it and the governor at the same
    # time.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.argv[1], sys.argv[2:])
