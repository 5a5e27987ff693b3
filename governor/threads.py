"""Names of threads, as programs like top(1) show them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

LONGEST = 15
"""Longest name that the kernel keeps, in bytes (TASK_COMM_LEN)."""


def show_name() -> None:
    """Tell the kernel the calling thread's name; Python 3.14 and newer have done so already."""
    with contextlib.suppress(OSError):  # it is for the administrator's eyes only
        Path("/proc/thread-self/comm").write_text(threading.current_thread().name[:LONGEST])
