"""The driver calls that steer the GPU's own scheduler, as data.

The kernel module accepts ioctls on /dev/nvidiactl. A caller allocates objects under its own
*client* (NV_ESC_RM_ALLOC) and controls objects (NV_ESC_RM_CONTROL). The C names here are those in
NVIDIA's published source for the kernel module, https://github.com/NVIDIA/open-gpu-kernel-modules,
in which numbers, sizes and offsets are the same in every branch from 515 to 595, except where
`since` or `before` is set.
`python -m tools.check_driver_calls` compiles this table against that source.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

FIRST_BRANCH = 515
"""Oldest branch with a published source; that source was compared with this table."""

CONTROL_DEVICE = "/dev/nvidiactl"
IOCTL_TYPE = ord("F")

SIZES = {"u8": 1, "i32": 4, "u32": 4, "u64": 8}
_FORMATS = {"u8": "B", "i32": "i", "u32": "I", "u64": "Q"}


Buffer = bytes | bytearray | mmap.mmap


class CallField(NamedTuple):
    """One field of a structure: its name in C, type, offset, and number of elements."""

    name: str
    type: str
    offset: int
    n: int = 1


@dataclass(frozen=True, eq=False)
class Layout:
    """A structure of the driver: its name in C, the header that defines it, its size in bytes.

    `since` and `before` bound the branches in which it has this layout.
    """

    name: str
    header: str
    size: int
    fields: tuple[CallField, ...]
    since: int = FIRST_BRANCH
    before: int = 1000

    def pack(self, values: Mapping[str, int | list[int] | tuple[int, ...]]) -> bytearray:
        """Return the structure with these fields set, and zeros elsewhere."""
        out = bytearray(self.size)
        for name, value in values.items():
            offset, n, element = self._elements[name]
            if isinstance(value, int):
                element.pack_into(out, offset, value)
                continue
            if len(value) > n:
                raise ValueError(f"{self.name}.{name} holds {n}, not {len(value)}")
            struct.pack_into(f"<{len(value)}{element.format[1:]}", out, offset, *value)
        return out

    @functools.cached_property
    def _elements(self) -> dict[str, tuple[int, int, struct.Struct]]:
        """Offset, number of elements, and format of an element, by field.

        They are cached, because a search for a process's clients and channels makes a thousand
        calls, and would otherwise spend most of its time on these look-ups.
        """
        return {
            field.name: (field.offset, field.n, struct.Struct(f"<{_FORMATS[field.type]}"))
            for field in self.fields
        }

    def get(self, data: Buffer, name: str, at: int = 0) -> int:
        """Return a field, or its first element; the structure begins at `at`."""
        offset, _, element = self._elements[name]
        value: int = element.unpack_from(data, at + offset)[0]
        return value

    def put(self, data: bytearray, name: str, value: int) -> None:
        """Set a field of a structure that `pack` returned."""
        offset, _, element = self._elements[name]
        element.pack_into(data, offset, value)

    def only(self, *names: str) -> struct.Struct:
        """Return a format that unpacks these fields at once; they must be in order of offset."""
        format_, end = "<", 0
        for name in names:
            offset, n, element = self._elements[name]
            format_ += f"{offset - end}x{n}{element.format[1:]}"
            end = offset + n * element.size
        return struct.Struct(format_)

    def text(self, data: bytes | bytearray, name: str) -> str:
        """Return a field of bytes as text, up to its first zero byte."""
        field = next(field for field in self.fields if field.name == name)
        raw = bytes(data[field.offset : field.offset + field.n])
        return raw.split(b"\0", 1)[0].decode("ascii", "replace")


class Call(NamedTuple):
    """A control call: its name and number, the header that defines them, and its parameters."""

    name: str
    number: int
    header: str
    parameters: Layout | None


class Constant(NamedTuple):
    """A constant of the driver: its name in C, its value, and the header that defines it."""

    name: str
    value: int
    header: str


_ESCAPE = "nv_escape.h"
_NVOS = "nvos.h"
_CLIENT = "ctrl/ctrl0000/ctrl0000client.h"
_GPUS = "ctrl/ctrl0000/ctrl0000gpu.h"
_SUBDEVICE_GPU = "ctrl/ctrl2080/ctrl2080gpu.h"
_SUBDEVICE_FIFO = "ctrl/ctrl2080/ctrl2080fifo.h"
_SUBDEVICE_GR = "ctrl/ctrl2080/ctrl2080gr.h"
_SUBDEVICE_TIMER = "ctrl/ctrl2080/ctrl2080tmr.h"
_GROUP = "ctrl/ctrla06c.h"
_BUFFER = "ctrl/ctrl90cd.h"
_BUFFER_CLASS = "class/cl90cd.h"
_FECS = "class/cl90cdfecs.h"

# ---- ioctls ----

ESC_ALLOC = Constant("NV_ESC_RM_ALLOC", 0x2B, _ESCAPE)
ESC_CONTROL = Constant("NV_ESC_RM_CONTROL", 0x2A, _ESCAPE)
ESC_MAP = Constant("NV_ESC_RM_MAP_MEMORY", 0x4E, _ESCAPE)

ALLOC = Layout(
    "NVOS21_PARAMETERS",
    _NVOS,
    32,
    (
        CallField("hRoot", "u32", 0),
        CallField("hObjectParent", "u32", 4),
        CallField("hObjectNew", "u32", 8),
        CallField("hClass", "u32", 12),
        CallField("pAllocParms", "u64", 16),
        CallField("paramsSize", "u32", 24),
        CallField("status", "u32", 28),
    ),
    since=535,
)
ALLOC_WITHOUT_SIZE = dataclasses.replace(
    ALLOC,
    fields=(*ALLOC.fields[:5], CallField("status", "u32", 24)),
    since=FIRST_BRANCH,
    before=535,
)

CONTROL = Layout(
    "NVOS54_PARAMETERS",
    _NVOS,
    32,
    (
        CallField("hClient", "u32", 0),
        CallField("hObject", "u32", 4),
        CallField("cmd", "u32", 8),
        CallField("flags", "u32", 12),
        CallField("params", "u64", 16),
        CallField("paramsSize", "u32", 24),
        CallField("status", "u32", 28),
    ),
)

MAP = Layout(
    "NVOS33_PARAMETERS",
    _NVOS,
    48,
    (
        CallField("hClient", "u32", 0),
        CallField("hDevice", "u32", 4),
        CallField("hMemory", "u32", 8),
        CallField("offset", "u64", 16),
        CallField("length", "u64", 24),
        CallField("pLinearAddress", "u64", 32),
        CallField("status", "u32", 40),
        CallField("flags", "u32", 44),
    ),
)
"""The ioctl takes this structure, followed by the file descriptor to use for the mapping (i32) and
four bytes of padding."""

# ---- classes, and what they are allocated with ----

CLIENT = Constant("NV01_ROOT_CLIENT", 0x41, "class/cl0041.h")
DEVICE = Constant("NV01_DEVICE_0", 0x80, "class/cl0080.h")
SUBDEVICE = Constant("NV20_SUBDEVICE_0", 0x2080, "class/cl2080.h")
GROUP = Constant("KEPLER_CHANNEL_GROUP_A", 0xA06C, "class/cla06c.h")
BUFFER = Constant("NV_EVENT_BUFFER", 0x90CD, _BUFFER_CLASS)
MEMORY = Constant("NV01_MEMORY_DEVICELESS", 0x90CE, "class/cl90ce.h")
CHANNEL_LOW_BYTE = 0x6F
"""Low byte of the classes of channels, in every GPU architecture: 0xc46f Turing, 0xc56f Ampere,
0xc86f Hopper."""
ENGINE_LOW_BYTES = (0xC0, 0x97)
"""Low bytes of the compute and graphics classes: 0xc6c0 and 0xc697 Ampere, 0xcbc0 and 0xcb97
Hopper. A channel group without such an object does neither compute nor graphics work."""

DEVICE_ALLOC = Layout(
    "NV0080_ALLOC_PARAMETERS",
    "class/cl0080.h",
    56,
    (CallField("deviceId", "u32", 0), CallField("vaMode", "u32", 48)),
)
VA_MODE_MULTIPLE = 2
"""NV_DEVICE_ALLOCATION_VAMODE_MULTIPLE_VASPACES: no address space is created with the device."""

SUBDEVICE_ALLOC = Layout(
    "NV2080_ALLOC_PARAMETERS", "class/cl2080.h", 4, (CallField("subDeviceId", "u32", 0),)
)

MEMORY_ALLOC = Layout(
    "NV_MEMORY_ALLOCATION_PARAMS",
    _NVOS,
    128,
    (CallField("attr", "u32", 24), CallField("attr2", "u32", 28), CallField("size", "u64", 64)),
    since=545,
)
MEMORY_ALLOC_WITHOUT_NODE = dataclasses.replace(
    MEMORY_ALLOC, size=120, since=FIRST_BRANCH, before=545
)
MEMORY_ATTR = 1 << 25 | 1 << 29
"""NVOS32_ATTR_LOCATION_PCI (26:25) and NVOS32_ATTR_COHERENCY_CACHED (31:29)."""
MEMORY_ATTR2 = 1 << 22
"""NVOS32_ATTR2_PROTECTION_USER_READ_ONLY: the driver accepts event buffers only in such memory."""
MAP_READ_ONLY = 1
"""NVOS33_FLAGS_ACCESS_READ_ONLY."""

BUFFER_ALLOC = Layout(
    "NV_EVENT_BUFFER_ALLOC_PARAMETERS",
    _BUFFER_CLASS,
    72,
    (
        CallField("recordSize", "u32", 16),
        CallField("recordCount", "u32", 20),
        CallField("hSubDevice", "u32", 52),
        CallField("hBufferHeader", "u32", 60),
        CallField("hRecordBuffer", "u32", 64),
    ),
)
BUFFER_HEADER = Layout(
    "NV_EVENT_BUFFER_HEADER",
    _BUFFER_CLASS,
    32,
    (
        CallField("recordGet", "u32", 0),
        CallField("recordPut", "u32", 4),
        CallField("recordCount", "u64", 8),
        CallField("recordDropcount", "u64", 16),
    ),
)
RECORD_HEADER_SIZE = 8
"""sizeof(NV_EVENT_BUFFER_RECORD_HEADER), which precedes each record."""
SWITCH_RECORD = Layout(
    "NV_EVENT_BUFFER_FECS_RECORD_V2",
    _FECS,
    24,
    (
        CallField("tag", "u8", 0),
        CallField("seqno", "u8", 2, 2),
        CallField("context_id", "u32", 4),
        CallField("pid", "u32", 8),
        CallField("timestamp", "u64", 16),
    ),
)
TAG_BEGIN = Constant("NV_EVENT_BUFFER_FECS_CTXSWTAG_SIMPLE_START", 6, _FECS)
TAG_END = Constant("NV_EVENT_BUFFER_FECS_CTXSWTAG_SIMPLE_END", 7, _FECS)

# ---- control calls ----

GET_ATTACHED_IDS = Call(
    "NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS",
    0x201,
    _GPUS,
    Layout(
        "NV0000_CTRL_GPU_GET_ATTACHED_IDS_PARAMS", _GPUS, 128, (CallField("gpuIds", "u32", 0, 32),)
    ),
)
NO_GPU_ID = 0xFFFFFFFF
GET_ID_INFO = Call(
    "NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2",
    0x205,
    _GPUS,
    Layout(
        "NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS",
        _GPUS,
        32,
        (
            CallField("gpuId", "u32", 0),
            CallField("deviceInstance", "u32", 8),
            CallField("subDeviceInstance", "u32", 12),
        ),
    ),
)
GET_UUID = Call(
    "NV0000_CTRL_CMD_GPU_GET_UUID_FROM_GPU_ID",
    0x275,
    _GPUS,
    Layout(
        "NV0000_CTRL_GPU_GET_UUID_FROM_GPU_ID_PARAMS",
        _GPUS,
        268,
        (
            CallField("gpuId", "u32", 0),
            CallField("flags", "u32", 4),
            CallField("gpuUuid", "u8", 8, 256),
            CallField("uuidStrLen", "u32", 264),
        ),
    ),
)
GET_HANDLE_INFO = Call(
    "NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO",
    0xD02,
    _CLIENT,
    Layout(
        "NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS",
        _CLIENT,
        16,
        (CallField("hObject", "u32", 0), CallField("index", "u32", 4), CallField("data", "u32", 8)),
    ),
)
"""The call needs the open file with which the client was allocated. `data` is a union; a handle is
its low half."""
INFO_PARENT = Constant("NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_PARENT", 1, _CLIENT)
INFO_CLASS = Constant("NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_CLASSID", 2, _CLIENT)
GET_ACCESS_RIGHTS = Call(
    "NV0000_CTRL_CMD_CLIENT_GET_ACCESS_RIGHTS",
    0xD03,
    _CLIENT,
    Layout(
        "NV0000_CTRL_CLIENT_GET_ACCESS_RIGHTS_PARAMS",
        _CLIENT,
        12,
        (CallField("hObject", "u32", 0), CallField("hClient", "u32", 4)),
    ),
)
"""Any client may use this call to ask whether another client has an object. If that client does not
have it, the kernel module logs nothing."""
GET_GPU_ID = Call(
    "NV2080_CTRL_CMD_GPU_GET_ID",
    0x20800142,
    _SUBDEVICE_GPU,
    Layout("NV2080_CTRL_GPU_GET_ID_PARAMS", _SUBDEVICE_GPU, 4, (CallField("gpuId", "u32", 0),)),
)
GET_TIME = Call(
    "NV2080_CTRL_CMD_TIMER_GET_TIME",
    0x20800403,
    _SUBDEVICE_TIMER,
    Layout(
        "NV2080_CTRL_TIMER_GET_TIME_PARAMS",
        _SUBDEVICE_TIMER,
        8,
        (CallField("time_nsec", "u64", 0),),
    ),
)
"""The clock of the trace's records."""
GET_TIMESLICE = Call(
    "NVA06C_CTRL_CMD_GET_TIMESLICE",
    0xA06C0104,
    _GROUP,
    Layout("NVA06C_CTRL_TIMESLICE_PARAMS", _GROUP, 8, (CallField("timesliceUs", "u64", 0),)),
)
SET_TIMESLICE = Call("NVA06C_CTRL_CMD_SET_TIMESLICE", 0xA06C0103, _GROUP, GET_TIMESLICE.parameters)
N_SWITCHED = 64
"""Largest number of channels in one call: NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES."""
DISABLE_CHANNELS = Call(
    "NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS",
    0x2080110B,
    _SUBDEVICE_FIFO,
    Layout(
        "NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS",
        _SUBDEVICE_FIFO,
        536,
        (
            CallField("bDisable", "u8", 0),
            CallField("numChannels", "u32", 4),
            CallField("bOnlyDisableScheduling", "u8", 8),
            CallField("bRewindGpPut", "u8", 9),
            CallField("pRunlistPreemptEvent", "u64", 16),
            CallField("hClientList", "u32", 24, N_SWITCHED),
            CallField("hChannelList", "u32", 280, N_SWITCHED),
        ),
    ),
)
BIND_TRACE = Call(
    "NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2",
    0x20801238,
    _SUBDEVICE_GR,
    Layout(
        "NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_V2_PARAMS",
        _SUBDEVICE_GR,
        24,
        (
            CallField("hEventBuffer", "u32", 0),
            CallField("recordSize", "u32", 4),
            CallField("levelOfDetail", "u32", 8),
            CallField("bAllUsers", "u8", 16),
            CallField("reasonCode", "u32", 20),
        ),
    ),
)
DETAIL_SIMPLE = 1
"""NV2080_CTRL_GR_FECS_BIND_EVTBUF_LOD_SIMPLE: only starts and ends of contexts are recorded."""
ENABLE_TRACE = Call(
    "NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS",
    0x90CD0101,
    _BUFFER,
    Layout(
        "NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS_PARAMS",
        _BUFFER,
        8,
        (CallField("enable", "u8", 0), CallField("flags", "u32", 4)),
    ),
)
KEEP_OLDEST = Constant("NV_EVENT_BUFFER_FLAG_OVERFLOW_POLICY_KEEP_OLDEST", 1, _BUFFER)
MOVE_GET = Call(
    "NV_EVENT_BUFFER_CTRL_CMD_UPDATE_GET",
    0x90CD0102,
    _BUFFER,
    Layout(
        "NV_EVENT_BUFFER_CTRL_CMD_UPDATE_GET_PARAMS",
        _BUFFER,
        8,
        (CallField("recordBufferGet", "u32", 0),),
    ),
)
FLUSH_TRACE = Call("NV_EVENT_BUFFER_CTRL_CMD_FLUSH", 0x90CD0104, _BUFFER, None)

