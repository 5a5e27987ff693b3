"""A stand-in for the governor: it answers the requests that the driver makes, with minimal bookkeeping."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 1 << 30
MIB = 1 << 20


def gpu(index: int, **more: Any) -> dict[str, Any]:
    """Return a GPU as the governor describes it: 80 GiB less the reserve."""
    return {
        "index": index,
        "uuid": f"GPU-{index:08x}-1111-2222-3333-444455556666",
        "name": "NVIDIA H100 80GB HBM3",
        "memory": 80 * GIB - 512 * MIB,
        "memory_left": 80 * GIB - 512 * MIB,
        "memory_granted": 0,
        "compute_left": 100,
        "containers": 0,
        "strategy": "timeslice",
        "mps": None,
        "numa_node": index // 4,
        "pci": f"0000:{0x1A + index:02x}:00.0",
        "lost": None,
        "closed": None,
        "routes": [],
        **more,
    }


def answer(*gpus: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the governor's answer to `gpus`."""
    return {
        "ok": True,
        "placement": "spread",
        "driver": "580.159.04",
        "cuda": "13.0",
        "context_memory": 520 * MIB,
        "gpus": list(gpus),
        "left_out": [],
        **more,
    }


class GovernorStandIn:
    """Listens on <runtime_dir>/governor.sock; claims are kept as long as this object exists."""

    def __init__(self, runtime_dir: Path, *gpus: dict[str, Any]) -> None:
        self.gpus = list(gpus) or [gpu(0), gpu(1)]
        self.listed: list[dict[str, Any]] = []
        self.claims: dict[str, dict[str, Any]] = {}
        self.requests: list[dict[str, Any]] = []
        self.changes = 0
        """Number of changes of the claims."""
        self.before: Callable[[str], None] = lambda _op: None
        self.after: Callable[[str], None] = lambda _op: None
        """Called after a request is executed and before it is answered."""
        self.failed: list[str] = []
        self.lock = threading.RLock()
        schema = json.loads((ROOT / "governor" / "protocol.schema.json").read_text())
        self._validator = jsonschema.Draft202012Validator(schema)
        runtime_dir.mkdir(parents=True, exist_ok=True)
        self.path = runtime_dir / "governor.sock"
        self._listen()

    def _listen(self) -> None:
        self.path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen(64)
        threading.Thread(target=self._serve, args=(self.listener,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.path.unlink(missing_ok=True)
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def come_back(self) -> None:
        """Listen again, with the same claims."""
        self._listen()

    def count(self, op: str) -> int:
        """Return how often an operation was requested."""
        with self.lock:
            return sum(request["op"] == op for request in self.requests)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def _connection(self, connection: socket.socket) -> None:
        # The client may be dead when the answer is sent.
        with connection, contextlib.suppress(OSError), connection.makefile("rwb") as stream:
            try:
                for line in stream:
                    request = json.loads(line)
                    self._validator.validate(request)
                    self.before(request["op"])
                    with self.lock:
                        self.requests.append(request)
                        response = self._answer(request)
                    self.after(request["op"])
                    stream.write(json.dumps(response).encode() + b"\n")
                    stream.flush()
            except OSError:
                raise
            except Exception as e:  # noqa: BLE001 - the test reports it at its end
                self.failed.append(repr(e))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "gpus":
                return answer(*self.gpus)
            case "list":
                return {"ok": True, "containers": self.listed}
            case "claims":
                return {"ok": True, "claims": list(self.claims.values())}
            case "unclaim":
                if self.claims.pop(request["uid"], None) is not None:
                    self.changes += 1
                return {"ok": True}
            case "claim":
                return self._claim(request)
        raise AssertionError(request)

    def _claim(self, request: dict[str, Any]) -> dict[str, Any]:
        claim = {key: request[key] for key in ("uid", "namespace", "name", "shares")}
        known = {one["uuid"]: one for one in self.gpus}
        for share in claim["shares"]:
            others = [
                other
                for uid, entered in self.claims.items()
                for other in entered["shares"]
                if uid != claim["uid"] and other["device"] == share["device"]
            ]
            used = sum(other["compute"] for other in others)
            if used + share["compute"] > 100:
                message = f"claim {claim['namespace']}/{claim['name']} asks for {share['compute']} % of GPU {known[share['device']]['index']}, {100 - used} % are left"
                return {
                    "ok": False,
                    "error": {"code": "occupied", "message": message, "hint": "wait"},
                }
        if self.claims.get(claim["uid"]) != claim:
            self.claims[claim["uid"]] = claim
            self.changes += 1
        shares = [
            {
                "name": s["name"],
                "index": known[s["device"]]["index"],
                "uuid": s["device"],
                "minor": None,
            }
            for s in claim["shares"]
        ]
        return {"ok": True, "uid": claim["uid"], "shares": shares}
