"""A client of the API server that speaks HTTP over the Unix socket of `kubectl proxy`, so that no TCP
port is opened.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")
Document = dict[str, Any]

GROUPS = {
    "resourceclaims": "apis/resource.k8s.io/v1",
    "resourceclaimtemplates": "apis/resource.k8s.io/v1",
    "resourceslices": "apis/resource.k8s.io/v1",
    "daemonsets": "apis/apps/v1",
    "controllerrevisions": "apis/apps/v1",
    "jobs": "apis/batch/v1",
}
"""API group of each resource; resources that are not listed are in the core group."""
CLUSTER_WIDE = frozenset({"nodes", "resourceslices", "namespaces"})


class ApiError(Exception):
    """An error response of the API server, with its status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class _ApiConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class KubeApi:
    """Requests to the API server, as administrator."""

    def __init__(self, socket_path: Path) -> None:
        self._socket = socket_path

    def request(
        self, method: str, path: str, body: Document | list[Any] | None = None, *, kind: str = ""
    ) -> Document:
        """Send a request. Raise ApiError for an answer that is not 2xx, and OSError if there is no answer."""
        connection = _ApiConnection(self._socket, timeout=30)
        try:
            headers = {"Content-Type": kind or "application/json"}
            data = None if body is None else json.dumps(body)
            connection.request(method, f"/{path}", data, headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            try:
                text = json.loads(text)["message"]
            except (ValueError, KeyError):
                text = text[:300]
            raise ApiError(answer.status, text)
        document: Document = json.loads(text) if text.startswith("{") else {"text": text}
        return document

    @staticmethod
    def path(kind: str, name: str = "", namespace: str | None = "default") -> str:
        """Return the path of a kind or an object; with `namespace=None`, the path for all namespaces."""
        parts = [GROUPS.get(kind, "api/v1")]
        if namespace is not None and kind not in CLUSTER_WIDE:
            parts += ["namespaces", namespace]
        return "/".join([*parts, kind, *([name] if name else [])])

    def get(self, kind: str, name: str, namespace: str = "default") -> Document | None:
        """Return an object, or None if it does not exist."""
        try:
            return self.request("GET", self.path(kind, name, namespace))
        except ApiError as e:
            if e.status == 404:
                return None
            raise

    def objects(
        self, kind: str, namespace: str | None = "default", *, labels: str = ""
    ) -> list[Document]:
        """Return the objects of a kind; with `namespace=None`, those of all namespaces."""
        query = f"?labelSelector={labels.replace('=', '%3D')}" if labels else ""
        found: list[Document] = self.request("GET", self.path(kind, "", namespace) + query)["items"]
        return found

    def create(self, kind: str, document: Document, namespace: str = "default") -> Document:
        """Create an object."""
        return self.request("POST", self.path(kind, "", namespace), document)

    def patch(self, kind: str, name: str, document: Document, namespace: str = "default") -> None:
        """Change an object by a strategic merge patch."""
        path = self.path(kind, name, namespace)
        kind_of_patch = "application/strategic-merge-patch+json"
        self.request("PATCH", path, document, kind=kind_of_patch)

    def delete(
        self, kind: str, name: str, namespace: str = "default", *, grace: int | None = None
    ) -> None:
        """Delete an object, and in the background the objects that it owns. A missing object is not an error."""
        query = "?propagationPolicy=Background"
        query += "" if grace is None else f"&gracePeriodSeconds={grace}"
        try:
            self.request("DELETE", self.path(kind, name, namespace) + query)
        except ApiError as e:
            if e.status != 404:
                raise

    def events(self, name: str, namespace: str = "default") -> list[str]:
        """Return the events of an object, oldest first: reason and message."""
        found = [
            one
            for one in self.objects("events", namespace)
            if one["involvedObject"]["name"] == name
        ]
        found.sort(key=lambda one: one["metadata"]["creationTimestamp"])
        return [f"{one['reason']}: {one['message']}" for one in found]


def condition(pod: Document, kind: str) -> Document:
    """Return a condition of an object, or {} if it has no condition of that type."""
    for one in pod.get("status", {}).get("conditions") or []:
        if one["type"] == kind:
            found: Document = one
            return found
    return {}


def is_true(document: Document, kind: str) -> bool:
    """Return whether a condition is true."""
    return condition(document, kind).get("status") == "True"


def wait_for(
    awaited: str,
    condition: Callable[[], Value],
    seconds: float,
    explain: Callable[[], str] = lambda: "",
    *,
    every: float = 0.2,
) -> Value:
    """Wait until a condition is true and return its value. After the timeout raise AssertionError with the text
    of `explain`.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {awaited}\n{explain()}"
        time.sleep(every)
    return value
