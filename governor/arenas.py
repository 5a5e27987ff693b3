"""Host memory in which the processes of a container park their device memory.

Each process has its own arena, a memfd that it maps when it registers. The governor makes the arena
ready piece by piece, so the memory is charged to the governor's control group and not to the
container's, and exists before it is needed. When the process has ended, the memory is given back
even if a descriptor of the file has been passed on; the kernel clears it before it is used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from governor.account import RegisteredProcess
from governor.processes import mapped, start_time
from governor.shared_memory import memfd_device
from libcontrol import layout, pages

ARENA = "tidegate-arena"
MAPPED = f"/memfd:{ARENA} (deleted)"

SPARE = 1 << 30
"""Bytes of the node's memory that are left available when arenas grow."""
SEARCH_S = 0.5
"""Time limit of the search for the arenas of a recovered container, in seconds."""

_PUNCH_HOLE, _KEEP_SIZE = 2, 1


class ArenaError(Exception):
    """There is no host memory for an arena; the message states what is short."""


def available() -> int:
    """Return the bytes of memory that are available on this node, from /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _punch(fd: int, size: int) -> None:
    """Give back the memory of a file's first `size` bytes; Python has no function for this."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, 0, size)


async def _no_wait() -> None:
    pass


@dataclass(eq=False)
class _Arena:
    """The arena of one process; compared by identity, because slots and descriptors are reused."""

    fd: int
    ready: int = 0


class Arenas:
    """The arenas of one container, by slot."""

    def __init__(self, ledger: mmap, available: Callable[[], int] = available) -> None:
        """Start without arenas; the size that is ready is written to the slots of `ledger`."""
        self._ledger, self._available = ledger, available
        self._arenas: dict[int, _Arena] = {}

    def open(self, slot: int) -> None:
        """Create the arena of a new process; none of it is ready yet."""
        self.close(slot)
        # No seals are allowed, so the process cannot prevent the governor from making it larger.
        self._arenas[slot] = _Arena(os.memfd_create(ARENA, os.MFD_CLOEXEC))
        self._publish(slot)

    def descriptor(self, slot: int) -> int | None:
        """Return the descriptor of a process's arena, or None if it has none."""
        return self._arenas[slot].fd if slot in self._arenas else None

    def ready(self, slot: int) -> int:
        """Return how many bytes are ready for a process."""
        return self._arenas[slot].ready if slot in self._arenas else 0

    async def grow(
        self, slot: int, size: int, turn: Callable[[], Awaitable[None]] = _no_wait
    ) -> None:
        """Make at least `size` bytes ready, piece by piece in a thread; that may take a while.

        `turn` is awaited before each piece. Raise ArenaError if there is no memory. The process may
        end in the meantime.
        """
        arena = self._arenas.get(slot)
        if arena is None:
            return
        try:
            fd = os.dup(arena.fd)  # the arena may be closed while the thread runs
        except OSError as e:
            raise ArenaError(f"host memory cannot be reserved: {e.strerror}") from e
        try:
            while arena.ready < size:
                await turn()
                if self._arenas.get(slot) is not arena:
                    break
                missing = layout.ARENA_PIECE + SPARE - self._available()
                if missing > 0:
                    raise ArenaError(f"this node lacks {missing} bytes of memory")
                end = arena.ready + layout.ARENA_PIECE
                await asyncio.to_thread(os.posix_fallocate, fd, arena.ready, layout.ARENA_PIECE)
                if self._arenas.get(slot) is arena:
                    arena.ready = end
                    self._publish(slot)
                else:
                    _punch(fd, end)
        except OSError as e:
            raise ArenaError(f"host memory cannot be reserved: {e.strerror}") from e
        finally:
            os.close(fd)

    def _publish(self, slot: int) -> None:
        ready = self._arenas[slot].ready
        pages.write(self._ledger, pages.slot_base(slot), "ledger_slot", "arena", ready)

    def close(self, slot: int) -> None:
        """Give back the memory of a process that has ended."""
        arena = self._arenas.pop(slot, None)
        if arena is not None:
            if arena.ready:
                _punch(arena.fd, arena.ready)
            os.close(arena.fd)

    def drop(self) -> None:
        """Close the descriptors of processes that keep their memory."""
        for arena in self._arenas.values():
            os.close(arena.fd)
        self._arenas.clear()

    @property
    def total(self) -> int:
        """The number of bytes that are ready, over all processes."""
        return sum(arena.ready for arena in self._arenas.values())

    def find(self, processes: Iterable[RegisteredProcess]) -> None:
        """Find the arenas of running processes, after a restart of the governor.

        An arena that is not found can still be used, but does not grow.
        """
        device = memfd_device()
        until = time.monotonic() + SEARCH_S
        for process in processes:
            for path, _ in mapped(process.pid, MAPPED, device):
                with contextlib.suppress(OSError):
                    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                    if start_time(process.pid) != process.start:
                        os.close(fd)
                        break
                    # The file's size is used, not the slot's value, which the process can change.
                    status = os.fstat(fd)
                    ready = min(status.st_size, status.st_blocks * 512)
                    self._arenas[process.slot] = _Arena(fd, ready)
                    self._publish(process.slot)
                    break
            if time.monotonic() > until:
                break
