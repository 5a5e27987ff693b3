"""A directory of the host that no container may access, and the check that no container did."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

from tests.container.bundles import LIBDIR, TARGET
from tests.container.test_hook_start import host_mounts, tree

EVENT = struct.Struct("iIII")
IN_NONBLOCK = 0o4000
IN_ALL_EVENTS = 0xFFF
SECRET = "secret-of-the-host"  # noqa: S105 - the name of a file

NAMES = {
    1: "read", 2: "changed", 4: "attributes", 8: "closed after writing", 0x10: "closed", 0x20: "opened", 0x40: "moved from",
    0x80: "moved to", 0x100: "created", 0x200: "deleted", 0x400: "deleted itself", 0x800: "moved itself",
}  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


class Canary:
    """A tree that looks like the parts of an image that the hook touches. `watch()` starts the
    check, and `check()` ends it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("usr/bin", LIBDIR, "usr/lib64", "etc", "run/tidegate", "x86-64-v2"):
            (path / name).mkdir(parents=True)
            (path / name / SECRET).write_bytes(b"the host's secret")
        for name in ("etc/ld.so.cache", "usr/bin/nvidia-smi", "file", f"{LIBDIR}/libc.so.6"):
            (path / name).write_bytes(b"the host's own")
        (path / TARGET).mkdir(parents=True)
        self.fd = -1

    def watch(self) -> None:
        """Ask the kernel to report all events in the tree from now on."""
        self.before = self._contents()
        self.mounts = self._mounts()
        self.fd = _libc.inotify_init1(IN_NONBLOCK | os.O_CLOEXEC)
        assert self.fd >= 0
        self.watches: dict[int, Path] = {}
        for path in [self.path, *self.path.rglob("*")]:
            wd = _libc.inotify_add_watch(self.fd, os.fsencode(path), IN_ALL_EVENTS)
            assert wd >= 0, os.strerror(ctypes.get_errno())
            self.watches[wd] = path

    def events(self) -> list[str]:
        """Return what was opened, read, changed, created or removed since `watch()`."""
        found = []
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return found
            while data:
                wd, mask, _, size = EVENT.unpack_from(data)
                name = data[EVENT.size : EVENT.size + size].rstrip(b"\0").decode()
                names = [text for bit, text in NAMES.items() if mask & bit]
                found.append(f"{self.watches[wd] / name}: {', '.join(names)}")
                data = data[EVENT.size + size :]

    def check(self, *, links: bool = False) -> None:
        """Require that nothing was opened, read, changed, created or removed, and nothing was mounted
        on the host.

        With `links` the image has hard links to the tree's files, which may be removed or renamed.
        """
        fine = (": attributes", ": moved itself") if links else ()
        found = [event for event in self.events() if not event.endswith(fine)]
        assert found == [], found
        os.close(self.fd)
        self.fd = -1
        assert self._contents() == self.before
        assert self._mounts() == self.mounts

    def _mounts(self) -> list[str]:
        """Return the mounts of the host in the canary's parent directory, where other programs make
        no mounts.
        """
        return [line for line in host_mounts(self.path.parent) if str(self.path.parent) in line]

    def _contents(self) -> dict[str, tuple[tuple[int, int, int], bytes]]:
        return {
            name: (names, (self.path / name).read_bytes() if (self.path / name).is_file() else b"")
            for name, names in tree(self.path).items()
        }
