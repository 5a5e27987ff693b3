"""What the governor tells the service manager: that it is ready, that it lives (sd_notify(3))."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

PATIENCE_S = 0.5
"""A manager that is stuck itself, with a full queue, holds the governor up for no longer."""


def notify(state: str) -> None:
    """Tell the service manager, where there is one."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
        s.settimeout(PATIENCE_S)
        s.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


def watchdog_s() -> float | None:
    """Return within how many seconds the manager wants a sign of life; None where it wants none."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(usec) / 1e6 if is_ours and usec.isdecimal() and int(usec) else None


async def feed_watchdog(within_s: float) -> None:
    """Give signs of life from the event loop, twice in the time in which one is wanted."""
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(within_s / 2)
