"""A stand-in for the API server, written from the published API: it serves the requests that the driver makes, over HTTP.

Bodies are checked against the published OpenAPI schemas and against the rules that the API documents for ResourceSlices.
The stand-in can drop fields as a disabled feature gate does, answer late, wrongly or not at all, and call a function of
the test before it answers. It has no admission, no authorisation, and no resources that the driver does not use.
"""

from __future__ import annotations

import copy
import json
import re
import socket
import threading
import time
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate

from kube.quantity import parse_quantity

RELEASE = "1.36"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")


class MisfitError(Exception):
    """A body that the API server would refuse with 422."""


def validate(body: dict[str, Any]) -> None:
    """Check a body against the published schemas and the documented rules."""
    try:
        kubernetes_validate.validate(dict(body), RELEASE, strict=True)
    except kubernetes_validate.ValidationError as e:
        raise MisfitError(f"{list(e.path)}: {e.message}") from e
    if body["kind"] == "ResourceSlice":
        _validate_slice(body["spec"])


def _require(condition: object, message: str) -> None:
    if not condition:
        raise MisfitError(message)


def _validate_slice(spec: dict[str, Any]) -> None:
    devices = spec.get("devices") or []
    names = [device["name"] for device in devices]
    _require(len(set(names)) == len(names), "device names are not unique")
    tainted = any(device.get("taints") for device in devices)
    _require(len(devices) <= (64 if tainted else 128), "too many devices")
    _require(spec["pool"]["resourceSliceCount"] > 0 and spec["pool"]["generation"] >= 0, "pool")
    for device in devices:
        _require(_LABEL.fullmatch(device["name"]), f"{device['name']} is not a DNS label")
        attributes, capacity = device.get("attributes") or {}, device.get("capacity") or {}
        _require(len(attributes) + len(capacity) <= 32, "more than 32 attributes and capacities")
        for name, value in attributes.items():
            _require(_IDENTIFIER.fullmatch(name.rpartition("/")[2]), f"attribute {name}")
            _require(len(value) == 1, f"attribute {name} has {len(value)} values")
            text = str(value.get("string", value.get("version", ""))).encode()
            _require(len(text) <= 64, f"attribute {name} has {len(text)} bytes")
            if "version" in value:
                _require(
                    _VERSION.fullmatch(value["version"]),
                    f"{value['version']} is not a semantic version",
                )
        for name, one in capacity.items():
            _validate_capacity(name, one, shared=device.get("allowMultipleAllocations") is True)
        for taint in device.get("taints") or ():
            _require(_LABEL_VALUE.fullmatch(taint.get("value", "")), "taint value")
            _require(_LABEL_VALUE.fullmatch(taint["key"].rpartition("/")[2]), "taint key")
            _require(taint["effect"] in ("None", "NoSchedule", "NoExecute"), "taint effect")


def _validate_capacity(name: str, capacity: dict[str, Any], *, shared: bool) -> None:
    value = parse_quantity(capacity["value"])
    policy = capacity.get("requestPolicy")
    if policy is None:
        return
    _require(shared, f"{name}: requestPolicy without allowMultipleAllocations")
    usual = parse_quantity(policy["default"])
    if "validRange" in policy:
        least = parse_quantity(policy["validRange"]["min"])
        most = parse_quantity(policy["validRange"].get("max", capacity["value"]))
        step = parse_quantity(policy["validRange"].get("step", "1"))
        _require(0 <= least <= usual <= most <= value, f"{name}: min, default, max, value")
        # Steps are counted from min. If min were not a multiple of step, the resulting quantities
        # would be hard to read.
        _require(step > 0, f"{name}: step is {step}")
        _require(
            all(one % step == 0 for one in (least, usual, most)),
            f"{name}: min, default or max is not a multiple of step",
        )
        _require(least + step <= value, f"{name}: min + step is above the value")
    _require(not {"validRange", "validValues"} <= set(policy), f"{name}: two policies")
    if "validValues" in policy:
        values = [parse_quantity(one) for one in policy["validValues"]]
        _require(
            usual in values
            and values == sorted(set(values))
            and values[-1] <= value
            and len(values) <= 10,
            f"{name}: values",
        )


