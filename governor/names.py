"""What engines call their containers, for people: Docker and Podman do not tell a hook.

Kubernetes and nerdctl do, by annotations. For the others the engine's own files are read, as root,
and only when a name is asked for. Their content is foreign text; it may be wrong, gone or anything.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 16 << 20
"""Largest size of a file, in bytes: Podman has all its containers in one."""
MOST = 128
"""Longest name, in characters."""
OWN_FILES = ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf")
"""Files that Docker mounts from the directory in which it keeps a container's settings."""
PODMAN_FILES = ("containers.json", "volatile-containers.json")


class Name(NamedTuple):
    """A container's engine, name and pod; each may be empty."""

    engine: str = ""
    name: str = ""
    pod: str = ""

    @property
    def whole(self) -> str:
        """One text, like namespace/pod/container; empty if there is neither."""
        return "/".join(part for part in (self.pod, self.name) if part)


def find_name(identifier: str, bundle: str, identity: Mapping[str, str]) -> Name:
    """Return what a container's engine calls it."""
    engine = _engine(bundle)
    if pod := identity.get("pod", ""):
        engine = "cri-o" if engine == "podman" else engine  # both have the same storage
        namespace = identity.get("namespace", "")
        whole = f"{namespace}/{pod}" if namespace else pod
        return Name(engine, _shown(identity.get("container", "")), _shown(whole))
    if name := identity.get("name", ""):
        return Name("nerdctl", _shown(name))
    read = {"docker": _read_docker, "podman": _read_podman}.get(engine)
    return Name(engine, "" if read is None else _shown(read(identifier, bundle)))


def _engine(bundle: str) -> str:
    """Return the engine of a bundle by its path: each engine has a place of its own."""
    parts = bundle.strip("/").split("/")
    if len(parts) >= 3 and parts[-1] == "userdata" and parts[-3].endswith("-containers"):
        return "podman"
    if len(parts) >= 3 and parts[-3].startswith("io.containerd.runtime."):
        return "docker" if parts[-2] == "moby" else "containerd"
    return ""


def _shown(name: object) -> str:
    return name[:MOST] if isinstance(name, str) else ""


def _read_docker(identifier: str, bundle: str) -> object:
    """Read it next to the files that the container has mounted: Docker may use any directory."""
    config = _read(Path(bundle) / "config.json")
    mounts = config.get("mounts") if isinstance(config, dict) else None
    for mount in mounts if isinstance(mounts, list) else ():
        if not isinstance(mount, dict) or mount.get("destination") not in OWN_FILES:
            continue
        directory = Path(str(mount.get("source"))).parent
        if directory.name != identifier:  # a file that the user has mounted there
            continue
        settings = _read(directory / "config.v2.json")
        if isinstance(settings, dict) and settings.get("ID") == identifier:
            name = settings.get("Name")
            return name.removeprefix("/") if isinstance(name, str) else ""
    return ""


def _read_podman(identifier: str, bundle: str) -> object:
    directory = Path(bundle).parent.parent
    for file in PODMAN_FILES:
        listed = _read(directory / file)
        for one in listed if isinstance(listed, list) else ():
            if isinstance(one, dict) and one.get("id") == identifier:
                names = one.get("names")
                return names[0] if isinstance(names, list) and names else ""
    return ""


def _read(path: Path) -> Any:
    """Return a file's JSON, None if it cannot be had: a name is not worth failing or waiting."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > LIMIT:
                return None
            with os.fdopen(fd, "rb", closefd=False) as stream:
                return json.loads(stream.read(LIMIT))
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError):
        return None
