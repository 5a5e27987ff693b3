"""Runs a process under the control library without a container and without a governor.

The control library is put in front of a driver of the caller's choice, in a separate mount
namespace where /run/tidegate is a directory with a grant page and a socket. The caller writes each
word of the page, so a test or a measurement controls the grants. This needs root, or user
namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shlex
import shutil
import socket
import struct
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from governor.parking import PARKED, RESIDENT
from libcontrol import layout, pages

HEARTBEAT_S = 0.05
FUTEX_WAKE = 1
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]

SETTINGS = {
    "inflight_ns": 4_000_000,
    "marker_ns": 250_000,
    "lookahead_ns": 120_000,
    "idle_release_ns": 200_000,
    "spin_ns": 0,
    "holds": 1,
}
"""Header of a grant page as a governor with default settings writes it."""

DEVICE: dict[str, int | bytes] = {
    "memory_limit": 1 << 40,
    "context_bytes": 512 << 20,
    "compute": 1_000_000,
    "compute_limit": 1_000_000,
    "deadline_ns": layout.OPEN,
    "epoch": 1,
    "signal": 1,
}
"""Default fields of a device's entry: a container alone on the GPU, with an open grant."""


def control_folder(folder: Path, control: Path, driver: Path) -> Path:
    """Put the control library `control` in front of the library `driver`, as a mirror does.

    Return the folder for LD_LIBRARY_PATH.
    """
    (folder / "origin").mkdir(parents=True, exist_ok=True)
    shutil.copy(control, folder / "libcuda.so.1")
    shutil.copy(driver, folder / "origin" / "libcuda-origin.so.1")
    return folder


