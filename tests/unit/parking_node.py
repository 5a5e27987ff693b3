"""A container whose memory may be parked, on a simulated GPU; the test acts as the governor."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from libcontrol import layout, pages
from tests.unit.memory_node import Agent, MemoryNode

RESIDENT, CLOSING, PARKED, COMING = 0, 1, 3, 4

WORDS = """
import array, time
def fill(address, size, seed):
    words = array.array('Q', range(seed, seed + 512)).tobytes() * (size // 4096)
    driver.call('cuMemcpyHtoD_v2', address, words, size)
def holds(address, size, seed):
    words = array.array('Q', range(seed, seed + 512)).tobytes() * (size // 4096)
    found = ctypes.create_string_buffer(size)
    driver.call('cuMemcpyDtoH_v2', found, address, size)
    return found.raw == words
"""


class ParkingNode(MemoryNode):
    """A container whose memory may be parked."""

    def __init__(self, build: Path, work: Path, limit: int, shim: Path | None = None) -> None:
        self.arenas: list[int] = []
        self.has_arena = True
        super().__init__(build, work, limit, shim=shim)
        self.build = build
        self.write("parking", 1)
        self.write("resident", 1)

    def more_fds(self, slot: int) -> list[int]:
        """Create the host memory in which a process parks its device memory."""
        if not self.has_arena:
            return []
        arena = os.memfd_create("tidegate-arena", os.MFD_CLOEXEC)
        self.arenas.append(arena)
        self.make_ready(slot, self.limit)
        return [arena]

    def make_ready(self, slot: int, size: int) -> None:
        """Make the first `size` bytes of a process's arena ready."""
        os.truncate(f"/proc/self/fd/{self.arenas[-1]}", size)
        pages.write(self.ledger, pages.slot_base(slot), "ledger_slot", "arena", size)

    def close(self) -> None:
        super().close()
        for arena in self.arenas:
            os.close(arena)

    def order(self, *, resident: bool) -> None:
        """Order that the memory be unparked or parked, and wake the threads that move it."""
        self.write("resident", int(resident))
        view = ctypes.c_uint32.from_buffer(
            self.grant, layout.grant_device(0) + layout.offsets(layout.GRANT_DEVICE)["resident"]
        )
        wake, number = 1, {"x86_64": 202, "aarch64": 98}[platform.machine()]
        ctypes.CDLL(None).syscall(number, ctypes.byref(view), wake, 2**31 - 1, None, None, 0)

    def report(self, agent: Agent, name: str) -> int:
        """Read a field that a process reports in its slot."""
        assert agent.slot is not None
        base = pages.slot_base(agent.slot)
        return pages.read(self.ledger, base, "ledger_slot", name)

    def park(self, agent: Agent) -> None:
        self.order(resident=False)
        until(lambda: self.report(agent, "residency") == PARKED)

    def unpark(self, agent: Agent) -> None:
        self.order(resident=True)
        until(lambda: self.report(agent, "residency") == RESIDENT)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
