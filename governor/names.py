"""Look up the names of containers in their engines, for display.

Kubernetes and nerdctl pass names to hooks as annotations. Docker and Podman do not, so their own
files are read, as root, and only when a name is needed. The content of these files is not trusted.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

MAX_FILE = 16 << 20
"""Maximum size of a file, in bytes; Podman lists all of its containers in one file."""
MAX_NAME = 128
"""Maximum length of a name, in characters."""
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
        """Pod and name as one string, such as namespace/pod/container."""
        return "/".join(part for part in (self.pod, self.name) if part)


def find_name(identifier: str, bundle: str, identity: Mapping[str, str]) -> Name:
    """Return a container's name in its engine."""
    engine = _engine(bundle)
    if pod := identity.get("pod", ""):
        engine = "cri-o" if engine == "podman" else engine  # both use the same storage layout
        namespace = identity.get("namespace", "")
        whole = f"{namespace}/{pod}" if namespace else pod
        return Name(engine, _truncated(identity.get("container", "")), _truncated(whole))
    if name := identity.get("name", ""):
        return Name("nerdctl", _truncated(name))
    read = {"docker": _read_docker, "podman": _read_podman}.get(engine)
    return Name(engine, "" if read is None else _truncated(read(identifier, bundle)))


def _engine(bundle: str) -> str:
    """Infer the engine of a bundle from its path: each engine has its own directories."""
    parts = bundle.strip("/").split("/")
    if len(parts) >= 3 and parts[-1] == "userdata" and parts[-3].endswith("-containers"):
        return "podman"
    if len(parts) >= 3 and parts[-3].startswith("io.containerd.runtime."):
        return "docker" if parts[-2] == "moby" else "containerd"
    return ""


def _truncated(name: object) -> str:
    return name[:MAX_NAME] if isinstance(name, str) else ""


def _read_docker(identifier: str, bundle: str) -> object:
    """Read the name from Docker's settings for the container.

    They are in the directory from which the container mounts OWN_FILES, wherever that directory is.
    """
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
    """Return a file's JSON, or None if it cannot be read: a missing name is not an error."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE:
                return None
            with os.fdopen(fd, "rb", closefd=False) as stream:
                return json.loads(stream.read(MAX_FILE))
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError):
        return None