def _canonical(value: str) -> str:
    """Format a quantity as the API server does: with the largest suffix that leaves a whole number."""
    number = parse_quantity(value)
    for suffix, power in (("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if value.endswith("i") and number % (1 << power) == 0:
            return f"{number // (1 << power)}{suffix}"
    return str(value)


class ApiServer:
    """Listens on a port of this machine; `kubeconfig` points to it."""

    def __init__(self, directory: Path, node: str = "node-1") -> None:
        self.lock = threading.RLock()
        self.node_uid = str(uuid.uuid4())
        self.nodes = {
            node: {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": node, "uid": self.node_uid},
            }
        }
        self.slices: dict[str, dict[str, Any]] = {}
        self.claims: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str]] = []
        """Verb and resource of each request, in order; dry runs have separate verbs."""
        self.latest: dict[tuple[str, str], float] = {}
        """Time of the latest request of each verb and resource, on the monotonic clock."""
        self.misfits: list[str] = []
        """Errors of the bodies that were refused with 422."""
        self.consumable = True
        """State of the feature gate DRAConsumableCapacity."""
        self.taints = True
        """State of the feature gate DRADeviceTaints."""
        self.refuse: dict[tuple[str, str], list[int]] = {}
        """Statuses of the next answers, by verb and resource: 0 closes the connection, -1 sends no answer."""
        self.before: Callable[[str, str], None] = lambda _verb, _resource: None
        self.deeper: dict[str, int] = {}
        """Number of lists to add around the innermost value of a claim's parameters, by the claim's
        name.
        """
        self._version = 100
        self._watchers: list[tuple[str, list[dict[str, Any]], threading.Condition]] = []
        self._stopped = threading.Event()
        api = self

        class ApiHandler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                api._serve(self, "get")

            def do_POST(self) -> None:
                api._serve(self, "create")

            def do_PUT(self) -> None:
                api._serve(self, "update")

            def do_PATCH(self) -> None:
                api._serve(self, "patch")

            def do_DELETE(self) -> None:
                api._serve(self, "delete")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), ApiHandler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.kubeconfig = directory / "kubeconfig"
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [
                        {"name": "test", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
                    ],
                    "users": [{"name": "test", "user": {"token": "none"}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                }
            )
        )

    def close(self) -> None:
        """Stop, and end every watch."""
        self._stopped.set()
        self.server.shutdown()
        self.server.server_close()

    def counts(self) -> Counter[tuple[str, str]]:
        """Return the number of requests for each verb and resource."""
        with self.lock:
            return Counter(self.requests)

    def add_claim(self, document: dict[str, Any]) -> None:
        """Store a claim."""
        with self.lock:
            metadata = document["metadata"]
            self.claims[metadata["namespace"], metadata["name"]] = document

    def wipe_slices(self) -> None:
        """Delete the node's slices, as a kubelet does when it starts."""
        with self.lock:
            for name in list(self.slices):
                self._note("DELETED", self.slices.pop(name))

    def slice_of(self, name: str = "node-1-tidegate.gpu") -> dict[str, Any] | None:
        """Return the stored slice with this name, or None."""
        with self.lock:
            return copy.deepcopy(self.slices.get(name))

    def _serve(self, handler: BaseHTTPRequestHandler, verb: str) -> None:
        url = urllib.parse.urlsplit(handler.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else None
        parts = url.path.strip("/").split("/")
        if query.get("watch", "").lower() in ("1", "true"):
            verb = "watch"
        elif verb == "get" and parts[-1] == "pods":
            verb = "list"
        if query.get("dryRun") == "All":
            verb = f"dry-{verb}"
        resource = self._resource(parts)
        self.before(verb, resource)
        with self.lock:
            self.requests.append((verb, resource))
            self.latest[verb, resource] = time.monotonic()
            planned = self.refuse.get((verb, resource))
            status = planned.pop(0) if planned else 200
        if status == 0:
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return
        if status == -1:
            self._stopped.wait(60)
            handler.close_connection = True
            return
        if status != 200:
            self._send(handler, status, self._status(status, "as the test wants it"))
            return
        if verb == "watch":
            self._watch(handler, query)
            return
        try:
            with self.lock:
                code, answer = self._do(verb, resource, parts, body)
        except MisfitError as e:
            self.misfits.append(str(e))
            code, answer = 422, self._status(422, str(e))
        self._send(handler, code, answer, self.deeper.get(parts[-1], 0))

    @staticmethod
    def _resource(parts: list[str]) -> str:
        if parts[-3:-2] == ["pods"] and parts[-1] == "status":
            return "pods/status"
        known = ("resourceslices", "resourceclaims", "nodes", "events", "pods")
        return next((part for part in parts if part in known), "?")

    def _do(
        self, verb: str, resource: str, parts: list[str], body: Any
    ) -> tuple[int, dict[str, Any]]:
        name = parts[-1]
        if resource == "pods":
            return 200, {"apiVersion": "v1", "kind": "PodList", "items": list(self.pods.values())}
        if resource == "pods/status":
            pod = self.pods.get((parts[-4], parts[-2]))
            if pod is None:
                return self._found(None)
            if body["metadata"].pop("uid") != pod["metadata"]["uid"]:
                return 422, self._status(422, "metadata.uid: Invalid value: field is immutable")
            if set(body) != {"metadata"} or set(body["metadata"]) != {"annotations"}:
                raise MisfitError("more than the annotations of a pod would be changed")
            pod["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
            return 200, pod
        if resource == "nodes":
            return self._found(self.nodes.get(name))
        if resource == "resourceclaims":
            return self._found(self.claims.get((parts[-3], name)))
        if resource == "events":
            validate(body)
            if body["metadata"]["namespace"] != parts[-2]:
                raise MisfitError("the event belongs to another namespace")
            self.events.append(body)
            return 201, body
        if resource != "resourceslices":
            return 404, self._status(404, "the server could not find the requested resource")
        dry = verb.startswith("dry-")
        match verb.removeprefix("dry-"):
            case "get":
                return self._found(self.slices.get(name))
            case "delete":
                gone = self.slices.pop(name, None)
                if gone is not None:
                    self._note("DELETED", gone)
                return self._found(gone)
            case "create":
                name = body["metadata"]["name"]
                if name in self.slices:
                    return 409, self._status(409, f"resourceslices {name} already exists")
                return 201, self._store(name, body, None, dry=dry)
            case _:
                old = self.slices.get(name)
                if old is None:
                    return 404, self._status(404, "not found")
                if body["metadata"].get("resourceVersion") != old["metadata"]["resourceVersion"]:
                    return 409, self._status(409, "the object has been modified")
                for field in ("driver", "nodeName"):
                    if body["spec"].get(field) != old["spec"].get(field):
                        raise MisfitError(f"spec.{field} is immutable")
                return 200, self._store(name, body, old, dry=dry)

    def _store(
        self, name: str, body: dict[str, Any], old: dict[str, Any] | None, *, dry: bool
    ) -> dict[str, Any]:
        validate(body)
        stored = copy.deepcopy(body)
        for device in stored["spec"].get("devices") or ():
            if not self.consumable:
                device.pop("allowMultipleAllocations", None)
            if not self.taints:
                device.pop("taints", None)
            for taint in device.get("taints") or ():
                taint.setdefault("timeAdded", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
            for capacity in (device.get("capacity") or {}).values():
                if not self.consumable:
                    capacity.pop("requestPolicy", None)
                capacity["value"] = _canonical(capacity["value"])
                policy = capacity.get("requestPolicy") or {}
                for part in (policy, policy.get("validRange") or {}):
                    part.update({k: _canonical(v) for k, v in part.items() if isinstance(v, str)})
        self._version += 1
        stored["metadata"] |= {
            "resourceVersion": str(self._version),
            "uid": old["metadata"]["uid"] if old else str(uuid.uuid4()),
            "creationTimestamp": "2026-11-22T00:00:00Z",
        }
        if not dry:
            self.slices[name] = stored
            self._note("MODIFIED" if old else "ADDED", stored)
        return copy.deepcopy(stored)

    def _note(self, kind: str, document: dict[str, Any]) -> None:
        event = copy.deepcopy(document)
        if kind == "DELETED":
            self._version += 1
            event["metadata"]["resourceVersion"] = str(self._version)
        for name, events, changed in self._watchers:
            if document["metadata"]["name"] == name:
                with changed:
                    events.append({"type": kind, "object": event})
                    changed.notify_all()

    def _watch(self, handler: BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        events: list[dict[str, Any]] = []
        changed = threading.Condition()
        entry = (name, events, changed)
        with self.lock:
            # The first event is the change after the requested version, as far as the stored state
            # still shows it.
            stored = self.slices.get(name)
            if stored is None:
                events.append(
                    {
                        "type": "DELETED",
                        "object": {
                            "metadata": {"name": name, "resourceVersion": str(self._version)}
                        },
                    }
                )
            elif stored["metadata"]["resourceVersion"] != query.get("resourceVersion"):
                events.append({"type": "MODIFIED", "object": stored})
            self._watchers.append(entry)
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        until = time.monotonic() + float(query.get("timeoutSeconds", "60"))
        try:
            while time.monotonic() < until and not self._stopped.is_set():
                with changed:
                    if not events:
                        changed.wait(0.1)
                    pending, events[:] = list(events), []
                for event in pending:
                    line = json.dumps(event).encode() + b"\n"
                    handler.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                    handler.wfile.flush()
            handler.wfile.write(b"0\r\n\r\n")
        except OSError:
            handler.close_connection = True
        finally:
            with self.lock:
                self._watchers.remove(entry)

    def _found(self, document: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        return (404, self._status(404, "not found")) if document is None else (200, document)

    @staticmethod
    def _status(code: int, message: str) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Status",
            "status": "Failure",
            "message": message,
            "code": code,
        }

    @staticmethod
    def _send(
        handler: BaseHTTPRequestHandler, code: int, document: dict[str, Any], deeper: int = 0
    ) -> None:
        data = json.dumps(document).encode()
        data = data.replace(b"[[]]", b"[" * deeper + b"[[]]" + b"]" * deeper)
        try:
            handler.send_response(code)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
        except OSError:
            handler.close_connection = True
