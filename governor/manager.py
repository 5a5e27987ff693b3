"""Notify the service manager (sd_notify(3)) of readiness, and feed its watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

PATIENCE_S = 0.5
"""Longest wait for a stuck service manager whose socket's queue is full, in seconds."""


def notify(state: str) -> None:
    """Send `state` to the service manager, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
        s.settimeout(PATIENCE_S)
        s.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


def watchdog_s() -> float | None:
    """Return this process's watchdog interval in seconds, or None if it has none."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(usec) / 1e6 if is_ours and usec.isdecimal() and int(usec) else None


async def feed_watchdog(within_s: float) -> None:
    """Send keep-alive messages from the event loop, twice per watchdog interval."""
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(within_s / 2)
