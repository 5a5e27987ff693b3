"""Find a process's driver clients and channel groups on the GPUs, from outside the process.

The kernel module has no call that lists them, but handles are assigned in sequence: a new client
gets the next number, and libcuda numbers its objects in order. Clients are thus found by probing
handles downwards from that of a newly allocated client, and objects by probing from FIRST_OBJECT
upwards. The probes are calls on that new client, and write nothing to the kernel's log. All other
calls on a client need the open file of /dev/nvidiactl with which it was allocated. `pidfd_getfd`
duplicates the process's descriptor for that file (CAP_SYS_PTRACE).

A program that calls the driver directly may number its objects in any way, and then they are not
found. The trace still shows its pid.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import select
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from governor.hardware import calls
from governor.hardware.driver import DriverClient

MAX_CLIENTS_PROBED = 4096
"""Number of most recent clients that an ordinary search probes. Older ones were found when they
were new, except those of processes that started before the governor."""
MAX_FILES_EXAMINED = 4096
"""Largest number of a process's descriptors that are examined. If the process uses the GPU through
other descriptors, the trace shows the process."""
GAP = 512
"""Number of consecutive missing handles after which the search for a client's objects ends."""
_PIDFD_GETFD = 438

_libc = ctypes.CDLL(None, use_errno=True)


class ChannelGroup(NamedTuple):
    """A channel group that computes or draws: client, handle, GPU id and channels."""

    client: int
    handle: int
    gpu_id: int
    channels: tuple[int, ...]


class Holding(NamedTuple):
    """A process's client and its channel groups.

    `descriptor` is the process's own descriptor for the open file that the client was allocated
    with. No duplicate of it is kept, because a client and its memory live as long as the file is
    open anywhere.
    """

    pid: int
    client: int
    descriptor: int
    groups: tuple[ChannelGroup, ...]


def duplicate_descriptor(pidfd: int, fd: int) -> int:
    """Return a duplicate of another process's descriptor; raise OSError if that is not allowed."""
    copy = int(_libc.syscall(_PIDFD_GETFD, pidfd, fd, 0))
    if copy < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return copy


def has_ended(pidfd: int) -> bool:
    """Return whether a process has ended; this needs no permission to send it signals."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


@contextlib.contextmanager
def borrowed(pidfd: int, descriptor: int, device: str = calls.CONTROL_DEVICE) -> Iterator[int]:
    """Lend a duplicate of a process's descriptor; raise OSError if it cannot be obtained.

    The error is also EBADF if the number now refers to another file, on which no call may be made.
    """
    fd = duplicate_descriptor(pidfd, descriptor)
    try:
        if os.fstat(fd).st_rdev != os.stat(device).st_rdev:  # noqa: PTH116
            raise OSError(errno.EBADF, f"descriptor {descriptor} refers to another file")
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def borrowed_of(pid: int, descriptor: int, device: str = calls.CONTROL_DEVICE) -> Iterator[int]:
    """Lend as `borrowed` does, by pid; if the pid was reused, the driver refuses the file."""
    pidfd = os.pidfd_open(pid)
    try:
        with borrowed(pidfd, descriptor, device) as fd:
            yield fd
    finally:
        os.close(pidfd)


def control_descriptors(pid: int, device: str, proc: Path = Path("/proc")) -> list[int]:
    """Return a process's descriptors for open files of the driver's control device.

    They are identified by device number, because a container may have the node under any name.
    """
    wanted = os.stat(device).st_rdev  # noqa: PTH116
    found = []
    try:
        for entry in itertools.islice(os.scandir(proc / str(pid) / "fd"), MAX_FILES_EXAMINED):
            try:
                if os.stat(entry.path).st_rdev == wanted:  # noqa: PTH116
                    found.append(int(entry.name))
            except OSError:
                continue
    except OSError:
        return []
    return sorted(found)


def live_clients(driver: DriverClient, n: int = MAX_CLIENTS_PROBED) -> list[int]:
    """Return which of the last `n` client handles exist, newest first, except that of `driver`.

    `driver` must be newer than the clients that are searched for: the search begins at its handle.
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


def _objects(driver: DriverClient, client: int, fd: int) -> dict[int, _Object]:
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


def _gpu_ids(
    driver: DriverClient, client: int, fd: int, objects: dict[int, _Object]
) -> dict[int, int]:
    """Return the GPU id of each device object, read from its subdevice."""
    found = {}
    for handle, item in objects.items():
        if item.kind == calls.SUBDEVICE.value:
            status, data = driver.ask(calls.GET_GPU_ID, handle, {}, client=client, fd=fd)
            if status == 0:
                found[item.parent] = int.from_bytes(data, "little")
    return found


def _groups(driver: DriverClient, client: int, fd: int) -> tuple[ChannelGroup, ...]:
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
        found.append(
            ChannelGroup(client, handle, gpu_ids.get(item.parent, calls.NO_GPU_ID), channels)
        )
    return tuple(found)


def find_holdings(
    driver: DriverClient,
    pid: int,
    pidfd: int,
    clients: Iterable[int],
    *,
    device: str = calls.CONTROL_DEVICE,
    proc: Path = Path("/proc"),
) -> list[Holding]:
    """Return a process's clients that have channel groups on the GPUs.

    `clients` are those that may belong to the process. Raise OSError if the process has ended,
    because its pid may have been reused while its files were read, or if its descriptors cannot be
    duplicated.
    """
    found: list[Holding] = []
    left = set(clients)
    for descriptor in control_descriptors(pid, device, proc):
        try:
            with borrowed(pidfd, descriptor, device) as fd:
                # If a descriptor duplicates another, its clients were found through the other.
                answering = [c for c in sorted(left) if answers(driver, c, fd)]
                left.difference_update(answering)
                found += [
                    Holding(pid, client, descriptor, groups)
                    for client in answering
                    if (groups := _groups(driver, client, fd))
                ]
        except OSError as e:
            if e.errno != errno.EBADF:  # closed in the meantime
                raise
    if has_ended(pidfd):
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
    return found  # the process is alive, so its pid was not reused


def answers(driver: DriverClient, client: int, fd: int) -> bool:
    """Return whether a client was allocated with this open file."""
    values = {"hObject": client, "index": calls.INFO_CLASS.value}
    return driver.ask(calls.GET_HANDLE_INFO, client, values, client=client, fd=fd)[0] == 0
