"""Queries NVML through a library at a given path; the only module that imports pynvml.

The results' types are defined here; no other module uses NVML's names. Every failure is an
NvmlError. A value that a GPU or a driver does not report (the memory of a unified-memory GPU, or of
a process behind MPS) is None.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from vdriver.errors import NvmlError

T = TypeVar("T")

_SWITCH = "switch"

_lock = threading.Lock()
_open: tuple[str, int] | None = None  # the library in use, and the number of its users
_kept: dict[str, ctypes.CDLL] = {}


@dataclass(frozen=True)
class Gpu:
    """One GPU: its index in NVML's list, and its properties; memory is in bytes."""

    index: int
    uuid: str
    name: str
    memory_total: int | None
    minor: int | None


class Ancestor(IntEnum):
    """The point where the PCIe paths of two GPUs meet, nearest first; named as in nvidia-smi."""

    SAME = 0  # both on one board
    PIX = 10  # one PCIe switch
    PXB = 20  # several PCIe switches, but no host bridge
    PHB = 30  # a host bridge
    NODE = 40  # several host bridges in one NUMA node
    SYS = 50  # the interconnect between NUMA nodes


@dataclass(frozen=True)
class Route:
    """How two GPUs are connected: active NVLinks, and the PCIe ancestor; None if unknown."""

    nvlinks: int
    ancestor: Ancestor | None


@dataclass(frozen=True)
class Topology:
    """The locations of a node's GPUs and their connections, by UUID; unknown values are omitted."""

    nodes: Mapping[str, int] = field(default_factory=dict)
    routes: Mapping[frozenset[str], Route] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)  # PCI addresses


@dataclass(frozen=True)
class ProcessMemory:
    """The memory on one GPU that one process on this host uses, in bytes.

    `computes` is false for a process that NVML lists with only a graphics context.
    """

    pid: int
    used: int | None
    computes: bool = True


@dataclass(frozen=True)
class ProcessUse:
    """A utilisation sample for a process on this host, in percent of a GPU's time.

    `time_us` is microseconds since 1970.
    """

    pid: int
    time_us: int
    percent: int


class DeviceUse(NamedTuple):
    """One sample: how much of the time since the GPU's previous sample a kernel ran, in percent.

    `time_us` is microseconds since 1970.
    """

    time_us: int
    percent: int


