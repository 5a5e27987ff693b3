"""Create the device files of the simulated GPU, and read their state.

This module depends on the layout in `simgpu/layout.h` (the offsets are asserted there and compared
by a test) but not on the schedule. It reads the state to which a process last advanced the device's
timeline. If a process that uses a device closes any descriptor of the file, it loses the device
(POSIX record locks work that way), so the descriptors opened here stay open.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import json
import os
import re
import struct
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

DEFAULT_DIRECTORY = Path("/dev/tidegate-simgpu")

MAGIC = 0x5550474D49534754
VERSION = 5
SLOTS = 256
CONTEXTS = 256
QUEUE = 1024
SLOT_LOCK = 1 << 40

CONFIG = struct.Struct("<QII6QI16s96sII4I20s")
CONFIG_SIZE = 4096
LOST_OFFSET = 184
NVLINKS = 18
CLOCK_OFFSET = 0x1008  # mode, current timeline, virtual now
N_CONTEXTS_OFFSET = 0x1028
SLOTS_OFFSET = 0x1058
SLOT = struct.Struct("<QQII40x")
CHECKPOINTED = 2
"""State of a process whose memory and contexts are not on the GPU."""
TIMELINES_OFFSET = 0x5058
TIMELINE = struct.Struct("<4QII2Q")
LANE = struct.Struct("<10Q")
TIMELINE_SIZE = TIMELINE.size + CONTEXTS * LANE.size
CONTEXTS_OFFSET = 0x10000
CONTEXT = struct.Struct("<QQII")
CONTEXT_SIZE = 64 + 16 * QUEUE
FILE_SIZE = (CONTEXTS_OFFSET + CONTEXTS * CONTEXT_SIZE + 4095) // 4096 * 4096

FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux

UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}

_descriptors: dict[tuple[int, int], int] = {}


@dataclass(frozen=True)
class SeenContext:
    """A context on a device: times are ns of GPU time, and `pid` is 0 if it is not visible here."""

    serial: int
    pid: int
    pending: int
    completed: int
    busy: int
    slices: int


@dataclass(frozen=True)
class Process:
    """A process that holds device memory; `memory` is in bytes and includes its contexts."""

    pid: int
    memory: int
    contexts: int


@dataclass(frozen=True)
class DeviceStatus:
    """The state of a device at `now`, in ns on its clock."""

    device: str
    uuid: str
    name: str
    total: int
    used: int
    now: int
    clock: str
    busy: int
    switches: int
    recoveries: int
    processes: tuple[Process, ...]
    contexts: tuple[SeenContext, ...]


def size(text: str) -> int:
    """Return the number of bytes in `16Gi`, `16GiB` or `4096`. Raise ValueError for other text."""
    match = re.fullmatch(r"(\d+)\s*(?:([KMGT]i)B?|)", text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a size: write a number of bytes, or use Ki, Mi, Gi or Ti, as in 16Gi"
        )
    return int(match[1]) * UNITS[match[2] or ""]


def _size(text: str) -> int:
    try:
        return size(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def device_uuid(seed: int, index: int) -> uuid.UUID:
    """Return the UUID that `create` gives device `index` in a directory made with `seed`."""
    return uuid.UUID(
        bytes=hashlib.sha256(f"simgpu {seed} {index}".encode()).digest()[:16], version=4
    )


@dataclass(frozen=True)
class MachineTopology:
    """Locations of the GPUs of a machine, and the NVLinks between them.

    A location is `NUMA node/host bridge/PCIe tree/switch`: the common prefix of two locations is
    what NVML calls their common ancestor. Without locations NVML reports no ancestor. Links
    are written as `0-1=4`, four NVLinks between GPUs 0 and 1; `switch=18` means 18 links from each
    GPU to NVSwitches, and `unseen=18` the same in a virtual machine, which does not see the
    switches.
    """

    places: tuple[str, ...] = ()
    nvlinks: tuple[str, ...] = ()

    def check(self, devices: int) -> None:
        """Raise ValueError if an NVLink names one GPU twice, or one beyond the `devices` GPUs."""
        for link in self.nvlinks:
            ends = [int(number) for number in re.findall(r"\d+", link.partition("=")[0])]
            if any(end >= devices for end in ends):
                raise ValueError(f"{link!r} names a GPU that does not exist: there are {devices}")
            if len(set(ends)) < len(ends):
                raise ValueError(f"{link!r} names one GPU twice")

    def place(self, index: int) -> list[int]:
        """Return the four numbers of a GPU's location, each plus 1; zeros if it has none.

        Raise ValueError if the location is malformed.
        """
        if index >= len(self.places):
            return [0] * 4
        match = re.fullmatch(r"(\d{1,3})/(\d{1,3})/(\d{1,3})/(\d{1,3})", self.places[index])
        if match is None:
            raise ValueError(f"{self.places[index]!r} is not a location: write it like 0/0/1/0")
        return [int(number) + 1 for number in match.groups()]

    def ends(self, index: int) -> bytes:
        """Return the other end of each NVLink of a GPU, encoded as in layout.h.

        Raise ValueError if a link is malformed or the GPU has too many links.
        """
        ends = b""
        for link in self.nvlinks:
            match = re.fullmatch(r"(?:(\d+)-(\d+)|(switch|unseen))=(\d+)", link)
            if match is None:
                raise ValueError(f"{link!r} is not an NVLink: write 0-1=4, switch=18 or unseen=18")
            if match[3]:
                ends += {"switch": b"\xfe", "unseen": b"\xff"}[match[3]] * int(match[4])
            elif index in (int(match[1]), int(match[2])):
                other = int(match[1]) + int(match[2]) - index
                ends += bytes([other + 1]) * int(match[4])
        if len(ends) > NVLINKS:
            raise ValueError(f"GPU {index} has {len(ends)} NVLinks: at most {NVLINKS} are possible")
        return ends


def create(
    directory: Path,
    *,
    devices: int = 1,
    memory: int = 16 << 30,
    seed: int = 1,
    name: str = "Tidegate Simulated GPU",
    slice_us: int = 2000,
    switch_us: int = 130,
    context_memory: int = 512 << 20,
    jitter: int = 0,
    virtual_clock: bool = False,
    topology: MachineTopology = MachineTopology(),
) -> list[Path]:
    """Create `gpu0`, `gpu1`... in `directory`, replace existing ones, and return their paths.

    Sizes are in bytes; `jitter` is in per mille of a kernel's duration. With `virtual_clock` the
    devices' time starts at 0 and passes only on request. Raise ValueError if a parameter is out of
    range.
    """
    if not 1 <= devices <= 32:
        raise ValueError(f"{devices} devices: must be between 1 and 32")
    if slice_us < 1 or switch_us < 0 or not 0 <= jitter <= 1000:
        raise ValueError(
            "a slice must be at least 1 us, a switch at least 0 us, and jitter 0 to 1000 per mille"
        )
    topology.check(devices)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    shown = name.encode()[:95].decode(errors="ignore").encode()
    for index in range(devices):
        path = directory / f"gpu{index}"
        config = CONFIG.pack(
            MAGIC, VERSION, CONFIG_SIZE, FILE_SIZE,
            memory, context_memory, slice_us * 1000, switch_us * 1000, seed,
            jitter, device_uuid(seed, index).bytes, shown, index + 1,
            0, *topology.place(index), topology.ends(index),
        )  # fmt: skip
        partial = directory / f".gpu{index}.{os.getpid()}"
        with partial.open("wb") as file:
            file.write(config)
            file.truncate(FILE_SIZE)
            if virtual_clock:
                file.seek(CLOCK_OFFSET)
                file.write(struct.pack("<I", 1))
        partial.chmod(0o666)  # like /dev/nvidia0: any process that sees it may use it
        partial.rename(path)
        paths.append(path)
    return paths


def set_lost(path: Path, *, lost: bool) -> None:
    """Make NVML report that a device has fallen off the bus, or that it is back."""
    os.pwrite(_open(path), struct.pack("<I", lost), LOST_OFFSET)


def _open(path: Path) -> int:
    """Return a descriptor that stays open for the life of this process."""
    found = path.stat()
    key = (found.st_dev, found.st_ino)
    if key not in _descriptors:
        _descriptors[key] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return _descriptors[key]


def _owner(descriptor: int, slot: int) -> int | None:
    """Return the PID of a slot's owner.

    Return 0 if the owner is not visible here, and None if no other process holds the slot.
    """
    query = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, SLOT_LOCK + slot, 1, 0)
    kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def _process_key() -> int:
    """Return the key that this process's libraries use, as `process_key` in device.c does."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype = ctypes.c_size_t
    key = 14695981039346656037 ^ os.getpid()
    for byte in ctypes.string_at(getauxval(ctypes.c_ulong(25)), 16):  # AT_RANDOM
        key = (key ^ byte) * 1099511628211 % (1 << 64)
    return key or 1


