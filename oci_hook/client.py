"""The governor's protocol, the hook's half of it: JSON lines on a stream socket."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any, NamedTuple

from oci_hook.errors import GovernorError, RefusedError, show

LINE_LIMIT = 64 << 10
PEER = struct.Struct("=iII")  # struct ucred: pid, uid, gid
START = "start tidegate-governor (`systemctl status tidegate-governor` says why it is down)"


class Grant(NamedTuple):
    """What the governor granted."""

    key: str
    directory: str
    devices: tuple[str, ...]  # UUIDs
    memory: int
    compute: int
    strategy: str = "timeslice"
    minors: tuple[int, ...] = ()  # of the GPUs' device nodes, as far as they have any
    already: bool = False  # the hook has run for this container


class Reservation(NamedTuple):
    """GPUs that the governor keeps for a container for a while."""

    reservation: str
    minors: tuple[int, ...]


def _minors(answer: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(d["minor"]) for d in answer["devices"] if d.get("minor") is not None)


class Client:
    """One connection to the governor.  An admission lives as long as it does, until confirmed."""

    def __init__(self, runtime_dir: str, timeout: float) -> None:
        self.path = f"{runtime_dir}/governor.sock"
        self.timeout = timeout
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.socket.settimeout(timeout)
        self.buffer = b""
        try:
            self.socket.connect(self.path)
        except (OSError, ValueError) as e:
            self.socket.close()
            raise self._lost("connect", e) from e
        self._require_trusted()

    def _require_trusted(self) -> None:
        """Refuse a listener that is neither root nor our own user: it says what is mounted."""
        peer = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        _, uid, _ = PEER.unpack(peer)
        if uid not in (0, os.geteuid()):
            self.socket.close()
            raise GovernorError(
                f"{show(self.path)} is listened on by user {uid}, not by the governor",
                hint="see who may write to that directory, and start tidegate-governor",
            )

    def _lost(self, op: str, e: Exception) -> GovernorError:
        if isinstance(e, TimeoutError):
            return GovernorError(
                f"the governor did not answer {op} within {self.timeout:g} s", hint=START
            )
        reason = e.strerror if isinstance(e, OSError) and e.strerror else show(e)
        return GovernorError(
            f"the governor is not reachable at {show(self.path)} ({op}: {reason})", hint=START
        )

    def _bad(self, op: str, found: object) -> GovernorError:
        return GovernorError(
            f"the governor answered {op} with {show(found)}, which this hook does not understand",
            hint="install the same version of hook and governor",
        )

    def _request(self, op: str, fds: tuple[int, ...] = (), **fields: object) -> dict[str, Any]:
        """Send one request and wait for its answer, which is `ok`."""
        line = json.dumps({"v": 1, "op": op, **fields}).encode() + b"\n"
        if len(line) > LINE_LIMIT:
            raise GovernorError(
                f"the request {op} takes {len(line)} bytes", hint=f"{LINE_LIMIT} are accepted"
            )
        try:
            sent = socket.send_fds(self.socket, [line], list(fds)) if fds else 0
            if sent < len(line):  # to send nothing fails too, once the other side has closed
                self.socket.sendall(line[sent:])
            while b"\n" not in self.buffer:
                part = self.socket.recv(LINE_LIMIT)
                if not part:
                    raise GovernorError(
                        f"the governor closed the connection during {op}", hint=START
                    )
                self.buffer += part
                if len(self.buffer) > LINE_LIMIT:
                    raise self._bad(op, f"{len(self.buffer)} bytes")
        except OSError as e:
            raise self._lost(op, e) from e
        answer, _, self.buffer = self.buffer.partition(b"\n")
        try:
            document = json.loads(answer)
        except (ValueError, RecursionError) as e:
            raise self._bad(op, answer[:80]) from e
        if type(document) is not dict or type(document.get("ok")) is not bool:
            raise self._bad(op, document)
        if not document["ok"]:
            error = document.get("error")
            if type(error) is not dict:
                raise self._bad(op, document)
            raise RefusedError(
                show(error.get("message") or "the governor refused the container", 400),
                hint=show(error.get("hint") or "see the governor's log", 300),
            )
        return document

    def admit(
        self,
        *,
        ident: str,
        pid: int,
        pidfd: int,
        bundle: str,
        annotations: dict[str, str],
        identity: dict[str, str],
        **more: object,
    ) -> Grant:
        """Ask for a place on a GPU; `directory` exists afterwards."""
        answer = self._request(
            "admit",
            (pidfd,),
            id=ident,
            pid=pid,
            bundle=bundle,
            annotations=annotations,
            identity=identity,
            **more,
        )
        try:
            grant = Grant(
                key=answer["key"],
                directory=answer["directory"],
                devices=tuple(str(d["uuid"]) for d in answer["devices"]),
                memory=int(answer["memory"] or 0),
                compute=int(answer["compute"] or 0),
                strategy=str(answer.get("strategy", "timeslice")),
                minors=_minors(answer),
                already=answer.get("already") is True,
            )
        except (KeyError, TypeError, ValueError) as e:
            raise self._bad("admit", answer) from e
        if (
            type(grant.key) is not str
            or type(grant.directory) is not str
            or not grant.directory.startswith("/")
        ):
            raise self._bad("admit", answer)
        return grant

    def reserve(
        self, annotations: dict[str, str], identity: dict[str, str], **more: Any
    ) -> Reservation:
        """Have GPUs kept for a container that is about to be made."""
        answer = self._request("reserve", annotations=annotations, identity=identity, **more)
        try:
            return Reservation(str(answer["reservation"]), _minors(answer))
        except (KeyError, TypeError, ValueError) as e:
            raise self._bad("reserve", answer) from e

    def confirm(self) -> None:
        """Say that the container is ready: the admission stays when this connection ends."""
        self._request("confirm")

    def release(self, ident: str) -> None:
        """Say that the container is gone."""
        self._request("release", id=ident)

    def close(self) -> None:
        """End the connection; an admission that was not confirmed ends with it."""
        self.socket.close()
