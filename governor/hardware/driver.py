"""Make calls to NVIDIA's kernel module, as described by the table in `calls`.

A `DriverClient` is a client of the kernel module, and belongs to this process. An object of another
client is identified by the pair of client and object. A call on a foreign client is accepted only
through the open file with which that client was allocated (`discovery` duplicates it from the
process). Calls take 0.1 to 0.7 ms, and wait for locks that all GPUs on the host share, so they are
made on a separate thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from governor.hardware import calls

Values = Mapping[str, int | list[int] | tuple[int, ...]]
Ioctl = Callable[[int, int, bytearray], None]

_STATUS_NAMES = {constant.value: constant.name for constant in calls.STATUSES}
_HANDLES = 0x7D600000
"""First handle of our own objects, chosen so that they stand out in a debugger."""


class DriverCallError(Exception):
    """The driver refused a call with `status`."""

    def __init__(self, what: str, status: int) -> None:
        self.status = status
        super().__init__(f"{what}: {_STATUS_NAMES.get(status, f'status {status:#x}')}")


def module_branch(proc: Path = Path("/proc")) -> int | None:
    """Return the branch of the running kernel module, 580 for 580.159.04; None if there is none."""
    try:
        text = (proc / "driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,})\.\d+", text)
    return int(found[1]) if found else None


def node_of(uuid: str, proc: Path = Path("/proc")) -> str | None:
    """Return the name of a GPU's device node, `nvidia0`; None if it is not known."""
    for path in (proc / "driver/nvidia/gpus").glob("*/information"):
        try:
            text = path.read_text()
        except OSError:
            continue
        minor = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        if minor and re.search(rf"^GPU UUID:\s*{re.escape(uuid)}\s*$", text, re.MULTILINE):
            return f"nvidia{minor[1]}"
    return None


def kernel_ioctl(fd: int, request: int, data: bytearray) -> None:
    """Make the system call."""
    fcntl.ioctl(fd, request, data)


class DriverGpu(NamedTuple):
    """A GPU, with its id in the driver and the handles of our device and subdevice objects."""

    gpu_id: int
    uuid: str
    device: int
    subdevice: int


class _ControlRequest:
    """A control call, which may be made more than once."""

    def __init__(self, call: calls.Call, client: int, target: int, values: Values) -> None:
        self.parameters = call.parameters.pack(values) if call.parameters else bytearray()
        # As long as the buffer exists, the parameters stay at their address.
        size = max(1, len(self.parameters))
        self._buffer = (ctypes.c_char * size).from_buffer(self.parameters or bytearray(1))
        self._data = calls.CONTROL.pack(
            {
                "hClient": client,
                "hObject": target,
                "cmd": call.number,
                "params": ctypes.addressof(self._buffer) if self.parameters else 0,
                "paramsSize": len(self.parameters),
            }
        )
        self._number = calls.ioctl_request(calls.ESC_CONTROL.value, len(self._data))

    def make(self, ioctl: Ioctl, fd: int) -> int:
        """Make the call; return the driver's status."""
        ioctl(fd, self._number, self._data)
        return calls.CONTROL.get(self._data, "status")


