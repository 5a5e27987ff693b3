"""Cases for the admission policies of packaging/kubernetes/base/admission.yaml, as data: objects that
the policies accept, and objects that they refuse.

test_admission.py compares the cases with the driver and the hook, tests/cluster with a real API server.
"""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def parameters(**options: Any) -> Document:
    """Return the options of a TidegateConfig."""
    return {"apiVersion": "tidegate.gpu/v1", "kind": "TidegateConfig", **options}


def claim(
    options: Document | None,
    compute: str = "",
    *,
    requests: tuple[str, ...] = (),
    driver: str = "tidegate.gpu",
    kind: str = "ResourceClaim",
) -> Document:
    """Return a claim, or a template of one, with parameters."""
    exactly: Document = {"deviceClassName": "gpu-elastic.tidegate.gpu"}
    if compute:
        exactly["capacity"] = {"requests": {"compute": compute}}
    other = {"name": "other", "exactly": {"deviceClassName": "nic.example.com"}}
    devices: Document = {"requests": [{"name": "gpu", "exactly": exactly}, other]}
    if options is not None:
        config: Document = {"opaque": {"driver": driver, "parameters": options}}
        devices["config"] = [config | ({"requests": list(requests)} if requests else {})]
    spec: Document = {"devices": devices}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": "case", "namespace": "default"},
        "spec": spec if kind == "ResourceClaim" else {"spec": spec},
    }


def template(options: Document | None, compute: str = "") -> Document:
    """Return a template of a claim."""
    return claim(options, compute, kind="ResourceClaimTemplate")


def device_class(options: Document) -> Document:
    """Return a device class with parameters."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "case.tidegate.gpu"},
        "spec": {"config": [{"opaque": {"driver": "tidegate.gpu", "parameters": options}}]},
    }


def pod(*, claims: bool = False, **annotations: str) -> Document:
    """Return a pod with annotations of tidegate.gpu. Underscores in the names become hyphens."""
    container: Document = {"name": "a", "image": "registry.example/a"}
    spec: Document = {"automountServiceAccountToken": False, "containers": [container]}
    if claims:
        spec["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "case"}]
        container["resources"] = {"claims": [{"name": "gpu"}]}
    named = {f"tidegate.gpu/{name.replace('_', '-')}": text for name, text in annotations.items()}
    metadata: Document = {"name": "case", "namespace": "default"}
    if named:
        metadata["annotations"] = named
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


UUID = "GPU-00000000-1111-2222-3333-444455556666"

PASS: dict[str, Document] = {
    "no parameters": claim(None),
    "empty": claim(parameters()),
    "a limit": claim(parameters(computeLimit=60), "30"),
    "a limit as high as the share": claim(parameters(computeLimit=60), "60"),
    "a limit with a capacity in thousandths": claim(parameters(computeLimit=60), "30000m"),
    "a limit of another request": claim(parameters(computeLimit=10), "30", requests=("other",)),
    "strict": claim(parameters(strict=True)),
    "elastic with a limit": claim(parameters(strict=False, computeLimit=50), "30"),
    "a strategy": claim(parameters(strategy="mps")),
    "a class of work": claim(parameters(**{"class": "latency"})),
    "parking": claim(parameters(parking="never")),
    "another driver's": claim({"computeLimit": "x", "y": 1}, driver="nic.example.com"),
    "a template": template(parameters(computeLimit=60), "30"),
    "a template without parameters": template(None),
    "a class": device_class(parameters(strict=False)),
    "a pod": pod(),
    "all annotations": pod(
        memory="8Gi", compute="30", compute_limit="60", devices=f"0,{UUID}",
        strategy="timeslice", **{"class": "latency"}, parking="never",
        capabilities="compute,utility", driver="optional",
    ),
    "a count": pod(memory="8Gi", count="2"),
    "all capabilities": pod(memory="8Gi", capabilities="all"),
    "a limit alone": pod(memory="1024", compute_limit="5"),
    "a whole GPU": pod(memory="8Gi", compute="100"),
    "beside a claim": pod(claims=True, driver="optional"),
}  # fmt: skip

REFUSE: dict[str, tuple[Document, str]] = {
    "another version": (claim({"apiVersion": "tidegate.gpu/v2", "kind": "TidegateConfig"}), "write apiVersion: tidegate.gpu/v1"),
    "no kind": (claim({"apiVersion": "tidegate.gpu/v1"}), "kind: TidegateConfig"),
    "an unknown option": (claim(parameters(computLimit=5)), "computLimit is not an option"),
    "a limit of 0": (claim(parameters(computeLimit=0)), "computeLimit must be a whole number from 1 to 100"),
    "a limit of 101": (claim(parameters(computeLimit=101)), "computeLimit must be a whole number from 1 to 100"),
    "a limit as text": (claim(parameters(computeLimit="60")), "computeLimit must be a whole number from 1 to 100"),
    "half a percent": (claim(parameters(computeLimit=60.5)), "computeLimit must be a whole number from 1 to 100"),
    "strict as text": (claim(parameters(strict="yes")), "strict must be true or false"),
    "a strategy": (claim(parameters(strategy="exclusive")), "strategy must be auto, timeslice or mps"),
    "a class of work": (claim(parameters(**{"class": "fast"})), "class must be throughput or latency"),
    "parking": (claim(parameters(parking="sometimes")), "parking must be allowed or never"),
    "strict with a limit": (claim(parameters(strict=True, computeLimit=50)), "contradict each other"),
    "a limit below the share": (claim(parameters(computeLimit=20), "30"), "is below the compute"),
    "a limit below its request": (claim(parameters(computeLimit=20), "30", requests=("gpu",)), "is below the compute"),
    "in a template": (template(parameters(x=1)), "x is not an option"),
    "a limit below the share, in a template": (template(parameters(computeLimit=20), "30"), "is below the compute"),
    "in a class": (device_class(parameters(strict=1)), "strict must be true or false"),
    "an unknown annotation": (pod(memroy="8Gi"), "tidegate.gpu/memroy is unknown"),
    "memory": (pod(memory="8GB"), "write it like 8Gi"),
    "memory of two lines": (pod(memory="8Gi\n"), "memory"),
    "a share of 120": (pod(memory="8Gi", compute="120"), "write a percentage"),
    "a limit of 0 percent": (pod(memory="8Gi", compute_limit="0"), "write a percentage"),
    "a limit below the share of a pod": (pod(memory="8Gi", compute="60", compute_limit="30"), "is below"),
    "65 GPUs": (pod(memory="8Gi", count="65"), "must be a whole number from 1 to 64"),
    "how many and which": (pod(memory="8Gi", count="1", devices="0"), "cannot be used together"),
    "a GPU without a name": (pod(memory="8Gi", devices="0,x"), "GPU indices"),
    "an unknown class": (pod(memory="8Gi", **{"class": "x"}), "class must be throughput or latency"),
    "unknown parking": (pod(memory="8Gi", parking="x"), "parking must be allowed or never"),
    "an unknown strategy": (pod(memory="8Gi", strategy="x"), "strategy must be auto"),
    "an unknown capability": (pod(memory="8Gi", capabilities="compute,x"), "compat32"),
    "a driver that is neither": (pod(memory="8Gi", driver="x"), "driver must be required or optional"),
}  # fmt: skip

WARN = pod(claims=True, memory="8Gi")
"""A pod that passes with a warning: its claim may be for another driver."""
