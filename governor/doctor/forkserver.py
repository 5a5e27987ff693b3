"""Check the fork server: whether it listens, and whether it can serve the node's engines."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from governor.doctor.finding import Finding, UnseenError, note, ok, warning
from governor.doctor.node import AS_ROOT, ExaminedNode

UNIT = "/usr/lib/systemd/system/tidegate-forkserver.service"
SOCKET = "forkserver.sock"  # as in oci_hook/forkserver.py
START = "systemctl start tidegate-forkserver"
CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
TIMEOUT_S = 2.0


def serves(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether the fork server starts the hooks; otherwise each starts an interpreter."""
    path = f"{node.config.runtime_dir}/{SOCKET}"
    pid = _listener(node, path)
    if pid is None:
        found = (
            "the fork server is not running: each hook starts an interpreter, which takes about "
            "25 ms"
        )
        if node.stat(UNIT) is None:
            yield note(found)
        else:
            yield warning(found, START)
        return
    other = [name for name in ("mnt", "pid", "user") if _differs(node, pid, name)]
    if other:
        yield warning(
            f"the fork server, process {pid}, is in a different {other[0]} namespace from the"
            " node's first process: it declines the requests of the node's engines",
            "in its unit's drop-ins, remove the settings that give it namespaces, then"
            " systemctl restart tidegate-forkserver",
        )
    else:
        yield ok(f"the fork server, process {pid}, starts hooks")


def _listener(node: ExaminedNode, path: str) -> int | None:
    """Return the pid of the listening process, or None if there is none."""
    host = node.host(path)
    if host is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as asking:
        asking.settimeout(TIMEOUT_S)
        try:
            asking.connect(host)
        except PermissionError as e:
            raise UnseenError(f"{path}: {e.strerror}", remedy=AS_ROOT) from e
        except (OSError, ValueError):
            return None
        peer = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, _, _ = CREDENTIALS.unpack(peer)
    return int(pid)


def _differs(node: ExaminedNode, pid: int, name: str) -> bool:
    """Return whether a process is in a different namespace from the machine's first process."""
    if not node.alive:
        return False  # the tree belongs to another machine, or to a test
    try:
        places = [os.stat(Path(f"/proc/{one}/ns/{name}")) for one in (pid, 1)]  # noqa: PTH116
    except OSError:
        return False
    return (places[0].st_dev, places[0].st_ino) != (places[1].st_dev, places[1].st_ino)