# ---- statuses ----

STATUSES = tuple(
    Constant(name, value, "nvstatus.h")
    for name, value in (
        ("NV_OK", 0x0),
        ("NV_ERR_GPU_IS_LOST", 0xF),
        ("NV_ERR_INSUFFICIENT_PERMISSIONS", 0x1B),
        ("NV_ERR_INVALID_ARGUMENT", 0x1F),
        ("NV_ERR_INVALID_CLIENT", 0x23),
        ("NV_ERR_INVALID_OBJECT_HANDLE", 0x33),
        ("NV_ERR_INVALID_STATE", 0x40),
        ("NV_ERR_NOT_SUPPORTED", 0x56),
        ("NV_ERR_OBJECT_NOT_FOUND", 0x57),
        ("NV_ERR_TIMEOUT", 0x65),
    )
)
"""The statuses on which a decision depends; others are shown as numbers."""

# ---- observed, and in no header ----

FIRST_CLIENT = 0xC1D00000
"""First handle of a client. The handles of all clients come from one counter, which wraps after
N_CLIENTS."""
N_CLIENTS = 1 << 20
FIRST_OBJECT = 0x5C000000
"""First handle that libcuda gives to an object of its client."""
N_OBJECTS = 0x2000
"""Number of object handles that a search tries: a context under branch 580 on Hopper has some 120
objects."""


def ioctl_request(number: int, size: int) -> int:
    """Return the request number of an ioctl that reads and writes a structure of `size` bytes."""
    return 3 << 30 | size << 16 | IOCTL_TYPE << 8 | number
