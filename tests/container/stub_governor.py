"""A stub of the governor: it speaks the protocol on a thread, grants everything, and records the requests."""

from __future__ import annotations

import array
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema

from tests.container.bundles import GPU, ROOT


class StubGovernor:
    """Listens on <runtime_dir>/governor.sock.

    `mode` selects how it answers: grant, refuse, silent, close, garbage, deny-confirm. `admitted`
    contains the current admissions, and `confirmed` the identifiers of those that were confirmed.
    `before_admit` runs before an admission is answered, and `before_confirm` before a confirmation
    is.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.mode = "grant"
        self.minor: int | None = None  # of its GPU's device node
        self.before_admit: Callable[[], None] = lambda: None
        self.before_confirm: Callable[[], None] = lambda: None
        self.schema = json.loads((ROOT / "governor" / "protocol.schema.json").read_text())
        self.requests: list[dict[str, Any]] = []
        self.misfits: list[str] = []
        self.admitted: dict[str, dict[str, Any]] = {}
        self.confirmed: set[str] = set()
        self.released: list[str] = []
        self.pidfds: list[int] = []
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
        self.connections = 0
        runtime_dir.mkdir(parents=True, exist_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(runtime_dir / "governor.sock"))
        self.listener.listen(16)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop listening."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()
        for fd in self.pidfds:
            os.close(fd)

    def wait_idle(self) -> None:
        """Wait until every connection has ended."""
        with self.idle:
            assert self.idle.wait_for(lambda: self.connections == 0, timeout=10)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with self.lock:
                self.connections += 1
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        own_id: str | None = None
        buffer = b""
        try:
            while True:
                data, ancillary, _, _ = connection.recvmsg(65536, socket.CMSG_SPACE(16))
                fds: list[int] = []
                for level, kind, content in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        fds += array.array("i", content[: len(content) - len(content) % 4])
                self.pidfds += fds
                if not data:
                    return
                buffer += data
                while b"\n" in buffer:
                    line, _, buffer = buffer.partition(b"\n")
                    plain = json.loads(line)
                    errors = jsonschema.Draft202012Validator(self.schema).iter_errors(plain)
                    self.misfits += [error.message for error in errors]
                    request = plain | {"fds": len(fds)}
                    with self.lock:
                        self.requests.append(request)
                    if request["op"] == "admit":
                        own_id = request["id"]
                        self.before_admit()
                    if request["op"] == "confirm":
                        self.before_confirm()
                    answer = self._answer(request, own_id)
                    if answer is None:
                        if self.mode == "close":
                            return
                        continue
                    connection.sendall(answer)
        except OSError:
            return
        finally:
            connection.close()
            with self.idle:
                if own_id is not None and own_id not in self.confirmed:
                    self.admitted.pop(own_id, None)
                self.connections -= 1
                self.idle.notify_all()

    def _answer(self, request: dict[str, Any], own_id: str | None) -> bytes | None:
        if self.mode in ("silent", "close"):
            return None
        if self.mode == "garbage":
            return b'["what?"]\n'
        answer: dict[str, Any] = {"ok": True}
        with self.lock:
            if request["op"] in ("admit", "reserve") and self.mode == "refuse":
                message = "GPU memory: 8Gi asked, 2Gi free on every GPU"
                answer = {
                    "ok": False,
                    "error": {"code": "memory", "message": message, "hint": "ask for less"},
                }
            elif request["op"] == "admit":
                assert own_id is not None
                number = len(self.requests)  # other clients may have asked by now
                while (self.runtime_dir / "containers" / f"key{number}").exists():
                    number += 1
                directory = self.runtime_dir / "containers" / f"key{number}"
                directory.mkdir(parents=True)
                (directory / "grant").write_bytes(b"TIDEGATE".ljust(4096, b"\0"))
                self.admitted[own_id] = request
                answer |= {
                    "key": directory.name,
                    "directory": str(directory),
                    "devices": [{"uuid": GPU, "index": 0, "minor": self.minor}],
                    "memory": 8 << 30,
                    "compute": 50,
                    "compute_limit": 50,
                }
            elif request["op"] == "reserve":
                answer |= {
                    "reservation": f"token{len(self.requests)}",
                    "expires_s": 30,
                    "devices": [{"uuid": GPU, "index": 0, "minor": self.minor}],
                }
            elif request["op"] == "confirm" and self.mode == "deny-confirm":
                answer = {
                    "ok": False,
                    "error": {"code": "gone", "message": "the admission is gone", "hint": "retry"},
                }
            elif request["op"] == "confirm" and own_id is not None:
                self.confirmed.add(own_id)
            elif request["op"] == "release":
                self.released.append(request["id"])
                self.admitted.pop(request["id"], None)
        return json.dumps(answer).encode() + b"\n"