class Nvml:
    """NVML from the library at `path`; a context manager that opens and closes it.

    The library is loaded by that path, never by a search: on a node with Tidegate the name
    libnvidia-ml.so.1 may resolve to the control library. pynvml keeps one library for the whole
    process, so several instances may have the same path open, while opening a second path raises
    NvmlError until they are closed.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> Self:
        global _open  # noqa: PLW0603 - mirrors pynvml's own module state
        import pynvml

        with _lock:
            if _open is not None and _open[0] != self._path:
                raise NvmlError(
                    f"NVML is already open from {_open[0]}, not from {self._path}",
                    hint="close it before opening another driver's",
                )
            if _open is None:
                _select(pynvml, self._path)
            _call(f"{self._path}: nvmlInit", pynvml.nvmlInit)
            _open = (self._path, _open[1] + 1 if _open else 1)
            self._nvml = pynvml
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _open  # noqa: PLW0603
        with _lock:
            nvml, self._nvml = self._nvml, None
            self._handles.clear()
            if _open is not None:
                _open = (_open[0], _open[1] - 1) if _open[1] > 1 else None
            _call("nvmlShutdown", nvml.nvmlShutdown)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs in NVML's order; NvmlError if one of them does not answer."""
        found = self.survey()
        for one in found:
            if isinstance(one, NvmlError):
                raise one
        return tuple(one for one in found if isinstance(one, Gpu))

    def survey(self) -> tuple[Gpu | NvmlError, ...]:
        """Return the GPUs in NVML's order; an NvmlError replaces a GPU that does not answer."""
        found: list[Gpu | NvmlError] = []
        for i in range(int(_call("nvmlDeviceGetCount", self._nvml.nvmlDeviceGetCount))):
            try:
                found.append(self._gpu(i))
            except NvmlError as e:
                found.append(e)
        return tuple(found)

    def simulated(self, uuid: str) -> tuple[Any, Any] | None:
        """Return the library and the handle of a simulated GPU; None for a real one."""
        library = self._nvml.nvmlLib
        return (library, self._get(uuid)) if hasattr(library, "nvmlSimgpuSwitch") else None

    def topology(self, uuids: Sequence[str]) -> Topology:
        """Return the topology of these GPUs, as far as the driver and the kernel report it.

        An old driver lacks some functions, and in a virtual machine others fail. The values are
        then unknown, which is not an error.
        """
        handles = {uuid: self._get(uuid) for uuid in uuids}
        addresses = {uuid: self._address(handle) for uuid, handle in handles.items()}
        nodes = {uuid: self._node(handles[uuid], addresses[uuid]) for uuid in uuids}
        ends = {
            uuid: self._link_ends(handle, {a for a in addresses.values() if a is not None})
            for uuid, handle in handles.items()
        }
        routes = {}
        for one, other in combinations(uuids, 2):
            direct = max(
                ends[a].count(address)
                for a, address in ((one, addresses[other]), (other, addresses[one]))
            )
            # Through NVSwitches a GPU reaches every other GPU. The number of links for a pair is
            # the smaller of the two GPUs' numbers.
            switched = min(ends[one].count(_SWITCH), ends[other].count(_SWITCH))
            level = self._try_call(
                "nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other]
            )
            ancestor = Ancestor(level) if level in list(Ancestor) else None
            routes[frozenset((one, other))] = Route(direct + switched, ancestor)
        return Topology(
            {u: node for u, node in nodes.items() if node is not None},
            routes,
            {u: address for u, address in addresses.items() if address is not None},
        )

    def driver_version(self) -> str:
        """Return the version of the driver that answers the queries."""
        return str(_call("nvmlSystemGetDriverVersion", self._nvml.nvmlSystemGetDriverVersion))

    def cuda_version(self) -> str | None:
        """Return the newest CUDA version that the driver supports, such as 13.0, or None."""
        number = self._try_call("nvmlSystemGetCudaDriverVersion_v2")
        return None if not number else f"{number // 1000}.{number % 1000 // 10}"

    def memory_used(self, uuid: str) -> int | None:
        """Return the bytes in use on a GPU by all processes and by the driver itself."""
        memory = _optional(self._nvml, lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._get(uuid)))
        return None if memory is None else int(memory.used)

    def processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        """Return the processes that have a context on a GPU, each once, by pid."""
        nvml = self._nvml
        handle = self._get(uuid)
        used: dict[int, int | None] = {}
        computing: set[int] = set()
        # A process with contexts of several kinds is in several lists, with the same figure.
        for ask in (
            nvml.nvmlDeviceGetComputeRunningProcesses,
            nvml.nvmlDeviceGetGraphicsRunningProcesses,
            nvml.nvmlDeviceGetMPSComputeRunningProcesses,
        ):
            for process in _optional(nvml, functools.partial(ask, handle)) or ():
                known = (used.get(int(process.pid)), _available(nvml, process.usedGpuMemory))
                used[int(process.pid)] = max((k for k in known if k is not None), default=None)
                if ask is not nvml.nvmlDeviceGetGraphicsRunningProcesses:
                    computing.add(int(process.pid))
        return tuple(ProcessMemory(pid, used[pid], pid in computing) for pid in sorted(used))

    def utilisation(self, uuid: str, since_us: int) -> tuple[ProcessUse, ...]:
        """Return samples of the processes on a GPU, newer than `since_us`; there may be none."""
        nvml = self._nvml
        handle = self._get(uuid)
        samples = _optional(
            nvml,
            lambda: nvml.nvmlDeviceGetProcessUtilization(handle, since_us),
            # No process was active. pynvml treats a success without samples as an error.
            also=(nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_SUCCESS),
        )
        return tuple(
            ProcessUse(int(sample.pid), int(sample.timeStamp), int(sample.smUtil))
            for sample in samples or ()
            # The driver fills the unused part of the buffer with entries that have the pid 0.
            if sample.pid and sample.timeStamp > since_us
        )

    def busy(self, uuid: str, since_us: int) -> tuple[DeviceUse, ...]:
        """Return samples of a GPU, newer than `since_us`, by time; there may be none."""
        nvml = self._nvml
        handle = self._get(uuid)
        answer = _optional(
            nvml,
            lambda: nvml.nvmlDeviceGetSamples(handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, since_us),
            also=(nvml.NVML_ERROR_NOT_FOUND,),
        )
        samples = (
            DeviceUse(int(one.timeStamp), int(one.sampleValue.uiVal))
            for one in (answer[1] if answer else ())
        )
        return tuple(sorted(one for one in samples if one.time_us > since_us))

    def _gpu(self, index: int) -> Gpu:
        nvml = self._nvml
        what = f"GPU {index}"
        handle = _call(what, lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        memory = _optional(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        minor = _optional(nvml, lambda: nvml.nvmlDeviceGetMinorNumber(handle))
        uuid = _text(_call(what, lambda: nvml.nvmlDeviceGetUUID(handle)))
        self._handles[uuid] = handle
        return Gpu(
            index=index,
            uuid=uuid,
            name=_text(_call(what, lambda: nvml.nvmlDeviceGetName(handle))),
            memory_total=None if memory is None else _available(nvml, memory.total),
            minor=None if minor is None else int(minor),
        )

    def _address(self, handle: Any) -> str | None:
        info = self._try_call("nvmlDeviceGetPciInfo", handle)
        return None if info is None else _pci_address(info)

    def _node(self, handle: Any, address: str | None) -> int | None:
        """Return the NUMA node nearest to a GPU, or None if neither NVML nor the kernel reports it.

        nvmlDeviceGetNumaNodeId is something else: the node of a GPU's own memory.
        """
        words = self._try_call("nvmlDeviceGetMemoryAffinity", handle, 16, 0)  # scope 0: the node
        mask = sum(int(word) << 64 * i for i, word in enumerate(words or ()))
        if mask.bit_count() == 1:
            return mask.bit_length() - 1
        try:
            # The file contains -1 if the firmware has no value, as on many machines with one node.
            node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def _link_ends(self, handle: Any, gpus: AbstractSet[str]) -> list[str | None]:
        """Return the remote end of each active NVLink: a PCI address of `gpus`, _SWITCH or None.

        None means any other device, such as a CPU, or a GPU that is not among `gpus`.
        """
        nvml = self._nvml
        ends: list[str | None] = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if not self._try_call("nvmlDeviceGetNvLinkState", handle, link):
                continue
            kind = self._try_call("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            info = self._try_call("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            address = None if info is None else _pci_address(info)
            if address in gpus:
                ends.append(address)
            elif kind in (
                nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH,
                # A virtual machine does not see the switches at the end of its GPUs' links.
                nvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN,
                None,
            ):
                ends.append(_SWITCH)
            else:
                ends.append(None)
        return ends

    def _try_call(self, name: str, *arguments: object) -> Any:
        """Return the result of an NVML function, or None if it fails for any reason."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None

    def _get(self, uuid: str) -> Any:
        # Looking up a UUID may fail because another GPU has fallen off the bus.
        if uuid in self._handles:
            return self._handles[uuid]
        # pynvml versions with decorators for strings accept a str; older ones accept only bytes.
        return _call(f"GPU {uuid}", lambda: self._nvml.nvmlDeviceGetHandleByUUID(uuid))


def _select(pynvml: Any, path: str) -> None:
    """Make pynvml use the library at `path` from now on."""
    try:
        # Never unloaded: unloading would free memory that the library's threads are still using.
        library = _kept.setdefault(path, ctypes.CDLL(path))
    except OSError as e:
        raise NvmlError(
            f"NVML cannot be loaded: {e}", hint="run tidegate refresh, or reinstall the driver"
        ) from e
    pynvml.nvmlLib = library
    # The cache holds addresses of the previous library's functions.
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001


def _call(what: str, function: Callable[[], T]) -> T:
    import pynvml

    try:
        return function()
    except pynvml.NVMLError as e:
        raise NvmlError(f"{what}: {e}", hint=_remedy(pynvml, e)) from e


def _optional(
    nvml: Any, function: Callable[[], T], *, also: tuple[int, ...] = (), again: int = 3
) -> T | None:
    """Return the result of `function`, or None if this GPU or driver does not report it.

    `also` lists further error codes that mean that there is nothing to report. pynvml queries the
    size and then the data: if there is more data by then, the call is repeated up to `again` times.
    """
    absent = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, *also)
    try:
        return function()
    except nvml.NVMLLibraryMismatchError:
        # pynvml found no version of the function that it can use.
        return None
    except nvml.NVMLError as e:
        if e.value in absent:
            return None
        if e.value == nvml.NVML_ERROR_INSUFFICIENT_SIZE and again:
            return _optional(nvml, function, also=also, again=again - 1)
        raise NvmlError(str(e), hint=_remedy(nvml, e)) from e


def _available(nvml: Any, value: int | None) -> int | None:
    """Return a number from NVML; None for its "not available" value in either width."""
    if value is None or value in (
        nvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value,
        nvml.NVML_VALUE_NOT_AVAILABLE_uint.value,
    ):
        return None
    return int(value)


def _remedy(nvml: Any, error: Any) -> str:
    remedies = {
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the kernel module: modprobe nvidia",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "library and kernel module differ in version: reboot after a driver update, "
            "then run tidegate refresh"
        ),
        nvml.NVML_ERROR_NO_PERMISSION: "run as root, or give access to /dev/nvidia*",
        nvml.NVML_ERROR_NOT_FOUND: "tidegate check lists the GPUs of this node",
        nvml.NVML_ERROR_INVALID_ARGUMENT: "tidegate check lists the GPUs of this node",
        nvml.NVML_ERROR_GPU_IS_LOST: (
            "the GPU has fallen off the bus: see the kernel log, and reboot"
        ),
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver is too old, or this is not an NVML library",
    }
    return remedies.get(error.value, "try nvidia-smi on the host, and see the kernel log")


def _pci_address(info: Any) -> str:
    """Return a PCI address in the kernel's notation."""
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