def status(path: Path) -> DeviceStatus:
    """Return the state of a device, without the contexts and memory of dead processes.

    Raise ValueError if the file is not a simulated GPU of this version.
    """
    descriptor = _open(path)
    config = CONFIG.unpack(os.pread(descriptor, CONFIG.size, 0))
    if config[0] != MAGIC or config[1] != VERSION:
        raise ValueError(f"{path} is not a simulated GPU of version {VERSION}")

    while True:  # the current timeline may change during the read
        mode, current, _ = struct.unpack("<IIQ", os.pread(descriptor, 16, CLOCK_OFFSET))
        start = TIMELINES_OFFSET + (current & 1) * TIMELINE_SIZE
        timeline = os.pread(descriptor, TIMELINE_SIZE, start)
        n_contexts, recoveries = struct.unpack("<II", os.pread(descriptor, 8, N_CONTEXTS_OFFSET))
        slots = os.pread(descriptor, SLOTS * SLOT.size, SLOTS_OFFSET)
        heads = [
            CONTEXT.unpack(os.pread(descriptor, CONTEXT.size, CONTEXTS_OFFSET + i * CONTEXT_SIZE))
            for i in range(min(n_contexts, CONTEXTS))
        ]
        if os.pread(descriptor, 4, CLOCK_OFFSET + 4) == struct.pack("<I", current):
            break

    now, _, _, _, _, _, switches, busy = TIMELINE.unpack_from(timeline)
    owners: dict[int, tuple[int, int]] = {}
    own_key = _process_key()
    for slot, (key, memory, attached, state) in enumerate(SLOT.iter_unpack(slots)):
        pid = os.getpid() if key == own_key else _owner(descriptor, slot)
        if attached and pid is not None and state != CHECKPOINTED:
            owners[slot] = (pid, memory)
    contexts: list[SeenContext] = []
    held: dict[int, int] = {}
    for index, (serial, tail, slot, _) in enumerate(heads):
        if not serial or slot not in owners:
            continue
        head, _, lane_busy, slices, *_ = LANE.unpack_from(
            timeline, TIMELINE.size + index * LANE.size
        )
        held[slot] = held.get(slot, 0) + 1
        pid, _ = owners[slot]
        contexts.append(SeenContext(serial, pid, tail - head, head, lane_busy, slices))
    processes = tuple(
        Process(pid, memory + config[5] * held.get(slot, 0), held.get(slot, 0))
        for slot, (pid, memory) in owners.items()
        if memory or slot in held
    )
    return DeviceStatus(
        device=path.name,
        uuid=f"GPU-{uuid.UUID(bytes=config[10])}",
        name=config[11].rstrip(b"\0").decode(),
        total=config[4],
        used=sum(process.memory for process in processes),
        now=now,
        clock="virtual" if mode else "monotonic",
        busy=busy,
        switches=switches,
        recoveries=recoveries,
        processes=processes,
        contexts=tuple(contexts),
    )


