"""What a process has on the GPUs, found from outside.

The kernel module lists nothing. But handles are counters: a new client has the next number, and
libcuda numbers its objects in order. So clients are found by asking which handles exist, from a new
client's own downwards, and objects by asking which exist from FIRST_OBJECT on. These questions go
to our own client, and write nothing to the kernel's log. A client answers only through the open
file of /dev/nvidiactl that it came by; `pidfd_getfd` duplicates the process's (CAP_SYS_PTRACE).

A program that calls the driver by itself may number its objects as it likes, and is then not found
here; the trace names its pid all the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from governor.hardware import calls
from governor.hardware.driver import Driver

N_CLIENTS_LOOKED_AT = 4096
"""Clients that are older than so many others were found when they were new, but those of processes
that were there before the governor."""
N_FILES_LOOKED_AT = 4096
"""Of a process. Where it is on the GPU by others than these, the trace says so."""
GAP = 512
"""So many handles that do not exist, one after the other, end a client's objects."""
_PIDFD_GETFD = 438

_libc = ctypes.CDLL(None, use_errno=True)


class Group(NamedTuple):
    """A channel group that computes or draws: client, handle, GPU id and channels."""

    client: int
    handle: int
    gpu_id: int
    channels: tuple[int, ...]


class Holding(NamedTuple):
    """A process's client and its channel groups.

    `descriptor` is the process's own, of the open file that the client came by. No duplicate of it
    is kept: a client lives, with its memory, as long as its file is open anywhere.
    """

    pid: int
    client: int
    descriptor: int
    groups: tuple[Group, ...]


def duplicate_descriptor(pidfd: int, fd: int) -> int:
    """Return a duplicate of another process's descriptor; OSError where that is not allowed."""
    copy = int(_libc.syscall(_PIDFD_GETFD, pidfd, fd, 0))
    if copy < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return copy


@contextlib.contextmanager
def borrowed(pidfd: int, descriptor: int, device: str = calls.CONTROL_DEVICE) -> Iterator[int]:
    """Have a duplicate of a process's descriptor for a moment; OSError where it cannot be had.

    EBADF also where the number is another file's by now: no call of ours goes to that.
    """
    fd = duplicate_descriptor(pidfd, descriptor)
    try:
        if os.fstat(fd).st_rdev != os.stat(device).st_rdev:  # noqa: PTH116
            raise OSError(errno.EBADF, f"descriptor {descriptor} is another file")
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def borrowed_of(pid: int, descriptor: int, device: str = calls.CONTROL_DEVICE) -> Iterator[int]:
    """The same of a process that may have ended; a client answers to no other's open file."""
    pidfd = os.pidfd_open(pid)
    try:
        with borrowed(pidfd, descriptor, device) as fd:
            yield fd
    finally:
        os.close(pidfd)


def control_descriptors(pid: int, device: str, proc: Path = Path("/proc")) -> list[int]:
    """Return the descriptors of a process that are open files of the driver's control device.

    Told by device number: a container may have the node under any name.
    """
    wanted = os.stat(device).st_rdev  # noqa: PTH116
    found = []
    try:
        for entry in itertools.islice(os.scandir(proc / str(pid) / "fd"), N_FILES_LOOKED_AT):
            try:
                if os.stat(entry.path).st_rdev == wanted:  # noqa: PTH116
                    found.append(int(entry.name))
            except OSError:
                continue
    except OSError:
        return []
    return sorted(found)


def live_clients(driver: Driver, n: int = N_CLIENTS_LOOKED_AT) -> list[int]:
    """Return the handles of clients that exist of the last `n`, newest first, ours left out.

    `driver` has to be younger than what is looked for: its handle is where the search begins.
    """
    newest = driver.client - calls.FIRST_CLIENT
    return [
        client
        for i in range(1, min(n, calls.N_CLIENTS))
        if driver.exists(client := calls.FIRST_CLIENT + (newest - i) % calls.N_CLIENTS, client)
    ]


class _Object(NamedTuple):
    parent: int
    kind: int


def _objects(driver: Driver, client: int, fd: int) -> dict[int, _Object]:
    found: dict[int, _Object] = {}
    missing = 0
    layout = calls.GET_HANDLE_INFO.parameters
    assert layout  # noqa: S101
    for handle in range(calls.FIRST_OBJECT, calls.FIRST_OBJECT + calls.N_OBJECTS):
        if not driver.exists(client, handle):
            missing += 1
            if missing == GAP:
                break
            continue
        missing = 0
        answers = []
        for index in (calls.INFO_PARENT, calls.INFO_CLASS):
            values = {"hObject": handle, "index": index.value}
            status, data = driver.ask(calls.GET_HANDLE_INFO, client, values, client=client, fd=fd)
            answers.append(layout.get(data, "data") if status == 0 else 0)
        found[handle] = _Object(*answers)
    return found


def _gpu_ids(driver: Driver, client: int, fd: int, objects: dict[int, _Object]) -> dict[int, int]:
    """Return the GPU id of each device object, which its subdevice knows."""
    found = {}
    for handle, item in objects.items():
        if item.kind == calls.SUBDEVICE.value:
            status, data = driver.ask(calls.GET_GPU_ID, handle, {}, client=client, fd=fd)
            if status == 0:
                found[item.parent] = int.from_bytes(data, "little")
    return found


def _groups(driver: Driver, client: int, fd: int) -> tuple[Group, ...]:
    objects = _objects(driver, client, fd)
    gpu_ids = _gpu_ids(driver, client, fd, objects)
    computes = {
        objects[item.parent].parent
        for item in objects.values()
        if item.kind & 0xFF in calls.ENGINE_LOW_BYTES and item.parent in objects
    }
    found = []
    for handle, item in objects.items():
        if item.kind != calls.GROUP.value or handle not in computes:
            continue
        channels = tuple(
            channel
            for channel, other in objects.items()
            if other.parent == handle and other.kind & 0xFF == calls.CHANNEL_LOW_BYTE
        )
        found.append(Group(client, handle, gpu_ids.get(item.parent, calls.NO_GPU_ID), channels))
    return tuple(found)


def find_holdings(
    driver: Driver,
    pid: int,
    pidfd: int,
    clients: Iterable[int],
    *,
    device: str = calls.CONTROL_DEVICE,
    proc: Path = Path("/proc"),
) -> list[Holding]:
    """Return what a process has on the GPUs, one entry for each of its clients with channel groups.

    `clients` are those that may be the process's. OSError: the process is gone, or its descriptors
    cannot be had; all that was read by its number is that of another one then.
    """
    found: list[Holding] = []
    left = set(clients)
    for descriptor in control_descriptors(pid, device, proc):
        try:
            with borrowed(pidfd, descriptor, device) as fd:
                # A duplicate is the same open file, and its clients are known by then.
                answering = [c for c in sorted(left) if answers(driver, c, fd)]
                left.difference_update(answering)
                found += [
                    Holding(pid, client, descriptor, groups)
                    for client in answering
                    if (groups := _groups(driver, client, fd))
                ]
        except OSError as e:
            if e.errno != errno.EBADF:  # closed since
                raise
    signal.pidfd_send_signal(pidfd, 0)  # it is there still, so its number was its own
    return found


def answers(driver: Driver, client: int, fd: int) -> bool:
    """Return whether a client came by this open file."""
    values = {"hObject": client, "index": calls.INFO_CLASS.value}
    return driver.ask(calls.GET_HANDLE_INFO, client, values, client=client, fd=fd)[0] == 0
