"""A stand-in for NVIDIA's kernel module: objects, control calls and the trace, as its ioctls behave.

Its behaviour follows the published source (580.142, src/nvidia/src/kernel/rmapi). A call on a
client is valid only through the open file that allocated the client (`rmclientValidate_IMPL`,
strict). GET_ACCESS_RIGHTS, called on the caller's own client, answers about any client. Parameters
must have their exact size. Client handles come from a counter. Here, open files are identified by
descriptor, because each descriptor is a separate file. The clock advances only when a test advances
it. Only a process that has the GPU's device node open can allocate a device object
(`osIsGpuAccessible`); here, the node is `nvidia3` of `make_nodes`.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from governor.hardware import calls
from governor.hardware.trace import RESTORE

OK, INVALID_ARGUMENT, INVALID_CLIENT, NOT_FOUND, NOT_SUPPORTED = 0, 0x1F, 0x23, 0x57, 0x56
INSUFFICIENT_PERMISSIONS = 0x1B
UUID = "GPU-6cfd9e5c-0000-0000-0000-000000000001"
GPU_ID = 0x600
RECORD = calls.RECORD_HEADER_SIZE + calls.SWITCH_RECORD.size


def make_nodes(directory: Path) -> dict[str, Any]:
    """Create device nodes and their entries in /proc; return the arguments that locate them."""
    for name in ("nvidiactl", "nvidia0", "nvidia3"):
        (directory / name).touch()
    proc = directory / "proc"
    for i, (uuid, minor) in enumerate([("GPU-other", 0), (UUID, 3)]):
        gpu = proc / f"driver/nvidia/gpus/0000:0{i}:00.0"
        gpu.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        (gpu / "information").write_text(text)
    (proc / "driver/nvidia/version").write_text("NVRM version: ...  580.159.04  Release Build\n")
    return {"path": str(directory / "nvidiactl"), "proc": proc}


def has_node_open() -> bool:
    """Return whether this process has the GPU's device node open."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if os.readlink(f"/proc/self/fd/{name}").endswith("/nvidia3"):  # noqa: PTH115
                return True
        except OSError:
            continue
    return False


@dataclass
class Object:
    parent: int
    kind: int
    timeslice_us: int = 2048
    off: int = 0  # number of times switched off and not yet on again, as the driver counts
    data: bytearray = field(default_factory=bytearray)


