"""Names by which the cluster knows us, in one place."""

from __future__ import annotations

DRIVER = "tidegate.gpu"
"""The DRA driver: in ResourceSlices, allocations, opaque parameters, and at the kubelet."""

CLASSES = tuple(f"gpu-{kind}.tidegate.gpu" for kind in ("strict", "elastic", "whole"))
"""The DeviceClasses of packaging/kubernetes/."""

PARAMETERS_VERSION = "tidegate.gpu/v1"
PARAMETERS_KIND = "TidegateConfig"

MEMORY = "memory"
COMPUTE = "compute"
"""The capacities of a device: bytes, and percent of a GPU's time."""

PLUGIN_RESOURCE = "tidegate.gpu/memory-gib"
"""What the device plugin offers where the cluster has no consumable capacity."""

CDI_CLASS = "claim"

TAINT_LOST = f"{DRIVER}/lost"
TAINT_CLOSED = f"{DRIVER}/closed"
TAINT_BYPASS = f"{DRIVER}/bypass"
"""Keys of device taints: does not answer; takes no container now; somebody works past us."""

KUBELET_DIR = "/var/lib/kubelet"
