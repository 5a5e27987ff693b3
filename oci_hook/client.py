"""The hook's client of the governor: sends requests as JSON lines on a stream socket."""

from __future__ import annotations

import _socket as socket  # without socket's enums and selectors, which take 2 ms
import os
from _struct import Struct, pack  # struct only re-exports these names
from time import monotonic, sleep

from oci_hook.errors import AdmissionRefusedError, UnreachableError, show
from oci_hook.light_json import dump_json, load_json
from oci_hook.state import is_text

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from typing import Any, NamedTuple
else:
    from oci_hook.light_typing import NamedTuple

LINE_LIMIT = 64 << 10
MAX_MINOR = (1 << 20) - 1  # MINORMASK
MAX_MEMORY = 1 << 50
WRONG = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # for a malformed answer
PEER = Struct("=iII")  # struct ucred: pid, uid, gid
PATIENCE = 5.0  # seconds; a restart of the governor, as in an upgrade, takes less
START = "start tidegate-governor (`systemctl status tidegate-governor` says why it is down)"


class Grant(NamedTuple):
    """A container's admission: its directory, GPUs and quota."""

    key: str
    directory: str
    devices: tuple[str, ...]  # UUIDs
    memory: int
    compute: int
    strategy: str = "timeslice"
    minors: tuple[int, ...] = ()  # of those GPUs that have a device node
    already: bool = False  # the hook has run before for this container


class Reservation(NamedTuple):
    """GPUs that the governor reserves for a container for a limited time."""

    reservation: str
    minors: tuple[int, ...]


def _whole(value: Any, most: int) -> int:
    """Return a number from an answer, 0 for null. Raise ValueError unless it is 0 to `most`."""
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{show(value)} is not a number from 0 to {most}")
    return value


def _name(value: Any) -> str:
    if not is_text(value):
        raise ValueError(f"{show(value)} is not a name")
    return value  # type: ignore[no-any-return]


def _devices(answer: dict[str, Any]) -> tuple[tuple[str, int | None], ...]:
    """Return the GPUs in an answer: UUID and minor number."""
    devices = answer["devices"]
    if type(devices) is not list:
        raise TypeError(f"devices are {show(devices)}")
    return tuple(
        (_name(d["uuid"]), None if d.get("minor") is None else _whole(d["minor"], MAX_MINOR))
        for d in devices
    )


def parse_admission(answer: dict[str, Any]) -> Grant:
    """Return the admission in an answer; a malformed answer raises one of the errors in WRONG.

    governor/answers.schema.json describes the same format.
    """
    devices = _devices(answer)
    directory = _name(answer["directory"])
    if not directory.startswith("/"):
        raise ValueError(f"directory {show(directory)}")
    return Grant(
        key=_name(answer["key"]),
        directory=directory,
        devices=tuple(uuid for uuid, _ in devices),
        memory=_whole(answer["memory"], MAX_MEMORY),
        compute=_whole(answer["compute"], 100),
        strategy=_name(answer.get("strategy", "timeslice")),
        minors=tuple(minor for _, minor in devices if minor is not None),
        already=answer.get("already") is True,
    )


def parse_reservation(answer: dict[str, Any]) -> Reservation:
    """Return the reservation in an answer; raise the same errors as `parse_admission`."""
    minors = tuple(minor for _, minor in _devices(answer) if minor is not None)
    return Reservation(_name(answer["reservation"]), minors)


def parse_answer(line: bytes) -> dict[str, Any]:
    """Parse an answer: an object with `ok`, and with `error` if `ok` is false."""
    document = load_json(line)
    if type(document) is not dict or type(document.get("ok")) is not bool:
        raise TypeError("no answer")
    if not document["ok"] and type(document.get("error")) is not dict:
        raise TypeError("no error")
    return document


def require_reachable(runtime_dir: str, uid_map: str = "/proc/self/uid_map") -> None:
    """Refuse a rootless engine, unless its user can connect to the governor.

    That is possible if the governor runs in the same user namespace.
    """
    try:
        fd = os.open(uid_map, os.O_RDONLY | os.O_CLOEXEC)  # open() takes ten times as long
        try:
            inside, outside, count = map(int, os.read(fd, 64).partition(b"\n")[0].split())
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return
    if (inside, outside, count) == (0, 0, 0xFFFFFFFF):
        return
    path = f"{runtime_dir}/governor.sock"
    if os.access(path, os.W_OK):
        return
    raise UnreachableError(
        f"this engine is rootless (root in its user namespace is user {outside} outside), and the"
        f" governor at {show(path)} serves only the node's root",
        hint="start this container with root's engine, for example with `sudo podman run`",
    )


class _EndedError(UnreachableError):
    """The governor ended before it answered."""