def has_ended(process: socket.socket) -> bool:
    """Return whether a process has closed its connection; its wake-ups are read and discarded."""
    try:
        while process.recv(4096, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class GrantSandbox:
    """A context manager with a grant page that its owner writes, and a heartbeat.

    With `parks`, memory may be parked in host memory of `memory_limit` bytes for each process.
    """

    def __init__(
        self, directory: Path, uuids: list[bytes], *, parks: bool = False, **fields: int
    ) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.alive = True
        """Whether the heartbeat is being written."""
        self.returned = 0
        """Number of times that a process has reconnected."""
        path = directory / "grant"
        path.write_bytes(bytes(layout.GRANT_SIZE))
        with path.open("r+b") as file:
            self.grant = mmap.mmap(file.fileno(), layout.GRANT_SIZE)
        self._ledger_fd = os.memfd_create("ledger", os.MFD_CLOEXEC)
        os.ftruncate(self._ledger_fd, layout.LEDGER_SIZE)
        self.ledger = mmap.mmap(self._ledger_fd, layout.LEDGER_SIZE)
        self._word = (ctypes.c_char * layout.GRANT_SIZE).from_buffer(self.grant)
        self._uuids = uuids
        self._recovered = 0
        self._fields = {**fields, "parking": 1, "resident": 1} if parks else fields
        self._parks = parks
        self.reset()
        pages.init_ledger(self.ledger)
        # Via a descriptor of its directory: the path of a socket is limited to 107 bytes.
        self._folder_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"/proc/self/fd/{self._folder_fd}/governor.sock")
        (directory / "governor.sock").chmod(0o666)
        self._listener.listen(layout.N_SLOTS)
        self._processes: dict[int, socket.socket] = {}  # by slot
        self._pids: dict[int, int] = {}  # by slot
        self._used: set[int] = set()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._beat), threading.Thread(target=self._serve)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for process in [self._listener, *self._processes.values()]:
            process.close()
        os.close(self._folder_fd)
        os.close(self._ledger_fd)

    def reset(self) -> None:
        """Fill the page as a governor with default settings does."""
        # Fields without a default may have been changed as well.
        rest = {field.name: 0 for field in layout.GRANT_DEVICE.fields}
        devices: list[dict[str, int | bytes]] = [
            {**rest, **DEVICE, "uuid": uuid, **self._fields} for uuid in self._uuids
        ]
        header = {"on_governor_loss": 0, "unknown_functions": 0, **SETTINGS}
        beat = {"heartbeat_ns": time.monotonic_ns()}
        pages.init_grant(self.grant, settings=header | beat, devices=devices)

    def recover(self) -> None:
        """Refill the page, whatever its content, and wake all waiters; signals never decrease."""
        self._recovered += 1
        self.reset()
        for device in range(len(self._uuids)):
            self.write("epoch", self._recovered * 1000 % 2**32, device)
            self.write("signal", self._recovered * 1000 % 2**32, device)
            self.write("standby_ns", 0, device)
            self.wake(device)

    def write(self, field: str, value: int, device: int = 0) -> None:
        """Store a field of a device's entry."""
        pages.write(self.grant, layout.grant_device(device), "grant_device", field, value)

    def grant_until(self, deadline_ns: int, device: int = 0) -> None:
        """Begin a grant that ends at `deadline_ns` (0: end the grant), and wake the waiters."""
        base = layout.grant_device(device)
        now = time.monotonic_ns()
        epoch = pages.read(self.grant, base, "grant_device", "epoch")
        self.write("start_ns", now, device)
        self.write("epoch", (epoch + 1) % 2**32, device)
        self.write("deadline_ns", deadline_ns, device)
        self.wake(device)

    def wake(self, device: int = 0) -> None:
        """Advance a device's signal, and wake the threads that sleep on it."""
        base = layout.grant_device(device)
        signal = pages.read(self.grant, base, "grant_device", "signal")
        self.write("signal", (signal + 1) % 2**32, device)
        self._wake_field("signal", device)

    def order(self, *, resident: bool) -> None:
        """Order memory to be parked, or to be moved back to the first GPU."""
        self.write("resident", int(resident))
        self._wake_field("resident", 0)

    def has_moved(self) -> bool:
        """Return whether all processes have carried out the last order."""
        resident = pages.read(self.grant, layout.grant_device(0), "grant_device", "resident")
        wanted = RESIDENT if resident else PARKED
        # The list is a copy: a process may connect at any time.
        return all(self._read_slot(slot, "residency") == wanted for slot in list(self._processes))

    def moved(self) -> int:
        """Return how many bytes the running processes have parked and moved back."""
        return sum(self._read_slot(slot, "moved") for slot in list(self._processes))

    def _read_slot(self, slot: int, field: str) -> int:
        return pages.read(self.ledger, pages.slot_base(slot), "ledger_slot", field)

    def _wake_field(self, field: str, device: int) -> None:
        at = layout.grant_device(device) + layout.offsets(layout.GRANT_DEVICE)[field]
        ctypes.CDLL(None).syscall(
            SYS_FUTEX, ctypes.c_void_p(ctypes.addressof(self._word) + at), FUTEX_WAKE, 2**31 - 1, 0
        )

    def counter(self, field: str, device: int = 0) -> int:
        """Return the sum of a ledger field over the processes that have registered."""
        return pages.device_sums(self.ledger, [field], device)[field]

    def command(self, *arguments: str) -> list[str]:
        """Return a command that runs `arguments` in this environment."""
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        inside = (
            f"mount -t tmpfs tmpfs /run && mkdir /run/tidegate && "
            f'mount --bind {shlex.quote(str(self.directory))} /run/tidegate && exec "$@"'
        )
        return [
            "unshare", *user, "--mount", "--propagation", "private",
            "sh", "-c", inside, "sh", *arguments,
        ]  # fmt: skip

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            if self.alive:
                now = time.monotonic_ns()
                pages.write(self.grant, 0, "grant_header", "heartbeat_ns", now)

    def _serve(self) -> None:
        """Give each process that connects a slot: an unused one, or that of an ended process."""
        while True:
            try:
                process, _ = self._listener.accept()
            except OSError:
                return
            request = process.recv(1)
            credentials = process.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid = struct.unpack("3i", credentials)[0]
            if request == layout.AGAIN:
                self._answer_again(process, pid)
                continue
            for slot in [s for s, known in self._processes.items() if has_ended(known)]:
                self._processes.pop(slot).close()
            free = [slot for slot in range(layout.N_SLOTS) if slot not in self._processes]
            if not free or not request:
                process.close()
                continue
            # The counts of an ended process are kept for as long as there are unused slots.
            slot = min(free, key=lambda one: (one in self._used, one))
            if slot in self._used:
                pages.clear_slot(self.ledger, slot)
            self._used.add(slot)
            self._pids[slot] = pid
            self._processes[slot] = process
            pages.write(self.ledger, pages.slot_base(slot), "ledger_slot", "state", 1)
            pages.write(self.ledger, 0, "ledger_header", "n_slots", len(self._used))
            self._send(process, slot)

    def _send(self, process: socket.socket, slot: int) -> None:
        """Send a process its slot and descriptors: the ledger's, and that of host memory."""
        fds = [self._ledger_fd]
        if self._parks:
            size = self._fields["memory_limit"]
            fds.append(os.memfd_create("tidegate-arena", os.MFD_CLOEXEC))
            os.ftruncate(fds[1], size)
            pages.write(self.ledger, pages.slot_base(slot), "ledger_slot", "arena", size)
        _answer(process, slot, fds)
        for fd in fds[1:]:
            os.close(fd)

    def _answer_again(self, process: socket.socket, pid: int) -> None:
        """Answer a process that already has a slot, as a restarted governor does."""
        slot = next((s for s, known in self._pids.items() if known == pid), layout.NO_SLOT)
        if slot == layout.NO_SLOT:
            process.close()
            return
        known = self._processes.pop(slot, None)
        if known is not None:
            known.close()
        self._processes[slot] = process
        self.returned += 1
        _answer(process, slot, [self._ledger_fd])

    def lose_ledger(self) -> None:
        """Continue with a new ledger, like a governor that did not find the previous one."""
        fd = os.memfd_create("ledger", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.LEDGER_SIZE)
        ledger = mmap.mmap(fd, layout.LEDGER_SIZE)
        pages.init_ledger(ledger)
        for slot in list(self._pids):
            pages.write(ledger, pages.slot_base(slot), "ledger_slot", "state", 1)
            arena = self._read_slot(slot, "arena")
            pages.write(ledger, pages.slot_base(slot), "ledger_slot", "arena", arena)
        pages.write(ledger, 0, "ledger_header", "n_slots", len(self._used))
        os.close(self._ledger_fd)
        self._ledger_fd, self.ledger = fd, ledger
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connections, as a killed governor does."""
        for process in list(self._processes.values()):
            with contextlib.suppress(OSError):
                process.shutdown(socket.SHUT_RDWR)


def _answer(process: socket.socket, slot: int, fds: list[int]) -> None:
    """Send a process its slot and descriptors, unless it has closed the connection."""
    with contextlib.suppress(OSError):
        socket.send_fds(process, [struct.pack("I", slot)], fds)
