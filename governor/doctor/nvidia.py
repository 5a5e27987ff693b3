"""Check for NVIDIA's toolkit, operator and device plugin: GPUs that they assign are ungoverned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from governor.doctor.cdi import files as cdi_files
from governor.doctor.crio import configuration as crio_configuration
from governor.doctor.engines import (
    CONTAINERD,
    DAEMON_JSON,
    containerd_config,
    cri_runtimes,
    docker_info,
    names_default,
)
from governor.doctor.finding import Finding, note, ok, warning
from governor.doctor.hooks import files as hook_files
from governor.doctor.node import ExaminedNode, read_json
from oci_hook.edits import FOREIGN

PLUGIN = "/var/lib/kubelet/device-plugins/nvidia-gpu.sock"
OPERATOR = "/run/nvidia"
UNGOVERNED = "an image that sets NVIDIA_VISIBLE_DEVICES gets GPUs outside of all quotas"


def _docker(node: ExaminedNode) -> tuple[str, str, str]:
    """Return the engine, its default runtime, and the step that changes it."""
    key = "default-runtime"
    running = (docker_info(node) or {}).get("DefaultRuntime")
    written = (read_json(node, DAEMON_JSON) or {}).get(key)
    if running and running != written:
        remedy = (
            f"{DAEMON_JSON} does not set it: remove --{key} from dockerd's command line"
            " (systemctl cat docker), systemctl restart docker"
        )
    else:
        remedy = f"remove {key} from {DAEMON_JSON}, systemctl reload docker"
    return "Docker", str(running or written or ""), remedy


def _defaults(node: ExaminedNode) -> Iterator[tuple[str, str, str]]:
    """Yield each engine, its default runtime, and the step that changes it.

    The step names the file that takes precedence, which may be a drop-in.
    """
    yield _docker(node)
    for path in CONTAINERD:
        config = containerd_config(node, path)
        if config is not None:
            name = cri_runtimes(config.document)[1]
            setting = [file for file, document in config.files if names_default(document)]
            file = setting[-1] if setting else path
            yield path, name, f'set default_runtime_name = "runc" in {file}, restart containerd'
    crio = crio_configuration(node)
    default = "" if crio is None else crio.text("default_runtime")
    file = "/etc/crio" if crio is None else crio.named_by.get("default_runtime", "/etc/crio")
    yield "CRI-O", default, f"set default_runtime in {file}, systemctl restart crio"


def default_runtime(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether an engine starts every container with NVIDIA's runtime."""
    found = [d for d in _defaults(node) if d[1].startswith("nvidia")]
    for engine, name, remedy in found:
        yield warning(f"{engine} has the default runtime {name}: {UNGOVERNED}", remedy)
    if not found:
        yield ok("no engine has NVIDIA's runtime as its default")


def hook(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether NVIDIA's hook is in force for engines that read oci-hooks(5)."""
    found = [h.path for h in hook_files(node) if PurePosixPath(h.program).name in FOREIGN]
    for path in found:
        yield warning(f"{path} is NVIDIA's hook: {UNGOVERNED}", f"rm {path}")
    if not found:
        yield ok("no hook directory contains NVIDIA's hook")


def cdi(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether NVIDIA's devices can be requested through CDI."""
    found = [file for file in cdi_files(node) if file.kind.partition("/")[0].endswith("nvidia.com")]
    for file in found:
        yield note(
            f"{file.path}: a container that requests {file.kind} gets a GPU outside of all quotas",
            f"systemctl disable --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service, "
            f"rm {file.path}",
        )
    if not found:
        yield ok("NVIDIA has no CDI file")


def operator(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether NVIDIA's device plugin or operator hands out this node's GPUs."""
    quiet = True
    if node.stat(PLUGIN) is not None:
        quiet = False
        yield warning(
            f"{PLUGIN} exists: the kubelet gives out whole GPUs that the governor also shares",
            "label the node nvidia.com/gpu.deploy.device-plugin=false, or separate the GPUs",
        )
    inside = node.names(OPERATOR)
    if "driver" in inside and node.names(f"{OPERATOR}/driver"):
        quiet = False
        yield note(
            f"{OPERATOR}/driver: the driver comes from a container, and is mirrored from there"
        )
    if "toolkit" in inside or node.names("/usr/local/nvidia/toolkit"):
        quiet = False
        yield note(
            "NVIDIA's operator installed a toolkit on this node; nvidia.default-runtime says "
            "whether it is in force"
        )
    if quiet:
        yield ok("this node has neither NVIDIA's device plugin nor its operator")
