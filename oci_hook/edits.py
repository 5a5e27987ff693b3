"""What config.json needs for a container that shares a GPU: one model for every way in.

The wrapper runtime and Podman's `precreate` edit with it before the container is made, because only
device nodes that config.json names outlast a reload of systemd. The mounts are the hook's, later.
"""

from __future__ import annotations

import os
import stat

from oci_hook.entry import PREFIX
from oci_hook.errors import BundleError, DeviceError, HookError, show
from oci_hook.letters import DIGITS, consists_of

TYPE_CHECKING = False  # typing itself takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, NamedTuple
else:
    from oci_hook.record import NamedTuple

RESERVATION = PREFIX + "reservation"
TOKEN_LIMIT = 64
GPU_MAJOR = 195  # Linux's devices.txt: nvidia
GPU_MINORS = 254  # modeset and control are behind
CONTROL = ("nvidiactl", "nvidia-uvm")
GPU_NODE = "/dev/nvidia"  # and a number
HOOK_ENV = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin",)
HOOK_TIMEOUT = 30
STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
# What puts NVIDIA's driver into a container by itself, after our hook or before.
FOREIGN = (
    "nvidia-container-runtime-hook",
    "nvidia-container-toolkit",
    "nvidia-container-cli",
    "nvidia-cdi-hook",
    "nvidia-ctk",
)


def take_reservation(annotations: dict[str, str]) -> str:
    """Take the reservation out of the annotations; nothing where it is none of the governor's."""
    token = annotations.pop(RESERVATION, "")
    return token if token.isascii() and token.isalnum() and len(token) <= TOKEN_LIMIT else ""


class Node(NamedTuple):
    """A device node: the path that it has in the container."""

    path: str
    major: int
    minor: int


class Entry(NamedTuple):
    """How the hook is entered into config.json."""

    path: str
    arguments: tuple[str, ...] = ()


