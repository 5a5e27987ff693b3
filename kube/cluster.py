"""Makes all of the DRA driver's calls to the Kubernetes API server, through the official client.

Objects are plain JSON as on the wire, so fields that the client's models do not have yet are kept.
The client's classes for the API groups are not used: they load models of all Kubernetes objects,
which takes two seconds of processor time at each start and 22 MB. Their calls also go through
pydantic's Rust code. If the interpreter exits while a thread is in such a call, the process aborts.

Every failure is a ClusterError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
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


RESOURCES = "/apis/resource.k8s.io/v1"
SLICES = f"{RESOURCES}/resourceslices"
SLICE = f"{SLICES}/{{name}}"


@dataclass(frozen=True)
class ApiRequest:
    """A request to the API server; `names` are those in braces in `path`."""

    method: str
    path: str
    names: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] | None = None

    def headers(self) -> dict[str, str]:
        """Return the headers that depend on the request."""
        headers = {"Accept": "application/json"}
        if self.body is not None:
            patches = self.method == "PATCH"
            kind = "strategic-merge-patch+json" if patches else "json"
            headers["Content-Type"] = f"application/{kind}"
        return headers


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
        self._timeout = timeout

    def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Return a ResourceClaim."""
        return self._json(
            f"claim {namespace}/{name}",
            ApiRequest(
                "GET", f"{RESOURCES}/namespaces/{{namespace}}/resourceclaims/{{name}}",
                {"namespace": namespace, "name": name},
            ),
        )  # fmt: skip

    def node(self, name: str) -> dict[str, Any]:
        """Return a Node."""
        return self._json(f"node {name}", ApiRequest("GET", "/api/v1/nodes/{name}", {"name": name}))

    def slice(self, name: str) -> dict[str, Any] | None:
        """Return a ResourceSlice, or None if it does not exist."""
        try:
            return self._json(f"ResourceSlice {name}", ApiRequest("GET", SLICE, {"name": name}))
        except ClusterError as e:
            if e.http == 404:
                return None
            raise

    def create_slice(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create a ResourceSlice; return what is stored, or with `dry_run` what would be stored."""
        query = {"dryRun": "All"} if dry_run else {}
        try:
            return self._json(
                f"ResourceSlice {body['metadata']['name']}",
                ApiRequest("POST", SLICES, query=query, body=body),
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
        query = {"dryRun": "All"} if dry_run else {}
        return self._json(
            f"ResourceSlice {name}", ApiRequest("PUT", SLICE, {"name": name}, query, body)
        )

    def delete_slice(self, name: str) -> None:
        """Delete a ResourceSlice; it is not an error if it does not exist."""
        try:
            self._json(f"ResourceSlice {name}", ApiRequest("DELETE", SLICE, {"name": name}))
        except ClusterError as e:
            if e.http != 404:
                raise

    def watch_slice(self, name: str, version: str, seconds: int) -> Iterator[dict[str, Any]]:
        """Yield the events of a ResourceSlice after a version, for at most `seconds`.

        Raise ClusterError with the status 410 if that version is too old.
        """
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={name}",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        response = self._call(
            f"ResourceSlice {name}",
            ApiRequest("GET", SLICES, query=query),
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
                            f"the watch on ResourceSlice {name} ended",
                            hint="the driver starts it again",
                            http=code,
                        )
                    yield event
        except ClusterError:
            raise
        except Exception as e:
            raise _explain(f"the watch on ResourceSlice {name}", e) from e
        finally:
            response.close()

    def create_event(self, namespace: str, body: dict[str, Any]) -> None:
        """Create an Event."""
        path = "/api/v1/namespaces/{namespace}/events"
        self._json(
            f"event in {namespace}", ApiRequest("POST", path, {"namespace": namespace}, body=body)
        )

    def pods(self, node: str) -> list[dict[str, Any]]:
        """Return the pods on a node, from the API server's cache."""
        query = {"fieldSelector": f"spec.nodeName={node}", "resourceVersion": "0"}
        answer = self._json(f"pods of node {node}", ApiRequest("GET", "/api/v1/pods", query=query))
        items = answer.get("items")
        return [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []

    def annotate_pod(self, namespace: str, name: str, uid: str, annotation: str, text: str) -> None:
        """Set an annotation through the pod's status subresource, so nothing else can change."""
        path = "/api/v1/namespaces/{namespace}/pods/{name}/status"
        body = {"metadata": {"uid": uid, "annotations": {annotation: text}}}
        self._json(
            f"pod {namespace}/{name}",
            ApiRequest("PATCH", path, {"namespace": namespace, "name": name}, body=body),
        )

    def _json(self, subject: str, request: ApiRequest) -> dict[str, Any]:
        response = self._call(subject, request, timeout=self._timeout)
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

    def _call(self, subject: str, request: ApiRequest, *, timeout: tuple[float, float]) -> Any:
        """Send a request, and return urllib3's response if the API server accepts it."""
        from kubernetes.client.exceptions import ApiException

        try:
            serialized = self._client.param_serialize(
                request.method,
                request.path,
                path_params=request.names,
                query_params=list(request.query.items()),
                header_params=request.headers(),
                body=request.body,
                auth_settings=["BearerToken"],
            )
            answer = self._client.call_api(*serialized, _request_timeout=timeout)
            if not 200 <= answer.status <= 299:
                answer.read()
                raise ApiException(http_resp=answer)
        except Exception as e:
            raise _explain(subject, e) from e
        return answer.response


def _explain(subject: str, e: Exception) -> ClusterError:
    """Return a one-line error for any exception that the client raised."""
    from kubernetes.client.exceptions import ApiException

    # An SSLError from urllib3 arrives as an ApiException with the status 0.
    if isinstance(e, ApiException) and e.status:
        status = int(e.status)
        said = ""
        try:
            said = str(json.loads(e.body)["message"])
        except (TypeError, ValueError, KeyError):
            said = str(e.reason)
        hints = {
            401: "check the service account's token",
            403: "give the driver's service account the role in packaging/kubernetes/",
            404: "it no longer exists",
            409: "the driver retries",
            422: "report this line as a bug",
        }
        if "ValidatingAdmissionPolicy" in said:
            hints[status] = "check the policy, and the owner of this driver's token (own-node.yaml)"
        return ClusterError(
            f"{subject}: the API server answered with status {status}:"
            f" {' '.join(said.split())[:300]}",
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
            " ConfigMap kube-root-ca.crt in the namespace"
        )
    return ClusterError(f"{subject}: no answer from the API server: {reason}", hint=hint)