class KernelModule:
    """A kernel module with clients by handle; each has its objects, and the descriptor by which it
    was allocated.
    """

    def __init__(self, branch: int = 580) -> None:
        self.branch = branch
        self.clients: dict[int, tuple[int, dict[int, Object]]] = {}
        self.asked: list[tuple[str, int]] = []  # names of control calls and their answers
        self.refuse: dict[str, int] = {}  # answer to give, by the name of the call
        self.files: dict[int, mmap.mmap] = {}  # memory by handle
        self.now_ns = 1_795_000_000_000_000_000
        self._next = itertools.count(calls.FIRST_CLIENT + 1)
        self._calls = {c.number: c for c in vars(calls).values() if isinstance(c, calls.Call)}
        self._put = self._sequence = 0
        self._enabled = False

    # ---- called by a test ----

    def process(self, fd: int, *, n_contexts: int = 1, first: int = calls.FIRST_OBJECT) -> int:
        """Create the client of a process that uses CUDA, allocated by this descriptor, and return it."""
        client = next(self._next)
        handles = itertools.count(first + 1)
        objects = {client: Object(0, 0x41)}
        objects[device := next(handles)] = Object(client, 0x80)
        objects[next(handles)] = Object(device, 0x2080)
        for _ in range(n_contexts):
            for engine, n_channels in ((0xCBC0, 8), (0xC8B5, 4)):  # compute; copy
                objects[group := next(handles)] = Object(device, 0xA06C)
                for _ in range(n_channels):
                    objects[channel := next(handles)] = Object(group, 0xC86F)
                    objects[next(handles)] = Object(channel, engine)
        self.clients[client] = (fd, objects)
        return client

    def turn(
        self, pid: int, context: int, ns: int, *, begins: bool = True, ends: bool = True
    ) -> None:
        """Restore a context on the GPU, run it for the given time, and write the trace."""
        if begins:
            self._write(calls.TAG_BEGIN.value, pid, context)
            self.now_ns += RESTORE
        self.now_ns += ns
        if ends:
            self._write(calls.TAG_END.value, pid, context)

    def lose(self, n: int) -> None:
        """Drop records, as the GPU does."""
        self._sequence += n

    def objects(self, client: int, kind: int) -> dict[int, Object]:
        return {h: o for h, o in self.clients[client][1].items() if o.kind == kind}

    # ---- the ioctls ----

    def ioctl(self, fd: int, request: int, data: bytearray) -> None:
        number, size = request & 0xFF, request >> 16 & 0x3FFF
        assert request == calls.ioctl_request(number, size)
        assert len(data) == size
        if number == calls.ESC_ALLOC.value:
            self._alloc(fd, data)
        elif number == calls.ESC_MAP.value:
            self._map(data)
        else:
            self._control(fd, data)

    def _alloc(self, fd: int, data: bytearray) -> None:
        layout = calls.ALLOC if self.branch >= 535 else calls.ALLOC_WITHOUT_SIZE
        root, parent, new, kind = struct.unpack_from("<IIII", data)
        if kind == calls.CLIENT.value:
            new = next(self._next)
            self.clients[new] = (fd, {new: Object(0, kind)})
        else:
            pointer = layout.get(data, "pAllocParms")
            sizes = {0x80: 56, 0x2080: 4, 0x90CD: 72, 0x90CE: 128 if self.branch >= 545 else 120}
            parameters = ctypes.string_at(pointer, sizes[kind])
            if layout is calls.ALLOC and layout.get(data, "paramsSize") != sizes[kind]:
                return struct.pack_into("<I", data, 28, INVALID_ARGUMENT)
            if kind == calls.DEVICE.value and not has_node_open():
                at = 28 if layout is calls.ALLOC else 24
                return struct.pack_into("<I", data, at, INSUFFICIENT_PERMISSIONS)
            assert parent in self.clients[root][1]
            self.clients[root][1][new] = Object(parent, kind, data=bytearray(parameters))
        struct.pack_into("<I", data, 8, new)
        struct.pack_into("<I", data, 28 if layout is calls.ALLOC else 24, OK)
        return None

    def _map(self, data: bytearray) -> None:
        """Map new memory at the given descriptor, as the real module does."""
        fd, size = struct.unpack_from("<i", data, 48)[0], calls.MAP.get(data, "length")
        memory = os.memfd_create("memory")
        os.ftruncate(memory, size)
        self.files[calls.MAP.get(data, "hMemory")] = mmap.mmap(memory, size)
        os.dup2(memory, fd, inheritable=False)
        os.close(memory)
        struct.pack_into("<I", data, 40, OK)

    def _control(self, fd: int, data: bytearray) -> None:
        client, target, number = (calls.CONTROL.get(data, n) for n in ("hClient", "hObject", "cmd"))
        call = self._calls[number]
        size = calls.CONTROL.get(data, "paramsSize")
        status = self.refuse.get(call.name, OK)
        if client not in self.clients or self.clients[client][0] != fd:
            status = INVALID_CLIENT
        elif target not in self.clients[client][1]:
            status = NOT_FOUND
        elif size != (call.parameters.size if call.parameters else 0):
            status = INVALID_ARGUMENT
        elif not status:
            address = calls.CONTROL.get(data, "params")
            parameters = bytearray(ctypes.string_at(address, size))
            status = getattr(self, f"_{call.name.rpartition('CMD_')[2].lower()}")(
                client, target, parameters
            )
            assert len(parameters) == size
            ctypes.memmove(address, bytes(parameters), size)
        self.asked.append((call.name, status))
        struct.pack_into("<I", data, 28, status)

    def _find(self, client: int, handle: int) -> Object | None:
        return self.clients[client][1].get(handle) if client in self.clients else None

    def _gpu_get_attached_ids(self, _client: int, _target: int, p: bytearray) -> int:
        struct.pack_into("<32I", p, 0, GPU_ID, *[calls.NO_GPU_ID] * 31)
        return OK

    def _gpu_get_id_info_v2(self, _client: int, _target: int, p: bytearray) -> int:
        return OK if struct.unpack_from("<I", p)[0] == GPU_ID else INVALID_ARGUMENT

    def _gpu_get_uuid_from_gpu_id(self, _client: int, _target: int, p: bytearray) -> int:
        p[8 : 8 + len(UUID)] = UUID.encode()
        return OK

    def _gpu_get_id(self, _client: int, _target: int, p: bytearray) -> int:
        struct.pack_into("<I", p, 0, GPU_ID)
        return OK

    def _client_get_access_rights(self, _client: int, _target: int, p: bytearray) -> int:
        handle, owner = struct.unpack_from("<II", p)
        return OK if self._find(owner, handle) else NOT_FOUND

    def _client_get_handle_info(self, client: int, _target: int, p: bytearray) -> int:
        handle, index = struct.unpack_from("<II", p)
        found = self._find(client, handle)
        if found is None:
            return NOT_FOUND
        struct.pack_into("<Q", p, 8, found.parent if index == 1 else found.kind)
        return OK

    def _get_timeslice(self, client: int, target: int, p: bytearray) -> int:
        struct.pack_into("<Q", p, 0, self.clients[client][1][target].timeslice_us)
        return OK

    def _set_timeslice(self, client: int, target: int, p: bytearray) -> int:
        self.clients[client][1][target].timeslice_us = struct.unpack_from("<Q", p)[0]
        return OK

    def _fifo_disable_channels(self, _client: int, _target: int, p: bytearray) -> int:
        off, n = p[0], struct.unpack_from("<I", p, 4)[0]
        if n > 64:
            return INVALID_ARGUMENT
        for i in range(n):
            client, channel = (struct.unpack_from("<I", p, at + 4 * i)[0] for at in (24, 280))
            found = self._find(client, channel)
            if found is None or found.kind & 0xFF != 0x6F:
                return INVALID_ARGUMENT  # the channels before it are switched
            found.off = found.off + 1 if off else max(0, found.off - 1)
        return OK

    def _timer_get_time(self, _client: int, _target: int, p: bytearray) -> int:
        struct.pack_into("<Q", p, 0, self.now_ns)
        return OK

    def _gr_fecs_bind_evtbuf_for_uid_v2(self, client: int, _target: int, p: bytearray) -> int:
        buffer = self._find(client, struct.unpack_from("<I", p)[0])
        return OK if buffer and struct.unpack_from("<I", p, 4)[0] == 24 else INVALID_ARGUMENT

    def _enable_events(self, client: int, target: int, p: bytearray) -> int:
        data = self.clients[client][1][target].data
        self._header, self._records = (
            self.files[struct.unpack_from("<I", data, at)[0]] for at in (60, 64)
        )
        self._n = struct.unpack_from("<I", data, 20)[0]
        self._enabled = bool(p[0])
        return OK

    def _update_get(self, _client: int, _target: int, p: bytearray) -> int:
        get = struct.unpack_from("<I", p)[0]
        if get >= self._n:
            return INVALID_ARGUMENT
        struct.pack_into("<I", self._header, 0, get)
        return OK

    def _flush(self, _client: int, _target: int, _p: bytearray) -> int:
        return OK

    def _write(self, tag: int, pid: int, context: int) -> None:
        sequence, self._sequence = self._sequence, self._sequence + 1
        if not self._enabled:
            return
        get = struct.unpack_from("<I", self._header)[0]
        if (self._put + 1) % self._n == get:
            dropped = struct.unpack_from("<Q", self._header, 16)[0]
            struct.pack_into("<Q", self._header, 16, dropped + 1)
            return
        record = struct.pack(
            "<HHIBBHIIHBBQ", 2, 0, 0, tag, 0, sequence & 0xFFFF, context, pid, 0, 0, 0, self.now_ns
        )
        self._records[self._put * RECORD : (self._put + 1) * RECORD] = record
        self._put = (self._put + 1) % self._n
        struct.pack_into("<I", self._header, 4, self._put)
