"""The layout of the grant page and the ledger, which a container shares with the governor.

This is the only description of the two: `libcontrol.gen` writes `layout.gen.h` from it, with static
assertions on every offset, and `libcontrol.pages` uses it to access them from Python. Fields are
only ever appended. A reader first checks magic, version and size, and then the bounds of every
index that it reads. A field is written by a single store of its full width, so that no reader sees
a torn value.

Unless a name says otherwise, times are nanoseconds of CLOCK_MONOTONIC, sizes are bytes, and shares
are parts per million of one GPU.
"""

from __future__ import annotations

from typing import NamedTuple

VERSION = 1
N_DEVICES = 16
"""Maximum number of GPUs of one container."""
N_SLOTS = 64
"""Maximum number of processes of one container that use the GPU at the same time."""

N_UNKNOWN = 16
"""Maximum number of functions that one container's ledger names as unknown to the library."""
UNKNOWN_SIZE = 48
"""Size in bytes of the entry for such a name, including the terminating null byte."""

GRANT_MAGIC = int.from_bytes(b"TDGGRANT", "little")
LEDGER_MAGIC = int.from_bytes(b"TDGLEDGR", "little")

SIZES = {"u8": 1, "u32": 4, "u64": 8}


class Field(NamedTuple):
    """A field: its name, C type, number of elements, writer and meaning.

    `order` names the memory order of the writer's store where a reader depends on it.
    """

    name: str
    type: str
    n: int = 1
    writer: str = "governor"
    order: str = "relaxed"
    doc: str = ""


class Struct(NamedTuple):
    """A structure of the grant page or the ledger: its fields in order, padded to `size` bytes."""

    name: str
    size: int
    fields: tuple[Field, ...]
    doc: str


GRANT_HEADER = Struct(
    "grant_header",
    256,
    (
        Field("magic", "u64", order="release", doc="GRANT_MAGIC"),
        Field("version", "u32", doc="LAYOUT_VERSION"),
        Field("size", "u32", doc="bytes of the whole file"),
        Field("heartbeat_ns", "u64", doc="when the governor was last alive"),
        Field("n_devices", "u32", doc="entries of devices[] in use"),
        Field("on_governor_loss", "u32", doc="0 enforce the quota locally, 1 deny, 2 open"),
        Field("inflight_ns", "u64", doc="work that may be queued on the GPU while others wait"),
        Field("marker_ns", "u64", doc="predicted work between two markers"),
        Field("lookahead_ns", "u64", doc="the hand-over begins when this much work is left"),
        Field("idle_release_ns", "u64", doc="a holder idle for this long gives the GPU back"),
        Field("spin_ns", "u64", doc="longest time that a process on standby spins"),
        Field("holds", "u32", doc="work may be held on the GPU until the next grant"),
        Field("unknown_functions", "u32", doc="0 forward, 1 count, 2 refuse"),
    ),
    "Values for the whole container.",
)

GRANT_DEVICE = Struct(
    "grant_device",
    192,
    (
        Field("uuid", "u8", 16, doc="the GPU's UUID"),
        Field("memory_limit", "u64", doc="quota of device memory"),
        Field("memory_overhead", "u64", doc="memory that the driver uses beyond the ledger's sum"),
        Field("memory_used", "u64", doc="memory in use at the last reconciliation, for NVML"),
        Field("context_bytes", "u64", doc="charged for a process's first context"),
        Field("compute", "u32", doc="guaranteed share"),
        Field("compute_limit", "u32", doc="cap"),
        Field("deadline_ns", "u64", order="release", doc="work may start before this; 0: closed"),
        Field("epoch", "u32", order="release", doc="number of this grant"),
        Field("signal", "u32", order="release", doc="futex word, incremented on every change"),
        Field("start_ns", "u64", doc="when this grant began"),
        Field("standby_ns", "u64", order="release", doc="spin until then: the grant is near"),
        Field("contended", "u32", doc="another container is waiting for this GPU"),
        Field("strategy", "u32", doc="0 timeslice, 1 mps: how this GPU is shared"),
        Field("reconciled_ns", "u64", order="release", doc="when memory_overhead was sampled"),
        Field("utilisation", "u32", doc="GPU time of the last second, in percent of compute_limit"),
        Field("n_processes", "u32", doc="processes on the GPU when unattributed was sampled"),
        Field(
            "unattributed",
            "u64",
            doc="memory in use that neither NVML nor a ledger attributes to a process; "
            "only differences matter",
        ),
        Field("unattributed_ns", "u64", order="release", doc="when unattributed was sampled"),
        Field("overhead_last", "u64", doc="lower bound of memory_overhead at the last sample"),
        Field("unattributed_each", "u64", doc="part of unattributed that each process adds"),
        Field("together", "u32", doc="granted together with other GPUs: no launch is held"),
        Field("beside", "u32", doc="the previous holder's last work may run alongside"),
        Field("work_class", "u32", doc="0 throughput, 1 latency"),
        Field("parking", "u32", doc="1: its memory may be parked in host memory"),
        Field(
            "resident",
            "u32",
            order="release",
            doc="futex word; 1: its memory belongs on the GPU, 0: in host memory",
        ),
    ),
    "One GPU of the container.",
)