class Client:
    """A connection to the governor. An admission that is not confirmed ends with the connection."""

    def __init__(self, runtime_dir: str, timeout: float, patience: float = 0.0) -> None:
        """Connect; if the governor is being restarted, wait at most `patience` seconds for it.

        The wait does not exceed `timeout` seconds either, so that the connection error is reported,
        not the missed deadline. If the socket's listen backlog is full, the governor is running
        but busy; the client then waits, whatever `patience` is.
        """
        self.runtime_dir = runtime_dir
        self.path = f"{runtime_dir}/governor.sock"
        self.timeout = timeout
        self.patience = patience
        self._connect(monotonic())

    def _connect(self, began: float) -> None:
        """Connect; `began` is the time at which the wait began."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.socket.settimeout(self.timeout)
        self.buffer = b""
        patience, timeout = self.patience, self.timeout
        while True:
            try:
                self.socket.connect(self.path)
                break
            except (OSError, ValueError) as e:
                gone = isinstance(e, FileNotFoundError | ConnectionRefusedError)
                full = isinstance(e, BlockingIOError)  # a socket with a timeout is non-blocking
                most = min(PATIENCE if full else patience if gone else 0.0, timeout)
                if monotonic() - began < most and os.path.isdir(self.runtime_dir):
                    sleep(0.05)
                    continue
                self.socket.close()
                if full:
                    raise UnreachableError(
                        f"the governor accepted no connection at {show(self.path)} within"
                        f" {most:g} s",
                        hint=START,
                    ) from e
                raise self._lost("connect", e) from e
        self._require_trusted()

    def _require_trusted(self) -> None:
        """Refuse a listener that neither root nor this user runs: it decides what is mounted."""
        peer = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        _, uid, _ = PEER.unpack(peer)
        if uid not in (0, os.geteuid()):
            self.socket.close()
            raise UnreachableError(
                f"user {uid}, not the governor, is listening on {show(self.path)}",
                hint="check which users may write to that directory, and start tidegate-governor",
            )

    def _lost(self, op: str, e: Exception) -> UnreachableError:
        if isinstance(e, TimeoutError):
            return UnreachableError(
                f"the governor did not answer {op} within {self.timeout:g} s", hint=START
            )
        if isinstance(e, FileNotFoundError):
            # Podman would mistake the system's own message for that of a missing program.
            reason = "there is no socket"
        else:
            reason = e.strerror if isinstance(e, OSError) and e.strerror else show(e)
        return UnreachableError(
            f"the governor is not reachable at {show(self.path)} ({op}: {reason})", hint=START
        )

    def _bad(self, op: str, found: object) -> UnreachableError:
        return UnreachableError(
            f"the governor answered {op} with {show(found)}, which this hook does not understand",
            hint="install the same version of the hook and the governor",
        )

    def _request(self, op: str, fds: tuple[int, ...] = (), **fields: object) -> dict[str, Any]:
        """Send a request and return its answer. Raise AdmissionRefusedError if that is not `ok`."""
        line = dump_json({"v": 1, "op": op, **fields}).encode() + b"\n"
        if len(line) > LINE_LIMIT:
            raise UnreachableError(
                f"the request {op} takes {len(line)} bytes", hint=f"the limit is {LINE_LIMIT}"
            )
        try:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, pack(f"{len(fds)}i", *fds))
            sent = self.socket.sendmsg([line], [rights]) if fds else 0
            if sent < len(line):  # sendall fails even for no data if the peer has closed
                self.socket.sendall(line[sent:])
            while b"\n" not in self.buffer:
                part = self.socket.recv(LINE_LIMIT)
                if not part:
                    raise _EndedError(f"the governor closed the connection during {op}", hint=START)
                self.buffer += part
                if len(self.buffer) > LINE_LIMIT:
                    raise self._bad(op, f"{len(self.buffer)} bytes")
        except (ConnectionResetError, BrokenPipeError) as e:
            raise _EndedError(self._lost(op, e).message, hint=START) from e
        except OSError as e:
            raise self._lost(op, e) from e
        answer, _, self.buffer = self.buffer.partition(b"\n")
        try:
            document = parse_answer(answer)
        except WRONG as e:
            raise self._bad(op, answer[:80].decode(errors="replace")) from e
        if not document["ok"]:
            error = document["error"]
            raise AdmissionRefusedError(
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
        """Ask the governor to admit a container; the admission's `directory` exists afterwards.

        If the governor ends before it answers, it has admitted nothing, and its successor is asked.
        """
        lost_at: float | None = None
        while True:
            try:
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
                break
            except _EndedError:
                lost_at = monotonic() if lost_at is None else lost_at
                if monotonic() - lost_at >= min(self.patience, self.timeout):
                    raise
                self.socket.close()
                sleep(0.05)  # no busy loop if a governor accepts connections but never answers
                self._connect(lost_at)
        try:
            return parse_admission(answer)
        except WRONG as e:
            raise self._bad("admit", answer) from e

    def reserve(
        self, annotations: dict[str, str], identity: dict[str, str], **more: Any
    ) -> Reservation:
        """Reserve GPUs for a container that is about to be created."""
        answer = self._request("reserve", annotations=annotations, identity=identity, **more)
        try:
            return parse_reservation(answer)
        except WRONG as e:
            raise self._bad("reserve", answer) from e

    def confirm(self) -> None:
        """Tell the governor that the container is ready: its admission outlasts the connection."""
        self._request("confirm")

    def release(self, ident: str) -> None:
        """Tell the governor that the container has ended."""
        self._request("release", id=ident)

    def close(self) -> None:
        """End the connection; an admission that was not confirmed ends with it."""
        self.socket.close()
