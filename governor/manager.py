"""What the governor tells the service manager (sd_notify(3)): it is ready, it is alive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

PATIENCE_S = 0.5
"""Longest time for which a stuck service manager, with a full queue, holds the governor up, in
seconds."""


def notify(state: str) -> None:
    """Notify the service manager, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
        s.settimeout(PATIENCE_S)
        s.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


def watchdog_s() -> float | None:
    """Return the time within which the manager wants a sign of life, in seconds; None if never."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(usec) / 1e6 if is_ours and usec.isdecimal() and int(usec) else None


async def feed_watchdog(within_s: float) -> None:
    """Send signs of life from the event loop, twice within the time in which one is wanted."""
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(within_s / 2)
