"""Test the host memory for parked memory: allocated piece by piece, and given back."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from governor import arenas as module
from governor.arenas import SPARE, ArenaError, Arenas, available
from governor.processes import start_time
from libcontrol import layout, pages

PIECE = layout.ARENA_PIECE


@pytest.fixture
def ledger():
    with mmap.mmap(-1, layout.LEDGER_SIZE) as page:
        pages.init_ledger(page)
        yield page


def said(ledger: mmap.mmap, slot: int) -> int:
    return pages.read(ledger, pages.slot_base(slot), "ledger_slot", "arena")


def test_an_arena_grows_by_whole_pieces(ledger) -> None:
    arenas = Arenas(ledger)
    arenas.open(3)
    assert said(ledger, 3) == 0
    asyncio.run(arenas.grow(3, PIECE + 1))
    assert said(ledger, 3) == arenas.ready(3) == arenas.total == 2 * PIECE
    fd = arenas.descriptor(3)
    assert fd is not None
    assert os.fstat(fd).st_blocks * 512 == 2 * PIECE
    asyncio.run(arenas.grow(3, PIECE))
    assert said(ledger, 3) == 2 * PIECE
    arenas.close(3)
    assert arenas.total == 0


def test_the_memory_is_given_back_even_if_the_descriptor_was_passed_on(ledger) -> None:
    arenas = Arenas(ledger)
    arenas.open(0)
    asyncio.run(arenas.grow(0, PIECE))
    passed_on = os.dup(arenas.descriptor(0) or 0)
    os.pwrite(passed_on, b"secret", 100)
    arenas.close(0)
    assert os.fstat(passed_on).st_blocks == 0
    assert os.pread(passed_on, 6, 100) == bytes(6)
    os.close(passed_on)


def test_a_process_cannot_prevent_its_arena_from_growing(ledger) -> None:
    arenas = Arenas(ledger)
    arenas.open(0)
    fd = os.dup(arenas.descriptor(0) or 0)

    with pytest.raises(OSError, match="not permitted"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    asyncio.run(arenas.grow(0, PIECE))
    os.ftruncate(fd, 0)
    asyncio.run(arenas.grow(0, 2 * PIECE))
    assert os.fstat(fd).st_size == 2 * PIECE
    arenas.close(0)
    os.close(fd)


def test_some_memory_is_left_for_the_node(ledger) -> None:
    left = SPARE + PIECE + 5
    arenas = Arenas(ledger, lambda: left)
    arenas.open(0)
    asyncio.run(arenas.grow(0, PIECE))
    left = SPARE + PIECE - 5
    with pytest.raises(ArenaError, match="this node lacks 5 bytes of memory"):
        asyncio.run(arenas.grow(0, 2 * PIECE))
    assert arenas.ready(0) == PIECE
    arenas.close(0)
    assert available() > 0


def test_a_process_that_ends_while_its_arena_grows_leaves_nothing(ledger, monkeypatch) -> None:
    arenas = Arenas(ledger)
    arenas.open(0)
    passed_on = os.dup(arenas.descriptor(0) or 0)

    def allocate(fd: int, offset: int, size: int) -> None:
        os.ftruncate(fd, offset + size)
        os.pwrite(fd, b"x" * 4096, offset)
        arenas.close(0)
        arenas.open(0)  # the slot's next process

    monkeypatch.setattr(module.os, "posix_fallocate", allocate)
    asyncio.run(arenas.grow(0, PIECE))
    assert os.fstat(passed_on).st_blocks == 0
    assert arenas.ready(0) == said(ledger, 0) == 0
    arenas.close(0)
    os.close(passed_on)


def test_a_process_that_ends_while_it_waits_for_its_turn_gets_nothing(ledger, monkeypatch) -> None:
    arenas = Arenas(ledger)
    arenas.open(0)

    async def end() -> None:
        arenas.close(0)

    monkeypatch.setattr(module.os, "posix_fallocate", lambda *_: pytest.fail("it was allocated"))
    asyncio.run(arenas.grow(0, PIECE, end))
    assert arenas.total == 0


def test_an_arena_that_was_not_opened_does_not_grow(ledger) -> None:
    arenas = Arenas(ledger)
    asyncio.run(arenas.grow(5, PIECE))
    arenas.close(5)
    assert arenas.descriptor(5) is None
    assert arenas.total == 0


HOLDER = """
import mmap, sys
arena = mmap.mmap(int(sys.argv[1]), 4096)
print("there", flush=True)
sys.stdin.read()
"""


def test_the_next_governor_finds_an_arena(ledger) -> None:
    first = Arenas(ledger)
    first.open(2)
    asyncio.run(first.grow(2, PIECE))
    fd = os.dup(first.descriptor(2) or 0)
    os.set_inheritable(fd, True)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(fd)],
        pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout
    assert child.stdout.readline() == b"there\n"
    first.drop()
    second = Arenas(ledger)
    second.find([SimpleNamespace(pid=child.pid, start=start_time(child.pid), slot=2)])
    assert second.ready(2) == PIECE
    asyncio.run(second.grow(2, 2 * PIECE))
    assert os.fstat(fd).st_size == 2 * PIECE
    second.close(2)
    assert os.fstat(fd).st_blocks == 0
    child.communicate()
    os.close(fd)
