"""Create a container's two shared pages, or find them again for a running container.

The grant page is a file that only the governor writes, so if it is invalid, it has been damaged.
The ledger is a memfd, without a path, that the container's processes have mapped. It is found
through one of these processes, which may have mapped other files under the same name.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from governor.arbiter import WHOLE
from governor.config import Config
from governor.processes import FileIdentity, Identity, mapped, start_time
from governor.quota import LATENCY, THROUGHPUT, Device, Quota
from libcontrol import layout, pages

LEDGER = "tidegate-ledger"
MAPPED = f"/memfd:{LEDGER} (deleted)"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LOSS = {"keep": 0, "deny": 1, "open": 2}
_UNKNOWN = {"forward": 0, "count": 1, "refuse": 2}

SEARCH_S = 0.5
"""Time limit for the search for a container's ledger, in seconds: its processes may have a large
number of mappings."""


class PageError(Exception):
    """A shared page is invalid; the message states what was found."""


class Ledger(NamedTuple):
    """A ledger: its descriptor, which is sent to new processes, and its mapping."""

    fd: int
    page: mmap.mmap

    @property
    def file(self) -> FileIdentity:
        """The identity of the file."""
        status = os.fstat(self.fd)
        return FileIdentity(status.st_dev, status.st_ino)


def uuid_bytes(uuid: str) -> bytes:
    """Return a GPU's UUID in the driver's binary form."""
    return bytes.fromhex(uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", ""))


def _settings(config: Config, strategy: str) -> dict[str, int]:
    inflight_ns = config.inflight_us * 1000
    if strategy == "mps":
        # Work that is queued beyond a grant would delay the next holder.
        inflight_ns = min(inflight_ns, int(config.mps_quantum_ms * 1e6))
    return {
        "on_governor_loss": _LOSS[config.on_governor_loss],
        "inflight_ns": inflight_ns,
        "marker_ns": 250_000,
        "lookahead_ns": config.lookahead_us * 1000,
        "idle_release_ns": config.idle_release_us * 1000,
        "spin_ns": config.spin_us * 1000,
        "holds": int(config.hold_launches),
        "unknown_functions": _UNKNOWN[config.unknown_functions],
    }


def make_grant(
    path: Path,
    quota: Quota,
    devices: tuple[Device, ...],
    config: Config,
    strategy: str = "timeslice",
) -> mmap.mmap:
    """Create a grant page at `path`, replacing an existing file, and a list of GPUs beside it."""
    described: list[dict[str, int | bytes]] = [
        {
            "uuid": uuid_bytes(device.uuid),
            "memory_limit": quota.memory,
            "context_bytes": config.context_memory,
            "compute": quota.compute * WHOLE // 100,
            "compute_limit": quota.compute_limit * WHOLE // 100,
            "strategy": int(strategy == "mps"),
            "work_class": int(quota.is_latency),
            "parking": int(quota.parking),
            # A container that may be parked gets room on the GPU when it needs it.
            "resident": int(not quota.parking),
        }
        for device in devices
    ]
    if path.is_dir() and not path.is_symlink():
        raise PageError("it is a directory")
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.fchmod(fd, 0o644)
        # Allocate the space now: on a full tmpfs, a write to an unallocated page raises SIGBUS.
        os.posix_fallocate(fd, 0, layout.GRANT_FILE_SIZE)
        page = mmap.mmap(fd, layout.GRANT_FILE_SIZE)
    finally:
        os.close(fd)
    pages.init_grant(page, settings=_settings(config, strategy), devices=described)
    # The list is for CUDA_VISIBLE_DEVICES: the GPUs are not known before the container's start.
    listed = path.with_name("devices")
    listed.unlink(missing_ok=True)
    listed.write_text(",".join(device.uuid for device in devices) + "\n")
    listed.chmod(0o644)
    return page


def open_grant(path: Path) -> mmap.mmap:
    """Map the grant page of a running container; raise PageError if it is invalid."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        raise PageError(e.strerror) from e
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PageError("it is not a regular file")
        if status.st_uid != os.geteuid():
            raise PageError(f"it belongs to user {status.st_uid}")
        if status.st_mode & 0o022:
            raise PageError("users other than its owner may write to it")
        if status.st_size != layout.GRANT_FILE_SIZE:
            raise PageError(f"it has {status.st_size} bytes, not {layout.GRANT_FILE_SIZE}")
        page = mmap.mmap(fd, layout.GRANT_FILE_SIZE)
    except OSError as e:
        raise PageError(e.strerror) from e
    finally:
        os.close(fd)
    found = tuple(
        pages.read(page, 0, "grant_header", name) for name in ("magic", "version", "size")
    )
    if found != (layout.GRANT_MAGIC, layout.VERSION, layout.GRANT_FILE_SIZE):
        page.close()
        raise PageError("its magic number, version or size is wrong")
    return page


