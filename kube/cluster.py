"""Makes all of the DRA driver's calls to the Kubernetes API server, through the official client.

Objects are plain JSON as on the wire, so fields that the client's model does not know yet are kept.
Every failure is a ClusterError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from kube.errors import ClaimError, ClusterError
from kube.tls import relax

CALLS = (
    ("resource.k8s.io", "resourceslices", ("get", "watch", "create", "update", "delete")),
    ("resource.k8s.io", "resourceclaims", ("get",)),
    ("", "nodes", ("get",)),
    ("", "events", ("create",)),
    ("", "pods", ("list",)),
    ("", "pods/status", ("patch",)),
)
"""Every group, resource and verb in use; the role in packaging/kubernetes/ has exactly these."""

LONGEST = 4 << 20
"""Maximum size of a watch event in bytes: an object is at most 1.5 MiB."""

POOL = 16
"""Number of connections that are kept open: a kubelet starts many pods at once."""

TIMEOUT = (5.0, 10.0)
"""Timeouts in seconds for connecting and for the answer: the kubelet waits 45 s in total."""


class Cluster:
    """The driver's requests to the API server."""

    def __init__(
        self, kubeconfig: str | None = None, timeout: tuple[float, float] = TIMEOUT
    ) -> None:
        """Configure access from a kubeconfig file, or else from the pod's service account."""
        from kubernetes import client, config

        configuration = client.Configuration()
        try:
            if kubeconfig:
                config.load_kube_config(kubeconfig, client_configuration=configuration)
            else:
                config.load_incluster_config(client_configuration=configuration)
        except Exception as e:  # the client's own errors, and any that an invalid file causes
            by = kubeconfig or "a service account"
            raise ClusterError(
                f"no access to the API server through {by}: {' '.join(str(e).split())[:200]}",
                hint="name a file that kubectl accepts"
                if kubeconfig
                else "run in a pod with a service account, or name a file with --kubeconfig",
            ) from e
        configuration.retries = False  # the callers decide when to retry
        configuration.connection_pool_maxsize = POOL
        self._client = client.ApiClient(configuration)
        relax(self._client.rest_client.pool_manager)
        self._resource = client.ResourceV1Api(self._client)
        self._core = client.CoreV1Api(self._client)
        self._timeout = timeout

    def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Return a ResourceClaim."""
        return self._json(
            f"claim {namespace}/{name}",
            lambda **o: self._resource.read_namespaced_resource_claim(name, namespace, **o),
        )

    def node(self, name: str) -> dict[str, Any]:
        """Return a Node."""
        return self._json(f"node {name}", lambda **o: self._core.read_node(name, **o))

    def slice(self, name: str) -> dict[str, Any] | None:
        """Return a ResourceSlice, or None if it does not exist."""
        try:
            return self._json(
                f"ResourceSlice {name}", lambda **o: self._resource.read_resource_slice(name, **o)
            )
        except ClusterError as e:
            if e.http == 404:
                return None
            raise

    def create_slice(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create a ResourceSlice; return what is stored, or with `dry_run` what would be stored."""
        more = {"dry_run": "All"} if dry_run else {}
        try:
            return self._json(
                f"ResourceSlice {body['metadata']['name']}",
                lambda **o: self._resource.create_resource_slice(body, **more, **o),
            )
        except ClusterError as e:
            if e.http != 404:
                raise
            raise ClusterError(
                f"the API server has no resource.k8s.io/v1, so no GPU is offered ({e.message})",
                hint="use Kubernetes 1.34 or newer, or run the device plugin instead"
                " (docs/howto/kubernetes.md)",
                http=404,
            ) from e

    def replace_slice(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Replace a ResourceSlice if it still has the version in `body`; return what is stored."""
        name = body["metadata"]["name"]
        more = {"dry_run": "All"} if dry_run else {}
        return self._json(
            f"ResourceSlice {name}",
            lambda **o: self._resource.replace_resource_slice(name, body, **more, **o),
        )

    def delete_slice(self, name: str) -> None:
        """Delete a ResourceSlice; it is not an error if it does not exist."""
        try:
            self._json(
                f"ResourceSlice {name}",
                lambda **o: self._resource.delete_resource_slice(name, **o),
            )
        except ClusterError as e:
            if e.http != 404:
                raise

    def watch_slice(self, name: str, version: str, seconds: int) -> Iterator[dict[str, Any]]:
        """Yield the events of a ResourceSlice after a version, for at most `seconds`.

        Raise ClusterError with the status 410 if that version is too old.
        """
        response = self._call(
            f"ResourceSlice {name}",
            lambda **o: self._resource.list_resource_slice(
                watch=True,
                field_selector=f"metadata.name={name}",
                resource_version=version,
                timeout_seconds=seconds,
                **o,
            ),
            timeout=(self._timeout[0], seconds + self._timeout[1]),
        )
        partial = b""
        try:
            for part in response.stream(1 << 16):
                *lines, partial = (partial + part).split(b"\n")
                if len(partial) > LONGEST:
                    raise ValueError(f"an event has more than {LONGEST} bytes")
                for line in filter(None, lines):
                    event: dict[str, Any] = json.loads(line)
                    if event.get("type") == "ERROR":
                        code = int((event.get("object") or {}).get("code") or 0)
                        raise ClusterError(
                            f"the watch of ResourceSlice {name} ended",
                            hint="the driver starts it again",
                            http=code,
                        )
                    yield event
        except ClusterError:
            raise
        except Exception as e:
            raise _explain(f"the watch of ResourceSlice {name}", e) from e
        finally:
            response.close()

    def create_event(self, namespace: str, body: dict[str, Any]) -> None:
        """Create an Event."""
        self._json(
            f"event in {namespace}",
            lambda **o: self._core.create_namespaced_event(namespace, body, **o),
        )

    def pods(self, node: str) -> list[dict[str, Any]]:
        """Return the pods of a node, from a cache of the API server."""
        answer = self._json(
            f"pods of node {node}",
            lambda **o: self._core.list_pod_for_all_namespaces(
                field_selector=f"spec.nodeName={node}", resource_version="0", **o
            ),
        )
        items = answer.get("items")
        return [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []

    def annotate_pod(self, namespace: str, name: str, uid: str, annotation: str, text: str) -> None:
        """Set an annotation through the pod's status subresource, so nothing else can change."""
        body = {"metadata": {"uid": uid, "annotations": {annotation: text}}}
        self._json(
            f"pod {namespace}/{name}",
            lambda **o: self._core.patch_namespaced_pod_status(name, namespace, body, **o),
        )

    def _json(self, subject: str, call: Callable[..., Any]) -> dict[str, Any]:
        response = self._call(subject, call, timeout=self._timeout)
        try:
            document = json.loads(response.data)
        except RecursionError as e:
            # The API server stores parameters as deeply nested as their author wrote them.
            raise ClaimError(
                f"{subject} is nested too deeply to be read", hint="simplify its parameters"
            ) from e
        except Exception as e:
            raise _explain(subject, e) from e
        if not isinstance(document, dict):
            raise ClusterError(
                f"{subject}: the answer is not an object", hint="check the address in --kubeconfig"
            )
        return document

    @staticmethod
    def _call(subject: str, call: Callable[..., Any], *, timeout: tuple[float, float]) -> Any:
        try:
            return call(_preload_content=False, _request_timeout=timeout)
        except Exception as e:
            raise _explain(subject, e) from e


def _explain(subject: str, e: Exception) -> ClusterError:
    """Return a one-line error for any exception that the client raised."""
    from kubernetes.client.exceptions import ApiException

    # An SSLError of urllib3 arrives as an ApiException with the status 0.
    if isinstance(e, ApiException) and e.status:
        status = int(e.status)
        said = ""
        try:
            said = str(json.loads(e.body)["message"])
        except (TypeError, ValueError, KeyError):
            said = str(e.reason)
        hints = {
            401: "check the service account's token",
            403: "give the driver's service account the role of packaging/kubernetes/",
            404: "it no longer exists",
            409: "the driver retries",
            422: "report this line as a bug",
        }
        if "ValidatingAdmissionPolicy" in said:
            hints[status] = "check the policy, and the owner of this driver's token (own-node.yaml)"
        return ClusterError(
            f"{subject}: the API server says {status}: {' '.join(said.split())[:300]}",
            hint=hints.get(status, "the driver retries; see the API server's log"),
            http=status,
        )
    said = str(e.reason) if isinstance(e, ApiException) else str(e)
    # The cause comes last, after class names and object addresses.
    reason = " ".join(said.partition("Caused by ")[2].split() or said.split())[:300]
    hint = "the driver retries; check the network and the API server"
    if "CERTIFICATE" in reason or "certificate" in reason:
        hint = (
            "the trusted certificate authority must be the one that issued the API server's"
            " certificate, and that certificate must name the host: see the kubeconfig, or the"
            " ConfigMap kube-root-ca.crt of the namespace"
        )
    return ClusterError(f"{subject}: no answer from the API server: {reason}", hint=hint)
