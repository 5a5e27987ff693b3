"""Set the names of threads that programs like top(1) show."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

LONGEST = 15
"""Longest name that the kernel keeps, in bytes (TASK_COMM_LEN)."""


def show_name() -> None:
    """Pass the calling thread's name to the kernel; Python 3.14 and newer do that themselves."""
    with contextlib.suppress(OSError):  # the name is only informational
        Path("/proc/thread-self/comm").write_text(threading.current_thread().name[:LONGEST])