LEDGER_HEADER = Struct(
    "ledger_header",
    4096,
    (
        Field("magic", "u64", order="release", doc="LEDGER_MAGIC"),
        Field("version", "u32", doc="LAYOUT_VERSION"),
        Field("size", "u32", doc="bytes of the whole ledger"),
        Field("n_slots", "u32", order="release", doc="slots that have ever been in use"),
        Field("reserved", "u32"),
        Field("memory_peak", "u64", N_DEVICES, "container", doc="highest sum of charges, per GPU"),
        Field(
            "trust_ns",
            "u64",
            N_DEVICES,
            "container",
            doc="time until which a pool may outgrow its charge",
        ),
        Field("n_unknown", "u32", 1, "container", doc="entries of unknown in use"),
        Field(
            "unknown",
            "u8",
            N_UNKNOWN * UNKNOWN_SIZE,
            "container",
            "release",
            "names of functions that the library does not know; the first byte is written last",
        ),
    ),
    "What the container's processes share.",
)

LEDGER_DEVICE = Struct(
    "ledger_device",
    256,
    (
        Field("want", "u32", 1, "container", "release", "threads that are waiting for GPU time"),
        Field("active_epoch", "u32", 1, "container", "seq_cst", "grant in which work was started"),
        Field("released_epoch", "u32", 1, "container", "release", "grant that was given back"),
        Field("pending", "u32", 1, "container", doc="markers that the GPU has not reached"),
        Field("seen_ns", "u64", 1, "container", doc="when the process last read the grant"),
        Field("release_ns", "u64", 1, "container", doc="when released_epoch was given back"),
        Field("residual_ns", "u64", 1, "container", doc="work left on the GPU at that time"),
        Field("busy_ns", "u64", 1, "container", doc="total GPU time used, by the GPU's clock"),
        Field("memory", "u64", 1, "container", "seq_cst", "charged to this process"),
        Field("blocks", "u64", 1, "container", doc="live allocations"),
        Field("launches", "u64", 1, "container", doc="calls that started work"),
        Field("waits", "u64", 1, "container", doc="launches that had to wait"),
        Field("wait_ns", "u64", 1, "container", doc="total time that launches waited"),
        Field("refused", "u64", 1, "container", doc="allocations refused"),
        Field("markers", "u64", 1, "container", doc="markers submitted"),
        Field("predicted_ns", "u64", 1, "container", doc="total of submitted work, as predicted"),
        Field("error_ns", "u64", 1, "container", doc="sum of |measured - predicted|"),
        Field("unseen", "u64", 1, "container", doc="part of memory that NVML does not attribute"),
        Field(
            "provisional", "u64", 1, "container", doc="taken by the driver since the last sample"
        ),
        Field("provisional_ns", "u64", 1, "container", "release", "when provisional last changed"),
        Field("transfers", "u64", 1, "container", doc="copies between host and device"),
        Field("transfer_bytes", "u64", 1, "container", doc="bytes that transfers copied"),
        Field("small", "u64", 1, "container", doc="calls counted as too small to gate"),
        Field("contexts", "u64", 1, "container", doc="live contexts"),
        Field("returned", "u64", 1, "container", "seq_cst", "total given back, excluding unseen"),
        Field(
            "moving",
            "u64",
            1,
            "container",
            "seq_cst",
            "part of (memory - unseen) in calls under way",
        ),
        Field(
            "pooled", "u64", 1, "container", "seq_cst", "part of (memory - unseen) held by pools"
        ),
        Field(
            "taking",
            "u64",
            1,
            "container",
            "seq_cst",
            "part of unseen that is counted so far in only one of memory and unseen",
        ),
        Field("shrunk", "u64", 1, "container", "seq_cst", "total shrinkage of pools, as observed"),
        Field(
            "asked_ns", "u64", 1, "container", "release", "all pools were queried after this time"
        ),
        Field("outgrown", "u64", 1, "container", "seq_cst", "pools that grew beyond the quota"),
        Field("took", "u64", 1, "container", "seq_cst", "total that the driver took on its own"),
        Field("gave", "u64", 1, "container", "seq_cst", "part of took that the driver gave back"),
        Field("alive_ns", "u64", 1, "container", doc="when overdue work was last seen running"),
    ),
    "One process on one GPU.",
)

