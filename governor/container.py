"""One admitted container: its directory, its two pages, its socket and its processes.

The directory is bound into the container read-only; it holds the grant page and the socket, not
the socket file alone, because a bound socket file refuses for ever after the governor restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import mmap
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from governor.arbiter import WHOLE, Runner
from governor.books import Device, Quota
from governor.config import Config
from libcontrol import layout, pages

log = structlog.get_logger()

_LOSS = {"keep": 0, "deny": 1, "open": 2}
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def container_key(identifier: str) -> str:
    """Return the name of a container's directory: an id is foreign text, a digest is not."""
    return hashlib.sha256(identifier.encode()).hexdigest()[:16]


def _uuid_bytes(uuid: str) -> bytes:
    return bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))


class Container:
    """Made by an admission, ended by `close`."""

    def __init__(
        self,
        *,
        identifier: str,
        pidfd: int,
        pid: int,
        quota: Quota,
        devices: tuple[Device, ...],
        runners: dict[str, Runner],
        config: Config,
    ) -> None:
        self.identifier = identifier
        self.key = container_key(identifier)
        self.pid = pid
        self.quota = quota
        self.devices = devices
        self.directory = Path(config.runtime_dir) / "containers" / self.key
        self.confirmed = False
        self._pidfd = pidfd
        self._runners = [runners[device.uuid] for device in devices]
        self._tenants: list[int] = []
        self._processes: dict[int, tuple[int, int, socket.socket]] = {}  # slot: pid, pidfd, socket
        self._server: asyncio.Server | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()
        try:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(mode=0o755, parents=True)
            self.grant = self._make_grant(config)
            self._ledger_fd, self.ledger = self._make_ledger()
            shares = (quota.compute * WHOLE // 100, quota.compute_limit * WHOLE // 100)
            for i, runner in enumerate(self._runners):
                self._tenants.append(runner.add(*shares, self.grant, i, self.ledger))
        except BaseException:
            self._forget()
            raise

    def _make_grant(self, config: Config) -> mmap.mmap:
        settings = {
            "on_governor_loss": _LOSS[config.on_governor_loss],
            "inflight_ns": config.inflight_us * 1000,
            "marker_ns": 250_000,
            "lookahead_ns": config.lookahead_us * 1000,
            "idle_release_ns": config.idle_release_us * 1000,
            "spin_ns": config.spin_us * 1000,
            "holds": int(config.hold_launches),
        }
        devices: list[dict[str, int | bytes]] = [
            {
                "uuid": _uuid_bytes(device.uuid),
                "memory_limit": self.quota.memory,
                "context_bytes": config.context_memory,
                "compute": self.quota.compute * WHOLE // 100,
                "compute_limit": self.quota.compute_limit * WHOLE // 100,
            }
            for device in self.devices
        ]
        path = self.directory / "grant"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.fchmod(fd, 0o644)
            os.ftruncate(fd, layout.GRANT_SIZE)
            page = mmap.mmap(fd, layout.GRANT_SIZE)
        finally:
            os.close(fd)
        pages.init_grant(page, settings=settings, devices=devices)
        return page

    def _make_ledger(self) -> tuple[int, mmap.mmap]:
        fd = os.memfd_create("tidegate-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, layout.LEDGER_SIZE)
        page = mmap.mmap(fd, layout.LEDGER_SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        pages.init_ledger(page)
        return fd, page

    async def listen(self, on_end: Callable[[Container], None]) -> None:
        """Serve the container's processes, and call `on_end` when its first process has ended."""
        path = self.directory / "governor.sock"
        self._server = await asyncio.start_unix_server(self._register, path=str(path))
        path.chmod(0o666)  # whoever runs in the container; the directory is in no other
        self._loop.add_reader(self._pidfd, on_end, self)

    async def _register(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give a process its slot: one byte comes, the slot's number and the ledger go back."""
        try:
            await asyncio.wait_for(reader.readexactly(1), 5)
            peer: socket.socket = writer.get_extra_info("socket")
            # A duplicate, because the transport closes its own when this returns.
            own = socket.socket(fileno=os.dup(peer.fileno()))
            own.setblocking(False)
            credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid = struct.unpack("3i", credentials)[0]
            try:
                self._admit_process(pid, own)
            except (OSError, RuntimeError) as e:
                own.close()
                log.warning("process-refused", container=self.identifier, pid=pid, error=str(e))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    def _admit_process(self, pid: int, own: socket.socket) -> None:
        slot = next(
            (i for i in range(layout.N_SLOTS) if i not in self._processes),
            None,
        )
        if slot is None:
            raise RuntimeError(f"{layout.N_SLOTS} processes of this container use the GPU already")
        pidfd = os.pidfd_open(pid)
        pages.clear_slot(self.ledger, slot)
        base = pages.slot_base(slot)
        pages.write(self.ledger, base, "ledger_slot", "state", 1)
        seen = pages.read(self.ledger, 0, "ledger_header", "n_slots")
        if slot >= seen:
            pages.write(self.ledger, 0, "ledger_header", "n_slots", slot + 1)
        self._processes[slot] = (pid, pidfd, own)
        self._loop.add_reader(pidfd, self._end_process, slot)
        for runner in self._runners:
            runner.watch(own.fileno())
        socket.send_fds(own, [struct.pack("I", slot)], [self._ledger_fd])
        log.info("process-registered", container=self.identifier, pid=pid, slot=slot)

    def _end_process(self, slot: int) -> None:
        """Take back what a process that ended was charged; the driver has freed it by then."""
        pid, pidfd, own = self._processes.pop(slot)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        own.close()
        pages.clear_slot(self.ledger, slot)
        log.info("process-ended", container=self.identifier, pid=pid, slot=slot)

    def pids(self) -> frozenset[int]:
        """Return the registered processes, by their pids on the host."""
        return frozenset(pid for pid, _, _ in self._processes.values())

    def charged(self, device: int) -> int:
        """Return what the container's processes are charged on its GPU `device`, bytes."""
        return pages.device_sum(self.ledger, "memory", device)

    def reconcile(self, device: int, seen: int | None, charged: int) -> None:
        """Carry what the driver took beyond the books as debt, and publish what is used."""
        base = layout.grant_device(device)
        overhead = max(0, seen - charged) if seen is not None else 0
        pages.write(self.grant, base, "grant_device", "memory_overhead", overhead)
        pages.write(self.grant, base, "grant_device", "memory_used", max(seen or 0, charged))

    def describe(self) -> dict[str, Any]:
        """Return what `tidegate ps` shows: bytes, percent, nanoseconds and counts."""
        devices = []
        for i, device in enumerate(self.devices):
            stats = self._runners[i].stats(self._tenants[i])
            base = layout.grant_device(i)
            overhead = pages.read(self.grant, base, "grant_device", "memory_overhead")
            counters = {
                name: pages.device_sum(self.ledger, name, i)
                for name in (
                    "launches",
                    "waits",
                    "wait_ns",
                    "refused",
                    "markers",
                    "busy_ns",
                    "blocks",
                    "predicted_ns",
                    "error_ns",
                )
            }
            devices.append(
                {
                    "uuid": device.uuid,
                    "index": device.index,
                    "memory_limit": self.quota.memory,
                    "memory_used": self.charged(i) + overhead,
                    "memory_peak": pages.read(self.ledger, 0, "ledger_header", "memory_peak", i),
                    "grants": int(stats.grants),
                    "charged_ns": int(stats.charged_ns),
                    "lent_ns": int(stats.lent_ns),
                    "held_ns": int(stats.held_ns),
                    "overdue": int(stats.overdue),
                    **counters,
                }
            )
        lookups = sum(
            pages.read(self.ledger, pages.slot_base(slot), "ledger_slot", "lookups")
            for slot in self._processes
        )
        return {
            "id": self.identifier,
            "key": self.key,
            "pid": self.pid,
            "confirmed": self.confirmed,
            "compute": self.quota.compute,
            "compute_limit": self.quota.compute_limit,
            "processes": sorted(self.pids()),
            "lookups": lookups,
            "devices": devices,
        }

    def close(self, *, keep: bool = False) -> None:
        """Take everything back: the GPU, the slots, the socket, the directory.

        With `keep` the container runs on without us: its pages, what its processes are charged and
        its directory stay, and it keeps its quota by itself.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError, ValueError):
            self._loop.remove_reader(self._pidfd)
        if self._server is not None:
            self._server.close()
        for slot, (_, pidfd, own) in list(self._processes.items()):
            if keep:
                self._loop.remove_reader(pidfd)
                os.close(pidfd)
                own.close()
            else:
                self._end_process(slot)
        self._forget(keep=keep)

    def _forget(self, *, keep: bool = False) -> None:
        for runner, tenant in zip(self._runners, self._tenants, strict=False):
            runner.remove(tenant)
        self._tenants = []
        os.close(self._pidfd)
        if hasattr(self, "_ledger_fd"):
            os.close(self._ledger_fd)
        if not keep:
            shutil.rmtree(self.directory, ignore_errors=True)