def _object(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """Give a member that is an object; one that is absent or null is made."""
    value = parent.get(name)
    if value is None:
        value = parent[name] = {}
    if type(value) is not dict:
        raise BundleError(
            f"{name} in config.json is {type(value).__name__}, not an object",
            hint="whatever wrote config.json has to write it as the OCI specification says",
        )
    return value


def _list(parent: dict[str, Any], name: str) -> list[Any]:
    """Give a member that is a list; one that is absent or null is made."""
    value = parent.get(name)
    if value is None:
        value = parent[name] = []
    if type(value) is not list:
        raise BundleError(
            f"{name} in config.json is {type(value).__name__}, not a list",
            hint="whatever wrote config.json has to write it as the OCI specification says",
        )
    return value


def members(document: dict[str, Any], outer: str, name: str) -> list[dict[str, Any]]:
    """Give the objects in a list of config.json, for reading: what is not as it should be is left.

    The runtime has checked it, or will.
    """
    section = document.get(outer) if outer else document
    value = section.get(name) if type(section) is dict else None
    return [item for item in value if type(item) is dict] if type(value) is list else []


def gpu_nodes(document: dict[str, Any]) -> tuple[int, ...]:
    """Give the minor numbers of the GPUs whose nodes config.json makes."""
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
    """Tell whether config.json lets the container reach a GPU, whether we prepare it or not."""
    linux = document.get("linux")
    resources = linux.get("resources") if type(linux) is dict else None
    rules = members({"resources": resources}, "resources", "devices")
    return (
        bool(gpu_nodes(document))
        or any(
            rule.get("allow") is True
            and (_is_gpu(rule.get("major"), rule.get("minor")) or _is_of_all(rule))
            for rule in rules
        )
        # Without a right to make nodes, as in a user namespace, the host's are mounted.
        or any(is_gpu_node(str(m.get("source"))) for m in members(document, "", "mounts"))
    )


def is_gpu_node(path: str) -> bool:
    """Tell whether a path of the host is a GPU's."""
    return path.startswith(GPU_NODE) and consists_of(path[len(GPU_NODE) :], DIGITS)


def require_no_gpu(document: dict[str, Any], why: HookError) -> None:
    """Refuse to start without our driver what reaches a GPU all the same: nobody would govern it.

    `why` the driver cannot serve the container.
    """
    if gives_gpu(document):
        raise type(why)(
            f"{why.message}, and config.json gives the container a GPU, which nobody would govern",
            hint="start it without --device and tidegate.gpu/shared to start without a GPU",
        ) from why


def foreign_driver(document: dict[str, Any]) -> str:
    """Give what else puts a driver into the container, or nothing."""
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
    """Refuse a container that gets a driver by somebody else, too; `name` is for the reader."""
    foreign = foreign_driver(document)
    if foreign:
        raise BundleError(
            f"{name} has a {foreign}, which brings a driver of its own",
            hint="start the container without --gpus and nvidia.com devices, by a runtime that"
            " is not NVIDIA's",
        )


def governed_by(document: dict[str, Any], path: str) -> bool:
    """Tell whether a device of ours was asked for by name: CDI enters the hook so."""
    return any(
        hook.get("path") == path and type(hook.get("args")) is list and "--governed" in hook["args"]
        for hook in members(document, "hooks", "createRuntime")
    )


def host_nodes(directory: str, minors: tuple[int, ...]) -> tuple[Node, ...]:
    """Give the nodes that a container with these GPUs needs, as the host has them.

    Without GPUs that have one there are none: simulated GPUs are no devices.
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
                hint="make it with `nvidia-modprobe -u -c 0`, or see whether the driver runs",
            ) from e
        if not stat.S_ISCHR(status.st_mode):
            raise DeviceError(
                f"device node {path} is no character device",
                hint="remove it, and make it with `nvidia-modprobe -u -c 0`",
            )
        nodes.append(Node(f"/dev/{name}", os.major(status.st_rdev), os.minor(status.st_rdev)))
    return tuple(nodes)


def check_devices(minors: tuple[int, ...], nodes: tuple[int, ...]) -> None:
    """Refuse a container without the nodes of GPUs that it was granted: programs find none."""
    missing = [f"/dev/nvidia{minor}" for minor in minors if minor not in nodes]
    if missing:
        raise DeviceError(
            f"the container has no {', '.join(missing)}, the node of a GPU that it was granted",
            hint="start it by tidegate-runtime, with a device of tidegate.gpu/shared, or with"
            f" --device {missing[0]}",
        )


def _edit_devices(document: dict[str, Any], nodes: tuple[Node, ...]) -> None:
    """Let a container have these nodes, and no other GPU's."""
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
    """Tell whether a rule is of GPUs: runtimes take no minor number, and one below 0, for all."""
    return major == GPU_MAJOR and (type(minor) is not int or minor < GPU_MINORS)


def _is_of_all(rule: dict[str, Any]) -> bool:
    """Tell whether a rule lets whoever makes a node use it, of a GPU as of all else.

    Everybody may make nodes (`m`), that alone reaches nothing.
    """
    major, minor = rule.get("major"), rule.get("minor")
    return (
        rule.get("type") != "b"
        and (type(major) is not int or major < 0)
        and (type(minor) is not int or minor < GPU_MINORS)
        and rule.get("access") != "m"
    )


def hook_entry(path: str, arguments: Iterable[str], stage: str = "createRuntime") -> dict[str, Any]:
    """Give the hook's entry, in the words of config.json; CDI has the same."""
    return {
        "path": path,
        "args": [os.path.basename(path), *arguments, stage],
        "env": list(HOOK_ENV),
        "timeout": HOOK_TIMEOUT,
    }


def enter_hook(document: dict[str, Any], entry: Entry) -> None:
    """Enter the hook once, whoever entered it before.

    No `poststop`: whoever edits sees the end by itself, and an end is a process less.
    """
    # Behind a front of ours CDI's word stays: a GPU was asked for by name.
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
        hooks.pop("createRuntime", None)  # so that ours stands where it will the next time
    _list(hooks, "createRuntime").append(hook_entry(entry.path, (*entry.arguments, *more)))


def _edit_environment(document: dict[str, Any]) -> None:
    """Tell NVIDIA's own runtime and hook, which images ask by their environment, to stay away."""
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
    nodes: tuple[Node, ...],
    entry: Entry,
) -> None:
    """Edit config.json, which stays as it is besides; to do it twice changes nothing more."""
    own = _object(document, "annotations")
    own |= annotations
    own[RESERVATION] = reservation
    if nodes:
        _edit_devices(document, nodes)
    enter_hook(document, entry)
    _edit_environment(document)