def devices(directory: Path) -> list[Path]:
    """Return the device files in a directory, in the order of their numbers."""
    found = [path for path in directory.glob("gpu*") if path.name[3:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[3:]))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status is 0, or 2 with a one-line error."""
    parser = argparse.ArgumentParser(prog="python -m simgpu", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    maker = verbs.add_parser("create", help="make device files")
    maker.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    maker.add_argument("--devices", type=int, default=1)
    maker.add_argument("--memory", type=_size, default=16 << 30, metavar="16Gi")
    maker.add_argument("--seed", type=int, default=1)
    maker.add_argument("--name", default="Tidegate Simulated GPU")
    maker.add_argument("--slice-us", type=int, default=2000)
    maker.add_argument("--switch-us", type=int, default=130)
    maker.add_argument("--context-mib", type=int, default=512)
    maker.add_argument("--jitter", type=int, default=0, help="per mille of a kernel's duration")
    maker.add_argument(
        "--place", action="append", default=[], metavar="NODE/BRIDGE/TREE/SWITCH",
        help="location of the next GPU",
    )  # fmt: skip
    maker.add_argument(
        "--nvlink", action="append", default=[], metavar="A-B=N",
        help="NVLinks between two GPUs; switch=18: from each GPU to NVSwitches",
    )  # fmt: skip
    maker.add_argument("--virtual-clock", action="store_true", help="time passes only on request")
    reader = verbs.add_parser("status", help="print the state of the devices as JSON")
    reader.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    options = parser.parse_args(arguments)
    try:
        if options.verb == "create":
            made = create(
                options.dir,
                devices=options.devices,
                memory=options.memory,
                seed=options.seed,
                name=options.name,
                slice_us=options.slice_us,
                switch_us=options.switch_us,
                context_memory=options.context_mib << 20,
                jitter=options.jitter,
                virtual_clock=options.virtual_clock,
                topology=MachineTopology(tuple(options.place), tuple(options.nvlink)),
            )
            print("\n".join(map(str, made)))
        else:
            if not options.dir.is_dir():
                raise FileNotFoundError(f"{options.dir} does not exist; run create --dir")
            found = [asdict(status(path)) for path in devices(options.dir)]
            print(json.dumps({"devices": found}, indent=2))
    except (OSError, ValueError) as error:
        parser.exit(2, f"simgpu: {error}\n")
    return 0
