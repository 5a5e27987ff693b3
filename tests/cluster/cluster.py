"""A complete cluster: control plane, nodes with GPUs, and Tidegate from packaging/kubernetes."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.binaries import Binaries
from tests.cluster.cluster_node import SIMGPU, ClusterNode
from tests.cluster.control_plane import NODES, PODS, URL, ControlPlane
from tests.cluster.images import TIDEGATE_IMAGE, WORKLOAD_IMAGE
from tests.cluster.kube_api import Document, KubeApi, is_true, wait_for
from tests.conftest import ROOT

MANIFESTS = ROOT / "packaging/kubernetes"
SYSTEM = "tidegate-system"
START_S = 180.0

# A simulated GPU needs only this addition to the manifests: its device is a directory, which the
# runtime does not mount into a container unless told to, not even into a privileged one.
SIMULATED = f"""
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: tidegate
spec:
  template:
    spec:
      containers:
        - name: governor
          volumeMounts:
            - {{name: simgpu, mountPath: {SIMGPU}}}
            - {{name: host, mountPath: /host, readOnly: true}}
      volumes:
        - name: simgpu
          hostPath: {{path: {SIMGPU}, type: Directory}}
"""


class RealCluster:
    """A cluster: `start` brings it up without Tidegate, `apply` installs Tidegate, and `close`
    stops it and returns what it has left on this machine.
    """

    def __init__(
        self,
        base: Path,
        binaries: Binaries,
        *,
        root: Path,
        build: Path,
        nodes: int = 1,
        key_usage: bool = True,
    ) -> None:
        self.base = base
        self.first_look: list[Document] = []  # the DaemonSet's pods when first ready
        self.control_plane = ControlPlane(base / "control-plane", binaries, key_usage=key_usage)
        self.nodes = [
            ClusterNode(
                f"node-{number}", base / f"node-{number}", binaries=binaries, root=root, build=build,
                address=NODES.format(10 + number), pods=PODS.format(number),
            )
            for number in range(1, nodes + 1)
        ]  # fmt: skip

    @property
    def api(self) -> KubeApi:
        """The API server."""
        return self.control_plane.api

    def kubectl(self, *arguments: str, stdin: str = "", timeout: float = 120) -> str:
        """Run kubectl as the administrator, require that it succeeds, and return its output."""
        ran = self.control_plane.kubectl(*arguments, stdin=stdin, timeout=timeout)
        assert ran.status == 0, f"kubectl {' '.join(arguments)}: {ran.text}"
        return ran.stdout

    def start(self, images: Sequence[Path]) -> None:
        """Start the control plane and the nodes, and wait until the nodes are ready for pods."""
        self.control_plane.start()
        pki = self.control_plane.certificates
        for node in self.nodes:
            node.boot()
            self.control_plane.plug(node)
            pki.sign(node.name, f"system:node:{node.name}", group="system:nodes")
            node.configure(pki.kubeconfig(node.name, URL), Path(pki.certificate("ca")))
            node.start_containerd()
            for image in images:
                node.load(image)
            node.keep_fresh(TIDEGATE_IMAGE)
            node.kubelet.start()
        for node in self.nodes:
            self.wait_ready(node)

    def wait_ready(self, node: ClusterNode, seconds: float = START_S) -> None:
        """Wait until the cluster reports that a node is ready."""

        def ready() -> bool:
            node.kubelet.check()
            found = self.api.get("nodes", node.name)
            return found is not None and is_true(found, "Ready")

        wait_for(f"{node.name} to be ready", ready, seconds, node.kubelet.tail)

    def reboot(self, node: ClusterNode) -> None:
        """Reset a node, and start what systemd would start."""
        left = node.crash()
        assert not left, "\n".join(left)
        node.boot()
        self.control_plane.plug(node)
        node.start()

    # Tidegate.

    def overlay(self, name: str = "base", configuration: str = "") -> Path:
        """Write a kustomization of a directory of packaging/kubernetes that adds the simulated
        GPU's mounts, and replaces the nodes' configuration if one is given.
        """
        directory = self.base / f"overlay-{name.replace('/', '-')}"
        directory.mkdir(exist_ok=True)
        base = os.path.relpath(MANIFESTS / name, directory)
        (directory / "simulated.yaml").write_text(SIMULATED)
        text = f"resources: [{base}]\npatches: [{{path: simulated.yaml}}]\n"
        if configuration:
            (directory / "config.yaml").write_text(configuration)
            text += (
                f"configMapGenerator: [{{name: tidegate, namespace: {SYSTEM}, behavior: replace,"
                " files: [config.yaml]}]\n"
            )
        (directory / "kustomization.yaml").write_text(text)
        return directory

    def apply(self, name: str = "base", configuration: str = "") -> None:
        """Apply the manifests, and wait until the GPUs of all nodes are offered."""
        for node in self.nodes:
            self.kubectl("label", "node", node.name, "tidegate.gpu/node=true", "--overwrite")
        self.kubectl("apply", "-k", str(self.overlay(name, configuration)))
        wait_for("the DaemonSet to be ready", self.is_up, START_S, self.explain)
        self.first_look = self.system_pods()

    def is_up(self) -> bool:
        """Return whether the DaemonSet's newest pods are ready on all nodes, and all GPUs are offered."""
        for one in self.api.objects("daemonsets", SYSTEM):
            status = one.get("status", {})
            newest = status.get("observedGeneration") == one["metadata"]["generation"]
            if not newest or status.get("updatedNumberScheduled", 0) < len(self.nodes):
                return False
        ready = [pod for pod in self.system_pods() if is_true(pod, "Ready")]
        offered = {one["spec"].get("nodeName") for one in self.api.objects("resourceslices")}
        return len(ready) == len(self.nodes) and offered >= {node.name for node in self.nodes}

    def system_pods(self) -> list[Document]:
        """Return the pods of the DaemonSet."""
        return self.api.objects("pods", SYSTEM)

    def explain(self) -> str:
        """Describe the state of the DaemonSet's pods."""
        parts = [self.control_plane.kubectl("get", "pods,resourceslices", "-A", "-o", "wide").text]
        for pod in self.system_pods():
            name = pod["metadata"]["name"]
            parts += self.api.events(name, SYSTEM)
            for container in ("install", "refresh", "governor", "dra"):
                logs = ("logs", name, "-c", container, "--tail=30")
                ran = self.control_plane.kubectl("-n", SYSTEM, *logs)
                parts.append(f"-- {container}\n{ran.text}")
        return "\n".join(parts)

    def container_pids(self, node: ClusterNode, name: str) -> list[int]:
        """Return the processes of the governor, driver or fork server on a node, as PIDs of this machine."""
        words = {
            "governor": ("tidegate-governor",),
            "driver": ("-m", "kube.main"),
            "forkserver": ("tidegate-forkserver",),
        }
        return node.processes(*words[name])

    def tidegate(self, *arguments: str) -> str:
        """Run `tidegate` in the first node's governor container."""
        command = ("exec", "daemonset/tidegate", "-c", "governor", "--", "tidegate", *arguments)
        return self.kubectl("-n", SYSTEM, *command)

    # Pods.

    def claim_template(self, name: str, *, memory: str, compute: str, strict: bool = True) -> None:
        """Create a ResourceClaimTemplate for a share of one GPU."""
        kind = "gpu-strict" if strict else "gpu-elastic"
        exactly = {
            "deviceClassName": f"{kind}.tidegate.gpu",
            "capacity": {"requests": {"memory": memory, "compute": compute}},
        }
        self.api.create(
            "resourceclaimtemplates",
            {
                "metadata": {"name": name},
                "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
            },
        )

    def delete_pods(self, *names: str, seconds: float = 120) -> None:
        """Delete pods, and wait until they are gone. Pods with the prefix `force-` are deleted without a grace period."""
        for name in names:
            self.api.delete("pods", name, grace=0 if name.startswith("force-") else 1)
        gone = lambda: not {p["metadata"]["name"] for p in self.api.objects("pods")} & set(names)  # noqa: E731
        wait_for(f"{', '.join(names)} to be gone", gone, seconds, self.pods_text)

    def pods_text(self) -> str:
        """List the pods and claims."""
        return self.control_plane.kubectl("get", "pods,resourceclaims", "-A", "-o", "wide").text

    def wait_pods(self, *names: str, seconds: float = 120) -> float:
        """Wait until pods are ready; return the time that it took, in seconds."""
        began = time.monotonic()

        def ready() -> bool:
            found = {pod["metadata"]["name"]: pod for pod in self.api.objects("pods")}
            return all(name in found and is_true(found[name], "Ready") for name in names)

        def explain() -> str:
            events = [f"{name}: {line}" for name in names for line in self.api.events(name)[-6:]]
            return "\n".join([self.pods_text(), *events])

        wait_for(f"{', '.join(names)} to be ready", ready, seconds, explain)
        return time.monotonic() - began

    # Leftovers.

    def leftovers(self, node: ClusterNode) -> list[str]:
        """Return what former claims and containers have left on a node."""
        state = node.path("/run/tidegate")
        left = [str(p) for p in node.path("/var/run/cdi").glob("tidegate.gpu-claim_*")]
        left += [str(p) for p in (state / "containers").glob("*")]
        return [path.removeprefix(f"/proc/{node.pid}/root") for path in left]

    def close(self) -> list[str]:
        """Stop everything; return what is left of it on this machine."""
        left: list[str] = []

        def close(node: ClusterNode) -> None:
            left.extend(node.close())

        with contextlib.ExitStack() as stack:
            stack.callback(self.control_plane.close)
            for node in reversed(self.nodes):
                stack.callback(close, node)
        return left

    def remove(self) -> None:
        """Remove the files of the cluster."""
        shutil.rmtree(self.base, ignore_errors=True)


def pod(
    name: str,
    *command: str,
    template: str = "",
    labels: dict[str, str] | None = None,
    restart: str = "Always",
    out: bool = False,
    node: str = "",
) -> Document:
    """Return a pod with one container of the workload image, and a claim if `template` is given."""
    mounts: list[dict[str, Any]] = []
    volumes: list[dict[str, Any]] = []
    container: dict[str, Any] = {
        "name": "main",
        "image": WORKLOAD_IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command or ("/usr/bin/sleep", "infinity")),
        "volumeMounts": mounts,
    }
    spec: dict[str, Any] = {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": volumes,
        "automountServiceAccountToken": False,
    }
    if node:
        spec["nodeName"] = node
    if template:
        mounts.append({"name": "simgpu", "mountPath": SIMGPU})
        volumes.append({"name": "simgpu", "hostPath": {"path": SIMGPU, "type": "Directory"}})
        spec["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": template}]
        container["resources"] = {"claims": [{"name": "gpu"}]}
    if out:
        mounts.append({"name": "out", "mountPath": "/out"})
        path = {"path": f"/var/lib/out/{name}", "type": "DirectoryOrCreate"}
        volumes.append({"name": "out", "hostPath": path})
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": spec}
