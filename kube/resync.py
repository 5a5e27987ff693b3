"""Makes the kubelet retry pods at once when the driver can prepare their claims.

If the driver is absent or refuses a call, the kubelet does not retry the pod until the pod's next
resync, 60 to 90 s later, unless the pod changes. The driver therefore writes the current time into
an annotation on the pod if a call has timed out waiting for a temporary condition to pass, or if
the pod was already waiting when the driver was registered, as after a reboot. The driver may change
only that annotation, and only on pods on its own node (packaging/kubernetes/base/resync.yaml).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import structlog

from governor.errors import TidegateError
from kube.errors import ClusterError
from kube.names import DRIVER

log = structlog.get_logger()

ANNOTATION = f"dra.{DRIVER}/prepare-again"
"""The annotation. It is not under `tidegate.gpu/`, where the hook refuses unknown names."""
AFTER_S = 1.0
"""Seconds from a refusal to the annotation, so that the kubelet processes the refusal first."""
SEARCH_DELAYS_S = (0.3, 3.0, 9.0)
"""Seconds from a registration to each search for waiting pods: a kubelet that has just started
reports its pods late."""
RETRY_S = 5.0
"""Seconds from a failed search to the next."""
MAX_PENDING = 1024
"""Maximum number of pods that are waiting for their annotation."""


class PodApi(Protocol):
    """The requests to the API server about pods and their claims."""

    def pods(self, node: str) -> list[dict[str, Any]]:
        """Return the pods on a node."""

    def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Return a ResourceClaim."""

    def annotate_pod(self, namespace: str, name: str, uid: str, annotation: str, text: str) -> None:
        """Set an annotation on a pod."""


class ClaimRecord(Protocol):
    """The driver, which knows which claims the kubelet has asked for."""

    def was_asked(self, uid: str) -> bool:
        """Return whether the driver prepared the claim for a kubelet, or is working on it."""


class Resync:
    """Writes annotations on a separate thread, so that answers to the kubelet do not wait."""

    def __init__(self, cluster: PodApi, node: str, driver: ClaimRecord) -> None:
        self._cluster = cluster
        self._node = node
        self._driver = driver
        self._changed = threading.Condition()
        self._searches: list[float] = []
        self._pods: dict[tuple[str, str, str], float] = {}
        self._forbidden = False
        self._stopped = False

    def registered(self) -> None:
        """Schedule searches for waiting pods, because the kubelet has registered the driver."""
        now = time.monotonic()
        with self._changed:
            self._searches = [now + after for after in SEARCH_DELAYS_S]
            self._changed.notify_all()

    def refused(self, namespace: str, pods: Iterable[Mapping[str, Any]] | None) -> None:
        """Record that a claim of these pods was refused for a temporary reason.

        `pods` is None if they are unknown because the API server did not answer; the thread then
        searches for them.
        """
        if pods is None:
            self.registered()
            return
        due = time.monotonic() + AFTER_S
        with self._changed:
            for pod in pods:
                key = namespace, str(pod.get("name")), str(pod.get("uid"))
                if len(self._pods) < MAX_PENDING:
                    self._pods.setdefault(key, due)
            self._changed.notify_all()

    def run(self) -> None:
        """Write annotations until `stop` is called."""
        while True:
            with self._changed:
                due = [*self._searches, *self._pods.values()]
                wait = min(due) - time.monotonic() if due else None
                if not self._stopped and (wait is None or wait > 0):
                    self._changed.wait(wait)
                if self._stopped:
                    return
                now = time.monotonic()
                is_search_due = any(one <= now for one in self._searches)
                self._searches = [one for one in self._searches if one > now]
                ready = [key for key, one in self._pods.items() if one <= now]
                for key in ready:
                    del self._pods[key]
            if self._forbidden:
                continue
            for key in ready:
                self._write(*key, why="refused")
            if is_search_due:
                self._search()

    def stop(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _search(self) -> None:
        """Annotate each waiting pod on the node that has a claim the kubelet has not asked for."""
        try:
            for pod in self._cluster.pods(self._node):
                if _waits(pod) and self._has_unasked_claim(pod):
                    metadata = pod["metadata"]
                    self._write(
                        str(metadata["namespace"]),
                        str(metadata["name"]),
                        str(metadata["uid"]),
                        why="registered",
                    )
        except ClusterError as e:
            self._failed(e)
            with self._changed:
                self._searches.append(time.monotonic() + RETRY_S)
        except Exception as e:  # noqa: BLE001 - an unexpected pod must not end the thread
            log.warning("pods-not-understood", error=repr(e)[:300])

    def _has_unasked_claim(self, pod: Mapping[str, Any]) -> bool:
        """Return whether the pod has a claim on this node that the kubelet never asked for."""
        namespace = str(pod["metadata"]["namespace"])
        for name in _claims(pod):
            try:
                claim = self._cluster.claim(namespace, name)
            except ClusterError as e:
                if e.http == 404:
                    continue
                raise
            except TidegateError:  # an unreadable claim is refused when the kubelet asks for it
                continue
            allocation = (claim.get("status") or {}).get("allocation") or {}
            results = (allocation.get("devices") or {}).get("results") or ()
            on_this_node = any(
                one.get("driver") == DRIVER and one.get("pool") == self._node for one in results
            )
            if on_this_node and not self._driver.was_asked(str(claim["metadata"]["uid"])):
                return True
        return False

    def _write(self, namespace: str, name: str, uid: str, *, why: str) -> None:
        if self._forbidden:
            return
        text = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            self._cluster.annotate_pod(namespace, name, uid, ANNOTATION, text)
        except ClusterError as e:
            # The pod is gone, or another one has its name, so it is no longer waiting.
            if e.http != 404 and "metadata.uid" not in e.message:
                self._failed(e)
            return
        log.info("pod-asked-again", namespace=namespace, pod=name, why=why)

    def _failed(self, e: ClusterError) -> None:
        if e.http == 403 and not self._forbidden:
            self._forbidden = True
            log.warning(
                "pods-not-asked-again",
                message=e.message,
                hint="pods whose claims were refused wait 60 to 90 s for the kubelet's next resync;"
                " the role and policy in packaging/kubernetes/base avoid that",
            )
        elif e.http != 403:
            log.warning("pod-not-asked-again", message=e.message, hint=e.hint)


def _waits(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod has no sandbox yet; the claims of a pod with a sandbox are prepared."""
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp") or status.get("phase") in ("Succeeded", "Failed"):
        return False
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodReadyToStartContainers":
            return bool(condition.get("status") == "False")
    return bool(status.get("phase") == "Pending")


def _claims(pod: Mapping[str, Any]) -> list[str]:
    """Return the names of a pod's existing claims."""
    names = [
        one.get("resourceClaimName") for one in (pod.get("spec") or {}).get("resourceClaims") or ()
    ]
    status = pod.get("status") or {}
    names += [one.get("resourceClaimName") for one in status.get("resourceClaimStatuses") or ()]
    extended = status.get("extendedResourceClaimStatus") or {}
    return [str(name) for name in (*names, extended.get("resourceClaimName")) if name]
