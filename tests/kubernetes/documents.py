"""ResourceClaims as a scheduler allocates them."""

from __future__ import annotations

import uuid
from typing import Any

from kube.slices import device_name
from tests.kubernetes.governor import gpu

NODE = "node-1"


def result(
    index: int = 0, request: str = "gpu", memory: str = "8Gi", compute: str = "30", **more: Any
) -> dict[str, Any]:
    """Return one device of an allocation."""
    return {
        "request": request,
        "driver": "tidegate.gpu",
        "pool": NODE,
        "device": device_name(gpu(index)["uuid"]),
        "shareID": str(uuid.uuid4()),
        "consumedCapacity": {"memory": memory, "compute": compute},
        **more,
    }


def config(
    source: str = "FromClass", requests: tuple[str, ...] = (), **parameters: Any
) -> dict[str, Any]:
    """Return opaque parameters of a class or of a claim."""
    document = {"apiVersion": "tidegate.gpu/v1", "kind": "TidegateConfig", **parameters}
    entry: dict[str, Any] = {
        "source": source,
        "opaque": {"driver": "tidegate.gpu", "parameters": document},
    }
    return entry | ({"requests": list(requests)} if requests else {})


def claim(
    name: str = "train",
    namespace: str = "team-a",
    *results: dict[str, Any],
    configs: tuple[dict[str, Any], ...] = (),
    uid: str = "",
) -> dict[str, Any]:
    """Return a ResourceClaim that is allocated."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace, "uid": uid or str(uuid.uuid4())},
        "spec": {
            "devices": {
                "requests": [
                    {"name": "gpu", "exactly": {"deviceClassName": "gpu-elastic.tidegate.gpu"}}
                ]
            }
        },
        "status": {
            "allocation": {
                "devices": {"results": list(results) or [result()], "config": list(configs)}
            },
            "reservedFor": [{"resource": "pods", "name": f"{name}-pod", "uid": str(uuid.uuid4())}],
        },
    }


def reference(document: dict[str, Any]) -> tuple[str, str, str]:
    """Return namespace, name and uid, as the kubelet identifies a claim."""
    metadata = document["metadata"]
    return metadata["namespace"], metadata["name"], metadata["uid"]