def read_quota(page: mmap.mmap, uuids: Iterable[str]) -> tuple[Quota, tuple[str, ...]]:
    """Return the quota and the GPUs in a grant page; each GPU has to be one of `uuids`.

    Raise PageError if the content of the page is invalid.
    """
    names = {uuid_bytes(uuid): uuid for uuid in uuids}
    count = pages.read(page, 0, "grant_header", "n_devices")
    if not 1 <= count <= layout.N_DEVICES:
        raise PageError(f"it has {count} GPUs")
    found: list[str] = []
    quotas = set()
    for i in range(count):
        base = layout.grant_device(i)
        uuid = bytes(pages.read(page, base, "grant_device", "uuid", j) for j in range(16))
        if uuid not in names or names[uuid] in found:
            raise PageError(f"GPU {uuid.hex()} in it is not this node's, or occurs twice")
        found.append(names[uuid])
        memory, compute, limit = (
            pages.read(page, base, "grant_device", name)
            for name in ("memory_limit", "compute", "compute_limit")
        )
        latency = pages.read(page, base, "grant_device", "work_class")
        parking = pages.read(page, base, "grant_device", "parking")
        shares = (compute * 100 // WHOLE, limit * 100 // WHOLE)
        work_class = LATENCY if latency else THROUGHPUT
        quotas.add(Quota(memory, *shares, work_class, parking == 1))
    quota = quotas.pop()
    if quotas or not 1 <= quota.compute <= quota.compute_limit <= 100 or not quota.memory:
        raise PageError("its quota is invalid")
    return quota, tuple(found)


def take_over(
    page: mmap.mmap, config: Config, strategy: str = "timeslice", *, may_hold: bool = True
) -> None:
    """Write the node's settings to a grant page that a previous governor created.

    Unless `may_hold`, no launch is held on the GPU, whatever the settings are.
    """
    settings = _settings(config, strategy)
    settings["holds"] *= may_hold
    for name, value in settings.items():
        pages.write(page, 0, "grant_header", name, value)


def make_ledger() -> Ledger:
    """Create an empty ledger."""
    fd = os.memfd_create(LEDGER, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, layout.LEDGER_SIZE)
    page = mmap.mmap(fd, layout.LEDGER_SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    pages.init_ledger(page)
    return Ledger(fd, page)


def memfd_device() -> int:
    """Return the device of the file system of memfds, which contains no other files."""
    fd = os.memfd_create("tidegate", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def find_ledger(
    processes: Iterable[Identity], file: FileIdentity | None, taken: set[FileIdentity]
) -> Ledger | None:
    """Return the ledger that one of these processes has mapped, or None if none has.

    `file` is the identity of the ledger. If it is not known, the first file that has the form of a
    ledger and does not belong to another container (`taken`) is used: a process may have received a
    descriptor of another container's ledger.
    """
    device = file.device if file else memfd_device()
    until = time.monotonic() + SEARCH_S
    for process in processes:
        for path, inode in mapped(process.pid, MAPPED, device):
            found = FileIdentity(device, inode)
            if found in taken or found != (file or found):
                continue
            ledger = _open_ledger(path, found, known=file is not None)
            if ledger is None:
                continue
            if start_time(process.pid) == process.start:
                return ledger
            close_ledger(ledger)
        if time.monotonic() > until:
            break
    return None


def _open_ledger(path: str, file: FileIdentity, *, known: bool) -> Ledger | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError, ValueError):
        status = os.fstat(fd)
        # Without the seals, a process could shrink it while it is in use, which would raise SIGBUS.
        if (
            FileIdentity(status.st_dev, status.st_ino) == file
            and status.st_size == layout.LEDGER_SIZE
            and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        ):
            ledger = Ledger(fd, mmap.mmap(fd, layout.LEDGER_SIZE))
            header = tuple(
                pages.read(ledger.page, 0, "ledger_header", name)
                for name in ("magic", "version", "size")
            )
            if header == (layout.LEDGER_MAGIC, layout.VERSION, layout.LEDGER_SIZE):
                return ledger
            if known:  # it is the container's ledger, even if a process has overwritten its header
                pages.init_ledger(ledger.page)
                return ledger
            ledger.page.close()
    os.close(fd)
    return None


def close_ledger(ledger: Ledger) -> None:
    """Close a ledger that is not used."""
    ledger.page.close()
    os.close(ledger.fd)
