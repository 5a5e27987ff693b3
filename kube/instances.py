"""Coordinates the instances of the DRA driver on one node during an update.

The new instance is serving before the old one ends. Since 1.33, kubelets support several plugins
for one driver if their sockets have different names, and call the one that registered last. Both
instances may therefore prepare claims. Only one of them publishes and reconciles: of the registered
instances, the one that was started last.

Each live instance holds a lock on its own file in the driver's directory. The other instances
remove the files of a dead one. All instances share a lock on the directory itself; a driver with
fixed socket names, and the device plugin, hold this lock exclusively.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from kube.errors import SocketError
from kube.names import DRIVER

log = structlog.get_logger()

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_LOCK = re.compile(r"instance-(?P<name>.+)\.lock")
_PLUGIN = re.compile(r"dra(?:-(?P<name>.+))?\.sock")
_REGISTRAR = re.compile(rf"{re.escape(DRIVER)}(?:-(?P<name>.+))?-reg\.sock")
CLAIMS = "claims.lock"
"""File for byte-range locks; the instance that works on a claim locks one byte for it."""
SLOTS = 1 << 30
"""Number of bytes that can be locked; claims' uids are hashed to their offsets."""
PATIENCE_S = 5.0
"""Longest wait in seconds for the lock on this instance's own file."""
LATELY_S = 120.0
"""How long another instance counts as present after it was last seen, in seconds."""
MAX_HOLD_S = 20.0
"""Longest wait in seconds for another instance to release a claim. No instance needs that long,
because instances do not wait for anything while they hold a claim."""