LEDGER_SLOT = Struct(
    "ledger_slot",
    8192,
    (
        Field("state", "u32", 1, "governor", "release", "0 free, 1 in use"),
        Field("pid", "u32", 1, "container", doc="PID in its own PID namespace"),
        Field("lookups", "u64", 1, "container", doc="cuGetProcAddress answers replaced"),
        Field("namespace", "u64", 1, "governor", doc="inode of its PID namespace, 0: unknown"),
        Field(
            "overruns",
            "u8",
            N_DEVICES,
            "container",
            doc="1 while work of a grant that is over is still running",
        ),
        Field("movable", "u64", 1, "container", doc="part of memory that can be parked"),
        Field("parked", "u64", 1, "container", "seq_cst", "part of unseen that is parked"),
        Field("moved", "u64", 1, "container", doc="total bytes parked and moved back"),
        Field("move_ns", "u64", 1, "container", doc="total time that moves took"),
        Field("away_ns", "u64", 1, "container", doc="total time that calls waited for memory"),
        Field(
            "residency",
            "u32",
            1,
            "container",
            "release",
            "0 resident, 1 about to be parked, 2 being parked, 3 parked, 4 being moved back",
        ),
        Field("awaiting", "u32", 1, "container", "seq_cst", "calls that are waiting for memory"),
        Field("arena", "u64", doc="bytes of host memory that are ready for its parked memory"),
        Field("reserved", "u64", 4, "container"),
    ),
    "One process; its devices follow at LEDGER_SLOT_DEVICES. It parks the memory of only one GPU.",
)

USAGE_HEADER = Struct(
    "usage_header",
    256,
    (
        Field("sequence", "u32", order="release", doc="odd while the entries are being written"),
        Field("n_entries", "u32", doc="entries in use"),
        Field("time_us", "u64", doc="when they were written, in microseconds since 1970"),
    ),
    "What the container's processes use, for NVML: after the grant page, in the same file.",
)

USAGE_ENTRY = Struct(
    "usage_entry",
    512,
    (
        Field("pid", "u32", doc="PID in the PID namespace of the container's first process"),
        Field("state", "u32", doc="0 free, 1 in use"),
        Field("start_us", "u64", doc="when it registered, in microseconds since 1970"),
        Field("memory", "u64", N_DEVICES, doc="memory in use, per GPU"),
        Field("memory_peak", "u64", N_DEVICES, doc="highest sample of memory, per GPU"),
        Field("utilisation", "u32", N_DEVICES, doc="its part of grant_device.utilisation"),
        Field("mean_utilisation", "u32", N_DEVICES, doc="the same, since start_us"),
    ),
    "One process as NVML shows it.",
)

