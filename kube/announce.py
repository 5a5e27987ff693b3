"""Writes events on a claim and its pods that tell users why the claim was refused.

The kubelet retries, but not every retry causes an event: the same message about the same claim is
written at most once in five minutes. A driver that is not permitted to write events logs that once
and continues without them.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import structlog

from governor.errors import TidegateError
from kube.claims import Reference
from kube.errors import ClusterError
from kube.names import DRIVER

log = structlog.get_logger()

AGAIN_S = 300.0
"""Minimum interval between two events with the same message about the same claim, in seconds."""
MAX_QUEUED = 512
"""Maximum number of queued events, and of remembered messages."""
MAX_PODS = 4
"""Maximum number of pods of a claim that get an event."""
MESSAGE = 1000
"""Maximum length of a message in characters; the API server accepts 1024."""


class Events(Protocol):
    """The announcer's requests to the API server."""

    def create_event(self, namespace: str, body: dict[str, Any]) -> None:
        """Create an event."""


class Announcer:
    """Writes events on a separate thread, so that answers to the kubelet do not wait."""

    def __init__(self, cluster: Events, node: str) -> None:
        self._cluster = cluster
        self._node = node
        self._queue: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(MAX_QUEUED)
        self._said: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()
        self._forbidden = False

    def refused(
        self, reference: Reference, document: Mapping[str, Any] | None, error: TidegateError
    ) -> None:
        """Announce why a claim was refused; `document` is the claim, if it could be read."""
        self._say(reference, document, "PrepareRefused", str(error))

    def waits(
        self,
        reference: Reference,
        document: Mapping[str, Any] | None,
        error: TidegateError,
        seconds: float,
    ) -> None:
        """Announce what a claim is waiting for, and for how many seconds the driver retries it."""
        suffix = f"; the driver retries for {seconds:.0f} s"
        message = str(error)[: MESSAGE - len(suffix)] + suffix
        self._say(reference, document, "PrepareWaiting", message)

    def _say(
        self,
        reference: Reference,
        document: Mapping[str, Any] | None,
        reason: str,
        message: str,
    ) -> None:
        message = message[:MESSAGE]
        now = time.monotonic()
        with self._lock:
            last = self._said.get((reference.uid, message))
            if self._forbidden or (last is not None and now - last < AGAIN_S):
                return
            if len(self._said) >= MAX_QUEUED:
                self._said = {k: t for k, t in self._said.items() if now - t < AGAIN_S}
            if len(self._said) >= MAX_QUEUED:
                return
            self._said[reference.uid, message] = now
        claim: dict[str, Any] = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "namespace": reference.namespace,
            "name": reference.name,
            "uid": reference.uid,
        }
        pods = pods_of(document)
        for about in (
            claim,
            *(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "namespace": reference.namespace,
                    "name": pod.get("name"),
                    "uid": pod.get("uid"),
                }
                for pod in pods[:MAX_PODS]
            ),
        ):
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait((reference.namespace, self._event(about, reason, message)))

    def _event(self, about: Mapping[str, Any], reason: str, message: str) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{str(about['name'])[:230].rstrip('.-')}.{secrets.token_hex(8)}",
                "namespace": about["namespace"],
            },
            "involvedObject": dict(about),
            "type": "Warning",
            "reason": reason,
            "message": message,
            "source": {"component": DRIVER, "host": self._node},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "reportingComponent": DRIVER,
            "reportingInstance": self._node,
        }

    def run(self) -> None:
        """Write events until `stop` is called."""
        while True:
            item = self._queue.get()
            if item is None:
                return
            if self._forbidden:  # the events that were queued before the refusal
                continue
            try:
                self._cluster.create_event(*item)
            except ClusterError as e:
                self._forbidden = self._forbidden or e.http == 403
                log.warning("event-not-written", message=e.message, hint=e.hint)

    def stop(self) -> None:
        """Stop the thread once the queued events are written; a full queue loses its oldest one."""
        while True:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()
            else:
                return


def pods_of(document: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the pods that a claim is reserved for, without other consumers."""
    status = (document or {}).get("status")
    reserved = status.get("reservedFor") if isinstance(status, Mapping) else None
    return [
        one
        for one in (reserved if isinstance(reserved, list) else ())
        if isinstance(one, Mapping) and one.get("resource") == "pods" and not one.get("apiGroup")
    ]
