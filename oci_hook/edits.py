"""Edits config.json for a container that shares a GPU: device nodes, hook and annotations.

The wrapper runtime and Podman's `precreate` edit config.json before the container is created,
because only device nodes that config.json names survive `systemctl daemon-reload`. The hook makes
the mounts later.
"""

from __future__ import annotations

import os
import stat

from oci_hook.errors import BundleError, DeviceError, HookError, show
from oci_hook.light_re import DIGITS, consists_of
from oci_hook.quick import PREFIX

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, NamedTuple
else:
    from oci_hook.light_typing import NamedTuple

RESERVATION = PREFIX + "reservation"
TOKEN_LIMIT = 64
GPU_MAJOR = 195  # Linux's devices.txt: nvidia
GPU_MINORS = 254  # smaller minor numbers are GPUs; the next two are modeset and control
CONTROL = ("nvidiactl", "nvidia-uvm")
GPU_NODE = "/dev/nvidia"  # followed by the minor number
HOOK_ENV = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin",)
HOOK_TIMEOUT = 30
STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
# Programs that put NVIDIA's driver into a container on their own, before or after this hook.
FOREIGN = (
    "nvidia-container-runtime-hook",
    "nvidia-container-toolkit",
    "nvidia-container-cli",
    "nvidia-cdi-hook",
    "nvidia-ctk",
)


def take_reservation(annotations: dict[str, str]) -> str:
    """Remove the reservation from the annotations; return it, or "" if absent or malformed."""
    token = annotations.pop(RESERVATION, "")
    return token if token.isascii() and token.isalnum() and len(token) <= TOKEN_LIMIT else ""


class DeviceNode(NamedTuple):
    """A device node, with its path in the container."""

    path: str
    major: int
    minor: int


class HookEntry(NamedTuple):
    """The hook's path and arguments for its entry in config.json."""

    path: str
    arguments: tuple[str, ...] = ()


