"""Test registrations that fail, or that come while the container ends."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from governor.account import RegisteredProcess
from governor.shared_memory import Ledger, close_ledger, make_ledger
from governor.slots import Slots
from libcontrol import layout, pages


def make_slots(ledger: Ledger, did: Mock, processes: dict[int, RegisteredProcess]) -> Slots:
    """Return the slots of a container to which every process belongs."""
    member = SimpleNamespace(identifier="c", pid=os.getpid())
    members = Mock(of=lambda _: member, __getitem__=lambda *_: member, __len__=lambda _: 1)
    return Slots(
        key="c", ledger=ledger, n_devices=1, processes=processes, members=members,
        gpus=did.gpus, account=did.account, state=did.state,
    )  # fmt: skip


async def close_after(path: Path, n_steps: int) -> tuple[list[Any], list[Any]]:
    """Return the effects of a registration until the slots were closed, and those until the end.

    The slots are closed `n_steps` steps of the event loop after the process sent its request.
    """
    did = Mock()
    ledger = make_ledger()
    slots = make_slots(ledger, did, {})
    slots.listen(path)
    with socket.socket(socket.AF_UNIX) as process:
        process.setblocking(False)
        await asyncio.get_running_loop().sock_connect(process, str(path))
        for _ in range(5):  # its connection is accepted, and the governor waits for the request
            await asyncio.sleep(0)
        process.send(b"r")
        for _ in range(n_steps):
            await asyncio.sleep(0)
        slots.close(keep=False)
        slots.drop()
        before = list(did.mock_calls)
        for _ in range(10):
            await asyncio.sleep(0)
        after = list(did.mock_calls)
    close_ledger(ledger)
    return before, after


@pytest.mark.parametrize("n_steps", range(8))
def test_no_process_is_registered_after_the_container_ended(tmp_path: Path, n_steps: int) -> None:
    """The ledger's descriptor is closed by then, and its number may have been reused."""
    before, after = asyncio.run(close_after(tmp_path / "s", n_steps))
    assert after == before


def test_a_request_is_answered_within_seven_steps(tmp_path: Path) -> None:
    before, _ = asyncio.run(close_after(tmp_path / "s", 7))
    assert "state.register" in [cast("Any", call)[0] for call in before]


def test_a_process_that_a_gpu_cannot_take_leaves_its_slot_free(tmp_path: Path) -> None:
    async def scene() -> None:
        did = Mock()
        did.gpus.enter.side_effect = OSError(errno.EMFILE, "Too many open files")
        processes: dict[int, RegisteredProcess] = {}
        ledger = make_ledger()
        slots = make_slots(ledger, did, processes)
        slots.listen(tmp_path / "s")
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as process:
            process.setblocking(False)
            await loop.sock_connect(process, str(tmp_path / "s"))
            process.send(b"r")
            assert await loop.sock_recv(process, 4) == struct.pack("I", layout.NO_SLOT)
        assert processes == {}
        did.gpus.leave.assert_called_once_with(0)
        did.state.unregister.assert_called_once_with("c", 0)
        assert pages.read(ledger.page, pages.slot_base(0), "ledger_slot", "state") == 0
        slots.close(keep=False)
        close_ledger(ledger)

    asyncio.run(scene())
