"""The names that Tidegate uses in a cluster."""

from __future__ import annotations

DRIVER = "tidegate.gpu"
"""Name of the DRA driver: in ResourceSlices, allocations, opaque parameters, and the kubelet."""

CLASSES = tuple(f"gpu-{kind}.tidegate.gpu" for kind in ("strict", "elastic", "whole"))
"""The DeviceClasses of packaging/kubernetes/."""

PARAMETERS_VERSION = "tidegate.gpu/v1"
PARAMETERS_KIND = "TidegateConfig"

MEMORY = "memory"
COMPUTE = "compute"
"""Names of a device's capacities: bytes, and percent of a GPU's time."""

PLUGIN_RESOURCE = "tidegate.gpu/memory-gib"
"""The resource that the device plugin advertises in clusters without consumable capacity."""

CDI_CLASS = "claim"

TAINT_LOST = f"{DRIVER}/lost"
TAINT_CLOSED = f"{DRIVER}/closed"
TAINT_BYPASS = f"{DRIVER}/bypass"
"""Keys of device taints, for a GPU that does not answer, a GPU that accepts no containers at the
moment, and a GPU on which a container bypasses its quota."""

KUBELET_DIR = "/var/lib/kubelet"