class DriverClient:
    """A client of the kernel module, until it is closed; methods raise OSError or DriverCallError.

    `branch` is that of the kernel module, and `ioctl` makes the system call. The device nodes are
    in the directory of `path`.
    """

    def __init__(
        self,
        branch: int,
        *,
        path: str = calls.CONTROL_DEVICE,
        proc: Path = Path("/proc"),
        ioctl: Ioctl = kernel_ioctl,
    ) -> None:
        if branch < calls.FIRST_BRANCH:
            raise DriverCallError(
                f"the kernel module is from branch {branch}, but Tidegate supports calls "
                f"only from branch {calls.FIRST_BRANCH} onwards",
                0x56,
            )
        self._ioctl = ioctl
        self._path, self._proc = path, proc
        self._nodes: list[int] = []
        self._existence: _ControlRequest | None = None
        self._alloc = calls.ALLOC if branch >= calls.ALLOC.since else calls.ALLOC_WITHOUT_SIZE
        node = branch >= calls.MEMORY_ALLOC.since
        self._memory = calls.MEMORY_ALLOC if node else calls.MEMORY_ALLOC_WITHOUT_NODE
        self._n_handles = 0
        self.client = 0
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.client = self.allocate(0, calls.CLIENT, None, {}, handle=0)
        except BaseException:
            os.close(self.fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the client with all its objects."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        while self._nodes:
            os.close(self._nodes.pop())

    def allocate(
        self,
        parent: int,
        kind: calls.Constant,
        layout: calls.Layout | None,
        values: Values,
        *,
        handle: int | None = None,
    ) -> int:
        """Allocate an object under `parent`; return its handle."""
        if handle is None:
            self._n_handles += 1
            handle = _HANDLES + self._n_handles
        parameters = layout.pack(values) if layout else bytearray()
        buffer = (ctypes.c_char * max(1, len(parameters))).from_buffer(parameters or bytearray(1))
        request: dict[str, int] = {
            "hRoot": self.client,
            "hObjectParent": parent,
            "hObjectNew": handle,
            "hClass": kind.value,
            "pAllocParms": ctypes.addressof(buffer) if parameters else 0,
        }
        if self._alloc is calls.ALLOC:
            request["paramsSize"] = len(parameters)
        data = self._alloc.pack(request)
        self._ioctl(self.fd, calls.ioctl_request(calls.ESC_ALLOC.value, len(data)), data)
        status = self._alloc.get(data, "status")
        if status:
            raise DriverCallError(kind.name, status)
        return self._alloc.get(data, "hObjectNew")

    def ask(
        self, call: calls.Call, target: int, values: Values, *, client: int = 0, fd: int = -1
    ) -> tuple[int, bytearray]:
        """Make a control call on an object; return the driver's status and the parameters.

        Without `client` the object is ours. A foreign client's object needs that client's open file
        as `fd`.
        """
        request = _ControlRequest(call, client or self.client, target, values)
        return request.make(self._ioctl, self.fd if fd < 0 else fd), request.parameters

    def control(
        self, call: calls.Call, target: int, values: Values, *, client: int = 0, fd: int = -1
    ) -> bytearray:
        """Make a control call as `ask` does; return the parameters, or raise DriverCallError."""
        status, parameters = self.ask(call, target, values, client=client, fd=fd)
        if status:
            raise DriverCallError(call.name, status)
        return parameters

    def exists(self, client: int, handle: int) -> bool:
        """Return whether a client, of any process, has this object; nothing is logged if not.

        A search makes up to a thousand of these calls for each client, so the request is kept, and
        only the two handles are written. Only one thread at a time may call this method.
        """
        call = calls.GET_ACCESS_RIGHTS
        assert call.parameters  # noqa: S101
        if self._existence is None:
            self._existence = _ControlRequest(call, self.client, self.client, {})
        call.parameters.put(self._existence.parameters, "hClient", client)
        call.parameters.put(self._existence.parameters, "hObject", handle)
        return self._existence.make(self._ioctl, self.fd) == 0

    def gpu(self, uuid: str) -> DriverGpu | None:
        """Open a GPU with a device and a subdevice object; None if no process has it open."""
        ids = self.control(calls.GET_ATTACHED_IDS, self.client, {})
        for i in range(0, len(ids), 4):
            gpu_id = int.from_bytes(ids[i : i + 4], "little")
            if gpu_id != calls.NO_GPU_ID and self._uuid(gpu_id) == uuid:
                return self._open_gpu(gpu_id, uuid)
        return None

    def _uuid(self, gpu_id: int) -> str:
        answer = self.control(calls.GET_UUID, self.client, {"gpuId": gpu_id})
        assert calls.GET_UUID.parameters  # noqa: S101
        return calls.GET_UUID.parameters.text(answer, "gpuUuid")

    def _open_gpu(self, gpu_id: int, uuid: str) -> DriverGpu:
        # The kernel module creates a device object only for a process that has the GPU's device
        # node open (`osIsGpuAccessible`); libraries like NVML open it for their process.
        name = node_of(uuid, self._proc)
        if name:
            node = str(Path(self._path).with_name(name))
            self._nodes.append(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        info = self.control(calls.GET_ID_INFO, self.client, {"gpuId": gpu_id})
        layout = calls.GET_ID_INFO.parameters
        assert layout  # noqa: S101
        device = self.allocate(
            self.client,
            calls.DEVICE,
            calls.DEVICE_ALLOC,
            {"deviceId": layout.get(info, "deviceInstance"), "vaMode": calls.VA_MODE_MULTIPLE},
        )
        subdevice = self.allocate(
            device,
            calls.SUBDEVICE,
            calls.SUBDEVICE_ALLOC,
            {"subDeviceId": layout.get(info, "subDeviceInstance")},
        )
        return DriverGpu(gpu_id, uuid, device, subdevice)

    def map_memory(self, size: int) -> tuple[int, mmap.mmap]:
        """Map memory that the driver writes, read-only; return its handle and the mapping."""
        handle = self.allocate(
            self.client,
            calls.MEMORY,
            self._memory,
            {"attr": calls.MEMORY_ATTR, "attr2": calls.MEMORY_ATTR2, "size": size},
        )
        # The kernel module stores the permitted mapping in the open file, which has room for one.
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            data = calls.MAP.pack(
                {
                    "hClient": self.client,
                    "hDevice": self.client,
                    "hMemory": handle,
                    "length": size,
                    "flags": calls.MAP_READ_ONLY,
                }
            )
            data += fd.to_bytes(4, "little") + bytes(4)
            self._ioctl(self.fd, calls.ioctl_request(calls.ESC_MAP.value, len(data)), data)
            status = calls.MAP.get(data, "status")
            if status:
                raise DriverCallError(calls.ESC_MAP.name, status)
            return handle, mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)

    # ---- calls that steer the scheduler ----

    def timeslice_us(self, client: int, group: int, fd: int) -> int:
        """Return the time slice that was set for a channel group, in microseconds."""
        answer = self.control(calls.GET_TIMESLICE, group, {}, client=client, fd=fd)
        return int.from_bytes(answer, "little")

    def set_timeslice(self, client: int, group: int, fd: int, us: int) -> None:
        """Set a channel group's time slice; it takes effect with the group's next turn."""
        self.control(calls.SET_TIMESLICE, group, {"timesliceUs": us}, client=client, fd=fd)

    def switch_channels(self, gpu: DriverGpu, channels: list[tuple[int, int]], *, on: bool) -> None:
        """Switch channels, given as (client, channel), on or off; running work is interrupted.

        One call accepts up to 64 channels; more are switched in several calls. After an error, some
        of them may have been switched.
        """
        for i in range(0, len(channels), calls.N_SWITCHED):
            part = channels[i : i + calls.N_SWITCHED]
            self.control(
                calls.DISABLE_CHANNELS,
                gpu.subdevice,
                {
                    "bDisable": 0 if on else 1,
                    "numChannels": len(part),
                    "hClientList": [client for client, _ in part],
                    "hChannelList": [channel for _, channel in part],
                },
            )

    def gpu_time_ns(self, gpu: DriverGpu) -> int:
        """Return the GPU's clock, which trace records use, in nanoseconds since 1970."""
        return int.from_bytes(self.control(calls.GET_TIME, gpu.subdevice, {}), "little")