class Instance:
    """One running driver; without a name it is the only one on its node."""

    def __init__(self, directory: Path, registry: Path, name: str = "") -> None:
        if name and not _NAME.fullmatch(name):
            raise SocketError(
                f"{name[:80]!r} cannot be part of a socket's name",
                hint="name the instance after the uid of its pod",
            )
        self.name = name
        self._directory = directory
        self._registry = registry
        self._started = 0
        self._registered = False
        self._met: float | None = None
        self._shared: int | None = None
        self._own: int | None = None
        self._claims: int | None = None

    @property
    def socket(self) -> Path:
        """The socket on which the kubelet calls this driver."""
        return self._socket(self.name)

    @property
    def registration(self) -> Path:
        """The registration socket by which the kubelet finds this driver."""
        return self._registration(self.name)

    def _socket(self, name: str) -> Path:
        return self._directory / (f"dra-{name}.sock" if name else "dra.sock")

    def _registration(self, name: str) -> Path:
        return self._registry / (f"{DRIVER}-{name}-reg.sock" if name else f"{DRIVER}-reg.sock")

    def _lock_file(self, name: str) -> Path:
        return self._directory / f"instance-{name}.lock"

    def start(self) -> None:
        """Take the locks; raise SocketError if another driver excludes this one."""
        try:
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._registry.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._shared = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(
                self._shared, (fcntl.LOCK_SH if self.name else fcntl.LOCK_EX) | fcntl.LOCK_NB
            )
            self._claims = os.open(
                self._directory / CLAIMS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            if self.name:
                self._own = self._lock()
                self._started = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
                self._write(registered=False)
            self.clean()
        except BlockingIOError as e:
            self.close()
            if self.name:
                raise SocketError(
                    f"another driver with fixed socket names, or the device plugin, is already"
                    f" using {self._directory}",
                    hint="stop it first (kubectl delete daemonset)",
                ) from e
            raise SocketError(
                f"another driver is already using {self._directory}",
                hint="stop it first (a DaemonSet with maxSurge 0 does), or name each instance"
                " (--instance)",
            ) from e
        except OSError as e:
            self.close()
            raise SocketError(
                f"{e.filename or self._directory}: {e.strerror}",
                hint="run as root; see --kubelet-dir",
            ) from e

    def _lock(self) -> int:
        """Lock this instance's file and return its descriptor, never that of a removed file."""
        path = self._lock_file(self.name)
        until = time.monotonic() + PATIENCE_S
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another instance that examined the file before it was locked may have removed it.
                if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
                    return fd
            except BlockingIOError:
                # Another instance is examining it, or the previous container is still ending.
                if time.monotonic() > until:
                    os.close(fd)
                    raise
            os.close(fd)
            time.sleep(0.02)

    def _write(self, *, registered: bool) -> None:
        if self._own is None:
            return
        data = json.dumps({"started": self._started, "registered": registered}).encode()
        # The whole line is written at once, so a reader sees either the old line or the new one.
        os.pwrite(self._own, data.ljust(80) + b"\n", 0)

    def note_registered(self, registered: bool) -> None:  # noqa: FBT001 - the only argument
        """Record whether the kubelet has registered this instance."""
        self._registered = registered
        with contextlib.suppress(OSError):
            self._write(registered=registered)

    def leads(self) -> bool:
        """Return whether this instance publishes and reconciles; clean up after dead instances.

        Raise SocketError if the kubelet's directories cannot be used any more.
        """
        if not self.name:
            return True
        try:
            others = self.clean()
        except OSError as e:
            raise SocketError(
                f"{e.filename or self._directory}: {e.strerror}",
                hint="start the driver again, which creates its directory; see --kubelet-dir",
            ) from e
        return not any(
            other["registered"] and (other["started"] > self._started or not self._registered)
            for other in others
        )

    def has_successor(self) -> bool:
        """Return whether a later instance, which serves once this one ends, is registered."""
        if not self.name:
            return False
        try:
            others = self.clean()
        except OSError:  # nothing can be learnt about the others, and this one ends in any case
            return False
        return any(other["registered"] and other["started"] > self._started for other in others)

    def clean(self) -> list[dict[str, Any]]:
        """Remove the files of dead instances; return the states that the live ones have written."""
        # Sockets are listed first: an instance takes its lock before it creates them.
        left = self._found(self._directory, _PLUGIN) | self._found(self._registry, _REGISTRAR)
        alive = {}
        for name in self._found(self._directory, _LOCK) - {self.name}:
            state = self._look(name)
            if state is not None:
                alive[name] = state
        for name in left - set(alive) - {self.name}:
            for path in (self._registration(name), self._socket(name)):
                path.unlink(missing_ok=True)
            log.info("sockets-left-over", instance=name)
        if alive:
            self._met = time.monotonic()
        return list(alive.values())

    def others(self) -> bool:
        """Return whether another instance was seen recently, so the kubelet may have called it."""
        return self._met is not None and time.monotonic() - self._met < LATELY_S

    def _found(self, directory: Path, pattern: re.Pattern[str]) -> set[str]:
        matches = (pattern.fullmatch(entry.name) for entry in os.scandir(directory))
        return {match["name"] or "" for match in matches if match}

    def _look(self, name: str) -> dict[str, Any] | None:
        """Return the state of a live instance; remove the file of a dead one, and return None."""
        path = self._lock_file(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            return _read(fd)
        finally:
            os.close(fd)
        return None

    @contextlib.contextmanager
    def hold(self, uid: str, check: Callable[[], None]) -> Iterator[None]:
        """Keep other instances from working on a claim; `check` raises to give up the wait.

        The caller must let only one thread at a time hold a claim: the kernel's lock excludes
        processes, not threads.
        """
        if self._claims is None or not self.name:
            yield
            return
        slot = zlib.crc32(uid.encode(errors="replace")) % SLOTS
        until = time.monotonic() + MAX_HOLD_S
        while True:
            try:
                fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
                break
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    raise SocketError(
                        f"{self._directory / CLAIMS}: {e.strerror}", hint="see --kubelet-dir"
                    ) from e
                check()
                if time.monotonic() > until:
                    raise SocketError(
                        f"another driver on this node has held the claim for {MAX_HOLD_S:.0f} s",
                        hint="stop the older driver",
                    ) from e
                time.sleep(0.02)
        try:
            yield
        finally:
            fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, slot)

    def close(self) -> None:
        """Release the locks; the sockets are removed by the servers that created them."""
        if self._own is not None:
            self._lock_file(self.name).unlink(missing_ok=True)
        for fd in (self._own, self._claims, self._shared):
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._own = self._claims = self._shared = None


def _read(fd: int) -> dict[str, Any]:
    """Return the state that an instance has written; without a state it counts as the oldest."""
    try:
        state = json.loads(os.pread(fd, 200, 0))
        return {"started": int(state["started"]), "registered": state["registered"] is True}
    except (OSError, ValueError, TypeError, KeyError):
        return {"started": 0, "registered": False}