GRANT_SIZE = 4096
"""Size of the grant page itself. Readers that do not use the usage part map only this much."""
GRANT_DEVICES = GRANT_HEADER.size
GRANT_USAGE = GRANT_SIZE
GRANT_USAGE_ENTRIES = GRANT_USAGE + USAGE_HEADER.size
GRANT_FILE_SIZE = -(-(GRANT_USAGE_ENTRIES + N_SLOTS * USAGE_ENTRY.size) // 4096) * 4096
LEDGER_SLOTS = LEDGER_HEADER.size
LEDGER_SLOT_DEVICES = 128
LEDGER_SIZE = LEDGER_SLOTS + N_SLOTS * LEDGER_SLOT.size

OPEN = 2**64 - 1
"""`deadline_ns` of an open grant: no other container is waiting and no cap applies."""

NO_SLOT = 2**32 - 1
"""The answer to a process that cannot be given a slot; no descriptor comes with it."""

ARENA_PIECE = 64 << 20
"""Host memory for parked memory is prepared and pinned in pieces of this size, in bytes."""

REGISTER = b"r"
"""First byte that a process sends to request a slot."""

AGAIN = b"a"
"""First byte that a process sends to reconnect: the governor that gave it its slot has ended, or
the connection was lost."""

STRUCTS = (
    GRANT_HEADER,
    GRANT_DEVICE,
    USAGE_HEADER,
    USAGE_ENTRY,
    LEDGER_HEADER,
    LEDGER_DEVICE,
    LEDGER_SLOT,
)

CONSTANTS = {
    "LAYOUT_VERSION": VERSION,
    "LAYOUT_N_DEVICES": N_DEVICES,
    "LAYOUT_N_SLOTS": N_SLOTS,
    "LAYOUT_NO_SLOT": NO_SLOT,
    "LAYOUT_N_UNKNOWN": N_UNKNOWN,
    "LAYOUT_UNKNOWN_SIZE": UNKNOWN_SIZE,
    "LAYOUT_ARENA_PIECE": ARENA_PIECE,
    "LAYOUT_REGISTER": ord(REGISTER),
    "LAYOUT_AGAIN": ord(AGAIN),
    "GRANT_MAGIC": GRANT_MAGIC,
    "LEDGER_MAGIC": LEDGER_MAGIC,
    "GRANT_SIZE": GRANT_SIZE,
    "GRANT_DEVICES": GRANT_DEVICES,
    "GRANT_USAGE": GRANT_USAGE,
    "GRANT_USAGE_ENTRIES": GRANT_USAGE_ENTRIES,
    "GRANT_FILE_SIZE": GRANT_FILE_SIZE,
    "LEDGER_SLOTS": LEDGER_SLOTS,
    "LEDGER_SLOT_DEVICES": LEDGER_SLOT_DEVICES,
    "LEDGER_SIZE": LEDGER_SIZE,
    "GRANT_OPEN": OPEN,
    "STRATEGY_MPS": 1,
    "UNKNOWN_FORWARD": 0,
    "UNKNOWN_COUNT": 1,
    "UNKNOWN_REFUSE": 2,
}


def offsets(struct: Struct) -> dict[str, int]:
    """Return the offset of each field. Raise ValueError if one is misaligned or does not fit."""
    at = 0
    result = {}
    for field in struct.fields:
        size = SIZES[field.type]
        if at % size:
            raise ValueError(f"{struct.name}.{field.name} is misaligned at {at}")
        result[field.name] = at
        at += size * field.n
    if at > struct.size:
        raise ValueError(f"{struct.name} needs {at} bytes, has {struct.size}")
    return result


def grant_device(index: int) -> int:
    """Return the offset of GPU `index` in the grant page. Raise IndexError if there is none."""
    if not 0 <= index < N_DEVICES:
        raise IndexError(index)
    return GRANT_DEVICES + index * GRANT_DEVICE.size


def ledger_device(slot: int, index: int) -> int:
    """Return the offset of a process's GPU in the ledger. Raise IndexError if there is none."""
    if not 0 <= slot < N_SLOTS or not 0 <= index < N_DEVICES:
        raise IndexError((slot, index))
    return LEDGER_SLOTS + slot * LEDGER_SLOT.size + LEDGER_SLOT_DEVICES + index * LEDGER_DEVICE.size