def _object(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a member that is an object; it is created if it is absent or null."""
    value = parent.get(name)
    if value is None:
        value = parent[name] = {}
    if type(value) is not dict:
        raise BundleError(
            f"{name} in config.json is {type(value).__name__}, not an object",
            hint="the program that wrote config.json has to follow the OCI specification",
        )
    return value


def _list(parent: dict[str, Any], name: str) -> list[Any]:
    """Return a member that is a list; it is created if it is absent or null."""
    value = parent.get(name)
    if value is None:
        value = parent[name] = []
    if type(value) is not list:
        raise BundleError(
            f"{name} in config.json is {type(value).__name__}, not a list",
            hint="the program that wrote config.json has to follow the OCI specification",
        )
    return value


def members(document: dict[str, Any], outer: str, name: str) -> list[dict[str, Any]]:
    """Return the objects in a list of config.json, for reading; malformed parts are skipped.

    The runtime itself checks config.json.
    """
    section = document.get(outer) if outer else document
    value = section.get(name) if type(section) is dict else None
    return [item for item in value if type(item) is dict] if type(value) is list else []


def gpu_nodes(document: dict[str, Any]) -> tuple[int, ...]:
    """Return the minor numbers of the GPUs for which config.json creates device nodes."""
    return tuple(
        sorted(
            {
                device["minor"]
                for device in members(document, "linux", "devices")
                if device.get("major") == GPU_MAJOR
                and type(device.get("minor")) is int
                and 0 <= device["minor"] < GPU_MINORS
            }
        )
    )


def gives_gpu(document: dict[str, Any]) -> bool:
    """Return whether config.json gives the container access to a GPU, with or without the hook."""
    linux = document.get("linux")
    resources = linux.get("resources") if type(linux) is dict else None
    rules = members({"resources": resources}, "resources", "devices")
    return (
        bool(gpu_nodes(document))
        or any(
            rule.get("allow") is True
            and (_is_gpu(rule.get("major"), rule.get("minor")) or _permits_all(rule))
            for rule in rules
        )
        # Where nodes cannot be created, as in a user namespace, those of the host are mounted.
        or any(is_gpu_node(str(m.get("source"))) for m in members(document, "", "mounts"))
    )


def is_gpu_node(path: str) -> bool:
    """Return whether a path on the host is a GPU's device node."""
    return path.startswith(GPU_NODE) and consists_of(path[len(GPU_NODE) :], DIGITS)


def require_no_gpu(document: dict[str, Any], why: HookError) -> None:
    """Refuse a container that would start without the driver but could use a GPU without a quota.

    `why` says why the driver cannot serve the container.
    """
    if gives_gpu(document):
        raise type(why)(
            f"{why.message}, and config.json gives the container a GPU, which would be ungoverned",
            hint="leave out --device and tidegate.gpu/shared to start it without a GPU",
        ) from why


def foreign_driver(document: dict[str, Any]) -> str:
    """Return the hook or mount that puts another driver into the container; "" if there is none."""
    for stage in STAGES:
        for hook in members(document, "hooks", stage):
            name = os.path.basename(str(hook.get("path")))
            if name in FOREIGN:
                return f"hook {name}"
    for mount in members(document, "", "mounts"):
        where = str(mount.get("destination"))
        if os.path.basename(where).startswith("libcuda.so."):
            return f"mount on {show(where)}"
    return ""


def refuse_foreign(document: dict[str, Any], name: str = "config.json") -> None:
    """Refuse a container that gets another driver as well; `name` is for the message."""
    foreign = foreign_driver(document)
    if foreign:
        raise BundleError(
            f"{name} has the {foreign}, which brings its own driver",
            hint="start the container without --gpus or nvidia.com devices, and not with NVIDIA's"
            " runtime",
        )


def governed_by(document: dict[str, Any], path: str) -> bool:
    """Return whether a device of Tidegate was requested by name: CDI then adds --governed."""
    return any(
        hook.get("path") == path and type(hook.get("args")) is list and "--governed" in hook["args"]
        for hook in members(document, "hooks", "createRuntime")
    )


def host_nodes(directory: str, minors: tuple[int, ...]) -> tuple[DeviceNode, ...]:
    """Return the device nodes that a container with these GPUs needs, with the host's numbers.

    The result is empty without minor numbers: simulated GPUs have no device nodes.
    """
    if not minors:
        return ()
    nodes = []
    for name in (*CONTROL, *(f"nvidia{minor}" for minor in minors)):
        path = f"{directory}/{name}"
        try:
            status = os.stat(path)
        except OSError as e:
            raise DeviceError(
                f"device node {path}: {e.strerror}",
                hint="create it with `nvidia-modprobe -u -c 0`, or check that the driver is loaded",
            ) from e
        if not stat.S_ISCHR(status.st_mode):
            raise DeviceError(
                f"device node {path} is not a character device",
                hint="remove it, then create it with `nvidia-modprobe -u -c 0`",
            )
        nodes.append(DeviceNode(f"/dev/{name}", os.major(status.st_rdev), os.minor(status.st_rdev)))
    return tuple(nodes)


def check_devices(minors: tuple[int, ...], nodes: tuple[int, ...]) -> None:
    """Refuse a container that lacks the node of a granted GPU: programs would not find the GPU."""
    missing = [f"/dev/nvidia{minor}" for minor in minors if minor not in nodes]
    if missing:
        raise DeviceError(
            f"the container lacks the device node of a GPU that it was granted:"
            f" {', '.join(missing)}",
            hint="start it with tidegate-runtime, with a device of tidegate.gpu/shared, or with"
            f" --device {missing[0]}",
        )


def _edit_devices(document: dict[str, Any], nodes: tuple[DeviceNode, ...]) -> None:
    """Give a container these device nodes, and remove those of all other GPUs."""
    linux = _object(document, "linux")
    devices = _list(linux, "devices")
    paths = {node.path for node in nodes}
    numbers = {(node.major, node.minor) for node in nodes}
    devices[:] = [
        device
        for device in devices
        if type(device) is not dict
        or not (device.get("path") in paths or _is_gpu(device.get("major"), device.get("minor")))
    ]
    rules = _list(_object(linux, "resources"), "devices")
    rules[:] = [
        rule
        for rule in rules
        if type(rule) is not dict
        or rule.get("allow") is not True
        or not (
            (rule.get("major"), rule.get("minor")) in numbers
            or _is_gpu(rule.get("major"), rule.get("minor"))
        )
    ]
    for node in nodes:
        devices.append(
            {
                "path": node.path,
                "type": "c",
                "major": node.major,
                "minor": node.minor,
                "fileMode": 0o666,
                "uid": 0,
                "gid": 0,
            }
        )
        rules.append(
            {
                "allow": True,
                "type": "c",
                "major": node.major,
                "minor": node.minor,
                "access": "rw",
            }
        )


def _is_gpu(major: object, minor: object) -> bool:
    """Return whether a rule is about GPUs; a missing or negative minor number means all."""
    return major == GPU_MAJOR and (type(minor) is not int or minor < GPU_MINORS)


def _permits_all(rule: dict[str, Any]) -> bool:
    """Return whether a rule permits all devices, so that a process can create a GPU's node itself.

    All containers may create nodes (`m`); that alone does not give access.
    """
    major, minor = rule.get("major"), rule.get("minor")
    return (
        rule.get("type") != "b"
        and (type(major) is not int or major < 0)
        and (type(minor) is not int or minor < GPU_MINORS)
        and rule.get("access") != "m"
    )


def hook_entry(path: str, arguments: Iterable[str], stage: str = "createRuntime") -> dict[str, Any]:
    """Return the hook's entry in the format of config.json, which CDI shares."""
    return {
        "path": path,
        "args": [os.path.basename(path), *arguments, stage],
        "env": list(HOOK_ENV),
        "timeout": HOOK_TIMEOUT,
    }


def add_hook_entry(document: dict[str, Any], entry: HookEntry) -> None:
    """Add the hook's entry exactly once; earlier entries are replaced.

    There is no `poststop` entry: the programs that edit config.json are called when the container
    is deleted, so no process has to be started for it.
    """
    # --governed from an entry that CDI added is kept: a GPU was requested by name.
    more = ("--governed",) if governed_by(document, entry.path) else ()
    hooks = _object(document, "hooks")
    for stage in list(hooks):
        if type(hooks[stage]) is list:
            kept = [h for h in hooks[stage] if type(h) is not dict or h.get("path") != entry.path]
            if kept:
                hooks[stage] = kept
            else:
                del hooks[stage]
    if hooks.get("createRuntime") is None:
        hooks.pop("createRuntime", None)  # so that a second edit finds it at the same position
    _list(hooks, "createRuntime").append(hook_entry(entry.path, (*entry.arguments, *more)))


def _edit_environment(document: dict[str, Any]) -> None:
    """Disable NVIDIA's own runtime and hook, which images request through their environment."""
    process = document.get("process")
    environment = process.get("env") if type(process) is dict else None
    if type(environment) is list:
        environment[:] = [
            "NVIDIA_VISIBLE_DEVICES=void"
            if type(variable) is str and variable.startswith("NVIDIA_VISIBLE_DEVICES=")
            else variable
            for variable in environment
        ]


def edit(
    document: dict[str, Any],
    *,
    annotations: dict[str, str],
    reservation: str,
    nodes: tuple[DeviceNode, ...],
    entry: HookEntry,
) -> None:
    """Edit config.json, and keep the rest of it; repeating the same edit changes nothing."""
    own = _object(document, "annotations")
    own |= annotations
    own[RESERVATION] = reservation
    if nodes:
        _edit_devices(document, nodes)
    add_hook_entry(document, entry)
    _edit_environment(document)
